"""The norm of Mamba2 in Triton.

Legend: T vectors of S channels in G groups of E (BE the next power of two), P programs of the backward pass a group.

The formulas are those of `ccq.ops.gated_group_rms_norm`, in float32. What is between inputs and gradients is computed
again backward, in registers. Of the gradients of weight and skip each program adds up its own vectors in a fixed order;
the sums of the programs are added outside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.early_launch import early_launch, follow

CHANNELS_PER_WARP = 256
"""Eight of a thread: with twice as many the backward pass takes all of its registers."""
MAX_WARPS = 16
PROGRAMS = 528
"""P of one group; of several, as many in all."""


@triton.jit
def _forward_kernel(
    x,
    gate,
    weight,
    values,
    skip,
    y,
    x_stride,
    gate_stride,
    values_stride,
    eps,
    G: tl.constexpr,
    E: tl.constexpr,
    BE: tl.constexpr,
    SKIP: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    vector = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BE)
    fits, channel = column < E, tl.program_id(1) * E + column
    b_s = tl.load(x + vector * x_stride + channel, mask=fits, other=0.0).to(tl.float32)
    if SKIP:
        b_v = tl.load(values + vector * values_stride + channel, mask=fits, other=0.0).to(tl.float32)
        b_s += tl.load(skip + channel, mask=fits, other=0.0).to(tl.float32) * b_v
    b_g = tl.load(gate + vector * gate_stride + channel, mask=fits, other=0.0).to(tl.float32)
    b_w = tl.load(weight + channel, mask=fits, other=0.0).to(tl.float32)
    b_z = b_s * b_g * tl.sigmoid(b_g)
    b_y = b_z * tl.rsqrt(tl.sum(b_z * b_z, 0) / E + eps) * b_w
    tl.store(y + vector * (G * E) + channel, b_y.to(y.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["vectors"])
def _backward_kernel(
    dy,
    x,
    gate,
    weight,
    values,
    skip,
    d_x,
    d_gate,
    d_weight,
    d_values,
    d_skip,
    vectors,
    x_stride,
    gate_stride,
    values_stride,
    eps,
    G: tl.constexpr,
    E: tl.constexpr,
    BE: tl.constexpr,
    SKIP: tl.constexpr,
):
    """d_weight, d_skip [P, S]"""
    column = tl.arange(0, BE)
    fits, channel = column < E, tl.program_id(1) * E + column
    b_w = tl.load(weight + channel, mask=fits, other=0.0).to(tl.float32)
    b_dw = tl.zeros((BE,), tl.float32)
    if SKIP:
        b_skip = tl.load(skip + channel, mask=fits, other=0.0).to(tl.float32)
        b_dskip = tl.zeros((BE,), tl.float32)
    for each in range(tl.program_id(0), vectors, tl.num_programs(0)):
        vector = tl.cast(each, tl.int64)
        at = vector * (G * E) + channel
        b_s = tl.load(x + vector * x_stride + channel, mask=fits, other=0.0).to(tl.float32)
        if SKIP:
            b_v = tl.load(values + vector * values_stride + channel, mask=fits, other=0.0).to(tl.float32)
            b_s += b_skip * b_v
        b_g = tl.load(gate + vector * gate_stride + channel, mask=fits, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + at, mask=fits, other=0.0).to(tl.float32)
        b_share = tl.sigmoid(b_g)
        b_a = b_g * b_share
        b_z = b_s * b_a
        b_r = tl.rsqrt(tl.sum(b_z * b_z, 0) / E + eps)
        b_n, b_dn = b_z * b_r, b_dy * b_w
        b_dz = b_r * (b_dn - b_n * (tl.sum(b_dn * b_n, 0) / E))
        b_ds = b_dz * b_a
        b_dg = b_dz * b_s * b_share * (1 + b_g * (1 - b_share))
        b_dw += b_dy * b_n
        tl.store(d_x + at, b_ds.to(d_x.dtype.element_ty), mask=fits)
        tl.store(d_gate + at, b_dg.to(d_gate.dtype.element_ty), mask=fits)
        if SKIP:
            b_dskip += b_ds * b_v
            tl.store(d_values + at, (b_ds * b_skip).to(d_values.dtype.element_ty), mask=fits)
    there = tl.program_id(0).to(tl.int64) * (G * E) + channel
    tl.store(d_weight + there, b_dw, mask=fits)
    if SKIP:
        tl.store(d_skip + there, b_dskip, mask=fits)


def _sizes(size: int, groups: int) -> dict[str, int]:
    block = triton.next_power_of_2(size // groups)
    warps = min(MAX_WARPS, max(1, block // CHANNELS_PER_WARP))
    return {"G": groups, "E": size // groups, "BE": block, "num_warps": warps}


def forward(
    x: Tensor, gate: Tensor, weight: Tensor, values: Tensor | None, skip: Tensor | None, groups: int, eps: float
) -> Tensor:
    """x, gate, values [T, S] with channels side by side, weight, skip [S] contiguous -> [T, S] in the dtype of x."""
    vectors, size = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    # A pointer that a kernel does not use must still be one.
    others, factors = (x, weight) if values is None or skip is None else (values, skip)
    _forward_kernel[(vectors, groups)](
        x, gate, weight, others, factors, y, x.stride(0), gate.stride(0), others.stride(0), eps,
        SKIP=values is not None, **_sizes(size, groups), **early_launch(x.device),
    )  # fmt: skip
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    values: Tensor | None,
    skip: Tensor | None,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients in all of them, each in its dtype and contiguous; dy contiguous, the others as in `forward`."""
    vectors, size = x.shape
    programs = min(max(1, PROGRAMS // groups), vectors)
    d_x, d_gate = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, gate))
    d_weight = x.new_empty((programs, size), dtype=torch.float32)
    others, factors, d_values, d_skip = x, weight, None, None
    if values is not None and skip is not None:
        others, factors, d_skip = values, skip, torch.empty_like(d_weight)
        d_values = torch.empty_like(values, memory_format=torch.contiguous_format)
    _backward_kernel[(programs, groups)](
        dy, x, gate, weight, others, factors, d_x, d_gate, d_weight, d_x if d_values is None else d_values,
        d_weight if d_skip is None else d_skip, vectors, x.stride(0), gate.stride(0), others.stride(0), eps,
        SKIP=values is not None, **_sizes(size, groups),
    )  # fmt: skip
    in_weight = d_weight.sum(0).to(weight.dtype)
    return d_x, d_gate, in_weight, d_values, None if d_skip is None else d_skip.sum(0).to(factors.dtype)
