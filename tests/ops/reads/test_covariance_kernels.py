"""The kernels of functions of the covariance against the loops in float64, on a GPU or in Triton's interpreter.

Blocks, chunks and tiles are made small, so that short input already has many of each. What is compared is the change of
the query, y - q, never only the query, from which it may differ little.
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
from typing import Any, NamedTuple

import pytest
import torch
from tests.helpers import assert_close, relative_error
from tests.ops.query.test_fused import passes_over_rows
from torch import Tensor, library

from ccq.ops.query import KeyStatistics, fused, l2_normalize
from ccq.ops.reads import QueryResult, exact_query, exponential_query, richardson_query
from ccq.ops.reads.covariance import operator
from ccq.ops.reads.exact import steps_needed
from ccq.ops.reads.exponential import FITTED
from ccq.ops.reads.solve import conjugate_gradient

pytest.importorskip("triton")

from ccq.ops.query import kernels, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 3e-6
"""Relative error allowed to sums in float32."""
FLOOR = 1e-6
"""Absolute error allowed where the exact value is zero."""
CONFIGURATION = kernels.configuration
SMALL = dict(block=16, group=16, chunk=32, tile=16, part=16, scan_group=16, row_rows=16)
OPERATORS: dict[str, Callable[..., QueryResult]] = {
    "richardson": richardson_query,
    "exact": exact_query,
    "exponential": exponential_query,
}
by_name = pytest.mark.parametrize("name", OPERATORS)
by_kernel = pytest.mark.parametrize("name", ["richardson", "exact"])
"""The exponential is another polynomial."""


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    gate: Tensor
    statistics: KeyStatistics

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another type; sums are float32, or float64 with float64."""
        state = torch.float64 if dtype == torch.float64 else torch.float32
        statistics = KeyStatistics(self.statistics[0].to(state), self.statistics[1].to(state), self.statistics[2])
        return Case(self.q.to(dtype), self.k.to(dtype), self.gate.to(state), statistics)


def make_case(rows: int, tokens: int, heads: int, size: int, *, sequences: int | None = None, seen: int = 9) -> Case:
    """Random float64 input with keys that share a mean, and statistics of `seen` earlier keys."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    sequences = rows if sequences is None else sequences
    earlier = l2_normalize(normal(sequences, heads, seen, size) + 0.5)
    statistics = KeyStatistics(earlier.mT @ earlier, earlier.sum(-2), torch.full((sequences,), seen))
    gate = 0.1 + 0.9 * torch.rand(rows, tokens, heads, dtype=torch.float64)
    return Case(normal(rows, tokens, heads, size), normal(rows, tokens, heads, size) + 0.4, gate, statistics)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "configuration", lambda *which: CONFIGURATION(*which)._replace(**SMALL))


def run(
    name: str,
    case: Case,
    *,
    backend: str,
    device: str = "cpu",
    want: tuple[str, ...] = ("change", "second_moment", "total"),
    **options: Any,
) -> dict[str, Tensor]:
    """The change of the query, the correction, which is the change over lambda where the backend does not give it, the
    state, and the gradients of a random linear function of those in `want`.
    """
    leaves = (*case[:3], *case.statistics[:2])
    q, k, gate, moment, total = (x.detach().clone().to(device).requires_grad_() for x in leaves)
    options = {option: x.to(device) if isinstance(x, Tensor) else x for option, x in options.items()}
    statistics = KeyStatistics(moment, total, case.statistics.count.to(device))
    result = OPERATORS[name](q, k, gate, statistics=statistics, backend=backend, **options)
    before = l2_normalize(q) if options.get("normalize", True) in (True, "queries") else q
    outputs = {"change": result.query - before, **result.statistics._asdict()}
    count = outputs.pop("count")
    divided = -outputs["change"] / gate.unsqueeze(-1)
    outputs["correction"] = divided if result.correction is None else result.correction
    random = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for output, value in outputs.items():
        weight = torch.randn(value.shape, generator=random, dtype=torch.float64)
        weight = weight + weight.mT if output == "second_moment" else weight
        loss = loss + (value.cpu().double() * weight).sum() if output in want else loss
    inputs = {"q": q, "k": k, "gate": gate, "second_moment": moment, "total": total}
    gradients = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
    for given, gradient in zip(inputs, gradients, strict=True):
        # M is symmetric, so only the symmetric part of its gradient has a meaning.
        outputs[f"d_{given}"] = (gradient + gradient.mT) / 2 if given == "second_moment" else gradient
    return {output: x.detach().cpu() for output, x in {**outputs, "count": count}.items()}


def check(name: str, case: Case, tolerance: float = TOLERANCE, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients of the kernels in float32, compared with the loop in float64 on the same numbers."""
    given = case.to(torch.float32)
    actual = run(name, given, backend="triton", device=DEVICE, **options)
    expected = run(name, given.to(torch.float64), backend="reference", **options)
    assert actual.keys() == expected.keys()
    for output, value in expected.items():
        if output == "count":
            assert torch.equal(actual[output], value)
        else:
            assert_close(output, actual[output], value, tolerance, floor=FLOOR)
    return actual


