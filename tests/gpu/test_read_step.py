"""The Triton kernels of the read step on a GPU, in the configurations that users get.

Exact values come from the chunked form in float64, which tests/ops/query holds against the recurrence. In low precision
an error may be at most twice that of a plain routine with operands rounded to the dtype and sums in float32.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.gpu.capture import capture
from tests.helpers import assert_close, relative_error
from tests.ops.query.test_curvature_conditioned_query import (
    MASKS,
    Case,
    make_case,
    run,
    spread_keys,
    yardstick,
)
from torch import Tensor

from ccq.ops.query import (
    KeyStatistics,
    PackedKeyStatistics,
    curvature_conditioned_query,
    l2_normalize,
    update_and_read_,
)

pytest.importorskip("triton")
from ccq.ops.query import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (32, 64, 96, 128, 192, 256)
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 127, 1000)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error allowed where the yardstick does not reach: a few roundings of the dtype."""
GIB = 1 << 30


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


def check_against_yardstick(case: Case, dtype: torch.dtype) -> None:
    given, want = case.to(dtype), ("query", "correction")
    actual = run(given, backend="triton", device="cuda", want=want)
    exact = run(given.to(torch.float64), backend="torch", device="cuda", want=want)
    assert actual["query"].dtype == actual["d_q"].dtype == actual["d_k"].dtype == dtype
    assert actual["correction"].dtype == torch.float32
    failures = []
    for name, value in yardstick(case, dtype).items():
        if exact[name].norm() <= 1e-12:  # one key has no covariance: nothing to be relative to
            continue
        error, yard = relative_error(actual[name], exact[name]), relative_error(value, exact[name])
        if not error <= 2 * yard:
            failures.append(f"{name}: {error:.2e} against {yard:.2e}")
    assert not failures, "; ".join(failures)


