"""Differences with their two intervals, against sums written out here."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.report.built_runs import evaluation, runs

from ccq.evals.results import read_results
from ccq.report.differences import PairedDifference, difference_cells, differences_csv, paired_differences
from ccq.report.runs import Comparison, read_runs

BOOLQ, WIKITEXT = ("boolq", "acc"), ("wikitext", "word_perplexity")
NEEDLE = ("niah_single_1/4096", "accuracy")


def one(found: list[PairedDifference], first: str, second: str, column: str) -> PairedDifference:
    (difference,) = [each for each in found if (each.first, each.second, each.column) == (first, second, column)]
    return difference


def test_pairs_are_read_step_and_backbone_and_on_and_off() -> None:
    values = {WIKITEXT: [20.0, 21.0]}
    given = runs(
        evaluation("gla", "language", values),
        evaluation("gla+ccq", "language", values),
        evaluation("gla+ccq", "language", values, read="off"),
        evaluation("gla+ccq", "language", values, read="scale=2"),
        evaluation("gla", "language", values, scale="tiny"),
        evaluation("mamba2", "language", values),
    )
    assert [(each.first, each.second) for each in paired_differences(given)] == [
        ("gla+ccq", "gla"),
        ("gla+ccq", "gla+ccq, correction off"),
        ("gla+ccq", "gla+ccq, read scale=2"),
        ("gla+ccq, correction off", "gla"),
        ("gla+ccq, read scale=2", "gla"),
    ]


def test_a_difference_is_paired_seed_by_seed_and_sample_by_sample() -> None:
    mine = {0: [18.0, 20.0, 25.0], 1: [17.0, 22.0, 21.0], 2: [19.0, 19.0, 19.0]}
    base = {0: [19.0, 21.5, 24.0], 1: [19.5, 21.0, 24.0], 3: [1.0, 1.0, 1.0]}
    given = runs(
        *(evaluation("gla+ccq", "language", {WIKITEXT: values}, seed=seed) for seed, values in mine.items()),
        *(evaluation("gla", "language", {WIKITEXT: values}, seed=seed) for seed, values in base.items()),
    )
    found = one(paired_differences(given), "gla+ccq", "gla", "Wiki ppl")
    # Seeds 0 and 1 are those that both have: 21 - 21.5 and 20 - 21.5.
    assert found.by_seed == pytest.approx((-0.5, -1.5))
    assert found.mean == pytest.approx(-1.0)
    # Standard deviation 0.7071, t(0.975, 1) = 12.7062.
    assert found.over_seeds == pytest.approx((-1 - 12.7062 / 2, -1 + 12.7062 / 2), rel=1e-4)
    # Sample by sample, over both seeds: (-1 - 2.5) / 2, (-1.5 + 1) / 2, (1 - 3) / 2; t(0.975, 2) = 4.30265.
    each = [-1.75, -0.25, -1.0]
    error = math.sqrt(sum((value + 1) ** 2 for value in each) / 2 / 3)
    assert found.over_samples == pytest.approx((-1 - 4.30265 * error, -1 + 4.30265 * error), rel=1e-4)
    assert (found.samples, found.reason, found.outcome) == (3, "", "level")
    # 16.92 - 18.80 in the paper.
    assert found.paper == pytest.approx(-1.88)


def test_one_seed_has_the_sample_interval_alone() -> None:
    given = runs(
        evaluation("gla+ccq", "needle", {NEEDLE: [1] * 45 + [0] * 5}),
        evaluation("gla", "needle", {NEEDLE: [1] * 20 + [0] * 30}),
    )
    found = one(paired_differences(given), "gla+ccq", "gla", "S1 4K")
    assert found.over_seeds is None and found.over_samples is not None
    assert found.mean == pytest.approx(50.0) and found.paper == pytest.approx(96.8 - 47.8)
    assert found.outcome == "better"
    paper, here, seeds, samples = difference_cells(found)
    assert (paper, here, seeds) == ("+49.0", "+50.0", "one seed")
    assert samples.endswith("(50)")


def test_both_intervals_must_leave_out_zero() -> None:
    def outcome(mine: list[list[float]], base: list[float]) -> str:
        given = runs(
            *(evaluation("gla+ccq", "language", {WIKITEXT: each}, seed=seed) for seed, each in enumerate(mine)),
            *(evaluation("gla", "language", {WIKITEXT: base}, seed=seed) for seed in range(len(mine))),
        )
        return one(paired_differences(given), "gla+ccq", "gla", "Wiki ppl").outcome

    base = [20.0, 20.0, 20.0]
    # Two seeds that nearly agree on -1, and three samples that do not: 2, -2 and -3.
    assert outcome([[22.0, 18.0, 17.0], [22.01, 18.0, 17.0]], base) == "level"
    # Samples that agree on -1 or so, and two seeds that do not.
    assert outcome([[19.9, 19.9, 19.8], [18.0, 18.1, 18.1]], base) == "level"
    assert outcome([[19.0, 19.1, 18.9], [19.01, 19.1, 18.9]], base) == "better"


def test_of_losses_less_is_better_and_equal_seeds_are_said() -> None:
    given = runs(
        *(evaluation("gla+ccq", "language", {WIKITEXT: [18.0, 18.1, 18.2]}, seed=seed) for seed in (0, 1)),
        *(evaluation("gla", "language", {WIKITEXT: [19.0, 19.1, 19.2]}, seed=seed) for seed in (0, 1)),
    )
    found = one(paired_differences(given), "gla+ccq", "gla", "Wiki ppl")
    assert difference_cells(found)[1:3] == ("−1.00", "all 2 seeds equal")
    # Their spread tells nothing of that of others, and samples alone are not enough where there are seeds.
    assert found.outcome == "unknown"
    one_seed = one(
        paired_differences(
            runs(
                evaluation("gla+ccq", "language", {WIKITEXT: [18.0, 18.1, 18.2]}, seed=0),
                evaluation("gla", "language", {WIKITEXT: [19.0, 19.1, 19.2]}, seed=0),
            )
        ),
        "gla+ccq",
        "gla",
        "Wiki ppl",
    )
    assert one_seed.outcome == "better"


def test_other_questions_have_no_sample_interval_and_the_reason_is_there() -> None:
    given = runs(
        evaluation("gla+ccq", "language", {WIKITEXT: [18.0, 19.0, 20.0]}),
        evaluation("gla", "language", {WIKITEXT: [18.0, 19.5]}),
    )
    found = one(paired_differences(given), "gla+ccq", "gla", "Wiki ppl")
    assert (found.over_samples, found.reason, found.outcome) == (None, "not the same samples", "unknown")
    assert difference_cells(found)[3] == "not the same samples"
    assert paired_differences(runs(evaluation("gla+ccq", "language", {WIKITEXT: [18.0]}))) == []


def test_of_read_off_the_paper_has_no_table() -> None:
    values = {NEEDLE: [1, 0, 1]}
    given = runs(evaluation("gla+ccq", "needle", values), evaluation("gla+ccq", "needle", values, read="off"))
    (found,) = paired_differences(given)
    assert found.paper is None and difference_cells(found)[0] == "–"


def test_the_mean_of_a_suite_has_the_samples_of_its_tasks() -> None:
    tasks = ("piqa", "boolq")
    mine = {(task, "acc"): [1] * 15 + [0] * 5 for task in tasks}
    base = {(task, "acc"): [1] * 10 + [0] * 10 for task in tasks}
    given = runs(evaluation("gla+ccq", "language", mine, mean=0.75), evaluation("gla", "language", base, mean=0.5))
    found = one(paired_differences(given), "gla+ccq", "gla", "Avg")
    single = one(paired_differences(given), "gla+ccq", "gla", "PIQA")
    assert found.mean == pytest.approx(25.0) and found.samples == 40
    assert found.over_samples is not None and single.over_samples is not None
    widths = [each.high - each.low for each in (found.over_samples, single.over_samples)]
    assert widths[0] == pytest.approx(widths[1] / math.sqrt(2))


def test_perplexity_by_length_stands_beside_the_curves() -> None:
    given = [
        evaluation(arm, "extrapolation", {("govreport/8192", "token_perplexity"): [value, value + 1.0, value + 0.5]})
        for arm, value in (("gla+ccq", 7.0), ("gla", 7.5))
    ]
    found = one(paired_differences(runs(*given)), "gla+ccq", "gla", "GovReport 8192")
    assert found.paper == pytest.approx(6.93 - 7.44)
    assert found.mean == pytest.approx(-0.5)


def test_differences_of_real_evaluations_are_those_of_their_files(measured: Path) -> None:
    found = paired_differences(read_runs([measured / "results"]))

    def windows(name: str) -> list[float]:
        task = read_results(measured / "results" / f"extrapolation-{name}.json", "eval")["tasks"][0]
        return [record["loss"] for record in task["records"]]

    def perplexity(name: str) -> float:
        losses = windows(name)
        return math.exp(math.fsum(losses) / len(losses))

    difference = one(found, "gla+ccq", "gla", "mine 32")
    expected = [perplexity(f"gla+ccq-{seed}") - perplexity(f"gla-{seed}") for seed in (0, 1)]
    assert difference.by_seed == pytest.approx(expected)
    assert difference.samples == len(windows("gla-0"))
    assert difference.over_samples is not None
    assert one(found, "gla+ccq", "gla+ccq, correction off", "BoolQ").samples == 6


def test_comparisons_give_their_own_differences(build_results: Callable[..., Any]) -> None:
    results = build_results(arms=["gla", "gla+ccq"], seeds=3)
    results["pairs"][0].update(mean=0.05, low=0.01, high=0.09, differences=[0.04, 0.05, 0.06])
    found = paired_differences(runs(comparisons=[Comparison(Path("results.json"), results)]))
    difference = one(found, "gla+ccq", "gla", "needle accuracy at 256, %")
    assert (difference.mean, difference.outcome, difference.paper) == (pytest.approx(5.0), "better", None)
    assert difference.over_seeds == pytest.approx((1.0, 9.0))
    loss = one(found, "gla+ccq", "gla", "loss at 256")
    assert loss.lower_is_better and loss.over_samples is None


def test_csv_holds_every_seed() -> None:
    given = runs(
        *(evaluation("gla+ccq", "language", {BOOLQ: [1, 1, value]}, seed=seed) for seed, value in ((0, 0), (1, 1))),
        *(evaluation("gla", "language", {BOOLQ: [1, 0, 0]}, seed=seed) for seed in (0, 1)),
    )
    (line,) = csv.DictReader(io.StringIO(differences_csv(paired_differences(given))))
    assert [float(value) for value in line["by_seed"].split()] == pytest.approx([100 / 3, 200 / 3])
    assert (line["seeds"], line["samples"], line["column"]) == ("2", "3", "BoolQ")
    assert json.loads(line["paper"]) == pytest.approx(59.69 - 58.01)
