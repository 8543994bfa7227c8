"""Needle samples: what the text states is what is asked for, and nothing but the arguments decides them."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from ccq.data.ruler import ANSWER_TOKENS, NEEDLE_TASKS, NeedleSample, needle_samples, score_answer

ESSAYS = "It rained. Nobody had seen Dr. Grey before noon, and so on it went. " * 400


def samples(task: str, **changes: Any) -> list[NeedleSample]:
    arguments: dict[str, Any] = {
        "length": 1200,
        "samples": 6,
        "seed": 0,
        "count_tokens": lambda text: len(re.findall(r"\w+|\W", text)),
        "essays": lambda: ESSAYS,
    }
    return needle_samples(task, **arguments | changes)


def stated(prompt: str) -> list[tuple[str, str]]:
    """Key and value of every statement."""
    return re.findall(r"One of the special magic (?:numbers|uuids) for ([\w-]+) is: ([\w-]+)\.", prompt)


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_answers_are_what_is_stated_for_the_asked_keys(task: str) -> None:
    kind = NEEDLE_TASKS[task]
    for sample in samples(task):
        question = sample.prompt[sample.prompt.rindex("What ") :]
        said = stated(sample.prompt)
        asked = [key for key in dict(said) if key in question]
        assert len(asked) == kind.asked_keys
        assert sorted(sample.answers) == sorted(value for key, value in said if key in asked)
        assert len(sample.answers) == kind.asked_keys * kind.values_of_a_key
        if kind.haystack != "needle":
            assert len(said) == max(kind.stated_keys, kind.asked_keys) * kind.values_of_a_key
        pattern = r"[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}" if kind.values == "uuids" else r"\d{7}"
        assert all(re.fullmatch(pattern, answer) for answer in sample.answers)
        assert sample.prompt.endswith((" mentioned in the provided text is", " mentioned in the provided text are"))
        place = sample.prompt.index(sample.answers[0])
        assert sample.depth == pytest.approx(place / len(sample.prompt))


@pytest.mark.parametrize(("task", "step"), [("niah_single_1", 5 * 18), ("niah_single_2", 1), ("niah_multiquery", 1)])
def test_lengths_are_kept_and_nearly_used(task: str, step: int) -> None:
    """But for `step` words by which the haystack grows, and what is left free for keys and values."""

    def count(text: str) -> int:
        return len(text.split())

    for length in (1500, 3000):
        for sample in samples(task, length=length, count_tokens=count):
            # The beginning of the answer is not counted by lm-eval; it is short.
            tokens = count(sample.prompt[: sample.prompt.rindex("The special magic")]) + ANSWER_TOKENS
            assert length - step - 20 * len(sample.answers) < tokens <= length


def test_lm_eval_takes_500_words_at_a_time() -> None:
    def count(text: str) -> int:
        return len(text.split())

    for length, words in ((1300, 1000), (1700, 1500), (1900, 1500)):
        for sample in samples("niah_single_2", length=length, count_tokens=count, fill=False):
            essay = sample.prompt[sample.prompt.index("It rained.") : sample.prompt.index("What is")]
            assert count(re.sub(r"One of the special magic .*?: \S+\.", "", essay)) == words


def test_samples_are_a_function_of_the_arguments() -> None:
    random.seed(1)
    before = random.getstate()
    first = samples("niah_single_2")
    assert random.getstate() == before
    random.seed(2)
    assert samples("niah_single_2") == first
    assert samples("niah_single_2", seed=1) != first
    assert {sample.answers[0] for sample in samples("niah_single_2", length=1300)}.isdisjoint(
        sample.answers[0] for sample in first
    )
    # As many samples as are asked for do not change those before.
    assert samples("niah_single_2", samples=3) == first[:3]


def test_haystacks_are_the_essays_or_repeated_noise() -> None:
    essay, noise = samples("niah_single_2", samples=1)[0].prompt, samples("niah_single_1", samples=1)[0].prompt
    assert "Nobody had seen Dr. Grey before noon" in essay
    assert "The grass is green. The sky is blue." in noise
    assert "Grey" not in noise


def test_an_answer_is_scored_by_what_it_contains() -> None:
    assert score_answer(" 123 and\n456.", ["123", "456"]) == 1
    assert score_answer(" 123", ["123", "456"]) == 0.5
    assert score_answer("ABC", ["abc"]) == 1
    assert score_answer("", ["1"]) == 0


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("niah", {}, "unknown needle task 'niah'; accepted: niah_single_1, "),
        (
            "niah_single_2",
            {"length": 6000, "essays": lambda: "One sentence. " * 50},
            "100 words of essays make samples of at most .*more text",
        ),
        ("niah_single_2", {"length": 1200, "fill": False}, "a longer length: lm-eval takes 500 words at a time"),
        ("niah_single_1", {"length": 150}, "Could not generate any sample"),
    ],
)
def test_impossible_requests_are_refused(task: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samples(task, **changes)
