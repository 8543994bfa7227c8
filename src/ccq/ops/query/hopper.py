"""The largest kernels of the read step for sm_90, with a warp that does nothing but copy.

They compute what `_covariance_kernel` and `_key_gradients_kernel` of `kernels.py` do, whose docstring has the
mathematics and the names, for bfloat16 heads of 256 and dense rows whose length is a multiple of 128.

In Triton the same warps copy and multiply. Sums of 64 rows of 256 columns fill the registers of four warps, twice that
many fit a processor, and nobody is left to wait for the next tile. These kernels are written in Gluon, Triton's
language in which the program says which warp does what:

- An item is two neighbouring blocks of one head. Two groups of four warps multiply, a block each, and read the same
  tiles. One warp copies: the rows of the blocks into one ring of slots, and what both read into another, as far ahead
  as there is room. A slot holds 64 rows of 256 columns, 32 KiB.
- There are as many programs as the card has processors, and each walks through the items that a schedule gives it. So
  copies for an item begin before the one before it has ended.
- A slot is passed on by two barriers: one that is passed when it is full, and one when all its readers have freed it.
  Who waits for a slot must have freed before all that the copying warp waits for on its way there; else both wait for
  ever.
- What is computed takes the place of what it was computed from, and leaves from there as one bulk copy. What is added
  to dk comes as the last tile of an item, while the products before it are computed.

A processor keeps 128 KiB of instructions. Two groups have their code twice, and what does not fit is fetched anew for
every item, at two to three times the time. So the longest pieces are loops that carry sums around, where unrolled ones
would need no moves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ccq.ops.query.reference import NORM_EPSILON

if TYPE_CHECKING:
    from ccq.ops.query.kernels import Launcher, Rows

D = gl.constexpr(256)
BT = gl.constexpr(64)
"""Rows of a block, and of a slot."""
BR = gl.constexpr(128)
"""Rows of an item."""
C = gl.constexpr(256)
"""Rows of a chunk."""
EPSILON = gl.constexpr(NORM_EPSILON)
WARPS = gl.constexpr(4)
"""Of a group that multiplies."""
SLOTS = gl.constexpr(7)
"""Of both rings together: all that fit."""
ROW_SLOTS = gl.constexpr(3)
"""Of the ring of rows. Forward it has one more: tiles are few there, and the rows of the next item may be there too."""
OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Registers a thread at launch. 12 warps share them out anew: each that multiplies gets 240."""
REGISTERS = gl.constexpr([240, 24])
"""Of the second group that multiplies, and of the warp that copies."""

