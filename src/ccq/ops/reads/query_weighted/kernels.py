"""The query-weighted read step in Triton.

Legend: N sequences, H heads, D key size (BD the next power of two), R landmarks (LR the next power of two, at least
16), BT rows a block. i reads, j is read, r is a landmark; b is the sharpness, z the landmarks.

Everything that is summed over tokens is a sum over the R landmarks or over the rows of a block, so nothing of the size
of q is written but the query and the gradients, and everything of R numbers a token that the backward pass needs again
is computed again. Each way takes four launches: `_sums_kernel` shares the keys of a block among the landmarks, w_j =
softmax(b z k_j), and sums w_jr k_j and w_jr; two scans add those up to the totals m_r and shares c_r before each block;
a last kernel reads. Forward k is read twice and q once; backward q, k and the gradient of y twice.

Centring. sum_r f_ir c_ir = 0 and softmax does not see what all landmarks have in common, so the same vector may be
taken from all keys of a block and from the means of all landmarks. It is the mean key behind the block: what is left is
rounded to the dtype of the input for the large products, and the rest is far larger where keys share a mean.

Forward, with m and the keys centred:

    score_ir = q_i . m_ir / c_ir,    p_i = softmax(log c_i + b score_i),    u_ir = score_ir - sum_r p_ir score_ir,
    f_ir = p_ir u_ir / c_ir,         r_i = sum_r f_ir m_ir

Backward, with x_i the gradient that reaches r_i and v_ir = x_i . m_ir, by the rules of softmax and quotient: the
gradients e_ir = v_ir / c_ir of p u, da_ir of q_i . m_ir, and dc_ir of c_ir. Then

    dq_i = sum_r da_ir m_ir,    dm_ir = da_ir q_i + f_ir x_i,    G_jr = sum over i >= j of dm_ir,
    dw_jr = G_jr . k_j + sum over i >= j of dc_ir,
    dk_j = sum_r w_jr G_jr + b sum_r y_jr z_r,    dz_r = b sum_j y_jr k_j

with y the gradient of softmax that dw gives. G and the sum of dc behind each block come from reverse scans.

Products of a pair of rows of D columns take the dtype of the input in bfloat16; those with R, and all in float16, whose
range is too small, take float32 numbers with the mantissa of tf32, in float16 rounded to it and, where keys are not
centred, all digits; float32 input takes IEEE products. All sums are float32; nothing is added atomically and no result
depends on the order in which programs run. Addresses are 64-bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query import kernels
from ccq.ops.query.kernels import _load_part, _store_part
from ccq.ops.query.padding import clear_gradients, fill_outputs
from ccq.ops.reads.kernels import BlockLaunch, locate, rounded, suffix_sums, through_norm, unit_rows

SMALLEST = tl.constexpr(2.0**-126)
"""Of the normal numbers. A landmark with a share below it has none."""


@triton.jit
def _load_state(x, place, R: tl.constexpr, D: tl.constexpr, LR: tl.constexpr, BD: tl.constexpr):
    """[LR, BD] float32 of a tensor [..., R, D] whose leading sizes are counted by `place`."""
    landmark, column = tl.arange(0, LR), tl.arange(0, BD)
    fits = (landmark < R)[:, None] & (column < D)
    where = place.to(tl.int64) * (R * D) + landmark[:, None] * D + column
    return tl.load(x + where, mask=fits, other=0.0).to(tl.float32)


@triton.jit
def _store_state(x, value, place, R: tl.constexpr, D: tl.constexpr, LR: tl.constexpr, BD: tl.constexpr):
    """The counterpart of `_load_state`."""
    landmark, column = tl.arange(0, LR), tl.arange(0, BD)
    fits = (landmark < R)[:, None] & (column < D)
    tl.store(x + place.to(tl.int64) * (R * D) + landmark[:, None] * D + column, value, mask=fits)


@triton.jit
def _token_part(vector, left, H: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, LR: tl.constexpr):
    """Where the R numbers of each row of a block lie in [B, T, H, R], and which of them there are."""
    row, landmark = tl.arange(0, BT), tl.arange(0, LR)
    where = vector * R + row[:, None] * (H * R) + landmark
    return where, (row < left)[:, None] & (landmark < R)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, CENTRED: tl.constexpr = True):
    """acc + a b. PRECISION "rounded": of numbers rounded to tf32; but of all their digits where keys are not CENTRED,
    because what they share cancels.
    """
    if PRECISION != "rounded":
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    elif CENTRED:
        acc = tl.dot(rounded(a), rounded(b), acc, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _shares(unit, z, left, SHARPNESS: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, LR: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """w [BT, LR]: how each key is shared among the landmarks; zero for rows that are not there."""
    landmark = tl.arange(0, LR)
    b_z = SHARPNESS * _dot(unit, tl.trans(z), None, PRECISION, False)
    b_z = tl.where(landmark < R, b_z, -float("inf"))
    b_w = tl.exp(b_z - tl.max(b_z, 1)[:, None])
    return tl.where((tl.arange(0, BT) < left)[:, None], b_w / tl.sum(b_w, 1)[:, None], 0.0)


@triton.jit
def _weights(score, share, SHARPNESS: tl.constexpr, R: tl.constexpr, LR: tl.constexpr):
    """p = softmax(log c + b score), next to nothing where there is no share, and u = score - sum p score."""
    landmark = tl.arange(0, LR)
    b_l = tl.where(landmark < R, tl.log(tl.maximum(share, SMALLEST)) + SHARPNESS * score, -float("inf"))
    b_p = tl.exp(b_l - tl.max(b_l, 1)[:, None])
    b_p = b_p / tl.sum(b_p, 1)[:, None]
    return b_p, score - tl.sum(b_p * score, 1)[:, None]


@triton.jit
def _causal(x, BT: tl.constexpr):
    """x_ij where i >= j, otherwise zero."""
    row = tl.arange(0, BT)
    return tl.where(row[:, None] >= row, x, 0.0)


@triton.jit
def _sums_kernel(
    k, z, totals, shares, begin, end, owner, block_start, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, R: tl.constexpr, LR: tl.constexpr, UNIT_KEYS: tl.constexpr, SHARPNESS: tl.constexpr,
    PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The sums of w k and of w over each block, [blocks, H, R, D] and [blocks, H, R]."""
    block, _, h, base, _, left = locate(begin, end, owner, block_start, H, BT)
    landmark = tl.arange(0, LR)
    b_k, _ = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), UNIT_KEYS, EPS)
    b_w = _shares(b_k, _load_state(z, h, R, D, LR, BD), left, SHARPNESS, R, BT, LR, PRECISION)
    place = block * H + h
    _store_state(totals, _dot(tl.trans(b_w), b_k, None, PRECISION, False), place, R, D, LR, BD)
    tl.store(shares + place * R + landmark, tl.sum(b_w, 0), mask=landmark < R)


