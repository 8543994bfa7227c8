"""Associative recall, solved row by row with a dictionary, and its odds against the stated ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.keyless import check_chance

from ccq.data.loader import IGNORE_INDEX
from ccq.data.recall import BLANK, AssociativeRecall


@given(
    pairs=st.integers(1, 8),
    queries=st.integers(1, 8),
    spare=st.integers(0, 30),
    more_keys=st.integers(0, 20),
    more_values=st.integers(0, 20),
    power=st.sampled_from([0.01, 0.5, 1.0]),
    fillers=st.sampled_from([0, 1, 7]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_dictionary_answers_every_question(
    pairs: int, queries: int, spare: int, more_keys: int, more_values: int, power: float, fillers: int, seed: int
) -> None:
    queries = min(queries, pairs)
    keys, values = pairs + more_keys, pairs + more_values
    task = AssociativeRecall(2 * pairs + queries + spare, pairs, queries, keys, values, power, fillers)
    batch = task.batch(seed=seed, step=3, batch_size=5)
    assert batch.inputs.shape == batch.targets.shape == (5, task.length)
    assert batch.target_tokens == 5 * queries
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        stated = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(stated) == len(set(stated.values())) == pairs
        assert all(1 <= key <= keys for key in stated)
        assert all(keys < value <= keys + values for value in stated.values())
        assert targets[: 2 * pairs] == [IGNORE_INDEX] * (2 * pairs)
        asked = []
        for token, target in zip(tokens[2 * pairs :], targets[2 * pairs :], strict=True):
            if target == IGNORE_INDEX:
                assert token == BLANK if not fillers else keys + values < token < task.vocabulary_size
            else:
                assert target == stated[token]
                asked.append(token)
        assert len(asked) == len(set(asked)) == queries


def test_rows_are_a_function_of_seed_step_and_number() -> None:
    task = AssociativeRecall(40, 6, 4, keys=20, values=10, fillers=5)
    whole = task.batch(seed=1, step=2, batch_size=6)
    part = task.batch(seed=1, step=2, batch_size=3)
    torch.testing.assert_close(part.inputs, whole.inputs[:3], rtol=0, atol=0)
    torch.testing.assert_close(part.targets, whole.targets[:3], rtol=0, atol=0)
    others = [task.batch(seed=seed, step=step, batch_size=6).inputs for seed, step in ((1, 3), (2, 2), (2, 1))]
    rows = torch.cat([whole.inputs, *others])
    assert len({tuple(row) for row in rows.tolist()}) == 24


@pytest.mark.parametrize("power", [0.01, 0.6, 1.0])
def test_the_first_question_comes_after_gaps_as_stated(power: float) -> None:
    task = AssociativeRecall(2 + 12, 1, 1, keys=2, values=2, power=power)
    batch = task.batch(seed=0, step=0, batch_size=20_000)
    gaps = (batch.targets != IGNORE_INDEX).nonzero()[:, 1].numpy() - 2 + 1
    observed = np.bincount(gaps, minlength=13)[1:]
    weights = np.arange(1, 13) ** (power - 1.0)
    assert scipy.stats.chisquare(observed, 20_000 * weights / weights.sum()).pvalue > 1e-3


def test_keys_values_and_asked_pairs_are_uniform() -> None:
    task = AssociativeRecall(10, 3, 2, keys=5, values=4)
    batch = task.batch(seed=5, step=0, batch_size=6000)
    orders = Counter(map(tuple, batch.inputs[:, 0:6:2].tolist()))
    assert len(orders) == 5 * 4 * 3
    assert scipy.stats.chisquare(list(orders.values())).pvalue > 1e-3
    values = Counter(map(tuple, batch.inputs[:, 1:6:2].tolist()))
    assert len(values) == 4 * 3 * 2
    assert scipy.stats.chisquare(list(values.values())).pvalue > 1e-3
    places = [tuple(row[:6:2].index(key) for key in row[6:] if key != BLANK) for row in batch.inputs.tolist()]
    asked = Counter(places)
    assert len(asked) == 3 * 2
    assert scipy.stats.chisquare(list(asked.values())).pvalue > 1e-3


@pytest.mark.parametrize("task", [AssociativeRecall(30, 6, 3, 8, 8), AssociativeRecall(30, 8, 8, 8, 8)])
def test_who_ignores_keys_is_right_as_often_as_chance_says(task: AssociativeRecall) -> None:
    check_chance(task)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": 5}, "no more queries than pairs"),
        ({"queries": 0}, "at least 1 pair and query"),
        ({"keys": 3}, "4 pairs need as many different keys, got 3"),
        ({"values": 3}, "4 pairs need as many different values, got 3"),
        ({"length": 9}, "length 9 is too short for 4 pairs and 2 queries; give at least 10"),
        ({"power": 0.0}, "power is 0.0; give a number above 0"),
    ],
)
def test_impossible_tasks_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AssociativeRecall(**{"length": 20, "pairs": 4, "queries": 2, **options})


def test_seeds_and_steps_that_are_no_keys_are_refused() -> None:
    task = AssociativeRecall(10, 2, 2)
    for arguments in ({"seed": -1, "step": 0}, {"seed": 0, "step": 2**64}):
        with pytest.raises(ValueError, match="give a number from 0 to"):
            task.batch(batch_size=1, **arguments)
