"""Running means of keys in Triton, and what two read steps make of them: ccq-mean, and the traces of ccq-trace.

Legend: N sequences, H heads, D key size (BD the next power of two), BT rows a block, W columns of a running sum: D, and
one more for the squared lengths of the keys where the trace is asked for. i reads, j is read.

Each way takes three launches. `_sums_kernel` sums the unit keys of each block; the scan of the read step's own kernels
adds them up to m before each block; a last kernel makes the sums inside its block on the chip, and so the mean mu_i =
m_i / t_i of every token without its ever being written. Forward k is read twice, q read and y written once; backward
each of k and q is read twice, and the gradient of y twice.

ccq-mean. With a_i = mu_i . q_i, r_i = a_i mu_i and g_i the gradient that reaches r_i, b_i = mu_i . g_i:

    dq_i += b_i mu_i,    v_i = (a_i g_i + b_i q_i) / t_i,    dk_j = sum over i >= j of v_i

ccq-trace. tr_i = s_i / t_i - |mu_i|^2 with s the sum of squared lengths. Its reciprocal, bounded, has the gradient c_i
in tr_i, which is 0 where the bound holds:

    v_i = -2 c_i mu_i / t_i,    e_i = c_i / t_i,    dk_j = sum over i >= j of v_i + 2 k_j (sum over i >= j of e_i)

Sums over i >= j are suffix sums: inside the block, and a reverse scan over the blocks behind it. Everything is summed
in float32; nothing is added atomically and no result depends on the order in which programs run. Addresses are 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query.kernels import _load_part, _store_part
from ccq.ops.query.padding import clear_gradients, fill_outputs
from ccq.ops.reads.kernels import BlockLaunch, locate, reciprocal_count, suffix_sums, through_norm, unit_rows


@triton.jit
def _sums_kernel(
    k, sums, begin, end, owner, block_start, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    W: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The sum of the keys of each block, [blocks, H, W], and where W is D + 1 that of their squared lengths."""
    block, _, h, base, _, left = locate(begin, end, owner, block_start, H, BT)
    column = tl.arange(0, BD)
    b_k, _ = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), NORMALIZE, EPS)
    here = sums + (block * H + h) * W
    tl.store(here + column, tl.sum(b_k, 0), mask=column < D)
    if W > D:
        tl.store(here + D, tl.sum(tl.sum(b_k * b_k, 1), 0))


@triton.jit
def _read_kernel(
    q, k, gate, vectors, count, query, correction, begin, end, owner, block_start, H: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, UNIT_QUERIES: tl.constexpr, UNIT_KEYS: tl.constexpr,
    CORRECTION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """query = q - gate mu (mu . q), and with CORRECTION what the gate multiplies."""
    block, n, h, base, start, left = locate(begin, end, owner, block_start, H, BT)
    row, column = tl.arange(0, BT), tl.arange(0, BD)
    b_m = tl.load(vectors + (block * H + h) * D + column, mask=column < D, other=0.0)
    b_k, _ = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), UNIT_KEYS, EPS)
    b_mean = (b_m + tl.cumsum(b_k, 0)) * reciprocal_count(count, n, start, left, BT)[:, None]
    b_q, _ = unit_rows(_load_part(q + base * D, 0, left, BT, BD, H, D), UNIT_QUERIES, EPS)
    b_mean *= tl.sum(b_mean * b_q, 1)[:, None]
    if CORRECTION:
        _store_part(correction + base * D, b_mean, 0, left, BT, BD, H, D)
    b_g = tl.load(gate + base + row * H, mask=row < left, other=0.0).to(tl.float32)
    _store_part(query + base * D, b_q - b_g[:, None] * b_mean, 0, left, BT, BD, H, D)


@triton.jit
def _reaches_correction(dy, dr, gate, HAS_DR: tl.constexpr):
    """g: the gradient that reaches the correction by the query and, with HAS_DR, by itself."""
    b_x = -gate[:, None] * dy
    if HAS_DR:
        b_x += dr.to(tl.float32)
    return b_x


