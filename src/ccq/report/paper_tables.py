"""The tables of the paper with the runs that were given, their differences, and quality against cost, as plain data.

What is not there stays empty: a cell that no run measured, an interval that nothing gives. Pages and files are made
from these tables alone.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ccq.report.benchmarks import DecodeBenchmark, LayerBenchmark, ModelBenchmark, Times
from ccq.report.intervals import Interval, of_score, over_seeds
from ccq.report.paper import PaperColumn, PaperNote, PaperTable, PaperValue, read_paper
from ccq.report.runs import MEAN, Runs, Score, ScoreName, subject_order

MISSING = "–"
PAPER, HERE = "paper", "here"
EVALUATIONS = ("table-2", "table-3", "table-4", "table-7")
"""The paper's tables of scores."""
_SUITES = {"niah": "needle"}
_PASSES = {"forward": "fwd", "forward_backward": "fwd+bwd"}


class Estimate(NamedTuple):
    """A figure over its seeds. `interval_from` is "seeds", "samples" (one seed) or None without an interval."""

    values: tuple[float, ...]
    mean: float
    interval: Interval | None
    interval_from: str | None


class TableCell(NamedTuple):
    """`text` is the figure and `note` the small print below it; `marks` are numbers of footnotes. `interval_from` says
    what `low` and `high` are: "seeds", "samples", "quartiles" or "standard deviation".
    """

    text: str = MISSING
    note: str = ""
    marks: tuple[int, ...] = ()
    value: float | None = None
    low: float | None = None
    high: float | None = None
    interval_from: str | None = None
    provenance: str = ""


class TableRow(NamedTuple):
    """`source` is `PAPER` or `HERE`; `seeds` is how many trainings the row is over, where that is known."""

    scale: str
    arm: str
    label: str
    source: str
    seeds: int | None
    cells: tuple[TableCell, ...]


class ReportTable(NamedTuple):
    """`lead` are sentences above the table, `footnotes` those its cells refer to, numbered from 1."""

    key: str
    title: str
    lead: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    footnotes: tuple[str, ...]


def estimate(scores: Sequence[Score]) -> Estimate:
    """One score over the seeds it was measured with."""
    values = tuple(score.value for score in scores)
    interval, interval_from = over_seeds(values), "seeds"
    if len(values) == 1 and scores[0].samples is not None:
        interval, interval_from = of_score(scores[0].samples), "samples"
    return Estimate(values, statistics.fmean(values), interval, None if interval is None else interval_from)


# The tables of the paper.


def paper_tables(runs: Runs) -> list[ReportTable]:
    """The paper's tables for which something was given, in the paper's order."""
    makers = {key: _score_table for key in EVALUATIONS} | {"table-5": _layer_table, "efficiency": _efficiency_table}
    tables = [makers[key](table, runs) for key, table in read_paper().tables.items()]
    return [table for table in tables if table is not None]


def score_name(table: PaperTable, column: PaperColumn) -> ScoreName:
    """Where results have what a column holds."""
    suite = table.suite
    if suite == "ablation":
        suite = _SUITES.get(str(column.task).partition("_")[0], "language")
    if column.is_mean:
        return ScoreName(suite, MEAN, MEAN)
    return ScoreName(suite, str(column.task), str(column.metric))


def score_columns(table: PaperTable, runs: Runs) -> list[tuple[PaperColumn, ScoreName, bool]]:
    """The paper's columns, then those of needles that the paper does not have; the last value says which."""
    columns = [(column, score_name(table, column), True) for column in table.columns]
    known = {name for _, name, _ in columns}
    if table.suite == "needle":
        digits = table.columns[0].digits
        for name in runs.names("needle"):
            if name not in known:
                label = name.task.replace("niah_single_", "S").replace("/", " ")
                column = PaperColumn(label, name.task, name.metric, False, None, None, None, digits, 100.0, False)
                columns.append((column, name, False))
    return columns


