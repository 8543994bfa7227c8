"""The figures of a comparison as plain data, and the tables made from them.

`comparison_rows` gathers the runs of `results.json` by arm. Everything a reader sees (the terminal table, the tables
and sentences of the HTML report, the plots) starts from these rows, so that no two places can disagree.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

    from ccq.evals.results import CompareResults, RunResult

NORMAL_QUANTILE = 1.959963984540054  # two-sided 95 %


@dataclass(frozen=True)
class Measured:
    """One figure of one arm over its seeds.

    `values` has one entry a seed; `mean` is their mean; `deviation` the sample standard deviation (n - 1), None with
    one seed; `low` and `high` the 95 % interval that the results give for a single run, None with several seeds or
    where none is given.
    """

    values: tuple[float, ...]
    mean: float
    deviation: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ComparisonRow:
    """Everything measured for one arm; mappings go from length in tokens to the figure. None or empty: not measured."""

    arm: str
    seeds: tuple[int, ...]
    parameters: Measured | None
    read_parameters: Measured | None
    state_bytes: Measured | None
    loss: dict[int, Measured]
    perplexity: dict[int, Measured]
    needle: dict[int, Measured]
    needle_read_off: dict[int, Measured]
    gate_mean: Measured | None
    correction_relative_size: Measured | None
    training_tokens_per_second: Measured | None
    decode_tokens_per_second: Measured | None


@dataclass(frozen=True)
class Difference:
    """An arm minus its backbone in one metric.

    `interval_from` is "seeds" (t interval over seeds, from the results), "samples" (one seed: only the chance in which
    questions or windows were drawn, computed here) or None (no interval). `outcome` is "better", "worse" (interval
    excludes zero), "level" (interval contains zero) or "unknown" (no interval).
    """

    backbone: str
    arm: str
    metric: str
    differences: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    interval_from: str | None

    @property
    def favours_arm(self) -> bool | None:
        """Whether the mean lies on the arm's side; None when it is exactly zero."""
        if self.mean == 0:
            return None
        return (self.mean < 0) == lower_is_better(self.metric)

    @property
    def outcome(self) -> str:
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 0 <= self.high:
            return "level"
        return "better" if self.favours_arm else "worse"


class Cell(NamedTuple):
    """A table cell: the figure, and below it in small print its interval or spread."""

    main: str
    note: str = ""


class TextRow(NamedTuple):
    label: str
    arm: str
    cells: tuple[Cell, ...]


class TextTable(NamedTuple):
    """A table ready to print: `header` names the label column first, then one Cell a column."""

    title: str
    header: tuple[Cell, ...]
    rows: tuple[TextRow, ...]


def backbone_of(arm: str) -> str:
    """ "gla+ccq" -> "gla"; an arm without a read is its own backbone."""
    return arm.partition("+")[0]


def lower_is_better(metric: str) -> bool:
    return any(word in metric for word in ("loss", "perplexity", "bytes", "seconds per", "milliseconds"))


def arms_of(results: CompareResults) -> list[str]:
    """Arms that have a run, in the order of the settings, then in order of appearance."""
    present = list(dict.fromkeys(run["arm"] for run in results["runs"]))
    asked = results["settings"].get("arms")
    order = [arm for arm in asked if arm in present] if isinstance(asked, list) else []
    return order + [arm for arm in present if arm not in order]


def runs_of(results: CompareResults, arm: str) -> list[RunResult]:
    """The arm's runs by seed."""
    return sorted((run for run in results["runs"] if run["arm"] == arm), key=lambda run: run["seed"])


def seed_count(results: CompareResults) -> int:
    """The smallest number of seeds that any arm was trained with."""
    return min((len({run["seed"] for run in runs_of(results, arm)}) for arm in arms_of(results)), default=0)


def summarize(values: Iterable[float | None], low: float | None = None, high: float | None = None) -> Measured | None:
    """Mean and sample standard deviation; the interval is kept for a single value. None when nothing was measured."""
    present = tuple(float(value) for value in values if value is not None)
    if not present:
        return None
    if len(present) > 1:
        return Measured(present, statistics.fmean(present), statistics.stdev(present))
    return Measured(present, present[0], None, low, high)


def _nested(run: Mapping[str, Any], *names: str) -> Any:
    value: Any = run
    for name in names:
        if value is None:
            return None
        value = value[name]
    return value


def _by_length(runs: Sequence[Mapping[str, Any]], section: str, field: str) -> dict[int, Measured]:
    entries: dict[int, list[Mapping[str, Any]]] = {}
    for run in runs:
        for entry in run[section] or ():
            entries.setdefault(entry["length"], []).append(entry)
    measured = {}
    for length in sorted(entries):
        group = entries[length]
        value = summarize((entry[field] for entry in group), group[0].get("low"), group[0].get("high"))
        if value is not None:
            measured[length] = value
    return measured


