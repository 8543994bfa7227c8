"""The page of a diagnosis says what its results say, and needs nothing but itself."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as MatplotlibFigure
from tests.report.page import Page

from ccq.report.diagnosis import all_figures, findings, headline, layer_tables, render_diagnosis, write_diagnosis

LAYERS, HEADS = 3, 2


def _kinds(text: float) -> dict[str, float]:
    return {"text": text, "needle": text + 0.02, "question": text + 0.1, "last": text + 0.2}


def _keys(look: str, difference: float) -> dict[str, Any]:
    layers = [
        {
            "layer": layer,
            "name": f"layers.{layer}.attn",
            "difference": difference + 0.1 * layer,
            "standard_deviation": 0.02,
            "unique": 0.5 + difference + 0.1 * layer,
            "needle": 0.48,
            "text": 0.5,
            "rare_text": 0.45,
            "difference_by_head": [difference + 0.1 * layer + 0.04 * (2 * head - 1) for head in range(HEADS)],
        }
        for layer in range(LAYERS)
    ]
    mean = sum(layer["difference"] for layer in layers) / LAYERS
    cells = [cell for layer in layers for cell in layer["difference_by_head"]]
    return {
        "keys": look,
        "alignment": {
            "directions": 4,
            "difference": mean,
            # Standard deviation 0.002 with 3 of them.
            "difference_by_prompt": [mean - 0.002, mean, mean + 0.002],
            "unique": 0.5 + mean,
            "text": 0.5,
            "layers_below_zero": sum(layer["difference"] < 0 for layer in layers),
            "heads_above_zero": sum(cell > 0 for cell in cells),
            "heads": len(cells),
            "layers": layers,
            "histogram": {"edges": [0.0, 0.5, 1.0], "unique": [6, 4], "text": [30, 70]},
        },
        "spectrum": [
            {
                "layer": layer,
                "name": f"layers.{layer}.attn",
                "trace": 0.75,
                "mean_length_squared": 0.25,
                "largest": 0.4,
                "top_share": 0.95,
                "effective_rank": 2.5,
                "eigenvalues": [0.4, 0.2, 0.1, 0.05, 0.0],
            }
            for layer in range(LAYERS)
        ],
    }


@pytest.fixture
def results() -> Any:
    layers = [{"layer": layer, "name": f"layers.{layer}.attn"} for layer in range(LAYERS)]
    return {
        "schema": "ccq-diagnosis/1",
        "created": "2026-01-02T03:04:05+00:00",
        "model": {"name": "a <b>model", "type": "ccq", "arm": "gla+ccq", "read": "on", "parameters": 12345,
                  "dtype": "float32"},
        "settings": {
            "prompts": 3, "seed": 0, "fillers": 120, "text": None, "sentences": 60, "tokens": [1500, 1600],
            "queries": "memory", "nominal_gate": None,
        },
        "versions": {"torch": "2.0", "transformers": "5.0"},
        "environment": {"ccq": "9.8.7", "python": "3", "torch": "2.0", "platform": "p", "processor": "c", "cores": 1,
                        "threads_per_run": 1, "device": "cpu"},
        "keys": [_keys("projection", -0.25), _keys("memory", -0.05)],
        "correction": [
            {**layer, "gate": _kinds(0.3), "relative_size": _kinds(0.004), "angle": 0.25, "rounding_noise": 0.9,
             "unchanged": 0.125}
            for layer in layers
        ],
        "margins": [
            {**layer, "condition_holds": 0.6, "margin": 0.2, "change": change, "standard_deviation": 0.001,
             "first_direction": change / 2, "score_change": _kinds(-0.01)}
            for layer, change in zip(layers, (0.004, 0.002, -0.003), strict=True)
        ],
        "expansion": [
            {"length": length, "remainder": 1e-4 * length**3, "remainder_of_linear": 1e-2 * length**2,
             "covariance_distance": 0.05 * length, "action_cosine": 0.9}
            for length in (1.0, 4.0, 16.0)
        ],
    }  # fmt: skip


def test_sentences_state_the_figures(results: Any) -> None:
    # t(0.975, 2) * 0.002 / sqrt(3), of a table: 4.303.
    assert headline(results) == (
        "In the output of the key projection the needle's unique tokens lie less in the crowded directions than the "
        "text around them (−0.150 ± 0.005); in the keys that enter memory the needle's unique tokens lie more in the "
        "crowded directions than the text around them (+0.050 ± 0.005)."
    )
    texts = [finding.text for finding in findings(results)]
    assert texts[0].endswith(
        "35 % of a unique needle token's distance from the mean lies in the top 4 directions, of a token of the text "
        "50 %, of one as rare 45 % (difference −0.150 ± 0.005, its 95 % interval over prompts, with a standard "
        "deviation from prompt to prompt of 0.020 in a layer; below zero in 3 of 3 layers, above in 0 of 6 heads)."
    )
    assert (
        "With the model's own gate the correction is 0.4 % of a query on the text and 10 % on the question" in texts[2]
    )
    assert "turns a query by 0.25°" in texts[2]
    assert texts[3] == (
        "The gate is 0.300 on the text, 0.320 on the needle, 0.400 on the question, 0.500 on the last token."
    )
    assert "by +0.001, from +0.2, and widens it in 2 of 3 layers; the sign condition holds for 60 %" in texts[4]
    assert "0.0001 nats at length 1, 0.0064 nats at length 4" in texts[5]


@pytest.mark.parametrize(
    ("by_prompt", "words"),
    [
        ([-0.03, -0.02, -0.04], "lie less in the crowded directions than the text around them (−0.030 ± 0.025)"),
        ([0.03, 0.02, 0.04], "lie more in the crowded directions than the text around them (+0.030 ± 0.025)"),
        ([-0.03, -0.01, -0.05], "no difference of alignment between the needle's unique tokens and the text around "
         "them can be told from chance (−0.030 ± 0.050)"),
        # 0.0301 and 0.0296 read as 0.030 both.
        ([-0.0301, -0.0182, -0.0420], "can be told from chance (−0.030 ± 0.030)"),
        ([-0.03], "lie less in the crowded directions than the text around them (−0.030, with no spread over prompts"),
    ],
)  # fmt: skip
def test_the_headline_follows_sign_and_spread(results: Any, by_prompt: list[float], words: str) -> None:
    mean = sum(by_prompt) / len(by_prompt)
    results["keys"][1]["alignment"] |= {"difference": mean, "difference_by_prompt": by_prompt}
    first, second = headline(results).split("; ")
    assert words in second and "lie less" in first


def test_the_page_says_what_random_weights_show(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccq.report.diagnosis._svg", lambda *_: "")  # drawing takes most of the time
    limits = Page(render_diagnosis(results)).text.split("Limits")[1].split("What was run")[0]
    assert "models with random weights show it too" in limits


def test_rounding_is_told_by_the_median_layer_and_drawn_on_a_log_axis(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer, noise, unchanged in zip(results["correction"], (2.0, None, 155.0), (0.5, 1.0, 0.9), strict=True):
        layer |= {"rounding_noise": noise, "unchanged": unchanged}
    results["correction"].append({**results["correction"][0], "layer": 3, "rounding_noise": 0.04, "unchanged": 0.1})
    # The layer without a correction has no error of one, and is left out.
    assert (
        "Rounding the corrected query to bfloat16 makes an error of 200 % of the correction (ratio of root mean "
        "squares over tokens, the median of layers from 4 % to 15500 %) and leaves 50 % of its coordinates as they "
        "were."
    ) in findings(results)[2].text
    drawn: dict[str, Any] = {}

    def keep(name: str, _: str, __: tuple[float, float], draw: Any) -> str:
        drawn[name] = MatplotlibFigure().add_subplot()
        draw(drawn[name])
        return ""

    monkeypatch.setattr("ccq.report.diagnosis._svg", keep)
    figures = {figure.key: figure for figure in all_figures(results)}
    assert len(figures["rounding"].panels) == 2 and "logarithmic axis" in figures["rounding"].caption
    error, unchanged = drawn["rounding-error"], drawn["rounding-unchanged"]
    assert (error.get_yscale(), error.get_ylim(), error.get_ylabel()) == ("log", (1, 1e5), "% of the correction")
    assert error.lines[0].get_ydata() == pytest.approx([200, math.nan, 15500, 4], nan_ok=True)
    assert (unchanged.get_yscale(), unchanged.get_ylim()) == ("linear", (0, 100))
    assert unchanged.lines[0].get_ydata() == pytest.approx([50, 100, 90, 10])


def test_a_correction_of_zero_has_no_error_of_rounding(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccq.report.diagnosis._svg", lambda *_: "")
    for layer in results["correction"]:
        layer["rounding_noise"] = None
    assert "Rounding" not in " ".join(finding.text for finding in findings(results))
    assert "rounding" not in [figure.key for figure in all_figures(results)]
    column = layer_tables(results)[2].header.index("bf16 error")
    assert {row[column] for row in layer_tables(results)[2].rows} == {""}


def test_a_read_step_without_a_correction_is_described_as_that(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccq.report.diagnosis._svg", lambda *_: "")
    normalized = {**results, "correction": None, "margins": None}
    texts = [finding.text for finding in findings(normalized)]
    assert texts[2].startswith("The read step of this model has no correction,") and "log-partition" in texts[3]
    assert not any("cannot be told from the output" in text or "bfloat16" in text for text in texts)
    assert [figure.key for figure in all_figures(normalized)] == [
        "curve", "histogram", "heat", "spectrum", "expansion"
    ]  # fmt: skip
    assert len(layer_tables(normalized)) == 2


def test_a_model_without_gate_or_queries_is_described_as_that(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccq.report.diagnosis._svg", lambda *_: "")  # drawing takes most of the time
    ungated = copy.deepcopy(results)
    ungated["model"] |= {"arm": "gla", "read": None}
    ungated["settings"]["nominal_gate"] = 0.3
    for layer in ungated["correction"]:
        layer["gate"] = None
    texts = [finding.text for finding in findings(ungated)]
    assert any("With a gate of 0.3 (since the model has none) the correction is" in text for text in texts)
    assert not any(text.startswith("The gate is") for text in texts)
    assert "gate-by-kind" not in [figure.key for figure in all_figures(ungated)]
    assert not any("gate" in name for table in layer_tables(ungated) for name in table.header)

    unqueried = {**results, "correction": None, "margins": None, "expansion": None}
    assert findings(unqueried)[-1].text.startswith("The queries of this model cannot be told")
    assert [figure.key for figure in all_figures(unqueried)] == ["curve", "histogram", "heat", "spectrum"]
    assert len(layer_tables(unqueried)) == 2
    assert "cannot be told" in render_diagnosis(unqueried)


def test_an_intervention_is_named_wherever_it_changes_the_figures(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ccq.report.diagnosis._svg", lambda *_: "")  # drawing takes most of the time
    assert "intervention" not in Page(render_diagnosis(results)).text
    scaled = copy.deepcopy(results)
    scaled["model"]["read"] = "scale=0.5"
    text = Page(render_diagnosis(scaled)).text
    assert "read with the intervention scale=0.5" in text and "own gate" not in text
    assert text.count("With the gate under the intervention scale=0.5") == 2  # the sentence and the caption
    off = copy.deepcopy(results)
    off["model"]["read"], off["settings"]["nominal_gate"] = "off", 0.3
    for layer in off["correction"]:
        layer["gate"] = None
    text = Page(render_diagnosis(off)).text
    assert "read with the intervention off" in text and "the model has none" not in text
    assert text.count("With a gate of 0.3 (since the intervention off leaves no correction)") == 2
    assert findings(off)[0].text.startswith("The read steps ran under the intervention off;")


def test_tables_have_a_row_a_layer(results: Any) -> None:
    projection, memory, queries = layer_tables(results)
    assert projection.rows[2] == ["2", "0.450", "0.500", "−0.050", "0.95", "0.400", "2.5", "0.25"]
    assert [row[3] for row in memory.rows] == ["−0.050", "+0.050", "+0.150"]
    assert queries.rows[0] == ["0", "0.300", "0.400", "0.4 %", "0.25°", "90 %", "60 %", "+0.2", "+0.004"]


def test_one_prompt_and_one_layer_are_drawn(results: Any) -> None:
    for keys in results["keys"]:
        keys["alignment"]["layers"] = keys["alignment"]["layers"][:1]
        keys["alignment"]["layers"][0] |= {"standard_deviation": None, "rare_text": None}
        keys["alignment"]["difference_by_prompt"] = keys["alignment"]["difference_by_prompt"][:1]
        keys["spectrum"] = keys["spectrum"][:1]
    for part in ("correction", "margins"):
        results[part] = results[part][:1]
    results["margins"][0]["standard_deviation"] = None
    assert len(all_figures(results)) == 9
    assert "over prompts" not in findings(results)[0].text and "as rare" not in findings(results)[0].text


def test_the_page_refers_to_nothing_outside_and_escapes_names(
    results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = render_diagnosis(results)
    found = Page(page)
    assert all(value.startswith("#") for _, value in found.targets)
    assert not found.loaders
    assert "url(http" not in page and "@import" not in page
    assert "<b>model" not in page and "a &lt;b&gt;model" in page
    assert "Made by ccq 9.8.7" in page and "3 prompts of 1500 to 1600 tokens" in page
    cells = [c for keys in results["keys"] for x in keys["alignment"]["layers"] for c in x["difference_by_head"]]
    assert all(f">{cell:.2f}<" in page for cell in cells) and "ends at ± 0.29" in page
    monkeypatch.setattr("ccq.report.diagnosis.render_diagnosis", lambda given: page if given is results else "")
    write_diagnosis(results, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == page.encode()
