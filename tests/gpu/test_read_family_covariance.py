"""richardson, exact and exponential on a GPU: the kernels of functions of the covariance, as users get them.

Exact values come from the form by products in float64, which tests/ops/reads holds against the loop. In half precision
an error may be at most twice that of the same form in the same dtype, whose products round their operands alike.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.gpu.capture import capture
from tests.helpers import relative_error
from torch import Tensor, library

from ccq.ops.query import KeyStatistics, l2_normalize
from ccq.ops.reads import exact_query, exponential_query, richardson_query

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from ccq.ops.reads.covariance import operator  # noqa: E402

OPERATORS = {"richardson": richardson_query, "exact": exact_query, "exponential": exponential_query}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
by_name = pytest.mark.parametrize("name", OPERATORS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
Results = dict[str, Tensor]


def make_case(rows: int, tokens: int, size: int, *, sequences: int | None = None, mean: float = 0.1) -> Results:
    """Numbers of bfloat16 in float64: q, k with a shared mean, and a state of 9 earlier keys."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16().double()

    sequences = rows if sequences is None else sequences
    earlier = l2_normalize(normal(sequences, 2, 9, size) + 0.5).float().double()
    return {
        "q": normal(rows, tokens, 2, size),
        "k": (normal(rows, tokens, 2, size) + mean).bfloat16().double(),
        "gate": torch.rand(rows, tokens, 2, device="cuda").bfloat16().double(),
        "second_moment": (earlier.mT @ earlier).float().double(),
        "total": earlier.sum(-2).float().double(),
    }


def run(name: str, case: Results, dtype: torch.dtype, backend: str, want: tuple[str, ...], **options: Any) -> Results:
    """Outputs, and gradients of a random linear function of those in `want`."""
    states = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {x: value.to(dtype if x in "qk" else states).requires_grad_() for x, value in case.items()}
    count = torch.full((len(case["total"]),), 9, device="cuda")
    result = OPERATORS[name](
        leaves["q"],
        leaves["k"],
        leaves["gate"],
        statistics=KeyStatistics(leaves["second_moment"], leaves["total"], count),
        backend=backend,
        **options,
    )
    outputs = {"query": result.query, "correction": result.correction, **result.statistics._asdict()}
    count = outputs.pop("count")
    random = torch.Generator("cuda").manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device="cuda")
    for output, value in outputs.items():
        weight = torch.randn(value.shape, generator=random, dtype=torch.float64, device="cuda")
        weight = weight + weight.mT if output == "second_moment" else weight
        loss = loss + (value.double() * weight).sum() if output in want else loss
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        outputs[f"d_{leaf}"] = (gradient + gradient.mT) / 2 if leaf == "second_moment" else gradient
    return {output: x.detach() for output, x in {**outputs, "count": count}.items()}


def check(name: str, case: Results, dtype: torch.dtype, want: tuple[str, ...], **options: Any) -> Results:
    actual = run(name, case, dtype, "triton", want, **options)
    plain = run(name, case, dtype, "torch", want, **options)
    exact = run(name, case, torch.float64, "torch", want, **options)
    assert torch.equal(actual["count"], exact["count"])
    assert actual["query"].dtype == actual["d_q"].dtype == actual["d_k"].dtype == dtype
    failures = []
    for output, value in exact.items():
        if output == "count" or value.norm() < 1e-9:
            continue
        error = relative_error(actual[output], value)
        allowed = max(2 * relative_error(plain[output], value), 5e-6)
        print(f"{name} {dtype} {output}: {error:.1e}, allowed {allowed:.1e}")
        if not error <= allowed:
            failures.append(f"{output}: {error:.2e}, allowed {allowed:.2e}")
    assert not failures, "; ".join(failures)
    return actual


@pytest.mark.parametrize("size", [64, 128])
@by_dtype
@by_name
def test_values_and_gradients(name: str, dtype: torch.dtype, size: int) -> None:
    """The query's gradients, then those of the correction, which is what is small; then a large common mean."""
    case = make_case(2, 300, size)
    check(name, case, dtype, ("query", "second_moment", "total"))
    if size == 64:
        check(name, case, dtype, ("correction",))
        check(name, make_case(2, 300, size, mean=4.0), dtype, ("query",))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 1000])
@by_name
def test_every_length(name: str, tokens: int) -> None:
    check(name, make_case(2 if tokens > 50 else 12, tokens, 64), torch.bfloat16, ("query",))


@by_dtype
@by_name
def test_packed_documents(name: str, dtype: torch.dtype) -> None:
    boundaries = torch.tensor([0, 0, 5, 70, 71, 400, 400], device="cuda")
    check(name, make_case(1, 400, 64, sequences=6), dtype, ("query", "second_moment"), cu_seqlens=boundaries)


@by_dtype
@by_name
def test_padding(name: str, dtype: torch.dtype) -> None:
    mask = torch.zeros(3, 200, dtype=torch.bool, device="cuda")
    mask[0, 3:150], mask[1, 100:], mask[2, :70] = True, True, True
    case = make_case(3, 200, 64)
    actual = check(name, case, dtype, ("query", "second_moment"), mask=mask)
    for output in ("correction", "d_k", "d_gate"):
        assert not actual[output][~mask].any(), output
    dirty = {x: value.clone() for x, value in case.items()}
    for x in "qk":
        dirty[x][~mask] = math.nan
    found = run(name, dirty, dtype, "triton", ("query", "second_moment"), mask=mask)
    for output, value in actual.items():
        part: Any = mask if output == "query" else slice(None)
        assert torch.equal(found[output][part], value[part]), output


