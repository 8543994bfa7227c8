"""Tokens of one chunk under per-channel decay, in Triton: their weights for each other, and the gradients of these.

Legend: B rows, T tokens, H heads, D key size, C tokens a chunk, BD columns at once. i reads, j is read. G are the
decays summed from the beginning of a chunk, in units of log 2.

    a_ij = scale * sum over d of q_id k_jd 2^(G_id - G_jd)              j <= i
    dq_i = sum over j of da_ij k_j 2^(G_i - G_j)
    dk_j = sum over i of da_ij q_i 2^(G_i - G_j)

A product of matrices needs the decay between i and j as a factor of i times a factor of j, and neither may overflow.
Let S be the highest bit in which the numbers i and j differ: then there is a token r, a multiple of S, with
j < r <= i, and 2^(G_i - G_r) and 2^(G_r - G_j) are both at most 1. r is the same for all pairs of a group of 2 S
tokens, and a token is on one side of it, so one factor a token and channel serves a whole level S, and the log2(C)
levels, each a masked product, make all pairs but those with themselves. That holds for any decay, and takes
log2(C) exponentials a number, where flash-linear-attention's kernels, which go through 16 neighbours one by one,
take more than thirty: on an H200 those were 2.3 of the 17.2 ms of a layer at 8 x 4096 tokens, these are 1.7.

For half precision the operands of products are float16, whatever the input: its mantissa is that of tf32. Its range is
smaller than that of bfloat16, so rows are divided by their largest number first, which keeps every row of the weights
and of dq as exact as it is alone. Of dk and inside dq rows meet: what is 2^14 times smaller than the largest of its
chunk loses digits. The gradients for float16 input are products of float32 in three parts
("tf32x3"): that of the decay, which is made of q . dq - k . dk, would see the rounding of the operands. All is float32
for float32 input. Nothing is added atomically; addresses are 64-bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = {"weights": 4, "gradients": 8}
COLUMNS = {"weights": 64, "gradients": 64}
"""BD. Measured on an H200 at 8 x 4096 tokens, 6 heads of 256, with one scale for all rows of a chunk: 454 and 1,021 us.
2 warps and 32 columns took 436 for the weights, but have no registers left for a scale a row; 4 and 32 took 1,104 for
the gradients.
"""
SMALLEST = tl.constexpr(2.0**-120)
"""That numbers are divided by: one over it is finite, and zeros stay zeros."""


@triton.jit
def _chunk(cu_seqlens, chunk_indices, tokens, chunks, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of this program's chunk, and how many tokens it has."""
    number = tl.program_id(0).to(tl.int64)
    if PACKED:
        document = tl.load(chunk_indices + 2 * number).to(tl.int64)
        begin = tl.load(cu_seqlens + document).to(tl.int64)
        inside = tl.load(chunk_indices + 2 * number + 1).to(tl.int64) * C
        length = tl.load(cu_seqlens + document + 1).to(tl.int64) - begin
    else:
        begin = number // chunks * tokens
        inside = number % chunks * C
        length = tokens
    return begin + inside, tl.minimum(length - inside, C).to(tl.int32)


@triton.jit
def _rows_scaled(x, HALF: tl.constexpr):
    """Every row of x over its largest number, and these [C]."""
    largest = tl.full((x.shape[0],), 1.0, tl.float32)
    if HALF:
        largest = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST)
        # One division a row, not one a number.
        x *= (1.0 / largest)[:, None]
    return x, largest


@triton.jit
def _scaled(x, HALF: tl.constexpr):
    """x over its largest number, and this."""
    largest = 1.0
    if HALF:
        largest = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), SMALLEST)
        x *= 1.0 / largest
    return x, largest


