"""The plots of a comparison, as inline SVG panels for the HTML report and as one PNG for the README.

Each figure is a few small panels that the page lays side by side or, on a phone, one below the other. A backbone has
one hue; its arm with a read is the darker, solid form of it, the backbone alone the lighter, dashed one. Where one
backbone has several reads, each further one has a hue, a marker and a line of its own. matplotlib is imported inside
the functions.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from ccq.files import write_bytes_atomically
from ccq.report.tables import (
    ComparisonRow,
    Difference,
    Measured,
    arm_differences,
    arms_of,
    backbone_of,
    bytes_text,
    comparison_rows,
    multiple_text,
    runs_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.figure import Figure as MatplotlibFigure
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Affine2D

    from ccq.evals.results import CompareResults, GateHistogram, RunResult, TrainingPoint

# Light and dark form of each hue, told apart in the common colour-vision deficiencies (blue, orange, green, purple of
# different lightness; those after the grey are at least 10 in CIELAB from all others and from the hues of reads, with
# and without a deficiency, which matplotlib's tab20 and tab20b are not). The models of `ccq models` have fewer
# backbones; the lengths of the two lists have no common factor, so that hue and marker together differ for 55.
_HUES = (
    ("#7eb0de", "#0f4c8a"),
    ("#eba45c", "#a34a00"),
    ("#6cc3a0", "#00664b"),
    ("#c29bd6", "#652a86"),
    ("#b3b3b3", "#3d3d3d"),
    ("#e169ff", "#1e0087"),
    ("#d2a578", "#782d00"),
    ("#ff6987", "#a55a78"),
    ("#78c300", "#78782d"),
    ("#2db43c", "#2d4b2d"),
    ("#a5b4ff", "#001eb4"),
)
_MARKERS = "os^Dv"
_KNOWN_BACKBONES = ("gla", "gated-deltanet")
# Further reads of a backbone: form for lines and form for text of each hue. The hues differ in lightness too, for the
# colour-vision deficiencies; the lengths of the three lists have no common factor, so that hue and marker together
# differ for 35 arms, hue and line for 28.
_READ_HUES = (
    ("#b3123f", "#b3123f"),
    ("#1590a8", "#0d6a7c"),
    ("#6a2be0", "#6a2be0"),
    ("#9c8a00", "#6b5f00"),
    ("#101820", "#101820"),
    ("#e05ab4", "#a8277c"),
    ("#451a05", "#451a05"),
)
_READ_MARKERS = "P*<>d"
_READ_DASHES = ((0, (3.5, 1.2, 1, 1.2)), (0, (7, 1.5)), (0, (3.5, 1.2, 1, 1.2, 1, 1.2)), "-")
_MOST_END_LABELS = 7  # of more, the leaders can no longer be followed
_INK = "#333333"
_FAINT = "#8a8a8a"
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
}


class ArmStyle(NamedTuple):
    """How an arm is drawn in every figure."""

    color: str
    dark: str  # the dark form of the hue, for text and heat maps
    dashes: Any  # matplotlib line style
    marker: str
    filled: bool


class GatePoint(NamedTuple):
    """lambda after so many tokens of a training: its mean, and where weight decay alone would have taken it."""

    tokens: float
    gate: float
    by_decay_alone: float | None


class Figure(NamedTuple):
    """One figure of the report. `key` names it in the page; `panels` are complete <svg> elements without fixed size."""

    key: str
    title: str
    caption: str
    panels: tuple[str, ...]


def arm_styles(arms: Sequence[str]) -> dict[str, ArmStyle]:
    """A style for each arm; a known backbone and its arm with ccq look the same in every report.

    The hue of a backbone goes to ccq or, without it, to the first read; the further reads take looks by their turn.
    """
    backbones = list(dict.fromkeys([*_KNOWN_BACKBONES, *(backbone_of(arm) for arm in arms)]))
    first_reads: dict[str, str] = {}
    for arm in arms:
        backbone = backbone_of(arm)
        if arm == f"{backbone}+ccq":
            first_reads[backbone] = arm
        elif arm != backbone:
            first_reads.setdefault(backbone, arm)
    styles: dict[str, ArmStyle] = {}
    turns = itertools.count()
    for arm in arms:
        backbone = backbone_of(arm)
        number = backbones.index(backbone)
        (light, dark), marker = _HUES[number % len(_HUES)], _MARKERS[number % len(_MARKERS)]
        if arm == backbone:
            styles[arm] = ArmStyle(light, dark, (0, (4, 2)), marker, False)
        elif arm == first_reads[backbone]:
            styles[arm] = ArmStyle(dark, dark, "-", marker, True)
        else:
            turn = next(turns)
            color, dark = _READ_HUES[turn % len(_READ_HUES)]
            dashes, marker = _READ_DASHES[turn % len(_READ_DASHES)], _READ_MARKERS[turn % len(_READ_MARKERS)]
            styles[arm] = ArmStyle(color, dark, dashes, marker, True)
    return styles


def swatch(style: ArmStyle) -> str:
    """The line and the marker of an arm as a small <svg> element, to stand beside its name."""
    from matplotlib.markers import MarkerStyle
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2D

    marker = MarkerStyle(style.marker)
    path = marker.get_path().transformed(marker.get_transform() + Affine2D().scale(9, -9).translate(17, 7))
    letters = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
    shape = "".join(
        "Z" if code == Path.CLOSEPOLY else letters[code] + " ".join(f"{value:.1f}" for value in points)
        for points, code in path.iter_segments(simplify=False)
    )
    lengths = [] if style.dashes == "-" else [f"{2 * length:g}" for length in style.dashes[1]]
    dashes = f' stroke-dasharray="{" ".join(lengths)}"' if lengths else ""
    fill = style.color if style.filled else "#ffffff"
    return (
        f'<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true"><g stroke="{style.color}" stroke-width="2">'
        f'<path d="M0 7H34"{dashes}/><path d="{shape}" fill="{fill}" stroke-width="1"/></g></svg>'
    )


@contextmanager
def _plain_style() -> Iterator[None]:
    """matplotlib's defaults plus ours, whatever the reader's matplotlibrc says."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _svg(name: str, description: str, size: tuple[float, float], draw: Callable[[Axes], None]) -> str:
    """Draw one panel and return it as an <svg> element that scales with its container and whose ids are its own."""
    from matplotlib.figure import Figure as MatplotlibFigure

    with _plain_style():
        figure = MatplotlibFigure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        return svg_element(name, description, figure)


