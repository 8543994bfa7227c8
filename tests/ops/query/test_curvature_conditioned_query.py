"""The read step: the recurrence against the covariance written out, and the chunked form against the recurrence.

The correction Sigma q is compared, never only the query: the correction is often smaller than the spacing of
low-precision numbers near q, so that a routine that returns q would pass.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from tests.helpers import assert_close, relative_error
from torch import Tensor

from ccq.ops.query import KeyStatistics, curvature_conditioned_query, l2_normalize

LENGTHS = (0, 1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 127, 1000)
EXACT = 1e-12
"""Relative error allowed between two float64 computations of the same sums."""
FLOOR = 1e-13
"""Absolute error allowed where the exact value is zero, as the correction at the first key."""


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    gate: Tensor
    statistics: KeyStatistics

    def to(self, dtype: torch.dtype) -> Case:
        state = torch.float64 if dtype == torch.float64 else torch.float32
        statistics = KeyStatistics(self.statistics[0].to(state), self.statistics[1].to(state), self.statistics[2])
        return Case(self.q.to(dtype), self.k.to(dtype), self.gate.to(dtype), statistics)


def make_case(
    rows: int, tokens: int, heads: int, size: int, *, sequences: int | None = None, seen: int = 9, seed: int = 0
) -> Case:
    """Random float64 input; statistics of `seen` earlier keys that are not centred at zero."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    sequences = rows if sequences is None else sequences
    earlier = l2_normalize(normal(sequences, heads, seen, size) + 0.5)
    count = torch.arange(sequences) * 0 + seen
    statistics = KeyStatistics(earlier.mT @ earlier, earlier.sum(-2), count)
    gate = torch.rand(rows, tokens, heads, generator=random, dtype=torch.float64)
    return Case(normal(rows, tokens, heads, size), normal(rows, tokens, heads, size), gate, statistics)


def run(
    case: Case,
    *,
    backend: str,
    want: tuple[str, ...] = ("query", "correction", "second_moment", "total"),
    device: str = "cpu",
    **options: object,
) -> dict[str, Tensor]:
    """Outputs and the gradients of a random linear function of the outputs named in `want`, computed on `device`."""
    leaves = (*case[:3], *case.statistics[:2])
    q, k, gate, second_moment, total = (x.detach().clone().to(device).requires_grad_() for x in leaves)
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    result = curvature_conditioned_query(
        q,
        k,
        gate,
        statistics=KeyStatistics(second_moment, total, case.statistics.count.to(device)),
        backend=backend,
        return_correction="correction" in want,
        **options,  # type: ignore[arg-type]
    )
    outputs = {
        "query": result.query,
        "correction": result.correction,
        "second_moment": result.statistics.second_moment,
        "total": result.statistics.total,
    }
    random = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for name, output in outputs.items():
        if output is not None:
            weight = torch.randn(output.shape, generator=random, dtype=torch.float64)
            if name == "second_moment":
                weight = weight + weight.mT
            if name in want:
                loss = loss + (output.cpu().double() * weight).sum()
    inputs = {"q": q, "k": k, "gate": gate, "second_moment": second_moment, "total": total}
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    found = {name: output for name, output in outputs.items() if output is not None}
    found["count"] = result.statistics.count
    for name, gradient in zip(inputs, gradients, strict=True):
        gradient = torch.zeros_like(inputs[name]) if gradient is None else gradient
        # M is symmetric, so only the symmetric part of its gradient has a meaning.
        found[f"d_{name}"] = (gradient + gradient.mT) / 2 if name == "second_moment" else gradient
    return {name: value.detach().cpu() for name, value in found.items()}


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = EXACT) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name == "count":
            assert torch.equal(actual[name], value)
        else:
            assert actual[name].dtype == value.dtype, name
            assert_close(name, actual[name], value, tolerance, floor=FLOOR)


