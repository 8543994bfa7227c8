"""ccq-two-reads: o = S q - S (lambda Sigma q), the memory read once with the query and once with the correction.

In exact arithmetic this is o = S (q - lambda Sigma q). In bfloat16 the correction is often smaller than the spacing of
the numbers near q, so that rounding their difference loses most of it; apart, each keeps its own digits.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ccq.nn.read import CurvatureConditionedQuery, Normalized, QueryInParts, ReadResult
from ccq.ops.query import KeyStatistics, curvature_conditioned_query


class TwoReads(CurvatureConditionedQuery):
    """The Curvature-Conditioned Query as a `QueryInParts`."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        presplit_query: Tensor,
        log_decay: Tensor | None = None,
        statistics: KeyStatistics | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        normalized: Normalized = False,
    ) -> ReadResult:
        """As `ReadStep.forward`, but with the query in two parts."""
        if not self.enabled:
            return ReadResult(self._query_before(q, normalized), None)
        options: dict[str, Any] = {"statistics": statistics, "mask": mask, "cu_seqlens": cu_seqlens}
        lam = self._multiplied(self._strength(q, presplit_query, normalized=normalized, **options), q)
        result = curvature_conditioned_query(
            q, k, lam, normalize=self._normalize(normalized), return_correction=True, **options
        )
        assert result.correction is not None
        self._observe(q, lam, result.correction, mask, normalized)
        strength = lam.unsqueeze(-1) if isinstance(lam, Tensor) else lam
        parts = QueryInParts(self._query_before(q, normalized), (strength * result.correction).to(q.dtype))
        return ReadResult(cast(Tensor, parts), result.statistics)
