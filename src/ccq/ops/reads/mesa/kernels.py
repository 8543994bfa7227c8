"""The ridge systems of mesa in Triton: (H_i + Lambda) x_i = q_i for every token i, by conjugate gradients on the chip.

Legend: as in `ccq.ops.reads.decayed.kernels`, whose sums, scans and gradients of keys and decays are used here, without
means. H_i = e^{g_i} M + sum over j <= i of w_ij k_j k_j^T with M the sum before the chunk.

`_solve_kernel` takes a chunk: one system a row. What a product with H_i needs, the keys of the chunk, the decays
between its tokens and M, is loaded once and stays on the chip for all steps, of which each is three products of
matrices, where o multiplies number by number:

    H p = e^g o (p M) + (w o (p K^T)) K

For half precision the operands of these products are float16, whatever the input: its mantissa is eight times finer
than that of bfloat16, and its range is enough, because rows p are divided by their length, keys by the longest of the
chunk, and M by its largest number. The vectors of the iteration are float32, and all is float32 for float32 input. A
chunk is done after `steps` steps, or when the residuals of all its rows are far below the rounding of its products
(TOLERANCE).

Backward. With dx the gradient in the solution, u_i = (H_i + Lambda)^-1 dx_i is the gradient in q_i: the same systems.
The solution moves with -u_i . (dH_i + dLambda) x_i, so the gradient of Lambda is the sum of -u o x, and those of keys,
decays and the state are the ones of the bilinear form p_i . H_i x_i with p = -u, which `decayed.kernels` derives. Its
part -e^g u . M x is a product with M as it was kept, not with the float16 numbers of the iteration, which would do for
x and u but not for this form: both are small where M is large. (u . (q - Lambda x) would save the product, but the
residuals that x and u still have enter it whole.)

Each way takes three launches, as in `decayed.kernels`, and a sum of the chunks' shares of the gradient of Lambda. Kept
for the backward pass are M before each chunk, in float32, and the solution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query.kernels import _load_part, _store_block, _store_part
from ccq.ops.query.padding import clear_gradients, fill_outputs
from ccq.ops.reads.decayed.kernels import (
    Launcher,
    Readers,
    Spreads,
    State,
    Sums,
    _decay_between,
    _unit_keys,
    double_dot,
    form_dot,
)
from ccq.ops.reads.kernels import locate, through_norm, unit_rows

TOLERANCE = {True: 2.0**-28, False: 2.0**-50}
"""Of the squared residual over the squared right-hand side, for half precision and for float32: lengths of an eighth
and of half of what rounding an operand may change in it."""


@triton.jit
def _push(p, b_size, b_k, b_moment, b_w, b_fade, b_scale, b_ridge, PRECISION: tl.constexpr):
    """(H + Lambda) p for rows p, of squared lengths near b_size."""
    b_length = tl.rsqrt(tl.maximum(b_size, 1e-37))
    b_p = (p * b_length[:, None]).to(b_k.dtype)
    acc = tl.dot(b_p, b_moment, input_precision=PRECISION) * b_fade[:, None]
    b_s = tl.dot(b_p, tl.trans(b_k), input_precision=PRECISION) * b_w
    acc = tl.dot(b_s.to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    return acc * (b_scale / b_length)[:, None] + b_ridge * p


@triton.jit(do_not_specialize=["steps"])
def _solve_kernel(
    right,
    q,
    k,
    ridge,
    high,
    low,
    states,
    solution,
    adjoint,
    dq,
    share,
    spreads,
    d_ridge,
    steps,
    begin,
    end,
    owner,
    block_start,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    C: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    HALF: tl.constexpr,
    GRADIENTS: tl.constexpr,
    TOLERANCE: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):
    """The systems of one chunk, right-hand sides `right` [B, T, H, D]. Forward these are the queries, to be normalised
    with UNIT_QUERIES, and `solution` is written.

    GRADIENTS: they are the gradient in `solution`. Writes u to `adjoint`, dq, S = -e^g u . M x [B, T, H], and of the
    chunk the sum of -e^g (u x^T + x u^T) [P, H, BD, BD] and of -u o x [P, H, BD].
    """
    chunk, _, h, base, _, left = locate(begin, end, owner, block_start, H, C)
    where = chunk * H + h
    row, column = tl.arange(0, C), tl.arange(0, BD)
    if left <= 0:
        if GRADIENTS:
            tl.store(d_ridge + where * BD + column, tl.zeros((BD,), tl.float32))
        return
    token, real = base + row * H, row < left
    b_high, b_low = tl.load(high + token, mask=real, other=0.0), tl.load(low + token, mask=real, other=0.0)
    b_start = tl.exp(b_high + b_low)
    b_w = _decay_between(b_high, b_low, row, left)
    b_k, _ = _unit_keys(k, base, left, C, BD, H, D, UNIT_KEYS, EPS)
    b_moment = tl.load(states + where * BD * BD + (column[:, None] * BD + column))
    b_ridge = tl.load(ridge + h * D + column, mask=column < D, other=1.0)
    b_fade, b_scale = b_start, 1.0
    if HALF:
        # float16 from here on: everything is brought to at most 1, and back in `_push`.
        if not UNIT_KEYS:
            b_f = b_k.to(tl.float32)
            b_scale = tl.max(tl.sum(b_f * b_f, 1), 0)
            b_scale = tl.where(b_scale > 0, b_scale, 1.0)
            b_k = (b_f * tl.rsqrt(b_scale)).to(tl.float16)
        b_k = b_k.to(tl.float16)
        b_largest = tl.max(tl.max(tl.abs(b_moment), 1), 0)
        b_largest = tl.where(b_largest > 0, b_largest, 1.0)
        b_moment = (b_moment / b_largest).to(tl.float16)
        b_fade = b_start * (b_largest / b_scale)

    b_r, _ = unit_rows(_load_part(right + base * D, 0, left, C, BD, H, D), UNIT_QUERIES and not GRADIENTS, EPS)
    b_limit = tl.sum(b_r * b_r, 1) * TOLERANCE
    b_x = b_r / b_ridge
    # Step -1 makes the first residual, with the start as its direction: the product is compiled once.
    b_p = b_x
    b_length = tl.sum(b_x * b_x, 1)
    b_size = b_length
    step = -1
    while (step < 0) | ((step < steps) & (tl.max(b_size - b_limit, 0) > 0)):
        b_v = _push(b_p, b_length, b_k, b_moment, b_w, b_fade, b_scale, b_ridge, PRECISION)
        b_c = tl.sum(b_p * b_v, 1)
        b_a = b_size / tl.where(b_c > 0, b_c, 1.0)
        b_x += tl.where(step < 0, 0.0, b_a)[:, None] * b_p
        b_r -= tl.where(step < 0, 1.0, b_a)[:, None] * b_v
        b_new = tl.sum(b_r * b_r, 1)
        b_b = tl.where(step < 0, 0.0, b_new / tl.where(b_size > 0, b_size, 1.0))
        b_p = b_r + b_b[:, None] * b_p
        # Residuals and the direction before are orthogonal.
        b_length = b_new + b_b * b_b * b_length
        b_size = b_new
        step += 1

    if GRADIENTS:
        _store_part(adjoint + base * D, b_x, 0, left, C, BD, H, D)
        b_y = _load_part(solution + base * D, 0, left, C, BD, H, D).to(tl.float32)
        b_q, b_l = unit_rows(_load_part(q + base * D, 0, left, C, BD, H, D), UNIT_QUERIES, EPS)
        tl.store(d_ridge + where * BD + column, -tl.sum(b_x * b_y, 0))
        b_length = tl.rsqrt(tl.maximum(tl.sum(b_y * b_y, 1), 1e-37))
        # Loaded again, because what is on the chip is rounded.
        b_moment = tl.load(states + where * BD * BD + (column[:, None] * BD + column))
        b_v = form_dot((b_y * b_length[:, None]).to(b_k.dtype), b_moment, PRECISION)
        tl.store(share + token, -tl.sum(b_x * b_v, 1) * (b_start / b_length), mask=real)
        b_u = b_x.to(q.dtype.element_ty)
        _store_part(dq + base * D, through_norm(b_x, b_q, b_l, UNIT_QUERIES), 0, left, C, BD, H, D)
        b_y = (-b_start[:, None] * b_y).to(q.dtype.element_ty)
        if HALF:
            b_spread = tl.dot(tl.trans(b_y), b_u, input_precision=PRECISION)
            b_spread = tl.dot(tl.trans(b_u), b_y, b_spread, input_precision=PRECISION)
        else:
            b_spread = double_dot(tl.trans(b_y), b_u) + double_dot(tl.trans(b_u), b_y)
        _store_block(spreads + where * BD * BD, b_spread, BD, BD)
    else:
        _store_part(solution + base * D, b_x, 0, left, C, BD, H, D)


def _launcher(
    q: Tensor, mask: Tensor | None, boundaries: Sequence[int] | None, unit_queries: bool, unit_keys: bool
) -> Launcher:
    return Launcher(q, mask, boundaries, unit_queries=unit_queries, unit_keys=unit_keys, centred=False)


def _solve(launch: Launcher, steps: int, gradients: bool, *arguments: Tensor) -> None:
    half = launch.q.dtype != torch.float32
    launch.run_chunks(
        _solve_kernel, *arguments, steps, UNIT_QUERIES=launch.unit_queries, UNIT_KEYS=launch.unit_keys, HALF=half,
        GRADIENTS=gradients, TOLERANCE=TOLERANCE[half],
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, ridge: Tensor, log_decay: Tensor, second_moment: Tensor | None, mask: Tensor | None,
    boundaries: Sequence[int] | None, *, steps: int, unit_queries: bool, unit_keys: bool, wide: bool,
) -> tuple[Tensor, Sums]:  # fmt: skip
    """The solutions [B, T, H, D], in float32 with `wide`, and the sums of the keys. q, k [B, T, H, D], ridge [H, D],
    log_decay [B, T, H], second_moment [N, H, D, D]; all contiguous.
    """
    launch = _launcher(q, mask, boundaries, unit_queries, unit_keys)
    state = None if second_moment is None else State(second_moment, second_moment, second_moment)
    sums = launch.sums(k, log_decay, state)
    solution = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
    # A pointer that a kernel does not use must still be one.
    unused = (q, q, sums.high, sums.states, sums.high)
    _solve(launch, steps, False, q, q, k, ridge, *sums[:2], sums.states, solution, *unused)
    if mask is not None:
        fill_outputs(mask, q, solution, None, unit_queries)
    return solution, sums


def backward(
    q: Tensor, k: Tensor, ridge: Tensor, kept: Sequence[Tensor], solution: Tensor, dy: Tensor, d_moment: Tensor | None,
    mask: Tensor | None, boundaries: Sequence[int] | None, *, steps: int, unit_queries: bool, unit_keys: bool,
    state_gradients: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of `forward` in q, k, ridge, log_decay and the second moment; `kept` are the first four of the
    sums.
    """
    launch = _launcher(q, mask, boundaries, unit_queries, unit_keys)
    high, low, log_fades, states = kept
    nothing = launch.empty(0)
    sums = Sums(high, low, log_fades, states, *(nothing,) * 5)
    dq, adjoint, share = torch.empty_like(q), torch.empty_like(q), launch.per_token()
    spreads, d_ridge = Spreads(launch.squares(), nothing, nothing), launch.per_chunk(launch.width)
    _solve(launch, steps, True, dy, q, k, ridge, high, low, states, solution, adjoint, dq, share, spreads.spreads,
           d_ridge)  # fmt: skip
    d_last = None if d_moment is None else State(d_moment, nothing, nothing)
    dk, d_log_decay, first = launch.key_gradients(
        solution.to(q.dtype), k, adjoint, nothing, sums, Readers(*(share,) * 5), spreads, d_last,
        unit_queries=False, scaled=True, state_gradients=state_gradients,
    )  # fmt: skip
    if mask is not None:
        clear_gradients(mask, dq, dk, share)
    return dq, dk, d_ridge.sum(0)[:, : launch.size].contiguous(), d_log_decay, first.second_moment
