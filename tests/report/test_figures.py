"""The plots show the figures of the results, are well-formed and the same every time."""

from __future__ import annotations

import copy
import itertools
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from ccq.models.presets import PRESETS
from ccq.report.figures import Figure, GatePoint, all_figures, arm_styles, draw_gates, figure_png

Build = Callable[..., dict[str, Any]]
SVG = "{http://www.w3.org/2000/svg}"
# Of every model that has a name, so with every backbone.
KNOWN_ARMS = list(dict.fromkeys(name.rpartition("-")[0] for name in PRESETS))
ELEVEN = ["gla", "gated-deltanet", *(f"backbone{number}" for number in range(9))]
ABLATIONS = ["gla", *(f"gla+{read}" for read in ("normalize", "ccq", *(f"ccq-form{number}" for number in range(16))))]


def _figures(results: Any) -> dict[str, Figure]:
    return {figure.key: figure for figure in all_figures(results)}


def _texts(panel: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(panel).iter(f"{SVG}text")]


def test_panels_are_well_formed_scalable_and_share_no_id(build_results: Build) -> None:
    ids: set[str] = set()
    for figure in all_figures(build_results(arms=["gla", "gla+ccq"])):  # type: ignore[arg-type]
        assert figure.panels and figure.caption.endswith(".")
        for panel in figure.panels:
            root = ElementTree.fromstring(panel)
            assert root.tag == f"{SVG}svg" and "viewBox" in root.attrib and "width" not in root.attrib
            assert root.attrib["aria-label"]
            assert root.find(f"{SVG}metadata") is None
            own = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
            assert len(own) == len(set(own)) and not ids & set(own)
            ids |= set(own)
            referred = [
                value.split("#", 1)[1].rstrip(")")
                for element in root.iter()
                for name, value in element.attrib.items()
                if name.endswith("href") or value.startswith("url(#")
            ]
            assert set(referred) <= set(own)


def test_rendering_twice_gives_the_same_bytes(build_results: Build) -> None:
    results: Any = build_results(arms=["gla+ccq"], seeds=2)
    assert all_figures(copy.deepcopy(results)) == all_figures(results)


def test_heat_map_cells_are_pooled_over_seeds(build_results: Build) -> None:
    results: Any = build_results(arms=["gla+ccq"], seeds=2)
    for run, correct in zip(results["runs"], (11, 40), strict=True):
        run["needle"] = [{"length": 512, "depth_from": 0.4, "depth_to": 0.6, "asked": 50, "correct": correct}]
    heat = _figures(results)["heat"]
    texts = _texts(heat.panels[0])
    assert "51" in texts and "40–60 %" in texts and "512" in texts  # (11 + 40) / 100
    assert "rests on 100 questions" in heat.caption


def test_cost_bars_carry_their_figures(build_results: Build) -> None:
    results: Any = build_results(arms=["gla"])
    results["runs"][0]["training"]["tokens_per_second"] = 12345.0
    results["runs"][0]["state_bytes"] = 3 * 1024 * 1024
    training, _, state = _figures(results)["cost"].panels
    assert "12.3k" in _texts(training) and "3.0 MiB" in _texts(state)


def test_curriculum_changes_are_marked(build_results: Build) -> None:
    text_loss, answer_loss = _figures(build_results(arms=["gla"]))["training"].panels
    for panel in (text_loss, answer_loss):
        assert {"64", "128", "256"} <= set(_texts(panel))


def test_constant_window_length_marks_nothing(build_results: Build) -> None:
    results: Any = build_results(arms=["gla"])
    for point in results["runs"][0]["training"]["curve"]:
        point["length"] = 256
    assert "256" not in _texts(_figures(results)["training"].panels[0])


def test_every_arm_and_both_chance_levels_are_named_beside_their_line(build_results: Build) -> None:
    texts = " ".join(_texts(_figures(build_results(arms=["gla+ccq", "gated-deltanet"]))["needle"].panels[0]))
    for name in ("gla+ccq", "gated-deltanet", "chance, values seen", "chance, any value"):
        assert name in texts


@pytest.mark.parametrize("arms", [["gla"], ["gla+ccq"], ["other+ccq", "other"]])
def test_any_set_of_arms_draws(build_results: Build, arms: list[str]) -> None:
    figures = _figures(build_results(arms=arms))
    has_read, has_pair = any("+" in arm for arm in arms), len(arms) == 2
    assert len(figures["needle"].panels) == (2 if has_read else 1)
    assert ("gate" in figures) == has_read
    assert ("differences" in figures) == has_pair
    assert len(figures["heat"].panels) == len(arms)


