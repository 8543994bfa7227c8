"""query-weighted: y = q - lambda Cov_p(q) q, the covariance of the keys under softmax weights at the query itself.

The Hessian of the log-partition log sum exp(b k_j . q) at q is b^2 times the covariance of the keys under the softmax
weights p_j; at q = 0 all weights are equal, which is the read step's own Sigma. A version of low rank is named as
follow-up work in arXiv:2606.01294. Weights at the query would need every key, so here R landmarks z_r stand for them:
each key is shared among them by w_jr = softmax_r(b z_r . k_j), and each landmark keeps what it got, c_r = sum of w_jr,
and the mean mu_r of its keys. Then

    p_r = softmax_r(log c_r + b mu_r . q),   Cov = sum p_r (mu_r - mu_p) (mu_r - mu_p)^T,   mu_p = sum p_r mu_r

which has rank R - 1 at most, and a state of R vectors a head. b = sqrt(D), as if the entries of q and k had variance 1.
A landmark whose share is below the smallest normal number, as those far from every key have it, has no weight.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, check_backend, check_device, check_input, check_shape
from ccq.ops.query import BACKENDS
from ccq.ops.query.arguments import check_gate
from ccq.ops.query.reference import NORM_EPSILON, l2_normalize
from ccq.ops.reads.common import QueryResult, ReadInputs, check_read_state, read_inputs, scan
from ccq.ops.reads.query_weighted.operator import MAX_LANDMARKS, MAX_SIZE, query_weighted_read
from ccq.ops.reads.reference import read_loop, times
from ccq.ops.reads.triton_backend import check_call, choose_backend


class LandmarkStatistics(NamedTuple):
    """What the landmarks of each sequence have of its keys."""

    totals: Tensor
    """[N, H, R, D] float32 (float64 for float64 input): the sum of w_jr k_j."""
    shares: Tensor
    """[N, H, R], same dtype: c_r."""

    @classmethod
    def zeros(
        cls, sequences: int, heads: int, landmarks: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> LandmarkStatistics:
        shapes = ((sequences, heads, landmarks, size), (sequences, heads, landmarks))
        return cls(*(torch.zeros(shape, dtype=accumulation_dtype(dtype), device=device) for shape in shapes))


def query_weighted_query(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    landmarks: Tensor,
    statistics: LandmarkStatistics | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
    return_correction: bool = True,
    backend: str = "auto",
) -> QueryResult:
    """q - gate * Cov_p(q) q. Arguments: see `ccq.ops.reads.ReadOptions`, and landmarks [H, R, D]. With
    normalize="keys", which leaves q its length, the result is that of the unit query times |q|.
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    check_shape("landmarks", landmarks, (q.shape[2], "R", q.shape[3]))
    check_device("landmarks", landmarks, q)
    if _choose(backend, q, landmarks) == "triton":
        call = check_call(q, k, cu_seqlens=cu_seqlens, mask=mask, normalize=normalize, query_dtype=query_dtype)
        statistics = _state(statistics, call.sequences, landmarks, q)
        query, found, *rest = query_weighted_read(
            q, k, check_gate(gate, q), landmarks, *statistics, call.mask, call.boundaries, call.unit_queries,
            call.unit_keys, return_correction, call.query_dtype != q.dtype,
        )  # fmt: skip
        return QueryResult(query, found if return_correction else None, LandmarkStatistics(*rest[:2]))
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
    landmarks = landmarks.to(inputs.query.dtype)
    statistics = _state(statistics, inputs.sequences, landmarks, q)
    with torch.autocast(q.device.type, enabled=False):
        unit, length = inputs, torch.ones((), dtype=inputs.query.dtype, device=q.device)
        if normalize == "keys":
            length = (inputs.query.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()
            unit = inputs._replace(query=l2_normalize(inputs.query))
        if backend == "reference":
            query, last = _loop(unit, landmarks, statistics)
            return QueryResult(inputs.finish(length * query), None, last)
        correction, last = _chunked(unit, landmarks, statistics)
        correction = length * correction
        query = inputs.finish(inputs.query - inputs.gate * correction)
        return QueryResult(query, correction if return_correction else None, last)


def _choose(backend: str, q: Tensor, landmarks: Tensor) -> str:
    """The backend that "auto" stands for. Refuses what the kernels do not take, where they were asked for."""
    chosen, count = choose_backend(backend, q, MAX_SIZE), landmarks.shape[1]
    if chosen != "triton" or count <= MAX_LANDMARKS:
        return chosen
    if backend == "auto":
        return "torch"
    raise ValueError(f"backend 'triton' takes up to {MAX_LANDMARKS} landmarks, got {count}; take backend='torch'")


def _state(statistics: LandmarkStatistics | None, sequences: int, landmarks: Tensor, q: Tensor) -> LandmarkStatistics:
    """The state to start from."""
    heads, count, size = landmarks.shape
    if statistics is None:
        return LandmarkStatistics.zeros(sequences, heads, count, size, dtype=q.dtype, device=q.device)
    first = (sequences, heads, count)
    check_read_state(statistics, LandmarkStatistics, {"totals": (*first, size), "shares": first}, q)
    return statistics


def _loop(inputs: ReadInputs, landmarks: Tensor, statistics: LandmarkStatistics) -> tuple[Tensor, LandmarkStatistics]:
    sharpness = math.sqrt(inputs.query.shape[-1])

    def step(state: LandmarkStatistics, query: Tensor, key: Tensor, gate: Tensor) -> tuple[Tensor, LandmarkStatistics]:
        share = torch.softmax(sharpness * times(landmarks, key), -1)
        state = LandmarkStatistics(state.totals + share.unsqueeze(-1) * key.unsqueeze(-2), state.shares + share)
        divisor, log = _divisor_and_log(state.shares)
        means = state.totals / divisor.unsqueeze(-1)
        weight = torch.softmax(log + sharpness * times(means, query), -1).unsqueeze(-1)
        centred = means - (weight * means).sum(-2, keepdim=True)
        covariance = (weight * centred).mT @ centred
        return query - gate * times(covariance, query), state

    return read_loop(step, (inputs.query, inputs.key, inputs.gate), statistics, inputs)


def _chunked(
    inputs: ReadInputs, landmarks: Tensor, statistics: LandmarkStatistics
) -> tuple[Tensor, LandmarkStatistics]:
    """With s_ij = q_i . k_j: mu_r . q_i is (q_i . m_r + sum s_ij w_jr) / c_ir, and Cov q_i the sum of p_r (mu_r . q_i -
    mu_p . q_i) / c_ir times what landmark r has at token i. So every sum over the tokens of a chunk is a product with a
    causal matrix, and no mean is formed for single tokens.
    """
    layout, sharpness = inputs.layout, math.sqrt(inputs.query.shape[-1])
    query, key = layout.split(inputs.query), layout.split(inputs.key)
    share = torch.softmax(sharpness * torch.matmul(key, landmarks.mT), -1)
    real = torch.ones_like(inputs.query[..., :1, :1])
    if inputs.mask is not None:
        real = inputs.mask[..., None, None].to(real.dtype)
    share = share * layout.split(real)
    totals, last_totals = scan(layout, torch.matmul(share.mT, key), statistics.totals)
    inside = share.cumsum(-2)
    shares, last_shares = scan(layout, inside[:, :, -1], statistics.shares)
    shares, log = _divisor_and_log(inside + shares.unsqueeze(-2))
    scores = torch.matmul(query, key.mT).tril()
    score = (torch.matmul(query, totals.mT) + torch.matmul(scores, share)) / shares
    weight = torch.softmax(log + sharpness * score, -1)
    factor = weight * (score - (weight * score).sum(-1, keepdim=True)) / shares
    correction = torch.matmul(factor, totals) + torch.matmul(torch.matmul(factor, share.mT).tril(), key)
    return layout.merge(correction), LandmarkStatistics(last_totals, last_shares)


def _divisor_and_log(shares: Tensor) -> tuple[Tensor, Tensor]:
    """By what the totals of landmarks are divided, and the logarithm of their shares; where there is no share, as in
    padding before the first token, 1 and a logarithm that leaves no weight beside the others.
    """
    smallest = torch.finfo(shares.dtype).tiny
    held = shares >= smallest
    return torch.where(held, shares, 1), torch.where(held, shares, smallest).log()
