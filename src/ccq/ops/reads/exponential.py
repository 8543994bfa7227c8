"""exponential: y = exp(-lambda Sigma) q, where the gradient flow of q^T Sigma q / 2 takes q in time lambda.

One step of that flow is the Curvature-Conditioned Query. The exponential is summed as a series, exp(-lambda Sigma / P)
P times, where P is 1 unless a fixed lambda is above 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ccq.ops.reads.common import QueryResult
from ccq.ops.reads.covariance import Answer, Covariance, covariance_read
from ccq.ops.reads.reference import times

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ccq.ops.reads.common import ReadOptions


def exponential_query(q: Tensor, k: Tensor, gate: Tensor | float, **options: Unpack[ReadOptions]) -> QueryResult:
    """exp(-gate Sigma) q. Arguments: see `ccq.ops.reads.ReadOptions`; `statistics` are KeyStatistics. The length of the
    series is right for a gate tensor of values in [-1, 1] and for any fixed gate.
    """
    pieces = 1 if isinstance(gate, Tensor) else max(1, math.ceil(abs(gate)))

    def answer(sigma: Covariance) -> Answer:
        inputs, last = sigma.inputs, sigma.statistics
        share = inputs.gate / pieces
        x, correction = inputs.query, torch.zeros_like(inputs.query)
        for _ in range(pieces):
            term = x
            for n in range(1, terms_needed(torch.finfo(inputs.query.dtype).eps) + 1):
                pushed, last = sigma.times(term, inputs.dtype)
                correction = correction + pushed / (n * pieces)
                term = -share * pushed / n
                x = x + term
        return Answer(x, correction, last)

    return covariance_read(_formula, answer, q, k, gate, **options)


def _formula(query: Tensor, covariance: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
    return times(torch.linalg.matrix_exp(-gate.unsqueeze(-1) * covariance), query)


def terms_needed(error: float) -> int:
    """Terms of the series of exp(-x) for x in [0, 1], of which the first left out is below `error`."""
    return next(n for n in range(1, 100) if 1 / math.factorial(n + 1) < error)
