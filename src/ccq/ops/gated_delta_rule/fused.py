"""flash-linear-attention's kernels for the gated delta rule as operators of torch.

The package's functions are called below their autograd, so that the operators can be compiled around and captured in
CUDA graphs; their normalisation of queries and keys is off. Operators take and return plain tensors, and never None: a
gradient that is not wanted is an empty tensor.

Where the package multiplies float32 numbers, in the triangular systems for one, it does so in tf32; and it forms the
gradients of the decays as differences of sums. In bfloat16 those err by up to 2 % and everything else by less than 1 %
(H200; up to 6 % for values and strengths when all keys are equal, whose gradients then nearly cancel).

| operator | what it is |
| --- | --- |
| ccq::gated_delta_rule | the rule over any number of tokens, in chunks of 64, differentiable |
| ccq::gated_delta_rule_backward | its gradients |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ccq.ops.flash_linear_attention import CHUNK, launching, packing
from ccq.ops.operators import custom_operator
from ccq.ops.write_rule import WriteRuleResult

RULE = "gated_delta_rule"


@custom_operator(
    "gated_delta_rule",
    schema="(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor? state, float scale, "
    "int[]? boundaries) -> (Tensor, Tensor, Tensor, Tensor)",
)
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    """Output and last state; and for the backward pass the decays summed from the beginning of each chunk, and the
    inverse of the triangular system of each chunk. The gates are float32.
    """
    q, k, v, log_decay, beta = (x.contiguous() for x in (q, k, v, log_decay, beta))
    with launching(RULE, q, v):
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

        packed = packing(boundaries, q)
        summed, output, inverse, final, _, _ = chunk_gated_delta_rule_fwd(
            q=q, k=k, v=v, g=log_decay, beta=beta, scale=scale,
            initial_state=None if state is None else state.contiguous(), output_final_state=True,
            cu_seqlens=packed.cu_seqlens, chunk_indices=packed.chunk_indices, chunk_size=CHUNK,
        )  # fmt: skip
    return output, final, summed, inverse


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
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
        q.new_empty((rows, tokens, heads), dtype=kept),
        k.new_empty((rows, tokens, heads, CHUNK)),
    )


@custom_operator(
    "gated_delta_rule_backward",
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor summed, Tensor inverse, Tensor? state, "
    "Tensor d_output, Tensor? d_final, float scale, int[]? boundaries)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    summed: Tensor,
    inverse: Tensor,
    state: Tensor | None,
    d_output: Tensor,
    d_final: Tensor | None,
    scale: float,
    boundaries: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    """The gradients in q, k, v, log_decay, beta and state (empty without a state)."""
    q, k, v, beta, d_output = (x.contiguous() for x in (q, k, v, beta, d_output))
    with launching(RULE, q, v):
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

        packed = packing(boundaries, q)
        d_q, d_k, d_v, d_beta, d_log_decay, d_state, _, _ = chunk_gated_delta_rule_bwd(
            q=q, k=k, v=v, g=summed, beta=beta, A=inverse, scale=scale,
            initial_state=None if state is None else state.contiguous(), do=d_output,
            dht=None if d_final is None else d_final.contiguous(), cu_seqlens=packed.cu_seqlens,
            chunk_indices=packed.chunk_indices, chunk_size=CHUNK,
        )  # fmt: skip
    return d_q, d_k, d_v, d_log_decay, d_beta, summed.new_empty(0) if d_state is None else d_state


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    summed: Tensor,
    inverse: Tensor,
    state: Tensor | None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    gradients = tuple(x.new_empty(x.shape) for x in (q, k, v, summed, beta))
    return *gradients, summed.new_empty(0 if state is None else state.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, beta, state, ctx.scale, ctx.boundaries = inputs
    _, _, summed, inverse = output
    ctx.save_for_backward(q, k, v, beta, summed, inverse, state)
    ctx.mark_non_differentiable(summed, inverse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_output: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *saved, state = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(saved[2])
    *gradients, d_state = torch.ops.ccq.gated_delta_rule_backward(
        *saved, state, d_output, d_final, ctx.scale, ctx.boundaries
    )
    return *gradients, None if state is None else d_state, None, None


forward.register_autograd(_backward, setup_context=_setup_context)


def fused_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    boundaries: list[int] | None,
) -> WriteRuleResult:
    """Shapes as in `ccq.ops.gated_delta_rule.gated_delta_rule`, with at least one sequence and token; nothing is
    checked.
    """
    # Outside of the operator, whose gradients are then those of its own inputs.
    gates = log_decay.float(), beta.float()
    return WriteRuleResult(*torch.ops.ccq.gated_delta_rule(q, k, v, *gates, state, scale, boundaries)[:2])
