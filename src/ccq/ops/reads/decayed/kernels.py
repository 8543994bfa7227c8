"""Decayed statistics in Triton: their sums before each chunk, the read step with them, and its gradients.

Legend: B rows, N sequences, T tokens, H heads, D key size per head (BD the next power of two), C tokens a chunk, P
chunks in all. i reads, j is read; alpha_t = e^{l_t}.

With w_ij = e^{g_i - g_j}, g the running sum of the log decays l, the statistics at token i are sums over j <= i of w_ij
times k_j k_j^T, k_j and 1; M, m, n are those before a chunk. Token i has the weight n_i, scores s_ij = q_i . k_j and
the mean score a_i = q_i . m_i / n_i, and

    r_i = Sigma_i q_i = sum over j of w_ij (s_ij - a_i) k_j / n_i

Forward, three launches. `_chunk_sums_kernel`: the sums of each chunk, all chunks at once. `_scan_sums_kernel`: a row of
the state a program, the sums before 16 chunks at once as a product with the decays between them; it writes M / n - (m /
n)(m / n)^T, centred before it is rounded, as in `ccq.ops.query.kernels`. `_read_kernel`: every chunk alone.

Backward, three launches. With p_i the gradient that reaches r_i, z_ij = p_i . k_j, c_i its mean score, and the bilinear
form f_i = p_i . Sigma_i q_i, which is the weighted covariance of the scores s_ij and z_ij:

    df_i / dk_j  = w_ij / n_i (p_i (s_ij - a_i) + q_i (z_ij - c_i))
    df_i / dw_ij = 1 / n_i ((s_ij - a_i) (z_ij - c_i) - f_i)

Summed over the readers of token j these are, with the readers behind its chunk in W = sum of w (p q^T + q p^T) / n, v =
sum of w (a p + c q) / n and b = sum of w (a c - f) / n, which decay from reader to read as the statistics do from read
to reader,

    dk_j = W k_j - v,   e_j = k_j . W k_j / 2 - v . k_j + b

where e_j is the gradient in the logarithm of all weights of token j; W / 2, -v and b are the gradients in M, m and n.
Around the mean mu at the end of the chunk, so that nothing cancels after W is rounded, with k' = k_j - mu:

    dk_j = W k' + (W mu - v),   e_j = k' . W k' / 2 + k' . (W mu - v) + (mu . W mu / 2 - mu . v + b)

The log decay l_t multiplies the weights of all j < t for all readers i >= t, so its gradient is the sum of E_ij = w_ij
df_i / dw_ij over those. (One reader's E_ij add up to zero, so the sum of -e_j over all tokens from t on would do, but
would leave the rounding errors of all of them.) Of the four parts, by whether i and j are in the chunk of t, that with
neither is

    X = e^{g_C} (<M, W> / 2 - m . v + n b)

and that with j before the chunk adds up the shares S_i of the readers i >= t,

    S_i = e^{g_i} n / n_i (p_i . Sigma_0 q_i + (m . q_i / n - a_i) (m . p_i / n - c_i) - f_i)

that with i behind it adds up e_j over the tokens j < t of the chunk, and the last is summed as it stands.

`_query_gradients_kernel`: Sigma p by the routine of the forward pass, dq, the gradient of the gate, S, and each chunk's
share of W, v and b. `_scan_gradients_kernel`: the counterpart of the forward scan, and X. `_key_gradients_kernel`: dk
and dl.

The sum g of a chunk is kept in two float32 numbers, the second the rounding error of the first: the difference of two
sums is then as exact as a sum over the tokens between, and no exponent is above 0. Keys meet their decay to the end of
the chunk as sqrt(w) k on both sides, so that sums of products stay symmetric, and the covariance that of keys.

Without means, as mesa uses this, nothing is centred, and q and p are solutions of systems with M: nearly orthogonal to
what the keys share. The forms p . M q and k . W k are then far smaller than their terms, and an error in an entry of M
or W enters multiplied by the two components that q and p lack; that of q or of p itself by one of them. So M and W are
kept in float32 and not rounded for these products (`form_dot`), and for float32 input they are summed in float64.

Passes over tensors of the size of q, at D = C = 64 and in units of q in bfloat16: forward, k and its sums (1 + 2, in
float32), the scan (2 + 1), q, k, states and query (4), so 10; backward q, k, the gradient, states, dq and sums (7),
the scan (2 + 1 + 1), the same inputs, W and dk (5), so 16. The states before the chunks, D x D / C numbers a token and
head, are kept for the backward pass, which making them anew would lengthen by 6; besides a few numbers a token.
Nothing is added atomically and no result depends on the order in which programs run. Addresses are 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query import kernels
from ccq.ops.query.kernels import _load_part, _sequence, _store_block, _store_part
from ccq.ops.query.padding import clear_gradients, fill_outputs
from ccq.ops.query.reference import NORM_EPSILON
from ccq.ops.reads.kernels import locate, suffix_sums, through_norm, unit_rows

PART = 32
"""Columns that float32 units multiply at once: registers hold no more."""
STEP = 16
"""Chunks that a scan takes at once: the least that `tl.dot` multiplies."""


class Configuration(NamedTuple):
    """Sizes and launch parameters for one dtype and key size."""

    chunk: int
    """C"""
    warps: int
    """Of the kernels that take a chunk each."""
    scan_warps: int


def configuration(dtype: torch.dtype, size: int) -> Configuration:
    """The configuration for heads of `size` columns. Nothing is tuned at run time."""
    if dtype == torch.float32:
        return Configuration(chunk=32, warps=8, scan_warps=4)
    return Configuration(chunk=64, warps=4 if size <= 64 else 8, scan_warps=2)


@triton.jit
def _unit_keys(k, base, left, C: tl.constexpr, BD: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
               NORMALIZE: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """The keys of a chunk as products see them: normalised where asked for, and rounded to the dtype of k."""
    b_k, b_r = unit_rows(_load_part(k + base * D, 0, left, C, BD, H, D), NORMALIZE, EPS)
    return b_k.to(k.dtype.element_ty), b_r


@triton.jit
def _scores(
    x, y, b_x, b_y, left, C: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x_i . y_j [C, C] of b_x and b_y; float32 units take the columns in parts, of the rows at x and y."""
    if PRECISION == "ieee":
        acc = tl.zeros((C, C), tl.float32)
        for d in range(0, D, BK):
            b_xd, b_yd = _load_part(x, d, left, C, BK, H, D), _load_part(y, d, left, C, BK, H, D)
            acc = tl.dot(b_xd, tl.trans(b_yd), acc, input_precision=PRECISION)
        return acc
    else:
        return tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)


