"""The Triton kernels of ccq-mean, ccq-trace, ccq-raw, query-weighted and comba, on a GPU or in Triton's interpreter.

Their values and gradients are compared with the loops over tokens in float64, on the same numbers. Blocks are made
small, so that short input already has many.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import assert_close, relative_error
from tests.ops.query.test_curvature_conditioned_query import make_case as make_read_step_case
from tests.ops.reads import test_reads
from tests.ops.reads.test_reads import HEADS, Case, far_landmark, make_case, run
from torch import Tensor, library

from ccq.ops.query import KeyStatistics, l2_normalize
from ccq.ops.reads import KeyMean, comba_query, mean_query, query_in_parts, query_weighted_query
from ccq.ops.reads.comba import operator as comba
from ccq.ops.reads.mean import operator as mean
from ccq.ops.reads.query_weighted import operator as query_weighted
from ccq.ops.reads.two_parts import operator as two_parts

pytest.importorskip("triton")

from ccq.ops.query import kernels, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE, FLOOR = 1e-5, 2e-6
"""Relative and absolute error allowed to sums in float32, and to a query of length 1 from which the one before is
subtracted."""
OWN = ("mean", "query-weighted")
"""Read steps whose kernels do everything."""
NAMES = (*OWN, "trace", "raw")
"""And those that give the read step's own kernels another gate: few tests, because those take long here."""
CONFIGURATION = kernels.configuration
HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(block=16, group=16, chunk=32, tile=16, part=16, scan_group=16, row_rows=8)
    monkeypatch.setattr(kernels, "configuration", lambda *which: CONFIGURATION(*which)._replace(**sizes))


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Choose D of `make_case`."""
    return lambda size: monkeypatch.setattr(test_reads, "SIZE", size)


def to(case: Case, dtype: torch.dtype, device: str = "cpu") -> Case:
    """In a state of float32 where the case is of half precision."""
    placed = case.map(lambda x: x.to(device, dtype) if x.is_floating_point() else x.to(device))
    if case.state is None or dtype.itemsize != 2:
        return placed
    wide = (x.float() if x.is_floating_point() else x for x in placed.state)
    return placed._replace(state=placed.state._make(wide))


def check(case: Case, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients of the kernels in float32, compared with the loop in float64."""
    given = to(case, torch.float32, DEVICE)
    placed = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    actual = {name: x.cpu() for name, x in run(given, backend="triton", **placed).items()}
    expected = run(to(to(case, torch.float32), torch.float64), backend="reference", **options)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name == "count":
            assert torch.equal(actual[name], value)
        else:
            assert actual[name].dtype == torch.float32
            assert_close(name, actual[name], value, TOLERANCE, floor=FLOOR)
    return actual


@pytest.mark.parametrize("tokens", [1, 16, 35])
@pytest.mark.parametrize("name", OWN)
def test_any_length(name: str, tokens: int) -> None:
    check(make_case(name, 2 if tokens < 20 else 1, tokens))


@pytest.mark.parametrize(("name", "features"), [("mean", 24), ("query-weighted", 24), ("trace", 8), ("raw", 24)])
def test_any_size(name: str, features: int, size: Callable[[int], None]) -> None:
    size(features)
    check(make_case(name, 1, 21))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_state(name: str) -> None:
    check(make_case(name, 1, 34, seen=0))


@pytest.mark.parametrize(
    ("name", "normalize"), [*itertools.product(OWN, ("queries", "keys", False)), ("trace", "queries"), ("raw", "keys")]
)
def test_other_lengths_of_q_and_k(name: str, normalize: bool | str) -> None:
    case = make_case(name, 1, 19)
    if normalize != "keys":
        case.tensors["k"] /= case.tensors["k"].norm(dim=-1).max()
    case.tensors["q"] /= case.tensors["q"].norm(dim=-1).max()
    check(case, normalize=normalize)


