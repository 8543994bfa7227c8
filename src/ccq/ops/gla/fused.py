"""Gated linear attention as operators of torch: flash-linear-attention's kernels from chunk to chunk, and those of this
library inside the chunks.

The package's functions are called below their autograd, so that the operators can be compiled around and captured in
CUDA graphs. Operators take and return plain tensors, and never None: a gradient that is not wanted is an empty tensor.

| operator | what it is |
| --- | --- |
| ccq::gated_linear_attention | the rule over any number of tokens, in chunks of 64, differentiable |
| ccq::gated_linear_attention_backward | its gradients |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ccq.ops.flash_linear_attention import CHUNK, Packing, launching, packing
from ccq.ops.operators import custom_operator
from ccq.ops.write_rule import WriteRuleResult

RULE = "gla"


def _kernels() -> ModuleType:
    from ccq.ops.gla import kernels

    return kernels


def _grid(x: Tensor, block: str, packed: Packing) -> Callable[[Mapping[str, int]], tuple[int, int]]:
    """Programs of a kernel of the package that takes a chunk, a head and `block` columns of x each."""
    rows, tokens, heads, columns = x.shape
    chunks = -(-tokens // CHUNK) if packed.chunk_indices is None else len(packed.chunk_indices)
    return lambda chosen: (-(-columns // chosen[block]) * chunks, rows * heads)


@custom_operator(
    "gated_linear_attention",
    schema="(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? state, float scale, int[]? boundaries)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    scale: float,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    """Output and last state; and for the backward pass the decays summed from the beginning of each chunk, in units of
    log 2, and the weights inside the chunks. `log_decay` is float32.
    """
    q, k, v, log_decay = (x.contiguous() for x in (q, k, v, log_decay))
    with launching(RULE, q, v):
        from fla.ops.common.chunk_h import chunk_fwd_h
        from fla.ops.gla.chunk import chunk_gla_fwd_kernel_o
        from fla.ops.utils.cumsum import chunk_local_cumsum

        packed = packing(boundaries, q)
        cut = {"cu_seqlens": packed.cu_seqlens, "chunk_indices": packed.chunk_indices}
        summed = chunk_local_cumsum(log_decay, CHUNK, scale=1 / math.log(2), **cut)
        states, final = chunk_fwd_h(
            k=k, v=v, gk=summed, h0=None if state is None else state.contiguous(), output_final_state=True,
            cu_seqlens=packed.cu_seqlens, chunk_size=CHUNK,
        )  # fmt: skip
        weights = _kernels().chunk_weights(q, k, summed, scale, chunk=CHUNK, **cut)
        output = torch.empty_like(v)
        _, tokens, heads, size = q.shape
        # Its own function would clear the output first.
        chunk_gla_fwd_kernel_o[_grid(v, "BV", packed)](
            q=q, v=v, g=summed, h=states, o=output, A=weights, scale=scale, T=tokens, H=heads, HV=heads, K=size,
            V=v.shape[-1], BT=CHUNK, STATE_V_FIRST=False, **cut,
        )  # fmt: skip
    return output, final, summed, weights


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    scale: float,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    rows, tokens, heads, size = q.shape
    sequences = rows if boundaries is None else len(boundaries) - 1
    kept = torch.float32
    return (
        v.new_empty(v.shape),
        v.new_empty((sequences, heads, size, v.shape[3]), dtype=kept),
        q.new_empty(q.shape, dtype=kept),
        q.new_empty((rows, tokens, heads, CHUNK)),
    )


@custom_operator(
    "gated_linear_attention_backward",
    schema="(Tensor q, Tensor k, Tensor v, Tensor summed, Tensor weights, Tensor? state, Tensor d_output, "
    "Tensor? d_final, float scale, int[]? boundaries) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summed: Tensor,
    weights: Tensor,
    state: Tensor | None,
    d_output: Tensor,
    d_final: Tensor | None,
    scale: float,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    """The gradients in q, k, v, log_decay and state (empty without a state).

    The steps of the package's own backward pass, but for what this library does inside the chunks; weights that are
    not float32, which would be multiplied without matrix units; and gradients that are rounded where they are stored.
    """
    q, k, v, d_output = (x.contiguous() for x in (q, k, v, d_output))
    first = None if state is None else state.contiguous()
    with launching(RULE, q, v):
        from fla.ops.common.chunk_h import chunk_bwd_dh, chunk_fwd_h
        from fla.ops.gla.chunk import chunk_gla_bwd_dA, chunk_gla_bwd_dv, chunk_gla_bwd_kernel_inter

        packed = packing(boundaries, q)
        cut = {"cu_seqlens": packed.cu_seqlens, "chunk_size": CHUNK}
        # Products round the states to the dtype of q; the gradient of the decay would see it if they were kept so.
        kept = {"h0": first, "gk": summed, "states_in_fp32": True, **cut}
        states, _ = chunk_fwd_h(k=k, v=v, output_final_state=False, **kept)
        d_states, d_state = chunk_bwd_dh(
            q=q, k=k, v=v, do=d_output, dht=None if d_final is None else d_final.contiguous(), scale=scale, **kept
        )
        cut["chunk_indices"] = packed.chunk_indices
        d_v = chunk_gla_bwd_dv(k=k, g=summed, A=weights, do=d_output, dh=d_states, **cut)
        d_weights = chunk_gla_bwd_dA(v=v, do=d_output, scale=scale, **cut)
        inner_q, inner_k = _kernels().chunk_gradients(
            q, k, summed, d_weights, chunk=CHUNK, cu_seqlens=packed.cu_seqlens, chunk_indices=packed.chunk_indices
        )
        d_q, d_k, d_log_decay = torch.empty_like(q), torch.empty_like(k), torch.empty_like(summed)
        _, tokens, heads, size = q.shape
        chunk_gla_bwd_kernel_inter[_grid(q, "BK", packed)](
            q=q, k=k, v=v, g=summed, h=states, do=d_output, dh=d_states, dq=inner_q, dk=inner_k, dq2=d_q, dk2=d_k,
            dg=d_log_decay, cu_seqlens=packed.cu_seqlens, chunk_indices=packed.chunk_indices, scale=scale, T=tokens,
            H=heads, K=size, V=v.shape[-1], BT=CHUNK, STATE_V_FIRST=False,
        )  # fmt: skip
    return d_q, d_k, d_v, d_log_decay, summed.new_empty(0) if d_state is None else d_state


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summed: Tensor,
    weights: Tensor,
    state: Tensor | None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    gradients = tuple(x.new_empty(x.shape) for x in (q, k, v, summed))
    return *gradients, summed.new_empty(0 if state is None else state.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, state, ctx.scale, ctx.boundaries = inputs
    _, _, summed, weights = output
    ctx.save_for_backward(q, k, v, summed, weights, state)
    ctx.mark_non_differentiable(summed, weights)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_output: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *saved, state = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(saved[2])
    *gradients, d_state = torch.ops.ccq.gated_linear_attention_backward(
        *saved, state, d_output, d_final, ctx.scale, ctx.boundaries
    )
    return *gradients, None if state is None else d_state, None, None


forward.register_autograd(_backward, setup_context=_setup_context)


def fused_gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    scale: float,
    boundaries: list[int] | None,
) -> WriteRuleResult:
    """Shapes as in `ccq.ops.gla.gated_linear_attention`, with at least one sequence and token; nothing is checked."""
    # Outside of the operator, whose gradients are then those of its own inputs.
    return WriteRuleResult(
        *torch.ops.ccq.gated_linear_attention(q, k, v, log_decay.float(), state, scale, boundaries)[:2]
    )
