"""What stands at padded tokens: the other kernels read and write real tokens only. Touches nothing else.

Legend: B rows, T tokens, H heads, D key size (BD the next power of two), BT vectors a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query.reference import NORM_EPSILON

VECTORS = 32
"""BT"""


@triton.jit(do_not_specialize=["vectors"])
def _fill_kernel(
    mask,
    vectors,
    source,
    target,
    other,
    scalars,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    COPY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    OTHER: tl.constexpr,
    SCALARS: tl.constexpr,
    EPS: tl.constexpr,
):
    """At padded tokens: target = source (COPY, NORMALIZE) or zero; other and scalars, where there are any, zero."""
    vector = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    padding = tl.load(mask + vector // H, mask=vector < vectors, other=1) == 0
    if tl.max(padding.to(tl.int32), 0) > 0:
        column = tl.arange(0, BD)
        where = vector[:, None] * D + column
        fits = padding[:, None] & (column < D)
        b_x = tl.zeros((BT, BD), tl.float32)
        if OTHER:
            tl.store(other + where, b_x.to(other.dtype.element_ty), mask=fits)
        if SCALARS:
            tl.store(scalars + vector, tl.zeros((BT,), tl.float32), mask=padding)
        if COPY:
            b_x = tl.load(source + where, mask=fits, other=0.0).to(tl.float32)
            if NORMALIZE:
                b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)[:, None]
        tl.store(target + where, b_x.to(target.dtype.element_ty), mask=fits)


def _fill(
    mask: Tensor,
    target: Tensor,
    *,
    source: Tensor | None,
    other: Tensor | None,
    scalars: Tensor | None,
    normalize: bool,
) -> None:
    heads, size = target.shape[2:]
    vectors = target.shape[0] * target.shape[1] * heads
    x, y, z = (target if tensor is None else tensor for tensor in (source, other, scalars))
    _fill_kernel[(triton.cdiv(vectors, VECTORS),)](
        mask.contiguous().view(torch.uint8), vectors, x, target, y, z,
        H=heads, D=size, BD=max(16, triton.next_power_of_2(size)), BT=VECTORS, COPY=source is not None,
        NORMALIZE=normalize, OTHER=other is not None, SCALARS=scalars is not None, EPS=NORM_EPSILON,
    )  # fmt: skip


def fill_outputs(mask: Tensor, q: Tensor, query: Tensor, correction: Tensor | None, normalize: bool) -> None:
    """Padded queries come back normalised (or as they were), with a correction of zero; mask [B, T] bool."""
    _fill(mask, query, source=q, other=correction, scalars=None, normalize=normalize)


def clear_gradients(mask: Tensor, d_q: Tensor, d_k: Tensor, d_gate: Tensor) -> None:
    """Padding has no gradient; d_q and d_k [B, T, H, D], d_gate [B, T, H] float32."""
    _fill(mask, d_q, source=None, other=d_k, scalars=d_gate, normalize=False)
