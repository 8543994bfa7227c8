"""mesa: y = (H + Lambda)^-1 q, the read of MesaNet (von Oswald et al., arXiv:2506.05233), as a peer.

H <- alpha H + k k^T is the second moment of the keys, forgotten as the memory is, and not divided by their number;
Lambda is a positive diagonal. Solved by conjugate gradients, 30 steps as there. Two things differ from MesaNet, because
they belong to its write: the decay is that of the backbone, one number a head (see `ccq.ops.reads.decay`), and every
key counts in full.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, check_backend, check_device, check_input, check_shape
from ccq.ops.query import BACKENDS, l2_normalize
from ccq.ops.reads.common import QueryResult, ReadInputs, check_number, check_read_state, read_inputs
from ccq.ops.reads.decayed import DecayedChunks, head_decay
from ccq.ops.reads.decayed.operator import MAX_SIZE
from ccq.ops.reads.mesa.operator import mesa_read
from ccq.ops.reads.reference import read_loop
from ccq.ops.reads.solve import conjugate_gradient, differentiable_solution
from ccq.ops.reads.triton_backend import check_call, choose_backend


class DecayedSecondMoment(NamedTuple):
    """Second moment of the keys of each sequence, older keys counting less."""

    second_moment: Tensor
    """[N, H, D, D] float32 (float64 for float64 input), symmetric"""

    @classmethod
    def zeros(
        cls, sequences: int, heads: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> DecayedSecondMoment:
        return cls(torch.zeros(sequences, heads, size, size, dtype=accumulation_dtype(dtype), device=device))


def mesa_query(
    q: Tensor,
    k: Tensor,
    ridge: Tensor,
    *,
    log_decay: Tensor | None,
    steps: int = 30,
    statistics: DecayedSecondMoment | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
    return_correction: bool = True,
    backend: str = "auto",
) -> QueryResult:
    """(H + Lambda)^-1 q. Arguments: see `ccq.ops.reads.ReadOptions`, and

    ridge: [H, D], the diagonal Lambda, above 0.
    log_decay: as in `decay_query`.
    steps: of the conjugate gradients, at most. The backward pass takes them for enough: its gradient is that of the
        solution.

    The correction in the result is q - y. Backend "reference" solves the systems directly; "triton" takes D up to 128,
    and fewer steps where they solve the systems to the accuracy of its products.
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    steps = check_number("steps", steps)
    check_shape("ridge", ridge, tuple(q.shape[2:]))
    check_device("ridge", ridge, q)
    ridge = ridge.to(accumulation_dtype(q.dtype))
    chosen = choose_backend(backend, q, MAX_SIZE)
    if chosen == "triton":
        call = check_call(q, k, cu_seqlens=cu_seqlens, mask=mask, normalize=normalize, query_dtype=query_dtype)
        log_decay = head_decay(log_decay, q)
        if statistics is not None:
            _check_statistics(statistics, call.sequences, q)
        wide = return_correction or call.query_dtype != q.dtype
        solution, last_moment, *_ = mesa_read(
            q, k, ridge, log_decay, None if statistics is None else statistics.second_moment, call.mask,
            call.boundaries, steps, call.unit_queries, call.unit_keys, wide,
        )  # fmt: skip
        correction = _difference(q, solution, call.mask, call.unit_queries) if return_correction else None
        return QueryResult(solution.to(call.query_dtype), correction, DecayedSecondMoment(last_moment))
    inputs = read_inputs(
        q,
        k,
        1.0,
        cu_seqlens=cu_seqlens,
        mask=mask,
        normalize=normalize,
        query_dtype=query_dtype,
        backend=chosen,
    )
    log_decay = head_decay(log_decay, inputs.query)
    if statistics is None:
        statistics = DecayedSecondMoment.zeros(inputs.sequences, *q.shape[2:], dtype=q.dtype, device=q.device)
    _check_statistics(statistics, inputs.sequences, q)
    with torch.autocast(q.device.type, enabled=False):
        if chosen == "reference":
            query, last = _loop(inputs, ridge, log_decay, statistics)
            return QueryResult(inputs.finish(query), None, last)
        query, last = _chunked(inputs, ridge, log_decay, statistics, steps)
        return QueryResult(inputs.finish(query), inputs.query - query if return_correction else None, last)


def _check_statistics(statistics: DecayedSecondMoment, sequences: int, q: Tensor) -> None:
    shape = (sequences, q.shape[2], q.shape[3], q.shape[3])
    check_read_state(statistics, DecayedSecondMoment, {"second_moment": shape}, q)


def _difference(q: Tensor, solution: Tensor, mask: Tensor | None, unit_queries: bool) -> Tensor:
    """q - y in the dtype of sums, zero where there is padding."""
    if mask is not None:
        # Emptied before anything is computed, as in `read_inputs`.
        q, solution = (torch.where(mask[..., None, None], x, 0) for x in (q, solution))
    return (l2_normalize(q) if unit_queries else q.to(solution.dtype)) - solution


def _loop(
    inputs: ReadInputs, ridge: Tensor, log_decay: Tensor, statistics: DecayedSecondMoment
) -> tuple[Tensor, DecayedSecondMoment]:
    def step(
        state: DecayedSecondMoment, query: Tensor, key: Tensor, log_decay: Tensor
    ) -> tuple[Tensor, DecayedSecondMoment]:
        alpha = log_decay.exp()[:, :, None, None]
        second_moment = alpha * state.second_moment + key.unsqueeze(-1) * key.unsqueeze(-2)
        solution = torch.linalg.solve(second_moment + torch.diag_embed(ridge), query.unsqueeze(-1))
        return solution.squeeze(-1), DecayedSecondMoment(second_moment)

    return read_loop(step, (inputs.query, inputs.key, log_decay), statistics, inputs)


def _chunked(
    inputs: ReadInputs, ridge: Tensor, log_decay: Tensor, statistics: DecayedSecondMoment, steps: int
) -> tuple[Tensor, DecayedSecondMoment]:
    chunks = DecayedChunks.of(inputs, log_decay)
    query = chunks.layout.split(inputs.query)
    diagonal = ridge.unsqueeze(-2)
    moments, last = chunks.second_moments(statistics.second_moment)
    frozen_chunks, frozen_moments, frozen_diagonal = chunks.detach(), moments.detach(), diagonal.detach()

    def product(x: Tensor) -> Tensor:
        return frozen_chunks.second_moment_times(x, frozen_moments) + frozen_diagonal * x

    def solve(right: Tensor) -> Tensor:
        return conjugate_gradient(product, right, right / frozen_diagonal, steps)

    with torch.no_grad():
        solution = solve(query.detach())
    residual = query - chunks.second_moment_times(solution, moments) - diagonal * solution
    solution = differentiable_solution(solution, residual, solve)
    return chunks.layout.merge(solution), DecayedSecondMoment(last)
