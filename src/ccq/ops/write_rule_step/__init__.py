"""One token of every sequence for a write rule, by a kernel that can leave the new state in the place of the old one.

| operator | what it is |
| --- | --- |
| ccq::write_token | output and new state |
| ccq::write_token_ | output; the state is overwritten |
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ccq.ops.checks import needs_gradient
from ccq.ops.operators import TRITON_INSTALLED, custom_operator
from ccq.ops.write_rule import WriteRuleResult

MAX_SIZE = 256
"""The largest D of the kernel, which holds D x 16 numbers of a state in registers."""
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? beta, "


def _kernels() -> ModuleType:
    from ccq.ops.write_rule_step import kernels

    return kernels


def _run(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, scale: float, in_place: bool
) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(q):
        found: tuple[Tensor, Tensor] = _kernels().write_token(
            *(x.contiguous() for x in (q, k, v, log_decay)), None if beta is None else beta.contiguous(), state, scale,
            in_place=in_place,
        )  # fmt: skip
    return found


@custom_operator("write_token", schema=f"({_INPUTS}Tensor state, float scale) -> (Tensor, Tensor)")
def _write_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k [N, 1, G, D], v [N, 1, H, V], gates [N, 1, H] or [N, 1, H, D]: output and new state, computed in float32."""
    return _run(q, k, v, log_decay, beta, state.contiguous(), scale, False)


@_write_token.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


@custom_operator("write_token_", schema=f"({_INPUTS}Tensor(a!) state, float scale) -> Tensor")
def _write_token_(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, scale: float
) -> Tensor:
    """As `write_token`, but the (contiguous) state is overwritten."""
    return _run(q, k, v, log_decay, beta, state, scale, True)[0]


@_write_token_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, scale: float) -> Tensor:
    return v.new_empty(v.shape)


def is_chosen(q: Tensor, *others: Tensor) -> bool:
    """Whether the kernel writes and reads one token of every sequence: no gradient is wanted in any of the tensors."""
    sizes = 0 < q.shape[-1] <= MAX_SIZE and all(x.numel() for x in (q, *others))
    computed = q.is_cuda and TRITON_INSTALLED and q.dtype != torch.float64
    return computed and sizes and not needs_gradient(q, *others)


def can_overwrite(state: Tensor | None) -> bool:
    """Whether a state that its owner lets be overwritten can be: gradients must not reach back through it."""
    return state is not None and state.is_contiguous() and not torch.is_grad_enabled() and not state.requires_grad


def write_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    scale: float,
    *,
    in_place: bool,
) -> WriteRuleResult:
    """One token of gated linear attention, of state space duality, or, with beta, of the gated delta rule; shapes as
    there, nothing is checked. In place, the state that comes back is the one given, overwritten.
    """
    if in_place:
        return WriteRuleResult(torch.ops.ccq.write_token_(q, k, v, log_decay, beta, state, scale), state)
    return WriteRuleResult(*torch.ops.ccq.write_token(q, k, v, log_decay, beta, state, scale))
