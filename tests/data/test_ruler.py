"""RULER's samples: what the text states is what is asked for, and nothing but the arguments decides them."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.tasks.ruler import cwe_utils, vt_utils

from ccq.data.ruler import (
    FREQUENT_WORDS,
    NEEDLE_TASKS,
    SPREAD_TASKS,
    RulerSample,
    ruler_samples,
    score_answer,
)

ESSAYS = "It rained. Nobody had seen Dr. Grey before noon, and so on it went. " * 400


def count_pieces(text: str) -> int:
    return len(re.findall(r"\w+|\W", text))


def count_words(text: str) -> int:
    return len(text.split())


def samples(task: str, **changes: Any) -> list[RulerSample]:
    arguments: dict[str, Any] = {
        "length": 1200,
        "samples": 6,
        "seed": 0,
        "count_tokens": count_pieces,
        "essays": lambda: ESSAYS,
    }
    return ruler_samples(task, **arguments | changes)


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

    for length in (1500, 3000):
        for sample in samples(task, length=length, count_tokens=count_words):
            # The beginning of the answer is not counted by lm-eval; it is short.
            tokens = count_words(sample.prompt[: sample.prompt.rindex("The special magic")]) + 128
            assert length - step - 20 * len(sample.answers) < tokens <= length


def test_lm_eval_takes_500_words_at_a_time() -> None:
    for length, words in ((1300, 1000), (1700, 1500), (1900, 1500)):
        for sample in samples("niah_single_2", length=length, count_tokens=count_words, fill=False):
            essay = sample.prompt[sample.prompt.index("It rained.") : sample.prompt.index("What is")]
            assert count_words(re.sub(r"One of the special magic .*?: \S+\.", "", essay)) == words


@pytest.mark.parametrize("task", ["niah_single_2", "frequent_multikey", *SPREAD_TASKS])
def test_samples_are_a_function_of_the_arguments(task: str) -> None:
    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), cwe_utils.RNG.getstate()]

    random.seed(1)
    np.random.seed(1)
    before = states()
    first = samples(task)
    assert states() == before
    random.seed(2)
    np.random.seed(2)
    assert samples(task) == first
    assert samples(task, seed=1) != first
    others = samples(task, length=1300)
    assert {sample.answers[0] for sample in others}.isdisjoint(sample.answers[0] for sample in first)
    # As many samples as are asked for do not change those before.
    assert samples(task, samples=3) == first[:3]


@pytest.mark.parametrize("task", ["frequent_single", "frequent_multikey"])
def test_frequent_keys_are_the_words_that_fill_the_haystack(task: str) -> None:
    """Sixty words, each as often as its number says; the ten rarest are no keys."""
    words = [f"{a}word{b}" for a in "abcdef" for b in "ghijklmnop"]
    text = " ".join(f"{word} is." for number, word in enumerate(words, 1) for _ in range(number))
    found = samples(task, samples=40, length=12_000, essays=lambda: text)
    keys = [[key for key, _ in stated(sample.prompt)] for sample in found]
    assert all(len(set(of_one)) == len(of_one) == NEEDLE_TASKS[task].stated_keys for of_one in keys)
    drawn = {key for of_one in keys for key in of_one}
    assert drawn <= set(words[-FREQUENT_WORDS:])
    assert len(drawn) > 20
    with pytest.raises(ValueError, match="0 different words of at least 4 letters"):
        samples(task, essays=lambda: "a bc 1234 d_e. " * 2000)


def test_tracked_variables_are_those_with_the_asked_value() -> None:
    for sample in samples("ruler_vt"):
        context, question = re.fullmatch(r".*\n\n(Memorize .*)\nQuestion: (.*)", sample.prompt, re.DOTALL).groups()  # type: ignore[union-attr]
        value = re.search(r"assigned the value (\d+) in the text", question)
        assert value is not None
        holds = dict(re.findall(r"VAR (\w+) = (\d+)", context))
        for _ in range(5):
            holds |= {to: holds[of] for to, of in re.findall(r"VAR (\w+) = VAR (\w+)", context) if of in holds}
        assert sorted(sample.answers) == sorted(name for name, held in holds.items() if held == value[1])
        assert len(sample.answers) == 5
        assert sample.prompt.count("they are:") == 2, "one solved example, and the beginning of the answer"
        assert sample.prompt.endswith("they are:")
        assert sample.depth is None


def test_common_words_are_those_that_stand_most_often_in_the_list() -> None:
    for length in (1200, 5000):
        for sample in samples("ruler_cwe", length=length):
            counts = Counter(re.findall(r"\d+\. (\S+)", sample.prompt.partition("\nQuestion")[0]))
            common = counts.most_common(10)
            assert sorted(sample.answers) == sorted(word for word, _ in common)
            assert common[-1][1] > counts.most_common(11)[-1][1]
            assert sample.prompt.endswith("list?\n\nAnswer: The top 10 words that appear most often in the list are:")
            assert sample.depth is None


def test_frequent_words_are_those_that_stand_most_often_in_the_coded_text() -> None:
    for length in (1200, 5000):
        for sample in samples("ruler_fwe", length=length):
            text = re.search(r"coded words\. (.*)\nQuestion", sample.prompt)
            assert text is not None
            counts = Counter(text[1].split())
            noise, *most = counts.most_common(5)
            assert noise[0] == "..."
            assert sorted(sample.answers) == sorted(word for word, _ in most[:3])
            assert most[2][1] > most[3][1]
            assert sample.prompt.endswith("the three most frequently appeared words are:")
            assert sample.depth is None


@pytest.mark.parametrize("task", SPREAD_TASKS)
@pytest.mark.parametrize("count", [count_words, count_pieces, len])
def test_samples_with_spread_answers_keep_the_length(task: str, count: Any) -> None:
    for length in (12_000, 16_000):
        for sample in samples(task, length=length, count_tokens=count):
            assert 0.6 * length < count(sample.prompt) + SPREAD_TASKS[task].answer_tokens <= length


@pytest.mark.parametrize("length", [1024, 1100, 2048, 4096, 8000])
def test_sizes_are_those_of_lm_evals_own_tasks(length: int) -> None:
    """Up to a step of ten: whether the last one fits depends on the words that were drawn."""

    class Words:
        def __init__(self, text: str) -> None:
            self.input_ids = text.split()

    def different_words(text: str) -> int:
        return len(set(re.findall(r"\d+\. (\S+)", text.partition("\nQuestion")[0])))

    def noises(text: str) -> int:
        return text.count("The grass is green.")

    (theirs,) = cwe_utils.sys_word_pair_random(1, length, Words)
    (own,) = samples("ruler_cwe", length=length, samples=1, count_tokens=count_words)
    assert different_words(own.prompt) == pytest.approx(different_words(theirs["input"]), abs=10)
    (example,) = vt_utils.sys_vartrack_w_noise_random(Words, 1, 500, incremental=5)
    (theirs,) = vt_utils.sys_vartrack_w_noise_random(Words, 1, length, icl_example=example)
    (own,) = samples("ruler_vt", length=length, samples=1, count_tokens=count_words)
    assert noises(own.prompt) == pytest.approx(noises(theirs["input"]), abs=10)


def test_answers_are_as_long_as_in_lm_evals_own_tasks() -> None:
    folder = Path(cwe_utils.__file__).parent
    base = (folder / "niah_single_1.yaml").read_text()
    for task, kind in {**NEEDLE_TASKS, **SPREAD_TASKS}.items():
        if task.startswith("frequent"):
            continue
        own = (folder / f"{task.removeprefix('ruler_')}.yaml").read_text()
        assert task in own
        tokens, delimiter = (
            re.search(pattern, own) or re.search(pattern, base)
            for pattern in (r"max_gen_toks: (\d+)", r'delimiter: "(.*)"')
        )
        assert tokens is not None and delimiter is not None
        assert kind.answer_tokens == int(tokens[1])
        assert getattr(kind, "delimiter", " ") == delimiter[1].replace("\\n", "\n")


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
        *((task, {"length": 200}, "at length 200: question and answer take more tokens") for task in SPREAD_TASKS),
        ("ruler_cwe", {"length": 4096, "count_tokens": len}, "at length 4096: question and answer take more tokens"),
    ],
)
def test_impossible_requests_are_refused(task: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samples(task, **changes)
