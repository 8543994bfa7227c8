"""Linear maps of a few vectors in Triton.

Legend: R vectors (BR, the next power of two, at least 16), K inputs (BK a step), N outputs (BN a program), S programs
that share an output.

A program reads BN rows of one weight, many steps ahead, and multiplies them with all vectors: weights are read once,
which is what decoding takes. Sums are float32 and in a fixed order, so that no result depends on the vectors beside it.
Where several maps are computed together there are programs enough for each to read its rows from the first column to
the last; those of one map have parts of the columns, and another kernel adds their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.early_launch import early_launch, follow


class Launch(NamedTuple):
    outputs: int
    """BN"""
    inputs: int
    """BK"""
    warps: int
    stages: int


JOINT = Launch(outputs=32, inputs=128, warps=2, stages=5)
"""All are the best in whole steps of 1.3B models on an H200. Alone the five maps of a GLA layer (2048 inputs, 9,232
outputs) take 13 us for 8 vectors and as five products of a matrix library 28; their weights are read in 9.
"""
GATED = Launch(outputs=32, inputs=128, warps=4, stages=4)
"""The same: 17.5 us for 2048 inputs and 2 x 5632 outputs, 20 as two products and the formula behind; read in 11."""
SINGLE = Launch(outputs=64, inputs=128, warps=4, stages=4)
"""The maps behind the write rule and behind SwiGLU (3072 and 5632 inputs, 2048 outputs) alone are no faster than those
of a matrix library, but they start early: a step of GLA + ccq takes 2 % less.
"""
STEPS = 4
"""Of a program where an output is shared: S = K / (STEPS * BK)."""
NUMBERS = 128
"""That a program adds up."""


@triton.jit
def _load_step(x, row, column, rows, K: tl.constexpr):
    return tl.load(x + row[:, None] * K + column, mask=(row < rows)[:, None] & (column < K), other=0.0)


@triton.jit
def _product(
    x,
    weight,
    y,
    tile,
    begin,
    end,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BN outputs, from the columns `begin` to `end`."""
    row, output = tl.arange(0, BR), tile * BN + tl.arange(0, BN)
    line = output.to(tl.int64)
    b_y = tl.zeros((BR, BN), tl.float32)
    for start in range(begin, end, BK):
        column = start + tl.arange(0, BK)
        b_x = _load_step(x, row, column, rows, K)
        b_w = _load_step(weight, line, column, N, K)
        b_y = tl.dot(b_x, tl.trans(b_w), b_y)
    tl.store(y + row[:, None] * N + output, b_y.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (output < N))


