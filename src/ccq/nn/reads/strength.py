"""ccq-strength: y = q - lambda D Sigma q, the control for a correction that is too weak to matter.

The trace of Sigma is at most 1 and spreads over D directions, so that lambda Sigma q is often a small part of q.
"""

from __future__ import annotations

from torch import Tensor

from ccq.nn.read import CurvatureConditionedQuery, Normalized


class StrengthRead(CurvatureConditionedQuery):
    """The Curvature-Conditioned Query with D times its lambda; an observer sees lambda D."""

    def gate_and_query(
        self, q: Tensor, presplit_query: Tensor | None = None, *, normalized: Normalized = False
    ) -> tuple[Tensor | float, Tensor]:
        gate, q = super().gate_and_query(q, presplit_query, normalized=normalized)
        return self.head_dim * gate, q

    def configured_gate(self, observed: float) -> float:
        return observed / self.head_dim
