"""Every read step of the registry: alone against its formula, and inside the backbones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close, relative_error
from tests.nn.token_loop import covariance, gate_of, mixer_loop, unit
from torch import Tensor, nn

from ccq.nn import CurvatureConditionedQuery, GatedDeltaNet, GatedLinearAttention, Mamba2, MixerState, ReadObservation
from ccq.nn.mixers import map_state, state_from_tensors, state_tensors
from ccq.nn.read import GatedReadStep, QueryInParts, ReadResult, ReadStep
from ccq.nn.reads import READS
from ccq.nn.reads.random_covariance import random_rotations
from ccq.ops.reads import (
    decay_query,
    exact_query,
    exponential_query,
    mean_query,
    mesa_query,
    query_weighted_query,
    raw_query,
    richardson_query,
    trace_query,
)

HIDDEN, HEADS, SIZE, VALUE, TOKENS = 12, 2, 4, 6, 9
NAMES = [name for name, kind in READS.items() if kind.make is not None]
GATED = [name for name in NAMES if "gate" in READS[name].takes and name != "ccq-fixed"]
STATELESS = ["normalize", "comba"]
OPERATORS: dict[str, Any] = {
    "ccq-mean": mean_query,
    "ccq-raw": raw_query,
    "ccq-trace": trace_query,
    "richardson": richardson_query,
    "exact": exact_query,
    "exponential": exponential_query,
    "ccq-decay": decay_query,
    "query-weighted": query_weighted_query,
}
TOLERANCE = {"mesa": 1e-9, "exact": 1e-11}
BACKBONES = ["gla", "gated-deltanet", "mamba2"]


def tolerance(name: str) -> float:
    return TOLERANCE.get(name, 1e-12)


def make_read(name: str, heads: int = HEADS, **options: Any) -> ReadStep:
    """With parameters away from their start."""
    make = READS[name].make
    assert make is not None
    read = make(heads, SIZE, **options)
    with torch.no_grad():
        for parameter in read.parameters():
            parameter.normal_()
    read = read.double()
    if name == "random":
        # Orthogonal in float64, too.
        read.rotation = random_rotations(heads, SIZE)
    return read


def make_layer(backbone: str, name: str, groups: int = 2) -> GatedLinearAttention | GatedDeltaNet | Mamba2:
    read = make_read(name, groups if backbone == "mamba2" else HEADS)
    layer: GatedLinearAttention | GatedDeltaNet | Mamba2
    if backbone == "gla":
        layer = GatedLinearAttention(HIDDEN, HEADS, SIZE, VALUE, read=read)
    elif backbone == "gated-deltanet":
        layer = GatedDeltaNet(HIDDEN, HEADS, SIZE, VALUE, read=read, max_a=2.0)
    else:
        layer = Mamba2(HIDDEN, 4, SIZE, VALUE, read=read, num_groups=groups, max_a=2.0)
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
    return layer.double()


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, the query before the split, and log decays of three parts a head."""
    presplit = 2 * torch.randn(2, TOKENS, HEADS * SIZE, dtype=torch.float64)
    k = torch.randn(2, TOKENS, HEADS, SIZE, dtype=torch.float64) + 0.7
    log_decay = -torch.rand(2, TOKENS, HEADS, 3, dtype=torch.float64)
    return presplit.unflatten(-1, (HEADS, SIZE)), k, presplit, log_decay


