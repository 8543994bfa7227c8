"""The geometry of keys, and what the correction lambda Sigma q does to queries and scores: functions on tensors.

Sigma is the covariance of the keys. Everything is computed in the dtype of its input, which should be float32 or
float64. Equation numbers are those of arXiv:2606.01294, first version.

Legend: T tokens, H heads, D key size per head, U directions; "..." are any leading dimensions, such as heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Below it a squared length is that of rounding, and its direction means nothing.
_TINY = 1e-12


class Spectrum(NamedTuple):
    """Eigenvalues of a covariance and what they add up to."""

    eigenvalues: Tensor
    """[..., D], from the largest to the smallest."""
    trace: Tensor
    """[...], their sum; 1 - |mean|^2 for unit keys."""
    top_share: Tensor
    """[...] in [0, 1]: the share of the trace in the largest U eigenvalues; 0 where the trace is 0."""
    effective_rank: Tensor
    """[...] in [1, D]: trace(Sigma)^2 / trace(Sigma^2), the number of directions that equal eigenvalues of this spread
    would fill; 0 where the trace is 0."""


class Taylor(NamedTuple):
    """The log-partition A(q) = log sum_j exp(k_j . q) beside its expansion at q = 0 (equation 7), each [...]."""

    exact: Tensor
    linear: Tensor
    """log T + mean . q"""
    quadratic: Tensor
    """log T + mean . q + q . Sigma q / 2"""
    remainder: Tensor
    """exact - quadratic; of the third order in q."""


def covariance(keys: Tensor, *, sample: bool = False) -> Tensor:
    """[..., T, D] -> [..., D, D]: (1/T) sum (k - mean)(k - mean)^T (equation 8); `sample` divides by T - 1 in place
    of T.
    """
    tokens = keys.shape[-2]
    if tokens < 1 + sample:
        raise ValueError(f"a covariance needs at least {1 + sample} keys, got {tokens}")
    centred = keys - keys.mean(-2, keepdim=True)
    return centred.mT @ centred / (tokens - sample)


def spectrum(sigma: Tensor, directions: int) -> Spectrum:
    """Eigenvalues of a covariance [..., D, D], with the share of the largest `directions`."""
    _check_directions(directions, sigma.shape[-1])
    eigenvalues = torch.linalg.eigvalsh(sigma).flip(-1).clamp(min=0)
    trace, squares = eigenvalues.sum(-1), eigenvalues.square().sum(-1)
    return Spectrum(
        eigenvalues,
        trace,
        _ratio(eigenvalues[..., :directions].sum(-1), trace),
        _ratio(trace.square(), squares),
    )


def top_directions(sigma: Tensor, directions: int) -> Tensor:
    """[..., D, D] -> [..., D, U]: unit eigenvectors of the largest eigenvalues, the largest first."""
    _check_directions(directions, sigma.shape[-1])
    return torch.linalg.eigh(sigma).eigenvectors[..., -directions:].flip(-1)


def alignment(keys: Tensor, directions: int) -> Tensor:
    """[..., T, D] -> [..., T] in [0, 1]: how much of each key's distance from the mean lies in the top directions.

    |U^T (k - mean)|^2 / |k - mean|^2, with U the largest `directions` eigenvectors of the covariance over all T keys,
    divided by T - 1 (equation 28). Keys are taken as they are: give unit keys for the paper's figure. A key that is the
    mean has alignment 0. Of a direction drawn at random, U / D is expected.
    """
    basis = top_directions(covariance(keys, sample=True), directions)
    away = keys - keys.mean(-2, keepdim=True)
    return _ratio((away @ basis).square().sum(-1), away.square().sum(-1))


def relative_size(query: Tensor, change: Tensor) -> Tensor:
    """|change| / |query| over the last dimension; `change` is lambda Sigma q. 0 where the query is 0."""
    return _ratio(change.norm(dim=-1), query.norm(dim=-1))


def angle(query: Tensor, change: Tensor) -> Tensor:
    """Degrees between q and q - change, over the last dimension; exact for small ones too. 0 where either is 0."""
    after = query - change
    length = query.norm(dim=-1, keepdim=True).clamp(min=_TINY)
    unit = query / length
    along = (after * unit).sum(-1)
    # From the change, not from q - change, in which a small one would have drowned.
    across = change - (change * unit).sum(-1, keepdim=True) * unit
    return torch.rad2deg(torch.atan2(across.norm(dim=-1), along))


def rounding_noise(query: Tensor, change: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """|round(y) - y| / |change| over the last dimension, y = q - change: the error of rounding the corrected query to
    `dtype`, as a share of the correction. 0 where the correction is 0.
    """
    after = query - change
    return _ratio((after.to(dtype).to(after.dtype) - after).norm(dim=-1), change.norm(dim=-1))


def unchanged_share(query: Tensor, change: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The share of the D coordinates in which q - change and q are the same number of `dtype`."""
    return ((query - change).to(dtype) == query.to(dtype)).to(query.dtype).mean(-1)


def score_change(keys: Tensor, change: Tensor) -> Tensor:
    """keys [..., T, D], change [..., D] -> [..., T]: by how much each score k . q moves, - k . (lambda Sigma q)
    (equation 11).
    """
    return -(keys @ change.unsqueeze(-1)).squeeze(-1)


def sign_condition(target: Tensor, distractor: Tensor, query: Tensor, direction: Tensor) -> Tensor:
    """(beta - alpha) (u . q) over the last dimension: alpha = target . u, beta = distractor . u.

    The correction widens the margin (target - distractor) . q of a covariance rho u u^T by lambda rho times this
    (equation 26): it is positive where the correction helps, negative where it harms.
    """
    return ((distractor - target) * direction).sum(-1) * (direction * query).sum(-1)


def margin_change(target: Tensor, distractor: Tensor, change: Tensor) -> Tensor:
    """(distractor - target) . (lambda Sigma q) over the last dimension: by how much the margin (target - distractor) .
    q grows, for any covariance. Linear in both keys, so that of mean keys is the mean over all pairs.
    """
    return ((distractor - target) * change).sum(-1)


def log_partition(query: Tensor, keys: Tensor) -> Taylor:
    """query [..., D], keys [..., T, D] -> the exact log-partition (equation 5) and its quadratic form (equation 7)."""
    scores = (keys @ query.unsqueeze(-1)).squeeze(-1)
    exact = torch.logsumexp(scores, -1)
    # q . Sigma q is the variance of the scores.
    linear = math.log(keys.shape[-2]) + scores.mean(-1)
    quadratic = linear + scores.var(-1, correction=0) / 2
    return Taylor(exact, linear, quadratic, exact - quadratic)


def query_weighted_covariance(query: Tensor, keys: Tensor) -> Tensor:
    """query [..., D], keys [..., T, D] -> [..., D, D]: the covariance of the keys under softmax weights, which is the
    second derivative of the log-partition at q (equations 14 to 18). At q = 0 it is Sigma.
    """
    weights = torch.softmax(keys @ query.unsqueeze(-1), -2)
    centred = keys - (weights * keys).sum(-2, keepdim=True)
    return centred.mT @ (weights * centred)


def _check_directions(directions: int, size: int) -> None:
    if not 1 <= directions <= size:
        raise ValueError(f"directions must be from 1 to the size of a key, {size}; got {directions}")


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > _TINY, part / whole.clamp(min=_TINY), torch.zeros_like(part))
