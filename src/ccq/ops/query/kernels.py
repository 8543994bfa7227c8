"""The read step in Triton: forward and backward for dense, padded and packed input.

Legend: N sequences, H heads, D key size (BD the next power of two), C tokens a chunk, BT tokens a block (a chunk has
C / BT of them), S tiles of a state a side (of BS columns), G segments into which the scan of a long sequence is split.
i reads, j is read.

The mathematics is that of `chunked.py`; what differs is how sums travel between programs.

Forward. `_block_sums` reads k once: reciprocal lengths rk, and sums of rk k over each block. `_scan_vectors` adds these
up to m before each block. `_scan_moments` walks over the sequence, one program for each tile of the upper triangle,
adds up M in float32 registers, and writes at each chunk the covariance of everything before it, Sigma_0 = M / t0 -
(m / t0)(m / t0)^T: centred before it is rounded, because M and m m^T / t0 nearly cancel when keys share a mean, and
divided by t0 so that its range does not grow with length. `_read` then treats every block alone:

    a_i = (q_i . m_block + sum over j <= i in the block of s_ij) / t_i
    r_i = (t0 Sigma_0 q_i + ((q_i . m_chunk) / t0 - a_i) m_chunk + sum over j <= i in the chunk of (s_ij - a_i) k_j) / t_i

Queries and keys enter products as they were given; their reciprocal lengths multiply scores and rows, so normalising
rounds nothing.

Backward. `_read_backward` applies the same routine to the gradient p that reaches r, which gives dq and the gate's
gradient, and the block sums of w. `_scan_gradients` walks backwards and writes at each chunk W, the sum over later
tokens of (p q^T + q p^T) / t, and W mu for the mean mu at the end of the chunk. `_key_gradients` then needs

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

    block: int
    """BT"""
    tile: int
    """BS"""
    part: int
    """BK, columns of a state that are loaded at once."""
    chunk: int
    """C, a multiple of BT."""
    scan_warps: int
    read_warps: int
    gradient_warps: int
    stages: int


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
def _block_sums_kernel(
    k,
    reciprocal,
    sums,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
):
    """For every block: reciprocal lengths of its keys [B T, H], and the sum of its normalised keys [blocks, H, D]."""
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    inside = (block - tl.load(block_start + n)).to(tl.int32) * BT + tl.arange(0, BT)
    real = inside < length
    token = (first + inside) * H + h
    column = tl.arange(0, BD)
    b_k = tl.load(k + token[:, None] * D + column, mask=real[:, None] & (column < D), other=0.0).to(tl.float32)
    b_r = tl.full((BT,), 1.0, tl.float32)
    if NORMALIZE:
        b_r = tl.rsqrt(tl.sum(b_k * b_k, 1) + EPS)
    tl.store(reciprocal + token, b_r, mask=real)
    tl.store(sums + (block * H + h) * D + column, tl.sum(b_k * b_r[:, None], 0), mask=column < D)


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
    """In place of the block sums [blocks, H, D]: the sum before each block (REVERSE: behind it). And the last one."""
    h = tl.program_id(0) % H
    n = tl.program_id(0).to(tl.int64) // H
    start = tl.load(block_start + n)
    blocks = (tl.load(block_start + n + 1) - start).to(tl.int32)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    step = tl.arange(0, STEP)
    state = (n * H + h) * D + column
    running = tl.load(initial + state, mask=column < D, other=0.0)
    for done in range(0, blocks, STEP):
        place = done + step
        inside = (place < blocks)[:, None] & (column < D)
        if REVERSE:
            place = blocks - 1 - place
        pointer = sums + ((start + place[:, None]) * H + h) * D + column
        b_x = tl.load(pointer, mask=inside, other=0.0)
        b_sum = tl.cumsum(b_x, 0)
        tl.store(pointer, running + b_sum - b_x, mask=inside)
        running += tl.sum(b_x, 0)
    tl.store(final + state, running, mask=column < D)


@triton.jit
def _moment_tile(
    k,
    reciprocal,
    first,
    start,
    stop,
    h,
    row,
    column,
    acc,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + the sum of k_row k_column^T, both normalised, over tokens start ... stop - 1."""
    for t in range(start, stop, BT):
        inside = t + tl.arange(0, BT)
        real = inside < stop
        token = (first + inside) * H + h
        b_r = tl.load(reciprocal + token, mask=real, other=0.0)
        b_i = tl.load(k + token[:, None] * D + row, mask=real[:, None] & (row < D), other=0.0)
        b_j = tl.load(k + token[:, None] * D + column, mask=real[:, None] & (column < D), other=0.0)
        b_i = (b_i.to(tl.float32) * (b_r * b_r)[:, None]).to(b_j.dtype)
        acc = tl.dot(tl.trans(b_i), b_j, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _scan_moments_kernel(
    k,
    reciprocal,
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
    BT: tl.constexpr,
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
        acc = _moment_tile(
            k, reciprocal, first, low * C, tl.minimum(high * C, length), h, row, column, acc, H, D, BT, PRECISION
        )
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
        seen = tl.load(count + n) + low * C
        block = tl.load(block_start + n)
        for c in range(low, high):
            b_t = 1.0 / tl.maximum(seen, 1).to(tl.float32)
            b_c = acc * b_t
            if CENTRED:
                m = vectors + ((block + c * (C // BT)) * H + h) * D
                b_mi = tl.load(m + row, mask=row < D, other=0.0) * b_t
                b_mj = tl.load(m + column, mask=column < D, other=0.0) * b_t
                b_c -= b_mi[:, None] * b_mj
            state = covariances + ((tl.load(chunk_start + n) + c) * H + h) * D * D
            tl.store(state + square, b_c.to(covariances.dtype.element_ty), mask=fits)
            if i != j:
                tl.store(state + mirrored, b_c.to(covariances.dtype.element_ty), mask=fits)
            stop = tl.minimum((c + 1) * C, length)
            acc = _moment_tile(k, reciprocal, first, c * C, stop, h, row, column, acc, H, D, BT, PRECISION)
            seen += C
        if segment == tl.maximum(chunks - 1, 0) // per_segment:
            state = final + (n * H + h) * D * D
            tl.store(state + square, acc, mask=fits)
            if i != j:
                tl.store(state + mirrored, acc, mask=fits)


@triton.jit
def _covariance_times(
    x,
    b_x,
    b_rx,
    k,
    reciprocal,
    vectors,
    covariances,
    block,
    chunk,
    place,
    first,
    length,
    seen,
    h,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    C: tl.constexpr,
    CENTRED: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """Sigma_i x_i [BT, BD] and the mean scores [BT] of one block, for x as given (`b_x` in float32) times `b_rx`.

    `seen` is the count of the sequence before its first token of this call, `place` the block's number in it.
    """
    inside = place * BT + tl.arange(0, BT)
    real = inside < length
    token = (first + inside) * H + h
    column = tl.arange(0, BD)
    FIRST: tl.constexpr = C // BT
    start = (place // FIRST) * FIRST
    before = seen + start * BT
    b_t = tl.where(real, seen + inside + 1, 1).to(tl.float32)

    acc = tl.zeros((BT, BD), tl.float32)
    for d in range(0, D, BK):
        part = d + tl.arange(0, BK)
        b_xd = tl.load(x + token[:, None] * D + part, mask=real[:, None] & (part < D), other=0.0)
        state = covariances + (chunk * H + h) * D * D
        b_c = tl.load(state + part[:, None] * D + column, mask=(part < D)[:, None] & (column < D), other=0.0)
        acc = tl.dot(b_xd.to(b_c.dtype), b_c, acc, input_precision=STATE_PRECISION)
    acc *= (before.to(tl.float32) * b_rx)[:, None]

    b_r = tl.load(reciprocal + token, mask=real, other=0.0)
    b_k = tl.load(k + token[:, None] * D + column, mask=real[:, None] & (column < D), other=0.0)
    operand = b_x.to(b_k.dtype)
    b_s = tl.dot(operand, tl.trans(b_k), input_precision=PRECISION) * b_rx[:, None] * b_r
    causal = tl.arange(0, BT)[:, None] >= tl.arange(0, BT)
    b_a = tl.zeros((BT,), tl.float32)
    if CENTRED:
        b_mb = tl.load(vectors + (block * H + h) * D + column, mask=column < D, other=0.0)
        b_mc = tl.load(vectors + ((block - (place - start)) * H + h) * D + column, mask=column < D, other=0.0)
        b_a = (tl.sum(b_x * b_mb, 1) * b_rx + tl.sum(tl.where(causal, b_s, 0.0), 1)) / b_t
        b_lean = tl.sum(b_x * b_mc, 1) * b_rx / tl.maximum(before, 1).to(tl.float32) - b_a
        acc += b_lean[:, None] * b_mc
    b_s = tl.where(causal, b_s - b_a[:, None], 0.0) * b_r
    acc = tl.dot(b_s.to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    for earlier in range(start, place):
        source = (first + earlier * BT + tl.arange(0, BT)) * H + h
        b_r = tl.load(reciprocal + source)
        b_k = tl.load(k + source[:, None] * D + column, mask=(column < D)[None, :], other=0.0)
        b_s = tl.dot(operand, tl.trans(b_k), input_precision=PRECISION) * b_rx[:, None] * b_r
        b_s = (b_s - b_a[:, None]) * b_r
        acc = tl.dot(b_s.to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    return acc / b_t[:, None], b_a


@triton.jit
def _read_kernel(
    q,
    k,
    gate,
    reciprocal,
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
    BK: tl.constexpr,
    BT: tl.constexpr,
    C: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    CORRECTION: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """The contracted queries of one block, its mean scores, and on request its correction."""
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    place = (block - tl.load(block_start + n)).to(tl.int32)
    if place * BT < length:
        chunk = tl.load(chunk_start + n) + place // (C // BT)
        inside = place * BT + tl.arange(0, BT)
        real = inside < length
        token = (first + inside) * H + h
        column = tl.arange(0, BD)
        where = token[:, None] * D + column
        fits = real[:, None] & (column < D)
        b_q = tl.load(q + where, mask=fits, other=0.0).to(tl.float32)
        b_rq = tl.full((BT,), 1.0, tl.float32)
        if NORMALIZE:
            b_rq = tl.rsqrt(tl.sum(b_q * b_q, 1) + EPS)
        b_y, b_a = _covariance_times(
            q, b_q, b_rq, k, reciprocal, vectors, covariances, block, chunk, place, first, length,
            tl.load(count + n), h, H, D, BD, BK, BT, C, CENTRED, PRECISION, STATE_PRECISION,
        )  # fmt: skip
        if CORRECTION:
            tl.store(correction + where, b_y, mask=fits)
        b_g = tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
        b_y = b_q * b_rq[:, None] - b_g[:, None] * b_y
        tl.store(query + where, b_y.to(query.dtype.element_ty), mask=fits)
        if CENTRED:
            tl.store(mean + token, b_a, mask=real)


@triton.jit
def _read_backward_kernel(
    q,
    k,
    x,
    dy,
    strength,
    reciprocal,
    vectors,
    covariances,
    count,
    mean,
    dq,
    d_gate,
    mean_x,
    reciprocal_q,
    weight_q,
    leans,
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
    C: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """With p = strength x the gradient that reaches r: dq, the gate's gradient where x is dy, and block sums of w.

    leans [blocks, H, D] gets the sums of (a p + c q) / t; mean_x [B T, H] the mean scores of x, reciprocal_q the
    reciprocal lengths of q, and weight_q the factor strength / (|q| t) that the other kernels need.
    """
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    place = (block - tl.load(block_start + n)).to(tl.int32)
    column = tl.arange(0, BD)
    b_w = tl.zeros((BD,), tl.float32)
    if place * BT < length:
        chunk = tl.load(chunk_start + n) + place // (C // BT)
        inside = place * BT + tl.arange(0, BT)
        real = inside < length
        token = (first + inside) * H + h
        where = token[:, None] * D + column
        fits = real[:, None] & (column < D)
        b_x = tl.load(x + where, mask=fits, other=0.0).to(tl.float32)
        seen = tl.load(count + n)
        b_one = tl.full((BT,), 1.0, tl.float32)
        b_u, b_b = _covariance_times(
            x, b_x, b_one, k, reciprocal, vectors, covariances, block, chunk, place, first, length,
            seen, h, H, D, BD, BK, BT, C, CENTRED, PRECISION, STATE_PRECISION,
        )  # fmt: skip
        b_q = tl.load(q + where, mask=fits, other=0.0).to(tl.float32)
        b_rq = b_one
        if NORMALIZE:
            b_rq = tl.rsqrt(tl.sum(b_q * b_q, 1) + EPS)
        b_q *= b_rq[:, None]
        tl.store(d_gate + token, -tl.sum(b_q * b_u, 1), mask=real)
        b_l = tl.load(strength + token, mask=real, other=0.0).to(tl.float32)
        b_dq = tl.load(dy + where, mask=fits, other=0.0).to(tl.float32) + b_l[:, None] * b_u
        if NORMALIZE:
            b_dq = (b_dq - b_q * tl.sum(b_q * b_dq, 1)[:, None]) * b_rq[:, None]
        tl.store(dq + where, b_dq.to(dq.dtype.element_ty), mask=fits)
        b_l /= tl.where(real, seen + inside + 1, 1).to(tl.float32)
        tl.store(reciprocal_q + token, b_rq, mask=real)
        tl.store(weight_q + token, b_l * b_rq, mask=real)
        if CENTRED:
            tl.store(mean_x + token, b_b, mask=real)
            b_a = tl.load(mean + token, mask=real, other=0.0)
            b_w = tl.sum((b_a * b_l)[:, None] * b_x + (b_b * b_l)[:, None] * b_q, 0)
    tl.store(leans + (block * H + h) * D + column, b_w, mask=column < D)


@triton.jit
def _spread_tile(
    q,
    x,
    weight_q,
    first,
    start,
    stop,
    h,
    row,
    column,
    acc,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + the sum of (p q^T + q p^T) / t over tokens start ... stop - 1, from the last block to the first."""
    blocks = tl.cdiv(stop - start, BT)
    for done in range(0, blocks):
        inside = start + (blocks - 1 - done) * BT + tl.arange(0, BT)
        real = inside < stop
        token = (first + inside) * H + h
        b_f = tl.load(weight_q + token, mask=real, other=0.0)[:, None]
        rows, columns = real[:, None] & (row < D), real[:, None] & (column < D)
        b_qi = tl.load(q + token[:, None] * D + row, mask=rows, other=0.0)
        b_xj = tl.load(x + token[:, None] * D + column, mask=columns, other=0.0)
        acc = tl.dot(tl.trans((b_qi.to(tl.float32) * b_f).to(b_xj.dtype)), b_xj, acc, input_precision=PRECISION)
        b_qj = tl.load(q + token[:, None] * D + column, mask=columns, other=0.0)
        b_xi = tl.load(x + token[:, None] * D + row, mask=rows, other=0.0)
        acc = tl.dot(tl.trans(b_xi), (b_qj.to(tl.float32) * b_f).to(b_xi.dtype), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _scan_gradients_kernel(
    q,
    x,
    weight_q,
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
    BT: tl.constexpr,
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
        acc = _spread_tile(
            q, x, weight_q, first, low * C, tl.minimum(high * C, length), h, row, column, acc, H, D, BT, PRECISION
        )
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
        block = tl.load(block_start + n)
        for done in range(0, high - low):
            c = high - 1 - done
            stop = tl.minimum((c + 1) * C, length)
            chunk = tl.load(chunk_start + n) + c
            state = spreads + (chunk * H + h) * D * D
            tl.store(state + square, acc.to(spreads.dtype.element_ty), mask=fits)
            if i != j:
                tl.store(state + mirrored, acc.to(spreads.dtype.element_ty), mask=fits)
            if CENTRED:
                m = vectors + ((block + (c + 1) * (C // BT)) * H + h) * D
                if c == chunks - 1:
                    m = last_vector + (n * H + h) * D
                b_t = 1.0 / (seen + stop).to(tl.float32)
                b_mi = tl.load(m + row, mask=row < D, other=0.0) * b_t
                b_mj = tl.load(m + column, mask=column < D, other=0.0) * b_t
                share = means + (chunk * H + h) * S * D
                tl.store(share + j * D + row, tl.sum(acc * b_mj, 1), mask=row < D)
                if i != j:
                    tl.store(share + i * D + column, tl.sum(acc * b_mi[:, None], 0), mask=column < D)
            acc = _spread_tile(q, x, weight_q, first, c * C, stop, h, row, column, acc, H, D, BT, PRECISION)
        if segment == 0:
            state = final + (n * H + h) * D * D
            tl.store(state + square, acc, mask=fits)
            if i != j:
                tl.store(state + mirrored, acc, mask=fits)


@triton.jit
def _key_gradients_kernel(
    q,
    k,
    x,
    strength,
    reciprocal,
    reciprocal_q,
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
    S: tl.constexpr,
    C: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """dk of one block. `leans` holds w behind each block."""
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    place = (block - tl.load(block_start + n)).to(tl.int32)
    if place * BT < length:
        FIRST: tl.constexpr = C // BT
        c = place // FIRST
        chunk = tl.load(chunk_start + n) + c
        blocks = tl.cdiv(length, BT)
        stop = tl.minimum((c + 1) * FIRST, blocks)
        inside = place * BT + tl.arange(0, BT)
        real = inside < length
        token = (first + inside) * H + h
        column = tl.arange(0, BD)
        where = token[:, None] * D + column
        fits = real[:, None] & (column < D)
        seen = tl.load(count + n)
        b_r = tl.load(reciprocal + token, mask=real, other=0.0)

        behind = block + (stop - place)
        m = vectors + (behind * H + h) * D
        w = leans + ((behind - 1) * H + h) * D
        if stop == blocks:
            m = last_vector + (n * H + h) * D
        b_t = 1.0 / (seen + tl.minimum(stop * BT, length)).to(tl.float32)
        acc = tl.zeros((BT, BD), tl.float32)
        for d in range(0, D, BK):
            part = d + tl.arange(0, BK)
            b_kd = tl.load(k + token[:, None] * D + part, mask=real[:, None] & (part < D), other=0.0)
            b_kd = b_kd.to(tl.float32) * b_r[:, None]
            if CENTRED:
                b_kd -= tl.load(m + part, mask=part < D, other=0.0) * b_t
            state = spreads + (chunk * H + h) * D * D
            b_w = tl.load(state + part[:, None] * D + column, mask=(part < D)[:, None] & (column < D), other=0.0)
            acc = tl.dot(b_kd.to(b_w.dtype), b_w, acc, input_precision=STATE_PRECISION)
        b_v = -tl.load(w + column, mask=column < D, other=0.0)
        if CENTRED:
            for s in range(0, S):
                b_v += tl.load(means + ((chunk * H + h) * S + s) * D + column, mask=column < D, other=0.0)
        acc += b_v

        b_k = tl.load(k + where, mask=fits, other=0.0)
        for reader in range(place, stop):
            at = reader * BT + tl.arange(0, BT)
            there = at < length
            source = (first + at) * H + h
            b_q = tl.load(q + source[:, None] * D + column, mask=there[:, None] & (column < D), other=0.0)
            b_x = tl.load(x + source[:, None] * D + column, mask=there[:, None] & (column < D), other=0.0)
            b_rq = tl.load(reciprocal_q + source, mask=there, other=0.0)
            b_l = tl.load(strength + source, mask=there, other=0.0).to(tl.float32)
            b_l /= tl.where(there, seen + at + 1, 1).to(tl.float32)
            reads = at[:, None] >= inside
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_rq[:, None] * b_r
            b_z = tl.dot(b_x, tl.trans(b_k), input_precision=PRECISION) * b_r
            if CENTRED:
                b_s -= tl.load(mean + source, mask=there, other=0.0)[:, None]
                b_z -= tl.load(mean_x + source, mask=there, other=0.0)[:, None]
            b_s = tl.where(reads, b_s * b_l[:, None], 0.0)
            b_z = tl.where(reads, b_z * (b_l * b_rq)[:, None], 0.0)
            acc = tl.dot(tl.trans(b_s.to(b_x.dtype)), b_x, acc, input_precision=PRECISION)
            acc = tl.dot(tl.trans(b_z.to(b_q.dtype)), b_q, acc, input_precision=PRECISION)
        if NORMALIZE:
            b_u = b_k.to(tl.float32) * b_r[:, None]
            acc = (acc - b_u * tl.sum(b_u * acc, 1)[:, None]) * b_r[:, None]
        tl.store(dk + where, acc.to(dk.dtype.element_ty), mask=fits)


def configuration(dtype: torch.dtype, size: int) -> Configuration:
    """The configuration for heads of `size` columns."""
    width = max(16, triton.next_power_of_2(size))
    wide = width > 64
    if dtype == torch.float32:
        return Configuration(32, min(32, width), min(32, width), 128, 4, 8 if wide else 4, 8 if wide else 4, 1)
    return Configuration(64, min(64, width), min(64, width), 256, 4, 8 if wide else 4, 8 if wide else 4, 2)


def cut(begin: Tensor, end: Tensor, lengths: list[int], block: int, chunk: int) -> Plan:
    """The plan for sequences with at most `lengths` tokens each."""
    device = begin.device
    blocks = torch.tensor([-(-length // block) for length in lengths], dtype=torch.int64)
    chunks = torch.tensor([-(-length // chunk) for length in lengths], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), blocks)
    zero = torch.zeros(1, dtype=torch.int64)
    block_start, chunk_start = (torch.cat((zero, x.cumsum(0))) for x in (blocks, chunks))
    moved = (x.to(device, non_blocking=True) for x in (owner, block_start, chunk_start))
    return Plan(begin, end, *moved, int(chunk_start[-1]), int(chunks.max()) if lengths else 0)


@functools.lru_cache(maxsize=64)
def _rows_plan(rows: int, tokens: int, block: int, chunk: int, device: torch.device) -> Plan:
    """Dense rows; kept, so that a step of training builds no tables."""
    begin = torch.arange(rows, dtype=torch.int64, device=device) * tokens
    return cut(begin, begin + tokens, [tokens] * rows, block, chunk)


def make_plan(
    rows: int, tokens: int, mask: Tensor | None, boundaries: list[int] | None, config: Configuration, device: torch.device
) -> Plan:
    """The plan of a call: packed documents, padded rows (cut as if they were full), or dense rows."""
    if boundaries is not None:
        edges = torch.tensor(boundaries, dtype=torch.int64)
        bounds = edges.to(device)
        return cut(bounds[:-1], bounds[1:], edges.diff().tolist(), config.block, config.chunk)
    plan = _rows_plan(rows, tokens, config.block, config.chunk, device)
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
    """[B, T, H] float32, of the keys."""
    vectors: Tensor
    """[blocks, H, D] float32, m before each block."""
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
        self.common = {"H": self.heads, "D": self.size, "BT": config.block}
        self.wide = {"BD": max(16, triton.next_power_of_2(self.size)), "BK": config.part, "C": config.chunk}
        self.state_precision = {"PRECISION": self.precision, "STATE_PRECISION": self.precision}
        # One program a tile and segment: long sequences are split until the card is full.
        programs = self.sequences * self.heads * self.pairs
        wanted = max(1, min(8, 512 // max(programs, 1)))
        self.per_segment = max(1, triton.cdiv(plan.longest, wanted))
        self.segments = max(1, triton.cdiv(plan.longest, self.per_segment))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def block_sums(self, k: Tensor) -> tuple[Tensor, Tensor]:
        reciprocal = self.empty(self.rows, self.tokens, self.heads)
        sums = self.empty(self.blocks, self.heads, self.size)
        plan = self.plan
        _block_sums_kernel[(self.blocks * self.heads,)](
            k, reciprocal, sums, plan.begin, plan.end, plan.owner, plan.block_start,
            **self.common, BD=self.wide["BD"], NORMALIZE=self.normalize, EPS=NORM_EPSILON,
        )  # fmt: skip
        return reciprocal, sums

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

    def _scan(self, kernel: Any, before: tuple[Any, ...], states: tuple[Any, ...], initial: Tensor, count: Tensor) -> Tensor:
        """Run a scan of tiles: totals of the segments first where there is more than one."""
        plan, config = self.plan, self.config
        final = torch.empty_like(initial)
        totals = self.empty(self.segments if self.segments > 1 else 0, self.sequences * self.heads * self.pairs, config.tile**2)
        grid = (self.sequences * self.heads * self.pairs, self.segments)
        for totals_only in (True, False) if self.segments > 1 else (False,):
            kernel[grid](
                *before, *states, totals, initial, count, final, plan.begin, plan.end, plan.block_start, plan.chunk_start,
                self.sequences, self.per_segment, **self.common, BS=config.tile, S=self.tiles, C=config.chunk,
                CENTRED=self.centred, TOTALS_ONLY=totals_only, PRECISION=self.precision,
                num_warps=config.scan_warps, num_stages=config.stages,
            )  # fmt: skip
        return final

    def moments(self, k: Tensor, reciprocal: Tensor, vectors: Tensor, initial: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The covariance before each chunk, and M behind each sequence."""
        covariances = self.empty(self.plan.chunks, self.heads, self.size, self.size, dtype=self.state_dtype)
        final = self._scan(_scan_moments_kernel, (k, reciprocal, vectors), (covariances,), initial, count)
        return covariances, final

    def tables(self) -> tuple[Tensor, ...]:
        plan = self.plan
        return plan.begin, plan.end, plan.owner, plan.block_start, plan.chunk_start


def forward(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor, total: Tensor, count: Tensor, plan: Plan, config: Configuration,
    *, normalize: bool, centred: bool, return_correction: bool,
) -> Forward:  # fmt: skip
    """The read step. q, k [B, T, H, D] and gate [B, T, H], contiguous; the rest as in `curvature_conditioned_query`."""
    launch = Launcher(q, plan, config, normalize, centred)
    reciprocal, vectors = launch.block_sums(k)
    last = launch.scan_vectors(vectors, total, reverse=False)
    covariances, moment = launch.moments(k, reciprocal, vectors, second_moment, count)
    query = torch.empty_like(q)
    correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
    mean = torch.empty_like(reciprocal)
    _read_kernel[(launch.blocks * launch.heads,)](
        q, k, gate, reciprocal, vectors, covariances, count, query, query if correction is None else correction, mean,
        *launch.tables(), **launch.common, **launch.wide, NORMALIZE=normalize, CENTRED=centred,
        CORRECTION=return_correction, EPS=NORM_EPSILON, **launch.state_precision,
        num_warps=config.read_warps, num_stages=config.stages,
    )  # fmt: skip
    return Forward(query, correction, moment, last, reciprocal, vectors, mean)


def backward(
    q: Tensor, k: Tensor, gate: Tensor, dy: Tensor, dr: Tensor | None, d_moment: Tensor, d_total: Tensor, result: Forward,
    second_moment: Tensor, count: Tensor, plan: Plan, config: Configuration, *, normalize: bool, centred: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous; padding is left as `torch.empty` made it."""
    launch = Launcher(q, plan, config, normalize, centred)
    x, strength, d_gate = dy, -gate.float(), torch.empty_like(result.reciprocal)
    if dr is not None:
        assert result.correction is not None
        x = (dr + strength.unsqueeze(-1) * dy).to(q.dtype)
        strength = torch.ones_like(strength)
    covariances, _ = launch.moments(k, result.reciprocal, result.vectors, second_moment, count)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    mean_x, reciprocal_q, weight_q = (torch.empty_like(result.mean) for _ in range(3))
    leans = torch.empty_like(result.vectors)
    _read_backward_kernel[(launch.blocks * launch.heads,)](
        q, k, x, dy, strength, result.reciprocal, result.vectors, covariances, count, result.mean,
        dq, d_gate, mean_x, reciprocal_q, weight_q, leans, *launch.tables(), **launch.common, **launch.wide,
        NORMALIZE=normalize, CENTRED=centred, EPS=NORM_EPSILON, **launch.state_precision,
        num_warps=config.read_warps, num_stages=config.stages,
    )  # fmt: skip
    del covariances
    if dr is not None:
        d_gate = -(dy.float() * result.correction).sum(-1)
    first_lean = launch.scan_vectors(leans, -d_total, reverse=True)
    spreads = launch.empty(plan.chunks, launch.heads, launch.size, launch.size, dtype=launch.state_dtype)
    means = launch.empty(plan.chunks, launch.heads, launch.tiles, launch.size)
    first_spread = launch._scan(
        _scan_gradients_kernel, (q, x, weight_q, result.vectors, result.total), (spreads, means),
        d_moment + d_moment.mT, count,
    )  # fmt: skip
    _key_gradients_kernel[(launch.blocks * launch.heads,)](
        q, k, x, strength, result.reciprocal, reciprocal_q, result.vectors, result.total, spreads, means, leans, count,
        result.mean, mean_x, dk, *launch.tables(), **launch.common, **launch.wide, S=launch.tiles,
        NORMALIZE=normalize, CENTRED=centred, **launch.state_precision,
        num_warps=config.gradient_warps, num_stages=config.stages,
    )  # fmt: skip
    return Gradients(dq, dk, d_gate, first_spread / 2, -first_lean)
