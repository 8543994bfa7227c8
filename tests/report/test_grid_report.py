"""The report of a grid, from a hand-written one: what its sentences say, what its tables hold, a page that is whole."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ccq.report.grid import (
    as_difference,
    findings,
    grid_figure_png,
    grid_figures,
    grid_table,
    grid_tables,
    headline,
    interval_of,
    reading_notes,
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
            {"reading": name, "gate": 0.25 if name.startswith("put into") else None, "scores": scores(values)}
            for name, values in readings.items()
        ],
    }


def _difference(
    kind: str, first: str, second: str, means: tuple[float, float], seeds: int, half: float, arm: str = "gla+ccq"
) -> list[Any]:
    return [
        {
            "task": "recall",
            "setting": setting,
            "metric": "accuracy",
            "kind": kind,
            "arm": arm,
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
    readings = {"off": (0.7, 0.3), "put into gla": (0.5, 0.1)} if interventions else {}
    runs = []
    for seed in range(seeds):
        runs += [_run("gla", seed, (0.6, 0.05), {}), _run("gla+ccq", seed, (0.9, 0.04), readings)]
    differences = _difference("arm", "gla+ccq", "gla", (0.3, -0.01), seeds, half)
    if interventions:
        differences += _difference("reading", "gla+ccq, on", "gla+ccq, off", (0.2, -0.26), seeds, half)
        differences += _difference("reading", "gla, ccq put in", "gla", (-0.1, 0.05), seeds, half)
        training = "training and normalisation"
        differences += _difference(training, "gla+ccq, off", "gla", (0.1, 0.25), seeds, half)
        differences += _difference(training, "gla+ccq, on", "gla, ccq put in", (0.4, -0.06), seeds, half)
        names = "gla+ccq: on − off", "gla: ccq put in − as trained"
        differences += _difference("interaction", *names, (0.3, -0.31), seeds, half)
    return {
        "schema": "ccq-results/1",
        "kind": "grid",
        "name": "grid <1>",
        "created": "2026-01-02T03:04:05+00:00",
        "settings": {
            "arms": list(ARMS),
            "seeds": seeds,
            "tasks": {"recall": {"pairs": 8}},
            "interventions": ["off"] if interventions else [],
        },
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
    # With several seeds, one of whose intervals is missing, the other says nothing of what is missing.
    for missing in ("over_seeds", "over_prompts"):
        assert interval_of({**difference, missing: None}) is None
        assert as_difference({**difference, missing: None}).outcome == "unknown"
    assert as_difference(difference).outcome == "better"


def test_seeds_that_agree_call_nothing() -> None:
    given = results()
    for each in given["differences"]:
        each["over_seeds"] = None
    assert "none leaves zero out of both its intervals" in headline(given)
    kinds = [finding.kind for finding in findings(given)]
    assert set(kinds) == {"level", "unknown", "note"}
    page = render_grid_report(given)
    assert page.count("not called</td>") == 10, "all but the two interactions, which take no sides"
    assert "first better" not in page and "first worse" not in page


def test_one_seed_takes_no_sides() -> None:
    given = results(1)
    unclear = given["differences"][2:4]
    for each in unclear:
        each["over_prompts"] = [-0.5, 0.5]
    found = findings(given)
    assert {finding.kind for finding in found} == {"note"}
    assert "+30.0 points (accuracy, pairs 8); the other not beyond the interval over prompts." in found[0].text
    page = render_grid_report(given)
    assert not re.search(r'class="(mark )?(better|worse)"', page)
    # How many comparisons there are does not depend on the seeds.
    many = "12 comparisons at 95 %"
    assert [sum(many in finding.text for finding in findings(results(seeds))) for seeds in (1, 2)] == [1, 1]


def test_every_read_step_that_is_put_in_has_a_finding_of_its_own() -> None:
    given = results()
    for number, read in enumerate(("exact", "random")):
        gate = 0.1 * (number + 1)
        for run in [each for each in given["runs"] if each["arm"] == "gla+ccq"]:
            readings = [{**reading, "gate": reading["gate"] and gate} for reading in run["readings"]]
            given["runs"].append({**run, "arm": f"gla+{read}", "readings": readings})
        names = f"gla, {read} put in", "gla"
        given["differences"] += _difference("reading", *names, (0.5, 0.6), 2, 0.01, f"gla+{read}")
    texts = [finding.text for finding in findings(given)]
    start = "against gla, one model read in two ways: of 2 differences beyond the intervals"
    assert [text.partition(" against")[0] for text in texts if start in text] == [
        "gla, ccq put in at λ 0.25",
        "gla, exact put in at λ 0.1",
        "gla, random put in at λ 0.2",
    ]
    page = render_grid_report(given)
    assert "gla, exact put in at λ 0.1 − gla<small>one model read in two ways</small>" in page
    assert "(gla+ccq: on − off) − (gla: ccq put in − as trained)<small>" in page


def test_lambdas_that_differ_are_a_range() -> None:
    given = results()
    for run, gate in zip((r for r in given["runs"] if r["readings"]), (0.01234, 0.5), strict=True):
        for reading in run["readings"]:
            reading["gate"] = gate if reading["gate"] else None
    (table,) = grid_tables(given)
    assert table.rows[3].label == "  gla, ccq put in at λ 0.012 to 0.5"


def test_what_is_not_clear_is_one_line() -> None:
    given = results(half=0.4)
    texts = [finding.text for finding in findings(given) if finding.kind == "level"]
    assert texts == ["In 6 comparisons nothing is beyond the intervals (12 differences; the tables below have them)."]
    given = results()
    for each in given["differences"]:
        if each["kind"] != "arm":
            each["over_seeds"] = [-1.0, 1.0]
    found = findings(given)
    assert [finding.kind for finding in found if "recall: gla+ccq against" in finding.text] == ["better"]
    assert sum("In 5 other comparisons nothing" in finding.text for finding in found) == 1


def test_small_differences_keep_two_figures() -> None:
    given = results()
    for each in given["differences"]:
        each.update(metric="loss", by_seed=[-4.2e-4] * 2, mean=-4.2e-4)
        each.update(over_seeds=[-6.3e-4, -2.1e-4], over_prompts=[-5e-4, -0.3e-4])
    # One that ends close to zero, and one within its intervals.
    given["differences"][2].update(over_prompts=[-5e-4, -0.7e-6])
    given["differences"][3].update(over_seeds=[-6.3e-4, 2.1e-4], over_prompts=[-0.02, 0.01])
    for run in given["runs"]:
        for scores in [run["scores"], *(reading["scores"] for reading in run["readings"])]:
            for score in scores:
                score["metric"] = "loss"
    texts = [finding.text for finding in findings(given)]
    assert texts[0] == (
        "recall: gla+ccq against gla: −0.00042 nats (loss, pairs 8) and −0.00042 nats (loss, pairs 16, length 96)."
    )
    assert any("2 in favour of the first (loss −0.00042 to −0.00042 nats)" in text for text in texts)
    (table,) = two_by_two_tables(given)
    cells = [(row.cells[7].main, row.cells[7].note) for row in table.rows]
    assert cells == [("−0.0004200", "−0.0006300 to −0.0000007"), ("0.000", "−0.020 to +0.010")]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(grid_table(given))
    assert "−0.00063 to −0.00021" in console.export_text()


def test_the_page_says_what_does_not_apply() -> None:
    assert reading_notes(results(interventions=False)) == []
    given = results()
    given["settings"]["interventions"] = ["off", "gate=shuffled,seed=0"]
    (run,) = [each for each in given["runs"] if (each["arm"], each["seed"]) == ("gla+ccq", 0)]
    off = {**run, "readings": [reading for reading in run["readings"] if reading["reading"] == "off"]}
    given["runs"] += [{**off, "arm": "gla+mesa"}, {**off, "arm": "mamba2+ccq"}]
    given["runs"].append({**off, "arm": "gla+normalize", "readings": []})
    notes = reading_notes(given)
    assert notes == [
        "gate=shuffled,seed=0 does not apply to gla+ccq, gla+mesa and mamba2+ccq.",
        "gla+normalize: read as trained alone, because there is no correction to change.",
        "mamba2+ccq: without the 2 × 2, because the backbone is not among the arms.",
        "gla+mesa: without the 2 × 2, because such a read step has parameters other than a gate, which no other model "
        "has learned.",
        "gla+ccq: with unit queries, while gla reads with raw ones, so that what training changes contains the "
        "normalisation of the queries; an arm gla+normalize in the grid takes it out.",
    ]
    page = render_grid_report(given)
    assert all(f"<li>{note}</li>".replace(" %", "\u00a0%") in page for note in notes)


def test_a_backbone_with_unit_queries_is_a_corner_of_its_own() -> None:
    given = results()
    unit = "gla+normalize"
    given["runs"] += [{**run, "arm": unit} for run in given["runs"] if run["arm"] == "gla"]
    for run in given["runs"]:
        for reading in run["readings"]:
            reading["reading"] = reading["reading"].replace("into gla", f"into {unit}")
    for each in given["differences"]:
        if each["kind"] != "arm":
            each["kind"] = each["kind"].partition(" and ")[0]
            each["first"] = each["first"].replace("gla, ccq", f"{unit}, ccq").replace("gla: ccq", f"{unit}: ccq")
            each["second"] = each["second"].replace("gla, ccq", f"{unit}, ccq").replace("gla: ccq", f"{unit}: ccq")
            each["second"] = unit if each["second"] == "gla" else each["second"]
    given["differences"] += _difference("control", "gla+ccq", unit, (0.3, 0.2), 2, 0.01)
    (table,) = two_by_two_tables(given)
    assert [cell.main for cell in table.rows[0].cells[4:]] == ["+10.0", "+40.0", "−10.0", "+20.0", "+30.0"]
    assert table.title == f"recall, gla+ccq and {unit}: answers that are right, %"
    assert not any("normalisation" in note for note in reading_notes(given))
    assert any(finding.text.startswith(f"recall: gla+ccq against {unit}: +30.0") for finding in findings(given))
    # The headline is of arms and their backbones.
    assert "of 2 differences between an arm and its backbone" in headline(given)
    assert "two-by-two" in [figure.key for figure in grid_figures(given)]


def test_findings_say_what_is_clear_and_who_is_guessing() -> None:
    texts = [finding.text for finding in findings(results())]
    assert (
        texts[0] == "recall: gla+ccq against gla: +30.0 points (accuracy, pairs 8); the other not beyond the intervals."
    )
    assert (
        "gla+ccq, on against gla+ccq, off, one model read in two ways: of 2 differences beyond the intervals 1 in "
        "favour of the first (accuracy +20.0 points) and 1 against it (accuracy −26.0 points)." in texts
    )
    (guessing,) = (text for text in texts if "guessing" in text)
    assert "every arm with pairs 16, length 96 (8 %)" in guessing and "pairs 8 (" not in guessing
    kinds = {finding.text.partition(":")[0]: finding.kind for finding in findings(results())}
    assert kinds["recall"] in ("better", "note")


def test_the_table_has_every_way_of_reading() -> None:
    (table,) = grid_tables(results())
    assert [row.label for row in table.rows] == ["gla", "gla+ccq", "  gla+ccq, off", "  gla, ccq put in at λ 0.25"]
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
    assert table.title == (
        "recall, gla+ccq and gla: answers that are right, %; training is with normalisation of the queries, too"
    )
    assert two_by_two_tables(results(interventions=False)) == []


def test_the_terminal_shows_differences_with_both_intervals() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(grid_table(results()))
    text = console.export_text()
    assert re.search(r"recall, pairs 8\s+gla\+ccq\s+\+30.0 points\s+\+29.0 to \+31.0\s+− gla\s+\+28.0 to \+33.0", text)
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
