"""ccq-mean: the direction of the mean key alone, y = q - lambda mu (mu^T q).

What centring adds: the uncentred read step contracts by C = Sigma + mu mu^T, this one by mu mu^T. Its state is a vector
a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, check_backend, check_input
from ccq.ops.query import BACKENDS
from ccq.ops.query.arguments import check_gate
from ccq.ops.reads.common import QueryResult, ReadInputs, check_read_state, read_inputs, running_sum, tokens_seen
from ccq.ops.reads.mean.operator import mean_read
from ccq.ops.reads.reference import read_loop
from ccq.ops.reads.triton_backend import check_call, choose_backend


class KeyMean(NamedTuple):
    """Total and count of the keys of each sequence. Its names are not a part of those of KeyStatistics, so that a state
    that lacks a tensor is not taken for another.
    """

    key_total: Tensor
    """[N, H, D] float32 (float64 for float64 input)"""
    count: Tensor  # type: ignore[assignment]  # a field, not the method of tuple
    """[N] int64"""

    @classmethod
    def zeros(cls, sequences: int, heads: int, size: int, *, dtype: torch.dtype, device: torch.device) -> KeyMean:
        return cls(
            torch.zeros(sequences, heads, size, dtype=accumulation_dtype(dtype), device=device),
            torch.zeros(sequences, dtype=torch.int64, device=device),
        )


def mean_query(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    statistics: KeyMean | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
    return_correction: bool = True,
    backend: str = "auto",
) -> QueryResult:
    """q - gate * mu (mu . q), mu the mean of the keys so far. Arguments: see `ccq.ops.reads.ReadOptions`."""
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    if choose_backend(backend, q) == "triton":
        return _by_kernels(
            q,
            k,
            gate,
            statistics,
            cu_seqlens=cu_seqlens,
            mask=mask,
            normalize=normalize,
            query_dtype=query_dtype,
            return_correction=return_correction,
        )
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
    statistics = _state(statistics, inputs.sequences, q)
    with torch.autocast(q.device.type, enabled=False):
        if backend == "reference":
            query, last = _loop(inputs, statistics)
            return QueryResult(inputs.finish(query), None, last)
        total, last_total = running_sum(inputs.key, statistics.key_total, inputs)
        mean = total / tokens_seen(inputs, statistics.count).unsqueeze(-1)
        correction = mean * torch.linalg.vecdot(mean, inputs.query).unsqueeze(-1)
        last = KeyMean(last_total, statistics.count + tokens_added(inputs))
        query = inputs.finish(inputs.query - inputs.gate * correction)
        return QueryResult(query, correction if return_correction else None, last)


def _state(statistics: KeyMean | None, sequences: int, q: Tensor) -> KeyMean:
    if statistics is None:
        return KeyMean.zeros(sequences, *q.shape[2:], dtype=q.dtype, device=q.device)
    check_read_state(statistics, KeyMean, {"key_total": (sequences, *q.shape[2:]), "count": (sequences,)}, q)
    return statistics


def _by_kernels(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    statistics: KeyMean | None,
    *,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    normalize: bool | str,
    query_dtype: torch.dtype | None,
    return_correction: bool,
) -> QueryResult:
    call = check_call(q, k, cu_seqlens=cu_seqlens, mask=mask, normalize=normalize, query_dtype=query_dtype)
    statistics = _state(statistics, call.sequences, q)
    query, correction, *last, _ = mean_read(
        q, k, check_gate(gate, q), *statistics, call.mask, call.boundaries, call.unit_queries, call.unit_keys,
        return_correction, call.query_dtype != q.dtype,
    )  # fmt: skip
    return QueryResult(query, correction if return_correction else None, KeyMean(*last))


def _loop(inputs: ReadInputs, statistics: KeyMean) -> tuple[Tensor, KeyMean]:
    """m += k,  t += 1,  y = q - lambda (m / t) ((m / t) . q)"""

    def step(state: KeyMean, query: Tensor, key: Tensor, gate: Tensor) -> tuple[Tensor, KeyMean]:
        state = KeyMean(state.key_total + key, state.count + 1)
        mean = state.key_total / state.count.to(key.dtype)[:, None, None]
        return query - gate * mean * (mean * query).sum(-1, keepdim=True), state

    return read_loop(step, (inputs.query, inputs.key, inputs.gate), statistics, inputs)


def tokens_added(inputs: ReadInputs) -> Tensor:
    """[N] int64: how many real tokens each sequence has in this call."""
    if inputs.boundaries is not None:
        return torch.tensor(inputs.boundaries, device=inputs.query.device).diff()
    rows, tokens = inputs.query.shape[:2]
    if inputs.mask is not None:
        return inputs.mask.sum(1)
    return torch.full((rows,), tokens, device=inputs.query.device)
