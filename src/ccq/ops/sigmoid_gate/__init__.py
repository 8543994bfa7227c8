"""The gate of a read step: sigmoid(W x + b), few outputs of a wide input.

With H = 6 outputs the matrix libraries fall back to kernels for unaligned matrices, with casts around them: 0.06 ms of
a GLA layer's forward + backward at batch 1 and 0.19 at batch 8 (H200, 4096 tokens, 6 heads of 256), beside 0.27 and
1.25 for the read step itself. Here the logits, which most of all need more digits than bfloat16 has, never leave the
chip, and x is read once each way.

| operator | what it is |
| --- | --- |
| ccq::sigmoid_gate | the gate, differentiable |
| ccq::sigmoid_gate_backward | its gradients |
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

from ccq.ops.checks import accumulation_dtype
from ccq.ops.query.fused import TRITON_INSTALLED

MAX_OUTPUTS = 64
"""The largest H of the kernels."""


def _kernels() -> ModuleType:
    from ccq.ops.sigmoid_gate import kernels

    return kernels


@library.custom_op("ccq::sigmoid_gate", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor")
def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [R, E], weight [H, E], bias [H] -> [R, H] float32."""
    with torch.cuda.device_of(x):
        gate: Tensor = _kernels().forward(x.contiguous(), weight.contiguous(), bias.contiguous())
    return gate


@forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@library.custom_op(
    "ccq::sigmoid_gate_backward",
    mutates_args=(),
    schema="(Tensor d_gate, Tensor gate, Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor)",
)
def backward(d_gate: Tensor, gate: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, weight and bias; those of the parameters float32."""
    with torch.cuda.device_of(x):
        found: tuple[Tensor, Tensor, Tensor] = _kernels().backward(
            d_gate.contiguous(), gate, x.contiguous(), weight.contiguous()
        )
    return found


@backward.register_fake
def _(d_gate: Tensor, gate: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(weight.shape, dtype=torch.float32),
        x.new_empty(weight.shape[:1], dtype=torch.float32),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(output, x, weight)
    ctx.bias_dtype = bias.dtype


def _backward(ctx: Any, d_gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, x, weight = ctx.saved_tensors
    d_x, d_weight, d_bias = torch.ops.ccq.sigmoid_gate_backward(d_gate, gate, x, weight)
    return d_x, d_weight.to(weight.dtype), d_bias.to(ctx.bias_dtype)


forward.register_autograd(_backward, setup_context=_setup_context)


def is_chosen(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels compute it."""
    sizes = len(weight) <= MAX_OUTPUTS and x.numel() > 0
    return x.is_cuda and TRITON_INSTALLED and x.dtype != torch.float64 and sizes


def sigmoid_gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """sigmoid(x weight^T + bias).

    Args:
        x: [..., E].
        weight: [H, E]; rounded to the dtype of x.
        bias: [H]; not rounded, because it is most of the sum.

    Returns:
        [..., H] in float32 (float64 for float64 input).
    """
    if is_chosen(x, weight):
        gate: Tensor = torch.ops.ccq.sigmoid_gate(x.reshape(-1, x.shape[-1]), weight, bias)
        return gate.view(*x.shape[:-1], len(weight))
    dtype = accumulation_dtype(x.dtype)
    # In the dtype of x, whose copy in float32 would cost more than the read step.
    return torch.sigmoid(F.linear(x, weight.to(x.dtype)).to(dtype) + bias.to(dtype))
