"""The plots show the figures of the results, are well-formed and the same every time."""

from __future__ import annotations

import copy
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure as MatplotlibFigure

from ccq.report.figures import Figure, GatePoint, all_figures, arm_styles, draw_gates, figure_png

Build = Callable[..., dict[str, Any]]
SVG = "{http://www.w3.org/2000/svg}"


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
