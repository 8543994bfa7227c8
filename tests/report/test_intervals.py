"""Intervals against closed forms, a library, and brute force over resampled samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from ccq.report.intervals import Interval, Samples, of_difference, of_interaction, of_score, over_seeds, span


def samples(values: object, *, shares: bool = False, name: str = "q") -> Samples:
    array = np.asarray(values, dtype=np.float64)
    return Samples(array, tuple(f"{name}{number}" for number in range(len(array))), shares)


def test_over_seeds_is_students_interval() -> None:
    # Mean 2, standard deviation 1, t(0.975, 2) = 4.30265.
    assert over_seeds([1.0, 2.0, 3.0]) == pytest.approx(
        (2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), rel=1e-5
    )
    values = [0.3, 0.9, -0.2, 0.4]
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert over_seeds(values) == pytest.approx((theirs.low, theirs.high))


def test_a_span_leaves_out_zero_where_every_interval_does() -> None:
    seeds, prompts = Interval(0.5, 0.9), Interval(0.2, 0.6)
    assert span([seeds, prompts]) == (0.2, 0.9)
    assert span([None, prompts]) == prompts
    assert span([None, None]) is None
    low, high = span([seeds, Interval(-0.1, 1.2)]) or (1.0, 1.0)
    assert low < 0 < high


@pytest.mark.parametrize("values", [[], [1.0], [0.5, 0.5, 0.5]])
def test_without_spread_there_is_no_interval_over_seeds(values: list[float]) -> None:
    assert over_seeds(values) is None


def test_one_task_of_right_and_wrong_answers_has_wilsons_interval() -> None:
    # 8 of 10: Wilson 0.490 to 0.943, as in tables of it.
    assert of_score([samples([1] * 8 + [0] * 2, shares=True)]) == pytest.approx((0.49016, 0.94330), abs=1e-4)


def test_shares_are_cut_where_they_end_and_keep_a_width() -> None:
    both = [samples([0.0] * 20, shares=True), samples([0.0] * 20, shares=True)]
    interval = of_score(both)
    assert interval is not None
    # Plus four: variance of a mean (2 / 24) (22 / 24) / 24 for each of two tasks.
    half = 1.959964 * math.sqrt(2 * (2 / 24) * (22 / 24) / 24) / 2
    assert interval == pytest.approx((0.0, half), rel=1e-6)


def test_losses_have_a_t_interval() -> None:
    values = [2.0, 2.5, 3.1, 2.2]
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert of_score([samples(values)]) == pytest.approx((theirs.low, theirs.high))
    assert of_score([samples([2.0])]) is None


def test_paired_answers_have_the_interval_of_agresti_and_min() -> None:
    """From the two-by-two table alone: both right 40, first only 15, second only 5, none 40."""
    first = [1] * 40 + [1] * 15 + [0] * 5 + [0] * 40
    second = [1] * 40 + [0] * 15 + [1] * 5 + [0] * 40
    only_first, only_second, total = 15.5, 5.5, 102.0
    centre = (only_first - only_second) / total
    error = math.sqrt((only_first + only_second) - (only_first - only_second) ** 2 / total) / total
    interval = of_difference([[(samples(first, shares=True), samples(second, shares=True))]])
    assert interval == pytest.approx((centre - 1.959964 * error, centre + 1.959964 * error), rel=1e-6)


def test_models_that_never_differ_still_have_a_width() -> None:
    same = samples([1, 0, 1, 1], shares=True)
    interval = of_difference([[(same, same)]])
    assert interval is not None
    assert interval.low == -interval.high < 0


def test_four_models_have_the_interval_of_price_and_bonett() -> None:
    """From the sums alone: 100 samples and one more, whose contrasts have the mean 0 and the mean square 1."""
    random = np.random.default_rng(2)
    four = [random.random(100) < share for share in (0.9, 0.5, 0.6, 0.4)]
    contrast = [int(a) - int(b) - int(c) + int(d) for a, b, c, d in zip(*four, strict=True)]
    centre = sum(contrast) / 101
    error = math.sqrt(((sum(x * x for x in contrast) + 1) / 101 - centre**2) / 101)
    interval = of_interaction([tuple(samples(values, shares=True) for values in four)])  # type: ignore[list-item]
    assert interval == pytest.approx((centre - 1.959964 * error, centre + 1.959964 * error), rel=1e-6)
    # A pair that always agrees adds nothing but its share of the pseudo-samples: as wide as that of the other pair.
    a, b = (samples(values, shares=True) for values in four[:2])
    pair, both = of_difference([[(a, b)]]), of_interaction([(a, b, a, a)])
    assert pair is not None and both is not None
    assert both.high - both.low == pytest.approx(pair.high - pair.low, rel=0.01)


def test_four_models_that_never_differ_still_have_a_width() -> None:
    same = samples([1, 0, 1, 1], shares=True)
    # The pseudo-sample alone: standard error sqrt(1 / 5 / 5).
    assert of_interaction([(same, same, same, same)]) == pytest.approx((-1.959964 / 5, 1.959964 / 5), rel=1e-6)
    assert of_interaction([(same, same, same, same)] * 3) == of_interaction([(same, same, same, same)])


def test_the_interval_of_four_models_covers_a_rare_difference() -> None:
    """One model of four answers one prompt in a hundred otherwise: where none of 100 does, a spread tells nothing."""
    random = np.random.default_rng(0)
    covered = []
    for _ in range(500):
        rare, never = samples(random.random(100) < 0.01, shares=True), samples(np.zeros(100), shares=True)
        interval = of_interaction([(rare, never, never, never)])
        assert interval is not None
        covered.append(interval.low <= 0.01 <= interval.high)
    assert np.mean(covered) > 0.95


def test_four_losses_have_a_t_interval() -> None:
    random = np.random.default_rng(5)
    a, b, c, d = values = random.normal(3.0, 0.4, (4, 30))
    theirs = stats.ttest_1samp(a - b - c + d, 0).confidence_interval(0.95)
    assert of_interaction([tuple(map(samples, values))]) == pytest.approx((theirs.low, theirs.high))  # type: ignore[list-item]
    assert of_interaction([(samples(a), samples(b), samples(c), samples(d, name="other"))]) is None


def resampled(statistic: object, *data: NDArray[np.float64]) -> tuple[float, float]:
    found = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    return found.low, found.high


def test_a_difference_of_perplexities_is_that_of_resampled_windows() -> None:
    random = np.random.default_rng(0)
    base = random.normal(3.0, 0.3, 600)
    other = base - 0.1 + random.normal(0, 0.05, 600)
    contributions = [math.exp(x.mean()) * (1 + x - x.mean()) for x in (other, base)]
    interval = of_difference([[(samples(contributions[0]), samples(contributions[1]))]])
    brute = resampled(lambda x, y, axis: np.exp(x.mean(axis)) - np.exp(y.mean(axis)), other, base)
    assert interval is not None
    assert interval == pytest.approx(brute, abs=0.06 * (brute[1] - brute[0]))
    unpaired = math.hypot(*(x.std() / math.sqrt(600) for x in contributions))
    assert interval.high - interval.low < 0.5 * 2 * 1.96 * unpaired, "pairing takes the difficulty of windows out"


def test_a_mean_over_seeds_and_tasks_is_that_of_resampled_questions() -> None:
    """Two tasks of different length, three trainings each: the questions are drawn again, the trainings are not."""
    random = np.random.default_rng(3)
    tasks, data = [], []
    for count in (400, 250):
        difficulty = random.uniform(0.2, 0.8, count)
        pairs = [(random.random(count) < difficulty + 0.1, random.random(count) < difficulty) for _ in range(3)]
        tasks.append([(samples(a, shares=True), samples(b, shares=True)) for a, b in pairs])
        data.append(np.mean([a.astype(float) - b for a, b in pairs], axis=0))
    interval = of_difference(tasks)
    means = [np.mean([random.choice(values, len(values)).mean() for values in data]) for _ in range(4000)]
    brute = np.quantile(means, [0.025, 0.975])
    assert interval == pytest.approx(tuple(brute), abs=0.06 * (brute[1] - brute[0]))


def test_other_questions_are_not_paired() -> None:
    assert of_difference([[(samples([1.0, 2.0], name="a"), samples([1.0, 2.0], name="b"))]]) is None
    unknown = Samples(np.array([1.0, 2.0]), None, False)
    assert of_difference([[(unknown, unknown)]]) is None
    first, second = samples([1.0, 2.0]), samples([1.0, 2.5])
    assert of_difference([[(first, second), (samples([1.0, 2.0], name="b"), samples([1.0, 2.5], name="b"))]]) is None


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40),
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=40),
)
def test_exchanged_models_have_the_mirrored_interval(
    answers: list[tuple[bool, bool]], losses: list[tuple[float, float]]
) -> None:
    for pairs, shares in ((answers, True), (losses, False)):
        first, second = (samples(column, shares=shares) for column in zip(*pairs, strict=True))
        forward, back = of_difference([[(first, second)]]), of_difference([[(second, first)]])
        assert forward is not None and back is not None
        assert forward == pytest.approx((-back.high, -back.low), abs=1e-9)
        mean = float((first.values - second.values).mean())
        assert forward.low - 1e-9 <= mean <= forward.high + 1e-9
