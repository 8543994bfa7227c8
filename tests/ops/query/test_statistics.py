"""Packed key statistics: where every number stands, and the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import assert_close

from ccq.ops.query import KeyStatistics, PackedKeyStatistics
from ccq.ops.query.statistics import _kept_places, pack_triangle


def place(i: int, j: int, size: int) -> int:
    """As the docstring of `PackedKeyStatistics` has it, for j <= i."""
    if 2 * i >= size - 1:
        return (size - 1 - i) * size + j
    return i * size + size - 1 - j if j < i else size * (size + 1) // 2 - 1 - i


def draw(size: int, dtype: torch.dtype = torch.float64) -> KeyStatistics:
    keys = torch.randn(2, 3, 2 * size, size, dtype=dtype)
    return KeyStatistics(keys.mT @ keys, keys.sum(-2), torch.tensor([2 * size, 7]))


@given(st.integers(1, 40))
def test_every_number_has_its_place(size: int) -> None:
    statistics = draw(size)
    packed = PackedKeyStatistics.of(statistics)
    places = {place(i, j, size): statistics.second_moment[..., i, j] for i in range(size) for j in range(i + 1)}
    assert sorted(places) == list(range(size * (size + 1) // 2))
    assert torch.equal(packed.triangle, torch.stack([places[at] for at in sorted(places)], -1))
    for a, b in zip(packed.unpacked(), statistics, strict=True):
        assert torch.equal(a, b)
    assert packed.total is statistics.total and packed.count is statistics.count


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_both_ways_are_differentiable(size: int) -> None:
    matrix, triangle = draw(size).second_moment, torch.randn(2, size * (size + 1) // 2, dtype=torch.float64)
    total, count = torch.zeros(2, size, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    inputs = matrix.requires_grad_(), triangle.requires_grad_()
    torch.autograd.gradcheck(lambda x: PackedKeyStatistics.of(KeyStatistics(x, total, count)).triangle, inputs[:1])
    torch.autograd.gradcheck(lambda x: PackedKeyStatistics(x, total, count).unpacked().second_moment, inputs[1:])


def test_the_size_of_packed_statistics() -> None:
    """A memory of 256 x 512 and what the read step adds to it: no more than 25.5 %."""
    packed = PackedKeyStatistics.of(KeyStatistics.zeros(1, 6, 256, dtype=torch.float32, device=torch.device("meta")))
    added = sum(x.numel() * x.element_size() for x in packed)
    assert added / (6 * 256 * 512 * 4) < 0.255


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_stands_above_the_diagonal_does_not_count(dtype: torch.dtype) -> None:
    statistics = draw(7, dtype)
    dirty = statistics._replace(second_moment=statistics.second_moment.tril() + 9 * torch.ones(7, 7).triu(1).to(dtype))
    packed = PackedKeyStatistics.of(dirty)
    assert packed.triangle.dtype == dtype
    assert_close("second moment", packed.unpacked().second_moment, statistics.second_moment, 0.0)


def test_what_is_kept_of_one_kind_of_call_serves_the_others() -> None:
    """The tables, which are made once for a size, are neither those of a compiler nor of the inference mode."""
    statistics, size = draw(9), 9
    _kept_places.cache_clear()
    with torch._subclasses.FakeTensorMode():
        assert pack_triangle(torch.empty(2, size, size)).shape == (2, 45)
    with torch.inference_mode():
        packed = PackedKeyStatistics.of(statistics)
    pack = torch.compile(lambda x: pack_triangle(x), fullgraph=True, backend="aot_eager")
    assert torch.equal(pack(statistics.second_moment), packed.triangle)
    leaf = statistics.second_moment.clone().requires_grad_()
    pack_triangle(leaf).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.ones(size, size).tril().double().expand(2, 3, -1, -1))