def _score_table(table: PaperTable, runs: Runs) -> ReportTable | None:
    columns = score_columns(table, runs)
    subjects, rows = runs.subjects(), []
    if table.suite == "ablation":
        subjects = [s for s in subjects if s.backbone == "gated-deltanet" and s.read in (None, "on")]
        if {subject.arm for subject in subjects} <= {"gated-deltanet", "gated-deltanet+ccq"}:
            return None  # nothing is varied that tables 2 and 3 do not have
    for subject in subjects:
        by_seed = list(runs.seeds(subject).values())
        found = [[scores[name] for scores in by_seed if name in scores] for _, name, _ in columns]
        if not any(found):
            continue
        cells = tuple(
            _estimate_cell(estimate(scores), column) if scores else TableCell()
            for (column, _, _), scores in zip(columns, found, strict=True)
        )
        seeds = max(map(len, found))
        rows.append(TableRow(subject.scale, subject.arm, subject.label, HERE, seeds, cells))
    lead = [] if not rows else [*_interval_words(rows), *_conditions(table, runs)]
    return _with_paper(table, [column for column, _, _ in columns], rows, lead)


def _interval_words(rows: Sequence[TableRow]) -> list[str]:
    found = {cell.interval_from for row in rows for cell in row.cells}
    words = []
    if "seeds" in found:
        words.append(
            "With several seeds a figure is their mean, below it the 95 % t interval over seeds where they differ."
        )
    if "samples" in found:
        words.append(
            "With one seed the 95 % interval below a figure covers only which samples were drawn, not another training."
        )
    return words


def _conditions(table: PaperTable, runs: Runs) -> list[str]:
    """Settings in which evaluations of one table are not alike."""
    suites = {score_name(table, column).suite for column in table.columns}
    lines = []
    for suite in sorted(suites):
        evaluations = [evaluation for evaluation in runs.evaluations if evaluation.suite == suite]
        for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation.conditions):
            values = list(dict.fromkeys(str(evaluation.conditions[name]) for evaluation in evaluations))
            if len(values) > 1:
                lines.append(f"Not alike: {name} is {' and '.join(values)} in the evaluations of {suite}.")
    return lines


def _estimate_cell(found: Estimate, column: PaperColumn) -> TableCell:
    factor, digits = column.factor, column.digits
    interval = None if found.interval is None else Interval(*(factor * edge for edge in found.interval))
    return TableCell(
        text=number_text(factor * found.mean, digits),
        note="" if interval is None else range_text(interval, digits),
        value=factor * found.mean,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        interval_from=found.interval_from,
    )


def range_text(interval: Interval, digits: int) -> str:
    """ "1.2 to 3.4"."""
    return f"{number_text(interval.low, digits)} to {number_text(interval.high, digits)}"


def number_text(value: float, digits: int) -> str:
    """With so many digits behind the point, or three in all from a million on."""
    text = f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"
    return text.replace("-", "\N{MINUS SIGN}")


def _with_paper(
    table: PaperTable, columns: Sequence[PaperColumn], rows: Sequence[TableRow], lead: Sequence[str]
) -> ReportTable | None:
    """The runs' rows behind the paper's, scale by scale and arm by arm; None without any of the runs.

    The paper's scales are those of the runs, or all where no run has one of them.
    """
    if not rows:
        return None
    paper = read_paper()
    scales = [scale for scale in table.values if any(row.scale == scale for row in rows)] or list(table.values)
    footnotes: list[PaperNote] = []
    ordered: list[TableRow] = []
    for scale in scales:
        mine = [row for row in rows if row.scale == scale]
        for arm, values in table.values[scale].items():
            own = {column.label: value for column, value in zip(table.columns, values, strict=True)}
            cells = tuple(
                _paper_cell(table, scale, arm, column.label, own.get(column.label), footnotes) for column in columns
            )
            ordered.append(TableRow(scale, arm, paper.models.get(arm, arm), PAPER, 1, cells))
            ordered += [row for row in mine if row.arm == arm]
        ordered += [row for row in mine if row.arm not in table.values[scale]]
    ordered += [row for row in rows if row.scale not in scales]
    words = ", ".join(paper.provenance[tag] for tag in table.provenance)
    general = [note.text for note in table.notes if not note.places]
    source = f"Values of the paper: {words}."
    return ReportTable(
        table.key,
        table.title,
        (source, *general, *lead),
        tuple(column.label for column in columns),
        tuple(ordered),
        tuple(note.text for note in footnotes),
    )


def _paper_cell(
    table: PaperTable, scale: str, row: str, column: str, value: PaperValue | None, footnotes: list[PaperNote]
) -> TableCell:
    if value is None:
        return TableCell()
    marks = []
    for note in table.notes:
        if note.is_at(scale, row, column):
            if note not in footnotes:
                footnotes.append(note)
            marks.append(footnotes.index(note) + 1)
    deviation = value.deviation
    return TableCell(
        text=value.text,
        note="" if deviation is None else f"± {deviation:g}",
        marks=tuple(marks),
        value=value.value,
        low=None if deviation is None else value.value - deviation,
        high=None if deviation is None else value.value + deviation,
        interval_from=None if deviation is None else "standard deviation",
        provenance="+".join(value.provenance),
    )


