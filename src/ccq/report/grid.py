"""The grid as tables, figures and one self-contained HTML page.

Differences are paired by seed and by prompt: models of one seed started from the same weights and saw the same rows,
and all models answer the same prompts. Each has two intervals, see `ccq.report.intervals`, and counts as a finding
only where both leave out zero.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ccq.evals.results import PUT_INTO
from ccq.files import write_bytes_atomically
from ccq.report.figures import (
    _FAINT,
    ArmStyle,
    Figure,
    GatePoint,
    LineEnd,
    _count_text,
    _forest,
    _label_ends,
    _marked_line,
    _plain_style,
    _svg,
    _two_lines,
    arm_styles,
    draw_gates,
    gate_caption,
)
from ccq.report.html import ONE_SEED, Finding, _flattened, _listed, _plural, verdict
from ccq.report.intervals import Interval, span
from ccq.report.pages import render_page
from ccq.report.tables import (
    Cell,
    Difference,
    Measured,
    TextRow,
    TextTable,
    backbone_of,
    measured_cell,
    share_text,
    signed,
    summarize,
    terminal_grid,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from ccq.evals.results import GridDifference, GridReading, GridResults, GridRunResult, GridScore, GridTaskResult

METRICS = ("accuracy", "loss")
_TITLES = {"accuracy": "answers that are right, %", "loss": "loss on text, nats a token"}
_AS_TRAINED = ("arm", "control")
_KINDS = {
    "arm": "an arm and its backbone, both as trained",
    "control": "an arm and its backbone with unit queries, both as trained",
    "training": "two models read alike",
    "training and normalisation": "two models, one read with unit queries and the other with raw ones",
    "reading": "one model read in two ways",
    "interaction": "the difference of two differences",
}


class Line(NamedTuple):
    """What one kind of model scores at each setting of a task."""

    label: str
    arm: str
    """Whose colour it has."""
    reading: str
    """"on" for as it was trained."""
    values: dict[str, Measured]


def arms_of_grid(results: GridResults) -> list[str]:
    """In the order of the runs."""
    return list(dict.fromkeys(run["arm"] for run in results["runs"]))


def seeds_of_grid(results: GridResults) -> int:
    return len({run["seed"] for run in results["runs"]})


def metrics_of(results: GridResults, task: str) -> list[str]:
    found = {score["metric"] for run in results["runs"] if run["task"] == task for score in run["scores"]}
    return [metric for metric in METRICS if metric in found]


def lines_of(results: GridResults, task: str, metric: str) -> list[Line]:
    """Every arm as trained, and behind it in the other ways it was read."""
    lines = []
    for arm in arms_of_grid(results):
        runs = [run for run in results["runs"] if (run["task"], run["arm"]) == (task, arm)]
        lines.append(Line(arm, arm, "on", _measured([run["scores"] for run in runs], metric)))
        readings = dict.fromkeys(reading["reading"] for run in runs for reading in run["readings"])
        for name in readings:
            found = [_reading(run, name) for run in runs]
            scores = [reading["scores"] for reading in found if reading is not None]
            lines.append(Line(_label(arm, name, found), arm, name, _measured(scores, metric)))
    return lines


def _reading(run: GridRunResult, name: str) -> GridReading | None:
    return next((reading for reading in run["readings"] if reading["reading"] == name), None)


def put_in_title(arm: str, base: str) -> str:
    """What a trained model of arm `base` is called that the read step of `arm` is put into."""
    return f"{base}, {arm.partition('+')[2]} put in"


def _label(arm: str, reading: str, found: Sequence[GridReading | None]) -> str:
    if not reading.startswith(PUT_INTO):
        return f"{arm}, {reading}"
    title = put_in_title(arm, reading.removeprefix(PUT_INTO))
    return title + _at_strength(each["gate"] for each in found if each is not None)


def _at_strength(gates: Iterable[float | None]) -> str:
    """ " at λ 0.25", or from the smallest to the largest."""
    known = [gate for gate in gates if gate is not None]
    texts = list(dict.fromkeys(f"{gate:.2g}" for gate in (min(known), max(known)))) if known else []
    return f" at λ {' to '.join(texts)}" if texts else ""


def put_in_base(results: GridResults, arm: str) -> str | None:
    """The arm whose models the read step of `arm` was put into; None for an arm without the 2 x 2."""
    readings = (reading["reading"] for run in results["runs"] if run["arm"] == arm for reading in run["readings"])
    return next((name.removeprefix(PUT_INTO) for name in readings if name.startswith(PUT_INTO)), None)


def _named(results: GridResults, difference: GridDifference, tasks: Sequence[str]) -> tuple[str, str]:
    """Both sides of a difference, a read step that was put in with its lambda in these tasks."""
    arm = difference["arm"]
    base = put_in_base(results, arm)
    put_in = None if base is None else put_in_title(arm, base)
    strength = _at_strength(
        reading["gate"]
        for run in results["runs"]
        if run["arm"] == arm and run["task"] in tasks
        for reading in run["readings"]
        if reading["reading"].startswith(PUT_INTO)
    )
    first, second = (
        f"{name}{strength}" if name == put_in else name for name in (difference["first"], difference["second"])
    )
    return first, second


def _measured(runs: Sequence[Sequence[GridScore]], metric: str) -> dict[str, Measured]:
    scores: dict[str, list[GridScore]] = {}
    for run in runs:
        for score in run:
            if score["metric"] == metric:
                scores.setdefault(score["setting"], []).append(score)
    measured = {}
    for setting, group in scores.items():
        value = summarize((score["mean"] for score in group), group[0]["low"], group[0]["high"])
        assert value is not None
        measured[setting] = value
    return measured


def interval_of(difference: GridDifference) -> Interval | None:
    """The span of both intervals, with one seed the one over prompts; None where one of them is missing."""
    kinds = ("over_seeds", "over_prompts") if len(difference["by_seed"]) > 1 else ("over_prompts",)
    found = [difference[kind] for kind in kinds]  # type: ignore[literal-required]
    return None if None in found else span(Interval(*each) for each in found)


_UNITS = {"accuracy": (100.0, 1, " points"), "loss": (1.0, 3, " nats")}
"""By what a difference is multiplied, the digits behind its point, and its unit."""


def _text(difference: GridDifference, value: float, unit: bool = True) -> str:
    """A value in the unit of a difference: its mean, or an edge of its intervals. Where they leave out zero, it has so
    many digits behind the point that the mean has two figures and no edge looks like zero.
    """
    scale, digits, word = _UNITS[difference["metric"]]
    interval = interval_of(difference)
    if interval is not None and interval.low * interval.high > 0:
        nearest = min(map(abs, interval))
        digits = max(digits, 1 - _place(scale * abs(difference["mean"])), -_place(scale * nearest))
    return signed(scale * value, digits) + (word if unit else "")


def _place(size: float) -> int:
    """Of the first figure: 0 for 1 ... 9, -1 for 0.1 ... 0.9."""
    return math.floor(math.log10(size))


def _interval_text(difference: GridDifference, bounds: Sequence[float] | None) -> str:
    return "–" if bounds is None else " to ".join(_text(difference, edge, unit=False) for edge in bounds)


def as_difference(difference: GridDifference) -> Difference:
    """In the form that the figures of a comparison draw. Without `interval_of` its outcome is "unknown"."""
    low, high = interval_of(difference) or (None, None)
    source = None if low is None else "seeds" if difference["over_seeds"] is not None else "samples"
    return Difference(
        difference["second"],
        difference["first"],
        f"{difference['metric']} at {difference['setting']}",
        tuple(difference["by_seed"]),
        difference["mean"],
        low,
        high,
        source,
    )


def headline(results: GridResults) -> str:
    """The verdict in one or two sentences."""
    differences = [as_difference(each) for each in results["differences"] if each["kind"] == "arm"]
    seeds = seeds_of_grid(results)
    if not differences:
        return "No arm was trained beside its own backbone, so there is nothing to compare."
    if seeds < 2:
        return f"{ONE_SEED} The figures below show what one run of each arm did, not which arm is better."
    return verdict(
        seeds,
        [difference.outcome for difference in differences],
        none="none leaves zero out of both its intervals",
        one="leaves zero out of both intervals",
        several="leave zero out of both intervals",
    )


def findings(results: GridResults) -> list[Finding]:
    """The sentences under the headline: what is clear, for each task of every arm as trained and over all tasks of any
    other comparison; the rest in a line; then what limits them. With one seed no mark takes sides.
    """
    groups: dict[tuple[str, ...], list[GridDifference]] = {}
    for each in results["differences"]:
        task = each["task"] if each["kind"] in _AS_TRAINED else ""
        groups.setdefault((each["arm"], each["kind"], each["first"], each["second"], task), []).append(each)
    clear, rest = [], []
    for group in sorted(groups.values(), key=lambda group: group[0]["kind"] not in _AS_TRAINED):
        if _clear(group):
            clear.append(_finding(results, group))
        else:
            rest.append(group)
    found = clear
    if rest:
        where = _plural(len(rest), "other comparison" if clear else "comparison")
        which = _plural(sum(map(len, rest)), "difference")
        text = f"In {where} nothing is beyond {_intervals(results)} ({which}; the tables below have them)."
        found = [*clear, Finding("level" if seeds_of_grid(results) > 1 else "note", text)]
    unknown = sum(interval_of(each) is None for each in results["differences"])
    if unknown:
        text = (
            f"{_plural(unknown, 'difference')} without an interval, as where all seeds have the same value: not called."
        )
        found.append(Finding("unknown", text))
    found += [Finding("note", line) for line in _guessing(results)]
    count = len(results["differences"]) - unknown
    if count > 5:
        by_chance = max(1, round(count / 20))
        text = f"{count} comparisons at 95 %: even if nothing differed, about {by_chance} could look like a difference."
        found.append(Finding("note", text))
    return found


def _intervals(results: GridResults) -> str:
    return "the intervals" if seeds_of_grid(results) > 1 else "the interval over prompts"


def _clear(differences: Sequence[GridDifference]) -> list[GridDifference]:
    return [each for each in differences if as_difference(each).outcome in ("better", "worse")]


def _finding(results: GridResults, group: Sequence[GridDifference]) -> Finding:
    """What is clear of one comparison, where something is."""
    kind = group[0]["kind"]
    clear = _clear(group)
    rest = len(group) - len(clear)
    first, second = _named(results, group[0], [each["task"] for each in group])
    if kind in _AS_TRAINED:
        parts = [f"{_text(each, each['mean'])} ({each['metric']}, {each['setting']})" for each in clear]
        text = f"{group[0]['task']}: {first} against {second}: {_listed(parts)}"
        if rest:
            text += f"; {'the other' if rest == 1 else f'the other {rest}'} not beyond {_intervals(results)}"
    else:
        sides = [[each for each in clear if as_difference(each).outcome == side] for side in ("better", "worse")]
        parts = [
            f"{len(side)} {words} ({_sizes(side)})"
            for side, words in zip(sides, ("in favour of the first", "against it"), strict=True)
            if side
        ]
        text = (
            f"{first} against {second}, {_KINDS[kind]}: of {_plural(len(group), 'difference')} beyond "
            f"{_intervals(results)} {_listed(parts)}"
        )
    outcomes = {as_difference(each).outcome for each in clear}
    takes_sides = seeds_of_grid(results) > 1 and kind != "interaction" and len(outcomes) == 1
    return Finding(outcomes.pop() if takes_sides else "note", f"{text}.")


def _sizes(differences: Sequence[GridDifference]) -> str:
    """ "accuracy +3.0 to +12.5 points, loss −0.00042 nats" """
    parts = []
    for metric in METRICS:
        own = sorted((each for each in differences if each["metric"] == metric), key=lambda each: each["mean"])
        if own:
            low, high = _text(own[0], own[0]["mean"], unit=False), _text(own[-1], own[-1]["mean"])
            parts.append(f"{metric} {f'{low} to {high}' if len(own) > 1 else high}")
    return ", ".join(parts)


def reading_notes(results: GridResults) -> list[str]:
    """What of reading trained models otherwise does not apply to which arm, and where an effect of training is not of
    training alone; none without interventions.
    """
    asked = results["settings"].get("interventions") or []
    arms = arms_of_grid(results)
    readings = {
        arm: {reading["reading"] for run in results["runs"] if run["arm"] == arm for reading in run["readings"]}
        for arm in arms
        if arm != backbone_of(arm)
    }
    notes = []
    for name in asked:
        without = [arm for arm, found in readings.items() if found and name not in found]
        if without:
            notes.append(f"{name} does not apply to {_listed(without)}.")
    unchanged = [arm for arm, found in readings.items() if asked and not found]
    without = [arm for arm, found in readings.items() if found and put_in_base(results, arm) is None]
    alone = [arm for arm in without if backbone_of(arm) not in arms]
    others = [arm for arm in without if arm not in alone]
    if unchanged:
        notes.append(f"{_listed(unchanged)}: read as trained alone, because there is no correction to change.")
    if alone:
        notes.append(f"{_listed(alone)}: without the 2 × 2, because the backbone is not among the arms.")
    if others:
        notes.append(
            f"{_listed(others)}: without the 2 × 2, because such a read step has parameters other than a gate, which "
            "no other model has learned."
        )
    confounded = dict.fromkeys(
        each["arm"] for each in results["differences"] if each["kind"] == "training and normalisation"
    )
    for backbone in dict.fromkeys(map(backbone_of, confounded)):
        own = [arm for arm in confounded if backbone_of(arm) == backbone]
        notes.append(
            f"{_listed(own)}: with unit queries, while {backbone} reads with raw ones, so that what training changes "
            f"contains the normalisation of the queries; an arm {backbone}+normalize in the grid takes it out."
        )
    return notes


def _guessing(results: GridResults) -> Iterator[str]:
    """Which arms do not beat guessing among what a row shows; a difference between two guessers means nothing."""
    for task in results["tasks"]:
        guessing: dict[str, list[str]] = {}
        for setting, chance in zip(task["settings"], task["chance"], strict=True):
            lows: dict[str, float] = {}
            for run in results["runs"]:
                for score in run["scores"]:
                    if (run["task"], score["setting"], score["metric"]) == (task["task"], setting, "accuracy"):
                        low = score["mean"] if score["low"] is None else score["low"]
                        lows[run["arm"]] = min(low, lows.get(run["arm"], low))
            guessers = [arm for arm, low in lows.items() if chance is not None and low <= chance]
            if guessers:
                who = "every arm" if len(guessers) == len(lows) else _listed(guessers)
                guessing.setdefault(who, []).append(f"{setting} ({share_text(chance or 0)})")
        if guessing:
            parts = [f"{who} with {_listed(settings)}" for who, settings in guessing.items()]
            yield (
                f"{task['task']}: not clearly above guessing among what a row shows: {'; '.join(parts)}. A difference "
                "between two such arms says little."
            )


def grid_tables(results: GridResults) -> list[TextTable]:
    """For every task and metric one table of scores, and for every arm with the 2 x 2 one of its effects."""
    several = seeds_of_grid(results) > 1
    spread = "mean ± standard deviation over seeds" if several else "95 % interval over prompts below"
    tables = []
    for task in results["tasks"]:
        for metric in metrics_of(results, task["task"]):
            lines = lines_of(results, task["task"], metric)
            settings = [setting for setting in task["settings"] if any(setting in line.values for line in lines)]
            is_share = metric == "accuracy"
            rows = tuple(
                TextRow(
                    line.label if line.reading == "on" else f"  {line.label}",
                    line.arm,
                    tuple(
                        measured_cell(line.values.get(setting), 1 if is_share else 3, percentage=is_share)
                        for setting in settings
                    ),
                )
                for line in lines
            )
            title = f"{task['task']}: {_TITLES[metric]}; {spread}"
            tables.append(TextTable(title, (Cell("arm"), *(_header(setting) for setting in settings)), rows))
    return tables


def _header(setting: str) -> Cell:
    """ "length 256" -> two lines."""
    name, space, value = setting.rpartition(" ")
    return Cell(name, value) if space and "," not in setting else Cell(setting)


def two_by_two_tables(results: GridResults) -> list[TextTable]:
    """For every task and arm: trained with and without the read step, read with and without it, and the effects."""
    tables = []
    for task in results["tasks"]:
        arms = dict.fromkeys(
            each["arm"]
            for each in results["differences"]
            if each["task"] == task["task"] and each["kind"] == "interaction"
        )
        for arm in arms:
            for metric in metrics_of(results, task["task"]):
                tables.append(_two_by_two_table(results, task, arm, metric))
    return tables


_EFFECTS = (
    ("training", "read off"),
    ("training", "read on"),
    ("reading", "trained without"),
    ("reading", "trained with"),
    ("interaction", ""),
)
"""What training or reading with the step changes, and where."""


def _two_by_two_table(results: GridResults, task: GridTaskResult, arm: str, metric: str) -> TextTable:
    corners = two_by_two(results, task["task"], arm, metric)
    effects = _effects(results, task["task"], arm, metric)
    is_share = metric == "accuracy"
    rows = []
    for setting in task["settings"]:
        if setting not in corners["with on"].values:
            continue
        cells = [
            measured_cell(line.values[setting], 1 if is_share else 3, percentage=is_share) for line in corners.values()
        ]
        for effect in _EFFECTS:
            found = effects[effect][setting]
            text = _text(found, found["mean"], unit=False)
            cells.append(Cell(text, _interval_text(found, interval_of(found))))
        rows.append(TextRow(setting, setting, tuple(cells)))
    header = [
        Cell("setting"),
        *(Cell(f"read {name.split()[1]}", f"trained {name.split()[0]}") for name in corners),
        *(Cell(kind, words) for kind, words in _EFFECTS),
    ]
    title = f"{task['task']}, {arm} and {put_in_base(results, arm)}: {_TITLES[metric]}"
    if any(each["kind"] != "training" for each in effects["training", "read off"].values()):
        title += "; training is with normalisation of the queries, too"
    return TextTable(title, tuple(header), tuple(rows))


def two_by_two(results: GridResults, task: str, arm: str, metric: str) -> dict[str, Line]:
    """The four corners: trained without and with the read step, read without and with it."""
    lines = {(line.arm, line.reading): line for line in lines_of(results, task, metric)}
    base = put_in_base(results, arm)
    assert base is not None
    return {
        "without off": lines[base, "on"],
        "without on": lines[arm, f"{PUT_INTO}{base}"],
        "with off": lines[arm, "off"],
        "with on": lines[arm, "on"],
    }


def _effects(
    results: GridResults, task: str, arm: str, metric: str
) -> dict[tuple[str, str], dict[str, GridDifference]]:
    effects: dict[tuple[str, str], dict[str, GridDifference]] = {effect: {} for effect in _EFFECTS}
    base = put_in_base(results, arm)
    for each in results["differences"]:
        if (each["task"], each["arm"], each["metric"]) != (task, arm, metric):
            continue
        kind, names = each["kind"], (each["first"], each["second"])
        if kind.startswith("training"):
            effects["training", "read off" if names[1] == base else "read on"][each["setting"]] = each
        elif kind == "reading" and names == (f"{arm}, on", f"{arm}, off"):
            effects["reading", "trained with"][each["setting"]] = each
        elif kind == "reading" and names[1] == base:
            effects["reading", "trained without"][each["setting"]] = each
        elif kind == "interaction":
            effects["interaction", ""][each["setting"]] = each
    return effects


def grid_table(results: GridResults) -> Table:
    """The terminal table: scores of every task, then the differences between arms and their backbones, as trained."""
    differences = [each for each in results["differences"] if each["kind"] in _AS_TRAINED]
    tables = grid_tables(results)
    if differences:
        tables.append(
            TextTable(
                "Differences between an arm and its backbone, paired by seed and by prompt",
                (
                    Cell("task, setting"),
                    Cell("pair"),
                    Cell("difference"),
                    Cell("95 % over seeds", "and over prompts"),
                ),
                tuple(
                    TextRow(
                        label,
                        label,
                        (
                            Cell(each["first"], f"− {each['second']}"),
                            Cell(_text(each, each["mean"])),
                            Cell(
                                _interval_text(each, each["over_seeds"]),
                                _interval_text(each, each["over_prompts"]),
                            ),
                        ),
                    )
                    for each in differences
                    for label in (f"{each['task']}, {each['setting']}",)
                ),
            )
        )
    notes = (
        [(ONE_SEED + " A second seed may reverse any difference here.", "bold")] if seeds_of_grid(results) < 2 else []
    )
    return terminal_grid(tables, [*notes, *((note, "") for note in reading_notes(results))])


def _score_lines(
    axes: Axes,
    lines: Sequence[tuple[Line, ArmStyle]],
    settings: Sequence[str],
    metric: str,
) -> list[LineEnd]:
    """One line a kind of model over the settings. Returns the line ends."""
    scale = 100.0 if metric == "accuracy" else 1.0
    ends = []
    for index, (line, style) in enumerate(lines):
        points = [(place, line.values[setting]) for place, setting in enumerate(settings) if setting in line.values]
        if points:
            ends.append(_marked_line(axes, points, (index, len(lines)), style, scale, line.label))
    axes.set_xticks(range(len(settings)), [_tick(setting) for setting in settings])
    axes.set_xlim(-0.35, len(settings) - 1 + 0.35)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_ylabel(_TITLES[metric])
    return ends


def _tick(setting: str) -> str:
    """ "needles 8, length 128" -> four short lines."""
    return "\n".join(part.replace(" ", "\n", 1) for part in setting.split(", "))


def _finish(axes: Axes, ends: list[LineEnd], metric: str, chances: Sequence[float | None]) -> None:
    """Limits, guessing, and the names of the lines."""
    if metric == "accuracy":
        axes.set_ylim(-2, 102)
        known = [(place, 100 * chance) for place, chance in enumerate(chances) if chance is not None]
        if known:
            axes.step(
                [known[0][0] - 0.35, *(place for place, _ in known), known[-1][0] + 0.35],
                [known[0][1], *(value for _, value in known), known[-1][1]],
                where="mid",
                color=_FAINT,
                linewidth=0.9,
                linestyle=(0, (1, 2)),
            )
            ends.append(LineEnd(axes.get_xlim()[1], known[-1][1], "guessing", _FAINT, _FAINT))
    _label_ends(axes, ends)


def _score_figures(results: GridResults, styles: Mapping[str, ArmStyle]) -> Iterator[Figure]:
    several = seeds_of_grid(results) > 1
    bars = (
        "Bars are ± one standard deviation over seeds, dots single seeds"
        if several
        else "Bars are 95 % intervals over prompts"
    )
    for number, task in enumerate(results["tasks"]):
        panels = []
        for metric in metrics_of(results, task["task"]):

            def draw(axes: Axes, task: GridTaskResult = task, metric: str = metric) -> None:
                lines = [line for line in lines_of(results, task["task"], metric) if line.reading == "on"]
                ends = _score_lines(axes, [(line, styles[line.arm]) for line in lines], task["settings"], metric)
                _finish(axes, ends, metric, task["chance"])
                axes.set_title("All arms as trained" if metric == "accuracy" else "Text without needles")

            panels.append(_svg(f"score-{number}-{metric}", f"{task['task']}: {_TITLES[metric]}", (4.6, 3.4), draw))

        def draw_curves(axes: Axes, task: GridTaskResult = task) -> None:
            _curves(axes, results, task["task"], styles)
            axes.set_title("Loss on answers during training")

        panels.append(
            _svg(f"curve-{number}", f"{task['task']}: loss on answers during training", (4.6, 3.4), draw_curves)
        )
        caption = (
            f"{task['description']} {bars}; grey dots are guessing among what a row shows. Bands of the training "
            "curves span the seeds."
        )
        yield Figure(f"task-{number}", f"{task['task']}: by difficulty", caption, tuple(panels))


def _curves(axes: Axes, results: GridResults, task: str, styles: Mapping[str, ArmStyle]) -> None:
    ends = []
    for arm, style in styles.items():
        runs = [run for run in results["runs"] if (run["task"], run["arm"]) == (task, arm) and run["curve"]]
        if not runs:
            continue
        common = sorted(set.intersection(*({point["tokens"] for point in run["curve"]} for run in runs)))
        columns = [
            [point["loss"] for run in runs for point in run["curve"] if point["tokens"] == tokens] for tokens in common
        ]
        means = [sum(column) / len(column) for column in columns]
        if len(runs) > 1:
            axes.fill_between(
                common, [min(c) for c in columns], [max(c) for c in columns], color=style.color, alpha=0.18, linewidth=0
            )
        (line,) = axes.plot(common, means, color=style.color, linestyle=style.dashes, linewidth=1.6)
        ends.append(LineEnd(common[-1], means[-1], _two_lines(arm), style.color, style.dark, line))
    axes.margins(x=0.0)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(lambda tokens, _position: _count_text(tokens))
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss, nats an answer")
    _label_ends(axes, ends)


def _gate_figure(results: GridResults, styles: Mapping[str, ArmStyle]) -> Figure | None:
    panels = []
    alone = False
    for number, task in enumerate(results["tasks"]):
        trainings: dict[str, list[list[GatePoint]]] = {}
        for run in results["runs"]:
            points = [
                GatePoint(point["tokens"], point["gate"], point.get("gate_by_decay_alone"))
                for point in run["curve"]
                if point["gate"] is not None
            ]
            if run["task"] == task["task"] and points:
                trainings.setdefault(run["arm"], []).append(points)
                alone = alone or any(point.by_decay_alone is not None for point in points)
        if trainings:

            def draw(
                axes: Axes,
                task: GridTaskResult = task,
                trainings: Mapping[str, Sequence[Sequence[GatePoint]]] = trainings,
            ) -> None:
                draw_gates(axes, trainings, styles)
                axes.set_title(task["task"])

            panels.append(_svg(f"gate-{number}", f"{task['task']}: mean gate during training", (4.6, 3.0), draw))
    caption = "The gate λ is how strongly a head applies the correction at a token. Bands span the seeds."
    if alone:
        caption += f" {gate_caption(results['settings'].get('optimizer', {}).get('decay_gate_bias'))}"
    return Figure("gate", "The gate during training", caption, tuple(panels)) if panels else None


def _two_by_two_figure(results: GridResults) -> Figure | None:
    panels = []
    dots = (0, (1, 1.5))
    for number, task in enumerate(results["tasks"]):
        arms = dict.fromkeys(
            each["arm"]
            for each in results["differences"]
            if (each["task"], each["kind"]) == (task["task"], "interaction")
        )
        for place, arm in enumerate(arms):
            for metric in metrics_of(results, task["task"]):

                def draw(axes: Axes, task: GridTaskResult = task, arm: str = arm, metric: str = metric) -> None:
                    drawn = []
                    styles = arm_styles((*arms_of_grid(results), backbone_of(arm)))
                    for name, line in two_by_two(results, task["task"], arm, metric).items():
                        trained, read = name.split()
                        style = styles[arm if trained == "with" else backbone_of(arm)]
                        style = style._replace(dashes="-" if read == "on" else dots, filled=read == "on")
                        drawn.append((line._replace(label=f"trained {trained},\nread {read}"), style))
                    ends = _score_lines(axes, drawn, task["settings"], metric)
                    _finish(axes, ends, metric, task["chance"])
                    axes.set_title(f"{task['task']}, {arm}")

                name = f"two-by-two-{number}-{place}-{metric}"
                panels.append(_svg(name, f"{task['task']}, {arm}: trained and read with and without", (4.6, 3.4), draw))
    caption = (
        "In the colour of the arm: trained with the read step, in that of its backbone: without it. Solid: read with "
        "it, dotted: without. If the step itself carries a gain, solid is better than dotted of the same colour; if "
        "training with it does, the colour of the arm is better than the other."
    )
    return Figure("two-by-two", "Training and reading", caption, tuple(panels)) if panels else None


def _difference_figure(results: GridResults, styles: Mapping[str, ArmStyle]) -> Figure | None:
    panels = []
    for number, task in enumerate(results["tasks"]):
        for metric in metrics_of(results, task["task"]):
            own = [each for each in results["differences"] if (each["task"], each["metric"]) == (task["task"], metric)]
            chosen = [as_difference(each) for each in own if each["kind"] == "arm"]
            names = [each["setting"] for each in own if each["kind"] == "arm"]
            if not chosen:
                continue

            def draw(
                axes: Axes,
                chosen: list[Difference] = chosen,
                names: list[str] = names,
                task: GridTaskResult = task,
                metric: str = metric,
            ) -> None:
                _forest(axes, chosen, styles, 100.0 if metric == "accuracy" else 1.0, names)
                better = "arm better →" if metric == "accuracy" else "← arm better"
                unit = "points" if metric == "accuracy" else "nats"
                axes.set_title(f"{task['task']}: {metric}, {unit}")
                if metric == "accuracy":
                    # Intervals of two or three seeds reach further than accuracies can differ.
                    reach = min(max(map(abs, axes.get_xlim())), 105)
                    axes.set_xlim(-reach, reach)
                axes.set_xlabel(f"arm minus its backbone   ({better})")

            size = (4.6, 1.0 + 0.3 * (len(chosen) + len({each.arm for each in chosen})))
            panels.append(_svg(f"difference-{number}-{metric}", f"{task['task']}: arm minus backbone", size, draw))
    caption = (
        "Each point is the mean over seeds, small dots are single seeds, and the bar spans both 95 % intervals, over "
        "seeds and over prompts; where all seeds agree there is none"
        if seeds_of_grid(results) > 1
        else "The bar is the 95 % interval over prompts of this one seed; another seed can move the point further"
    )
    caption += ". A bar that crosses zero settles nothing."
    return Figure("differences", "Differences to the backbone", caption, tuple(panels)) if panels else None


def grid_figures(results: GridResults) -> list[Figure]:
    """The report's figures in reading order."""
    styles = arm_styles(arms_of_grid(results))
    figures = [
        _difference_figure(results, styles),
        _two_by_two_figure(results),
        *_score_figures(results, styles),
        _gate_figure(results, styles),
    ]
    return [figure for figure in figures if figure is not None]


