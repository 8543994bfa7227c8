"""comba in Triton: one pass each way over queries and keys.

Legend: H heads, D key size (BD the next power of two), BT tokens a program, all of one head. Addresses are 64-bit.

Forward y = q - d k, or q - d |q| k where the query keeps its length. With g = -d dy + dr the gradient that reaches the
correction c = |q| k: dk = |q| g, d|q| = g . k, and the gradient of d is the sum of -dy . c, first over the tokens of a
program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query.reference import NORM_EPSILON
from ccq.ops.reads.kernels import ELEMENTS, through_norm, unit_rows

TOKENS = 32
"""BT"""


@triton.jit
def _load(x, where, fits):
    return tl.load(x + where, mask=fits, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    q, k, strength, mask, query, correction, tokens, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, UNIT_QUERIES: tl.constexpr, UNIT_KEYS: tl.constexpr, MASKED: tl.constexpr,
    CORRECTION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """query = q - strength * correction; padded queries come back normalised or as they were."""
    h = tl.program_id(0) % H
    token = tl.program_id(0).to(tl.int64) // H * BT + tl.arange(0, BT)
    column = tl.arange(0, BD)
    there = token < tokens
    where = (token * H + h)[:, None] * D + column
    fits = there[:, None] & (column < D)
    real = there
    if MASKED:
        real = there & (tl.load(mask + token, mask=there, other=0) != 0)
    b_q, _ = unit_rows(_load(q, where, fits), UNIT_QUERIES, EPS)
    b_c, _ = unit_rows(_load(k, where, fits & real[:, None]), UNIT_KEYS, EPS)
    if UNIT_KEYS and not UNIT_QUERIES:
        b_c *= tl.where(real, tl.sqrt(tl.sum(b_q * b_q, 1) + EPS), 0.0)[:, None]
    if CORRECTION:
        tl.store(correction + where, b_c, mask=fits)
    b_y = b_q - tl.load(strength + h).to(tl.float32) * b_c
    tl.store(query + where, b_y.to(query.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    q, k, strength, mask, dy, dr, dq, dk, d_strength, tokens, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, UNIT_QUERIES: tl.constexpr, UNIT_KEYS: tl.constexpr, MASKED: tl.constexpr,
    HAS_DR: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """dq, dk, and of each program the gradient of the strength, [programs, H]."""
    h = tl.program_id(0) % H
    token = tl.program_id(0).to(tl.int64) // H * BT + tl.arange(0, BT)
    column = tl.arange(0, BD)
    there = token < tokens
    where = (token * H + h)[:, None] * D + column
    fits = there[:, None] & (column < D)
    read = fits
    if MASKED:
        read = fits & (tl.load(mask + token, mask=there, other=0) != 0)[:, None]
    b_q, b_rq = unit_rows(_load(q, where, read), UNIT_QUERIES, EPS)
    b_k, b_rk = unit_rows(_load(k, where, read), UNIT_KEYS, EPS)
    b_dy = _load(dy, where, read)
    b_g = -tl.load(strength + h).to(tl.float32) * b_dy
    if HAS_DR:
        b_g += _load(dr, where, read)
    b_d = tl.sum(b_dy * b_k, 1)
    b_dq = b_dy
    if UNIT_KEYS and not UNIT_QUERIES:
        b_l = tl.sqrt(tl.sum(b_q * b_q, 1) + EPS)
        b_d *= b_l
        b_dq += (tl.sum(b_g * b_k, 1) / b_l)[:, None] * b_q
        b_g *= b_l[:, None]
    tl.store(d_strength + tl.program_id(0), -tl.sum(b_d, 0))
    tl.store(dq + where, through_norm(b_dq, b_q, b_rq, UNIT_QUERIES).to(dq.dtype.element_ty), mask=fits)
    tl.store(dk + where, through_norm(b_g, b_k, b_rk, UNIT_KEYS).to(dk.dtype.element_ty), mask=fits)


def _launch(kernel: Any, q: Tensor, mask: Tensor | None, *arguments: Any, **constants: Any) -> None:
    rows, tokens, heads, size = q.shape
    width = max(16, triton.next_power_of_2(size))
    kernel[(programs(q) * heads,)](
        *arguments, rows * tokens, H=heads, D=size, BD=width, BT=TOKENS, MASKED=mask is not None, EPS=NORM_EPSILON,
        **constants, num_warps=max(1, TOKENS * width // ELEMENTS),
    )  # fmt: skip


def programs(q: Tensor) -> int:
    """For each head of q [B, T, H, D]."""
    return int(triton.cdiv(q.shape[0] * q.shape[1], TOKENS))


def _bytes(mask: Tensor | None, otherwise: Tensor) -> Tensor:
    # A pointer that a kernel does not use must still be one.
    return otherwise if mask is None else mask.contiguous().view(torch.uint8)


class Forward(NamedTuple):
    query: Tensor
    correction: Tensor | None


def forward(
    q: Tensor, k: Tensor, strength: Tensor, mask: Tensor | None, *, unit_queries: bool, unit_keys: bool,
    return_correction: bool, wide: bool,
) -> Forward:  # fmt: skip
    """q - strength * correction, all inputs contiguous; mask [B, T] bool; the query in float32 with `wide`."""
    query = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
    correction = torch.empty_like(q, dtype=torch.float32) if return_correction else None
    _launch(
        _forward_kernel, q, mask, q, k, strength, _bytes(mask, q), query, query if correction is None else correction,
        UNIT_QUERIES=unit_queries, UNIT_KEYS=unit_keys, CORRECTION=return_correction,
    )  # fmt: skip
    return Forward(query, correction)


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    strength: Tensor
    """[H] float32"""


def backward(
    q: Tensor, k: Tensor, strength: Tensor, mask: Tensor | None, dy: Tensor, dr: Tensor | None, *,
    unit_queries: bool, unit_keys: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous; padding has none."""
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    d_strength = q.new_empty((programs(q), q.shape[2]), dtype=torch.float32)
    _launch(
        _backward_kernel, q, mask, q, k, strength, _bytes(mask, q), dy, dy if dr is None else dr, dq, dk, d_strength,
        UNIT_QUERIES=unit_queries, UNIT_KEYS=unit_keys, HAS_DR=dr is not None,
    )  # fmt: skip
    return Gradients(dq, dk, d_strength.sum(0))
