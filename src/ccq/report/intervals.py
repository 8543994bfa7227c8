"""What chance does to a score and to a difference of scores: 95 % intervals over seeds and over samples.

Two kinds of chance, never mixed in one interval. Over seeds: how another training would have gone, from the spread of
trainings on the samples that were asked. Over samples: how other questions or windows would have gone, for the
trainings that were made.

Samples are paired: all models of a comparison answer the same ones, so what counts is the spread of the differences
sample by sample, in which the difficulty of a sample cancels out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ccq.evals.needle import wilson_interval
from ccq.report.tables import NORMAL_QUANTILE


class Interval(NamedTuple):
    """95 %."""

    low: float
    high: float


def span(intervals: Iterable[Interval | None]) -> Interval | None:
    """From the lowest to the highest edge of those there are; None where there are none.

    A difference counts as better or worse where this leaves out zero: where each of its intervals, over seeds and over
    samples, does so by itself.
    """
    known = [interval for interval in intervals if interval is not None]
    return Interval(min(each.low for each in known), max(each.high for each in known)) if known else None


@dataclass(frozen=True)
class Samples:
    """What each sample of a task contributes to a score of it.

    Attributes:
        values: float64 [n]; their mean is the score. Those of a mean are what was averaged; those of a perplexity are
            to first order, perplexity * (1 + loss of the sample - loss), with weights where words or bytes weigh.
        identities: names the samples and how they were asked; two models whose identities are equal were asked the
            same. None where results do not tell.
        are_shares: the values lie in 0 ... 1.
    """

    values: NDArray[np.float64]
    identities: tuple[str, ...] | None
    are_shares: bool


def over_seeds(values: Sequence[float]) -> Interval | None:
    """Student's t interval of a mean, mean -+ t(0.975, n - 1) * standard deviation / sqrt(n). Of scores, or of
    differences seed by seed.

    None for one value, and for values that are all equal, such as scores of 0 or 1: their spread tells nothing of that
    of others.
    """
    if len(set(values)) < 2:
        return None
    from scipy.stats import t

    mean = statistics.fmean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def of_score(tasks: Sequence[Samples]) -> Interval | None:
    """Interval of one task's score, or of the unweighted mean of several tasks', over samples; None where it would rest
    on one sample.

    Answers of one task that are right or wrong: Wilson's interval. Other shares: normal, with the variance after adding
    two samples of 1 and two of 0 (Agresti and Coull, The American Statistician 52, 1998), which keeps its width where
    all are right, and cut at 0 and 1. Else a t interval, with the degrees of freedom of the shortest task.
    """
    if not all(samples.are_shares for samples in tasks):
        return _of_mean([_Moments.of(samples.values) for samples in tasks], min(len(s.values) for s in tasks))
    if len(tasks) == 1 and set(np.unique(tasks[0].values)) <= {0.0, 1.0}:
        return Interval(*wilson_interval(int(tasks[0].values.sum()), len(tasks[0].values)))
    errors = [_Moments.of(samples.values, added=(1.0, 1.0, 0.0, 0.0)).squared_error for samples in tasks]
    means = [float(samples.values.mean()) for samples in tasks]
    interval = _of_mean([_Moments(mean, error) for mean, error in zip(means, errors, strict=True)], None)
    return None if interval is None else Interval(max(interval.low, 0.0), min(interval.high, 1.0))


def of_difference(tasks: Sequence[Sequence[tuple[Samples, Samples]]]) -> Interval | None:
    """Interval of a difference over samples that are paired; None where the samples are not the same, or where it would
    rest on one.

    Args:
        tasks: for each task of which a mean is taken (one, for the score of one task) the pairs (first, second) of all
            seeds. The difference of a sample is the mean over seeds of first - second.

    Shares: half a sample with the difference 1, half a one with -1 and one with 0 are added; for answers that are right
    or wrong and one seed that is the interval of Agresti and Min (Statistics in Medicine 24, 2005), and keeps its width
    where two models never differ. Else a t interval, as in `of_score`.
    """
    moments, fewest = [], math.inf
    added, weight = _pseudo_samples((1, -1))
    are_shares = all(s.are_shares for pairs in tasks for pair in pairs for s in pair)
    for pairs in tasks:
        asked = {samples.identities for pair in pairs for samples in pair}
        if len(asked) != 1 or None in asked:
            return None
        values = np.mean([first.values - second.values for first, second in pairs], axis=0)
        moments.append(_Moments.of(values, added, weight) if are_shares else _Moments.of(values))
        fewest = min(fewest, len(values))
    return _of_mean(moments, None if are_shares else int(fewest))


def of_interaction(seeds: Sequence[tuple[Samples, Samples, Samples, Samples]]) -> Interval | None:
    """Interval of a difference of two differences, (a - b) - (c - d), over samples that all four models were asked;
    None where the samples are not the same, or where it would rest on one.

    Args:
        seeds: (a, b, c, d) of every seed. The difference of a sample is the mean over seeds.

    Shares: one sample is added, spread evenly over the sixteen ways in which four models can be right or wrong. So each
    model gets half a success and half a failure, which is what Price and Bonett (Computational Statistics and Data
    Analysis 45, 2004) add to each of four proportions in a contrast; their 4 / m samples for m proportions are the two
    of Agresti and Min for m = 2. It keeps its width where the four never differ. Else a t interval.
    """
    asked = {samples.identities for four in seeds for samples in four}
    if len(asked) != 1 or None in asked:
        return None
    # In this order models that agree in pairs leave no rounding.
    values = np.mean([(a.values - b.values) - (c.values - d.values) for a, b, c, d in seeds], axis=0)
    if not all(samples.are_shares for four in seeds for samples in four):
        return _of_mean([_Moments.of(values)], len(values))
    return _of_mean([_Moments.of(values, *_pseudo_samples((1, -1, -1, 1)))], None)


def _pseudo_samples(signs: Sequence[int]) -> tuple[list[float], float]:
    """What a contrast of answers with these signs is in every pattern of right and wrong, and how much each pattern
    counts: 4 / m samples in all for m models.
    """
    values = [
        float(sum(sign * right for sign, right in zip(signs, pattern, strict=True)))
        for pattern in product((0, 1), repeat=len(signs))
    ]
    return values, 4 / len(signs) / len(values)


class _Moments(NamedTuple):
    mean: float
    squared_error: float | None
    """Of the mean; None for one sample."""

    @classmethod
    def of(cls, values: NDArray[np.float64], added: Sequence[float] = (), weight: float = 1.0) -> _Moments:
        """Of a sample, or of a sample with pseudo-samples, of which each counts `weight`."""
        count = len(values)
        if not added:
            error = None if count < 2 else float(values.var(ddof=1)) / count
            return cls(float(values.mean()), error)
        total = count + weight * len(added)
        mean = (float(values.sum()) + weight * math.fsum(added)) / total
        square = (float((values**2).sum()) + weight * math.fsum(value**2 for value in added)) / total
        return cls(mean, (square - mean**2) / total)


def _of_mean(tasks: Sequence[_Moments], fewest: int | None) -> Interval | None:
    """Of the unweighted mean over tasks, whose samples are independent; `fewest` samples of a task give the degrees of
    freedom, None the normal quantile.
    """
    errors = [task.squared_error for task in tasks if task.squared_error is not None]
    if not tasks or len(errors) < len(tasks):
        return None
    quantile = NORMAL_QUANTILE
    if fewest is not None:
        from scipy.stats import t

        quantile = float(t.ppf(0.975, fewest - 1))
    mean = math.fsum(task.mean for task in tasks) / len(tasks)
    half = quantile * math.sqrt(math.fsum(errors)) / len(tasks)
    return Interval(mean - half, mean + half)
