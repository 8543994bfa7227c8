"""Operators made by `custom_operator`, in the eager mode, under the compiler and where they are misused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library

from ccq.ops.gated_delta_rule import gated_delta_rule
from ccq.ops.gated_group_rms_norm import gated_group_rms_norm
from ccq.ops.gla import gated_linear_attention
from ccq.ops.linear_cross_entropy import linear_cross_entropy
from ccq.ops.operators import custom_operator
from ccq.ops.query import curvature_conditioned_query
from ccq.ops.reads import exact_query
from ccq.ops.ssd import state_space_duality


@custom_operator("test_scaled_square", schema="(Tensor x, Tensor? weight, float scale) -> (Tensor, Tensor)")
def scaled_square(x: Tensor, weight: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """scale weight x^2, and twice x."""
    square = scale * x * x
    return square if weight is None else weight * square, 2 * x


@scaled_square.register_fake
def _(x: Tensor, weight: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ctx.scale = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, double = ctx.saved_tensors
    d_square = ctx.scale * gradient
    if weight is None:
        return d_square * double, None, None
    return d_square * weight * double, d_square * x * x, None


scaled_square.register_autograd(_backward, setup_context=_setup_context)


def inputs(*, gradient: bool = True) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(3, 4, generator=random, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(gradient), weight.requires_grad_(gradient)


def test_the_function_runs_with_its_own_name_and_docstring() -> None:
    x, weight = inputs(gradient=False)
    square, double = scaled_square(x, weight, 0.5)
    assert torch.equal(square, weight * (0.5 * x * x))
    assert torch.equal(double, x + x)
    assert torch.equal(torch.ops.ccq.test_scaled_square(x, None, 0.5)[0], 0.5 * x * x)
    assert scaled_square.__doc__ == "scale weight x^2, and twice x."


def test_gradients_are_those_of_the_formulas() -> None:
    x, weight = inputs()
    assert torch.autograd.gradcheck(lambda x, weight: scaled_square(x, weight, 0.5)[0], (x, weight))
    assert torch.autograd.gradcheck(lambda x: scaled_square(x, None, 0.5)[0], (x,))


def test_nothing_is_recorded_where_nothing_can_be_asked_for() -> None:
    x, weight = inputs()
    with torch.no_grad():
        assert scaled_square(x, weight, 1.0)[0].grad_fn is None
    assert scaled_square(x.detach(), weight.detach(), 1.0)[0].grad_fn is None
    square, double = scaled_square(x, weight.detach(), 1.0)
    assert square.grad_fn is not None
    assert not double.requires_grad


@custom_operator("test_scaled_square_backward", schema="(Tensor gradient, Tensor double) -> Tensor")
def product(gradient: Tensor, double: Tensor) -> Tensor:
    return gradient * double


def test_what_has_no_formula_is_not_taken_for_a_constant() -> None:
    """As in a second derivative: the operator of the backward pass depends on what the forward pass saved."""
    x = torch.ones(3, requires_grad=True)
    (d_x,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    found = product(d_x, x).sum()
    assert found.requires_grad
    with pytest.raises(RuntimeError, match="ccq::test_scaled_square_backward has no derivative"):
        found.backward()


def test_a_second_derivative_is_refused_whatever_was_saved() -> None:
    """What the backward pass reads may be an output that has no gradient itself, or stand in a list."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (d_x,) = torch.autograd.grad(scaled_square(x, None, 1.0)[0].sum(), x, create_graph=True)
    assert torch.equal(d_x, 2 * x) and d_x.requires_grad
    with pytest.raises(RuntimeError, match="ccq::test_scaled_square has no derivative"):
        (d_x.square().sum() + 0 * x.sum()).backward()
    assert not torch.autograd.grad(scaled_square(x, None, 1.0)[0].sum(), x)[0].requires_grad


@custom_operator("test_sum_of_squares", schema="(Tensor[] tensors) -> Tensor")
def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    return sum((x * x for x in tensors), torch.zeros(3))


