"""The chunk layout against brute force: each sequence cut by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ccq.ops.layout import ChunkLayout

documents = st.lists(st.integers(0, 40), min_size=0, max_size=8)
chunks = st.sampled_from([1, 2, 4, 8, 16])


def cut_by_hand(sequences: list[Tensor], chunk: int) -> list[tuple[int, int, Tensor]]:
    """(sequence, place, tokens) of each chunk; tokens [up to C, H, X]."""
    return [
        (n, place, part)
        for n, sequence in enumerate(sequences)
        for place, part in enumerate(sequence.split(chunk) if len(sequence) else ())
    ]


def check(layout: ChunkLayout, x: Tensor, sequences: list[Tensor], count: Tensor, mask: Tensor | None = None) -> None:
    heads, size = x.shape[2:]
    by_hand = {(n, place): part for n, place, part in cut_by_hand(sequences, layout.chunk)}
    rank = (
        {n: r for r, n in enumerate(layout.order.tolist())}
        if layout.order is not None
        else {n: n for n in range(layout.sequences)}
    )
    firsts = torch.tensor((0, *layout.active)).cumsum(0).tolist()
    split = layout.split(x)
    positions = layout.positions(count, mask)
    assert split.shape == (sum(layout.active), heads, layout.chunk, size)
    for (n, place), part in by_hand.items():
        slot = firsts[place] + rank[n]
        assert torch.equal(split[slot, :, : len(part)], part.transpose(0, 1))
        assert not split[slot, :, len(part) :].any()
        if mask is None:
            expected = count[n] + place * layout.chunk + torch.arange(1, len(part) + 1)
            assert torch.equal(positions[slot, 0, : len(part)], expected)
    assert torch.equal(layout.merge(split), x)

    delta = torch.arange(1.0, sum(layout.active) + 1, dtype=torch.float64)
    initial = torch.arange(layout.sequences, dtype=torch.float64) * 1000
    prefix, last = layout.prefix_sums(delta, initial)
    suffix, first = layout.suffix_sums(delta, initial)
    for n in range(layout.sequences):
        slots = [firsts[place] + rank[n] for (m, place) in sorted(by_hand) if m == n]
        for place, slot in enumerate(slots):
            assert prefix[slot] == initial[n] + delta[slots[:place]].sum()
            assert suffix[slot] == initial[n] + delta[slots[place + 1 :]].sum()
        assert last[n] == first[n] == initial[n] + delta[slots].sum()


@given(lengths=documents, chunk=chunks)
def test_packed_layout_cuts_at_documents(lengths: list[int], chunk: int) -> None:
    total = sum(lengths)
    x = torch.arange(1.0, total * 6 + 1).view(1, total, 2, 3)
    boundaries = [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
    layout = ChunkLayout.packed(boundaries, chunk, x.device)
    check(layout, x, list(x[0].split(lengths)) if lengths else [], torch.arange(len(lengths)) * 7)


@given(rows=st.integers(0, 3), tokens=st.integers(0, 40), chunk=chunks)
def test_dense_layout_cuts_every_row(rows: int, tokens: int, chunk: int) -> None:
    x = torch.arange(1.0, rows * tokens * 6 + 1).view(rows, tokens, 2, 3)
    layout = ChunkLayout.dense(rows, tokens, chunk)
    check(layout, x, list(x), torch.arange(rows) * 7)


def test_positions_count_real_tokens_only() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    layout = ChunkLayout.dense(2, 5, 4)
    positions = layout.merge_scalar(layout.positions(torch.tensor([10, 0]), mask))
    assert positions[:, :, 0].tolist() == [[10, 10, 11, 12, 13], [1, 2, 3, 3, 3]]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_short_input_gets_short_chunks(tokens: int) -> None:
    """A decode step must not compute a whole chunk."""
    assert ChunkLayout.dense(2, tokens, 64).chunk == 1 << (tokens - 1).bit_length()
    assert ChunkLayout.packed([0, tokens], 64, torch.device("cpu")).chunk == 1 << (tokens - 1).bit_length()
