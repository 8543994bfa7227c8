"""The gated delta rule in chunks, by matrix products, with a closed-form backward.

Legend: B rows, N sequences, T tokens, H heads, D key size, V value size, C chunk length, P chunks in all, G = P * H.

With S the state before a chunk, g_i the sum of the log decays up to and with token i, and L_ij = exp(g_i - g_j) where
j <= i, token i writes k_i u_i^T with

    u_i = beta_i (v_i - e^{g_i} S^T k_i - sum of L_ij (k_i . k_j) u_j over j < i)

so all u of a chunk solve one unit triangular system (the WY form of Yang et al., arXiv:2412.06464):

    (I + A) u = beta v - (beta e^g k) S,    A_ij = beta_i L_ij (k_i . k_j) for j < i
    o_i = e^{g_i} S^T q_i + sum of L_ij (q_i . k_j) u_j over j <= i
    S  <- e^{g_C} S + sum of L_Cj k_j u_j^T

The sums in L are formed from the token behind j on, not as differences of sums from the beginning of the chunk, which
would lose small decays behind a large one.

Backward. With the inverse R of I + A kept, du = (weights)^T do + (L_C k) dS is carried from chunk to chunk together
with dS <- e^{g_C} dS + (e^g q)^T do - (R beta e^g k)^T du. Then r = R^T du is the gradient of the right-hand side and
dA = -r u^T; the rest is the product rule. The gradient of g at token l is the sum of the gradients of all log L_ij
with j < l <= i, those being all that contain it: again a sum without cancellation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ccq.ops.gated_delta_rule.reference import gated_delta_rule_step
from ccq.ops.layout import ChunkLayout
from ccq.ops.operators import differentiable_once
from ccq.ops.write_rule import WriteRuleResult


def chunk_length(size: int) -> int:
    """C for heads of key size D = `size`, as measured on a CPU, forward + backward.

    D 32: 32 is 20 % faster than 64. D 64: 32 is 10 to 20 % faster with two threads and equal with one. D 128: 64 is 5
    to 10 % faster, and its states, D * V / C numbers for every token, take half the memory.
    """
    return 32 if size <= 64 else 64


def chunked_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, scale: float, layout: ChunkLayout
) -> WriteRuleResult:
    """Shapes as in `ccq.ops.gated_delta_rule.gated_delta_rule`, for sequences cut by `layout`; nothing is checked.

    Sums, products and states are float32 (float64 for float64 input), also under autocast. Differentiable once.
    """
    if layout.gather is None and layout.tokens == 1:
        output, state = gated_delta_rule_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], beta[:, 0], state, scale)
        return WriteRuleResult(output.to(v.dtype).unsqueeze(1), state)
    with torch.autocast(q.device.type, enabled=False):
        output, state = _GatedDeltaRule.apply(q, k, v, log_decay, beta, state, scale, layout)
        # The cast stands outside of the Function: as its last operation, torch 2.11 compiles it into a zero gradient.
        return WriteRuleResult(output.to(v.dtype), state)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        scale: float,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:
        chunks = _Chunks(layout, state.dtype, q, k, v, log_decay, beta)
        inverse = _inverse(chunks.couplings())
        erase = chunks.erase(inverse)
        writes = torch.bmm(inverse, chunks.values * chunks.beta)

        heads, size, value_size = state.shape[1:]
        running = layout.states_in(state).flatten(0, 1).clone()
        states = state.new_empty(writes.shape[0], size, value_size)
        for here in _slices(layout, heads):
            active = running[: here.stop - here.start]
            states[here] = active
            writes[here].baddbmm_(erase[here], active, alpha=-1)
            active.mul_(chunks.total[here]).baddbmm_(chunks.keys_to_end[here].mT, writes[here])
        final = layout.states_out(running.view_as(state))
        output = torch.bmm(chunks.scores, writes).baddbmm_(chunks.queries * chunks.from_start, states).mul_(scale)
        ctx.save_for_backward(q, k, v, log_decay, beta, inverse, writes, states)
        ctx.scale, ctx.layout = scale, layout
        return layout.merge(output.unflatten(0, (-1, heads))), final

    @staticmethod
    @differentiable_once("gated_delta_rule")
    def backward(ctx: Any, grad_output: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, beta, inverse, writes, states = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        heads = q.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            chunks = _Chunks(layout, states.dtype, q, k, v, log_decay, beta)
            queries, keys, decay, strength = chunks.queries, chunks.keys, chunks.decay, chunks.beta
            grad_output = layout.split(grad_output).flatten(0, 1).to(states.dtype) * ctx.scale
            erase = chunks.erase(inverse)

            grad_writes = torch.bmm(chunks.scores.mT, grad_output)
            sent_back = torch.bmm((queries * chunks.from_start).mT, grad_output)
            running = layout.states_in(grad_final).flatten(0, 1).clone()
            grad_after = torch.empty_like(states)
            for here in reversed(_slices(layout, heads)):
                active = running[: here.stop - here.start]
                grad_after[here] = active
                grad_writes[here].baddbmm_(chunks.keys_to_end[here], active)
                active.mul_(chunks.total[here]).add_(sent_back[here])
                active.baddbmm_(erase[here].mT, grad_writes[here], alpha=-1)
            grad_initial = layout.states_out(running.view_as(grad_final))
            grad_right = torch.bmm(inverse.mT, grad_writes)
            # Each tensor is as large as an input: let go of it, or write over it, as soon as it has served.
            del grad_writes, erase, chunks.keys_to_end

            # What the chunk reads from the state before it, erases there, and leaves to the state behind it.
            grad_total = torch.mul(states, grad_after, out=sent_back).sum((1, 2)).view(-1, 1, 1) * chunks.total
            grad_queries = torch.bmm(grad_output, states.mT).mul_(chunks.from_start)
            grad_from_start = (grad_queries * queries).sum(-1, keepdim=True)
            grad_keys = torch.bmm(writes, grad_after.mT).mul_(chunks.to_end)
            grad_to_end = (grad_keys * keys).sum(-1)
            erased = torch.bmm(grad_right, states.mT).mul_(chunks.from_start)
            erased_keys = (erased * keys).sum(-1, keepdim=True)
            grad_keys.addcmul_(erased, strength, value=-1)
            grad_beta = (grad_right * chunks.values).sum(-1, keepdim=True) - erased_keys
            grad_from_start -= erased_keys * strength
            grad_from_start[:, -1:] += grad_total
            del erased, sent_back, grad_after

            # What it asks of itself: the weights of its outputs, and the couplings of its writes.
            grad_scores = torch.bmm(grad_output, writes.mT)
            grad_log = chunks.scores.mul_(grad_scores)
            grad_log[:, -1] += grad_to_end
            grad_scores *= decay
            grad_couplings = torch.bmm(grad_right, writes.mT).mul_(decay).tril_(-1)
            similar = chunks.similarity.mul_(grad_couplings)
            grad_beta -= similar.sum(-1, keepdim=True)
            grad_log.addcmul_(similar, strength, value=-1)
            grad_couplings *= strength
            grad_queries.baddbmm_(grad_scores, keys)
            grad_keys.baddbmm_(grad_scores.mT, queries)
            grad_keys.baddbmm_(torch.add(grad_couplings, grad_couplings.mT, out=decay), keys, alpha=-1)

            grad_log_decay = grad_from_start.flip(1).cumsum(1).flip(1)
            grad_log_decay[:, 1:] += grad_log.cumsum_(-1).tril_(-1).sum(1)[:, :-1].unsqueeze(-1)
            gradients = (
                (grad_queries, q),
                (grad_keys, k),
                (grad_right.mul_(strength), v),
                (grad_log_decay, log_decay.unsqueeze(-1)),
                (grad_beta, beta.unsqueeze(-1)),
            )
            merged = (layout.merge(x.unflatten(0, (-1, heads))).to(like.dtype).view_as(like) for x, like in gradients)
            grad_q, grad_k, grad_v, grad_log_decay, grad_beta = merged
            return grad_q, grad_k, grad_v, grad_log_decay.squeeze(-1), grad_beta.squeeze(-1), grad_initial, None, None


class _Chunks:
    """What forward and backward both need of the inputs, in chunks."""

    def __init__(
        self,
        layout: ChunkLayout,
        dtype: torch.dtype,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
    ) -> None:
        self.queries, self.keys, self.values = (layout.split(x).flatten(0, 1).to(dtype) for x in (q, k, v))
        """[G, C, D], [G, C, D], [G, C, V]"""
        log_decay, self.beta = (layout.split_scalar(x).flatten(0, 1).unsqueeze(-1).to(dtype) for x in (log_decay, beta))
        """[G, C, 1]"""
        self.from_start = log_decay.cumsum(1).exp()
        """[G, C, 1], e^{g_i}."""
        self.total = self.from_start[:, -1:]
        """[G, 1, 1], e^{g_C}."""
        later = torch.ones(layout.chunk, layout.chunk, dtype=dtype, device=q.device).tril_(-1)
        self.decay = (log_decay * later).cumsum_(1).exp_().tril_()
        """[G, C, C], L, zero for j > i."""
        self.to_end = self.decay[:, -1].unsqueeze(-1).clone()
        """[G, C, 1], L_Cj."""
        self.keys_to_end = self.keys * self.to_end
        self.scores = torch.bmm(self.queries, self.keys.mT).mul_(self.decay)
        """[G, C, C], L_ij (q_i . k_j)."""
        self.similarity = torch.bmm(self.keys, self.keys.mT)
        """[G, C, C], k_i . k_j."""

    def couplings(self) -> Tensor:
        """[G, C, C], A."""
        return self.similarity.mul(self.decay).mul_(self.beta).tril_(-1)

    def erase(self, inverse: Tensor) -> Tensor:
        """[G, C, D], what the writes take from the state: u = (I + A)^-1 beta v - erase S."""
        return torch.bmm(inverse, self.keys * (self.beta * self.from_start))


def _inverse(couplings: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower triangular A [G, C, C], by inverting diagonal blocks of 1, 2, 4, ..., C rows.

    [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]. Not by powers of A, which grow like binomial coefficients
    when keys are equal and beta = 1, while the inverse does not. `torch.linalg.solve_triangular` on the identity is
    as fast at C = 32, but loses up to ten times as much precision when keys are nearly equal and beta = 2.
    """
    size = couplings.shape[1]
    inverse = torch.zeros_like(couplings)
    inverse.diagonal(dim1=1, dim2=2).fill_(1)
    half = 1
    while half < size:
        # [G, n, 2h, 2h], views of the blocks on the diagonal.
        blocks = size // (2 * half)
        shape = (-1, blocks, 2 * half, blocks, 2 * half)
        known = inverse.view(shape).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        below = couplings.view(shape).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)[..., half:, :half]
        known[..., half:, :half] = -(known[..., half:, half:] @ (below @ known[..., :half, :half]))
        half *= 2
    return inverse


def _slices(layout: ChunkLayout, heads: int) -> list[slice]:
    """The chunks of each place as slices of dimension G."""
    return [slice(here.start * heads, here.stop * heads) for here in layout.slices()]