def test_a_gradient_in_a_list_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    assert torch.equal(sum_of_squares([x.detach(), x.detach()]), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="ccq::test_sum_of_squares has no derivative"):
        (sum_of_squares([x, x]) + 0 * x).sum().backward()


@custom_operator("test_multiples", schema="(Tensor x, int count) -> Tensor[]")
def multiples(x: Tensor, count: int) -> list[Tensor]:
    return [i * x for i in range(1, count + 1)]


def test_a_gradient_through_a_list_that_comes_back_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    assert [y.tolist() for y in multiples(x.detach(), 2)] == [[1.0] * 3, [2.0] * 3]
    with pytest.raises(RuntimeError, match="ccq::test_multiples has no derivative"):
        (multiples(x, 2)[1] + x).sum().backward()


@custom_operator("test_take_in", schema="(Tensor x, Tensor(a!) total, Tensor(b!)[] others) -> Tensor")
def take_in(x: Tensor, total: Tensor, others: list[Tensor]) -> Tensor:
    """Adds x to the total and to the others; twice x."""
    for each in (total, *others):
        each.add_(x)
    return 2 * x


@take_in.register_fake
def _(x: Tensor, total: Tensor, others: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape)


def totals() -> tuple[Tensor, list[Tensor]]:
    return torch.zeros(3), [torch.ones(3), torch.full((3,), 2.0)]


def test_what_is_overwritten_is_known_to_autograd() -> None:
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    for place in range(3):
        total, others = totals()
        products = [weight * each for each in (total, *others)]
        assert torch.equal(take_in(x, total, others), 2 * x)
        assert torch.equal(torch.stack((total, *others)), torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            products[place].sum().backward()
    with torch.inference_mode():
        inside = totals()
        take_in(x, *inside)
        assert torch.equal(inside[0], x)


def test_what_overwrites_takes_no_gradient() -> None:
    x, (total, others) = torch.ones(3, requires_grad=True), totals()
    with pytest.raises(RuntimeError, match=r"ccq::test_take_in overwrites .* torch\.no_grad"):
        take_in(x, total, others)
    assert not total.any()
    with torch.no_grad():
        take_in(x, total, others)
    assert torch.equal(total, torch.ones(3))


def test_what_overwrites_compiles_and_keeps_its_promises() -> None:
    library.opcheck(take_in.overload, (torch.ones(3), *totals()))

    def twice(x: Tensor, total: Tensor, others: list[Tensor]) -> Tensor:
        return take_in(take_in(x, total, others), total, others) + total

    results = []
    for function in (twice, torch.compile(twice, backend="aot_eager", fullgraph=True)):
        total, others = totals()
        results.append(torch.stack((function(torch.ones(3), total, others), total, *others)))
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own
def test_derivatives_in_forward_mode_are_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="ccq::test_scaled_square has no derivative"):
        torch.func.jvp(lambda x: scaled_square(x, None, 1.0)[0], (x,), (x,))


def test_a_node_of_a_graph_has_the_name_of_its_operator() -> None:
    x, weight = inputs()
    node = scaled_square(x, weight, 1.0)[0].grad_fn
    assert type(node).__name__ == "ccq_test_scaled_squareBackward"


def _backward_and_passed(ctx: Any, gradient: Tensor | None, _: Any, passed: Tensor | None = None) -> tuple[Any, ...]:
    if gradient is None:
        return passed, None, None
    d_x, *others = _backward(ctx, gradient, None)
    return d_x if passed is None else d_x + passed, *others


