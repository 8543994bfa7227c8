"""The figures of the paper with the runs that were given, and quality against cost.

An arm looks as it does in a comparison's report, and the same in every figure. Lines of the paper are thin and without
marks, those of runs thicker and with marks.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ccq.report.costs import QUALITY_TITLES, CostPoint
from ccq.report.figures import (
    ArmStyle,
    _count_text,
    _heat,
    _plain_style,
    arm_styles,
    draw_gates,
    gate_caption,
    svg_element,
)
from ccq.report.paper import PaperValue, read_paper
from ccq.report.paper_tables import HERE, PAPER, ReportTable, TableRow, estimate
from ccq.report.runs import Runs, ScoreName, Subject, Training, subject_order
from ccq.report.tables import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

_COLUMNS = 3
_DOTS_PER_INCH = 150
_SWEEP_HEIGHT = 3.0
"""Inches."""

Panel = TypeVar("Panel")


class ReportFigure(NamedTuple):
    """A figure and how it is drawn on an empty matplotlib figure of `size` inches; `key` names its files."""

    key: str
    title: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Figure], None]


def report_figures(runs: Runs, efficiency: ReportTable | None, points: Sequence[CostPoint]) -> list[ReportFigure]:
    """Needles by depth, figures 3 and 4 by scale, figure 5, quality against cost and the gate during training, as far
    as something was given for them.
    """
    styles = _styles(runs, efficiency)
    figures = [
        *_depth_figures(runs, styles),
        *_extrapolation_figures(runs, styles),
        _efficiency_figure(runs, efficiency, styles),
        _cost_figure(points, styles),
        _gate_figure(runs, styles),
    ]
    return [figure for figure in figures if figure is not None]


def _styles(runs: Runs, efficiency: ReportTable | None) -> dict[str, ArmStyle]:
    """One for each arm of any figure."""
    arms = [subject.arm for subject in runs.subjects()]
    arms += [] if efficiency is None else [row.arm for row in efficiency.rows]
    arms += [arm for benchmark in runs.models for arm, _ in benchmark.sweep]
    arms += [training.model.arm for training in runs.trainings]
    arms += [
        arm for corpora in read_paper().extrapolation.values.values() for values in corpora.values() for arm in values
    ]
    return arm_styles(list(dict.fromkeys(arms)))


def render_figure(figure: ReportFigure) -> tuple[str, bytes, bytes]:
    """As an <svg> element for a page, as an SVG file and as a PNG file; equal input gives equal output."""
    import matplotlib
    from matplotlib.figure import Figure as MatplotlibFigure

    with _plain_style():
        drawn = MatplotlibFigure(figsize=figure.size, layout="constrained")
        figure.draw(drawn)
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")  # what is placed stays there, and is not placed again for each file
        element = svg_element(figure.key, figure.title, drawn)
        files = []
        for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            matplotlib.rcParams["svg.hashsalt"] = figure.key
            buffer = io.BytesIO()
            drawn.savefig(buffer, format=kind, facecolor="white", dpi=_DOTS_PER_INCH, metadata=metadata)
            files.append(buffer.getvalue())
    return element, files[0], files[1]


# Needles by depth, which the paper does not show.


def _depth_figures(runs: Runs, styles: Mapping[str, ArmStyle]) -> list[ReportFigure]:
    """For each scale and task a grid of panels, one a model: length across, depth down."""
    found = {subject: runs.depths(subject) for subject in runs.subjects()}
    figures = []
    for scale in dict.fromkeys(subject.scale for subject in found):
        mine = {subject: depths for subject, depths in found.items() if subject.scale == scale and depths}
        names = dict.fromkeys(task.rpartition("/")[0] for depths in mine.values() for task in depths)
        figures += [_depth_figure(scale, name, mine, styles) for name in names]
    return figures


def _depth_figure(
    scale: str,
    name: str,
    found: Mapping[Subject, Mapping[str, Mapping[tuple[float, float], float]]],
    styles: Mapping[str, ArmStyle],
) -> ReportFigure:
    grids: dict[Subject, dict[int, Mapping[tuple[float, float], float]]] = {}
    for subject, depths in found.items():
        for task, points in depths.items():
            if task.rpartition("/")[0] == name:
                grids.setdefault(subject, {})[int(task.rpartition("/")[2])] = points
    lengths = sorted({length for columns in grids.values() for length in columns})
    places = sorted({place for columns in grids.values() for points in columns.values() for place in points})
    columns = min(len(grids), _COLUMNS)
    rows = -(-len(grids) // columns)

    def draw(figure: Figure) -> None:
        for number, (subject, by_length) in enumerate(grids.items()):
            axes = figure.add_subplot(rows, columns, number + 1)
            grid = [[by_length.get(length, {}).get(place) for length in lengths] for place in places]
            style = styles[subject.arm]
            _heat(axes, grid, style.dark, 1.0, lambda value: f"{100 * value:.0f}")
            axes.set_xticks(range(len(lengths)), [length_text(length) for length in lengths])
            axes.set_yticks(range(len(places)), [f"{100 * start:.0f}–{100 * end:.0f} %" for start, end in places])
            axes.set_title(_clipped(subject.label), color=style.dark)
            if number >= len(grids) - columns:
                axes.set_xlabel("length in tokens")

    caption = (
        "Share of needles found, in per cent, by length of the text and depth at which the needle stands (0 % is the "
        "start, far from the question), over all seeds. An empty cell was not asked. The paper does not show this."
    )
    size = (max(3.4, 0.45 * len(lengths) + 1.0) * columns, (0.27 * len(places) + 0.75) * rows)
    return ReportFigure(
        f"depth-{_file_name(scale)}-{_file_name(name)}", f"{name} by depth, {scale}", caption, size, draw
    )


# Figures 3 and 4.


def _extrapolation_figures(runs: Runs, styles: Mapping[str, ArmStyle]) -> list[ReportFigure]:
    curves = read_paper().extrapolation
    names = runs.names("extrapolation")
    mine = [s for s in runs.subjects() if any(name in scores for scores in runs.seeds(s).values() for name in names)]
    if not mine:
        return []
    own_scales = list(dict.fromkeys(subject.scale for subject in mine))
    of_paper = [scale for scale in curves.values if scale in own_scales] or list(curves.values)
    figures = []
    for scale in [*of_paper, *(scale for scale in own_scales if scale not in of_paper)]:
        subjects = [subject for subject in mine if subject.scale == scale]
        paper = curves.values.get(scale, {})
        corpora = list(dict.fromkeys([*paper, *(name.task.rpartition("/")[0] for name in names if subjects)]))
        measured = {corpus: _curves_of(runs, subjects, names, corpus) for corpus in corpora}
        corpora = [corpus for corpus in corpora if corpus in paper or measured[corpus]]
        figures.append(_extrapolation_figure(scale, corpora, paper, measured, styles))
    return figures


Curve = list[tuple[int, tuple[float, ...], float, float]]
"""Length, values of the seeds, and the ends of the bar."""


def _curves_of(
    runs: Runs, subjects: Sequence[Subject], names: Sequence[ScoreName], corpus: str
) -> dict[Subject, Curve]:
    curves: dict[Subject, Curve] = {}
    for subject in subjects:
        by_seed = runs.seeds(subject)
        for name in names:
            task, _, length = name.task.rpartition("/")
            scores = [found[name] for found in by_seed.values() if name in found]
            if task != corpus or not scores:
                continue
            found = estimate(scores)
            low = high = found.mean
            if len(found.values) > 1:
                deviation = statistics.stdev(found.values)
                low, high = found.mean - deviation, found.mean + deviation
            elif found.interval is not None:
                low, high = found.interval
            curves.setdefault(subject, []).append((int(length), found.values, low, high))
    return {subject: sorted(curve) for subject, curve in curves.items()}


def _extrapolation_figure(
    scale: str,
    corpora: Sequence[str],
    paper: Mapping[str, Mapping[str, Sequence[PaperValue]]],
    measured: Mapping[str, Mapping[Subject, Curve]],
    styles: Mapping[str, ArmStyle],
) -> ReportFigure:
    curves = read_paper().extrapolation
    subjects = list(dict.fromkeys(subject for found in measured.values() for subject in found))
    paper_arms = list(dict.fromkeys(arm for arms in paper.values() for arm in arms))
    rows = -(-len(corpora) // _COLUMNS)

    def draw(figure: Figure) -> None:
        for place, corpus in enumerate(corpora):
            axes = figure.add_subplot(rows, _COLUMNS, place + 1)
            for arm, values in paper.get(corpus, {}).items():
                style = styles[arm]
                perplexities = [value.value for value in values]
                axes.plot(curves.lengths, perplexities, color=style.color, linestyle=style.dashes, linewidth=1.0)
            for subject, curve in measured[corpus].items():
                _plot_curve(axes, curve, styles[subject.arm], subject)
            lengths = sorted(
                {length for curve in measured[corpus].values() for length, *_ in curve}
                | set(curves.lengths if corpus in paper else ())
            )
            axes.set_xticks(_spread(lengths, 6), [length_text(length) for length in _spread(lengths, 6)])
            axes.set_title(_clipped(curves.panels.get(corpus, corpus)))
            axes.grid(axis="y")
            axes.set_axisbelow(True)
            if place % _COLUMNS == 0:
                axes.set_ylabel("token perplexity")
            if place >= len(corpora) - _COLUMNS:
                axes.set_xlabel("window length in tokens")
        handles = [_line(styles[arm], f"{read_paper().models.get(arm, arm)} ({PAPER})", False) for arm in paper_arms]
        handles += [_line(_style(styles, subject), f"{_clipped(subject.label)} ({HERE})", True) for subject in subjects]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)

    bars = (
        "Bars are one standard deviation over seeds, dots single seeds; with one seed they are the 95 % interval over "
        "windows."
    )
    legend_rows = -(-(len(paper_arms) + len(subjects)) // 4)
    words = {"500M": "Figures 3 and 4, 500M", "1.3B": "Figures 3 and 4, 1.3B"}
    notes = " ".join(note.text for note in curves.notes if not note.places or any(p[0] == scale for p in note.places))
    if not paper:
        caption = f"Lower is better. {bars} The paper has no models of this scale."
    else:
        provenance = read_paper().provenance["digitised"]
        caption = f"Lower is better. {bars if subjects else ''} Curves of the paper: {provenance}. {notes}"
    return ReportFigure(
        f"extrapolation-{_file_name(scale)}",
        f"{words.get(scale, scale)}: token perplexity by length",
        " ".join(caption.split()),
        (10.0, 2.5 * rows + 0.4 + 0.22 * legend_rows),
        draw,
    )


def _plot_curve(axes: Axes, curve: Curve, style: ArmStyle, subject: Subject) -> None:
    lengths = [length for length, *_ in curve]
    means = [statistics.fmean(values) for _, values, _, _ in curve]
    drawn = _shifted(style, subject)
    axes.plot(
        lengths,
        means,
        color=drawn.color,
        linestyle=drawn.dashes,
        linewidth=1.9,
        marker=drawn.marker,
        markersize=4.5,
        markerfacecolor=drawn.color if drawn.filled else "white",
    )
    for length, values, low, high in curve:
        axes.plot([length, length], [low, high], color=drawn.dark, linewidth=1, alpha=0.7, zorder=1.5)
        if len(values) > 1:
            axes.scatter([length] * len(values), values, s=7, color=drawn.dark, alpha=0.5, linewidths=0)


def _shifted(style: ArmStyle, subject: Subject) -> ArmStyle:
    """With the correction off, or another intervention: dotted and hollow."""
    return style if subject.read in (None, "on") else style._replace(dashes=(0, (1, 1.5)), filled=False)


def _style(styles: Mapping[str, ArmStyle], subject: Subject) -> ArmStyle:
    return _shifted(styles[subject.arm], subject)


def _line(style: ArmStyle, label: str, is_here: bool) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        label=label,
        color=style.color,
        linestyle=style.dashes,
        linewidth=1.9 if is_here else 1.0,
        marker=style.marker if is_here else None,
        markersize=4.5,
        markerfacecolor=style.color if style.filled else "white",
    )


def _clipped(text: str, most: int = 40) -> str:
    """Names may be longer than a figure has room for; tables have them in full."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, the first and the last among them."""
    step = -(-(len(values) - 1) // (most - 1)) or 1
    chosen = list(values[::step])
    return chosen if values and chosen[-1] == values[-1] else [*chosen[:-1], *values[-1:]]


def length_text(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in text)


# Figure 5.


def _efficiency_figure(runs: Runs, table: ReportTable | None, styles: Mapping[str, ArmStyle]) -> ReportFigure | None:
    """The efficiency table as bars, and the sweeps over lengths at a fixed number of tokens a step."""
    sweeps = [benchmark for benchmark in runs.models if benchmark.sweep]
    shown = () if table is None else table.rows
    chosen = [
        (place, label)
        for place, label in enumerate(() if table is None else table.columns)
        if any(row.source == HERE and row.cells[place].value is not None for row in shown)
    ]
    if not chosen and not sweeps:
        return None
    bars = [(_bars(shown, place), label) for place, label in chosen]
    # A row of bars is as high as the panel with most of them.
    bar_heights = [0.8 + 0.24 * max(len(each) for each, _ in row) for row in _rows_of(bars)]
    sweep_heights = [_SWEEP_HEIGHT for _ in _rows_of(sweeps)]

    def draw(figure: Figure) -> None:
        # Laid out apart: the long names beside bars would leave a sweep little width.
        heights = [sum(each) for each in (bar_heights, sweep_heights) if each]
        parts = iter(figure.subfigures(len(heights), height_ratios=heights, squeeze=False).flat)
        if bars:
            for axes, (each, label) in _panels(next(parts), bar_heights, bars):
                _draw_bars(axes, each, label, styles)
        if sweeps:
            for axes, benchmark in _panels(next(parts), sweep_heights, sweeps):
                _draw_sweep(axes, benchmark.sweep, styles)
                axes.set_title(f"training, {benchmark.sweep_tokens:,} tokens a step, {benchmark.scale}")

    caption = []
    if bars:
        caption.append(
            "Bars of the paper are hatched (v2, App. C, from a reading note of v2); those of runs are plain. Machines, "
            "numbers of rows and precision differ as the table says."
        )
    caption.append(
        "The paper's own Figure 5, a sweep over lengths at 32K tokens a step, is not drawn: none of its numbers is "
        "known here."
    )
    for sweep in sweeps:
        said = "; ".join((f"one {sweep.machine}, medians", *sweep.notes)).rstrip(".")
        caption.append(f"The sweep of {sweep.path.name}: {said}.")
    return ReportFigure(
        "efficiency",
        "Figure 5: end-to-end efficiency",
        " ".join(caption),
        (10.0, sum((*bar_heights, *sweep_heights)) + 0.3),
        draw,
    )


def _rows_of(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    """Two a row."""
    return [panels[first : first + 2] for first in range(0, len(panels), 2)]


def _panels(figure: SubFigure, heights: Sequence[float], panels: Sequence[Panel]) -> Iterator[tuple[Axes, Panel]]:
    """Every panel with its place."""
    grid = figure.add_gridspec(len(heights), min(len(panels), 2), height_ratios=heights)
    for place, panel in enumerate(panels):
        yield figure.add_subplot(grid[divmod(place, 2)]), panel


def _bars(rows: Sequence[TableRow], place: int) -> list[tuple[str, str, str, float, str]]:
    """Label, arm, source, value and its text of every row that has one."""
    return [
        (
            _clipped(f"{row.label} ({row.scale})", 56),
            row.arm,
            row.source,
            row.cells[place].value or 0.0,
            row.cells[place].text,
        )
        for row in rows
        if row.cells[place].value is not None
    ]


def _draw_bars(
    axes: Axes, bars: Sequence[tuple[str, str, str, float, str]], title: str, styles: Mapping[str, ArmStyle]
) -> None:
    for place, (_, arm, source, value, text) in enumerate(bars):
        style = styles[arm]
        if source == PAPER:
            axes.barh(place, value, height=0.66, color="white", edgecolor=style.color, hatch="////", linewidth=0.8)
        else:
            axes.barh(place, value, height=0.66, color=style.color)
        axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * max(value for *_, value, _ in bars))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_title(title)


def _draw_sweep(axes: Axes, sweep: Mapping[tuple[str, int], float], styles: Mapping[str, ArmStyle]) -> None:
    for arm in dict.fromkeys(arm for arm, _ in sweep):
        mine = sorted((tokens, speed) for (name, tokens), speed in sweep.items() if name == arm)
        style = styles[arm]
        axes.plot(
            [tokens for tokens, _ in mine],
            [speed for _, speed in mine],
            color=style.color,
            linestyle=style.dashes,
            marker=style.marker,
            markersize=4.5,
            markerfacecolor=style.color if style.filled else "white",
            label=arm,
        )
    lengths = sorted({tokens for _, tokens in sweep})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [length_text(length) for length in lengths], minor=False)
    axes.minorticks_off()
    # The topmost mark whole.
    axes.set_ylim(0, 1.06 * max(sweep.values()))
    axes.yaxis.set_major_formatter(lambda value, _position: _count_text(value))
    axes.set_xlabel("length of a row in tokens")
    axes.set_ylabel("tokens a second")
    axes.grid(axis="y")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