@pytest.mark.parametrize(
    ("name", "normalize"), [*itertools.product(OWN, (True, "keys")), ("trace", True), ("raw", True)]
)
def test_padding_is_not_seen(name: str, normalize: bool | str) -> None:
    spans = [(4, 20), (0, 17), (0, 0)]
    case = make_case(name, len(spans), 20, heads=1)
    mask = torch.zeros(len(spans), 20, dtype=torch.bool)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = True
    actual = check(case, mask=mask, normalize=normalize)
    # That of q goes through the query before, too, which is subtracted.
    assert not any(actual[f"d_{n}"][~mask].any() for n in case.tensors if n != "q")
    assert actual["change"][~mask].abs().max() < 1e-6
    # The gate of a number that is none is refused where values can be looked at.
    spoilt = case._replace(tensors={n: x.clone() for n, x in case.tensors.items()})
    for n in ("q", "k") if DEVICE == "cpu" else ("q", "k", "gate"):
        spoilt.tensors[n][~mask] = math.nan
    found = run(to(spoilt, torch.float32, DEVICE), backend="triton", mask=mask.to(DEVICE), normalize=normalize)
    for n, value in actual.items():
        real = mask if n in ("change", "d_q") else slice(None)
        assert torch.equal(found[n].cpu()[real], value[real]), n


@pytest.mark.parametrize(
    ("name", "boundaries"),
    [
        *itertools.product(OWN, ([0, 5, 5, 6, 23, 40, 40], [0], [0, 0])),
        *((n, [0, 0, 5, 22]) for n in NAMES[2:]),
    ],
)
def test_packed_documents(name: str, boundaries: list[int]) -> None:
    case = make_case(name, 1, boundaries[-1], sequences=len(boundaries) - 1)
    check(case, cu_seqlens=torch.tensor(boundaries, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_gives_nothing_out_and_the_state_back(name: str, shape: tuple[int, int]) -> None:
    case = make_case(name, *shape)
    found = run(to(case, torch.float32, DEVICE), backend="triton")
    assert found["change"].shape == (*shape, HEADS, test_reads.SIZE)
    for field, x in case.state._asdict().items():
        assert torch.equal(found[field].cpu(), x.to(found[field].dtype)), field


@pytest.mark.parametrize("name", NAMES)
def test_any_cut_equals_the_whole(name: str) -> None:
    case = to(make_case(name, 1, 20, seen=0), torch.float32)
    exact = to(case, torch.float64).call(backend="reference")
    state, queries = None, []
    for start, end in itertools.pairwise((0, 1, 16, 19, 20)):
        piece = to(case.cut(slice(start, end)), torch.float32, DEVICE)
        result = piece._replace(state=state).call(backend="triton", return_correction=False)
        assert result.correction is None
        state = result.statistics
        queries.append(result.query.cpu())
    start = test_reads.before(to(case, torch.float64))
    assert_close("change", torch.cat(queries, 1) - start, exact.query - start, TOLERANCE, floor=FLOOR)
    for field, x in exact.statistics._asdict().items():
        assert_close(field, getattr(state, field).cpu(), x, TOLERANCE)


@pytest.mark.parametrize(
    ("name", "normalize"), [*itertools.product(OWN, (True, "keys")), ("trace", True), ("raw", True)]
)
def test_the_correction_and_its_gradients(name: str, normalize: bool | str) -> None:
    """Against the chunked form in float64, because the loop gives none."""
    case = to(make_case(name, 1, 18), torch.float32)
    found = []
    for backend, dtype, device in (("triton", torch.float32, DEVICE), ("torch", torch.float64, "cpu")):
        given = to(case, dtype, device).map(lambda x: x.clone().requires_grad_(x.is_floating_point()))
        result = given.call(backend=backend, normalize=normalize)
        leaves = [*given.tensors.values(), *given.own.values(), *(x for x in given.state if x.is_floating_point())]
        weights = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).sin() for x in result[:2]]
        terms = zip(result[:2], weights, strict=True)
        loss = sum((x.double().flatten() * weight.to(device)).sum() for x, weight in terms)
        gradients = torch.autograd.grad(loss, leaves)
        # A second moment is symmetric, so only the symmetric part of its gradient has a meaning.
        gradients = [g + g.mT if g.shape[-1] == g.shape[-2] else g for g in gradients]
        found.append([result.correction, *gradients])
    for actual, expected in zip(*found, strict=True):
        assert_close("values", actual.cpu(), expected, TOLERANCE)


