"""State-space duality in chunks, by matrix products, with a closed-form backward.

Legend: B rows, N sequences, T tokens, G groups of queries and keys, H heads, R = H / G heads of a group, D key size, V
value size, C chunk length, P chunks in all.

With S the state before a chunk, g_i the sum of the log decays up to and with token i, and L_ij = exp(g_i - g_j) where
j <= i (Dao and Gu, arXiv:2405.21060):

    o_i = e^{g_i} S^T q_i + sum of L_ij (q_i . k_j) v_j over j <= i
    S  <- e^{g_C} S + sum of L_Cj k_j v_j^T

No exponent is above 0. The sums in L are formed from the token behind j on, not as differences of sums from the
beginning of the chunk, which would lose small decays behind a large one.

The products q_i . k_j are made once for each group. Products with the state are made for all heads of a group at once:
their decays stand beside the values, so the R states lie next to each other as one matrix [D, R * V] ("folded").

Backward. With dS the gradient of the state behind a chunk, dS <- e^{g_C} dS + (e^g q)^T do runs from the last chunk to
the first, and the rest is the product rule. The gradient of g at token l is the sum of the gradients of all log L_ij
with j < l <= i, those being all that contain it, and of what crosses the borders of the chunk: sums without
cancellation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ccq.ops.layout import ChunkLayout
from ccq.ops.operators import differentiable_once
from ccq.ops.ssd.reference import state_space_duality_step
from ccq.ops.write_rule import WriteRuleResult


def chunk_length(size: int) -> int:
    """C for heads of key size D = `size`, as measured on a CPU with one thread, forward + backward.

    D 128, V 64, 16 heads of one group: 64 is 25 % faster than 32, and 20 % faster than 128. D 64: 32 and 64 are within
    7 %. D 32: 32 is 25 % faster.
    """
    return 32 if size < 64 else 64


def chunked_state_space_duality(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float, layout: ChunkLayout
) -> WriteRuleResult:
    """Shapes as in `ccq.ops.ssd.state_space_duality`, for sequences cut by `layout`; nothing is checked.

    Sums, products and states are float32 (float64 for float64 input), also under autocast. Differentiable once.
    """
    if layout.gather is None and layout.tokens == 1:
        output, state = state_space_duality_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], state, scale)
        return WriteRuleResult(output.to(v.dtype).unsqueeze(1), state)
    with torch.autocast(q.device.type, enabled=False):
        output, state = _StateSpaceDuality.apply(q, k, v, log_decay, state, scale, layout)
        # The cast stands outside of the Function: as its last operation, torch 2.11 compiles it into a zero gradient.
        return WriteRuleResult(output.to(v.dtype), state)


class _StateSpaceDuality(torch.autograd.Function):
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
        chunks = _Chunks(layout, state.dtype, q, k, v, log_decay)
        states, final = chunks.states(state)
        output = torch.matmul(chunks.scores(), chunks.values)
        output.addcmul_(_unfold(torch.matmul(chunks.queries, states), v.shape[2]), chunks.from_start).mul_(scale)
        ctx.save_for_backward(q, k, v, log_decay, state)
        ctx.scale, ctx.layout = scale, layout
        return layout.merge(output), final

    @staticmethod
    @differentiable_once("state_space_duality")
    def backward(ctx: Any, grad_output: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, state = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        groups, heads = q.shape[2], v.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            chunks = _Chunks(layout, state.dtype, q, k, v, log_decay)
            queries, keys, values = chunks.queries, chunks.keys, chunks.values
            grad_output = layout.split(grad_output).to(state.dtype) * ctx.scale
            # Once more: kept, they would be as much as all else that a layer of 500M keeps for its backward pass.
            states, _ = chunks.states(state)

            # What the chunk reads from the state before it, and what it leaves to the state behind it.
            asked = _fold(grad_output * chunks.from_start, groups)
            sent_back = torch.matmul(queries.mT, asked)
            grad_after, grad_initial = _scan(layout, chunks.total, sent_back, grad_final, groups, reverse=True)
            del sent_back
            grad_queries = torch.matmul(asked, states.mT)
            grad_from_start = (_unfold(torch.matmul(queries, states), heads) * grad_output).sum(-1, keepdim=True)
            grad_from_start *= chunks.from_start
            carried = _unfold((states * grad_after).sum(2, keepdim=True), heads).sum(-1, keepdim=True)
            grad_from_start[:, :, -1:] += carried * chunks.total
            grad_keys = torch.matmul(chunks.values_to_end(), grad_after.mT)
            grad_values = _unfold(torch.matmul(keys, grad_after), heads) * chunks.to_end
            grad_to_end = (grad_values * values).sum(-1)
            del asked, grad_after

            # What its tokens read from each other.
            scores = chunks.scores()
            grad_values += torch.matmul(scores.mT, grad_output)
            grad_scores = torch.matmul(grad_output, values.mT)
            grad_log = scores.mul_(grad_scores)
            grad_log[:, :, -1] += grad_to_end
            grad_similarity = grad_scores.mul_(chunks.decay).unflatten(1, (groups, -1)).sum(2)
            grad_queries += torch.matmul(grad_similarity, keys)
            grad_keys += torch.matmul(grad_similarity.mT, queries)

            grad_log_decay = grad_from_start.squeeze(-1).flip(2).cumsum(2).flip(2)
            grad_log_decay[:, :, 1:] += grad_log.cumsum_(-1).tril_(-1).sum(2)[:, :, :-1]
            return (
                layout.merge(grad_queries).to(q.dtype),
                layout.merge(grad_keys).to(k.dtype),
                layout.merge(grad_values).to(v.dtype),
                layout.merge_scalar(grad_log_decay).to(log_decay.dtype),
                grad_initial,
                None,
                None,
            )


class _Chunks:
    """What forward and backward both need of the inputs, in chunks."""

    def __init__(
        self, layout: ChunkLayout, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor
    ) -> None:
        self.layout = layout
        self.queries, self.keys, self.values = (layout.split(x).to(dtype) for x in (q, k, v))
        """[P, G, C, D], [P, G, C, D], [P, H, C, V]"""
        log_decay = layout.split_scalar(log_decay).unsqueeze(-1).to(dtype)
        self.from_start = log_decay.cumsum(2).exp()
        """[P, H, C, 1], e^{g_i}."""
        self.total = self.from_start[:, :, -1:]
        """[P, H, 1, 1], e^{g_C}."""
        later = torch.ones(layout.chunk, layout.chunk, dtype=dtype, device=q.device).tril_(-1)
        self.decay = (log_decay * later).cumsum_(2).exp_().tril_()
        """[P, H, C, C], L, zero for j > i."""
        self.to_end = self.decay[:, :, -1].unsqueeze(-1)
        """[P, H, C, 1], L_Cj."""

    def states(self, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each chunk [P, G, D, R * V], folded, and the last one of each sequence, [N, H, D, V]."""
        update = torch.matmul(self.keys.mT, self.values_to_end())
        return _scan(self.layout, self.total, update, initial, self.keys.shape[1])

    def values_to_end(self) -> Tensor:
        """[P, G, C, R * V], L_Cj v_j, folded."""
        return _fold(self.values * self.to_end, self.keys.shape[1])

    def scores(self) -> Tensor:
        """[P, H, C, C], L_ij (q_i . k_j)."""
        similarity = torch.matmul(self.queries, self.keys.mT).unsqueeze(2)
        return (self.decay.unflatten(1, (similarity.shape[1], -1)) * similarity).flatten(1, 2)


