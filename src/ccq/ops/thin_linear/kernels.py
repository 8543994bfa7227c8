"""The thin linear map in Triton.

Legend: R rows of x (BR a block), E columns (BE a block), H outputs (BH the next power of two, at least 16), G groups of
row blocks, U blocks of a step.

Backward, with z = x W^T + b and dz = dy, or dy * y * (1 - y) behind a sigmoid: dx = dz W, dW = dz^T x, db = sum of dz.
A program holds BE columns of dW and walks over the row blocks of its group, so that x is read once for both; the sums
of the groups are added up outside. A row without any gradient takes no part, whatever x holds there: padding may be
NaN. What else is to reach dx (`beside`) is added before dx is rounded.

For few outputs the products are written out: 2 H of them for a number of x take less than the matrix units, of which
each would fill 16 columns, and what has to move between registers for them.
"""

from __future__ import annotations

from typing import NamedTuple

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
MAX_FEW = 8
"""The largest H whose products are written out: registers hold W and dW, eight columns of each for every thread."""


class Few(NamedTuple):
    """How the kernel of few outputs is launched."""

    row: int
    """Bytes of a row for a program: 512 are 16 for a thread."""
    rows: int
    """BR, a row for each warp, whose sums so stay with it to the end."""
    steps: int
    """U. All blocks of a step are read before any is written, because the compiler may not move a read over a write."""
    programs: int
    """Wanted: as many as fit at once."""


FEW = Few(row=512, rows=4, steps=4, programs=264)


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


@triton.jit
def _none():
    """No blocks yet. A plain () would be for mypy a tuple that stays empty."""
    return ()


@triton.jit(do_not_specialize=["rows", "per_group"])
def _few_backward_kernel(
    dy, y, x, weight, beside, d_x, d_parameters, rows, per_group, E: tl.constexpr, H: tl.constexpr, BR: tl.constexpr,
    BE: tl.constexpr, U: tl.constexpr, SIGMOID: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """As `_backward_kernel`; a group are `per_group` steps of U blocks."""
    column = tl.program_id(0) * BE + tl.arange(0, BE)
    group = tl.program_id(1).to(tl.int64)
    fits = column < E
    taps, b_dw, b_db = _none(), _none(), _none()
    for h in tl.static_range(H):
        taps += (tl.load(weight + h * E + column, mask=fits, other=0.0).to(x.dtype.element_ty).to(tl.float32),)
        b_dw += (tl.zeros((BR, BE), tl.float32),)
        b_db += (tl.zeros((BR,), tl.float32),)
    for step in range(per_group):
        first = (group * per_group + step) * (U * BR) + tl.arange(0, BR)
        blocks, others, slopes = _none(), _none(), _none()
        for u in tl.static_range(U):
            row = first + u * BR
            at, inside = row[:, None] * E + column, (row < rows)[:, None] & fits
            blocks += (tl.load(x + at, mask=inside, other=0.0),)
            if BESIDE:
                others += (tl.load(beside + at, mask=inside, other=0.0),)
        for u in tl.static_range(U):
            row = first + u * BR
            for h in tl.static_range(H):
                b_dz = tl.load(dy + row * H + h, mask=row < rows, other=0.0).to(tl.float32)
                if SIGMOID:
                    b_y = tl.load(y + row * H + h, mask=row < rows, other=0.0)
                    b_dz = tl.where(b_dz == 0, 0.0, b_dz * b_y * (1 - b_y))
                slopes += (b_dz,)
        for u in tl.static_range(U):
            row = first + u * BR
            alive = slopes[u * H] != 0
            for h in tl.static_range(1, H):
                alive = alive | (slopes[u * H + h] != 0)
            b_x = tl.where(alive[:, None], blocks[u].to(tl.float32), 0.0)
            b_dx = slopes[u * H][:, None] * taps[0]
            sums, biases = _none(), _none()
            for h in tl.static_range(H):
                b_dz = slopes[u * H + h]
                if h > 0:
                    b_dx += b_dz[:, None] * taps[h]
                sums += (b_dw[h] + b_dz[:, None] * b_x,)
                biases += (b_db[h] + b_dz,)
            b_dw, b_db = sums, biases
            if BESIDE:
                b_dx += others[u].to(tl.float32)
            at, inside = row[:, None] * E + column, (row < rows)[:, None] & fits
            tl.store(d_x + at, b_dx.to(d_x.dtype.element_ty), mask=inside)
    for h in tl.static_range(H):
        target = d_parameters + (group * H + h) * (E + 1)
        tl.store(target + column, tl.sum(b_dw[h], 0), mask=fits)
        if tl.program_id(0) == 0:
            tl.store(target + E, tl.sum(b_db[h], 0))


@triton.jit(do_not_specialize=["rows", "per_group"])
def _backward_kernel(
    dy,
    y,
    x,
    weight,
    beside,
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
    BESIDE: tl.constexpr,
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
        if BESIDE:
            b_dx += tl.load(beside + row[:, None] * E + column, mask=inside, other=0.0).to(tl.float32)
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


def backward(
    dy: Tensor, y: Tensor | None, x: Tensor, weight: Tensor, beside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, columns), outputs = x.shape, len(weight)
    few = outputs <= MAX_FEW
    width, step, programs = COLUMNS, ROWS["backward"], WANTED_PROGRAMS
    if few:
        width, step, programs = FEW.row // x.element_size(), FEW.rows * FEW.steps, FEW.programs
    parts = triton.cdiv(columns, width)
    steps = triton.cdiv(rows, step)
    per_group = triton.cdiv(steps, max(1, programs // parts))
    groups = triton.cdiv(steps, per_group)
    d_x = torch.empty_like(x)
    d_parameters = x.new_empty((groups, outputs, columns + 1), dtype=torch.float32)
    arguments = (dy, dy if y is None else y, x, weight, dy if beside is None else beside, d_x, d_parameters)
    flags = {"SIGMOID": y is not None, "BESIDE": beside is not None}
    if few:
        _few_backward_kernel[(parts, groups)](
            *arguments, rows, per_group, E=columns, H=outputs, BR=FEW.rows, BE=width, U=FEW.steps, num_warps=FEW.rows,
            **flags,
        )  # fmt: skip
    else:
        _backward_kernel[(parts, groups)](
            *arguments, rows, per_group, BR=step, num_warps=4, num_stages=3, **flags, **_sizes(x, weight)
        )
    return d_x, d_parameters[..., :columns].sum(0), d_parameters[..., columns].sum(0)
