"""The short convolution and its SiLU in one pass, on a GPU.

For q, k and v of a Gated DeltaNet layer (1536, 1536 and 3072 channels, W 4, 8 x 4096 tokens, bfloat16, one H200, device
time) the bytes that must move take 190 us forward and 290 us backward at 4.2 TB/s. flash-linear-attention's kernels
take 288 and 1,282 us, and 288 more because their backward pass wants the forward pass again. These take 228 and 422:
the backward pass is one kernel, and nothing but the inputs is kept for it.

| operator | what it is |
| --- | --- |
| ccq::short_convolution | the convolution, differentiable |
| ccq::short_convolution_backward | its gradients |
| ccq::short_convolution_token_ | several of one token each, with the states overwritten |
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ccq.ops.operators import TRITON_INSTALLED, custom_operator

MAX_KERNEL_SIZE = 8
"""The largest W of the kernels."""


def _kernels() -> ModuleType:
    from ccq.ops.short_convolution import kernels

    return kernels


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


@custom_operator(
    "short_convolution",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? state, int[]? boundaries) -> Tensor",
)
def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, boundaries: Sequence[int] | None
) -> Tensor:
    """silu(convolution) of x [B, T, channels] by weight [channels, W], behind the state [N, W - 1, channels], which is
    of the dtype of x.
    """
    with torch.cuda.device_of(x):
        y: Tensor = _kernels().forward(*_contiguous(x, weight, bias, state), boundaries)
    return y


@forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, boundaries: Sequence[int] | None) -> Tensor:
    return x.new_empty(x.shape)


@custom_operator(
    "short_convolution_backward",
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? state, int[]? boundaries)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients in x, weight, bias and state (the last two empty without one)."""
    with torch.cuda.device_of(x):
        d_x, d_weight, d_bias, d_state = _kernels().backward(*_contiguous(dy, x, weight, bias, state), boundaries)
    d_bias = weight.new_empty(0) if d_bias is None else d_bias
    d_state = x.new_empty(0) if d_state is None else d_state
    return d_x, d_weight, d_bias, d_state


@backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(0) if bias is None else bias.new_empty(bias.shape),
        x.new_empty(0 if state is None else state.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.boundaries = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, state = ctx.saved_tensors
    d_x, d_weight, d_bias, d_state = torch.ops.ccq.short_convolution_backward(
        dy, x, weight, bias, state, ctx.boundaries
    )
    return d_x, d_weight, None if bias is None else d_bias, None if state is None else d_state, None


forward.register_autograd(_backward, setup_context=_setup_context)


@custom_operator(
    "short_convolution_token_",
    schema="(Tensor[] xs, Tensor[] weights, Tensor(a!)[] states, Tensor(b!)[] ys) -> ()",
)
def token_(xs: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """xs and the outputs ys [N, 1, channels], weights [channels, W], states [N, W - 1, channels], of one dtype, N and
    W; states and ys contiguous. (The compiler takes no list that an operator which overwrites something returns.)
    """
    with torch.cuda.device_of(xs[0]):
        _kernels().token([x.contiguous() for x in xs], [weight.contiguous() for weight in weights], states, ys)


@token_.register_fake
def _(xs: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    return None


def is_chosen(x: Tensor, kernel_size: int) -> bool:
    """Whether the kernels compute it."""
    sizes = 1 < kernel_size <= MAX_KERNEL_SIZE and x.numel() > 0
    return x.is_cuda and TRITON_INSTALLED and x.dtype != torch.float64 and sizes
