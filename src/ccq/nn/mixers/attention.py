"""Softmax attention as a layer: the Llama-style Transformer that the linear backbones are compared with."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ccq.nn.mixers.common import AttentionState, MixerOutput, check_owner, split_heads
from ccq.nn.projection import project
from ccq.nn.read import ReadStep
from ccq.ops.checks import accumulation_dtype, check_input, check_sequences, check_shape


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with rotary positions, by torch's scaled_dot_product_attention.

    Names and shapes of the parameters, and the rotation (the two halves of a head as pairs), are those of Llama. The
    position of a token is the number of real tokens before it in its sequence: padding has none, and every document of
    packed input starts at 0.

    read
        Must be None: a read step changes how a linear memory is read, and there is none here.
    num_kv_heads
        Heads of keys and values, each shared by equally many of the query; by default one for every head of the query.
    rope_base
        The angles of pair i turn by rope_base ** (-2 i / D) per position.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        value_head_dim: int,
        *,
        read: ReadStep | None = None,
        num_kv_heads: int | None = None,
        rope_base: float = 10000.0,
    ) -> None:
        super().__init__()
        if read is not None:
            raise ValueError("softmax attention has no linear memory for a read step to read; leave read at None")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide the {num_heads} heads, got {num_kv_heads}")
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, because its channels rotate in pairs; got {head_dim}")
        if not rope_base > 0:
            raise ValueError(f"rope_base must be above 0, got {rope_base}")
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_head_dim = value_head_dim
        self.rope_base = rope_base
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * value_head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * value_head_dim, hidden_size, bias=False)
        self.read = None

    def forward(
        self,
        x: Tensor,
        *,
        state: AttentionState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = True,
    ) -> MixerOutput:
        """x [B, T, hidden], mask [B, T] (1 = real token), cu_seqlens [N + 1] (packed documents, B = 1) -> output [B,
        T, hidden] and state.

        Training, prefill and decode are this one call; `state` continues the sequences where an earlier call left them.
        `return_state=False` returns no state: that of packed documents has room for the longest in every document,
        which can be many times the row.
        """
        check_input("x", x, ("B", "T", self.hidden_size))
        sequences, mask, boundaries = check_sequences(x, cu_seqlens, mask)
        if state is not None:
            self._check_state(state, sequences)
        q = split_heads(self.q_proj(x), self.num_heads)
        k, v = (split_heads(projection(x), self.num_kv_heads) for projection in (self.k_proj, self.v_proj))
        if boundaries is None:
            output, state = self._attend(q, k, v, state, mask)
        else:
            # One document at a time: exact, and no score between two documents is ever computed or stored.
            outputs, states = [q.new_empty(1, 0, self.num_heads, self.value_head_dim)], []
            for n, (begin, end) in enumerate(pairwise(boundaries)):
                piece = slice(begin, end)
                before = None if state is None else AttentionState(*(kept[n : n + 1] for kept in state))
                document, after = self._attend(q[:, piece], k[:, piece], v[:, piece], before, None)
                outputs.append(document)
                states.append(after)
            output, state = torch.cat(outputs, 1), _stack(states, k, v) if return_state else None
        (output,) = project(output.flatten(2), self.o_proj)
        return MixerOutput(output, state if return_state else None)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState | None, mask: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        """q [B, T, H, D], k [B, T, K, D], v [B, T, K, V], not yet rotated -> output [B, T, H, V] and the new state."""
        rows, tokens = q.shape[:2]
        if tokens == 0:
            state = AttentionState(k, v, k.new_zeros(rows, dtype=torch.int64)) if state is None else state
            return q.new_empty(rows, 0, self.num_heads, self.value_head_dim), state
        place = torch.arange(tokens, device=q.device)
        if mask is None:
            real = torch.full((rows,), tokens, device=q.device)
        else:
            # Roll every row so that its real tokens come first: behind them, no padding is in a causal window.
            real, first = mask.sum(1), mask.to(torch.int64).argmax(1, keepdim=True)
            padding = (place >= real.unsqueeze(1))[..., None, None]
            q, k, v = (_take(x, (place + first) % tokens).masked_fill(padding, 0) for x in (q, k, v))
        position = place if state is None else state.count.unsqueeze(1) + place
        q, k = self._rotate(q, position), self._rotate(k, position)
        visible = None
        if state is None:
            state = AttentionState(k, v, real)
        else:
            state = _append(state, k, v, real)
            visible = (torch.arange(state.keys.shape[1], device=q.device) <= position.unsqueeze(-1)).unsqueeze(1)
        output = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            state.keys.transpose(1, 2),
            state.values.transpose(1, 2),
            attn_mask=visible,
            is_causal=visible is None,
            enable_gqa=self.num_kv_heads != self.num_heads,
        ).transpose(1, 2)
        if mask is not None:
            output = _take(output, (place - first) % tokens).masked_fill(~mask[..., None, None], 0)
        return output, state

    def _rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """x [B, T, X, D], position [T] or [B, T] -> x rotated (Su et al., "RoFormer", arXiv:2104.09864), in the dtype
        of x; computed in float32 (float64 for float64 input).
        """
        dtype = accumulation_dtype(x.dtype)
        pair = torch.arange(0, self.head_dim, 2, device=x.device, dtype=dtype) / self.head_dim
        angle = (position.to(dtype).unsqueeze(-1) * self.rope_base**-pair).unsqueeze(-2)
        cosine, sine = angle.cos(), angle.sin()
        a, b = x.to(dtype).chunk(2, -1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)

    def _check_state(self, state: AttentionState, sequences: int) -> None:
        check_owner(state, AttentionState, "keys", sequences)
        check_shape("state.keys", state.keys, (sequences, "S", self.num_kv_heads, self.head_dim))
        slots = state.keys.shape[1]
        check_shape("state.values", state.values, (sequences, slots, self.num_kv_heads, self.value_head_dim))
        check_shape("state.count", state.count, (sequences,))


def _append(state: AttentionState, k: Tensor, v: Tensor, real: Tensor) -> AttentionState:
    """The state with T more slots, and the first `real` [B] of the new keys and values behind those that are there."""
    slots = state.keys.shape[1] + k.shape[1]
    place = torch.arange(slots, device=k.device)
    count = state.count.unsqueeze(1)
    # Which of (old slots, new tokens) comes to lie in each slot.
    source = torch.where(place < count, place, state.keys.shape[1] + place - count).clamp(max=slots - 1)
    empty = (place >= count + real.unsqueeze(1))[..., None, None]
    keys, values = (
        _take(torch.cat((old.to(new.dtype), new), 1), source).masked_fill(empty, 0)
        for old, new in ((state.keys, k), (state.values, v))
    )
    return AttentionState(keys, values, state.count + real)


def _stack(states: list[AttentionState], k: Tensor, v: Tensor) -> AttentionState:
    """The states of single documents as the rows of one, with slots for the longest; k and v give shape and dtype."""
    slots = max((state.keys.shape[1] for state in states), default=0)
    keys, values = (
        torch.cat(
            [like.new_empty(0, slots, *like.shape[2:])] + [F.pad(x, (0, 0, 0, 0, 0, slots - x.shape[1])) for x in parts]
        )
        for like, parts in ((k, [s.keys for s in states]), (v, [s.values for s in states]))
    )
    counts = [state.count for state in states]
    return AttentionState(keys, values, torch.cat(counts) if counts else k.new_empty(0, dtype=torch.int64))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, X, D], index [B, S] -> [B, S, X, D]: token index[b, s] of row b."""
    return x.gather(1, index[..., None, None].expand(-1, -1, *x.shape[2:]))