def test_nothing_measured_draws_nothing(build_results: Build) -> None:
    results: Any = build_results(arms=["gla+ccq"])
    results["runs"][0].update(needle=[], needle_by_length=[], needle_read_off=None, perplexity=[], gate=None)
    results["runs"][0]["training"]["curve"] = []
    assert set(_figures(results)) == {"cost"}


def test_seeds_logged_at_different_tokens_are_drawn(build_results: Build) -> None:
    results: Any = build_results(arms=["gla"], seeds=2)
    results["runs"][1]["training"]["curve"] = results["runs"][1]["training"]["curve"][::3]
    panel = ElementTree.fromstring(_figures(results)["training"].panels[0])
    own_lines = [
        element for element in panel.iter() if f"stroke: {arm_styles(['gla'])['gla'].color}" in element.get("style", "")
    ]
    assert len([element for element in own_lines if "stroke-width: 1.6" in element.get("style", "")]) == 2


def test_text_is_not_read_as_mathematics_or_markup(build_results: Build) -> None:
    hostile = "a$b_{1}$<x>&"
    panel = _figures(build_results(arms=[hostile]))["cost"].panels[0]
    assert hostile in _texts(panel)


def test_an_arm_looks_the_same_whichever_others_are_there() -> None:
    everywhere = arm_styles(["gla", "gla+ccq", "gated-deltanet", "gated-deltanet+ccq"])
    assert arm_styles(["gated-deltanet+ccq"])["gated-deltanet+ccq"] == everywhere["gated-deltanet+ccq"]
    assert len({style.color for style in everywhere.values()}) == 4
    assert everywhere["gla"].dark == everywhere["gla+ccq"].color


def test_the_usual_arms_look_as_ever() -> None:
    usual = {
        "gla": ("#7eb0de", "#0f4c8a", (0, (4, 2)), "o", False),
        "gla+ccq": ("#0f4c8a", "#0f4c8a", "-", "o", True),
        "gated-deltanet": ("#eba45c", "#a34a00", (0, (4, 2)), "s", False),
        "gated-deltanet+ccq": ("#a34a00", "#a34a00", "-", "s", True),
    }
    assert arm_styles(list(usual)) == usual
    assert arm_styles(["gla+normalize"])["gla+normalize"] == usual["gla+ccq"], "its only read has the hue too"
    among_many = arm_styles([*ABLATIONS, "gated-deltanet+exact", *usual])
    assert {arm: among_many[arm] for arm in usual} == usual


@pytest.mark.parametrize(
    "arms",
    [
        ABLATIONS,
        [
            f"{backbone}{read}"
            for backbone in ("gla", "gated-deltanet")
            for read in ("", "+ccq", "+normalize", "+exact")
        ],
        [f"gla+read{number}" for number in range(29)],
        KNOWN_ARMS,
        [f"{backbone}{read}" for backbone in ELEVEN for read in ("", "+ccq")],
    ],
)
def test_no_two_arms_look_alike_with_marks_or_with_lines_alone(arms: list[str]) -> None:
    styles = arm_styles(arms).values()
    assert len({(style.color, style.marker, style.filled) for style in styles}) == len(arms)
    assert len({(style.color, style.dashes) for style in styles}) == len(arms)
    reads = [style for style in styles if style.filled]
    assert len({style.color for style in reads}) >= min(len(reads), 8)


# Machado, Oliveira and Fernandes 2009, severity 1: protanopia, deuteranopia, tritanopia, on linear RGB.
DEFICIENCIES = (
    np.eye(3),
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
)
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def _linear(color: str) -> Any:
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def _lab(rgb: Any) -> Any:
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _difference(one: str, other: str) -> float:
    """The smallest distance in CIELAB, with and without a deficiency."""
    return min(
        float(np.linalg.norm(_lab(matrix @ _linear(one)) - _lab(matrix @ _linear(other)))) for matrix in DEFICIENCIES
    )


def _contrast(color: str) -> float:
    """On white, as WCAG says it; it asks 4.5 of text."""
    return float(1.05 / (TO_XYZ[1] @ _linear(color) + 0.05))


def test_hues_of_the_reads_differ_for_the_colour_blind_and_their_text_has_contrast() -> None:
    styles = arm_styles(ABLATIONS).values()
    colors = {style.color for style in styles}
    assert len(colors) == 9  # the backbone, its first read and the hues of the further ones
    assert min(_difference(one, other) for one, other in itertools.combinations(colors, 2)) > 10
    assert all(_contrast(style.dark) > 4.5 for style in styles)