@pytest.mark.parametrize("normalize", [False, "queries"])
@by_dtype
@by_name
def test_unit_keys_are_read_where_they_are(name: str, dtype: torch.dtype, normalize: bool | str) -> None:
    case = make_case(2, 320, 64)
    case["k"] = l2_normalize(case["k"]).bfloat16().double()
    want = ("query", "correction", "second_moment", "total")
    found = check(name, case, dtype, want, normalize=normalize)
    # Packed, the same sequences are copied.
    packed = case | {x: case[x].flatten(0, 1)[None] for x in ("q", "k", "gate")}
    boundaries = torch.tensor([0, 320, 640], device="cuda")
    copied = run(name, packed, dtype, "triton", want, normalize=normalize, cu_seqlens=boundaries)
    for output, value in found.items():
        assert torch.equal(copied[output].view(value.shape), value), output


@pytest.mark.parametrize("normalize", [False, "keys", "queries"])
@by_name
def test_lengths_of_q_and_k(name: str, normalize: bool | str) -> None:
    case = make_case(2, 200, 64)
    if normalize != "keys":
        # Sigma below 1, for which the number of terms and steps is right.
        case["k"] = (case["k"] / case["k"].norm(dim=-1).max()).bfloat16().double()
        case["second_moment"], case["total"] = case["second_moment"] * 0, case["total"] * 0
    check(name, case, torch.bfloat16, ("query", "second_moment"), normalize=normalize)


@by_name
def test_the_query_can_come_back_in_float32(name: str) -> None:
    case = make_case(2, 200, 64)
    leaves = [case[x].bfloat16() for x in ("q", "k", "gate")]
    wide = OPERATORS[name](*leaves, query_dtype=torch.float32)
    change = l2_normalize(leaves[0]) - wide.query
    assert wide.query.dtype == torch.float32
    assert relative_error(change, leaves[2].float().unsqueeze(-1) * wide.correction) < 1e-5


@by_name
def test_a_gate_of_zero_and_equal_keys(name: str) -> None:
    case = {x: value.bfloat16() for x, value in make_case(1, 500, 64).items()}
    zero = torch.zeros_like(case["gate"])
    assert torch.equal(OPERATORS[name](case["q"], case["k"], zero, normalize="keys").query, case["q"])
    nothing = OPERATORS[name](case["q"], case["k"], zero, query_dtype=torch.float32)
    assert relative_error(nothing.query, l2_normalize(case["q"])) < 1e-6
    leaves = [case[x].requires_grad_() for x in ("q", "k", "gate")]
    equal = OPERATORS[name](leaves[0], leaves[1][:, :1].expand_as(leaves[1]), leaves[2])
    assert equal.correction.abs().max() < torch.finfo(torch.bfloat16).eps
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(equal.query.sum(), leaves))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the graph is captured on its own stream
@by_name
def test_a_cuda_graph_captures_forward_and_backward(name: str) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    cases = [{x: value.bfloat16() for x, value in make_case(2, 300, 64).items()} for _ in range(2)]
    static = [cases[0][x].clone().requires_grad_() for x in ("q", "k", "gate")]
    dy = torch.randn(2, 300, 2, 64, device="cuda").bfloat16()

    def step() -> tuple[Tensor, ...]:
        result = OPERATORS[name](*static, return_correction=False)
        return (result.query, *result.statistics, *torch.autograd.grad(result.query, static, dy))

    graph, outputs = capture(step)
    for case in cases:
        with torch.no_grad():
            for x, which in zip(static, ("q", "k", "gate"), strict=True):
                x.copy_(case[which])
        graph.replay()
        for captured, eager in zip(outputs, step(), strict=True):
            assert torch.equal(captured, eager)


@by_name
def test_split_prefill(name: str) -> None:
    case = {x: value.bfloat16() for x, value in make_case(2, 200, 64).items()}
    exact = OPERATORS[name](*(case[x].double() for x in ("q", "k", "gate")))
    statistics, parts = None, []
    for part in torch.arange(200).split([1, 63, 100, 34, 1, 1]):
        pieces = (case[x][:, part[0] : part[-1] + 1] for x in ("q", "k", "gate"))
        result = OPERATORS[name](*pieces, statistics=statistics)
        statistics = result.statistics
        parts.append(result.correction)
    whole = OPERATORS[name](*(case[x] for x in ("q", "k", "gate")))
    error, allowed = (relative_error(x, exact.correction) for x in (torch.cat(parts, 1), whole.correction))
    assert error <= 1.5 * allowed
    assert statistics.count.tolist() == [200, 200]


@pytest.mark.parametrize("function", [([1.0, 0.5], 0), ([], 4)])
def test_the_operator_keeps_its_promises(function: tuple[list[float], int]) -> None:
    case = make_case(1, 70, 64)
    rows = [case[x].bfloat16().requires_grad_() for x in ("q", "k", "gate")]
    states = [case[x].float().requires_grad_() for x in ("second_moment", "total")]
    count = torch.full((1,), 9, device="cuda")
    arguments = (*rows, *states, count, None, None, *function, True, True, True, False)
    library.opcheck(operator.covariance_function.overload, arguments, atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_generated_code_around_it_agrees() -> None:
    torch._dynamo.reset()
    torch.utils.deterministic.fill_uninitialized_memory = False
    weight = (torch.randn(128, 3 * 128, device="cuda") / 12).requires_grad_()
    hidden = torch.randn(2, 100, 128, device="cuda")

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ weight).unflatten(-1, (2, 192)).split(64, dim=-1)
        for read in OPERATORS.values():
            q = read(q, k, q.mean(-1).sigmoid(), return_correction=False).query
        return (q * v.sigmoid()).flatten(2)

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        output = function(hidden, weight)
        results.append((output, *torch.autograd.grad(output.square().sum(), weight)))
    for eager, compiled in zip(*results, strict=True):
        assert relative_error(compiled, eager) < 1e-4
