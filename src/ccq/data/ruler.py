"""Samples of RULER (Hsieh et al., 2024, arXiv:2404.06654), by lm-eval's generators and templates.

lm-eval's own tasks take their essays from the hub and as many samples as they like; its generators take any haystack,
length and number, so they are called here. Nothing is downloaded.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import functools
import io
import random
import re
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

FREQUENT_WORDS = 50
"""So many of a haystack's words are frequent keys, from the most frequent one on."""
FREQUENT_LETTERS = 4
"""The fewest letters of a frequent key: shorter ones ("the", "of") would leave no readable question."""
_NEEDS_EXTRA = "pip install 'ccq-attention[eval]'"
_SENTENCES = "tokenizers/punkt_tab"
_SHORTEST = 0.5
"""A sample below this share of its length is no sample of that length."""
_TRIED = 16
"""Samples without haystack whose largest tells what the rest of a prompt takes."""
_TRIES = 6
_EXAMPLE_TOKENS = 500
"""The most that lm-eval lets the solved example of variable tracking take, if it can be made so short."""
_FEWEST_WORDS = 20
"""Of which ten are the common ones."""


class NeedleTask(NamedTuple):
    """What RULER varies: the haystack, what keys and values are, and how many of them there are; and `answer_tokens`,
    what lm-eval's task generates, and leaves room for in the length of a sample.

    Keys that are "words" are pairs of words that no haystack has; "frequent" ones are among the haystack's most
    frequent words.
    """

    haystack: Literal["repeat", "essay", "needle"]
    keys: Literal["words", "uuids", "frequent"]
    values: Literal["numbers", "uuids"]
    stated_keys: int = 1
    values_of_a_key: int = 1
    asked_keys: int = 1
    answer_tokens: int = 128


