"""The middle of the feed-forward half of a block, silu(gate) * x, in one pass by flash-linear-attention's kernel on a
GPU.

In eager PyTorch it is two kernels forward and three backward, and silu(gate), which nobody else needs, is kept for the
backward pass: a quarter of what the feed-forward half keeps, 7.2 GiB of a 1.3B model at 8 x 4096 tokens. torch.compile
fuses the formula by itself, so it is given the formula.

| operator | what it is |
| --- | --- |
| ccq::swiglu | the product, differentiable |
| ccq::swiglu_backward | its gradients |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.ops.flash_linear_attention import launching_fixed, reason_against
from ccq.ops.operators import custom_operator

OPERATION = "swiglu"
CONFIGURATIONS = {name: {"B": 1024, "num_warps": 4} for name in ("swiglu_fwd_kernel", "swiglu_fwdbwd_kernel")}
"""Bound by memory, so one for every card."""


@custom_operator("swiglu", schema="(Tensor gate, Tensor x) -> Tensor")
def forward(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) * x, both of one shape."""
    with launching_fixed(CONFIGURATIONS, x):
        from fla.modules.activations.ops import swiglu_fwd

        product: Tensor = swiglu_fwd(gate.contiguous(), x.contiguous())
    return product


@forward.register_fake
def _(gate: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@custom_operator("swiglu_backward", schema="(Tensor gradient, Tensor gate, Tensor x) -> (Tensor, Tensor)")
def backward(gradient: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients in gate and x."""
    with launching_fixed(CONFIGURATIONS, x):
        from fla.modules.activations.ops import swiglu_fwdbwd

        d_gate, d_x = swiglu_fwdbwd(gate.contiguous(), x.contiguous(), gradient.contiguous())
    return d_gate, d_x


@backward.register_fake
def _(gradient: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_x = torch.ops.ccq.swiglu_backward(gradient, *ctx.saved_tensors)
    return d_gate, d_x


forward.register_autograd(_backward, setup_context=_setup_context)


def is_chosen(gate: Tensor, x: Tensor) -> bool:
    """Whether the kernel computes it."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.numel() == 0:
        return False
    half = gate.dtype == x.dtype and x.dtype in (torch.float16, torch.bfloat16)
    return half and not reason_against(OPERATION, x.device.index)


def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) * x (Shazeer, arXiv:2002.05202): gate, x [...] -> [...]. The kernel computes in float32 and rounds
    once.
    """
    if is_chosen(gate, x):
        product: Tensor = torch.ops.ccq.swiglu(gate, x)
        return product
    return F.silu(gate) * x
