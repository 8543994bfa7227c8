"""Solving A x = b for a symmetric A that is given by its products alone, one system a token.

All tensors are [..., D], one vector a system.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ccq.ops.operators import differentiable_once

Product = Callable[[Tensor], Tensor]


def conjugate_gradient(product: Product, right: Tensor, start: Tensor, steps: int) -> Tensor:
    """`steps` steps of the conjugate-gradient method from `start` (Hestenes and Stiefel, 1952); A positive definite.

    A system that is solved before stays as it is.
    """
    x = start
    residual = right - product(x)
    direction = residual
    size = torch.linalg.vecdot(residual, residual).unsqueeze(-1)
    for _ in range(steps):
        pushed = product(direction)
        curvature = torch.linalg.vecdot(direction, pushed).unsqueeze(-1)
        length = size / torch.where(curvature > 0, curvature, 1)
        x = x + length * direction
        residual = residual - length * pushed
        size_after = torch.linalg.vecdot(residual, residual).unsqueeze(-1)
        direction = residual + size_after / torch.where(size > 0, size, 1) * direction
        size = size_after
    return x


def differentiable_solution(solution: Tensor, residual: Tensor, solve: Product) -> Tensor:
    """`solution` with the gradient that the solution of A x = b has in everything that A and b are made of.

    residual = b - A solution, with `solution` detached and the rest not: its gradients, given A^-1 times the gradient
    that arrives, are those of the solution (implicit differentiation). So nothing of the iteration is kept, and the
    backward pass is one more solution, by `solve`, which needs no gradients.
    """
    return _Implicit.apply(residual, solution, solve)


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, solution: Tensor, solve: Product) -> Tensor:
        ctx.solve = solve
        return solution.clone()

    @staticmethod
    @differentiable_once("the solution")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.solve(gradient), None, None
