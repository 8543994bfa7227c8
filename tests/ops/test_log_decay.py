"""logsigmoid(x) / normalizer, in PyTorch and in its kernel, which runs in Triton's interpreter here."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from torch import Tensor, library

from ccq.ops import log_decay as module
from ccq.ops.log_decay import log_sigmoid_decay

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMALIZER = 16.0


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are used, in any dtype."""
    monkeypatch.setattr(module, "is_chosen", lambda x: True)


def by_hand(x: Tensor) -> Tensor:
    """-log(1 + e^-x) / 16 of float64, with the digits that are left at large x."""
    return -torch.where(x > 0, torch.log1p(torch.exp(-x)), torch.log1p(torch.exp(x)) - x) / NORMALIZER


def check(x: Tensor, tolerance: float) -> None:
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    y, expected = log_sigmoid_decay(leaf, NORMALIZER), by_hand(exact)
    assert y.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    small = torch.finfo(y.dtype).eps
    assert_close("y", y, expected, 4 * small)
    gradient = torch.randn(x.shape, dtype=torch.float64, device=x.device)
    (found,) = torch.autograd.grad(y, leaf, gradient.to(y.dtype))
    assert found.dtype == x.dtype
    assert_close("x", found, torch.autograd.grad(expected, exact, gradient)[0], tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_the_formula(dtype: torch.dtype) -> None:
    check(5 * torch.randn(2, 5, 24, device=DEVICE, dtype=torch.float64).to(dtype), 2 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 16), (7,), (1, 1025), (2048,)])
def test_the_kernel_is_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(5 * torch.randn(shape, device=DEVICE).to(dtype), 2 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("kernels")
def test_the_kernel_keeps_the_digits_of_small_and_large_numbers() -> None:
    x = torch.tensor([-1e4, -100.0, -20.0, -1e-3, 0.0, 1e-3, 7.0, 8.0, 9.0, 12.0, 17.0, 30.0, 80.0], device=DEVICE)
    y, expected = log_sigmoid_decay(x, NORMALIZER).double(), by_hand(x.double())
    assert ((y - expected).abs() <= 5e-7 * expected.abs()).all()


@pytest.mark.usefixtures("kernels")
def test_strided_input() -> None:
    check(torch.randn(6, 4, 16, device=DEVICE).transpose(0, 1)[..., ::2], 1e-6)


@pytest.mark.usefixtures("kernels")
def test_the_operators_keep_their_promises() -> None:
    x = torch.randn(6, 16, device=DEVICE, requires_grad=True)
    library.opcheck(module.forward.overload, (x, NORMALIZER), atol=1e-6, rtol=1e-6)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(module.backward.overload, (torch.randn_like(x), x.detach(), NORMALIZER), test_utils=checks)
