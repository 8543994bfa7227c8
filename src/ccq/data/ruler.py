"""Needle-in-a-haystack samples of RULER (Hsieh et al., 2024, arXiv:2404.06654), by lm-eval's generator and templates.

lm-eval's own tasks take their essays from the hub and as many samples as they like; its generator takes any haystack,
length and number, so it is called here. Nothing is downloaded.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

ANSWER_TOKENS = 128
"""What lm-eval's tasks generate, and leave room for in the length of a sample."""
_NEEDS_EXTRA = "pip install 'ccq-attention[eval]'"
_SENTENCES = "tokenizers/punkt_tab"
_SHORTEST = 0.5
"""A sample below this share of its length is no sample of that length."""
_TRIED = 16
"""Samples without haystack whose largest tells what the rest of a prompt takes."""
_TRIES = 6


class NeedleTask(NamedTuple):
    """What RULER varies: the haystack, what keys and values are, and how many of them there are."""

    haystack: Literal["repeat", "essay", "needle"]
    keys: Literal["words", "uuids"]
    values: Literal["numbers", "uuids"]
    stated_keys: int = 1
    values_of_a_key: int = 1
    asked_keys: int = 1


NEEDLE_TASKS: dict[str, NeedleTask] = {
    "niah_single_1": NeedleTask("repeat", "words", "numbers"),
    "niah_single_2": NeedleTask("essay", "words", "numbers"),
    "niah_single_3": NeedleTask("essay", "words", "uuids"),
    "niah_multikey_1": NeedleTask("essay", "words", "numbers", stated_keys=4),
    "niah_multikey_2": NeedleTask("needle", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needle", "uuids", "uuids"),
    "niah_multivalue": NeedleTask("essay", "words", "numbers", values_of_a_key=4),
    "niah_multiquery": NeedleTask("essay", "words", "numbers", asked_keys=4),
}
"""RULER's tasks under lm-eval's names."""


@dataclass(frozen=True)
class NeedleSample:
    """One question.

    Attributes:
        prompt: haystack with needles, question, and the beginning of the answer, as lm-eval puts them together.
        answers: what the answer must contain.
        depth: where the first of them is stated, as a share of the prompt's characters.
    """

    prompt: str
    answers: list[str]
    depth: float


def needle_samples(
    task: str,
    *,
    length: int,
    samples: int,
    seed: int,
    count_tokens: Callable[[str], int],
    essays: Callable[[], str],
    fill: bool = True,
) -> list[NeedleSample]:
    """Samples of one task at one length: a function of its arguments alone.

    Args:
        task: one of `NEEDLE_TASKS`.
        length: the most tokens of prompt and answer together; `ANSWER_TOKENS` of them are the answer's.
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
    if task not in NEEDLE_TASKS:
        raise ValueError(f"unknown needle task {task!r}; accepted: {', '.join(NEEDLE_TASKS)}")
    kind = NEEDLE_TASKS[task]
    generate, haystack, template = _generator()

    def generated(text: str | list[str], count: int) -> list[dict[str, Any]]:
        # lm-eval draws a progress bar of its own.
        with _seeded(f"{seed} {task} {length}"), contextlib.redirect_stderr(io.StringIO()):
            return generate(
                text,
                TOKENIZER=lambda prompt: _Encoded(range(count_tokens(prompt))),
                max_seq_length=length,
                type_haystack=kind.haystack,
                type_needle_k=kind.keys,
                type_needle_v=kind.values,
                template=template,
                num_samples=count,
                tokens_to_generate=ANSWER_TOKENS,
                num_needle_k=kind.stated_keys,
                num_needle_v=kind.values_of_a_key,
                num_needle_q=kind.asked_keys,
            )

    if kind.haystack != "essay":
        found = generated(haystack(kind.haystack), samples)
    else:
        words = re.sub(r"\s+", " ", essays()).strip().split(" ")
        if fill:
            # lm-eval leaves room for the answers beside the tokens that are generated.
            tried = generated(words[:1], _TRIED)
            rests = [row["length"] + count_tokens(" ".join(row["outputs"])) for row in tried]
            spread = max(rests) - min(rests) + 1
            # Keys and values of one sample may be longer than those that were tried.
            for tries in range(_TRIES):
                room = length - max(rests) - spread * tries
                found = generated(words[: _fitting(words, room, count_tokens)], samples)
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
    return [_sample(row) for row in found]


def _fitting(words: Sequence[str], tokens: int, count_tokens: Callable[[str], int]) -> int:
    """How many of the first words have at most so many tokens; at least one."""
    low, high = 1, max(1, min(len(words), tokens))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count_tokens(" ".join(words[:middle])) <= tokens else (low, middle - 1)
    return low


class _Encoded(NamedTuple):
    """What lm-eval's generator asks a tokenizer for: only its length is looked at."""

    input_ids: Sequence[int]


def _sample(row: dict[str, Any]) -> NeedleSample:
    prompt = f"{row['input']} {row['gen_prefix']}"
    return NeedleSample(prompt, row["outputs"], prompt.index(row["outputs"][0]) / len(prompt))


@functools.cache
def _generator() -> tuple[Callable[..., list[dict[str, Any]]], Callable[[str], str], str]:
    """lm-eval's generator, its own haystacks, and its template."""
    try:
        import nltk

        # Importing the generator downloads the parameters of a sentence splitter unless it finds some.
        if not has_sentence_splitter():
            nltk.data.path.append(str(_untrained_sentence_splitter()))
        from lm_eval.tasks.ruler.niah_utils import TEMPLATE
        from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack
    except ImportError as error:
        raise ValueError(f"needle tasks need lm-eval with its generator ({error}): {_NEEDS_EXTRA}") from error
    return generate_samples, get_haystack, TEMPLATE


def score_answer(answer: str, expected: Sequence[str]) -> float:
    """The share of `expected` that `answer` contains, as lm-eval counts it."""
    _generator()
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
def _seeded(seed: str) -> Iterator[None]:
    """The generator draws from Python's global random numbers, which go on afterwards as if nothing had been drawn."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
