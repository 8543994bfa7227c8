"""ccq-decay: y = q - lambda Sigma q, with the statistics forgotten as the memory forgets.

The memory of a backbone with decay alpha_t is the sum of v k^T with older keys counting less; Sigma of the paper counts
all keys alike, and a covariance aligned with the decay is its named follow-up (arXiv:2606.01294, modelling choices):

    M <- alpha M + k k^T,  m <- alpha m + k,  n <- alpha n + 1,  Sigma = M / n - (m / n) (m / n)^T

alpha is one number a head. Where the backbone has one for each channel of a head (GLA), or the heads of a group share
their keys (Mamba2), it is the geometric mean of those.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, check_backend, check_input
from ccq.ops.query import BACKENDS
from ccq.ops.query.arguments import check_gate
from ccq.ops.reads.common import QueryResult, ReadInputs, check_read_state, read_inputs
from ccq.ops.reads.decay.operator import decay_read
from ccq.ops.reads.decayed import DecayedChunks, head_decay
from ccq.ops.reads.decayed.operator import MAX_SIZE
from ccq.ops.reads.reference import read_loop, times
from ccq.ops.reads.triton_backend import check_call, choose_backend


class DecayedKeyStatistics(NamedTuple):
    """Second moment, total and weight of the keys of each sequence, older keys counting less."""

    second_moment: Tensor
    """[N, H, D, D] float32 (float64 for float64 input), symmetric"""
    total: Tensor
    """[N, H, D], same dtype"""
    weight: Tensor
    """[N, H], same dtype: the sum of what the keys count."""

    @classmethod
    def zeros(
        cls, sequences: int, heads: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> DecayedKeyStatistics:
        shapes = ((sequences, heads, size, size), (sequences, heads, size), (sequences, heads))
        return cls(*(torch.zeros(shape, dtype=accumulation_dtype(dtype), device=device) for shape in shapes))


def decay_query(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    log_decay: Tensor | None,
    statistics: DecayedKeyStatistics | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
    return_correction: bool = True,
    backend: str = "auto",
) -> QueryResult:
    """q - gate * Sigma q with decayed statistics. Arguments: see `ccq.ops.reads.ReadOptions`, and

    log_decay: the backbone's, at most 0, [B, T, H] of each head or [B, T, H, X] of its X parts, of which the mean is
        taken; differentiable.

    Backend "triton" takes D up to 128.
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    if choose_backend(backend, q, MAX_SIZE) == "triton":
        call = check_call(q, k, cu_seqlens=cu_seqlens, mask=mask, normalize=normalize, query_dtype=query_dtype)
        gate, log_decay = check_gate(gate, q), head_decay(log_decay, q)
        if statistics is not None:
            _check_statistics(statistics, call.sequences, q)
        query, correction, *last = decay_read(
            q, k, gate, log_decay, *((None,) * 3 if statistics is None else statistics), call.mask,
            call.boundaries, call.unit_queries, call.unit_keys, return_correction, call.query_dtype != q.dtype,
        )  # fmt: skip
        return QueryResult(query, correction if return_correction else None, DecayedKeyStatistics(*last[:3]))
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
    log_decay = head_decay(log_decay, inputs.query)
    if statistics is None:
        statistics = DecayedKeyStatistics.zeros(inputs.sequences, *q.shape[2:], dtype=q.dtype, device=q.device)
    _check_statistics(statistics, inputs.sequences, q)
    with torch.autocast(q.device.type, enabled=False):
        if backend == "reference":
            query, last = _loop(inputs, log_decay, statistics)
            return QueryResult(inputs.finish(query), None, last)
        correction, last = _chunked(inputs, log_decay, statistics)
        query = inputs.finish(inputs.query - inputs.gate * correction)
        return QueryResult(query, correction if return_correction else None, last)


def _check_statistics(statistics: DecayedKeyStatistics, sequences: int, q: Tensor) -> None:
    first, size = (sequences, q.shape[2]), q.shape[3]
    shapes = {"second_moment": (*first, size, size), "total": (*first, size), "weight": first}
    check_read_state(statistics, DecayedKeyStatistics, shapes, q)


def _loop(
    inputs: ReadInputs, log_decay: Tensor, statistics: DecayedKeyStatistics
) -> tuple[Tensor, DecayedKeyStatistics]:
    def step(
        state: DecayedKeyStatistics, query: Tensor, key: Tensor, gate: Tensor, log_decay: Tensor
    ) -> tuple[Tensor, DecayedKeyStatistics]:
        alpha = log_decay.exp()[:, :, None]
        second_moment = alpha.unsqueeze(-1) * state.second_moment + key.unsqueeze(-1) * key.unsqueeze(-2)
        state = DecayedKeyStatistics(second_moment, alpha * state.total + key, alpha.squeeze(-1) * state.weight + 1)
        weight = state.weight.unsqueeze(-1)
        mean = state.total / weight
        covariance = second_moment / weight.unsqueeze(-1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return query - gate * times(covariance, query), state

    return read_loop(step, (inputs.query, inputs.key, inputs.gate, log_decay), statistics, inputs)


def _chunked(
    inputs: ReadInputs, log_decay: Tensor, statistics: DecayedKeyStatistics
) -> tuple[Tensor, DecayedKeyStatistics]:
    """Centred scores as in the read step's own chunked form, with the decays L in place of the causal mask."""
    chunks = DecayedChunks.of(inputs, log_decay)
    query = chunks.layout.split(inputs.query)
    moments, last_moment = chunks.second_moments(statistics.second_moment)
    totals, last_total = chunks.totals(chunks.key, statistics.total)
    weights, last_weight = chunks.totals(chunks.real, statistics.weight.unsqueeze(-1))
    weight = chunks.from_start * weights + torch.matmul(chunks.decay, chunks.real)
    # Only padding before the first token has none.
    weight = torch.where(weight > 0, weight, 1)
    scores = torch.matmul(query, chunks.key.mT)
    mean = chunks.from_start * torch.matmul(query, totals.mT) + (chunks.decay * scores).sum(-1, keepdim=True)
    mean = mean / weight
    correction = torch.matmul(chunks.decay * (scores - mean), chunks.key)
    correction = correction + chunks.from_start * (torch.matmul(query, moments) - mean * totals)
    last = DecayedKeyStatistics(last_moment, last_total, last_weight.squeeze(-1))
    return chunks.layout.merge(correction / weight), last
