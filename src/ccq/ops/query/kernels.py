"""The read step in Triton: forward and backward for dense, padded and packed input.

Legend: N sequences, H heads, D key size (BD the next power of two), BT rows a block, BN rows a group, C tokens a
chunk, S tiles of a state a side (of BS columns). i reads, j is read.

The mathematics is that of `chunked.py`; what differs is how sums travel between programs.

Forward. `_to_blocks` normalises k and sums each block; `_scan_vectors` adds these sums up to m before each block.
`_scan_moments` walks over the sequence, one program for each tile of the upper triangle, adds up M in float32
registers, and writes at each chunk the covariance of everything before it, Sigma_0 = M / t0 - (m / t0)(m / t0)^T:
centred before it is rounded, because M and m m^T / t0 nearly cancel when keys share a mean, and divided by t0 so that
its range does not grow with length. `_covariance` then treats every block of rows alone:

    a_i = (q_i . m_block + sum over j <= i in the block of s_ij) / t_i
    r_i = (t0 Sigma_0 q_i + ((q_i . m_chunk) / t0 - a_i) m_chunk + sum over j <= i of (s_ij - a_i) k_j) / t_i

Queries enter products as they were given; their reciprocal lengths multiply rows.

Backward. `_covariance` applied to the gradient p that reaches r gives u = Sigma p; `_query_gradients` makes dq, the
gate's gradient and the sums of w from it. `_scan_gradients` walks backwards and writes at each chunk W, the sum over
later tokens of (p q^T + q p^T) / t, and W mu for the mean mu at the end of the chunk. `_key_gradients` then needs

    dk_j = W (k_j - mu) + (W mu - w) + sum over i >= j in the chunk of (p_i (s_ij - a_i) + q_i (z_ij - c_i)) / t_i

with k centred before W, which is rounded, meets it. Where keys are used elsewhere too (`beside`), their gradient there
is added to it behind the normalisation.

What several programs read lies in blocks: [H, blocks, BT, BD], one after the other along each sequence, with zeros
behind its last token and past column D. So the large products load without masks, and where the card can (BULK) by
tensor descriptors. Rows are copied into that form unless they can be read where they are (`Launcher.is_aligned`). Keys
that can and are not to be normalised are passed over for the sums of blocks alone, and backward not at all.

Nothing is added atomically and no result depends on the order in which programs run. Addresses are 64-bit.

Where `copies_apart` holds, `_covariance` and `_key_gradients` are those of `hopper.py`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ccq.ops.query.reference import NORM_EPSILON
from ccq.ops.query.step import interpreted

WANTED_PROGRAMS = 256
"""Programs of a scan below which sequences are cut into segments."""
MAX_SEGMENTS = 8


class Configuration(NamedTuple):
    """Sizes and launch parameters of all kernels for one dtype and key size."""

    block: int
    """BT, rows of a program of the kernels that multiply."""
    group: int
    """BN, rows that are multiplied at once; divides BT."""
    chunk: int
    """C, a multiple of BT."""
    tile: int
    """BS"""
    part: int
    """BK, rows of a state that are loaded at once."""
    scan_group: int
    """BN of the scans."""
    scan_warps: int
    scan_stages: int
    read_warps: int
    read_stages: int
    row_rows: int
    """BR, rows that the kernels which only pass over rows hold at once."""
    row_warps: int
    row_stages: int
    scan_registers: int | None
    """Registers a thread that the scans may use, where more of their programs on a processor win more."""
    gradient_warps: int
    gradient_stages: int
    bulk: bool
    """Whether tiles are loaded by tensor descriptors, which sm_90 and later execute as bulk copies; not in float32."""


class Plan(NamedTuple):
    """Where the sequences of a call lie among its B * T tokens, and how they are cut. int64 on the device."""

    begin: Tensor
    """[N], the first token of each sequence."""
    end: Tensor
    """[N], one past its last token."""
    length: Tensor
    """[N]"""
    nothing: Tensor
    """[N], zeros: the counts of sequences that begin here."""
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
    full: bool
    """Whether every block is full and block i holds the tokens from i * BT on."""


@triton.jit
def _sequence(begin, end, n):
    """First token of sequence n, and its number of tokens."""
    first = tl.load(begin + n)
    return first, (tl.load(end + n) - first).to(tl.int32)


@triton.jit
def _tile(
    source, row, column, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BULK: tl.constexpr
):  # fmt: skip
    """[ROWS, WIDTH] of a matrix whose rows are STRIDE apart: a tensor descriptor (BULK) or a pointer."""
    if BULK:
        return source.load([row.to(tl.int32), column])
    else:
        # A 64-bit pointer and 32-bit offsets inside the tile: fewer registers than 64 bits for every element.
        inside = tl.arange(0, ROWS)[:, None] * STRIDE + tl.arange(0, WIDTH)
        return tl.load(source + row.to(tl.int64) * STRIDE + column + inside)


@triton.jit
def _origin(first, place, h, H: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr):
    """Row and column at which rows of head h begin: where token `first` is (ALIGNED), or at row `place` of blocks."""
    if ALIGNED:
        return first, h * D
    else:
        return place, 0


@triton.jit
def _load_part(pointer, side, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """[ROWS, WIDTH] of one head, from the row at `pointer` and column `side` on; zeros past `left` rows and past D."""
    row, column = tl.arange(0, ROWS), side + tl.arange(0, WIDTH)
    mask = (row < left)[:, None]
    # Blocks are at least 16 columns wide, so one of 8 may be the half that D = 8 does not fill.
    if D % WIDTH != 0 or D < 16:
        mask = mask & (column < D)
    return tl.load(pointer + (row[:, None] * (H * D) + column), mask=mask, other=0.0)


@triton.jit
def _store_part(pointer, x, side, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """The counterpart of `_load_part`; converts to the type of the memory."""
    row, column = tl.arange(0, ROWS), side + tl.arange(0, WIDTH)
    mask = (row < left)[:, None]
    if D % WIDTH != 0 or D < 16:
        mask = mask & (column < D)
    tl.store(pointer + (row[:, None] * (H * D) + column), x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _store_block(pointer, x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] to consecutive memory."""
    inside = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)
    tl.store(pointer + inside, x.to(pointer.dtype.element_ty))


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