def grid_figure_png(results: GridResults, path: str | os.PathLike[str]) -> None:
    """Write one PNG: the scores of every task by difficulty, up to three side by side. The file is replaced whole; its
    folder must exist.
    """
    from matplotlib.figure import Figure as MatplotlibFigure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    styles = arm_styles(arms_of_grid(results))
    columns = min(len(results["tasks"]), 3)
    rows = -(-len(results["tasks"]) // columns)
    with _plain_style():
        layout = ConstrainedLayoutEngine(wspace=0.05, hspace=0.08)
        figure = MatplotlibFigure(figsize=(4.8 * columns, 3.7 * rows), dpi=120, layout=layout)
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, task in zip(grid, results["tasks"], strict=False):
            lines = [line for line in lines_of(results, task["task"], "accuracy") if line.reading == "on"]
            ends = _score_lines(axes, [(line, styles[line.arm]) for line in lines], task["settings"], "accuracy")
            _finish(axes, ends, "accuracy", task["chance"])
            axes.set_title(task["task"])
        for axes in grid[len(results["tasks"]) :]:
            axes.set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    write_bytes_atomically(path, buffer.getvalue())


def _all_differences(results: GridResults) -> list[dict[str, str]]:
    one_seed = seeds_of_grid(results) < 2
    return [
        {
            "task": each["task"],
            "setting": each["setting"],
            "what": _KINDS[each["kind"]],
            "pair": _pair(results, each),
            "difference": _text(each, each["mean"]),
            "seeds": _interval_text(each, each["over_seeds"]),
            "prompts": _interval_text(each, each["over_prompts"]),
            "outcome": "note" if one_seed or each["kind"] == "interaction" else as_difference(each).outcome,
        }
        for each in results["differences"]
    ]


def _pair(results: GridResults, difference: GridDifference) -> str:
    first, second = _named(results, difference, [difference["task"]])
    return f"({first}) − ({second})" if difference["kind"] == "interaction" else f"{first} − {second}"


def _run_facts(results: GridResults) -> list[tuple[str, str]]:
    facts = []
    for task in results["tasks"]:
        for arm in arms_of_grid(results):
            runs = [run for run in results["runs"] if (run["task"], run["arm"]) == (task["task"], arm)]
            first = runs[0]
            text = (
                f"{first['steps']:,} steps, {first['tokens']:,} tokens a run, {first['parameters']:,} parameters, "
                f"{_plural(len(runs), 'seed')}, {sum(run['seconds'] for run in runs):,.0f} s in all"
            )
            gates = [run["gate"] for run in runs if run["gate"] is not None]
            if gates:
                corrections = [run["correction"] for run in runs if run["correction"] is not None]
                text += (
                    f"; mean λ {sum(gates) / len(gates):.3f}, correction "
                    f"{100 * sum(corrections) / len(corrections):.2f} % of a query"
                )
            facts.append((f"{task['task']}, {arm}", text))
    return facts


def render_grid_report(results: GridResults) -> str:
    """The page as text; equal results give equal text."""
    arms = arms_of_grid(results)
    facts: list[tuple[str, Any]] = [("Runs", _run_facts(results))]
    settings = {name: value for name, value in results["settings"].items() if name != "tasks"}
    facts += [("Settings", _flattened(settings))]
    facts += [(f"Task {name}", _flattened(values)) for name, values in results["settings"]["tasks"].items()]
    facts += [("Machine and versions", _flattened(dict(results["environment"])))]
    return render_page(
        "grid.html.j2",
        grid_figures(results),
        name=results["name"],
        created=results["created"],
        arms=arms,
        seeds=seeds_of_grid(results),
        styles=arm_styles(arms),
        headline=headline(results),
        findings=findings(results),
        tables=grid_tables(results),
        two_by_two=two_by_two_tables(results),
        reading_notes=reading_notes(results),
        differences=_all_differences(results),
        tasks=results["tasks"],
        facts=facts,
        version=results["environment"]["ccq"],
    )


def write_grid_report(results: GridResults, path: str | os.PathLike[str]) -> None:
    """Write the self-contained HTML report of a grid to `path`, whole or not at all. The folder must exist."""
    write_bytes_atomically(path, render_grid_report(results).encode())