@pytest.mark.parametrize(
    ("name", "tokens"), [*itertools.product(("richardson", "exact"), (0, 1, 17, 50)), ("exponential", 17)]
)
def test_any_length(name: str, tokens: int) -> None:
    check(name, make_case(1, tokens, 1, 16))


@pytest.mark.parametrize(("name", "heads", "size"), [("exact", 2, 24), ("richardson", 1, 8), ("exact", 1, 64)])
def test_any_size(name: str, heads: int, size: int) -> None:
    check(name, make_case(1, 18, heads, size))


@by_kernel
def test_gradients_of_the_correction(name: str) -> None:
    check(name, make_case(2, 18, 1, 16), want=("correction", "change"))


@pytest.mark.parametrize("steps", [1, 5])
def test_any_number_of_steps_of_richardson(steps: int) -> None:
    check("richardson", make_case(1, 18, 1, 16), steps=steps)


@pytest.mark.parametrize(
    ("name", "normalize"), [("richardson", False), ("richardson", "keys"), ("exact", "keys"), ("exact", "queries")]
)
def test_lengths_of_q_and_k(name: str, normalize: bool | str) -> None:
    case = make_case(1, 18, 1, 16)
    # Sigma below 1, for which the series and the number of steps are right.
    case = case._replace(k=case.k / case.k.norm(dim=-1).max()) if normalize in (False, "queries") else case
    check(name, case, normalize=normalize)