@pytest.mark.parametrize("backbones", [[arm for arm in KNOWN_ARMS if "+" not in arm], ELEVEN])
def test_every_backbone_has_hues_of_its_own(backbones: list[str]) -> None:
    arms = [f"{backbone}{read}" for backbone in backbones for read in ("", "+ccq")]
    styles = arm_styles([*arms, *ABLATIONS])
    colors = {style.color for style in styles.values()}
    assert len(arms) > 10 and len(colors) == len(arms) + 7  # the hues of further reads
    assert all(_contrast(style.dark) > 4.5 for style in styles.values())
    for arm in arms[10:]:  # the first five pairs rely on their markers too
        own = styles[arm].color
        assert min(_difference(own, other) for other in colors - {own}) > 10


def _crowded(arms: list[str]) -> dict[str, list[list[GatePoint]]]:
    """One line at the top, the others close together at the bottom."""
    ends = [0.002 * number for number in range(1, len(arms))]
    return {
        arm: [[GatePoint(0.0, 0.01, None), GatePoint(100.0, end, None)]]
        for arm, end in zip(arms, [1.0, *ends], strict=True)
    }


SEVEN = ["gla", "gla+ccq", *(f"{backbone}{read}" for backbone in ("gated-deltanet", "mamba2") for read in ("", "+ccq"))]
SEVEN = [*SEVEN, "gated-deltanet+ccq-uncentred"]


@pytest.mark.parametrize("rows", [1, 2])
def test_names_at_the_ends_of_lines_do_not_overlap_in_a_grid_of_panels(rows: int) -> None:
    figure = MatplotlibFigure(figsize=(14.4, 3.7 * rows), layout="constrained")
    panels = figure.subplots(rows, 3).flatten()
    for axes in panels:
        draw_gates(axes, _crowded(SEVEN), arm_styles(SEVEN))
        axes.set_title("set later, and\ntwo lines high")
        axes.set_xlabel("below\nthe axes")
    figure.draw_without_rendering()
    for axes in panels:
        names = [text for text in axes.texts if isinstance(text, Annotation)]
        boxes = [Text.get_window_extent(name) for name in names]  # an Annotation's own has the leader too
        assert len(boxes) == 7
        assert not any(Bbox.intersection(a, b) for a, b in itertools.combinations(boxes, 2))
        points = figure.dpi / 72
        assert all(axes.bbox.y0 - 4 * points <= box.y0 and box.y1 <= axes.bbox.y1 + 4 * points for box in boxes)
        # From the bottom up in the order of their lines: the first arm ends at the top.
        upwards = sorted(zip((box.y0 for box in boxes), names, strict=True), key=lambda each: each[0])
        found = [name.get_text().replace("\n", "") for _, name in upwards]
        assert found == [*SEVEN[1:], SEVEN[0]]


def test_a_name_with_room_stands_beside_the_end_of_its_line() -> None:
    figure = MatplotlibFigure(figsize=(5, 4), layout="constrained")
    axes = figure.add_subplot()
    points = {"gla+ccq": 0.9, "mamba2+ccq": 0.5, "gla+exact": 0.1}
    trainings = {arm: [[GatePoint(0.0, 0.0, None), GatePoint(9.0, end, None)]] for arm, end in points.items()}
    draw_gates(axes, trainings, arm_styles(list(trainings)))
    figure.draw_without_rendering()
    for name in axes.texts:
        box = Text.get_window_extent(name)
        _, end = axes.transData.transform((9.0, points[name.get_text()]))
        assert (box.y0 + box.y1) / 2 == pytest.approx(end, abs=1.5)


def test_many_lines_are_named_in_one_legend_below_all_panels() -> None:
    eight = [*SEVEN, "gla+exact"]
    figure = MatplotlibFigure(figsize=(9, 3.7), layout="constrained")
    for axes, arms in zip(figure.subplots(1, 3), (eight, [*eight, "gla+comba"], SEVEN), strict=True):
        draw_gates(axes, _crowded(arms), arm_styles([*eight, "gla+comba"]))
    figure.draw_without_rendering()
    assert [len(axes.texts) for axes in figure.axes] == [0, 0, 7]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*eight, "gla+comba"]
    looks = [(handle.get_color(), handle.get_linestyle()) for handle in legend.legend_handles]
    drawn = [(line.get_color(), line.get_linestyle()) for line in figure.axes[1].lines]
    assert looks == drawn
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert all(box.y1 <= axes.get_tightbbox().y0 for axes in figure.axes)
    alone = MatplotlibFigure(figsize=(9, 3.7), layout="constrained")
    for axes in alone.subplots(1, 3):
        draw_gates(axes, _crowded(SEVEN), arm_styles(SEVEN))
    alone.draw_without_rendering()
    assert figure.axes[0].bbox.height == pytest.approx(alone.axes[0].bbox.height, rel=0.05), "the figure grew by it"
    assert figure.get_figwidth() == 9


