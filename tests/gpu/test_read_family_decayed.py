"""The Triton kernels of ccq-decay and mesa on a GPU, in the configurations that users get.

Exact values come from the chunked forms in float64, which tests/ops/reads holds against the recurrences. In low
precision an error may be at most twice that of a plain routine with operands rounded to the dtype and sums in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.capture import capture
from tests.helpers import assert_close, relative_error
from tests.ops.reads.test_decayed_kernels import KINDS, Case, common_mean, make_case, run, yardstick
from torch import Tensor, library

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error allowed where the yardstick does not reach: a few roundings of the dtype."""


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


def check(case: Case, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Every output and gradient within the tolerance of the dtype."""
    given = case.to(dtype)
    actual = run(given, device="cuda", backend="triton", **options)
    exact = run(given.to(torch.float64), device="cuda", backend="torch", **options)
    failures = []
    for field, value in exact.items():
        error = relative_error(actual[field], value)
        print(f"{field}: {error:.2e}")
        close = (actual[field].double() - value.double()).norm() <= 1e-5
        if not (error <= TOLERANCE[dtype] or close):
            failures.append(f"{field}: {error:.2e}")
    assert not failures, "; ".join(failures)
    return actual


@pytest.mark.parametrize("kind", ["flat", "common mean"])
@pytest.mark.parametrize(
    ("dtype", "size"), [*((dtype, 64) for dtype in DTYPES), (torch.bfloat16, 128), (torch.float32, 128)], ids=name_of
)
@pytest.mark.parametrize("name", KINDS)
def test_errs_at_most_twice_the_yardstick(name: str, dtype: torch.dtype, size: int, kind: str) -> None:
    case = make_case(name, 2, 300, 2, size, seen=0, slow=0.1)
    case = common_mean(case) if kind == "common mean" else case
    given = case.to(dtype)
    actual = run(given, device="cuda", backend="triton", want=("query",))
    exact = run(given.to(torch.float64), device="cuda", backend="torch", want=("query",))
    assert actual["d_q"].dtype == actual["d_k"].dtype == dtype
    assert actual["correction"].dtype == torch.float32
    failures = []
    for field, value in yardstick(case, dtype).items():
        error, yard = relative_error(actual[field], exact[field]), relative_error(value, exact[field])
        print(f"{field}: {error:.2e} against {yard:.2e}")
        # Where rounding is all that is left of float32, twice that of another order of sums is too narrow.
        if not error <= max(2 * yard, 5e-6 if dtype == torch.float32 else 0.0):
            failures.append(f"{field}: {error:.2e} against {yard:.2e}")
    assert not failures, "; ".join(failures)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 2049])
@pytest.mark.parametrize("name", KINDS)
def test_every_length(name: str, tokens: int) -> None:
    check(make_case(name, 2, tokens, 2, 64, slow=0.02), torch.bfloat16, want=("query",))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", KINDS)
def test_statistics_and_their_gradients(name: str, dtype: torch.dtype) -> None:
    check(make_case(name, 2, 200, 2, 64, slow=0.2), dtype)


@pytest.mark.parametrize("normalize", [False, "keys", "queries"])
@pytest.mark.parametrize("name", KINDS)
def test_queries_and_keys_as_they_are(name: str, normalize: bool | str) -> None:
    case = make_case(name, 2, 100, 2, 64, seen=0)
    case = case.replace(k=case.tensors["k"] / 8, q=case.tensors["q"] / 8)
    check(case, torch.bfloat16, normalize=normalize, want=("query",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("name", KINDS)
def test_packed_documents(name: str, dtype: torch.dtype) -> None:
    boundaries = [0, 0, 5, 5, 70, 71, 300, 300]
    case = make_case(name, 1, 300, 2, 64, sequences=len(boundaries) - 1)
    check(case, dtype, cu_seqlens=torch.tensor(boundaries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("name", KINDS)
def test_padding(name: str, dtype: torch.dtype) -> None:
    mask = torch.tensor([[0] * 3 + [1] * 60 + [0] * 87, [0] * 64 + [1] * 86, [0] * 150, [1] * 150])
    real = mask.bool()
    case = make_case(name, 4, 150, 2, 64)
    actual = check(case, dtype, mask=mask)
    for gradient in ("d_q", "d_k", "d_log_decay"):
        assert not actual[gradient][~real].any(), gradient
    dirty = case.replace(**{n: case.tensors[n].masked_fill(~real[..., None, None], float("nan")) for n in ("q", "k")})
    found = run(dirty.to(dtype), device="cuda", backend="triton", mask=mask)
    for field, value in actual.items():
        assert torch.equal(found[field], value), field


@pytest.mark.parametrize("name", KINDS)
def test_small_and_uneven_heads(name: str) -> None:
    check(make_case(name, 1, 100, 3, 40), torch.bfloat16)
    check(make_case(name, 1, 40, 1, 96), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("name", KINDS)
def test_split_prefill(name: str, dtype: torch.dtype) -> None:
    case = make_case(name, 2, 200, 2, 64, seen=0).to(dtype, "cuda")
    exact = case.to(torch.float64, "cuda").call(backend="torch")
    state, parts = None, []
    for part in (slice(0, 1), slice(1, 64), slice(64, 199), slice(199, 200)):
        cut = {n: x if n == "ridge" else x[:, part] for n, x in case.tensors.items()}
        result = Case(name, cut, state).call()
        state = tuple(result.statistics)
        parts.append(result.correction)
    assert state is not None
    assert_close("correction", torch.cat(parts, 1), exact.correction, TOLERANCE[dtype])
    for field, value in exact.statistics._asdict().items():
        assert_close(field, getattr(result.statistics, field), value, TOLERANCE[dtype])


@pytest.mark.parametrize("name", KINDS)
def test_two_runs_are_bit_equal(name: str) -> None:
    case = make_case(name, 2, 1000, 2, 64, slow=0.1).to(torch.bfloat16)
    first, second = (run(case, device="cuda", backend="triton") for _ in range(2))
    for field, value in first.items():
        assert torch.equal(second[field], value), field


@pytest.mark.parametrize("name", KINDS)
def test_equal_and_zero_keys_stay_finite(name: str) -> None:
    case = make_case(name, 1, 500, 2, 64, seen=0, slow=0.01)
    for k in (case.tensors["k"][:, :1].expand_as(case.tensors["k"]), torch.zeros_like(case.tensors["k"])):
        for dtype in (torch.float32, torch.bfloat16):
            found = run(case.replace(k=k).to(dtype), device="cuda", backend="triton")
            assert all(torch.isfinite(value).all() for value in found.values())
            if name == "decay":
                assert found["correction"].abs().max() <= max(torch.finfo(dtype).eps, 6e-6)


def test_a_new_length_compiles_nothing() -> None:
    import triton

    def step(name: str, tokens: int) -> None:
        case = make_case(name, 2, tokens, 2, 64, seen=0)
        run(case.to(torch.bfloat16), device="cuda", backend="triton", want=("query",))

    for name in KINDS:
        step(name, 64)
        step(name, 100)
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **details: compiled.append(str(details.get("repr")))
    try:
        for name in KINDS:
            for tokens in (1, 17, 1000, 4096):
                step(name, tokens)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the graph is captured on its own stream
@pytest.mark.parametrize("name", KINDS)
def test_a_cuda_graph_captures_forward_and_backward(name: str) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    case = make_case(name, 2, 300, 2, 64).to(torch.bfloat16, "cuda")
    static = {n: x.clone().requires_grad_() for n, x in case.tensors.items()}
    dy = torch.randn(2, 300, 2, 64, device="cuda").bfloat16()

    def step() -> tuple[Tensor, ...]:
        result = Case(name, static, case.state).call(return_correction=False)
        return (result.query, *result.statistics, *torch.autograd.grad(result.query, list(static.values()), dy))

    graph, outputs = capture(step)
    for other in (case, case.replace(q=case.tensors["q"].flip(1), k=case.tensors["k"].flip(0))):
        with torch.no_grad():
            for n, x in static.items():
                x.copy_(other.tensors[n])
        graph.replay()
        for captured, eager in zip(outputs, step(), strict=True):
            assert torch.equal(captured, eager)


@pytest.mark.parametrize("name", KINDS)
def test_the_operators_keep_their_promises(name: str) -> None:
    from ccq.ops.reads.decay.operator import decay_read
    from ccq.ops.reads.mesa.operator import mesa_read

    case = make_case(name, 2, 70, 2, 64, parts=1).to(torch.bfloat16, "cuda")
    assert case.state is not None
    x = {n: t.requires_grad_() for n, t in case.tensors.items()}
    state = [t.requires_grad_() for t in case.state]
    decay = x["log_decay"].squeeze(-1).detach().requires_grad_()
    options: dict[str, Any] = {"atol": 1e-2, "rtol": 1e-2}
    if name == "decay":
        arguments = (x["q"], x["k"], x["gate"], decay, *state, None, None, True, True, True, False)
        library.opcheck(decay_read.overload, arguments, **options)
    else:
        arguments = (x["q"], x["k"], x["ridge"], decay, *state, None, None, 30, True, True, False)
        library.opcheck(mesa_read.overload, arguments, **options)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("arm", ["gla+ccq-decay-tiny", "gated-deltanet+mesa-tiny"])
def test_a_model_compiles_without_a_break_and_agrees(arm: str) -> None:
    from ccq.models import CCQForCausalLM, preset

    torch._dynamo.reset()
    sizes = {"num_layers": 1, "hidden_size": 64, "head_dim": 32, "value_head_dim": 32, "intermediate_size": 64}
    model = CCQForCausalLM(preset(arm, vocab_size=50, initializer_range=0.3, **sizes)).cuda()
    tokens = torch.randint(50, (2, 40), device="cuda")
    results = []
    for run_model in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        logits = run_model(tokens, use_cache=False).logits
        results.append((logits, torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    (logits, gradients), (compiled_logits, compiled_gradients) = results
    assert_close("logits", compiled_logits, logits, 1e-5)
    for (field, _), gradient, compiled in zip(model.named_parameters(), gradients, compiled_gradients, strict=True):
        assert_close(field, compiled, gradient, 1e-4)
