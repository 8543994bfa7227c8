"""The diagnosis of a model as one self-contained HTML page: sentences, plots and a table, computed from the results.

The page needs no network and no script.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ccq.files import write_bytes_atomically
from ccq.report.figures import _FAINT, _INK, Figure, _svg
from ccq.report.html import Finding, _flattened
from ccq.report.intervals import over_seeds
from ccq.report.pages import render_page
from ccq.report.tables import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ccq.analysis.diagnosis import AlignmentResult, CorrectionLayer, DiagnosisResults, KeysResult, MarginLayer

_BLUE, _ORANGE, _GREEN, _PURPLE = "#0f4c8a", "#a34a00", "#00664b", "#652a86"
_KEYS_WORDS = {"projection": "output of the key projection", "memory": "keys that enter memory"}
_KIND_WORDS = {"text": "text", "needle": "needle", "question": "question", "last": "last token"}
_KIND_COLORS = {"text": _INK, "needle": _ORANGE, "question": _BLUE, "last": _GREEN}
# More heads than this leave no room for figures in the cells of the heat map.
_MOST_WRITTEN = 12


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float) -> str:
    """Two digits that count: 0.00123 -> "0.12 %"."""
    return f"{100 * value:.2g} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"


def _short(value: float) -> str:
    """Two digits that count, with a sign: -0.000012 -> "−1.2e−05"."""
    return f"{value:+.2g}".replace("-", "−")


def _kind_mean(values: Sequence[Any], kind: str) -> float:
    return _mean([value[kind] for value in values])


def intervention(results: DiagnosisResults) -> str | None:
    """What was changed in the read steps, such as "off"; None where they ran as trained, or there are none."""
    read = results["model"]["read"]
    return None if read in (None, "on") else read


def _gate_words(results: DiagnosisResults) -> str:
    """Which gate the correction was computed with."""
    nominal, changed = results["settings"]["nominal_gate"], intervention(results)
    if nominal is None:
        return "the model's own gate" if changed is None else f"the gate under the intervention {changed}"
    because = "the model has none" if changed is None else f"the intervention {changed} leaves no correction"
    return f"a gate of {nominal:g} (since {because})"


def headline(results: DiagnosisResults) -> str:
    """Where the needles' keys lie: for each look the sign of the difference, held against its spread over prompts."""
    parts = []
    for keys in results["keys"]:
        found = keys["alignment"]
        where, difference = f"in the {_KEYS_WORDS[keys['keys']]}", _difference_text(found)
        half = _half_interval(found)
        # As printed, so that no reader sees a difference as large as its interval called one.
        if half is not None and abs(round(found["difference"], 3)) <= round(half, 3):
            parts.append(
                f"{where} no difference of alignment between the needle's unique tokens and the text around them can "
                f"be told from chance ({difference})"
            )
            continue
        if half is None:
            difference += ", with no spread over prompts to weigh it against"
        parts.append(
            f"{where} the needle's unique tokens lie {'less' if found['difference'] < 0 else 'more'} in the crowded "
            f"directions than the text around them ({difference})"
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _half_interval(found: AlignmentResult) -> float | None:
    """Half of the 95 % interval of the difference over prompts; None where one prompt gives no spread."""
    # What the interval of a mean asks of its values holds for prompts as for seeds.
    interval = over_seeds(found["difference_by_prompt"])
    return None if interval is None else (interval.high - interval.low) / 2


def _difference_text(found: AlignmentResult) -> str:
    half = _half_interval(found)
    return signed(found["difference"], 3) + ("" if half is None else f" ± {half:.3f}")


def findings(results: DiagnosisResults) -> list[Finding]:
    """The sentences under the headline."""
    found = []
    if changed := intervention(results):
        text = f"The read steps ran under the intervention {changed}; all figures are of the model as it then is."
        found.append(Finding("note", text))
    for keys in results["keys"]:
        aligned = keys["alignment"]
        deviations = [x["standard_deviation"] for x in aligned["layers"] if x["standard_deviation"] is not None]
        rare = [x["rare_text"] for x in aligned["layers"] if x["rare_text"] is not None]
        as_rare = f", of one as rare {100 * _mean(rare):.0f} %" if rare else ""
        spread = (
            f", its 95 % interval over prompts, with a standard deviation from prompt to prompt of "
            f"{_mean(deviations):.3f} in a layer"
            if deviations
            else ""
        )
        found.append(
            Finding(
                "note",
                f"{_KEYS_WORDS[keys['keys']].capitalize()}: {100 * aligned['unique']:.0f} % of a unique needle token's "
                f"distance from the mean lies in the top {aligned['directions']} directions, of a token of the text "
                f"{100 * aligned['text']:.0f} %{as_rare} (difference {_difference_text(aligned)}{spread}; below zero "
                f"in {aligned['layers_below_zero']} of {len(aligned['layers'])} layers, above in "
                f"{aligned['heads_above_zero']} of {aligned['heads']} heads).",
            )
        )
    if results["correction"] is not None and results["margins"] is not None:
        found += _correction_findings(results, results["correction"], results["margins"])
    elif results["expansion"] is not None:
        text = "The read step of this model has no correction, so nothing is said of its size, its rounding or margins."
        found.append(Finding("note", text))
    if results["expansion"] is None:
        text = (
            "The queries of this model cannot be told from the output of its projections, so its keys alone are shown."
        )
        return [*found, Finding("note", text)]
    parts = [f"{x['remainder']:.2g} nats at length {x['length']:g}" for x in results["expansion"]]
    found.append(
        Finding(
            "note",
            f"The quadratic form misses the log-partition by {', '.join(parts)}; the covariance under the query's own "
            "weights differs from Sigma by "
            f"{', '.join(_percent(x['covariance_distance']) for x in results['expansion'])}.",
        )
    )
    return found


def _correction_findings(
    results: DiagnosisResults, correction: Sequence[CorrectionLayer], margins: Sequence[MarginLayer]
) -> list[Finding]:
    found = [
        Finding(
            "note",
            f"With {_gate_words(results)} the correction is "
            f"{_percent(_mean([x['relative_size']['text'] for x in correction]))} of a query on the text and "
            f"{_percent(_mean([x['relative_size']['question'] for x in correction]))} on the question, and turns a "
            f"query by {_mean([x['angle'] for x in correction]):.2g}°.{_rounding_sentence(correction)}",
        )
    ]
    gates = [x["gate"] for x in correction if x["gate"] is not None]
    if gates:
        means = ", ".join(f"{_kind_mean(gates, kind):.3f} on the {words}" for kind, words in _KIND_WORDS.items())
        found.append(Finding("note", f"The gate is {means}."))
    wider = sum(x["change"] > 0 for x in margins)
    found.append(
        Finding(
            "note",
            "At the last token the correction moves the margin of the needle over the text by "
            f"{_short(_mean([x['change'] for x in margins]))}, from {_short(_mean([x['margin'] for x in margins]))}, "
            f"and widens it in {wider} of {len(margins)} layers; the sign condition holds for "
            f"{100 * _mean([x['condition_holds'] for x in margins]):.0f} % of the pairs of tokens.",
        )
    )
    return found


def _rounding_sentence(correction: Sequence[CorrectionLayer]) -> str:
    """Of the layers that correct anything; empty where there is none."""
    noise = [x["rounding_noise"] for x in correction if x["rounding_noise"] is not None]
    unchanged = [x["unchanged"] for x in correction if x["rounding_noise"] is not None]
    if not noise:
        return ""
    median = f", the median of layers from {_percent(min(noise))} to {_percent(max(noise))}" if len(noise) > 1 else ""
    return (
        f" Rounding the corrected query to bfloat16 makes an error of {_percent(statistics.median(noise))} of the "
        f"correction (ratio of root mean squares over tokens{median}) and leaves "
        f"{_percent(_mean(unchanged))} of its coordinates as they were."
    )


def _by_layer(axes: Axes, layers: Sequence[int], label: str) -> None:
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    step = -(-len(layers) // 12)
    axes.set_xticks(layers[::step])
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _from_zero(axes: Axes) -> None:
    """The axis begins at zero, or below where values are, and ends a little above the largest."""
    low, high = axes.dataLim.intervaly
    axes.set_ylim(min(0, low), high + 0.08 * max(high - min(0, low), 1e-12))


def _line(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[float],
    color: str,
    label: str | None = None,
    *,
    deviations: Sequence[float | None] = (),
    dashed: bool = False,
) -> None:
    axes.plot(
        places,
        values,
        color=color,
        label=label,
        linewidth=1.6,
        linestyle=(0, (4, 2)) if dashed else "-",
        marker="o" if len(places) <= 12 else None,
        markersize=4,
    )
    spread = [deviation for deviation in deviations if deviation is not None]
    if spread and len(spread) == len(values):
        low = [value - deviation for value, deviation in zip(values, spread, strict=True)]
        high = [value + deviation for value, deviation in zip(values, spread, strict=True)]
        axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8.5, loc="best")


def _curve_figure(results: DiagnosisResults) -> Figure:
    lowest, highest = 0.0, 0.0
    for keys in results["keys"]:
        for x in keys["alignment"]["layers"]:
            spread = x["standard_deviation"] or 0.0
            lowest, highest = min(lowest, x["difference"] - spread), max(highest, x["difference"] + spread)
    margin = 0.08 * max(highest - lowest, 1e-3)

    def panel(keys: KeysResult) -> str:
        def draw(axes: Axes) -> None:
            layers = keys["alignment"]["layers"]
            places = [x["layer"] for x in layers]
            spread = [x["standard_deviation"] for x in layers]
            _line(axes, places, [x["difference"] for x in layers], _BLUE, deviations=spread)
            axes.axhline(0, color=_INK, linewidth=0.8)
            axes.set_ylim(lowest - margin, highest + margin)
            _by_layer(axes, places, "needle minus text")
            axes.set_title(_KEYS_WORDS[keys["keys"]].capitalize())

        return _svg(f"curve-{keys['keys']}", f"Difference of alignment by layer, {keys['keys']}", (4.4, 3.0), draw)

    caption = (
        "Alignment of the needle's unique tokens with the top directions of the keys, minus that of the text around "
        "it. Below zero the needle stands out from the directions that are crowded; a band is one standard deviation "
        "over prompts."
    )
    return Figure("curve", "Alignment by layer", caption, tuple(panel(keys) for keys in results["keys"]))


def _histogram_figure(results: DiagnosisResults) -> Figure:
    def panel(keys: KeysResult) -> str:
        def draw(axes: Axes) -> None:
            found = keys["alignment"]
            histogram = found["histogram"]
            groups = (
                (histogram["text"], found["text"], _INK, "text"),
                (histogram["unique"], found["unique"], _ORANGE, "needle"),
            )
            for counts, mean, color, label in groups:
                share = [100 * count / sum(counts) for count in counts]
                axes.stairs(share, histogram["edges"], fill=True, color=color, alpha=0.3)
                axes.stairs(share, histogram["edges"], color=color, linewidth=1, label=f"{label}, mean {mean:.2f}")
                axes.axvline(mean, color=color, linewidth=1.2, linestyle=(0, (3, 2)))
            axes.set_xlim(0, 1)
            axes.set_ylim(bottom=0)
            axes.set_xlabel(f"alignment with the top {found['directions']} directions")
            axes.set_ylabel("share of tokens, %")
            axes.set_title(f"{_KEYS_WORDS[keys['keys']].capitalize()}: {signed(found['difference'], 3)}")
            _legend(axes)

        return _svg(f"histogram-{keys['keys']}", f"Histogram of alignment, {keys['keys']}", (4.4, 3.0), draw)

    caption = "The tokens of all prompts, layers and heads together; dashed lines are the means."
    return Figure("histogram", "Alignment of all tokens", caption, tuple(panel(keys) for keys in results["keys"]))


def _heat_figure(results: DiagnosisResults) -> Figure:
    cells = [c for keys in results["keys"] for x in keys["alignment"]["layers"] for c in x["difference_by_head"]]
    top = max(abs(cell) for cell in cells) or 1.0

    def panel(keys: KeysResult) -> str:
        layers = keys["alignment"]["layers"]

        def draw(axes: Axes) -> None:
            _diverging_heat(axes, [x["difference_by_head"] for x in layers], [x["layer"] for x in layers], top)
            axes.set_title(_KEYS_WORDS[keys["keys"]].capitalize())

        size = (4.4, 1.1 + 0.2 * len(layers))
        return _svg(f"heat-{keys['keys']}", f"Difference of alignment by layer and head, {keys['keys']}", size, draw)

    caption = (
        "Needle minus text, one cell a layer and head: blue below zero, orange above. Both panels share one scale, "
        f"which ends at ± {top:.2f}."
    )
    return Figure("heat", "Alignment by layer and head", caption, tuple(panel(keys) for keys in results["keys"]))


def _diverging_heat(axes: Axes, grid: Sequence[Sequence[float]], layers: Sequence[int], top: float) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    ramp = LinearSegmentedColormap.from_list("ramp", [_BLUE, "#ffffff", _ORANGE])
    heads = max(len(values) for values in grid)
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=ramp(0.5 + value / top / 2), linewidth=0)
            )
            if heads <= _MOST_WRITTEN:
                ink = "white" if abs(value) > 0.55 * top else _INK
                # Adding zero takes the sign from a zero.
                axes.text(column, row, f"{round(value, 2) + 0.0:.2f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_xlim(-0.5, heads - 0.5)
    axes.set_ylim(len(grid) - 0.5, -0.5)
    axes.set_xticks(range(0, heads, 1 if heads <= _MOST_WRITTEN else 4))
    step = 1 if len(grid) <= 12 else 4
    axes.set_yticks(range(0, len(grid), step), [str(layer) for layer in layers[::step]])
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _spectrum_figure(results: DiagnosisResults) -> Figure:
    def panel(keys: KeysResult) -> str:
        def draw(axes: Axes) -> None:
            from matplotlib.colors import LinearSegmentedColormap

            ramp = LinearSegmentedColormap.from_list("ramp", ["#9ec5e8", _BLUE, "#08223f"])
            last = max(len(keys["spectrum"]) - 1, 1)
            for number, x in enumerate(keys["spectrum"]):
                share = [value / x["trace"] if x["trace"] > 0 else 0.0 for value in x["eigenvalues"]]
                label = f"layer {x['layer']}" if number in (0, last) else None
                axes.plot(range(1, len(share) + 1), share, color=ramp(number / last), linewidth=1.2, label=label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_ylim(1e-6, 1.2)
            axes.xaxis.set_major_formatter(lambda value, _position: f"{value:g}")
            axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
            axes.axvline(keys["alignment"]["directions"], color=_FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
            axes.set_xlabel("eigenvalue, by rank")
            axes.set_ylabel("share of the variance")
            axes.grid(axis="y")
            axes.set_title(_KEYS_WORDS[keys["keys"]].capitalize())
            _legend(axes)

        return _svg(f"spectrum-{keys['keys']}", f"Eigenvalues of Sigma by layer, {keys['keys']}", (4.4, 3.0), draw)

    caption = (
        "Eigenvalues of the covariance of unit keys as shares of its trace, mean over heads and prompts, one line a "
        "layer, darker with depth. The dotted line is where the top directions end. A steep line has few crowded "
        "directions, which the correction can turn down; on a flat one it does little."
    )
    return Figure("spectrum", "Spectrum of the covariance", caption, tuple(panel(keys) for keys in results["keys"]))


def _kinds_panel(key: str, title: str, label: str, places: Sequence[int], values: Sequence[Any], scale: float) -> str:
    def draw(axes: Axes) -> None:
        for kind, color in _KIND_COLORS.items():
            _line(axes, places, [scale * x[kind] for x in values], color, _KIND_WORDS[kind], dashed=kind == "last")
        _from_zero(axes)
        _by_layer(axes, places, label)
        axes.set_title(title)
        _legend(axes)

    return _svg(key, f"{title} by layer and kind of token", (4.4, 3.0), draw)


def _correction_figures(results: DiagnosisResults) -> list[Figure]:
    correction = results["correction"]
    if correction is None:
        return []
    places = [x["layer"] for x in correction]

    size = _kinds_panel(
        "size", "Size of the correction", "% of the query", places, [x["relative_size"] for x in correction], 100
    )
    gates = [x["gate"] for x in correction]
    caption = f"With {_gate_words(results)}: the length of the change of a query relative to the query."
    figures = [Figure("correction", "The correction", caption, (size,))]
    if any(x["rounding_noise"] is not None for x in correction):
        figures.append(_rounding_figure(correction))
    if all(gate is not None for gate in gates):
        panel = _kinds_panel("gate", "Gate", "gate λ", places, gates, 1)
        caption = (
            "Mean of the gate by kind of token: the sentences around the needle, the needle, the question at the end, "
            "and the last token, at which the answer is looked up."
        )
        figures.append(Figure("gate-by-kind", "The gate by kind of token", caption, (panel,)))
    return figures


def _rounding_figure(correction: Sequence[CorrectionLayer]) -> Figure:
    places = [x["layer"] for x in correction]
    noise = [math.nan if x["rounding_noise"] is None else 100 * x["rounding_noise"] for x in correction]

    def draw_error(axes: Axes) -> None:
        _line(axes, places, noise, _PURPLE)
        axes.axhline(100, color=_FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
        known = [100, *(value for value in noise if value > 0)]
        axes.set_yscale("log")
        # Whole decades, each of which has a label.
        axes.set_ylim(10 ** math.floor(math.log10(0.9 * min(known))), 10 ** math.ceil(math.log10(1.1 * max(known))))
        axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
        _by_layer(axes, places, "% of the correction")
        axes.set_title("Error of rounding")

    def draw_unchanged(axes: Axes) -> None:
        _line(axes, places, [100 * x["unchanged"] for x in correction], _GREEN)
        axes.set_ylim(0, 100)
        _by_layer(axes, places, "% of the coordinates")
        axes.set_title("Left as without a correction")

    caption = (
        "Left, the root mean square of the error over tokens and heads as a share of that of the correction, on a "
        "logarithmic axis: above the dotted line, a query that is kept in bfloat16 carries more noise than correction. "
        "Right, the coordinates that are the same bfloat16 number with and without the correction."
    )
    panels = (
        _svg("rounding-error", "Error of rounding the corrected query to bfloat16, by layer", (4.4, 3.0), draw_error),
        _svg(
            "rounding-unchanged", "Coordinates that rounding leaves as they were, by layer", (4.4, 3.0), draw_unchanged
        ),
    )
    return Figure("rounding", "What rounding to bfloat16 does to it", caption, panels)


def _margin_figure(results: DiagnosisResults) -> Figure | None:
    margins = results["margins"]
    if margins is None:
        return None
    places = [x["layer"] for x in margins]

    def draw_change(axes: Axes) -> None:
        spread = [x["standard_deviation"] for x in margins]
        _line(axes, places, [x["change"] for x in margins], _BLUE, "all of it", deviations=spread)
        first = [x["first_direction"] for x in margins]
        _line(axes, places, first, _ORANGE, "along the first direction", dashed=True)
        axes.axhline(0, color=_INK, linewidth=0.8)
        _by_layer(axes, places, "change of the margin")
        axes.set_title("What the correction adds to the margin")
        _legend(axes)

    def draw_condition(axes: Axes) -> None:
        _line(axes, places, [100 * x["condition_holds"] for x in margins], _GREEN)
        axes.axhline(50, color=_FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
        axes.set_ylim(0, 100)
        _by_layer(axes, places, "pairs of tokens, %")
        axes.set_title("Where (β − α)(u · q) > 0")

    caption = (
        "At the last token: the score of the needle's unique tokens minus that of the text. The correction widens this "
        "margin where the text has more of the crowded direction u than the needle has and the query points along u, "
        "and narrows it where one of the two is the other way round."
    )
    panels = (
        _svg("margin-change", "Change of the margin by layer", (4.4, 3.0), draw_change),
        _svg(
            "margin-condition",
            "Share of token pairs for which the sign condition holds, by layer",
            (4.4, 3.0),
            draw_condition,
        ),
    )
    return Figure("margins", "Needle against text", caption, panels)


def _expansion_figure(results: DiagnosisResults) -> Figure | None:
    expansion = results["expansion"]
    if expansion is None:
        return None
    lengths = [x["length"] for x in expansion]

    def axis(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
        axes.set_xlabel("length of the query")
        axes.grid(axis="y")

    def draw_remainder(axes: Axes) -> None:
        _line(axes, lengths, [x["remainder_of_linear"] for x in expansion], _FAINT, "linear", dashed=True)
        _line(axes, lengths, [x["remainder"] for x in expansion], _BLUE, "quadratic")
        if all(x["remainder"] > 0 for x in expansion):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
            axes.yaxis.set_minor_formatter(lambda _value, _position: "")
        axis(axes)
        axes.set_ylabel("error, nats")
        axes.set_title("Error of the expansion")
        _legend(axes)

    def draw_weighted(axes: Axes) -> None:
        _line(axes, lengths, [x["covariance_distance"] for x in expansion], _ORANGE, "distance, as a share of Sigma")
        cosine = [x["action_cosine"] for x in expansion]
        _line(axes, lengths, cosine, _GREEN, "cosine of the two corrections", dashed=True)
        axis(axes)
        _from_zero(axes)
        axes.set_title("Covariance under the query's weights")
        _legend(axes)

    caption = (
        "The correction comes from the log-partition expanded at q = 0. Left, by how much that expansion misses the "
        "exact value at the model's queries, brought to three lengths; right, how far the covariance under softmax "
        "weights, which is the exact second derivative at q, is from Sigma."
    )
    panels = (
        _svg("expansion-remainder", "Error of the expansion by length of the query", (4.4, 3.0), draw_remainder),
        _svg("expansion-weighted", "Query-weighted covariance against Sigma", (4.4, 3.0), draw_weighted),
    )
    return Figure("expansion", "Is the expansion good where the queries are?", caption, panels)


def all_figures(results: DiagnosisResults) -> list[Figure]:
    """The figures in reading order; one for which nothing was measured is left out."""
    figures = [
        _curve_figure(results),
        _histogram_figure(results),
        _heat_figure(results),
        _spectrum_figure(results),
        *_correction_figures(results),
        _margin_figure(results),
        _expansion_figure(results),
    ]
    return [figure for figure in figures if figure is not None]


class LayerTable(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


_Column = tuple[str, Callable[[Any], str]]


def layer_tables(results: DiagnosisResults) -> list[LayerTable]:
    """One row a layer, with what was measured of its keys, and of its queries."""
    tables = []
    for keys in results["keys"]:
        merged = [{**x, **y} for x, y in zip(keys["alignment"]["layers"], keys["spectrum"], strict=True)]
        columns: list[_Column] = [
            ("needle", lambda x: f"{x['unique']:.3f}"),
            ("text", lambda x: f"{x['text']:.3f}"),
            ("difference", lambda x: signed(x["difference"], 3)),
            ("top share", lambda x: f"{x['top_share']:.2f}"),
            ("largest eigenvalue", lambda x: f"{x['largest']:.3f}"),
            ("effective rank", lambda x: f"{x['effective_rank']:.1f}"),
            ("mean key squared", lambda x: f"{x['mean_length_squared']:.2f}"),
        ]
        tables.append(_table(_KEYS_WORDS[keys["keys"]].capitalize(), merged, columns))
    if results["correction"] is not None and results["margins"] is not None:
        both = [{**x, **y} for x, y in zip(results["correction"], results["margins"], strict=True)]
        columns = []
        if all(x["gate"] is not None for x in both):
            columns += [("gate, text", lambda x: f"{x['gate']['text']:.3f}")]
            columns += [("gate, question", lambda x: f"{x['gate']['question']:.3f}")]
        columns += [
            ("correction, text", lambda x: _percent(x["relative_size"]["text"])),
            ("turn", lambda x: f"{x['angle']:.2g}°"),
            ("bf16 error", lambda x: "" if x["rounding_noise"] is None else _percent(x["rounding_noise"])),
            ("condition holds", lambda x: f"{100 * x['condition_holds']:.0f} %"),
            ("margin", lambda x: _short(x["margin"])),
            ("its change", lambda x: _short(x["change"])),
        ]
        tables.append(_table("Queries and margins", both, columns))
    return tables


def _table(title: str, layers: Sequence[Any], columns: Sequence[_Column]) -> LayerTable:
    rows = [[str(x["layer"]), *(text(x) for _, text in columns)] for x in layers]
    return LayerTable(title, ["layer", *(name for name, _ in columns)], rows)


def _facts(results: DiagnosisResults) -> list[tuple[str, list[tuple[str, str]]]]:
    return [
        ("Model", _flattened(results["model"])),
        ("Prompts", _flattened(results["settings"])),
        ("Machine and versions", _flattened({**results["environment"], **results["versions"]})),
    ]


def render_diagnosis(results: DiagnosisResults) -> str:
    """The page as text; equal results give equal text."""
    return render_page(
        "diagnosis.html.j2",
        all_figures(results),
        name=results["model"]["name"],
        created=results["created"],
        intervention=intervention(results),
        settings=results["settings"],
        headline=headline(results),
        findings=findings(results),
        tables=layer_tables(results),
        facts=_facts(results),
        version=results["environment"]["ccq"],
    )


def write_diagnosis(results: DiagnosisResults, path: str | os.PathLike[str]) -> None:
    """Write the self-contained HTML page of a diagnosis to `path`, whole or not at all. The folder must exist."""
    write_bytes_atomically(path, render_diagnosis(results).encode())
