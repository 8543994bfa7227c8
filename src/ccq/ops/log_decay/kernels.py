"""logsigmoid(x) / normalizer and its gradient in Triton, number by number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 1024
"""Of a program."""


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(x, y, count, normalizer, NUMBERS: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    b_x = tl.load(x + where, mask=where < count, other=0.0).to(tl.float32)
    b_z = tl.exp(-tl.abs(b_x))
    # log(1 + z) to the last digit: what rounding 1 + z loses, the quotient loses too (Goldberg 1991, theorem 4).
    b_u = 1.0 + b_z
    b_l = tl.where(b_u == 1.0, b_z, tl.log(b_u) * (b_z / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    tl.store(y + where, (tl.minimum(b_x, 0.0) - b_l) / normalizer, mask=where < count)


@triton.jit(do_not_specialize=["count"])
def _backward_kernel(dy, x, dx, count, normalizer, NUMBERS: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    b_x = tl.load(x + where, mask=where < count, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + where, mask=where < count, other=0.0).to(tl.float32)
    tl.store(dx + where, (b_dy * tl.sigmoid(-b_x) / normalizer).to(dx.dtype.element_ty), mask=where < count)


def forward(x: Tensor, normalizer: float) -> Tensor:
    """float32, of contiguous x."""
    y = torch.empty_like(x, dtype=torch.float32)
    _forward_kernel[(triton.cdiv(x.numel(), NUMBERS),)](
        x, y, x.numel(), float(normalizer), NUMBERS=NUMBERS, num_warps=4
    )
    return y


def backward(dy: Tensor, x: Tensor, normalizer: float) -> Tensor:
    """In the dtype of x; both contiguous."""
    dx = torch.empty_like(x)
    _backward_kernel[(triton.cdiv(x.numel(), NUMBERS),)](
        dy, x, dx, x.numel(), float(normalizer), NUMBERS=NUMBERS, num_warps=4
    )
    return dx
