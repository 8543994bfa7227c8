"""Gated linear attention in chunks, by matrix products, with a closed-form backward.

Legend: B rows, N sequences, T tokens, H heads, D key size, V value size, C chunk length, P chunks in all, G = P * H.

Inside a chunk, output i reads key j <= i through the weight A_ij = sum_d q_id k_jd exp(sum of g_ld over j < l <= i),
g the log decays. Splitting that exponent at one reference for the whole chunk needs exp of a positive number, which
overflows. So the chunk is halved again and again: a block of 2h tokens has a boundary in its middle, and a query of
its upper half and a key of its lower half meet there, each with a decay of its own that is at most 1:

    q^_i = q_i exp(sum of g from the boundary up to and with i)
    k^_j = k_j exp(sum of g behind j up to the boundary)

Every pair j < i is split by exactly one boundary, so all weights are exact: one product q^ k^T a level, h = 1, 2, 4,
..., C/2, and nothing underflows unless the weight itself does. From one level to the next q^ of an upper half takes
the whole decay of the lower half as another factor, and k^ of a lower half that of the upper, so that one exponential
per element serves all levels. Past the last level q^ and k^ refer to the borders of the chunk and serve the product
with the state and the update of the state.

Backward. The levels are differentiated from the top down. A decay e^g multiplies q^ of every later token and k^ of
every earlier token of the pairs that it separates, so its gradient in g is the sum of q^ * dq^ (or of k^ * dk^) over
them. Collected as the levels go down, each sum only has terms of pairs that the token does separate: unlike the
shorter form, the reversed cumulative sum of q * dq - k * dk, nothing cancels, and strongly decayed channels keep
their small gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ccq.ops.gla.reference import gated_linear_attention_step
from ccq.ops.layout import ChunkLayout
from ccq.ops.operators import differentiable_once
from ccq.ops.write_rule import WriteRuleResult


def chunk_length(size: int) -> int:
    """C for heads of key size D = `size`, as measured on a CPU, forward + backward.

    D 32: 32 is 10 % faster than 64. D 64: 32 is the faster with two threads, 64 with one, by 10 to 20 %. D 128: 64 is
    up to 20 % faster, and its states, D * V / C numbers for every token, take half the memory.
    """
    return 32 if size <= 64 else 64


def chunked_gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float, layout: ChunkLayout
) -> WriteRuleResult:
    """Shapes as in `ccq.ops.gla.gated_linear_attention`, for sequences cut by `layout`; nothing is checked.

    Sums, products and states are float32 (float64 for float64 input), also under autocast. Differentiable once.
    """
    if layout.gather is None and layout.tokens == 1:
        output, state = gated_linear_attention_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], state, scale)
        return WriteRuleResult(output.to(v.dtype).unsqueeze(1), state)
    with torch.autocast(q.device.type, enabled=False):
        output, state = _GatedLinearAttention.apply(q, k, v, log_decay, state, scale, layout)
        # The cast stands outside of the Function: as its last operation, torch 2.11 compiles it into a zero gradient.
        return WriteRuleResult(output.to(v.dtype), state)


class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        state: Tensor,
        scale: float,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:
        queries, keys, values, decay = _split(layout, state.dtype, q, k, v, log_decay)
        levels = _Levels(queries, keys, decay.exp(), keep=False)
        states, final = _scan(layout, levels.total, torch.bmm(levels.keys.mT, values), state)
        output = torch.bmm(levels.scores, values).baddbmm_(levels.queries, states).mul_(scale)
        ctx.save_for_backward(q, k, v, log_decay, levels.scores, states)
        ctx.scale, ctx.layout = scale, layout
        return _merge(layout, output, q.shape[2]), final

    @staticmethod
    @differentiable_once("gated_linear_attention")
    def backward(ctx: Any, grad_output: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, scores, states = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        heads = q.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            queries, keys, values, decay, grad_output = _split(layout, states.dtype, q, k, v, log_decay, grad_output)
            grad_output = grad_output * ctx.scale
            decay = decay.exp()
            levels = _Levels(queries, keys, decay, keep=True)

            sent_back = torch.bmm(levels.queries.mT, grad_output)
            grad_after, grad_initial = _scan(layout, levels.total, sent_back, grad_final, reverse=True)
            grad_values = torch.bmm(scores.mT, grad_output).baddbmm_(levels.keys, grad_after)
            # Each tensor is as large as an input: let go of it, or write over it, as soon as it has served.
            grad_queries = torch.bmm(grad_output, states.mT, out=levels.queries)
            grad_keys = torch.bmm(values, grad_after.mT, out=levels.keys)
            grad_total = levels.total * torch.mul(states, grad_after, out=sent_back).sum(-1).unsqueeze(1)
            grad_values = _merge(layout, grad_values, heads).to(v.dtype)
            grad_scores = torch.bmm(grad_output, values.mT)
            del grad_output, values, sent_back, grad_after

            while levels.steps:
                half, upper, lower, before, behind = levels.steps.pop()
                grad_upper, grad_lower = _upper(grad_queries, half), _lower(grad_keys, half)
                grad_upper *= before
                grad_lower *= behind
                sums = torch.stack(((upper * grad_upper).sum(1), (lower * grad_lower).sum(1)), 1)
                sums = sums.view(*grad_total.shape[:2], 2, grad_total.shape[2])
                grad_total = (grad_total.unsqueeze(2) + sums).flatten(1, 2)
                grad_block = _block(grad_scores, half).reshape(-1, half, half)
                grad_upper += _small_product(grad_block, lower)
                grad_lower += _small_product(grad_block.mT, upper)

            grad_queries *= decay
            grad_log_decay = grad_total.addcmul_(queries, grad_queries)
            diagonal = grad_scores.diagonal(dim1=1, dim2=2).unsqueeze(-1)
            grad_queries.addcmul_(diagonal, keys)
            grad_keys.addcmul_(diagonal, queries)
            return (
                _merge(layout, grad_queries, heads).to(q.dtype),
                _merge(layout, grad_keys, heads).to(k.dtype),
                grad_values,
                _merge(layout, grad_log_decay, heads).to(log_decay.dtype),
                grad_initial,
                None,
                None,
            )


class _Levels:
    """The climb from single tokens to whole chunks: the weights inside the chunks, and what refers to their borders."""

    def __init__(self, queries: Tensor, keys: Tensor, decay: Tensor, keep: bool) -> None:
        """queries, keys, decay (e^g) [G, C, D]. `keep` keeps the operands of every level instead of the weights."""
        chunk = queries.shape[1]
        self.queries = queries * decay
        """[G, C, D], each query times the decay from the beginning of its chunk."""
        self.keys = keys.clone()
        """[G, C, D], each key times the decay to the end of its chunk."""
        self.total = decay
        """[G, 1, D], the decay of the whole chunk."""
        self.steps: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []
        """h, q^, k^ [G * C / 2h, h, D], and the whole decays of the lower and the upper halves [G * C / 2h, 1, D]."""
        if not keep:
            self.scores = queries.new_zeros(queries.shape[0], chunk, chunk)
            """[G, C, C], the weights A_ij, zero for j > i; only without `keep`."""
            self.scores.diagonal(dim1=1, dim2=2).copy_((queries * keys).sum(-1))
        half = 1
        while half < chunk:
            upper, lower = _upper(self.queries, half), _lower(self.keys, half)
            lower_total, upper_total = self.total[:, 0::2], self.total[:, 1::2]
            before, behind = (x.reshape(-1, 1, x.shape[-1]) for x in (lower_total, upper_total))
            if keep:
                self.steps.append((half, upper.clone(), lower.clone(), before, behind))
            else:
                block = _block(self.scores, half)
                block.copy_(_small_scores(upper, lower).view_as(block))
            upper *= before
            lower *= behind
            self.total = lower_total * upper_total
            half *= 2


def _lower(x: Tensor, half: int) -> Tensor:
    """[G, C, X] -> [G * C / 2h, h, X], a view of the first half of every block of 2h tokens."""
    return x.view(-1, 2 * half, x.shape[-1])[:, :half]


def _upper(x: Tensor, half: int) -> Tensor:
    """The same of the second half."""
    return x.view(-1, 2 * half, x.shape[-1])[:, half:]


def _block(scores: Tensor, half: int) -> Tensor:
    """[G, C, C] -> [G, C / 2h, h, h], a view: upper half (rows) against lower half (columns) of every block."""
    blocks = scores.shape[1] // (2 * half)
    diagonal = scores.view(-1, blocks, 2 * half, blocks, 2 * half).diagonal(dim1=1, dim2=3)
    return diagonal[:, half:, :half].permute(0, 3, 1, 2)


# With one or two rows elementwise products are faster: a matrix routine treats every matrix of the batch apart.
_SMALLEST_MATRIX = 4


def _small_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[n, h, D], [n, h, D] -> [n, h, h]"""
    if queries.shape[1] < _SMALLEST_MATRIX:
        return (queries.unsqueeze(2) * keys.unsqueeze(1)).sum(-1)
    return torch.bmm(queries, keys.mT)


