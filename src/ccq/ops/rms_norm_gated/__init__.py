"""The norm behind a write rule: RMS norm times silu(gate), in one pass by flash-linear-attention's kernel on a GPU.

Composed from PyTorch it takes a dozen kernels, most of them over float32 copies: about 3 of the 19.8 ms of a GLA
layer's forward + backward (H200, batch 8, 4096 tokens, 6 heads of 256/512), where the two kernels of
flash-linear-attention's own layer take 0.55.

| operator | what it is |
| --- | --- |
| ccq::rms_norm_gated | the norm, differentiable |
| ccq::rms_norm_gated_backward | its gradients |
| ccq::rms_norm_gated_few | the norm of the few vectors of decoding, by a kernel of this library |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, needs_gradient
from ccq.ops.flash_linear_attention import MULTIPLE, launching, reason_against
from ccq.ops.operators import TRITON_INSTALLED, custom_operator

OPERATION = "rms_norm_gated"
MAX_SIZE = 512
"""The largest V of the kernels that take several vectors a program."""
FEW_VECTORS = 512
"""The most that are few: one for each row and head of a decoding step."""


@custom_operator(
    "rms_norm_gated",
    schema="(Tensor x, Tensor gate, Tensor weight, float eps) -> (Tensor, Tensor)",
)
def forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x [T, V], and the reciprocal lengths [T] for the backward pass."""
    with launching(OPERATION, x, x):
        from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd

        y, _, reciprocal, _ = layer_norm_gated_fwd(
            x.contiguous(), gate.contiguous(), weight.contiguous(), None, eps=eps, is_rms_norm=True
        )
    return y, reciprocal


@forward.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


@custom_operator(
    "rms_norm_gated_backward",
    schema="(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor reciprocal, float eps)"
    " -> (Tensor, Tensor, Tensor)",
)
def backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, reciprocal: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, gate and weight."""
    with launching(OPERATION, x, x):
        from fla.modules.norm.fused_norm_gate import layer_norm_gated_bwd

        d_x, d_gate, d_weight, *_ = layer_norm_gated_bwd(
            dy.contiguous(), x.contiguous(), gate.contiguous(), weight.contiguous(), None, eps=eps, rstd=reciprocal,
            is_rms_norm=True,
        )  # fmt: skip
    return d_x, d_gate, d_weight


@backward.register_fake
def _(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, reciprocal: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gate, weight, ctx.eps = inputs
    ctx.save_for_backward(x, gate, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *torch.ops.ccq.rms_norm_gated_backward(dy, *ctx.saved_tensors, ctx.eps), None


forward.register_autograd(_backward, setup_context=_setup_context)


@custom_operator("rms_norm_gated_few", schema="(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor")
def few(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x [T, V]."""
    from ccq.ops.rms_norm_gated import kernels

    with torch.cuda.device_of(x):
        y: Tensor = kernels.few(x.contiguous(), gate.contiguous(), weight.contiguous(), eps)
    return y


@few.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def are_few(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Whether the kernel for few vectors computes it."""
    half = x.dtype == gate.dtype and x.dtype in (torch.float16, torch.bfloat16)
    counted = 0 < x.numel() <= FEW_VECTORS * x.shape[-1] and x.shape[-1] <= MAX_SIZE
    return x.is_cuda and TRITON_INSTALLED and half and counted and not needs_gradient(x, gate, weight)


def is_chosen(x: Tensor, gate: Tensor) -> bool:
    """Whether the kernel of flash-linear-attention computes it."""
    size = x.shape[-1]
    sizes = size <= MAX_SIZE and size % MULTIPLE == 0 and x.numel() > 0
    half = x.dtype == gate.dtype and x.dtype in (torch.float16, torch.bfloat16)
    return x.is_cuda and sizes and half and not reason_against(OPERATION, x.device.index)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), the mean over the last dimension.

    Args:
        x, gate: [..., V].
        weight: [V].
        eps: added to the mean square.

    Returns:
        [..., V] in the dtype of x; computed in float32 (float64 for float64 input) and rounded once.
    """
    size = x.shape[-1]
    if are_few(x, gate, weight):
        found: Tensor = torch.ops.ccq.rms_norm_gated_few(x.reshape(-1, size), gate.reshape(-1, size), weight, eps)
        return found.view(x.shape)
    if is_chosen(x, gate):
        y, _ = torch.ops.ccq.rms_norm_gated(x.reshape(-1, size), gate.reshape(-1, size), weight, eps)
        return y.view(x.shape)
    dtype = accumulation_dtype(x.dtype)
    normed = F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps)
    return (normed * F.silu(gate.to(dtype))).to(x.dtype)
