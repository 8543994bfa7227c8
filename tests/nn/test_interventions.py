"""Corrections changed by hand: factors of heads, lambda by position, and a fixed lambda for each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import assert_close
from tests.nn.test_reads import HEADS, NAMES, SIZE, inputs, make_read, tolerance, whole
from torch import Tensor

from ccq.nn import CurvatureConditionedQuery, ReadObservation
from ccq.nn.read import GatedReadStep
from ccq.nn.reads import READS
from ccq.ops.layout import positions
from ccq.ops.query import KeyStatistics, curvature_conditioned_query, l2_normalize

CORRECTING = [name for name in NAMES if name != "normalize"]


@pytest.mark.parametrize("keep_length", [False, True])
@pytest.mark.parametrize("name", CORRECTING)
def test_factors_multiply_the_distance_to_the_query_before(name: str, keep_length: bool) -> None:
    read = make_read(name, keep_length=keep_length)
    q, k, presplit, log_decay = inputs()
    mask = torch.ones(q.shape[:2])
    mask[0, :3] = 0
    # Padding must not spread, whatever stands in it.
    k[0, :3] = torch.nan
    options: dict[str, Any] = {"presplit_query": presplit, "log_decay": log_decay, "mask": mask}
    on = whole(read(q, k, **options).query)
    read.intervene(enabled=False)
    off = whole(read(q, k, **options).query)
    factors = torch.tensor([-1.7, 0.0], dtype=torch.float64)
    read.intervene(factors=factors)
    seen: list[ReadObservation] = []
    read.observer = seen.append
    changed = whole(read(q, k, **options).query)
    real = mask.bool()
    expected = off + factors[:, None] * (on - off)
    assert_close("changed", changed[real], expected[real], 10 * tolerance(name))
    assert torch.equal(changed[real][:, 1], off[real][:, 1])
    (observed,) = seen
    by_observation = observed.query - observed.gate[..., None] * observed.correction
    assert_close("observed", by_observation[real], changed[real], 10 * tolerance(name))
    assert read.is_changed
    read.intervene()
    assert not read.is_changed
    assert torch.equal(whole(read(q, k, **options).query)[real], on[real])


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("name", CORRECTING)
def test_padding_has_no_gradient_whatever_stands_in_it(name: str, changed: bool) -> None:
    """The real tokens have that of a call with zeros in the padding, which is the same with and without factors."""
    read = make_read(name)
    if changed:
        read.intervene(factors=torch.tensor([-1.7, 0.4], dtype=torch.float64))
    q, k, presplit, log_decay = inputs()
    mask = torch.ones(q.shape[:2], dtype=torch.bool)
    mask[0, :3] = mask[1, 7:] = False
    upstream = torch.randn_like(q)
    gradients = []
    for padding in (0.0, 3.0, torch.nan, torch.inf):
        tensors = [x.masked_fill(~mask[..., None, None], padding).requires_grad_() for x in (q, k)]
        options: dict[str, Any] = {"presplit_query": presplit, "log_decay": log_decay, "mask": mask}
        query = whole(read(*tensors, **options).query)
        # Of the padding, too, where its query is a number.
        reached = query if padding == 3 else query[mask]
        gradients.append(torch.autograd.grad(reached, tensors, upstream if padding == 3 else upstream[mask]))
    for found in gradients:
        for ours, expected in zip(found, gradients[0], strict=True):
            assert not ours[~mask].any()
            assert_close("gradient", ours, expected, 1e-12)


@pytest.mark.parametrize("name", ["ccq", "richardson", "mesa"])
def test_rounding_comes_last(name: str) -> None:
    """In bfloat16, of the query that is multiplied as of any other: its error is at most half a spacing."""
    read = make_read(name).float()
    q, k, presplit, log_decay = (x.bfloat16() for x in inputs())
    options = {"presplit_query": presplit, "log_decay": log_decay}
    read.intervene(factors=torch.tensor([2.0, 0.5]))
    seen: list[ReadObservation] = []
    read.observer = seen.append
    changed = read(q, k, **options).query
    exact = l2_normalize(q) - seen[0].gate[..., None] * seen[0].correction
    assert changed.dtype == torch.bfloat16
    assert ((changed.float() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


def position_loop(tokens: int, counts: list[int], mask: list[list[int]] | None, bounds: list[int] | None) -> Any:
    if bounds is not None:
        rows = [n for n in range(len(bounds) - 1) for _ in range(bounds[n], bounds[n + 1])]
        return [[counts[n] + t - bounds[n] for t, n in enumerate(rows)]]
    return [
        [count + sum(mask[row][:t] if mask else [1] * t) for t in range(tokens)] for row, count in enumerate(counts)
    ]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
@settings(deadline=None, max_examples=30)
def test_positions_count_the_real_tokens_of_each_sequence(lengths: list[int], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    packed = positions(torch.zeros(1, bounds[-1]), torch.tensor(counts), mask=None, cu_seqlens=torch.tensor(bounds))
    assert packed.tolist() == position_loop(bounds[-1], counts, None, bounds)
    tokens = max(lengths)
    left = [data.draw(st.integers(0, tokens - length)) for length in lengths]
    mask = [[0] * a + [1] * n + [0] * (tokens - n - a) for a, n in zip(left, lengths, strict=True)]
    padded = positions(
        torch.zeros(len(lengths), tokens), torch.tensor(counts), mask=torch.tensor(mask).bool(), cu_seqlens=None
    )
    real = torch.tensor(mask).bool()
    assert torch.equal(padded[real], torch.tensor(position_loop(tokens, counts, mask, None))[real])
    plain = positions(torch.zeros(2, tokens), None, mask=None, cu_seqlens=None)
    assert plain.tolist() == position_loop(tokens, [0, 0], None, None)


@pytest.mark.parametrize("name", [name for name in CORRECTING if "gate" in READS[name].takes])
def test_the_table_takes_the_place_of_the_gate(name: str) -> None:
    read = make_read(name)
    assert isinstance(read, GatedReadStep)
    q, k, presplit, log_decay = inputs()
    options = {"presplit_query": presplit, "log_decay": log_decay}
    one = torch.rand(1, HEADS, dtype=torch.float64)
    read.intervene(table=one)
    got = whole(read(q, k, **options).query)
    for head in range(HEADS):
        fixed = make_read(name, gate=one[0, head].item())
        fixed.load_state_dict({key: x for key, x in read.state_dict().items() if "gate" not in key}, strict=False)
        # ccq-strength multiplies the number of its configuration, but not a value that its gate once had.
        scale = 1 / SIZE if name == "ccq-strength" else 1.0
        fixed.intervene(factors=torch.full((HEADS,), scale, dtype=torch.float64))
        expected = whole(fixed(q, k, **options).query)
        assert_close("of one value", got[:, :, head], expected[:, :, head], 10 * tolerance(name))
    if not read.counts_tokens:
        with pytest.raises(ValueError, match=f"the state of {type(read).__name__} counts no tokens"):
            read.intervene(table=torch.rand(2, HEADS))
        assert torch.equal(whole(read(q, k, **options).query), got)


@pytest.mark.parametrize("form", ["padded", "packed", "rows"])
def test_lambda_goes_by_position(form: str) -> None:
    read = make_read("ccq")
    assert isinstance(read, GatedReadStep)
    table = torch.randn(5, HEADS, dtype=torch.float64)
    read.intervene(table=table)
    q, k, presplit, _ = inputs()
    options: dict[str, Any] = {}
    counts = [7, 2]
    mask = bounds = None
    tokens = q.shape[1]
    if form == "packed":
        q, k, presplit = (x[:1] for x in (q, k, presplit))
        bounds = [0, 4, tokens]
        options["cu_seqlens"] = torch.tensor(bounds)
    elif form == "padded":
        mask = [[0] * 2 + [1] * (tokens - 2), [1] * (tokens - 3) + [0] * 3]
        options["mask"] = torch.tensor(mask)
    before = KeyStatistics.zeros(2, HEADS, SIZE, dtype=torch.float64, device=torch.device("cpu"))
    before = before._replace(count=torch.tensor(counts))
    place = torch.tensor(position_loop(tokens, counts, mask, bounds))
    gate = torch.stack([torch.stack([table[p % 5] for p in row.tolist()]) for row in place])
    expected = curvature_conditioned_query(q, k, gate, statistics=before, backend="reference", **options)
    got = read(q, k, presplit_query=presplit, statistics=before, **options)
    assert_close("query", got.query, expected.query, 1e-12)


@pytest.mark.parametrize("name", [name for name in CORRECTING if "gate" in READS[name].takes])
def test_a_fixed_lambda_for_each_head(name: str) -> None:
    gates = (0.25, 0.75)
    read = make_read(name, gate=gates)
    q, k, presplit, log_decay = inputs()
    options = {"presplit_query": presplit, "log_decay": log_decay}
    got = whole(read(q, k, **options).query)
    others = {key: x for key, x in read.state_dict().items() if key in ("landmarks", "rotation")}
    assert read.state_dict().keys() == others.keys()
    for head, gate in enumerate(gates):
        single = make_read(name, gate=gate)
        single.load_state_dict(others)
        assert_close(str(head), got[:, :, head], whole(single(q, k, **options).query)[:, :, head], tolerance(name))
    assert read.operations_per_token == make_read(name, gate=0.5).operations_per_token


@pytest.mark.parametrize("gate", [(0.1,), (0.1, float("nan")), [0.1, "0.2"], (0.1, 0.2, 0.3)])
def test_a_list_of_gates_must_fit(gate: Any) -> None:
    with pytest.raises(ValueError, match="or a list of 2 such numbers, one a head"):
        CurvatureConditionedQuery(2, 4, gate=gate)


def test_gradients_pass_through_factors() -> None:
    read = make_read("ccq")
    read.intervene(factors=torch.tensor([3.0, 0.0], dtype=torch.float64))
    q, k, presplit, _ = inputs()

    def query(weight: Tensor) -> Tensor:
        return torch.func.functional_call(read, {"gate_weight": weight}, (q, k), {"presplit_query": presplit}).query

    weight = read.gate_weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(query, weight)
    (gradient,) = torch.autograd.grad(query(weight).square().sum(), weight)
    assert gradient[0].any() and not gradient[1].any()
