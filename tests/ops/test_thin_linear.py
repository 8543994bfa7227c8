"""The thin linear map in PyTorch and by its kernels, against its formula in float64, on a GPU or in Triton's
interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import assert_close
from torch import Tensor, library
from torch.utils.checkpoint import checkpoint

from ccq.ops import thin_linear as module
from ccq.ops.thin_linear import thin_linear, thin_linear_and_input

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("y", "x", "weight", "bias")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are used, on a CPU too."""
    monkeypatch.setattr(module, "is_chosen", lambda x, outputs: True)


def draw(*shape: int, outputs: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight, bias and the gradient that arrives. The bias is far below the weights' part, as in training."""
    x = torch.randn(shape).to(dtype)
    weight, bias = torch.randn(outputs, shape[-1]) * shape[-1] ** -0.5, torch.randn(outputs) - 4.6
    return [x, weight, bias, torch.randn(*shape[:-1], outputs)]


def formula(inputs: list[Tensor], rounded: torch.dtype, sigmoid: bool = True) -> list[Tensor]:
    """Outputs and gradients in float64, with the weight rounded as x is."""
    x, weight, bias, gradient = inputs
    leaves = [x.double().requires_grad_(), weight.to(rounded).double().requires_grad_(), bias.double().requires_grad_()]
    y = (leaves[0].unsqueeze(-2) * leaves[1]).sum(-1) + leaves[2]
    if sigmoid:
        y = 1 / (1 + torch.exp(-y))
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient.double())]


def differentiate(inputs: list[Tensor], sigmoid: bool = True) -> list[Tensor]:
    *leaves, gradient = (x.to(DEVICE) for x in inputs)
    leaves = [x.clone().requires_grad_() for x in leaves]
    y = thin_linear(*leaves, sigmoid=sigmoid)
    return [y.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(y, leaves, gradient))]


