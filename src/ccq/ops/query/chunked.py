"""The read step by chunks in PyTorch, with the closed-form backward.

Legend: P chunks, H heads, C chunk length, D key size; i, j tokens of one chunk, tokens are rows.

A covariance times a query is linear attention with centred scores. With M, m, t0 from everything before the chunk, s_ij
= q_i . k_j and
t_i = t0 + place in the chunk:

    a_i = (q_i . m + sum_{j<=i} s_ij) / t_i
    r_i = (M q_i - a_i m + sum_{j<=i} (s_ij - a_i) k_j) / t_i
    y_i = q_i - lambda_i r_i

Backward: the covariance is symmetric, so the gradient of r_i in q_i is the operator itself, u_i = Sigma_i (dr)_i,
computed by the same routine. With p_i the gradient that reaches r_i, c_i the mean score of p_i, and z_ij = p_i . k_j,

    dk_j = sum_{i>=j} [p_i (s_ij - a_i) + q_i (z_ij - c_i)] / t_i

which is summed inside the chunk, and across chunks by a scan from the last to the first over W = sum (p q^T + q p^T) /
t and w = sum (a p + c q) / t. Nothing beyond the normalised q and k, their lengths, the gate and the prefix states is
kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.layout import ChunkLayout
from ccq.ops.operators import differentiable_once
from ccq.ops.query.reference import NORM_EPSILON, curvature_conditioned_query_step, l2_normalize
from ccq.ops.query.statistics import KeyStatistics

CHUNK = 64


def _normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors as `l2_normalize` makes them, and the reciprocal lengths [..., 1] that their gradient needs."""
    reciprocal = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
    return x * reciprocal, reciprocal


def _normalize_backward(gradient: Tensor, unit: Tensor, reciprocal: Tensor) -> Tensor:
    """The gradient in x of x * rsqrt(x . x + eps), exact with the eps; overwrites `gradient`."""
    along = torch.linalg.vecdot(gradient, unit).unsqueeze(-1)
    return gradient.addcmul_(unit, along, value=-1).mul_(reciprocal)


