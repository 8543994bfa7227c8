"""The read step as a loop over tokens: the specification that every other implementation is tested against."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.query.statistics import KeyStatistics

NORM_EPSILON = 1e-6
"""Added to the squared length before the root, so that a zero vector stays zero."""


def l2_normalize(x: Tensor) -> Tensor:
    """x * rsqrt(sum x^2 + 1e-6) over the last dimension, in float32 (float64 for float64 input)."""
    x = x.to(accumulation_dtype(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def curvature_conditioned_query_step(
    query: Tensor, key: Tensor, gate: Tensor, second_moment: Tensor, total: Tensor, seen: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token of every sequence: query, key [N, H, D], gate [N, H, 1], all in the dtype of the statistics.

    second_moment [N, H, D, D] and total [N, H, D] are those before the token; seen [N, 1, 1] is the count with it, at
    least 1. Returns the query, the correction, and the new second moment and total.
    """
    second_moment = second_moment + key.unsqueeze(-1) * key.unsqueeze(-2)
    total = total + key
    correction = (second_moment @ query.unsqueeze(-1)).squeeze(-1) / seen
    if centred:
        mean = total / seen
        correction = correction - mean * (mean * query).sum(-1, keepdim=True)
    return query - gate * correction, correction, second_moment, total


def curvature_conditioned_query_reference(
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
) -> tuple[Tensor, Tensor, KeyStatistics]:
    """The recurrence, token by token, with ordinary automatic differentiation.

    For each token (paper, equations 8 and 9; the current key is included before it is read):

        M += k k^T,  m += k,  t += 1
        r = M q / t - (m / t) ((m / t) . q)        the second term only if centred
        y = q - gate * r

    q, k [B, T, H, D]; gate [B, T, H]; mask [B, T] bool; boundaries: the N + 1 document boundaries of packed input.
    Returns the query and the correction r, both [B, T, H, D] in the accumulation dtype, and the statistics after the
    last token.
    """
    if boundaries is not None:
        documents = [
            curvature_conditioned_query_reference(
                q[:, start:end],
                k[:, start:end],
                gate[:, start:end],
                KeyStatistics(*(field[n : n + 1] for field in statistics)),
                mask=None,
                boundaries=None,
                unit_queries=unit_queries,
                unit_keys=unit_keys,
                centred=centred,
            )
            for n, (start, end) in enumerate(itertools.pairwise(boundaries))
        ]
        if not documents:
            return q.to(statistics.total.dtype), q.to(statistics.total.dtype), statistics
        document_queries, document_corrections, finals = zip(*documents, strict=True)
        joined = KeyStatistics(*(torch.cat(fields) for fields in zip(*finals, strict=True)))
        return torch.cat(document_queries, 1), torch.cat(document_corrections, 1), joined

    kept = accumulation_dtype(q.dtype)
    real = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask
    padding = ~real[:, :, None, None]
    padded_query = l2_normalize(q.detach()) if unit_queries else q.detach().to(kept)
    # Emptied before anything is computed: whatever stands in the padding, NaN included, must not spread.
    q, k, gate = (
        q.masked_fill(padding, 0),
        k.masked_fill(padding, 0),
        gate.unsqueeze(-1).masked_fill(padding, 0).to(kept),
    )
    q = l2_normalize(q) if unit_queries else q.to(kept)
    k = l2_normalize(k) if unit_keys else k.to(kept)
    second_moment, total, count = statistics
    queries, corrections = [], []
    for i in range(q.shape[1]):
        count = count + real[:, i]
        seen = count.clamp(min=1).to(kept)[:, None, None]
        query, correction, second_moment, total = curvature_conditioned_query_step(
            q[:, i], k[:, i], gate[:, i], second_moment, total, seen, centred
        )
        queries.append(torch.where(padding[:, i], padded_query[:, i], query))
        corrections.append(correction)
    if not queries:
        return q, torch.zeros_like(q), statistics
    return torch.stack(queries, 1), torch.stack(corrections, 1), KeyStatistics(second_moment, total, count)
