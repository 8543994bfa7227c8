"""The page says what the results say, no more, and needs nothing but itself."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.report.page import Page

from ccq.report.html import ONE_SEED, findings, headline, losses, render_report, write_report

Build = Callable[..., dict[str, Any]]


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words and tables: drawing takes most of a report's time."""
    monkeypatch.setattr("ccq.report.html.all_figures", lambda results: [])


def _page(results: Any) -> Page:
    return Page(render_report(results))


@pytest.mark.usefixtures("no_figures")
def test_numbers_of_the_table_are_those_of_the_results(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"])
    run = results["runs"][1]
    run["needle_by_length"][0].update(accuracy=0.898, low=0.855, high=0.93)
    run["needle_read_off"][0].update(accuracy=0.777, low=0.7, high=0.8)
    run["perplexity"][0].update(loss=3.21, perplexity=24.78)
    rows = _page(results).rows
    needle = next(row for row in rows if row[0] == "gla+ccq" and "89.8 85.5–93.0" in row)
    assert needle[-2:] == ["0.070", "1.30 %"]
    assert any(row[0] == "correction off" and row[1] == "77.7 70.0–80.0" for row in rows)
    assert any(row[0] == "gla+ccq" and row[1] == "3.210" and row[4] == "24.78" for row in rows)
    assert any(row[0] == "gla" and row[-2:] == ["–", "–"] for row in rows)


@pytest.mark.usefixtures("no_figures")
def test_an_arm_has_the_line_and_the_marker_of_the_figures_beside_its_name(build_results: Build) -> None:
    def swatches(arms: list[str]) -> list[str]:
        names = re.search(r'<ul class="arms">(.*?)</ul>', render_report(build_results(arms=arms)), re.DOTALL)  # type: ignore[arg-type]
        assert names is not None
        return re.findall(r"<svg.*?</svg>", names[1])

    line, dashed = swatches(["gated-deltanet+ccq", "gated-deltanet"])
    assert 'stroke="#a34a00"' in line and "dasharray" not in line and 'fill="#a34a00"' in line
    assert 'stroke="#eba45c"' in dashed and 'stroke-dasharray="8 4"' in dashed and 'fill="#ffffff"' in dashed
    # A square of 9 around the middle of the line.
    corners = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", line)][-4:]
    assert set(corners) == {(12.5, 2.5), (12.5, 11.5), (21.5, 2.5), (21.5, 11.5)}
    arms = ["gla", "gla+ccq", *(f"gla+ccq-form{number}" for number in range(17))]
    assert len(set(swatches(arms))) == len(arms)


@pytest.mark.usefixtures("no_figures")
def test_several_seeds_show_mean_and_deviation(build_results: Build) -> None:
    results: Any = build_results(arms=["gla"], seeds=3)
    for run, loss in zip(results["runs"], (3.0, 3.1, 3.5), strict=True):
        run["perplexity"][0]["loss"] = loss
    # mean 3.2, deviation sqrt((0.04 + 0.01 + 0.09) / 2) = 0.2646
    assert any(row[0] == "gla" and row[1] == "3.200 ± 0.265" for row in _page(results).rows)


@pytest.mark.usefixtures("no_figures")
def test_one_seed_is_said_to_rank_nothing_and_three_are_not(build_results: Build) -> None:
    one, three = _page(build_results(seeds=1)).text, _page(build_results(seeds=3)).text
    assert ONE_SEED in one and "not which arm is better" in one and "1 seed" in one
    assert ONE_SEED not in three and "another seed" not in three and "3 seeds" in three


def test_headline_counts_the_differences_beyond_their_interval(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"], seeds=3)
    bounds = [(0.01, 0.1), (0.02, 0.3), (-0.3, -0.1), (-0.1, 0.1), (-0.2, 0.3), (-0.1, 0.2)]
    for pair, (low, high) in zip(results["pairs"], bounds, strict=True):
        pair.update(low=low, high=high, mean=(low + high) / 2)
    # In order: accuracy better, loss worse, accuracy worse, then three that contain zero.
    assert headline(results) == (
        "3 seeds; of 6 differences between an arm and its backbone, 3 are larger than the 95 % interval: "
        "1 in favour of the read step, 2 against it."
    )
    kinds = {finding.kind: finding.text for finding in findings(results) if finding.kind != "note"}
    assert (
        kinds["better"] == "gla+ccq: better than gla by more than the interval in needle accuracy at 256 (+5.5 points)."
    )
    assert "loss at 256 (+0.160 nats)" in kinds["worse"] and "needle accuracy at 512 (−20.0 points)" in kinds["worse"]
    assert (
        kinds["level"]
        == "gla+ccq: no difference from gla beyond the interval in loss at 512 and 1024; needle accuracy at 1024."
    )
    assert any("6 comparisons at 95 %" in finding.text for finding in findings(results))
    for pair in results["pairs"]:
        pair.update(low=-1.0, high=1.0)
    assert "none is larger than its 95 % interval, so these runs settle nothing" in headline(results)


def test_arms_that_only_guess_are_named(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"])
    for run, low in zip(results["runs"], (0.24, 0.26), strict=True):
        for entry in run["needle_by_length"]:
            entry["low"] = 0.9
        run["needle_by_length"][2]["low"] = low
    (guess,) = [finding.text for finding in findings(results) if "guessing" in finding.text]
    assert "at 1024 tokens gla. " in guess and "256" not in guess
    results["runs"][0]["needle_by_length"][2]["low"] = 0.26
    (guess,) = [finding.text for finding in findings(results) if "guessing" in finding.text]
    assert guess.startswith("Every arm answers needles better than guessing")


def test_switching_the_correction_off_is_reported_at_its_largest(build_results: Build) -> None:
    results: Any = build_results(arms=["gla+ccq"])
    for on, off, pair in zip(
        results["runs"][0]["needle_by_length"],
        results["runs"][0]["needle_read_off"],
        ((0.9, 0.88), (0.5, 0.55), (0.3, 0.31)),
        strict=True,
    ):
        on["accuracy"], off["accuracy"] = pair
    assert any(
        "by 5.0 points at most (at 512 tokens: 50.0 % on, 55.0 % off)" in finding.text for finding in findings(results)
    )


def test_where_the_read_step_loses_is_listed_with_its_costs(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"], seeds=3)
    for pair in results["pairs"]:
        pair.update(mean=0.02, low=-1.0, high=1.0)  # accuracy ahead, loss behind, none beyond its interval
    for run in results["runs"]:
        run["training"]["tokens_per_second"] = 1000.0 if run["arm"] == "gla" else 840.0
        run["decode"]["tokens_per_second"] = 100.0 if run["arm"] == "gla" else 65.0
    assert losses(results) == [
        "gla+ccq against gla: loss at 256 (+0.020 nats), 512 (+0.020 nats) and 1024 (+0.020 nats).",
        "gla+ccq against gla: 16 % slower training, 35 % slower decoding and 50 % more state.",
    ]


def test_hostile_strings_are_escaped(build_results: Build) -> None:
    hostile = "<script>alert('x')</script><img src=http://example.org/x.png onerror=alert(1)>\"&"
    results: Any = build_results(arms=["gla", "gla+ccq"])
    results["settings"].update({"note": hostile, hostile: 1})
    results["name"] = results["corpus"]["source"] = results["needle_task"]["description"] = hostile
    arm = "gla+<b onclick=x>$\\frac{1}$"
    for run in results["runs"][1:]:
        run["arm"] = arm
    for pair in results["pairs"]:
        pair["arm"] = arm
    page = _page(results)
    assert "script" not in page.tags and "img" not in page.tags
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert page.text.count(hostile) >= 4 and arm in page.text


def test_the_page_refers_to_nothing_outside(build_results: Build) -> None:
    page = _page(build_results(arms=["gla", "gla+ccq"], seeds=2))
    assert not page.loaders
    assert all(value.startswith("#") for _, value in page.targets), page.targets
    for _, _, value in page.attributes:
        if "url(" in value:
            assert value.count("url(") == value.count("url(#")
    assert "url(" not in page.styles and "@import" not in page.styles
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert "prefers-color-scheme: dark" in page.styles


@pytest.mark.usefixtures("no_figures")
def test_what_was_run_is_there(build_results: Build) -> None:
    text = _page(build_results(arms=["gla", "gla+ccq"], seeds=2)).text
    for part in (
        "2.13.0+cpu",
        "Python 3.11.7 standard library",
        "ab" * 32,
        "model: hidden size",
        "1,000 steps, 2,048,000 tokens",
    ):
        assert part in text
    assert "6.25 % for a guess among all 16 values, 25 % for a guess among the 4 values" in text


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("arms", [[], ["gla"], ["gla+ccq"]])
def test_without_a_pair_nothing_is_compared(build_results: Build, arms: list[str]) -> None:
    results: Any = build_results(arms=arms)
    text = _page(results).text
    assert ("there is nothing to compare" in text) == bool(arms)
    assert ("nothing to report yet" in text) == (not arms)
    assert "better than" not in headline(results)


@pytest.mark.usefixtures("no_figures")
def test_empty_measurements_are_left_out(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"])
    for run in results["runs"]:
        run.update(needle=[], needle_by_length=[], needle_read_off=None, perplexity=[], gate=None, correction=None)
        run["training"]["curve"] = []
    results["pairs"] = []
    text = _page(results).text
    assert "Size and speed" in text and "None" not in text and "nan" not in text


def test_written_file_is_the_rendered_page_every_time(build_results: Build, tmp_path: Path) -> None:
    results: Any = build_results(arms=["gla+ccq"])
    write_report(results, tmp_path / "report.html")
    write_report(copy.deepcopy(results), tmp_path / "again.html")
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "again.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.html", "report.html"]
