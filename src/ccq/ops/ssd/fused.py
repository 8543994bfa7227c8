"""flash-linear-attention's kernels for one decay per head and token as operators of torch.

The package's functions are called below their autograd, so that the operators can be compiled around and captured in
CUDA graphs. Operators take and return plain tensors, and never None: a gradient that is not wanted is an empty tensor.

Its kernels inside the chunks read the queries and keys of a group where they are, and give every head gradients of its
own, which are then added up. Its kernels of the states know no groups: while one of them runs, the keys or queries
stand in memory once for each head, as many bytes as the states of the chunks in the dtype of q when V is 64. Nothing of
it is kept for the backward pass.

| operator | what it is |
| --- | --- |
| ccq::state_space_duality | the rule over any number of tokens, in chunks of 64, differentiable |
| ccq::state_space_duality_backward | its gradients |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ccq.ops.flash_linear_attention import CHUNK, launching, packing
from ccq.ops.operators import custom_operator
from ccq.ops.write_rule import WriteRuleResult

RULE = "ssd"
LEAST = -104.0
"""exp of it is zero in float32. The kernels take differences of sums of log decays, in which a smaller one, of a token
that erases the state, would leave no digits to the decays behind it."""


def _for_every_head(x: Tensor, heads: int) -> Tensor:
    """[B, T, G, D] -> [B, T, H, D]"""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


@custom_operator(
    "state_space_duality",
    schema="(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? state, float scale, int[]? boundaries)"
    " -> (Tensor, Tensor, Tensor)",
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
    log 2. `log_decay` is float32.
    """
    q, k, v, log_decay = (x.contiguous() for x in (q, k, v, log_decay))
    with launching(RULE, q, v):
        from fla.ops.common.chunk_h import chunk_fwd_h
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.utils.cumsum import chunk_local_cumsum

        packed = packing(boundaries, q)
        cut = {"cu_seqlens": packed.cu_seqlens, "chunk_indices": packed.chunk_indices}
        summed = chunk_local_cumsum(log_decay.clamp(min=LEAST), CHUNK, scale=1 / math.log(2), **cut)
        states, final = chunk_fwd_h(
            k=_for_every_head(k, v.shape[2]), v=v, g=summed, h0=None if state is None else state.contiguous(),
            output_final_state=True, cu_seqlens=packed.cu_seqlens, chunk_size=CHUNK,
        )  # fmt: skip
        output = chunk_fwd_o(q=q, k=k, v=v, h=states, g=summed, scale=scale, chunk_size=CHUNK, **cut)
    return output, final, summed


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
    rows, _, heads, value_size = v.shape
    sequences = rows if boundaries is None else len(boundaries) - 1
    kept = torch.float32
    return (
        v.new_empty(v.shape),
        v.new_empty((sequences, heads, q.shape[3], value_size), dtype=kept),
        v.new_empty(v.shape[:3], dtype=kept),
    )


@custom_operator(
    "state_space_duality_backward",
    schema="(Tensor q, Tensor k, Tensor v, Tensor summed, Tensor? state, Tensor d_output, Tensor? d_final, "
    "float scale, int[]? boundaries) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summed: Tensor,
    state: Tensor | None,
    d_output: Tensor,
    d_final: Tensor | None,
    scale: float,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    """The gradients in q, k, v, log_decay and state (empty without a state)."""
    q, k, v, d_output = (x.contiguous() for x in (q, k, v, d_output))
    heads = v.shape[2]
    with launching(RULE, q, v):
        from fla.ops.common.chunk_h import chunk_bwd_dh, chunk_fwd_h
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv
        from fla.ops.utils.cumsum import chunk_local_cumsum

        packed = packing(boundaries, q)
        cut = {"cu_seqlens": packed.cu_seqlens, "chunk_size": CHUNK}
        # Products round the states to the dtype of q; the gradient of the decay would see it if they were kept so.
        kept = {
            "g": summed, "h0": None if state is None else state.contiguous(), "states_in_fp32": True, **cut,
        }  # fmt: skip
        states, _ = chunk_fwd_h(k=_for_every_head(k, heads), v=v, output_final_state=False, **kept)
        queries = _for_every_head(q, heads)
        # Of the keys it wants the shape only.
        d_states, d_state = chunk_bwd_dh(
            q=queries, k=queries, v=v, do=d_output, dht=None if d_final is None else d_final.contiguous(), scale=scale,
            **kept,
        )  # fmt: skip
        del queries
        cut["chunk_indices"] = packed.chunk_indices
        inside = {"q": q, "k": k, "do": d_output, "dh": d_states, "g": summed, "scale": scale, **cut}
        d_v = chunk_bwd_dv(**inside)
        d_q, d_k, _, d_summed = chunk_bwd_dqkwg(v=v, h=states, **inside)
        d_log_decay = chunk_local_cumsum(d_summed, reverse=True, **cut)
    return d_q, d_k, d_v, d_log_decay, summed.new_empty(0) if d_state is None else d_state


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summed: Tensor,
    state: Tensor | None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    gradients = tuple(x.new_empty(x.shape) for x in (q, k, v, summed))
    return *gradients, summed.new_empty(0 if state is None else state.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, state, ctx.scale, ctx.boundaries = inputs
    _, _, summed = output
    ctx.save_for_backward(q, k, v, summed, state)
    ctx.mark_non_differentiable(summed)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_output: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *saved, state = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(saved[2])
    *gradients, d_state = torch.ops.ccq.state_space_duality_backward(
        *saved, state, d_output, d_final, ctx.scale, ctx.boundaries
    )
    return *gradients, None if state is None else d_state, None, None


forward.register_autograd(_backward, setup_context=_setup_context)


def fused_state_space_duality(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    scale: float,
    boundaries: list[int] | None,
) -> WriteRuleResult:
    """Shapes as in `ccq.ops.ssd.state_space_duality`, with at least one sequence and token; nothing is checked."""
    # Outside of the operator, whose gradients are then those of its own inputs.
    return WriteRuleResult(*torch.ops.ccq.state_space_duality(q, k, v, log_decay.float(), state, scale, boundaries)[:2])
