"""The loader against plain loops over lists: windows, packing, order, resuming, processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice, permutations
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ccq.data.loader import IGNORE_INDEX, TokenBatch, TokenLoader, TokenWindows, permute, window_of_sample
from ccq.data.shards import TokenArray
from ccq.ops.checks import check_boundaries

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def stream_of(lengths: Sequence[int]) -> TokenArray:
    """Documents of these lengths; token ids count from 100."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return TokenArray(np.arange(100, 100 + sum(lengths), dtype=np.uint16), starts)


def assert_equal(actual: TokenBatch, expected: TokenBatch) -> None:
    for name in ("inputs", "targets", "cu_seqlens", "positions"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@given(tokens=st.integers(2, 60), length=st.integers(1, 20))
def test_windows_cover_every_token_once_as_target(tokens: int, length: int) -> None:
    stream = stream_of([tokens])
    if tokens <= length:
        with pytest.raises(ValueError, match=rf"needs {length + 1} tokens, but the stream has {tokens}; give shorter"):
            TokenWindows(stream, length)
        return
    windows = TokenWindows(stream, length)
    batch = windows.batch(range(len(windows)))
    read = list(range(100, 100 + tokens))
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.tolist() == [read[start : start + length] for start in range(0, len(windows) * length, length)]
    assert batch.targets.flatten().tolist() == read[1 : 1 + len(windows) * length]
    assert tokens - 1 - len(windows) * length < length  # no further window would fit
    assert batch.target_tokens == len(windows) * length
    assert batch.cu_seqlens is None
    assert batch.positions is None


@given(lengths=LENGTHS, length=st.integers(1, 8), order=st.randoms(use_true_random=False))
@example(lengths=[4, 4, 4, 1], length=4, order=None)
def test_packed_windows_restart_at_every_document(lengths: list[int], length: int, order: Any) -> None:
    stream = stream_of([*lengths, length + 1])
    windows = TokenWindows(stream, length)
    chosen = list(range(len(windows)))
    if order is not None:
        order.shuffle(chosen)
    owner = [number for number, size in enumerate([*lengths, length + 1]) for _ in range(size)]
    inputs: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    boundaries: list[int] = []
    for window in chosen:
        for place in range(window * length, (window + 1) * length):
            if place == window * length or owner[place] != owner[place - 1]:
                boundaries.append(len(inputs))
            positions.append(len(inputs) - boundaries[-1])
            inputs.append(100 + place)
            targets.append(101 + place if owner[place + 1] == owner[place] else IGNORE_INDEX)
    batch = windows.batch(chosen, pack_documents=True)
    assert batch.cu_seqlens is not None and batch.cu_seqlens.dtype == torch.int32
    assert batch.positions is not None and batch.positions.dtype == torch.int64
    assert batch.inputs.tolist() == [inputs]
    assert batch.targets.tolist() == [targets]
    assert batch.positions.tolist() == [positions]
    assert batch.cu_seqlens.tolist() == [*boundaries, len(inputs)]
    assert batch.target_tokens == sum(target != IGNORE_INDEX for target in targets)
    # What the operators demand of boundaries.
    assert check_boundaries(batch.cu_seqlens, 1, len(inputs)) == batch.cu_seqlens.tolist()


def test_no_window_outside_of_the_stream() -> None:
    windows = TokenWindows(stream_of([9]), 2)
    for number in (-1, 4):
        with pytest.raises(IndexError, match=f"window {number} does not exist; there are 4"):
            windows.batch([number])
    with pytest.raises(ValueError, match="length is 0"):
        TokenWindows(stream_of([9]), 0)


@given(size=st.integers(1, 400), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
@example(size=1, seed=0, epoch=0)
@example(size=2, seed=1, epoch=0)
@example(size=256, seed=2, epoch=1)
@example(size=257, seed=3, epoch=1)
def test_every_epoch_reads_every_window_once(size: int, seed: int, epoch: int) -> None:
    def order_of(seed: int, epoch: int) -> list[int]:
        return [window_of_sample(sample, size, seed) for sample in range(epoch * size, (epoch + 1) * size)]

    order = order_of(seed, epoch)
    assert sorted(order) == list(range(size))
    if size >= 20:  # two orders of 20 agree by chance once in 20! times
        assert order != sorted(order)
        assert order != order_of(seed, epoch + 1)
        assert order != order_of(seed ^ 1, epoch)


@pytest.mark.parametrize("size", [4, 5])
def test_all_orders_are_equally_likely(size: int) -> None:
    counts = Counter(tuple(window_of_sample(sample, size, seed) for sample in range(size)) for seed in range(4000))
    observed = [counts[order] for order in permutations(range(size))]
    assert sum(observed) == 4000
    assert scipy.stats.chisquare(observed).pvalue > 1e-4


def test_one_index_of_a_huge_permutation_is_found_at_once() -> None:
    size = 10**15
    keys = list(range(1, 17))
    images = [permute(index, size, keys) for index in range(2000)]
    assert len(set(images)) == 2000
    assert all(0 <= image < size for image in images)
    # Neighbours are as far apart as two uniform numbers are on average: a third of the size.
    assert abs(np.mean(np.abs(np.diff(images))) / size - 1 / 3) < 0.03


def loader(**options: Any) -> TokenLoader:
    """30 windows of 4 tokens."""
    return TokenLoader(stream_of([3, 10, 1, 40, 67]), **{"length": 4, "batch_size": 8, "rows": 2, "seed": 5, **options})


def expected_batches(first: int, count: int, rows: int = 2, *, pack_documents: bool = False) -> list[TokenBatch]:
    """Micro-batches of `rows` consecutive samples from sample `first` on, one process."""
    windows = TokenWindows(stream_of([3, 10, 1, 40, 67]), 4)
    samples = range(first, first + count * rows)
    numbers = [window_of_sample(sample, len(windows), 5) for sample in samples]
    return [
        windows.batch(numbers[start : start + rows], pack_documents=pack_documents)
        for start in range(0, count * rows, rows)
    ]


@pytest.mark.parametrize("pack_documents", [False, True])
def test_a_step_is_its_samples_in_order(pack_documents: bool) -> None:
    own = loader(pack_documents=pack_documents)
    assert own.windows == 30
    expected = expected_batches(0, 40, pack_documents=pack_documents)
    for step, batches in enumerate(islice(own, 10)):  # into the third epoch
        assert len(batches) == 4
        for batch, other in zip(batches, expected[4 * step :], strict=False):
            assert_equal(batch, other)
        assert own.state_dict()["next_sample"] == 8 * (step + 1)
        assert own.epoch == 8 * (step + 1) / 30


@pytest.mark.parametrize(("processes", "rows"), [(2, 4), (4, 1), (8, 1)])
def test_processes_share_the_same_steps(processes: int, rows: int) -> None:
    loaders = [
        loader(process=process, processes=processes, rows=rows, batch_size=8, seed=5) for process in range(processes)
    ]
    whole = [torch.cat([batch.inputs for batch in step]) for step in islice(loader(), 9)]
    for step, parts in enumerate(islice(zip(*loaders, strict=True), 9)):
        assert {len(part) for part in parts} == {8 // (processes * rows)}
        for process, part in enumerate(parts):
            own = torch.cat([batch.inputs for batch in part])
            torch.testing.assert_close(own, whole[step][process::processes], rtol=0, atol=0)
    assert len({json.dumps(one.state_dict()) for one in loaders}) == 1


@pytest.mark.parametrize("options", [{}, {"rows": 8}, {"batch_size": 4}, {"rows": 4, "pack_documents": True}])
def test_it_goes_on_where_it_was_saved(options: dict[str, Any]) -> None:
    first = loader()
    steps = iter(first)
    for _ in range(5):
        next(steps)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["next_sample"] == 40
    next(steps)  # after the state was taken
    second = loader(**options)
    second.load_state_dict(state)
    rows = options.get("rows", 2)
    expected = expected_batches(40, 8, rows, pack_documents=options.get("pack_documents", False))
    resumed = [batch for step in islice(second, 8) for batch in step]
    for batch, other in zip(resumed, expected, strict=False):
        assert_equal(batch, other)
    assert len(resumed) >= len(expected)


def test_it_goes_on_with_another_number_of_processes() -> None:
    first = loader(process=1, processes=2)
    for _ in islice(first, 3):
        pass
    parts = []
    for process in range(4):
        second = loader(process=process, processes=4)
        second.load_state_dict(first.state_dict())
        (batch,) = next(iter(second))
        parts.append(batch.inputs)
    expected = torch.cat([batch.inputs for batch in expected_batches(24, 4)])
    torch.testing.assert_close(torch.stack(parts, dim=1).flatten(0, 1), expected, rtol=0, atol=0)


@pytest.mark.parametrize("pack_documents", [False, True])
def test_background_workers_change_nothing(pack_documents: bool) -> None:
    own = loader(workers=2, process=1, processes=2, pack_documents=pack_documents)
    plain = loader(process=1, processes=2, pack_documents=pack_documents)
    for step, other in islice(zip(own, plain, strict=True), 12):
        for batch, expected in zip(step, other, strict=True):
            assert_equal(batch, expected)
        assert own.state_dict() == plain.state_dict()  # what was read ahead does not count


def test_a_state_of_something_else_is_refused() -> None:
    state = loader().state_dict()
    other_data = TokenLoader(stream_of([121]), length=4, batch_size=8, rows=2, seed=5)
    for other, name in ((other_data, "data"), (loader(seed=6), "seed"), (loader(length=5), "length")):
        with pytest.raises(ValueError, match=rf"the saved data order has {name} .* this loader .*; go on with"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 3}, r"step of 8 windows cannot be dealt to 1 .* of 3; .* multiple of 3, or one of .* 1, 2, 4, 8$"),
        (
            {"processes": 3},
            r"step of 8 windows cannot be dealt to 3 .*; give a batch size .* multiple of 6$",
        ),
        ({"process": 1}, "process one of 0 ... processes - 1"),
        ({"rows": 0}, "must be at least 1"),
        ({"seed": -1}, "seed is -1; give a number from 0"),
        ({"length": 200}, "needs 201 tokens, but the stream has 121"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(**options)


def test_a_batch_moves_as_a_whole() -> None:
    batch = TokenWindows(stream_of([4, 5]), 4).batch([0, 1], pack_documents=True)
    moved = batch.to("meta")
    for name in ("inputs", "targets", "cu_seqlens", "positions"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(batch, name).shape
    assert_equal(batch.to("cpu"), batch)