@triton.jit
def _centre(unit, totals, shares, w, left, BT: tl.constexpr):
    """The mean key behind the block, and keys and totals without it."""
    b_n = tl.maximum(tl.sum(shares, 0) + tl.minimum(tl.maximum(left, 0), BT).to(tl.float32), 1.0)
    b_m = (tl.sum(totals, 0) + tl.sum(unit, 0)) / b_n
    there = (tl.arange(0, BT) < left)[:, None]
    return b_m, tl.where(there, unit - b_m, 0.0), totals - shares[:, None] * b_m


@triton.jit
def _read_kernel(
    q, k, z, gate, totals, shares, query, correction, begin, end, owner, block_start, H: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, LR: tl.constexpr,
    UNIT_QUERIES: tl.constexpr, KEEP: tl.constexpr, UNIT_KEYS: tl.constexpr, CORRECTION: tl.constexpr,
    LOW: tl.constexpr, SHARPNESS: tl.constexpr, PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """query = q - gate r. KEEP: r of the unit query, times the length of q, which it keeps."""
    block, _, h, base, _, left = locate(begin, end, owner, block_start, H, BT)
    row, landmark = tl.arange(0, BT), tl.arange(0, LR)
    place = block * H + h
    b_k, _ = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), UNIT_KEYS, EPS)
    b_w = _shares(b_k, _load_state(z, h, R, D, LR, BD), left, SHARPNESS, R, BT, LR, PRECISION)
    b_before = tl.load(shares + place * R + landmark, mask=landmark < R, other=0.0)
    b_n = b_before + tl.cumsum(b_w, 0)
    b_c = tl.where(b_n >= SMALLEST, b_n, 1.0)
    _, b_k, b_t = _centre(b_k, _load_state(totals, place, R, D, LR, BD), b_before, b_w, left, BT)
    b_kl = b_k.to(LOW)
    b_x = _load_part(q + base * D, 0, left, BT, BD, H, D)
    b_q, b_r = unit_rows(b_x, UNIT_QUERIES or KEEP, EPS)
    b_s = _dot(b_x.to(LOW), tl.trans(b_kl), None, PRECISION) * b_r[:, None]
    b_a = _dot(b_q, tl.trans(b_t), None, PRECISION)
    b_a = _dot(_causal(b_s, BT), b_w, b_a, PRECISION)
    b_p, b_u = _weights(b_a / b_c, b_n, SHARPNESS, R, LR)
    b_f = b_p * b_u / b_c
    b_s = _causal(_dot(b_f, tl.trans(b_w), None, PRECISION), BT)
    acc = _dot(b_f, b_t, None, PRECISION)
    acc = _dot(b_s.to(LOW), b_kl, acc, PRECISION)
    if KEEP:
        acc *= (1.0 / b_r)[:, None]
        b_q = b_x.to(tl.float32)
    if CORRECTION:
        _store_part(correction + base * D, acc, 0, left, BT, BD, H, D)
    b_g = tl.load(gate + base + row * H, mask=row < left, other=0.0).to(tl.float32)
    _store_part(query + base * D, b_q - b_g[:, None] * acc, 0, left, BT, BD, H, D)