def _small_product(scores: Tensor, x: Tensor) -> Tensor:
    """[n, h, h], [n, h, D] -> [n, h, D]"""
    if x.shape[1] < _SMALLEST_MATRIX:
        return (scores.unsqueeze(-1) * x.unsqueeze(1)).sum(2)
    return torch.bmm(scores, x)


def _split(layout: ChunkLayout, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """[B, T, H, X] -> [G, C, X] in `dtype`."""
    return [layout.split(x).flatten(0, 1).to(dtype) for x in tensors]


def _merge(layout: ChunkLayout, x: Tensor, heads: int) -> Tensor:
    """[G, C, X] -> [B, T, H, X]"""
    return layout.merge(x.unflatten(0, (-1, heads)))


def _scan(
    layout: ChunkLayout, decay: Tensor, update: Tensor, initial: Tensor, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """S <- decay S + update from chunk to chunk: decay [G, 1, D], update [G, D, V], initial [N, H, D, V].

    Returns the state before each chunk [G, D, V] (`reverse`: behind each chunk) and the last one [N, H, D, V].
    """
    heads, size, value_size = initial.shape[1:]
    update, decay = update.view(-1, heads, size, value_size), decay.view(-1, heads, size, 1)
    running = layout.states_in(initial).clone()
    states = torch.empty_like(update)
    places = list(zip(layout.slices(), layout.active, strict=True))
    for here, n in reversed(places) if reverse else places:
        states[here] = running[:n]
        running[:n].mul_(decay[here]).add_(update[here])
    return states.flatten(0, 1), layout.states_out(running)
