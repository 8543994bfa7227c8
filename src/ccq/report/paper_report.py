"""`ccq report`: runs beside the paper, as a folder of files: a page, the same as Markdown, tables and figures.

report.html     one self-contained page: it needs no network and no script
report.md       the same words and tables, with links to the figures
TABLE.csv       a line a figure, with interval, provenance and notes; differences.csv has what is compared
FIGURE.png, FIGURE.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ccq import __version__
from ccq.files import write_bytes_atomically
from ccq.report.costs import cost_points, cost_table
from ccq.report.differences import PairedDifference, difference_cells, differences_csv, paired_differences
from ccq.report.figures import Figure
from ccq.report.html import Finding, _plural
from ccq.report.pages import render_page
from ccq.report.paper import read_paper
from ccq.report.paper_figures import render_figure, report_figures
from ccq.report.paper_tables import ReportTable, paper_tables, table_csv, trainings_table
from ccq.report.runs import COMPARISON, Runs

_GROUPS = {"extrapolation": "Figures 3 and 4. Token perplexity by length", COMPARISON: "What ccq compare measured"}
_BEYOND = {
    (True, True): "both intervals",
    (True, False): "the interval over seeds",
    (False, True): "the interval over samples",
}
"""By whether there is one over seeds, and one over samples."""
PAIRED = (
    "A difference is the first model minus the second, paired twice.",
    "Over seeds: between trainings of one seed, with the 95 % t interval of these differences; it covers how another "
    "training would have gone. With one seed there is none.",
    "Over samples: between answers to one and the same question (or losses of one window), averaged over seeds, with a "
    "95 % interval; it covers which questions were drawn, for the trainings that were made, and nothing about others. "
    "In brackets the number of samples. Where models were not asked the same there is none.",
    "A difference counts as better or worse where zero is outside of both intervals, or of the one there is; with one "
    "seed that is the one over samples. Where several seeds have equal differences there is none over seeds, and "
    "nothing is called.",
    "The paper's differences are computed from its tables: single runs without intervals.",
    "No correction is made for the number of comparisons: of twenty intervals one misses by chance.",
)


class DifferenceGroup(NamedTuple):
    """The differences of one table; a line is pair, column, paper, here, over seeds, over samples, outcome."""

    title: str
    lines: tuple[tuple[str, str, str, str, str, str, str], ...]


class PaperReport(NamedTuple):
    """Everything that the page and the Markdown file say."""

    findings: tuple[Finding, ...]
    sources: tuple[tuple[str, str, str, str, str], ...]
    """File, what it is, scale, model, seed."""
    left_out: tuple[str, ...]
    tables: tuple[ReportTable, ...]
    differences: tuple[DifferenceGroup, ...]
    costs: ReportTable | None
    trainings: ReportTable | None
    figures: tuple[Figure, ...]


def write_paper_report(runs: Runs, folder: Path) -> tuple[Finding, ...]:
    """Write the report into `folder`, which is made if need be; each file whole or not at all. Returns the sentences at
    its top.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables, differences, points = paper_tables(runs), paired_differences(runs), cost_points(runs)
    costs, trainings = cost_table(points), trainings_table(runs)
    efficiency = next((table for table in tables if table.key == "efficiency"), None)
    figures = []
    for figure in report_figures(runs, efficiency, points):
        element, svg, png = render_figure(figure)
        write_bytes_atomically(folder / f"{figure.key}.svg", svg)
        write_bytes_atomically(folder / f"{figure.key}.png", png)
        figures.append(Figure(figure.key, figure.title, figure.caption, (element,)))
    for table in (*tables, costs, trainings):
        if table is not None:
            write_bytes_atomically(folder / f"{table.key}.csv", table_csv(table).encode())
    if differences:
        write_bytes_atomically(folder / "differences.csv", differences_csv(differences).encode())
    report = PaperReport(
        findings=tuple(report_findings(runs, differences)),
        sources=tuple(_sources(runs)),
        left_out=tuple(map(str, runs.left_out)),
        tables=tuple(tables),
        differences=tuple(_groups(differences)),
        costs=costs,
        trainings=trainings,
        figures=tuple(figures),
    )
    write_bytes_atomically(folder / "report.md", render_markdown(report).encode())
    write_bytes_atomically(folder / "report.html", render_paper_report(report).encode())
    return report.findings


