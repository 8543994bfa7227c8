"""Hidden statements, answered by a reader that goes through a row token by token, and their odds against the stated
ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from ccq.data.loader import IGNORE_INDEX
from ccq.data.statements import ASK, STATE, HiddenStatements


def answers_by_reading(task: HiddenStatements, tokens: list[int]) -> dict[int, int]:
    """What a reader that keeps a notebook predicts, by the position it predicts at: a question is answered from what
    was written down, value by value.
    """
    notebook: dict[int, list[list[int]]] = {}
    predictions: dict[int, int] = {}
    position = 0
    while position < len(tokens):
        if tokens[position] == STATE:
            key, value = tokens[position + 1], tokens[position + 2 : position + 2 + task.value_tokens]
            known = notebook.setdefault(key, [])
            if task.values_differ or value not in known:
                known.append(value)
            position += 2 + task.value_tokens
        elif tokens[position] == ASK:
            said = [token for value in notebook[tokens[position + 1]] for token in value]
            predictions |= {position + 1 + place: token for place, token in enumerate(said)}
            position += 2 + len(said)
        else:
            position += 1
    return predictions


@st.composite
def tasks(draw: st.DrawFn) -> HiddenStatements:
    needles = draw(st.integers(1, 5))
    queries = draw(st.integers(1, needles))
    statements, differ = draw(st.integers(1, 3)), draw(st.booleans())
    value_tokens, fillers = draw(st.integers(1, 3)), draw(st.integers(0, 25))
    stated = queries * statements + needles - queries
    answer = value_tokens * (statements if differ else 1)
    return HiddenStatements(
        length=stated * (2 + value_tokens) + queries * (2 + answer) + fillers - 1,
        needles=needles,
        queries=queries,
        statements=statements,
        values_differ=differ,
        value_tokens=value_tokens,
        keys=needles + draw(st.integers(0, 5)),
        values=draw(st.integers(1, 9)),
        fillers=draw(st.integers(1, 9)),
    )


@given(task=tasks(), seed=st.integers(0, 2**64 - 1))
def test_a_reader_with_a_notebook_answers_every_question(task: HiddenStatements, seed: int) -> None:
    batch = task.batch(seed=seed, step=3, batch_size=4)
    assert batch.inputs.shape == batch.targets.shape == (4, task.length)
    assert batch.target_tokens == 4 * task.answers
    assert int(batch.inputs.max()) < task.vocabulary_size
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        expected = {place: target for place, target in enumerate(targets) if target != IGNORE_INDEX}
        assert answers_by_reading(task, tokens) == expected


@given(task=tasks(), seed=st.integers(0, 2**64 - 1))
def test_rows_are_made_of_what_the_definition_says(task: HiddenStatements, seed: int) -> None:
    first_key, first_value = 2, 2 + task.keys
    first_filler = first_value + task.values
    for tokens in task.batch(seed=seed, step=0, batch_size=3).inputs.tolist():
        asked = [tokens[place + 1] for place, token in enumerate(tokens) if token == ASK]
        stated = Counter(tokens[place + 1] for place, token in enumerate(tokens) if token == STATE)
        assert len(asked) == len(set(asked)) == task.queries
        assert len(stated) == task.needles
        assert all(first_key <= key < first_value for key in stated)
        assert all(stated[key] == (task.statements if key in asked else 1) for key in stated)
        fillers = sum(token >= first_filler for token in tokens)
        others = sum(stated.values()) * (2 + task.value_tokens) + task.queries * 2 + task.answers
        assert fillers + others - 1 == task.length
        # Behind the first question there is no filler and no statement.
        assert not [token for token in tokens[tokens.index(ASK) :] if token == STATE or token >= first_filler]


@pytest.mark.parametrize("depth", [(0.0, 0.2), (0.5, 0.75), (0.8, 1.0)])
def test_asked_statements_stand_where_they_shall(depth: tuple[float, float]) -> None:
    """Counted in slots, of which a whole statement takes one: 3 statements and 17 fillers."""
    task = HiddenStatements(17 + 3 * 3 + 3 - 1, needles=3, fillers=5, keys=9, depth=depth)
    slots: Counter[int] = Counter()
    for tokens in task.batch(seed=0, step=0, batch_size=4000).inputs.tolist():
        asked = tokens[tokens.index(ASK) + 1]
        starts = [place for place, token in enumerate(tokens) if token == STATE]
        place = next(place for place in starts if tokens[place + 1] == asked)
        slots[place - 2 * sum(start < place for start in starts)] += 1
    first, last = round(depth[0] * 20), round(depth[1] * 20)
    assert set(slots) == set(range(first, last))
    assert scipy.stats.chisquare(list(slots.values())).pvalue > 1e-3


def test_a_drawn_answer_is_right_as_often_as_stated() -> None:
    task = HiddenStatements(60, needles=4, queries=2, statements=3, values_differ=True, keys=8, values=5, fillers=3)
    batch = task.batch(seed=1, step=0, batch_size=3000)
    right = []
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        shown = [tokens[place + 2] for place, token in enumerate(tokens) if token == STATE]
        right.append(np.mean([shown.count(target) / len(shown) for target in targets if target != IGNORE_INDEX]))
    assert np.mean(right) == pytest.approx(task.chance, abs=4 * np.std(right) / len(right) ** 0.5)


def test_rows_are_a_function_of_seed_step_and_number() -> None:
    task = HiddenStatements(40, needles=3, queries=2)
    whole = task.batch(seed=1, step=2, batch_size=6)
    part = task.batch(seed=1, step=2, batch_size=3)
    assert torch.equal(part.inputs, whole.inputs[:3]) and torch.equal(part.targets, whole.targets[:3])
    others = [task.batch(seed=seed, step=step, batch_size=6).inputs for seed, step in ((1, 3), (2, 2), (2, 1))]
    assert len({tuple(row) for row in torch.cat([whole.inputs, *others]).tolist()}) == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": 4}, "got 4 queries and 3 needles"),
        ({"keys": 2}, "3 needles need as many different keys, got 2"),
        ({"statements": 0}, "statements must be at least 1, got 0"),
        ({"length": 10}, "length 10 is too short for 3 statements and 1 queries; give at least 11"),
        ({"depth": (0.5, 0.2)}, "depth must be two rising shares in 0 ... 1, got 0.5 and 0.2"),
        ({"depth": (0.5, 0.51)}, "depth 0.5 to 0.51 has 0 places for 1 asked statements"),
    ],
)
def test_impossible_tasks_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HiddenStatements(**{"length": 30, "needles": 3, **options})


def test_the_shortest_row_has_room_for_nothing_else() -> None:
    task = HiddenStatements(11, needles=3)
    tokens = task.batch(seed=0, step=0, batch_size=1).inputs[0].tolist()
    assert [token == STATE for token in tokens[:9]] == [True, False, False] * 3
    assert tokens[9] == ASK