def expected_query(name: str, read: ReadStep, q: Tensor, k: Tensor, presplit: Tensor, log_decay: Tensor) -> Tensor:
    """By the operator's loop, with the gate of the token loop; by the formula where there is no such operator."""
    keep = read.keep_length
    start = q if keep else unit(q)
    gate = None
    if isinstance(read, GatedReadStep):
        gate = torch.zeros(q.shape[:3], dtype=q.dtype)
        for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
            gate[b, t, h] = gate_of(read, presplit[b, t], unit(q[b, t, h]), h)  # type: ignore[arg-type]
    options: dict[str, Any] = {"normalize": "keys" if keep else True, "backend": "reference"}
    if name == "mesa":
        ridge = 0.25 + torch.log1p(read.ridge.exp())
        return mesa_query(q, k, ridge, log_decay=log_decay, **options).query
    if name in OPERATORS:
        if name == "ccq-decay":
            options["log_decay"] = log_decay
        if name == "query-weighted":
            options["landmarks"] = read.landmarks
        return OPERATORS[name](q, k, gate, **options).query
    if name == "normalize":
        return unit(q)
    if name == "comba":
        length = (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() if keep else 1.0
        return start - read.strength[:, None] * unit(k) * length
    factor = SIZE if name == "ccq-strength" else 1
    result = torch.zeros_like(q)
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        sigma = covariance(unit(k[b, : t + 1, h]), name != "ccq-uncentred")
        if name == "random":
            sigma = read.rotation[h] @ sigma @ read.rotation[h].T
        result[b, t, h] = start[b, t, h] - factor * gate[b, t, h] * (sigma @ start[b, t, h])
    return result


def whole(query: Tensor | QueryInParts) -> Tensor:
    return query.kept - query.removed if isinstance(query, QueryInParts) else query


CASES = [
    *((name, {}) for name in NAMES),
    *((name, {"gate": "head", "keep_length": True}) for name in GATED),
    *((name, {"gate": 0.6}) for name in (*GATED, "ccq-fixed")),
    *((name, {"keep_length": True}) for name in ("mesa", "comba")),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_query_and_gradients_are_those_of_the_formula(name: str, options: dict[str, Any]) -> None:
    read = make_read(name, **options)
    q, k, presplit, log_decay = inputs()
    presplit, k, log_decay = presplit.requires_grad_(), k.requires_grad_(), log_decay.requires_grad_()
    q = presplit.unflatten(-1, (HEADS, SIZE))
    result = read(q, k, presplit_query=presplit, log_decay=log_decay)
    query = whole(result.query)
    expected = expected_query(name, read, q, k, presplit, log_decay)
    start = q if read.keep_length else unit(q)
    assert_close("change", query - start, expected - start, tolerance(name), floor=1e-13)
    assert (result.statistics is None) == (name in STATELESS) == (not read.keeps_statistics)
    upstream = torch.randn_like(query)
    tensors = {"presplit": presplit, "k": k, "log_decay": log_decay, **dict(read.named_parameters())}
    ours, theirs = (
        torch.autograd.grad(y, list(tensors.values()), upstream, allow_unused=True) for y in (query, expected)
    )
    for field, a, b in zip(tensors, ours, theirs, strict=True):
        assert (a is None) == (b is None), field
        if a is not None:
            assert_close(field, a, b, 1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_off_is_the_normalised_query_without_a_state(name: str) -> None:
    read = make_read(name)
    read.enabled = False
    q, k, presplit, _ = inputs()
    result = read(q, k, presplit_query=presplit)
    assert_close("query", result.query, unit(q), 1e-14)
    assert result.statistics is None
    assert read(unit(q), unit(k), presplit_query=presplit, normalized=True).query.equal(unit(q))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_an_observer_sees_query_gate_and_correction(name: str) -> None:
    read = make_read(name)
    seen: list[ReadObservation] = []
    read.observer = seen.append
    q, k, presplit, log_decay = inputs()
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, :3] = False
    result = read(q, k, presplit_query=presplit, log_decay=log_decay, mask=mask)
    (observed,) = seen
    assert observed.mask is mask
    assert observed.gate.shape == q.shape[:3]
    assert_close("query", observed.query, unit(q), 1e-14)
    change = observed.gate.unsqueeze(-1) * observed.correction
    assert_close("relation", whole(result.query)[mask], (observed.query - change)[mask], tolerance(name))


@pytest.mark.parametrize("name", NAMES)
def test_creation_draws_no_random_numbers_and_reset_restores_the_start(name: str) -> None:
    before = torch.get_rng_state()
    make = READS[name].make
    assert make is not None
    read = make(HEADS, SIZE)
    assert torch.equal(torch.get_rng_state(), before)
    start = {key: x.clone() for key, x in read.state_dict().items()}
    for parameter in read.parameters():
        parameter.data.fill_(torch.nan)
    if start:
        read.reset_parameters()  # type: ignore[operator]
    assert all(torch.equal(x, start[key]) for key, x in read.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_takes_and_options_are_what_the_constructor_takes(name: str) -> None:
    kind = READS[name]
    assert kind.make is not None
    values: dict[str, Any] = {"gate": 0.25, "centred": False, "keep_length": True}
    read = kind.make(HEADS, SIZE, **{key: values[key] for key in kind.takes}, **kind.options)
    for key in kind.takes:
        assert getattr(read, key) == values[key]
    for key, default in kind.options.items():
        assert repr(read).count(f"{key}={default}") == 1
        assert repr(kind.make(HEADS, SIZE)) == repr(kind.make(HEADS, SIZE, **kind.options))
    for key in {"gate", "keep_length"} - set(kind.takes):
        with pytest.raises(TypeError, match=key):
            kind.make(HEADS, SIZE, **{key: values[key]})


def test_exact_wants_a_gate_of_at_least_zero() -> None:
    with pytest.raises(ValueError, match=r"gate of read step exact must be at least 0, got -0.1"):
        make_read("exact", gate=-0.1)


@pytest.mark.parametrize("option", ["steps", "landmarks"])
def test_options_are_checked(option: str) -> None:
    for name in NAMES:
        if option in READS[name].options:
            with pytest.raises(ValueError, match=f"{option} must be a whole number of at least 1, got 0"):
                make_read(name, **{option: 0})


def test_random_has_the_spectrum_of_the_covariance_and_other_directions() -> None:
    rotation = random_rotations(3, 6)
    assert_close("orthogonal", rotation @ rotation.mT, torch.eye(6).double().expand(3, 6, 6), 1e-14)
    assert torch.equal(rotation, random_rotations(3, 6))
    assert (rotation[0] - rotation[1]).norm() > 1
    read = make_read("random", gate=1.0)
    q, k, presplit, _ = inputs()
    # The operator of the last token, column by column.
    columns = []
    for d in range(SIZE):
        one = torch.zeros_like(q)
        one[..., d] = 1
        columns.append((one - read(one, k, presplit_query=presplit, normalized=False).query)[:, -1])
    operator = torch.stack(columns, -1)
    for b, h in ((0, 0), (1, 1)):
        sigma = covariance(unit(k[b, :, h]))
        ours, theirs = torch.linalg.eigvalsh(operator[b, h]), torch.linalg.eigvalsh(sigma)
        assert_close("spectrum", ours, theirs, 1e-5)  # of the 1e-6 in the length of a unit vector
        assert relative_error(operator[b, h], sigma) > 0.3


def test_two_reads_keep_the_digits_of_a_small_correction() -> None:
    """In bfloat16, a correction of a hundredth of the query: apart it has an error of one rounding, in the difference
    it is mostly lost.
    """
    q, k, presplit, _ = (x.bfloat16() for x in inputs())
    exact = CurvatureConditionedQuery(HEADS, SIZE, gate=0.01)(q.double(), k.double(), presplit_query=presplit.double())
    change = unit(q.double()) - exact.query
    apart = make_read("ccq-two-reads", gate=0.01)(q, k, presplit_query=presplit).query
    together = CurvatureConditionedQuery(HEADS, SIZE, gate=0.01)(q, k, presplit_query=presplit).query
    assert apart.kept.dtype == apart.removed.dtype == torch.bfloat16
    assert relative_error(apart.removed, change) < 2**-8
    assert relative_error(unit(q.double()) - together.double(), change) > 0.3


@pytest.mark.parametrize("backbone", BACKBONES)
def test_two_reads_equal_one(backbone: str) -> None:
    layer = make_layer(backbone, "ccq-two-reads")
    x = torch.randn(2, 11, HIDDEN, dtype=torch.float64, requires_grad=True)
    ours, state = layer(x)
    one = CurvatureConditionedQuery(layer.read.num_heads, SIZE).double()
    one.load_state_dict(layer.read.state_dict())
    layer.read = one
    expected, expected_state = layer(x)
    assert_close("loop", expected[0], mixer_loop(layer, x[0]), 1e-12)
    assert_close("output", ours, expected, 1e-12)
    assert_close("memory", state.memory, expected_state.memory, 1e-14)
    upstream = torch.randn_like(ours)
    assert_close("x", *(torch.autograd.grad(y, x, upstream)[0] for y in (ours, expected)), 1e-11)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_backbones_hand_over_their_decay(backbone: str) -> None:
    """log_decay is the logarithm of what a token leaves of the memory before it, for each head or its parts."""
    layer = make_layer(backbone, "normalize", groups=2)
    handed: list[Tensor] = []

    class Probe(ReadStep):
        keeps_statistics = False

        def forward(self, q: Tensor, k: Tensor, *, log_decay: Tensor, **_: Any) -> ReadResult:
            handed.append(log_decay)
            return ReadResult(q, None)

    layer.read = Probe(2, SIZE)
    x = torch.randn(1, 5, HIDDEN, dtype=torch.float64)
    layer(x)
    if backbone == "gla":
        inner, outer = layer.gk_proj
        expected = torch.log(torch.sigmoid(x @ inner.weight.T @ outer.weight.T + outer.bias)) / 16
        expected = expected.view(1, 5, HEADS, SIZE)
    elif backbone == "gated-deltanet":
        expected = -layer.A_log.exp() * F.softplus(x @ layer.a_proj.weight.T + layer.dt_bias)
    else:
        step = F.softplus((x @ layer.in_proj.weight.T)[..., -4:] + layer.dt_bias)
        # Two heads share the keys of a group.
        expected = (-layer.A_log.exp() * step).view(1, 5, 2, 2)
    assert_close("log decay", handed[0], expected, 1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_cuts_padding_and_packing_inside_a_backbone(backbone: str, name: str) -> None:
    layer = make_layer(backbone, name)
    documents = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in (5, 1, 7)]
    alone = [layer(d.unsqueeze(0)) for d in documents]
    padded, mask = torch.randn(3, 9, HIDDEN, dtype=torch.float64), torch.zeros(3, 9)
    for row, (d, start) in enumerate(zip(documents, (4, 8, 1), strict=True)):
        padded[row, start : start + len(d)], mask[row, start : start + len(d)] = d, 1
    rows = layer(padded, mask=mask)
    packed = layer(torch.cat(documents).unsqueeze(0), cu_seqlens=torch.tensor([0, 5, 6, 13]))
    for n, (begin, end) in enumerate(pairwise((0, 5, 6, 13))):
        assert_close("padded", rows.output[n][mask[n].bool()], alone[n].output[0], tolerance(name))
        assert_close("packed", packed.output[0, begin:end], alone[n].output[0], tolerance(name))
        for state in (rows.state, packed.state):
            ours, theirs = (state_tensors(x) for x in (map_state(state, lambda x, n=n: x[n : n + 1]), alone[n].state))
            assert ours.keys() == theirs.keys()
            for field, x in ours.items():
                assert_close(field, x, theirs[field], 1e-11)
    # Token by token, with gradients through the states.
    x = documents[2].unsqueeze(0).requires_grad_()
    outputs, state = [], None
    for token in x.split(1, 1):
        output, state = layer(token, state=state)
        outputs.append(output)
    whole = layer(x).output
    assert_close("decode", torch.cat(outputs, 1), whole, tolerance(name))
    upstream = torch.randn_like(whole)
    ours, theirs = (torch.autograd.grad(y, x, upstream)[0] for y in (torch.cat(outputs, 1), whole))
    assert_close("gradient", ours, theirs, 1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_states_are_taken_apart_and_put_together(name: str) -> None:
    layer = make_layer("gla", name)
    _, state = layer(torch.randn(3, 6, HIDDEN, dtype=torch.float64))
    tensors = state_tensors(state)
    again = state_from_tensors(tensors)
    assert isinstance(again, MixerState)
    # Whether they may be packed is not in the tensors.
    assert isinstance(state.statistics, type(again.statistics))
    assert all(torch.equal(x, tensors[field]) for field, x in state_tensors(again).items())
    for field in tensors:
        if field.startswith("statistics.") and len(state.statistics) > 1:
            left = {key: x for key, x in tensors.items() if key != field}
            # A second moment alone is the state of mesa.
            if [key for key in left if key.startswith("statistics.")] != ["statistics.second_moment"]:
                with pytest.raises(KeyError, match=r"statistics\."):
                    state_from_tensors(left)
    expected = (
        layer.read.initial_statistics(3, dtype=torch.float64, device="cpu") if layer.read.keeps_statistics else ()
    )
    assert type(state.statistics) is (type(expected) if expected else type(None))
    for ours, start in zip(state.statistics or (), expected, strict=True):
        assert (ours.shape, ours.dtype) == (start.shape, start.dtype)
        assert not start.any()


def test_a_state_of_another_read_step_is_refused() -> None:
    x = torch.randn(1, 4, HIDDEN, dtype=torch.float64)
    _, state = make_layer("gla", "ccq-mean")(x)
    with pytest.raises(TypeError, match="statistics must be a KeyStatistics"):
        make_layer("gla", "ccq")(x, state=state)
    with pytest.raises(ValueError, match="has no key statistics"):
        make_layer("gla", "mesa")(x, state=make_layer("gla", "comba")(x).state)


def test_decay_is_asked_for() -> None:
    q, k, presplit, _ = inputs()
    for name in ("ccq-decay", "mesa"):
        with pytest.raises(ValueError, match="needs log_decay, the backbone's own"):
            make_read(name)(q, k, presplit_query=presplit)