@pytest.mark.parametrize("centred", [True, False])
def test_reference_is_the_covariance_times_the_query(centred: bool) -> None:
    case = make_case(2, 20, 3, 5)
    result = curvature_conditioned_query(
        case.q, case.k, case.gate, centred=centred, return_correction=True, backend="reference"
    )
    for row in range(2):
        for head in range(3):
            keys = l2_normalize(case.k[row, :, head])
            for i in range(20):
                seen = keys[: i + 1]
                query = case.q[row, i, head] / (case.q[row, i, head].square().sum() + 1e-6).sqrt()
                sigma = torch.cov(seen.T, correction=0) if centred else seen.T @ seen / (i + 1)
                torch.testing.assert_close(result.correction[row, i, head], sigma @ query, atol=1e-14, rtol=0)
                cleaned = query - case.gate[row, i, head] * (sigma @ query)
                torch.testing.assert_close(result.query[row, i, head], cleaned, atol=1e-14, rtol=0)
    keys = l2_normalize(case.k)
    torch.testing.assert_close(result.statistics.second_moment, torch.einsum("bthd,bthe->bhde", keys, keys))
    torch.testing.assert_close(result.statistics.total, keys.sum(1))
    assert result.statistics.count.tolist() == [20, 20]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunked_equals_recurrence(tokens: int) -> None:
    case = make_case(2, tokens, 2, 6)
    compare(run(case, backend="torch"), run(case, backend="reference"))


