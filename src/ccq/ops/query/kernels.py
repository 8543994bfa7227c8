"""The read step in Triton: forward and backward for dense, padded and packed input.

Legend: N sequences, H heads, D key size (BD the next power of two), C tokens a chunk, BN keys a group, two groups a
block, BT rows that a program treats, S tiles of a state a side (of BS columns). i reads, j is read.

The mathematics is that of `chunked.py`; what differs is how sums travel between programs.

Forward. `_unit_keys` normalises k and sums each group of BN keys; `_scan_vectors` adds these sums up to m before each
group. `_scan_moments` walks over the sequence, one program for each tile of the upper triangle, adds up M in float32
registers, and writes at each chunk the covariance of everything before it, Sigma_0 = M / t0 - (m / t0)(m / t0)^T:
centred before it is rounded, because M and m m^T / t0 nearly cancel when keys share a mean, and divided by t0 so that
its range does not grow with length. `_covariance` then treats every block of rows alone:

    a_i = (q_i . m_block + sum over j <= i in the block of s_ij) / t_i
    r_i = (t0 Sigma_0 q_i + ((q_i . m_chunk) / t0 - a_i) m_chunk + sum over j <= i of (s_ij - a_i) k_j) / t_i

Queries enter products as they were given; their reciprocal lengths multiply scores and rows.

Backward. `_covariance` applied to the gradient p that reaches r gives u = Sigma p; `_query_gradients` makes dq, the
gate's gradient and the sums of w from it. `_scan_gradients` walks backwards and writes at each chunk W, the sum over
later tokens of (p q^T + q p^T) / t, and W mu for the mean mu at the end of the chunk. `_key_gradients` then needs

    dk_j = W (k_j - mu) + (W mu - w) + sum over i >= j in the chunk of (p_i (s_ij - a_i) + q_i (z_ij - c_i)) / t_i

with k centred before W, which is rounded, meets it.

Nothing is added atomically and no result depends on the order in which programs run. Addresses are 64-bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query.reference import NORM_EPSILON


class Configuration(NamedTuple):
    """Sizes and launch parameters of all kernels for one dtype and key size."""

    group: int
    """BN, keys that are multiplied at once; a block has two groups."""
    chunk: int
    """C, a multiple of 2 BN."""
    tile: int
    """BS"""
    part: int
    """BK, rows of a state that are loaded at once."""
    scan_warps: int
    scan_stages: int
    read_rows: int
    """BT of `_covariance_kernel`, BN or 2 BN."""
    read_columns: int
    """BO"""
    read_warps: int
    read_stages: int
    row_rows: int
    """BR, rows that the kernels which only pass over rows hold at once."""
    row_warps: int
    gradient_rows: int
    gradient_warps: int
    gradient_stages: int


class Plan(NamedTuple):
    """Where the sequences of a call lie among its B * T tokens, and how they are cut. int64 on the device."""

    begin: Tensor
    """[N], the first token of each sequence."""
    end: Tensor
    """[N], one past its last token."""
    owner: Tensor
    """[blocks], the sequence of each block."""
    block_start: Tensor
    """[N + 1], the first block of each sequence."""
    chunk_start: Tensor
    """[N + 1], the first chunk."""
    chunks: int
    """Chunks in all."""
    longest: int
    """Chunks of the longest sequence."""


@triton.jit
def _sequence(begin, end, n):
    """First token of sequence n, and its number of tokens."""
    first = tl.load(begin + n)
    return first, (tl.load(end + n) - first).to(tl.int32)


@triton.jit
def _load_rows(
    pointer, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """[ROWS, WIDTH] of one head, from the row at `pointer` on; zeros past `left` rows and past D.

    Addresses are a 64-bit pointer and 32-bit offsets inside the block: fewer registers than 64 bits for every element.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    mask = (row < left)[:, None]
    if WIDTH > D:
        mask = mask & (column < D)
    return tl.load(pointer + (row[:, None] * (H * D) + column), mask=mask, other=0.0)