def svg_element(name: str, description: str, figure: MatplotlibFigure) -> str:
    """A drawn figure as such an element; inside `_plain_style`."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = name
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(buffer.getvalue())
    for child in [child for child in root if child.tag == f"{{{_SVG}}}metadata"]:
        root.remove(child)
    for element in root.iter():
        for attribute, value in list(element.attrib.items()):
            if attribute == "id":
                element.set(attribute, f"{name}-{value}")
            elif attribute == f"{{{_XLINK}}}href" and value.startswith("#"):
                element.set(attribute, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(attribute, re.sub(r"url\(#", f"url(#{name}-", value))
    for attribute in ("width", "height"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", description)
    return ElementTree.tostring(root, encoding="unicode")


def _count_text(value: float) -> str:
    """1500 -> "1.5k", 2048000 -> "2.05M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _two_lines(arm: str) -> str:
    backbone, plus, read = arm.partition("+")
    return f"{backbone}\n+{read}" if plus and len(arm) > 10 else arm


class LineEnd(NamedTuple):
    """Where a line ends, in data units, and what stands beside it."""

    x: float
    y: float
    text: str
    color: str
    text_color: str
    line: Line2D | None = None  # how a legend shows it; without one as a plain line of its colour


def _label_ends(axes: Axes, ends: Sequence[LineEnd]) -> None:
    """Label each line at the right edge, moved up or down so that no two labels overlap, with a thin leader. Where they
    are more than can be followed that way, a legend below the figure names the arms, and labels only the faint lines.
    """
    if len(ends) > _MOST_END_LABELS:
        _legend_below(axes, [end for end in ends if end.text_color != _FAINT])
        ends = [end for end in ends if end.text_color == _FAINT]
    ordered = sorted(ends, key=lambda end: end.y)
    heights = [2.5 + 8.5 * (1 + end.text.count("\n")) for end in ordered]  # in points, with the room between two

    def place(index: int, _renderer: RendererBase) -> Affine2D:
        """Only when it is drawn does the layout know the height of the axes."""
        from matplotlib.transforms import Affine2D

        point = axes.figure.dpi / 72
        bottom, top = axes.bbox.y0 / point, axes.bbox.y1 / point
        wanted = [axes.transData.transform((end.x, end.y))[1] / point for end in ordered]
        return Affine2D().translate(0, point * _spread_out(wanted, heights, bottom - 4, top + 4)[index])

    for index, end in enumerate(ordered):
        axes.annotate(
            end.text,
            (end.x, end.y),
            xytext=(1.06, 0),
            textcoords=("axes fraction", functools.partial(place, index)),
            color=end.text_color,
            fontsize=8.5,
            va="center",
            linespacing=1.0,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.color,
                "linewidth": 0.7,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 2,
            },
        )


