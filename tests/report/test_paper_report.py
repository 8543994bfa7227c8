"""`ccq report` as users call it: the files, what they say, and that the page needs nothing but itself."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tests.report.built_runs import benchmark, evaluation, runs, training
from tests.report.page import Page

from ccq.cli import main
from ccq.evals.results import read_results
from ccq.report.costs import cost_points
from ccq.report.differences import paired_differences
from ccq.report.figures import GatePoint
from ccq.report.paper_figures import ReportFigure, report_figures
from ccq.report.paper_report import report_findings, write_paper_report
from ccq.report.paper_tables import paper_tables

HOSTILE = "<script>alert('x')</script>|<img src=x onerror=alert(1)>`*\"&"
WIKITEXT, BOOLQ = ("wikitext", "word_perplexity"), ("boolq", "acc")
S1 = ("niah_single_1/4096", "accuracy")


@pytest.fixture(scope="module")
def report(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "out"
    folders = [measured / "results", *sorted((measured / "runs").iterdir())]
    assert main(["report", *map(str, folders), "--out", str(out)]) == 0
    return out


def test_every_table_and_figure_has_its_files(report: Path) -> None:
    assert sorted(path.name for path in report.iterdir()) == [
        "differences.csv",
        "efficiency.csv",
        "efficiency.png",
        "efficiency.svg",
        "extrapolation-1-layer-of-64.png",
        "extrapolation-1-layer-of-64.svg",
        "extrapolation-1.3B.png",
        "extrapolation-1.3B.svg",
        "extrapolation-500M.png",
        "extrapolation-500M.svg",
        "gate.png",
        "gate.svg",
        "quality-cost.csv",
        "quality-cost.png",
        "quality-cost.svg",
        "report.html",
        "report.md",
        "table-2.csv",
        "trainings.csv",
    ]
    for path in report.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for path in report.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_the_gate_during_training_stands_beside_what_decay_alone_would_do(report: Path) -> None:
    words = {"".join(element.itertext()).strip() for element in ElementTree.parse(report / "gate.svg").iter()}
    assert {"decay alone", "gla+ccq"} <= words and "gla" not in words
    assert "It does not decay here" in (report / "report.md").read_text()


def test_page_markdown_and_csv_have_the_figures_of_the_results(report: Path, measured: Path) -> None:
    values = []
    for seed in (0, 1):
        file = read_results(measured / "results" / f"language-gla+ccq-{seed}.json", "eval")
        values.append(100 * file["tasks"][0]["scores"][0]["value"])
    mean = sum(values) / 2
    page = Page((report / "report.html").read_text())
    row = next(row for row in page.rows if row[0].startswith("gla+ccq here, 2 seeds") and len(row) == 13)
    assert row[11].split()[0] == f"{mean:.2f}"
    assert row[12] == "–", "two tasks make no mean of seven"
    lines = list(csv.DictReader((report / "table-2.csv").read_text().splitlines()))
    mine = next(line for line in lines if line["model"] == "gla+ccq" and line["column"] == "BoolQ")
    assert float(mine["value"]) == pytest.approx(mean)
    markdown = (report / "report.md").read_text()
    assert re.search(rf"\| 1 layer of 64 \| gla\+ccq \| here, 2 seeds \|.*\| {mean:.2f}(<br>|[ |])", markdown)
    assert "| 500M | Transformer | paper | 331.69<sup>1</sup> |" in markdown
    assert "arXiv:2606.01294" in markdown and "arXiv:2606.01294" in page.text


def test_markdown_tables_are_whole_and_figures_are_there(report: Path) -> None:
    markdown = (report / "report.md").read_text()
    width = None
    for line in markdown.splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        assert width in (None, cells), line
        width = cells
    linked = re.findall(r"\]\(([^)]+)\)", markdown)
    assert linked and all((report / name).is_file() for name in linked)


def test_what_is_missing_or_not_a_number_is_nowhere_written(report: Path) -> None:
    for name in ("report.html", "report.md"):
        text = Page((report / name).read_text()).text if name.endswith("html") else (report / name).read_text()
        assert not re.search(r"\b(None|nan|inf)\b", text)


def test_the_page_refers_to_nothing_outside_but_the_paper(report: Path) -> None:
    page = Page((report / "report.html").read_text())
    assert not page.loaders
    for tag, value in page.targets:
        assert value.startswith("#") or (tag, value) == ("a", "https://arxiv.org/abs/2606.01294")
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_what_intervals_cover_is_said(report: Path) -> None:
    text = Page((report / "report.html").read_text()).text
    for words in (
        "Over seeds: between trainings of one seed",
        "Over samples: between answers to one and the same question",
        "of twenty intervals one misses by chance",
        "counts as better or worse where zero is outside of both intervals, or of the one there is",
        "gla+ccq against gla+ccq, correction off (1 layer of 64)",
        "One training run of each model, no seeds and no error bars",
        "published reading note of v2",
    ):
        assert words in text, words
    for name in ("language-gla+ccq-1-off.json", "runs/gla-0"):
        assert name in text


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    given = runs(
        evaluation("gla", "language", {WIKITEXT: [20.0, 21.0]}, state=1),
        evaluation("gla+ccq", "language", {WIKITEXT: [19.0, 21.0]}, state=2),
    )
    for name in ("a", "b"):
        write_paper_report(given, tmp_path / name)
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert set(first) == {"differences.csv", "report.html", "report.md", "table-2.csv"}


def test_findings_say_which_intervals_they_are_beyond() -> None:
    def text(*seeds: int) -> str:
        given = runs(
            *(evaluation("gla", "needle", {S1: [0] * 9 + [seed]}, seed=seed) for seed in seeds),
            *(evaluation("gla+ccq", "needle", {S1: [1] * 9 + [seed]}, seed=seed) for seed in seeds),
        )
        return report_findings(given, paired_differences(given))[0].text

    assert text(0).endswith("1 score: 1 better and 0 worse beyond the interval over samples, 0 not beyond.")
    # Both seeds differ by nine answers of ten, so their spread says nothing.
    assert text(0, 1).endswith(
        "0 better and 0 worse beyond the interval over samples, 0 not beyond, 1 not called for want of an interval."
    )
    given = runs(
        *(evaluation("gla", "needle", {S1: [0] * 10}, seed=seed) for seed in (0, 1)),
        *(evaluation("gla+ccq", "needle", {S1: [1] * (8 + seed) + [0] * (2 - seed)}, seed=seed) for seed in (0, 1)),
    )
    # 80 and 90 points: 85 -+ 12.706 * 7.071 / sqrt(2) = 21.5 to 148.5.
    found = report_findings(given, paired_differences(given))[0]
    assert (found.kind, found.text) == (
        "better",
        "gla+ccq against gla (1.3B), 1 score: 1 better and 0 worse beyond both intervals, 0 not beyond.",
    )


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    given = [
        evaluation(HOSTILE, "language", {BOOLQ: [1, 0, 1]}, scale=HOSTILE, complete=False, state=5),
        evaluation(f"gla+{HOSTILE}", "extrapolation", {(f"{HOSTILE}/64", "token_perplexity"): [9.0, 8.0]}, state=5),
        training(HOSTILE, 0, 5.0, scale=HOSTILE, state=5),
    ]
    write_paper_report(runs(*given), tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert not {"script", "img"} & set(page.tags)
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert page.text.count("<script>alert('x')</script>") >= 4
    markdown = (tmp_path / "report.md").read_text()
    assert "<script" not in markdown and "<img" not in markdown
    assert all("/" not in path.name and "<" not in path.name for path in tmp_path.iterdir())


def figure(found: list[ReportFigure], key: str) -> ReportFigure:
    return next(each for each in found if each.key == key)


def lines_of(drawn: ReportFigure, title: str) -> list[tuple[list[float], list[float]]]:
    """Of the panel with this title: the x and y of every line of more than one point that is no bar."""
    from matplotlib.figure import Figure

    made = Figure()
    drawn.draw(made)
    axes = next(
        axes for axes in made.axes if axes.get_title(loc="left").startswith(title) or axes.get_title().startswith(title)
    )
    found = [([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]) for line in axes.lines]
    return [(x, y) for x, y in found if len(set(x)) > 1]


def test_curves_are_those_of_paper_and_runs() -> None:
    given = [
        evaluation(
            "gla+ccq",
            "extrapolation",
            {
                (f"qmsum/{n}", "token_perplexity"): [value + seed, value + seed]
                for n, value in ((8192, 13.0), (4096, 14.0))
            },
            scale="500M",
            seed=seed,
        )
        for seed in (0, 1)
    ]
    found = report_figures(runs(*given), None, [])
    drawn = lines_of(figure(found, "extrapolation-500M"), "QMSum")
    assert ([4096.0, 8192.0], [14.5, 13.5]) in drawn
    lengths = [4096.0 + 2048 * step for step in range(9)]
    assert (lengths, [15.54, 15.21, 15.05, 14.95, 14.90, 14.88, 14.88, 14.84, 14.82]) in drawn
    assert len(drawn) == 6
    assert len(lines_of(figure(found, "extrapolation-500M"), "PG19")) == 5, "no run, so the paper's alone"
    assert "lowest on every corpus" in figure(found, "extrapolation-500M").caption
    assert "GovReport, QMSum and Qasper" not in figure(found, "extrapolation-500M").caption, "that is about 1.3B"


def test_a_sweep_is_drawn_by_length() -> None:
    sweep = [
        {"arm": "gla", "rows": rows, "tokens": 32768 // rows, "step": None, "tokens_per_second": 1000.0 * rows}
        for rows in (4, 1, 2)
    ]
    given = runs(benchmark([], sweep))
    assert paper_tables(given) == []
    (found,) = report_figures(given, None, [])
    assert "hatched" not in found.caption, "there are no bars"
    said = "one NVIDIA H200, torch 2.11.0, medians; gla+ccq, gla, training step: left out (no room)."
    assert found.caption.endswith(f"The sweep of model.json: {said}")
    drawn = lines_of(found, "training, 32,768 tokens a step, 1.3B")
    assert drawn == [([8192.0, 16384.0, 32768.0], [4000.0, 2000.0, 1000.0])]


def test_needles_by_depth_are_means_over_seeds() -> None:
    from matplotlib.figure import Figure

    given = [
        evaluation(
            "gla",
            "needle",
            {("niah_single_1/4096", "accuracy"): [1, 0]},
            seed=seed,
            depths={"niah_single_1/4096": {(0.0, 0.1): (value, count), (0.9, 1.0): (1.0, 1)}},
        )
        for seed, value, count in ((0, 1.0, 1), (1, 0.0, 3))
    ]
    found = report_figures(runs(*given), None, cost_points(runs(*given)))
    made = Figure()
    figure(found, "depth-1.3B-niah-single-1").draw(made)
    assert [text.get_text() for text in made.axes[0].texts] == ["25", "100"]


def test_an_arm_has_one_look_in_every_figure() -> None:
    from matplotlib.figure import Figure

    task = "niah_single_1/4096"
    given = [
        evaluation(arm, "needle", {(task, "accuracy"): [1, 0]}, scale=scale, depths={task: {(0.0, 0.1): (0.5, 2)}})
        for scale, reads in (("500M", ("random",)), ("1.3B", ("exact", "random")))
        for arm in ("gla", "gla+ccq", *(f"gla+{read}" for read in reads))
    ]
    gates = (GatePoint(0.0, 0.1, None), GatePoint(10.0, 0.2, None))
    given += [training(arm, 0, 5.0, gates=gates) for arm in ("gla+ccq", "gla+random")]
    found = report_figures(runs(*given), None, [])
    drawn = {}
    for key in ("depth-500M-niah-single-1", "depth-1.3B-niah-single-1", "gate"):
        drawn[key] = Figure()
        figure(found, key).draw(drawn[key])
    colors = {(key, axes.get_title()): axes.title.get_color() for key, made in drawn.items() for axes in made.axes}
    of_random = {color for (_, title), color in colors.items() if title == "gla+random"}
    assert len(of_random) == 1
    assert of_random.isdisjoint(color for (_, title), color in colors.items() if title in ("gla+exact", "gla+ccq"))
    assert [line.get_color() for line in drawn["gate"].axes[0].lines][-1:] == list(of_random)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such"], "ccq: /no/such does not exist; accepted are"),
        (["FILE"], "is none of the files of a report"),
    ],
)
def test_wrong_input_is_one_clear_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"schema": "other"}))
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    assert main(["report", *given, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_as_out_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "is a file; --out takes the folder of the report" in capsys.readouterr().err
