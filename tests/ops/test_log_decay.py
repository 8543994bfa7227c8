"""The decays of gated linear attention and of the gated delta rule, in PyTorch and in their kernels, which run in
Triton's interpreter here.
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from torch import Tensor, library

from ccq.ops import log_decay as module
from ccq.ops.log_decay import delta_gates, log_sigmoid_decay, low_rank_is_chosen, low_rank_log_decay

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


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "channels"), [((3, 1, 16), 130), ((1, 5), 7), ((16, 33), 256)])
def test_behind_a_linear_map_in_one_kernel(shape: tuple[int, ...], channels: int, dtype: torch.dtype) -> None:
    """The map is rounded as by itself, and the decay of what is rounded is exact."""
    x, weight, bias = (
        torch.randn(*sizes, device=DEVICE).to(dtype) for sizes in (shape, (channels, shape[-1]), (channels,))
    )
    found = low_rank_log_decay(x, weight, bias, NORMALIZER)
    exact = (x.double().unsqueeze(-2) * weight.double()).sum(-1) + bias.double()
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert_close("y", found, by_hand(exact), torch.finfo(dtype).eps)
    # Where a sum lies between two numbers of the dtype, float32 may round it to the other one.
    rounded = by_hand(exact.to(dtype).double())
    assert ((found.double() - rounded).abs() <= 1e-6 * rounded.abs()).double().mean() > 0.98


def test_when_the_linear_map_is_part_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnACard(Tensor):
        is_cuda = True

    def chosen(vectors: int = 16, inputs: int = 64, dtype: torch.dtype = torch.float16, gradient: bool = False) -> bool:
        x = torch.zeros(vectors, inputs, dtype=dtype).as_subclass(OnACard)
        weight = torch.zeros(5, inputs, dtype=torch.float16, requires_grad=gradient)
        return low_rank_is_chosen(x, weight, torch.zeros(5, dtype=torch.float16))

    assert chosen()
    assert not chosen(vectors=17) and not chosen(inputs=65) and not chosen(dtype=torch.bfloat16)
    assert not chosen(gradient=True)
    with torch.no_grad():
        assert chosen(gradient=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not chosen()
    assert not low_rank_is_chosen(*(torch.zeros(5, 5).half() for _ in range(2)), torch.zeros(5).half())


def draw_gates(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """steps, strengths, a_log, bias, with steps on both sides of where the exponential vanishes."""
    steps, strengths = 20 * torch.randn(3, 7, 6), 5 * torch.randn(3, 7, 6)
    return [x.to(DEVICE, dtype) for x in (steps, strengths, torch.randn(6), 3 * torch.randn(6))]


def gates_by_hand(steps: Tensor, strengths: Tensor, a_log: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: -e^a softplus(steps + bias), and sigmoid(strengths)."""
    z = steps.double() + bias.double()
    softplus = z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))
    return -torch.exp(a_log.double()) * softplus, 1 / (1 + torch.exp(-strengths.double()))


def test_the_gates_of_the_delta_rule_are_their_formulas() -> None:
    exact = [x.double().requires_grad_() for x in draw_gates()]
    leaves = [x.float().detach().requires_grad_() for x in exact]
    found, expected = delta_gates(*leaves), gates_by_hand(*exact)
    gradients = [torch.randn_like(x) for x in expected]
    for name, ours, value in zip(("decay", "strength"), found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert_close(name, ours, value, 1e-6)
    ours = torch.autograd.grad(found, leaves, [x.float() for x in gradients])
    for mine, value in zip(ours, torch.autograd.grad(expected, exact, gradients), strict=True):
        assert_close("gradient", mine, value, 1e-6)
    for each, value in zip(delta_gates(*exact), expected, strict=True):
        assert each.dtype == torch.float64
        assert_close("in float64", each, value, 1e-8)  # torch's softplus is linear from 20 on


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_of_the_gates_is_the_formulas(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from ccq.ops.log_decay import kernels

    monkeypatch.setattr(kernels, "NUMBERS", 64)  # several programs
    inputs = draw_gates(dtype)
    flat = [inputs[0].reshape(-1, 6), inputs[1].reshape(-1, 6), *inputs[2:]]
    for name, ours, value in zip(("decay", "strength"), kernels.delta(*flat), gates_by_hand(*flat), strict=True):
        assert ours.dtype == torch.float32
        # Rounding steps + bias, which are up to 100, moves the exponential by so much.
        assert ((ours.double() - value).abs() <= 2e-5 * value.abs()).all(), name


def test_the_operators_without_gradients_keep_their_promises() -> None:
    steps, strengths, a_log, bias = (x.reshape(-1, 6) if x.ndim > 1 else x for x in draw_gates())
    library.opcheck(module._delta.overload, (steps, strengths, a_log, bias))
    x, weight, bias = (torch.randn(*sizes, device=DEVICE).half() for sizes in ((3, 16), (20, 16), (20,)))
    library.opcheck(module._low_rank.overload, (x, weight, bias, NORMALIZER))
    with pytest.raises(RuntimeError, match="ccq::low_rank_log_decay has no derivative"):
        low_rank_log_decay(x.requires_grad_(), weight, bias, NORMALIZER).sum().backward()
