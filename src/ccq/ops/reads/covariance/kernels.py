"""Functions of the covariance in Triton: polynomials in lambda Sigma_i, and the solution with I + lambda Sigma_i.

Legend: N sequences, H heads, D key size (BD the next power of two), BT rows a block, K pairs, S tiles of a state a
side. i reads, j is read.

All are y = q - lambda c with c = Sigma z_0, and differ in z_0 alone:

    a polynomial 1 + c_1 (-lambda Sigma) + ... + c_K (-lambda Sigma)^K, by Horner's scheme: z_{K-1} = c_K q and
    z_{s-1} = c_s q - lambda Sigma z_s. With coefficients of 1 these are the steps of Richardson's iteration.
    the solution: z_0 = y, by conjugate gradients started at q, with two scalars a row and step.

A product Sigma_i x_i needs the keys of the block, the covariance before it, and nothing else, if that covariance is
written before every block: what `ccq.ops.query.kernels` calls a chunk is one block here. So one program loads both and
multiplies as often as it must without touching memory in between. However many products, the forward pass has the
launches of the Curvature-Conditioned Query and passes over the same rows; what it pays for chunks of one block is about
D numbers more a token, written once and read once.

Backward. Sigma_i is symmetric, so the vectors e_0 = dy, e_{s+1} = -lambda Sigma e_s are all that is needed:

    dq = dy + sum_s c_{s+1} e_{s+1},   dlambda = -sum_s z_s . Sigma e_s,   dSigma = sum_s p_s z_s^T,  p_s = -lambda e_s

For the solution K = 1 and e_0 = (I + lambda Sigma)^-1 dy, which is dq too (implicit differentiation). What reaches c
itself joins p_0. So a token reads the keys by K pairs (z_s, p_s), where the Curvature-Conditioned Query has one, and
the gradient of the keys is its own, a sum over pairs:

    dk_j = sum over s and i >= j of (p_i (z_i . k_j - a_i) + z_i (p_i . k_j - c_i)) / t_i, a and c the mean scores

`_polynomial_kernel` writes the z_s, over t, once more (`_solution_kernel` solves for e_0); `_adjoint_kernel` computes
the e_s, writes the p_s, and does what concerns the block alone, its own keys included; `_scan_gradients_kernel` of the
read step sums W = p z^T + z p^T over later tokens; `_key_gradients_kernel` multiplies keys with that. That is one large
launch more than the Curvature-Conditioned Query has, and for every pair two rows a token that are written once, and
read once (p) or twice (z). The scan takes the K pairs of a token for K tokens: their rows lie one after the other,
sequences are K times as long, and the means that it multiplies with come out K times too small.

States of float16 input are float32, as those of the read step, and are ROUNDed to the mantissa of tf32 before products.

Everything else, the copies into blocks, the scans and their layout, is that of `ccq.ops.query.kernels`. Nothing is
added atomically and no result depends on the order in which programs run. Addresses are 64-bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query import kernels
from ccq.ops.query.kernels import (
    Configuration,
    Gradients,
    Launcher,
    Plan,
    _load_part,
    _origin,
    _sequence,
    _store_part,
    _tile,
)
from ccq.ops.query.reference import NORM_EPSILON
from ccq.ops.reads.kernels import rounded


@triton.jit
def _store_rows(pointer, x, STRIDE, BT: tl.constexpr, BD: tl.constexpr):
    """[BT, BD] to rows that are STRIDE apart."""
    inside = tl.arange(0, BT)[:, None] * STRIDE + tl.arange(0, BD)
    tl.store(pointer + inside, x.to(pointer.dtype.element_ty))


@triton.jit
def _unit_rows(x, base, left, BT: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
               NORMALIZE: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """The rows of a block in float32, normalised or not, and one over their lengths."""
    b_x = _load_part(x + base * D, 0, left, BT, BD, H, D).to(tl.float32)
    b_r = tl.full((BT,), 1.0, tl.float32)
    if NORMALIZE:
        b_r = tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)
        b_x *= b_r[:, None]
    return b_x, b_r


@triton.jit
def _through_norm(b_dx, b_x, b_r):
    """The gradient before the normalisation that made b_x, from the one behind it."""
    return (b_dx - b_x * tl.sum(b_x * b_dx, 1)[:, None]) * b_r[:, None]


@triton.jit
def _before(unit, covariances, vectors, first, block, h, seen, blocks, H: tl.constexpr, D: tl.constexpr,
            BD: tl.constexpr, BT: tl.constexpr, KEYS_ALIGNED: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    """The keys of a block, which begins at token `first`; and the covariance and the mean of the `seen` keys before it.

    `unit` are keys in blocks, or keys as they are (KEYS_ALIGNED).
    """
    column = tl.arange(0, BD)
    key, side = _origin(first, (h * blocks.to(tl.int64) + block) * BT, h, H, D, KEYS_ALIGNED)
    STRIDE: tl.constexpr = H * D if KEYS_ALIGNED else BD
    b_k = _tile(unit, key, side, STRIDE, BT, BD, False)
    b_c = _tile(covariances, (block * H + h) * BD, 0, BD, BD, BD, False)
    if ROUND:
        b_c = rounded(b_c)
    b_m = tl.load(vectors + (block * H + h) * D + column, mask=column < D, other=0.0)
    return b_k, b_c, b_m / tl.maximum(seen, 1).to(tl.float32)


@triton.jit
def _scores(b_x, b_k, b_m, b_it, seen, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Centred scores of rows x with the keys of their block up to themselves, their mean scores over all keys, and
    x . mu with mu the mean before the block.
    """
    row = tl.arange(0, BT)
    reads = row[:, None] >= row
    b_mx = tl.sum(b_x.to(tl.float32) * b_m, 1)
    b_s = tl.where(reads, tl.dot(b_x, tl.trans(b_k), input_precision=PRECISION), 0.0)
    b_a = (seen.to(tl.float32) * b_mx + tl.sum(b_s, 1)) * b_it
    return tl.where(reads, b_s - b_a[:, None], 0.0), b_a, b_mx


