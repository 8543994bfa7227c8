"""Read steps that are a gate and an operator of `ccq.ops.reads`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ccq.nn.read import GatedReadStep, Normalized, ReadResult
from ccq.ops.reads import (
    KeyMean,
    QueryResult,
    exact_query,
    exponential_query,
    mean_query,
    raw_query,
    richardson_query,
    trace_query,
)
from ccq.ops.reads.common import check_number
from ccq.ops.reads.exact import check_gate_of_exact, steps_needed
from ccq.ops.reads.exponential import terms_needed

_ERROR = torch.finfo(torch.float32).eps


class OperatorReadStep(GatedReadStep):
    """Calls `operator` with lambda from the gate."""

    operator: ClassVar[Callable[..., QueryResult]]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        presplit_query: Tensor | None = None,
        log_decay: Tensor | None = None,
        statistics: Any = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        normalized: Normalized = False,
    ) -> ReadResult:
        """As `ReadStep.forward`."""
        if not self.enabled:
            return ReadResult(self._query_before(q, normalized), None)
        lam, q = self._strength(
            q, presplit_query, statistics=statistics, mask=mask, cu_seqlens=cu_seqlens, normalized=normalized
        )
        result = self.operator(
            q,
            k,
            lam,
            statistics=statistics,
            mask=mask,
            cu_seqlens=cu_seqlens,
            normalize=self._normalize(normalized),
            return_correction=self.observer is not None or self.factors is not None,
            **self._own_arguments(log_decay),
        )
        if result.correction is None:
            return ReadResult(result.query, result.statistics)
        self._observe(q, self._multiplied(lam, q), result.correction, mask, normalized)
        query = self._multiplied_query(result.query, q, lam, result.correction, mask, normalized)
        return ReadResult(query, result.statistics)

    def _own_arguments(self, log_decay: Tensor | None) -> dict[str, Any]:
        """Arguments of the operator beside those that all have."""
        return {}


class MeanRead(OperatorReadStep):
    """ccq-mean: y = q - lambda mu (mu . q)."""

    operator = staticmethod(mean_query)

    def initial_statistics(self, sequences: int, *, dtype: torch.dtype, device: torch.device | str) -> KeyMean:
        return KeyMean.zeros(sequences, self.num_heads, self.head_dim, dtype=dtype, device=torch.device(device))

    @property
    def operations_per_token(self) -> int:
        # Two products of vectors in place of those with D x D matrices.
        matrices = (2 + 2 * self.products) * self.num_heads * self.head_dim**2
        return super().operations_per_token - matrices + 4 * self.num_heads * self.head_dim


class RawRead(OperatorReadStep):
    """ccq-raw: y = q - lambda t Sigma q."""

    operator = staticmethod(raw_query)


class TraceRead(OperatorReadStep):
    """ccq-trace: y = q - lambda Sigma q / tr(Sigma)."""

    operator = staticmethod(trace_query)


class RichardsonRead(OperatorReadStep):
    """richardson: x <- q - lambda Sigma x, `steps` times from x = q."""

    operator = staticmethod(richardson_query)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        gate: str | float | Sequence[float] = "presplit",
        keep_length: bool = False,
        steps: int = 3,
    ) -> None:
        super().__init__(num_heads, head_dim, gate=gate, keep_length=keep_length)
        self.steps = check_number("steps", steps)

    @property
    def products(self) -> int:
        return self.steps

    def _own_arguments(self, log_decay: Tensor | None) -> dict[str, Any]:
        return {"steps": self.steps}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, steps={self.steps}"


class ExactRead(OperatorReadStep):
    """exact: y = (I + lambda Sigma)^-1 q. A fixed lambda must not be below 0."""

    operator = staticmethod(exact_query)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        gate: str | float | Sequence[float] = "presplit",
        keep_length: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, gate=gate, keep_length=keep_length)
        if not isinstance(self.gate, str):
            for fixed in self.gate if isinstance(self.gate, tuple) else (self.gate,):
                check_gate_of_exact(fixed)

    @property
    def products(self) -> int:
        # The first residual and that of the solution, beside one a step.
        return 2 + steps_needed(self.gate if isinstance(self.gate, float) else 0.0, _ERROR)


class ExponentialRead(OperatorReadStep):
    """exponential: y = exp(-lambda Sigma) q."""

    operator = staticmethod(exponential_query)

    @property
    def products(self) -> int:
        return terms_needed(_ERROR) * (max(1, math.ceil(abs(self.gate))) if isinstance(self.gate, float) else 1)