def yardstick(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """A plain routine in low precision: unit vectors and correction rounded to `dtype`, everything else float64."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    given = case.map(lambda x: x.to(dtype).requires_grad_())
    unit = {name: rounded(l2_normalize(given.tensors[name])) for name in "qk"}
    tensors = {**given.tensors, **unit, "gate": given.tensors["gate"].double()}
    own = {name: x.double() for name, x in given.own.items()}
    correction = rounded(Case(case.name, tensors, own, None).call(normalize=False, backend="torch").correction)
    return outputs(given, unit["q"] - tensors["gate"].unsqueeze(-1) * correction, correction)


def outputs(given: Case, query: Tensor, correction: Tensor) -> dict[str, Tensor]:
    """The correction, and the gradients of a random linear function of the query.

    Random, because weights that are all but constant along a row have the direction that the keys share, in which unit
    keys hardly vary: everything in such gradients cancels. With those the chunked form of ccq-raw itself errs by 1e-4
    in float32, and with these by 4e-6.
    """
    leaves = {**given.tensors, **given.own}
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(query.shape, generator=random, dtype=torch.float64).to(query.device)
    gradients = torch.autograd.grad((query.double() * weight).sum(), list(leaves.values()))
    return {
        "correction": correction.detach().cpu(),
        **{f"d_{name}": x.cpu() for name, x in zip(leaves, gradients, strict=True)},
    }


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize(
    ("name", "dtype", "shared"),
    [
        *((name, HALF, shared) for name in OWN for shared in (0.7, 4.0)),
        *((name, BRAIN, 0.7) for name in NAMES),
        ("raw", HALF, 0.7),
    ],
    ids=str,
)
def test_half_precision_errs_at_most_twice_the_yardstick(
    name: str, dtype: torch.dtype, shared: float, size: Callable[[int], None]
) -> None:
    """Also where keys share a large mean."""
    size(16)
    case = make_case(name, 1, 65, seen=0)
    case.tensors["k"] += shared - 0.7
    low = to(case, dtype, DEVICE).map(lambda x: x.requires_grad_())
    result = low.call(backend="triton")
    assert result.query.dtype == dtype
    assert result.correction.dtype == torch.float32
    actual = outputs(low, result.query, result.correction)
    high = to(to(case, dtype), torch.float64).map(lambda x: x.requires_grad_())
    precise = high.call(backend="torch")
    exact = outputs(high, precise.query, precise.correction)
    failures = []
    for field, value in yardstick(case, dtype).items():
        error, yard = relative_error(actual[field], exact[field]), relative_error(value, exact[field])
        print(f"{field}: {error:.2e} against {yard:.2e}")
        if not error <= 2 * yard:
            failures.append(f"{field}: {error:.2e} against {yard:.2e}")
    assert not failures, "; ".join(failures)


@pytest.mark.parametrize("name", OWN)
def test_the_query_can_come_back_in_float32(name: str) -> None:
    low = to(make_case(name, 2, 20, seen=0), torch.float16)
    result = to(low, torch.float16, DEVICE).call(backend="triton", query_dtype=torch.float32)
    assert result.query.dtype == torch.float32
    exact = to(low, torch.float64).call(backend="reference").query
    # Rounding the query itself to float16 would cost 2e-4.
    assert_close("query", result.query.cpu(), exact, 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_equal_keys_stay_finite(name: str) -> None:
    """The trace of their covariance is below its bound, and the bound is what divides."""
    case = to(make_case(name, 1, 20, seen=0), torch.float32, DEVICE)
    case.tensors["k"][:] = torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5])
    case = case.map(lambda x: x.requires_grad_())
    result = case.call(backend="triton")
    result.query.square().sum().backward()
    assert torch.isfinite(result.query).all()
    assert all(torch.isfinite(x.grad).all() for x in case.tensors.values())
    if name != "mean":
        larger = {"raw": 20.0, "trace": 1000.0}.get(name, 1.0)
        assert (result.query - test_reads.before(case)).abs().max() < 2e-6 * larger


def test_a_landmark_without_keys_has_no_weight() -> None:
    check(far_landmark())


@pytest.mark.parametrize("kind", ["dense", "padded", "packed"])
@pytest.mark.parametrize("unit_keys", [True, False])
def test_traces(unit_keys: bool, kind: str) -> None:
    """Against sums of all keys so far, in float64."""
    for tokens, size in ((1, 16), (16, 5), (50, 24)):
        rows, spans = 2, {"dense": [(0, tokens)] * 2, "padded": [(tokens // 3, tokens), (0, tokens // 2)]}.get(kind)
        if spans is None:
            rows, spans = 1, [(0, 0), (0, tokens // 4), (tokens // 4, tokens)]
        keys = torch.randn(rows, tokens, HEADS, size) + 0.3
        keys /= 1 if unit_keys else keys.norm(dim=-1).max()
        count = torch.tensor([4, 0, 9][: len(spans)])
        # A total whose square the squared lengths exceed, as those of keys do.
        before = torch.rand(len(spans), HEADS, size + 1) * count[:, None, None] / size
        before[..., -1] += count[:, None] / 2
        upstream = torch.randn(rows, tokens, HEADS)
        mask = torch.zeros(rows, tokens, dtype=torch.bool)
        leaves = [x.double().requires_grad_() for x in (keys, before)]
        expected = torch.zeros_like(upstream, dtype=torch.float64)
        for n, (start, end) in enumerate(spans):
            row = n if kind != "packed" else 0
            mask[row, start:end] = True
            k = leaves[0][row, start:end]
            k = l2_normalize(k) if unit_keys else k
            means = leaves[1][n] + torch.cat((k, k.square().sum(-1, keepdim=True)), -1).cumsum(0)
            means = means / (count[n] + torch.arange(1, end - start + 1))[:, None, None]
            trace = means[..., -1] - means[..., :-1].square().sum(-1)
            # What a single key has no covariance to be multiplied by.
            first = (count[n] == 0) & (torch.arange(end - start) == 0)
            expected[row, start:end] = (1 / trace.clamp(min=1e-3)).masked_fill(first[:, None], 0)
        exact = torch.autograd.grad((expected * upstream).sum(), leaves)
        found = [x.to(DEVICE).requires_grad_() for x in (keys, before)]
        boundaries = [0, *(end for _, end in spans)] if kind == "packed" else None
        masked = mask.to(DEVICE) if kind == "padded" else None
        inverse, _ = mean.inverse_trace(*found, count.to(DEVICE), masked, boundaries, unit_keys, 1e-3)
        assert_close("inverse", inverse.cpu(), expected, TOLERANCE)
        gradients = torch.autograd.grad((inverse * upstream.to(DEVICE)).sum(), found)
        for name, actual, value in zip(("k", "sums"), gradients, exact, strict=True):
            assert_close(name, actual.cpu(), value, TOLERANCE, floor=FLOOR)


@pytest.mark.parametrize("normalize", [True, "queries", "keys", False])
@pytest.mark.parametrize("padded", [False, True])
def test_comba(padded: bool, normalize: bool | str) -> None:
    """Against the form in PyTorch in float64, which is the definition."""
    q, k, upstream, upstream_correction = (torch.randn(2, 45, 3, 24) for _ in range(4))
    strength = torch.rand(3)
    mask = torch.arange(45).expand(2, 45) >= torch.tensor([[5], [0]])
    if padded:
        k[~mask] = math.nan
    found = []
    for backend, dtype, device in (("triton", torch.float32, DEVICE), ("torch", torch.float64, "cpu")):
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, strength)]
        options = {"mask": mask.to(device)} if padded else {}
        result = comba_query(*leaves, normalize=normalize, backend=backend, **options)
        weights = (x.to(device, dtype) for x in (upstream, upstream_correction))
        loss = sum((x * weight).sum() for x, weight in zip(result[:2], weights, strict=True))
        found.append((*result[:2], *torch.autograd.grad(loss, leaves)))
    for name, actual, expected in zip(("query", "correction", "q", "k", "strength"), *found, strict=True):
        assert_close(name, actual.cpu(), expected, 1e-6)
    if padded:
        assert not found[0][3][~mask].any()


def parts_and_gradients(
    inputs: tuple[Tensor, ...], state: KeyStatistics | None, weights: list[Tensor], **options: Any
) -> dict[str, Tensor]:
    """Both parts of the query, the state, and the gradients of a linear function of them all."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    if state is not None:
        state = state._replace(**{n: getattr(state, n).clone().requires_grad_() for n in ("second_moment", "total")})
    result = query_in_parts(*leaves, statistics=state, **options)
    moment, total, seen = result.statistics
    found = {"kept": result.kept, "removed": result.removed, "second_moment": moment, "total": total}
    loss = sum((x * weight.to(x)).sum() for x, weight in zip(found.values(), weights, strict=True))
    leaves += [] if state is None else state[:2]
    gradients = torch.autograd.grad(loss, leaves)
    names = ("q", "k", "gate", "second_moment", "total")
    # A second moment is symmetric, so only the symmetric part of its gradient has a meaning.
    for name, gradient in zip(names, gradients, strict=False):
        found[f"d_{name}"] = gradient + gradient.mT if name == "second_moment" else gradient
    return {**{name: x.detach().cpu() for name, x in found.items()}, "count": seen.cpu()}


@pytest.mark.parametrize("kind", ["dense", "keys", "padded", "packed"])
def test_two_parts(kind: str) -> None:
    """Against the recurrence in float64; two heads, so that the gates of both are read where they belong."""
    rows, tokens, size = (1, 20, 24) if kind == "packed" else (2, 20, 8)
    sequences = 3 if kind == "packed" else rows
    case = make_read_step_case(rows, tokens, 2, size, sequences=sequences).to(torch.float32)
    options: dict[str, Any] = {
        "keys": {"normalize": "keys"},
        "padded": {"mask": torch.arange(tokens).expand(2, tokens) >= torch.tensor([[5], [0]])},
        "packed": {"cu_seqlens": torch.tensor([0, 0, 3, tokens])},
    }.get(kind, {})
    random = torch.Generator().manual_seed(0)
    state = case.statistics if kind == "packed" else None
    shapes = [case.q.shape, case.q.shape, (sequences, 2, size, size), (sequences, 2, size)]
    weights = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    weights[2] = weights[2] + weights[2].mT
    if kind == "padded":
        # The gradient of a padded query goes through its norm in PyTorch, and nowhere in the kernels.
        weights[0][~options["mask"]] = 0
    placed = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    low = [x.to(DEVICE) for x in case[:3]]
    low_state = None if state is None else KeyStatistics(*(x.to(DEVICE) for x in state))
    actual = parts_and_gradients(tuple(low), low_state, weights, backend="triton", **placed)
    exact = case.to(torch.float64)
    state = None if state is None else exact.statistics
    expected = parts_and_gradients(exact[:3], state, weights, backend="reference", **options)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(name, actual[name], value, 3e-6, floor=FLOOR)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_the_operator_of_two_parts_keeps_its_promises() -> None:
    q, k, gate = given(1, 5, 1, 16), given(1, 5, 1, 16), given(1, 5, 1)
    state = (given(1, 1, 16, 16).detach(), given(1, 1, 16).detach(), count(3))
    sequences = ("test_schema", "test_faketensor")
    library.opcheck(
        two_parts.read_in_parts.overload, (q, k, gate, *state, None, None, True, True), atol=1e-5, rtol=1e-5
    )
    mask = torch.arange(5, device=DEVICE)[None] > 2
    arguments = (q, k, gate, None, *state[1:])
    library.opcheck(two_parts.read_in_parts.overload, (*arguments, mask, None, True, True), test_utils=sequences)
    library.opcheck(two_parts.read_in_parts.overload, (*arguments, None, [0, 5], True, False), test_utils=sequences)


def test_comba_of_nothing() -> None:
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8)):
        q, strength = torch.randn(shape, device=DEVICE, requires_grad=True), torch.rand(2, device=DEVICE)
        query = comba_query(q, q, strength.requires_grad_(), backend="triton", return_correction=False).query
        assert query.shape == shape
        assert not torch.autograd.grad(query.sum(), strength)[0].any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@pytest.mark.parametrize("name", [*OWN, "trace", "comba"])
