"""ccq-strength: y = q - lambda D Sigma q, the control for a correction that is too weak to matter.

The trace of Sigma is at most 1 and spreads over D directions, so that lambda Sigma q is often a small part of q.
"""

from __future__ import annotations

from torch import Tensor

from ccq.nn.read import CurvatureConditionedQuery, Normalized


class StrengthRead(CurvatureConditionedQuery):
    """The Curvature-Conditioned Query with D times its lambda; an observer sees lambda D."""

    def gate_values(self, q: Tensor, presplit_query: Tensor, *, normalized: Normalized = False) -> Tensor | float:
        return self.head_dim * super().gate_values(q, presplit_query, normalized=normalized)

    def configured_gate(self, observed: float) -> float:
        return observed / self.head_dim
