"""silu(gate) * x, in PyTorch and around flash-linear-attention's kernel."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from tests.ops.fixtures import fla_stand_in
from torch import Tensor, library

from ccq.ops import swiglu as module
from ccq.ops.swiglu import swiglu


def by_hand(gate: Tensor, x: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * x


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are used, on a CPU and in any dtype; a stand-in computes what they do."""
    fla_stand_in.install(monkeypatch)
    monkeypatch.setattr(module, "is_chosen", lambda gate, x: True)


def check(gate: Tensor, x: Tensor, tolerance: float) -> None:
    leaves = [each.detach().requires_grad_() for each in (gate, x)]
    exact = [each.detach().double().requires_grad_() for each in (gate, x)]
    gradient = torch.randn(x.shape, dtype=torch.float64)
    y, expected = swiglu(*leaves), by_hand(*exact)
    assert y.dtype == x.dtype
    assert_close("y", y, expected, tolerance)
    found = torch.autograd.grad(y, leaves, gradient.to(x.dtype))
    for name, ours, value in zip(("gate", "x"), found, torch.autograd.grad(expected, exact, gradient), strict=True):
        assert_close(name, ours, value, 4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_the_formula(dtype: torch.dtype) -> None:
    gate, x = (3 * torch.randn(2, 5, 24, dtype=torch.float64) for _ in range(2))
    check(gate.to(dtype), x.to(dtype), torch.finfo(dtype).eps)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(2, 3, 16), (7,), (1, 1, 33)])
def test_around_the_kernel_it_is_the_formula(shape: tuple[int, ...]) -> None:
    check(3 * torch.randn(shape), torch.randn(shape), 1e-6)


@pytest.mark.usefixtures("kernels")
def test_strided_input() -> None:
    check(torch.randn(4, 6, 8).transpose(0, 1), torch.randn(6, 4, 16)[..., ::2], 1e-6)


@pytest.mark.usefixtures("kernels")
def test_the_operators_keep_their_promises() -> None:
    gate, x = (torch.randn(6, 16, requires_grad=True) for _ in range(2))
    library.opcheck(module.forward.overload, (gate, x), atol=1e-6, rtol=1e-6)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(module.backward.overload, (torch.randn(6, 16), gate.detach(), x.detach()), test_utils=checks)