def check(inputs: list[Tensor], tolerances: dict[str, float]) -> None:
    for sigmoid in (False, True):
        found, exact = differentiate(inputs, sigmoid), formula(inputs, inputs[0].dtype, sigmoid)
        for name, actual, value in zip(NAMES, found, exact, strict=True):
            assert_close(name, actual, value, tolerances[name])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("shape", "outputs"),
    [
        ((2, 70, 48), 6),
        ((1, 1, 300), 1),
        ((3, 5, 129), 9),
        ((200, 16), 3),
        ((131, 520), 12),
        ((67, 130), 16),
        ((77, 70), 17),
    ],
)
def test_the_kernels_are_the_formula(shape: tuple[int, ...], outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ccq.ops.thin_linear import kernels

    monkeypatch.setattr(kernels, "WANTED_PROGRAMS", 4)  # several blocks a group, and several groups
    check(draw(*shape, outputs=outputs), dict.fromkeys(NAMES, 2e-6))


@pytest.mark.usefixtures("kernels", "gpu_rounding")
@pytest.mark.parametrize("outputs", [1, 6, 12, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_of_low_precision_input_are_not_rounded(dtype: torch.dtype, outputs: int) -> None:
    eps = torch.finfo(dtype).eps
    inputs = draw(2, 90, 48, outputs=outputs, dtype=dtype)
    # dz is rounded before it meets x and the weight; the gate and the bias see no rounding.
    check(inputs, {"y": 2e-6, "x": 2 * eps, "weight": 2 * eps, "bias": 2e-6})


def test_composed_from_torch_it_is_the_formula() -> None:
    inputs = draw(2, 9, 24, outputs=3)
    for name, actual, value in zip(NAMES, differentiate(inputs), formula(inputs, torch.float64), strict=True):
        assert_close(name, actual, value, 2e-6)
    exact = [x.double() for x in inputs]
    for name, actual, value in zip(NAMES, differentiate(exact), formula(exact, torch.float64), strict=True):
        assert actual.dtype == torch.float64
        assert_close(name, actual, value, 1e-14)


@pytest.mark.usefixtures("kernels")
def test_rows_without_a_gradient_take_no_part() -> None:
    """Padding, whatever stands in it."""
    x, weight, bias, gradient = draw(70, 20, outputs=3)
    gradient[10:40] = 0
    clean = differentiate([x, weight, bias, gradient])
    x[10:40] = float("nan")
    spoilt = differentiate([x, weight, bias, gradient])
    for name, ours, theirs in zip(NAMES[2:], spoilt[2:], clean[2:], strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(spoilt[1], clean[1]) and not spoilt[1][10:40].any()


@pytest.mark.usefixtures("kernels")
def test_parameters_of_any_dtype_and_strided_input() -> None:
    x, weight, bias, gradient = draw(6, 40, 24, outputs=3, dtype=torch.float16)
    halves = [x.transpose(0, 1).contiguous().transpose(0, 1), weight.half(), bias.half(), gradient]
    found, exact = differentiate(halves), formula(halves, torch.float16)
    assert [each.dtype for each in found] == [torch.float32, *(torch.float16,) * 3]
    for name, actual, value in zip(NAMES, found, exact, strict=True):
        assert_close(name, actual, value, 2e-6 if name == "y" else 2 * torch.finfo(torch.float16).eps)


@pytest.mark.usefixtures("kernels")
def test_without_a_bias() -> None:
    x, weight, bias, gradient = draw(40, 24, outputs=3)
    exact = formula([x, weight, 0 * bias, gradient], torch.float32, sigmoid=False)
    leaves = [each.to(DEVICE).requires_grad_() for each in (x, weight)]
    y = thin_linear(*leaves)
    found = (y.detach(), *torch.autograd.grad(y, leaves, gradient.to(DEVICE)))
    for name, actual, value in zip(NAMES, found, exact, strict=False):
        assert_close(name, actual.cpu(), value, 2e-6)


@pytest.mark.usefixtures("kernels")
def test_the_operators_keep_their_promises() -> None:
    x, weight, bias, gradient = (each.to(DEVICE) for each in draw(40, 24, outputs=3))
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    library.opcheck(module.forward.overload, (*leaves, True), atol=1e-6, rtol=1e-6)
    library.opcheck(module.forward.overload, (*leaves[:2], None, False), atol=1e-6, rtol=1e-6)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for y in (None, module.forward(x, weight, bias, True)):
        for beside in (None, torch.ones_like(x)):
            library.opcheck(module.backward.overload, (gradient, y, x, weight, beside), test_utils=checks)


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_compiles_without_a_break_and_agrees() -> None:
    inputs = draw(2, 20, 24, outputs=3)
    eager = differentiate(inputs)
    compiled = torch.compile(thin_linear, fullgraph=True, backend="aot_eager")
    *leaves, gradient = (x.to(DEVICE) for x in inputs)
    leaves = [x.clone().requires_grad_() for x in leaves]
    y = compiled(*leaves, sigmoid=True)
    for ours, theirs in zip((y.detach(), *torch.autograd.grad(y, leaves, gradient)), eager, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.usefixtures("kernels", "gpu_rounding")
@pytest.mark.parametrize("outputs", [6, 9])
@pytest.mark.parametrize("used", ["both", "outputs", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_from_elsewhere_is_added(dtype: torch.dtype, used: str, outputs: int) -> None:
    """Against float64, where x is used twice. The other use is a sum with weights, so that its gradient is known."""
    x, weight, bias, gradient = draw(2, 41, 48, outputs=outputs, dtype=dtype)
    elsewhere = torch.randn(x.shape).to(dtype)
    gradient[0, 3:9] = 0
    exact = formula([x, weight, bias, gradient * (used != "input")], dtype)
    leaves = [each.to(DEVICE).requires_grad_() for each in (x, weight, bias)]
    y, again = thin_linear_and_input(*leaves, sigmoid=True)
    assert torch.equal(again, leaves[0]) and again is not leaves[0]
    found = torch.autograd.grad(
        *{
            "both": ((y, again), leaves, (gradient.to(DEVICE), elsewhere.to(DEVICE))),
            "outputs": (y, leaves, gradient.to(DEVICE)),
            "input": (again, leaves, elsewhere.to(DEVICE)),
        }[used],
        allow_unused=used == "input",
    )
    assert_close("y", y.detach().cpu(), exact[0], 2e-6)
    tolerance = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert_close("x", found[0].cpu(), exact[1] + elsewhere.double() * (used != "outputs"), tolerance)
    if used != "outputs":
        assert torch.equal(found[0][0, 3:9].cpu(), elsewhere[0, 3:9])
    if used == "input":
        assert torch.equal(found[0].cpu(), elsewhere) and found[1:] == (None, None)
    else:
        for name, actual, value in zip(NAMES[2:], found[1:], exact[2:], strict=True):
            assert_close(name, actual.cpu(), value, tolerance)


def test_without_the_kernels_the_input_comes_back_itself() -> None:
    x, weight, bias, _ = draw(2, 9, 24, outputs=3)
    y, again = thin_linear_and_input(x, weight, bias, sigmoid=True)
    assert again is x and torch.equal(y, thin_linear(x, weight, bias, sigmoid=True))


@pytest.mark.usefixtures("kernels")
def test_a_gradient_of_a_gradient_is_refused() -> None:
    leaves = [each.to(DEVICE).requires_grad_() for each in draw(2, 9, 24, outputs=3)[:3]]
    y, again = thin_linear_and_input(*leaves, sigmoid=True)
    (first,) = torch.autograd.grad(y.sum() + again.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="thin_linear has no derivative"):
        first.sum().backward()


@pytest.mark.usefixtures("kernels")
def test_without_gradients_nothing_is_recorded() -> None:
    x, weight, bias, _ = (each.to(DEVICE) for each in draw(2, 9, 24, outputs=3))
    with torch.no_grad():
        y, again = thin_linear_and_input(x, weight.requires_grad_(), bias)
    assert not y.requires_grad and not again.requires_grad and torch.equal(again, x)
    y, again = thin_linear_and_input(x, weight, bias)
    assert y.requires_grad and not again.requires_grad


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("outputs", [1, 6, 12, 17])
def test_padding_gets_what_comes_from_elsewhere(outputs: int, sigmoid: bool) -> None:
    """Bit for bit, beside rows that hold NaN; the gradients of the others and of the parameters do not see them."""
    x, weight, bias, gradient = (each.to(DEVICE) for each in draw(75, 20, outputs=outputs))
    elsewhere = torch.randn_like(x)
    gradient[10:40] = 0

    def run(x: Tensor) -> tuple[Tensor, ...]:
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        both = thin_linear_and_input(*leaves, sigmoid=sigmoid)
        return torch.autograd.grad(both, leaves, (gradient, elsewhere))

    clean = run(x)
    x[10:40] = float("nan")
    for name, ours, theirs in zip(NAMES[1:], run(x), clean, strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(clean[0][10:40], elsewhere[10:40]) and not torch.equal(clean[0][:10], elsewhere[:10])


@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 300),
    outputs=st.integers(1, 20),
    sigmoid=st.booleans(),
    biased=st.booleans(),
    dead=st.integers(0, 150),
    programs=st.sampled_from([1, 4, 528]),
)
def test_any_sizes(
    rows: int, columns: int, outputs: int, sigmoid: bool, biased: bool, dead: int, programs: int
) -> None:
    """Of the first `dead` rows no gradient comes back but that from elsewhere."""
    from ccq.ops.thin_linear import kernels

    x, weight, bias, gradient = draw(rows, columns, outputs=outputs)
    bias, elsewhere = bias * biased, torch.randn(rows, columns)
    gradient[:dead] = 0
    exact = formula([x, weight, bias, gradient], torch.float32, sigmoid)
    exact[1] = exact[1] + elsewhere.double()
    leaves = [each.to(DEVICE).requires_grad_() for each in ((x, weight, bias) if biased else (x, weight))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "is_chosen", lambda x, outputs: True)
        patch.setattr(kernels, "WANTED_PROGRAMS", programs)
        y, again = thin_linear_and_input(*leaves, sigmoid=sigmoid)
        found = torch.autograd.grad((y, again), leaves, (gradient.to(DEVICE), elsewhere.to(DEVICE)))
    for name, actual, value in zip(NAMES, (y, *found), exact, strict=False):
        # A single sum may come out near zero, of terms that are not.
        assert_close(name, actual.detach().cpu(), value, 4e-6, floor=1e-5)


@pytest.mark.usefixtures("kernels")
def test_a_strided_gradient_from_elsewhere() -> None:
    x, weight, bias, gradient = (each.to(DEVICE) for each in draw(6, 20, 24, outputs=3))
    elsewhere = torch.randn(20, 6, 24, device=DEVICE).transpose(0, 1)
    apart = x.transpose(0, 1).contiguous().transpose(0, 1)
    found = []
    for given_x, beside in ((x, elsewhere.contiguous()), (apart, elsewhere), (x, elsewhere[:1, :1].expand_as(x))):
        leaves = [each.clone().requires_grad_() for each in (given_x, weight, bias)]
        found.append(torch.autograd.grad(thin_linear_and_input(*leaves), leaves, (gradient, beside)))
    for plain, strided in zip(*found[:2], strict=True):
        assert torch.equal(plain, strided)
    assert_close("x", found[2][0] - found[0][0], elsewhere[:1, :1] - elsewhere, 2e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_both_uses_under_activation_checkpointing(dtype: torch.dtype) -> None:
    inputs = [each.to(DEVICE) for each in draw(2, 30, 24, outputs=3, dtype=dtype)[:3]]

    def loss(*leaves: Tensor) -> Tensor:
        y, again = thin_linear_and_input(*leaves, sigmoid=True)
        return y.sum() + again.float().square().sum()

    results = []
    for again in (False, True):
        leaves = [each.clone().requires_grad_() for each in inputs]
        total = checkpoint(loss, *leaves, use_reentrant=False) if again else loss(*leaves)
        results.append(torch.autograd.grad(total, leaves))
    for kept, computed in zip(*results, strict=True):
        assert torch.equal(kept, computed)


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_both_uses_compile_without_a_break() -> None:
    """In a compiled graph x is itself, and the sum of its two gradients the compiler's."""
    inputs = [each.to(DEVICE) for each in draw(2, 20, 24, outputs=3)]

    def both(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        y, again = thin_linear_and_input(*leaves, sigmoid=True)
        return y, 2 * again

    results = []
    for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        leaves = [each.clone().requires_grad_() for each in inputs[:3]]
        y, double = call(*leaves)
        results.append((y, *torch.autograd.grad((y, double), leaves, (inputs[3], inputs[0]))))
    for name, eager, compiled in zip(NAMES, *results, strict=True):
        assert_close(name, compiled.detach().cpu(), eager.detach().cpu(), 2e-6)