def _layer_table(table: PaperTable, runs: Runs) -> ReportTable | None:
    rows, lead = [], []
    for benchmark in runs.layers:
        lead.append(
            f"{benchmark.path.name}: {benchmark.machine}, one row; medians with quartiles. Eager is one call from an "
            "idle card until it is idle again, as the paper measured; device is without what the processor needs to "
            "launch."
        )
        lead += _notes(benchmark)
        for arm in dict.fromkeys(arm for arm, *_ in benchmark.times):
            for clock, words in (("wall", "eager"), ("device", "device")):
                places = [(arm, str(c.layer_pass), c.tokens or 0, clock) for c in table.columns]
                cells = tuple(
                    _time_cell(benchmark.times.get(place), column)
                    for place, column in zip(places, table.columns, strict=True)
                )
                rows.append(TableRow(benchmark.scale, arm, f"{arm}, {words}", HERE, None, cells))
    return _with_paper(table, table.columns, rows, lead)


def _notes(benchmark: LayerBenchmark | ModelBenchmark | DecodeBenchmark) -> list[str]:
    """What a benchmark says of itself, such as what was left out."""
    return [f"{benchmark.path.name}: {note}" for note in benchmark.notes]


def _time_cell(times: Times | None, column: PaperColumn) -> TableCell:
    if times is None:
        return TableCell()
    return TableCell(
        text=f"{times.median:,.{column.digits}f}",
        note=range_text(Interval(times.low, times.high), column.digits),
        value=times.median,
        low=times.low,
        high=times.high,
        interval_from="quartiles",
    )


def _efficiency_table(table: PaperTable, runs: Runs) -> ReportTable | None:
    """Benchmarks of models, trainings, and comparisons, each in rows of its own."""
    columns = {str(column.measure): column for column in table.columns}
    rows: list[TableRow] = []
    lead = []

    def add(scale: str, arm: str, source: str, seeds: int | None, found: Mapping[str, TableCell]) -> None:
        cells = tuple(found.get(measure, TableCell()) for measure in columns)
        if any(cell.value is not None for cell in cells):
            rows.append(TableRow(scale, arm, f"{arm}, {source}", HERE, seeds, cells))

    for benchmark in runs.models:
        if benchmark.models:
            shape = f"B {benchmark.rows}, T {benchmark.tokens}"
            lead.append(f"{benchmark.path.name}: one {benchmark.machine}, {shape}; medians with quartiles.")
            lead += _notes(benchmark)
        for model in benchmark.models:
            found = {"state": _number_cell(model.state_bytes / 2**20, columns["state"])}
            if model.peak_bytes is not None:
                found["memory"] = _number_cell(model.peak_bytes / 2**30, columns["memory"])
            if model.step is not None:
                thousands = benchmark.rows * benchmark.tokens / 1000
                found["training"] = _speed_cell(thousands, model.step, columns["training"])
            if model.prefill is not None:
                found["prefill"] = _time_cell(model.prefill, columns["prefill"])
            add(benchmark.scale, model.arm, "ccq bench model", None, found)
    for decoding in runs.decodes:
        if decoding.models:
            shape = f"{decoding.rows} rows after {decoding.context} tokens"
            lead.append(
                f"{decoding.path.name}: one {decoding.machine}, {shape}; medians with quartiles. Eager is a loop in "
                "Python; replayed is the same step as a CUDA graph."
            )
            lead += _notes(decoding)
        for each in decoding.models:
            state = _number_cell(each.state_bytes / 2**20, columns["state"])
            for words, times in (("eager", each.eager), ("replayed", each.graph)):
                if times is not None:
                    found = {"state": state, "decode": _speed_cell(decoding.rows, times, columns["decode"])}
                    add(decoding.scale, each.arm, f"ccq bench decode, {words}", None, found)
    for subject in sorted({training.model.subject for training in runs.trainings}, key=subject_order):
        mine = [training for training in runs.trainings if training.model.subject == subject]
        speeds = [
            training.tokens_per_second / training.processes / 1000
            for training in mine
            if training.tokens_per_second is not None and training.processes is not None
        ]
        peaks = [training.memory / 2**30 for training in mine if training.memory is not None]
        found = {}
        if speeds:
            found["training"] = _number_cell(statistics.fmean(speeds), columns["training"])
        if peaks:
            found["memory"] = _number_cell(statistics.fmean(peaks), columns["memory"])
        kept = runs.state_bytes(subject)
        if kept is not None:
            found["state"] = _number_cell(kept / 2**20, columns["state"])
        add(subject.scale, subject.arm, "ccq train", len(mine), found)
    if runs.trainings:
        lead.append(
            "Rows of ccq train: median speed of a run for each of its processes, the peak of the first process, "
            "means over seeds."
        )
    for comparison in runs.comparisons:
        for arm in dict.fromkeys(run["arm"] for run in comparison.results["runs"]):
            mine_runs = [run for run in comparison.results["runs"] if run["arm"] == arm]
            found = {
                "training": _number_cell(
                    statistics.fmean(run["training"]["tokens_per_second"] for run in mine_runs) / 1000,
                    columns["training"],
                ),
                "decode": _number_cell(
                    statistics.fmean(run["decode"]["tokens_per_second"] for run in mine_runs), columns["decode"]
                ),
                "state": _number_cell(mine_runs[0]["state_bytes"] / 2**20, columns["state"]),
            }
            add(comparison.scale, arm, "ccq compare", len(mine_runs), found)
    if runs.models or runs.trainings:
        lead.append("State: of one sequence, by the model's configuration.")
    if runs.comparisons:
        lead.append("Rows of ccq compare: one thread of a processor, decoding with one row; means over seeds.")
    return _with_paper(table, table.columns, rows, lead)


