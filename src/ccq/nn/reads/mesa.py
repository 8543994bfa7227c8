"""mesa: y = (H + Lambda)^-1 q, the read of MesaNet (von Oswald et al., arXiv:2506.05233)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ccq.nn.read import Normalized, ReadResult, ReadStep
from ccq.ops.reads import DecayedSecondMoment, mesa_query
from ccq.ops.reads.common import check_number

SMALLEST_RIDGE = 0.25
INITIAL_RIDGE = 1.0
"""As in MesaNet."""


class MesaRead(ReadStep):
    """Solves a ridge system for every token, by `steps` conjugate gradients; Lambda is learned, one number a channel,
    0.25 + softplus(ridge), and starts at 1. To an observer the gate is 1 and the correction q - y.
    """

    def __init__(self, num_heads: int, head_dim: int, *, keep_length: bool = False, steps: int = 30) -> None:
        super().__init__(num_heads, head_dim, keep_length=keep_length)
        self.steps = check_number("steps", steps)
        self.ridge = nn.Parameter(torch.empty(num_heads, head_dim))
        self.ridge._no_weight_decay = True  # type: ignore[attr-defined]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Lambda = 1."""
        # The inverse of softplus.
        self.ridge.fill_(math.log(math.expm1(INITIAL_RIDGE - SMALLEST_RIDGE)))

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
        """As `ReadStep.forward`; log_decay is needed."""
        if not self.enabled:
            return ReadResult(self._query_before(q, normalized), None)
        result = mesa_query(
            q,
            k,
            SMALLEST_RIDGE + F.softplus(self.ridge.to(torch.promote_types(self.ridge.dtype, torch.float32))),
            log_decay=log_decay,
            steps=self.steps,
            statistics=statistics,
            mask=mask,
            cu_seqlens=cu_seqlens,
            normalize=self._normalize(normalized),
            return_correction=self.observer is not None or self.factors is not None,
        )
        if result.correction is None:
            return ReadResult(result.query, result.statistics)
        self._observe(q, self._multiplied(1.0, q), result.correction, mask, normalized)
        query = self._multiplied_query(result.query, q, 1.0, result.correction, mask, normalized)
        return ReadResult(query, result.statistics)

    def initial_statistics(
        self, sequences: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> DecayedSecondMoment:
        return DecayedSecondMoment.zeros(
            sequences, self.num_heads, self.head_dim, dtype=dtype, device=torch.device(device)
        )

    @property
    def operations_per_token(self) -> int:
        # The decay, the sum of k k^T, and a product for the first residual, every step and the last residual.
        return (3 + 2 * (self.steps + 2)) * self.num_heads * self.head_dim**2

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, steps={self.steps}"
