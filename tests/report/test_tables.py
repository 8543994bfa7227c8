"""The figures in the tables are those of the results, worked out by hand or by numpy."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ccq.evals.results import read_results, write_results
from ccq.report.tables import (
    arm_differences,
    backbone_of,
    bytes_text,
    comparison_rows,
    comparison_table,
    difference_text,
    sampling_interval,
    seed_count,
    share_text,
    summarize,
    text_tables,
)

Build = Callable[..., dict[str, Any]]


def _printed(results: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(comparison_table(results))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_fixture_is_a_valid_results_file(build_results: Build, tmp_path: Any) -> None:
    results = build_results(seeds=2)
    write_results(tmp_path / "results.json", results)  # type: ignore[arg-type]
    assert read_results(tmp_path / "results.json") == results


def test_mean_and_deviation_over_three_seeds(build_results: Build) -> None:
    results = build_results(arms=["gla", "gla+ccq"], seeds=3)
    accuracies = (0.5, 0.6, 0.85)
    runs = [run for run in results["runs"] if run["arm"] == "gla+ccq"]
    for run, accuracy in zip(runs, accuracies, strict=True):
        run["needle_by_length"][0]["accuracy"] = accuracy
        run["training"]["tokens_per_second"] = 1000 * accuracy
    row = comparison_rows(results)[1]  # type: ignore[arg-type]
    assert (row.arm, row.seeds) == ("gla+ccq", (0, 1, 2))
    assert row.needle[256].mean == pytest.approx(0.65)
    assert row.needle[256].deviation == pytest.approx(float(np.std(accuracies, ddof=1)))
    assert row.needle[256].low is None  # the Wilson interval of one run says nothing about three
    cells = text_tables(results)[1].rows[1].cells  # type: ignore[arg-type]
    assert cells[0] == ("65.0", "± 18.0")  # deviation sqrt((.15^2 + .05^2 + .2^2) / 2) = 0.1803
    speed = text_tables(results)[2].rows[1].cells[2]  # type: ignore[arg-type]
    assert speed == ("650", "± 180")


def test_one_seed_shows_the_interval_of_its_questions(build_results: Build) -> None:
    results = build_results(arms=["gla"])
    entry = results["runs"][0]["needle_by_length"][1]
    entry.update(accuracy=0.898, low=0.855, high=0.930)
    assert text_tables(results)[1].rows[0].cells[1] == ("89.8", "85.5–93.0")  # type: ignore[arg-type]


def test_every_figure_of_an_arm_is_its_own(build_results: Build) -> None:
    results = build_results(arms=["gla", "gla+ccq"])
    run = results["runs"][1]
    run.update(parameters=7654321, read_parameters=4321, state_bytes=98765)
    run["perplexity"][2].update(loss=2.5, perplexity=12.18)
    run["gate"]["mean"], run["correction"]["relative_size"] = 0.3141, 0.0271
    run["decode"]["tokens_per_second"] = 333.4
    run["needle_read_off"][0].update(accuracy=0.123, low=0.1, high=0.2)
    text, needle, cost = text_tables(results)  # type: ignore[arg-type]
    assert [cell.note for cell in text.header[1:4]] == ["256 1×", "512 2×", "1024 4×"]
    assert (text.rows[1].cells[2].main, text.rows[1].cells[5].main) == ("2.500", "12.18")
    assert [cell.main for cell in needle.rows[1].cells[3:]] == ["0.314", "2.71 %"]
    assert (needle.rows[2].label.strip(), needle.rows[2].cells[0]) == ("correction off", ("12.3", "10.0–20.0"))
    assert [cell.main for cell in cost.rows[1].cells] == ["7,654,321", "4,321", "22,372", "333", "98,765", "1"]
    # An arm without a read has a dash for gate and correction, and no row for the correction switched off.
    assert [cell.main for cell in needle.rows[0].cells[3:]] == ["–", "–"]
    assert [row.arm for row in needle.rows] == ["gla", "gla+ccq", "gla+ccq"]


@pytest.mark.parametrize("seeds", [1, 3])
def test_terminal_table_fits_80_columns_without_breaking_a_figure(build_results: Build, seeds: int) -> None:
    results = build_results(seeds=seeds)
    lines = _printed(results, 80)
    assert max(map(len, lines)) <= 80
    printed = "\n".join(lines)
    for table in text_tables(results):  # type: ignore[arg-type]
        for row in table.rows:
            assert sum(line.startswith(f" {row.label} ") for line in lines) >= (3 if row.label == row.arm else 2)
            for cell in row.cells:
                assert cell.main in printed and cell.note in printed
    assert "Chance: 6.25 % guessing any value, 25 % guessing among the values seen." in printed
    assert ("One seed ranks nothing" in printed) == (seeds == 1)


def test_arms_come_in_the_order_of_the_settings(build_results: Build) -> None:
    results = build_results(arms=["gla", "gla+ccq"])
    results["settings"]["arms"] = ["gla+ccq", "absent", "gla"]
    assert [row.arm for row in comparison_rows(results)] == ["gla+ccq", "gla"]  # type: ignore[arg-type]


def test_newcombe_interval_against_the_published_example(build_results: Build) -> None:
    """Newcombe 1998, table II, example (a): 56/70 against 48/80, method 10 gives 0.0524 to 0.3339."""
    results = build_results(arms=["gla", "gla+ccq"])
    for run, (correct, asked) in zip(results["runs"], ((48, 80), (56, 70)), strict=True):
        p, z = correct / asked, 1.959964
        centre = (correct + z * z / 2) / (asked + z * z)
        half = z * math.sqrt(asked * p * (1 - p) + z * z / 4) / (asked + z * z)
        run["needle_by_length"][0].update(
            asked=asked, correct=correct, accuracy=p, low=centre - half, high=centre + half
        )
    interval = sampling_interval(results, "gla", "gla+ccq", "needle accuracy at 256")  # type: ignore[arg-type]
    assert interval == pytest.approx((0.0524, 0.3339), abs=6e-5)


def test_loss_and_perplexity_intervals_from_standard_errors(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"])
    for run, (loss, error) in zip(results["runs"], ((3.0, 0.03), (2.9, 0.04)), strict=True):
        run["perplexity"][0].update(loss=loss, standard_error=error, perplexity=math.exp(loss))
    assert sampling_interval(results, "gla", "gla+ccq", "loss at 256") == pytest.approx(
        (-0.1 - 0.098, -0.1 + 0.098), abs=1e-5
    )
    low, high = sampling_interval(results, "gla", "gla+ccq", "perplexity at 256") or (0.0, 0.0)
    errors = np.array([math.exp(3.0) * 0.03, math.exp(2.9) * 0.04])
    assert (high - low) / 2 == pytest.approx(1.959964 * float(np.linalg.norm(errors)), rel=1e-6)
    results["runs"][1]["perplexity"][0]["standard_error"] = None
    assert sampling_interval(results, "gla", "gla+ccq", "loss at 256") is None


@pytest.mark.parametrize(
    ("metric", "low", "high", "outcome"),
    [
        ("needle accuracy at 256", 0.01, 0.2, "better"),
        ("needle accuracy at 256", -0.2, -0.01, "worse"),
        ("needle accuracy at 256", -0.01, 0.2, "level"),
        ("loss at 256", 0.01, 0.2, "worse"),
        ("loss at 256", -0.2, -0.01, "better"),
        ("needle accuracy at 99", None, None, "unknown"),
    ],
)
def test_outcome_of_a_difference(build_results: Build, metric: str, low: Any, high: Any, outcome: str) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"], seeds=3)
    mean = 0.1 if low is None else (low + high) / 2
    pair = {"backbone": "gla", "arm": "gla+ccq", "metric": metric, "differences": [mean] * 3, "mean": mean}
    results["pairs"] = [{**pair, "standard_deviation": None, "low": low, "high": high}]
    (difference,) = arm_differences(results)
    assert difference.outcome == outcome


def test_a_perplexity_is_not_counted_beside_its_loss(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"], seeds=3)
    loss = next(pair for pair in results["pairs"] if pair["metric"] == "loss at 256")
    results["pairs"] += [{**loss, "metric": "perplexity at 256"}, {**loss, "metric": "perplexity at 9999"}]
    metrics = [difference.metric for difference in arm_differences(results)]
    assert "perplexity at 256" not in metrics and "perplexity at 9999" in metrics


def test_seed_count_is_the_smallest_of_any_arm(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"], seeds=3)
    assert seed_count(results) == 3
    results["runs"] = [run for run in results["runs"] if run["arm"] == "gla" or run["seed"] == 1]
    assert seed_count(results) == 1


def test_words_for_figures() -> None:
    assert (backbone_of("gated-deltanet+ccq"), backbone_of("gla")) == ("gated-deltanet", "gla")
    assert [bytes_text(value) for value in (512, 24576, 3 * 1024**2, 5 * 1024**3)] == [
        "512 B",
        "24.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert (share_text(0.0625), share_text(1 / 3)) == ("6.25 %", "33.3 %")
    assert difference_text("needle accuracy at 256", -0.0391) == "−3.9 points"
    assert difference_text("loss at 256", 0.0121) == "+0.012 nats"
    assert difference_text("loss at 256", -0.0001) == "0.000 nats"
    assert summarize([None, None]) is None
