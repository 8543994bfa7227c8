"""The decays of gated linear attention, logsigmoid(x) / normalizer, and of the gated delta rule, each in one pass by a
Triton kernel on a GPU.

In eager PyTorch the first is a cast and two kernels forward and three backward, all on float32: 0.59 of the 17.2 ms of
a GLA layer's forward + backward at 8 x 4096 tokens (H200, 6 heads of 256), and the float32 copy is kept for the
backward pass. Here only x in its own dtype is. torch.compile fuses the formula by itself, so it is given the formula.

Without gradients, as in decoding, the linear map that gives x for few vectors is part of the same kernel, and so are
both gates of the gated delta rule, six kernels in PyTorch.

| operator | what it is |
| --- | --- |
| ccq::log_decay | the decay, differentiable |
| ccq::log_decay_backward | its gradient |
| ccq::low_rank_log_decay | the same behind a linear map of few inputs, without gradients |
| ccq::delta_gates | decay and strength of the gated delta rule, without gradients |
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, needs_gradient
from ccq.ops.operators import TRITON_INSTALLED, custom_operator

MAX_VECTORS = 16
"""The most vectors for which the linear map is part of the kernel."""
MAX_INPUTS = 64
"""The most inputs of that map."""


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


@custom_operator("low_rank_log_decay", schema="(Tensor x, Tensor weight, Tensor bias, float normalizer) -> Tensor")
def _low_rank(x: Tensor, weight: Tensor, bias: Tensor, normalizer: float) -> Tensor:
    """x [R, K], weight [C, K], bias [C] -> [R, C] float32."""
    with torch.cuda.device_of(x):
        y: Tensor = _kernels().low_rank(x.contiguous(), weight.contiguous(), bias.contiguous(), normalizer)
    return y


@_low_rank.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, normalizer: float) -> Tensor:
    return x.new_empty((len(x), len(weight)), dtype=torch.float32)


@custom_operator(
    "delta_gates", schema="(Tensor steps, Tensor strengths, Tensor a_log, Tensor bias) -> (Tensor, Tensor)"
)
def _delta(steps: Tensor, strengths: Tensor, a_log: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """steps, strengths [R, H], a_log, bias [H] -> log decay and beta [R, H] float32."""
    with torch.cuda.device_of(steps):
        found: tuple[Tensor, Tensor] = _kernels().delta(*(x.contiguous() for x in (steps, strengths, a_log, bias)))
    return found


@_delta.register_fake
def _(steps: Tensor, strengths: Tensor, a_log: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return steps.new_empty(steps.shape, dtype=torch.float32), steps.new_empty(steps.shape, dtype=torch.float32)


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


def low_rank_is_chosen(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether one kernel computes the linear map, which must have a bias, and the decay."""
    if not (x.is_cuda and TRITON_INSTALLED) or bias is None or torch.is_autocast_enabled(x.device.type):
        return False
    half = x.dtype in (torch.float16, torch.bfloat16) and weight.dtype == bias.dtype == x.dtype
    few = 0 < x.numel() <= MAX_VECTORS * x.shape[-1] and x.shape[-1] <= MAX_INPUTS
    return half and few and not needs_gradient(x, weight, bias)


def low_rank_log_decay(x: Tensor, weight: Tensor, bias: Tensor, normalizer: float) -> Tensor:
    """logsigmoid(x weight^T + bias) / normalizer, where `low_rank_is_chosen`: x [..., K], weight [C, K], bias [C] ->
    [..., C] in float32; the linear map is rounded to the dtype of x, as by itself.
    """
    y: Tensor = torch.ops.ccq.low_rank_log_decay(x.reshape(-1, x.shape[-1]), weight, bias, normalizer)
    return y.view(*x.shape[:-1], len(weight))


def delta_gates(steps: Tensor, strengths: Tensor, a_log: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """-exp(a_log) softplus(steps + bias), the log decay, and sigmoid(strengths), beta (Yang et al., arXiv:2412.06464,
    with the parametrisation of Mamba2): steps, strengths [..., H], a_log, bias [H] -> [..., H] each in float32 (float64
    for float64 input).
    """
    tensors = (steps, strengths, a_log, bias)
    fits = steps.is_cuda and TRITON_INSTALLED and steps.numel() > 0 and steps.dtype != torch.float64
    if fits and not torch.compiler.is_compiling() and not needs_gradient(*tensors):
        heads = len(a_log)
        found = torch.ops.ccq.delta_gates(steps.reshape(-1, heads), strengths.reshape(-1, heads), a_log, bias)
        return found[0].view(steps.shape), found[1].view(steps.shape)
    steps, strengths, a_log, bias = (x.to(accumulation_dtype(steps.dtype)) for x in tensors)
    return -torch.exp(a_log) * F.softplus(steps + bias), torch.sigmoid(strengths)