@triton.jit(do_not_specialize=["rows"])
def _joint_kernel(
    x,
    weights,
    outputs,
    rows,
    K: tl.constexpr,
    SIZES: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    tile = tl.program_id(0)
    for i in tl.static_range(len(SIZES)):
        tiles = (SIZES[i] + BN - 1) // BN
        if (tile >= 0) & (tile < tiles):
            _product(x, weights[i], outputs[i], tile, 0, K, rows, K, SIZES[i], BR, BN, BK)
        tile -= tiles


@triton.jit(do_not_specialize=["rows"])
def _part_kernel(
    x,
    weight,
    parts,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """parts [S, R, N]"""
    follow(EARLY)
    begin, part = tl.program_id(1) * STEPS * BK, tl.program_id(1).to(tl.int64)
    y = parts + part * rows * N
    _product(x, weight, y, tl.program_id(0), begin, begin + STEPS * BK, rows, K, N, BR, BN, BK)


@triton.jit(do_not_specialize=["numbers"])
def _sum_kernel(
    parts,
    beside,
    y,
    numbers,
    S: tl.constexpr,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
    BESIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """With BESIDE those numbers are added to the sums, which are rounded before."""
    follow(EARLY)
    part, at = tl.arange(0, BS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (part < S)[:, None] & (at < numbers)
    b_y = tl.sum(tl.load(parts + part[:, None] * numbers + at, mask=inside, other=0.0), 0)
    dtype: tl.constexpr = y.dtype.element_ty
    if BESIDE:
        b_y = b_y.to(dtype).to(tl.float32) + tl.load(beside + at, mask=at < numbers, other=0.0).to(tl.float32)
    tl.store(y + at, b_y.to(dtype), mask=at < numbers)


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x,
    gate,
    weight,
    y,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    row, output = tl.arange(0, BR), tl.program_id(0) * BN + tl.arange(0, BN)
    line = output.to(tl.int64)
    b_g, b_y = tl.zeros((BR, BN), tl.float32), tl.zeros((BR, BN), tl.float32)
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        b_x = _load_step(x, row, column, rows, K)
        b_v = _load_step(gate, line, column, N, K)
        b_w = _load_step(weight, line, column, N, K)
        b_g = tl.dot(b_x, tl.trans(b_v), b_g)
        b_y = tl.dot(b_x, tl.trans(b_w), b_y)
    dtype: tl.constexpr = y.dtype.element_ty
    # Rounded where the maps by themselves are.
    b_g, b_y = b_g.to(dtype).to(tl.float32), b_y.to(dtype).to(tl.float32)
    b_y = b_g * tl.sigmoid(b_g) * b_y
    tl.store(y + row[:, None] * N + output, b_y.to(dtype), mask=(row < rows)[:, None] & (output < N))


def single(x: Tensor, weight: Tensor, dtype: torch.dtype, beside: Tensor | None = None) -> Tensor:
    """x weight^T in `dtype`, added to `beside` [R, N] of that dtype: x [R, K], weight [N, K], all contiguous."""
    (rows, size), outputs = x.shape, len(weight)
    shares = triton.cdiv(size, STEPS * SINGLE.inputs)
    parts = x.new_empty((shares, rows, outputs), dtype=torch.float32)
    early = early_launch(x.device)
    _part_kernel[(triton.cdiv(outputs, SINGLE.outputs), shares)](
        x, weight, parts, rows, K=size, N=outputs, BR=max(16, triton.next_power_of_2(rows)),
        BN=SINGLE.outputs, BK=SINGLE.inputs, STEPS=STEPS, num_warps=SINGLE.warps, num_stages=SINGLE.stages, **early,
    )  # fmt: skip
    y = x.new_empty((rows, outputs), dtype=dtype)
    _sum_kernel[(triton.cdiv(y.numel(), NUMBERS),)](
        parts, y if beside is None else beside, y, y.numel(), S=shares, BS=triton.next_power_of_2(shares),
        BLOCK=NUMBERS, BESIDE=beside is not None, num_warps=4, **early,
    )  # fmt: skip
    return y


def joint(x: Tensor, weights: Sequence[Tensor], wide: int) -> list[Tensor]:
    """x [R, K], weights [N, K] each, all contiguous -> [R, N] each, the last `wide` in float32."""
    if len(weights) == 1:
        return [single(x, weights[0], torch.float32 if wide else x.dtype)]
    rows, size = x.shape
    sizes = tuple(len(weight) for weight in weights)
    dtypes = [x.dtype] * (len(sizes) - wide) + [torch.float32] * wide
    outputs = [x.new_empty((rows, each), dtype=dtype) for each, dtype in zip(sizes, dtypes, strict=True)]
    _joint_kernel[(sum(triton.cdiv(each, JOINT.outputs) for each in sizes),)](
        x, tuple(weights), tuple(outputs), rows, K=size, SIZES=sizes, BR=max(16, triton.next_power_of_2(rows)),
        BN=JOINT.outputs, BK=JOINT.inputs, num_warps=JOINT.warps, num_stages=JOINT.stages,
        **early_launch(x.device),
    )  # fmt: skip
    return outputs


def gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """silu(x gate^T) * (x weight^T): x [R, K], gate and weight [N, K], all contiguous -> [R, N]."""
    rows, size = x.shape
    y = x.new_empty((rows, len(weight)))
    _gated_kernel[(triton.cdiv(len(weight), GATED.outputs),)](
        x, gate, weight, y, rows, K=size, N=len(weight), BR=max(16, triton.next_power_of_2(rows)),
        BN=GATED.outputs, BK=GATED.inputs, num_warps=GATED.warps, num_stages=GATED.stages,
        **early_launch(x.device),
    )  # fmt: skip
    return y


def added(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual + x weight^T: residual [R, N], x [R, K], weight [N, K], all contiguous -> [R, N]."""
    return single(x, weight, x.dtype, residual)
