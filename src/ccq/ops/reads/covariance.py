"""Read steps that are functions of the covariance Sigma of the keys so far.

Every one of them has a formula for one token, which the loop applies, and a form for all tokens at once that is built
from products Sigma_i x_i of the read step's own operator, and so has its kernels and its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.query import BACKENDS, KeyStatistics, curvature_conditioned_query
from ccq.ops.query.statistics import check_statistics
from ccq.ops.reads.common import QueryResult, ReadInputs, read_inputs
from ccq.ops.reads.reference import read_loop

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query [N, H, D], covariance [N, H, D, D], gate [N, H, 1], t [N, 1, 1]) -> query [N, H, D]"""


class Covariance(NamedTuple):
    """The covariances Sigma_i of all tokens of a call, by their products."""

    inputs: ReadInputs
    statistics: KeyStatistics
    """Of the keys before the call."""
    backend: str

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
        return Covariance(self.inputs.detach(), statistics, self.backend)


class Answer(NamedTuple):
    """What a read step makes of a `Covariance`."""

    query: Tensor
    correction: Tensor
    statistics: KeyStatistics


def covariance_read(
    formula: Formula,
    answer: Callable[[Covariance], Answer],
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    statistics: KeyStatistics | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> QueryResult:
    """A read step, by its `formula` with backend "reference", otherwise by its `answer` for all tokens at once."""
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
        if backend == "reference":
            query, last = _loop(formula, inputs, statistics)
            return QueryResult(inputs.finish(query), None, last)
        result = answer(Covariance(inputs, statistics, backend))
        return QueryResult(inputs.finish(result.query), result.correction, result.statistics)


def _loop(formula: Formula, inputs: ReadInputs, statistics: KeyStatistics) -> tuple[Tensor, KeyStatistics]:
    """M += k k^T,  m += k,  t += 1,  Sigma = M / t - (m / t) (m / t)^T,  y = formula(q, Sigma, lambda, t)"""

    def step(state: KeyStatistics, query: Tensor, key: Tensor, gate: Tensor) -> tuple[Tensor, KeyStatistics]:
        second_moment = state.second_moment + key.unsqueeze(-1) * key.unsqueeze(-2)
        state = KeyStatistics(second_moment, state.total + key, state.count + 1)
        seen = state.count.to(key.dtype)[:, None, None]
        mean = state.total / seen
        covariance = second_moment / seen.unsqueeze(-1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return formula(query, covariance, gate, seen), state

    return read_loop(step, (inputs.query, inputs.key, inputs.gate), statistics, inputs)
