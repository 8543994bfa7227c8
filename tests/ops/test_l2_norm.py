"""Unit vectors in their own dtype, in PyTorch and around flash-linear-attention's kernel."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from tests.ops.fixtures import fla_stand_in
from torch import Tensor, library

from ccq.ops import l2_norm as module
from ccq.ops.l2_norm import l2_norm


def by_hand(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are used, on a CPU and in any dtype; a stand-in computes what they do."""
    fla_stand_in.install(monkeypatch)
    monkeypatch.setattr(module, "is_chosen", lambda x: True)


def check(x: Tensor, tolerance: float) -> None:
    exact = x.detach().double().requires_grad_()
    gradient = torch.randn(x.shape, dtype=torch.float64)
    y, expected = l2_norm(x), by_hand(exact)
    assert y.dtype == x.dtype
    assert_close("y", y, expected, tolerance)
    ours, theirs = torch.autograd.grad(y, x, gradient.to(x.dtype)), torch.autograd.grad(expected, exact, gradient)
    assert_close("gradient", ours[0], theirs[0], 4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_the_formula_rounded_once(dtype: torch.dtype) -> None:
    check(torch.randn(3, 5, 24, dtype=torch.float64).to(dtype).requires_grad_(), torch.finfo(dtype).eps)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (7, 33), (1, 1, 48)])
def test_around_the_kernel_it_is_the_formula(shape: tuple[int, ...]) -> None:
    check(torch.randn(shape).requires_grad_(), 1e-6)


@pytest.mark.usefixtures("kernels")
def test_strided_vectors() -> None:
    check(torch.randn(4, 6, 16).transpose(0, 1).requires_grad_(), 1e-6)


@pytest.mark.usefixtures("kernels")
def test_the_operators_keep_their_promises() -> None:
    x = torch.randn(6, 16, requires_grad=True)
    library.opcheck(module.forward.overload, (x,), atol=1e-6, rtol=1e-6)
    unit, reciprocal = module.forward(x.detach())
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(module.backward.overload, (torch.randn_like(unit), unit, reciprocal), test_utils=checks)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "expected"),
    [
        ("cuda", torch.bfloat16, 256, True),
        ("cuda", torch.float16, 40, True),
        ("cuda", torch.bfloat16, 257, False),
        ("cuda", torch.float32, 64, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
@pytest.mark.parametrize("usable", [True, False])
def test_the_kernel_is_used_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, size: int, expected: bool, usable: bool
) -> None:
    monkeypatch.setattr(module, "reason_against", lambda *_: "" if usable else "it rains")
    # Fake tensors of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        assert module.is_chosen(torch.empty(2, 3, size, dtype=dtype, device=device)) == (expected and usable)
        assert not module.is_chosen(torch.empty(0, size, dtype=dtype, device=device))
