"""Needle accuracy: does the model say the value that the text stated for the asked key?

`evaluate_needles` asks models that know the tokens of `ccq.data.needles`; `needle_tasks` asks any model in plain text,
as RULER does.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ccq.data.needles import NeedleWindows
from ccq.data.ruler import (
    RULER_TASKS,
    NeedleTask,
    RulerSample,
    has_sentence_splitter,
    ruler_samples,
    score_answer,
)
from ccq.evals.decoding import greedy_answers
from ccq.evals.harness import EvalTask, LoadedModel, mean_score
from ccq.evals.local_data import EMBEDDED, HubText, read_text, text_source
from ccq.evals.perplexity import EvaluatedModel, evaluation_mode, multiple_of
from ccq.evals.results import EvalPoint, EvalTaskResult, NeedleDepthResult, NeedleLengthResult

LENGTHS = (1024, 2048, 4096, 8192)
"""Of the paper's table 3."""
READ_OFF_LENGTHS: Mapping[str, tuple[int, ...]] = {
    "niah_single_1": (4096, 8192, 16384, 32768, 65536, 102400),
    "niah_single_2": (4096, 8192, 16384),
    "niah_single_3": (4096, 8192, 16384),
}
"""The paper's runs with the correction switched off: pass-key from 4K to 100K, number and UUID from 4K to 16K. It names
the ends; the lengths between them are a choice of this library."""
ESSAYS = "essays"
"""The file or folder that haystacks of essays are made of."""
HUB_ESSAYS = HubText("baber/paul_graham_essays", None, "train", "text")
"""What lm-eval's tasks read."""
DEPTH_BINS = 10
_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True)
class NeedleOutcome:
    """One model's answers to the windows of one length.

    Attributes:
        length: tokens of a window.
        correct: bool [W].
        depths: float64 [W], see `NeedleWindows`.
        depth_bins: equal bins of [0, 1) to report by.
    """

    length: int
    correct: NDArray[np.bool_]
    depths: NDArray[np.float64]
    depth_bins: int


def evaluate_needles(model: EvaluatedModel, windows: NeedleWindows, *, batch_size: int) -> NeedleOutcome:
    """Ask every window's question once. An answer is right when the largest logit of the whole vocabulary at the last
    position is the stated value's: there is no choice among values and no partial credit.

    Args:
        model: see `EvaluatedModel`; called with `logits_to_keep=1`, in eval mode on its own device, and its modes are
            restored.
        windows: of one length.
        batch_size: windows in one call.

    Raises:
        ValueError: `batch_size` is not positive, or the model gives NaN.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give at least 1")
    answers: list[torch.Tensor] = []
    with evaluation_mode(model) as device:
        for tokens in windows.tokens.split(batch_size):
            logits = model(tokens.to(device), use_cache=False, logits_to_keep=1).logits[:, -1]
            if logits.isnan().any():
                raise ValueError(
                    f"the model gives NaN logits for needle windows of length {windows.length}; "
                    "was its training stable?"
                )
            answers.append(logits.argmax(dim=-1).cpu())
    return NeedleOutcome(
        length=windows.length,
        correct=(torch.cat(answers) == windows.answers).numpy(),
        depths=windows.depths.numpy(),
        depth_bins=windows.depth_bins,
    )


def summarize_by_length(outcomes: Iterable[NeedleOutcome], *, training_length: int) -> list[NeedleLengthResult]:
    """One result for each outcome, over all depths, with 95 % Wilson intervals."""
    results = []
    for outcome in outcomes:
        asked, correct = len(outcome.correct), int(outcome.correct.sum())
        low, high = wilson_interval(correct, asked)
        results.append(
            NeedleLengthResult(
                length=outcome.length,
                multiple=multiple_of(outcome.length, training_length),
                asked=asked,
                correct=correct,
                accuracy=correct / asked,
                low=low,
                high=high,
            )
        )
    return results


def summarize_by_depth(outcomes: Iterable[NeedleOutcome]) -> list[NeedleDepthResult]:
    """One result for each outcome and depth bin in which a question was asked, with 95 % Wilson intervals."""
    results = []
    for outcome in outcomes:
        edges = [bin_ / outcome.depth_bins for bin_ in range(outcome.depth_bins + 1)]
        bins = np.searchsorted(edges, outcome.depths, side="right") - 1
        for bin_ in range(outcome.depth_bins):
            inside = outcome.correct[bins == bin_]
            asked, correct = len(inside), int(inside.sum())
            if asked == 0:
                continue
            low, high = wilson_interval(correct, asked)
            results.append(
                NeedleDepthResult(
                    length=outcome.length,
                    depth_from=edges[bin_],
                    depth_to=edges[bin_ + 1],
                    asked=asked,
                    correct=correct,
                    accuracy=correct / asked,
                    low=low,
                    high=high,
                )
            )
    return results


def wilson_interval(correct: int, asked: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion (E. B. Wilson, 1927), without continuity correction."""
    from scipy.stats import binomtest

    interval = binomtest(correct, asked).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def needle_tasks(
    loaded: LoadedModel,
    lengths: Mapping[str, Sequence[int]],
    *,
    samples: int,
    seed: int,
    batch_size: int,
    folder: Path | None = None,
    hub_essays: bool = False,
) -> list[EvalTask]:
    """Tasks of RULER, one for each name and length: see `ccq.data.ruler`.

    Args:
        loaded: the model.
        lengths: of each task of `RULER_TASKS` that is run, in tokens, prompt and answer together.
        samples: of each task and length.
        seed: of the samples.
        batch_size: rows of a call.
        folder: where `ESSAYS` is; None for the sources of Python's standard library.
        hub_essays: take the essays of the hub instead, in lm-eval's own steps of 500 words.
    """
    longest = max((max(sizes) for name, sizes in lengths.items() if _has_essays(name)), default=0)

    @functools.cache
    def essays() -> tuple[str, dict[str, Any]]:
        local = ESSAYS if folder is not None else EMBEDDED
        source = text_source(ESSAYS, None, HUB_ESSAYS) if hub_essays else text_source(local, folder, None)
        text = read_text(source, characters=_CHARACTERS_PER_TOKEN * longest, limit=None)
        is_original = "the essays of RULER's own tasks" if hub_essays else "local text, not the essays of RULER"
        return " ".join(text.documents), {"haystack": is_original, **text.description}

    def task(name: str, length: int) -> EvalTask:
        def run(advance: Callable[[int, int], None]) -> EvalTaskResult:
            return _ask(loaded, name, length, samples, seed, batch_size, essays, hub_essays, advance)

        return EvalTask(f"{name}/{length}", run)

    return [task(name, length) for name, sizes in lengths.items() for length in sizes]