@triton.jit
def _query_gradients_kernel(
    q, k, z, gate, dy, dr, totals, shares, origins, dq, d_gate, strength, da, dc, means, d_totals, d_shares, begin, end,
    owner, block_start, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, R: tl.constexpr,
    LR: tl.constexpr, UNIT_QUERIES: tl.constexpr, KEEP: tl.constexpr, UNIT_KEYS: tl.constexpr,
    HAS_DR: tl.constexpr, LOW: tl.constexpr, SHARPNESS: tl.constexpr, PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """dq and the gradient of the gate; for the keys f (times the length that KEEP gives it) as `strength`, da and dc,
    [B, T, H, R] each, the mean key behind each block [blocks, H, D], and the sums of dm and dc over each block, those
    of dc with keys that are centred at the origin of the sequence.
    """
    block, n, h, base, _, left = locate(begin, end, owner, block_start, H, BT)
    row, landmark, column = tl.arange(0, BT), tl.arange(0, LR), tl.arange(0, BD)
    place = block * H + h
    token, real = base + row * H, row < left
    b_k, _ = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), UNIT_KEYS, EPS)
    b_w = _shares(b_k, _load_state(z, h, R, D, LR, BD), left, SHARPNESS, R, BT, LR, PRECISION)
    b_before = tl.load(shares + place * R + landmark, mask=landmark < R, other=0.0)
    b_n = b_before + tl.cumsum(b_w, 0)
    b_c = tl.where(b_n >= SMALLEST, b_n, 1.0)
    b_m, b_k, b_t = _centre(b_k, _load_state(totals, place, R, D, LR, BD), b_before, b_w, left, BT)
    tl.store(means + place * D + column, b_m, mask=column < D)
    b_kl = b_k.to(LOW)
    b_x = _load_part(q + base * D, 0, left, BT, BD, H, D)
    b_q, b_r = unit_rows(b_x, UNIT_QUERIES or KEEP, EPS)
    b_s = _dot(b_x.to(LOW), tl.trans(b_kl), None, PRECISION) * b_r[:, None]
    b_a = _dot(b_q, tl.trans(b_t), None, PRECISION)
    b_a = _dot(_causal(b_s, BT), b_w, b_a, PRECISION)
    b_a = b_a / b_c
    b_p, b_u = _weights(b_a, b_n, SHARPNESS, R, LR)
    b_f = b_p * b_u / b_c

    # v of dy is what the gradient of the gate needs, too.
    b_dy = _load_part(dy + base * D, 0, left, BT, BD, H, D)
    b_s = _causal(_dot(b_dy.to(LOW), tl.trans(b_kl), None, PRECISION), BT)
    b_v = _dot(b_dy.to(tl.float32), tl.trans(b_t), None, PRECISION)
    b_v = _dot(b_s, b_w, b_v, PRECISION)
    b_l = tl.full((BT,), 1.0, tl.float32)
    if KEEP:
        b_l = 1.0 / b_r
    tl.store(d_gate + token, -b_l * tl.sum(b_f * b_v, 1), mask=real)
    b_g = tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
    b_v *= -b_g[:, None]
    b_dy = b_dy.to(tl.float32)
    b_x = -b_g[:, None] * b_dy
    if HAS_DR:
        b_dr = _load_part(dr + base * D, 0, left, BT, BD, H, D)
        b_s = _causal(_dot(b_dr.to(LOW), tl.trans(b_kl), None, PRECISION), BT)
        b_v += _dot(b_dr, tl.trans(b_t), None, PRECISION)
        b_v = _dot(b_s, b_w, b_v, PRECISION)
        b_x += b_dr
    b_dl = tl.sum(b_f * b_v, 1)
    b_v *= b_l[:, None]
    b_fl = b_f * b_l[:, None]

    # p u / c, then u, then softmax, then a / c. What has no share has none of its gradient.
    b_e = b_v / b_c
    b_du = b_e * b_p
    b_ds = -tl.sum(b_du, 1)[:, None]
    b_dp = b_e * b_u + b_a * b_ds
    b_dl_r = b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
    b_da = (b_du + b_p * b_ds + SHARPNESS * b_dl_r) / b_c
    b_dc = tl.where(b_n >= SMALLEST, b_dl_r / b_c - b_v * b_f / b_c - b_da * b_a, 0.0)
    where, fits = _token_part(base, left, H, R, BT, LR)
    tl.store(strength + where, b_fl, mask=fits)
    tl.store(da + where, b_da, mask=fits)
    tl.store(dc + where, b_dc, mask=fits)
    b_dm = _dot(tl.trans(b_da), b_q, None, PRECISION)
    b_dm = _dot(tl.trans(b_fl), b_x, b_dm, PRECISION)
    _store_state(d_totals, b_dm, place, R, D, LR, BD)
    # What was centred moves with the shares: all blocks of a sequence add theirs up with keys that are centred alike.
    b_o = tl.load(origins + (n * H + h) * D + column, mask=column < D, other=0.0)
    b_dn = tl.sum(b_dc, 0) - tl.sum(b_dm * (b_m - b_o), 1)
    tl.store(d_shares + place * R + landmark, b_dn, mask=landmark < R)

    b_s = _causal(_dot(b_da, tl.trans(b_w), None, PRECISION), BT)
    acc = _dot(b_da, b_t, None, PRECISION)
    acc = _dot(b_s.to(LOW), b_kl, acc, PRECISION)
    if KEEP:
        acc = through_norm(acc, b_q, b_r, True) + b_dl[:, None] * b_q + b_dy
    else:
        acc = through_norm(acc + b_dy, b_q, b_r, UNIT_QUERIES)
    _store_part(dq + base * D, acc, 0, left, BT, BD, H, D)


