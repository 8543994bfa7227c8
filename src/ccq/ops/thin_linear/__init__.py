"""Few numbers from a wide input, x W^T + b and its sigmoid: the gate of a read step, the gates of Gated DeltaNet.

With 6 outputs the matrix libraries fall back to kernels for unaligned matrices, with casts around them: on an H200
(4096 tokens, 6 heads of 256) 0.19 ms of a GLA layer's forward + backward at batch 8 for the gate of the read step,
whose own kernels take 1.05 ms, and 0.42 ms for the two of Gated DeltaNet. Here the sums, which need more digits than
bfloat16 has, stay float32, and x is read once each way. Where x goes on to something else, `thin_linear_and_input` adds
the gradient from there in the same pass.

| operator | what it is |
| --- | --- |
| ccq::thin_linear | the outputs, differentiable |
| ccq::thin_linear_backward | its gradients |
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.operators import TRITON_INSTALLED, custom_operator

MAX_OUTPUTS = 64
"""The largest H of the kernels."""


def _kernels() -> ModuleType:
    from ccq.ops.thin_linear import kernels

    return kernels


@custom_operator("thin_linear", schema="(Tensor x, Tensor weight, Tensor? bias, bool sigmoid) -> Tensor")
def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sigmoid: bool) -> Tensor:
    """x [R, E], weight [H, E], bias [H] -> [R, H] float32."""
    with torch.cuda.device_of(x):
        y: Tensor = _kernels().forward(
            x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), sigmoid
        )
    return y


@forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, sigmoid: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@custom_operator(
    "thin_linear_backward",
    schema="(Tensor dy, Tensor? y, Tensor x, Tensor weight, Tensor? beside) -> (Tensor, Tensor, Tensor)",
)
def backward(
    dy: Tensor, y: Tensor | None, x: Tensor, weight: Tensor, beside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, weight and bias, those of the parameters float32; y is given where it is the sigmoid. beside
    [R, E] is added to that in x.
    """
    with torch.cuda.device_of(x):
        found: tuple[Tensor, Tensor, Tensor] = _kernels().backward(
            dy.contiguous(), y, x.contiguous(), weight.contiguous(), None if beside is None else beside.contiguous()
        )
    return found


@backward.register_fake
def _(dy: Tensor, y: Tensor | None, x: Tensor, weight: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(weight.shape, dtype=torch.float32),
        x.new_empty(weight.shape[:1], dtype=torch.float32),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, sigmoid = inputs
    ctx.save_for_backward(output if sigmoid else None, x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, beside: Tensor | None = None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return beside, None, None, None
    y, x, weight = ctx.saved_tensors
    d_x, d_weight, d_bias = torch.ops.ccq.thin_linear_backward(dy, y, x, weight, beside)
    return d_x, d_weight.to(weight.dtype), None if ctx.bias_dtype is None else d_bias.to(ctx.bias_dtype), None


forward.register_autograd(_backward, setup_context=_setup_context, passed=0)


def is_chosen(x: Tensor, outputs: int) -> bool:
    """Whether the kernels compute so many outputs of x."""
    sizes = outputs <= MAX_OUTPUTS and x.numel() > 0
    return x.is_cuda and TRITON_INSTALLED and x.dtype != torch.float64 and sizes


def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sigmoid: bool = False) -> Tensor:
    """x weight^T + bias, or the sigmoid of that.

    Args:
        x: [..., E].
        weight: [H, E]; rounded to the dtype of x.
        bias: [H]; not rounded.

    Returns:
        [..., H] in float32 (float64 for float64 input). Composed from PyTorch, which also serves more than 64 outputs,
        the product is rounded to the dtype of x before the bias is added.
    """
    if is_chosen(x, len(weight)):
        found: Tensor = torch.ops.ccq.thin_linear(x.reshape(-1, x.shape[-1]), weight, bias, sigmoid)
        return found.view(*x.shape[:-1], len(weight))
    dtype = accumulation_dtype(x.dtype)
    # In the dtype of x, whose copy in float32 would cost more than all that is done with the outputs.
    y = F.linear(x, weight.to(x.dtype)).to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return torch.sigmoid(y) if sigmoid else y


def thin_linear_and_input(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sigmoid: bool = False
) -> tuple[Tensor, Tensor]:
    """`thin_linear`, and x again for what else reads it: where the kernels compute the map, the gradient that comes
    back from there is added to the map's own inside their backward pass, in place of a pass over both.

    Arguments as for `thin_linear`.

    Returns:
        (outputs [..., H], x [..., E]).
    """
    if not is_chosen(x, len(weight)):
        return thin_linear(x, weight, bias, sigmoid=sigmoid), x
    y, passed = forward.with_passed(x.reshape(-1, x.shape[-1]), weight, bias, sigmoid)
    return y.view(*x.shape[:-1], len(weight)), passed.view(x.shape)
