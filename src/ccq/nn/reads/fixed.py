"""ccq-fixed: y = q - lambda Sigma q with one lambda for all, as in an ablation of arXiv:2606.01294 (second version)."""

from __future__ import annotations

from collections.abc import Sequence

from ccq.nn.read import CurvatureConditionedQuery

PAPER = 0.1
"""Lambda of the paper's ablation."""


class FixedRead(CurvatureConditionedQuery):
    """The Curvature-Conditioned Query without parameters: lambda is `gate` where that is a number, otherwise 0.1."""

    def __init__(
        self, num_heads: int, head_dim: int, *, gate: str | float | Sequence[float] = PAPER, keep_length: bool = False
    ) -> None:
        super().__init__(num_heads, head_dim, gate=PAPER if isinstance(gate, str) else gate, keep_length=keep_length)
