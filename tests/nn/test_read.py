"""The read step as a module, against covariances taken over all keys seen so far."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.nn.token_loop import covariance, gate_of, unit
from torch import Tensor

from ccq.nn import CurvatureConditionedQuery, ReadObservation
from ccq.nn.read import PackableKeyStatistics, StaticKeyStatistics
from ccq.ops import thin_linear

HEADS, SIZE, TOKENS = 3, 4, 11
GATES = ["presplit", "head", "attached", 0.3]


def randomize(read: CurvatureConditionedQuery) -> CurvatureConditionedQuery:
    """Weights away from their constant start."""
    with torch.no_grad():
        for parameter in read.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return read


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    presplit = 2 * torch.randn(2, TOKENS, HEADS * SIZE, dtype=dtype)
    # Keys with a common part, so that centring matters.
    k = torch.randn(2, TOKENS, HEADS, SIZE, dtype=dtype) + 1
    return presplit.unflatten(-1, (HEADS, SIZE)), k, presplit


def brute_force(read: CurvatureConditionedQuery, q: Tensor, k: Tensor, presplit: Tensor) -> Tensor:
    result = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                sigma = covariance(unit(k[b, : t + 1, h]), read.centred)
                query = q[b, t, h] if read.keep_length else unit(q[b, t, h])
                strength = gate_of(read, presplit[b, t], unit(q[b, t, h]), h)
                result[b, t, h] = query - strength * (sigma @ query)
    return result


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("keep_length", [False, True])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_query_and_gradients(gate: str | float, centred: bool, keep_length: bool, given: bool) -> None:
    options: dict[str, Any] = {"gate": gate, "centred": centred, "keep_length": keep_length}
    read = randomize(CurvatureConditionedQuery(HEADS, SIZE, **options).double())
    q, k, presplit = inputs()
    presplit = presplit.requires_grad_()
    k = k.requires_grad_()
    q = presplit.unflatten(-1, (HEADS, SIZE))
    query = read(q, k, presplit_query=presplit if given else None).query
    expected = brute_force(read, q, k, presplit)
    before = q if keep_length else unit(q)
    assert_close("correction", query - before, expected - before, 1e-12)
    upstream = torch.randn_like(query)
    names = ["presplit", "k", *(name for name, _ in read.named_parameters())]
    tensors = [presplit, k, *read.parameters()]
    ours = torch.autograd.grad(query, tensors, upstream)
    theirs = torch.autograd.grad(expected, tensors, upstream)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert_close(name, a, b, 1e-10)


@pytest.mark.parametrize(("gate", "start"), [("presplit", 0.01), ("head", 0.1), ("attached", 0.0), (0.25, 0.25)])
def test_gate_starts_where_the_paper_says_whatever_the_query(gate: str | float, start: float) -> None:
    read = CurvatureConditionedQuery(HEADS, SIZE, gate=gate)
    seen: list[ReadObservation] = []
    read.observer = seen.append
    q, k, presplit = inputs(torch.float32)
    read(q, k, presplit_query=presplit)
    assert seen[0].gate.shape == (2, TOKENS, HEADS)
    torch.testing.assert_close(seen[0].gate, torch.full((2, TOKENS, HEADS), start), rtol=1e-6, atol=0)


def test_parameters_by_form() -> None:
    shapes = {
        form: {name: tuple(p.shape) for name, p in CurvatureConditionedQuery(HEADS, SIZE, gate=form).named_parameters()}
        for form in ("presplit", "head", "attached")
    }
    wide = {"gate_weight": (HEADS, HEADS * SIZE), "gate_bias": (HEADS,)}
    assert shapes == {
        "presplit": wide,
        "head": {"gate_weight": (HEADS, SIZE), "gate_bias": (HEADS,)},
        "attached": {**wide, "gate_scale": (HEADS,)},
    }
    assert CurvatureConditionedQuery(HEADS, SIZE, gate=0.1).state_dict() == {}


def test_the_bias_is_marked_as_free_of_weight_decay() -> None:
    read = CurvatureConditionedQuery(HEADS, SIZE, gate="attached")
    marked = {name for name, p in read.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"gate_bias"}


@pytest.mark.parametrize("gate", GATES)
def test_creation_draws_no_random_numbers(gate: str | float) -> None:
    before = torch.get_rng_state()
    CurvatureConditionedQuery(HEADS, SIZE, gate=gate)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", ["attached", 0.0])
def test_zero_gate_with_kept_length_changes_no_bit(gate: str | float, dtype: torch.dtype) -> None:
    read = CurvatureConditionedQuery(HEADS, SIZE, gate=gate, keep_length=True).to(dtype)
    q, k, presplit = inputs(dtype)
    assert torch.equal(read(q, k, presplit_query=presplit).query, q)


def test_zero_gate_on_unit_vectors_changes_no_bit() -> None:
    read = CurvatureConditionedQuery(HEADS, SIZE, gate=0.0)
    q, k, presplit = inputs(torch.float32)
    q, k = unit(q), unit(k)
    assert torch.equal(read(q, k, presplit_query=presplit, normalized=True).query, q)


def test_the_attached_scale_has_a_gradient_at_its_start() -> None:
    read = CurvatureConditionedQuery(HEADS, SIZE, gate="attached").double()
    q, k, presplit = inputs()
    upstream = torch.randn_like(q)
    read(q, k, presplit_query=presplit).query.backward(upstream)
    fixed = CurvatureConditionedQuery(HEADS, SIZE, gate=1.0).double()
    correction = unit(q) - brute_force(fixed, q, k, presplit)
    assert_close("scale", read.gate_scale.grad, -0.01 * (upstream * correction).sum((0, 1, 3)), 1e-6)


def test_given_numbers_keep_their_digits_in_every_dtype() -> None:
    """A lambda a head, factors and a table: as the number itself, which no dtype of the model touches."""
    given = torch.tensor([0.3, 0.7, -0.2])
    q, k, presplit = inputs(torch.bfloat16)
    for there_and_back in ([torch.bfloat16], [torch.float16, torch.float32], [torch.float64, torch.bfloat16]):
        read = CurvatureConditionedQuery(HEADS, SIZE, gate=[float(x) for x in given])
        read.intervene(factors=given.clone())
        tabled = CurvatureConditionedQuery(HEADS, SIZE, gate=0.1)
        tabled.intervene(table=given[None].clone(), factors=given.clone())
        for dtype in there_and_back:
            read, tabled = read.to(dtype), tabled.to(dtype)
        for kept in (read.fixed, read.factors, tabled.table, tabled.factors):
            assert kept is not None and kept.dtype == torch.float32 and torch.equal(kept.flatten(), given)
        expected = CurvatureConditionedQuery(HEADS, SIZE, gate=[float(x) ** 2 for x in given])
        for each in (read, tabled):
            assert_close("query", each(q, k, presplit_query=presplit).query, expected(q, k).query.double(), 2**-8)
    moved = CurvatureConditionedQuery(HEADS, SIZE, gate=[float(x) for x in given]).to("meta", torch.bfloat16)
    assert moved.fixed is not None and moved.fixed.is_meta and moved.fixed.dtype == torch.float32


def test_length_is_kept() -> None:
    """A kept length scales the paper's unit result by |q|, up to the 1e-6 of the normalisation."""
    q, k, presplit = inputs()
    kept, paper = (
        CurvatureConditionedQuery(HEADS, SIZE, gate=0.7, keep_length=keep).double() for keep in (True, False)
    )
    length = (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    expected = length * paper(q, k, presplit_query=presplit).query
    assert_close("query", kept(q, k, presplit_query=presplit).query, expected, 1e-13)
    assert (kept(q, k, presplit_query=presplit).query.norm(dim=-1) <= q.norm(dim=-1) * (1 + 1e-12)).all()


@pytest.mark.parametrize("keep_length", [False, True])
def test_off_keeps_the_normalisation_and_no_statistics(keep_length: bool) -> None:
    read = randomize(CurvatureConditionedQuery(HEADS, SIZE, keep_length=keep_length).double())
    q, k, presplit = inputs()
    on = read(q, k, presplit_query=presplit)
    assert on.statistics is not None
    read.enabled = False
    off = read(q, k, presplit_query=presplit, statistics=on.statistics)
    assert off.statistics is None
    assert_close("query", off.query, q if keep_length else unit(q), 1e-14)


@pytest.mark.parametrize("keep_length", [False, True])
@pytest.mark.parametrize("gate", ["presplit", 0.4])
@torch.no_grad()
def test_observer_sees_query_gate_and_correction(gate: str | float, keep_length: bool) -> None:
    read = randomize(CurvatureConditionedQuery(HEADS, SIZE, gate=gate, keep_length=keep_length).double())
    seen: list[ReadObservation] = []
    read.observer = seen.append
    q, k, presplit = inputs()
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, :3] = False
    result = read(q, k, presplit_query=presplit, mask=mask)
    (observed,) = seen
    assert observed.mask is mask
    before = q if keep_length else unit(q)
    assert_close("query", observed.query[mask], before[mask], 1e-14)
    for b, start in ((0, 0), (1, 3)):
        for h in range(HEADS):
            for t in range(start, TOKENS):
                sigma = covariance(unit(k[b, start : t + 1, h]))
                # The first correction is zero.
                if t > start:
                    assert_close("correction", observed.correction[b, t, h], sigma @ before[b, t, h], 1e-12)
                value = gate_of(read, presplit[b, t], unit(q[b, t, h]), h)
                assert math.isclose(observed.gate[b, t, h], value, rel_tol=1e-12)
    change = observed.query - observed.gate.unsqueeze(-1) * observed.correction
    assert_close("relation", result.query[mask], change[mask], 1e-13)


