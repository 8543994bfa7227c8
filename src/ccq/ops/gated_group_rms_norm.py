"""The norm at the end of a Mamba2 layer, keeping nothing but its inputs for the backward pass.

Recorded by autograd it keeps six float32 vectors a token: 49 of the 111 KB that a block of 500M keeps of a token
under autocast to bfloat16, in 65 blocks. With s = x + skip * values, a = silu(gate), z = s * a, r = rsqrt(mean(z^2) +
eps) over a group and n = z * r, the output is n * weight, and for a gradient dy and dn = dy * weight

    dz = r (dn - n mean(dn * n)),  ds = dz * a,  d_gate = dz * s * silu'(gate),  d_weight = sum of dy * n,

and with ds those of x, values and skip.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.operators import differentiable_once


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
