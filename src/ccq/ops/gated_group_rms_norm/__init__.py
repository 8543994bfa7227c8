"""The norm at the end of a Mamba2 layer, keeping nothing but its inputs for the backward pass.

Recorded by autograd it keeps six float32 vectors a token: 49 of the 111 KB that a block of 500M keeps of a token
under autocast to bfloat16, in 65 blocks. With s = x + skip * values, a = silu(gate), z = s * a, r = rsqrt(mean(z^2) +
eps) over a group and n = z * r, the output is n * weight, and for a gradient dy and dn = dy * weight

    dz = r (dn - n mean(dn * n)),  ds = dz * a,  d_gate = dz * s * silu'(gate),  d_weight = sum of dy * n,

and with ds those of x, values and skip. On a GPU one kernel computes it in each direction. Composed from PyTorch it
takes about sixty, most of them over float32 copies: a training step of the 500M model (H200, 32,768 tokens) took 1,030
ms and takes 579.

| operator | what it is |
| --- | --- |
| ccq::gated_group_rms_norm | the norm by its kernel, differentiable |
| ccq::gated_group_rms_norm_backward | its gradients |
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.operators import TRITON_INSTALLED, custom_operator, differentiable_once

MAX_SIZE = 16_384
"""Of a group, which the kernels hold in registers."""


def _kernels() -> ModuleType:
    from ccq.ops.gated_group_rms_norm import kernels

    return kernels


def _side_by_side(x: Tensor) -> Tensor:
    """The same with the channels of a vector next to each other, as a part of a projection has them."""
    return x if x.stride(1) == 1 else x.contiguous()


@custom_operator(
    "gated_group_rms_norm",
    schema="(Tensor x, Tensor gate, Tensor weight, Tensor? values, Tensor? skip, int groups, float eps) -> Tensor",
)
def forward(
    x: Tensor, gate: Tensor, weight: Tensor, values: Tensor | None, skip: Tensor | None, groups: int, eps: float
) -> Tensor:
    """x, gate, values [T, S], weight, skip [S]: the norm, like x."""
    others = None if values is None else _side_by_side(values)
    factors = None if skip is None else skip.contiguous()
    with torch.cuda.device_of(x):
        y: Tensor = _kernels().forward(
            _side_by_side(x), _side_by_side(gate), weight.contiguous(), others, factors, groups, eps
        )
    return y


@forward.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@custom_operator(
    "gated_group_rms_norm_backward",
    schema="(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor? values, Tensor? skip, int groups, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    values: Tensor | None,
    skip: Tensor | None,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """The gradients in x, gate, weight, values and skip, empty without these."""
    others = None if values is None else _side_by_side(values)
    factors = None if skip is None else skip.contiguous()
    with torch.cuda.device_of(x):
        found = _kernels().backward(
            dy.contiguous(), _side_by_side(x), _side_by_side(gate), weight.contiguous(), others, factors, groups, eps
        )
    return tuple(x.new_empty(0) if each is None else each for each in found)


@backward.register_fake
def _(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(dy.new_empty(0) if each is None else each.new_empty(each.shape) for each in inputs[:5])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.groups, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = torch.ops.ccq.gated_group_rms_norm_backward(dy, *tensors, ctx.groups, ctx.eps)
    return *(None if x is None else each for x, each in zip(tensors, found, strict=True)), None, None


forward.register_autograd(_backward, setup_context=_setup_context)


def is_chosen(x: Tensor, groups: int, *others: Tensor) -> bool:
    """Whether the kernels compute it; `others` are all tensors beside x."""
    sizes = x.numel() > 0 and x.shape[-1] // groups <= MAX_SIZE
    return x.is_cuda and TRITON_INSTALLED and sizes and all(y.dtype != torch.float64 for y in (x, *others))


def gated_group_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    groups: int,
    eps: float,
    values: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """RMS norm of (x + skip * values) * silu(gate) over each of `groups` equal parts of the last dimension, times
    weight (Dao and Gu, arXiv:2405.21060).

    Args:
        x, gate, values: [..., S]; `groups` divides S.
        weight: [S].
        skip: [S], given where values are.

    Returns:
        [..., S] in the dtype of x; computed in float32 (float64 for float64 input). Differentiable once.
    """
    arguments = (x, gate, weight, values, skip)
    if torch.compiler.is_compiling():
        # The compiler fuses the formula, and decides itself what it keeps.
        return _formula(*arguments, groups, eps)
    if is_chosen(x, groups, *(each for each in arguments[1:] if each is not None)):
        flat = (None if each is None else each.reshape(-1, x.shape[-1]) for each in (x, gate, values))
        flat_x, flat_gate, flat_values = flat
        found: Tensor = torch.ops.ccq.gated_group_rms_norm(flat_x, flat_gate, weight, flat_values, skip, groups, eps)
        return found.view(x.shape)
    y: Tensor = _GatedGroupRMSNorm.apply(*arguments, groups, eps)
    return y


def _sum(x: Tensor, values: Tensor | None, skip: Tensor | None) -> Tensor:
    """s"""
    s = x.to(accumulation_dtype(x.dtype))
    return s if values is None or skip is None else s + skip.to(s.dtype) * values.to(s.dtype)


def _formula(
    x: Tensor, gate: Tensor, weight: Tensor, values: Tensor | None, skip: Tensor | None, groups: int, eps: float
) -> Tensor:
    s = _sum(x, values, skip)
    z = (s * F.silu(gate.to(s.dtype))).unflatten(-1, (groups, -1))
    n = F.rms_norm(z, z.shape[-1:], eps=eps).flatten(-2)
    return (n * weight.to(n.dtype)).to(x.dtype)


class _GatedGroupRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.groups, ctx.eps = arguments
        ctx.save_for_backward(*tensors)
        with torch.autocast(tensors[0].device.type, enabled=False):
            return _formula(*arguments)

    @staticmethod
    @differentiable_once("gated_group_rms_norm")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, values, skip = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            s = _sum(x, values, skip)
            g = gate.to(s.dtype)
            share = torch.sigmoid(g)
            z = (s * g * share).unflatten(-1, (ctx.groups, -1))
            r = torch.rsqrt(z.square().mean(-1, keepdim=True) + ctx.eps)
            n = z * r
            dy = dy.to(n.dtype)
            dn = (dy * weight.to(n.dtype)).unflatten(-1, (ctx.groups, -1))
            dz = (r * (dn - n * (dn * n).mean(-1, keepdim=True))).flatten(-2)
            ds = dz * g * share
            d_gate = dz * s * (share * (1 + g * (1 - share)))
            d_weight = (dy * n.flatten(-2)).flatten(0, -2).sum(0)
            d_values = d_skip = None
            if values is not None and skip is not None:
                d_values = (ds * skip.to(ds.dtype)).to(values.dtype)
                d_skip = (ds * values).flatten(0, -2).sum(0).to(skip.dtype)
            return ds.to(x.dtype), d_gate.to(gate.dtype), d_weight.to(weight.dtype), d_values, d_skip, None, None