def test_half_precision_is_normalised_in_float32() -> None:
    """Statistics of bfloat16 keys: those of the same keys in float64; unit vectors are not rounded to bfloat16."""
    q, k, presplit = inputs(torch.bfloat16)
    for keep_length in (False, True):
        read = CurvatureConditionedQuery(HEADS, SIZE, gate=0.5, keep_length=keep_length)
        result = read(q, k, presplit_query=presplit)
        keys = unit(k.double())
        moment = torch.einsum("bthd,bthe->bhde", keys, keys)
        assert result.query.dtype == torch.bfloat16
        assert result.statistics.second_moment.dtype == torch.float32
        assert_close("second moment", result.statistics.second_moment, moment, 1e-6)


@pytest.mark.parametrize("gate", ["pre-split", math.nan, math.inf, True, None])
def test_unknown_gate_is_named(gate: Any) -> None:
    with pytest.raises(ValueError, match=f"'presplit', 'head', 'attached', a finite number.*got {gate!r}"):
        CurvatureConditionedQuery(HEADS, SIZE, gate=gate)


@pytest.mark.parametrize("gate", ["presplit", "attached"])
def test_a_gate_by_kernels_adds_the_gradient_of_the_query(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, in which autograd adds the two."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    read = randomize(CurvatureConditionedQuery(HEADS, SIZE, gate=gate).double())
    _, k, presplit = inputs()
    upstream = torch.randn_like(k)

    def gradients(dtype: torch.dtype, device: str) -> list[Tensor]:
        own = read.to(device, dtype)
        leaf = presplit.to(device, dtype).requires_grad_()
        query = own(leaf.unflatten(-1, (HEADS, SIZE)), k.to(device, dtype)).query
        return [x.cpu() for x in torch.autograd.grad(query, (leaf, *own.parameters()), upstream.to(device, dtype))]

    exact = gradients(torch.float64, "cpu")
    launched: list[bool] = []
    kernels = importlib.import_module("ccq.ops.thin_linear.kernels")
    backward = kernels.backward

    def note(*arguments: Any) -> Any:
        launched.append(arguments[-1] is not None)
        return backward(*arguments)

    monkeypatch.setattr(thin_linear, "is_chosen", lambda x, outputs: x.dtype == torch.float32)
    monkeypatch.setattr(kernels, "backward", note)
    names = ("query", *dict(read.named_parameters()))
    for name, ours, theirs in zip(names, gradients(torch.float32, device), exact, strict=True):
        assert_close(name, ours, theirs, 1e-5)
    assert launched == [True]


def test_query_of_another_width_is_named() -> None:
    q, k, presplit = inputs()
    with pytest.raises(ValueError, match=r"H \* D\] = \[2, 11, 12\], got \[2, 11, 8\]"):
        CurvatureConditionedQuery(HEADS, SIZE)(q, k, presplit_query=presplit[..., :8])


@pytest.mark.parametrize("keep_length", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_statistics_that_may_be_overwritten_take_in_one_token_in_place(gate: str | float, keep_length: bool) -> None:
    read = randomize(CurvatureConditionedQuery(HEADS, SIZE, gate=gate, keep_length=keep_length).double())
    q, k, presplit = inputs()
    expected = read(q, k, presplit_query=presplit)
    with torch.no_grad():
        first = read(q[:, :-1], k[:, :-1], presplit_query=presplit[:, :-1]).statistics
        assert first is not None and isinstance(first, PackableKeyStatistics)
        static = StaticKeyStatistics(*first.packed())
        before = StaticKeyStatistics(*(x.clone() for x in static))
        last = {"q": q[:, -1:], "k": k[:, -1:], "presplit_query": presplit[:, -1:]}
        # A mask may say that a row has no token, so it takes the other way.
        masked = read(**last, statistics=static, mask=torch.ones(2, 1))
        assert all(torch.equal(a, b) for a, b in zip(static, before, strict=True))
        result = read(**last, statistics=static)
    assert all(a is b for a, b in zip(result.statistics, static, strict=True))
    for got, last_statistics in ((result, result.statistics.unpacked()), (masked, masked.statistics)):
        assert_close("query", got.query, expected.query[:, -1:], 1e-12)
        for name, a, b in zip(last_statistics._fields, last_statistics, expected.statistics, strict=True):
            assert_close(name, a, b, 1e-12)
    kept = [x.clone() for x in before]
    recorded = read(**last, statistics=before)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True)), "gradients need what was there"
    assert_close("query", recorded.query, expected.query[:, -1:], 1e-12)