def _number_cell(value: float, column: PaperColumn) -> TableCell:
    digits = column.digits if abs(value) >= 10 else max(column.digits, 2)
    return TableCell(text=f"{value:,.{digits}f}", value=value)


def _speed_cell(tokens: float, times: Times, column: PaperColumn) -> TableCell:
    """A second's share of `tokens` a step, from milliseconds a step; the slower quartile is the lower speed."""
    speed, low, high = (1000 * tokens / each for each in (times.median, times.high, times.low))
    return TableCell(
        text=f"{speed:,.{column.digits}f}",
        note=range_text(Interval(low, high), column.digits),
        value=speed,
        low=low,
        high=high,
        interval_from="quartiles",
    )


def trainings_table(runs: Runs) -> ReportTable | None:
    """The trainings that were given, one row each."""
    if not runs.trainings:
        return None
    columns = ("seed", "step", "of", "tokens", "loss", "held-out loss", "gate", "correction")
    rows = []
    for training in sorted(runs.trainings, key=lambda each: (subject_order(each.model.subject), each.model.seed)):
        model = training.model
        cells = (
            TableCell(str(model.seed), value=model.seed),
            TableCell(f"{training.step:,}", value=training.step),
            TableCell(f"{training.steps:,}", value=training.steps),
            TableCell(f"{training.tokens:,}", value=training.tokens),
            optional_cell(training.loss, ".3f"),
            optional_cell(training.held_out_loss, ".3f"),
            optional_cell(training.gate, ".3f"),
            optional_cell(training.correction, ".2%"),
        )
        rows.append(TableRow(model.scale, model.arm, model.arm, HERE, 1, cells))
    lead = (
        "Loss of the last recorded step; gate and correction (|lambda Sigma q| / |q|) are the means over layers when "
        "they were last looked at.",
    )
    return ReportTable("trainings", "Trainings", lead, columns, tuple(rows), ())


def optional_cell(value: float | None, form: str) -> TableCell:
    return TableCell() if value is None else TableCell(f"{value:{form}}".replace("%", " %"), value=value)


def table_csv(table: ReportTable) -> str:
    """One line for each figure, with what it stands on; a cell without a figure has a line without a value."""
    header = "source scale model arm seeds column value low high interval provenance notes".split()
    lines = []
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            value = cell.value if cell.value is not None else "" if cell.text == MISSING else cell.text
            notes = " ".join(table.footnotes[mark - 1] for mark in cell.marks)
            model = row.source, row.scale, row.label, row.arm, row.seeds
            lines.append((*model, column, value, cell.low, cell.high, cell.interval_from, cell.provenance, notes))
    return csv_text(header, lines)


def csv_text(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in line] for line in lines)
    return file.getvalue()
