"""Aggregation, answered by counting, and rows against their definitions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ccq.data.frequency import ASK, CommonWords, FrequentWords
from ccq.data.loader import IGNORE_INDEX


def share_of_places(text: list[int], answers: list[int]) -> float:
    """How often a drawn place holds the answer, among those that hold no earlier answer: on average over answers."""
    shares = []
    for number, answer in enumerate(answers):
        left = [word for word in text if word not in answers[:number]]
        shares.append(sum(word == answer for word in left) / len(left))
    return sum(shares) / len(shares)


@given(
    words=st.integers(2, 7),
    top=st.integers(1, 3),
    steepness=st.sampled_from([0.4, 1.0, 2.0]),
    length=st.integers(8, 80),
    seed=st.integers(0, 2**64 - 1),
)
def test_counting_finds_the_most_frequent_words(words: int, top: int, steepness: float, length: int, seed: int) -> None:
    try:
        task = FrequentWords(length, words, top, steepness, vocabulary=9)
    except ValueError:
        assume(False)
    batch = task.batch(seed=seed, step=1, batch_size=4)
    assert batch.inputs.shape == batch.targets.shape == (4, length)
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        text = tokens[: tokens.index(ASK)]
        counts = Counter(text)
        assert len(counts) == words and all(1 <= word < task.vocabulary_size for word in counts)
        expected = [word for word, _ in counts.most_common(top)]
        assert targets == [IGNORE_INDEX] * len(text) + expected
        assert tokens[len(text) + 1 :] == expected[:-1]
        # Zipf's law, each count rounded up or down.
        shares = [rank**-steepness for rank in range(1, words + 1)]
        for (_, count), share in zip(counts.most_common(), shares, strict=True):
            assert abs(count - len(text) * share / sum(shares)) < 1
        assert task.chance == pytest.approx(share_of_places(text, expected))


@given(
    common=st.integers(1, 3),
    often=st.integers(2, 6),
    seldom=st.integers(1, 5),
    rest=st.integers(1, 20),
    seed=st.integers(0, 2**64 - 1),
)
def test_counting_finds_the_common_words(common: int, often: int, seldom: int, rest: int, seed: int) -> None:
    assume(seldom < often)
    length = common * often + rest + common
    task = CommonWords(length, common, often, seldom, vocabulary=30)
    batch = task.batch(seed=seed, step=1, batch_size=4)
    assert batch.inputs.shape == batch.targets.shape == (4, length)
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        text = tokens[: tokens.index(ASK)]
        counts = Counter(text)
        expected = [word for word in dict.fromkeys(text) if counts[word] == often]
        assert len(expected) == common
        assert sorted(counts.values())[:-common].count(seldom) >= len(counts) - common - 1
        assert max(count for word, count in counts.items() if word not in expected) <= seldom
        assert targets == [IGNORE_INDEX] * len(text) + expected
        assert common > 1 or task.chance == pytest.approx(share_of_places(text, expected))


@pytest.mark.parametrize(
    ("common", "often", "seldom", "rest"),
    [(1, 3, 2, 3), (2, 2, 1, 1), (2, 2, 1, 4), (3, 2, 1, 2), (2, 3, 2, 2), (2, 3, 2, 3)],
)
def test_chance_is_that_of_the_best_who_knows_the_order_of_words(
    common: int, often: int, seldom: int, rest: int
) -> None:
    """Over all rows, of the best place in the order of words for each answer and places of the answers before."""
    others = [common + token // seldom for token in range(rest)]
    orders = set(itertools.permutations([*range(common)] * often + others))
    seen: dict[tuple[int, ...], Counter[int]] = {}
    for order in orders:
        places = [place for place, word in enumerate(dict.fromkeys(order)) if word < common]
        for number, place in enumerate(places):
            seen.setdefault(tuple(places[:number]), Counter())[place] += 1
    best = sum(max(places.values()) for places in seen.values()) / len(orders) / common
    assert CommonWords(common * often + rest + common, common, often, seldom).chance == pytest.approx(best)


Player = Callable[[list[int], list[int], list[int]], int]
"""Says one of the words that are not answered yet, and does not count: all of them in the order of the row, those of
them behind the first place of the answer before, and those of the latter that did not stand in front of it.
"""

PLAYERS: dict[str, Player] = {
    "first": lambda left, behind, new: left[0],
    "in the middle": lambda left, behind, new: left[len(left) // 2],
    "nearest to the question": lambda left, behind, new: left[-1],
    "next": lambda left, behind, new: (behind or left)[0],
    "next new": lambda left, behind, new: (new or left)[0],
}


@pytest.mark.parametrize(
    ("task", "best"),
    [
        (CommonWords(40, 1, 6, 2), "first"),
        (CommonWords(40, 2, 6, 1), "next new"),
        (CommonWords(64, 3, 8, 5), "next new"),
        (CommonWords(30, 4, 4, 3), "next new"),
        (FrequentWords(40, 5, 1), "first"),
        (FrequentWords(40, 6, 3, 1.5), "first"),
    ],
)
def test_who_does_not_count_is_right_as_often_as_chance_says(task: CommonWords | FrequentWords, best: str) -> None:
    rows = 2000
    batch = task.batch(seed=11, step=0, batch_size=rows)
    shares: dict[str, list[float]] = {name: [] for name in PLAYERS}
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        text, answers = tokens[: tokens.index(ASK)], targets[tokens.index(ASK) :]
        right: Counter[str] = Counter()
        for number, answer in enumerate(answers):
            before = text.index(answers[number - 1]) if number else 0
            left = [word for word in text if word not in answers[:number]]
            behind = [word for word in text[before:] if word not in answers[:number]]
            new = [word for word in behind if word not in text[:before]]
            right.update(name for name, player in PLAYERS.items() if player(left, behind, new) == answer)
        for name, share in shares.items():
            share.append(right[name] / len(answers))
    for name, each in shares.items():
        error = 4 * np.std(each) / rows**0.5
        assert np.mean(each) <= task.chance + error, f"{name}: {np.mean(each)} where {task} says {task.chance}"
        if name == best:
            assert np.mean(each) >= task.chance - error, f"{name}: {np.mean(each)} where {task} says {task.chance}"


@pytest.mark.parametrize("task", [FrequentWords(5, 3, 1, 1.0, vocabulary=3), CommonWords(5, 1, 2, 1, vocabulary=3)])
def test_orders_and_words_are_uniform(task: Any) -> None:
    rows = Counter(map(tuple, task.batch(seed=3, step=0, batch_size=6000).inputs.tolist()))
    # Three words, one of them twice: 4! / 2 orders of 3 choices each.
    assert len(rows) == 36
    assert scipy.stats.chisquare(list(rows.values())).pvalue > 1e-3


@pytest.mark.parametrize("task", [FrequentWords(20, 4, 2), CommonWords(20, 2, 5, 2)])
def test_rows_are_a_function_of_seed_step_and_number(task: Any) -> None:
    whole = task.batch(seed=1, step=2, batch_size=6)
    part = task.batch(seed=1, step=2, batch_size=3)
    assert torch.equal(part.inputs, whole.inputs[:3]) and torch.equal(part.targets, whole.targets[:3])
    others = [task.batch(seed=seed, step=step, batch_size=6).inputs for seed, step in ((1, 3), (2, 2), (2, 1))]
    assert len({tuple(row) for row in torch.cat([whole.inputs, *others]).tolist()}) == 24


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (FrequentWords, {"length": 20, "words": 4, "top": 4}, "got 4, 4 and 64"),
        (FrequentWords, {"length": 4, "words": 4}, "length 4 is too short for 4 words and 1 answers; give at least 5"),
        (FrequentWords, {"length": 9, "words": 4, "steepness": 0.01}, "would stand 2, 2, 2, 2 times"),
        (FrequentWords, {"length": 20, "words": 4, "steepness": 0.0}, "steepness must be a finite number above 0"),
        (CommonWords, {"length": 20, "often": 2, "seldom": 2}, "often above seldom"),
        (CommonWords, {"length": 7, "often": 6}, "leaves no room for other words.*give at least 8"),
        (CommonWords, {"length": 40, "vocabulary": 9}, "has 34 different words, the vocabulary only 9"),
    ],
)
def test_impossible_tasks_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
