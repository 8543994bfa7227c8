"""ccq-two-reads: the Curvature-Conditioned Query in two parts, q and lambda Sigma q, for a memory that is read twice.

In exact arithmetic their difference is the query of the read step. Each part is rounded to its own spacing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import check_backend, check_input
from ccq.ops.query import BACKENDS, KeyStatistics, curvature_conditioned_query, l2_normalize
from ccq.ops.query.arguments import check_gate
from ccq.ops.query.statistics import check_statistics
from ccq.ops.reads.triton_backend import check_call, choose_backend
from ccq.ops.reads.two_parts.operator import read_in_parts


class QueryParts(NamedTuple):
    """What `query_in_parts` returns."""

    kept: Tensor
    """[B, T, H, D] in the dtype of q: q as `normalize` leaves it."""
    removed: Tensor
    """[B, T, H, D], same dtype: gate * Sigma q; zero at padding."""
    correction: Tensor | None
    """[B, T, H, D] float32 (float64 for float64 input): Sigma q; None unless asked for."""
    statistics: KeyStatistics
    """After the last token of each sequence."""


def query_in_parts(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    statistics: KeyStatistics | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    return_correction: bool = False,
    backend: str = "auto",
) -> QueryParts:
    """q and gate * Sigma q apart. Arguments and errors: see `ccq.ops.query.curvature_conditioned_query`.

    With backend "triton" nothing of float32 is kept for the backward pass; one token, or a correction that is asked
    for, are read by the read step's own operator.
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    if choose_backend(backend, q) == "triton" and q.shape[1] > 1 and not return_correction:
        call = check_call(q, k, cu_seqlens=cu_seqlens, mask=mask, normalize=normalize, query_dtype=None)
        strength = check_gate(gate, q)
        moment: Tensor | None = None
        if statistics is None:
            _, total, count = KeyStatistics.zeros(call.sequences, *q.shape[2:], dtype=q.dtype, device=q.device)
        else:
            check_statistics(statistics, call.sequences, q)
            moment, total, count = statistics
        kept, removed, *last = read_in_parts(
            q, k, strength, moment, total, count, call.mask, call.boundaries, call.unit_queries, call.unit_keys
        )[:5]
        return QueryParts(kept, removed, None, KeyStatistics(*last))
    result = curvature_conditioned_query(
        q,
        k,
        gate,
        statistics=statistics,
        cu_seqlens=cu_seqlens,
        mask=mask,
        normalize=normalize,
        return_correction=True,
        backend=backend,
    )
    assert result.correction is not None
    with torch.autocast(q.device.type, enabled=False):
        removed = gate.unsqueeze(-1) * result.correction if isinstance(gate, Tensor) else gate * result.correction
        kept = _kept(q, normalize)
        if mask is not None:
            real = mask.to(torch.bool)[..., None, None]
            # The gate of padding may be no number.
            removed = torch.where(real, removed, 0)
            # Padding has no gradient, and is emptied first: 0 times that of what is no number would be no number.
            kept = torch.where(real, _kept(torch.where(real, q, 0), normalize), kept.detach())
    return QueryParts(kept, removed.to(q.dtype), result.correction if return_correction else None, result.statistics)


def _kept(q: Tensor, normalize: bool | str) -> Tensor:
    """q as `normalize` leaves it."""
    return l2_normalize(q).to(q.dtype) if normalize in (True, "queries") else q
