"""The thin linear map in Triton.

Legend: R rows of x (BR a block), E columns (BE a block), H outputs (BH the next power of two, at least 16), G groups of
row blocks.

Backward, with z = x W^T + b and dz = dy, or dy * y * (1 - y) behind a sigmoid: dx = dz W, dW = dz^T x, db = sum of dz.
dx needs no x, so that two kernels move no more than one that does it all, and each has little to keep: together they
take 78 us on an H200 at 32,768 x 1536, bfloat16, H 6, where one took 124 (at 4,096 rows 22 and 21). What else is to
reach dx (`beside`) is added before that is rounded: 30 us more, where a pass of its own took about 70.

For dW a program holds BE columns of it and walks over the row blocks of its group; the sums of the groups are added up
outside. A row without any gradient takes no part, whatever x holds there: padding may be NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128
"""BE"""
ROWS = {"forward": 32, "input": 64, "weight": 64}
"""BR"""
WANTED_PROGRAMS = 528
"""For dW: four for each processor of an H200; half and twice as many are as fast."""


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x,
    weight,
    bias,
    y,
    rows,
    E: tl.constexpr,
    H: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BH: tl.constexpr,
    PRECISION: tl.constexpr,
    BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    output = tl.arange(0, BH)
    b_z = tl.zeros((BR, BH), tl.float32)
    for start in range(0, E, BE):
        column = start + tl.arange(0, BE)
        fits = column < E
        b_x = tl.load(x + row[:, None] * E + column, mask=(row < rows)[:, None] & fits, other=0.0)
        b_w = tl.load(weight + output[:, None] * E + column, mask=(output < H)[:, None] & fits, other=0.0)
        b_z = tl.dot(b_x, tl.trans(b_w.to(b_x.dtype)), b_z, input_precision=PRECISION)
    if BIAS:
        b_z += tl.load(bias + output, mask=output < H, other=0.0).to(tl.float32)
    if SIGMOID:
        b_z = tl.sigmoid(b_z)
    tl.store(y + row[:, None] * H + output, b_z, mask=(row < rows)[:, None] & (output < H))


@triton.jit(do_not_specialize=["rows"])
def _input_gradients_kernel(
    dy,
    y,
    weight,
    beside,
    d_x,
    slopes,
    d_bias,
    rows,
    E: tl.constexpr,
    H: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BH: tl.constexpr,
    PRECISION: tl.constexpr,
    SIGMOID: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """dx, dz in the dtype of x with columns of zeros behind it, slopes [R, BH], and db of each block, [blocks, H]."""
    parts: tl.constexpr = (E + BE - 1) // BE
    block, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, column, output = block.to(tl.int64) * BR + tl.arange(0, BR), part * BE + tl.arange(0, BE), tl.arange(0, BH)
    counts, fits, real = output < H, column < E, row < rows
    dtype: tl.constexpr = d_x.dtype.element_ty
    b_dz = tl.load(dy + row[:, None] * H + output, mask=real[:, None] & counts, other=0.0).to(tl.float32)
    if SIGMOID:
        b_y = tl.load(y + row[:, None] * H + output, mask=real[:, None] & counts, other=0.0)
        b_dz = tl.where(b_dz == 0, 0.0, b_dz * b_y * (1 - b_y))
    if part == 0:
        tl.store(d_bias + block * H + output, tl.sum(b_dz, 0), mask=counts)
        tl.store(slopes + row[:, None] * BH + output, b_dz.to(dtype), mask=real[:, None])
    b_w = tl.load(weight + output[:, None] * E + column, mask=counts[:, None] & fits, other=0.0)
    b_dx = tl.dot(b_dz.to(dtype), b_w.to(dtype), input_precision=PRECISION)
    at, inside = row[:, None] * E + column, real[:, None] & fits
    if BESIDE:
        b_dx += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_x + at, b_dx.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows", "per_group"])
def _weight_gradients_kernel(
    slopes,
    x,
    d_weight,
    rows,
    per_group,
    E: tl.constexpr,
    H: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d_weight [G, H, E]: dW of a group."""
    column = tl.program_id(0) * BE + tl.arange(0, BE)
    group = tl.program_id(1).to(tl.int64)
    output, fits = tl.arange(0, BH), column < E
    b_dw = tl.zeros((BH, BE), tl.float32)
    for block in range(per_group):
        row = (group * per_group + block) * BR + tl.arange(0, BR)
        b_dz = tl.load(slopes + row[:, None] * BH + output, mask=(row < rows)[:, None], other=0.0)
        takes_part = tl.max(tl.abs(b_dz.to(tl.float32)), 1) > 0
        b_x = tl.load(x + row[:, None] * E + column, mask=takes_part[:, None] & fits, other=0.0)
        b_dw = tl.dot(tl.trans(b_dz), b_x, b_dw, input_precision=PRECISION)
    target = d_weight + (group * H + output[:, None]) * E + column
    tl.store(target, b_dw, mask=(output < H)[:, None] & fits)


def _sizes(x: Tensor, weight: Tensor) -> dict[str, Any]:
    return {
        "E": x.shape[1],
        "H": len(weight),
        "BE": COLUMNS,
        "BH": max(16, triton.next_power_of_2(len(weight))),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sigmoid: bool) -> Tensor:
    rows = len(x)
    y = x.new_empty((rows, len(weight)), dtype=torch.float32)
    # A pointer that a kernel does not use must still be one.
    _forward_kernel[(triton.cdiv(rows, ROWS["forward"]),)](
        x, weight, weight if bias is None else bias, y, rows,
        BR=ROWS["forward"], BIAS=bias is not None, SIGMOID=sigmoid, num_warps=4, num_stages=4, **_sizes(x, weight),
    )  # fmt: skip
    return y


def backward(
    dy: Tensor, y: Tensor | None, x: Tensor, weight: Tensor, beside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, columns), outputs = x.shape, len(weight)
    sizes, parts = _sizes(x, weight), triton.cdiv(columns, COLUMNS)
    d_x, slopes = torch.empty_like(x), x.new_empty((rows, sizes["BH"]))
    blocks = triton.cdiv(rows, ROWS["input"])
    d_bias = x.new_empty((blocks, outputs), dtype=torch.float32)
    # A pointer that a kernel does not use must still be one.
    _input_gradients_kernel[(parts * blocks,)](
        dy, dy if y is None else y, weight, x if beside is None else beside, d_x, slopes, d_bias, rows,
        BR=ROWS["input"], SIGMOID=y is not None, BESIDE=beside is not None, num_warps=4, **sizes,
    )  # fmt: skip
    blocks = triton.cdiv(rows, ROWS["weight"])
    per_group = triton.cdiv(blocks, max(1, WANTED_PROGRAMS // parts))
    groups = triton.cdiv(blocks, per_group)
    d_weight = x.new_empty((groups, outputs, columns), dtype=torch.float32)
    _weight_gradients_kernel[(parts, groups)](
        slopes, x, d_weight, rows, per_group, BR=ROWS["weight"], num_warps=4,
        # In float32 Triton 3.7.1 keeps too few slopes for a pipeline: they are overwritten before they are multiplied.
        num_stages=1 if x.dtype == torch.float32 else 3, **sizes,
    )  # fmt: skip
    return d_x, d_weight.sum(0), d_bias.sum(0)
