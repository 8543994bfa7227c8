"""Read steps that are functions of the covariance Sigma of the keys so far.

Every one of them has a formula for one token, which the loop applies, and a function of products Sigma_i x_i for all
tokens at once: a `Polynomial`, or the `Solution` of a system. Backend "triton" has kernels for both, for D up to 128,
which multiply as often as they must without leaving the chip. Everything else is built from calls of the read step's
own operator, one a product, and so has its kernels and its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import check_backend, check_input
from ccq.ops.query import BACKENDS, KeyStatistics, curvature_conditioned_query
from ccq.ops.query.arguments import check_gate
from ccq.ops.query.statistics import check_statistics
from ccq.ops.reads.common import QueryResult, ReadInputs, read_inputs
from ccq.ops.reads.covariance.operator import fits, read_by_kernels
from ccq.ops.reads.reference import read_loop
from ccq.ops.reads.solve import conjugate_gradient, differentiable_solution
from ccq.ops.reads.triton_backend import check_call, choose_backend

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query [N, H, D], covariance [N, H, D, D], gate [N, H, 1], t [N, 1, 1]) -> query [N, H, D]"""


class Covariance(NamedTuple):
    """The covariances Sigma_i of all tokens of a call, by their products."""

    inputs: ReadInputs
    statistics: KeyStatistics
    """Of the keys before the call."""
    backend: str
    return_correction: bool

    def times(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, KeyStatistics]:
        """x [B, T, H, D] -> Sigma_i x_i for each token i, and the statistics after the last token. Products are those
        of numbers of `dtype`, sums float32 (float64 for float64).

        All calls start from the same statistics, so that one after the other multiplies with the same Sigma_i.
        """
        result = curvature_conditioned_query(
            x.to(dtype),
            self.inputs.key.to(dtype),
            1.0,
            statistics=self.statistics,
            cu_seqlens=self.inputs.cu_seqlens,
            mask=self.inputs.mask,
            normalize=False,
            return_correction=True,
            backend=self.backend,
        )
        assert result.correction is not None
        return result.correction, result.statistics

    def detach(self) -> Covariance:
        statistics = KeyStatistics(*(field.detach() for field in self.statistics))
        return self._replace(inputs=self.inputs.detach(), statistics=statistics)


class Answer(NamedTuple):
    """What a read step makes of a `Covariance`."""

    query: Tensor
    correction: Tensor
    statistics: KeyStatistics


@dataclass(frozen=True)
class Polynomial:
    """y = p(lambda Sigma / P) q, P times, with p(x) = 1 + c_1 (-x) + ... + c_K (-x)^K."""

    coefficients: tuple[float, ...]
    """c_1 to c_K"""
    pieces: int = 1
    """P"""
    steps: ClassVar[int] = 0

    def answer(self, sigma: Covariance) -> Answer:
        """By Horner's scheme, K products a piece."""
        inputs, last = sigma.inputs, sigma.statistics
        share = inputs.gate / self.pieces
        x, correction = inputs.query, torch.zeros_like(inputs.query)
        for _ in range(self.pieces):
            z = self.coefficients[-1] * x
            for coefficient in self.coefficients[-2::-1]:
                z = coefficient * x - share * sigma.times(z, inputs.dtype)[0]
            pushed, last = sigma.times(z, inputs.dtype)
            correction = correction + pushed / self.pieces
            x = x - share * pushed
        return Answer(x, correction, last)


@dataclass(frozen=True)
class Solution:
    """y = (I + lambda Sigma)^-1 q, by conjugate gradients started at q."""

    steps: int
    coefficients: ClassVar[tuple[float, ...]] = ()
    pieces: ClassVar[int] = 1

    def answer(self, sigma: Covariance) -> Answer:
        """Differentiated as a solution, so that nothing of the iteration is kept."""
        inputs, frozen = sigma.inputs, sigma.detach()

        def product(x: Tensor) -> Tensor:
            return x + frozen.inputs.gate * frozen.times(x, inputs.dtype)[0]

        def solve(right: Tensor) -> Tensor:
            return conjugate_gradient(product, right, right, self.steps)

        with torch.no_grad():
            solution = solve(frozen.inputs.query)
        correction, last = sigma.times(solution, inputs.dtype)
        residual = inputs.query - inputs.gate * correction - solution
        query = differentiable_solution(solution, residual, solve)
        if sigma.return_correction:
            # The one above knows nothing of how the solution came about.
            correction, _ = sigma.times(query, inputs.dtype)
        return Answer(query, correction, last)


def covariance_read(
    formula: Formula,
    function: Callable[[torch.dtype], Polynomial | Solution],
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
    """A read step, by its `formula` with backend "reference", otherwise by its `function`, which may depend on the
    dtype of the input: products of numbers that are rounded need not be more exact than they are.
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    form = function(q.dtype)
    chosen = choose_backend(backend, q)
    if chosen == "triton" and form.pieces == 1 and fits(q):
        call = check_call(q, k, cu_seqlens=cu_seqlens, mask=mask, normalize=normalize, query_dtype=query_dtype)
        if statistics is not None:
            check_statistics(statistics, call.sequences, q)
        return QueryResult(
            *read_by_kernels(
                q,
                k,
                check_gate(gate, q),
                call,
                statistics,
                form.coefficients,
                form.steps,
                return_correction=return_correction,
            )
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
        backends=BACKENDS,
    )
    if statistics is None:
        statistics = KeyStatistics.zeros(inputs.sequences, *q.shape[2:], dtype=q.dtype, device=q.device)
    else:
        check_statistics(statistics, inputs.sequences, q)
    # Sums of a float32 state must not be rounded by an autocast around the model.
    with torch.autocast(q.device.type, enabled=False):
        if chosen == "reference":
            query, last = covariance_loop(formula, inputs, statistics)
            return QueryResult(inputs.finish(query), None, last)
        result = form.answer(Covariance(inputs, statistics, chosen, return_correction))
        correction = result.correction if return_correction else None
        return QueryResult(inputs.finish(result.query), correction, result.statistics)


def covariance_loop(formula: Formula, inputs: ReadInputs, statistics: KeyStatistics) -> tuple[Tensor, KeyStatistics]:
    """M += k k^T,  m += k,  t += 1,  Sigma = M / t - (m / t) (m / t)^T,  y = formula(q, Sigma, lambda, t)"""

    def step(state: KeyStatistics, query: Tensor, key: Tensor, gate: Tensor) -> tuple[Tensor, KeyStatistics]:
        second_moment = state.second_moment + key.unsqueeze(-1) * key.unsqueeze(-2)
        state = KeyStatistics(second_moment, state.total + key, state.count + 1)
        seen = state.count.to(key.dtype)[:, None, None]
        mean = state.total / seen
        covariance = second_moment / seen.unsqueeze(-1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return formula(query, covariance, gate, seen), state

    return read_loop(step, (inputs.query, inputs.key, inputs.gate), statistics, inputs)
