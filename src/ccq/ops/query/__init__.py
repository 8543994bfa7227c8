"""The read step: the query contracted along the directions in which the keys seen so far vary most.

Linear attention reads its memory S by o = S q. The Curvature-Conditioned Query (arXiv 2606.01294, equation 9)
replaces q by q - lambda Sigma q, where Sigma is the covariance of the keys seen so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import check_backend, check_input, check_sequences
from ccq.ops.operators import TRITON_INSTALLED
from ccq.ops.query.arguments import check_gate, check_normalize, check_query_dtype
from ccq.ops.query.chunked import chunked_curvature_conditioned_query
from ccq.ops.query.fused import (
    fused_curvature_conditioned_query,
    fused_update_and_read_,
    is_supported,
)
from ccq.ops.query.gate import LinearGate, check_linear_gate
from ccq.ops.query.reference import curvature_conditioned_query_reference, l2_normalize
from ccq.ops.query.statistics import (
    KeyStatistics,
    PackedKeyStatistics,
    check_packed_statistics,
    check_statistics,
)

__all__ = [
    "BACKENDS",
    "CurvatureConditionedQueryResult",
    "KeyStatistics",
    "LinearGate",
    "PackedKeyStatistics",
    "UpdateAndReadResult",
    "curvature_conditioned_query",
    "curvature_conditioned_query_and_keys",
    "l2_normalize",
    "update_and_read_",
]

BACKENDS = ("auto", "reference", "torch", "triton")
"""Accepted backends. "auto" is "triton" on a GPU where triton is installed and takes the input (not float64, D up to
256), "torch" otherwise."""


class CurvatureConditionedQueryResult(NamedTuple):
    """What `curvature_conditioned_query` returns."""

    query: Tensor
    """[B, T, H, D], in the dtype of q or as asked for: q - lambda Sigma q, with q as `normalize` leaves it."""
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
    normalize: bool | str = True,
    centred: bool = True,
    return_correction: bool = False,
    query_dtype: torch.dtype | None = None,
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
        normalize: L2-normalise q and k over D, x * rsqrt(sum x^2 + 1e-6) in float32. "keys" leaves the queries their
            length, which the result has too, because the operator is linear in q. "queries" takes the keys as they are,
            False both.
        centred: subtract the mean key's part; False uses the second moment instead of the covariance.
        return_correction: also return Sigma q before the gate.
        query_dtype: of the query that comes back: that of q (None), or float32 (float64 for float64 input), because in
            bfloat16 the correction is often smaller than the spacing of the numbers.
        backend: "reference" is the loop over tokens that defines the result; "torch" is chunked with a closed-form
            backward; "triton" runs the same forms as GPU kernels, for D up to 256 and not for float64; "auto" takes the
            fastest for the device and the input.

    Returns:
        CurvatureConditionedQueryResult(query, correction, statistics). Differentiable in q, k, gate and statistics,
        through all of the outputs; of the gradient in `second_moment` only the symmetric part has a meaning.

    Raises:
        TypeError, ValueError: on wrong types, dtypes, devices or shapes; on statistics of another number of sequences;
            on boundaries that do not run from 0 to T; on a mask with a hole or a gate that is not finite (values of
            tensors are looked at on a CPU only); on input that backend "triton" does not take.
        ImportError, RuntimeError: with backend "triton", if triton is not installed or the tensors are on a CPU.
    """
    return curvature_conditioned_query_and_keys(
        q,
        k,
        gate,
        statistics=statistics,
        cu_seqlens=cu_seqlens,
        mask=mask,
        normalize=normalize,
        centred=centred,
        return_correction=return_correction,
        query_dtype=query_dtype,
        backend=backend,
    )[0]


