"""The norm in front of each half of a block: RMS norm of the residual stream and of what is added to it, in one pass.

Under autocast the stream is float32, and so is torch's norm of it, which every linear map that reads it rounds for
itself, keeps so, and gives a gradient of its own back for: five in a GLA layer. Here it is rounded once. What the half
before has put out is added in the same pass, and so are the gradients that meet there in the backward pass.

On an H200 (32,768 vectors of 2048, stream float32, norm bfloat16) the kernels take 96 us forward, 195 with the sum, and
237 and 270 us backward with the gradients of stream and weight. PyTorch takes 154 for the norm, 237 for the sum and 94
for every rounding. flash-linear-attention's kernels are as fast forward and take 483 and 510 us backward, which is why
these are not they. torch.compile fuses the formula by itself and is given the formula.

| operator | what it is |
| --- | --- |
| ccq::rms_norm | the norm, differentiable |
| ccq::rms_norm_backward | its gradients |
| ccq::add_rms_norm | the sum and its norm, differentiable |
| ccq::add_rms_norm_backward | their gradients |
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.ops.operators import TRITON_INSTALLED, custom_operator

MAX_SIZE = 16_384
"""The largest E of the kernels, which hold a vector in registers."""


def _kernels() -> ModuleType:
    from ccq.ops.residual_rms_norm import kernels

    return kernels


@custom_operator("rms_norm", schema="(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)")
def forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, E]: the norm in `dtype`, and the reciprocal lengths [T] for the backward pass."""
    with torch.cuda.device_of(x):
        y, _, reciprocal = _kernels().forward(x.contiguous(), None, weight.contiguous(), eps, dtype)
    return y, reciprocal


@forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:1], dtype=torch.float32)


@custom_operator(
    "rms_norm_backward",
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor reciprocal, Tensor? beside) -> (Tensor, Tensor)",
)
def backward(dy: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients in x, to which beside [T, E] is added, and in weight."""
    with torch.cuda.device_of(x):
        d_x, _, d_weight = _kernels().backward(
            dy.contiguous(), x.contiguous(), weight.contiguous(), reciprocal,
            None if beside is None else beside.contiguous(), None,
        )  # fmt: skip
    return d_x, d_weight


@backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *_ = inputs
    _, reciprocal = output
    ctx.save_for_backward(x, weight, reciprocal)
    ctx.mark_non_differentiable(reciprocal)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: None, beside: Tensor | None = None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return beside, None, None, None
    return *torch.ops.ccq.rms_norm_backward(dy, *ctx.saved_tensors, beside), None, None


forward.register_autograd(_backward, setup_context=_setup_context, passed=0)


@custom_operator(
    "add_rms_norm",
    schema="(Tensor x, Tensor branch, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
)
def add_forward(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x, branch [T, E]: the norm of their sum in `dtype`, the sum in the dtype of x, and the reciprocal lengths [T]."""
    with torch.cuda.device_of(x):
        found: tuple[Tensor, Tensor, Tensor] = _kernels().forward(
            x.contiguous(), branch.contiguous(), weight.contiguous(), eps, dtype
        )
    return found


@add_forward.register_fake
def _(x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


@custom_operator(
    "add_rms_norm_backward",
    schema="(Tensor dy, Tensor? d_total, Tensor total, Tensor weight, Tensor reciprocal, ScalarType? branch)"
    " -> (Tensor, Tensor, Tensor)",
)
def add_backward(
    dy: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, reciprocal: Tensor, branch: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient in x; the same in the dtype of the branch, empty where that (None) is the dtype of x; and that in
    weight.
    """
    with torch.cuda.device_of(total):
        d_x, d_branch, d_weight = _kernels().backward(
            dy.contiguous(), total.contiguous(), weight.contiguous(), reciprocal,
            None if d_total is None else d_total.contiguous(), branch,
        )  # fmt: skip
    return d_x, d_x.new_empty(0) if branch is None else d_branch, d_weight


@add_backward.register_fake
def _(
    dy: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, reciprocal: Tensor, branch: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    d_branch = total.new_empty(0) if branch is None else total.new_empty(total.shape, dtype=branch)
    return total.new_empty(total.shape), d_branch, weight.new_empty(weight.shape)


def _add_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, weight, *_ = inputs
    _, total, reciprocal = output
    ctx.branch = None if branch.dtype == x.dtype else branch.dtype
    ctx.save_for_backward(total, weight, reciprocal)
    ctx.mark_non_differentiable(reciprocal)
    ctx.set_materialize_grads(False)


def _add_backward(ctx: Any, dy: Tensor | None, d_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        lower = d_total if d_total is None or ctx.branch is None else d_total.to(ctx.branch)
        return d_total, lower, None, None, None
    total, weight, reciprocal = ctx.saved_tensors
    d_x, d_branch, d_weight = torch.ops.ccq.add_rms_norm_backward(dy, d_total, total, weight, reciprocal, ctx.branch)
    return d_x, d_x if ctx.branch is None else d_branch, d_weight, None, None


add_forward.register_autograd(_add_backward, setup_context=_add_setup_context)


def _lowered(dtype: torch.dtype, device: str) -> torch.dtype:
    """What linear maps round an input of `dtype` to. Autocast leaves float64 alone."""
    # Autocast does not know the meta device, and torch 2.11 cannot trace the question which devices it knows.
    lowers = device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64
    return torch.get_autocast_dtype(device) if lowers else dtype


def is_chosen(x: Tensor, branch: Tensor | None) -> bool:
    """Whether the kernels compute it."""
    if torch.compiler.is_compiling() or not (x.is_cuda and TRITON_INSTALLED):
        return False
    # PyTorch adds in the wider of two dtypes, which need not be that of x.
    stays = branch is None or torch.promote_types(x.dtype, branch.dtype) == x.dtype
    half = _lowered(x.dtype, x.device.type) in (torch.float16, torch.bfloat16)
    return stays and half and x.dtype != torch.float64 and x.numel() > 0 and x.shape[-1] <= MAX_SIZE


def residual_rms_norm(x: Tensor, weight: Tensor, eps: float, *, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y = z / sqrt(mean(z^2) + eps) * weight, the mean over the last dimension, for z = x, or x + branch (Zhang and
    Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467).

    Args:
        x: [..., E], the residual stream.
        weight: [E].
        eps: added to the mean square.
        branch: [..., E], what is added to the stream; None for nothing.

    Returns:
        (y [..., E], z [..., E]). Under autocast y has the dtype that it lowers the input of linear maps to, else that
        of z; the kernels compute it in float32 and round once.
    """
    if is_chosen(x, branch):
        dtype, size = _lowered(x.dtype, x.device.type), x.shape[-1]
        if branch is None:
            y, _, z = forward.with_passed(x.reshape(-1, size), weight, eps, dtype)
        else:
            y, z, _ = torch.ops.ccq.add_rms_norm(x.reshape(-1, size), branch.reshape(-1, size), weight, eps, dtype)
        return y.view(x.shape), z.view(x.shape)
    z = x if branch is None else x + branch
    return F.rms_norm(z, weight.shape, weight, eps).to(_lowered(z.dtype, z.device.type)), z
