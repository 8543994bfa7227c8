"""Normalisations. A plain RMS norm is `torch.nn.RMSNorm`; here is what torch does not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ccq.ops.checks import accumulation_dtype


class RMSNormGated(nn.Module):
    """The output norm of the mixers: RMS norm over the value size of one head, times silu(gate).

    The weight [V] is shared by the heads and called `weight`, as in flash-linear-attention.
    """

    def __init__(self, size: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., V] -> [..., V] in the dtype of x; computed in float32 (float64 for float64 input)."""
        dtype = accumulation_dtype(x.dtype)
        normed = F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return (normed * F.silu(gate.to(dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
