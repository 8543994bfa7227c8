"""The mixers: against the token loop, and against themselves for padding, packing, and any cut into calls."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.nn.token_loop import mixer_loop
from torch import Tensor, nn

import ccq.nn.mixers.gated_deltanet as gated_deltanet_module
import ccq.nn.mixers.gated_linear_attention as gated_linear_attention_module
import ccq.nn.mixers.mamba2 as mamba2_module
import ccq.nn.read as read_module
from ccq.nn import (
    AttentionState,
    CurvatureConditionedQuery,
    GatedDeltaNet,
    GatedLinearAttention,
    LayerState,
    Mamba2,
    MixerState,
    SoftmaxAttention,
)
from ccq.nn import conv as conv_module
from ccq.nn.mixers import map_state, state_from_tensors, state_tensors
from ccq.nn.mixers.common import OverwritableState
from ccq.nn.read import PackableKeyStatistics, StaticKeyStatistics
from ccq.nn.reads import TwoReads
from ccq.ops import thin_linear, write_rule_step
from ccq.ops.query import KeyStatistics, PackedKeyStatistics

HIDDEN, HEADS, SIZE, VALUE = 12, 2, 4, 6
# Mamba2 with heads that share one query and key, and with two groups of such heads.
GROUPS = {"mamba2": 1, "mamba2 in groups": 2}
BACKBONES = ["gla", "gla without convolution", "gla-hedgehog", "gated-deltanet", *GROUPS]
ATTENTION = ["transformer", "transformer with shared keys"]
READS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "presplit": {"gate": "presplit"},
    "head": {"gate": "head"},
    "attached, kept length": {"gate": "attached", "keep_length": True},
    "fixed, uncentred": {"gate": 0.5, "centred": False},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

Mixer = GatedLinearAttention | GatedDeltaNet | Mamba2 | SoftmaxAttention


def read_for(backbone: str, **options: Any) -> CurvatureConditionedQuery:
    return CurvatureConditionedQuery(GROUPS.get(backbone, HEADS), SIZE, **options)


def make(backbone: str, read: dict[str, Any] | None = None, dtype: torch.dtype = torch.float64) -> Mixer:
    """A mixer with weights of size one and a gate away from its start, so that no part of it is negligible."""
    step = None if read is None else read_for(backbone, **read)
    layer: Mixer
    if backbone == "gated-deltanet":
        layer = GatedDeltaNet(HIDDEN, HEADS, SIZE, VALUE, read=step, max_a=2.0)
    elif backbone in GROUPS:
        layer = Mamba2(HIDDEN, 4, SIZE, VALUE, read=step, num_groups=GROUPS[backbone], max_a=2.0)
    elif backbone in ATTENTION:
        layer = SoftmaxAttention(HIDDEN, HEADS, SIZE, VALUE, num_kv_heads=HEADS if backbone == "transformer" else 1)
    else:
        layer = GatedLinearAttention(
            HIDDEN,
            HEADS,
            SIZE,
            VALUE,
            read=step,
            short_convolution=4 if backbone == "gla" else None,
            feature_map="hedgehog" if backbone == "gla-hedgehog" else None,
        )
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
        for name, parameter in layer.named_parameters():
            if "feature_map" in name or name in ("D", "norm.weight"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        if step is not None:
            for parameter in step.parameters():
                parameter.normal_()
    return layer.to(dtype)


CASES = [
    pytest.param(backbone, options, id=f"{backbone}, {read}")
    for backbone in BACKBONES
    for read, options in READS.items()
]


PASSING = ["gla", "gated-deltanet", "mamba2"]
EVERY_CASE = [*CASES, *(pytest.param(name, None, id=name) for name in ATTENTION)]


def assert_same_state(actual: LayerState, expected: LayerState, tolerance: float) -> None:
    """Every tensor of two states. Of softmax attention, the slots that hold a token; the others must be zero. One may
    have its statistics packed and the other not.
    """
    assert type(actual) is type(expected)
    ours, theirs = (state_tensors(unpacked(state)) for state in (actual, expected))
    assert ours.keys() == theirs.keys()
    for name in ours:
        a, b = ours[name], theirs[name]
        if name in ("count", "statistics.count"):
            assert torch.equal(a, b)
            continue
        if isinstance(actual, AttentionState):
            for n, used in enumerate(actual.count.tolist()):
                assert not a[n, used:].any()
                assert not b[n, used:].any()
                assert_close(f"{name} of sequence {n}", a[n, :used], b[n, :used], tolerance)
            continue
        assert_close(name, a, b, tolerance)


def unpacked(state: LayerState) -> LayerState:
    if isinstance(state, AttentionState) or not isinstance(state.statistics, PackedKeyStatistics):
        return state
    return state._replace(statistics=state.statistics.unpacked())


def rows_of(state: LayerState, row: int) -> LayerState:
    """The state of one sequence."""
    return map_state(state, lambda x: x[row : row + 1])


@pytest.mark.parametrize(("backbone", "read"), EVERY_CASE)
def test_equals_the_token_loop_in_values_and_every_gradient(backbone: str, read: dict[str, Any] | None) -> None:
    layer = make(backbone, read)
    x = torch.randn(1, 19, HIDDEN, dtype=torch.float64, requires_grad=True)
    output, _ = layer(x)
    expected = mixer_loop(layer, x[0]).unsqueeze(0)
    assert_close("output", output, expected, 1e-12)
    upstream = torch.randn_like(output)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    ours = torch.autograd.grad(output, (x, *parameters), upstream)
    theirs = torch.autograd.grad(expected, (x, *parameters), upstream)
    for name, a, b in zip(("x", *names), ours, theirs, strict=True):
        assert b.any(), f"{name} receives no gradient"
        assert_close(name, a, b, 1e-9)


@pytest.mark.parametrize(("backbone", "read"), CASES)
def test_chunked_equals_reference_beyond_one_chunk(
    backbone: str, read: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same layer with every operator replaced by its plain recurrence, on padded rows longer than a chunk."""
    layer = make(backbone, read)
    x = torch.randn(2, 90, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 90)
    mask[0, :7] = 0
    mask[1, 85:] = 0
    upstream = torch.randn_like(x)
    results = []
    for backend in ("torch", "reference"):
        for module, name in (
            (read_module, "curvature_conditioned_query_and_keys"),
            (gated_linear_attention_module, "gated_linear_attention"),
            (gated_deltanet_module, "gated_delta_rule"),
            (mamba2_module, "state_space_duality"),
        ):
            operator = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, f=operator, b=backend, **kw: f(*a, **{**kw, "backend": b}))
        output, state = layer(x, mask=mask)
        gradients = torch.autograd.grad((output * upstream).sum() + state.memory.sum(), (x, *layer.parameters()))
        results.append((output, state, gradients))
        monkeypatch.undo()
    (output, state, gradients), (expected, expected_state, expected_gradients) = results
    assert_close("output", output, expected, 1e-12)
    assert_same_state(state, expected_state, 1e-12)
    for name, a, b in zip(
        ("x", *(name for name, _ in layer.named_parameters())), gradients, expected_gradients, strict=True
    ):
        assert_close(name, a, b, 1e-9)