def _spread_out(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Centres as near to the ascending wanted ones as can be (least squares), of which no two overlap. The stack stays
    between low and high if it fits there, else it hangs from high.
    """
    steps = [(below + above) / 2 for below, above in itertools.pairwise(heights)]
    offsets = list(itertools.accumulate(steps, initial=0.0))
    # Less its offset a centre may not be below the one before it; neighbours that would be share their mean.
    groups: list[list[float]] = []
    for centre, offset in zip(wanted, offsets, strict=True):
        groups.append([centre - offset])
        while len(groups) > 1 and statistics.fmean(groups[-2]) > statistics.fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    shared = [statistics.fmean(group) for group in groups for _ in group]
    bottom, top = low + heights[0] / 2, high - heights[-1] / 2 - offsets[-1]
    return [min(max(each, bottom), top) + offset for each, offset in zip(shared, offsets, strict=True)]


def _legend_below(axes: Axes, ends: Sequence[LineEnd]) -> None:
    """Name the lines in the one legend of the figure, in as many columns as fit; the figure grows by its height."""
    from matplotlib.lines import Line2D

    figure = cast("MatplotlibFigure", axes.figure)
    entries: dict[str, Any] = {}

    def legend(columns: int) -> Legend:
        return figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower center",
            ncols=columns,
            columnspacing=0.8,
            handlelength=4.0,
            frameon=False,
            fontsize=8.5,
        )

    height = 0.0
    for earlier in figure.legends:  # of another panel
        entries.update(zip((text.get_text() for text in earlier.get_texts()), earlier.legend_handles, strict=True))
        height -= earlier.get_window_extent().height
        earlier.remove()
    for end in ends:
        name = end.text.replace("\n+", "+").replace("\n", " ")
        entries.setdefault(name, end.line or Line2D([], [], color=end.color))
    column = legend(1)
    columns = max(1, int(figure.bbox.width / column.get_window_extent().width))
    column.remove()
    height += legend(columns).get_window_extent().height
    figure.set_figheight(figure.get_figheight() + height / figure.dpi)


def _length_axis(axes: Axes, lengths: Sequence[int], training_length: int) -> None:
    axes.set_xticks(range(len(lengths)), [f"{length}\n{multiple_text(length, training_length)}" for length in lengths])
    axes.set_xlim(-0.35, len(lengths) - 1 + 0.35)
    axes.set_xlabel("window length in tokens")
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _by_length(
    axes: Axes,
    rows: Sequence[ComparisonRow],
    field: str,
    lengths: Sequence[int],
    styles: Mapping[str, ArmStyle],
    scale: float = 1.0,
) -> list[LineEnd]:
    """One line an arm over the lengths. Returns the line ends."""
    ends = []
    for index, row in enumerate(rows):
        measured: dict[int, Measured] = getattr(row, field)
        points = [(position, measured[length]) for position, length in enumerate(lengths) if length in measured]
        if points:
            ends.append(_marked_line(axes, points, (index, len(rows)), styles[row.arm], scale, row.arm))
    return ends


def _marked_line(
    axes: Axes,
    points: Sequence[tuple[int, Measured]],
    turn: tuple[int, int],
    style: ArmStyle,
    scale: float,
    label: str,
) -> LineEnd:
    """A line with a marker, a bar and the dots of single seeds at each place. It is line `turn[0]` of `turn[1]`, each
    shifted sideways so that bars do not hide each other.
    """
    index, count = turn
    shift = (index - (count - 1) / 2) * min(0.08, 0.4 / count)
    places = [position + shift for position, _ in points]
    (line,) = axes.plot(
        places,
        [scale * value.mean for _, value in points],
        color=style.color,
        linestyle=style.dashes,
        linewidth=1.8,
        marker=style.marker,
        markersize=5.5,
        markerfacecolor=style.color if style.filled else "white",
    )
    for place, (_, value) in zip(places, points, strict=True):
        if value.deviation is not None:
            axes.scatter(
                [place] * len(value.values),
                [scale * v for v in value.values],
                s=9,
                color=style.dark,
                alpha=0.6,
                linewidths=0,
            )
            low, high = value.mean - value.deviation, value.mean + value.deviation
        elif value.low is not None and value.high is not None:
            low, high = value.low, value.high
        else:
            continue
        axes.plot([place, place], [scale * low, scale * high], color=style.dark, linewidth=1, alpha=0.75, zorder=1.5)
    return LineEnd(places[-1], scale * points[-1][1].mean, _two_lines(label), style.color, style.dark, line)


def _needle_axes(
    axes: Axes, results: CompareResults, rows: Sequence[ComparisonRow], styles: Mapping[str, ArmStyle]
) -> None:
    lengths = sorted({length for row in rows for length in row.needle})
    _length_axis(axes, lengths, results["training_length"])
    ends = _by_length(axes, rows, "needle", lengths, styles, 100)
    axes.set_ylim(-2, 102)
    axes.set_ylabel("needles answered, %")
    task = results["needle_task"]
    for chance, text in ((task["chance_among_seen"], "chance, values seen"), (task["chance"], "chance, any value")):
        axes.axhline(100 * chance, color=_FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
        ends.append(LineEnd(axes.get_xlim()[1], 100 * chance, text, _FAINT, _FAINT))
    _label_ends(axes, ends)


LossName = Literal["text_loss", "answer_loss"]


def _curve_values(run: RunResult, field: LossName) -> tuple[list[float], list[float]]:
    curve = run["training"]["curve"]
    return [float(point["tokens"]) for point in curve], [point[field] for point in curve]


def _curves(axes: Axes, results: CompareResults, field: LossName, styles: Mapping[str, ArmStyle]) -> None:
    """One line an arm."""
    ends = []
    for arm, style in styles.items():
        curves = [curve for curve in (_curve_values(run, field) for run in runs_of(results, arm)) if curve[0]]
        if not curves:
            continue
        ends.append(_seed_lines(axes, curves, style, _two_lines(arm)))
    _token_axis(axes)
    axes.set_ylabel("loss, nats per token")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.08 * (high - low))
    _mark_lengths(axes, results)
    _label_ends(axes, ends)


def _seed_lines(axes: Axes, curves: Sequence[tuple[list[float], list[float]]], style: ArmStyle, label: str) -> LineEnd:
    """Mean and range over seeds; seeds logged at different places are drawn one by one. Returns the end of the first
    line.
    """
    if all(x == curves[0][0] for x, _ in curves):
        x, columns = curves[0][0], list(zip(*(y for _, y in curves), strict=True))
        lines = [(x, [sum(column) / len(column) for column in columns])]
        if len(curves) > 1:
            axes.fill_between(
                x, [min(c) for c in columns], [max(c) for c in columns], color=style.color, alpha=0.18, linewidth=0
            )
    else:
        lines = list(curves)
    drawn = [
        axes.plot(x, y, color=style.color, linestyle=style.dashes, linewidth=1.6, marker="o" if len(x) == 1 else None)
        for x, y in lines
    ]
    return LineEnd(lines[0][0][-1], lines[0][1][-1], label, style.color, style.dark, drawn[0][0])


def _token_axis(axes: Axes) -> None:
    axes.margins(x=0.0)
    axes.grid(axis="y")
    axes.xaxis.set_major_formatter(lambda tokens, _position: _count_text(tokens))
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("training tokens")


def gate_caption(decays: bool | None) -> str:
    """What a panel of `draw_gates` shows; whether the bias of the gate decays, None where that differs between runs."""
    own = {
        True: "It decays here (decay_gate_bias), so that what was learned is the distance between the two.",
        False: "It does not decay here (decay_gate_bias), so that nothing of how λ moves comes from that.",
        None: "Where it decays (decay_gate_bias true), what was learned is the distance between the two.",
    }
    return (
        f"Dashed: where λ would be if weight decay alone had moved the bias of the gate since the start. {own[decays]}"
    )


def draw_gates(
    axes: Axes,
    trainings: Mapping[str, Sequence[Sequence[GatePoint]]],
    styles: Mapping[str, ArmStyle],
    label: Callable[[str], str] = _two_lines,
) -> None:
    """lambda along the trainings of every arm, and dashed what decay alone would do: once for all arms where it is the
    same. `label` makes what stands beside a line from the name of its arm.
    """
    ends = []
    by_decay: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for arm, seeds in trainings.items():
        curves = [([point.tokens for point in seed], [point.gate for point in seed]) for seed in seeds]
        ends.append(_seed_lines(axes, curves, styles[arm], label(arm)))
        # Means over another number of heads are rounded differently.
        alone = tuple(
            (point.tokens, round(point.by_decay_alone, 6)) for point in seeds[0] if point.by_decay_alone is not None
        )
        if alone:
            by_decay.setdefault(alone, []).append(arm)
    for alone, arms in by_decay.items():
        style = styles[arms[0]]
        color, dark = (_FAINT, _FAINT) if len(by_decay) == 1 else (style.color, style.dark)
        text = "decay alone" if len(by_decay) == 1 else f"{label(arms[0])}: decay alone"
        (line,) = axes.plot(*zip(*alone, strict=True), color=color, linestyle=(0, (4, 2)), linewidth=1.2)
        ends.append(LineEnd(*alone[-1], text, color, dark, line))
    _token_axis(axes)
    axes.set_axisbelow(True)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set_ylabel("gate λ, mean")
    _label_ends(axes, ends)


def _mark_lengths(axes: Axes, results: CompareResults) -> None:
    """A thin line where the training windows grow, and the window length at the top of each stretch."""
    curve: Sequence[TrainingPoint] = next(
        (run["training"]["curve"] for run in results["runs"] if run["training"]["curve"]), ()
    )
    changes = [
        ((before["tokens"] + after["tokens"]) / 2, after["length"])
        for before, after in itertools.pairwise(curve)
        if before["length"] != after["length"]
    ]
    if not changes:
        return
    for tokens, _ in changes:
        axes.axvline(tokens, color="#c4c4c4", linewidth=0.8, zorder=0.5)
    left, right = axes.get_xlim()
    starts = [(left, curve[0]["length"]), *changes]
    for (tokens, length), end in zip(starts, [*(start for start, _ in changes), right], strict=True):
        if end - tokens > 0.07 * (right - left):  # a shorter stretch has no room for its label
            axes.annotate(
                str(length),
                (tokens, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -1),
                textcoords="offset points",
                fontsize=7.5,
                color=_FAINT,
                va="top",
            )


def _training_figure(results: CompareResults, styles: Mapping[str, ArmStyle]) -> Figure | None:
    panels = []
    losses: tuple[tuple[LossName, str], ...] = (
        ("text_loss", "Loss on text"),
        ("answer_loss", "Loss on needle answers"),
    )
    for field, title in losses:
        if not any(_curve_values(run, field)[0] for run in results["runs"]):
            continue

        def draw(axes: Axes, field: LossName = field, title: str = title) -> None:
            _curves(axes, results, field, styles)
            axes.set_title(title)

        panels.append(
            _svg(f"training-{field.replace('_', '-')}", f"{title} during training, one line an arm", (4.4, 3.2), draw)
        )
    caption = (
        "Lower is better; each line is one arm over the tokens it has trained on, a band (if any) spans its seeds, "
        "and where the training windows become longer a vertical line has their length in tokens at its top."
    )
    return Figure("training", "Training curves", caption, tuple(panels)) if panels else None


def _needle_figure(
    results: CompareResults, rows: Sequence[ComparisonRow], styles: Mapping[str, ArmStyle]
) -> Figure | None:
    if not any(row.needle for row in rows):
        return None

    def draw(axes: Axes) -> None:
        _needle_axes(axes, results, rows, styles)
        axes.set_title("All arms")

    panels = [_svg("needle-length", "Needle accuracy by window length, one line an arm", (4.4, 3.4), draw)]
    read_rows = [row for row in rows if row.needle_read_off]
    if read_rows:

        def draw_off(axes: Axes) -> None:
            lengths = sorted(
                {length for row in read_rows for length in row.needle}
                | {n for row in read_rows for n in row.needle_read_off}
            )
            _length_axis(axes, lengths, results["training_length"])
            ends = _by_length(axes, read_rows, "needle", lengths, styles, 100)
            off_styles = {arm: style._replace(dashes=(0, (1, 1.5)), filled=False) for arm, style in styles.items()}
            _by_length(axes, read_rows, "needle_read_off", lengths, off_styles, 100)
            axes.set_ylim(-2, 102)
            axes.set_title("Correction on (filled) and switched off (hollow, dotted)")
            _label_ends(axes, ends)

        panels.append(
            _svg("needle-off", "Needle accuracy of trained models with the correction on and off", (4.4, 3.4), draw_off)
        )
    several = any(len(row.seeds) > 1 for row in rows)
    bars = (
        "bars are ± one standard deviation over seeds, dots single seeds"
        if several
        else "bars are 95 % intervals from the questions asked"
    )
    caption = (
        f"Higher is better; {bars}, and grey dotted lines are what guessing would score. The second panel has the "
        "same trained models with the correction switched off at inference, which shows how much accuracy it carries."
        if read_rows
        else f"Higher is better; {bars}, and grey dotted lines are what guessing would score."
    )
    return Figure("needle", "Needle accuracy by length", caption, tuple(panels))


def _needle_cells(results: CompareResults, arm: str) -> dict[tuple[float, float, int], tuple[int, int]]:
    """(depth from, depth to, length) -> (correct, asked), summed over seeds."""
    cells: dict[tuple[float, float, int], tuple[int, int]] = {}
    for run in runs_of(results, arm):
        for entry in run["needle"]:
            place = (entry["depth_from"], entry["depth_to"], entry["length"])
            correct, asked = cells.get(place, (0, 0))
            cells[place] = (correct + entry["correct"], asked + entry["asked"])
    return cells


def _heat_figure(results: CompareResults, styles: Mapping[str, ArmStyle]) -> Figure | None:
    panels = []
    questions: list[int] = []
    for index, (arm, style) in enumerate(styles.items()):
        cells = _needle_cells(results, arm)
        if not cells:
            continue
        questions += [asked for _, asked in cells.values()]

        def draw(
            axes: Axes, arm: str = arm, style: ArmStyle = style, cells: Mapping[Any, tuple[int, int]] = cells
        ) -> None:
            depths = sorted({(start, end) for start, end, _ in cells})
            lengths = sorted({length for _, _, length in cells})
            grid = [
                [
                    correct / asked if asked else None
                    for correct, asked in (cells.get((*depth, length), (0, 0)) for length in lengths)
                ]
                for depth in depths
            ]
            _heat(axes, grid, style.dark, 1.0, lambda value: f"{100 * value:.0f}")
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{100 * start:.0f}–{100 * end:.0f} %" for start, end in depths])
            axes.set_xlabel("window length in tokens")
            axes.set_ylabel("depth in the window")
            axes.set_title(arm, color=style.dark, fontweight="bold")

        panels.append(_svg(f"heat-{index}", f"Needle accuracy of {arm} by length and depth", (4.4, 2.8), draw))
    if not panels:
        return None
    fewest, most = min(questions), max(questions)
    rests_on = str(most) if fewest == most else f"{fewest} to {most}"
    caption = (
        "Percentage of needles answered; each cell is one window length and one stretch of the window where the fact "
        f"stood (0 % = start, far from the question). Darker is better; a cell rests on {rests_on} questions."
    )
    return Figure("heat", "Needle accuracy by length and depth", caption, tuple(panels))


def _heat(
    axes: Axes, grid: Sequence[Sequence[float | None]], color: str, top: float, text: Callable[[float], str]
) -> None:
    """Cells from white (0) to `color` (`top`), each with its figure written in; None leaves the cell empty."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    ramp = LinearSegmentedColormap.from_list("ramp", ["#ffffff", color])
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            if value is None:
                continue
            level = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
            fill = ramp(0.04 + 0.96 * level)
            brightness = 0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2]
            ink = "white" if brightness < 0.6 else _INK
            axes.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=fill, linewidth=0))
            axes.text(column, row, text(value), ha="center", va="center", fontsize=9, color=ink)
    axes.set_xlim(-0.55, max(len(values) for values in grid) - 0.45)
    axes.set_ylim(len(grid) - 0.45, -0.55)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _difference_figure(results: CompareResults, styles: Mapping[str, ArmStyle]) -> Figure | None:
    differences = arm_differences(results)
    groups = (
        ("accuracy", "Needle accuracy, percentage points", "arm better →", 100.0),
        ("loss", "Loss, nats per token", "← arm better", 1.0),
        ("perplexity", "Perplexity", "← arm better", 1.0),
    )
    panels = []
    for word, title, better, scale in groups:
        chosen = [difference for difference in differences if word in difference.metric]
        if chosen:

            def draw(
                axes: Axes,
                chosen: list[Difference] = chosen,
                title: str = title,
                better: str = better,
                scale: float = scale,
            ) -> None:
                _forest(axes, chosen, styles, scale)
                axes.set_title(title)
                axes.set_xlabel(f"arm minus its backbone   ({better})")

            size = (4.4, 1.0 + 0.3 * (len(chosen) + len({d.arm for d in chosen})))
            panels.append(_svg(f"difference-{word}", f"{title}: arm minus backbone", size, draw))
    if not panels:
        return None
    source = {difference.interval_from for difference in differences}
    interval = (
        "the 95 % t interval over seeds"
        if "seeds" in source
        else "a 95 % interval from the drawn questions or windows alone (another seed can move the point further)"
    )
    caption = (
        f"Each dot is one arm minus its own backbone, the bar is {interval}; a bar that crosses zero settles nothing."
    )
    return Figure("differences", "Differences to the backbone", caption, tuple(panels))


