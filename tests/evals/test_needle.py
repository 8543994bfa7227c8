"""Needle scores of models that are right where it is known, and Wilson intervals from their formula."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ccq.data.needles import NeedleWindows, evaluation_windows
from ccq.data.tokenizer import NeedleVocabulary
from ccq.evals.needle import NeedleOutcome, evaluate_needles, summarize_by_depth, summarize_by_length, wilson_interval

VOCABULARY = NeedleVocabulary(remember=100, recall=101, keys=tuple(range(110, 126)), values=tuple(range(130, 138)))
SIZE = 138
STREAM = (np.arange(3000) % 100).astype(np.uint16)


def windows(length: int = 48, count: int = 60, seed: int = 0, depth_bins: int = 5) -> NeedleWindows:
    return evaluation_windows(
        STREAM, seed=seed, length=length, windows=count, needles=3, depth_bins=depth_bins, vocabulary=VOCABULARY
    )


def look_up(row: list[int]) -> int:
    """The right answer, read off the window."""
    for i in range(len(row) - 3):
        if row[i] == VOCABULARY.remember and row[i + 1] == row[-1]:
            return row[i + 2]
    raise AssertionError("the asked key is not in the window")


class Reader(nn.Module):
    """Answers from the last `span` tokens, and says `otherwise` when the statement lies further back."""

    def __init__(self, span: int, otherwise: int = 7) -> None:
        super().__init__()
        self.span, self.otherwise = span, otherwise
        self.calls: list[int] = []

    def forward(self, tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        assert logits_to_keep == 1
        assert not use_cache
        assert not self.training
        assert not torch.is_grad_enabled()
        self.calls.append(len(tokens))
        logits = torch.zeros(len(tokens), 1, SIZE)
        for i, row in enumerate(tokens.tolist()):
            stated = row[-self.span :].count(row[-1]) == 2
            logits[i, 0, look_up(row) if stated else self.otherwise] = 1
        return SimpleNamespace(logits=logits)


def brute_force(w: NeedleWindows, span: int) -> list[bool]:
    return [next(i for i, token in enumerate(row) if token == row[-1]) >= len(row) - span for row in w.tokens.tolist()]


@pytest.mark.parametrize("span", [0, 12, 25, 48])
def test_correct_where_the_model_can_see(span: int) -> None:
    w = windows()
    outcome = evaluate_needles(Reader(max(span, 1)), w, batch_size=7)
    expected = brute_force(w, span)
    assert outcome.correct.tolist() == expected
    assert outcome.length == 48
    assert sum(expected) == {0: 0, 48: 60}.get(span, sum(expected))


def test_answers_of_the_windows_are_what_the_text_says() -> None:
    w = windows()
    assert w.answers.tolist() == [look_up(row) for row in w.tokens.tolist()]


def test_the_whole_vocabulary_competes() -> None:
    """A text token with the largest logit is a wrong answer even when the right value leads the values."""

    def distracted(tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        logits = torch.zeros(len(tokens), 1, SIZE)
        for i, row in enumerate(tokens.tolist()):
            logits[i, 0, look_up(row)] = 1
            logits[i, 0, 5] = 1.5 if i % 2 else 0.5
        return SimpleNamespace(logits=logits)

    outcome = evaluate_needles(distracted, windows(), batch_size=1000)
    assert outcome.correct.tolist() == [i % 2 == 0 for i in range(60)]


def test_only_the_last_position_counts_when_all_are_given() -> None:
    def full(tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        logits = torch.zeros(*tokens.shape, SIZE)
        logits[:, :-1, 5] = 9
        for i, row in enumerate(tokens.tolist()):
            logits[i, -1, look_up(row)] = 1
        return SimpleNamespace(logits=logits)

    assert evaluate_needles(full, windows(), batch_size=8).correct.all()


@given(st.integers(1, 70))
def test_batch_size_does_not_change_a_score(batch_size: int) -> None:
    model = Reader(20)
    outcome = evaluate_needles(model, windows(), batch_size=batch_size)
    assert outcome.correct.tolist() == evaluate_needles(Reader(20), windows(), batch_size=60).correct.tolist()
    assert model.calls == [batch_size] * (60 // batch_size) + [60 % batch_size] * (60 % batch_size > 0)
    assert model.training


def test_summaries_are_recounts() -> None:
    outcomes = [evaluate_needles(Reader(20), windows(length, depth_bins=4), batch_size=16) for length in (32, 48, 96)]
    by_length = summarize_by_length(outcomes, training_length=32)
    assert [(r["length"], r["multiple"], r["asked"]) for r in by_length] == [(32, 1, 60), (48, 1.5, 60), (96, 3, 60)]
    by_depth = summarize_by_depth(outcomes)
    assert len(by_depth) == 12
    for outcome, result in zip(outcomes, by_length, strict=True):
        assert result["correct"] == sum(brute_force(windows(outcome.length, depth_bins=4), 20))
        bins = [r for r in by_depth if r["length"] == outcome.length]
        assert [(r["depth_from"], r["depth_to"]) for r in bins] == [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]
        assert [r["asked"] for r in bins] == [15] * 4
        for r in bins:
            inside = [
                bool(c)
                for c, d in zip(outcome.correct, outcome.depths, strict=True)
                if r["depth_from"] <= d < r["depth_to"]
            ]
            assert r["correct"] == sum(inside)
        assert sum(r["correct"] for r in bins) == result["correct"]
    for r in [*by_length, *by_depth]:
        assert r["accuracy"] == r["correct"] / r["asked"]
        assert (r["low"], r["high"]) == pytest.approx(wilson_by_formula(r["correct"], r["asked"]), abs=1e-12)


@given(st.integers(1, 40), st.integers(1, 200))
def test_a_depth_on_an_edge_belongs_to_the_upper_bin(depth_bins: int, places: int) -> None:
    depths = np.array([place / places for place in range(places)])
    outcome = NeedleOutcome(length=9, correct=np.ones(places, dtype=bool), depths=depths, depth_bins=depth_bins)
    exact = np.bincount([place * depth_bins // places for place in range(places)], minlength=depth_bins)
    assert [r["asked"] for r in summarize_by_depth([outcome])] == [n for n in exact if n > 0]


def wilson_by_formula(correct: int, asked: int) -> tuple[float, float]:
    """Roots p of (correct / asked - p)^2 = z^2 p (1 - p) / asked; z is the 97.5 % point of the normal distribution."""
    z2 = 1.959963984540054**2
    a, b, c = 1 + z2 / asked, -(2 * correct / asked + z2 / asked), (correct / asked) ** 2
    root = math.sqrt(max(b * b - 4 * a * c, 0))
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


@given(st.integers(1, 500).flatmap(lambda asked: st.tuples(st.integers(0, asked), st.just(asked))))
def test_wilson_interval_solves_its_equation(counts: tuple[int, int]) -> None:
    assert wilson_interval(*counts) == pytest.approx(wilson_by_formula(*counts), abs=1e-9)


def test_wilson_interval_of_known_counts() -> None:
    # By hand: centre (45 + 1.9207) / (50 + 3.8415) = 0.87146, half width 1.95996 / 53.8415 * sqrt(4.5 + 0.9604).
    assert wilson_interval(45, 50) == pytest.approx((0.87146 - 0.08506, 0.87146 + 0.08506), abs=1e-5)
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(10, 10)[1] == 1


def test_nan_and_empty_batches_are_refused() -> None:
    def diverged(tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        return SimpleNamespace(logits=torch.full((len(tokens), 1, SIZE), math.nan))

    with pytest.raises(ValueError, match=r"NaN logits for needle windows of length 48; was its training stable\?"):
        evaluate_needles(diverged, windows(), batch_size=4)
    with pytest.raises(ValueError, match="batch_size is 0; give at least 1"):
        evaluate_needles(Reader(20), windows(), batch_size=0)
