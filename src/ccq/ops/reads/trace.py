"""ccq-trace: the covariance over its trace, y = q - lambda Sigma q / tr(Sigma).

The trace of the covariance of unit keys is 1 - |mu|^2, so keys that share a large mean have a small covariance
whatever their directions. This control gives every covariance the trace 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ccq.ops.reads.common import QueryResult, running_sum, tokens_seen
from ccq.ops.reads.covariance import Answer, Covariance, covariance_read
from ccq.ops.reads.reference import times

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
    return covariance_read(_formula, _answer, q, k, gate, **options)


def _formula(query: Tensor, covariance: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    return query - gate * times(covariance, query) / trace.clamp(min=SMALLEST_TRACE)


def _answer(sigma: Covariance) -> Answer:
    inputs = sigma.inputs
    pushed, last = sigma.times(inputs.query, inputs.dtype)
    seen = tokens_seen(inputs, sigma.statistics.count).unsqueeze(-1)
    squares = sigma.statistics.second_moment.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    squares, _ = running_sum(inputs.key.square().sum(-1, keepdim=True), squares, inputs)
    total, _ = running_sum(inputs.key, sigma.statistics.total, inputs)
    trace = squares / seen - (total / seen).square().sum(-1, keepdim=True)
    correction = pushed / trace.clamp(min=SMALLEST_TRACE)
    return Answer(inputs.query - inputs.gate * correction, correction, last)