def check_all(case: Case, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Every output and gradient within the tolerance of the dtype."""
    given = case.to(dtype)
    actual = run(given, backend="triton", device="cuda", **options)
    exact = run(given.to(torch.float64), backend="torch", device="cuda", **options)
    for name, value in exact.items():
        if name == "count":
            assert torch.equal(actual[name], value)
        else:
            assert_close(name, actual[name], value, TOLERANCE[dtype], floor=1e-5)
    return actual


@pytest.mark.parametrize("kind", ["flat", "common mean"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_size(dtype: torch.dtype, size: int, kind: str) -> None:
    check_against_yardstick(spread_keys(kind, make_case(2, 300, 2, size, seen=0)), dtype)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_length(dtype: torch.dtype, tokens: int) -> None:
    # More rows of short ones, so that an error is a mean over enough numbers.
    check_against_yardstick(make_case(2 if tokens > 50 else 12, tokens, 2, 64, seen=0), dtype)


@pytest.mark.parametrize("size", [40, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_statistics_and_their_gradients(dtype: torch.dtype, size: int) -> None:
    check_all(make_case(2, 300, 2, size), dtype)


@pytest.mark.parametrize(
    ("centred", "normalize"), [(False, True), (True, False), (False, False), (True, "keys"), (True, "queries")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_uncentred_and_raw(dtype: torch.dtype, centred: bool, normalize: bool | str) -> None:
    check_all(make_case(2, 200, 2, 64), dtype, centred=centred, normalize=normalize)


@pytest.mark.parametrize("normalize", ["queries", False])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_unit_keys_are_read_where_they_are(
    dtype: torch.dtype, size: int, normalize: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same kernels for both: others, which take dense rows only, add up in another order.
    monkeypatch.setattr(kernels, "copies_apart", lambda *_: False)
    case = make_case(2, 640, 2, size)
    case = case._replace(k=l2_normalize(case.k))
    found = check_all(case, dtype, normalize=normalize)
    # Packed, the same sequences are copied.
    packed = case._replace(**{name: getattr(case, name).flatten(0, 1)[None] for name in ("q", "k", "gate")})
    boundaries = torch.tensor([0, 640, 1280])
    copied = run(packed.to(dtype), backend="triton", device="cuda", normalize=normalize, cu_seqlens=boundaries)
    for name, value in found.items():
        assert torch.equal(copied[name].view(value.shape), value), name


@pytest.mark.parametrize("boundaries", [[0, 0, 16], [0, 5, 5, 70, 71, 400, 400], [0], [0, 0], [0, 1]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_packed_documents(dtype: torch.dtype, boundaries: list[int]) -> None:
    case = make_case(1, boundaries[-1], 2, 64, sequences=len(boundaries) - 1)
    check_all(case, dtype, cu_seqlens=torch.tensor(boundaries))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_padding(dtype: torch.dtype, kind: str) -> None:
    mask = torch.tensor(MASKS[kind])
    real = mask.bool()
    case = make_case(2, 70, 2, 64)
    actual = check_all(case, dtype, mask=mask)
    padded = l2_normalize(case.q.to(dtype))
    assert_close("padded query", actual["query"][~real], padded[~real], TOLERANCE[dtype])
    for name in ("correction", "d_q", "d_k", "d_gate"):
        assert not actual[name][~real].any(), name
    nan = case._replace(**{name: getattr(case, name).clone() for name in ("q", "k", "gate")})
    for x in nan[:3]:
        x[~real] = float("nan")
    dirty = run(nan.to(dtype), backend="triton", device="cuda", mask=mask)
    for name, value in actual.items():
        part: Any = real if name == "query" else slice(None)
        assert torch.equal(dirty[name][part], value[part]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_split_prefill(dtype: torch.dtype) -> None:
    case = make_case(2, 300, 2, 64, seen=0).to(dtype)
    exact = case.to(torch.float64)
    expected = curvature_conditioned_query(*exact[:3], return_correction=True, backend="torch")
    q, k, gate = (x.cuda() for x in case[:3])
    statistics, parts = None, []
    # The last pieces have one token, which the kernel of the decode step reads.
    for start, end in itertools.pairwise([0, 1, 64, 65, 250, 298, 299, 300]):
        pieces = (x[:, start:end] for x in (q, k, gate))
        result = curvature_conditioned_query(*pieces, statistics=statistics, return_correction=True)
        statistics = result.statistics
        parts.append(result.correction)
    assert_close("correction", torch.cat(parts, 1).cpu(), expected.correction, TOLERANCE[dtype])
    assert_close("second moment", statistics.second_moment.cpu(), expected.statistics.second_moment, TOLERANCE[dtype])
    assert_close("total", statistics.total.cpu(), expected.statistics.total, TOLERANCE[dtype])
    assert statistics.count.tolist() == [300, 300]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", [64, 256])
def test_two_runs_are_bit_equal(dtype: torch.dtype, size: int) -> None:
    case = make_case(2, 1000, 2, size).to(dtype)
    first, second = (run(case, backend="triton", device="cuda") for _ in range(2))
    for name, value in first.items():
        assert torch.equal(second[name], value), name


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_degenerate_keys(dtype: torch.dtype) -> None:
    case = make_case(1, 500, 2, 64, seen=0)
    equal = run(case._replace(k=case.k[:, :1].expand_as(case.k)).to(dtype), backend="triton", device="cuda")
    zero = run(case._replace(k=torch.zeros_like(case.k)).to(dtype), backend="triton", device="cuda")
    assert equal["correction"].abs().max() <= max(torch.finfo(dtype).eps, 50 * torch.finfo(torch.float32).eps)
    assert not zero["correction"].any()
    for found in (equal, zero):
        assert all(torch.isfinite(value).all() for value in found.values())


@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (2, 0, 2, 64)])
def test_nothing_in_gives_nothing_out_and_the_state_back(shape: tuple[int, ...]) -> None:
    case = make_case(*shape).to(torch.bfloat16)
    found = run(case, backend="auto", device="cuda")
    assert found["query"].shape == shape
    for name, field in zip(("second_moment", "total", "count"), case.statistics, strict=True):
        assert torch.equal(found[name], field)


def test_a_new_length_compiles_nothing() -> None:
    import triton

    def step(tokens: int) -> None:
        case = make_case(2, tokens, 2, 32, seen=0).to(torch.bfloat16)
        q, k, gate = (x.cuda().requires_grad_() for x in case[:3])
        curvature_conditioned_query(q, k, gate, backend="triton").query.sum().backward()

    for tokens in (100, 3000, 512):  # few and many tokens, and blocks that are all full
        step(tokens)
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **details: compiled.append(str(details.get("repr")))
    try:
        for tokens in (17, 64, 1000, 1024, 4096, 10_001, 32_768):
            step(tokens)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


def test_many_short_documents() -> None:
    documents = 40_000
    lengths = torch.randint(4, (documents,))
    boundaries = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    assert documents * 2 > 65_535
    case = make_case(1, int(boundaries[-1]), 2, 16, seen=0)
    results = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        inputs = [x.to("cuda", dtype).requires_grad_() for x in case[:3]]
        result = curvature_conditioned_query(
            *inputs, cu_seqlens=boundaries.cuda(), return_correction=True, backend=backend
        )
        gradients = torch.autograd.grad(result.query.square().sum() + result.correction.sum(), inputs)
        results.append((result.correction, result.statistics.second_moment, *gradients))
    for name, actual, expected in zip(("correction", "second moment", "d_q", "d_k", "d_gate"), *results, strict=True):
        assert_close(name, actual, expected, 1e-5)


def test_more_than_two_to_the_31_elements() -> None:
    rows, tokens, heads, size = 33, 1 << 17, 2, 256
    assert rows * tokens * heads * size > 1 << 31
    if torch.cuda.mem_get_info()[0] < 60 * GIB:
        pytest.skip("needs 60 GiB of free GPU memory")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would take longer than the test
    random = torch.Generator("cuda").manual_seed(0)
    shape = (rows, tokens, heads, size)
    q, k, dy = (torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gate = torch.rand(shape[:3], generator=random, device="cuda")
    # The last row, from its 131,000th token on, by the chunked form in float64.
    start, last = tokens - 72, slice(rows - 1, rows)
    key = l2_normalize(k[last, :start].double()).transpose(1, 2)
    statistics = KeyStatistics(key.mT @ key, key.sum(2), torch.tensor([start], dtype=torch.int64, device="cuda"))
    del key
    ends = [x[last, start:].double().requires_grad_() for x in (q, k, gate)]
    exact = curvature_conditioned_query(*ends, statistics=statistics, return_correction=True, backend="torch")
    expected = torch.autograd.grad((exact.query * dy[last, start:]).sum(), ends)

    with torch.no_grad():
        result = curvature_conditioned_query(q, k, gate, return_correction=True, backend="triton")
    assert_close("correction", result.correction[last, start:], exact.correction, 1e-2)
    assert_close("second moment", result.statistics.second_moment[last], exact.statistics.second_moment, 1e-3)
    assert result.statistics.count.tolist() == [tokens] * rows
    del result
    inputs = [x.requires_grad_() for x in (q, k, gate)]
    query = curvature_conditioned_query(*inputs, backend="triton").query
    gradients = torch.autograd.grad(query, inputs, dy)
    for name, gradient, value in zip(("d_q", "d_k", "d_gate"), gradients, expected, strict=True):
        assert_close(name, gradient[last, start:], value, 2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    case = make_case(2, 200, 2, 64).to(torch.bfloat16)
    first, second = (run(case, backend="auto", device=f"cuda:{index}") for index in range(2))
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert torch.cuda.current_device() == 0
    token = case._replace(**{name: getattr(case, name)[:, :1] for name in ("q", "k", "gate")})
    q, k, gate = (x.to("cuda:1") for x in token[:3])
    packed = PackedKeyStatistics.of(KeyStatistics(*(x.to("cuda:1") for x in token.statistics)))
    expected = curvature_conditioned_query(*token[:3], statistics=token.statistics, backend="reference")
    assert_close("query", update_and_read_(q, k, gate, packed).query.cpu(), expected.query, 1e-2)
    moment = packed.unpacked().second_moment.cpu()
    assert_close("second moment", moment, expected.statistics.second_moment, 1e-5)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the graph is captured on its own stream
def test_a_cuda_graph_captures_forward_and_backward() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    cases = [make_case(2, 300, 2, 64, seed=seed).to(torch.bfloat16) for seed in range(2)]
    static = [x.cuda().requires_grad_() for x in cases[0][:3]]
    statistics = KeyStatistics(*(x.cuda() for x in cases[0].statistics))
    dy = torch.randn(2, 300, 2, 64, device="cuda").bfloat16()

    def step() -> tuple[Tensor, ...]:
        result = curvature_conditioned_query(*static, statistics=statistics)
        return (result.query, *result.statistics, *torch.autograd.grad(result.query, static, dy))

    graph, outputs = capture(step)
    for case in cases:
        with torch.no_grad():
            for x, new in zip(static, case[:3], strict=True):
                x.copy_(new)
        graph.replay()
        for captured, eager in zip(outputs, step(), strict=True):
            assert torch.equal(captured, eager)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", [64, 71, 96, 256])
def test_a_cuda_graph_replays_decode_steps(size: int, dtype: torch.dtype) -> None:
    """Kernels that overwrite packed statistics, replayed as called eagerly, bit for bit; and near the recurrence."""
    tokens = 20
    case = make_case(3, tokens, 2, size).to(dtype)
    exact = case.to(torch.float64)
    expected = curvature_conditioned_query(
        *exact[:3], statistics=exact.statistics, return_correction=True, backend="reference"
    )
    start = PackedKeyStatistics(*(x.cuda() for x in PackedKeyStatistics.of(case.statistics)))
    replayed, eager = (PackedKeyStatistics(*(x.clone() for x in start)) for _ in range(2))
    static = [x[:, :1].cuda().contiguous() for x in case[:3]]

    def step() -> tuple[Tensor, ...]:
        result = update_and_read_(*static, replayed, return_correction=True)
        assert result.correction is not None
        return result.query, result.correction

    graph, outputs = capture(step)
    for x, before in zip(replayed, start, strict=True):
        x.copy_(before)
    corrections = []
    for i in range(tokens):
        for x, source in zip(static, case[:3], strict=True):
            x.copy_(source[:, i : i + 1])
        graph.replay()
        result = update_and_read_(*static, eager, return_correction=True)
        assert torch.equal(result.query, outputs[0])
        corrections.append(outputs[1].clone())
    for a, b in zip(eager, replayed, strict=True):
        assert torch.equal(a, b)
    # Keys are read as they were given and everything else is float32, whatever their dtype.
    assert_close("correction", torch.cat(corrections, 1).cpu(), expected.correction, 5e-6)
    last = replayed.unpacked()
    assert_close("second moment", last.second_moment.cpu(), expected.statistics.second_moment, 5e-6)
    assert last.count.tolist() == [9 + tokens] * 3


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_compiles_without_a_break_and_agrees(padded: bool) -> None:
    from ccq.models import CCQForCausalLM, preset

    torch._dynamo.reset()
    sizes = {"num_layers": 1, "hidden_size": 64, "head_dim": 32, "value_head_dim": 32, "intermediate_size": 64}
    config = preset("gla+ccq-tiny", vocab_size=50, initializer_range=0.3, **sizes)
    model = CCQForCausalLM(config).cuda()
    tokens = torch.randint(50, (2, 40), device="cuda")
    mask = None
    if padded:
        mask = torch.ones(2, 40, device="cuda")
        mask[0, :7] = 0
    results = []
    # Generating code for the loops of the write rule takes minutes; the next test does it for the read step.
    for run_model in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        output = run_model(tokens, attention_mask=mask, use_cache=False)
        logits = output.logits if mask is None else output.logits[mask.bool()]
        results.append((logits, torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    (logits, gradients), (compiled_logits, compiled_gradients) = results
    assert_close("logits", compiled_logits, logits, 1e-5)
    for (name, _), gradient, compiled in zip(model.named_parameters(), gradients, compiled_gradients, strict=True):
        assert_close(name, compiled, gradient, 1e-4)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_generated_code_around_the_read_step_agrees() -> None:
    torch._dynamo.reset()
    torch.utils.deterministic.fill_uninitialized_memory = False
    hidden = torch.randn(2, 100, 128, device="cuda")
    weights = [(torch.randn(128, 3 * 128, device="cuda") / 12).requires_grad_() for _ in range(2)]

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        for weight in (first, second):
            q, k, v = (x @ weight).unflatten(-1, (2, 192)).split(64, dim=-1)
            result = curvature_conditioned_query(q, k, q.mean(-1).sigmoid())
            x = x + (result.query * v.sigmoid()).flatten(2)
        return x

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        output = function(hidden, *weights)
        results.append((output, *torch.autograd.grad(output.square().sum(), weights)))
    for eager, compiled in zip(*results, strict=True):
        assert_close("compiled", compiled, eager, 1e-4)
