"""random: the covariance of the keys, turned by a fixed random rotation R: y = q - lambda R Sigma R^T q.

A control of the same cost, trace and spectrum, as causal as Sigma, whose directions have nothing to do with the keys
that the memory holds. R Sigma R^T is the covariance of the keys R k, so the operator is that of the read step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ccq.nn.read import CurvatureConditionedQuery, Normalized, ReadResult
from ccq.ops.query import KeyStatistics, PackedKeyStatistics

SEED = 0


class RandomRead(CurvatureConditionedQuery):
    """The Curvature-Conditioned Query on turned keys. The rotations, one a head, are a buffer; they are those of a
    fixed seed, the same in every layer and every model, and draw from no random stream of the caller.
    """

    rotation: Tensor
    """[H, D, D]"""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        gate: str | float | Sequence[float] = "presplit",
        keep_length: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, gate=gate, keep_length=keep_length)
        self.register_buffer("rotation", random_rotations(num_heads, head_dim).to(torch.get_default_dtype()))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        presplit_query: Tensor | None = None,
        log_decay: Tensor | None = None,
        statistics: KeyStatistics | PackedKeyStatistics | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        normalized: Normalized = False,
    ) -> ReadResult:
        """As `ReadStep.forward`; the state is the statistics of the turned keys."""
        options: dict[str, Any] = {"statistics": statistics, "mask": mask, "cu_seqlens": cu_seqlens}
        if self.enabled:
            # One product a head, of which only the result is copied: the operator wants it in the order of k.
            turned = torch.bmm(k.flatten(0, 1).transpose(0, 1), self.rotation.to(k.dtype).mT)
            k = turned.transpose(0, 1).unflatten(0, k.shape[:2])
        result = super().forward(q, k, presplit_query=presplit_query, normalized=normalized, **options)
        # The memory is written with the keys as they were.
        return result._replace(keys=None)

    @property
    def operations_per_token(self) -> int:
        return super().operations_per_token + 2 * self.num_heads * self.head_dim**2


def random_rotations(heads: int, size: int) -> Tensor:
    """[H, D, D] float64 on the CPU: orthogonal matrices, uniform over all of them, always the same."""
    random = torch.Generator("cpu").manual_seed(SEED)
    normal = torch.randn(heads, size, size, generator=random, dtype=torch.float64, device="cpu")
    rotation, triangle = torch.linalg.qr(normal)
    # Without the signs the factorisation would favour some matrices (Mezzadri, arXiv:math-ph/0609050).
    return rotation * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
