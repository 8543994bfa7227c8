"""Hidden statements, answered by a reader that goes through a row token by token, and their odds against the stated
ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.keyless import check_chance

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
    statements = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3, unique=True)))
    needles = len(statements) * draw(st.integers(1, 5 // len(statements)))
    asked = draw(st.sampled_from([None, *statements]))
    queries = draw(st.integers(1, needles if asked is None else needles // len(statements)))
    differ = draw(st.booleans()) and len(statements) == 1
    value_tokens, fillers = draw(st.integers(1, 3)), draw(st.integers(0, 25))
    stated = sum(statements) * needles // len(statements)
    answer = value_tokens * (statements[0] if differ else 1)
    return HiddenStatements(
        length=stated * (2 + value_tokens) + queries * (2 + answer) + fillers - 1,
        needles=needles,
        queries=queries,
        statements=statements,
        asked_statements=asked,
        values_differ=differ,
        value_tokens=value_tokens,
        keys=needles + draw(st.integers(0, 5)),
        values=(stated if differ else needles) + draw(st.integers(0, 5)),
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
        assert Counter(stated.values()) == dict.fromkeys(task.statements, task.needles // len(task.statements))
        assert all(stated[key] == task.asked_statements for key in asked if task.asked_statements is not None)
        values = {tokens[place + 2] for place, token in enumerate(tokens) if token == STATE}
        assert len(values) == (sum(stated.values()) if task.values_differ else task.needles)
        fillers = sum(token >= first_filler for token in tokens)
        others = sum(stated.values()) * (2 + task.value_tokens) + task.queries * 2 + task.answers
        assert fillers + others - 1 == task.length
        # Behind the first question there is no filler and no statement.
        assert not [token for token in tokens[tokens.index(ASK) :] if token == STATE or token >= first_filler]


@pytest.mark.parametrize("depth", [(0.0, 0.2), (0.5, 0.75), (0.8, 1.0)])
def test_statements_stand_where_they_shall(depth: tuple[float, float]) -> None:
    """Counted in slots, of which a whole statement takes one: 3 statements and 17 fillers."""
    task = HiddenStatements(17 + 3 * 3 + 3 - 1, needles=3, fillers=5, keys=9, depth=depth)
    asked_slots: Counter[int] = Counter()
    other_slots: Counter[int] = Counter()
    for tokens in task.batch(seed=0, step=0, batch_size=4000).inputs.tolist():
        asked = tokens[tokens.index(ASK) + 1]
        starts = [place for place, token in enumerate(tokens) if token == STATE]
        for before, place in enumerate(starts):
            (asked_slots if tokens[place + 1] == asked else other_slots)[place - 2 * before] += 1
    first, last = round(depth[0] * 20), round(depth[1] * 20)
    for slots in (asked_slots, other_slots):
        assert set(slots) == set(range(first, last))
        assert scipy.stats.chisquare(list(slots.values())).pvalue > 1e-3


def test_keys_are_asked_alike_however_often_they_are_stated() -> None:
    task = HiddenStatements(40, needles=6, statements=(1, 3), keys=9, fillers=3)
    often: Counter[int] = Counter()
    for tokens in task.batch(seed=2, step=0, batch_size=4000).inputs.tolist():
        key = tokens[tokens.index(ASK) + 1]
        often[sum(tokens[place : place + 2] == [STATE, key] for place in range(len(tokens)))] += 1
    assert set(often) == {1, 3}
    assert scipy.stats.chisquare(list(often.values())).pvalue > 1e-3


def test_the_rows_are_the_same_whichever_keys_are_asked() -> None:
    rows = []
    for asked in (1, 3):
        task = HiddenStatements(60, needles=6, statements=(1, 3), asked_statements=asked)
        rows.append(task.batch(seed=2, step=5, batch_size=50).inputs)
    assert torch.equal(rows[0][:, :-2], rows[1][:, :-2])
    assert (rows[0][:, -1] != rows[1][:, -1]).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"queries": 3},
        {"queries": 4},
        {"needles": 6, "statements": (1, 3)},
        {"needles": 6, "statements": (1, 3), "queries": 4},
        {"needles": 6, "statements": (1, 3), "queries": 2, "asked_statements": 1},
        {"needles": 6, "statements": (1, 3), "queries": 2, "asked_statements": 3},
        {"statements": (3,), "values_differ": True},
        {"statements": (3,), "values_differ": True, "queries": 3},
        {"statements": (2,), "values_differ": True, "queries": 2, "value_tokens": 2},
        {"value_tokens": 3, "values": 5},
        {"depth": (0.0, 0.4)},
        {"depth": (0.6, 1.0), "queries": 2},
    ],
)
def test_who_ignores_keys_is_right_as_often_as_chance_says(options: dict[str, Any]) -> None:
    check_chance(HiddenStatements(**{"length": 70, "needles": 4, "values": 12, "fillers": 3, **options}))


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
        (
            {"needles": 4, "statements": (1, 2), "asked_statements": 2, "queries": 3},
            "got 3 queries and 2 needles that may be asked",
        ),
        ({"keys": 2}, "3 needles need as many different keys, got 2"),
        ({"values": 2}, "a row has 3 different values, got 2"),
        ({"statements": (2,), "values_differ": True, "values": 5}, "a row has 6 different values, got 5"),
        ({"statements": (0, 1)}, "statements must be different numbers of at least 1, got 0, 1"),
        ({"statements": (2, 2)}, "statements must be different numbers of at least 1, got 2, 2"),
        ({"statements": ()}, "statements must be different numbers of at least 1, got none"),
        ({"statements": (1, 2)}, "3 needles cannot be divided evenly between statements 1, 2; give a multiple of 2"),
        ({"asked_statements": 2}, "asked_statements must be one of 1, got 2"),
        (
            {"needles": 2, "statements": (1, 2), "values_differ": True},
            "different lengths; give statements one entry, got 1, 2",
        ),
        ({"length": 10}, "length 10 is too short for 3 statements and 1 queries; give at least 11"),
        ({"depth": (0.5, 0.2)}, "depth must be two rising shares in 0 ... 1, got 0.5 and 0.2"),
        ({"depth": (0.5, 0.51)}, "depth 0.5 to 0.51 has 0 places for 3 statements"),
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