@pytest.mark.parametrize("normalize", ["queries", False])
@by_kernel
def test_keys_are_read_where_they_are_as_from_a_copy(
    name: str, normalize: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_over_rows(monkeypatch)
    rows, tokens = 2, 48
    case = make_case(rows, tokens, 2, 16)
    case = case._replace(k=l2_normalize(case.k))
    want = ("change", "correction", "second_moment", "total")
    expected = check(name, case, normalize=normalize, want=want)
    # Forward the sums of blocks alone, backward nothing.
    assert passes == ["sum"]
    passes.clear()
    packed = case._replace(**{which: getattr(case, which).flatten(0, 1)[None] for which in ("q", "k", "gate")})
    boundaries = torch.arange(rows + 1, dtype=torch.int32) * tokens
    found = run(
        name, packed.to(torch.float32), backend="triton", device=DEVICE, normalize=normalize, want=want,
        cu_seqlens=boundaries,
    )  # fmt: skip
    assert passes == ["copy"] * 2
    for output, value in expected.items():
        assert torch.equal(found[output].view(value.shape), value), output


@by_kernel
def test_padding_is_exact_and_spreads_nothing(name: str) -> None:
    mask = torch.zeros(2, 36, dtype=torch.bool)
    mask[0, 5:24], mask[1, 20:] = True, True
    case = make_case(2, 36, 1, 16)
    clean = check(name, case, mask=mask)
    for output in ("change", "d_k", "d_gate"):
        assert clean[output][~mask].abs().max() < 1e-6, output
    nan = [x.masked_fill(~mask.view(2, 36, *(1,) * (x.ndim - 2)), math.nan) for x in case[:2]]
    dirty = run(name, case._replace(q=nan[0], k=nan[1]).to(torch.float32), backend="triton", device=DEVICE, mask=mask)
    for output, value in clean.items():
        real = mask if output in ("change", "d_q") else slice(None)
        assert torch.equal(dirty[output][real], value[real]), output


@pytest.mark.parametrize("boundaries", [[0, 0, 5, 23, 23], [0]])
@by_kernel
def test_packed_documents(name: str, boundaries: list[int]) -> None:
    check(
        name,
        make_case(1, boundaries[-1], 1, 16, sequences=len(boundaries) - 1),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
    )


@by_kernel
def test_gradients_through_the_state_equal_those_of_the_whole(name: str) -> None:
    case = make_case(1, 20, 1, 16).to(torch.float32)
    weight = torch.randn(1, 20, 1, 16, dtype=torch.float64)

    def gradients(case: Case, cuts: list[int], backend: str, device: str) -> tuple[Tensor, ...]:
        inputs = [x.clone().requires_grad_() for x in case[:3]]
        statistics, parts = None, []
        for start, end in itertools.pairwise(cuts):
            pieces = (x[:, start:end].to(device) for x in inputs)
            result = OPERATORS[name](*pieces, statistics=statistics, backend=backend)
            statistics = result.statistics
            parts.append(result.query.cpu().double())
        return torch.autograd.grad((torch.cat(parts, 1) * weight).sum(), inputs)

    exact = gradients(case.to(torch.float64), [0, 20], "reference", "cpu")
    for which, whole, cut in zip("qkg", exact, gradients(case, [0, 1, 20], "triton", DEVICE), strict=True):
        assert_close(f"gradient of {which}", cut, whole, TOLERANCE)


@by_kernel
def test_views_and_expanded_gradients_are_read_right(name: str) -> None:
    packed = torch.randn(1, 18, 1, 3 * 16)
    q, k, _ = packed.split(16, dim=-1)
    gate = torch.rand(1, 1, 1).expand(1, 18, 1)
    found = []
    for backend, dtype, device in (("reference", torch.float64, "cpu"), ("triton", torch.float32, DEVICE)):
        inputs = [x.detach().to(device, dtype).requires_grad_() for x in (q, k, gate)]
        query = OPERATORS[name](*inputs, backend=backend).query
        found.append([x.cpu() for x in torch.autograd.grad(query.sum(), inputs)])
    for which, expected, actual in zip("qkg", *found, strict=True):
        assert_close(which, actual, expected, TOLERANCE, floor=FLOOR)


def test_equal_keys_and_zero_keys_change_nothing() -> None:
    case = make_case(1, 35, 1, 16, seen=0)
    equal, zero = (
        run("exact", case._replace(k=k).to(torch.float32), backend="triton", device=DEVICE)
        for k in (case.k[:, :1].expand_as(case.k), torch.zeros_like(case.k))
    )
    assert equal["correction"].abs().max() < 50 * torch.finfo(torch.float32).eps
    assert not zero["correction"].any()
    assert all(torch.isfinite(x).all() for found in (equal, zero) for x in found.values())


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float16) for name in OPERATORS), ("richardson", torch.bfloat16), ("exact", torch.bfloat16)],
)
def test_half_precision_errs_at_most_twice_as_much_as_the_composition(name: str, dtype: torch.dtype) -> None:
    given = make_case(1, 50, 1, 32).to(dtype)
    options: dict[str, Any] = {"want": ("correction",), "query_dtype": torch.float32}
    actual = run(name, given, backend="triton", device=DEVICE, **options)
    plain = run(name, given, backend="torch", **options)
    options["query_dtype"] = torch.float64
    exact = run(name, given.to(torch.float64), backend="torch", **options)
    assert actual["d_q"].dtype == actual["d_k"].dtype == dtype
    for output in ("correction", "change", "d_q", "d_k", "d_gate"):
        error, allowed = relative_error(actual[output], exact[output]), relative_error(plain[output], exact[output])
        print(f"{output}: {error:.2e} against {allowed:.2e}")
        assert error <= 2 * allowed, f"{output}: {error:.2e} against {allowed:.2e}"
        assert error < {torch.float16: 2e-3, torch.bfloat16: 3e-2}[dtype], output