@triton.jit(do_not_specialize=["blocks"])
def _to_blocks_kernel(
    x,
    blocked,
    reciprocal,
    sums,
    begin,
    end,
    owner,
    block_start,
    blocks,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    STAGES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    COPY: tl.constexpr,
    SUMS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Copies (COPY) the rows of a block, normalised (NORMALIZE, which stores their reciprocal lengths) or not, and sums
    them (SUMS).
    """
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    start = (block - tl.load(block_start + n)).to(tl.int32) * BT
    row, column = tl.arange(0, BR), tl.arange(0, BD)
    b_sum = tl.zeros((BR, BD), tl.float32)
    for r in tl.range(0, BT, BR, num_stages=STAGES):
        base, left = (first + start + r) * H + h, length - start - r
        b_x = _load_part(x + base * D, 0, left, BR, BD, H, D)
        if NORMALIZE:
            b_f = b_x.to(tl.float32)
            b_r = tl.rsqrt(tl.sum(b_f * b_f, 1) + EPS)
            tl.store(reciprocal + base + row * H, b_r, mask=row < left)
            b_x = (b_f * b_r[:, None]).to(blocked.dtype.element_ty)
        if COPY:
            _store_block(blocked + ((h * blocks.to(tl.int64) + block) * BT + r) * BD, b_x, BR, BD)
        # The sum of the rounded keys: it must be the mean of what the products see.
        b_sum += b_x.to(tl.float32)
    if SUMS:
        tl.store(sums + (block * H + h) * D + column, tl.sum(b_sum, 0), mask=column < D)


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
    INITIAL: tl.constexpr,
):
    """In place of the sums [blocks, H, D]: the sum before each block (REVERSE: behind it). And the last one."""
    h = tl.program_id(0) % H
    n = tl.program_id(0).to(tl.int64) // H
    start = tl.load(block_start + n)
    blocks = (tl.load(block_start + n + 1) - start).to(tl.int32)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    step = tl.arange(0, STEP)
    state = (n * H + h) * D + column
    running = tl.zeros((BV,), tl.float32)
    if INITIAL:
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
def _add_moments(
    unit, at, side, i, j, acc, STRIDE: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """acc + the sum of k_row k_column^T over the group of keys at row `at`, for tile (i, j)."""
    # Plain loads: bulk copies were a quarter slower here, and a tenth faster in `_add_spreads`.
    b_i = _tile(unit, at, side + i * BS, STRIDE, BN, BS, False)
    b_j = _tile(unit, at, side + j * BS, STRIDE, BN, BS, False)
    return tl.dot(tl.trans(b_i), b_j, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["sequences", "per_segment", "blocks"])
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
    blocks,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr,
    CENTRED: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    TOTALS_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of M along one segment of a sequence. `unit` are keys in blocks, or keys as they are (KEYS_ALIGNED).

    TOTALS_ONLY: its sum over the segment, [segments, N, H, pairs, BS, BS]. Otherwise the covariance before each chunk,
    [chunks, H, BD, BD], from the totals of the segments before; the last segment writes M behind the sequence.
    """
    PAIRS: tl.constexpr = S * (S + 1) // 2
    pair = tl.program_id(0) % PAIRS
    h = (tl.program_id(0) // PAIRS) % H
    n = tl.program_id(0).to(tl.int64) // (PAIRS * H)
    segment = tl.program_id(1)
    i, j = _upper_tile(pair, S)
    row, column = i * BS + tl.arange(0, BS), j * BS + tl.arange(0, BS)
    first, length = _sequence(begin, end, n)
    begun = tl.load(block_start + n)
    at, side = _origin(first, (h * blocks.to(tl.int64) + begun) * BT, h, H, D, KEYS_ALIGNED)
    STRIDE: tl.constexpr = H * D if KEYS_ALIGNED else BD
    chunks = tl.cdiv(length, C)
    low = segment * per_segment
    high = tl.minimum(low + per_segment, chunks)
    inside_tile = tl.arange(0, BS)[:, None] * BS + tl.arange(0, BS)
    tile = (n * H + h) * PAIRS + pair
    if TOTALS_ONLY:
        acc = tl.zeros((BS, BS), tl.float32)
        for t in range(low * C, tl.minimum(high * C, length), BN):
            acc = _add_moments(unit, at + t, side, i, j, acc, STRIDE, BN, BS, PRECISION)
        where = segment.to(tl.int64) * sequences * H * PAIRS + tile
        tl.store(totals + where * BS * BS + inside_tile, acc)
    else:
        state = (n * H + h) * D * D
        square = state + row[:, None] * D + column
        fits = (row < D)[:, None] & (column < D)
        acc = tl.zeros((BS, BS), tl.float32)
        if INITIAL:
            acc = tl.load(initial + square, mask=fits, other=0.0)
        for earlier in range(0, segment):
            where = tl.cast(earlier, tl.int64) * sequences * H * PAIRS + tile
            acc += tl.load(totals + where * BS * BS + inside_tile)
        seen = tl.load(count + n)
        chunk = tl.load(chunk_start + n)
        # One loop over all groups of the segment, not one for each chunk: loads run ahead across chunks.
        for t in range(low * C, tl.minimum(high * C, length), BN):
            if t % C == 0:
                b_t = 1.0 / tl.maximum(seen + t, 1).to(tl.float32)
                b_c = acc * b_t
                if CENTRED:
                    m = vectors + ((begun + t // BT) * H + h) * D
                    b_mi = tl.load(m + row, mask=row < D, other=0.0) * b_t
                    b_mj = tl.load(m + column, mask=column < D, other=0.0) * b_t
                    b_c -= b_mi[:, None] * b_mj
                b_c = b_c.to(covariances.dtype.element_ty)
                here = covariances + ((chunk + t // C) * H + h) * BD * BD
                tl.store(here + row[:, None] * BD + column, b_c)
                if i != j:
                    tl.store(here + column[:, None] * BD + row, tl.trans(b_c))
            acc = _add_moments(unit, at + t, side, i, j, acc, STRIDE, BN, BS, PRECISION)
        if FINAL:  # noqa: SIM102 - known when compiled, the other is not
            if segment == tl.maximum(chunks - 1, 0) // per_segment:
                tl.store(final + square, acc, mask=fits)
                if i != j:
                    tl.store(final + state + column[None, :] * D + row[:, None], acc, mask=fits)


@triton.jit
def _halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right half of x [ROWS, WIDTH]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["blocks"])
def _covariance_kernel(
    rows,
    parts,
    unit_blocks,
    unit_groups,
    covariances,
    x,
    gate,
    vectors,
    count,
    query,
    correction,
    mean,
    reciprocal,
    q,
    dy,
    mean_q,
    dq,
    d_gate,
    weighted,
    leans,
    begin,
    end,
    owner,
    block_start,
    chunk_start,
    blocks,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    C: tl.constexpr,
    ALIGNED: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    GRADIENTS: tl.constexpr,
    CORRECTION: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):
    """r = Sigma_i x_i for the rows of one block, and their mean scores. `rows` and `parts` are x in blocks, or x itself
    where it is ALIGNED; the same holds for keys, `unit_blocks` and `unit_groups`, and KEYS_ALIGNED.

    Forward: x are queries, which NORMALIZE normalises; their reciprocal lengths and query = x - gate r are stored, and
    r itself with CORRECTION.

    GRADIENTS: x is the gradient that reaches r without its factor `gate`, and NORMALIZE says whether q was normalised.
    With p = gate x: dq, the gradient of lambda where x is dy, and what the gradient of the keys needs: weighted
    [H, blocks, BT, BD], the normalised queries times gate / t, and leans [blocks, H, D], the sums of (a p + c q) / t.
    """
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    begun = tl.load(block_start + n)
    start = (block - begun).to(tl.int32) * BT
    if start >= length:
        if GRADIENTS:
            tl.store(leans + (block * H + h) * D + tl.arange(0, BD), tl.zeros((BD,), tl.float32), tl.arange(0, BD) < D)
        return
    row, column = tl.arange(0, BT), tl.arange(0, BD)
    base, left = (first + start) * H + h, length - start
    token, real = base + row * H, row < left
    low = (start // C) * C
    seen = tl.load(count + n)
    before = (seen + low).to(tl.float32)
    b_it = 1.0 / tl.where(real, seen + start + row + 1, 1).to(tl.float32)
    place = (h * blocks.to(tl.int64) + block) * BT
    at, side = _origin(first + start, place, h, H, D, ALIGNED)
    key, key_side = _origin(first + start, place, h, H, D, KEYS_ALIGNED)
    STRIDE: tl.constexpr = H * D if ALIGNED else BD
    KEY_STRIDE: tl.constexpr = H * D if KEYS_ALIGNED else BD
    b_x = _tile(rows, at, side, STRIDE, BT, BD, BULK)

    # What needs the rows in registers comes first, before there are sums to keep in them.
    b_f = b_x.to(tl.float32)
    b_r = tl.full((BT,), 1.0, tl.float32)
    if NORMALIZE and not GRADIENTS:
        b_r = tl.rsqrt(tl.sum(b_f * b_f, 1) + EPS)
        tl.store(reciprocal + token, b_r, mask=real)
    m = vectors + ((begun + low // BT) * H + h) * D + column
    b_a = tl.zeros((BT,), tl.float32)
    b_c = b_a
    if CENTRED:
        b_m = tl.load(vectors + ((begun + start // BT) * H + h) * D + column, mask=column < D, other=0.0)
        b_a = tl.sum(b_f * b_m, 1)
        b_c = tl.sum(b_f * tl.load(m, mask=column < D, other=0.0), 1)

    # Rows read the keys of their own block up to themselves.
    b_k = _tile(unit_blocks, key, key_side, KEY_STRIDE, BT, BD, BULK)
    b_s = tl.dot(b_x, tl.trans(b_k), input_precision=PRECISION)
    b_s = tl.where(row[:, None] >= row, b_s, 0.0)
    if CENTRED:
        b_a = (b_a + tl.sum(b_s, 1)) * b_it
        tl.store(mean + token, b_a * b_r, mask=real)
        b_s = tl.where(row[:, None] >= row, b_s - b_a[:, None], 0.0)
    acc = tl.dot(b_s.to(b_k.dtype), b_k, input_precision=PRECISION)
    for earlier in range(low, start, BN):
        b_ke = _tile(unit_groups, key - start + earlier, key_side, KEY_STRIDE, BN, BD, BULK)
        b_se = tl.dot(b_x, tl.trans(b_ke), input_precision=PRECISION) - b_a[:, None]
        acc = tl.dot(b_se.to(b_ke.dtype), b_ke, acc, input_precision=PRECISION)
    if CENTRED:
        b_c = b_c / tl.maximum(before, 1.0) - b_a
        acc += b_c[:, None] * tl.load(m, mask=column < D, other=0.0)
    if before > 0:
        # One accumulator: brought to the scale of x^T Sigma_0 before that is added, and back.
        acc *= 1.0 / before
        state = ((tl.load(chunk_start + n) + start // C) * H + h) * BD
        for d in range(0, BD, BK):
            b_xd = _tile(parts, at, side + d, STRIDE, BT, BK, BULK)
            b_state = _tile(covariances, state + d, 0, BD, BK, BD, BULK)
            acc = tl.dot(b_xd.to(b_state.dtype), b_state, acc, input_precision=PRECISION)
        acc *= before
    acc *= (b_it * b_r)[:, None]

    # One half of the columns after the other: registers do not hold more beside all sums.
    b_g = tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
    halves = _halves(acc, BT, BD)
    if GRADIENTS:
        if NORMALIZE:
            b_r = tl.load(reciprocal + token, mask=real, other=0.0)
        b_u = tl.zeros((BT,), tl.float32)
        b_d = tl.zeros((BT,), tl.float32)
        for half in tl.static_range(2):
            side = half * (BD // 2)
            b_q = _load_part(q + base * D, side, left, BT, BD // 2, H, D).to(tl.float32) * b_r[:, None]
            b_dy = _load_part(dy + base * D, side, left, BT, BD // 2, H, D).to(tl.float32)
            b_u += tl.sum(b_q * halves[half], 1)
            b_d += tl.sum(b_q * b_dy, 1)
        tl.store(d_gate + token, -b_u, mask=real)
        b_d += b_g * b_u
        b_w = b_g * b_it
        if CENTRED:
            b_l = tl.load(mean_q + token, mask=real, other=0.0) * b_w
        for half in tl.static_range(2):
            side = half * (BD // 2)
            b_q = _load_part(q + base * D, side, left, BT, BD // 2, H, D).to(tl.float32) * b_r[:, None]
            b_dq = _load_part(dy + base * D, side, left, BT, BD // 2, H, D).to(tl.float32) + b_g[:, None] * halves[half]
            if NORMALIZE:
                b_dq = (b_dq - b_q * b_d[:, None]) * b_r[:, None]
            _store_part(dq + base * D, b_dq, side, left, BT, BD // 2, H, D)
            b_q *= b_w[:, None]
            inside = row[:, None] * BD + side + tl.arange(0, BD // 2)
            tl.store(weighted + place * BD + inside, b_q.to(weighted.dtype.element_ty))
            b_lean = tl.zeros((BD // 2,), tl.float32)
            if CENTRED:
                b_xh = _load_part(x + base * D, side, left, BT, BD // 2, H, D).to(tl.float32)
                b_lean = tl.sum(b_l[:, None] * b_xh + b_a[:, None] * b_q, 0)
            which = side + tl.arange(0, BD // 2)
            tl.store(leans + (block * H + h) * D + which, b_lean, mask=which < D)
    else:
        if CORRECTION:
            _store_part(correction + base * D, acc, 0, left, BT, BD, H, D)
        for half in tl.static_range(2):
            side = half * (BD // 2)
            b_y = _load_part(x + base * D, side, left, BT, BD // 2, H, D).to(tl.float32) * b_r[:, None]
            b_y -= b_g[:, None] * halves[half]
            _store_part(query + base * D, b_y, side, left, BT, BD // 2, H, D)


@triton.jit
def _add_spreads(
    weighted, x, at, x_at, side, i, j, acc, STRIDE: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + the sum of (p q^T + q p^T) / t over the group of tokens at rows `at` and `x_at`, for tile (i, j)."""
    b_q, b_x = _tile(weighted, at, i * BS, BD, BN, BS, BULK), _tile(x, x_at, side + j * BS, STRIDE, BN, BS, BULK)
    acc = tl.dot(tl.trans(b_q), b_x, acc, input_precision=PRECISION)
    b_q, b_x = _tile(weighted, at, j * BS, BD, BN, BS, BULK), _tile(x, x_at, side + i * BS, STRIDE, BN, BS, BULK)
    return tl.dot(tl.trans(b_x), b_q, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["sequences", "per_segment", "blocks"])
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
    blocks,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    ALIGNED: tl.constexpr,
    CENTRED: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    TOTALS_ONLY: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of W along one segment, from its end to its beginning; the counterpart of `_scan_moments_kernel`.

    Writes W behind each chunk [chunks, H, BD, BD], and this tile's share of W mu [chunks, H, S, D] with mu the mean at
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
    begun = tl.load(block_start + n)
    at = (h * blocks.to(tl.int64) + begun) * BT
    x_at, side = _origin(first, at, h, H, D, ALIGNED)
    STRIDE: tl.constexpr = H * D if ALIGNED else BD
    chunks = tl.cdiv(length, C)
    low = segment * per_segment
    high = tl.minimum(low + per_segment, chunks)
    inside_tile = tl.arange(0, BS)[:, None] * BS + tl.arange(0, BS)
    tile = (n * H + h) * PAIRS + pair
    if TOTALS_ONLY:
        acc = tl.zeros((BS, BS), tl.float32)
        for t in range(low * C, tl.minimum(high * C, length), BN):
            acc = _add_spreads(weighted, x, at + t, x_at + t, side, i, j, acc, STRIDE, BD, BN, BS, BULK, PRECISION)
        where = segment.to(tl.int64) * sequences * H * PAIRS + tile
        tl.store(totals + where * BS * BS + inside_tile, acc)
    else:
        state = (n * H + h) * D * D
        square = state + row[:, None] * D + column
        fits = (row < D)[:, None] & (column < D)
        acc = tl.zeros((BS, BS), tl.float32)
        if INITIAL:
            acc = tl.load(initial + square, mask=fits, other=0.0)
        for later in range(segment + 1, tl.cdiv(chunks, per_segment)):
            where = tl.cast(later, tl.int64) * sequences * H * PAIRS + tile
            acc += tl.load(totals + where * BS * BS + inside_tile)
        seen = tl.load(count + n)
        chunk = tl.load(chunk_start + n)
        groups = tl.cdiv(tl.minimum(high * C, length), BN)
        for done in range(0, groups - low * (C // BN)):
            g = groups - 1 - done
            if ((g + 1) % (C // BN) == 0) | (done == 0):
                c = g // (C // BN)
                here = spreads + ((chunk + c) * H + h) * BD * BD
                b_w = acc.to(spreads.dtype.element_ty)
                tl.store(here + row[:, None] * BD + column, b_w)
                if i != j:
                    tl.store(here + column[:, None] * BD + row, tl.trans(b_w))
                if CENTRED:
                    m = vectors + ((begun + (c + 1) * (C // BT)) * H + h) * D
                    if c == chunks - 1:
                        m = last_vector + (n * H + h) * D
                    b_t = 1.0 / (seen + tl.minimum((c + 1) * C, length)).to(tl.float32)
                    b_mi = tl.load(m + row, mask=row < D, other=0.0) * b_t
                    b_mj = tl.load(m + column, mask=column < D, other=0.0) * b_t
                    share = means + ((chunk + c) * H + h) * S * D
                    tl.store(share + j * D + row, tl.sum(acc * b_mj, 1), mask=row < D)
                    if i != j:
                        tl.store(share + i * D + column, tl.sum(acc * b_mi[:, None], 0), mask=column < D)
            t = g * BN
            acc = _add_spreads(weighted, x, at + t, x_at + t, side, i, j, acc, STRIDE, BD, BN, BS, BULK, PRECISION)
        if FINAL:  # noqa: SIM102 - known when compiled, the other is not
            if segment == 0:
                tl.store(final + square, acc, mask=fits)
                if i != j:
                    tl.store(final + state + column[None, :] * D + row[:, None], acc, mask=fits)


@triton.jit(do_not_specialize=["blocks"])
def _key_gradients_kernel(
    unit_blocks,
    unit_parts,
    x_groups,
    weighted_groups,
    spreads,
    unit,
    strength,
    reciprocal,
    vectors,
    last_vector,
    means,
    leans,
    count,
    mean,
    mean_x,
    beside,
    dk,
    begin,
    end,
    owner,
    block_start,
    chunk_start,
    blocks,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    ALIGNED: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BESIDE: tl.constexpr,
    CENTRED: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk of one block, plus what `beside` holds there (BESIDE). `leans` holds w behind each block; x and keys as in
    `_covariance_kernel`.
    """
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    begun = tl.load(block_start + n)
    start = (block - begun).to(tl.int32) * BT
    if start >= length:
        return
    c = start // C
    chunk = tl.load(chunk_start + n) + c
    stop = tl.minimum((c + 1) * C, length)
    base, left = (first + start) * H + h, length - start
    row, reader_row, column = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BD)
    seen = tl.load(count + n)
    place = (h * blocks.to(tl.int64) + block) * BT
    at, side = _origin(first + start, place, h, H, D, ALIGNED)
    key, key_side = _origin(first + start, place, h, H, D, KEYS_ALIGNED)
    STRIDE: tl.constexpr = H * D if ALIGNED else BD
    KEY_STRIDE: tl.constexpr = H * D if KEYS_ALIGNED else BD

    m = vectors + ((begun + (c + 1) * (C // BT)) * H + h) * D
    w = leans + ((begun + tl.cdiv(stop, BT) - 1) * H + h) * D
    if stop == length:
        m = last_vector + (n * H + h) * D
    b_t = 1.0 / (seen + stop).to(tl.float32)
    # float32 units add one product after another: short sums that are added afterwards lose less than long ones. The
    # compiler would join them again without a mask.
    acc = tl.zeros((BT, BD), tl.float32)
    for d in range(0, BD, BK):
        b_kd = _tile(unit_parts, key, key_side + d, KEY_STRIDE, BT, BK, BULK)
        if CENTRED:
            slice = d + tl.arange(0, BK)
            b_kd = b_kd.to(tl.float32) - tl.load(m + slice, mask=slice < D, other=0.0) * b_t
        b_w = _tile(spreads, (chunk * H + h) * BD + d, 0, BD, BK, BD, BULK)
        if PRECISION == "ieee":
            acc += tl.where(row[:, None] < left, tl.dot(b_kd, b_w, input_precision=PRECISION), 0.0)
        else:
            acc = tl.dot(b_kd.to(b_w.dtype), b_w, acc, input_precision=PRECISION)
    b_v = -tl.load(w + column, mask=column < D, other=0.0)
    if CENTRED:
        for s in range(0, S):
            b_v += tl.load(means + ((chunk * H + h) * S + s) * D + column, mask=column < D, other=0.0)
    acc += b_v

    b_k = _tile(unit_blocks, key, key_side, KEY_STRIDE, BT, BD, BULK)
    for reader in range(start, stop, BN):
        source, there = (first + reader + reader_row) * H + h, reader + reader_row < length
        b_x = _tile(x_groups, at - start + reader, side, STRIDE, BN, BD, BULK)
        b_q = _tile(weighted_groups, place - start + reader, 0, BD, BN, BD, BULK)
        b_l = tl.load(strength + source, mask=there, other=0.0).to(tl.float32)
        b_l *= 1.0 / tl.where(there, seen + reader + reader_row + 1, 1).to(tl.float32)
        reads = row[:, None] <= reader - start + reader_row
        # `weighted` carries the factor strength / t, which both products need once.
        if PRECISION == "ieee":
            b_s = tl.zeros((BT, BN), tl.float32)
            b_z = b_s
            for part in tl.static_range(0, BD, BK):
                b_kp = _tile(unit_parts, key, key_side + part, KEY_STRIDE, BT, BK, BULK)
                b_qp = _tile(weighted_groups, place - start + reader, part, BD, BN, BK, BULK)
                b_xp = _tile(x_groups, at - start + reader, side + part, STRIDE, BN, BK, BULK)
                b_s += tl.where(reads, tl.dot(b_kp, tl.trans(b_qp), input_precision=PRECISION), 0.0)
                b_z += tl.where(reads, tl.dot(b_kp, tl.trans(b_xp), input_precision=PRECISION), 0.0)
        else:
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_z = tl.dot(b_k, tl.trans(b_x), input_precision=PRECISION)
        if CENTRED:
            b_s -= tl.load(mean + source, mask=there, other=0.0) * b_l
            b_z -= tl.load(mean_x + source, mask=there, other=0.0)
        b_s = tl.where(reads, b_s, 0.0)
        b_z = tl.where(reads, b_z, 0.0)
        if PRECISION == "ieee":
            b_n = tl.dot(b_s, b_x, input_precision=PRECISION)
            b_n = tl.dot(b_z, b_q, b_n, input_precision=PRECISION)
            acc += tl.where(row[:, None] < left, b_n, 0.0)
        else:
            acc = tl.dot(b_s.to(b_x.dtype), b_x, acc, input_precision=PRECISION)
            acc = tl.dot(b_z.to(b_q.dtype), b_q, acc, input_precision=PRECISION)
    # One half of the columns after the other, as above.
    halves = _halves(acc, BT, BD)
    if NORMALIZE:
        b_r = tl.load(reciprocal + base + row * H, mask=row < left, other=0.0)
        b_d = tl.zeros((BT,), tl.float32)
        inside = unit + place * BD + row[:, None] * BD + tl.arange(0, BD // 2)
        for half in tl.static_range(2):
            b_d += tl.sum(tl.load(inside + half * (BD // 2)).to(tl.float32) * halves[half], 1)
    for half in tl.static_range(2):
        side = half * (BD // 2)
        b_dk = halves[half]
        if NORMALIZE:
            b_dk = (b_dk - tl.load(inside + side).to(tl.float32) * b_d[:, None]) * b_r[:, None]
        if BESIDE:
            b_dk += _load_part(beside + base * D, side, left, BT, BD // 2, H, D).to(tl.float32)
        _store_part(dk + base * D, b_dk, side, left, BT, BD // 2, H, D)


_HALF = Configuration(
    block=64,
    group=32,
    chunk=256,
    tile=64,
    part=64,
    scan_group=64,
    scan_warps=4,
    scan_stages=3,
    read_warps=4,
    read_stages=2,
    row_rows=16,
    row_warps=2,
    row_stages=4,
    scan_registers=128,
    gradient_warps=4,
    gradient_stages=2,
    bulk=True,
)
_FLOAT = Configuration(
    block=32,
    group=32,
    chunk=128,
    tile=32,
    part=32,
    scan_group=32,
    scan_warps=4,
    scan_stages=1,
    read_warps=8,
    read_stages=1,
    row_rows=16,
    row_warps=4,
    row_stages=3,
    scan_registers=None,
    gradient_warps=8,
    gradient_stages=1,
    bulk=False,
)
_SMALL_HALF = Configuration(
    block=32,
    group=32,
    chunk=128,
    tile=64,
    part=32,
    scan_group=32,
    scan_warps=4,
    scan_stages=2,
    read_warps=4,
    read_stages=1,
    row_rows=16,
    row_warps=4,
    row_stages=3,
    scan_registers=None,
    gradient_warps=4,
    gradient_stages=1,
    bulk=False,
)
_SMALL_FLOAT = Configuration(
    block=16,
    group=16,
    chunk=64,
    tile=32,
    part=16,
    scan_group=16,
    scan_warps=4,
    scan_stages=1,
    read_warps=4,
    read_stages=1,
    row_rows=16,
    row_warps=4,
    row_stages=3,
    scan_registers=None,
    gradient_warps=4,
    gradient_stages=1,
    bulk=False,
)

TABLE: dict[tuple[int, int] | None, tuple[Configuration, Configuration]] = {
    (9, 0): (_HALF, _FLOAT),
    # Not measured: compiled for these targets and fitted to their shared memory. For this one Triton 3.7.1 does not
    # compile `_scan_moments_kernel` with more stages.
    (10, 0): (_HALF._replace(scan_stages=1), _FLOAT),
    (8, 0): (_HALF._replace(bulk=False), _FLOAT),
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
    fits = chosen._replace(tile=min(chosen.tile, width), part=min(chosen.part, width))
    if dtype != torch.float32:
        if width <= 64:
            # A state is no larger than 64 rows, and chunks of more multiply more.
            fits = fits._replace(chunk=64)
        elif fits.bulk:
            # Rows half as long leave room on the chip for the loads of one more step.
            fits = fits._replace(read_stages=3, gradient_stages=3)
    # Half the columns need no more than half the warps.
    return fits if width > 64 else fits._replace(read_warps=4, gradient_warps=4)


GLUON_RELEASE = "3.7.1"
"""Of Triton. The interface of Gluon may change with every release, and no other was tried."""


def copies_apart(q: Tensor, plan: Plan, config: Configuration, centred: bool) -> bool:
    """Whether the kernels of `hopper.py`, which have a warp for copies alone, take such a call."""
    return (
        plan.begin.is_cuda
        and not interpreted()
        and triton.__version__.startswith(GLUON_RELEASE)
        and torch.cuda.get_device_capability(plan.begin.device) == (9, 0)
        and q.dtype == torch.bfloat16
        and (q.shape[3], config.block, config.chunk) == (256, 64, 256)
        and centred
        and plan.full
        and q.shape[1] % 128 == 0
        and q.numel() > 0
    )


def _hopper() -> ModuleType:
    # Other releases may not have what it imports.
    from ccq.ops.query import hopper

    return hopper


def cut(begin: Tensor, end: Tensor, lengths: list[int], block: int, chunk: int, full: bool) -> Plan:
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
        end - begin,
        torch.zeros_like(begin),
        owner.to(device),
        block_start.to(device),
        chunk_start.to(device),
        int(chunk_start[-1]),
        int(chunks.max()) if lengths else 0,
        full,
    )


@functools.lru_cache(maxsize=64)
def _rows_plan(rows: int, tokens: int, block: int, chunk: int, device: torch.device) -> Plan:
    """Dense rows; kept, so that a step of training builds no tables."""
    begin = torch.arange(rows, dtype=torch.int64, device=device) * tokens
    return cut(begin, begin + tokens, [tokens] * rows, block, chunk, tokens % block == 0)


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
        return cut(bounds[:-1], bounds[1:].clone(), edges.diff().tolist(), config.block, config.chunk, False)
    plan = _rows_plan(rows, tokens, config.block, config.chunk, device)
    if mask is None or tokens == 0:
        return plan
    begin, length = plan.begin + mask.to(torch.int64).argmax(1), mask.sum(1)
    return plan._replace(begin=begin, end=begin + length, length=length, full=False)


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass."""

    correction: Tensor | None
    """Only for a gradient in it."""
    total: Tensor
    reciprocal: Tensor
    """[B, T, H] float32, one over the lengths of the queries; unset without normalisation."""
    vectors: Tensor
    """[blocks, H, D] float32, m before each block of keys."""
    mean: Tensor
    """[B, T, H] float32, the mean scores a."""


class Forward(NamedTuple):
    query: Tensor
    second_moment: Tensor
    kept: Kept


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    gate: Tensor
    second_moment: Tensor
    total: Tensor


class Rows(NamedTuple):
    """Rows that products load whole: a matrix whose rows are tokens."""

    matrix: Tensor
    """[H * blocks * BT, BD], or [B * T, H * D] where the rows as they are will do."""
    aligned: bool
    """Which of the two."""


Result = TypeVar("Result")
_compiled_variants: set[tuple[Any, ...]] = set()
_under_way: dict[tuple[Any, ...], threading.Thread] = {}
"""Variants of `_compiled_variants` that are being compiled in the background."""


class Launcher:
    """The kernels for one shape of input, with their constants filled in. Of inputs on the meta device nothing is
    launched: kernels are compiled for the device of the plan.
    """

    def __init__(
        self, q: Tensor, plan: Plan, config: Configuration, unit_queries: bool, unit_keys: bool, centred: bool
    ) -> None:
        self.rows, self.tokens, self.heads, self.size = q.shape
        self.device, self.place, self.dtype = plan.begin.device, q.device, q.dtype
        self.plan, self.config = plan, config
        self.compile_only = False
        self.sequences, self.blocks = plan.begin.shape[0], plan.owner.shape[0]
        self.unit_queries, self.normalize_keys, self.centred = unit_queries, unit_keys, centred
        self.copies_apart = copies_apart(q, plan, config, centred)
        self.width = max(16, triton.next_power_of_2(self.size))
        self.tiles = self.width // config.tile
        self.pairs = self.tiles * (self.tiles + 1) // 2
        # bf16 keeps states in bf16. float16 has not the range for gradients: float32 states, read as tf32, whose
        # mantissa is that of float16.
        self.state_dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        self.shape = {"H": self.heads, "D": self.size, "BD": self.width, "BT": config.block}
        common = {"C": config.chunk, "CENTRED": centred, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32"}
        # A descriptor must not be empty.
        self.bulk = config.bulk and self.blocks > 0
        self.grouped = common | {"BN": config.group, "BULK": self.bulk}
        self.scanned = common | {"BN": config.scan_group}
        # One program a tile and segment: long sequences are split until the card is full.
        programs = self.sequences * self.heads * self.pairs
        wanted = max(1, min(MAX_SEGMENTS, WANTED_PROGRAMS // max(programs, 1)))
        self.per_segment = max(1, triton.cdiv(plan.longest, wanted))
        self.segments = max(1, triton.cdiv(plan.longest, self.per_segment))

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch a kernel, or compile it where that is all that is wanted."""
        if self.compile_only:
            kernel.warmup(*arguments, grid=grid, **constants)
        else:
            kernel[grid](*arguments, **constants)

    def compiled(self, launch_all: Callable[[], Result], *variant: Any) -> Result:
        """What `launch_all` returns, its kernels compiled side by side where they may be new.

        The variant, with what a launcher knows, decides which kernels are needed. Where it leaves something out they
        are compiled at their launch, one after the other. With inputs on the meta device they are compiled in the
        background, and a later call for such inputs waits for that.
        """
        variant = (self.device, self.dtype, self.heads, self.size, self.unit_queries, self.normalize_keys, self.centred,
                   self.config, self.plan.full, self.copies_apart, self.segments > 1, *variant)  # fmt: skip
        ahead, new = self.place.type == "meta", variant not in _compiled_variants and not interpreted()
        if new:
            _compiled_variants.add(variant)
        if ahead:
            if new:
                thread = threading.Thread(target=self._compile, args=(launch_all,), name="ccq-compile", daemon=True)
                _under_way[variant] = thread
                thread.start()
            return None  # type: ignore[return-value]  # of inputs that hold nothing
        under_way = _under_way.pop(variant, None)
        if under_way is not None:
            under_way.join()
        elif new:
            self._compile(launch_all)
        return launch_all()

    def _compile(self, launch_all: Callable[[], Any]) -> None:
        self.compile_only = True
        # A kernel that does not compile says so when it is launched.
        with (
            contextlib.suppress(Exception) if self.place.type == "meta" else contextlib.nullcontext(),
            torch.cuda.device_of(self.plan.begin),
            concurrent.futures.ThreadPoolExecutor() as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            launch_all()
        self.compile_only = False

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.place)

    def empty_blocks(self) -> Tensor:
        return self.empty(self.heads * self.blocks * self.config.block, self.width, dtype=self.dtype)

    def tiles_of(self, matrix: Tensor, rows: int, columns: int) -> Any:
        """`matrix` as a kernel's source of tiles [rows, columns]."""
        return TensorDescriptor.from_tensor(matrix, [rows, columns]) if self.bulk else matrix

    def sequences_of_blocks(self) -> tuple[Tensor, ...]:
        plan = self.plan
        return plan.begin, plan.end, plan.owner, plan.block_start

    def is_aligned(self, x: Tensor) -> bool:
        """Whether products can load the rows of x [B, T, H, D] where they are."""
        return self.plan.full and self.size == self.width and x.data_ptr() % 16 == 0

    def _as_it_is(self, x: Tensor) -> Rows:
        return Rows(x.view(self.rows * self.tokens, self.heads * self.size), True)

    def _to_blocks(
        self, x: Tensor, blocked: Tensor | None, *, normalize: bool, reciprocal: Tensor | None, sums: Tensor | None
    ) -> None:
        """Copies the rows of x to `blocked`, sums each block, or both."""
        # A pointer that a kernel does not use must still be one.
        unused = self.plan.begin
        self.run(
            _to_blocks_kernel, (self.blocks * self.heads,),
            x, x if blocked is None else blocked, unused if reciprocal is None else reciprocal,
            unused if sums is None else sums, *self.sequences_of_blocks(), self.blocks, **self.shape,
            BR=self.config.row_rows, STAGES=self.config.row_stages, NORMALIZE=normalize, COPY=blocked is not None,
            SUMS=sums is not None, EPS=NORM_EPSILON, num_warps=self.config.row_warps,
        )  # fmt: skip

    def to_rows(self, x: Tensor) -> Rows:
        """The rows of x [B, T, H, D], copied where they do not lie as products need them."""
        if self.is_aligned(x):
            return self._as_it_is(x)
        blocked = self.empty_blocks()
        self._to_blocks(x, blocked, normalize=False, reciprocal=None, sums=None)
        return Rows(blocked, False)

    def unit_keys(self, k: Tensor, *, summed: bool) -> tuple[Rows, Tensor, Tensor]:
        """Normalised keys, their reciprocal lengths, and the sum of each block.

        The lengths are unset without normalisation. Without `summed` the sums may be too: keys that can be read where
        they are need no kernel then.
        """
        reciprocal = self.empty(self.rows, self.tokens, self.heads)
        sums = self.empty(self.blocks, self.heads, self.size)
        if self.normalize_keys or not self.is_aligned(k):
            blocked = self.empty_blocks()
            self._to_blocks(k, blocked, normalize=self.normalize_keys, reciprocal=reciprocal, sums=sums)
            return Rows(blocked, False), reciprocal, sums
        if summed:
            self._to_blocks(k, None, normalize=False, reciprocal=None, sums=sums)
        return self._as_it_is(k), reciprocal, sums

    def scan_vectors(self, sums: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
        """Turns the sums of blocks into sums before (behind) each block, in place, and returns the last. An `initial`
        of None is zero.
        """
        final = self.empty(self.sequences, self.heads, self.size)
        width = 32
        grid = (self.sequences * self.heads, triton.cdiv(self.size, width))
        self.run(
            _scan_vectors_kernel, grid, sums, final if initial is None else initial, final, self.plan.block_start,
            H=self.heads, D=self.size, BV=width, STEP=64, REVERSE=reverse, INITIAL=initial is not None,
        )  # fmt: skip
        return final

    def _scan(
        self, kernel: Any, before: tuple[Any, ...], states: tuple[Any, ...], initial: Tensor | None, count: Tensor,
        last: bool, **constants: bool,
    ) -> Tensor:  # fmt: skip
        """Run a scan of tiles: totals of the segments first where there is more than one. Returns the `last` state."""
        plan, config = self.plan, self.config
        final = self.empty(self.sequences, self.heads, self.size, self.size) if last else self.empty(0)
        totals = self.empty(
            self.segments if self.segments > 1 else 0, self.sequences * self.heads * self.pairs, config.tile**2
        )
        grid = (self.sequences * self.heads * self.pairs, self.segments)
        for totals_only in (True, False) if self.segments > 1 else (False,):
            self.run(
                kernel, grid, *before, *states, totals, totals if initial is None else initial, count, final,
                plan.begin, plan.end, plan.block_start, plan.chunk_start, self.sequences, self.per_segment,
                self.blocks, **self.shape, **self.scanned, **constants, BS=config.tile, S=self.tiles,
                TOTALS_ONLY=totals_only, INITIAL=initial is not None and not totals_only,
                FINAL=last and not totals_only,
                num_warps=config.scan_warps, num_stages=config.scan_stages, maxnreg=config.scan_registers,
            )  # fmt: skip
        return final

    def states(self) -> Tensor:
        """One state for each chunk and head, its rows below one another."""
        return self.empty(self.plan.chunks * self.heads * self.width, self.width, dtype=self.state_dtype)

    def moments(
        self, unit: Rows, vectors: Tensor, initial: Tensor | None, count: Tensor, last: bool
    ) -> tuple[Tensor, Tensor]:
        """The covariance before each chunk, and (`last`) M behind each sequence."""
        covariances = self.states()
        return covariances, self._scan(
            _scan_moments_kernel, (unit.matrix, vectors), (covariances,), initial, count, last,
            KEYS_ALIGNED=unit.aligned,
        )  # fmt: skip

    def covariance_times(
        self, x: Tensor, unit: Rows, vectors: Tensor, covariances: Tensor, count: Tensor, gate: Tensor,
        reciprocal: Tensor, *, query: Tensor | None = None, correction: Tensor | None = None,
        gradients: tuple[Tensor, ...] | None = None,
    ) -> tuple[Rows, Tensor]:  # fmt: skip
        """Sigma x, and what is made of it: `query` and `correction`, or the `gradients` from q to `leans`. Returns the
        rows of x and their mean scores.
        """
        config, rows = self.config, self.to_rows(x)
        mean = self.empty(self.rows, self.tokens, self.heads)
        written = None if query is None else query.dtype
        alone = gradients is None or gradients[1] is x
        if self.copies_apart and rows.aligned and correction is None and written in (None, self.dtype) and alone:
            _hopper().covariance_times(
                self, rows, unit, vectors, covariances, count, gate, reciprocal, mean, query=query, gradients=gradients
            )
            return rows, mean
        # A pointer that a kernel does not use must still be one.
        self.run(
            _covariance_kernel, (self.blocks * self.heads,),
            self.tiles_of(rows.matrix, config.block, self.width), self.tiles_of(rows.matrix, config.block, config.part),
            self.tiles_of(unit.matrix, config.block, self.width), self.tiles_of(unit.matrix, config.group, self.width),
            self.tiles_of(covariances, config.part, self.width), x, gate, vectors, count,
            x if query is None else query, mean if correction is None else correction, mean, reciprocal,
            *(gradients or (x, x, mean, x, mean, x, mean)),
            *self.sequences_of_blocks(), self.plan.chunk_start, self.blocks, **self.shape, **self.grouped,
            BK=config.part, ALIGNED=rows.aligned, KEYS_ALIGNED=unit.aligned, NORMALIZE=self.unit_queries,
            GRADIENTS=gradients is not None, CORRECTION=correction is not None, EPS=NORM_EPSILON,
            num_warps=config.read_warps, num_stages=config.read_stages,
        )  # fmt: skip
        return rows, mean


def forward(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor | None, total: Tensor | None, count: Tensor,
    plan: Plan, config: Configuration, *, unit_queries: bool, unit_keys: bool, centred: bool, return_correction: bool,
    wide: bool,
) -> Forward:  # fmt: skip
    """The read step. q, k [B, T, H, D] and gate [B, T, H], contiguous; the query in float32 with `wide`; the rest as in
    `curvature_conditioned_query`.
    """
    launch = Launcher(q, plan, config, unit_queries, unit_keys, centred)

    def launch_all() -> Forward:
        unit, _, vectors = launch.unit_keys(k, summed=True)
        last = launch.scan_vectors(vectors, total, reverse=False)
        covariances, moment = launch.moments(unit, vectors, second_moment, count, last=True)
        query = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
        correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
        reciprocal = torch.empty_like(gate, dtype=torch.float32)
        _, mean = launch.covariance_times(
            q, unit, vectors, covariances, count, gate, reciprocal, query=query, correction=correction
        )
        return Forward(query, moment, Kept(correction, last, reciprocal, vectors, mean))

    variant = (launch.is_aligned(k), gate.dtype, second_moment is None, total is None, return_correction, wide)
    return launch.compiled(launch_all, "forward", *variant)


def backward(
    q: Tensor, k: Tensor, gate: Tensor, dy: Tensor, dr: Tensor | None, d_moment: Tensor | None, d_total: Tensor | None,
    kept: Kept, second_moment: Tensor | None, count: Tensor, plan: Plan, config: Configuration, *, unit_queries: bool,
    unit_keys: bool, centred: bool, state_gradients: bool, beside: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous; padding is left as `torch.empty` made it, and the gradients
    of the states are empty without `state_gradients`. `beside` as in `backward_through`.
    """
    x, strength = dy.to(q.dtype), -gate.float()
    if dr is not None:
        x = (dr + strength.unsqueeze(-1) * dy).to(q.dtype)
        strength = torch.ones_like(strength)
    gradients = backward_through(
        q, k, x, strength, dy, d_moment, d_total, kept, second_moment, count, plan, config, unit_queries=unit_queries,
        unit_keys=unit_keys, centred=centred, state_gradients=state_gradients, beside=beside,
    )  # fmt: skip
    if dr is None or kept.correction is None:
        return gradients
    return gradients._replace(gate=-(dy.float() * kept.correction).sum(-1))


@functools.lru_cache(maxsize=64)
def compile_backward_ahead(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, gate_dtype: torch.dtype, query_dtype: torch.dtype,
    *, full: bool, padded: bool, has_moment: bool, unit_queries: bool, unit_keys: bool, centred: bool,
    state_gradients: bool,
) -> None:  # fmt: skip
    """Begin to compile, in the background, what `backward` launches for input of that shape where a gradient reaches
    the query and the keys that were handed on, as in training. `full` without padding and documents. Once for each
    kind of call.
    """
    rows, tokens, heads, size = shape
    config = configuration(dtype, size, device)
    plan = _rows_plan(rows, tokens, config.block, config.chunk, device)
    if not full:
        plan = plan._replace(full=False)
    empty = functools.partial(torch.empty, dtype=torch.float32, device="meta")
    x, number = empty(shape, dtype=dtype), empty(shape[:3])
    kept = Kept(None, empty(rows, heads, size), number, empty(len(plan.owner), heads, size), number)
    backward(
        x, x, empty(shape[:3], dtype=gate_dtype), empty(shape, dtype=query_dtype), None, None, None, kept,
        empty(rows, heads, size, size) if has_moment else None, plan.nothing, plan, config, unit_queries=unit_queries,
        unit_keys=unit_keys, centred=centred, state_gradients=state_gradients, beside=None if padded else x,
    )  # fmt: skip


def backward_through(
    q: Tensor, k: Tensor, x: Tensor, strength: Tensor, dy: Tensor, d_moment: Tensor | None, d_total: Tensor | None,
    kept: Kept, second_moment: Tensor | None, count: Tensor, plan: Plan, config: Configuration, *, unit_queries: bool,
    unit_keys: bool, centred: bool, state_gradients: bool, beside: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradients where strength [B, T, H] float32 times x [B, T, H, D] in the dtype of q reaches the correction r,
    and dy reaches the query before it. That of the gate is -x . r. beside, like k and contiguous, is a gradient that
    reaches k from elsewhere: added to that of k before it is rounded.
    """
    launch = Launcher(q, plan, config, unit_queries, unit_keys, centred)

    def launch_all() -> Gradients:
        unit, key_reciprocal, _ = launch.unit_keys(k, summed=False)
        covariances, _ = launch.moments(unit, kept.vectors, second_moment, count, last=False)
        dq, dk, d_gate = torch.empty_like(q), torch.empty_like(k), torch.empty_like(kept.reciprocal)
        weighted, leans = launch.empty_blocks(), torch.empty_like(kept.vectors)
        rows, mean_x = launch.covariance_times(
            x, unit, kept.vectors, covariances, count, strength, kept.reciprocal,
            gradients=(q, dy, kept.mean, dq, d_gate, weighted, leans),
        )  # fmt: skip
        del covariances
        first_lean = launch.scan_vectors(leans, None if d_total is None else -d_total, reverse=True)
        spreads = launch.states()
        means = launch.empty(plan.chunks, launch.heads, launch.tiles, launch.size)
        tiles = [launch.tiles_of(matrix, config.scan_group, config.tile) for matrix in (weighted, rows.matrix)]
        first_spread = launch._scan(
            _scan_gradients_kernel, (*tiles, kept.vectors, kept.total), (spreads, means),
            None if d_moment is None else d_moment + d_moment.mT, count,
            last=state_gradients, ALIGNED=rows.aligned, BULK=launch.bulk,
        )  # fmt: skip
        numbers = (strength, key_reciprocal, kept.vectors, kept.total, means, leans, count, kept.mean, mean_x)
        if launch.copies_apart and rows.aligned:
            _hopper().key_gradients(launch, rows, weighted, unit, spreads, dk, numbers, beside)
        else:
            launch.run(
                _key_gradients_kernel, (launch.blocks * launch.heads,),
                launch.tiles_of(unit.matrix, config.block, launch.width),
                launch.tiles_of(unit.matrix, config.block, config.part),
                launch.tiles_of(rows.matrix, config.group, launch.width),
                launch.tiles_of(weighted, config.group, launch.width),
                launch.tiles_of(spreads, config.part, launch.width), unit.matrix, *numbers,
                dk if beside is None else beside, dk, *launch.sequences_of_blocks(), plan.chunk_start, launch.blocks,
                **launch.shape, **launch.grouped, BK=config.part, S=launch.tiles, ALIGNED=rows.aligned,
                KEYS_ALIGNED=unit.aligned, NORMALIZE=unit_keys, BESIDE=beside is not None,
                num_warps=config.gradient_warps, num_stages=config.gradient_stages,
            )  # fmt: skip
        return Gradients(dq, dk, d_gate, first_spread / 2, -first_lean if state_gradients else launch.empty(0))

    variant = (launch.is_aligned(k), dy.dtype, d_moment is None, d_total is None, state_gradients, beside is None)
    return launch.compiled(launch_all, "backward", *variant)
