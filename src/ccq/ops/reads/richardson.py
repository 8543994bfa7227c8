"""richardson: K steps of Richardson's iteration for (I + lambda Sigma) x = q, started at x = q.

x <- x + (q - (I + lambda Sigma) x) = q - lambda Sigma x. One step is the Curvature-Conditioned Query; the limit, for
lambda |Sigma| < 1, is the read step "exact". K steps are the polynomial 1 - x + x^2 - ... of degree K in lambda Sigma.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ccq.ops.reads.common import QueryResult, check_number
from ccq.ops.reads.covariance import Polynomial, covariance_read
from ccq.ops.reads.reference import times

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ccq.ops.reads.common import ReadOptions


def richardson_query(
    q: Tensor, k: Tensor, gate: Tensor | float, *, steps: int = 3, **options: Unpack[ReadOptions]
) -> QueryResult:
    """q - gate * Sigma x with x from the step before, `steps` >= 1 times. Arguments: see `ccq.ops.reads.ReadOptions`;
    `statistics` are KeyStatistics.
    """
    steps = check_number("steps", steps)

    def formula(query: Tensor, covariance: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
        x = query
        for _ in range(steps):
            x = query - gate * times(covariance, x)
        return x

    return covariance_read(formula, lambda dtype: Polynomial((1.0,) * steps), q, k, gate, **options)
