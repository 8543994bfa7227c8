"""The short convolution with its SiLU in Triton.

Legend: C channels (BC a block), W kernel size, U rows of a step, P parts.

A part is `span` places of one sequence, whose first token has place 0 and whose state the places before that. A program
walks over a part with its channels, and keeps what a place needs of its neighbours in registers: but for the edges of a
part every input is read once, and every sigmoid computed once. U rows are read before any is written, because the
compiler may not move a read over a write.

Forward: s_t = bias + sum over i of w_i x_{t - (W - 1) + i} and y_t = s_t sigmoid(s_t). Backward, with ds_t = dy_t
silu'(s_t) and 0 outside of the sequence:

    dx_u = sum over j of w_{W - 1 - j} ds_{u + j},    dw_{W - 1 - j} = sum over u of x_u ds_{u + j},    db = sum of ds_u

A part has the sums over its own places u, so it computes the ds of W - 1 places more. With a state its places begin
W - 1 earlier, and the dx of places below 0 are the gradient of the state. The sums of the parts are added up outside,
so no result depends on the order in which programs run. Sums are float32, addresses 64-bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.early_launch import early_launch, follow


class Launch(NamedTuple):
    """How a kernel is launched."""

    row: int
    """Bytes of a row for a program, which are BC channels: 512 and one warp are 16 for a thread."""
    warps: int
    steps: int
    """U, a power of two."""
    programs: int
    """Wanted: the less there is to do, the shorter is a part."""


FORWARD = Launch(row=256, warps=1, steps=8, programs=4096)
BACKWARD = Launch(row=256, warps=1, steps=8, programs=4096)
"""Measured on an H200 at 8 x 4096 tokens, 1536 + 1536 + 3072 channels, W = 4: 228 and 422 us; with 4 steps 236 and 523,
with 16 bytes for a thread in place of 8 258 and 485, because fewer warps fit.
"""
TOKEN_CHANNELS = 256
"""BC where there is one token."""
SHORTEST, LONGEST = 16, 128
"""Parts, powers of two. For a part W - 1 rows more than it has are read, and backward W rows of float32 written: of
documents of one token each eight times the bytes of the input, of 64 tokens an eighth.
"""


@triton.jit
def _locate(table, tokens, span, each, C: tl.constexpr, BC: tl.constexpr, SHIFT: tl.constexpr, PACKED: tl.constexpr):
    """Of this program: its columns and its part; the sequence, its first token among all, its length; the part's first
    place. With PACKED they stand in the table, else every sequence has `tokens` tokens and `each` parts.
    """
    blocks: tl.constexpr = (C + BC - 1) // BC
    column = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    part = tl.program_id(0) // blocks
    if PACKED:
        row = table + part.to(tl.int64) * 4
        n, begin = tl.load(row), tl.load(row + 1)
        length, first = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    else:
        n = (part // each).to(tl.int64)
        begin = n * tokens
        length, first = tokens, part % each * span - SHIFT
    return column, part.to(tl.int64), n, begin, length, first


@triton.jit
def _none():
    """No blocks yet. A plain () would be for mypy a tuple that stays empty."""
    return ()


@triton.jit
def _taps(weight, bias, column, C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr):
    """The W weights of each channel, and with BIAS its bias behind them."""
    taps = _none()
    for i in tl.static_range(W):
        taps += (tl.load(weight + column * W + i, mask=column < C, other=0.0).to(tl.float32),)
    if BIAS:
        taps += (tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _row(x, place, length, column, C: tl.constexpr):
    """Of a sequence that begins at x; zeros outside of it."""
    inside = (place >= 0) & (place < length) & (column < C)
    return tl.load(x + tl.cast(place, tl.int64) * C + column, mask=inside, other=0.0)


@triton.jit
def _window(x, state, first, length, column, C: tl.constexpr, W: tl.constexpr, STATE: tl.constexpr):
    """The W - 1 inputs before a place in float32; of a sequence that begins at x, behind its state."""
    window = _none()
    for i in tl.static_range(W - 1):
        place = first - (W - 1) + i
        b_x = _row(x, place, length, column, C)
        if STATE:
            b_x += _row(state, place + W - 1, W - 1, column, C)
        window += (b_x.to(tl.float32),)
    return window


@triton.jit
def _reciprocal_share(x):
    """1 / sigmoid(x)"""
    # By log2(e) in one step, where tl.exp(-x) negates and scales: arithmetic takes about as long here as the memory.
    return 1 + tl.exp2(x * -1.4426950408889634)


@triton.jit
def _convolved(window, taps, W: tl.constexpr, BIAS: tl.constexpr):
    b_s = taps[0] * window[0]
    for i in tl.static_range(1, W):
        b_s += taps[i] * window[i]
    if BIAS:
        b_s += taps[W]
    return b_s


@triton.jit
def _slope(dy, window, taps, W: tl.constexpr, BIAS: tl.constexpr):
    """ds at the last input of the window."""
    b_s = _convolved(window, taps, W, BIAS)
    b_share = 1 / _reciprocal_share(b_s)
    return dy.to(tl.float32) * b_share * (1 + b_s * (1 - b_share))


@triton.jit(do_not_specialize=["tokens", "span", "each"])
def _forward_kernel(
    x, weight, bias, state, y, table, tokens, span, each, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
    U: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    column, _, n, begin, length, first = _locate(table, tokens, span, each, C, BC, 0, PACKED)
    x += begin * C
    y += begin * C
    taps = _taps(weight, bias, column, C, W, BIAS)
    window = _window(x, state + n * (W - 1) * C, first, length, column, C, W, STATE)
    for start in range(first, tl.minimum(first + span, length), U):
        rows = _none()
        for i in tl.static_range(U):
            rows += (_row(x, start + i, length, column, C),)
        for i in tl.static_range(U):
            window += (rows[i].to(tl.float32),)
            b_s = _convolved(window, taps, W, BIAS)
            b_y = (b_s / _reciprocal_share(b_s)).to(y.dtype.element_ty)
            place = start + i
            tl.store(y + tl.cast(place, tl.int64) * C + column, b_y, mask=(place < length) & (column < C))
            window = window[1:]


@triton.jit(do_not_specialize=["tokens", "span", "each"])
def _backward_kernel(
    dy, x, weight, bias, state, d_x, d_state, sums, table, tokens, span, each, C: tl.constexpr, W: tl.constexpr,
    BC: tl.constexpr, U: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """sums [P, W or with a bias W + 1, C] float32: dw of a part, and db in the last row."""
    column, part, n, begin, length, first = _locate(table, tokens, span, each, C, BC, (W - 1) * STATE, PACKED)
    dy += begin * C
    x += begin * C
    d_x += begin * C
    d_state += n * (W - 1) * C
    taps = _taps(weight, bias, column, C, W, BIAS)
    window = _window(x, state + n * (W - 1) * C, first, length, column, C, W, STATE)
    ahead = _window(x, state + n * (W - 1) * C, first + W - 1, length, column, C, W, STATE)
    slopes = _none()
    for i in tl.static_range(W - 1):
        window += (ahead[i],)
        slopes += (_slope(_row(dy, first + i, length, column, C), window, taps, W, BIAS),)
        window = window[1:]
    b_dw = _none()
    for _ in tl.static_range(W):
        b_dw += (tl.zeros((BC,), tl.float32),)
    b_db = tl.zeros((BC,), tl.float32)
    # Here the window begins, as the slopes do, at the place whose gradient is next.
    for start in range(first, tl.minimum(first + span, length), U):
        rows, gradients = _none(), _none()
        for i in tl.static_range(U):
            rows += (_row(x, start + W - 1 + i, length, column, C),)
            gradients += (_row(dy, start + W - 1 + i, length, column, C),)
        for i in tl.static_range(U):
            window += (rows[i].to(tl.float32),)
            slopes += (_slope(gradients[i], window, taps, W, BIAS),)
            b_dx = taps[W - 1] * slopes[0]
            b_more = _none()
            for j in tl.static_range(W):
                if j > 0:
                    b_dx += taps[W - 1 - j] * slopes[j]
                b_more += (b_dw[j] + window[0] * slopes[W - 1 - j],)
            b_dw = b_more
            b_db += slopes[0]
            b_dx = b_dx.to(d_x.dtype.element_ty)
            place = start + i
            inside = (place >= 0) & (place < length) & (column < C)
            tl.store(d_x + tl.cast(place, tl.int64) * C + column, b_dx, mask=inside)
            if STATE:
                tl.store(d_state + (place + W - 1) * C + column, b_dx, mask=(place < 0) & (column < C))
            window = window[1:]
            slopes = slopes[1:]
    sums += part * (W + BIAS) * C
    for i in tl.static_range(W):
        tl.store(sums + i * C + column, b_dw[i], mask=column < C)
    if BIAS:
        tl.store(sums + W * C + column, b_db, mask=column < C)


@triton.jit
def _token(x, weight, state, y, n, tile, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr):
    """One token behind its state, which moves on by one."""
    column = tile * BC + tl.arange(0, BC)
    fits = column < C
    state += n * (W - 1) * C
    taps = _taps(weight, weight, column, C, W, False)
    window = _none()
    for i in tl.static_range(W - 1):
        window += (tl.load(state + i * C + column, mask=fits, other=0.0),)
    window += (tl.load(x + n * C + column, mask=fits, other=0.0),)
    b_s = taps[0] * window[0].to(tl.float32)
    for i in tl.static_range(1, W):
        b_s += taps[i] * window[i].to(tl.float32)
    # Several threads may load the same number; all must have it before one of them overwrites it.
    tl.debug_barrier()
    for i in tl.static_range(W - 1):
        tl.store(state + i * C + column, window[i + 1], mask=fits)
    b_y = b_s / _reciprocal_share(b_s)
    tl.store(y + n * C + column, b_y.to(y.dtype.element_ty), mask=fits)


@triton.jit
def _token_kernel(xs, weights, states, ys, SIZES: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr):
    """Of several convolutions with SIZES channels each."""
    follow(EARLY)
    tile, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    for i in tl.static_range(len(SIZES)):
        tiles = (SIZES[i] + BC - 1) // BC
        if (tile >= 0) & (tile < tiles):
            _token(xs[i], weights[i], states[i], ys[i], n, tile, SIZES[i], W, BC)
        tile -= tiles


@functools.lru_cache(maxsize=16)
def _document_parts(boundaries: tuple[int, ...], span: int, shift: int, device: torch.device) -> Tensor:
    """[P, 4]: sequence, first token, length, first place of each part. Kept, because all layers of a model ask for the
    same.
    """
    edges = torch.tensor(boundaries)
    lengths = edges.diff()
    counts = (lengths + shift + span - 1) // span
    n = torch.repeat_interleave(torch.arange(len(counts)), counts)
    part = torch.arange(len(n)) - (counts.cumsum(0) - counts)[n]
    return torch.stack((n, edges[n], lengths[n], part * span - shift), 1).to(device)


class _Plan:
    """Parts, grid and sizes of a launch; the parts of a sequence begin `shift` places before it."""

    def __init__(self, x: Tensor, boundaries: Sequence[int] | None, launch: Launch, *, shift: int) -> None:
        rows, self.tokens, channels = x.shape
        columns = min(launch.row // x.element_size(), triton.next_power_of_2(channels))
        blocks = triton.cdiv(channels, columns)
        wanted = triton.next_power_of_2(triton.cdiv(rows * self.tokens * blocks, launch.programs))
        self.span = min(max(wanted, SHORTEST), LONGEST)
        # A pointer that a kernel does not use must still be one.
        self.table, self.each = x, triton.cdiv(self.tokens + shift, self.span)
        self.parts = rows * self.each
        if boundaries is not None:
            self.table = _document_parts(tuple(boundaries), self.span, shift, x.device)
            self.parts = len(self.table)
        self.grid = (self.parts * blocks,)
        self.sizes = {"C": channels, "BC": columns, "U": launch.steps, "num_warps": launch.warps}


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, boundaries: Sequence[int] | None
) -> Tensor:
    plan = _Plan(x, boundaries, FORWARD, shift=0)
    y = torch.empty_like(x)
    _forward_kernel[plan.grid](
        x, weight, weight if bias is None else bias, x if state is None else state, y,
        plan.table, plan.tokens, plan.span, plan.each,
        W=weight.shape[1], BIAS=bias is not None, STATE=state is not None, PACKED=boundaries is not None, **plan.sizes,
    )  # fmt: skip
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    channels, width = weight.shape
    plan = _Plan(x, boundaries, BACKWARD, shift=0 if state is None else width - 1)
    d_x, d_state = torch.empty_like(x), None if state is None else torch.empty_like(state)
    sums = x.new_empty((plan.parts, width + (bias is not None), channels), dtype=torch.float32)
    _backward_kernel[plan.grid](
        dy, x, weight, weight if bias is None else bias, x if state is None else state,
        d_x, d_x if d_state is None else d_state, sums, plan.table, plan.tokens, plan.span, plan.each,
        W=width, BIAS=bias is not None, STATE=state is not None, PACKED=boundaries is not None, **plan.sizes,
    )  # fmt: skip
    total = sums.sum(0)
    d_weight = torch.empty_like(weight).copy_(total[:width].t())
    d_bias = None if bias is None else torch.empty_like(bias).copy_(total[width])
    return d_x, d_weight, d_bias, d_state


def token(xs: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    sizes = tuple(x.shape[-1] for x in xs)
    _token_kernel[(sum(triton.cdiv(size, TOKEN_CHANNELS) for size in sizes), len(xs[0]))](
        tuple(xs), tuple(weights), tuple(states), tuple(ys),
        SIZES=sizes, W=weights[0].shape[1], BC=TOKEN_CHANNELS, num_warps=4,
        **early_launch(xs[0].device),
    )  # fmt: skip