@triton.jit
def _weighted_keys(b_x, b_s, b_a, b_mx, b_k, b_c, b_m, b_it, seen, PRECISION: tl.constexpr):
    """Sigma_i x_i from the scores of x."""
    before = seen.to(tl.float32)
    acc = tl.dot(b_x.to(b_c.dtype), b_c, input_precision=PRECISION) * before
    acc += ((b_mx - b_a) * before)[:, None] * b_m
    return tl.dot(b_s.to(b_k.dtype), b_k, acc, input_precision=PRECISION) * b_it[:, None]


@triton.jit
def _times(b_x, b_k, b_c, b_m, b_it, seen, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Sigma_i x_i for the rows of a block, already rounded."""
    b_s, b_a, b_mx = _scores(b_x, b_k, b_m, b_it, seen, BT, PRECISION)
    return _weighted_keys(b_x, b_s, b_a, b_mx, b_k, b_c, b_m, b_it, seen, PRECISION)


@triton.jit(do_not_specialize=["blocks", "terms"])
def _polynomial_kernel(
    q,
    gate,
    coefficients,
    unit,
    covariances,
    vectors,
    count,
    query,
    correction,
    kept,
    begin,
    end,
    owner,
    block_start,
    blocks,
    terms,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CORRECTION: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
    EPS: tl.constexpr,
):
    """query = q - gate c, and c with CORRECTION. With KEEP, z_s / t in place of both: [H, blocks, BT, K, BD]."""
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    start = (block - tl.load(block_start + n)).to(tl.int32) * BT
    if start >= length:
        return
    row = tl.arange(0, BT)
    base, left = (first + start) * H + h, length - start
    real = row < left
    seen = tl.load(count + n) + start
    b_it = 1.0 / tl.where(real, seen + row + 1, 1).to(tl.float32)
    b_k, b_c, b_m = _before(
        unit, covariances, vectors, first + start, block, h, seen, blocks, H, D, BD, BT, KEYS_ALIGNED, ROUND
    )  # fmt: skip
    b_g = tl.load(gate + base + row * H, mask=real, other=0.0).to(tl.float32)
    b_q, _ = _unit_rows(q, base, left, BT, H, D, BD, NORMALIZE, EPS)
    place = kept + (h * blocks.to(tl.int64) + block) * BT * terms * BD
    b_z = b_q * tl.load(coefficients + terms - 1)
    for s in range(terms - 1, 0, -1):
        if KEEP:
            _store_rows(place + s * BD, b_z * b_it[:, None], terms * BD, BT, BD)
        b_r = _times(b_z.to(b_k.dtype), b_k, b_c, b_m, b_it, seen, BT, PRECISION)
        b_z = b_q * tl.load(coefficients + s - 1) - b_g[:, None] * b_r
    if KEEP:
        _store_rows(place, b_z * b_it[:, None], terms * BD, BT, BD)
    else:
        b_r = _times(b_z.to(b_k.dtype), b_k, b_c, b_m, b_it, seen, BT, PRECISION)
        if CORRECTION:
            _store_part(correction + base * D, b_r, 0, left, BT, BD, H, D)
        _store_part(query + base * D, b_q - b_g[:, None] * b_r, 0, left, BT, BD, H, D)


@triton.jit(do_not_specialize=["blocks", "steps"])
def _solution_kernel(
    x,
    gate,
    unit,
    covariances,
    vectors,
    count,
    query,
    correction,
    q,
    y,
    dq,
    kept,
    begin,
    end,
    owner,
    block_start,
    blocks,
    steps,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CORRECTION: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
    EPS: tl.constexpr,
):
    """query = (I + gate Sigma)^-1 x = x - gate c, and c with CORRECTION. x are queries, which NORMALIZE normalises.

    With KEEP, x is the gradient of such queries y: also y / t [H, blocks, BT, BD] and the gradient of q.
    """
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    start = (block - tl.load(block_start + n)).to(tl.int32) * BT
    if start >= length:
        return
    row = tl.arange(0, BT)
    base, left = (first + start) * H + h, length - start
    real = row < left
    seen = tl.load(count + n) + start
    b_it = 1.0 / tl.where(real, seen + row + 1, 1).to(tl.float32)
    b_k, b_c, b_m = _before(
        unit, covariances, vectors, first + start, block, h, seen, blocks, H, D, BD, BT, KEYS_ALIGNED, ROUND
    )  # fmt: skip
    b_g = tl.load(gate + base + row * H, mask=real, other=0.0).to(tl.float32)
    b_x, _ = _unit_rows(x, base, left, BT, H, D, BD, NORMALIZE and not KEEP, EPS)
    # The correction is summed rather than the solution, so that it is as exact where it is small. Directions are
    # rounded before they are used, and so are not rounded by the product.
    b_r = _times(b_x.to(b_k.dtype), b_k, b_c, b_m, b_it, seen, BT, PRECISION)
    b_e = -b_g[:, None] * b_r
    b_n = tl.sum(b_e * b_e, 1)
    b_p = b_e.to(b_k.dtype)
    for _ in range(steps):
        b_u = _times(b_p, b_k, b_c, b_m, b_it, seen, BT, PRECISION)
        b_w = b_p.to(tl.float32) + b_g[:, None] * b_u
        b_d = tl.sum(b_p.to(tl.float32) * b_w, 1)
        b_l = tl.sum(b_p.to(tl.float32) * b_e, 1) / tl.where(b_d > 0, b_d, 1.0)
        b_r += b_l[:, None] * b_u
        b_e -= b_l[:, None] * b_w
        b_d = tl.sum(b_e * b_e, 1)
        b_p = (b_e + (b_d / tl.where(b_n > 0, b_n, 1.0))[:, None] * b_p.to(tl.float32)).to(b_k.dtype)
        b_n = b_d
    if CORRECTION:
        _store_part(correction + base * D, b_r, 0, left, BT, BD, H, D)
    b_y, _ = _unit_rows(x, base, left, BT, H, D, BD, NORMALIZE and not KEEP, EPS)
    b_y -= b_g[:, None] * b_r
    _store_part(query + base * D, b_y, 0, left, BT, BD, H, D)
    if KEEP:
        b_dq = b_y
        if NORMALIZE:
            b_q, b_rq = _unit_rows(q, base, left, BT, H, D, BD, True, EPS)
            b_dq = _through_norm(b_y, b_q, b_rq)
        _store_part(dq + base * D, b_dq, 0, left, BT, BD, H, D)
        b_z, _ = _unit_rows(y, base, left, BT, H, D, BD, False, EPS)
        _store_rows(kept + (h * blocks.to(tl.int64) + block) * BT * BD, b_z * b_it[:, None], BD, BT, BD)


@triton.jit(do_not_specialize=["blocks", "terms"])
def _adjoint_kernel(
    x,
    gate,
    coefficients,
    unit,
    covariances,
    vectors,
    count,
    kept,
    pushes,
    inside,
    leans,
    q,
    dy,
    dq,
    d_gate,
    begin,
    end,
    owner,
    block_start,
    blocks,
    terms,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    CORRECTION: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
    EPS: tl.constexpr,
):
    """The gradients of a block from its pairs; `kept` are z_s / t, and x is e_0.

    Writes p_s [H, blocks, BT, K, BD], the gradients of the unit keys from the block itself [H, blocks, BT, BD], leans
    [blocks, H, D], the sums of a p + c z / t with the mean scores a of z / t and c of p, the gradient of lambda, and
    that of q if POLYNOMIAL. With CORRECTION, x is p_0, and what p_0 brings to the gradient of lambda is left out.
    """
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    start = (block - tl.load(block_start + n)).to(tl.int32) * BT
    column = tl.arange(0, BD)
    if start >= length:
        tl.store(leans + (block * H + h) * D + column, tl.zeros((BD,), tl.float32), mask=column < D)
        return
    row = tl.arange(0, BT)
    base, left = (first + start) * H + h, length - start
    real = row < left
    seen = tl.load(count + n) + start
    b_t = tl.where(real, seen + row + 1, 1).to(tl.float32)
    b_it = 1.0 / b_t
    b_k, b_c, b_m = _before(
        unit, covariances, vectors, first + start, block, h, seen, blocks, H, D, BD, BT, KEYS_ALIGNED, ROUND
    )  # fmt: skip
    b_g = tl.load(gate + base + row * H, mask=real, other=0.0).to(tl.float32)
    b_x = _unit_rows(x, base, left, BT, H, D, BD, False, EPS)[0].to(b_k.dtype)
    b_l = -b_g
    if CORRECTION:
        b_l = tl.full((BT,), 1.0, tl.float32)
    if POLYNOMIAL:
        b_dq, _ = _unit_rows(dy, base, left, BT, H, D, BD, False, EPS)
    key = (h * blocks.to(tl.int64) + block) * BT
    pair = tl.arange(0, BT)[:, None] * (terms * BD) + column
    b_dk = tl.zeros((BT, BD), tl.float32)
    b_lean = tl.zeros((BD,), tl.float32)
    b_dg = tl.zeros((BT,), tl.float32)
    # In an order that keeps few tiles at a time.
    for s in range(0, terms):
        b_z = tl.load(kept + (key * terms + s) * BD + pair)
        b_p = (b_x.to(tl.float32) * b_l[:, None]).to(b_k.dtype)
        tl.store(pushes + (key * terms + s) * BD + pair, b_p)
        b_s, b_a, _ = _scores(b_z, b_k, b_m, b_it, seen, BT, PRECISION)
        b_dk = tl.dot(tl.trans(b_s.to(b_k.dtype)), b_p, b_dk, input_precision=PRECISION)
        b_lean += tl.sum(b_a[:, None] * b_p.to(tl.float32), 0)
        b_s, b_a, b_mx = _scores(b_x, b_k, b_m, b_it, seen, BT, PRECISION)
        b_dk = tl.dot(tl.trans((b_s * b_l[:, None]).to(b_k.dtype)), b_z, b_dk, input_precision=PRECISION)
        b_lean += tl.sum((b_l * b_a)[:, None] * b_z.to(tl.float32), 0)
        b_u = _weighted_keys(b_x, b_s, b_a, b_mx, b_k, b_c, b_m, b_it, seen, PRECISION)
        b_d = tl.sum(b_z.to(tl.float32) * b_u, 1)
        if CORRECTION:
            b_d = tl.where(s > 0, b_d, 0.0)
        b_dg -= b_d
        b_u *= b_l[:, None]
        if POLYNOMIAL:
            b_dq += tl.load(coefficients + s) * b_u
        b_x = b_u.to(b_k.dtype)
        b_l = -b_g
    tl.store(d_gate + base + row * H, b_dg * b_t, mask=real)
    tl.store(leans + (block * H + h) * D + column, b_lean, mask=column < D)
    _store_rows(inside + key * BD, b_dk, BD, BT, BD)
    if POLYNOMIAL:
        if NORMALIZE:
            b_q, b_rq = _unit_rows(q, base, left, BT, H, D, BD, True, EPS)
            b_dq = _through_norm(b_dq, b_q, b_rq)
        _store_part(dq + base * D, b_dq, 0, left, BT, BD, H, D)


@triton.jit(do_not_specialize=["blocks", "terms"])
def _key_gradients_kernel(
    inside,
    unit,
    reciprocal,
    spreads,
    means,
    leans,
    vectors,
    last_vector,
    count,
    dk,
    begin,
    end,
    owner,
    block_start,
    blocks,
    terms,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    S: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
):
    """dk = what its own block gives + W (k - mu) + (W mu - w), with W, w and mu of what is behind the block. `means`
    are K times too small.
    """
    h = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    n = tl.load(owner + block)
    first, length = _sequence(begin, end, n)
    start = (block - tl.load(block_start + n)).to(tl.int32) * BT
    if start >= length:
        return
    row, column = tl.arange(0, BT), tl.arange(0, BD)
    base, left = (first + start) * H + h, length - start
    place = block * H + h
    m = vectors + (place + H) * D
    if left <= BT:
        m = last_vector + (n * H + h) * D
    b_t = 1.0 / (tl.load(count + n) + tl.minimum(start + BT, length)).to(tl.float32)
    b_v = tl.zeros((BD,), tl.float32)
    for s in tl.static_range(S):
        b_v += tl.load(means + (place * S + s) * D + column, mask=column < D, other=0.0)
    b_v = b_v * terms - tl.load(leans + place * D + column, mask=column < D, other=0.0)
    at = (h * blocks.to(tl.int64) + block) * BT
    key, side = _origin(first + start, at, h, H, D, KEYS_ALIGNED)
    STRIDE: tl.constexpr = H * D if KEYS_ALIGNED else BD
    b_dk = _tile(inside, at, 0, BD, BT, BD, False) + b_v
    for d in range(0, BD, BK):
        part = d + tl.arange(0, BK)
        b_m = tl.load(m + part, mask=part < D, other=0.0) * b_t
        b_k = _tile(unit, key, side + d, STRIDE, BT, BK, False).to(tl.float32) - b_m
        b_w = _tile(spreads, place * BD + d, 0, BD, BK, BD, False)
        if ROUND:
            b_k, b_w = rounded(b_k), rounded(b_w)
        b_dk = tl.dot(b_k.to(b_w.dtype), b_w, b_dk, input_precision=PRECISION)
    if NORMALIZE:
        b_k = _tile(unit, key, side, STRIDE, BT, BD, False).to(tl.float32)
        b_r = tl.load(reciprocal + base + row * H, mask=row < left, other=0.0)
        b_dk = _through_norm(b_dk, b_k, b_r)
    _store_part(dk + base * D, b_dk, 0, left, BT, BD, H, D)


def configuration(dtype: torch.dtype, size: int, device: torch.device) -> Configuration:
    """That of the read step, cut so that the covariance before every block is written."""
    chosen = kernels.configuration(dtype, size, device)
    # Rows of 64 in the registers of four warps; float32 units need more of them for the same products.
    warps = (4 if size <= 64 else 8) * (2 if dtype == torch.float32 else 1)
    return chosen._replace(chunk=chosen.block, read_warps=warps)


class Function(NamedTuple):
    """Which function of Sigma."""

    coefficients: tuple[float, ...]
    """c_1 to c_K of a polynomial; empty for the solution."""
    steps: int
    """Of conjugate gradients, for the solution."""

    @property
    def pairs(self) -> int:
        """K"""
        return len(self.coefficients) or 1


class Forward(NamedTuple):
    query: Tensor
    correction: Tensor | None
    second_moment: Tensor
    total: Tensor
    vectors: Tensor
    """[blocks, H, D] float32, the sum of the keys before each block."""


@functools.lru_cache(maxsize=64)
def _on_device(coefficients: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept, so that a step of training copies nothing to the device."""
    return torch.tensor(coefficients, dtype=torch.float32, device=device)


class _Known(NamedTuple):
    """What products with Sigma need, as the kernels take it."""

    unit: Tensor
    covariances: Tensor
    vectors: Tensor
    seen: Tensor


def _run(launch: Launcher, kernel: Any, *arguments: Tensor, times: int, **constants: Any) -> None:
    """One program a block and head; `times` is how often it multiplies, or the number of pairs."""
    launch.run(
        kernel, (launch.blocks * launch.heads,), *arguments, *launch.sequences_of_blocks(), launch.blocks, times,
        **launch.shape, **constants, PRECISION=launch.scanned["PRECISION"], ROUND=launch.dtype == torch.float16,
        num_warps=launch.config.read_warps, num_stages=1,
    )  # fmt: skip


def _apply(
    launch: Launcher, function: Function, x: Tensor, gate: Tensor, known: _Known, query: Tensor,
    correction: Tensor | None, *, keys_aligned: bool, normalize: bool,
) -> None:  # fmt: skip
    """query = x - gate c, and c."""
    # A pointer that a kernel does not use must still be one.
    outputs = (query, known.vectors if correction is None else correction)
    options = {"NORMALIZE": normalize, "CORRECTION": correction is not None, "KEEP": False, "EPS": NORM_EPSILON}
    options["KEYS_ALIGNED"] = keys_aligned
    if function.coefficients:
        coefficients = _on_device(function.coefficients, x.device)
        _run(launch, _polynomial_kernel, x, gate, coefficients, *known, *outputs, x, times=function.pairs, **options)
    else:
        _run(launch, _solution_kernel, x, gate, *known, *outputs, x, x, x, x, times=function.steps, **options)


def forward(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor | None, total: Tensor, count: Tensor, plan: Plan,
    config: Configuration, function: Function, *, unit_queries: bool, unit_keys: bool, return_correction: bool,
    wide: bool,
) -> Forward:  # fmt: skip
    """q, k [B, T, H, D] and gate [B, T, H], contiguous; the query in float32 with `wide`."""
    launch = Launcher(q, plan, config, unit_queries, unit_keys, True)

    def launch_all() -> Forward:
        unit, _, vectors = launch.unit_keys(k, summed=True)
        last = launch.scan_vectors(vectors, total, reverse=False)
        covariances, moment = launch.moments(unit, vectors, second_moment, count, last=True)
        query = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
        correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
        known = _Known(unit.matrix, covariances, vectors, count)
        _apply(
            launch, function, q, gate, known, query, correction, keys_aligned=unit.aligned, normalize=unit_queries
        )  # fmt: skip
        return Forward(query, correction, moment, last, vectors)

    variant = (
        launch.is_aligned(k), bool(function.coefficients), gate.dtype, second_moment is None, return_correction, wide
    )  # fmt: skip
    return launch.compiled(launch_all, "function", *variant)


def backward(
    q: Tensor, k: Tensor, gate: Tensor, dy: Tensor, dr: Tensor | None, d_moment: Tensor | None, d_total: Tensor,
    query: Tensor, correction: Tensor | None, second_moment: Tensor | None, count: Tensor, last_total: Tensor,
    vectors: Tensor, plan: Plan, config: Configuration, function: Function, *, unit_queries: bool, unit_keys: bool,
    state_gradients: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous; padding is left as `torch.empty` made it, and the gradients
    of the states are empty without `state_gradients`. A gradient `dr` of the correction needs the correction; the
    solution needs its query.
    """
    launch = Launcher(q, plan, config, unit_queries, unit_keys, True)
    polynomial, pairs, rows = bool(function.coefficients), function.pairs, launch.blocks * launch.heads * config.block

    def launch_all() -> Gradients:
        unit, reciprocal, _ = launch.unit_keys(k, summed=False)
        covariances, _ = launch.moments(unit, vectors, second_moment, count, last=False)
        known = _Known(unit.matrix, covariances, vectors, count)
        dq, dk, d_gate = torch.empty_like(q), torch.empty_like(k), torch.empty_like(gate, dtype=torch.float32)
        kept = launch.empty(rows * pairs, launch.width, dtype=q.dtype)
        options = {"KEYS_ALIGNED": unit.aligned, "NORMALIZE": unit_queries, "EPS": NORM_EPSILON}
        keeping = options | {"CORRECTION": False, "KEEP": True}
        if polynomial:
            first, coefficients = dy, _on_device(function.coefficients, q.device)
            _run(launch, _polynomial_kernel, q, gate, coefficients, *known, q, q, kept, times=pairs, **keeping)
        else:
            first, arrived, coefficients = torch.empty_like(q), dy, gate
            if dr is not None:
                # The correction is Sigma y: its gradient reaches y by one more product.
                pushed = torch.empty_like(dr, dtype=torch.float32)
                product = Function((1.0,), 0)
                _apply(
                    launch, product, dr, gate, known, torch.empty_like(q), pushed, keys_aligned=unit.aligned,
                    normalize=False,
                )  # fmt: skip
                arrived = dy + pushed
            _run(
                launch, _solution_kernel, arrived, gate, *known, first, q, q, query, dq, kept, times=function.steps,
                **keeping,
            )  # fmt: skip
        x = first if dr is None else (dr - gate.float().unsqueeze(-1) * first).to(q.dtype)
        pushes, inside = torch.empty_like(kept), launch.empty(rows, launch.width)
        leans = torch.empty_like(vectors)
        _run(
            launch, _adjoint_kernel, x, gate, coefficients, *known, kept, pushes, inside, leans, q, dy, dq, d_gate,
            times=pairs, POLYNOMIAL=polynomial, CORRECTION=dr is not None, **options,
        )  # fmt: skip
        if dr is not None and correction is not None:
            d_gate -= (first.float() * correction).sum(-1)
        del covariances, known
        first_lean = launch.scan_vectors(leans, -d_total, reverse=True)
        spreads = launch.states()
        means = launch.empty(plan.chunks, launch.heads, launch.tiles, launch.size)
        first_spread = _scan_pairs(
            launch, q, pairs, kept, pushes, vectors, last_total, spreads, means, d_moment, count, state_gradients
        )
        _run(
            launch, _key_gradients_kernel, inside, unit.matrix, reciprocal, spreads, means, leans, vectors, last_total,
            count, dk, times=pairs, BK=config.part, S=launch.tiles, KEYS_ALIGNED=unit.aligned, NORMALIZE=unit_keys,
        )  # fmt: skip
        return Gradients(dq, dk, d_gate, first_spread / 2, -first_lean if state_gradients else launch.empty(0))

    variant = (
        launch.is_aligned(k), polynomial, dy.dtype, gate.dtype, query.dtype, dr is not None, d_moment is not None,
        state_gradients,
    )  # fmt: skip
    return launch.compiled(launch_all, "function backward", pairs, *variant)


def _scan_pairs(
    launch: Launcher, q: Tensor, pairs: int, kept: Tensor, pushes: Tensor, vectors: Tensor, last_total: Tensor,
    spreads: Tensor, means: Tensor, d_moment: Tensor | None, count: Tensor, last: bool,
) -> Tensor:  # fmt: skip
    """The sums of p z^T + z p^T behind each block, by a scan to which every pair is a token. Returns the first."""
    plan, config = launch.plan, launch.config
    if pairs > 1:
        count = count * pairs
        plan = plan._replace(begin=plan.begin * pairs, end=plan.end * pairs, length=plan.length * pairs)
        config = config._replace(block=config.block * pairs, chunk=config.chunk * pairs)
    scan = Launcher(q, plan, config, launch.unit_queries, launch.normalize_keys, True)
    scan.compile_only = launch.compile_only
    tiles = [scan.tiles_of(matrix, config.scan_group, config.tile) for matrix in (kept, pushes)]
    return scan._scan(
        kernels._scan_gradients_kernel, (*tiles, vectors, last_total), (spreads, means),
        None if d_moment is None else d_moment + d_moment.mT, count,
        last=last, ALIGNED=False, BULK=scan.bulk,
    )  # fmt: skip
