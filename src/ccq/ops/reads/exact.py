"""exact: the ridge solution y = (I + lambda Sigma)^-1 q, of which the Curvature-Conditioned Query is the first step.

Solved by conjugate gradients, one system a token. The spectrum of I + lambda Sigma lies in [1, 1 + lambda] for unit
keys, so a fixed number of steps is enough: the error falls by (sqrt(c) - 1) / (sqrt(c) + 1) a step, c = 1 + lambda.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ccq.ops.reads.common import QueryResult
from ccq.ops.reads.covariance import Solution, covariance_read

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ccq.ops.reads.common import ReadOptions


def exact_query(q: Tensor, k: Tensor, gate: Tensor | float, **options: Unpack[ReadOptions]) -> QueryResult:
    """(I + gate Sigma)^-1 q, to the accuracy of the dtype of q.

    Arguments: see `ccq.ops.reads.ReadOptions`; `statistics` are KeyStatistics. The number of steps is right for a gate
    tensor of values in [0, 1] and for any fixed gate of 0 or more: the bound on what they leave of the error is below
    the spacing of the dtype, which for float16 and bfloat16 is also what their products can tell apart.
    """
    bound = 1.0 if isinstance(gate, Tensor) else check_gate_of_exact(gate)

    def function(dtype: torch.dtype) -> Solution:
        return Solution(steps_needed(bound, torch.finfo(dtype).eps))

    return covariance_read(_formula, function, q, k, gate, **options)


def _formula(query: Tensor, covariance: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
    identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
    return torch.linalg.solve(identity + gate.unsqueeze(-1) * covariance, query)


def check_gate_of_exact(gate: float) -> float:
    """A fixed lambda, of at least 0: below -1 the system may have no solution."""
    if gate < 0:
        raise ValueError(f"a fixed gate of read step exact must be at least 0, got {gate}")
    return float(gate)


def steps_needed(gate: float, error: float) -> int:
    """Steps after which conjugate gradients have reduced the error to `error`, for lambda up to `gate`."""
    root = math.sqrt(1 + max(gate, 1.0))
    return math.ceil(math.log(2 / error) / math.log((root + 1) / (root - 1)))