def _has_essays(name: str) -> bool:
    kind = RULER_TASKS[name]
    return isinstance(kind, NeedleTask) and kind.haystack == "essay"


def _ask(
    loaded: LoadedModel,
    name: str,
    length: int,
    samples: int,
    seed: int,
    batch_size: int,
    essays: Callable[[], tuple[str, dict[str, Any]]],
    hub_essays: bool,
    advance: Callable[[int, int], None],
) -> EvalTaskResult:
    group = loaded.processes

    def draw() -> tuple[list[RulerSample], dict[str, Any]]:
        questions = ruler_samples(
            name,
            length=length,
            samples=samples,
            seed=seed,
            count_tokens=lambda text: len(loaded.encode(text)),
            essays=lambda: essays()[0],
            fill=not hub_essays,
        )
        if not _has_essays(name):
            return questions, {"haystack": "RULER's own"}
        splitter = "punkt_tab" if has_sentence_splitter() else "punkt without parameters"
        return questions, {**essays()[1], "sentence_splitter": splitter}

    questions, data = group.from_first(draw)
    answer_tokens = RULER_TASKS[name].answer_tokens
    prompts = [loaded.encode(question.prompt) for question in questions]
    done = 0

    def count(answers: int) -> None:
        nonlocal done
        done += answers
        # The other processes are about as far.
        advance(min(done * group.count, samples), samples)

    def text_of(tokens: list[int]) -> str:
        return str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))

    answers = greedy_answers(
        loaded.model,
        prompts,
        max_new_tokens=answer_tokens,
        batch_size=batch_size,
        end_tokens=loaded.end_tokens,
        # What an answer contains it goes on to contain, so the rest of it changes no score.
        is_enough=lambda number, tokens: score_answer(text_of(tokens), questions[number].answers) == 1,
        on_answers=count,
        processes=group,
    )
    records: list[dict[str, Any]] = []
    for number, (question, prompt, answer) in enumerate(zip(questions, prompts, answers, strict=True)):
        text = text_of(answer.tokens)
        records.append(
            {
                "sample": number,
                "prompt_tokens": len(prompt),
                "prompt_sha256": hashlib.sha256(question.prompt.encode()).hexdigest(),
                **({} if question.depth is None else {"depth": question.depth}),
                "expected": question.answers,
                "answer": text,
                "score": score_answer(text, question.answers),
            }
        )
    by_depth = _by_depth([record for record in records if "depth" in record])
    return {
        "task": f"{name}/{length}",
        "scores": [mean_score("accuracy", [record["score"] for record in records])],
        "curves": [{"metric": "accuracy", "axis": "depth", "points": by_depth}] if by_depth else [],
        "data": data,
        "settings": {
            "needle_task": name,
            "length": length,
            "answer_tokens": answer_tokens,
            "prompt_tokens": sum(map(len, prompts)),
            "tokens_read": round(sum(answer.read for answer in answers)),
        },
        "seconds": 0.0,
        "records": records,
    }


def _by_depth(records: Sequence[dict[str, Any]]) -> list[EvalPoint]:
    """The mean score in each of `DEPTH_BINS` equal bins of [0, 1] that has a sample."""
    bins: dict[int, list[float]] = {}
    for record in records:
        bins.setdefault(min(int(record["depth"] * DEPTH_BINS), DEPTH_BINS - 1), []).append(record["score"])
    return [
        {
            "start": bin_ / DEPTH_BINS,
            "end": (bin_ + 1) / DEPTH_BINS,
            "value": sum(found) / len(found),
            "samples": len(found),
        }
        for bin_, found in sorted(bins.items())
    ]
