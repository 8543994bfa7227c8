"""Linear maps of few vectors, as decoding needs them: several of the same vectors in one kernel, or one.

With 8 vectors a linear map takes the time in which its weight is read, and a matrix library, which launches a kernel
for each map, needs about as long again to begin and to end. The kernel of a map alone is no faster than the library's,
but starts while the one before it ends. No gradients: where they are wanted there are many vectors.

| operator | what it is |
| --- | --- |
| ccq::joint_linear | x W^T for several W |
| ccq::gated_linear | silu(x G^T) * (x W^T) |
| ccq::add_linear | r + x W^T |
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ccq.ops.checks import needs_gradient
from ccq.ops.operators import TRITON_INSTALLED, custom_operator

MAX_VECTORS = 16
"""The most vectors of the kernels. The products of matrix units have 16 rows, and 8 vectors were measured."""


def _kernels() -> ModuleType:
    from ccq.ops.joint_linear import kernels

    return kernels


@custom_operator("joint_linear", schema="(Tensor x, Tensor[] weights, int wide) -> Tensor[]")
def _joint(x: Tensor, weights: Sequence[Tensor], wide: int) -> list[Tensor]:
    """x [R, K], weights [N, K] each -> [R, N] each, in the dtype of x, the last `wide` of them in float32."""
    with torch.cuda.device_of(x):
        found: list[Tensor] = _kernels().joint(x.contiguous(), [weight.contiguous() for weight in weights], wide)
    return found


@_joint.register_fake
def _(x: Tensor, weights: Sequence[Tensor], wide: int) -> list[Tensor]:
    narrow = len(weights) - wide
    return [
        x.new_empty((len(x), len(weight)), dtype=x.dtype if i < narrow else torch.float32)
        for i, weight in enumerate(weights)
    ]


@custom_operator("gated_linear", schema="(Tensor x, Tensor gate, Tensor weight) -> Tensor")
def _gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """x [R, K], gate and weight [N, K] -> [R, N]."""
    with torch.cuda.device_of(x):
        y: Tensor = _kernels().gated(x.contiguous(), gate.contiguous(), weight.contiguous())
    return y


@_gated.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((len(x), len(weight)))


@custom_operator("add_linear", schema="(Tensor residual, Tensor x, Tensor weight) -> Tensor")
def _add(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual [R, N], x [R, K], weight [N, K] -> [R, N]."""
    with torch.cuda.device_of(x):
        y: Tensor = _kernels().added(residual.contiguous(), x.contiguous(), weight.contiguous())
    return y


@_add.register_fake
def _(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return residual.new_empty(residual.shape)


def is_chosen(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernels compute the maps of x."""
    if not (x.is_cuda and TRITON_INSTALLED) or torch.is_autocast_enabled(x.device.type):
        return False
    alike = all(weight.dtype == x.dtype and weight.device == x.device for weight in weights)
    half = x.dtype in (torch.float16, torch.bfloat16) and alike
    few = 0 < x.numel() <= MAX_VECTORS * x.shape[-1]
    return half and few and not needs_gradient(x, *weights)


def joint_linear(x: Tensor, weights: Sequence[Tensor], *, wide: int = 0) -> tuple[Tensor, ...]:
    """x W^T for every W, where `is_chosen`.

    Args:
        x: [..., K], float16 or bfloat16, of at most `MAX_VECTORS` vectors.
        weights: [N, K] each, dtype of x.
        wide: how many of the last outputs are to be float32.

    Returns:
        [..., N] each, in the dtype of x or float32; sums are float32.
    """
    found = torch.ops.ccq.joint_linear(x.reshape(-1, x.shape[-1]), list(weights), wide)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in found)


def gated_linear(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """silu(x G^T) * (x W^T), where `is_chosen`: the two products are rounded to the dtype of x as by themselves.

    Args:
        x: [..., K], float16 or bfloat16, of at most `MAX_VECTORS` vectors.
        gate, weight: G and W, [N, K], dtype of x.

    Returns:
        [..., N] in the dtype of x.
    """
    y: Tensor = torch.ops.ccq.gated_linear(x.reshape(-1, x.shape[-1]), gate, weight)
    return y.view(*x.shape[:-1], y.shape[-1])


def add_linear(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual + x W^T, where `is_chosen`: the product is rounded to the dtype of x as by itself.

    Args:
        residual: [..., N], dtype of x.
        x: [..., K], float16 or bfloat16, of at most `MAX_VECTORS` vectors.
        weight: W, [N, K], dtype of x.

    Returns:
        [..., N] in the dtype of x.
    """
    y: Tensor = torch.ops.ccq.add_linear(residual.reshape(-1, residual.shape[-1]), x.reshape(-1, x.shape[-1]), weight)
    return y.view(residual.shape)
