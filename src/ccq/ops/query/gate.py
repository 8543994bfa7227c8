"""A gate that the read step computes itself."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ccq.ops.checks import FLOATS, check_device, check_shape, describe
from ccq.ops.thin_linear import thin_linear


class LinearGate(NamedTuple):
    """lambda = scale * sigmoid(weight inputs + bias), the form of the paper's second version, for one token of N
    sequences. Any floating-point dtypes.
    """

    inputs: Tensor
    """[N, 1, I], such as the query before the head split."""
    weight: Tensor
    """[H, I]; rounded to the dtype of the inputs."""
    bias: Tensor
    """[H]"""
    scale: Tensor | None
    """[H]; None for 1."""

    def value(self) -> Tensor:
        """[N, 1, H] in float32 (float64 for float64 inputs)."""
        gate = thin_linear(self.inputs, self.weight, self.bias, sigmoid=True)
        return gate if self.scale is None else self.scale.to(gate.dtype) * gate


def check_linear_gate(gate: LinearGate, q: Tensor) -> None:
    """The gate must fit q [N, 1, H, D]."""
    heads, width = q.shape[2], gate.inputs.shape[-1:]
    shapes = {"inputs": (*q.shape[:2], *width), "weight": (heads, *width), "bias": (heads,), "scale": (heads,)}
    for name, shape in shapes.items():
        x = getattr(gate, name)
        if x is None and name == "scale":
            continue
        check_shape(f"gate.{name}", x, shape)
        check_device(f"gate.{name}", x, q)
        if x.dtype not in FLOATS:
            raise TypeError(f"gate.{name} must be a floating-point tensor, got {describe(x)}")
