"""ccq-decay: y = q - lambda Sigma q, with the statistics forgotten as the memory forgets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ccq.nn.reads.operators import OperatorReadStep
from ccq.ops.reads import DecayedKeyStatistics, decay_query


class DecayRead(OperatorReadStep):
    """The Curvature-Conditioned Query with decayed statistics; log_decay is needed."""

    operator = staticmethod(decay_query)

    def _own_arguments(self, log_decay: Tensor | None) -> dict[str, Any]:
        return {"log_decay": log_decay}

    def initial_statistics(
        self, sequences: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> DecayedKeyStatistics:
        return DecayedKeyStatistics.zeros(
            sequences, self.num_heads, self.head_dim, dtype=dtype, device=torch.device(device)
        )

    @property
    def operations_per_token(self) -> int:
        return super().operations_per_token + self.num_heads * self.head_dim**2
