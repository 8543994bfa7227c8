"""The decays in Triton: that of gated linear attention and its gradient, number by number, and the linear map in front
of it where there are few vectors; that of the gated delta rule, and its strength beside it.

Legend: R vectors, K inputs, C channels (BC a program), H heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.early_launch import early_launch, follow

NUMBERS = 1024
"""Of a program."""
CHANNELS = 128
"""BC"""


@triton.jit
def _log_sigmoid(x):
    b_z = tl.exp(-tl.abs(x))
    # log(1 + z) to the last digit: what rounding 1 + z loses, the quotient loses too (Goldberg 1991, theorem 4).
    b_u = 1.0 + b_z
    b_l = tl.where(b_u == 1.0, b_z, tl.log(b_u) * (b_z / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.minimum(x, 0.0) - b_l


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(x, y, count, normalizer, NUMBERS: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    b_x = tl.load(x + where, mask=where < count, other=0.0).to(tl.float32)
    tl.store(y + where, _log_sigmoid(b_x) / normalizer, mask=where < count)


@triton.jit(do_not_specialize=["count"])
def _backward_kernel(dy, x, dx, count, normalizer, NUMBERS: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    b_x = tl.load(x + where, mask=where < count, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + where, mask=where < count, other=0.0).to(tl.float32)
    tl.store(dx + where, (b_dy * tl.sigmoid(-b_x) / normalizer).to(dx.dtype.element_ty), mask=where < count)


@triton.jit
def _low_rank_kernel(
    x,
    weight,
    bias,
    y,
    normalizer,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    channel, column = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BK)
    vector = tl.program_id(1).to(tl.int64)
    b_x = tl.load(x + vector * K + column, mask=column < K, other=0.0)
    inside = (channel < C)[:, None] & (column < K)
    b_w = tl.load(weight + channel[:, None] * K + column, mask=inside, other=0.0)
    b_z = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32), 1)
    b_z += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    # Rounded where the linear map by itself is.
    b_z = b_z.to(x.dtype.element_ty).to(tl.float32)
    tl.store(y + vector * C + channel, _log_sigmoid(b_z) / normalizer, mask=channel < C)


@triton.jit(do_not_specialize=["count"])
def _delta_kernel(
    steps,
    strengths,
    a_log,
    bias,
    log_decay,
    beta,
    count,
    H: tl.constexpr,
    NUMBERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    where = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside, head = where < count, where % H
    b_z = tl.load(steps + where, mask=inside, other=0.0).to(tl.float32)
    b_z += tl.load(bias + head, mask=inside, other=0.0).to(tl.float32)
    b_a = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    # softplus(z) = -logsigmoid(-z)
    tl.store(log_decay + where, b_a * _log_sigmoid(-b_z), mask=inside)
    b_s = tl.load(strengths + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + where, tl.sigmoid(b_s), mask=inside)


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


def low_rank(x: Tensor, weight: Tensor, bias: Tensor, normalizer: float) -> Tensor:
    """x [R, K], weight [C, K], bias [C], all contiguous -> [R, C] float32."""
    vectors, size = x.shape
    channels = len(weight)
    y = x.new_empty((vectors, channels), dtype=torch.float32)
    _low_rank_kernel[(triton.cdiv(channels, CHANNELS), vectors)](
        x, weight, bias, y, float(normalizer), K=size, C=channels, BK=triton.next_power_of_2(size), BC=CHANNELS,
        **early_launch(x.device),
    )  # fmt: skip
    return y


def delta(steps: Tensor, strengths: Tensor, a_log: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """steps, strengths [R, H], a_log, bias [H], all contiguous -> log decay and beta [R, H] float32."""
    log_decay, beta = (torch.empty_like(steps, dtype=torch.float32) for _ in range(2))
    _delta_kernel[(triton.cdiv(steps.numel(), NUMBERS),)](
        steps, strengths, a_log, bias, log_decay, beta, steps.numel(), H=len(a_log), NUMBERS=NUMBERS,
        num_warps=4, **early_launch(steps.device),
    )  # fmt: skip
    return log_decay, beta