@triton.jit
def _times_state(
    x, b_x, b_r, m, scale, state, left, C: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, CENTRED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """b_x times the [BD, BD] at `state`. float32 units take b_x in parts: the rows at x times b_r, and (CENTRED) minus
    the vector at m times `scale`.
    """
    column = tl.arange(0, BD)
    if PRECISION == "ieee":
        acc = tl.zeros((C, BD), tl.float32)
        for d in range(0, D, BK):
            part = d + tl.arange(0, BK)
            b_xd = _load_part(x, d, left, C, BK, H, D) * b_r[:, None]
            if CENTRED:
                b_xd -= tl.load(m + part, mask=part < D, other=0.0) * scale
            b_state = tl.load(state + (part[:, None] * BD + column))
            acc = tl.dot(b_xd, b_state, acc, input_precision=PRECISION)
        return acc
    else:
        b_state = tl.load(state + (column[:, None] * BD + column))
        return tl.dot(b_x.to(b_state.dtype), b_state, input_precision=PRECISION)


@triton.jit
def _decay_between(b_high, b_low, row, left):
    """w_ij [reader, read], zero for j > i and past the last token."""
    b_g = tl.minimum((b_high[:, None] - b_high) + (b_low[:, None] - b_low), 0.0)
    return tl.where((row[:, None] >= row) & (row < left)[:, None], tl.exp(b_g), 0.0)


@triton.jit
def double_dot(a, b):
    """a b, summed in float64."""
    return tl.dot(a.to(tl.float64), b.to(tl.float64), input_precision="ieee").to(tl.float32)


@triton.jit
def _dot_of_sums(a, b, CENTRED: tl.constexpr, PRECISION: tl.constexpr):
    """a b, a part of M or W: without means float32 input needs every digit that float32 can hold of them."""
    if CENTRED or PRECISION != "ieee":
        return tl.dot(a, b, input_precision=PRECISION)
    else:
        return double_dot(a, b)


@triton.jit
def form_dot(a, b, PRECISION: tl.constexpr):
    """a b for a sum over tokens b in float32, which is not rounded to the dtype of a: for half precision an entry is
    two numbers of that dtype, scaled to its range.
    """
    if PRECISION == "ieee":
        return double_dot(a, b)
    else:
        b_largest = tl.max(tl.max(tl.abs(b), 1), 0)
        # 1e-30: where the reciprocal is still finite.
        b_largest = tl.where(b_largest > 1e-30, b_largest, 1.0)
        b *= 1.0 / b_largest
        b_high = b.to(a.dtype)
        acc = tl.dot(a, (b - b_high.to(tl.float32)).to(a.dtype), input_precision=PRECISION)
        return tl.dot(a, b_high, acc, input_precision=PRECISION) * b_largest


@triton.jit
def _chunk_sums_kernel(
    k,
    log_decay,
    high,
    low,
    moments,
    totals,
    weights,
    log_fades,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    C: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CENTRED: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):
    """Of one chunk: the sum of w k k^T [P, H, BD, BD], and (CENTRED) of w k [P, H, BD] and w [P, H], w decaying to its
    end; the sum of its log decays [P, H]; and the running sum of those in two parts, high and low [B, T, H].
    """
    chunk, _, h, base, _, left = locate(begin, end, owner, block_start, H, C)
    if left <= 0:
        return
    row = tl.arange(0, C)
    real = row < left
    b_l = tl.load(log_decay + base + row * H, mask=real, other=0.0).to(tl.float64)
    b_g = tl.cumsum(b_l, 0)
    b_all = tl.sum(b_l, 0)
    b_high = b_g.to(tl.float32)
    tl.store(high + base + row * H, b_high, mask=real)
    tl.store(low + base + row * H, (b_g - b_high.to(tl.float64)).to(tl.float32), mask=real)
    where = chunk * H + h
    tl.store(log_fades + where, b_all.to(tl.float32))
    b_k, _ = _unit_keys(k, base, left, C, BD, H, D, NORMALIZE, EPS)
    b_root = tl.exp(0.5 * (b_all - b_g).to(tl.float32))
    b_k = (b_k.to(tl.float32) * b_root[:, None]).to(b_k.dtype)
    _store_block(moments + where * BD * BD, _dot_of_sums(tl.trans(b_k), b_k, CENTRED, PRECISION), BD, BD)
    if CENTRED:
        # Of the rounded keys: it must be the mean of what the products see.
        tl.store(totals + where * BD + tl.arange(0, BD), tl.sum(b_k.to(tl.float32) * b_root[:, None], 0))
        tl.store(weights + where, tl.sum(tl.where(real, b_root * b_root, 0.0), 0))


@triton.jit
def _decay_between_chunks(log_fades, start, place, inside, h, STEP: tl.constexpr, H: tl.constexpr):
    """For consecutive chunks, in the order of a scan: the decays from each chunk to before another [STEP, STEP] and
    from all before to before each [STEP], and those to behind all of them, from each [STEP] and from all before [1].
    """
    b_l = tl.load(log_fades + (start + place) * H + h, mask=inside, other=0.0).to(tl.float64)
    b_g = tl.cumsum(b_l, 0)
    b_all = tl.sum(b_l, 0)
    order = tl.arange(0, STEP)
    b_before = b_g - b_l
    b_between = tl.exp(tl.minimum((b_before[:, None] - b_g).to(tl.float32), 0.0))
    b_between = tl.where(order[:, None] > order, b_between, 0.0)
    b_behind = tl.exp((b_all - b_g).to(tl.float32))
    return b_between, tl.exp(b_before.to(tl.float32)), b_behind, tl.exp(b_all.to(tl.float32))


@triton.jit
def _scan_sums_kernel(
    moments,
    totals,
    weights,
    log_fades,
    initial_moment,
    initial_total,
    initial_weight,
    states,
    totals_before,
    weights_before,
    final_moment,
    final_total,
    final_weight,
    begin,
    end,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    CENTRED: tl.constexpr,
    INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row of M along one sequence: the covariance (CENTRED) or M before each chunk [P, H, BD, BD], and M behind the
    last. The program of row 0 writes the totals [P, H, BD] and the weights [P, H], too. Rows past D are zero.
    """
    r = tl.program_id(0) % BD
    h = (tl.program_id(0) // BD) % H
    n = tl.program_id(0).to(tl.int64) // (BD * H)
    _, length = _sequence(begin, end, n)
    start = tl.load(block_start + n)
    chunks = tl.cdiv(length, C)
    order, column = tl.arange(0, STEP), tl.arange(0, BD)
    head = n * H + h
    b_moment = tl.zeros((BD,), tl.float32)
    b_total = b_moment
    b_weight = 0.0
    if INITIAL:
        b_moment = tl.load(initial_moment + (head * D + r) * D + column, mask=(column < D) & (r < D), other=0.0)
        if CENTRED:
            b_total = tl.load(initial_total + head * D + column, mask=column < D, other=0.0)
            b_weight = tl.load(initial_weight + head)
    for done in range(0, chunks, STEP):
        place = done + order
        inside = place < chunks
        b_between, b_before, b_behind, b_all = _decay_between_chunks(log_fades, start, place, inside, h, STEP, H)
        where = (start + place) * H + h
        square = (where[:, None] * BD + r) * BD + column
        vector = where[:, None] * BD + column
        b_x = tl.load(moments + square, mask=inside[:, None], other=0.0)
        b_state = _dot_of_sums(b_between, b_x, CENTRED, PRECISION) + b_before[:, None] * b_moment
        b_moment = b_all * b_moment + tl.sum(b_behind[:, None] * b_x, 0)
        if CENTRED:
            b_x = tl.load(totals + vector, mask=inside[:, None], other=0.0)
            b_m = tl.dot(b_between, b_x, input_precision=PRECISION) + b_before[:, None] * b_total
            b_total = b_all * b_total + tl.sum(b_behind[:, None] * b_x, 0)
            b_y = tl.load(weights + where, mask=inside, other=0.0)
            b_n = tl.sum(b_between * b_y, 1) + b_before * b_weight
            b_weight = b_all * b_weight + tl.sum(b_behind * b_y, 0)
            b_i = 1.0 / tl.where(b_n > 0, b_n, 1.0)
            b_mr = tl.sum(tl.where(column == r, b_m, 0.0), 1) * b_i
            b_state = (b_state - b_mr[:, None] * b_m) * b_i[:, None]
            if r == 0:
                tl.store(totals_before + vector, b_m, mask=inside[:, None])
                tl.store(weights_before + where, b_n, mask=inside)
        tl.store(states + square, b_state.to(states.dtype.element_ty), mask=inside[:, None])
    tl.store(final_moment + (head * D + r) * D + column, b_moment, mask=(column < D) & (r < D))
    if CENTRED:  # noqa: SIM102 - known when compiled, the other is not
        if r == 0:
            tl.store(final_total + head * D + column, b_total, mask=column < D)
            tl.store(final_weight + head, b_weight)


@triton.jit
def _covariance_times(
    x, k, q, b_x, b_k, b_l, b_w, b_start, m, before, state, left, C: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sigma_i x_i [C, BD] for the rows of a chunk, their mean scores and their weights. b_x and b_k come from the rows
    at x and k, b_l are the reciprocal lengths of the latter; b_w are the decays between the rows and b_start those from
    before them, where m points to the total, the weight is `before` and the covariance is at `state`. With FORM also
    q_i . Sigma_0 x_i for the rows at q and the covariance there.
    """
    b_n = tl.where(tl.arange(0, C) < left, b_start * before + tl.sum(b_w, 1), 1.0)
    b_s = _scores(x, k, b_x, b_k, left, C, BD, BK, H, D, PRECISION)
    if PRECISION == "ieee":
        b_s *= b_l
    b_m = tl.load(m + tl.arange(0, BD))
    b_c = tl.sum(b_x.to(tl.float32) * b_m, 1)
    b_a = (b_start * b_c + tl.sum(b_w * b_s, 1)) / b_n
    # One accumulator: brought to the scale of the sums once the covariance, which is a mean, is in it.
    acc = _times_state(x, b_x, tl.full((C,), 1.0, tl.float32), m, 1.0, state, left, C, BD, BK, H, D, False, PRECISION)
    b_f = b_c
    if FORM:
        b_f = tl.sum(_load_part(q, 0, left, C, BD, H, D).to(tl.float32) * acc, 1)
    acc *= (b_start * before)[:, None]
    acc += (b_start * (b_c / tl.where(before > 0, before, 1.0) - b_a))[:, None] * b_m
    acc = tl.dot((b_w * (b_s - b_a[:, None])).to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    return acc / b_n[:, None], b_a, b_n, b_f


@triton.jit
def _read_kernel(
    q,
    k,
    gate,
    high,
    low,
    states,
    totals,
    weights,
    query,
    correction,
    mean,
    seen,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    CORRECTION: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):
    """query = q - gate Sigma q for one chunk, Sigma q itself with CORRECTION, mean scores and weights [B, T, H]."""
    chunk, _, h, base, _, left = locate(begin, end, owner, block_start, H, C)
    if left <= 0:
        return
    row = tl.arange(0, C)
    token, real = base + row * H, row < left
    b_high, b_low = tl.load(high + token, mask=real, other=0.0), tl.load(low + token, mask=real, other=0.0)
    b_w = _decay_between(b_high, b_low, row, left)
    b_k, b_l = _unit_keys(k, base, left, C, BD, H, D, UNIT_KEYS, EPS)
    b_q = _load_part(q + base * D, 0, left, C, BD, H, D)
    where = chunk * H + h
    b_r, b_a, b_n, _ = _covariance_times(
        q + base * D, k + base * D, q, b_q, b_k, b_l, b_w, tl.exp(b_high + b_low), totals + where * BD,
        tl.load(weights + where), states + where * BD * BD, left, C, BD, BK, H, D, False, PRECISION,
    )  # fmt: skip
    # Queries enter products as they were given; their reciprocal lengths multiply rows.
    b_y, b_l = unit_rows(b_q, UNIT_QUERIES, EPS)
    b_r *= b_l[:, None]
    tl.store(mean + token, b_a * b_l, mask=real)
    tl.store(seen + token, b_n, mask=real)
    if CORRECTION:
        _store_part(correction + base * D, b_r, 0, left, C, BD, H, D)
    b_g = tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
    _store_part(query + base * D, b_y - b_g[:, None] * b_r, 0, left, C, BD, H, D)


@triton.jit
def _total_behind(
    totals, weights, final_total, final_weight, where, n, h, left, C: tl.constexpr, BD: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Where the total at the end of a chunk lies, and one over the weight there: before the next chunk, or at the end
    of the sequence.
    """
    m, weight = totals + (where + H) * BD, weights + where + H
    if left <= C:
        m, weight = final_total + (n * H + h) * D, final_weight + n * H + h
    return m, 1.0 / tl.load(weight)


@triton.jit
def _query_gradients_kernel(
    q,
    k,
    x,
    dy,
    gate,
    high,
    low,
    states,
    totals,
    weights,
    final_total,
    final_weight,
    mean,
    seen,
    dq,
    d_gate,
    mean_x,
    form,
    share,
    spreads,
    leans,
    rests,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):
    """dq of one chunk, the gradient of lambda where x is dy, the mean scores of x, q . Sigma x and S [B, T, H], and
    the chunk's share of W [P, H, BD, BD], v [P, H, BD] and b [P, H], decayed to before the chunk.

    The gradient that reaches r is p = -gate x with SCALED, and x without.
    """
    chunk, n, h, base, _, left = locate(begin, end, owner, block_start, H, C)
    if left <= 0:
        return
    row = tl.arange(0, C)
    token, real = base + row * H, row < left
    b_high, b_low = tl.load(high + token, mask=real, other=0.0), tl.load(low + token, mask=real, other=0.0)
    b_start = tl.exp(b_high + b_low)
    b_w = _decay_between(b_high, b_low, row, left)
    b_k, b_l = _unit_keys(k, base, left, C, BD, H, D, UNIT_KEYS, EPS)
    b_x = _load_part(x + base * D, 0, left, C, BD, H, D)
    where = chunk * H + h
    m, before = totals + where * BD, tl.load(weights + where)
    b_u, b_c, b_n, b_s = _covariance_times(
        x + base * D, k + base * D, q + base * D, b_x, b_k, b_l, b_w, b_start, m, before, states + where * BD * BD,
        left, C, BD, BK, H, D, True, PRECISION,
    )  # fmt: skip
    b_q, b_l = unit_rows(_load_part(q + base * D, 0, left, C, BD, H, D), UNIT_QUERIES, EPS)
    b_f = tl.sum(b_q * b_u, 1)
    tl.store(mean_x + token, b_c, mask=real)
    tl.store(form + token, b_f, mask=real)
    b_p = tl.where(real, 1.0, 0.0)
    if SCALED:
        b_p = -tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
        tl.store(d_gate + token, -b_f, mask=real)
    b_dq = _load_part(dy + base * D, 0, left, C, BD, H, D).to(tl.float32) + b_p[:, None] * b_u
    _store_part(dq + base * D, through_norm(b_dq, b_q, b_l, UNIT_QUERIES), 0, left, C, BD, H, D)

    b_a = tl.load(mean + token, mask=real, other=0.0)
    b_m = tl.load(m + tl.arange(0, BD)) / tl.where(before > 0, before, 1.0)
    b_p *= b_start / b_n
    b_s = b_s * b_l + (tl.sum(b_q * b_m, 1) - b_a) * (tl.sum(b_x * b_m, 1) - b_c) - b_f
    tl.store(share + token, b_p * before * b_s, mask=real)
    # Rounding q moves all scores of a row alike where keys share a mean, so that the mean score must go with it.
    b_q *= b_p[:, None]
    b_r = b_q.to(b_x.dtype)
    m, scale = _total_behind(totals, weights, final_total, final_weight, where, n, h, left, C, BD, H, D)
    column = tl.arange(0, BD)
    b_m = tl.load(m + column, mask=column < D, other=0.0) * scale
    b_a = b_p * b_a + tl.sum((b_r.to(tl.float32) - b_q) * b_m, 1)
    tl.store(leans + where * BD + column, tl.sum(b_a[:, None] * b_x + b_c[:, None] * b_r.to(tl.float32), 0))
    tl.store(rests + where, tl.sum(b_a * b_c - b_p * b_f, 0))
    b_spread = tl.dot(tl.trans(b_r), b_x, input_precision=PRECISION)
    b_spread = tl.dot(tl.trans(b_x), b_r, b_spread, input_precision=PRECISION)
    _store_block(spreads + where * BD * BD, b_spread, BD, BD)


@triton.jit
def _scan_gradients_kernel(
    spreads,
    leans,
    rests,
    log_fades,
    states,
    totals,
    weights,
    final_total,
    final_weight,
    initial_spread,
    initial_lean,
    initial_rest,
    spreads_behind,
    pulls,
    levels,
    scales,
    final_spread,
    final_lean,
    final_rest,
    begin,
    end,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    CENTRED: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row of W along one sequence, from its end to its beginning; the counterpart of `_scan_sums_kernel`.

    Behind each chunk: W [P, H, BD, BD], and with mu the mean there the row's entry of W mu - v, and its share of mu . W
    mu / 2 - mu . v + b [P, H, BD]; of X its share, [P, H, BD]. Not CENTRED: W and X, without means. FINAL: W, v and b
    before the sequence.
    """
    r = tl.program_id(0) % BD
    h = (tl.program_id(0) // BD) % H
    n = tl.program_id(0).to(tl.int64) // (BD * H)
    _, length = _sequence(begin, end, n)
    start = tl.load(block_start + n)
    chunks = tl.cdiv(length, C)
    order, column = tl.arange(0, STEP), tl.arange(0, BD)
    head = n * H + h
    b_spread = tl.zeros((BD,), tl.float32)
    b_lean = 0.0
    b_rest = 0.0
    if INITIAL:
        b_spread = tl.load(initial_spread + (head * D + r) * D + column, mask=(column < D) & (r < D), other=0.0)
        if CENTRED:
            b_lean = tl.load(initial_lean + head * D + r, mask=r < D, other=0.0)
            b_rest = tl.load(initial_rest + head, mask=r == 0, other=0.0)
    for done in range(0, chunks, STEP):
        place = chunks - 1 - (done + order)
        inside = place >= 0
        b_between, b_before, b_behind, b_all = _decay_between_chunks(log_fades, start, place, inside, h, STEP, H)
        where = (start + place) * H + h
        square = (where[:, None] * BD + r) * BD + column
        vector = where[:, None] * BD + column
        b_x = tl.load(spreads + square, mask=inside[:, None], other=0.0)
        b_w = _dot_of_sums(b_between, b_x, CENTRED, PRECISION) + b_before[:, None] * b_spread
        b_spread = b_all * b_spread + tl.sum(b_behind[:, None] * b_x, 0)
        tl.store(spreads_behind + square, b_w.to(spreads_behind.dtype.element_ty), mask=inside[:, None])
        b_state = tl.load(states + square, mask=inside[:, None], other=0.0).to(tl.float32)
        if CENTRED or PRECISION != "ieee":
            b_scale = 0.5 * tl.sum(b_state * b_w, 1)
        else:
            b_scale = (0.5 * tl.sum(b_state.to(tl.float64) * b_w.to(tl.float64), 1)).to(tl.float32)
        if CENTRED:
            b_y = tl.load(leans + where * BD + r, mask=inside, other=0.0)
            b_v = tl.sum(b_between * b_y, 1) + b_before * b_lean
            b_lean = b_all * b_lean + tl.sum(b_behind * b_y, 0)
            b_z = tl.load(rests + where, mask=inside & (r == 0), other=0.0)
            b_b = tl.sum(b_between * b_z, 1) + b_before * b_rest
            b_rest = b_all * b_rest + tl.sum(b_behind * b_z, 0)
            # The mean at the end of a chunk is that before the next one, or the last of all.
            last = place == chunks - 1
            next = inside & (place < chunks - 1)
            b_n = tl.load(weights + where + H, mask=next, other=0.0)
            b_n = tl.where(last, tl.load(final_weight + head), b_n)
            b_m = tl.load(totals + vector + H * BD, mask=next[:, None], other=0.0)
            b_m += tl.where(last[:, None], tl.load(final_total + head * D + column, mask=column < D, other=0.0), 0.0)
            b_mu = b_m / tl.where(b_n > 0, b_n, 1.0)[:, None]
            b_mr = tl.sum(tl.where(column == r, b_mu, 0.0), 1)
            b_pushed = tl.sum(b_w * b_mu, 1)
            tl.store(pulls + where * BD + r, b_pushed - b_v, mask=inside)
            tl.store(levels + where * BD + r, b_mr * (0.5 * b_pushed - b_v) + b_b, mask=inside)
            b_n = tl.load(weights + where, mask=inside, other=0.0)
            b_m = tl.load(totals + vector, mask=inside[:, None], other=0.0)
            b_mr = tl.sum(tl.where(column == r, b_m, 0.0), 1)
            b_pushed = tl.sum(b_w * b_m, 1) / tl.where(b_n > 0, b_n, 1.0)
            b_scale = b_n * (b_scale + b_b) + b_mr * (0.5 * b_pushed - b_v)
        b_own = tl.exp(tl.load(log_fades + where, mask=inside, other=0.0))
        tl.store(scales + where * BD + r, b_own * b_scale, mask=inside)
    if FINAL:
        tl.store(final_spread + (head * D + r) * D + column, b_spread, mask=(column < D) & (r < D))
        if CENTRED:
            tl.store(final_lean + head * D + r, b_lean, mask=r < D)
            if r == 0:
                tl.store(final_rest + head, b_rest)


@triton.jit
def _key_gradients_kernel(
    q,
    k,
    x,
    gate,
    high,
    low,
    totals,
    weights,
    final_total,
    final_weight,
    mean,
    seen,
    mean_x,
    form,
    share,
    spreads,
    pulls,
    levels,
    scales,
    dk,
    d_log_decay,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    SCALED: tl.constexpr,
    CENTRED: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):
    """dk and the gradient of the log decays of one chunk; `totals` and `weights` hold those before each chunk.

    Not CENTRED: the gradients of the sum over i of p_i . M_i q_i with p = -x.
    """
    chunk, n, h, base, _, left = locate(begin, end, owner, block_start, H, C)
    if left <= 0:
        return
    row, column = tl.arange(0, C), tl.arange(0, BD)
    token, real = base + row * H, row < left
    where = chunk * H + h
    b_high, b_low = tl.load(high + token, mask=real, other=0.0), tl.load(low + token, mask=real, other=0.0)
    end_token = base + (tl.minimum(left, C) - 1) * H
    b_end = (tl.load(high + end_token) - b_high) + (tl.load(low + end_token) - b_low)
    b_end = tl.where(real, tl.exp(tl.minimum(b_end, 0.0)), 0.0)
    b_k, b_l = _unit_keys(k, base, left, C, BD, H, D, UNIT_KEYS, EPS)

    # Readers behind the chunk.
    b_f = b_k.to(tl.float32)
    if CENTRED:
        m, scale = _total_behind(totals, weights, final_total, final_weight, where, n, h, left, C, BD, H, D)
        b_f -= tl.load(m + column, mask=column < D, other=0.0) * scale
        acc = _times_state(
            k + base * D, b_f, b_l, m, scale, spreads + where * BD * BD, left, C, BD, BK, H, D, True, PRECISION
        )  # fmt: skip
        b_pull = tl.load(pulls + where * BD + column)
        b_e = 0.5 * tl.sum(b_f * acc, 1)
        b_e += tl.sum(b_f * b_pull, 1) + tl.sum(tl.load(levels + where * BD + column), 0)
        acc += b_pull
    else:
        acc = form_dot(b_k, tl.load(spreads + where * BD * BD + (column[:, None] * BD + column)), PRECISION)
        b_e = 0.5 * tl.sum(b_f * acc, 1)
    b_e *= b_end
    acc *= b_end[:, None]

    # Readers in it: rows are read, columns read them.
    b_q = _load_part(q + base * D, 0, left, C, BD, H, D)
    b_x = _load_part(x + base * D, 0, left, C, BD, H, D)
    b_s = _scores(k + base * D, q + base * D, b_k, b_q, left, C, BD, BK, H, D, PRECISION)
    b_z = _scores(k + base * D, x + base * D, b_k, b_x, left, C, BD, BK, H, D, PRECISION)
    if PRECISION == "ieee":
        b_s, b_z = b_s * b_l[:, None], b_z * b_l[:, None]
    _, b_r = unit_rows(b_q, UNIT_QUERIES, EPS)
    b_s *= b_r
    b_p = tl.where(real, -1.0, 0.0)
    if CENTRED:
        b_p = tl.where(real, 1.0, 0.0)
        if SCALED:
            b_p = -tl.load(gate + token, mask=real, other=0.0).to(tl.float32)
        b_s -= tl.load(mean + token, mask=real, other=0.0)
        b_z -= tl.load(mean_x + token, mask=real, other=0.0)
        b_p /= tl.load(seen + token, mask=real, other=1.0)
    b_w = tl.minimum((b_high - b_high[:, None]) + (b_low - b_low[:, None]), 0.0)
    b_w = tl.where((row[:, None] <= row) & real, tl.exp(b_w), 0.0) * b_p
    b_f = b_s * b_z
    if CENTRED:
        b_f -= tl.load(form + token, mask=real, other=0.0)
    # At row t, column i: the sum over j < t.
    b_f = tl.dot(tl.where(row[:, None] > row, 1.0, 0.0), b_w * b_f, input_precision=PRECISION)
    b_f = tl.sum(tl.where(row[:, None] <= row, b_f, 0.0), 1)
    b_f += suffix_sums(tl.load(share + token, mask=real, other=0.0), 0.0)
    b_f += tl.cumsum(b_e, 0) - b_e + tl.sum(tl.load(scales + where * BD + column), 0)
    tl.store(d_log_decay + token, b_f, mask=real)
    acc = tl.dot((b_w * b_s).to(b_x.dtype), b_x, acc, input_precision=PRECISION)
    acc = tl.dot((b_w * b_z * b_r).to(b_q.dtype), b_q, acc, input_precision=PRECISION)
    _store_part(dk + base * D, through_norm(acc, b_k.to(tl.float32), b_l, UNIT_KEYS), 0, left, C, BD, H, D)


class Sums(NamedTuple):
    """Sums over the keys so far, float32."""

    high: Tensor
    """[B, T, H], the running sum of the log decays of each chunk, rounded."""
    low: Tensor
    """[B, T, H], what is left of it."""
    log_fades: Tensor
    """[P, H], the sum of the log decays of each chunk."""
    states: Tensor
    """[P, H, BD, BD], the covariance before each chunk, in bfloat16 for bfloat16 input; or M, where there are no means.
    """
    totals: Tensor
    """[P, H, BD], m before each chunk; without means this and the next are empty."""
    weights: Tensor
    """[P, H], n before each chunk."""
    last_moment: Tensor
    """[N, H, D, D], M behind each sequence."""
    last_total: Tensor
    """[N, H, D]"""
    last_weight: Tensor
    """[N, H]"""


class Readers(NamedTuple):
    """What tokens do as readers, float32 [B, T, H]; a kernel that has no use for one may be given any pointer."""

    mean: Tensor
    """a, the mean score of the query."""
    seen: Tensor
    """n, the weight of the keys that it sees."""
    mean_x: Tensor
    """c, the mean score of the gradient."""
    form: Tensor
    """f, the bilinear form without the factor between x and p."""
    share: Tensor
    """S, the part of the sum of E_ij with j before the chunk."""


class Spreads(NamedTuple):
    """Sums over the readers of each chunk, decayed to before it, float32."""

    spreads: Tensor
    """[P, H, BD, BD], of W"""
    leans: Tensor
    """[P, H, BD], of v; without means this and the next are empty."""
    rests: Tensor
    """[P, H], of b"""


class State(NamedTuple):
    """Statistics of the keys before a call, or gradients in them; without means there is the first only."""

    second_moment: Tensor
    """[N, H, D, D]"""
    total: Tensor
    """[N, H, D]"""
    weight: Tensor
    """[N, H]"""


class Launcher:
    """The kernels for one shape of input, with their constants filled in."""

    def __init__(
        self, q: Tensor, mask: Tensor | None, boundaries: Sequence[int] | None, *, unit_queries: bool, unit_keys: bool,
        centred: bool,
    ) -> None:  # fmt: skip
        rows, tokens, self.heads, self.size = q.shape
        self.q, self.mask = q, mask
        self.config = configuration(q.dtype, self.size)
        cuts = kernels.configuration(q.dtype, self.size, q.device)._replace(
            block=self.config.chunk, chunk=self.config.chunk
        )
        edges = None if boundaries is None else list(boundaries)
        self.plan = kernels.make_plan(rows, tokens, mask, edges, cuts, q.device)
        self.sequences, self.chunks = self.plan.begin.shape[0], self.plan.owner.shape[0]
        self.width = max(16, triton.next_power_of_2(self.size))
        self.unit_queries, self.unit_keys, self.centred = unit_queries, unit_keys, centred
        single = q.dtype == torch.float32
        self.precision = "ieee" if single else "tf32"
        # Of products whose operands are sums in float32.
        self.scan_precision = "ieee" if single else "tf32x3"
        # float16 has not the range for gradients: float32 states, read as tf32, whose mantissa is that of float16. A
        # plain sum must not be rounded, only what is centred before.
        self.state_dtype = torch.bfloat16 if centred and q.dtype == torch.bfloat16 else torch.float32
        self.shape = {"H": self.heads, "D": self.size, "BD": self.width, "C": self.config.chunk}
        self.parts = {"BK": min(self.width, PART)}

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def per_token(self) -> Tensor:
        """[B, T, H] float32; zero at padding, which no kernel writes."""
        shape = self.q.shape[:3]
        return self.empty(*shape) if self.mask is None else torch.zeros(shape, device=self.q.device)

    def per_chunk(self, *shape: int, dtype: torch.dtype = torch.float32, wanted: bool = True) -> Tensor:
        return self.empty(self.chunks if wanted else 0, self.heads, *shape, dtype=dtype)

    def squares(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.per_chunk(self.width, self.width, dtype=dtype)

    def state(self, wanted: bool = True) -> State:
        first = (self.sequences if wanted else 0, self.heads)
        means = (first[0] if self.centred else 0, self.heads)
        return State(self.empty(*first, self.size, self.size), self.empty(*means, self.size), self.empty(*means))

    def run_chunks(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """A program a chunk and head."""
        plan = self.plan
        kernel[(self.chunks * self.heads,)](
            *arguments, plan.begin, plan.end, plan.owner, plan.block_start, **self.shape, **constants,
            PRECISION=self.precision, EPS=NORM_EPSILON, num_warps=self.config.warps, num_stages=1,
        )  # fmt: skip

    def run_scan(self, kernel: Any, *arguments: Any, **constants: bool) -> None:
        """A program a row of a state and sequence."""
        plan = self.plan
        kernel[(self.sequences * self.heads * self.width,)](
            *arguments, plan.begin, plan.end, plan.block_start, **self.shape, **constants, STEP=STEP,
            CENTRED=self.centred, PRECISION=self.scan_precision, num_warps=self.config.scan_warps,
        )  # fmt: skip

    def sums(self, k: Tensor, log_decay: Tensor, initial: State | None) -> Sums:
        """The sums before each chunk and behind each sequence; `initial` of None is zero."""
        high, low, log_fades = self.per_token(), self.per_token(), self.per_chunk()
        moments = self.squares()
        totals, weights = self.per_chunk(self.width, wanted=self.centred), self.per_chunk(wanted=self.centred)
        self.run_chunks(
            _chunk_sums_kernel, k, log_decay, high, low, moments, totals, weights, log_fades,
            NORMALIZE=self.unit_keys, CENTRED=self.centred,
        )  # fmt: skip
        states = self.squares(self.state_dtype)
        before, last = (torch.empty_like(totals), torch.empty_like(weights)), self.state()
        # A pointer that a kernel does not use must still be one.
        self.run_scan(
            _scan_sums_kernel, moments, totals, weights, log_fades, *(last if initial is None else initial), states,
            *before, *last, INITIAL=initial is not None,
        )  # fmt: skip
        return Sums(high, low, log_fades, states, *before, *last)

    def read(
        self, q: Tensor, k: Tensor, gate: Tensor, sums: Sums, query: Tensor, correction: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write the query, and the correction where there is to be one. Returns mean scores and weights [B, T, H]."""
        mean, seen = self.per_token(), self.per_token()
        self.run_chunks(
            _read_kernel, q, k, gate, *sums[:2], sums.states, sums.totals, sums.weights, query,
            query if correction is None else correction, mean, seen,
            UNIT_QUERIES=self.unit_queries, UNIT_KEYS=self.unit_keys, CORRECTION=correction is not None, **self.parts,
        )  # fmt: skip
        return mean, seen

    def key_gradients(
        self, q: Tensor, k: Tensor, x: Tensor, gate: Tensor, sums: Sums, readers: Readers, spreads: Spreads,
        d_last: State | None, *, unit_queries: bool, scaled: bool, state_gradients: bool,
    ) -> tuple[Tensor, Tensor, State]:  # fmt: skip
        """The gradients in k and in log_decay, and those in the statistics before the call, empty where they are not
        wanted; d_last are those in the statistics behind it.
        """
        behind = self.squares(self.state_dtype)
        pulls, levels = (self.per_chunk(self.width, wanted=self.centred) for _ in range(2))
        scales, first = self.per_chunk(self.width), self.state(wanted=state_gradients)
        initial: State = first
        if d_last is not None:
            initial = State(d_last.second_moment + d_last.second_moment.mT, -d_last.total, d_last.weight)
        self.run_scan(
            _scan_gradients_kernel, *spreads, sums.log_fades, sums.states, sums.totals, sums.weights, sums.last_total,
            sums.last_weight, *initial, behind, pulls, levels, scales, *first,
            INITIAL=d_last is not None, FINAL=state_gradients,
        )  # fmt: skip
        dk, d_log_decay = torch.empty_like(k), self.per_token()
        self.run_chunks(
            _key_gradients_kernel, q, k, x, gate, *sums[:2], sums.totals, sums.weights, sums.last_total,
            sums.last_weight, *readers, behind, pulls, levels, scales, dk, d_log_decay,
            UNIT_QUERIES=unit_queries, UNIT_KEYS=self.unit_keys, SCALED=scaled, CENTRED=self.centred,
            **self.parts,
        )  # fmt: skip
        if state_gradients:
            first = State(first.second_moment / 2, -first.total, first.weight)
        return dk, d_log_decay, first


class Forward(NamedTuple):
    query: Tensor
    correction: Tensor | None
    sums: Sums
    mean: Tensor
    """[B, T, H], the mean scores."""
    seen: Tensor
    """[B, T, H], the weights."""


def forward(
    q: Tensor, k: Tensor, gate: Tensor, log_decay: Tensor, state: State | None, mask: Tensor | None,
    boundaries: Sequence[int] | None, *, unit_queries: bool, unit_keys: bool, return_correction: bool, wide: bool,
) -> Forward:  # fmt: skip
    """ccq-decay. q, k [B, T, H, D], gate and log_decay [B, T, H], contiguous; the query in float32 with `wide`."""
    launch = Launcher(q, mask, boundaries, unit_queries=unit_queries, unit_keys=unit_keys, centred=True)
    query = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
    correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
    sums = launch.sums(k, log_decay, state)
    mean, seen = launch.read(q, k, gate, sums, query, correction)
    if mask is not None:
        fill_outputs(mask, q, query, correction, unit_queries)
    return Forward(query, correction, sums, mean, seen)


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    gate: Tensor
    log_decay: Tensor
    state: State


def backward(
    q: Tensor, k: Tensor, gate: Tensor, sums: Sums, mean: Tensor, seen: Tensor, dy: Tensor, dr: Tensor | None,
    d_last: State | None, mask: Tensor | None, boundaries: Sequence[int] | None, *, unit_queries: bool,
    unit_keys: bool, state_gradients: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous; those of the state are empty without `state_gradients`."""
    launch = Launcher(q, mask, boundaries, unit_queries=unit_queries, unit_keys=unit_keys, centred=True)
    dq, d_gate, mean_x, form, share = torch.empty_like(q), *(launch.per_token() for _ in range(4))
    x = dy.to(q.dtype)
    if dr is not None:
        correction = torch.empty_like(q, dtype=torch.float32)
        launch.read(q, k, gate, sums, torch.empty_like(q), correction)
        d_gate = -(dy.float() * correction).sum(-1)
        x = (dr - gate.float().unsqueeze(-1) * dy).to(q.dtype)
    spreads = Spreads(launch.squares(), launch.per_chunk(launch.width), launch.per_chunk())
    launch.run_chunks(
        _query_gradients_kernel, q, k, x, dy, gate, *sums[:2], sums.states, sums.totals, sums.weights, sums.last_total,
        sums.last_weight, mean, seen, dq, d_gate, mean_x, form, share, *spreads,
        UNIT_QUERIES=unit_queries, UNIT_KEYS=unit_keys, SCALED=dr is None, **launch.parts,
    )  # fmt: skip
    dk, d_log_decay, first = launch.key_gradients(
        q, k, x, gate, sums, Readers(mean, seen, mean_x, form, share), spreads, d_last,
        unit_queries=unit_queries, scaled=dr is None, state_gradients=state_gradients,
    )  # fmt: skip
    if mask is not None:
        clear_gradients(mask, dq, dk, d_gate)
    return Gradients(dq, dk, d_gate, d_log_decay, first)
