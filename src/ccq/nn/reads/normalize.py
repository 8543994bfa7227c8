"""normalize: unit queries and no correction, the control for what the read step does to the length of the query."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ccq.nn.read import Normalized, ReadResult, ReadStep


class NormalizeRead(ReadStep):
    """y = q / |q|. To an observer it has a gate and a correction of 0."""

    keeps_statistics: ClassVar[bool] = False
    has_correction: ClassVar[bool] = False

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)

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
        query = self._query_before(q, normalized)
        if self.enabled and self.observer is not None:
            self._observe(q, 0.0, query.new_zeros(query.shape), mask, normalized)
        return ReadResult(query, None)
