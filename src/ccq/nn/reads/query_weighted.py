"""query-weighted: y = q - lambda Cov_p(q) q, under softmax weights at the query itself; of low rank, by landmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ccq.nn.reads.operators import OperatorReadStep
from ccq.ops.reads import LandmarkStatistics, query_weighted_query
from ccq.ops.reads.common import check_number

SEED = 0


class QueryWeightedRead(OperatorReadStep):
    """A gate, and R = `landmarks` learned vectors a head. They start as the random unit vectors of a fixed seed, the
    same in every layer and every model, and draw from no random stream of the caller.
    """

    operator = staticmethod(query_weighted_query)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        gate: str | float | Sequence[float] = "presplit",
        keep_length: bool = False,
        landmarks: int = 8,
    ) -> None:
        super().__init__(num_heads, head_dim, gate=gate, keep_length=keep_length)
        self.landmarks = nn.Parameter(torch.empty(num_heads, check_number("landmarks", landmarks), head_dim))
        self.landmarks._no_weight_decay = True  # type: ignore[attr-defined]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The constants that the gate and the landmarks start from."""
        super().reset_parameters()
        random = torch.Generator("cpu").manual_seed(SEED)
        normal = torch.randn(self.landmarks.shape, generator=random, dtype=torch.float64, device="cpu")
        self.landmarks.copy_(normal / normal.norm(dim=-1, keepdim=True))

    def _own_arguments(self, log_decay: Tensor | None) -> dict[str, Any]:
        return {"landmarks": self.landmarks}

    def initial_statistics(
        self, sequences: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> LandmarkStatistics:
        return LandmarkStatistics.zeros(sequences, *self.landmarks.shape, dtype=dtype, device=torch.device(device))

    @property
    def operations_per_token(self) -> int:
        # Keys and landmarks, their sums, queries and means, and the means weighted: 2 R D each; D x D is nowhere.
        matrices = (2 + 2 * self.products) * self.num_heads * self.head_dim**2
        return super().operations_per_token - matrices + 8 * self.landmarks.numel()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, landmarks={self.landmarks.shape[1]}"
