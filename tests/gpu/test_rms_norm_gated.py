"""flash-linear-attention's kernel of the norm behind the write rules, on a GPU, in the configurations that users get.

Exact values are those of the formula in float64. An error may be at most twice that of the composition in PyTorch,
which computes in float32 and rounds once.
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers import relative_error
from torch import Tensor, library

from ccq.ops.rms_norm_gated import backward, forward, rms_norm_gated

pytest.importorskip("fla")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EPS = 1e-5
SIZES = (16, 48, 64, 128, 256, 512)

by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype) -> list[Tensor]:
    """x, gate, weight and the gradient that arrives, on a CPU."""
    x, gate, gradient = (torch.randn(shape).to(dtype) for _ in range(3))
    return [x, gate, torch.randn(shape[-1]).to(dtype), gradient]


def differentiate(inputs: list[Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    *leaves, gradient = (x.to(device, dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    y = rms_norm_gated(*leaves, EPS)
    return [y.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(y, leaves, gradient))]


@pytest.mark.parametrize("tokens", [1, 5, 1000, 70_001])
@pytest.mark.parametrize("size", SIZES)
@by_dtype
def test_every_size(dtype: torch.dtype, size: int, tokens: int) -> None:
    if tokens > 1000 and size != 64:
        pytest.skip("one size is enough for many vectors")
    inputs = draw(tokens, size, dtype=dtype)
    actual = differentiate(inputs, "cuda", dtype)
    plain, exact = differentiate(inputs, "cpu", dtype), differentiate(inputs, "cpu", torch.float64)
    for name, ours, theirs, value in zip(("y", "x", "gate", "weight"), actual, plain, exact, strict=True):
        assert ours.dtype == dtype
        error, allowed = relative_error(ours, value), max(2 * relative_error(theirs, value), 1e-6)
        print(f"{name}: relative error {error:.2e} (allowed {allowed:.2e})")
        assert error <= allowed, name


@by_dtype
def test_weights_in_float32_under_autocast(dtype: torch.dtype) -> None:
    x, gate, weight, gradient = draw(300, 64, dtype=dtype)
    leaves = [x.cuda().requires_grad_(), gate.cuda().requires_grad_(), weight.cuda().float().requires_grad_()]
    y = rms_norm_gated(*leaves, EPS)
    gradients = torch.autograd.grad(y, leaves, gradient.cuda())
    exact = differentiate([x, gate, weight, gradient], "cpu", torch.float64)
    assert gradients[2].dtype == torch.float32
    assert relative_error(gradients[2].cpu(), exact[3]) < 1e-5


def test_two_runs_are_bit_equal_and_nothing_autotunes(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: pytest.fail("a kernel was tuned"))
    inputs = draw(2, 1000, 6, 512, dtype=torch.bfloat16)
    first, second = (differentiate(inputs, "cuda", torch.bfloat16) for _ in range(2))
    for ours, again in zip(first, second, strict=True):
        assert torch.equal(ours, again)


def test_the_operators_keep_their_promises() -> None:
    x, gate, weight, _ = (each.cuda() for each in draw(70, 64, dtype=torch.bfloat16))
    leaves = [each.clone().requires_grad_() for each in (x, gate, weight)]
    library.opcheck(forward.overload, (*leaves, EPS), atol=1e-2, rtol=1e-2)
    y, reciprocal = forward(x, gate, weight, EPS)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(backward.overload, (y, x, gate, weight, reciprocal, EPS), test_utils=checks)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_compiled_without_a_break_it_agrees() -> None:
    torch._dynamo.reset()
    torch.utils.deterministic.fill_uninitialized_memory = False
    x, gate, weight, gradient = (each.cuda() for each in draw(2, 100, 4, 64, dtype=torch.bfloat16))
    results = []
    for call in (rms_norm_gated, torch.compile(rms_norm_gated, fullgraph=True)):
        leaves = [each.clone().requires_grad_() for each in (x, gate, weight)]
        y = call(*leaves, EPS)
        results.append((y, *torch.autograd.grad(y, leaves, gradient)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)
