"""The decay of gated linear attention, logsigmoid(x) / normalizer, in one pass by a Triton kernel on a GPU.

In eager PyTorch it is a cast and two kernels forward and three backward, all on float32: 0.59 of the 17.2 ms of a GLA
layer's forward + backward at 8 x 4096 tokens (H200, 6 heads of 256), and the float32 copy is kept for the backward
pass. Here only x in its own dtype is. torch.compile fuses the formula by itself, so it is given the formula.

| operator | what it is |
| --- | --- |
| ccq::log_decay | the decay, differentiable |
| ccq::log_decay_backward | its gradient |
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.operators import custom_operator
from ccq.ops.query.fused import TRITON_INSTALLED


def _kernels() -> ModuleType:
    from ccq.ops.log_decay import kernels

    return kernels


@custom_operator("log_decay", schema="(Tensor x, float normalizer) -> Tensor")
def forward(x: Tensor, normalizer: float) -> Tensor:
    """The decay in float32."""
    with torch.cuda.device_of(x):
        y: Tensor = _kernels().forward(x.contiguous(), normalizer)
    return y


@forward.register_fake
def _(x: Tensor, normalizer: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


@custom_operator("log_decay_backward", schema="(Tensor dy, Tensor x, float normalizer) -> Tensor")
def backward(dy: Tensor, x: Tensor, normalizer: float) -> Tensor:
    """The gradient in x."""
    with torch.cuda.device_of(x):
        dx: Tensor = _kernels().backward(dy.contiguous(), x.contiguous(), normalizer)
    return dx


@backward.register_fake
def _(dy: Tensor, x: Tensor, normalizer: float) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.normalizer = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return torch.ops.ccq.log_decay_backward(dy, *ctx.saved_tensors, ctx.normalizer), None


forward.register_autograd(_backward, setup_context=_setup_context)


def is_chosen(x: Tensor) -> bool:
    """Whether the kernel computes it."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.numel() == 0:
        return False
    return TRITON_INSTALLED and x.dtype in (torch.float16, torch.bfloat16)


def log_sigmoid_decay(x: Tensor, normalizer: float) -> Tensor:
    """logsigmoid(x) / normalizer (Yang et al., arXiv:2312.06635, section 4.4): x [...] -> [...] in float32 (float64 for
    float64 input).
    """
    if is_chosen(x):
        y: Tensor = torch.ops.ccq.log_decay(x, normalizer)
        return y
    return F.logsigmoid(x.to(accumulation_dtype(x.dtype))) / normalizer
