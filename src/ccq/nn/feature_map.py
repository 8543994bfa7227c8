"""Learned feature maps: what a linear attention writes and reads in place of its keys and queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ccq.ops.checks import accumulation_dtype


class HedgehogFeatureMap(nn.Module):
    """softmax([2y, -2y]) of y = W x + b: positive features that a linear attention can learn to use like a softmax.

    The map of Zhang et al., "The Hedgehog & the Porcupine" (arXiv:2402.04347), in flash-linear-attention's form of it:
    one softmax over both signs. There W is square and the features are twice as many as the channels; here their number
    is free, and W has half as many rows. The paper starts from the identity. So does this map, folded where it has
    fewer rows than channels: every channel enters one y, and y has the variance of x. No random numbers are drawn.
    """

    def __init__(self, size: int, features: int) -> None:
        super().__init__()
        if features < 2 or features % 2 or size % (features // 2):
            raise ValueError(
                f"features must be even, and half of them must divide size; got {features} features of {size} channels"
            )
        self.weight = nn.Parameter(torch.empty(features // 2, size))
        self.bias = nn.Parameter(torch.empty(features // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        rows, size = self.weight.shape
        self.weight.copy_(torch.eye(rows).repeat(1, size // rows) * (rows / size) ** 0.5)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., features] in the dtype of x; the softmax is computed in float32 (float64 for float64
        input).
        """
        y = 2 * F.linear(x, self.weight, self.bias).to(accumulation_dtype(x.dtype))
        return torch.cat((y, -y), -1).softmax(-1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {2 * self.weight.shape[0]}"
