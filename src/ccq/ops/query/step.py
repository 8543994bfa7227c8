"""One token of the read step in Triton: the statistics take in the key and are read in one pass over the second moment.

Legend: N sequences, H heads, D key size (BD the next power of two), BR rows of the second moment a program.

With the new M, m and t, r = (M q - ((m . q) / t) m) / t. A row of r needs the same row of M and nothing else of it, so
every program handles a few rows alone: it loads q, k and m whole, updates its rows of M and multiplies them with q. The
sum over a row is never divided among programs, so a sequence is read the same in any batch.

m and the count are read by all programs of a sequence, so a kernel in front makes the new ones, which may take the
place of the old.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query.reference import NORM_EPSILON

ROWS = 16
"""BR"""


@triton.jit
def _load_vector(x, head, column, D: tl.constexpr):
    return tl.load(x + head * D + column, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def _advance_kernel(
    k,
    total,
    count,
    new_total,
    new_count,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Total and count of one head take in the key; they may be overwritten."""
    head, column = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    b_k = _load_vector(k, head, column, D)
    if UNIT_KEYS:
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
    tl.store(new_total + head * D + column, _load_vector(total, head, column, D) + b_k, mask=column < D)
    if head % H == 0:
        tl.store(new_count + head // H, tl.load(count + head // H) + 1)


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
    """BR rows of one head, with the new total and count. The second moment may be overwritten: only this program reads
    its rows.
    """
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
    b_t = tl.load(count + n).to(tl.float32)
    if UNIT_QUERIES:
        b_rq = tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS)
        b_q, b_qi = b_q * b_rq, b_qi * b_rq
    if UNIT_KEYS:
        b_rk = tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
        b_k, b_ki = b_k * b_rk, b_ki * b_rk
    b_moment += b_ki[:, None] * b_k
    tl.store(new_moment + square, b_moment, mask=fits)
    b_r = tl.sum(b_moment * b_q, 1) / b_t
    if CENTRED:
        b_r -= b_mi / b_t * tl.sum(b_m / b_t * b_q, 0)
    if CORRECTION:
        tl.store(correction + head * D + row, b_r, mask=row < D)
    b_y = b_qi - tl.load(gate + head).to(tl.float32) * b_r
    tl.store(query + head * D + row, b_y.to(query.dtype.element_ty), mask=row < D)


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
    *, unit_queries: bool, unit_keys: bool, centred: bool, return_correction: bool, wide: bool, in_place: bool,
) -> TokenRead:  # fmt: skip
    """One token: q, k [N, 1, H, D] and gate [N, 1, H], all contiguous; the statistics new, or overwritten;
    the query in float32 with `wide`.
    """
    sequences, _, heads, size = q.shape
    query = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
    correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
    old = (second_moment, total, count)
    new = old if in_place else tuple(torch.empty_like(x) for x in old)
    sizes = {
        "H": heads,
        "D": size,
        "BD": max(16, triton.next_power_of_2(size)),
        "UNIT_KEYS": unit_keys,
        "EPS": NORM_EPSILON,
    }
    # Every program of a head reads all of the total, so that none of them could overwrite its part.
    _advance_kernel[(sequences * heads,)](k, total, count, *new[1:], num_warps=1, **sizes)
    _read_token_kernel[(sequences * heads * triton.cdiv(size, ROWS),)](
        q, k, gate, second_moment, *new[1:], query, query if correction is None else correction, new[0],
        BR=ROWS, UNIT_QUERIES=unit_queries, CENTRED=centred, CORRECTION=return_correction, **sizes,
    )  # fmt: skip
    return TokenRead(query, correction, *new)