@triton.jit
def _key_gradients_kernel(
    q, k, z, gate, dy, dr, origins, strength, da, dc, means, d_totals, d_shares, dk, dz, begin, end, owner, block_start,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, LR: tl.constexpr,
    UNIT_QUERIES: tl.constexpr, KEEP: tl.constexpr, UNIT_KEYS: tl.constexpr, HAS_DR: tl.constexpr,
    LOW: tl.constexpr, SHARPNESS: tl.constexpr, PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """dk, and of each block the gradient of the landmarks [blocks, H, R, D]. `d_totals` and `d_shares` now hold the
    sums behind each block.
    """
    block, n, h, base, _, left = locate(begin, end, owner, block_start, H, BT)
    row, landmark, column = tl.arange(0, BT), tl.arange(0, LR), tl.arange(0, BD)
    place = block * H + h
    token, real = base + row * H, row < left
    b_k, b_r = unit_rows(_load_part(k + base * D, 0, left, BT, BD, H, D), UNIT_KEYS, EPS)
    b_z = _load_state(z, h, R, D, LR, BD)
    b_w = _shares(b_k, b_z, left, SHARPNESS, R, BT, LR, PRECISION)
    b_m = tl.load(means + place * D + column, mask=column < D, other=0.0)
    b_kc = tl.where(real[:, None], b_k - b_m, 0.0)
    b_kl = b_kc.to(LOW)
    b_q, _ = unit_rows(_load_part(q + base * D, 0, left, BT, BD, H, D), UNIT_QUERIES or KEEP, EPS)
    b_g = tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
    b_x = -b_g[:, None] * _load_part(dy + base * D, 0, left, BT, BD, H, D).to(tl.float32)
    if HAS_DR:
        b_x += _load_part(dr + base * D, 0, left, BT, BD, H, D)
    b_ql, b_xl = b_q.to(LOW), b_x.to(LOW)
    where, fits = _token_part(base, left, H, R, BT, LR)
    b_f = tl.load(strength + where, mask=fits, other=0.0)
    b_da = tl.load(da + where, mask=fits, other=0.0)
    b_dc = tl.load(dc + where, mask=fits, other=0.0)
    b_dm = _load_state(d_totals, place, R, D, LR, BD)
    b_dn = tl.load(d_shares + place * R + landmark, mask=landmark < R, other=0.0)
    b_o = tl.load(origins + (n * H + h) * D + column, mask=column < D, other=0.0)
    b_dn += tl.sum(b_dm * (b_m - b_o), 1)

    b_dw = suffix_sums(b_dc, b_dn)
    b_dw = _dot(b_kc, tl.trans(b_dm), b_dw, PRECISION)
    acc = _dot(b_w, b_dm, None, PRECISION)
    # Rows of these are readers, columns keys.
    b_s = _causal(_dot(b_ql, tl.trans(b_kl), None, PRECISION), BT)
    b_dw = _dot(tl.trans(b_s), b_da, b_dw, PRECISION)
    b_s = _causal(_dot(b_xl, tl.trans(b_kl), None, PRECISION), BT)
    b_dw = _dot(tl.trans(b_s), b_f, b_dw, PRECISION)
    b_s = _causal(_dot(b_da, tl.trans(b_w), None, PRECISION), BT)
    acc = _dot(tl.trans(b_s.to(LOW)), b_ql, acc, PRECISION)
    b_s = _causal(_dot(b_f, tl.trans(b_w), None, PRECISION), BT)
    acc = _dot(tl.trans(b_s.to(LOW)), b_xl, acc, PRECISION)
    b_y = SHARPNESS * b_w * (b_dw - tl.sum(b_w * b_dw, 1)[:, None])
    acc = _dot(b_y, b_z, acc, PRECISION)
    _store_state(dz, _dot(tl.trans(b_y), b_k, None, PRECISION, False), place, R, D, LR, BD)
    _store_part(dk + base * D, through_norm(acc, b_k, b_r, UNIT_KEYS), 0, left, BT, BD, H, D)


def _constants(q: Tensor, landmarks: Tensor) -> dict[str, Any]:
    count = landmarks.shape[1]
    return {
        "R": count,
        "LR": max(16, triton.next_power_of_2(count)),
        "SHARPNESS": math.sqrt(q.shape[-1]),
        "PRECISION": {torch.float32: "ieee", torch.float16: "rounded"}.get(q.dtype, "tf32"),
    }


def _reads(unit_queries: bool, unit_keys: bool, q: Tensor) -> dict[str, Any]:
    low = tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float32
    keep = unit_keys and not unit_queries
    return {"UNIT_QUERIES": unit_queries, "KEEP": keep, "UNIT_KEYS": unit_keys, "LOW": low}


def block_size(q: Tensor) -> int:
    """BT: that of the read step's own kernels where the operands fit into shared memory."""
    block: int = kernels.configuration(q.dtype, int(q.shape[-1]), q.device).block
    return min(block, 32) if q.dtype == torch.float16 and q.shape[-1] > 64 else block


def _launch(q: Tensor, mask: Tensor | None, boundaries: Sequence[int] | None) -> BlockLaunch:
    launch = BlockLaunch(q, mask, boundaries, block_size(q))
    # Fewer spill the partial sums of products without matrix units, and what is between several large products.
    launch.warps = 8 if q.dtype == torch.float32 or q.shape[-1] > 64 else 4
    return launch


class Forward(NamedTuple):
    query: Tensor
    correction: Tensor | None
    totals: Tensor
    shares: Tensor
    totals_before: Tensor
    """[blocks, H, R, D] float32, the totals before each block."""
    shares_before: Tensor
    """[blocks, H, R]"""


def forward(
    q: Tensor, k: Tensor, gate: Tensor, landmarks: Tensor, totals: Tensor, shares: Tensor, mask: Tensor | None,
    boundaries: Sequence[int] | None, *, unit_queries: bool, unit_keys: bool, return_correction: bool, wide: bool,
) -> Forward:  # fmt: skip
    """The read step, all inputs contiguous; the query in float32 with `wide`."""
    launch = _launch(k, mask, boundaries)
    constants = _constants(q, landmarks)
    totals_before, shares_before = launch.empty(*landmarks.shape[1:]), launch.empty(landmarks.shape[1])
    launch.run(_sums_kernel, k, landmarks, totals_before, shares_before, UNIT_KEYS=unit_keys, **constants)
    last_totals = launch.scan(totals_before, totals, reverse=False)
    last_shares = launch.scan(shares_before, shares, reverse=False)
    query = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
    correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
    # A pointer that a kernel does not use must still be one.
    launch.run(
        _read_kernel, q, k, landmarks, gate, totals_before, shares_before, query,
        query if correction is None else correction, CORRECTION=return_correction,
        **_reads(unit_queries, unit_keys, q), **constants,
    )  # fmt: skip
    if mask is not None:
        fill_outputs(mask, q, query, correction, unit_queries)
    return Forward(query, correction, last_totals, last_shares, totals_before, shares_before)


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    gate: Tensor
    landmarks: Tensor
    totals: Tensor
    shares: Tensor


def _origins(launch: BlockLaunch, totals: Tensor, shares: Tensor) -> Tensor:
    """[N, H, D]: the mean of the keys before the last block of each sequence, from the totals and shares before each
    block.
    """
    if not launch.blocks:
        return totals.new_zeros(len(launch.plan.begin), launch.heads, launch.size)
    # That of a sequence without a block may be any: what is added for it is taken off again.
    last = (launch.plan.block_start[1:] - 1).clamp(min=0)
    return totals[last].sum(-2) / shares[last].sum(-1, keepdim=True).clamp(min=1)


def _times(spread: Tensor, origins: Tensor) -> Tensor:
    """spread_r . origin, [N, H, R]"""
    return (spread * origins.unsqueeze(-2)).sum(-1)


def backward(
    q: Tensor, k: Tensor, gate: Tensor, landmarks: Tensor, totals_before: Tensor, shares_before: Tensor, dy: Tensor,
    dr: Tensor | None, d_totals: Tensor, d_shares: Tensor, mask: Tensor | None, boundaries: Sequence[int] | None, *,
    unit_queries: bool, unit_keys: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous; those of gate, landmarks and state float32."""
    launch = _launch(k, mask, boundaries)
    count, size = landmarks.shape[1:]
    constants = _constants(q, landmarks) | _reads(unit_queries, unit_keys, q) | {"HAS_DR": dr is not None}
    dq, dk, d_gate = torch.empty_like(q), torch.empty_like(k), torch.empty_like(gate, dtype=torch.float32)
    strength, da, dc = (gate.new_empty((*gate.shape, count), dtype=torch.float32) for _ in range(3))
    means, spread, lean = launch.empty(size), launch.empty(count, size), launch.empty(count)
    d_landmarks = launch.empty(count, size)
    origins = _origins(launch, totals_before, shares_before)
    given = (q, k, landmarks, gate, dy, dy if dr is None else dr)
    kept = (strength, da, dc, means, spread, lean)
    launch.run(_query_gradients_kernel, *given, totals_before, shares_before, origins, dq, d_gate, *kept, **constants)
    first_spread = launch.scan(spread, d_totals, reverse=True)
    first_lean = launch.scan(lean, d_shares + _times(d_totals, origins), reverse=True) - _times(first_spread, origins)
    launch.run(_key_gradients_kernel, *given, origins, *kept, dk, d_landmarks, **constants)
    if mask is not None:
        clear_gradients(mask, dq, dk, d_gate)
    return Gradients(dq, dk, d_gate, d_landmarks.sum(0), first_spread, first_lean)
