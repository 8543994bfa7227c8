"""Needle accuracy: does the model say the value that the window stated for the asked key?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ccq.data.needles import NeedleWindows
from ccq.evals.perplexity import EvaluatedModel, evaluation_mode, multiple_of
from ccq.evals.results import NeedleDepthResult, NeedleLengthResult


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