def _forest(
    axes: Axes,
    differences: Sequence[Difference],
    styles: Mapping[str, ArmStyle],
    scale: float,
    names: Sequence[str] | None = None,
) -> None:
    """A line a difference, an arm below the other; `names` stand beside the lines, without them the metrics."""
    places: list[float] = []
    labels = names or [difference.metric for difference in differences]
    position = 0.0
    previous = None
    for difference in differences:
        style = styles.get(difference.arm) or ArmStyle(_INK, _INK, "-", "o", True)
        if difference.arm != previous:
            position += 1.0
            axes.annotate(
                f"{difference.arm} − {difference.backbone}",
                (0, position),
                xycoords=("axes fraction", "data"),
                xytext=(2, 0),
                textcoords="offset points",
                fontsize=8.5,
                fontweight="bold",
                color=style.dark,
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )
            previous = difference.arm
        position += 1.0
        places.append(position)
        if difference.low is not None and difference.high is not None:
            axes.plot(
                [scale * difference.low, scale * difference.high],
                [position] * 2,
                color=style.dark,
                linewidth=1.6,
                alpha=0.55,
            )
        if len(difference.differences) > 1:
            axes.scatter(
                [scale * v for v in difference.differences],
                [position] * len(difference.differences),
                s=8,
                color=style.dark,
                alpha=0.5,
            )
        axes.plot([scale * difference.mean], [position], marker=style.marker, color=style.dark, markersize=6)
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.set_yticks(places, labels)
    axes.set_ylim(position + 0.6, 0.4)
    reach = max(abs(edge) for edge in axes.get_xlim())
    axes.set_xlim(-1.06 * reach, 1.06 * reach)
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _perplexity_figure(
    results: CompareResults, rows: Sequence[ComparisonRow], styles: Mapping[str, ArmStyle]
) -> Figure | None:
    if not any(row.perplexity for row in rows):
        return None

    def draw(axes: Axes) -> None:
        lengths = sorted({length for row in rows for length in row.perplexity})
        _length_axis(axes, lengths, results["training_length"])
        ends = _by_length(axes, rows, "perplexity", lengths, styles)
        low, high = axes.get_ylim()
        # Less than 2 % of spread would be blown up to the full height and look like a large effect.
        room = max(0.0, 0.02 * high - (high - low)) / 2
        axes.set_ylim(low - room, high + room)
        axes.set_ylabel("perplexity")
        _label_ends(axes, ends)

    caption = (
        "Lower is better; a line that rises to the right means that the model does worse on windows longer than those"
        " it was trained on. The axis does not start at zero."
    )
    panel = _svg("perplexity", "Perplexity on held-out text by window length, one line an arm", (5.2, 3.2), draw)
    return Figure("perplexity", "Perplexity on held-out text by length", caption, (panel,))


