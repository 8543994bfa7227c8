"""The report of a grid, from a hand-written one: what its sentences say, what its tables hold, a page that is whole."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ccq.report.grid import (
    findings,
    grid_figure_png,
    grid_figures,
    grid_table,
    grid_tables,
    headline,
    interval_of,
    render_grid_report,
    two_by_two_tables,
)

ARMS = ("gla", "gla+ccq")
SETTINGS = ("pairs 8", "pairs 16, length 96")


def _score(setting: str, mean: float) -> dict[str, Any]:
    low, high = max(mean - 0.05, 0.0), min(mean + 0.05, 1.0)
    return {"setting": setting, "metric": "accuracy", "prompts": 100, "mean": mean, "low": low, "high": high}


def _run(arm: str, seed: int, means: tuple[float, float], readings: dict[str, tuple[float, float]]) -> dict[str, Any]:
    def scores(values: tuple[float, float]) -> list[dict[str, Any]]:
        return [_score(setting, value + 0.01 * seed) for setting, value in zip(SETTINGS, values, strict=True)]

    curve = [{"step": s, "tokens": 100 * s, "length": 64, "loss": 3.0 / s, "gate": None} for s in (1, 2, 3)]
    return {
        "task": "recall",
        "arm": arm,
        "seed": seed,
        "parameters": 1000,
        "read_parameters": 0,
        "state_bytes": 10,
        "steps": 3,
        "tokens": 300,
        "seconds": 1.5,
        "curve": curve,
        "gate": 0.25 if readings else None,
        "correction": 0.02 if readings else None,
        "scores": scores(means),
        "readings": [
            {"reading": name, "gate": 0.25 if name == "put in" else None, "scores": scores(values)}
            for name, values in readings.items()
        ],
    }


def _difference(kind: str, first: str, second: str, means: tuple[float, float], seeds: int, half: float) -> list[Any]:
    return [
        {
            "task": "recall",
            "setting": setting,
            "metric": "accuracy",
            "kind": kind,
            "arm": "gla+ccq",
            "first": first,
            "second": second,
            "by_seed": [mean] * seeds,
            "mean": mean,
            "over_seeds": [mean - half, mean + half] if seeds > 1 else None,
            "over_prompts": [mean - 0.02, mean + 0.03],
        }
        for setting, mean in zip(SETTINGS, means, strict=True)
    ]


def results(seeds: int = 2, *, half: float = 0.01, interventions: bool = True) -> Any:
    readings = {"off": (0.7, 0.3), "put in": (0.5, 0.1)} if interventions else {}
    runs = []
    for seed in range(seeds):
        runs += [_run("gla", seed, (0.6, 0.05), {}), _run("gla+ccq", seed, (0.9, 0.04), readings)]
    differences = _difference("arm", "gla+ccq", "gla", (0.3, -0.01), seeds, half)
    if interventions:
        differences += _difference("reading", "gla+ccq, on", "gla+ccq, off", (0.2, -0.26), seeds, half)
        differences += _difference("reading", "gla, read put in", "gla", (-0.1, 0.05), seeds, half)
        differences += _difference("training", "gla+ccq, off", "gla", (0.1, 0.25), seeds, half)
        differences += _difference("training", "gla+ccq, on", "gla, read put in", (0.4, -0.06), seeds, half)
        names = "gla+ccq: on − off", "gla: put in − as trained"
        differences += _difference("interaction", *names, (0.3, -0.31), seeds, half)
    return {
        "schema": "ccq-results/1",
        "kind": "grid",
        "name": "grid <1>",
        "created": "2026-01-02T03:04:05+00:00",
        "settings": {"arms": list(ARMS), "seeds": seeds, "tasks": {"recall": {"pairs": 8}}},
        "environment": {"ccq": "1.2.3", "python": "3.12", "device": "cpu"},
        "tasks": [
            {
                "task": "recall",
                "kind": "recall",
                "description": "Pairs <of> tokens.",
                "settings": list(SETTINGS),
                "chance": [0.15, 0.08],
            }
        ],
        "runs": runs,
        "differences": differences,
    }


def test_the_headline_counts_what_both_intervals_leave_out() -> None:
    # At 16 pairs the difference of -0.01 lies inside of both its intervals.
    assert headline(results()) == (
        "2 seeds; of 2 differences between an arm and its backbone, 1 leaves zero out of both intervals: 1 in favour "
        "of the read step, none against it."
    )
    # The seeds alone take the other one away.
    assert "none leaves zero out of both its intervals" in headline(results(half=0.4))
    assert headline(results(1)).startswith("One seed ranks nothing.")
    assert "nothing to compare" in headline({**results(), "differences": []})


def test_an_interval_spans_both_kinds_of_chance() -> None:
    difference = results(half=0.1)["differences"][0]
    assert interval_of(difference) == pytest.approx((0.2, 0.4))
    assert interval_of(results(1)["differences"][0]) == pytest.approx((0.28, 0.33))
    assert interval_of({**difference, "over_seeds": None, "over_prompts": None}) is None


def test_findings_say_what_is_clear_and_who_is_guessing() -> None:
    texts = [finding.text for finding in findings(results())]
    assert (
        texts[0] == "recall: gla+ccq against gla: +30.0 points (accuracy, pairs 8); the other not beyond the intervals."
    )
    assert (
        "gla+ccq, on against gla+ccq, off, one model read in two ways: of 2 differences 1 beyond the intervals in "
        "favour of the first, 1 against." in texts
    )
    (guessing,) = (text for text in texts if "guessing" in text)
    assert "every arm with pairs 16, length 96 (8 %)" in guessing and "pairs 8 (" not in guessing
    kinds = {finding.text.partition(":")[0]: finding.kind for finding in findings(results())}
    assert kinds["recall"] in ("better", "note")


def test_the_table_has_every_way_of_reading() -> None:
    (table,) = grid_tables(results())
    assert [row.label for row in table.rows] == ["gla", "gla+ccq", "  gla+ccq, off", "  gla, read put in at λ 0.25"]
    assert [cell.main for cell in table.rows[1].cells] == ["90.5", "4.5"]
    assert table.rows[1].cells[0].note == "± 0.7"
    (single,) = grid_tables(results(1, interventions=False))
    assert single.rows[0].cells[0].note == "55.0–65.0"


def test_the_two_by_two_has_its_corners_and_effects() -> None:
    (table,) = two_by_two_tables(results())
    assert [cell.main for cell in table.rows[0].cells] == [
        *("60.5", "50.5", "70.5", "90.5"),
        *("+10.0", "+40.0", "−10.0", "+20.0", "+30.0"),
    ]
    assert [(cell.main, cell.note) for cell in table.header[1:]] == [
        ("read off", "trained without"),
        ("read on", "trained without"),
        ("read off", "trained with"),
        ("read on", "trained with"),
        ("training", "read off"),
        ("training", "read on"),
        ("reading", "trained without"),
        ("reading", "trained with"),
        ("interaction", ""),
    ]
    assert two_by_two_tables(results(interventions=False)) == []


def test_the_terminal_shows_differences_with_both_intervals() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(grid_table(results()))
    text = console.export_text()
    assert re.search(r"recall, pairs 8\s+gla\+ccq\s+\+30.0 points\s+\+29.0 to \+31.0\s+\+28.0 to \+33.0", text)
    console.print(grid_table(results(1)))
    assert "One seed ranks nothing." in console.export_text()


def test_the_page_is_whole_and_escaped() -> None:
    page = render_grid_report(results())
    assert page == render_grid_report(results())
    assert "grid &lt;1&gt;" in page and "Pairs &lt;of&gt; tokens." in page
    assert "<script" not in page and "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    keys = [figure.key for figure in grid_figures(results())]
    assert keys == ["differences", "two-by-two", "task-0"]
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert [figure.key for figure in grid_figures(results(1, interventions=False))] == ["differences", "task-0"]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"decay_gate_bias": True}, "It decays here"),
        ({"decay_gate_bias": False}, "It does not decay here"),
        ({}, "Where it decays"),
    ],
)
def test_the_gate_is_drawn_with_what_decay_alone_would_do(optimizer: dict[str, bool], words: str) -> None:
    given = results()
    given["settings"]["optimizer"] = optimizer
    for run in given["runs"]:
        if run["arm"] == "gla+ccq":
            run["curve"] = [
                {**point, "gate": 0.1 * point["step"], "gate_by_decay_alone": 0.01 * point["step"]}
                for point in run["curve"]
            ]
    (figure,) = (each for each in grid_figures(given) if each.key == "gate")
    (panel,) = figure.panels
    assert re.findall(r">([^<>]*)</text>", panel).count("decay alone") == 1
    assert words in figure.caption
    for run in given["runs"]:
        for point in run["curve"]:
            point.pop("gate_by_decay_alone", None)  # as files were before it was recorded
    (figure,) = (each for each in grid_figures(given) if each.key == "gate")
    assert "decay" not in figure.caption and "decay alone" not in figure.panels[0]


def test_the_figure_is_a_picture(tmp_path: Path) -> None:
    given = results()
    given["tasks"] = [{**given["tasks"][0], "task": name} for name in ("recall", "b", "c", "d")]
    given["runs"] = [{**run, "task": task["task"]} for task in given["tasks"] for run in given["runs"]]
    grid_figure_png(given, tmp_path / "figure.png")
    content = (tmp_path / "figure.png").read_bytes()
    # Four tasks: two rows of three, 4.8 inches wide each at 120 dots an inch.
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (1728, 888)