@triton.jit
def _read_gradients_kernel(
    q, k, gate, dy, dr, vectors, count, dq, d_gate, scores, leans, sums, begin, end, owner, block_start,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, UNIT_QUERIES: tl.constexpr,
    UNIT_KEYS: tl.constexpr, HAS_DR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """dq, the gradient of the gate, a (`scores`), b (`leans`), and the sum of v over each block."""
    block, n, h, base, start, left = locate(begin, end, owner, block_start, H, BT)
    row, column = tl.arange(0, BT), tl.arange(0, BD)
    real = row < left
    b_m = tl.load(vectors + (block * H + h) * D + column, mask=column < D, other=0.0)
    b_it = reciprocal_count(count, n, start, left, BT)
    b_k, _ = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), UNIT_KEYS, EPS)
    b_mean = (b_m + tl.cumsum(b_k, 0)) * b_it[:, None]
    b_q, b_r = unit_rows(_load_part(q + base * D, 0, left, BT, BD, H, D), UNIT_QUERIES, EPS)
    b_dy = _load_part(dy + base * D, 0, left, BT, BD, H, D).to(tl.float32)
    b_g = tl.load(gate + base + row * H, mask=real, other=0.0).to(tl.float32)
    b_x = _reaches_correction(b_dy, _load_part(dr + base * D, 0, left, BT, BD, H, D), b_g, HAS_DR)
    b_a, b_b = tl.sum(b_mean * b_q, 1), tl.sum(b_mean * b_x, 1)
    token = base + row * H
    tl.store(d_gate + token, -b_a * tl.sum(b_mean * b_dy, 1), mask=real)
    tl.store(scores + token, b_a, mask=real)
    tl.store(leans + token, b_b, mask=real)
    b_v = (b_a * b_it)[:, None] * b_x + (b_b * b_it)[:, None] * b_q
    tl.store(sums + (block * H + h) * D + column, tl.sum(b_v, 0), mask=column < D)
    b_dq = through_norm(b_dy + b_b[:, None] * b_mean, b_q, b_r, UNIT_QUERIES)
    _store_part(dq + base * D, b_dq, 0, left, BT, BD, H, D)


@triton.jit
def _key_gradients_kernel(
    q, k, gate, dy, dr, scores, leans, after, count, dk, begin, end, owner, block_start, H: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, UNIT_QUERIES: tl.constexpr, UNIT_KEYS: tl.constexpr,
    HAS_DR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """dk; `after` holds the sum of v behind each block."""
    block, n, h, base, start, left = locate(begin, end, owner, block_start, H, BT)
    row, column = tl.arange(0, BT), tl.arange(0, BD)
    real = row < left
    token = base + row * H
    b_it = reciprocal_count(count, n, start, left, BT)
    b_q, _ = unit_rows(_load_part(q + base * D, 0, left, BT, BD, H, D), UNIT_QUERIES, EPS)
    b_dy = _load_part(dy + base * D, 0, left, BT, BD, H, D).to(tl.float32)
    b_g = tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
    b_x = _reaches_correction(b_dy, _load_part(dr + base * D, 0, left, BT, BD, H, D), b_g, HAS_DR)
    b_a = tl.load(scores + token, mask=real, other=0.0) * b_it
    b_b = tl.load(leans + token, mask=real, other=0.0) * b_it
    b_w = tl.load(after + (block * H + h) * D + column, mask=column < D, other=0.0)
    b_dk = suffix_sums(b_a[:, None] * b_x + b_b[:, None] * b_q, b_w)
    b_k, b_r = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), UNIT_KEYS, EPS)
    _store_part(dk + base * D, through_norm(b_dk, b_k, b_r, UNIT_KEYS), 0, left, BT, BD, H, D)


@triton.jit
def _trace_kernel(
    k, vectors, count, inverse, d_inverse, after, dk, begin, end, owner, block_start, H: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, UNIT_KEYS: tl.constexpr, PASS: tl.constexpr,
    FLOOR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """PASS "forward": one over the trace, at least FLOOR, of each token; zero for the first key. "sums": those of v and
    e over each block, to `after`. "keys": dk, with `after` now holding the sums behind each block.
    """
    block, n, h, base, start, left = locate(begin, end, owner, block_start, H, BT)
    row, column = tl.arange(0, BT), tl.arange(0, BD)
    real = row < left
    token = base + row * H
    here = (block * H + h) * (D + 1)
    b_m = tl.load(vectors + here + column, mask=column < D, other=0.0)
    b_it = reciprocal_count(count, n, start, left, BT)
    b_k, b_r = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), UNIT_KEYS, EPS)
    b_mean = (b_m + tl.cumsum(b_k, 0)) * b_it[:, None]
    if PASS == "forward":
        b_s = (tl.load(vectors + here + D) + tl.cumsum(tl.sum(b_k * b_k, 1), 0)) * b_it
        b_trace = tl.maximum(b_s - tl.sum(b_mean * b_mean, 1), FLOOR)
        tl.store(inverse + token, tl.where(b_it < 1.0, 1.0 / b_trace, 0.0), mask=real)
    else:
        b_i = tl.load(inverse + token, mask=real, other=0.0)
        b_e = -b_it * b_i * b_i * tl.load(d_inverse + token, mask=real, other=0.0).to(tl.float32)
        b_e = tl.where(b_i * FLOOR < 1.0, b_e, 0.0)
        b_v = (-2.0 * b_e)[:, None] * b_mean
        if PASS == "sums":
            tl.store(after + here + column, tl.sum(b_v, 0), mask=column < D)
            tl.store(after + here + D, tl.sum(b_e, 0))
        else:
            b_dk = suffix_sums(b_v, tl.load(after + here + column, mask=column < D, other=0.0))
            b_dk += (2.0 * suffix_sums(b_e, tl.load(after + here + D)))[:, None] * b_k
            _store_part(dk + base * D, through_norm(b_dk, b_k, b_r, UNIT_KEYS), 0, left, BT, BD, H, D)