@pytest.mark.parametrize("dtype", FITTED)
def test_the_fitted_exponential_is_as_exact_as_the_dtype(dtype: torch.dtype) -> None:
    x = torch.linspace(1e-6, 1, 10_001, dtype=torch.float64)
    terms = [c * -((-x) ** n) for n, c in enumerate(FITTED[dtype], 1)]
    error = (torch.stack(terms).sum(0) / -torch.expm1(-x) - 1).abs()
    assert error.max() < torch.finfo(dtype).eps / 2
    # The smallest possible error takes its largest value, with alternating sign, once more than there are terms.
    largest = error > 0.95 * error.max()
    assert (largest[1:] & ~largest[:-1]).sum() + largest[0] == len(terms) + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_steps_of_exact_are_enough_for_the_dtype(dtype: torch.dtype) -> None:
    """Without rounding, on spectra that fill [0, 1]: what is left of lambda Sigma y, where y - q is that."""
    eigenvalues = torch.cat((torch.rand(50, 64, dtype=torch.float64), (torch.arange(64) % 8 < 1)[None].double()))
    right = torch.randn(51, 64, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    found = conjugate_gradient(lambda x: x + eigenvalues * x, right, right, steps_needed(1.0, eps))
    exact = right / (1 + eigenvalues)
    assert ((found - exact).norm(dim=-1) / (exact - right).norm(dim=-1)).max() < eps


def test_what_the_kernels_do_not_take_goes_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """D above 128, and an exponential in pieces: still backend "triton", by calls of the read step's own operator."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the kernels were called")

    monkeypatch.setattr("ccq.ops.reads.covariance.read_by_kernels", refuse)
    monkeypatch.setattr(operator, "MAX_SIZE", 16)
    for name, size, fixed in (("exact", 17, None), ("exponential", 16, 1.5)):
        given = make_case(1, 1, 1, size).to(torch.float32)
        queries = []
        for backend, case, device in (("triton", given, DEVICE), ("reference", given.to(torch.float64), "cpu")):
            q, k, gate = (x.to(device) for x in case[:3])
            statistics = KeyStatistics(*(x.to(device) for x in case.statistics))
            result = OPERATORS[name](q, k, fixed or gate, statistics=statistics, backend=backend)
            queries.append(result.query.cpu() - l2_normalize(case.q))
        assert_close(name, *queries, TOLERANCE)
    q = torch.randn(1, 1, 1, 16, device=DEVICE)
    with pytest.raises(AssertionError, match="the kernels were called"):
        exact_query(q, q, 0.5, backend="triton")


def test_autocast_around_the_call_rounds_nothing() -> None:
    case = make_case(1, 18, 1, 16).to(torch.float32)
    plain = run("richardson", case, backend="triton", device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        rounded = run("richardson", case, backend="triton", device=DEVICE)
    for name, value in plain.items():
        assert torch.equal(rounded[name], value), name


@by_name
def test_nothing_large_but_the_inputs_is_kept_for_the_backward_pass(name: str) -> None:
    case = make_case(1, 32, 1, 32, seen=0).to(torch.float32)
    q, k, gate = (x.to(DEVICE).requires_grad_() for x in case[:3])
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        query = OPERATORS[name](q, k, gate, backend="triton", return_correction=False).query
    known = {x.data_ptr() for x in (q, k, gate, query)}
    # The sums before each block, and the count; the query, which whoever reads with it keeps too, of a solution.
    assert sum(size for pointer, size in kept.items() if pointer not in known) <= 4 * 32
    assert (query.data_ptr() in kept) == (name == "exact")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@by_kernel
def test_compiles_without_a_break_and_agrees(name: str) -> None:
    case = make_case(1, 18, 1, 16).to(torch.float32)

    def read(q: Tensor, k: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        result = OPERATORS[name](q, k, gate, backend="triton")
        return result.query * 2, result.correction, *result.statistics

    results = []
    for function in (read, torch.compile(read, fullgraph=True, backend="aot_eager")):
        inputs = [x.clone().to(DEVICE).requires_grad_() for x in case[:3]]
        outputs = function(*inputs)
        loss = outputs[0].square().sum() + outputs[1].sum() + outputs[2].sum()
        results.append((*outputs, *torch.autograd.grad(loss, inputs)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)


POLYNOMIAL, SOLUTION = ([1.0, 0.5], 0), ([], 2)


@pytest.mark.parametrize("function", [POLYNOMIAL, SOLUTION])
def test_the_operators_keep_their_promises(function: tuple[list[float], int]) -> None:
    case = make_case(1, 5, 1, 16).to(torch.float32)
    leaves = (*case[:3], *case.statistics[:2])
    q, k, gate, moment, total = (x.to(DEVICE).requires_grad_() for x in leaves)
    count = case.statistics.count.to(DEVICE)
    inputs = (q, k, gate, moment, total, count, None, None, *function, True, True)
    library.opcheck(operator.covariance_function.overload, (*inputs, True, False), atol=1e-6, rtol=1e-6)
    checks = ("test_schema", "test_faketensor")
    mask = torch.arange(5, device=DEVICE)[None] > 2
    for given in ((q, k, gate, None, total, count, mask, None), (q, k, gate, None, total, count, None, [0, 5])):
        arguments = (*given, *function, True, True, False, True)
        library.opcheck(operator.covariance_function.overload, arguments, test_utils=checks)
    with torch.no_grad():
        query, correction, _, last, _, vectors = operator.covariance_function(*inputs, True, False)
    known = (query, correction, last, vectors, torch.ones_like(q))
    for dr, states in ((torch.ones_like(q), (torch.ones_like(moment), torch.ones_like(total))), (None, (None, None))):
        arguments = (q, k, gate, moment, count, *known, dr, *states, None, None, *function, True, True, dr is not None)
        arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
        library.opcheck(operator.covariance_function_backward.overload, arguments, test_utils=checks)


def test_what_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 3, 1, 16, device=DEVICE)
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got float64.*backend='torch'"):
        exact_query(q.double(), q.double(), 0.1, backend="triton")
    wide = torch.randn(1, 3, 1, 257, device=DEVICE)
    with pytest.raises(ValueError, match=r"D up to 256, got 257.*backend='torch'"):
        exact_query(wide, wide, 0.1, backend="triton")
    with pytest.raises(ValueError, match="gate must be finite"):
        exact_query(q, q, torch.full((1, 3, 1), math.nan), backend="triton")
    state = KeyStatistics.zeros(2, 1, 16, dtype=torch.float32, device=torch.device(DEVICE))
    with pytest.raises(ValueError, match="belongs to 2 sequences, but the input has 1"):
        exact_query(q, q, 0.1, statistics=state, backend="triton")
    monkeypatch.setattr(step, "interpreted", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs tensors on a GPU, got cpu.*TRITON_INTERPRET=1"):
        exact_query(q.cpu(), q.cpu(), 0.1, backend="triton")
    monkeypatch.setattr(fused, "TRITON_INSTALLED", False)
    with pytest.raises(ImportError, match=r"needs the package triton.*\[gpu\]"):
        exact_query(q, q, 0.1, backend="triton")


@pytest.mark.parametrize(
    ("device", "dtype", "size", "kernels_taken"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float16, 64, True),
        ("cuda", torch.float32, 17, True),
        ("cuda", torch.float64, 64, False),
        ("cuda", torch.bfloat16, 129, False),
        ("cpu", torch.float32, 64, False),
    ],
)
def test_auto_takes_the_kernels_where_they_can_run(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, size: int, kernels_taken: bool
) -> None:
    class Taken(Exception):
        pass

    def note(taken: bool) -> Callable[..., Any]:
        def implementation(*_: Any, **__: Any) -> Any:
            raise Taken(taken)

        return implementation

    monkeypatch.setattr("ccq.ops.reads.covariance.read_by_kernels", note(True))
    monkeypatch.setattr("ccq.ops.reads.covariance.curvature_conditioned_query", note(False))
    # A fake tensor of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(1, 3, 1, size, dtype=dtype, device=device)
        with pytest.raises(Taken, match=str(kernels_taken)):
            exact_query(q, q, 0.1)


LIMITS = {(8, 9): 99, (9, 0): 227}
"""KiB of shared memory a block may take, from the CUDA C++ programming guide, of the targets with the least and of the
one that is measured."""


@pytest.mark.parametrize("capability", LIMITS)
def test_the_kernels_fit_where_they_run(capability: tuple[int, int]) -> None:
    script = Path(__file__).with_name("compile_covariance_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, capability), "bfloat16", "128"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {kernel["kernel"] for kernel in found} == {
        f"_{name}_kernel" for name in ("polynomial", "solution", "adjoint", "key_gradients")
    }
    for kernel in found:
        assert 0 < kernel["shared"] <= LIMITS[capability] * 1024, kernel
