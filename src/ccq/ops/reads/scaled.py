"""Read steps that are the Curvature-Conditioned Query with another strength: y = q - lambda f Sigma q, f a factor of
each token and head.

The factor goes into the gate, so that these have the kernels of the read step's own operator, its backward, and no pass
over anything of the size of q besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, check_backend, check_input, check_sequences
from ccq.ops.layout import positions
from ccq.ops.query import BACKENDS, KeyStatistics, curvature_conditioned_query
from ccq.ops.query.arguments import check_gate, check_normalize
from ccq.ops.query.statistics import check_statistics
from ccq.ops.reads.common import QueryResult, read_inputs
from ccq.ops.reads.covariance import Formula, covariance_loop
from ccq.ops.reads.triton_backend import choose_backend


class ScaledInputs(NamedTuple):
    """What a factor is made of."""

    key: Tensor
    """[B, T, H, D], as given"""
    unit_keys: bool
    """Whether they are to be normalised."""
    statistics: KeyStatistics | None
    """Of the keys before the call; None for nothing."""
    sequences: int
    """N"""
    mask: Tensor | None
    """[B, T] bool"""
    boundaries: list[int] | None
    backend: str
    """"torch" or "triton"."""

    def keys_before(self) -> Tensor:
        """[N] int64: how many keys came before the call."""
        if self.statistics is not None:
            return self.statistics.count
        return torch.zeros(self.sequences, dtype=torch.int64, device=self.key.device)

    def tokens_seen(self) -> Tensor:
        """[B, T] in the dtype of sums: how many keys each token sees, its own included; at least 1."""
        count = None if self.statistics is None else self.statistics.count
        edges = None if self.boundaries is None else torch.tensor(self.boundaries, device=self.key.device)
        before = positions(self.key, count, mask=self.mask, cu_seqlens=edges)
        return (before + 1).to(accumulation_dtype(self.key.dtype))


def scaled_read(
    formula: Formula,
    factor: Callable[[ScaledInputs], Tensor],
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    statistics: KeyStatistics | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
    return_correction: bool = True,
    backend: str = "auto",
) -> QueryResult:
    """A read step, by its `formula` with backend "reference", otherwise by its `factor` [B, T, H] or [B, T, 1]."""
    if backend == "reference":
        inputs = read_inputs(
            q,
            k,
            gate,
            cu_seqlens=cu_seqlens,
            mask=mask,
            normalize=normalize,
            query_dtype=query_dtype,
            backend=backend,
        )
        if statistics is None:
            statistics = KeyStatistics.zeros(inputs.sequences, *q.shape[2:], dtype=q.dtype, device=q.device)
        check_statistics(statistics, inputs.sequences, q)
        with torch.autocast(q.device.type, enabled=False):
            query, last = covariance_loop(formula, inputs, statistics)
            return QueryResult(inputs.finish(query), None, last)
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    check_input("k", k, tuple(q.shape), q)
    sequences, real, boundaries = check_sequences(q, cu_seqlens, mask)
    if statistics is not None:
        check_statistics(statistics, sequences, q)
    _, unit_keys = check_normalize(normalize)
    with torch.autocast(q.device.type, enabled=False):
        strength = factor(
            ScaledInputs(k, unit_keys, statistics, sequences, real, boundaries, choose_backend(backend, q))
        )
        result = curvature_conditioned_query(
            q,
            k,
            check_gate(gate, q).to(accumulation_dtype(q.dtype)) * strength,
            statistics=statistics,
            # Not the tensor that came: its values would have to be waited for again.
            cu_seqlens=None if boundaries is None else torch.tensor(boundaries),
            mask=mask,
            normalize=normalize,
            query_dtype=query_dtype,
            return_correction=return_correction,
            backend=backend,
        )
        correction = None if result.correction is None else strength.unsqueeze(-1) * result.correction
        return QueryResult(result.query, correction, result.statistics)
