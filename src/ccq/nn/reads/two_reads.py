"""ccq-two-reads: o = S q - S (lambda Sigma q), the memory read once with the query and once with the correction.

In exact arithmetic this is o = S (q - lambda Sigma q). In bfloat16 the correction is often smaller than the spacing of
the numbers near q, so that rounding their difference loses most of it; apart, each keeps its own digits.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ccq.nn.read import GatedReadStep, Normalized, QueryInParts, ReadResult
from ccq.ops.query import KeyStatistics
from ccq.ops.reads import query_in_parts


class TwoReads(GatedReadStep):
    """The Curvature-Conditioned Query as a `QueryInParts`."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        presplit_query: Tensor | None = None,
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
        strength, q = self._strength(q, presplit_query, normalized=normalized, **options)
        lam = self._multiplied(strength, q)
        parts = query_in_parts(
            q,
            k,
            lam,
            normalize=self._normalize(normalized),
            return_correction=self.observer is not None,
            **options,
        )
        if parts.correction is not None:
            self._observe(q, lam, parts.correction, mask, normalized)
        return ReadResult(cast(Tensor, QueryInParts(parts.kept, parts.removed)), parts.statistics)