def comparison_rows(results: CompareResults) -> list[ComparisonRow]:
    """One row an arm, from a results dict of kind "compare"."""
    rows = []
    for arm in arms_of(results):
        runs = runs_of(results, arm)

        def over_seeds(*names: str, runs: Sequence[Mapping[str, Any]] = runs) -> Measured | None:
            return summarize(_nested(run, *names) for run in runs)

        rows.append(
            ComparisonRow(
                arm=arm,
                seeds=tuple(run["seed"] for run in runs),
                parameters=over_seeds("parameters"),
                read_parameters=over_seeds("read_parameters"),
                state_bytes=over_seeds("state_bytes"),
                loss=_by_length(runs, "perplexity", "loss"),
                perplexity=_by_length(runs, "perplexity", "perplexity"),
                needle=_by_length(runs, "needle_by_length", "accuracy"),
                needle_read_off=_by_length(runs, "needle_read_off", "accuracy"),
                gate_mean=over_seeds("gate", "mean"),
                correction_relative_size=over_seeds("correction", "relative_size"),
                training_tokens_per_second=over_seeds("training", "tokens_per_second"),
                decode_tokens_per_second=over_seeds("decode", "tokens_per_second"),
            )
        )
    return rows


def _entry(run: Mapping[str, Any], section: str, length: int) -> Mapping[str, Any] | None:
    return next((entry for entry in run[section] if entry["length"] == length), None)


def sampling_interval(results: CompareResults, backbone: str, arm: str, metric: str) -> tuple[float, float] | None:
    """95 % interval of a single run's difference, from the questions or windows drawn alone; None where unknown.

    Accuracies: Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10) from the two Wilson
    intervals. Losses: normal interval from the two standard errors. Both treat the two arms' samples as independent;
    where both arms answer the same questions and read the same windows the interval is wider than it need be.
    """
    match = re.fullmatch(r"(needle accuracy|loss|perplexity) at (\d+)", metric)
    backbone_runs, arm_runs = runs_of(results, backbone), runs_of(results, arm)
    if match is None or not backbone_runs or not arm_runs:
        return None
    name, length = match[1], int(match[2])
    section = "needle_by_length" if name == "needle accuracy" else "perplexity"
    base, treated = _entry(backbone_runs[0], section, length), _entry(arm_runs[0], section, length)
    if base is None or treated is None:
        return None
    if section == "perplexity":
        errors = []
        for entry in (base, treated):
            if entry["standard_error"] is None:
                return None
            # The error of exp(loss) is exp(loss) times the error of the loss, to first order.
            errors.append(entry["standard_error"] * (entry["perplexity"] if name == "perplexity" else 1.0))
        difference = treated[name] - base[name]
        half = NORMAL_QUANTILE * math.hypot(*errors)
        return difference - half, difference + half
    difference = treated["accuracy"] - base["accuracy"]
    below = math.hypot(treated["accuracy"] - treated["low"], base["high"] - base["accuracy"])
    above = math.hypot(treated["high"] - treated["accuracy"], base["accuracy"] - base["low"])
    return difference - below, difference + above


def arm_differences(results: CompareResults) -> list[Difference]:
    """The results' pairs, each with the interval that fits its number of seeds.

    A perplexity is left out where the loss behind it is there: it is the same finding, and would be counted twice.
    """
    found = []
    pairs = results["pairs"]
    given = {(pair["backbone"], pair["arm"], pair["metric"]) for pair in pairs}
    for pair in pairs:
        same_finding = (pair["backbone"], pair["arm"], pair["metric"].replace("perplexity", "loss"))
        if "perplexity" in pair["metric"] and same_finding in given:
            continue
        low, high = pair["low"], pair["high"]
        interval_from = "seeds" if low is not None and high is not None else None
        if interval_from is None and len(pair["differences"]) == 1:
            interval = sampling_interval(results, pair["backbone"], pair["arm"], pair["metric"])
            if interval is not None:
                (low, high), interval_from = interval, "samples"
        names = pair["backbone"], pair["arm"], pair["metric"]
        found.append(Difference(*names, tuple(pair["differences"]), pair["mean"], low, high, interval_from))
    return found


def share_text(value: float) -> str:
    """0.0625 -> "6.25 %": three figures, for shares that are exact."""
    return f"{100 * value:.3g} %"


def signed(value: float, digits: int) -> str:
    """With a sign and a real minus; a value that rounds to zero has neither."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def difference_text(metric: str, value: float, unit: bool = True) -> str:
    """A difference in the metric's own unit: percentage points for accuracies, nats for losses, plain otherwise."""
    if "accuracy" in metric:
        return signed(100 * value, 1) + (" points" if unit else "")
    if "loss" in metric:
        return signed(value, 3) + (" nats" if unit else "")
    return signed(value, 2 if abs(value) < 100 else 0)