# Results of products: all columns of a block, half and a quarter of them, half a quarter, and eight numbers a column.
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
MIDDLE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
EIGHT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, WIDE.value, 2))
WIDE_ROW, WIDE_COLUMN = (gl.constexpr(gl.SliceLayout(dim, WIDE.value)) for dim in (1, 0))
ROW, COLUMN = (gl.constexpr(gl.SliceLayout(dim, NARROW.value)) for dim in (1, 0))
HALF_ROW = gl.constexpr(gl.SliceLayout(1, HALF.value))
# Eight columns side by side a thread, so that each needs few numbers of a vector that all rows meet.
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.SliceLayout(0, LINES.value))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _item(schedule, item, T, H: gl.constexpr):
    """Sequence and head of an item, its first row in the sequence, and the first row of its chunk."""
    code = gl.load(schedule + item)
    pair = code // H
    start = pair % (T // BR) * BR
    return pair // (T // BR), code % H, start, start // C * C


@gluon.jit
def _state(n, h, start, T, H: gl.constexpr):
    """The number of the state of a chunk."""
    return (n * ((T + C - 1) // C) + start // C).to(gl.int64) * H + h


@gluon.jit
def _vector(block, h, H: gl.constexpr):
    """Where the vector of a block begins."""
    return (block.to(gl.int64) * H + h) * D


@gluon.jit
def _make_ring(SIZE: gl.constexpr, READERS: gl.constexpr, dtype: gl.constexpr):
    slots = gl.allocate_shared_memory(dtype, [SIZE, BT, D], TILE)
    full = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SIZE):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return slots, full, empty


@gluon.jit
def _fill(source, row, column, ring, filled):
    """Copy a tile into the next slot, once that is free."""
    slots, full, empty = ring
    SIZE: gl.constexpr = slots.shape[0]
    slot = filled % SIZE
    mbarrier.wait(empty.index(slot), (filled // SIZE & 1) ^ 1)
    mbarrier.expect(full.index(slot), source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [row, column], full.index(slot), slots.index(slot))
    return filled + 1


@gluon.jit
def _full(ring, number):
    """The slot of the tile with this number, once that is there."""
    slots, full, _ = ring
    SIZE: gl.constexpr = slots.shape[0]
    mbarrier.wait(full.index(number % SIZE), number // SIZE & 1)
    return slots.index(number % SIZE)


@gluon.jit
def _free(ring, number):
    slots, _, empty = ring
    mbarrier.arrive(empty.index(number % slots.shape[0]), count=1)


@gluon.jit
def _halves(x, LAYOUT: gl.constexpr):
    """The columns of x, in two. Nothing moves between threads."""
    left, right = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def _quarters(x):
    left, right = _halves(x, MIDDLE)
    a, b = _halves(left, NARROW)
    c, d = _halves(right, NARROW)
    return a, b, c, d


@gluon.jit
def _parts(slot, dtype: gl.constexpr):
    """The quarters of the columns of a slot: it holds them one after the other."""
    return slot._reinterpret(dtype, [D // BT, BT, BT], TILE)


@gluon.jit
def _thirds(a, b, dtype: gl.constexpr):
    """[8, BT]: a and b as sums of three numbers of `dtype` each, one below the other, and two rows of zeros."""
    kind = gl.arange(0, 8, gl.SliceLayout(1, LINES))[:, None]
    rest = gl.where(kind < 3, gl.convert_layout(a, LINE)[None, :], gl.convert_layout(b, LINE)[None, :])
    found = gl.zeros((8, BT), dtype, LINES)
    for third in gl.static_range(3):
        part = rest.to(dtype)
        found = gl.where((kind == third) | (kind == third + 3), part, found)
        rest -= part.to(gl.float32)
    return found


@gluon.jit
def _before(vectors, count, n, h, start, low, T, H: gl.constexpr):
    """How many keys sequence n had before; m before the block at `start` and m before its chunk."""
    flat, block = gl.arange(0, D, FLAT), n * (T // BT)
    b_here = gl.load(vectors + _vector(block + start // BT, h, H) + flat)
    b_low = gl.load(vectors + _vector(block + low // BT, h, H) + flat)
    return gl.load(count + n).to(gl.int32), b_here, b_low


@gluon.jit
def _copy_for_reads(
    inputs, walk, rows, ring, H: gl.constexpr, KEYS_ALIGNED: gl.constexpr, GRADIENTS: gl.constexpr
):  # fmt: skip
    x, q, unit, covariances, count = inputs
    schedule, items, T, sequences = walk
    taken = 0
    filled = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, h, start, low = _item(schedule, item, T, H)
        for which in gl.static_range(2):
            taken = _fill(x, n * T + start + which * BT, h * D, rows, taken)
        key, side = (h * sequences + n) * T, 0
        if KEYS_ALIGNED:
            key, side = n * T, h * D
        # The keys of the item itself come first: without them the mean scores are not known.
        for tile in range((BR + start - low) // BT):
            at = gl.where(tile < BR // BT, start + tile * BT, low + tile * BT - BR)
            filled = _fill(unit, key + at, side, ring, filled)
        if gl.load(count + n) + low > 0:
            state = _state(n, h, start, T, H).to(gl.int32) * D
            for part in range(D // BT):
                filled = _fill(covariances, state + part * BT, 0, ring, filled)
        if GRADIENTS:
            for which in range(2):
                filled = _fill(q, n * T + start + which * BT, h * D, ring, filled)


@gluon.jit
def _read(
    which: gl.constexpr, numbers, outputs, walk, rows, ring, H: gl.constexpr, NORMALIZE: gl.constexpr,
    GRADIENTS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """What block `which` of each item reads."""
    vectors, gate, count, reciprocal, mean_q = numbers
    query, dq, weighted, mean, d_gate, leans = outputs
    schedule, items, T, sequences = walk
    row, column = gl.arange(0, BT, ROW), gl.arange(0, BT, COLUMN)
    reads = row[:, None] >= column[None, :]
    zeros = gl.zeros((BT, BT), gl.float32, NARROW)
    used = 0
    taken = which
    n, h, pair, low = _item(schedule, gl.program_id(0), T, H)
    seen, b_here, b_low = _before(vectors, count, n, h, pair + which * BT, low, T, H)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        start = pair + which * BT
        place = n * T + start
        token = place.to(gl.int64) * H + h + row * H
        b_g = gl.load(gate + token).to(gl.float32)
        b_r = gl.full((BT,), 1.0, gl.float32, ROW)
        if GRADIENTS:
            b_l = gl.load(mean_q + token)
            if NORMALIZE:
                b_r = gl.load(reciprocal + token)
        # Sums are kept in the scale of x^T Sigma_0.
        before = gl.maximum(seen + low, 1).to(gl.float32)
        inverse = 1.0 / before
        b_it = 1.0 / (seen + start + row + 1).to(gl.float32)
        b_one, b_two = gl.convert_layout(b_here, LINE), gl.convert_layout(b_low, LINE)
        # What was made of the item before must have left. Here and no later: all that comes may wait for these slots.
        tma.store_wait(0)
        if taken > which:
            _free(rows, taken - 2)
            if GRADIENTS:
                _free(ring, used - 2 + which)

        # A block reads its own keys up to themselves, and the second block those of the first.
        x = _full(rows, taken)
        keys = _full(ring, used)
        b_s = warpgroup_mma(x, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        own = keys
        if which == 1:
            own = _full(ring, used + 1)
            b_z = warpgroup_mma(x, own.permute((1, 0)), zeros, use_acc=False, is_async=True)
        n_next, h_next, pair_next, low_next = _item(
            schedule, gl.minimum(item + gl.num_programs(0), items - 1), T, H
        )  # fmt: skip
        b_lines = x.load(LINES).to(gl.float32)
        b_a = gl.convert_layout(gl.sum(b_lines * b_one[None, :], 1), ROW)
        b_c = gl.convert_layout(gl.sum(b_lines * b_two[None, :], 1), ROW)
        if NORMALIZE and not GRADIENTS:
            b_r = gl.rsqrt(gl.convert_layout(gl.sum(b_lines * b_lines, 1), ROW) + EPSILON)
            gl.store(reciprocal + token, b_r)
        if which == 1:
            b_s, b_z = warpgroup_mma_wait(0, deps=(b_s, b_z))
        else:
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            b_z = b_s
        b_z = gl.where(reads, b_z, 0.0)
        b_a = (b_a + gl.sum(b_z, 1)) * b_it
        gl.store(mean + token, b_a if GRADIENTS else b_a * b_r)
        b_p = gl.convert_layout(gl.where(reads, (b_z - b_a[:, None]) * inverse, 0.0).to(dtype), LEFT)
        acc = gl.zeros((BT, D), gl.float32, WIDE)
        acc = warpgroup_mma(b_p, own, acc, use_acc=False, is_async=True)
        if which == 1:
            b_p = gl.convert_layout(((b_s - b_a[:, None]) * inverse).to(dtype), LEFT)
            acc = warpgroup_mma(b_p, keys, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _free(ring, used)
        else:
            _full(ring, used + 1)
            _free(ring, used + 1)
            acc = warpgroup_mma_wait(0, deps=(acc,))
        _free(ring, used + which)
        used += 2
        for _ in range((pair - low) // BT):
            keys = _full(ring, used)
            b_s = warpgroup_mma(x, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            b_p = gl.convert_layout(((b_s - b_a[:, None]) * inverse).to(dtype), LEFT)
            acc = warpgroup_mma(b_p, keys, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _free(ring, used)
            used += 1
        # The numbers of the next item: nothing of it can begin without them.
        seen_next, b_here_next, b_low_next = _before(
            vectors, count, n_next, h_next, pair_next + which * BT, low_next, T, H
        )  # fmt: skip
        if seen + low > 0:
            b_w = gl.convert_layout((b_c * inverse - b_a) * inverse, WIDE_ROW)
            acc += b_w[:, None] * gl.convert_layout(b_low, WIDE_COLUMN)[None, :]
            for part in gl.static_range(D // BT):
                acc = warpgroup_mma(x.slice(part * BT, BT, 1), _full(ring, used), acc, is_async=True)
                if part > 0:
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                    _free(ring, used - 1)
                used += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _free(ring, used - 1)
        scale = b_it * before
        if GRADIENTS:
            b_w = b_g * b_it
            q = _full(ring, used + which)
            q_parts, x_parts = _parts(q, dtype), _parts(x, dtype)
            u_one, u_two, u_three, u_four = _quarters(acc)
            b_u = gl.zeros((BT,), gl.float32, HALF_ROW)
            b_d = gl.zeros((BT,), gl.float32, HALF_ROW)
            for part in range(D // BT):
                u_halves = _halves(u_one, HALF)
                for half in gl.static_range(2):
                    b_q = q_parts.index(part).slice(half * (BT // 2), BT // 2, 1).load(HALF).to(gl.float32)
                    b_x = x_parts.index(part).slice(half * (BT // 2), BT // 2, 1).load(HALF).to(gl.float32)
                    b_u += gl.sum(b_q * u_halves[half], 1)
                    b_d += gl.sum(b_q * b_x, 1)
                u_one, u_two, u_three, u_four = u_two, u_three, u_four, u_one
            b_u = gl.convert_layout(b_u, ROW) * b_r * scale
            b_d = gl.convert_layout(b_d, ROW) * b_r + b_g * b_u
            gl.store(d_gate + token, -b_u)
            # The sum of (a p + c q) / t over rows, on matrix units, with factors in three numbers of 8 bits each.
            factors = gl.allocate_shared_memory(dtype, [8, BT], TILE)
            factors.store(_thirds(b_l * b_w, b_a * b_w * b_r, dtype))
            fence_async_shared()
            none = gl.zeros((D, 8), gl.float32, EIGHT)
            b_lx = warpgroup_mma(x.permute((1, 0)), factors.permute((1, 0)), none, use_acc=False, is_async=True)
            b_lq = warpgroup_mma(q.permute((1, 0)), factors.permute((1, 0)), none, use_acc=False, is_async=True)
            b_lx, b_lq = warpgroup_mma_wait(0, deps=(b_lx, b_lq))
            kind = gl.arange(0, 8, gl.SliceLayout(0, EIGHT))[None, :]
            b_lean = gl.sum(gl.where(kind < 3, b_lx, gl.where(kind < 6, b_lq, 0.0)), 1)
            gl.store(leans + _vector(place // BT, h, H) + gl.arange(0, D, gl.SliceLayout(1, EIGHT)), b_lean)
            # Factors of a row are multiplied before they meet its columns.
            b_gs = gl.convert_layout(b_g * scale, HALF_ROW)[:, None]
            b_dr = gl.convert_layout(b_d * b_r, HALF_ROW)[:, None]
            b_wr = gl.convert_layout(b_w * b_r, HALF_ROW)[:, None]
            b_rh = gl.convert_layout(b_r, HALF_ROW)[:, None]
            for part in range(D // BT):
                u_halves = _halves(u_one, HALF)
                for half in gl.static_range(2):
                    q_side = q_parts.index(part).slice(half * (BT // 2), BT // 2, 1)
                    x_side = x_parts.index(part).slice(half * (BT // 2), BT // 2, 1)
                    b_q, b_x = q_side.load(HALF).to(gl.float32), x_side.load(HALF).to(gl.float32)
                    b_dq = b_x + b_gs * u_halves[half]
                    if NORMALIZE:
                        b_dq = (b_dq - b_q * b_dr) * b_rh
                    q_side.store(b_dq.to(dtype))
                    x_side.store((b_q * b_wr).to(dtype))
                u_one, u_two, u_three, u_four = u_two, u_three, u_four, u_one
            fence_async_shared()
            tma.async_copy_shared_to_global(dq, [place, h * D], q)
            tma.async_copy_shared_to_global(weighted, [h * sequences * T + place, 0], x)
            _full(ring, used + 1 - which)
            _free(ring, used + 1 - which)
            used += 2
        else:
            b_g = gl.convert_layout(b_g * b_r * scale, WIDE_ROW)
            b_r = gl.convert_layout(b_r, WIDE_ROW)
            b_y = x.load(WIDE).to(gl.float32) * b_r[:, None] - b_g[:, None] * acc
            x.store(b_y.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(query, [place, h * D], x)
        taken += 2
        n, h, pair, low = n_next, h_next, pair_next, low_next
        seen, b_here, b_low = seen_next, b_here_next, b_low_next
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "T", "sequences"])
def _covariance_kernel(
    x, q, unit, covariances, query, dq, weighted, vectors, gate, count, mean, reciprocal, mean_q, d_gate, leans,
    schedule, items, T, sequences, H: gl.constexpr, KEYS_ALIGNED: gl.constexpr, NORMALIZE: gl.constexpr,
    GRADIENTS: gl.constexpr,
):  # fmt: skip
    """As that of `kernels.py`: q and from dq on are for GRADIENTS only, query for the other."""
    dtype: gl.constexpr = x.dtype
    held: gl.constexpr = ROW_SLOTS if GRADIENTS else ROW_SLOTS + 1
    rows = _make_ring(held, 1, dtype)
    ring = _make_ring(SLOTS - held, 2, dtype)
    inputs = (x, q, unit, covariances, count)
    numbers = (vectors, gate, count, reciprocal, mean_q)
    outputs = (query, dq, weighted, mean, d_gate, leans)
    walk = (schedule, items, T, sequences)
    gl.warp_specialize(
        [
            (_read, (0, numbers, outputs, walk, rows, ring, H, NORMALIZE, GRADIENTS, dtype)),
            (_read, (1, numbers, outputs, walk, rows, ring, H, NORMALIZE, GRADIENTS, dtype)),
            (_copy_for_reads, (inputs, walk, rows, ring, H, KEYS_ALIGNED, GRADIENTS)),
        ],
        [WARPS, 1],
        REGISTERS,
    )


@gluon.jit
def _copy_for_gradients(
    inputs, walk, rows, ring, H: gl.constexpr, KEYS_ALIGNED: gl.constexpr, BESIDE: gl.constexpr
):  # fmt: skip
    x, weighted, unit, spreads, beside = inputs
    schedule, items, T, sequences = walk
    taken = 0
    filled = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, h, start, low = _item(schedule, items - 1 - item, T, H)
        block = (h * sequences + n) * T
        key, side = block + start, 0
        if KEYS_ALIGNED:
            key, side = n * T + start, h * D
        for which in gl.static_range(2):
            taken = _fill(unit, key + which * BT, side, rows, taken)
        state = _state(n, h, start, T, H).to(gl.int32) * D
        for part in range(D // BT):
            filled = _fill(spreads, state + part * BT, 0, ring, filled)
        for reader in range(start, gl.minimum(low + C, T), BT):
            filled = _fill(weighted, block + reader, 0, ring, filled)
            filled = _fill(x, n * T + reader, h * D, ring, filled)
        if BESIDE:
            for which in range(2):
                filled = _fill(beside, n * T + start + which * BT, h * D, ring, filled)


@gluon.jit
def _differentiate_keys(
    which: gl.constexpr, numbers, dk, walk, rows, ring, H: gl.constexpr, NORMALIZE: gl.constexpr,
    BESIDE: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The gradients of the keys of block `which` of each item."""
    strength, reciprocal, vectors, last_vector, means, leans, count, mean, mean_x = numbers
    schedule, items, T, _ = walk
    row, column = gl.arange(0, BT, ROW), gl.arange(0, BT, COLUMN)
    flat = gl.arange(0, D, FLAT)
    zeros = gl.zeros((BT, BT), gl.float32, NARROW)
    used = 0
    taken = which
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        # As above.
        tma.store_wait(0)
        if taken > which:
            _free(rows, taken - 2)
        n, h, pair, low = _item(schedule, items - 1 - item, T, H)
        start = pair + which * BT
        token = n.to(gl.int64) * T * H + h
        seen = gl.load(count + n).to(gl.int32)
        stop = gl.minimum(low + C, T)
        end = n * (T // BT) + stop // BT
        m = vectors + _vector(end, h, H)
        if stop == T:
            m = last_vector + _vector(n, h, H)
        b_t = 1.0 / (seen + stop).to(gl.float32)
        b_v = -gl.load(leans + _vector(end - 1, h, H) + flat)
        share = means + _state(n, h, start, T, H) * (D // BT * D)
        for part in gl.static_range(D // BT):
            b_v += gl.load(share + part * D + flat)
        b_v = gl.convert_layout(b_v, WIDE_COLUMN)
        k = _full(rows, taken)
        acc = gl.zeros((BT, D), gl.float32, WIDE) + b_v[None, :]
        for part in gl.static_range(D // BT):
            b_k = k.slice(part * BT, BT, 1).load(NARROW).to(gl.float32)
            b_k -= (gl.load(m + part * BT + column) * b_t)[None, :]
            b_k = gl.convert_layout(b_k.to(dtype), LEFT)
            acc = warpgroup_mma(b_k, _full(ring, used), acc, is_async=True)
            if part > 0:
                acc = warpgroup_mma_wait(1, deps=(acc,))
                _free(ring, used - 1)
            used += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _free(ring, used - 1)
        if which == 1:
            # The first block does not read the keys of the second.
            for skipped in gl.static_range(2):
                _full(ring, used + skipped)
                _free(ring, used + skipped)
            used += 2
        for reader in range(start, stop, BT):
            source = reader + gl.arange(0, BT, FLAT)
            b_l = gl.load(strength + token + source * H) / (seen + source + 1).to(gl.float32)
            b_l = gl.convert_layout(b_l * gl.load(mean + token + source * H), COLUMN)[None, :]
            b_c = gl.convert_layout(gl.load(mean_x + token + source * H), COLUMN)[None, :]
            reads = row[:, None] <= reader - start + column[None, :]
            q = _full(ring, used)
            b_s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            x = _full(ring, used + 1)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            b_z = warpgroup_mma(k, x.permute((1, 0)), zeros, use_acc=False, is_async=True)
            # `weighted` carries the factor strength / t, which both products need once.
            b_p = gl.convert_layout(gl.where(reads, b_s - b_l, 0.0).to(dtype), LEFT)
            acc = warpgroup_mma(b_p, x, acc, is_async=True)
            b_z = warpgroup_mma_wait(1, deps=(b_z,))
            b_p = gl.convert_layout(gl.where(reads, b_z - b_c, 0.0).to(dtype), LEFT)
            acc = warpgroup_mma(b_p, q, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _free(ring, used)
            _free(ring, used + 1)
            used += 2
        parts = _quarters(acc)
        if NORMALIZE:
            b_r = gl.load(reciprocal + token + (start + row) * H)
            b_d = gl.zeros((BT,), gl.float32, ROW)
            for part in gl.static_range(D // BT):
                b_d += gl.sum(k.slice(part * BT, BT, 1).load(NARROW).to(gl.float32) * parts[part], 1)
        added = k
        if BESIDE:
            added = _full(ring, used + which)
        for part in gl.static_range(D // BT):
            side = k.slice(part * BT, BT, 1)
            b_dk = parts[part]
            if NORMALIZE:
                b_dk = (b_dk - side.load(NARROW).to(gl.float32) * b_d[:, None]) * b_r[:, None]
            if BESIDE:
                b_dk += added.slice(part * BT, BT, 1).load(NARROW).to(gl.float32)
            side.store(b_dk.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk, [n * T + start, h * D], k)
        if BESIDE:
            _free(ring, used + which)
            _full(ring, used + 1 - which)
            _free(ring, used + 1 - which)
            used += 2
        taken += 2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "T", "sequences"])
def _key_gradients_kernel(
    x, weighted, unit, spreads, beside, dk, strength, reciprocal, vectors, last_vector, means, leans, count, mean,
    mean_x, schedule, items, T, sequences, H: gl.constexpr, KEYS_ALIGNED: gl.constexpr, NORMALIZE: gl.constexpr,
    BESIDE: gl.constexpr,
):  # fmt: skip
    """As that of `kernels.py`."""
    dtype: gl.constexpr = x.dtype
    rows = _make_ring(ROW_SLOTS, 1, dtype)
    ring = _make_ring(SLOTS - ROW_SLOTS, 2, dtype)
    inputs = (x, weighted, unit, spreads, beside)
    numbers = (strength, reciprocal, vectors, last_vector, means, leans, count, mean, mean_x)
    walk = (schedule, items, T, sequences)
    gl.warp_specialize(
        [
            (_differentiate_keys, (0, numbers, dk, walk, rows, ring, H, NORMALIZE, BESIDE, dtype)),
            (_differentiate_keys, (1, numbers, dk, walk, rows, ring, H, NORMALIZE, BESIDE, dtype)),
            (_copy_for_gradients, (inputs, walk, rows, ring, H, KEYS_ALIGNED, BESIDE)),
        ],
        [WARPS, 1],
        REGISTERS,
    )


@functools.lru_cache(maxsize=64)
def _schedule(sequences: int, tokens: int, heads: int, device: torch.device) -> tuple[Tensor, int, int]:
    """The items, pair of blocks * heads + head, in the order in which programs take them in turn: [items] int32; how
    many there are, and how many programs.

    Items of one chunk, which share its state, are near each other. In every second round of the programs those that
    read most go first, in the others those that read least, so that all programs have as much to do.
    """
    each, items = tokens // BR.value, sequences * (tokens // BR.value) * heads
    programs = min(items, torch.cuda.get_device_properties(device).multi_processor_count)

    def work(item: int) -> int:
        return item // heads % each % (C.value // BR.value)

    order: list[int] = []
    for first in range(0, items, programs):
        some = range(first, min(first + programs, items))
        order += sorted(some, key=work, reverse=first // programs % 2 == 0)
    return torch.tensor(order, dtype=torch.int32, device=device), items, programs


def _tiles(matrix: Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [BT.value, D.value], TILE.value)


def _rows(launch: Launcher, x: Tensor) -> TensorDescriptor:
    return _tiles(x.view(launch.rows * launch.tokens, launch.heads * launch.size))


def _run(launch: Launcher, kernel: Any, *arguments: Any, **constants: bool) -> None:
    order, items, programs = _schedule(launch.rows, launch.tokens, launch.heads, launch.device)
    walk = (order, items, launch.tokens, launch.rows)
    launch.run(kernel, (programs,), *arguments, *walk, H=launch.heads, **constants, **OPTIONS)


def covariance_times(
    launch: Launcher, x: Rows, unit: Rows, vectors: Tensor, covariances: Tensor, count: Tensor, gate: Tensor,
    reciprocal: Tensor, mean: Tensor, *, query: Tensor | None, gradients: tuple[Tensor, ...] | None,
) -> None:  # fmt: skip
    """`Launcher.covariance_times` where `copies_apart` holds; writes mean, and query or the gradients."""
    rows = _tiles(x.matrix)
    # A kernel must be given what it does not use, too.
    q = dq = query_rows = weighted_rows = rows
    mean_q = d_gate = leans = mean
    if gradients is None:
        query_rows = rows if query is None else _rows(launch, query)
    else:
        queries, _, mean_q, d_queries, d_gate, weighted, leans = gradients
        q, dq, weighted_rows = _rows(launch, queries), _rows(launch, d_queries), _tiles(weighted)
    _run(
        launch, _covariance_kernel, rows, q, _tiles(unit.matrix), _tiles(covariances), query_rows, dq, weighted_rows,
        vectors, gate, count, mean, reciprocal, mean_q, d_gate, leans,
        KEYS_ALIGNED=unit.aligned, NORMALIZE=launch.unit_queries, GRADIENTS=gradients is not None,
    )  # fmt: skip


def key_gradients(
    launch: Launcher, x: Rows, weighted: Tensor, unit: Rows, spreads: Tensor, dk: Tensor, numbers: tuple[Tensor, ...],
    beside: Tensor | None,
) -> None:  # fmt: skip
    """Writes dk, with `beside` added to it; `numbers` are those from strength to mean_x of the kernel."""
    added = dk
    if beside is not None:
        # A bulk copy begins at a multiple of 16 bytes.
        added = beside if launch.is_aligned(beside) else beside.clone()
    _run(
        launch, _key_gradients_kernel, _tiles(x.matrix), _tiles(weighted), _tiles(unit.matrix), _tiles(spreads),
        _rows(launch, added), _rows(launch, dk), *numbers, KEYS_ALIGNED=unit.aligned, NORMALIZE=launch.normalize_keys,
        BESIDE=beside is not None,
    )  # fmt: skip