@triton.jit
def _store_rows(pointer, x, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """The counterpart of `_load_rows`; converts to the type of the memory."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    mask = (row < left)[:, None]
    if WIDTH > D:
        mask = mask & (column < D)
    tl.store(pointer + (row[:, None] * (H * D) + column), x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _upper_tile(pair, S: tl.constexpr):
    """Row and column of the tile number `pair` of the upper triangle, counted row by row."""
    row = 0
    before = 0
    for r in tl.static_range(S - 1):
        start = (r + 1) * S - (r + 1) * r // 2
        passed = pair >= start
        row = tl.where(passed, r + 1, row)
        before = tl.where(passed, start, before)
    return row, row + pair - before


@triton.jit
def _unit_keys_kernel(
    k,
    unit,
    reciprocal,
    sums,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
):
    """For every group of BN keys, two to a block: the normalised keys, their reciprocal lengths, and their sum."""
    h = tl.program_id(0) % H
    group = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + group // 2)
    first, length = _sequence(begin, end, n)
    start = (group - 2 * tl.load(block_start + n)).to(tl.int32) * BN
    row, column = tl.arange(0, BR), tl.arange(0, BD)
    b_sum = tl.zeros((BR, BD), tl.float32)
    for r in tl.static_range(0, BN, BR):
        base, left = (first + start + r) * H + h, length - start - r
        b_k = _load_rows(k + base * D, left, BR, BD, H, D).to(tl.float32)
        if NORMALIZE:
            b_r = tl.rsqrt(tl.sum(b_k * b_k, 1) + EPS)
            tl.store(reciprocal + base + row * H, b_r, mask=row < left)
            b_k *= b_r[:, None]
        b_unit = b_k.to(unit.dtype.element_ty)
        _store_rows(unit + base * D, b_unit, left, BR, BD, H, D)
        # The sum of the rounded keys: it must be the mean of what the products see.
        b_sum += b_unit.to(tl.float32)
    tl.store(sums + (group * H + h) * D + column, tl.sum(b_sum, 0), mask=column < D)


@triton.jit
def _scan_vectors_kernel(
    sums,
    initial,
    final,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
    STEP: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """In place of the sums [groups, H, D]: the sum before each group (REVERSE: behind it). And the last one."""
    h = tl.program_id(0) % H
    n = tl.program_id(0).to(tl.int64) // H
    start = 2 * tl.load(block_start + n)
    groups = (2 * tl.load(block_start + n + 1) - start).to(tl.int32)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    step = tl.arange(0, STEP)
    state = (n * H + h) * D + column
    running = tl.load(initial + state, mask=column < D, other=0.0)
    for done in range(0, groups, STEP):
        place = done + step
        inside = (place < groups)[:, None] & (column < D)
        if REVERSE:
            place = groups - 1 - place
        pointer = sums + ((start + place[:, None]) * H + h) * D + column
        b_x = tl.load(pointer, mask=inside, other=0.0)
        b_sum = tl.cumsum(b_x, 0)
        tl.store(pointer, running + b_sum - b_x, mask=inside)
        running += tl.sum(b_x, 0)
    tl.store(final + state, running, mask=column < D)


@triton.jit
def _load_columns(pointer, column, left, H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    """[BN, BS], the columns `column` of the rows from `pointer` on."""
    row = tl.arange(0, BN)
    return tl.load(pointer + (row[:, None] * (H * D) + column), mask=(row < left)[:, None] & (column < D), other=0.0)


@triton.jit
def _add_moments(
    unit, first, start, length, h, row, column, acc, H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + the sum of k_row k_column^T over the group of keys that begins at `start`."""
    base, left = unit + ((first + start) * H + h) * D, length - start
    b_i, b_j = _load_columns(base, row, left, H, D, BN), _load_columns(base, column, left, H, D, BN)
    return tl.dot(tl.trans(b_i), b_j, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["sequences", "per_segment"])
def _scan_moments_kernel(
    unit,
    vectors,
    covariances,
    totals,
    initial,
    count,
    final,
    begin,
    end,
    block_start,
    chunk_start,
    sequences,
    per_segment,
    H: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    CENTRED: tl.constexpr,
    TOTALS_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of M along one segment of a sequence.

    TOTALS_ONLY: its sum over the segment, [segments, N, H, pairs, BS, BS]. Otherwise the covariance before each chunk,
    [chunks, H, D, D], from the totals of the segments before; the last segment writes M behind the sequence.
    """
    PAIRS: tl.constexpr = S * (S + 1) // 2
    pair = tl.program_id(0) % PAIRS
    h = (tl.program_id(0) // PAIRS) % H
    n = tl.program_id(0).to(tl.int64) // (PAIRS * H)
    segment = tl.program_id(1)
    i, j = _upper_tile(pair, S)
    row, column = i * BS + tl.arange(0, BS), j * BS + tl.arange(0, BS)
    first, length = _sequence(begin, end, n)
    chunks = tl.cdiv(length, C)
    low = segment * per_segment
    high = tl.minimum(low + per_segment, chunks)
    inside_tile = tl.arange(0, BS)[:, None] * BS + tl.arange(0, BS)
    tile = (n * H + h) * PAIRS + pair
    if TOTALS_ONLY:
        acc = tl.zeros((BS, BS), tl.float32)
        for t in range(low * C, tl.minimum(high * C, length), BN):
            acc = _add_moments(unit, first, t, length, h, row, column, acc, H, D, BN, PRECISION)
        where = segment.to(tl.int64) * sequences * H * PAIRS + tile
        tl.store(totals + where * BS * BS + inside_tile, acc)
    else:
        square = row[:, None] * D + column
        mirrored = column[None, :] * D + row[:, None]
        fits = (row < D)[:, None] & (column < D)
        acc = tl.load(initial + (n * H + h) * D * D + square, mask=fits, other=0.0)
        for earlier in range(0, segment):
            where = tl.cast(earlier, tl.int64) * sequences * H * PAIRS + tile
            acc += tl.load(totals + where * BS * BS + inside_tile)
        seen = tl.load(count + n)
        group, chunk = 2 * tl.load(block_start + n), tl.load(chunk_start + n)
        # One loop over all groups of the segment, not one for each chunk: loads run ahead across chunks.
        for t in range(low * C, tl.minimum(high * C, length), BN):
            if t % C == 0:
                b_t = 1.0 / tl.maximum(seen + t, 1).to(tl.float32)
                b_c = acc * b_t
                if CENTRED:
                    m = vectors + ((group + t // BN) * H + h) * D
                    b_mi = tl.load(m + row, mask=row < D, other=0.0) * b_t
                    b_mj = tl.load(m + column, mask=column < D, other=0.0) * b_t
                    b_c -= b_mi[:, None] * b_mj
                state = covariances + ((chunk + t // C) * H + h) * D * D
                tl.store(state + square, b_c.to(covariances.dtype.element_ty), mask=fits)
                if i != j:
                    tl.store(state + mirrored, b_c.to(covariances.dtype.element_ty), mask=fits)
            acc = _add_moments(unit, first, t, length, h, row, column, acc, H, D, BN, PRECISION)
        if segment == tl.maximum(chunks - 1, 0) // per_segment:
            state = final + (n * H + h) * D * D
            tl.store(state + square, acc, mask=fits)
            if i != j:
                tl.store(state + mirrored, acc, mask=fits)


@triton.jit
def _load_part(pointer, begin, left, ROWS: tl.constexpr, BK: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """[ROWS, BK], columns `begin` ... of the rows from `pointer` on."""
    row, column = tl.arange(0, ROWS), begin + tl.arange(0, BK)
    mask = (row < left)[:, None]
    if D % BK != 0:
        mask = mask & (column < D)
    return tl.load(pointer + (row[:, None] * (H * D) + column), mask=mask, other=0.0)


@triton.jit
def _load_state(pointer, top, side, BK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """[BK, WIDTH], the rows from `top` and columns from `side` on of a state [D, D]."""
    row, column = top + tl.arange(0, BK), side + tl.arange(0, WIDTH)
    if D % BK == 0 and D % WIDTH == 0:
        return tl.load(pointer + (row[:, None] * D + column))
    else:
        return tl.load(pointer + (row[:, None] * D + column), mask=(row < D)[:, None] & (column < D), other=0.0)


@triton.jit
def _store_part(pointer, x, side, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """Stores [ROWS, WIDTH] at the columns from `side` on, in the type of the memory."""
    row, column = tl.arange(0, ROWS), side + tl.arange(0, WIDTH)
    mask = (row < left)[:, None]
    if D % WIDTH != 0:
        mask = mask & (column < D)
    tl.store(pointer + (row[:, None] * (H * D) + column), x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _row_scalars_kernel(
    x,
    vectors,
    reciprocal,
    at_block,
    at_chunk,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    C: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    EPS: tl.constexpr,
):
    """For every row x: its reciprocal length, and its products with m before its block of BT rows and its chunk.

    Apart from `_covariance_kernel`, which then needs its rows as operands only and keeps none of them in registers.
    """
    h = tl.program_id(0) % H
    group = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + group // 2)
    first, length = _sequence(begin, end, n)
    begun = 2 * tl.load(block_start + n)
    place = (group - begun).to(tl.int32)
    start = place * BN
    if start < length:
        row, column = tl.arange(0, BR), tl.arange(0, BD)
        b_mb = tl.zeros((BD,), tl.float32)
        b_mc = b_mb
        if CENTRED:
            m = vectors + ((begun + place // (BT // BN) * (BT // BN)) * H + h) * D
            b_mb = tl.load(m + column, mask=column < D, other=0.0)
            m = vectors + ((begun + place // (C // BN) * (C // BN)) * H + h) * D
            b_mc = tl.load(m + column, mask=column < D, other=0.0)
        for r in tl.static_range(0, BN, BR):
            base, left = (first + start + r) * H + h, length - start - r
            b_x = _load_rows(x + base * D, left, BR, BD, H, D).to(tl.float32)
            token, real = base + row * H, row < left
            b_r = tl.full((BR,), 1.0, tl.float32)
            if NORMALIZE:
                b_r = tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)
            tl.store(reciprocal + token, b_r, mask=real)
            if CENTRED:
                tl.store(at_block + token, tl.sum(b_x * b_mb, 1) * b_r, mask=real)
                tl.store(at_chunk + token, tl.sum(b_x * b_mc, 1) * b_r, mask=real)


@triton.jit
def _covariance_kernel(
    x,
    unit,
    gate,
    reciprocal,
    at_block,
    at_chunk,
    vectors,
    covariances,
    count,
    query,
    correction,
    mean,
    begin,
    end,
    owner,
    block_start,
    chunk_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    C: tl.constexpr,
    CENTRED: tl.constexpr,
    QUERY: tl.constexpr,
    CORRECTION: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """Sigma_i x_i for BT rows and BO columns, x normalised by `reciprocal`; and the rows' mean scores.

    CORRECTION stores it, QUERY stores x - gate Sigma x.
    """
    COLUMNS: tl.constexpr = (D + BO - 1) // BO
    PARTS: tl.constexpr = 2 * BN // BT
    out = (tl.program_id(0) % COLUMNS) * BO
    h = (tl.program_id(0) // COLUMNS) % H
    part = tl.program_id(0).to(tl.int64) // (COLUMNS * H)
    n = tl.load(owner + part // PARTS)
    first, length = _sequence(begin, end, n)
    begun = tl.load(block_start + n)
    start = (part - PARTS * begun).to(tl.int32) * BT
    if start < length:
        base, left = (first + start) * H + h, length - start
        row, key, column = tl.arange(0, BT), tl.arange(0, BN), out + tl.arange(0, BO)
        token, real = base + row * H, row < left
        low = (start // C) * C
        seen = tl.load(count + n)
        before = (seen + low).to(tl.float32)
        b_it = 1.0 / tl.where(real, seen + start + row + 1, 1).to(tl.float32)
        b_r = tl.load(reciprocal + token, mask=real, other=1.0)
        b_x = _load_rows(x + base * D, left, BT, BD, H, D)

        # Rows read the keys of their own block, one or two groups, up to themselves.
        b_k = _load_rows(unit + base * D, left, BN, BD, H, D)
        b_s = tl.dot(b_x, tl.trans(b_k), input_precision=PRECISION) * b_r[:, None]
        b_s = tl.where(row[:, None] >= key, b_s, 0.0)
        b_a = tl.zeros((BT,), tl.float32)
        if BT > BN:
            b_k = _load_rows(unit + (base + BN * H) * D, left - BN, BN, BD, H, D)
            b_s1 = tl.dot(b_x, tl.trans(b_k), input_precision=PRECISION) * b_r[:, None]
            b_s1 = tl.where(row[:, None] >= key + BN, b_s1, 0.0)
        if CENTRED:
            b_a = tl.load(at_block + token, mask=real, other=0.0) + tl.sum(b_s, 1)
            if BT > BN:
                b_a += tl.sum(b_s1, 1)
            b_a *= b_it
            if out == 0:
                tl.store(mean + token, b_a, mask=real)
            b_s = tl.where(row[:, None] >= key, b_s - b_a[:, None], 0.0)
        b_k = _load_part(unit + base * D, out, left, BN, BO, H, D)
        acc = tl.dot(b_s.to(b_k.dtype), b_k, input_precision=PRECISION)
        if BT > BN:
            b_s1 = tl.where(row[:, None] >= key + BN, b_s1 - b_a[:, None], 0.0)
            b_k = _load_part(unit + (base + BN * H) * D, out, left - BN, BN, BO, H, D)
            acc = tl.dot(b_s1.to(b_k.dtype), b_k, acc, input_precision=PRECISION)
        for earlier in range(low, start, BN):
            source = unit + ((first + earlier) * H + h) * D
            b_ke = _load_rows(source, length - earlier, BN, BD, H, D)
            b_se = tl.dot(b_x, tl.trans(b_ke), input_precision=PRECISION) * b_r[:, None] - b_a[:, None]
            b_ko = _load_part(source, out, length - earlier, BN, BO, H, D)
            acc = tl.dot(b_se.to(b_ko.dtype), b_ko, acc, input_precision=PRECISION)
        if CENTRED:
            b_m = tl.load(vectors + ((2 * begun + low // BN) * H + h) * D + column, mask=column < D, other=0.0)
            b_c = tl.load(at_chunk + token, mask=real, other=0.0) / tl.maximum(before, 1.0) - b_a
            acc += b_c[:, None] * b_m
        if before > 0:
            # One accumulator: brought to the scale of x^T Sigma_0 before that is added, and back.
            acc *= (1.0 / (before * b_r))[:, None]
            state = covariances + ((tl.load(chunk_start + n) + start // C) * H + h) * D * D
            for d in range(0, D, BK):
                b_xd = _load_part(x + base * D, d, left, BT, BK, H, D)
                b_state = _load_state(state, d, out, BK, BO, D)
                acc = tl.dot(b_xd.to(b_state.dtype), b_state, acc, input_precision=STATE_PRECISION)
            acc *= (before * b_r * b_it)[:, None]
        else:
            acc *= b_it[:, None]

        if CORRECTION:
            _store_part(correction + base * D, acc, out, left, BT, BO, H, D)
        if QUERY:
            b_g = tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
            b_y = _load_part(x + base * D, out, left, BT, BO, H, D).to(tl.float32) * b_r[:, None]
            _store_part(query + base * D, b_y - b_g[:, None] * acc, out, left, BT, BO, H, D)


@triton.jit
def _query_gradients_kernel(
    q,
    x,
    dy,
    u,
    strength,
    reciprocal,
    count,
    mean,
    mean_x,
    dq,
    d_gate,
    weighted,
    leans,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """With p = strength x the gradient that reaches r and u = Sigma x: dq, and the gate's gradient where x is dy.

    Also what the gradient of the keys needs: weighted [B T, H, D], the normalised queries times strength / t, and
    leans [groups, H, D], the sums of (a p + c q) / t over each group.
    """
    h = tl.program_id(0) % H
    group = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + group // 2)
    first, length = _sequence(begin, end, n)
    start = (group - 2 * tl.load(block_start + n)).to(tl.int32) * BN
    row, column = tl.arange(0, BR), tl.arange(0, BD)
    b_w = tl.zeros((BR, BD), tl.float32)
    if start < length:
        seen = tl.load(count + n) + start
        for r in tl.static_range(0, BN, BR):
            base, left = (first + start + r) * H + h, length - start - r
            token, real = base + row * H, row < left
            b_r = tl.load(reciprocal + token, mask=real, other=0.0)
            b_l = tl.load(strength + token, mask=real, other=0.0).to(tl.float32)
            b_q = _load_rows(q + base * D, left, BR, BD, H, D).to(tl.float32)
            if NORMALIZE:
                b_q *= b_r[:, None]
            b_u = _load_rows(u + base * D, left, BR, BD, H, D).to(tl.float32)
            tl.store(d_gate + token, -tl.sum(b_q * b_u, 1), mask=real)
            b_u = _load_rows(dy + base * D, left, BR, BD, H, D).to(tl.float32) + b_l[:, None] * b_u
            if NORMALIZE:
                b_u = (b_u - b_q * tl.sum(b_q * b_u, 1)[:, None]) * b_r[:, None]
            _store_rows(dq + base * D, b_u, left, BR, BD, H, D)
            b_l *= 1.0 / tl.where(real, seen + r + row + 1, 1).to(tl.float32)
            b_q *= b_l[:, None]
            _store_rows(weighted + base * D, b_q, left, BR, BD, H, D)
            if CENTRED:
                b_a = tl.load(mean + token, mask=real, other=0.0)
                b_b = tl.load(mean_x + token, mask=real, other=0.0)
                b_x = _load_rows(x + base * D, left, BR, BD, H, D).to(tl.float32)
                b_w += (b_a * b_l)[:, None] * b_x + b_b[:, None] * b_q
    tl.store(leans + (group * H + h) * D + column, tl.sum(b_w, 0), mask=column < D)


@triton.jit
def _add_spreads(
    weighted, x, first, start, length, h, row, column, acc, H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + the sum of (p q^T + q p^T) / t over the group of tokens that begins at `start`."""
    base, left = ((first + start) * H + h) * D, length - start
    b_q, b_x = _load_columns(weighted + base, row, left, H, D, BN), _load_columns(x + base, column, left, H, D, BN)
    acc = tl.dot(tl.trans(b_q), b_x, acc, input_precision=PRECISION)
    b_q, b_x = _load_columns(weighted + base, column, left, H, D, BN), _load_columns(x + base, row, left, H, D, BN)
    return tl.dot(tl.trans(b_x), b_q, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["sequences", "per_segment"])
def _scan_gradients_kernel(
    weighted,
    x,
    vectors,
    last_vector,
    spreads,
    means,
    totals,
    initial,
    count,
    final,
    begin,
    end,
    block_start,
    chunk_start,
    sequences,
    per_segment,
    H: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    CENTRED: tl.constexpr,
    TOTALS_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of W along one segment, from its end to its beginning; the counterpart of `_scan_moments_kernel`.

    Writes W behind each chunk [chunks, H, D, D], and this tile's share of W mu [chunks, H, S, D] with mu the mean at
    the end of the chunk: share s of row tile i comes from column tile s.
    """
    PAIRS: tl.constexpr = S * (S + 1) // 2
    pair = tl.program_id(0) % PAIRS
    h = (tl.program_id(0) // PAIRS) % H
    n = tl.program_id(0).to(tl.int64) // (PAIRS * H)
    segment = tl.program_id(1)
    i, j = _upper_tile(pair, S)
    row, column = i * BS + tl.arange(0, BS), j * BS + tl.arange(0, BS)
    first, length = _sequence(begin, end, n)
    chunks = tl.cdiv(length, C)
    low = segment * per_segment
    high = tl.minimum(low + per_segment, chunks)
    inside_tile = tl.arange(0, BS)[:, None] * BS + tl.arange(0, BS)
    tile = (n * H + h) * PAIRS + pair
    if TOTALS_ONLY:
        acc = tl.zeros((BS, BS), tl.float32)
        for t in range(low * C, tl.minimum(high * C, length), BN):
            acc = _add_spreads(weighted, x, first, t, length, h, row, column, acc, H, D, BN, PRECISION)
        where = segment.to(tl.int64) * sequences * H * PAIRS + tile
        tl.store(totals + where * BS * BS + inside_tile, acc)
    else:
        square = row[:, None] * D + column
        mirrored = column[None, :] * D + row[:, None]
        fits = (row < D)[:, None] & (column < D)
        acc = tl.load(initial + (n * H + h) * D * D + square, mask=fits, other=0.0)
        for later in range(segment + 1, tl.cdiv(chunks, per_segment)):
            where = tl.cast(later, tl.int64) * sequences * H * PAIRS + tile
            acc += tl.load(totals + where * BS * BS + inside_tile)
        seen = tl.load(count + n)
        group, chunk = 2 * tl.load(block_start + n), tl.load(chunk_start + n)
        groups = tl.cdiv(tl.minimum(high * C, length), BN)
        for done in range(0, groups - low * (C // BN)):
            g = groups - 1 - done
            if ((g + 1) % (C // BN) == 0) | (done == 0):
                c = g // (C // BN)
                state = spreads + ((chunk + c) * H + h) * D * D
                tl.store(state + square, acc.to(spreads.dtype.element_ty), mask=fits)
                if i != j:
                    tl.store(state + mirrored, acc.to(spreads.dtype.element_ty), mask=fits)
                if CENTRED:
                    m = vectors + ((group + (c + 1) * (C // BN)) * H + h) * D
                    if c == chunks - 1:
                        m = last_vector + (n * H + h) * D
                    b_t = 1.0 / (seen + tl.minimum((c + 1) * C, length)).to(tl.float32)
                    b_mi = tl.load(m + row, mask=row < D, other=0.0) * b_t
                    b_mj = tl.load(m + column, mask=column < D, other=0.0) * b_t
                    share = means + ((chunk + c) * H + h) * S * D
                    tl.store(share + j * D + row, tl.sum(acc * b_mj, 1), mask=row < D)
                    if i != j:
                        tl.store(share + i * D + column, tl.sum(acc * b_mi[:, None], 0), mask=column < D)
            acc = _add_spreads(weighted, x, first, g * BN, length, h, row, column, acc, H, D, BN, PRECISION)
        if segment == 0:
            state = final + (n * H + h) * D * D
            tl.store(state + square, acc, mask=fits)
            if i != j:
                tl.store(state + mirrored, acc, mask=fits)


@triton.jit
def _key_gradients_kernel(
    unit,
    x,
    weighted,
    strength,
    reciprocal,
    vectors,
    last_vector,
    spreads,
    means,
    leans,
    count,
    mean,
    mean_x,
    dk,
    begin,
    end,
    owner,
    block_start,
    chunk_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """dk of BT keys. `leans` holds w behind each group."""
    PARTS: tl.constexpr = 2 * BN // BT
    h = tl.program_id(0) % H
    part = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + part // PARTS)
    first, length = _sequence(begin, end, n)
    begun = tl.load(block_start + n)
    start = (part - PARTS * begun).to(tl.int32) * BT
    if start < length:
        c = start // C
        chunk = tl.load(chunk_start + n) + c
        stop = tl.minimum((c + 1) * C, length)
        base, left = (first + start) * H + h, length - start
        row, reader_row, column = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BD)
        seen = tl.load(count + n)

        behind = 2 * begun + (c + 1) * (C // BN)
        m = vectors + (behind * H + h) * D
        w = leans + ((2 * begun + tl.cdiv(stop, BN) - 1) * H + h) * D
        if stop == length:
            m = last_vector + (n * H + h) * D
        b_t = 1.0 / (seen + stop).to(tl.float32)
        acc = tl.zeros((BT, BD), tl.float32)
        for d in range(0, D, BK):
            b_kd = _load_part(unit + base * D, d, left, BT, BK, H, D)
            if CENTRED:
                slice = d + tl.arange(0, BK)
                b_kd = b_kd.to(tl.float32) - tl.load(m + slice, mask=slice < D, other=0.0) * b_t
            b_w = _load_state(spreads + (chunk * H + h) * D * D, d, 0, BK, BD, D)
            acc = tl.dot(b_kd.to(b_w.dtype), b_w, acc, input_precision=STATE_PRECISION)
        b_v = -tl.load(w + column, mask=column < D, other=0.0)
        if CENTRED:
            for s in range(0, S):
                b_v += tl.load(means + ((chunk * H + h) * S + s) * D + column, mask=column < D, other=0.0)
        acc += b_v

        b_k = _load_rows(unit + base * D, left, BT, BD, H, D)
        for reader in range(start, stop, BN):
            at, rest = (first + reader) * H + h, length - reader
            there, source = reader_row < rest, at + reader_row * H
            b_x = _load_rows(x + at * D, rest, BN, BD, H, D)
            b_q = _load_rows(weighted + at * D, rest, BN, BD, H, D)
            b_l = tl.load(strength + source, mask=there, other=0.0).to(tl.float32)
            b_l *= 1.0 / tl.where(there, seen + reader + reader_row + 1, 1).to(tl.float32)
            reads = row[:, None] <= reader - start + reader_row
            # `weighted` carries the factor strength / t, which both products need once.
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_z = tl.dot(b_k, tl.trans(b_x), input_precision=PRECISION)
            if CENTRED:
                b_s -= tl.load(mean + source, mask=there, other=0.0) * b_l
                b_z -= tl.load(mean_x + source, mask=there, other=0.0)
            b_s = tl.where(reads, b_s, 0.0)
            b_z = tl.where(reads, b_z, 0.0)
            acc = tl.dot(b_s.to(b_x.dtype), b_x, acc, input_precision=PRECISION)
            acc = tl.dot(b_z.to(b_q.dtype), b_q, acc, input_precision=PRECISION)
        if NORMALIZE:
            b_u = _load_rows(unit + base * D, left, BT, BD, H, D).to(tl.float32)
            b_r = tl.load(reciprocal + base + row * H, mask=row < left, other=0.0)
            acc = (acc - b_u * tl.sum(b_u * acc, 1)[:, None]) * b_r[:, None]
        _store_rows(dk + base * D, acc, left, BT, BD, H, D)


_HALF = Configuration(
    group=64,
    chunk=256,
    tile=64,
    part=64,
    scan_warps=4,
    scan_stages=3,
    read_rows=128,
    read_columns=256,
    read_warps=8,
    read_stages=2,
    row_rows=16,
    row_warps=4,
    gradient_rows=128,
    gradient_warps=8,
    gradient_stages=2,
)
_FLOAT = Configuration(
    group=32,
    chunk=128,
    tile=32,
    part=32,
    scan_warps=4,
    scan_stages=1,
    read_rows=32,
    read_columns=256,
    read_warps=8,
    read_stages=1,
    row_rows=16,
    row_warps=4,
    gradient_rows=32,
    gradient_warps=8,
    gradient_stages=1,
)
_SMALL_HALF = Configuration(
    group=32,
    chunk=128,
    tile=64,
    part=32,
    scan_warps=4,
    scan_stages=2,
    read_rows=64,
    read_columns=128,
    read_warps=4,
    read_stages=1,
    row_rows=16,
    row_warps=4,
    gradient_rows=32,
    gradient_warps=4,
    gradient_stages=1,
)
_SMALL_FLOAT = Configuration(
    group=16,
    chunk=64,
    tile=32,
    part=16,
    scan_warps=4,
    scan_stages=1,
    read_rows=16,
    read_columns=128,
    read_warps=4,
    read_stages=1,
    row_rows=16,
    row_warps=4,
    gradient_rows=16,
    gradient_warps=4,
    gradient_stages=1,
)

TABLE: dict[tuple[int, int] | None, tuple[Configuration, Configuration]] = {
    (9, 0): (_HALF, _FLOAT),
    # Not measured: compiled for these targets and fitted to their shared memory.
    (10, 0): (_HALF, _FLOAT),
    (8, 0): (_HALF._replace(read_rows=64, gradient_rows=64, gradient_stages=1), _FLOAT),
    (8, 9): (_SMALL_HALF, _SMALL_FLOAT),
    None: (_SMALL_HALF, _SMALL_FLOAT),
}
"""By compute capability, None for every other: configurations for two-byte numbers and for float32, D up to 256."""


def configuration(dtype: torch.dtype, size: int, device: torch.device) -> Configuration:
    """The configuration for heads of `size` columns on `device`. Nothing is tuned at run time."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    chosen = TABLE.get(capability, TABLE[None])[dtype == torch.float32]
    width = max(16, triton.next_power_of_2(size))
    if width > 128:
        return chosen
    fits = chosen._replace(
        tile=min(chosen.tile, width), part=min(chosen.part, width), read_columns=min(chosen.read_columns, width)
    )
    # Half the columns need no more than half the warps.
    return fits if width > 64 else fits._replace(read_warps=4, gradient_warps=4)


def cut(begin: Tensor, end: Tensor, lengths: list[int], block: int, chunk: int) -> Plan:
    """The plan for sequences with at most `lengths` tokens each."""
    device = begin.device
    blocks = torch.tensor([-(-length // block) for length in lengths], dtype=torch.int64)
    chunks = torch.tensor([-(-length // chunk) for length in lengths], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), blocks)
    zero = torch.zeros(1, dtype=torch.int64)
    block_start, chunk_start = (torch.cat((zero, x.cumsum(0))) for x in (blocks, chunks))
    return Plan(
        begin,
        end,
        owner.to(device),
        block_start.to(device),
        chunk_start.to(device),
        int(chunk_start[-1]),
        int(chunks.max()) if lengths else 0,
    )


@functools.lru_cache(maxsize=64)
def _rows_plan(rows: int, tokens: int, block: int, chunk: int, device: torch.device) -> Plan:
    """Dense rows; kept, so that a step of training builds no tables."""
    begin = torch.arange(rows, dtype=torch.int64, device=device) * tokens
    return cut(begin, begin + tokens, [tokens] * rows, block, chunk)


def make_plan(
    rows: int,
    tokens: int,
    mask: Tensor | None,
    boundaries: list[int] | None,
    config: Configuration,
    device: torch.device,
) -> Plan:
    """The plan of a call: packed documents, padded rows (cut as if they were full), or dense rows."""
    if boundaries is not None:
        edges = torch.tensor(boundaries, dtype=torch.int64)
        bounds = edges.to(device)
        # A copy begins at an aligned address; another alignment would be another variant of every kernel.
        return cut(bounds[:-1], bounds[1:].clone(), edges.diff().tolist(), 2 * config.group, config.chunk)
    plan = _rows_plan(rows, tokens, 2 * config.group, config.chunk, device)
    if mask is None or tokens == 0:
        return plan
    begin = plan.begin + mask.to(torch.int64).argmax(1)
    return plan._replace(begin=begin, end=begin + mask.sum(1))


class Forward(NamedTuple):
    """What the forward pass returns, and what its backward pass needs of it."""

    query: Tensor
    correction: Tensor | None
    second_moment: Tensor
    total: Tensor
    reciprocal: Tensor
    """[B, T, H] float32, one over the lengths of the queries; ones without normalisation."""
    vectors: Tensor
    """[groups, H, D] float32, m before each group of keys."""
    mean: Tensor
    """[B, T, H] float32, the mean scores a."""


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    gate: Tensor
    second_moment: Tensor
    total: Tensor


class Launcher:
    """The kernels for one shape of input, with their constants filled in."""

    def __init__(self, q: Tensor, plan: Plan, config: Configuration, normalize: bool, centred: bool) -> None:
        self.rows, self.tokens, self.heads, self.size = q.shape
        self.device = q.device
        self.plan, self.config = plan, config
        self.sequences, self.blocks = plan.begin.shape[0], plan.owner.shape[0]
        self.normalize, self.centred = normalize, centred
        self.tiles = triton.cdiv(self.size, config.tile)
        self.pairs = self.tiles * (self.tiles + 1) // 2
        # bf16 keeps states in bf16. float16 has not the range for gradients: float32 states, read as tf32, whose
        # mantissa is that of float16.
        self.state_dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        self.precision = "ieee" if q.dtype == torch.float32 else "tf32"
        self.common = {"H": self.heads, "D": self.size, "BN": config.group}
        self.wide = {"BD": max(16, triton.next_power_of_2(self.size)), "BK": config.part, "C": config.chunk}
        self.state_precision = {"PRECISION": self.precision, "STATE_PRECISION": self.precision}
        # One program a tile and segment: long sequences are split until the card is full.
        programs = self.sequences * self.heads * self.pairs
        wanted = max(1, min(8, 256 // max(programs, 1)))
        self.per_segment = max(1, triton.cdiv(plan.longest, wanted))
        self.segments = max(1, triton.cdiv(plan.longest, self.per_segment))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def unit_keys(self, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised keys, their reciprocal lengths, and the sum of each group."""
        unit = torch.empty_like(k)
        reciprocal = self.empty(self.rows, self.tokens, self.heads)
        sums = self.empty(2 * self.blocks, self.heads, self.size)
        plan = self.plan
        _unit_keys_kernel[(2 * self.blocks * self.heads,)](
            k, unit, reciprocal, sums, plan.begin, plan.end, plan.owner, plan.block_start,
            **self.common, BD=self.wide["BD"], BR=self.config.row_rows, NORMALIZE=self.normalize, EPS=NORM_EPSILON,
            num_warps=self.config.row_warps,
        )  # fmt: skip
        return unit, reciprocal, sums

    def scan_vectors(self, sums: Tensor, initial: Tensor, reverse: bool) -> Tensor:
        """Turns block sums into sums before (behind) each block, in place, and returns the last."""
        final = torch.empty_like(initial)
        width = 32
        grid = (self.sequences * self.heads, triton.cdiv(self.size, width))
        _scan_vectors_kernel[grid](
            sums, initial, final, self.plan.block_start,
            H=self.heads, D=self.size, BV=width, STEP=64, REVERSE=reverse,
        )  # fmt: skip
        return final

    def _scan(
        self, kernel: Any, before: tuple[Any, ...], states: tuple[Any, ...], initial: Tensor, count: Tensor
    ) -> Tensor:
        """Run a scan of tiles: totals of the segments first where there is more than one."""
        plan, config = self.plan, self.config
        final = torch.empty_like(initial)
        totals = self.empty(
            self.segments if self.segments > 1 else 0, self.sequences * self.heads * self.pairs, config.tile**2
        )
        grid = (self.sequences * self.heads * self.pairs, self.segments)
        for totals_only in (True, False) if self.segments > 1 else (False,):
            kernel[grid](
                *before, *states, totals, initial, count, final,
                plan.begin, plan.end, plan.block_start, plan.chunk_start, self.sequences, self.per_segment,
                **self.common, BS=config.tile, S=self.tiles, C=config.chunk,
                CENTRED=self.centred, TOTALS_ONLY=totals_only, PRECISION=self.precision,
                num_warps=config.scan_warps, num_stages=config.scan_stages,
            )  # fmt: skip
        return final

    def moments(self, unit: Tensor, vectors: Tensor, initial: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The covariance before each chunk, and M behind each sequence."""
        covariances = self.empty(self.plan.chunks, self.heads, self.size, self.size, dtype=self.state_dtype)
        final = self._scan(_scan_moments_kernel, (unit, vectors), (covariances,), initial, count)
        return covariances, final

    def covariance_times(
        self, x: Tensor, unit: Tensor, vectors: Tensor, covariances: Tensor, count: Tensor, *, gate: Tensor | None,
        query: Tensor | None, correction: Tensor | None, normalize: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Fills `query` and `correction` where given. Returns the mean scores and the reciprocal lengths of x."""
        plan, config = self.plan, self.config
        reciprocal, at_block, at_chunk, mean = (self.empty(self.rows, self.tokens, self.heads) for _ in range(4))
        bounds = (plan.begin, plan.end, plan.owner, plan.block_start)
        _row_scalars_kernel[(2 * self.blocks * self.heads,)](
            x, vectors, reciprocal, at_block, at_chunk, *bounds, **self.common, BD=self.wide["BD"], C=config.chunk,
            BT=config.read_rows, BR=config.row_rows, NORMALIZE=normalize, CENTRED=self.centred, EPS=NORM_EPSILON,
            num_warps=config.row_warps,
        )  # fmt: skip
        # A pointer that a kernel does not use must still be one.
        _covariance_kernel[(self.parts(config.read_rows) * triton.cdiv(self.size, config.read_columns),)](
            x, unit, reciprocal if gate is None else gate, reciprocal, at_block, at_chunk, vectors, covariances, count,
            x if query is None else query, x if correction is None else correction, mean, *bounds, plan.chunk_start,
            **self.common, **self.wide, BO=config.read_columns, BT=config.read_rows, CENTRED=self.centred,
            QUERY=query is not None, CORRECTION=correction is not None, **self.state_precision,
            num_warps=config.read_warps, num_stages=config.read_stages,
        )  # fmt: skip
        return mean, reciprocal

    def parts(self, rows: int) -> int:
        """Programs of a kernel that treats `rows` rows of one head."""
        return self.blocks * (2 * self.config.group // rows) * self.heads

    def tables(self) -> tuple[Tensor, ...]:
        plan = self.plan
        return plan.begin, plan.end, plan.owner, plan.block_start, plan.chunk_start


def forward(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor, total: Tensor, count: Tensor,
    plan: Plan, config: Configuration, *, normalize: bool, centred: bool, return_correction: bool,
) -> Forward:  # fmt: skip
    """The read step. q, k [B, T, H, D] and gate [B, T, H], contiguous; the rest as in `curvature_conditioned_query`."""
    launch = Launcher(q, plan, config, normalize, centred)
    unit, _, vectors = launch.unit_keys(k)
    last = launch.scan_vectors(vectors, total, reverse=False)
    covariances, moment = launch.moments(unit, vectors, second_moment, count)
    query = torch.empty_like(q)
    correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
    mean, reciprocal = launch.covariance_times(
        q, unit, vectors, covariances, count, gate=gate, query=query, correction=correction, normalize=normalize
    )
    return Forward(query, correction, moment, last, reciprocal, vectors, mean)


def backward(
    q: Tensor, k: Tensor, gate: Tensor, dy: Tensor, dr: Tensor | None, d_moment: Tensor, d_total: Tensor,
    result: Forward,
    second_moment: Tensor, count: Tensor, plan: Plan, config: Configuration, *, normalize: bool, centred: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous; padding is left as `torch.empty` made it."""
    launch = Launcher(q, plan, config, normalize, centred)
    x, strength, d_gate = dy, -gate.float(), torch.empty_like(result.reciprocal)
    correction = torch.empty(0) if result.correction is None else result.correction
    if dr is not None:
        x = (dr + strength.unsqueeze(-1) * dy).to(q.dtype)
        strength = torch.ones_like(strength)
    unit, key_reciprocal, _ = launch.unit_keys(k)
    covariances, _ = launch.moments(unit, result.vectors, second_moment, count)
    dq, dk, weighted = torch.empty_like(q), torch.empty_like(k), torch.empty_like(q)
    mean_x, _ = launch.covariance_times(
        x, unit, result.vectors, covariances, count, gate=None, query=None, correction=weighted, normalize=False
    )
    leans = torch.empty_like(result.vectors)
    # `weighted` holds Sigma x until the kernel that reads it writes over it, row by row.
    _query_gradients_kernel[(2 * launch.blocks * launch.heads,)](
        q, x, dy, weighted, strength, result.reciprocal, count, result.mean, mean_x, dq, d_gate, weighted, leans,
        plan.begin, plan.end, plan.owner, plan.block_start, **launch.common, BD=launch.wide["BD"],
        BR=config.row_rows, NORMALIZE=normalize, CENTRED=centred, num_warps=config.row_warps,
    )  # fmt: skip
    del covariances
    if dr is not None:
        d_gate = -(dy.float() * correction).sum(-1)
    first_lean = launch.scan_vectors(leans, -d_total, reverse=True)
    spreads = launch.empty(plan.chunks, launch.heads, launch.size, launch.size, dtype=launch.state_dtype)
    means = launch.empty(plan.chunks, launch.heads, launch.tiles, launch.size)
    first_spread = launch._scan(
        _scan_gradients_kernel,
        (weighted, x, result.vectors, result.total),
        (spreads, means),
        d_moment + d_moment.mT,
        count,
    )
    _key_gradients_kernel[(launch.parts(config.gradient_rows),)](
        unit, x, weighted, strength, key_reciprocal, result.vectors, result.total, spreads, means, leans, count,
        result.mean, mean_x, dk, *launch.tables(), **launch.common, **launch.wide, BT=config.gradient_rows,
        S=launch.tiles, NORMALIZE=normalize, CENTRED=centred, **launch.state_precision,
        num_warps=config.gradient_warps, num_stages=config.gradient_stages,
    )  # fmt: skip
    return Gradients(dq, dk, d_gate, first_spread / 2, -first_lean)