@triton.jit
def _factors(g, b_g, row, column, left, level, H: tl.constexpr, D: tl.constexpr):
    """The factors of a level [C, BD]: of a token behind r, the decay since r; of one before, the decay until r."""
    middle = tl.minimum((row >> level + 1 << level + 1) + (1 << level), left - 1)
    b_r = tl.load(g + middle[:, None] * (H * D) + column, mask=column < D, other=0.0)
    b_d = tl.where((row >> level & 1)[:, None] == 1, b_g - b_r, b_r - b_g)
    # Behind the last token there are no decays.
    return tl.exp2(tl.minimum(b_d, 0.0))


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _weights_kernel(
    q,
    k,
    g,
    weights,
    cu_seqlens,
    chunk_indices,
    tokens,
    chunks,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a of a chunk and head into weights [B, T, H, C]; zero where j > i."""
    first, left = _chunk(cu_seqlens, chunk_indices, tokens, chunks, C, PACKED)
    h = tl.program_id(1)
    row = tl.arange(0, C)
    differ, causal = row[:, None] ^ row, row[:, None] > row
    here = (first * H + h) * D
    acc = tl.zeros((C, C), tl.float32)
    for d in range(0, D, BD):
        column = d + tl.arange(0, BD)
        where, fits = row[:, None] * (H * D) + column, (row < left)[:, None] & (column < D)
        b_g = tl.load(g + here + where, mask=fits, other=0.0)
        b_q, q_scale = _rows_scaled(tl.load(q + here + where, mask=fits, other=0.0).to(tl.float32), HALF)
        b_k, k_scale = _rows_scaled(tl.load(k + here + where, mask=fits, other=0.0).to(tl.float32), HALF)
        b_a = tl.where(differ == 0, tl.sum(b_q * b_k, 1)[:, None], 0.0)
        for level in range(LEVELS):
            b_w = _factors(g + here, b_g, row, column, left, level, H, D)
            b_x, b_y = b_q * b_w, b_k * b_w
            if HALF:
                b_x, b_y = b_x.to(tl.float16), b_y.to(tl.float16)
            b_p = tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
            b_a = tl.where(causal & (differ >> level == 1), b_p, b_a)
        acc += b_a * (q_scale[:, None] * k_scale)
    inside = weights + (first * H + h) * C + row[:, None] * (H * C) + row
    tl.store(inside, (acc * scale).to(weights.dtype.element_ty), mask=(row < left)[:, None] & (row >= 0))


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _gradients_kernel(
    q,
    k,
    g,
    d_weights,
    dq,
    dk,
    cu_seqlens,
    chunk_indices,
    tokens,
    chunks,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq and dk of a chunk, head and BD columns, float32, from da [B, T, H, C]."""
    first, left = _chunk(cu_seqlens, chunk_indices, tokens, chunks, C, PACKED)
    h = tl.program_id(1)
    row, column = tl.arange(0, C), tl.program_id(2) * BD + tl.arange(0, BD)
    differ, causal = row[:, None] ^ row, row[:, None] > row
    inside = d_weights + (first * H + h) * C + row[:, None] * (H * C) + row
    b_a = tl.load(inside, mask=(row[:, None] < left) & (row < left) & (row[:, None] >= row), other=0.0)
    b_a, a_scale = _rows_scaled(b_a, HALF)
    here = (first * H + h) * D
    where, fits = row[:, None] * (H * D) + column, (row < left)[:, None] & (column < D)
    b_g = tl.load(g + here + where, mask=fits, other=0.0)
    b_q = tl.load(q + here + where, mask=fits, other=0.0).to(tl.float32) * a_scale[:, None]
    b_q, q_scale = _scaled(b_q, HALF)
    b_k, k_scale = _scaled(tl.load(k + here + where, mask=fits, other=0.0).to(tl.float32), HALF)
    b_s = tl.sum(tl.where(differ == 0, b_a, 0.0), 1)[:, None]
    b_dq, b_dk = b_s * b_k, b_s * b_q
    for level in range(LEVELS):
        b_w = _factors(g + here, b_g, row, column, left, level, H, D)
        b_m = tl.where(causal & (differ >> level == 1), b_a, 0.0)
        b_x, b_y = b_q * b_w, b_k * b_w
        if HALF:
            b_m, b_x, b_y = b_m.to(tl.float16), b_x.to(tl.float16), b_y.to(tl.float16)
        b_dq += b_w * tl.dot(b_m, b_y, input_precision=PRECISION)
        b_dk += b_w * tl.dot(tl.trans(b_m), b_x, input_precision=PRECISION)
    tl.store(dq + here + where, b_dq * (a_scale[:, None] * k_scale), mask=fits)
    tl.store(dk + here + where, b_dk * q_scale, mask=fits)


def _run(
    kernel: Any, name: str, q: Tensor, chunk: int, cu_seqlens: Tensor | None, chunk_indices: Tensor | None,
    *arguments: Any, split: bool, half: bool, precise: bool, last: tuple[Any, ...],
) -> None:  # fmt: skip
    rows, tokens, heads, size = q.shape
    width = min(COLUMNS[name], max(16, triton.next_power_of_2(size)))
    chunks = triton.cdiv(tokens, chunk)
    packed = chunk_indices is not None
    programs = rows * chunks if chunk_indices is None else len(chunk_indices)
    # A pointer that a kernel does not use must still be one.
    places = (cu_seqlens, chunk_indices) if packed else (q, q)
    kernel[(programs, heads, triton.cdiv(size, width)) if split else (programs, heads)](
        *arguments, *places, tokens, chunks, *last, H=heads, D=size, C=chunk, BD=width,
        LEVELS=chunk.bit_length() - 1, PACKED=packed, HALF=half, PRECISION="tf32x3" if precise else "ieee",
        num_warps=WARPS[name], num_stages=1,
    )  # fmt: skip


def chunk_weights(
    q: Tensor, k: Tensor, summed: Tensor, scale: float, *, chunk: int, cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
) -> Tensor:  # fmt: skip
    """a [B, T, H, C] in the dtype of q, zero where j > i.

    Args:
        q, k: [B, T, H, D], contiguous.
        summed: G [B, T, H, D] float32, contiguous.
        scale: of the queries.
        chunk: C, a power of two, 16 or more.
        cu_seqlens, chunk_indices: of packed documents, as `ccq.ops.flash_linear_attention.packing` makes them.
    """
    found = torch.empty((*q.shape[:3], chunk), dtype=q.dtype, device=q.device)
    _run(
        _weights_kernel, "weights", q, chunk, cu_seqlens, chunk_indices, q, k, summed, found, split=False,
        half=q.dtype != torch.float32, precise=False, last=(scale,),
    )  # fmt: skip
    return found


def chunk_gradients(
    q: Tensor, k: Tensor, summed: Tensor, d_weights: Tensor, *, chunk: int, cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq and dk [B, T, H, D] float32 from da [B, T, H, C] float32, which is read where j <= i; the rest as above."""
    dq, dk = (torch.empty_like(x, dtype=torch.float32) for x in (q, k))
    _run(
        _gradients_kernel, "gradients", q, chunk, cu_seqlens, chunk_indices, q, k, summed, d_weights, dq, dk,
        split=True, half=q.dtype == torch.bfloat16, precise=q.dtype == torch.float16, last=(),
    )  # fmt: skip
    return dq, dk