def _mean_grid(grids: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    return [[sum(cell) / len(cell) for cell in zip(*rows, strict=True)] for rows in zip(*grids, strict=True)]


def _gate_points(run: RunResult) -> list[GatePoint]:
    return [
        GatePoint(point["tokens"], point["gate_mean"], point.get("gate_by_decay_alone"))
        for point in run["training"]["curve"]
        if point["gate_mean"] is not None
    ]


def _gate_figure(results: CompareResults, styles: Mapping[str, ArmStyle]) -> Figure | None:
    panels = []
    for index, (arm, style) in enumerate(styles.items()):
        gates = [gate for gate in (run["gate"] for run in runs_of(results, arm)) if gate is not None]
        if not gates:
            continue
        histograms = [gate["histogram"] for gate in gates if sum(gate["histogram"]["counts"])]
        if histograms:

            def draw(
                axes: Axes,
                arm: str = arm,
                style: ArmStyle = style,
                histograms: Sequence[GateHistogram] = histograms,
            ) -> None:
                used: list[float] = []
                for histogram in histograms:
                    edges, counts = histogram["edges"], histogram["counts"]
                    share = [100 * count / sum(counts) for count in counts]
                    axes.stairs(share, edges, fill=True, color=style.color, alpha=0.75 / len(histograms))
                    axes.stairs(share, edges, color=style.dark, linewidth=0.9)
                    filled = [place for place, count in enumerate(counts) if count]
                    used += [edges[filled[0]], edges[filled[-1] + 1]]
                margin = 0.15 * (max(used) - min(used))
                axes.set_xlim(
                    max(histograms[0]["edges"][0], min(used) - margin),
                    min(histograms[0]["edges"][-1], max(used) + margin),
                )
                axes.set_ylim(bottom=0)
                axes.set_xlabel("gate λ")
                axes.set_ylabel("share of tokens and heads, %")
                axes.set_title(f"{arm}: all gates", color=style.dark)

            panels.append(_svg(f"gate-histogram-{index}", f"Histogram of the gate of {arm}", (4.4, 2.6), draw))
        grids = [gate["by_layer_and_head"] for gate in gates]
        if all(grids):

            def draw_heads(axes: Axes, arm: str = arm, style: ArmStyle = style, grids: Sequence[Any] = grids) -> None:
                grid = _mean_grid(grids)
                largest = max(max(values) for values in grid)
                digits = 2 if largest >= 0.1 else 3
                _heat(axes, grid, style.dark, largest, lambda value: f"{value:.{digits}f}")
                axes.set_xticks(range(len(grid[0])), [str(head) for head in range(len(grid[0]))])
                axes.set_yticks(range(len(grid)), [str(layer) for layer in range(len(grid))])
                axes.set_xlabel("head")
                axes.set_ylabel("layer")
                axes.set_title(f"{arm}: mean gate by layer and head", color=style.dark)

            panels.append(_svg(f"gate-heads-{index}", f"Mean gate of {arm} by layer and head", (4.4, 2.6), draw_heads))
    by_arm = {arm: [points for points in map(_gate_points, runs_of(results, arm)) if points] for arm in styles}
    trainings = {arm: seeds for arm, seeds in by_arm.items() if seeds}
    if trainings:

        def draw_training(axes: Axes) -> None:
            draw_gates(axes, trainings, styles)
            axes.set_title("Mean gate during training")

        panels.append(_svg("gate-training", "Mean gate during training, one line an arm", (4.4, 2.9), draw_training))
    caption = (
        "The gate λ is how strongly a head applies the correction at a token (0 = not at all, 1 = fully). The "
        "horizontal axes of gates cover only the range in use; colours are relative to the largest head of that arm."
    )
    if any(point.by_decay_alone is not None for seeds in trainings.values() for points in seeds for point in points):
        caption += f" {gate_caption(False)}"
    return Figure("gate", "What the gate learned", caption, tuple(panels)) if panels else None


def _cost_figure(rows: Sequence[ComparisonRow], styles: Mapping[str, ArmStyle]) -> Figure | None:
    fields: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("training_tokens_per_second", "Training tokens per second", _count_text),
        ("decode_tokens_per_second", "Decoded tokens per second", _count_text),
        ("state_bytes", "State of one sequence", bytes_text),
    )
    panels = []
    for field, title, text in fields:
        measured = [(row.arm, getattr(row, field)) for row in rows if getattr(row, field) is not None]
        if not measured:
            continue

        def draw(
            axes: Axes,
            measured: Sequence[tuple[str, Measured]] = measured,
            title: str = title,
            text: Callable[[float], str] = text,
        ) -> None:
            for place, (arm, value) in enumerate(measured):
                style = styles[arm]
                axes.barh(place, value.mean, height=0.62, color=style.color)
                axes.annotate(
                    text(value.mean),
                    (value.mean, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8.5,
                )
                if value.deviation:
                    axes.scatter(
                        value.values,
                        [place] * len(value.values),
                        s=8,
                        color="white",
                        edgecolors=_INK,
                        linewidths=0.6,
                        zorder=3,
                    )
            axes.set_yticks(range(len(measured)), [_two_lines(arm) for arm, _ in measured])
            axes.set_ylim(len(measured) - 0.4, -0.6)
            axes.set_xlim(0, 1.28 * max(value.mean for _, value in measured))
            axes.set_xticks([])
            axes.tick_params(axis="y", length=0)
            axes.spines["bottom"].set_visible(False)
            axes.set_title(title)

        panels.append(_svg(f"cost-{field.replace('_', '-')}", title, (3.6, 0.7 + 0.42 * len(measured)), draw))
    caption = (
        "What each arm costs on this machine: more tokens per second and a smaller state are better. Bars start at "
        "zero; small differences in speed may be noise of the machine."
    )
    return Figure("cost", "Cost", caption, tuple(panels)) if panels else None


def all_figures(results: CompareResults) -> list[Figure]:
    """The report's figures in reading order; a figure for which nothing was measured is left out."""
    rows = comparison_rows(results)
    styles = arm_styles(arms_of(results))
    figures = (
        _difference_figure(results, styles),
        _needle_figure(results, rows, styles),
        _training_figure(results, styles),
        _heat_figure(results, styles),
        _perplexity_figure(results, rows, styles),
        _gate_figure(results, styles),
        _cost_figure(rows, styles),
    )
    return [figure for figure in figures if figure is not None]


def figure_png(results: CompareResults, path: str | os.PathLike[str]) -> None:
    """Write the README figure: needle accuracy by length (left), loss on needle answers during training (right).

    A PNG 1200 pixels wide on white. The file is replaced whole; its folder must exist.
    """
    from matplotlib.figure import Figure as MatplotlibFigure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = comparison_rows(results)
    styles = arm_styles(arms_of(results))
    with _plain_style():
        figure = MatplotlibFigure(figsize=(10, 3.7), dpi=120, layout=ConstrainedLayoutEngine(wspace=0.05))
        left, right = figure.subplots(1, 2)
        _needle_axes(left, results, rows, styles)
        left.set_title("Needle accuracy by length")
        _curves(right, results, "answer_loss", styles)
        right.set_title("Loss on needle answers during training")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    write_bytes_atomically(path, buffer.getvalue())
