"""Needle windows taken apart token by token: nothing here uses how they were put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ccq.data.needles import (
    NeedleBatch,
    NeedleWindows,
    _generator,
    _Stream,
    evaluation_windows,
    training_batch,
)
from ccq.data.tokenizer import NeedleVocabulary

VOCABULARY = NeedleVocabulary(
    remember=5001, recall=5002, keys=tuple(range(5010, 5042)), values=tuple(range(5050, 5066))
)
# Every text token says where it stood, so a window's text must be consecutive numbers.
STREAM = np.arange(5000, dtype=np.uint16)


@dataclass
class Parsed:
    text: list[int]
    statements: list[tuple[int, int, int]]  # text tokens before it, key, value
    questions: list[list[int]]  # what follows each <|recall|>
    roles: list[str]


def parse(window: list[int]) -> Parsed:
    """Read a window from left to right by the grammar of the task."""
    parsed = Parsed([], [], [], [])
    i = 0
    while i < len(window):
        token = window[i]
        if token == VOCABULARY.remember:
            _, key, value = window[i : i + 3]
            assert key in VOCABULARY.keys
            assert value in VOCABULARY.values
            assert not parsed.questions, "a statement after a question"
            parsed.statements.append((len(parsed.text), key, value))
            parsed.roles += ["remember", "key", "value"]
            i += 3
        elif token == VOCABULARY.recall:
            question = window[i + 1 : i + 3]
            assert question[0] in VOCABULARY.keys
            parsed.questions.append(question)
            parsed.roles += ["recall", "question key", "answer"][: 1 + len(question)]
            i += 1 + len(question)
        else:
            assert token < 5000, "a needle token outside of a statement"
            assert not parsed.questions, "text after a question"
            parsed.text.append(token)
            parsed.roles.append("text")
            i += 1
    assert parsed.text == list(range(parsed.text[0], parsed.text[0] + len(parsed.text)))
    return parsed


def train(**changes: Any) -> NeedleBatch:
    arguments: dict[str, Any] = {
        "seed": 3,
        "step": 5,
        "batch_size": 4,
        "length": 64,
        "needles": 4,
        "vocabulary": VOCABULARY,
    }
    tokens = changes.pop("tokens", STREAM)
    return training_batch(tokens, **arguments | changes)


def evaluate(**changes: Any) -> NeedleWindows:
    arguments: dict[str, Any] = {
        "seed": 3,
        "length": 64,
        "windows": 10,
        "needles": 4,
        "depth_bins": 5,
        "vocabulary": VOCABULARY,
    }
    tokens = changes.pop("tokens", STREAM)
    return evaluation_windows(tokens, **arguments | changes)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 16), st.integers(0, 60))
def test_training_windows_follow_the_grammar(seed: int, step: int, needles: int, extra: int) -> None:
    length = 7 * needles + extra
    batch = train(seed=seed, step=step, needles=needles, length=length, batch_size=3)
    assert batch.tokens.dtype == torch.int64
    assert batch.tokens.shape == (3, length)
    for row, answer, text in zip(batch.tokens.tolist(), batch.answer.tolist(), batch.text.tolist(), strict=True):
        parsed = parse(row)
        stated = {key: value for _, key, value in parsed.statements}
        assert len(stated) == len(set(stated.values())) == needles
        assert len({place for place, _, _ in parsed.statements}) == needles
        assert sorted(parsed.questions) == sorted([key, value] for key, value in stated.items())
        assert len(parsed.text) == length - 6 * needles
        targets = parsed.roles[1:]
        assert answer == [role == "answer" for role in targets]
        assert text == [role in ("text", "remember", "recall") for role in targets]
    assert torch.equal(batch.inputs, batch.tokens[:, :-1])
    assert torch.equal(batch.targets, batch.tokens[:, 1:])


@given(st.integers(0, 2**64 - 1), st.integers(1, 8), st.integers(1, 7), st.integers(7, 60))
def test_evaluation_windows_follow_the_grammar(seed: int, needles: int, depth_bins: int, extra: int) -> None:
    length = 3 * needles + needles + 2 + extra
    windows = evaluate(seed=seed, needles=needles, depth_bins=depth_bins, length=length, windows=depth_bins + 3)
    assert windows.tokens.dtype == windows.answers.dtype == torch.int64
    assert windows.length == length
    for index, row in enumerate(windows.tokens.tolist()):
        parsed = parse(row)
        stated = {key: (place, value) for place, key, value in parsed.statements}
        assert len(stated) == len({value for _, value in stated.values()}) == needles
        assert len({place for place, _ in stated.values()}) == needles
        ((asked,),) = parsed.questions
        place, value = stated[asked]
        assert windows.answers[index] == value
        assert windows.depths[index] == place / (len(parsed.text) + 1)
        # Exact in integers: the asked statement lies in the stratum of its window.
        assert place * depth_bins // (len(parsed.text) + 1) == index % depth_bins
        assert len(parsed.text) == length - 3 * needles - 2


def test_batches_are_pure_and_differ_by_seed_and_step() -> None:
    first = train().tokens
    train(seed=9)
    evaluate()
    np.random.seed(77)
    torch.manual_seed(77)
    assert torch.equal(train().tokens, first)
    others = [train(seed=4).tokens, train(step=6).tokens, train(seed=5, step=3).tokens]
    for other in others:
        assert not torch.equal(other, first)
    assert len({tuple(row) for tokens in [first, *others] for row in tokens.tolist()}) == 16


def test_rows_do_not_depend_on_the_number_of_rows() -> None:
    assert torch.equal(train(batch_size=9).tokens[:4], train(batch_size=4).tokens)
    assert torch.equal(evaluate(windows=23).tokens[:10], evaluate(windows=10).tokens)


def test_no_two_steps_share_random_numbers() -> None:
    numbers = (0, 1, 2, 2**32, 2**32 + 1, 2**64 - 1)
    drawn = {
        number
        for stream in _Stream
        for seed in numbers
        for step in numbers
        for number in _generator(stream, seed, step).integers(2**63, size=100).tolist()
    }
    assert len(drawn) == 2 * 6 * 6 * 100


def test_evaluation_text_depends_on_the_length_and_the_seed() -> None:
    starts = {
        (seed, length): evaluate(seed=seed, length=length).tokens[:, 0].tolist()
        for seed in (1, 2)
        for length in (64, 128)
    }
    assert len({tuple(values) for values in starts.values()}) == 4


def test_places_keys_values_starts_and_question_order_are_uniform() -> None:
    # Two needles among 8 places: each of the 28 pairs of places, each key and value, each start equally often.
    rows = train(batch_size=5600, length=7 + 12, needles=2, tokens=STREAM[:16], seed=1).tokens.tolist()
    parsed = [parse(row) for row in rows]
    pairs = np.zeros((8, 8), dtype=int)
    for window in parsed:
        pairs[window.statements[0][0], window.statements[1][0]] += 1
    drawn = {
        "places": pairs[np.triu_indices(8, 1)],
        "keys": np.unique([key for w in parsed for _, key, _ in w.statements], return_counts=True)[1],
        "values": np.unique([value for w in parsed for _, _, value in w.statements], return_counts=True)[1],
        "starts": np.unique([w.text[0] for w in parsed], return_counts=True)[1],
        "first asked": np.unique([w.questions[0][0] == w.statements[0][1] for w in parsed], return_counts=True)[1],
    }
    assert [len(counts) for counts in drawn.values()] == [28, 32, 16, 10, 2]
    for name, counts in drawn.items():
        assert stats.chisquare(counts).pvalue > 1e-3, name


def test_asked_and_other_places_of_evaluation_are_uniform() -> None:
    # 12 places; asked: uniform, since the 4 strata hold 3 places each; the other: uniform over the 11 left.
    windows = evaluate(windows=6000, needles=2, length=11 + 6 + 2, depth_bins=4, tokens=STREAM[:30])
    parsed = [parse(row) for row in windows.tokens.tolist()]
    asked, distance, order = [], [], []
    for window in parsed:
        key = window.questions[0][0]
        places = {k: place for place, k, _ in window.statements}
        asked.append(places.pop(key))
        distance.append((next(iter(places.values())) - asked[-1]) % 12)
        order.append(window.statements[0][1] == key)
    assert stats.chisquare(np.bincount(asked, minlength=12)).pvalue > 1e-3
    counts = np.bincount(distance, minlength=12)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-3
    assert 0.45 < np.mean(order) < 0.55


def test_depths_are_spread_evenly() -> None:
    depths = evaluate(windows=200, length=512, depth_bins=5).depths.numpy()
    assert np.histogram(depths, bins=5, range=(0, 1))[0].tolist() == [40] * 5
    assert stats.kstest(depths, "uniform").pvalue > 0.05


def test_the_whole_stream_can_be_the_text() -> None:
    batch = train(tokens=STREAM[:40], length=64, batch_size=2)
    assert [parse(row).text for row in batch.tokens.tolist()] == [list(range(40))] * 2


def test_the_stream_is_not_changed() -> None:
    stream = STREAM.copy()
    train(tokens=stream).tokens.zero_()
    evaluate(tokens=stream).tokens.zero_()
    assert np.array_equal(stream, STREAM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 27}, r"length 27 is too short for 4 needles; give at least 28 tokens"),
        ({"needles": 17, "length": 500}, r"needles is 17, but the vocabulary has 16 values; ask for at most 16"),
        ({"needles": 0}, r"needles is 0; give at least 1"),
        ({"batch_size": 0}, r"batch_size is 0; give at least 1"),
        ({"tokens": STREAM[:39]}, r"has 39 tokens, but a window of length 64 needs 40 tokens of text"),
        ({"seed": -1}, r"seed is -1; give a number from 0"),
        ({"step": 2**64}, r"step or length is 18446744073709551616; give a number from 0"),
        (
            {"vocabulary": NeedleVocabulary(1, 2, (3, 4), VOCABULARY.values)},
            r"needles is 4, but the vocabulary has 2 keys",
        ),
    ],
)
def test_impossible_training_windows_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 17}, r"length 17 is too short for 4 needles; give at least 18 tokens"),
        ({"windows": 4}, r"windows is 4; give at least one for each of the 5 depth bins"),
        ({"depth_bins": 0}, r"depth_bins is 0; give at least 1"),
        (
            {"depth_bins": 20, "windows": 40, "length": 32},
            r"length 32 leaves 19 places for 20 depth bins; give a length of at least 33, or",
        ),
        ({"tokens": STREAM[:49]}, r"has 49 tokens, but a window of length 64 needs 50 tokens of text"),
    ],
)
def test_impossible_evaluation_windows_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(**changes)


def test_the_shortest_lengths_named_in_the_messages_are_accepted() -> None:
    assert train(length=28).tokens.shape == (4, 28)
    assert evaluate(length=18).tokens.shape == (10, 18)
    assert evaluate(length=33, depth_bins=20, windows=40).tokens.shape == (40, 33)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [(STREAM.astype(float), "float64"), (STREAM.reshape(2, -1), r"\[2, 2500\]"), ([1, 2], "list")],
)
def test_streams_of_another_kind_are_refused(tokens: Any, found: str) -> None:
    for make in (train, evaluate):
        with pytest.raises(TypeError, match=rf"tokens is .*{found}.*one-dimensional integer"):
            make(tokens=tokens)
