"""flash-linear-attention's kernels behind the write rules on a GPU, in the configurations that users get.

Exact values come from the chunked form in float64, which tests/ops holds against the recurrence. An error may be at
most twice that of the yardstick: the chunked form in PyTorch with the operands of its matrix products rounded to the
dtype and sums in float32; or that of a float32 sum. Where the package multiplies float32 operands it does so in tf32,
which cuts them to the mantissa of float16 without rounding; so does the yardstick, in float16 and in the triangular
systems of the gated delta rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.capture import capture
from tests.helpers import assert_close, relative_error
from tests.ops.fixtures.write_rules import SINGLE, Inputs, WriteRuleBattery
from tests.ops.gated_delta_rule import test_gated_delta_rule
from tests.ops.gla import test_gla
from tests.ops.ssd import test_ssd
from tests.ops.test_flash_linear_attention import REPLACED
from torch import Tensor, library
from torch.utils._python_dispatch import TorchDispatchMode

from ccq.ops import flash_linear_attention
from ccq.ops.gated_delta_rule import chunked as gated_delta_rule_chunked
from ccq.ops.gated_delta_rule import fused as gated_delta_rule_fused
from ccq.ops.gla import fused as gla_fused
from ccq.ops.ssd import fused as ssd_fused

pytest.importorskip("fla")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RULES: dict[str, WriteRuleBattery] = {
    "gla": test_gla.TestGatedLinearAttention(),
    "gated_delta_rule": test_gated_delta_rule.TestGatedDeltaRule(),
    "ssd": test_ssd.TestStateSpaceDuality(),
    "ssd in groups": test_ssd.TestSharedKeys(),
}
OPERATORS: dict[str, Any] = {
    "gla": gla_fused,
    "gated_delta_rule": gated_delta_rule_fused,
    "ssd": ssd_fused,
    "ssd in groups": ssd_fused,
}
DTYPES = (torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 15, 64, 65, 127, 1000)
SIZES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 512), (32, 32), (96, 48), (192, 384))
HALF = ("q", "k", "v")
ROUNDINGS = 3
"""In units of the dtype: the relative error allowed where there is no yardstick, and to the decay gradients of the
gated delta rule, which the package forms as differences of sums, of states rounded to the dtype (seen: up to 2.6)."""
CANCELLING = {torch.float16: 20, torch.bfloat16: 10}
"""The same for gradients that are small differences of large sums (seen: up to 18.4 and 7.7)."""
ROUNDED = 0.5
"""The same for the decay gradients of ssd: the package makes them of the gradients of the scores rounded to the dtype,
the yardstick of unrounded ones (seen, in Triton's interpreter: up to 0.3)."""

by_rule = pytest.mark.parametrize("rule", RULES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def cut(x: Tensor) -> Tensor:
    """float32 as matrix units take it: tf32, the ten first bits of the mantissa, the others cut off."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


class RoundedProducts(TorchDispatchMode):
    """Rounds the float32 operands of matrix products to a dtype; where `solving`, and for float16, to tf32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.solving = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_):
            *sum_so_far, left, right = args
            # The blocks of 16 on the diagonal are solved without matrix products.
            if not self.solving or left.shape[-1] >= 16:
                args = (*sum_so_far, self.rounded(left), self.rounded(right))
        return function(*args, **(kwargs or {}))

    def rounded(self, x: Tensor) -> Tensor:
        return cut(x) if self.solving or self.dtype == torch.float16 else x.to(self.dtype).to(x.dtype)


@pytest.fixture
def yardstick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Inputs]:
    """Runs a rule in PyTorch on a CPU with rounded products."""

    def run(rule: str, inputs: Inputs, *grads: Tensor, dtype: torch.dtype, **options: Any) -> Inputs:
        mode = RoundedProducts(dtype)
        invert = gated_delta_rule_chunked._inverse

        def inverse(couplings: Tensor) -> Tensor:
            mode.solving = True
            found = invert(couplings)
            mode.solving = False
            return found

        with monkeypatch.context() as patch, mode:
            patch.setattr(gated_delta_rule_chunked, "_inverse", inverse)
            return RULES[rule].run(inputs, *grads, backend="torch", **options)

    return run


