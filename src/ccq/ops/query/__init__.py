"""The read step: the query contracted along the directions in which the keys seen so far vary most.

Linear attention reads its memory S by o = S q. The Curvature-Conditioned Query (arXiv 2606.01294, equation 9)
replaces q by q - lambda Sigma q, where Sigma is the covariance of the keys seen so far.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import (
    FLOATS,
    check_backend,
    check_device,
    check_input,
    check_sequences,
    check_shape,
    describe,
    values_can_be_read,
)
from ccq.ops.query.chunked import chunked_curvature_conditioned_query
from ccq.ops.query.reference import curvature_conditioned_query_reference, l2_normalize
from ccq.ops.query.statistics import KeyStatistics, check_statistics

__all__ = [
    "BACKENDS",
    "CurvatureConditionedQueryResult",
    "KeyStatistics",
    "curvature_conditioned_query",
    "l2_normalize",
]

BACKENDS = ("auto", "reference", "torch")
"""Accepted backends. "auto" is "torch" on every device."""


class CurvatureConditionedQueryResult(NamedTuple):
    """What `curvature_conditioned_query` returns."""

    query: Tensor
    """[B, T, H, D], in the dtype of q: q - lambda Sigma q, from normalised q unless normalize=False."""
    correction: Tensor | None
    """[B, T, H, D] float32 (float64 for float64 input): Sigma q before the gate; None unless asked for."""
    statistics: KeyStatistics
    """The statistics after the last token of each sequence; give them to the next call to go on."""


def curvature_conditioned_query(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    statistics: KeyStatistics | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool = True,
    centred: bool = True,
    return_correction: bool = False,
    backend: str = "auto",
) -> CurvatureConditionedQueryResult:
    """Contract each query along the directions in which the keys seen so far vary: q - gate * Cov(keys) q.

    Token i sees the keys of its sequence up to and including its own. With t of them, second moment C = sum k k^T / t
    and mean mu = sum k / t, the result is q - gate (C - mu mu^T) q (paper, equations 8 and 9). Only the query changes:
    read the memory of any linear-attention layer with it, and do not normalise it again.

    Args:
        q: [B, T, H, D] queries; float64, float32, float16 or bfloat16.
        k: [B, T, H, D] keys, same dtype and device.
        gate: lambda, [B, T, H] in any floating-point dtype, or one number. Any finite value; in [0, 1] the query never
            grows.
        statistics: of the keys before this call, as an earlier call returned them; None starts at nothing.
        cu_seqlens: [N + 1] int32 or int64 boundaries of N packed documents, with B = 1; from 0 to T; empty documents
            are allowed. The statistics then have one entry a document. Excludes `mask`.
        mask: [B, T], 1 = real token, 0 = padding, the ones of a row without a gap. Padding is not counted, receives no
            correction and no gradient; its query comes back normalised.
        normalize: L2-normalise q and k over D, x * rsqrt(sum x^2 + 1e-6) in float32. False takes both as they are; the
            operator is linear in q, so raw queries with normalised keys keep their length.
        centred: subtract the mean key's part; False uses the second moment instead of the covariance.
        return_correction: also return Sigma q before the gate.
        backend: "reference" is the loop over tokens that defines the result; "torch" is chunked with a closed-form
            backward; "auto" takes the fastest for the device.

    Returns:
        CurvatureConditionedQueryResult(query, correction, statistics). Differentiable in q, k, gate and statistics,
        through all of the outputs; of the gradient in `second_moment` only the symmetric part has a meaning.

    Raises:
        TypeError, ValueError: on wrong types, dtypes, devices or shapes; on statistics of another number of sequences;
            on boundaries that do not run from 0 to T; on a mask with a hole or a gate that is not finite (values of
            tensors are looked at on a CPU only).
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    check_input("k", k, tuple(q.shape), q)
    gate = _check_gate(gate, q)
    sequences, mask, boundaries = check_sequences(q, cu_seqlens, mask)
    if statistics is None:
        statistics = KeyStatistics.zeros(sequences, q.shape[2], q.shape[3], dtype=q.dtype, device=q.device)
    else:
        check_statistics(statistics, sequences, q)

    # Sums of a float32 state must not be rounded by an autocast around the model.
    with torch.autocast(q.device.type, enabled=False):
        if backend == "reference":
            query, correction, last = curvature_conditioned_query_reference(
                q, k, gate, statistics, mask=mask, boundaries=boundaries, normalize=normalize, centred=centred
            )
            return CurvatureConditionedQueryResult(query.to(q.dtype), correction if return_correction else None, last)
        return CurvatureConditionedQueryResult(
            *chunked_curvature_conditioned_query(
                q,
                k,
                gate,
                statistics,
                mask=mask,
                boundaries=boundaries,
                normalize=normalize,
                centred=centred,
                return_correction=return_correction,
            )
        )


def _check_gate(gate: Tensor | float, q: Tensor) -> Tensor:
    """The gate as a tensor [B, T, H]."""
    if isinstance(gate, Tensor):
        if gate.dtype not in FLOATS:
            raise TypeError(f"gate must be a floating-point tensor or a number, got {describe(gate)}")
        check_shape("gate", gate, tuple(q.shape[:3]))
        check_device("gate", gate, q)
        if values_can_be_read(gate) and not torch.isfinite(gate).all():
            bad = int((~torch.isfinite(gate)).sum())
            raise ValueError(f"gate must be finite, got {bad} NaN or infinite values in {describe(gate)}")
        return gate
    if isinstance(gate, bool) or not isinstance(gate, (int, float)):
        raise TypeError(f"gate must be a tensor [B, T, H] or a number, got {type(gate).__name__}")
    if not math.isfinite(gate):
        raise ValueError(f"gate must be finite, got {gate}")
    return torch.full(q.shape[:3], float(gate), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