# Quality against cost.

_COSTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("state_bytes", "state of one sequence", bytes_text),
    ("training_tokens_per_second", "training, tokens a second", _count_text),
    ("decode_tokens_per_second", "decoding, tokens a second", _count_text),
)


def _cost_figure(points: Sequence[CostPoint], styles: Mapping[str, ArmStyle]) -> ReportFigure | None:
    panels = []
    for group, scale in dict.fromkeys((point.group, point.scale) for point in points):
        mine = [point for point in points if (point.group, point.scale) == (group, scale)]
        for cost, label, text in _COSTS:
            known = [point for point in mine if getattr(point, cost) is not None]
            if len(known) > 1:
                panels.append((group, scale, cost, label, text, known))
    if not panels:
        return None
    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    subjects = list(dict.fromkeys(point.subject._replace(scale="") for *_, known in panels for point in known))

    def draw(figure: Figure) -> None:
        for number, (group, scale, cost, label, text, known) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            for place, point in enumerate(known):
                shift = 5.0 * (place - (len(known) - 1) / 2)
                _draw_point(axes, point, float(getattr(point, cost)), styles[point.subject.arm], shift)
            axes.dataLim.update_from_data_xy(_corners(known, cost))
            axes.autoscale_view()
            axes.margins(x=0.2, y=0.15)
            axes.set_title(f"{QUALITY_TITLES[group]}\n{_clipped(scale)}", fontsize=9)
            axes.set_xlabel(label)
            if cost == "state_bytes":
                axes.set_xticks(sorted({getattr(point, cost) for point in known}))
            else:
                axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(_formatter(text))
            axes.grid(color="#eeeeee")
            axes.set_axisbelow(True)
        handles = [_point_handle(subject, styles) for subject in subjects]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)

    caption = (
        "Each point is one model: a backbone (not trained with the read step), a model trained with it, and the same "
        "model with the correction switched off (cross). Bars are 95 % intervals, over seeds where there are several, "
        "else over samples. Switched off, a model has the state of its backbone and the training speed of the "
        "correction; its speed of decoding was not measured. Losses: lower is better."
    )
    legend_rows = -(-len(subjects) // 3)
    size = (3.4 * columns if columns > 1 else 5.0, 2.9 * rows + 0.2 + 0.22 * legend_rows)
    return ReportFigure("quality-cost", "Quality against cost", caption, size, draw)


def _corners(points: Sequence[CostPoint], cost: str) -> list[tuple[float, float]]:
    """What the axes must show; of lines that are moved matplotlib does not know it."""
    return [
        (float(getattr(point, cost)), value)
        for point in points
        for value in (point.score.mean, *(point.score.interval or ()))
    ]


def _formatter(text: Callable[[float], str]) -> Callable[[float, float], str]:
    return lambda value, _position: text(value)


def _draw_point(axes: Axes, point: CostPoint, cost: float, style: ArmStyle, shift: float) -> None:
    """`shift` is in typographical points, so that models of equal cost stand side by side."""
    from matplotlib.transforms import ScaledTranslation

    moved = axes.transData + ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
    if point.score.interval is not None:
        bar = list(point.score.interval)
        axes.plot([cost, cost], bar, color=style.dark, linewidth=1.1, alpha=0.6, zorder=2, transform=moved)
    marks = _point_marks(point.subject, style)
    axes.plot([cost], [point.score.mean], linestyle="none", zorder=3, transform=moved, **marks)


def _point_marks(subject: Subject, style: ArmStyle) -> dict[str, Any]:
    marker = "X" if subject.read == "off" else style.marker
    return {
        "marker": marker,
        "markersize": 7,
        "markeredgecolor": style.dark,
        "markerfacecolor": style.dark if style.filled and subject.read != "off" else "white",
        "markeredgewidth": 1.3,
    }


def _point_handle(subject: Subject, styles: Mapping[str, ArmStyle]) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", label=_clipped(subject.label), **_point_marks(subject, styles[subject.arm]))


# The gate during training.


def _gate_figure(runs: Runs, styles: Mapping[str, ArmStyle]) -> ReportFigure | None:
    """A panel for each scale of the trainings whose gate was looked at."""
    groups: dict[str, dict[str, list[Training]]] = {}
    for training in sorted(runs.trainings, key=lambda each: subject_order(each.model.subject)):
        if training.gates:
            groups.setdefault(training.model.scale, {}).setdefault(training.model.arm, []).append(training)
    if not groups:
        return None
    shown = [training for arms in groups.values() for trainings in arms.values() for training in trainings]

    def draw(figure: Figure) -> None:
        for number, (scale, arms) in enumerate(groups.items()):
            axes = figure.add_subplot(len(groups), 1, number + 1)
            curves = {arm: [training.gates for training in trainings] for arm, trainings in arms.items()}
            draw_gates(axes, curves, styles, lambda arm: _clipped(arm.replace(", ", ",\n", 1), 70))
            axes.set_title(scale)

    caption = "The mean of λ over layers, heads and tokens, one line a model. Bands span the seeds."
    if any(point.by_decay_alone is not None for training in shown for point in training.gates):
        decays = {training.gate_bias_decays for training in shown}
        caption += f" {gate_caption(decays.pop() if len(decays) == 1 else None)}"
    return ReportFigure("gate", "The gate during training", caption, (10.0, 3.0 * len(groups) + 0.2), draw)