def curvature_conditioned_query_and_keys(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    statistics: KeyStatistics | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    centred: bool = True,
    return_correction: bool = False,
    query_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[CurvatureConditionedQueryResult, Tensor]:
    """`curvature_conditioned_query`, and the keys to write with: the numbers of k, whatever `normalize` says.

    A layer uses its keys twice, and the two gradients are added. Where it writes with the keys that come back, the
    last kernel of "triton" adds the gradient that reaches them, at padding too, to its own before that is rounded; a
    pass over both is saved. With the other backends, in compiled graphs and without gradients it is k itself that comes
    back.

    Arguments and errors as in `curvature_conditioned_query`.

    Returns:
        (CurvatureConditionedQueryResult(query, correction, statistics), keys [B, T, H, D] in the dtype of k).
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    check_input("k", k, tuple(q.shape), q)
    gate = check_gate(gate, q)
    query_dtype = check_query_dtype(query_dtype, q)
    unit_queries, unit_keys = check_normalize(normalize)
    sequences, mask, boundaries = check_sequences(q, cu_seqlens, mask)
    chosen = _choose(backend, q)
    if statistics is not None:
        check_statistics(statistics, sequences, q)

    # Sums of a float32 state must not be rounded by an autocast around the model.
    with torch.autocast(q.device.type, enabled=False):
        if chosen == "triton":
            query, correction, last, keys = fused_curvature_conditioned_query(
                q,
                k,
                gate,
                statistics,
                mask=mask,
                boundaries=boundaries,
                unit_queries=unit_queries,
                unit_keys=unit_keys,
                centred=centred,
                return_correction=return_correction,
                query_dtype=query_dtype,
            )
            return CurvatureConditionedQueryResult(query, correction, last), keys
        if statistics is None:
            statistics = KeyStatistics.zeros(sequences, q.shape[2], q.shape[3], dtype=q.dtype, device=q.device)
        if chosen == "reference":
            query, correction, last = curvature_conditioned_query_reference(
                q,
                k,
                gate,
                statistics,
                mask=mask,
                boundaries=boundaries,
                unit_queries=unit_queries,
                unit_keys=unit_keys,
                centred=centred,
            )
            result = CurvatureConditionedQueryResult(
                query.to(query_dtype), correction if return_correction else None, last
            )
            return result, k
        result = CurvatureConditionedQueryResult(
            *chunked_curvature_conditioned_query(
                q,
                k,
                gate,
                statistics,
                mask=mask,
                boundaries=boundaries,
                unit_queries=unit_queries,
                unit_keys=unit_keys,
                centred=centred,
                return_correction=return_correction,
                query_dtype=query_dtype,
            )
        )
        return result, k


class UpdateAndReadResult(NamedTuple):
    """What `update_and_read_` returns."""

    query: Tensor
    """[N, 1, H, D], as in `CurvatureConditionedQueryResult`."""
    correction: Tensor | None
    """[N, 1, H, D], as there."""
    statistics: PackedKeyStatistics
    """The argument, with the token in it."""


def update_and_read_(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float | LinearGate,
    statistics: PackedKeyStatistics,
    *,
    normalize: bool | str = True,
    centred: bool = True,
    return_correction: bool = False,
    query_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> UpdateAndReadResult:
    """One token of every sequence for decoding, with `statistics` overwritten instead of returned anew.

    The addresses of the statistics stay the same, so that a CUDA graph can replay the call; nothing is allocated for
    them, and of the second moment one triangle is kept and moved. Otherwise it equals `curvature_conditioned_query`
    with T = 1, but knows no gradients.

    Args:
        q: [N, 1, H, D] queries; float64, float32, float16 or bfloat16.
        k: [N, 1, H, D] keys, same dtype and device.
        gate: [N, 1, H] in any floating-point dtype, or one number, or a `LinearGate`, which the kernels of "triton"
            compute along with the query.
        statistics: of the keys before this call, `PackedKeyStatistics.of` those that `curvature_conditioned_query`
            returned; contiguous tensors.
        normalize, centred, return_correction, query_dtype, backend: as in `curvature_conditioned_query`.

    Returns:
        UpdateAndReadResult(query, correction, statistics), the last being the argument.

    Raises:
        TypeError, ValueError: as `curvature_conditioned_query`; on more or fewer tokens than one; on statistics that
            are not packed or not contiguous; if an input requires a gradient while gradients are recorded.
        ImportError, RuntimeError: as `curvature_conditioned_query`.
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("N", 1, "H", "D"))
    check_input("k", k, tuple(q.shape), q)
    if isinstance(gate, LinearGate):
        check_linear_gate(gate, q)
    else:
        gate = check_gate(gate, q)
    query_dtype = check_query_dtype(query_dtype, q)
    unit_queries, unit_keys = check_normalize(normalize)
    check_packed_statistics(statistics, q.shape[0], q)
    for name, field in zip(statistics._fields, statistics, strict=True):
        if not field.is_contiguous():
            raise ValueError(f"statistics.{name} must be contiguous to be overwritten, got strides {field.stride()}")
    of_the_gate = gate if isinstance(gate, LinearGate) else (gate,)
    given = (q, k, *statistics, *(x for x in of_the_gate if x is not None))
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise ValueError(
            "update_and_read_ overwrites the statistics and knows no gradients; call it under torch.no_grad(), or "
            "take curvature_conditioned_query"
        )
    chosen = _choose(backend, q)
    options: dict[str, Any] = {"unit_queries": unit_queries, "unit_keys": unit_keys, "centred": centred}
    if chosen == "triton":
        options |= {"return_correction": return_correction, "query_dtype": query_dtype}
        query, correction = fused_update_and_read_(q, k, gate, statistics, **options)
        return UpdateAndReadResult(query, correction, statistics)
    options |= {"mask": None, "boundaries": None}
    with torch.autocast(q.device.type, enabled=False):
        inputs = (q, k, gate.value() if isinstance(gate, LinearGate) else gate, statistics.unpacked())
        if chosen == "torch":
            options |= {"return_correction": return_correction, "query_dtype": query_dtype}
            query, correction, last = chunked_curvature_conditioned_query(*inputs, **options)
        else:
            query, found, last = curvature_conditioned_query_reference(*inputs, **options)
            query, correction = query.to(query_dtype), found if return_correction else None
    for field, new in zip(statistics, PackedKeyStatistics.of(last), strict=True):
        field.copy_(new)
    return UpdateAndReadResult(query, correction, statistics)


def _choose(backend: str, q: Tensor) -> str:
    """The backend that "auto" stands for."""
    if backend != "auto":
        return backend
    return "triton" if q.is_cuda and TRITON_INSTALLED and is_supported(q) else "torch"
