"""One token of the read step in Triton: the statistics take in the key and are read in one pass over the second moment.

Legend: N sequences, H heads, D key size (BD the next power of two), BR rows a program.

With the new M, m and t, r = (M q - ((m . q) / t) m) / t. Sums are float32 and in an order that D alone decides, so a
sequence is read the same in any batch.

New statistics: a row of r needs the same row of M and nothing else of it, so every program handles a few rows alone.

Packed statistics, overwritten: M[i, j] is kept once, for j <= i, and belongs to two rows of r. A program takes BR rows
of the rectangle in which the triangle is kept (`PackedKeyStatistics`), with one row above the middle and one below it
in each, and leaves two things: their rows of r as far as they stand here, and what they add to all others. A second
kernel, one program a head, adds that up; m, t and the gate are its part too, so that no third one is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.early_launch import early_launch, follow
from ccq.ops.query.gate import LinearGate
from ccq.ops.query.reference import NORM_EPSILON

ROWS = 16
"""BR"""
WARPS = 2
"""Of packed statistics, as below: the best in whole steps of GLA + ccq at 1.3B on an H200 (8 rows, CUDA graph), where
few threads leave the next kernel room to start early. With 4 a step takes 2 % longer, with 8 8 %.
"""
FINISH_WARPS = 1


@triton.jit
def _load_vector(x, head, column, D: tl.constexpr):
    fits = (column >= 0) & (column < D)
    return tl.load(x + head * D + column, mask=fits, other=0.0).to(tl.float32)


@triton.jit
def _read_token_kernel(
    q,
    k,
    gate,
    second_moment,
    total,
    count,
    query,
    correction,
    new_moment,
    new_total,
    new_count,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    CENTRED: tl.constexpr,
    CORRECTION: tl.constexpr,
    EPS: tl.constexpr,
):
    """BR rows of one head, with new statistics."""
    TILES: tl.constexpr = (D + BR - 1) // BR
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0).to(tl.int64) // TILES
    n = head // H
    column, row = tl.arange(0, BD), tile * BR + tl.arange(0, BR)
    square = head * D * D + row[:, None] * D + column
    fits = (row < D)[:, None] & (column < D)
    # First, because it takes longest and nothing that is computed here is needed for it.
    b_moment = tl.load(second_moment + square, mask=fits, other=0.0)
    b_q, b_k = _load_vector(q, head, column, D), _load_vector(k, head, column, D)
    b_qi, b_ki = _load_vector(q, head, row, D), _load_vector(k, head, row, D)
    b_m, b_mi = _load_vector(total, head, column, D), _load_vector(total, head, row, D)
    seen = tl.load(count + n) + 1
    b_t = seen.to(tl.float32)
    if UNIT_QUERIES:
        b_rq = tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS)
        b_q, b_qi = b_q * b_rq, b_qi * b_rq
    if UNIT_KEYS:
        b_rk = tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
        b_k, b_ki = b_k * b_rk, b_ki * b_rk
    b_moment += b_ki[:, None] * b_k
    b_m, b_mi = b_m + b_k, b_mi + b_ki
    tl.store(new_moment + square, b_moment, mask=fits)
    tl.store(new_total + head * D + row, b_mi, mask=row < D)
    if (tile == 0) & (head % H == 0):
        tl.store(new_count + n, seen)
    b_r = tl.sum(b_moment * b_q, 1) / b_t
    if CENTRED:
        b_r -= b_mi / b_t * tl.sum(b_m / b_t * b_q, 0)
    if CORRECTION:
        tl.store(correction + head * D + row, b_r, mask=row < D)
    b_y = b_qi - tl.load(gate + head).to(tl.float32) * b_r
    tl.store(query + head * D + row, b_y.to(query.dtype.element_ty), mask=row < D)


@triton.jit
def _triangle_kernel(
    q,
    k,
    triangle,
    count,
    own,
    others,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    EPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BR rows of the rectangle of one head: t r as far as M is concerned, of which own [N, H, D] is what stands in
    these rows and others [N, H, tiles, 2, D] what they add to other rows.

    Row p holds M[i, j] for i = D - 1 - p ("long") and for i = p ("short"), of which M[p, p] stands elsewhere.
    """
    follow(EARLY)
    LONG: tl.constexpr = (D + 1) // 2
    SHORT: tl.constexpr = D // 2
    LENGTH: tl.constexpr = D * (D + 1) // 2
    TILES: tl.constexpr = (LONG + BR - 1) // BR
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0).to(tl.int64) // TILES
    column, row = tl.arange(0, BD), tile * BR + tl.arange(0, BR)
    here = triangle + head * LENGTH
    is_short = (row < SHORT)[:, None] & (column < D) & (column >= (D - row)[:, None])
    is_long = (row < LONG)[:, None] & (column < (D - row)[:, None])
    # The last row of an odd size ends with the diagonal of the short ones; else all places are taken, and known to be.
    fits = (row < LONG)[:, None] & (column < D) if D % 2 == 0 else is_long | is_short
    at = row[:, None] * D + column
    b_moment = tl.load(here + at, mask=fits, other=0.0)
    b_diagonal = tl.load(here + LENGTH - 1 - row, mask=row < SHORT, other=0.0)
    # Both by column and by row: of the long rows, and of the short ones.
    b_qc, b_qd = _load_vector(q, head, column, D), _load_vector(q, head, D - 1 - column, D)
    b_kc, b_kd = _load_vector(k, head, column, D), _load_vector(k, head, D - 1 - column, D)
    b_ql, b_qs = _load_vector(q, head, D - 1 - row, D), _load_vector(q, head, row, D)
    b_kl, b_ks = _load_vector(k, head, D - 1 - row, D), _load_vector(k, head, row, D)
    if UNIT_QUERIES:
        b_rq = tl.rsqrt(tl.sum(b_qc * b_qc, 0) + EPS)
        b_qc, b_qd, b_ql, b_qs = b_qc * b_rq, b_qd * b_rq, b_ql * b_rq, b_qs * b_rq
    if UNIT_KEYS:
        b_rk = tl.rsqrt(tl.sum(b_kc * b_kc, 0) + EPS)
        b_kc, b_kd, b_kl, b_ks = b_kc * b_rk, b_kd * b_rk, b_kl * b_rk, b_ks * b_rk
    b_moment += tl.where(is_long, b_kl[:, None] * b_kc, b_ks[:, None] * b_kd)
    b_diagonal += b_ks * b_ks
    # Several threads may load the same number; all must have it before one of them overwrites it.
    tl.debug_barrier()
    tl.store(here + at, b_moment, mask=fits)
    tl.store(here + LENGTH - 1 - row, b_diagonal, mask=row < SHORT)
    b_long, b_short = tl.where(is_long, b_moment, 0.0), tl.where(is_short, b_moment, 0.0)
    tl.store(own + head * D + D - 1 - row, tl.sum(b_long * b_qc, 1), mask=row < LONG)
    tl.store(own + head * D + row, tl.sum(b_short * b_qd, 1) + b_diagonal * b_qs, mask=row < SHORT)
    # The diagonal of the long rows is theirs alone.
    b_long = tl.where(column < (D - 1 - row)[:, None], b_long, 0.0)
    there = others + (head * TILES + tile) * 2 * D
    tl.store(there + column, tl.sum(b_long * b_ql[:, None], 0), mask=column < D)
    tl.store(there + 2 * D - 1 - column, tl.sum(b_short * b_qs[:, None], 0), mask=column < D)
    # Here, because in the next kernel all heads of a sequence read it.
    if (tile == 0) & (head % H == 0):
        tl.store(count + head // H, tl.load(count + head // H) + 1)


@triton.jit
def _finish_kernel(
    q,
    k,
    gate,
    weight,
    bias,
    scale,
    total,
    count,
    own,
    others,
    query,
    correction,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PARTS: tl.constexpr,
    BP: tl.constexpr,
    INPUTS: tl.constexpr,
    BI: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    CENTRED: tl.constexpr,
    CORRECTION: tl.constexpr,
    LINEAR: tl.constexpr,
    SCALED: tl.constexpr,
    EPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head, with what `_triangle_kernel` left in PARTS = 2 tiles. With LINEAR the gate is the sigmoid of a linear
    map of its INPUTS `gate`, times the `scale` with SCALED.
    """
    follow(EARLY)
    head = tl.program_id(0).to(tl.int64)
    n = head // H
    column, part = tl.arange(0, BD), tl.arange(0, BP)
    inside = (part < PARTS)[:, None] & (column < D)
    b_others = tl.load(others + (head * PARTS + part[:, None]) * D + column, mask=inside, other=0.0)
    b_r = _load_vector(own, head, column, D)
    b_q, b_k, b_m = (
        _load_vector(q, head, column, D),
        _load_vector(k, head, column, D),
        _load_vector(total, head, column, D),
    )
    b_t = tl.load(count + n).to(tl.float32)
    if LINEAR:
        i = tl.arange(0, BI)
        b_x = tl.load(gate + n * INPUTS + i, mask=i < INPUTS, other=0.0)
        b_w = tl.load(weight + head % H * INPUTS + i, mask=i < INPUTS, other=0.0).to(b_x.dtype)
        b_gate = tl.sum(b_x.to(tl.float32) * b_w.to(tl.float32), 0)
        b_gate = tl.sigmoid(b_gate + tl.load(bias + head % H).to(tl.float32))
        if SCALED:
            b_gate *= tl.load(scale + head % H).to(tl.float32)
    else:
        b_gate = tl.load(gate + head).to(tl.float32)
    if UNIT_QUERIES:
        b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS)
    if UNIT_KEYS:
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
    b_m += b_k
    tl.debug_barrier()
    tl.store(total + head * D + column, b_m, mask=column < D)
    b_r = (b_r + tl.sum(b_others, 0)) / b_t
    if CENTRED:
        b_r -= b_m / b_t * tl.sum(b_m / b_t * b_q, 0)
    if CORRECTION:
        tl.store(correction + head * D + column, b_r, mask=column < D)
    tl.store(query + head * D + column, (b_q - b_gate * b_r).to(query.dtype.element_ty), mask=column < D)


def interpreted() -> bool:
    """Whether the kernels were made for Triton's interpreter, which runs them on a CPU."""
    return not isinstance(_read_token_kernel, triton.JITFunction)


class TokenRead(NamedTuple):
    query: Tensor
    correction: Tensor | None
    second_moment: Tensor
    total: Tensor
    count: Tensor  # type: ignore[assignment]  # a field, not the method of tuple


def read_token(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor, total: Tensor, count: Tensor,
    *, unit_queries: bool, unit_keys: bool, centred: bool, return_correction: bool, wide: bool,
) -> TokenRead:  # fmt: skip
    """One token: q, k [N, 1, H, D] and gate [N, 1, H], all contiguous; the query in float32 with `wide`."""
    sequences, _, heads, size = q.shape
    query, correction = _empty_results(q, return_correction, wide)
    new = tuple(torch.empty_like(x) for x in (second_moment, total, count))
    _read_token_kernel[(sequences * heads * triton.cdiv(size, ROWS),)](
        q, k, gate, second_moment, total, count, query, query if correction is None else correction, *new,
        H=heads, D=size, BD=_width(size), BR=ROWS, UNIT_QUERIES=unit_queries, UNIT_KEYS=unit_keys, CENTRED=centred,
        CORRECTION=return_correction, EPS=NORM_EPSILON,
    )  # fmt: skip
    return TokenRead(query, correction, *new)


def update_and_read_token(
    q: Tensor, k: Tensor, gate: Tensor | LinearGate, triangle: Tensor, total: Tensor, count: Tensor,
    *, unit_queries: bool, unit_keys: bool, centred: bool, return_correction: bool, wide: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same for packed statistics, which are overwritten: query and correction."""
    sequences, _, heads, size = q.shape
    query, correction = _empty_results(q, return_correction, wide)
    tiles = triton.cdiv((size + 1) // 2, ROWS)
    own, others = (
        torch.empty_like(q, dtype=torch.float32),
        q.new_empty((sequences, heads, 2 * tiles, size), dtype=torch.float32),
    )
    sizes = {"H": heads, "D": size, "BD": _width(size)}
    options = {"UNIT_QUERIES": unit_queries, "UNIT_KEYS": unit_keys, "EPS": NORM_EPSILON, **early_launch(q.device)}
    _triangle_kernel[(sequences * heads * tiles,)](
        q, k, triangle, count, own, others, BR=ROWS, num_warps=WARPS, **sizes, **options
    )
    linear = isinstance(gate, LinearGate)
    x, weight, bias, scale = gate if isinstance(gate, LinearGate) else (gate,) * 4
    inputs = x.shape[-1] if linear else 1
    _finish_kernel[(sequences * heads,)](
        q, k, x, weight, bias, bias if scale is None else scale, total, count, own, others, query,
        query if correction is None else correction, PARTS=2 * tiles, BP=triton.next_power_of_2(2 * tiles),
        INPUTS=inputs, BI=triton.next_power_of_2(inputs), CENTRED=centred, CORRECTION=return_correction,
        LINEAR=linear, SCALED=linear and scale is not None, num_warps=FINISH_WARPS, **sizes, **options,
    )  # fmt: skip
    return query, correction


def _width(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _empty_results(q: Tensor, return_correction: bool, wide: bool) -> tuple[Tensor, Tensor | None]:
    query = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
    return query, torch.empty_like(q, dtype=torch.float32) if return_correction else None
