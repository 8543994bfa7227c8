"""comba: y = q - d k with the key of the same token, d learned, one number a head (Hu et al., arXiv:2506.02475)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ccq.nn.read import Normalized, ReadResult, ReadStep
from ccq.ops.reads import comba_query

INITIAL_STRENGTH = 0.02
"""d at the start: what Comba's authors recommend for small models; for large ones they take 1."""


class CombaRead(ReadStep):
    """Reads with q - d k. To an observer d is the gate."""

    keeps_statistics: ClassVar[bool] = False

    def __init__(self, num_heads: int, head_dim: int, *, keep_length: bool = False) -> None:
        super().__init__(num_heads, head_dim, keep_length=keep_length)
        self.strength = nn.Parameter(torch.empty(num_heads))
        self.strength._no_weight_decay = True  # type: ignore[attr-defined]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """d as it starts."""
        self.strength.fill_(INITIAL_STRENGTH)

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
        """As `ReadStep.forward`; there is no state."""
        if not self.enabled:
            return ReadResult(self._query_before(q, normalized), None)
        strength = self.strength if self.factors is None else self.strength * self.factors
        result = comba_query(
            q,
            k,
            strength,
            mask=mask,
            cu_seqlens=cu_seqlens,
            normalize=self._normalize(normalized),
            return_correction=self.observer is not None,
        )
        if result.correction is not None:
            self._observe(q, strength.expand(q.shape[:3]), result.correction, mask, normalized)
        return ReadResult(result.query, None)

    @property
    def operations_per_token(self) -> int:
        return 2 * self.num_heads * self.head_dim