def test_compiles_without_a_break_and_agrees(name: str) -> None:
    torch._dynamo.reset()
    if name == "comba":
        tensors = {
            "q": torch.randn(1, 20, HEADS, 16),
            "k": torch.randn(1, 20, HEADS, 16),
            "strength": torch.rand(HEADS),
        }
    else:
        case = to(make_case(name, 1, 20, seen=0, heads=1), torch.float32)
        tensors = {**case.tensors, **case.own}
    operator = comba_query if name == "comba" else test_reads.OPERATORS[name]

    def read(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        result = operator(**tensors, backend="triton")
        return result.query * 2, result.correction

    results = []
    for function in (read, torch.compile(read, fullgraph=True, backend="aot_eager")):
        leaves = {name: x.clone().to(DEVICE).requires_grad_() for name, x in tensors.items()}
        found = function(**leaves)
        loss = found[0].square().sum() + found[1].sum()
        results.append((*found, *torch.autograd.grad(loss, list(leaves.values()))))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_()


def count(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


OPERATORS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "mean": (mean.mean_read, lambda: (*queries(17), given(1, 1, 16), count(3))),
    "trace": (mean.inverse_trace, lambda: (given(1, 17, 1, 16), given(1, 1, 17), count(3))),
    "query-weighted": (
        query_weighted.query_weighted_read,
        lambda: (*queries(17), given(1, 3, 16), given(1, 1, 3, 16), given(1, 1, 3).detach().exp().requires_grad_()),
    ),
}


def queries(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return given(1, tokens, 1, 16), given(1, tokens, 1, 16), given(1, tokens, 1)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_keep_their_promises(name: str) -> None:
    operator, make = OPERATORS[name]
    options = (True, 1e-3) if name == "trace" else (True, True, True, False)
    library.opcheck(operator.overload, (*make(), None, None, *options), atol=1e-5, rtol=1e-5)
    mask = torch.arange(17, device=DEVICE)[None] > 2
    library.opcheck(operator.overload, (*make(), mask, None, *options), test_utils=("test_schema", "test_faketensor"))
    library.opcheck(
        operator.overload, (*make(), None, [0, 17], *options), test_utils=("test_schema", "test_faketensor")
    )


def test_the_operator_of_comba_keeps_its_promises() -> None:
    arguments = (given(1, 17, 2, 16), given(1, 17, 2, 16), given(2))
    library.opcheck(comba.comba_read.overload, (*arguments, None, True, True, True, False), atol=1e-5, rtol=1e-5)


def test_what_the_kernels_do_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 3, 1, 16, device=DEVICE)
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got float64.*backend='torch'"):
        mean_query(q.double(), q.double(), 0.1, backend="triton")
    wide = torch.randn(1, 3, 1, 129, device=DEVICE)
    landmarks = torch.randn(1, 4, 129, device=DEVICE)
    with pytest.raises(ValueError, match=r"D up to 128, got 129.*backend='torch'"):
        query_weighted_query(wide, wide, 0.1, landmarks=landmarks, backend="triton")
    with pytest.raises(ValueError, match=r"up to 16 landmarks, got 17; take backend='torch'"):
        query_weighted_query(q, q, 0.1, landmarks=torch.randn(1, 17, 16, device=DEVICE), backend="triton")
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton; got 'reference'"):
        comba_query(q, q, torch.ones(1, device=DEVICE), backend="reference")
    with pytest.raises(TypeError, match=r"must be a KeyMean, as an earlier call .* got tuple"):
        mean_query(q, q, 0.1, statistics=(q, q), backend="triton")
    zeros = KeyMean.zeros(2, 1, 16, dtype=q.dtype, device=q.device)
    with pytest.raises(ValueError, match="belongs to 2 sequences, but the input has 1"):
        mean_query(q, q, 0.1, statistics=zeros, backend="triton")
    monkeypatch.setattr(step, "interpreted", lambda: False)
    if DEVICE == "cpu":
        for call in (
            lambda: mean_query(q, q, 0.1, backend="triton"),
            lambda: query_weighted_query(q, q, 0.1, landmarks=torch.randn(1, 4, 16), backend="triton"),
            lambda: comba_query(q, q, torch.ones(1), backend="triton"),
        ):
            with pytest.raises(RuntimeError, match=r"needs tensors on a GPU, got cpu.*TRITON_INTERPRET=1"):
                call()


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 64), ("float16", 128)])
def test_kernels_compile_for_hopper_and_fit(dtype: str, size: int) -> None:
    """227 KiB of shared memory a block, from the CUDA C++ programming guide; where training is, registers hold all."""
    script = Path(__file__).with_name("compile_sum_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), "9", "0", dtype, str(size)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 14
    for entry in found:
        assert entry["shared"] <= 227 * 1024, entry
        assert dtype != "bfloat16" or entry["spilled"] == 0, entry
