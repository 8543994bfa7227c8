"""ccq-trace: the covariance over its trace, y = q - lambda Sigma q / tr(Sigma).

The trace of the covariance of unit keys is 1 - |mu|^2, so keys that share a large mean have a small covariance
whatever their directions. This control gives every covariance the trace 1.

Of all keys tr(Sigma) = s / t - |mu|^2 with s the sum of their squared lengths, so that no matrix is needed for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.layout import ChunkLayout
from ccq.ops.query import l2_normalize
from ccq.ops.query.chunked import CHUNK
from ccq.ops.reads.common import QueryResult, scan
from ccq.ops.reads.mean.operator import inverse_trace
from ccq.ops.reads.reference import times
from ccq.ops.reads.scaled import ScaledInputs, scaled_read

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ccq.ops.reads.common import ReadOptions

SMALLEST_TRACE = 1e-3
"""A trace is taken for at least this. The first key of a sequence has none, and what is left of equal keys is
rounding."""


def trace_query(q: Tensor, k: Tensor, gate: Tensor | float, **options: Unpack[ReadOptions]) -> QueryResult:
    """q - gate * Sigma q / max(tr(Sigma), 0.001). Arguments: see `ccq.ops.reads.ReadOptions`; `statistics` are
    KeyStatistics.
    """
    return scaled_read(_formula, _factor, q, k, gate, **options)


def _formula(query: Tensor, covariance: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    return query - gate * times(covariance, query) / trace.clamp(min=SMALLEST_TRACE)


def _factor(inputs: ScaledInputs) -> Tensor:
    """One over the trace; zero at a first key, which has no covariance, so that its rounding is not multiplied."""
    sums = _sums_before(inputs)
    if inputs.backend == "triton":
        inverse, _ = inverse_trace(
            inputs.key,
            sums,
            inputs.keys_before(),
            inputs.mask,
            inputs.boundaries,
            inputs.unit_keys,
            SMALLEST_TRACE,
        )
        return inverse
    key = inputs.key
    if inputs.mask is not None:
        key = torch.where(inputs.mask[..., None, None], key, 0)
    key = l2_normalize(key) if inputs.unit_keys else key.to(sums.dtype)
    layout = ChunkLayout.of(key, inputs.boundaries, CHUNK)
    inside = layout.split(torch.cat((key, key.square().sum(-1, keepdim=True)), -1)).cumsum(-2)
    before, _ = scan(layout, inside[:, :, -1], sums)
    seen = inputs.tokens_seen().unsqueeze(-1)
    means = layout.merge(inside + before.unsqueeze(-2)) / seen.unsqueeze(-1)
    trace = means[..., -1] - means[..., :-1].square().sum(-1)
    return (seen > 1) / trace.clamp(min=SMALLEST_TRACE)


def _sums_before(inputs: ScaledInputs) -> Tensor:
    """[N, H, D + 1]: of the keys before the call, and of their squared lengths."""
    heads, size = inputs.key.shape[2:]
    if inputs.statistics is None:
        kept = accumulation_dtype(inputs.key.dtype)
        return inputs.key.new_zeros((inputs.sequences, heads, size + 1), dtype=kept)
    squares = inputs.statistics.second_moment.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    return torch.cat((inputs.statistics.total, squares), -1)
