"""Quality against cost: which score, which cost, and what stays unknown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.report.built_runs import benchmark, decoding, evaluation, runs, times, training

from ccq.report.costs import CostPoint, cost_points, cost_table
from ccq.report.runs import Comparison

PIQA, BOOLQ, WIKITEXT = ("piqa", "acc"), ("boolq", "acc"), ("wikitext", "word_perplexity")


def by_label(points: list[CostPoint], group: str) -> dict[str, CostPoint]:
    return {point.subject.label: point for point in points if point.group == group}


def test_a_score_is_the_mean_over_the_tasks_that_all_have() -> None:
    given = runs(
        evaluation("gla", "language", {PIQA: [1, 0], BOOLQ: [1, 1], WIKITEXT: [20.0, 21.0]}, state=100),
        evaluation("gla+ccq", "language", {PIQA: [1, 1], WIKITEXT: [20.0, 21.0]}, state=150),
        evaluation("gla+ccq", "language", {PIQA: [0, 0]}, read="off", state=100),
    )
    points = by_label(cost_points(given), "language")
    assert {label: (p.role, p.score.mean, p.state_bytes) for label, p in points.items()} == {
        "gla": ("backbone", 50.0, 100),
        "gla+ccq": ("correction on", 100.0, 150),
        "gla+ccq, correction off": ("correction off", 0.0, 100),
    }


def test_text_is_compared_by_loss_over_seeds() -> None:
    given = [
        evaluation(
            "gla",
            "extrapolation",
            {("a/64", "token_perplexity"): [9.0, 9.0], ("a/64", "loss"): [loss, loss + 0.2]},
            seed=seed,
            state=1,
        )
        for seed, loss in enumerate((2.0, 2.2))
    ]
    (point,) = cost_points(runs(*given))
    assert point.score.values == pytest.approx((2.1, 2.3))
    assert point.score.interval == pytest.approx((2.2 - 12.7062 * 0.1, 2.2 + 12.7062 * 0.1), rel=1e-4)
    assert point.score.interval_from == "seeds"


def test_speed_is_that_of_the_training_also_with_the_correction_off() -> None:
    values = {BOOLQ: [1, 0]}
    given = [
        evaluation("gla", "language", values),
        evaluation("gla+ccq", "language", values),
        evaluation("gla+ccq", "language", values, read="off"),
    ]
    trainings = training("gla", 0, 100.0), training("gla+ccq", 0, 80.0), training("gla+ccq", 1, 160.0, processes=2)
    points = by_label(cost_points(runs(*given, *trainings)), "language")
    assert [p.training_tokens_per_second for p in points.values()] == [100.0, 80.0, 80.0]
    assert all(p.decode_tokens_per_second is None for p in points.values())
    row = {"backbone": "gla", "model": "gla", "peak_bytes": 1, "step": times(8000.0), "prefill": None}
    measured = by_label(cost_points(runs(*given, *trainings, benchmark([row]))), "language")
    assert measured["gla"].training_tokens_per_second == 4096.0


def test_decoding_is_replayed_where_all_arms_were() -> None:
    values = {BOOLQ: [1, 0]}
    given = [
        evaluation("gla", "language", values),
        evaluation("gla+ccq", "language", values),
        evaluation("gla+ccq", "language", values, read="off"),
        evaluation("gla", "language", values, scale="tiny"),
    ]

    def speeds(*rows: tuple[str, float, float | None]) -> list[float | None]:
        points = cost_points(runs(*given, decoding(*rows)))
        return [point.decode_tokens_per_second for point in points]

    # 8 rows in 20 and 25, or in 1.6 and 2 milliseconds; nobody measured the correction off, or the small model.
    assert speeds(("gla", 20.0, 1.6), ("gla+ccq", 25.0, 2.0)) == [5000.0, 4000.0]
    assert speeds(("gla", 20.0, 1.6), ("gla+ccq", 25.0, None)) == [400.0, 320.0]
    assert speeds(("gla+ccq", 25.0, 2.0)) == [4000.0]
    (point,) = cost_points(runs(given[3], decoding(("gla", 4.0, None), scale="tiny")))
    table = cost_table([point])
    assert table is not None and table.rows[0].cells[-1].text == "2,000"


def test_without_a_cost_there_is_no_point() -> None:
    given = runs(evaluation("gla", "language", {BOOLQ: [1, 0]}))
    assert cost_points(given) == [] and cost_table([]) is None


def test_comparisons_give_accuracy_state_and_speeds(build_results: Callable[..., Any]) -> None:
    results = build_results(arms=["gla", "gla+ccq"], seeds=1)
    base, mine = results["runs"]
    for entry, correct in zip(mine["needle_by_length"], (100, 50, 30), strict=True):
        entry.update(asked=200, correct=correct, accuracy=correct / 200)
    for entry, correct in zip(mine["needle_read_off"], (80, 40, 30), strict=True):
        entry.update(asked=200, correct=correct, accuracy=correct / 200)
    points = by_label(cost_points(runs(comparisons=[Comparison(Path("r.json"), results)])), "comparison")
    on, off = points["gla+ccq"], points["gla+ccq, correction off"]
    assert (on.score.mean, off.score.mean) == pytest.approx((30.0, 25.0))
    assert on.score.interval is not None and on.score.interval.low < 30 < on.score.interval.high
    assert (on.state_bytes, off.state_bytes) == (mine["state_bytes"], base["state_bytes"])
    assert on.decode_tokens_per_second == mine["decode"]["tokens_per_second"]
    assert off.decode_tokens_per_second is None
    assert off.training_tokens_per_second == mine["training"]["tokens_per_second"]
    table = cost_table(list(points.values()))
    assert table is not None
    row = next(row for row in table.rows if row.label == "gla+ccq, correction off")
    assert [cell.text for cell in row.cells][1::3] == ["25.0", "–"]
