"""The read steps of `ccq.ops.reads`: the loops against the keys written out, and the chunked forms against the loops.

What is compared is the change of the query, y - q, never only the query, from which it may differ little.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.helpers import assert_close, relative_error
from torch import Tensor

from ccq.ops.query import KeyStatistics, curvature_conditioned_query, l2_normalize
from ccq.ops.reads import (
    DecayedKeyStatistics,
    DecayedSecondMoment,
    KeyMean,
    LandmarkStatistics,
    QueryResult,
    comba_query,
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
from ccq.ops.reads.solve import conjugate_gradient

HEADS, SIZE, LANDMARKS = 2, 5, 3
LENGTHS = (0, 1, 7, 64, 65, 130)
OPERATORS: dict[str, Callable[..., QueryResult]] = {
    "mean": mean_query,
    "raw": raw_query,
    "trace": trace_query,
    "richardson": richardson_query,
    "exact": exact_query,
    "exponential": exponential_query,
    "decay": decay_query,
    "mesa": mesa_query,
    "query-weighted": query_weighted_query,
}
EXACT = {"mesa": 1e-10, "exact": 1e-11}
"""Relative error allowed between two computations in float64 where it is not 1e-12: those that iterate."""


class Case(NamedTuple):
    """Arguments of an operator, all float64; the state is that of earlier keys."""

    name: str
    tensors: dict[str, Tensor]
    """Of one token each: q, k, gate and log_decay where the operator takes them."""
    own: dict[str, Tensor]
    """ridge, landmarks"""
    state: Any

    def call(self, **options: Any) -> QueryResult:
        return OPERATORS[self.name](**self.tensors, **self.own, **{"statistics": self.state, **options})

    def map(self, change: Callable[[Tensor], Tensor]) -> Case:
        tensors, own = ({n: change(x) for n, x in group.items()} for group in (self.tensors, self.own))
        state = None if self.state is None else self.state._make(change(x) for x in self.state)
        return Case(self.name, tensors, own, state)

    def cut(self, part: slice, row: int | None = None) -> Case:
        """Some of the tokens, of one row or all."""
        rows = slice(None) if row is None else slice(row, row + 1)
        tensors = {name: x[rows, part] for name, x in self.tensors.items()}
        state = self.state if row is None or self.state is None else self.state._make(x[rows] for x in self.state)
        return Case(self.name, tensors, self.own, state)

    def of_sequence(self, n: int, part: slice, row: int = 0) -> Case:
        """Tokens of one row with the state of sequence n."""
        state = None if self.state is None else self.state._make(x[n : n + 1] for x in self.state)
        tensors = {name: x[row : row + 1, part] for name, x in self.tensors.items()}
        return Case(self.name, tensors, self.own, state)


def make_case(
    name: str, rows: int, tokens: int, *, sequences: int | None = None, seen: int = 6, heads: int = HEADS
) -> Case:
    """Random input with keys that share a mean, and the state that `seen` earlier keys leave."""
    sequences = rows if sequences is None else sequences

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def tensors(rows: int, tokens: int) -> dict[str, Tensor]:
        found = {"q": 2 * normal(rows, tokens, heads, SIZE), "k": normal(rows, tokens, heads, SIZE) + 0.7}
        if name != "mesa":
            found["gate"] = torch.rand(rows, tokens, heads, dtype=torch.float64)
        if name in ("decay", "mesa"):
            found["log_decay"] = -torch.rand(rows, tokens, heads, 3, dtype=torch.float64)
        return found

    own = {}
    if name == "mesa":
        own["ridge"] = 0.25 + torch.rand(heads, SIZE, dtype=torch.float64)
    if name == "query-weighted":
        own["landmarks"] = normal(heads, LANDMARKS, SIZE)
    state = None
    if seen:
        state = Case(name, tensors(sequences, seen), own, None).call(backend="reference").statistics
    return Case(name, tensors(rows, tokens), own, state)


def before(case: Case, normalize: bool | str = True) -> Tensor:
    q = case.tensors["q"]
    return l2_normalize(q) if normalize in (True, "queries") else q


def run(case: Case, *, whole: bool = False, **options: Any) -> dict[str, Tensor]:
    """The change of the query, the state, and the gradients of a random linear function of both. With `whole` that in q
    is the gradient of the query itself: it is what is rounded to the dtype of q, and may be far larger than that of the
    change, of which it then says nothing.
    """
    case = case.map(lambda x: x.detach().clone().requires_grad_(x.is_floating_point()))
    result = case.call(**options)
    fields = result.statistics._asdict()
    unit = before(case, options.get("normalize", True))
    change = result.query - (unit.detach() if whole else unit)
    outputs = {"change": change, **{name: x for name, x in fields.items() if name != "count"}}
    random = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for name, output in outputs.items():
        weight = torch.randn(output.shape, generator=random, dtype=torch.float64).to(output.device)
        loss = loss + (output * (weight + weight.mT if name == "second_moment" else weight)).sum()
    inputs = {**case.tensors, **case.own}
    if case.state is not None:
        inputs |= {name: x for name, x in case.state._asdict().items() if name != "count"}
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    for name, gradient in zip(inputs, gradients, strict=True):
        gradient = torch.zeros_like(inputs[name]) if gradient is None else gradient
        # A second moment is symmetric, so only the symmetric part of its gradient has a meaning.
        outputs[f"d_{name}"] = (gradient + gradient.mT) / 2 if name == "second_moment" else gradient
    return {**{name: x.detach() for name, x in outputs.items()}, **{n: x for n, x in fields.items() if n == "count"}}


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name == "count":
            assert torch.equal(actual[name], value)
        else:
            assert_close(name, actual[name], value, tolerance, floor=1e-13)


def tolerance(name: str) -> float:
    return EXACT.get(name, 1e-12)


def written_out(case: Case, row: int, head: int, i: int, normalize: bool | str) -> Tensor:
    """The query of one token, from all keys of its row up to its own; there is no earlier state."""
    x = {name: tensor[row, :, head] for name, tensor in case.tensors.items()}
    keys = x["k"][: i + 1]
    keys = keys if normalize in (False, "queries") else keys / (keys.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    unit = x["q"][i] / (x["q"][i].square().sum() + 1e-6).sqrt()
    q = unit if normalize in (True, "queries") else x["q"][i]
    identity = torch.eye(SIZE, dtype=torch.float64)
    sigma = torch.cov(keys.T, correction=0) if i else torch.zeros_like(identity)
    gate = x["gate"][i] if "gate" in x else None
    if "log_decay" in x:
        # What each key counts: the product of the decays behind it.
        count = torch.stack([x["log_decay"].mean(-1)[j + 1 : i + 1].sum().exp() for j in range(i + 1)])
        moment = (count[:, None] * keys).T @ keys
    if case.name == "mean":
        return q - gate * keys.mean(0) * (keys.mean(0) @ q)
    if case.name == "raw":
        scatter = (keys - keys.mean(0)).T @ (keys - keys.mean(0))
        return q - gate * (scatter @ q)
    if case.name == "trace":
        return q - gate * (sigma @ q) / max(sigma.trace().item(), 1e-3)
    if case.name == "richardson":
        contracted = -gate * sigma
        powers = [torch.linalg.matrix_power(contracted, n) for n in range(4)]
        return torch.stack(powers).sum(0) @ q
    if case.name == "exact":
        return torch.linalg.solve(identity + gate * sigma, q)
    if case.name == "exponential":
        # Not matrix_exp, which is right to 1e-10 only for one small matrix.
        values, vectors = torch.linalg.eigh(sigma)
        return vectors @ (torch.exp(-gate * values) * (vectors.T @ q))
    if case.name == "decay":
        mean = (count[:, None] * keys).sum(0) / count.sum()
        return q - gate * ((moment / count.sum() - torch.outer(mean, mean)) @ q)
    if case.name == "mesa":
        return torch.linalg.solve(moment + case.own["ridge"][head].diag(), q)
    assert case.name == "query-weighted"
    landmarks = case.own["landmarks"][head]
    shared = torch.softmax(math.sqrt(SIZE) * keys @ landmarks.T, 1)
    means = shared.T @ keys / shared.sum(0)[:, None]
    weights = shared.sum(0) * torch.exp(math.sqrt(SIZE) * means @ (unit if normalize == "keys" else q))
    return q - gate * (torch.cov(means.T, correction=0, aweights=weights) @ q)


@pytest.mark.parametrize("normalize", [True, "queries", "keys", False])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_loop_is_the_formula_over_all_keys(name: str, normalize: bool | str) -> None:
    case = make_case(name, 2, 9, seen=0)
    if normalize in (False, "queries"):
        # As large as unit vectors: the formulas are stated for those.
        case.tensors["k"] /= case.tensors["k"].norm(dim=-1).max()
        case.tensors["q"] /= case.tensors["q"].norm(dim=-1).max()
    result = case.call(backend="reference", normalize=normalize)
    start = before(case, normalize)
    expected = torch.zeros_like(start)
    for row, head, i in itertools.product(range(2), range(HEADS), range(9)):
        expected[row, i, head] = written_out(case, row, head, i, normalize)
    assert (expected - start).norm() > 0.01
    assert_close("change", result.query - start, expected - start, 1e-12)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", OPERATORS)
def test_chunked_equals_the_loop_in_values_and_gradients(name: str, tokens: int) -> None:
    case = make_case(name, 2, tokens)
    compare(run(case), run(case, backend="reference"), tolerance(name))


@pytest.mark.parametrize("normalize", ["keys", False])
@pytest.mark.parametrize("name", OPERATORS)
def test_chunked_equals_the_loop_on_other_lengths_of_q_and_k(name: str, normalize: bool | str) -> None:
    case = make_case(name, 2, 19, seen=0)
    if normalize is False:
        case.tensors["k"] /= case.tensors["k"].norm(dim=-1).max()
    expected = run(case, backend="reference", normalize=normalize)
    compare(run(case, normalize=normalize), expected, tolerance(name))


@pytest.mark.parametrize("name", OPERATORS)
def test_padding_is_not_seen(name: str) -> None:
    """Padding of every kind, with NaN in it, beside earlier states: as the rows alone, and no gradient."""
    spans = [(4, 75), (0, 66), (2, 69), (0, 75), (74, 75), (0, 0)]
    case = make_case(name, len(spans), 75)
    mask = torch.zeros(len(spans), 75, dtype=torch.bool)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = True
    compare(run(case, mask=mask), run(case, mask=mask, backend="reference"), tolerance(name))
    spoilt = case._replace(tensors={n: x.clone() for n, x in case.tensors.items()})
    spoilt.tensors["k"][~mask] = math.nan
    result = spoilt.call(mask=mask)
    for row, (start, end) in enumerate(spans):
        alone = case.of_sequence(row, slice(start, end), row)
        expected = alone.call()
        assert_close("query", result.query[row, start:end], expected.query[0], tolerance(name))
        for field, x in expected.statistics._asdict().items():
            assert_close(field, getattr(result.statistics, field)[row], x[0], tolerance(name))
    assert_close("padding", result.query[~mask], l2_normalize(case.tensors["q"])[~mask], 1e-15)
    gradients = run(case, mask=mask)
    assert all(not gradients[f"d_{n}"][~mask].any() for n in case.tensors if n != "q")


@pytest.mark.parametrize("name", OPERATORS)
def test_packed_documents_equal_the_documents_alone(name: str) -> None:
    boundaries = [0, 5, 5, 6, 90, 159, 159]
    case = make_case(name, 1, 159, sequences=6)
    packed = torch.tensor(boundaries)
    actual = run(case, cu_seqlens=packed)
    compare(actual, run(case, cu_seqlens=packed, backend="reference"), tolerance(name))
    for n, (start, end) in enumerate(itertools.pairwise(boundaries)):
        alone = case.of_sequence(n, slice(start, end))
        expected = alone.call()
        change = expected.query - before(alone)
        assert_close("change", actual["change"][:, start:end], change, tolerance(name), floor=1e-13)
        for field, x in expected.statistics._asdict().items():
            assert_close(field, actual[field][n : n + 1], x, tolerance(name))
    nothing = case._replace(state=None).cut(slice(0, 0)).call(cu_seqlens=torch.tensor([0]))
    assert nothing.query.shape == (1, 0, HEADS, SIZE)
    assert all(len(x) == 0 for x in nothing.statistics)


@pytest.mark.parametrize("name", OPERATORS)
@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(cuts=st.sets(st.integers(0, 70), max_size=3))
def test_any_cut_equals_one_call(name: str, cuts: set[int]) -> None:
    torch.manual_seed(0)
    case = make_case(name, 2, 70, seen=0)
    whole = case.call()
    state, queries = None, []
    for start, end in itertools.pairwise((0, *sorted(cuts), 70, 70)):
        result = case.cut(slice(start, end))._replace(state=state).call()
        state = result.statistics
        queries.append(result.query)
    start = before(case)
    assert_close("change", torch.cat(queries, 1) - start, whole.query - start, tolerance(name))
    for field, x in whole.statistics._asdict().items():
        assert_close(field, getattr(state, field), x, 1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradcheck(name: str) -> None:
    case = make_case(name, 1, 3, seen=2, heads=1)
    groups = {**case.tensors, **case.own, **{n: x for n, x in case.state._asdict().items() if n != "count"}}
    names, values = zip(*groups.items(), strict=True)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = dict(zip(names, tensors, strict=True))
        if "second_moment" in found:
            found["second_moment"] = (found["second_moment"] + found["second_moment"].mT) / 2
        state = case.state._make(found.get(field, getattr(case.state, field)) for field in case.state._fields)
        result = OPERATORS[name](**{n: found[n] for n in (*case.tensors, *case.own)}, statistics=state)
        return result.query, *(x for x in result.statistics if x.is_floating_point())

    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in values], atol=1e-7, fast_mode=True)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "mesa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gate_of_zero_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    case = make_case(name, 2, 70, seen=0).map(lambda x: x.to(dtype))
    case.tensors["gate"].zero_()
    assert torch.equal(case.call(normalize="keys").query, case.tensors["q"])
    assert torch.equal(case.call().query, l2_normalize(case.tensors["q"]).to(dtype))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_correction_is_what_the_gate_multiplies(name: str) -> None:
    case = make_case(name, 2, 20)
    for normalize in (True, "keys"):
        result = case.call(normalize=normalize)
        gate = case.tensors["gate"].unsqueeze(-1) if "gate" in case.tensors else 1.0
        change = before(case, normalize) - result.query
        assert_close("correction", gate * result.correction, change, tolerance(name))


@pytest.mark.parametrize("name", OPERATORS)
def test_low_precision_sums_in_float32(name: str) -> None:
    """float32 to its accuracy; bfloat16 input, read in float32, to that of its products, which are its own numbers."""
    case = make_case(name, 2, 200, seen=0)
    for dtype, allowed in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        # The same numbers in both, so that only the arithmetic differs.
        low = case.map(lambda x, dtype=dtype: x.to(dtype))
        exact = low.map(Tensor.double).call()
        result = low.call(query_dtype=torch.float32)
        assert result.query.dtype == torch.float32
        assert low.call().query.dtype == dtype
        error = relative_error(result.correction, exact.correction)
        print(f"{name} {dtype}: {error:.1e}")
        assert error < allowed
        for x, y in zip(result.statistics, exact.statistics, strict=True):
            assert x.dtype == (torch.int64 if y.dtype == torch.int64 else torch.float32)


@pytest.mark.parametrize("name", OPERATORS)
def test_long_equal_keys_stay_finite(name: str) -> None:
    """A covariance of zero: no correction by it, and no number that is not finite, forward and backward."""
    case = make_case(name, 1, 300, seen=0).map(Tensor.float)
    case.tensors["k"][:] = torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5])
    case = case.map(lambda x: x.requires_grad_())
    result = case.call()
    result.query.square().sum().backward()
    assert torch.isfinite(result.query).all()
    assert all(torch.isfinite(x.grad).all() for x in case.tensors.values())
    if name not in ("mean", "mesa"):
        # What is left is rounding, a few units of float32; ccq-raw multiplies it by t, ccq-trace by up to 1000.
        larger = {"raw": 300.0, "trace": 1000.0}.get(name, 1.0)
        assert (result.query - before(case)).abs().max() < 2e-6 * larger


def far_landmark() -> Case:
    """A landmark on the other side of all keys, which gets e^-120 of them and less: nothing in float32."""
    case = make_case("query-weighted", 2, 9, seen=0)
    case.tensors["k"] += 3
    case.own["landmarks"][:, 1] = -60 / math.sqrt(SIZE)
    shares = case.call(backend="reference").statistics.shares
    assert (shares[..., 1] > 0).all()
    assert not shares[..., 1].float().any()
    return case


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_landmark_without_keys_has_no_weight(backend: str) -> None:
    """In float32, against its share of next to nothing in float64."""
    case = far_landmark()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    actual = run(case.map(lambda x: x.float() if x.is_floating_point() else x), mask=mask, backend=backend)
    for name, value in run(case, mask=mask, backend="reference").items():
        assert_close(name, actual[name], value, 1e-4, floor=2e-6)


def test_one_step_of_richardson_is_the_read_step() -> None:
    case = make_case("richardson", 2, 70)
    one = case.call(steps=1)
    expected = curvature_conditioned_query(**case.tensors, statistics=case.state, return_correction=True)
    assert_close("correction", one.correction, expected.correction, 1e-14)
    start = before(case)
    assert_close("change", one.query - start, expected.query - start, 1e-13)


@pytest.mark.parametrize("statistics", [True, False])
def test_many_steps_of_richardson_are_exact(statistics: bool) -> None:
    case = make_case("richardson", 2, 70, seen=6 if statistics else 0)
    start = before(case)
    # lambda |Sigma| is far below 1 for keys in general position.
    many = case.call(steps=60).query - start
    exact = case._replace(name="exact").call().query - start
    assert_close("change", many, exact, 1e-10)


@pytest.mark.parametrize("gate", [0.0, 0.3, 1.0, 7.5, 64.0])
def test_fixed_gates_of_any_size(gate: float) -> None:
    """The number of steps, or terms, follows a fixed lambda."""
    for name in ("exact", "exponential"):
        case = make_case(name, 1, 40)
        del case.tensors["gate"]
        start = before(case)
        loop = case.call(gate=gate, backend="reference").query - start
        assert_close(name, case.call(gate=gate).query - start, loop, 1e-9, floor=1e-14)


def test_bounds_of_the_solutions() -> None:
    """For lambda in [0, 1]: |y| <= |q| for both, and y . q > 0; exact and exponential lie on the same side of ccq."""
    case = make_case("exact", 2, 100)
    start = before(case)
    sizes = {name: case._replace(name=name).call().query.norm(dim=-1) for name in ("exact", "exponential")}
    assert all((size <= start.norm(dim=-1) * (1 + 1e-12)).all() for size in sizes.values())
    # 1 - x <= exp(-x) <= 1 / (1 + x)
    one = curvature_conditioned_query(**case.tensors, statistics=case.state).query
    assert (one.norm(dim=-1) <= sizes["exponential"] * (1 + 1e-12)).all()
    assert (sizes["exponential"] <= sizes["exact"] * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", OPERATORS)
def test_causal(name: str) -> None:
    """Another key at token 40 changes no query before it, and changes that one."""
    case = make_case(name, 1, 80)
    changed = case._replace(tensors={n: x.clone() for n, x in case.tensors.items()})
    changed.tensors["k"][:, 40] += 1.0
    difference = (changed.call().query - case.call().query).norm(dim=-1)
    assert difference[:, :40].max() < 1e-14
    assert difference[:, 40].min() > 1e-6


def test_no_decay_is_the_read_step_and_strong_decay_forgets() -> None:
    case = make_case("decay", 2, 70, seen=0)
    start = before(case)
    case.tensors["log_decay"].zero_()
    tensors = {name: case.tensors[name] for name in ("q", "k", "gate")}
    expected = curvature_conditioned_query(**tensors).query - start
    assert_close("no decay", case.call().query - start, expected, 1e-12)
    # Only the last key counts, so the covariance is that of one key.
    case.tensors["log_decay"].fill_(-50.0)
    assert (case.call().query - start).abs().max() < 1e-14
    case.tensors["log_decay"].fill_(-1e4)
    assert torch.isfinite(case.call().query).all()


def test_conjugate_gradients_solve_and_stay_where_it_is_solved() -> None:
    factor = torch.randn(7, 6, 6, dtype=torch.float64)
    matrix = factor @ factor.mT + torch.eye(6)
    right = torch.randn(7, 6, dtype=torch.float64)
    right[3] = 0

    def product(x: Tensor) -> Tensor:
        return (matrix @ x.unsqueeze(-1)).squeeze(-1)

    expected = torch.linalg.solve(matrix, right)
    for steps in (30, 300):
        assert_close("solution", conjugate_gradient(product, right, torch.zeros_like(right), steps), expected, 1e-10)
    assert_close("start", conjugate_gradient(product, right, expected, 50), expected, 1e-12)
    assert not conjugate_gradient(product, right, torch.zeros_like(right), 9)[3].any()


@pytest.mark.parametrize("normalize", [True, "queries", "keys", False])
def test_comba_subtracts_the_key_of_the_token(normalize: bool | str) -> None:
    q, k = (torch.randn(2, 9, HEADS, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2))
    strength = torch.rand(HEADS, dtype=torch.float64, requires_grad=True)
    length = (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    key = k if normalize in (False, "queries") else k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    unit = q if normalize is False else q / length
    expected = unit - strength[:, None] * key
    expected = expected * length if normalize == "keys" else expected
    result = comba_query(q, k, strength, normalize=normalize)
    assert_close("query", result.query, expected, 1e-14)
    upstream = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, (q, k, strength), upstream) for y in (result.query, expected))
    for name, a, b in zip(("q", "k", "strength"), ours, theirs, strict=True):
        assert_close(name, a, b, 1e-12)
    assert result.statistics is None


def test_wrong_arguments_are_named() -> None:
    case = make_case("decay", 2, 4)
    other = make_case("mean", 2, 4).state
    with pytest.raises(TypeError, match=r"must be a DecayedKeyStatistics, as an earlier call .* got KeyMean"):
        case.call(statistics=other)
    with pytest.raises(TypeError, match="must be a KeyStatistics"):
        make_case("exact", 2, 4).call(statistics=other)
    with pytest.raises(ValueError, match="belongs to 2 sequences, but the input has 1"):
        case.cut(slice(0, 4), 0)._replace(state=case.state).call()
    tensors = {name: x for name, x in case.tensors.items() if name != "log_decay"}
    with pytest.raises(ValueError, match="needs log_decay, the backbone's own"):
        decay_query(**tensors, log_decay=None)
    with pytest.raises(ValueError, match="log_decay must be at most 0, got 1"):
        decay_query(**tensors, log_decay=torch.ones(2, 4, HEADS, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"log_decay must have shape \[2, 4, 2\]"):
        decay_query(**tensors, log_decay=torch.zeros(2, 4, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        richardson_query(**tensors, steps=0)
    with pytest.raises(ValueError, match=r"gate of read step exact must be at least 0, got -0.5"):
        exact_query(tensors["q"], tensors["k"], -0.5)
    with pytest.raises(ValueError, match="backend must be one of auto, reference, torch, triton; got 'gpu'"):
        mean_query(**tensors, backend="gpu")
    with pytest.raises(ValueError, match=r"ridge must have shape \[2, 5\]"):
        mesa_query(tensors["q"], tensors["k"], torch.ones(2), log_decay=case.tensors["log_decay"])
    with pytest.raises(ValueError, match=r"landmarks must have shape \[2, R, 5\]"):
        query_weighted_query(**tensors, landmarks=torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="mask has a hole"):
        mean_query(**tensors, mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]))


def test_states_start_at_zero() -> None:
    """A call without a state is one with a state of zeros."""
    kinds = {
        "mean": KeyMean.zeros(2, HEADS, SIZE, dtype=torch.float64, device=torch.device("cpu")),
        "exact": KeyStatistics.zeros(2, HEADS, SIZE, dtype=torch.float64, device=torch.device("cpu")),
        "decay": DecayedKeyStatistics.zeros(2, HEADS, SIZE, dtype=torch.float64, device=torch.device("cpu")),
        "mesa": DecayedSecondMoment.zeros(2, HEADS, SIZE, dtype=torch.float64, device=torch.device("cpu")),
        "query-weighted": LandmarkStatistics.zeros(
            2, HEADS, LANDMARKS, SIZE, dtype=torch.float64, device=torch.device("cpu")
        ),
    }
    for name, zeros in kinds.items():
        case = make_case(name, 2, 5, seen=0)
        assert not any(x.any() for x in zeros)
        assert torch.equal(case.call().query, case.call(statistics=zeros).query)
