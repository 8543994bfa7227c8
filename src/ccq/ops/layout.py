"""How sequences are cut into chunks: one layout for dense, padded and packed input.

Legend: B rows, N sequences, T tokens, H heads, C chunk length, P chunks in all, X any feature size.

Every chunked function works on tensors [P, H, C, X]. Chunks are ordered by their place in their sequence first (all
first chunks, then all second chunks, ...), and inside one place by sequence, longest first. So the chunks of place j
are one contiguous slice, the sequences that have a chunk j are the first `active[j]` of the (reordered) sequences, and
a scan over chunks is a loop over slices that never meets a document boundary. Dense input is the case in which every
sequence is active at every place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def _power_of_two_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class ChunkLayout:
    """Where each token of a batch lies in chunk order. Make one with `of`."""

    rows: int
    """B"""
    tokens: int
    """T"""
    sequences: int
    """N"""
    chunk: int
    """C, a power of two, no longer than needed for the longest sequence."""
    active: tuple[int, ...]
    """For each place j, how many sequences have a chunk there; never increases."""
    gather: Tensor | None = None
    """Packed only: [P * C], the token at each slot of chunk order; T where the slot is padding."""
    scatter: Tensor | None = None
    """Packed only: [T], the slot of each token."""
    order: Tensor | None = None
    """Packed only: [N], the sequences by falling length."""
    rank: Tensor | None = None
    """Packed only: [N], the inverse of `order`."""

    @staticmethod
    def of(x: Tensor, boundaries: list[int] | None, chunk: int) -> ChunkLayout:
        """The layout of x [B, T, ...]: dense rows, or documents packed into one row if their `boundaries` are given."""
        if boundaries is None:
            return ChunkLayout.dense(x.shape[0], x.shape[1], chunk)
        return ChunkLayout.packed(boundaries, chunk, x.device)

    @staticmethod
    def dense(rows: int, tokens: int, chunk: int) -> ChunkLayout:
        """The layout of B rows of T tokens each."""
        chunk = min(chunk, _power_of_two_at_least(tokens))
        places = -(-tokens // chunk)
        return ChunkLayout(rows, tokens, rows, chunk, (rows,) * places)

    @staticmethod
    def packed(boundaries: list[int], chunk: int, device: torch.device) -> ChunkLayout:
        """The layout of one row of documents that begin and end at `boundaries` (N + 1 numbers, from 0 to T)."""
        ends = torch.tensor(boundaries)
        lengths = ends.diff()
        sequences, tokens = len(boundaries) - 1, boundaries[-1]
        longest = int(lengths.max()) if sequences else 0
        chunk = min(chunk, _power_of_two_at_least(longest))
        counts = (lengths + chunk - 1) // chunk
        order = torch.argsort(counts, descending=True, stable=True)
        places = -(-longest // chunk)
        active = tuple((counts.unsqueeze(0) > torch.arange(places).unsqueeze(1)).sum(1).tolist())
        first_chunk = torch.tensor((0, *active)).cumsum(0)

        rank = torch.empty_like(order)
        rank[order] = torch.arange(sequences)
        document = torch.repeat_interleave(torch.arange(sequences), lengths)
        inside = torch.arange(tokens) - ends[document]
        scatter = (first_chunk[inside // chunk] + rank[document]) * chunk + inside % chunk
        gather = torch.full((int(first_chunk[-1]) * chunk,), tokens)
        gather[scatter] = torch.arange(tokens)
        return ChunkLayout(
            1, tokens, sequences, chunk, active, *(index.to(device) for index in (gather, scatter, order, rank))
        )

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H, X] -> [P, H, C, X], contiguous, zeros where a chunk is not full."""
        heads, size = x.shape[2:]
        if self.gather is not None:
            padded = torch.cat((x[0], x.new_zeros(1, heads, size)))
            return padded[self.gather].view(-1, self.chunk, heads, size).transpose(1, 2).contiguous()
        places = len(self.active)
        padding = places * self.chunk - self.tokens
        if padding:
            x = F.pad(x, (0, 0, 0, 0, 0, padding))
        x = x.reshape(self.rows, places, self.chunk, heads, size)
        return x.permute(1, 0, 3, 2, 4).reshape(places * self.rows, heads, self.chunk, size).contiguous()

    def merge(self, x: Tensor) -> Tensor:
        """[P, H, C, X] -> [B, T, H, X], contiguous; the inverse of `split`."""
        heads, size = x.shape[1], x.shape[3]
        if self.scatter is not None:
            return x.transpose(1, 2).reshape(-1, heads, size)[self.scatter].unsqueeze(0)
        places = len(self.active)
        x = x.view(places, self.rows, heads, self.chunk, size).permute(1, 0, 3, 2, 4)
        return x.reshape(self.rows, places * self.chunk, heads, size)[:, : self.tokens].contiguous()

    def split_scalar(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [P, H, C]."""
        return self.split(x.unsqueeze(-1)).squeeze(-1)

    def merge_scalar(self, x: Tensor) -> Tensor:
        """[P, H, C] -> [B, T, H]."""
        return self.merge(x.unsqueeze(-1)).squeeze(-1)

    def states_in(self, state: Tensor) -> Tensor:
        """[N, ...] in the caller's order -> in chunk order."""
        return state if self.order is None else state[self.order]

    def states_out(self, state: Tensor) -> Tensor:
        """[N, ...] in chunk order -> in the caller's order."""
        return state if self.rank is None else state[self.rank]

    def slices(self) -> Iterator[slice]:
        """The chunks of place 0, of place 1, ... as slices of dimension P; that of place j has length `active[j]`."""
        start = 0
        for count in self.active:
            yield slice(start, start + count)
            start += count

    def positions(self, count: Tensor, mask: Tensor | None) -> Tensor:
        """t_i: how many real tokens its sequence has seen when token i is read, itself included.

        count [N] int64 (tokens seen before), mask [B, T] or None -> [P, 1, C] int64; zero or more in padding slots.
        """
        if self.order is not None:
            before = [count[self.order[:n]] + place * self.chunk for place, n in enumerate(self.active)]
            first = torch.cat((count[:0], *before))
            return (first.unsqueeze(-1) + torch.arange(1, self.chunk + 1, device=count.device)).unsqueeze(1)
        if mask is None:
            inside = torch.arange(1, self.tokens + 1, device=count.device).expand(self.rows, -1)
        else:
            inside = mask.to(torch.int64).cumsum(1)
        return self.split_scalar((inside + count.unsqueeze(1)).unsqueeze(-1))

    def prefix_sums(self, delta: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The sum before each chunk, and after the last: delta [P, ...], initial [N, ...] -> ([P, ...], [N, ...])."""
        running = self.states_in(initial).clone()
        prefix = torch.empty_like(delta)
        for here, n in zip(self.slices(), self.active, strict=True):
            prefix[here] = running[:n]
            running[:n] += delta[here]
        return prefix, self.states_out(running)

    def suffix_sums(self, delta: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the end: the sum behind each chunk, and before the first."""
        running = self.states_in(initial).clone()
        suffix = torch.empty_like(delta)
        for here, n in reversed(list(zip(self.slices(), self.active, strict=True))):
            suffix[here] = running[:n]
            running[:n] += delta[here]
        return suffix, self.states_out(running)


def positions(q: Tensor, count: Tensor | None, *, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """[B, T] int64: how many real tokens stand before each token of q [B, T, ...] in its sequence; count [N] int64 are
    those before the call, None for none. Padding has a position too, which means nothing.
    """
    place = torch.arange(q.shape[1], device=q.device)
    if cu_seqlens is None:
        if mask is not None:
            place = (mask.to(torch.int64).cumsum(1) - 1).clamp(min=0)
        place = place if count is None else place + count.unsqueeze(1)
        return place.expand(q.shape[:2])
    starts = cu_seqlens.to(torch.int64)
    # Of several documents that start at one place, all but the last are empty.
    document = torch.searchsorted(starts, place, right=True) - 1
    place = place - starts[document]
    return (place if count is None else place + count[document]).unsqueeze(0)