def test_a_legend_has_line_and_mark_and_leaves_the_chance_levels_where_they_are(build_results: Build) -> None:
    (panel, *_) = _figures(build_results(arms=ABLATIONS[:7]))["needle"].panels
    texts = _texts(panel)
    for name in (*ABLATIONS[:7], "chance, values seen", "chance, any value"):
        assert texts.count(name) == 1
    legend = next(part for part in ElementTree.fromstring(panel).iter() if "legend_1" in part.get("id", ""))
    dashed = [part for part in legend.iter(f"{SVG}path") if "stroke-dasharray" in part.get("style", "")]
    assert len(dashed) == 5, "all but ccq and the fourth of the further reads"
    assert len(list(legend.iter(f"{SVG}use"))) == 7, "a marker each"


def _drawn(trainings: Any) -> tuple[dict[str, list[tuple[float, ...]]], list[str]]:
    """The lines on an axes by whether they are dashed for decay, each as its values, and the words beside them."""
    axes = MatplotlibFigure().add_subplot()
    draw_gates(axes, trainings, arm_styles(list(trainings)))
    lines: dict[str, list[tuple[float, ...]]] = {"trained": [], "decay": []}
    for line in axes.lines:
        kind = "decay" if line.get_linewidth() == 1.2 else "trained"
        lines[kind].append(tuple(np.asarray(line.get_ydata()).tolist()))
    return lines, [text.get_text() for text in axes.texts]


def test_the_gate_is_a_mean_over_seeds_and_decay_alone_is_drawn_once() -> None:
    def curve(*values: float, alone: tuple[float | None, ...]) -> list[GatePoint]:
        return [GatePoint(100.0 * place, *both) for place, both in enumerate(zip(values, alone, strict=True))]

    one, same = (0.01, 0.02), (0.01, 0.02 + 1e-9)
    lines, words = _drawn(
        {
            "gla+ccq": [curve(0.01, 0.3, alone=one), curve(0.01, 0.5, alone=one)],
            "gated-deltanet+ccq": [curve(0.01, 0.1, alone=same)],
            "gla+ccq-fixed": [curve(0.1, 0.1, alone=(None, None))],
        }
    )
    assert [pytest.approx(values) for values in lines["trained"]] == [(0.01, 0.4), (0.01, 0.1), (0.1, 0.1)]
    assert lines["decay"] == [(0.01, 0.02)]
    assert words.count("decay alone") == 1 and "gla+ccq" in words
    lines, words = _drawn(
        {"gla+ccq": [curve(0.01, 0.3, alone=one)], "gated-deltanet+ccq": [curve(0.1, 0.3, alone=(0.1, 0.2))]}
    )
    assert lines["decay"] == [(0.01, 0.02), (0.1, 0.2)]
    assert "gla+ccq: decay alone" in words and "gated-deltanet\n+ccq: decay alone" in words


def test_a_comparison_draws_the_gate_with_decay_alone_where_it_was_recorded(build_results: Build) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"])
    before = _figures(results)["gate"]
    assert "gla+ccq" in _texts(before.panels[-1]) and "decay alone" not in _texts(before.panels[-1])
    assert "decay" not in before.caption
    for point in results["runs"][1]["training"]["curve"]:
        point["gate_by_decay_alone"] = 0.01 + point["step"] / 1e5
    after = _figures(results)["gate"]
    assert "decay alone" in _texts(after.panels[-1]) and len(after.panels) == len(before.panels)
    assert "It does not decay here" in after.caption


def test_png_is_1200_pixels_wide_and_the_same_every_time(build_results: Build, tmp_path: Path) -> None:
    results: Any = build_results(arms=["gla", "gla+ccq"])
    figure_png(results, tmp_path / "a.png")
    figure_png(results, tmp_path / "b.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", data[16:20]) == (1200,)
    assert data == (tmp_path / "b.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_importing_the_report_loads_no_heavy_library() -> None:
    code = "import sys, ccq.report; print(sorted({'matplotlib', 'jinja2', 'rich', 'torch'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
