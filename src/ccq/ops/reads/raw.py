"""ccq-raw: the sum in place of the mean, y = q - lambda t Sigma q.

t Sigma = sum (k - mu) (k - mu)^T grows with the number of keys t, so nothing bounds the query. The paper of the read
step (arXiv:2606.01294, section 3.3) names the form without 1 / t as the unstable one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ccq.ops.reads.common import QueryResult
from ccq.ops.reads.reference import times
from ccq.ops.reads.scaled import ScaledInputs, scaled_read

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ccq.ops.reads.common import ReadOptions


def raw_query(q: Tensor, k: Tensor, gate: Tensor | float, **options: Unpack[ReadOptions]) -> QueryResult:
    """q - gate * t Sigma q. Arguments: see `ccq.ops.reads.ReadOptions`; `statistics` are KeyStatistics."""
    return scaled_read(_formula, _factor, q, k, gate, **options)


def _formula(query: Tensor, covariance: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
    return query - gate * seen * times(covariance, query)


def _factor(inputs: ScaledInputs) -> Tensor:
    return inputs.tokens_seen().unsqueeze(-1)