@pytest.mark.parametrize("normalize", [True, "queries", "keys", False])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(
    "want",
    [("query",), ("correction",), ("second_moment",), ("total",), ("query", "second_moment"), ("query", "correction")],
)
def test_every_gradient_from_every_output(want: tuple[str, ...], centred: bool, normalize: bool | str) -> None:
    case = make_case(2, 70, 2, 5)
    options = {"want": want, "centred": centred, "normalize": normalize}
    compare(run(case, backend="torch", **options), run(case, backend="reference", **options))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gradcheck(backend: str) -> None:
    case = make_case(1, 6, 1, 3)

    def function(q: Tensor, k: Tensor, gate: Tensor, root: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        statistics = KeyStatistics((root + root.mT) / 2, total, case.statistics.count)
        result = curvature_conditioned_query(q, k, gate, statistics=statistics, return_correction=True, backend=backend)
        last = result.statistics
        return result.query, result.correction, (last.second_moment + last.second_moment.mT) / 2, last.total

    inputs = [x.clone().requires_grad_() for x in (*case[:3], *case.statistics[:2])]
    assert torch.autograd.gradcheck(function, inputs)


def yardstick(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """A plain low-precision routine: operands rounded to `dtype`, float32 sums, the correction rounded at the end."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    q, k, gate = (x.to(dtype).requires_grad_() for x in case[:3])
    unit_q, unit_k = rounded(l2_normalize(q)), rounded(l2_normalize(k))
    result = curvature_conditioned_query(
        unit_q,
        unit_k,
        gate,
        statistics=case.to(dtype).statistics,
        normalize=False,
        return_correction=True,
        backend="reference",
    )
    correction = rounded(result.correction)
    query = rounded(unit_q - gate.float().unsqueeze(-1) * correction)
    random = torch.Generator().manual_seed(1)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=random, dtype=torch.float64)).sum() for x in (query, correction)
    )
    names = ("correction", "d_q", "d_k", "d_gate")
    return dict(zip(names, (correction.detach(), *torch.autograd.grad(loss, (q, k, gate))), strict=True))


def spread_keys(kind: str, case: Case) -> Case:
    """Keys on which sums cancel or spectra are steep."""
    if kind == "common mean":
        mean = torch.nn.functional.normalize(case.k[:1, :1], dim=-1)
        noise = torch.nn.functional.normalize(case.k, dim=-1)
        return case._replace(k=0.95**0.5 * mean + 0.05**0.5 * noise)
    if kind == "steep":
        return case._replace(k=case.k / torch.arange(1, case.k.shape[-1] + 1).sqrt())
    return case


@pytest.mark.parametrize("kind", ["flat", "steep", "common mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("tokens", [1, 65, 300])
def test_low_precision_errs_at_most_twice_the_yardstick(tokens: int, dtype: torch.dtype, kind: str) -> None:
    case = spread_keys(kind, make_case(2, tokens, 2, 32, seen=0))
    given = case.to(dtype)
    want = ("query", "correction")
    exact = run(given.to(torch.float64), backend="reference", want=want)
    actual = run(given, backend="torch", want=want)
    allowed = yardstick(case, dtype)
    assert actual["query"].dtype == dtype
    assert actual["correction"].dtype == torch.float32
    for name, value in allowed.items():
        error, yard = relative_error(actual[name], exact[name]), relative_error(value, exact[name])
        scale = exact[name].norm()
        if scale > 1e-12:  # one key has no covariance: nothing to be relative to
            assert error <= 2 * yard, f"{name}: {error:.2e} against {yard:.2e}"


@pytest.mark.parametrize(
    "boundaries", [[0, 0, 16], [0, 5, 5, 70, 71, 199, 199], [0, 64, 128, 129], [0], [0, 0], [0, 0, 0], [0, 1]]
)
def test_packed_documents_equal_separate_ones(boundaries: list[int]) -> None:
    sequences = len(boundaries) - 1
    case = make_case(1, boundaries[-1], 2, 5, sequences=sequences)
    packed = run(case, backend="torch", cu_seqlens=torch.tensor(boundaries))
    compare(packed, run(case, backend="reference", cu_seqlens=torch.tensor(boundaries)))
    for n, (start, end) in enumerate(itertools.pairwise(boundaries)):
        alone = curvature_conditioned_query(
            case.q[:, start:end],
            case.k[:, start:end],
            case.gate[:, start:end],
            statistics=KeyStatistics(*(field[n : n + 1] for field in case.statistics)),
            return_correction=True,
            backend="reference",
        )
        assert_close("correction", packed["correction"][:, start:end], alone.correction, EXACT, floor=FLOOR)
        assert_close("second moment", packed["second_moment"][n], alone.statistics.second_moment[0], EXACT, floor=FLOOR)
        assert packed["count"][n] == alone.statistics.count[0]


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_split_prefill_at_every_cut(backend: str) -> None:
    tokens = 67
    case = make_case(2, tokens, 2, 4)
    whole = curvature_conditioned_query(
        *case[:3], statistics=case.statistics, return_correction=True, backend="reference"
    )
    for cut in range(tokens + 1):
        statistics, parts = case.statistics, []
        for part in (slice(0, cut), slice(cut, tokens)):
            result = curvature_conditioned_query(
                *(x[:, part] for x in case[:3]), statistics=statistics, return_correction=True, backend=backend
            )
            statistics = result.statistics
            parts.append(result.correction)
        assert_close(f"correction cut at {cut}", torch.cat(parts, 1), whole.correction, EXACT, floor=FLOOR)
        assert_close(
            f"second moment cut at {cut}", statistics.second_moment, whole.statistics.second_moment, EXACT, floor=FLOOR
        )
        assert_close(f"total cut at {cut}", statistics.total, whole.statistics.total, EXACT, floor=FLOOR)
        assert torch.equal(statistics.count, whole.statistics.count)


def test_gradients_through_the_state_equal_those_of_the_whole() -> None:
    case = make_case(2, 90, 2, 4)
    weight = torch.randn(2, 90, 2, 4, dtype=torch.float64)

    def gradients(cuts: list[int]) -> tuple[Tensor, ...]:
        inputs = [x.clone().requires_grad_() for x in case[:3]]
        statistics, parts = None, []
        for start, end in itertools.pairwise(cuts):
            result = curvature_conditioned_query(*(x[:, start:end] for x in inputs), statistics=statistics)
            statistics = result.statistics
            parts.append(result.query)
        return torch.autograd.grad((torch.cat(parts, 1) * weight).sum(), inputs)

    for name, whole, cut in zip("qkg", gradients([0, 90]), gradients([0, 1, 3, 40, 90]), strict=True):
        assert_close(f"gradient of {name}", cut, whole, EXACT, floor=FLOOR)


MASKS = {
    "left": ([0] * 13 + [1] * 57, [1] * 70),
    "right": ([1] * 50 + [0] * 20, [1] * 70),
    "both": ([0] * 3 + [1] * 60 + [0] * 7, [0] * 64 + [1] * 6),
    "row of padding": ([0] * 70, [1] * 1 + [0] * 69),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("seen", [0, 9])
def test_padding_is_exact(kind: str, seen: int) -> None:
    mask = torch.tensor(MASKS[kind])
    case = make_case(2, 70, 2, 5, seen=seen)
    chunked = run(case, backend="torch", mask=mask)
    compare(chunked, run(case, backend="reference", mask=mask))
    normalized = l2_normalize(case.q)
    for row in range(2):
        real = mask[row].bool()
        alone = run(
            Case(
                *(x[row : row + 1, real] for x in case[:3]),
                KeyStatistics(*(field[row : row + 1] for field in case.statistics)),
            ),
            backend="reference",
        )
        assert_close("correction", chunked["correction"][row, real], alone["correction"][0], EXACT, floor=FLOOR)
        assert_close("second moment", chunked["second_moment"][row], alone["second_moment"][0], EXACT, floor=FLOOR)
        assert chunked["count"][row] == seen + real.sum()
        assert not chunked["correction"][row, ~real].any()
        assert_close("padded query", chunked["query"][row, ~real], normalized[row, ~real], EXACT, floor=FLOOR)
        for name in ("d_q", "d_k", "d_gate"):
            assert not chunked[name][row, ~real].any(), name


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_nothing_in_the_padding_spreads(backend: str, garbage: float) -> None:
    mask = torch.tensor(MASKS["both"])
    case = make_case(2, 70, 2, 5)
    clean = run(case, backend=backend, mask=mask)
    dirty = case._replace(
        q=case.q.masked_fill(mask[:, :, None, None] == 0, garbage),
        k=case.k.masked_fill(mask[:, :, None, None] == 0, garbage),
    )
    found = run(dirty, backend=backend, mask=mask)
    real = mask.bool()
    for name, value in clean.items():
        if name == "query":
            assert_close(name, found[name][real], value[real], EXACT, floor=FLOOR)
        elif name != "count":
            assert_close(name, found[name], value, EXACT, floor=FLOOR)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_autocast_around_the_call_rounds_nothing(backend: str) -> None:
    case = make_case(2, 70, 2, 8).to(torch.float32)
    plain = run(case, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run(case, backend=backend)
    # Backward passes of the recurrence are autograd's own, and a backward pass under autocast is the caller's mistake.
    names = plain if backend == "torch" else ("query", "correction", "second_moment", "total", "count")
    compare({name: rounded[name] for name in names}, {name: plain[name] for name in names}, 1e-6)


def test_views_and_expanded_tensors_are_read_right() -> None:
    packed = torch.randn(2, 70, 2, 3 * 8, dtype=torch.float64)
    q, k, _ = packed.split(8, dim=-1)
    gate = torch.rand(2, 1, 1, dtype=torch.float64).expand(2, 70, 2)
    transposed = torch.randn(2, 2, 70, 8, dtype=torch.float64).transpose(1, 2)
    expanded = torch.randn(2, 1, 1, 8, dtype=torch.float64).expand(2, 70, 2, 8)
    for a, b in ((q, k), (transposed, k), (q, transposed), (expanded, k), (q, expanded)):
        results = []
        for backend in ("reference", "torch"):
            inputs = [x.detach().requires_grad_() for x in (a, b, gate)]
            result = curvature_conditioned_query(*inputs, return_correction=True, backend=backend)
            # The gradient of a sum arrives expanded, with strides of zero.
            results.append((result.correction.detach(), *torch.autograd.grad(result.query.sum(), inputs)))
        for name, expected, actual in zip(("correction", "d_q", "d_k", "d_gate"), *results, strict=True):
            assert_close(name, actual, expected, EXACT, floor=FLOOR)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equal_keys_have_no_covariance(backend: str, dtype: torch.dtype) -> None:
    q = torch.randn(1, 200, 2, 16).to(dtype)
    k = torch.randn(1, 1, 2, 16).to(dtype).expand(1, 200, 2, 16)
    result = curvature_conditioned_query(q, k, 1.0, return_correction=True, backend=backend)
    epsilon = torch.finfo(result.correction.dtype).eps
    assert result.correction.abs().max() <= 50 * epsilon


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_zero_keys_change_nothing(backend: str) -> None:
    q = torch.randn(1, 80, 2, 8).requires_grad_()
    k = torch.zeros(1, 80, 2, 8).requires_grad_()
    result = curvature_conditioned_query(q, k, 0.5, return_correction=True, backend=backend)
    assert torch.equal(result.query, l2_normalize(q.detach()))
    assert not result.correction.any()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(result.query.sum(), (q, k)))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_number_is_a_constant_gate(backend: str) -> None:
    case = make_case(2, 70, 2, 5)
    number = curvature_conditioned_query(case.q, case.k, 0.3, backend=backend)
    tensor = curvature_conditioned_query(
        case.q, case.k, torch.full((2, 70, 2), 0.3, dtype=torch.float64), backend="reference"
    )
    assert_close("query", number.query, tensor.query, EXACT, floor=FLOOR)


def test_the_type_of_the_gate_is_free_and_its_gradient_has_it() -> None:
    case = make_case(1, 20, 2, 5)
    gate = case.gate.float().requires_grad_()
    query = curvature_conditioned_query(case.q.bfloat16(), case.k.bfloat16(), gate).query
    assert query.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(query.float().square().sum(), gate)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (2, 0, 2, 4), (0, 0, 2, 4)])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_nothing_in_gives_nothing_out_and_the_state_back(shape: tuple[int, ...], backend: str) -> None:
    case = make_case(*shape)
    found = run(case, backend=backend)
    assert found["query"].shape == shape
    assert torch.equal(found["second_moment"], case.statistics.second_moment)
    assert torch.equal(found["total"], case.statistics.total)
    assert torch.equal(found["count"], case.statistics.count)


def test_long_stream_does_not_drift() -> None:
    """100,000 tokens in pieces, float32, against float64 sums over all keys at once."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 100_000, 1, 16, generator=random) + 0.3 for _ in range(2))
    statistics = None
    for piece in range(0, 100_000, 4096):
        result = curvature_conditioned_query(
            q[:, piece : piece + 4096], k[:, piece : piece + 4096], 0.3, statistics=statistics, return_correction=True
        )
        statistics = result.statistics
    keys = l2_normalize(k[0, :, 0].double())
    expected = torch.cov(keys.T, correction=0) @ l2_normalize(q[0, -1, 0].double())
    assert_close("last correction", result.correction[0, -1, 0], expected, 1e-4)
    assert statistics.count.tolist() == [100_000]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_compiles_without_a_break_and_agrees() -> None:
    case = make_case(2, 70, 2, 8).to(torch.float32)

    def step(q: Tensor, k: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        result = curvature_conditioned_query(q, k, gate, return_correction=True)
        return result.query, result.correction

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        inputs = [x.clone().requires_grad_() for x in case[:3]]
        query, correction = function(*inputs)
        results.append((query, correction, *torch.autograd.grad(query.square().sum() + correction.sum(), inputs)))
    for name, eager, compiled in zip(("query", "correction", "d_q", "d_k", "d_gate"), *results, strict=True):
        assert_close(name, compiled, eager, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_the_query_can_come_back_in_float32(backend: str, tokens: int) -> None:
    case = make_case(2, tokens, 2, 16)
    low, exact = case.to(torch.bfloat16), case.to(torch.bfloat16).to(torch.float64)
    expected = curvature_conditioned_query(*exact[:3], statistics=exact.statistics, backend="reference").query
    leaves = [x.requires_grad_() for x in low[:3]]
    query = curvature_conditioned_query(
        *leaves, statistics=low.statistics, query_dtype=torch.float32, backend=backend
    ).query
    assert query.dtype == torch.float32
    assert_close("query", query, expected, 3e-6)
    assert all(x.dtype == torch.bfloat16 for x in torch.autograd.grad(query.sum(), leaves))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_unit_keys_alone_keep_the_length_of_the_query(backend: str) -> None:
    case = make_case(2, 20, 2, 8)
    length = case.q.norm(dim=-1, keepdim=True)
    options = {"statistics": case.statistics, "backend": backend}
    unit = curvature_conditioned_query(case.q / length, l2_normalize(case.k), case.gate, normalize=False, **options)
    kept = curvature_conditioned_query(*case[:3], normalize="keys", **options)
    assert_close("query", kept.query, length * unit.query, EXACT)
