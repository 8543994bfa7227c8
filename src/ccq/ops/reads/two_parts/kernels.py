"""Query and correction apart, in Triton: the kernels of the read step, and one pass that cuts its result in two.

Forward the read step's kernels write the correction r in float32, and `_cut_kernel` makes of it, q and the gate what
the memory is read with. Backward the gradient of lambda r is, where it is, what the read step's kernels take to reach
r, with strength lambda, and that of q joins it there: no pass more than the read step itself has.

Legend: H heads, D key size (BD the next power of two), BT vectors a program. Addresses are 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.query import kernels
from ccq.ops.query.kernels import Gradients, Kept
from ccq.ops.query.padding import clear_gradients
from ccq.ops.query.reference import NORM_EPSILON
from ccq.ops.reads.kernels import ELEMENTS, unit_rows

VECTORS = 32
"""BT"""


@triton.jit(do_not_specialize=["vectors"])
def _cut_kernel(
    q, correction, gate, mask, kept, removed, vectors, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, NORMALIZE: tl.constexpr, MASKED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """kept = q, normalised or not, and removed = gate * correction, zero at padding."""
    vector = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.arange(0, BD)
    there = vector < vectors
    where = vector[:, None] * D + column
    fits = there[:, None] & (column < D)
    real = there
    if MASKED:
        real = there & (tl.load(mask + vector // H, mask=there, other=0) != 0)
    b_q, _ = unit_rows(tl.load(q + where, mask=fits, other=0.0), NORMALIZE, EPS)
    tl.store(kept + where, b_q.to(kept.dtype.element_ty), mask=fits)
    b_g = tl.load(gate + vector, mask=real, other=0.0).to(tl.float32)
    b_r = b_g[:, None] * tl.load(correction + where, mask=fits & real[:, None], other=0.0)
    tl.store(removed + where, b_r.to(removed.dtype.element_ty), mask=fits)


class Forward(NamedTuple):
    kept: Tensor
    removed: Tensor
    second_moment: Tensor
    count: Tensor  # type: ignore[assignment]  # a field, not the method of tuple
    saved: Kept


def forward(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor | None, total: Tensor, count: Tensor,
    mask: Tensor | None, boundaries: Sequence[int] | None, *, unit_queries: bool, unit_keys: bool,
) -> Forward:  # fmt: skip
    """All inputs contiguous."""
    rows, tokens, heads, size = q.shape
    config = kernels.configuration(q.dtype, size, q.device)
    plan = kernels.make_plan(rows, tokens, mask, None if boundaries is None else list(boundaries), config, q.device)
    done = kernels.forward(
        q, k, gate, second_moment, total, count, plan, config, unit_queries=unit_queries, unit_keys=unit_keys,
        centred=True, return_correction=True, wide=False,
    )  # fmt: skip
    kept, removed = done.query, torch.empty_like(q)
    vectors = rows * tokens * heads
    width = max(16, triton.next_power_of_2(size))
    _cut_kernel[(triton.cdiv(vectors, VECTORS),)](
        q, done.kept.correction, gate, q if mask is None else mask.contiguous().view(torch.uint8), kept, removed,
        vectors, H=heads, D=size, BD=width, BT=VECTORS, NORMALIZE=unit_queries, MASKED=mask is not None,
        EPS=NORM_EPSILON, num_warps=max(1, VECTORS * width // ELEMENTS),
    )  # fmt: skip
    return Forward(kept, removed, done.second_moment, count + plan.length, done.kept)


def backward(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor | None, count: Tensor, saved: Kept, d_kept: Tensor,
    d_removed: Tensor, d_moment: Tensor | None, d_total: Tensor, mask: Tensor | None,
    boundaries: Sequence[int] | None, *, unit_queries: bool, unit_keys: bool, state_gradients: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`, all inputs contiguous; that of the gate float32."""
    rows, tokens, _, size = q.shape
    config = kernels.configuration(q.dtype, size, q.device)
    plan = kernels.make_plan(rows, tokens, mask, None if boundaries is None else list(boundaries), config, q.device)
    found = kernels.backward_through(
        q, k, d_removed, gate.float(), d_kept, d_moment, d_total, saved, second_moment, count, plan, config,
        unit_queries=unit_queries, unit_keys=unit_keys, centred=True, state_gradients=state_gradients,
    )  # fmt: skip
    found = found._replace(gate=-found.gate)
    if mask is not None:
        clear_gradients(mask, found.q, found.k, found.gate)
    return found