def report_findings(runs: Runs, differences: Sequence[PairedDifference]) -> list[Finding]:
    """What the intervals allow to say, one sentence a pair of models."""
    found = []
    pairs = dict.fromkeys((each.scale, each.first, each.second) for each in differences)
    for scale, first, second in pairs:
        mine = [each for each in differences if (each.scale, each.first, each.second) == (scale, first, second)]
        counts = {kind: sum(each.outcome == kind for each in mine) for kind in ("better", "worse", "level", "unknown")}
        known = [(each.over_seeds is not None, each.over_samples is not None) for each in mine]
        known = sorted(set(known) - {(False, False)})
        over = _BEYOND[known[0]] if len(known) == 1 else "every interval there is"
        parts = [
            f"{counts['better']} better and {counts['worse']} worse beyond {over}",
            f"{counts['level']} not beyond",
        ]
        if counts["unknown"]:
            parts.append(f"{counts['unknown']} not called for want of an interval")
        kind = (
            "better"
            if counts["better"] > counts["worse"]
            else "worse"
            if counts["worse"] > counts["better"]
            else "level"
        )
        if not counts["better"] + counts["worse"] + counts["level"]:
            kind = "unknown"
        found.append(
            Finding(kind, f"{first} against {second} ({scale}), {_plural(len(mine), 'score')}: {', '.join(parts)}.")
        )
    if not pairs:
        found.append(
            Finding("note", "No model was given beside its backbone or beside itself with the correction off.")
        )
    elif any(len(each.by_seed) < 2 for each in differences):
        text = (
            "One seed ranks nothing: its intervals cover which samples were drawn, not how another training would go."
        )
        found.append(Finding("note", text))
    if any(not evaluation.complete for evaluation in runs.evaluations):
        names = ", ".join(evaluation.path.name for evaluation in runs.evaluations if not evaluation.complete)
        found.append(Finding("note", f"Not complete, so that tasks and means are missing: {names}."))
    return found


def _sources(runs: Runs) -> list[tuple[str, str, str, str, str]]:
    lines = []
    for evaluation in runs.evaluations:
        model = evaluation.model
        seed = "not recorded" if model.seed is None else str(model.seed)
        what = f"ccq eval {evaluation.suite}" + ("" if evaluation.complete else ", incomplete")
        lines.append((str(evaluation.path), what, model.scale, model.subject.label, seed))
    for training in runs.trainings:
        model = training.model
        what = "ccq train" + ("" if training.step == training.steps else ", unfinished")
        lines.append((str(training.path), what, model.scale, model.arm, str(model.seed)))
    for comparison in runs.comparisons:
        arms = ", ".join(dict.fromkeys(run["arm"] for run in comparison.results["runs"]))
        seeds = ", ".join(map(str, sorted({run["seed"] for run in comparison.results["runs"]})))
        lines.append((str(comparison.path), "ccq compare", "", arms, seeds))
    lines += [(str(each.path), "ccq bench layer", each.scale, "", "") for each in runs.layers]
    lines += [(str(each.path), "ccq bench model", each.scale, "", "") for each in runs.models]
    lines += [(str(each.path), "ccq bench decode", each.scale, "", "") for each in runs.decodes]
    return lines