NEEDLE_TASKS: dict[str, NeedleTask] = {
    "niah_single_1": NeedleTask("repeat", "words", "numbers"),
    "niah_single_2": NeedleTask("essay", "words", "numbers"),
    "niah_single_3": NeedleTask("essay", "words", "uuids"),
    "niah_multikey_1": NeedleTask("essay", "words", "numbers", stated_keys=4),
    "niah_multikey_2": NeedleTask("needle", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needle", "uuids", "uuids"),
    "niah_multivalue": NeedleTask("essay", "words", "numbers", values_of_a_key=4),
    "niah_multiquery": NeedleTask("essay", "words", "numbers", asked_keys=4),
    "frequent_single": NeedleTask("essay", "frequent", "numbers"),
    "frequent_multikey": NeedleTask("essay", "frequent", "numbers", stated_keys=4),
}
"""RULER's needles under lm-eval's names. The last two are this library's own: niah_single_2 and niah_multikey_1 with
keys whose tokens are all over the haystack."""


class SpreadTask(NamedTuple):
    """A task whose answer is spread over the text: `answer_tokens` as in `NeedleTask`, and the `delimiter` between the
    question and the beginning of the answer.
    """

    answer_tokens: int
    delimiter: str = " "


SPREAD_TASKS: dict[str, SpreadTask] = {
    "ruler_vt": SpreadTask(30),
    "ruler_cwe": SpreadTask(120, "\n\n"),
    "ruler_fwe": SpreadTask(50),
}
"""RULER's variable tracking, and its extraction of common and of frequent words, under lm-eval's names."""
RULER_TASKS: dict[str, NeedleTask | SpreadTask] = {**NEEDLE_TASKS, **SPREAD_TASKS}


@dataclass(frozen=True)
class RulerSample:
    """One question.

    Attributes:
        prompt: haystack with needles, question, and the beginning of the answer, as lm-eval puts them together.
        answers: what the answer must contain.
        depth: where the first of them is stated, as a share of the prompt's characters; None in a `SpreadTask`.
    """

    prompt: str
    answers: list[str]
    depth: float | None


def ruler_samples(
    task: str,
    *,
    length: int,
    samples: int,
    seed: int,
    count_tokens: Callable[[str], int],
    essays: Callable[[], str],
    fill: bool = True,
) -> list[RulerSample]:
    """Samples of one task at one length: a function of its arguments alone.

    Args:
        task: one of `RULER_TASKS`.
        length: the most tokens of prompt and answer together; the task's `answer_tokens` of them are the answer's.
        samples: how many.
        seed: of the random numbers; task and length have their own under each seed.
        count_tokens: how many tokens a text has.
        essays: the text that haystacks of essays are the beginning of; asked for where it is needed.
        fill: take as many words of the essays as fit; otherwise as many as lm-eval's own tasks, which are multiples of
            500, up to 500 words short of the length.

    Raises:
        ValueError: the task is unknown, lm-eval is not installed, the length is too short for question and answer, or
            the essays are too short for the length.
    """
    if task not in RULER_TASKS:
        raise ValueError(f"unknown needle task {task!r}; accepted: {', '.join(RULER_TASKS)}")
    if task in SPREAD_TASKS:
        return _spread_samples(task, length, samples, seed, count_tokens)
    kind = NEEDLE_TASKS[task]
    generate, haystack, template = _generator()
    words: list[str] = []
    keys: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if kind.haystack == "essay":
        words = re.sub(r"\s+", " ", essays()).strip().split(" ")
    if kind.keys == "frequent":
        # A token is at least a character, so a haystack of this length has no more words.
        keys = functools.partial(_keys_among, _frequent_words(words[:length]), kind.stated_keys)

    def generated(text: str | list[str], count: int) -> list[dict[str, Any]]:
        # lm-eval draws a progress bar of its own.
        with _seeded(f"{seed} {task} {length}"), keys(), contextlib.redirect_stderr(io.StringIO()):
            return generate(
                text,
                TOKENIZER=lambda prompt: _Encoded(range(count_tokens(prompt))),
                max_seq_length=length,
                type_haystack=kind.haystack,
                type_needle_k="uuids" if kind.keys == "uuids" else "words",
                type_needle_v=kind.values,
                template=template,
                num_samples=count,
                tokens_to_generate=kind.answer_tokens,
                num_needle_k=kind.stated_keys,
                num_needle_v=kind.values_of_a_key,
                num_needle_q=kind.asked_keys,
            )

    if kind.haystack != "essay":
        found = generated(haystack(kind.haystack), samples)
    else:
        if fill:
            # lm-eval leaves room for the answers beside the tokens that are generated.
            tried = generated(words[:1], _TRIED)
            rests = [row["length"] + count_tokens(" ".join(row["outputs"])) for row in tried]
            spread = max(rests) - min(rests) + 1
            # Keys and values of one sample may be longer than those that were tried.
            for tries in range(_TRIES):
                room = length - max(rests) - spread * tries
                fitting = _largest(lambda count: count_tokens(" ".join(words[:count])), room, min(len(words), room))
                found = generated(words[: max(fitting, 1)], samples)
                if len(found) == samples and max(row["length"] for row in found) > max(rests):
                    break
        else:
            found = generated(words, samples)
        longest = max(row["length"] for row in found)
        if longest < _SHORTEST * length:
            raise ValueError(
                f"{task} at length {length}: {len(words)} words of essays make samples of at most {longest} tokens; "
                "give more text" + ("" if fill else ", or a longer length: lm-eval takes 500 words at a time")
            )
    if len(found) < samples:
        raise ValueError(f"{task} at length {length}: only {len(found)} of {samples} samples fit; give a longer length")
    return [_needle_sample(task, row) for row in found]


def _largest(size: Callable[[int], int], room: int, high: int) -> int:
    """The largest count of 1 ... high whose size, which grows with it, is at most `room`; 0 if there is none."""
    return bisect.bisect_right(range(max(high, 0) + 1), room, lo=1, key=size) - 1


def _frequent_words(words: Sequence[str]) -> list[str]:
    """The `FREQUENT_WORDS` most frequent ones of a haystack, as they are written."""
    letters = re.findall(rf"\b[^\W\d_]{{{FREQUENT_LETTERS},}}\b", " ".join(words))
    return [word for word, _ in Counter(letters).most_common(FREQUENT_WORDS)]


@contextlib.contextmanager
def _keys_among(words: Sequence[str], keys: int) -> Iterator[None]:
    """The generator draws its keys from these words, so many for a sample, no two of them the same."""
    from lm_eval.tasks.ruler import prepare_niah

    if len(words) < keys:
        raise ValueError(
            f"the essays have {len(words)} different words of at least {FREQUENT_LETTERS} letters, and {keys} keys are "
            "needed; give more text"
        )
    last: deque[str] = deque(maxlen=keys - 1)

    def draw() -> str:
        word = random.choice([word for word in words if word not in last])
        last.append(word)
        return word

    drawn_before = prepare_niah.generate_random_word
    prepare_niah.generate_random_word = draw
    try:
        yield
    finally:
        prepare_niah.generate_random_word = drawn_before


def _spread_samples(
    task: str, length: int, samples: int, seed: int, count_tokens: Callable[[str], int]
) -> list[RulerSample]:
    """Samples of a `SpreadTask`, as large as those of lm-eval's own tasks."""
    with _needs_lm_eval():
        from lm_eval.tasks.ruler.cwe_utils import RNG
    make = {"ruler_vt": _variable_tracking, "ruler_cwe": _common_words, "ruler_fwe": _coded_words}[task]
    quiet = io.StringIO()
    with (
        _seeded(f"{seed} {task} {length}", RNG),
        contextlib.redirect_stderr(quiet),
        contextlib.redirect_stdout(quiet),
    ):
        rows = make(length, samples, count_tokens)
    if len(rows) < samples:
        raise ValueError(f"{task} at length {length}: question and answer take more tokens; give a longer length")
    return [RulerSample(_prompt(task, row), row["outputs"], None) for row in rows]


def _variable_tracking(length: int, samples: int, count_tokens: Callable[[str], int]) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random

    def make(noises: int, example: dict[str, Any] | None) -> dict[str, Any]:
        (row,) = sys_vartrack_w_noise_random(
            _nothing, 1, length, noises, tokens_to_generate=length, icl_example=example
        )
        return dict(row)

    def size_of_example(noises: int) -> int:
        row = make(noises, None)
        # Its question ends in the beginning of the answer.
        return count_tokens(f"{row['input']} {' '.join(row['outputs'])}")

    def size(noises: int) -> int:
        row = make(noises, example)
        return count_tokens(f"{_prompt('ruler_vt', row)} {' '.join(row['outputs'])}")

    room = length - SPREAD_TASKS["ruler_vt"].answer_tokens
    rest = _EXAMPLE_TOKENS - SPREAD_TASKS["ruler_vt"].answer_tokens
    example = make(max(_units(size_of_example, rest, step=5, least=1, most=_EXAMPLE_TOKENS), 1), None)
    # A noise has 19 words.
    noises = _units(size, room, step=10, least=1, most=max(length // 10, 1))
    return _rows(lambda units: make(units, example), samples, range(noises, 0, -1), "ruler_vt", room, count_tokens)


def _common_words(length: int, samples: int, count_tokens: Callable[[str], int]) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.cwe_utils import WORDS, sys_word_pair_random

    def make(words: int) -> dict[str, Any]:
        (row,) = sys_word_pair_random(1, length, _nothing, words, tokens_to_generate=length)
        return dict(row)

    def size(words: int) -> int:
        row = make(words)
        # The solved example counts, though lm-eval does not ask with it.
        answer = " ".join(f"{number}. {word}" for number, word in enumerate(row["outputs"], 1))
        return count_tokens(f"{row['input_example']}\n{_prompt('ruler_cwe', row)} {answer}")

    room = length - SPREAD_TASKS["ruler_cwe"].answer_tokens
    words = _units(size, room, step=10, least=_FEWEST_WORDS, most=len(WORDS))
    return _rows(make, samples, range(words, _FEWEST_WORDS - 1, -1), "ruler_cwe", room, count_tokens)


def _coded_words(length: int, samples: int, count_tokens: Callable[[str], int]) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.fwe_utils import TEMPLATE, sys_kwext

    def is_decided(row: dict[str, Any]) -> bool:
        """Whether each expected word stands in the text more often than all others."""
        ordinary = {"...", *TEMPLATE.split()}
        counts = Counter(word for word in row["input"].split() if word not in ordinary)
        least = min(counts.pop(word, 0) for word in row["outputs"])
        return least > max(counts.values(), default=0)

    # lm-eval leaves no room for the answer; here it is asked for shorter prompts.
    room = length - SPREAD_TASKS["ruler_fwe"].answer_tokens
    if count_tokens(TEMPLATE.format(context="")) >= room:
        return []
    rows = sys_kwext(lambda text: _Encoded(range(count_tokens(text))), room, samples, vocab_size=length // 50)
    return [row for row in rows if is_decided(row)]


def _nothing(text: str) -> _Encoded:
    """lm-eval's generators try one size after the other, and never end where a length is too short. Told that texts
    take no tokens and the answer takes the whole length, they make a sample of the size with which they begin.
    """
    return _Encoded(())


def _units(size: Callable[[int], int], room: int, *, step: int, least: int, most: int) -> int:
    """As many as fit, in lm-eval's steps where a step fits; below `least` if that does not fit."""
    units = least - 1 + _largest(lambda more: size(least - 1 + more), room, most - least + 1)
    return units - units % step if units >= max(step, least) else units


def _rows(
    make: Callable[[int], dict[str, Any]],
    samples: int,
    sizes: Sequence[int],
    task: str,
    room: int,
    count_tokens: Callable[[str], int],
) -> list[dict[str, Any]]:
    """Rows of the first size at which each fits, up to the first row that fits at none."""
    rows: list[dict[str, Any]] = []
    for _ in range(samples):
        fitting = (row for row in map(make, sizes) if count_tokens(_prompt(task, row)) <= room)
        row = next(fitting, None)
        if row is None:
            break
        rows.append(row)
    return rows


def _prompt(task: str, row: dict[str, Any]) -> str:
    delimiter = SPREAD_TASKS[task].delimiter if task in SPREAD_TASKS else " "
    return f"{row['input']}{delimiter}{row['gen_prefix']}"


class _Encoded(NamedTuple):
    """What lm-eval's generator asks a tokenizer for: only its length is looked at."""

    input_ids: Sequence[int]


def _needle_sample(task: str, row: dict[str, Any]) -> RulerSample:
    prompt = _prompt(task, row)
    return RulerSample(prompt, row["outputs"], prompt.index(row["outputs"][0]) / len(prompt))


@contextlib.contextmanager
def _needs_lm_eval() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ValueError(f"needle tasks need lm-eval with its generators ({error}): {_NEEDS_EXTRA}") from error


@functools.cache
def _generator() -> tuple[Callable[..., list[dict[str, Any]]], Callable[[str], str], str]:
    """lm-eval's generator of needles, its own haystacks, and its template."""
    with _needs_lm_eval():
        import nltk

        # Importing the generator downloads the parameters of a sentence splitter unless it finds some.
        if not has_sentence_splitter():
            nltk.data.path.append(str(_untrained_sentence_splitter()))
        from lm_eval.tasks.ruler.niah_utils import TEMPLATE
        from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack
    return generate_samples, get_haystack, TEMPLATE


def score_answer(answer: str, expected: Sequence[str]) -> float:
    """The share of `expected` that `answer` contains, as lm-eval counts it."""
    with _needs_lm_eval():
        from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all
    return float(string_match_all(postprocess_pred([answer]), [list(expected)]))


def has_sentence_splitter() -> bool:
    """Whether nltk has trained parameters of its sentence splitter (punkt_tab), between whose sentences needles are
    put; without them, sentences end at every full stop that is followed by a space, also after abbreviations.
    """
    import nltk

    try:
        found = nltk.data.find(f"{_SENTENCES}/english/abbrev_types.txt")
    except LookupError:
        return False
    return bool(found.file_size())


@functools.cache
def _untrained_sentence_splitter() -> Path:
    """A folder in which nltk finds a splitter that knows no abbreviations."""
    folder = Path(tempfile.mkdtemp(prefix="ccq-nltk-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    parameters = folder / _SENTENCES / "english"
    parameters.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (parameters / name).touch()
    return folder


@contextlib.contextmanager
def _seeded(seed: str, *others: random.Random) -> Iterator[None]:
    """The generators draw from the global random numbers of Python and numpy, and from `others`; all of them go on
    afterwards as if nothing had been drawn.
    """
    states = [(generator, generator.getstate()) for generator in others]
    state, numpy_state = random.getstate(), np.random.get_state()
    for generator in others:
        generator.seed(f"{seed} other")
    random.seed(seed)
    np.random.seed(random.Random(seed).getrandbits(32))
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        for generator, before in states:
            generator.setstate(before)