def make(rule: str, rows: int, tokens: int, size: int, value_size: int, dtype: torch.dtype, **options: Any) -> Inputs:
    """Inputs on a CPU: q, k, v in `dtype`, gates and state float32."""
    return halved(RULES[rule].inputs(rows, tokens, size=size, value_size=value_size, **options), dtype)


def halved(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype if name in HALF else torch.float32) for name, x in inputs.items()}


def gradients(rule: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Of output (exact in the dtype of v) and state, on a CPU."""
    output, state = RULES[rule].random_gradients(inputs)
    return output.to(inputs["v"].dtype), state.float()


def on_gpu(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    return {name: x.to("cuda", dtype or x.dtype) for name, x in inputs.items()}


def run(rule: str, inputs: Inputs, *grads: Tensor | None, backend: str = "fla", **options: Any) -> Inputs:
    """Output, state and gradients by the kernels, on a CPU."""
    options = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
    moved = [x if x is None else x.cuda() for x in grads]
    found = RULES[rule].run(on_gpu(inputs), *moved, backend=backend, **options)
    return {name: x.cpu() for name, x in found.items()}


def exactly(rule: str, inputs: Inputs, *grads: Tensor | None, **options: Any) -> Inputs:
    """The same in float64."""
    double = {name: x.double() for name, x in inputs.items()}
    return run(rule, double, *grads, backend="torch", **options)


def check(
    rule: str,
    inputs: Inputs,
    yardstick: Callable[..., Inputs],
    dtype: torch.dtype,
    allowances: dict[str, float] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Every output and gradient against the yardstick; `allowances` are in units of the dtype."""
    if allowances is None:
        allowances = {"gradient of log_decay": {"gla": 0, "gated_delta_rule": ROUNDINGS}.get(rule, ROUNDED)}
    unit = torch.finfo(dtype).eps
    grads = gradients(rule, inputs)
    actual, exact = run(rule, inputs, *grads, **options), exactly(rule, inputs, *grads, **options)
    yard = yardstick(rule, inputs, *grads, dtype=dtype, **options)
    failures = []
    for name, value in exact.items():
        assert actual[name].dtype == yard[name].dtype
        assert torch.isfinite(actual[name]).all(), name
        if value.norm() <= 1e-12:
            continue
        error = relative_error(actual[name], value)
        allowed = max(2 * relative_error(yard[name], value), allowances.get(name, 0) * unit, SINGLE)
        print(f"{name}: relative error {error:.2e} (allowed {allowed:.2e})")
        if not error <= allowed:
            failures.append(f"{name}: {error:.2e} against {allowed:.2e}")
    assert not failures, "; ".join(failures)
    return actual


def check_closely(rule: str, actual: Inputs, expected: Inputs, dtype: torch.dtype) -> None:
    for name, value in expected.items():
        assert_close(name, actual[name], value, ROUNDINGS * torch.finfo(dtype).eps, floor=1e-5)


@pytest.mark.parametrize("tokens", LENGTHS)
@by_dtype
@by_rule
def test_every_length(rule: str, dtype: torch.dtype, tokens: int, yardstick: Callable[..., Inputs]) -> None:
    # More rows of short ones, so that an error is a mean over enough numbers.
    check(rule, make(rule, 2 if tokens > 50 else 12, tokens, 64, 128, dtype), yardstick, dtype)


@pytest.mark.parametrize(("size", "value_size"), SIZES)
@by_rule
def test_every_size(rule: str, size: int, value_size: int, yardstick: Callable[..., Inputs]) -> None:
    check(rule, make(rule, 2, 200, size, value_size, torch.bfloat16), yardstick, torch.bfloat16)


@pytest.mark.parametrize("tokens", [15, 127, 1000])
@pytest.mark.parametrize("decay", ["to -3 a token", "none", "0 and -50"])
@by_dtype
@by_rule
def test_extreme_decay(
    rule: str, dtype: torch.dtype, decay: str, tokens: int, yardstick: Callable[..., Inputs]
) -> None:
    check(rule, make(rule, 2, tokens, 64, 64, dtype, decay=decay), yardstick, dtype)


@pytest.mark.parametrize(("groups", "heads"), [(1, 3), (1, 32), (4, 8)])
@by_dtype
def test_heads_that_share_keys(dtype: torch.dtype, groups: int, heads: int, yardstick: Callable[..., Inputs]) -> None:
    check("ssd", halved(test_ssd.grouped_inputs(2, 200, groups, heads, 128, 64), dtype), yardstick, dtype)


@by_dtype
def test_tokens_that_erase_the_state(dtype: torch.dtype, yardstick: Callable[..., Inputs]) -> None:
    inputs = make("ssd in groups", 2, 300, 64, 64, dtype)
    inputs["log_decay"] /= 30
    inputs["log_decay"][:, 10::50] = -1e6
    check("ssd in groups", inputs, yardstick, dtype)


@pytest.mark.parametrize("strength", [0.98, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.02])
@by_dtype
def test_equal_keys(dtype: torch.dtype, spread: float, strength: float, yardstick: Callable[..., Inputs]) -> None:
    inputs = make("gated_delta_rule", 2, 300, 64, 64, dtype, decay="none")
    keys = inputs["k"].float()
    inputs["k"] = F.normalize(keys[:, :1] + spread * torch.randn(keys.shape), dim=-1).to(dtype)
    inputs["beta"] = torch.full_like(inputs["beta"], strength)
    names = ("output", "final state", *(f"gradient of {name}" for name in inputs))
    # A value that the next key overwrites, and how much of it does, have next to no effect.
    small = {"gradient of v": CANCELLING[dtype], "gradient of beta": CANCELLING[dtype]}
    check("gated_delta_rule", inputs, yardstick, dtype, dict.fromkeys(names, ROUNDINGS) | small)


@pytest.mark.parametrize(
    "boundaries", [[0, 0, 16], [0, 5, 5, 70, 71, 400, 400], [0, 64, 128], [0, 1], [0, 0], [0]], ids=str
)
@by_dtype
@by_rule
def test_packed_documents_equal_single_ones(rule: str, dtype: torch.dtype, boundaries: list[int]) -> None:
    inputs = make(rule, 1, boundaries[-1], 64, 64, dtype, sequences=len(boundaries) - 1)
    grads = gradients(rule, inputs)
    for integers in (torch.int32, torch.int64):
        actual = run(rule, inputs, *grads, cu_seqlens=torch.tensor(boundaries, dtype=integers))
        check_closely(rule, actual, exactly(rule, inputs, *grads, cu_seqlens=torch.tensor(boundaries)), dtype)
    for n, (begin, end) in enumerate(itertools.pairwise(boundaries)):
        if end - begin > 1:
            document = {name: x[n : n + 1] if name == "state" else x[:, begin:end] for name, x in inputs.items()}
            alone = run(rule, document, grads[0][:, begin:end], grads[1][n : n + 1])
            for name, value in alone.items():
                here: Any = slice(n, n + 1) if name in ("final state", "gradient of state") else (0, slice(begin, end))
                assert torch.equal(actual[name][here], value if isinstance(here, slice) else value[0]), name


@by_dtype
@by_rule
def test_padding_on_either_side(rule: str, dtype: torch.dtype) -> None:
    rows, tokens = 5, 133
    runs = [(0, 130), (3, 133), (2, 132), (133, 133), (1, 66)]
    inputs = make(rule, rows, tokens, 64, 64, dtype)
    grads = gradients(rule, inputs)
    mask = torch.zeros(rows, tokens, dtype=torch.int64)
    for row, (begin, end) in enumerate(runs):
        mask[row, begin:end] = 1
    for name in HALF:
        inputs[name][mask == 0] = float("nan")
    inputs["log_decay"][mask == 0] = -7
    actual = run(rule, inputs, *grads, mask=mask)
    for row, (begin, end) in enumerate(runs):
        alone = {
            name: x[row : row + 1] if name == "state" else x[row : row + 1, begin:end] for name, x in inputs.items()
        }
        expected = exactly(rule, alone, grads[0][row : row + 1, begin:end], grads[1][row : row + 1])
        for name, x in actual.items():
            if name in ("final state", "gradient of state"):
                assert_close(f"row {row}: {name}", x[row : row + 1], expected[name], ROUNDINGS * torch.finfo(dtype).eps)
            else:
                assert_close(
                    f"row {row}: {name}",
                    x[row : row + 1, begin:end],
                    expected[name],
                    ROUNDINGS * torch.finfo(dtype).eps,
                )
                assert not x[row, :begin].any(), f"row {row}: {name} in the left padding"
                assert not x[row, end:].any(), f"row {row}: {name} in the right padding"


@by_dtype
@by_rule
def test_split_prefill(rule: str, dtype: torch.dtype) -> None:
    tokens = 300
    inputs = make(rule, 2, tokens, 64, 64, dtype)
    expected = exactly(rule, inputs)
    with torch.no_grad():
        moved = on_gpu(inputs)
        state, parts = moved["state"], []
        # The pieces of one token are read by the kernel of the recurrence.
        for begin, end in itertools.pairwise([0, 1, 64, 65, 67, 250, 298, 299, 300]):
            piece = {name: x[:, begin:end] for name, x in moved.items() if name != "state"}
            output, state = type(RULES[rule]).rule(**piece, state=state)
            parts.append(output)
    assert_close("output", torch.cat(parts, 1).cpu(), expected["output"], ROUNDINGS * torch.finfo(dtype).eps)
    assert_close("state", state.cpu(), expected["final state"], ROUNDINGS * torch.finfo(dtype).eps)


@by_dtype
@by_rule
def test_gradients_through_a_split(rule: str, dtype: torch.dtype) -> None:
    inputs = make(rule, 2, 130, 64, 64, dtype)
    grads = gradients(rule, inputs)
    leaves = {name: x.requires_grad_() for name, x in on_gpu(inputs).items()}
    state, parts = leaves["state"], []
    for begin, end in itertools.pairwise([0, 1, 66, 130]):
        piece = {name: x[:, begin:end] for name, x in leaves.items() if name != "state"}
        output, state = type(RULES[rule]).rule(**piece, state=state)
        parts.append(output)
    torch.autograd.backward((torch.cat(parts, 1), state), [x.cuda() for x in grads])
    found = {f"gradient of {name}": x.grad.cpu() for name, x in leaves.items() if x.grad is not None}
    expected = exactly(rule, inputs, *grads)
    check_closely(rule, found, {name: expected[name] for name in found}, dtype)
    assert len(found) == len(leaves)


@pytest.mark.parametrize("arrives", ["output", "final state"])
@by_rule
def test_gradient_from_one_result_alone(rule: str, arrives: str) -> None:
    inputs = make(rule, 2, 100, 64, 64, torch.bfloat16)
    grad_output, grad_final = gradients(rule, inputs)
    grads = (grad_output, None) if arrives == "output" else (None, grad_final)
    check_closely(rule, run(rule, inputs, *grads), exactly(rule, inputs, *grads), torch.bfloat16)


@by_rule
def test_a_missing_state_is_a_state_of_zeros(rule: str) -> None:
    inputs = make(rule, 2, 100, 64, 64, torch.bfloat16)
    grads = gradients(rule, inputs)
    zero = run(rule, {**inputs, "state": torch.zeros_like(inputs["state"])}, *grads)
    del inputs["state"]
    for name, value in run(rule, inputs, *grads).items():
        assert torch.equal(value, zero[name]), name


@by_rule
def test_strided_and_expanded_tensors(rule: str) -> None:
    inputs = make(rule, 2, 70, 64, 64, torch.bfloat16)
    inputs["k"], inputs["state"] = inputs["k"][:, :1].expand_as(inputs["q"]), inputs["state"].mT.contiguous().mT
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    one = torch.ones(())
    grads = (one.bfloat16().expand(inputs["v"].shape), one.expand(inputs["state"].shape))
    plain = {name: x.contiguous() for name, x in inputs.items()}
    expected = run(rule, plain, *(x.contiguous() for x in grads))
    for name, value in run(rule, inputs, *grads).items():
        assert torch.equal(value, expected[name]), name


@by_rule
def test_the_gates_may_be_in_half_precision(rule: str) -> None:
    inputs = {
        name: x if name == "state" else x.bfloat16() for name, x in make(rule, 2, 100, 64, 64, torch.bfloat16).items()
    }
    grads = gradients(rule, inputs)
    actual = run(rule, inputs, *grads)
    assert actual["gradient of log_decay"].dtype == torch.bfloat16
    check_closely(rule, actual, exactly(rule, inputs, *grads), torch.bfloat16)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@by_rule
def test_scale(rule: str, scale: float) -> None:
    inputs = make(rule, 2, 100, 64, 64, torch.bfloat16)
    grads = gradients(rule, inputs)
    actual = run(rule, inputs, *grads, scale=scale)
    check_closely(rule, actual, exactly(rule, inputs, *grads, scale=scale), torch.bfloat16)


@pytest.mark.parametrize(("rows", "tokens"), [(0, 5), (2, 0)])
@by_rule
def test_nothing_in_gives_nothing_out_and_the_state_back(rule: str, rows: int, tokens: int) -> None:
    inputs = make(rule, rows, tokens, 64, 64, torch.bfloat16)
    grads = gradients(rule, inputs)
    actual = run(rule, inputs, *grads)
    assert actual["output"].shape == inputs["v"].shape
    assert torch.equal(actual["final state"], inputs["state"])
    assert torch.equal(actual["gradient of state"], grads[1])


@pytest.mark.parametrize(("size", "value_size"), [(64, 128), (256, 512)])
@by_rule
def test_two_runs_are_bit_equal(rule: str, size: int, value_size: int) -> None:
    inputs = make(rule, 2, 1000, size, value_size, torch.bfloat16)
    grads = gradients(rule, inputs)
    first, second = (run(rule, inputs, *grads) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(second[name], value), name


@by_rule
def test_a_row_is_the_same_in_any_batch(rule: str) -> None:
    inputs = make(rule, 5, 300, 64, 64, torch.bfloat16)
    grads = gradients(rule, inputs)
    together = run(rule, inputs, *grads)
    alone = run(rule, {name: x[3:4] for name, x in inputs.items()}, *(x[3:4] for x in grads))
    for name, value in alone.items():
        assert torch.equal(together[name][3:4], value), name


@by_rule
def test_auto_is_the_kernels_in_half_precision_and_torch_otherwise(rule: str) -> None:
    inputs = make(rule, 2, 100, 64, 64, torch.bfloat16)
    grads = gradients(rule, inputs)
    for name, value in run(rule, inputs, *grads, backend="auto").items():
        assert torch.equal(value, run(rule, inputs, *grads, backend="fla")[name]), name
    single = {name: x.float() for name, x in inputs.items()}
    for name, value in run(rule, single, *grads, backend="auto").items():
        assert torch.equal(value, run(rule, single, *grads, backend="torch")[name]), name


@pytest.fixture
def no_tuning(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The autotuners that timed a configuration."""
    from triton.runtime.autotuner import Autotuner

    timed: list[str] = []
    bench = Autotuner._bench
    monkeypatch.setattr(
        Autotuner,
        "_bench",
        lambda self, *args, **arguments: (timed.append(self.base_fn.__name__), bench(self, *args, **arguments))[1],
    )
    return timed


@pytest.mark.parametrize(("size", "value_size"), SIZES)
@by_rule
def test_nothing_autotunes(rule: str, size: int, value_size: int, no_tuning: list[str]) -> None:
    inputs = make(rule, 1, 70, size, value_size, torch.bfloat16)
    run(rule, inputs, *gradients(rule, inputs))
    run(rule, inputs, *gradients(rule, inputs), cu_seqlens=torch.tensor([0, 70]))
    with torch.no_grad():
        one = {name: x if name == "state" else x[:, :1] for name, x in on_gpu(inputs).items()}
        type(RULES[rule]).rule(**one, backend="fla")
    assert no_tuning == []


def test_the_package_tunes_as_ever_for_others(no_tuning: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fla.ops.common import fused_recurrent
    from fla.ops.gla import fused_recurrent_gla

    run("gla", make("gla", 1, 70, 64, 64, torch.bfloat16))
    # What it found in another process does not count.
    monkeypatch.setattr(fused_recurrent.fused_recurrent_fwd_kernel.fn, "cache_results", False)
    q = torch.randn(1, 3, 1, 16, device="cuda", dtype=torch.bfloat16)
    fused_recurrent_gla(q, q, q, F.logsigmoid(q))
    assert set(no_tuning) == {"fused_recurrent_fwd_kernel"}


@by_rule
def test_a_new_length_compiles_nothing(rule: str) -> None:
    import triton

    def step(tokens: int) -> None:
        inputs = make(rule, 1, tokens, 64, 64, torch.bfloat16)
        run(rule, inputs, *gradients(rule, inputs))

    for tokens in (100, 300):
        step(tokens)
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **details: compiled.append(str(details.get("repr")))
    try:
        for tokens in (2, 17, 64, 1000, 1024, 4096):
            step(tokens)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


def test_many_short_documents() -> None:
    documents = 20_000
    lengths = torch.randint(4, (documents,))
    boundaries = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    assert documents * 4 > 65_535
    for rule in RULES:
        inputs = make(rule, 1, int(boundaries[-1]), 16, 16, torch.bfloat16, heads=4, sequences=documents)
        grads = gradients(rule, inputs)
        actual = run(rule, inputs, *grads, cu_seqlens=boundaries)
        check_closely(rule, actual, exactly(rule, inputs, *grads, cu_seqlens=boundaries), torch.bfloat16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@by_rule
def test_a_device_that_is_not_the_current_one(rule: str) -> None:
    inputs = make(rule, 2, 100, 64, 64, torch.bfloat16)
    grads = gradients(rule, inputs)
    first, second = (
        RULES[rule].run({name: x.to(device) for name, x in inputs.items()}, *(x.to(device) for x in grads))
        for device in ("cuda:0", "cuda:1")
    )
    for name, value in first.items():
        assert torch.equal(second[name].cpu(), value.cpu()), name
    assert torch.cuda.current_device() == 0


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the graph is captured on its own stream
@pytest.mark.parametrize("with_state", [True, False])
@by_rule
def test_a_cuda_graph_captures_forward_and_backward(rule: str, with_state: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    cases = [make(rule, 2, 300, 64, 64, torch.bfloat16) for _ in range(2)]
    for case in cases:
        if not with_state:
            del case["state"]
    static = {name: x.requires_grad_() for name, x in on_gpu(cases[0]).items()}
    heads = static["v"].shape[2]
    grads = [torch.randn(2, 300, heads, 64, device="cuda").bfloat16(), torch.randn(2, heads, 64, 64, device="cuda")]

    def step() -> tuple[Tensor, ...]:
        result = type(RULES[rule]).rule(**static)
        return (*result, *torch.autograd.grad(result, list(static.values()), grads))

    graph, outputs = capture(step)
    for case in cases:
        with torch.no_grad():
            for name, x in static.items():
                x.copy_(case[name])
        graph.replay()
        for captured, eager in zip(outputs, step(), strict=True):
            assert torch.equal(captured, eager)


@by_rule
def test_a_cuda_graph_replays_decode_steps(rule: str) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    inputs = make(rule, 3, 20, 64, 128, torch.bfloat16)
    expected = exactly(rule, inputs)
    moved = on_gpu(inputs)
    static = {name: x.clone() if name == "state" else x[:, :1].clone() for name, x in moved.items()}

    @torch.no_grad()
    def step() -> tuple[Tensor, ...]:
        output, state = type(RULES[rule]).rule(**static)
        static["state"].copy_(state)
        return (output,)

    graph, (output,) = capture(step)
    static["state"].copy_(moved["state"])
    outputs = []
    for t in range(20):
        for name, x in moved.items():
            if name != "state":
                static[name].copy_(x[:, t : t + 1])
        graph.replay()
        outputs.append(output.clone())
    # Everything but the output is float32.
    assert_close("output", torch.cat(outputs, 1).cpu(), expected["output"], 4e-3)
    assert_close("state", static["state"].cpu(), expected["final state"], 5e-6)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("with_state", [True, False])
@by_rule
def test_compiled_without_a_break_it_agrees(rule: str, with_state: bool, backend: str) -> None:
    torch._dynamo.reset()
    torch.utils.deterministic.fill_uninitialized_memory = False
    inputs = make(rule, 2, 100, 64, 64, torch.bfloat16)
    if not with_state:
        del inputs["state"]
    names = list(inputs)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(names, values, strict=True))
        arguments["v"] = arguments["v"].sigmoid()
        output, state = type(RULES[rule]).rule(**arguments)
        return output.float().square(), state

    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        leaves = [x.requires_grad_() for x in on_gpu(inputs).values()]
        outputs = call(*leaves)
        results.append((*outputs, *torch.autograd.grad(sum(x.sum() for x in outputs), leaves)))
    for i, (eager, compiled) in enumerate(zip(*results, strict=True)):
        # Generated code computes the sigmoid of v in float32 and rounds once.
        assert_close(str(i), compiled, eager, 1e-7 if backend == "aot_eager" else 5e-3)


@pytest.mark.parametrize("boundaries", [None, [0, 3, 3, 70]])
@pytest.mark.parametrize("with_state", [True, False])
@by_rule
def test_the_operators_keep_their_promises(rule: str, with_state: bool, boundaries: list[int] | None) -> None:
    inputs = make(rule, 1, 70, 64, 64, torch.bfloat16, sequences=None if boundaries is None else 3)
    leaves = {name: x.requires_grad_() for name, x in on_gpu(inputs).items()}
    state = leaves.pop("state")
    state = state if with_state else None
    operator, arguments = OPERATORS[rule], tuple(leaves.values())
    # Weights of later keys are left unwritten, so that only what is promised of shapes can be compared.
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(operator.forward.overload, (*arguments, state, 0.1, boundaries), test_utils=checks)
    values = [x.detach() for x in arguments]
    before = None if state is None else state.detach()
    output, final, *kept = operator.forward(*values, before, 0.1, boundaries)
    gates = values[4:]
    for d_final in (final, None):
        library.opcheck(
            operator.backward.overload,
            (*values[:3], *gates, *kept, before, output, d_final, 0.1, boundaries),
            test_utils=checks,
        )


@pytest.mark.parametrize(("size", "value_size"), SIZES)
@by_rule
def test_one_token(rule: str, size: int, value_size: int) -> None:
    inputs = make(rule, 3, 1, size, value_size, torch.bfloat16)
    double = {name: x.double() for name, x in inputs.items()}
    expected = RULES[rule].run(double, backend="reference")
    with torch.no_grad():
        output, state = type(RULES[rule]).rule(**on_gpu(inputs))
    assert_close("output", output.cpu(), expected["output"], 4e-3)
    assert_close("state", state.cpu(), expected["final state"], 1e-6)


def test_every_configuration_of_the_card_is_used_as_it_stands() -> None:
    """What the kernels were launched with is what the file of the card says."""
    table = flash_linear_attention.table_of_device(0)
    for rule in flash_linear_attention.RULES:
        for sizes, configurations in table.operations[rule].items():
            if sizes == flash_linear_attention.ANY:
                continue
            seen: dict[str, dict[str, int]] = {}

            class Watching(flash_linear_attention.Launcher):
                def configuration(self, autotuner: Any, args: Any, arguments: Any, seen: Any = seen) -> Any:
                    found = super().configuration(autotuner, args, arguments)
                    seen[autotuner.base_fn.__name__] = dict(found)
                    return found

            size, value_size = map(int, sizes.split("/"))
            inputs = make(rule, 1, 70, size, value_size, torch.bfloat16)
            operator = OPERATORS[rule]
            *values, state = on_gpu(inputs).values()
            with flash_linear_attention.using(Watching(configurations)):
                output, final, *kept = operator.forward(*values, state, 0.1, None)
                operator.backward(*values[:3], *values[4:], *kept, state, output, final, 0.1, None)
            assert seen == {name: each for name, each in configurations.items() if name not in REPLACED}