def interval_text(metric: str, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{difference_text(metric, low, unit=False)} to {difference_text(metric, high, unit=False)}"


def bytes_text(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def measured_cell(measured: Measured | None, digits: int = 0, *, percentage: bool = False, suffix: str = "") -> Cell:
    if measured is None:
        return Cell("–")
    scale = 100.0 if percentage else 1.0
    main = f"{scale * measured.mean:,.{digits}f}{suffix}"
    if measured.deviation is not None:
        # Counts such as parameters are the same for every seed; "± 0" under each would be noise.
        return Cell(main, f"± {scale * measured.deviation:,.{digits}f}" if digits or measured.deviation else "")
    if measured.low is not None and measured.high is not None:
        return Cell(main, f"{scale * measured.low:,.{digits}f}–{scale * measured.high:,.{digits}f}")
    return Cell(main)


def _lengths(rows: Sequence[ComparisonRow], *fields: str) -> list[int]:
    return sorted({length for row in rows for field in fields for length in getattr(row, field)})


def multiple_text(length: int, training_length: int) -> str:
    """ "2×" for twice the training length."""
    return f"{length / training_length:g}×"


def text_tables(results: CompareResults) -> list[TextTable]:
    """Three tables (text, needle, cost) for the terminal and for the HTML report."""
    rows = comparison_rows(results)
    training_length = results["training_length"]
    several = any(len(row.seeds) > 1 for row in rows)
    spread = "mean ± standard deviation over seeds"

    def at(lengths: list[int], prefix: str) -> list[Cell]:
        return [Cell(prefix, f"{length} {multiple_text(length, training_length)}") for length in lengths]

    text_lengths = _lengths(rows, "loss", "perplexity")
    text = TextTable(
        "Held-out text by window length" + (f"; {spread}" if several else ""),
        (Cell("arm"), *at(text_lengths, "loss"), *at(text_lengths, "ppl")),
        tuple(
            TextRow(
                row.arm,
                row.arm,
                (
                    *(measured_cell(row.loss.get(length), 3) for length in text_lengths),
                    *(measured_cell(row.perplexity.get(length), 2) for length in text_lengths),
                ),
            )
            for row in rows
        ),
    )
    needle_lengths = _lengths(rows, "needle", "needle_read_off")
    needle_rows: list[TextRow] = []
    for row in rows:
        size = measured_cell(row.correction_relative_size, 2, percentage=True, suffix=" %")
        read = (measured_cell(row.gate_mean, 3), size)
        accuracies = tuple(measured_cell(row.needle.get(length), 1, percentage=True) for length in needle_lengths)
        needle_rows.append(TextRow(row.arm, row.arm, accuracies + read))
        if row.needle_read_off:
            off = tuple(measured_cell(row.needle_read_off.get(length), 1, percentage=True) for length in needle_lengths)
            needle_rows.append(TextRow("  correction off", row.arm, (*off, Cell(""), Cell(""))))
    needle = TextTable(
        "Needle accuracy in % by window length; " + (spread if several else "95 % interval below"),
        (Cell("arm"), *at(needle_lengths, "needle"), Cell("gate", "mean"), Cell("correction", "of |query|")),
        tuple(needle_rows),
    )
    cost = TextTable(
        "Size and speed" + (f"; {spread}" if several else ""),
        (
            Cell("arm"),
            Cell("parameters"),
            Cell("of which", "read"),
            Cell("training", "tokens/s"),
            Cell("decode", "tokens/s"),
            Cell("state", "bytes"),
            Cell("seeds"),
        ),
        tuple(
            TextRow(
                row.arm,
                row.arm,
                (
                    measured_cell(row.parameters),
                    measured_cell(row.read_parameters),
                    measured_cell(row.training_tokens_per_second),
                    measured_cell(row.decode_tokens_per_second),
                    measured_cell(row.state_bytes),
                    Cell(str(len(row.seeds))),
                ),
            )
            for row in rows
        ),
    )
    return [
        table for table, has_columns in ((text, text_lengths), (needle, needle_lengths), (cost, True)) if has_columns
    ]


def comparison_table(results: CompareResults) -> Table:
    """The terminal table: one grid of the tables for text, needle and cost, each within 80 columns."""
    task = results["needle_task"]
    any_value, seen_value = share_text(task["chance"]), share_text(task["chance_among_seen"])
    notes = [(f"Chance: {any_value} guessing any value, {seen_value} guessing among the values seen.", "")]
    if 0 < seed_count(results) < 2:
        notes.append(("One seed ranks nothing: a second seed may reverse any difference here.", "bold"))
    return terminal_grid(text_tables(results), notes)


def terminal_grid(tables: Iterable[TextTable], notes: Iterable[tuple[str, str]]) -> Table:
    """The tables one below the other, and under them lines of text, each with its style."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid()
    grid.add_column()
    for text_table in tables:
        title = Text(text_table.title, style="bold")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for position, column in enumerate(text_table.header):
            table.add_column(
                Text("\n".join(filter(None, column))),
                justify="right" if position else "left",
                no_wrap=position > 0,
                overflow="fold",
            )
        for row in text_table.rows:
            cells = [
                Text.assemble(cell.main, ("\n" + cell.note, "dim")) if cell.note else Text(cell.main)
                for cell in row.cells
            ]
            table.add_row(Text(row.label, style="bold" if row.label == row.arm else "dim"), *cells)
        grid.add_row(table)
    for text, style in notes:
        grid.add_row(Text(text, style=style))
    return grid