def _fold(x: Tensor, groups: int) -> Tensor:
    """[P, H, X, V] -> [P, G, X, R * V]: the heads of a group side by side."""
    return x.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)


def _unfold(x: Tensor, heads: int) -> Tensor:
    """[P, G, X, R * V] -> [P, H, X, V], the inverse of `_fold`."""
    return x.unflatten(3, (heads // x.shape[1], -1)).transpose(2, 3).flatten(1, 2)


def _scan(
    layout: ChunkLayout, decay: Tensor, update: Tensor, initial: Tensor, groups: int, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """S <- decay S + update from chunk to chunk: decay [P, H, 1, 1], update [P, G, D, R * V], initial [N, H, D, V].

    Returns the state before each chunk (`reverse`: behind each chunk), folded like the update, and the last one [N, H,
    D, V].
    """
    heads, value_size = initial.shape[1], initial.shape[3]
    decay = _fold(decay.expand(-1, -1, -1, value_size), groups)
    running = _fold(layout.states_in(initial), groups).clone()
    states = torch.empty_like(update)
    places = list(zip(layout.slices(), layout.active, strict=True))
    for here, n in reversed(places) if reverse else places:
        states[here] = running[:n]
        running[:n].mul_(decay[here]).add_(update[here])
    return states, _unfold(layout.states_out(running), heads)
