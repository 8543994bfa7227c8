"""exponential: y = exp(-lambda Sigma) q, where the gradient flow of q^T Sigma q / 2 takes q in time lambda.

One step of that flow is the Curvature-Conditioned Query. The exponential is a polynomial, exp(-lambda Sigma / P) P
times, where P is 1 unless a fixed lambda is above 1 or below -1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ccq.ops.reads.common import QueryResult
from ccq.ops.reads.covariance import Polynomial, covariance_read
from ccq.ops.reads.reference import times

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ccq.ops.reads.common import ReadOptions


FITTED = {
    torch.bfloat16: (0.998891, 0.481285, 0.115215),
    torch.float16: (0.999946, 0.498363, 0.158553, 0.02805),
}
"""c_1 to c_K of 1 + c_1 (-x) + ... + c_K (-x)^K in place of exp(-x), for half precision: those with the smallest
relative error of 1 - exp(-x) over [0, 1] (Remez's exchange), which is 1.1e-3 and 5.5e-5, and as few as keep it below
half the spacing of the dtype. Outside of [0, 1] it grows: to 7 % and 2 % at -1."""


def exponential_query(q: Tensor, k: Tensor, gate: Tensor | float, **options: Unpack[ReadOptions]) -> QueryResult:
    """exp(-gate Sigma) q, to the accuracy of the dtype of q.

    Arguments: see `ccq.ops.reads.ReadOptions`; `statistics` are KeyStatistics. In float32 and float64 it is a series,
    whose length is right for a gate tensor of values in [-1, 1] and for any fixed gate. In float16 and bfloat16 it is
    `FITTED`, for a gate tensor or a fixed gate in [0, 1].
    """
    pieces = 1 if isinstance(gate, Tensor) else max(1, math.ceil(abs(gate)))
    within = isinstance(gate, Tensor) or 0 <= gate <= 1

    def function(dtype: torch.dtype) -> Polynomial:
        if within and dtype in FITTED:
            return Polynomial(FITTED[dtype])
        terms = terms_needed(torch.finfo(dtype).eps)
        return Polynomial(tuple(1 / math.factorial(n) for n in range(1, terms + 1)), pieces)

    return covariance_read(_formula, function, q, k, gate, **options)


def _formula(query: Tensor, covariance: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
    return times(torch.linalg.matrix_exp(-gate.unsqueeze(-1) * covariance), query)


def terms_needed(error: float) -> int:
    """Terms of the series of exp(-x) for x in [0, 1], of which the first left out is below `error`."""
    return next(n for n in range(1, 100) if 1 / math.factorial(n + 1) < error)
