"""The norm behind a write rule, in PyTorch and around flash-linear-attention's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.ops.fixtures import fla_stand_in
from torch import Tensor, library

from ccq.ops import rms_norm_gated as module
from ccq.ops.rms_norm_gated import rms_norm_gated

EPS = 1e-5


def by_hand(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight * gate / (1 + torch.exp(-gate))


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x, gate = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    return [x, gate, torch.randn(shape[-1], dtype=torch.float64).to(dtype).requires_grad_()]


def differentiate(function: Any, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    y = function(*inputs, EPS)
    return [y.detach(), *torch.autograd.grad(y, inputs, gradient.to(y.dtype))]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are used, on a CPU and in any dtype; a stand-in computes what they do."""
    fla_stand_in.install(monkeypatch)
    monkeypatch.setattr(module, "is_chosen", lambda x, gate: True)


def test_in_float64_it_is_the_formula() -> None:
    inputs, gradient = draw(2, 3, 5, 7), torch.randn(2, 3, 5, 7, dtype=torch.float64)
    for ours, expected in zip(
        differentiate(rms_norm_gated, inputs, gradient), differentiate(by_hand, inputs, gradient), strict=True
    ):
        assert_close("values", ours, expected, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_rounds_once(dtype: torch.dtype) -> None:
    inputs = draw(4, 6, 32, dtype=dtype)
    y = rms_norm_gated(*inputs, EPS)
    exact = by_hand(*(x.detach().double() for x in inputs), EPS)
    assert y.dtype == dtype
    assert_close("values", y, exact, max(torch.finfo(dtype).eps / 2, 2e-7))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (7, 16), (1, 1, 48)])
def test_around_the_kernel_it_is_the_formula(shape: tuple[int, ...]) -> None:
    inputs, gradient = draw(*shape, dtype=torch.float32), torch.randn(shape)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for ours, expected in zip(
        differentiate(rms_norm_gated, inputs, gradient), differentiate(by_hand, exact, gradient), strict=True
    ):
        assert_close("values", ours, expected, 1e-6)


@pytest.mark.usefixtures("kernels")
def test_strided_and_expanded_tensors() -> None:
    x, gate, weight = (t.detach() for t in draw(4, 6, 16, dtype=torch.float32))
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1), gate[:1].expand(4, 6, 16), weight]
    leaves = [t.requires_grad_() for t in strided]
    rms_norm_gated(*leaves, EPS).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in strided]
    by_hand(*exact, EPS).sum().backward()
    for ours, expected in zip(leaves, exact, strict=True):
        assert ours.grad is not None and expected.grad is not None
        assert_close("gradient", ours.grad, expected.grad, 1e-6)


@pytest.mark.usefixtures("kernels")
def test_the_operators_keep_their_promises() -> None:
    x, gate, weight = draw(6, 16, dtype=torch.float32)
    library.opcheck(module.forward.overload, (x, gate, weight, EPS), atol=1e-6, rtol=1e-6)
    y, reciprocal = module.forward(x.detach(), gate.detach(), weight.detach(), EPS)
    arguments = (y, x.detach(), gate.detach(), weight.detach(), reciprocal, EPS)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(module.backward.overload, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "expected"),
    [
        ("cuda", torch.bfloat16, 512, True),
        ("cuda", torch.float16, 16, True),
        ("cuda", torch.bfloat16, 528, False),
        ("cuda", torch.bfloat16, 100, False),
        ("cuda", torch.float32, 64, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
@pytest.mark.parametrize("usable", [True, False])
def test_the_kernel_is_used_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, size: int, expected: bool, usable: bool
) -> None:
    monkeypatch.setattr(module, "reason_against", lambda *_: "" if usable else "it rains")
    called: list[str] = []

    def operator(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, None]:
        called.append("kernel")
        return x, None

    monkeypatch.setattr(torch.ops.ccq, "rms_norm_gated", operator)
    # Fake tensors of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        x, gate = (torch.empty(60, 3, 4, size, dtype=dtype, device=device) for _ in range(2))
        y = rms_norm_gated(x, gate, torch.empty(size, dtype=dtype, device=device), EPS)
        assert y.shape == x.shape and y.dtype == dtype
        nothing = torch.empty(0, 3, 4, size, dtype=dtype, device=device)
        assert rms_norm_gated(nothing, nothing, torch.empty(size, dtype=dtype, device=device), EPS).shape[0] == 0
    assert called == ["kernel"] * (expected and usable)


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "expected"),
    [
        ("cuda", torch.bfloat16, (8, 1, 6, 512), True),
        ("cuda", torch.float16, (512, 100), True),
        ("cuda", torch.bfloat16, (513, 64), False),
        ("cuda", torch.bfloat16, (3, 528), False),
        ("cuda", torch.bfloat16, (0, 64), False),
        ("cuda", torch.float32, (8, 64), False),
        ("cpu", torch.bfloat16, (8, 64), False),
    ],
)
def test_few_vectors_have_a_kernel_of_their_own(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, shape: tuple[int, ...], expected: bool
) -> None:
    """Without flash-linear-attention too, but not where a gradient is wanted."""
    with torch._subclasses.FakeTensorMode():
        x, gate = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        weight = torch.empty(shape[-1], dtype=torch.float32, device=device)
        assert module.are_few(x, gate, weight) == expected
        assert not module.are_few(x, gate.double(), weight)
        monkeypatch.setattr(module, "TRITON_INSTALLED", False)
        assert not module.are_few(x, gate, weight)
        monkeypatch.undo()
        assert not module.are_few(x, gate, weight.requires_grad_())
        with torch.no_grad():
            assert module.are_few(x, gate, weight) == expected


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device on which the kernel for few vectors runs: a GPU, or a CPU in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(module, "are_few", lambda *_: True)
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(2, 1, 3, 16), (7, 48), (1, 1, 1, 100), (5, 512), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_for_few_vectors_is_the_formula(
    interpreter: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, gate, weight = (t.detach().to(interpreter) for t in draw(*shape, dtype=dtype))
    apart = torch.stack((gate, gate), -2).unbind(-2)[0]  # not contiguous
    exact = by_hand(*(t.double() for t in (x, gate, weight)), EPS)
    for y in (rms_norm_gated(x, gate, weight, EPS), rms_norm_gated(x, apart, weight, EPS)):
        assert y.dtype == dtype
        assert_close("values", y, exact, torch.finfo(dtype).eps)  # half of it only for many numbers
    library.opcheck(module.few.overload, (x.flatten(0, -2), gate.flatten(0, -2), weight, EPS))
