"""Normalisations. A plain RMS norm is `torch.nn.RMSNorm`; here is what torch does not have in one piece."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ccq.ops.gated_group_rms_norm import gated_group_rms_norm
from ccq.ops.residual_rms_norm import residual_rms_norm
from ccq.ops.rms_norm_gated import rms_norm_gated


class ResidualRMSNorm(nn.RMSNorm):
    """The norm in front of each half of a block, which adds what the half before has put out to the residual stream."""

    eps: float

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, branch [..., size] -> the norm of x + branch, in the dtype that linear maps compute in, and x + branch;
        without a branch, the norm of x, and x.
        """
        return residual_rms_norm(x, self.weight, self.eps, branch=branch)


class RMSNormGated(nn.Module):
    """The output norm of the mixers: RMS norm over the value size of one head, times silu(gate).

    The weight [V] is shared by the heads and called `weight`, as in flash-linear-attention.
    """

    def __init__(self, size: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., V] -> [..., V] in the dtype of x; computed in float32 (float64 for float64 input)."""
        return rms_norm_gated(x, gate, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedGroupRMSNorm(nn.Module):
    """The output norm of Mamba2: (x + skip * values) * silu(gate), then RMS norm over each of `groups` equal parts of
    the last dimension.

    The weight [size] is called `weight`, as in the official layer.
    """

    def __init__(self, size: int, *, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        if size % groups:
            raise ValueError(f"groups must divide size, got {groups} groups of {size}")
        self.groups = groups
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1)

    def forward(self, x: Tensor, gate: Tensor, *, values: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        """x, gate and, where there is a skip [size], values [..., size] -> [..., size] in the dtype of x; computed in
        float32 (float64 for float64 input).
        """
        return gated_group_rms_norm(x, gate, self.weight, groups=self.groups, eps=self.eps, values=values, skip=skip)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, groups={self.groups}, eps={self.eps}"