def _covariance_times(
    x: Tensor, k: Tensor, second_moment: Tensor, total: Tensor, reciprocal_count: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sigma_i x_i for every token, the centred causal scores, and the mean scores a_i [P, H, C, 1] (None if not
    centred).

    x, k [P, H, C, D]; second_moment [P, H, D, D] and total [P, H, D, 1] before each chunk; reciprocal_count [P, 1, C,
    1].
    """
    scores = torch.matmul(x, k.mT).tril_()
    result = torch.matmul(x, second_moment)
    mean = None
    if centred:
        mean = scores.sum(-1, keepdim=True).add_(torch.matmul(x, total)).mul_(reciprocal_count)
        # The mask comes after the subtraction: (s - a) L, never s L - a.
        scores.sub_(mean).tril_()
        result.addcmul_(mean, total.mT, value=-1)
    result.view(-1, *result.shape[2:]).baddbmm_(scores.flatten(0, 1), k.flatten(0, 1))
    return result.mul_(reciprocal_count), scores, mean


class _CurvatureConditionedQuery(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        gate: Tensor,
        second_moment: Tensor,
        total: Tensor,
        reciprocal_count: Tensor,
        real: Tensor | None,
        layout: ChunkLayout,
        unit_queries: bool,
        unit_keys: bool,
        centred: bool,
        return_correction: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        kept = accumulation_dtype(q.dtype)
        query, key = layout.split(q.to(kept)), layout.split(k.to(kept))
        q_reciprocal = k_reciprocal = None
        if unit_queries:
            query, q_reciprocal = _normalize(query)
        if unit_keys:
            key, k_reciprocal = _normalize(key)
        normalized = query
        if real is not None:
            # `where`, not a product: whatever stands in the padding, NaN included, must not spread.
            query, key = torch.where(real, query, 0), torch.where(real, key, 0)
        strength = layout.split_scalar(gate.to(kept)).unsqueeze(-1)
        if real is not None:
            strength = torch.where(real, strength, 0)
        moments, last_moment = layout.prefix_sums(torch.matmul(key.mT, key), second_moment)
        totals, last_total = layout.prefix_sums(key.sum(-2), total)
        totals = totals.unsqueeze(-1)
        correction, scores, mean = _covariance_times(query, key, moments, totals, reciprocal_count, centred)
        y = torch.addcmul(query, strength, correction, value=-1)
        if real is not None:
            y = torch.where(real, y, normalized)
        y = layout.merge(y)
        kept_correction = correction if return_correction else None
        ctx.save_for_backward(
            query,
            key,
            strength,
            q_reciprocal,
            k_reciprocal,
            scores,
            mean,
            moments,
            totals,
            reciprocal_count,
            real,
            kept_correction,
        )
        ctx.layout, ctx.centred = layout, centred
        ctx.dtypes = q.dtype, k.dtype, gate.dtype
        # Kept apart: a checkpointed layer lets the saved tensors be asked for once.
        ctx.device_type = q.device.type
        ctx.set_materialize_grads(False)
        return y, layout.merge(correction) if return_correction else None, last_moment, last_total

    @staticmethod
    @differentiable_once("curvature_conditioned_query")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.autocast(ctx.device_type, enabled=False):
            return _backward(ctx, *gradients)


def _backward(
    ctx: Any, dy: Tensor | None, dr: Tensor | None, d_moment: Tensor | None, d_total: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The closed forms of the module's description."""
    (
        query,
        key,
        strength,
        q_reciprocal,
        k_reciprocal,
        s,
        a,
        moments,
        totals,
        reciprocal_count,
        real,
        correction,
    ) = ctx.saved_tensors
    layout, centred = ctx.layout, ctx.centred
    sequences, kept = layout.sequences, query.dtype
    heads, size = query.shape[1], query.shape[3]
    dy = torch.zeros_like(query) if dy is None else layout.split(dy.to(kept))
    if real is not None:
        dy = torch.where(real, dy, 0)

    if correction is None:
        # Sigma dy gives both gradients that reach q and the gate; scores and means of p = -lambda dy follow.
        u, z, c = _covariance_times(dy, key, moments, totals, reciprocal_count, centred)
        d_gate = torch.linalg.vecdot(query, u).neg_()
        d_query = torch.addcmul(dy, strength, u, value=-1)
        p, scale = dy, -strength * reciprocal_count
    else:
        d_gate = torch.linalg.vecdot(dy, correction).neg_()
        p = torch.mul(dy, -strength)
        if dr is not None:
            p += layout.split(dr.to(kept)) if real is None else torch.where(real, layout.split(dr.to(kept)), 0)
        u, z, c = _covariance_times(p, key, moments, totals, reciprocal_count, centred)
        d_query = dy + u
        scale = reciprocal_count
    # From here on p, z and c carry the factor 1 / t.
    p, z = p * scale, z.mul_(scale)

    spread = torch.matmul(p.mT, query)
    start = key.new_zeros(sequences, heads, size, size) if d_moment is None else d_moment + d_moment.mT
    w, first = layout.suffix_sums(spread + spread.mT, start)
    d_key = torch.matmul(key, w)
    flat = d_key.view(-1, *d_key.shape[2:])
    flat.baddbmm_(s.mT.flatten(0, 1), p.flatten(0, 1))
    flat.baddbmm_(z.mT.flatten(0, 1), query.flatten(0, 1))
    lean = key.new_zeros(key.shape[0], heads, 1, size)
    if c is not None:
        lean = torch.matmul(a.mT, p).add_(torch.matmul(c.mul_(scale).mT, query))
    lean_start = key.new_zeros(sequences, heads, 1, size) if d_total is None else -d_total.unsqueeze(-2)
    lean, lean_first = layout.suffix_sums(lean, lean_start)
    d_key.sub_(lean)

    if q_reciprocal is not None:
        d_query = _normalize_backward(d_query, query, q_reciprocal)
    if k_reciprocal is not None:
        d_key = _normalize_backward(d_key, key, k_reciprocal)
    if real is not None:
        d_query, d_key = torch.where(real, d_query, 0), torch.where(real, d_key, 0)
    q_dtype, k_dtype, gate_dtype = ctx.dtypes
    return (
        layout.merge(d_query).to(q_dtype),
        layout.merge(d_key).to(k_dtype),
        layout.merge_scalar(d_gate).to(gate_dtype),
        first / 2,
        -lean_first.squeeze(-2),
        *(None,) * 7,
    )


def chunked_curvature_conditioned_query(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    statistics: KeyStatistics,
    *,
    mask: Tensor | None,
    boundaries: list[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    return_correction: bool,
    query_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, KeyStatistics]:
    """The read step by chunks: as `curvature_conditioned_query_reference`, but the query has `query_dtype`."""
    kept = accumulation_dtype(q.dtype)
    if q.shape[1] == 1 and mask is None and boundaries is None:
        # Decoding: one step of the recurrence has a third of the calls, and there is no chunk to win anything from.
        count = statistics.count + 1
        one, key = q[:, 0], k[:, 0]
        one = l2_normalize(one) if unit_queries else one.to(kept)
        key = l2_normalize(key) if unit_keys else key.to(kept)
        query, correction, second_moment, total = curvature_conditioned_query_step(
            one, key, gate[:, 0].to(kept).unsqueeze(-1), *statistics[:2], count.to(kept)[:, None, None], centred
        )
        last = KeyStatistics(second_moment, total, count)
        return query.to(query_dtype).unsqueeze(1), correction.unsqueeze(1) if return_correction else None, last
    layout = ChunkLayout.of(q, boundaries, CHUNK)
    if boundaries is not None:
        lengths = torch.tensor(boundaries, device=q.device).diff()
    else:
        lengths = torch.full((q.shape[0],), q.shape[1], device=q.device) if mask is None else mask.sum(1)
    reciprocal_count = layout.positions(statistics.count, mask).clamp(min=1).to(kept).reciprocal().unsqueeze(-1)
    real = None
    if mask is not None:
        real = layout.split(mask[:, :, None, None])
    query, correction, second_moment, total = _CurvatureConditionedQuery.apply(
        q,
        k,
        gate,
        statistics.second_moment,
        statistics.total,
        reciprocal_count,
        real,
        layout,
        unit_queries,
        unit_keys,
        centred,
        return_correction,
    )
    # The cast stands outside of the Function: as its last operation, torch 2.11 compiles it into a zero gradient.
    return query.to(query_dtype), correction, KeyStatistics(second_moment, total, statistics.count + lengths)
