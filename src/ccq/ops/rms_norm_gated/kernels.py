"""The norm of few vectors times silu(gate) in Triton: one vector of size V (BV the next power of two) a program.

For decoding, where the kernel of flash-linear-attention, which serves many vectors, would be the one of a layer that
does not start early (`ccq.ops.early_launch`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.early_launch import early_launch, follow


@triton.jit
def _few_kernel(x, gate, weight, y, eps, V: tl.constexpr, BV: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    column = tl.arange(0, BV)
    at, fits = tl.program_id(0).to(tl.int64) * V + column, column < V
    b_x = tl.load(x + at, mask=fits, other=0.0).to(tl.float32)
    b_g = tl.load(gate + at, mask=fits, other=0.0).to(tl.float32)
    b_w = tl.load(weight + column, mask=fits, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / V + eps) * b_w * b_g * tl.sigmoid(b_g)
    tl.store(y + at, b_y.to(y.dtype.element_ty), mask=fits)


def few(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, gate [R, V], weight [V], all contiguous -> like x."""
    y, size = torch.empty_like(x), x.shape[1]
    _few_kernel[(len(x),)](
        x, gate, weight, y, eps, V=size, BV=triton.next_power_of_2(size), num_warps=4, **early_launch(x.device)
    )
    return y