def test_an_argument_passes_through_and_its_gradient_comes_along() -> None:
    @custom_operator("test_passing", schema="(Tensor x, Tensor? weight, float scale) -> (Tensor, Tensor)")
    def passing(x: Tensor, weight: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        square = scale * x * x
        return square if weight is None else weight * square, 2 * x

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    passing.register_autograd(_backward_and_passed, setup_context=setup_context, passed=0)
    x, weight = inputs()
    square, double, passed = passing.with_passed(x, weight, 0.5)
    assert torch.equal(passed, x) and passed is not x and not double.requires_grad
    assert passed.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for loss, expected in (
        ((square * passed.sin()).sum(), (0.5 * weight * x * x * x.sin()).sum()),
        (passed.sin().sum(), x.sin().sum()),
        (square.sum(), (0.5 * weight * x * x).sum()),
    ):
        found = torch.autograd.grad(loss, (x, weight), retain_graph=True, allow_unused=True)
        for actual, wanted in zip(found, torch.autograd.grad(expected, (x, weight), allow_unused=True), strict=True):
            assert (actual is None) == (wanted is None)
            assert actual is None or torch.allclose(actual, wanted, rtol=1e-12)
    # Nothing can reach it, so there is nothing to pass.
    still = x.detach()
    assert passing.with_passed(still, weight, 0.5)[2] is still
    with torch.no_grad():
        assert passing.with_passed(x, weight, 0.5)[2] is x


def test_it_keeps_the_promises_of_an_operator() -> None:
    x, weight = inputs()
    library.opcheck(scaled_square.overload, (x, weight, 0.5))
    library.opcheck(scaled_square.overload, (x, None, 0.5))


def test_compiled_in_one_graph() -> None:
    def twice(x: Tensor, weight: Tensor) -> Tensor:
        return scaled_square(scaled_square(x.sin(), weight, 0.5)[0], None, 2.0)[0].cos()

    eager = inputs()
    expected = torch.autograd.grad(twice(*eager).sum(), eager)
    compiled = inputs()
    found = torch.compile(twice, backend="aot_eager", fullgraph=True)(*compiled)
    assert torch.allclose(found, twice(*eager), rtol=1e-12)
    for actual, wanted in zip(torch.autograd.grad(found.sum(), compiled), expected, strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-12)


def test_shapes_without_numbers() -> None:
    x, weight = (value.to("meta") for value in inputs(gradient=False))
    assert scaled_square(x, weight, 1.0)[0].shape == (3, 4)


def _rule_inputs() -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(1, 9, 2, 4, dtype=torch.float64) for _ in range(3))
    return q, k, v, -torch.rand(1, 9, 2, dtype=torch.float64)


def _losses() -> dict[str, Callable[[Tensor], Tensor]]:
    """By name: a sum of the outputs of each function that has a backward pass of its own, as a function of q."""
    _, k, v, decay = _rule_inputs()
    targets, weights = torch.tensor([1, 0]), torch.ones(2, dtype=torch.float64)
    head, gate = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    return {
        "curvature_conditioned_query": lambda x: curvature_conditioned_query(x, k, 0.5, backend="torch").query.sum(),
        "gated_linear_attention": lambda x: gated_linear_attention(
            x, k, v, decay.unsqueeze(-1).expand_as(k), backend="torch"
        ).output.sum(),
        "gated_delta_rule": lambda x: gated_delta_rule(x, k, v, decay, decay.exp(), backend="torch").output.sum(),
        "state_space_duality": lambda x: state_space_duality(x, k, v, decay, backend="torch").output.sum(),
        "gated_group_rms_norm": lambda x: gated_group_rms_norm(x, gate.expand_as(x), gate, groups=1, eps=1e-6).sum(),
        "linear_cross_entropy": lambda x: linear_cross_entropy(x[0, :2, 0], head, targets, weights).total,
        "the solution": lambda x: exact_query(x, k, 0.5).query.sum(),
    }


@pytest.mark.parametrize("name", _losses())
def test_a_backward_pass_of_its_own_is_not_taken_for_a_constant(name: str) -> None:
    """Behind a sum, where the gradient that arrives has no history, and added to what has a second derivative."""
    loss = _losses()[name]
    leaf = _rule_inputs()[0].requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    plain = torch.autograd.grad(loss(leaf), leaf)[0]
    assert not plain.requires_grad and torch.equal(first, plain)
    with pytest.raises(RuntimeError, match=f"{name} has no derivative, and one is asked for"):
        (first.square().sum() + leaf.square().sum()).backward()