@pytest.mark.parametrize("kind", ["dense", "packed", "padded"])
@pytest.mark.parametrize("keep_length", [False, True])
@pytest.mark.parametrize(("backbone", "backend"), [(b, "torch") for b in PASSING] + [(b, "triton") for b in PASSING])
def test_keys_through_the_read_step_change_no_gradient(
    backbone: str, backend: str, keep_length: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same layer that writes with the keys it gave to the read step, whose two gradients autograd adds."""
    kernels = backend == "triton"
    if kernels:
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("heads of 4 on a CPU, so in Triton's interpreter, which is off beside a GPU")
    dtype = torch.float32 if kernels else torch.float64
    layer = make(backbone, {"gate": "presplit", "keep_length": keep_length}, dtype)
    x = torch.randn(1 if kind == "packed" else 2, 19, HIDDEN, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 19)
    mask[0, :7] = 0
    mask[1, 15:] = 0
    options: dict[str, Any] = {
        "dense": {}, "packed": {"cu_seqlens": torch.tensor([0, 8, 8, 19])}, "padded": {"mask": mask}
    }[kind]  # fmt: skip
    upstream = torch.randn_like(x)
    operator = read_module.curvature_conditioned_query_and_keys
    passed: list[bool] = []
    results = []
    for through in (True, False):

        def read(q: Tensor, k: Tensor, *arguments: Any, through: bool = through, **given: Any) -> tuple[Any, Tensor]:
            result, keys = operator(q, k, *arguments, **given, backend=backend)
            passed.append(keys is not k)
            return result, keys if through else k

        monkeypatch.setattr(read_module, "curvature_conditioned_query_and_keys", read)
        output, state = layer(x, **options)
        loss = (output * upstream).sum() + state.memory.square().sum()
        results.append((output, *state_tensors(state).values(), *torch.autograd.grad(loss, (x, *layer.parameters()))))
    assert passed == [kernels] * 2
    same = 1 + len(state_tensors(state))
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        if number < same or not kernels:
            assert torch.equal(found, expected)
        else:
            assert_close("gradient", found, expected, 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("backbone", "read"), EVERY_CASE)
def test_every_cut_and_token_by_token_equal_one_call(
    backbone: str, read: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    layer = make(backbone, read, dtype)
    x = torch.randn(2, 13, HIDDEN, dtype=dtype)
    whole, last = layer(x)
    for cut in range(14):
        first, state = layer(x[:, :cut])
        second, after = layer(x[:, cut:], state=state)
        assert_close(f"output, cut at {cut}", torch.cat((first, second), 1), whole, TOLERANCE[dtype])
        assert_same_state(after, last, TOLERANCE[dtype])
    state, outputs = None, []
    for t in range(13):
        output, state = layer(x[:, t : t + 1], state=state)
        outputs.append(output)
    assert_close("output, token by token", torch.cat(outputs, 1), whole, TOLERANCE[dtype])
    assert_same_state(state, last, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("backbone", "read"), EVERY_CASE)
def test_padded_rows_equal_the_rows_alone(backbone: str, read: dict[str, Any] | None, dtype: torch.dtype) -> None:
    """Padding left, right, on both sides, none and nothing else; then a second call that goes on from the states."""
    spans = [(4, 11), (0, 6), (2, 9), (0, 11), (10, 11), (0, 0)]
    layer = make(backbone, read, dtype)
    x = torch.randn(len(spans), 11, HIDDEN, dtype=dtype)
    more = torch.randn(len(spans), 3, HIDDEN, dtype=dtype)
    mask = torch.zeros(len(spans), 11)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1
    output, state = layer(x, mask=mask)
    continued, last = layer(more, state=state)
    for row, (start, end) in enumerate(spans):
        alone = torch.cat((x[row, start:end], more[row])).unsqueeze(0)
        expected, expected_last = layer(alone)
        got = torch.cat((output[row, start:end], continued[row])).unsqueeze(0)
        assert_close("output", got, expected, TOLERANCE[dtype])
        assert_same_state(rows_of(last, row), expected_last, TOLERANCE[dtype])
        counts = [x for name, x in state_tensors(last).items() if name.endswith("count")]
        assert all(count[row] == end - start + 3 for count in counts)
    assert not output[mask == 0].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("backbone", "read"), EVERY_CASE)
def test_packed_documents_equal_the_documents_alone(
    backbone: str, read: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    boundaries = [0, 5, 5, 6, 17, 17]
    layer = make(backbone, read, dtype)
    x = torch.randn(1, 17, HIDDEN, dtype=dtype)
    more = torch.randn(5, 2, HIDDEN, dtype=dtype)
    output, state = layer(x, cu_seqlens=torch.tensor(boundaries))
    # The states of packed documents are states of rows: unpacked input goes on from them.
    continued, last = layer(more, state=state)
    for n, (start, end) in enumerate(pairwise(boundaries)):
        expected, expected_last = layer(torch.cat((x[:, start:end], more[n : n + 1]), 1))
        assert_close("output", torch.cat((output[:, start:end], continued[n : n + 1]), 1), expected, TOLERANCE[dtype])
        assert_same_state(rows_of(last, n), expected_last, TOLERANCE[dtype])


@pytest.mark.parametrize("backbone", [*BACKBONES, *ATTENTION])
def test_packed_documents_continue_states(backbone: str) -> None:
    """States of padded rows go on in packed documents, one of them empty; and no documents at all are no error."""
    layer = make(backbone, None if backbone in ATTENTION else READS["presplit"])
    x, more = torch.randn(3, 6, HIDDEN, dtype=torch.float64), torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    mask = torch.ones(3, 6)
    mask[0, :2] = 0
    mask[2, 1:] = 0
    boundaries = [0, 4, 4, 9]
    _, state = layer(x, mask=mask)
    output, last = layer(more, state=state, cu_seqlens=torch.tensor(boundaries))
    for n, (start, end) in enumerate(pairwise(boundaries)):
        real = x[n, mask[n].bool()]
        expected, expected_last = layer(torch.cat((real, more[0, start:end])).unsqueeze(0))
        assert_close("output", output[:, start:end], expected[:, len(real) :], 1e-12)
        assert_same_state(rows_of(last, n), expected_last, 1e-12)
    nothing, none = layer(more[:, :0], cu_seqlens=torch.tensor([0]))
    assert nothing.shape == (1, 0, HIDDEN)
    assert all(len(kept) == 0 for kept in state_tensors(none).values())


@pytest.mark.parametrize(("backbone", "read"), EVERY_CASE)
def test_gradients_of_padded_and_packed_input_equal_those_of_single_rows(
    backbone: str, read: dict[str, Any] | None
) -> None:
    layer = make(backbone, read)
    documents = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in (5, 1, 7)]

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(layer.parameters())))

    expected = gradients(sum(layer(d.unsqueeze(0))[0].square().sum() for d in documents))
    padded = torch.randn(3, 7, HIDDEN, dtype=torch.float64)
    mask = torch.zeros(3, 7)
    for row, d in enumerate(documents):
        padded[row, 7 - len(d) :], mask[row, 7 - len(d) :] = d, 1
    packed, boundaries = torch.cat(documents).unsqueeze(0), torch.tensor([0, 5, 6, 13])
    results = {
        "padded": gradients(layer(padded, mask=mask)[0].square().sum()),
        "packed": gradients(layer(packed, cu_seqlens=boundaries)[0].square().sum()),
    }
    for kind, result in results.items():
        for (name, _), a, b in zip(layer.named_parameters(), result, expected, strict=True):
            assert_close(f"{kind} {name}", a, b, 1e-10)


@pytest.mark.parametrize(("backbone", "read"), EVERY_CASE)
def test_gradients_flow_through_the_state(backbone: str, read: dict[str, Any] | None) -> None:
    """Two calls joined by a state that stays in the graph have the gradients of one call."""
    layer = make(backbone, read)
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    expected = torch.autograd.grad(layer(x)[0], (x, *layer.parameters()), upstream)
    for cut in (1, 2, 5):
        first, state = layer(x[:, :cut])
        second, _ = layer(x[:, cut:], state=state)
        ours = torch.autograd.grad(torch.cat((first, second), 1), (x, *layer.parameters()), upstream)
        for name, a, b in zip(("x", *(name for name, _ in layer.named_parameters())), ours, expected, strict=True):
            assert_close(f"{name}, cut at {cut}", a, b, 1e-9)


@pytest.mark.parametrize("backbone", [*BACKBONES, *ATTENTION])
@pytest.mark.parametrize("rows", [0, 2])
def test_no_tokens_leave_the_state_as_it_is(backbone: str, rows: int) -> None:
    layer = make(backbone, None if backbone in ATTENTION else READS["presplit"])
    _, state = layer(torch.randn(rows, 5, HIDDEN, dtype=torch.float64))
    output, after = layer(torch.randn(rows, 0, HIDDEN, dtype=torch.float64), state=state)
    assert output.shape == (rows, 0, HIDDEN)
    assert_same_state(after, state, 0.0)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("gate", ["attached", 0.0])
def test_attaching_changes_no_bit(backbone: str, gate: str | float) -> None:
    """A read step at its start on a trained layer: same output, bit for bit, in one call and token by token."""
    plain = make(backbone, None, torch.float32)
    attached = make(backbone, None, torch.float32)
    attached.load_state_dict(plain.state_dict())
    attached.read = read_for(backbone, gate=gate, keep_length=True)
    x = torch.randn(2, 70, HIDDEN)
    assert torch.equal(attached(x)[0], plain(x)[0])
    states: list[MixerState | None] = [None, None]
    for t in range(3):
        (a, states[0]), (b, states[1]) = (
            layer(x[:, t : t + 1], state=s) for layer, s in zip((attached, plain), states, strict=True)
        )
        assert torch.equal(a, b)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_off_keeps_no_statistics_and_equals_the_loop(backbone: str) -> None:
    layer = make(backbone, READS["presplit"])
    layer.read.enabled = False
    x = torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    output, state = layer(x)
    assert state.statistics is None
    assert_close("output", output, mixer_loop(layer, x[0]).unsqueeze(0), 1e-12)
    second, after = layer(x, state=state)
    assert after.statistics is None
    assert_close("continued", second, mixer_loop(layer, torch.cat((x[0], x[0])))[9:].unsqueeze(0), 1e-12)


@pytest.mark.parametrize("backbone", [*BACKBONES, *ATTENTION])
def test_states_can_be_repeated_selected_and_taken_apart(backbone: str) -> None:
    """Sequences named twice and in another order go on as the sequences they are."""
    layer = make(backbone, None if backbone in ATTENTION else READS["presplit"])
    x = torch.randn(3, 7, HIDDEN, dtype=torch.float64)
    more = torch.randn(4, 2, HIDDEN, dtype=torch.float64)
    mask = torch.ones(3, 7)
    mask[1, :4] = 0
    _, state = layer(x, mask=mask)
    indices = torch.tensor([2, 1, 1, 0])
    selected = map_state(state, lambda kept: kept.index_select(0, indices))
    output, _ = layer(more, state=state_from_tensors(state_tensors(selected)))
    for row, n in enumerate(indices.tolist()):
        alone = torch.cat((x[n, 7 - int(mask[n].sum()) :], more[row])).unsqueeze(0)
        assert_close(f"row {row}", output[row], layer(alone)[0][0, -2:], 1e-12)
    tensors = state_tensors(state)
    for name in tensors:
        if name.startswith("statistics") or name in ("memory", "values", "count"):
            with pytest.raises(KeyError, match=name):
                state_from_tensors({key: kept for key, kept in tensors.items() if key != name})


@pytest.mark.parametrize("backbone", [*BACKBONES, *ATTENTION])
def test_reset_parameters_restores_a_start(backbone: str) -> None:
    """Every parameter belongs to a module that can start it anew: constants as they were, random ones in range."""
    read = None if backbone in ATTENTION else {"gate": "attached"}
    layer, fresh = make(backbone, read, torch.float32), make(backbone, read, torch.float32)
    for module in fresh.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for parameter in layer.parameters():
        parameter.data.fill_(math.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (name, a), (_, b) in zip(layer.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.isfinite(a).all(), name
        if "proj" in name or "conv" in name or name in ("A_log", "dt_bias"):
            assert not torch.equal(a, b), f"{name} is not drawn anew"
            assert a.abs().max() < 8
        else:
            assert torch.equal(a, b), f"{name} does not start at a constant"


def test_decay_keeps_its_random_stream() -> None:
    """The weights of a seed last: A and the step sizes of Gated DeltaNet are drawn in this order, after five layers."""
    torch.manual_seed(7)
    layer = GatedDeltaNet(4, 3, 2, 2, max_a=2.0, dt_min=0.001, dt_max=0.1)
    torch.manual_seed(7)
    for outputs in (6, 6, 6, 3, 3):
        nn.Linear(4, outputs, bias=False)
    assert torch.equal(layer.A_log, torch.log(2.0 * (1 - torch.rand(3))))
    dt = torch.exp(torch.rand(3) * math.log(100) + math.log(0.001))
    assert_close("dt", nn.functional.softplus(layer.dt_bias), dt, 1e-5)


@pytest.mark.parametrize("backbone", [*BACKBONES, *ATTENTION])
def test_strided_input_and_expanded_gradients(backbone: str) -> None:
    layer = make(backbone, None if backbone in ATTENTION else READS["presplit"])
    plain = torch.randn(2, 20, HIDDEN, dtype=torch.float64, requires_grad=True)
    strided = plain.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    results = []
    for x, weights in ((plain, torch.ones_like(plain)), (strided, None)):
        output = layer(x)[0]
        (output.sum() if weights is None else (output * weights).sum()).backward()
        results.append((output, x.grad))
    for name, a, b in zip(("output", "x"), *results, strict=True):
        assert_close(name, a, b, 1e-13)


@pytest.mark.parametrize("backbone", [*BACKBONES, *ATTENTION])
def test_autocast_stays_near_float32(backbone: str) -> None:
    """Products in bfloat16, states of linear mixers in float32, gradients of all weights."""
    layer = make(backbone, None if backbone in ATTENTION else READS["presplit"], torch.float32)
    x = torch.randn(2, 40, HIDDEN)
    mask = torch.ones(2, 40)
    mask[0, :3] = 0
    upstream = torch.randn_like(x)
    results = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            first, state = layer(x[:, :30], mask=mask[:, :30])
            second, state = layer(x[:, 30:], state=state)
        output = torch.cat((first, second), 1)
        gradients = torch.autograd.grad(output, list(layer.parameters()), upstream.to(output.dtype))
        results.append((output, gradients))
        if isinstance(state, MixerState):
            assert state.memory.dtype == state.statistics.second_moment.dtype == torch.float32
    (output, gradients), (expected, expected_gradients) = results
    assert output.dtype == torch.bfloat16
    assert_close("output", output, expected, 0.03)
    for (name, _), a, b in zip(layer.named_parameters(), gradients, expected_gradients, strict=True):
        assert_close(name, a, b, 0.1)


def test_decay_starts_in_the_range_asked_for() -> None:
    layer = GatedDeltaNet(8, 4000, 1, 1, max_a=1.5, dt_min=0.001, dt_max=0.02)
    a, dt = layer.A_log.detach().exp(), nn.functional.softplus(layer.dt_bias.detach())
    assert 0 < a.min() <= a.max() <= 1.5
    assert math.isclose(a.mean(), 0.75, rel_tol=0.05)
    assert 0.001 * 0.999 <= dt.min() <= dt.max() <= 0.02 * 1.001
    assert math.isclose(dt.log().mean(), (math.log(0.001) + math.log(0.02)) / 2, rel_tol=0.02)
    assert layer.A_log._no_weight_decay
    assert layer.dt_bias._no_weight_decay


def choose_thin_kernels(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    """Let Gated DeltaNet take its small projections for the kernels' or not; they are computed in PyTorch."""
    both = SimpleNamespace(is_chosen=lambda x, outputs: chosen, thin_linear=thin_linear.thin_linear)
    monkeypatch.setattr(gated_deltanet_module, "thin_linear", both)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_small_projections_are_the_same_together(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """As the kernels compute them on a GPU, here in PyTorch: output and gradients."""
    layer, x = make("gated-deltanet", READS["presplit"], dtype), torch.randn(2, 9, HIDDEN, dtype=dtype)
    results = []
    for together in (False, True):
        choose_thin_kernels(monkeypatch, together)
        output = layer(x).output
        results.append([output, *torch.autograd.grad(output.square().sum(), list(layer.parameters()))])
    names = ["output", *(name for name, _ in layer.named_parameters())]
    for name, apart, joint in zip(names, *results, strict=True):
        assert_close(name, joint, apart, TOLERANCE[dtype])


def test_an_adapter_around_a_projection_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels the small projections are computed together, from their weights; an adapter has more than a
    weight.
    """
    choose_thin_kernels(monkeypatch, True)

    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 3

    layer, x = make("gated-deltanet"), torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    assert isinstance(layer, GatedDeltaNet)
    for name, bias in (("a_proj", "dt_bias"), ("b_proj", None)):
        plain = getattr(layer, name)
        adapter = Adapter(HIDDEN, HEADS, bias=False, dtype=torch.float64)
        adapter.weight = plain.weight
        setattr(layer, name, adapter)
        heard = layer(x).output
        setattr(layer, name, plain)
        assert not torch.allclose(heard, layer(x).output)
        if bias is not None:
            # The same shift as a bias.
            with torch.no_grad():
                getattr(layer, bias).add_(3)
            assert_close("output", heard, layer(x).output, 1e-12)
            with torch.no_grad():
                getattr(layer, bias).sub_(3)


@pytest.fixture
def step_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token without gradients is read by the kernels, in Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a CPU, so in Triton's interpreter, which is off beside a GPU")
    monkeypatch.setattr(
        write_rule_step,
        "is_chosen",
        lambda q, *others: not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others))),
    )
    monkeypatch.setattr(conv_module, "is_chosen", lambda x, width: x.shape[1] == 1)
    update = read_module.update_and_read_
    monkeypatch.setattr(read_module, "update_and_read_", lambda *x, **options: update(*x, **options, backend="triton"))


def copied(state: MixerState) -> MixerState:
    return map_state(state, lambda x: x.clone(memory_format=torch.contiguous_format))


def lent(state: MixerState) -> OverwritableState:
    """A copy, as a cache lends it."""
    memory, statistics, convolution = copied(state)
    if isinstance(statistics, PackableKeyStatistics):
        statistics = StaticKeyStatistics(*statistics.packed())
    return OverwritableState(memory, statistics, convolution)


def overwritten(before: MixerState, after: MixerState) -> set[str]:
    """Which tensors of the state after a call are those of the state before."""
    old, new = state_tensors(before), state_tensors(after)
    return {name for name, x in new.items() if name in old and x.data_ptr() == old[name].data_ptr()}


@pytest.mark.usefixtures("step_kernels")
@pytest.mark.parametrize("kind", ["dense", "padded", "gradients"])
@pytest.mark.parametrize("read", ["none", "presplit"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_state_is_overwritten_only_where_its_owner_lets_it(backbone: str, read: str, kind: str) -> None:
    """One token by the kernels, from a state held elsewhere and from one that is lent, is the same token."""
    layer = make(backbone, READS[read], torch.float32)
    x, token = torch.randn(3, 5, HIDDEN), torch.randn(3, 1, HIDDEN)
    options = {"mask": torch.tensor([[1], [0], [1]])} if kind == "padded" else {}
    with torch.no_grad():
        expected, last = make_exact(layer)(token.double(), state=make_exact(layer)(x.double()).state, **options)
        # Views of something larger would not be overwritten in any case.
        state = copied(layer(x).state)
    held, loan = copied(state), lent(state)
    with torch.set_grad_enabled(kind == "gradients"):
        output, after = layer(token, state=state, **options)
        from_loan, after_loan = layer(token, state=loan, **options)
    assert_same_state(state, held, 0.0)
    assert overwritten(state, after) == set()
    for y, new in ((output, after), (from_loan, after_loan)):
        assert_close("output", y, expected, 2e-6)
        assert_same_state(new, last, 2e-6)
    names = {"dense": set(state_tensors(loan)), "padded": {"memory"}, "gradients": set()}[kind]
    # The convolution of Mamba2 has a bias.
    assert overwritten(loan, after_loan) == {name for name in names if "mamba2" not in backbone or "conv" not in name}


def make_exact(layer: Mixer) -> Mixer:
    return copy.deepcopy(layer).double()


@pytest.mark.usefixtures("step_kernels")
@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_a_memory_that_is_read_twice_is_not_overwritten(backbone: str) -> None:
    layer = make(backbone, None, torch.float32)
    layer.read = TwoReads(GROUPS.get(backbone, HEADS), SIZE, gate=0.5)
    x, token = torch.randn(3, 5, HIDDEN), torch.randn(3, 1, HIDDEN)
    exact = make_exact(layer)
    expected, last = exact(token.double(), state=exact(x.double()).state)
    loan = lent(layer(x).state)
    assert isinstance(loan.statistics, KeyStatistics)  # this read step takes no packed ones
    before = loan.memory.clone()
    output, after = layer(token, state=loan)
    assert torch.equal(loan.memory, before) and "memory" not in overwritten(loan, after)
    assert_close("output", output, expected, 2e-6)
    assert_same_state(after, last, 2e-6)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_bfloat16_stays_near_float64(backbone: str) -> None:
    """Weights, input and output in bfloat16, states in float32."""
    layer = make(backbone, READS["presplit"])
    x = torch.randn(2, 40, HIDDEN, dtype=torch.float64).bfloat16()
    half = make(backbone, READS["presplit"], torch.bfloat16)
    half.load_state_dict(layer.state_dict())
    layer.load_state_dict(half.state_dict())
    output, state = half(x)
    assert output.dtype == torch.bfloat16
    assert state.memory.dtype == state.statistics.second_moment.dtype == torch.float32
    assert_close("output", output, layer(x.double())[0], 0.03)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_bad_input_is_named(backbone: str) -> None:
    layer = make(backbone, READS["presplit"])
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    _, state = layer(x)
    with pytest.raises(ValueError, match="state belongs to 2 sequences, but the input has 4"):
        layer(x.repeat(2, 1, 1), state=state)
    with pytest.raises(ValueError, match="state belongs to 2 sequences, but the input has 1"):
        layer(x[:1], state=state)
    with pytest.raises(TypeError, match=r"state must be the MixerState .* got AttentionState"):
        layer(x, state=AttentionState(state.memory, state.memory, state.statistics.count))
    with pytest.raises(ValueError, match="state has no key statistics"):
        layer(x, state=state._replace(statistics=None))
    if state.convolution is not None:
        with pytest.raises(ValueError, match="made by a layer without convolutions"):
            layer(x, state=state._replace(convolution=None))
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 12\]"):
        layer(x[..., :5])
    with pytest.raises(ValueError, match="mask has a hole in row 1"):
        layer(x, mask=torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="must start at 0 and end at T = 5"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 3]))


def test_a_read_step_for_other_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="made for 3 heads of 4, but the layer has 2 heads of 4"):
        GatedLinearAttention(HIDDEN, HEADS, SIZE, VALUE, read=CurvatureConditionedQuery(3, SIZE))
    with pytest.raises(ValueError, match="max_a must be above 0"):
        GatedDeltaNet(HIDDEN, HEADS, SIZE, VALUE, max_a=0)
