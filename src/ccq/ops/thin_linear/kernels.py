"""The thin linear map in Triton.

Legend: R rows of x (BR a block), E columns (BE a block), H outputs (BH the next power of two, at least 16), G groups of
row blocks.

Backward, with z = x W^T + b and dz = dy, or dy * y * (1 - y) behind a sigmoid: dx = dz W, dW = dz^T x, db = sum of dz.
A program holds BE columns of dW and walks over the row blocks of its group, so that x is read once for both; the sums
of the groups are added up outside. A row without any gradient takes no part, whatever x holds there: padding may be
NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128
"""BE"""
ROWS = {"forward": 32, "backward": 64}
"""BR"""
WANTED_PROGRAMS = 264
"""Of the backward pass: two for each processor of an H200. Eight are no faster (129 for 120 us at 32,768 x 1536)."""


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


@triton.jit(do_not_specialize=["rows", "per_group"])
def _backward_kernel(
    dy,
    y,
    x,
    weight,
    d_x,
    d_parameters,
    rows,
    per_group,
    E: tl.constexpr,
    H: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BH: tl.constexpr,
    PRECISION: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """d_parameters [G, H, E + 1]: dW of a group, and db in the last column."""
    column = tl.program_id(0) * BE + tl.arange(0, BE)
    group = tl.program_id(1).to(tl.int64)
    output = tl.arange(0, BH)
    fits, counts = column < E, output < H
    b_w = tl.load(weight + output[:, None] * E + column, mask=counts[:, None] & fits, other=0.0)
    b_dw = tl.zeros((BH, BE), tl.float32)
    b_db = tl.zeros((BH,), tl.float32)
    for block in range(per_group):
        row = (group * per_group + block) * BR + tl.arange(0, BR)
        real = (row < rows)[:, None] & counts
        b_dz = tl.load(dy + row[:, None] * H + output, mask=real, other=0.0).to(tl.float32)
        if SIGMOID:
            b_y = tl.load(y + row[:, None] * H + output, mask=real, other=0.0)
            b_dz = tl.where(b_dz == 0, 0.0, b_dz * b_y * (1 - b_y))
        inside = (row < rows)[:, None] & fits
        b_x = tl.load(x + row[:, None] * E + column, mask=inside, other=0.0)
        b_x = tl.where((tl.max(tl.abs(b_dz), 1) > 0)[:, None], b_x, 0.0)
        b_narrow = b_dz.to(b_x.dtype)
        b_dx = tl.dot(b_narrow, b_w.to(b_x.dtype), input_precision=PRECISION)
        tl.store(d_x + row[:, None] * E + column, b_dx.to(d_x.dtype.element_ty), mask=inside)
        b_dw = tl.dot(tl.trans(b_narrow), b_x, b_dw, input_precision=PRECISION)
        b_db += tl.sum(b_dz, 0)
    target = d_parameters + (group * H + output) * (E + 1)
    tl.store(target[:, None] + column, b_dw, mask=counts[:, None] & fits)
    if tl.program_id(0) == 0:
        tl.store(target + E, b_db, mask=counts)


def _sizes(x: Tensor, weight: Tensor) -> dict[str, object]:
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


def backward(dy: Tensor, y: Tensor | None, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (rows, columns), outputs = x.shape, len(weight)
    parts = triton.cdiv(columns, COLUMNS)
    blocks = triton.cdiv(rows, ROWS["backward"])
    per_group = triton.cdiv(blocks, max(1, WANTED_PROGRAMS // parts))
    groups = triton.cdiv(blocks, per_group)
    d_x = torch.empty_like(x)
    d_parameters = x.new_empty((groups, outputs, columns + 1), dtype=torch.float32)
    _backward_kernel[(parts, groups)](
        dy, dy if y is None else y, x, weight, d_x, d_parameters, rows, per_group,
        BR=ROWS["backward"], SIGMOID=y is not None, num_warps=4, num_stages=3, **_sizes(x, weight),
    )  # fmt: skip
    return d_x, d_parameters[..., :columns].sum(0), d_parameters[..., columns].sum(0)
