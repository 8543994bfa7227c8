"""Linear maps of one input, together where that is faster."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ccq.ops.checks import needs_gradient
from ccq.ops.joint_linear import add_linear, gated_linear, is_chosen, joint_linear
from ccq.ops.swiglu import swiglu


def is_exactly(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is a call of its class `kind` and nothing else: no adapter in its place, no forward
    of its own, and nobody who watches.
    """
    watched = module._forward_hooks or module._forward_pre_hooks
    return type(module) is kind and "forward" not in vars(module) and not watched


def plain_weights(*linears: nn.Module) -> list[Tensor] | None:
    """The weights of linear maps, or None where one of them is more than its weight, or that more than a tensor."""
    weights: list[Tensor] = []
    for linear in linears:
        if not is_exactly(linear, nn.Linear) or getattr(linear, "bias", None) is not None:
            return None
        weight: Any = linear.weight
        if type(weight) not in (Tensor, nn.Parameter):
            return None
        weights.append(weight)
    return weights


def project(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Every map of x [..., inputs]. Of a few vectors, as in decoding, by `ccq.ops.joint_linear`."""
    weights = plain_weights(*linears)
    if weights is not None and is_chosen(x, weights):
        return joint_linear(x, weights)
    return tuple(linear(x) for linear in linears)


def gated_projection(x: Tensor, gate_proj: nn.Module, up_proj: nn.Module) -> Tensor:
    """silu(gate_proj(x)) * up_proj(x), x [..., inputs]; as `project`."""
    weights = plain_weights(gate_proj, up_proj)
    if weights is not None and is_chosen(x, weights):
        return gated_linear(x, *weights)
    return swiglu(gate_proj(x), up_proj(x))


def add_projection(residual: Tensor, x: Tensor, linear: nn.Module) -> Tensor:
    """residual + linear(x), residual [..., outputs] and x [..., inputs]; as `project`."""
    weights = plain_weights(linear)
    alike = residual.dtype == x.dtype and residual.device == x.device and not needs_gradient(residual)
    if weights is not None and alike and is_chosen(x, weights):
        return add_linear(residual, x, *weights)
    y: Tensor = residual + linear(x)
    return y