def _sums_before(launch: BlockLaunch, k: Tensor, initial: Tensor, unit_keys: bool) -> tuple[Tensor, Tensor]:
    """The sums of the keys before each block, and the last; as many columns as `initial` [N, H, W] has."""
    columns = initial.shape[-1]
    sums = launch.empty(columns)
    launch.run(_sums_kernel, k, sums, W=columns, NORMALIZE=unit_keys)
    return sums, launch.scan(sums, initial, reverse=False)


class MeanRead(NamedTuple):
    query: Tensor
    correction: Tensor | None
    total: Tensor
    count: Tensor  # type: ignore[assignment]  # a field, not the method of tuple
    vectors: Tensor
    """[blocks, H, D] float32, m before each block of keys."""


def forward(
    q: Tensor, k: Tensor, gate: Tensor, total: Tensor, count: Tensor, mask: Tensor | None,
    boundaries: Sequence[int] | None, *, unit_queries: bool, unit_keys: bool, return_correction: bool, wide: bool,
) -> MeanRead:  # fmt: skip
    """q - gate mu (mu . q), all inputs contiguous; the query in float32 with `wide`."""
    launch = BlockLaunch(k, mask, boundaries)
    vectors, last = _sums_before(launch, k, total, unit_keys)
    query = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
    correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
    # A pointer that a kernel does not use must still be one.
    launch.run(
        _read_kernel, q, k, gate, vectors, count, query, query if correction is None else correction,
        UNIT_QUERIES=unit_queries, UNIT_KEYS=unit_keys, CORRECTION=return_correction,
    )  # fmt: skip
    if mask is not None:
        fill_outputs(mask, q, query, correction, unit_queries)
    return MeanRead(query, correction, last, count + launch.plan.length, vectors)


class MeanGradients(NamedTuple):
    q: Tensor
    k: Tensor
    gate: Tensor
    total: Tensor


def backward(
    q: Tensor, k: Tensor, gate: Tensor, vectors: Tensor, count: Tensor, dy: Tensor, dr: Tensor | None,
    d_total: Tensor, mask: Tensor | None, boundaries: Sequence[int] | None, *, unit_queries: bool, unit_keys: bool,
) -> MeanGradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous."""
    launch = BlockLaunch(k, mask, boundaries)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    d_gate, scores, leans = (torch.empty_like(gate, dtype=torch.float32) for _ in range(3))
    sums = launch.empty(launch.size)
    constants = {"UNIT_QUERIES": unit_queries, "UNIT_KEYS": unit_keys, "HAS_DR": dr is not None}
    given = (q, k, gate, dy, dy if dr is None else dr)
    launch.run(_read_gradients_kernel, *given, vectors, count, dq, d_gate, scores, leans, sums, **constants)
    first = launch.scan(sums, d_total, reverse=True)
    launch.run(_key_gradients_kernel, *given, scores, leans, sums, count, dk, **constants)
    if mask is not None:
        clear_gradients(mask, dq, dk, d_gate)
    return MeanGradients(dq, dk, d_gate, first)


def inverse_trace(
    k: Tensor, sums: Tensor, count: Tensor, mask: Tensor | None, boundaries: Sequence[int] | None, *,
    unit_keys: bool, floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """1 / max(tr Sigma, floor) [B, T, H] float32, zero at a first key and at padding, and the sums before each block
    [blocks, H, D + 1]; `sums` [N, H, D + 1] are those before the call: of the keys, and of their squared lengths.
    """
    launch = BlockLaunch(k, mask, boundaries)
    before, _ = _sums_before(launch, k, sums, unit_keys)
    make = torch.empty if mask is None else torch.zeros
    inverse = make(k.shape[:3], dtype=torch.float32, device=k.device)
    launch.run(
        _trace_kernel, k, before, count, inverse, inverse, before, k,
        UNIT_KEYS=unit_keys, PASS="forward", FLOOR=floor,
    )  # fmt: skip
    return inverse, before


def inverse_trace_backward(
    d_inverse: Tensor, inverse: Tensor, k: Tensor, before: Tensor, count: Tensor, mask: Tensor | None,
    boundaries: Sequence[int] | None, *, unit_keys: bool, floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients in k and in the sums before the call."""
    launch = BlockLaunch(k, mask, boundaries)
    after = launch.empty(launch.size + 1)
    dk = torch.empty_like(k) if mask is None else torch.zeros_like(k)
    given = (k, before, count, inverse, d_inverse, after, dk)
    constants = {"UNIT_KEYS": unit_keys, "FLOOR": floor}
    launch.run(_trace_kernel, *given, PASS="sums", **constants)
    # Nothing depends on the sums after the call.
    behind = after.new_zeros((count.shape[0], launch.heads, launch.size + 1))
    first = launch.scan(after, behind, reverse=True)
    launch.run(_trace_kernel, *given, PASS="keys", **constants)
    return dk, first