def _groups(differences: Sequence[PairedDifference]) -> list[DifferenceGroup]:
    titles = {key: table.title for key, table in read_paper().tables.items()} | _GROUPS
    groups = []
    for key in dict.fromkeys(each.group for each in differences):
        lines = tuple(
            (f"{each.first} − {each.second} ({each.scale})", each.column, *difference_cells(each), each.outcome)
            for each in differences
            if each.group == key
        )
        groups.append(DifferenceGroup(titles[key], lines))
    return groups


# Markdown.

_DIFFERENCE_HEADER = ("pair", "score", "paper", "here", "over seeds", "over samples")


def render_markdown(report: PaperReport) -> str:
    """The report as Markdown; figures are links to their files."""
    paper = read_paper()
    lines = [
        "# Runs beside the paper",
        "",
        f"Paper: {paper.title}, {paper.citation}.",
        "",
        *(f"- {_escaped(finding.text)}" for finding in report.findings),
    ]
    lines += ["", "## About the paper's values", "", *(f"- {_escaped(note)}" for note in paper.notes)]
    for table in report.tables:
        lines += ["", f"## {table.title}", "", *_markdown_report_table(table)]
    for figure in report.figures:
        lines += [
            "",
            f"## {figure.title}",
            "",
            f"![{_escaped(figure.title)}]({figure.key}.png)",
            "",
            _escaped(figure.caption),
        ]
    if report.costs is not None:
        lines += ["", "## Quality against cost, in numbers", "", *_markdown_report_table(report.costs)]
    if report.differences:
        lines += ["", "## Differences", "", *(f"- {text}" for text in PAIRED)]
        for group in report.differences:
            rows = [line[:-1] for line in group.lines]
            lines += ["", f"### {group.title}", "", *_markdown_table(_DIFFERENCE_HEADER, rows)]
    if report.trainings is not None:
        lines += ["", "## Trainings", "", *_markdown_report_table(report.trainings)]
    lines += ["", "## What was given", ""]
    lines += _markdown_table(("file", "what", "scale", "model", "seed"), report.sources)
    if report.left_out:
        lines += ["", f"Not used: {_escaped(', '.join(report.left_out))}."]
    lines += ["", "## Provenance of the paper's values", ""]
    lines += [f"- {word}: {meaning}" for word, meaning in paper.provenance.items()]
    lines += ["", f"Made by ccq {__version__}."]
    return "\n".join(lines) + "\n"


def _markdown_report_table(table: ReportTable) -> list[str]:
    rows = []
    for row in table.rows:
        cells = []
        for cell in row.cells:
            marks = "".join(f"<sup>{mark}</sup>" for mark in cell.marks)
            note = f"<br><small>{_escaped(cell.note)}</small>" if cell.note else ""
            cells.append(f"{_escaped(cell.text)}{marks}{note}")
        seeds = f", {row.seeds} seeds" if row.source == "here" and row.seeds is not None and row.seeds > 1 else ""
        rows.append([_escaped(row.scale), _escaped(row.label), f"{row.source}{seeds}", *cells])
    header = ("scale", "model", "from", *table.columns)
    lines = [f"- {_escaped(text)}" for text in table.lead]
    lines += ["", *_markdown_lines(header, rows)]
    if table.footnotes:
        lines += ["", *(f"{number}. {_escaped(text)}" for number, text in enumerate(table.footnotes, 1))]
    return lines


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return _markdown_lines(header, [[_escaped(cell) for cell in row] for row in rows])


def _markdown_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"|{' --- |' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _escaped(text: str) -> str:
    """Text that is neither markup nor the end of a cell."""
    for letter, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("\n", " ")):
        text = text.replace(letter, written)
    for letter in "\\|`*_[]":
        text = text.replace(letter, "\\" + letter)
    return text


# The page.


def render_paper_report(report: PaperReport) -> str:
    """The report as one HTML page; equal reports give equal text."""
    return render_page(
        "paper.html.j2",
        report.figures,
        report=report,
        paper=read_paper(),
        paired=PAIRED,
        difference_header=_DIFFERENCE_HEADER,
        version=__version__,
    )
