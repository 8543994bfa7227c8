"""The examples of the README run as they stand, and its figures are those of the files they come from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ccq import curvature_conditioned_query, gated_linear_attention
from tests.helpers import assert_close

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
OPERATOR, MODEL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_continues_the_sequence() -> None:
    found: dict[str, Any] = {}
    exec(OPERATOR, found)
    q, k, v, log_decay, gate = (
        torch.cat((x, x[:, :1]), 1) for x in (found[name] for name in ("q", "k", "v", "log_decay", "gate"))
    )
    read = curvature_conditioned_query(q, k, gate, backend="reference")
    whole = gated_linear_attention(read.query, k, v, log_decay, backend="reference")
    assert_close("last output", found["out"].output[:, 0], whole.output[:, -1], 1e-5)
    assert_close("memory", found["out"].state, whole.state, 1e-5)


def test_the_model_comes_back_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved: dict[str, Any] = {}
    before, after = MODEL.split("model = AutoModelForCausalLM")
    exec(before, saved)
    tokens = torch.arange(6)[None]
    expected = saved["model"].eval()(tokens).logits
    exec("model = AutoModelForCausalLM" + after, saved)
    assert torch.equal(saved["model"].eval()(tokens).logits, expected)


def test_the_figures_of_the_gpu_are_those_of_the_results_file() -> None:
    figures = json.loads((ROOT / "benchmarks/results/operator-h200.json").read_text())
    rows = {row["function"]: row for row in figures["functions"] if row["rows"] == 8}
    for name in ("triton", "composed"):
        forward, both = (rows[name][one]["device"]["median_ms"] for one in ("forward", "forward_backward"))
        assert re.search(rf"{forward:.2f}( ms forward)? and\s{both:.2f} ms", README), name


def test_what_the_read_step_costs_is_in_the_results_files() -> None:
    text = " ".join(README.split())
    layers = json.loads((ROOT / "benchmarks/results/layer-h200-gla.json").read_text())["ratios"]
    for rows in (1, 8):
        which = {"backbone": "gla", "rows": rows, "pass": "forward_backward"}
        (ratio,) = (line for line in layers if which.items() <= line.items())
        assert f"{ratio['ccq_over_backbone_device'] - 1:.0%}".replace("%", f" % more at batch {rows}") in text
    found = {}
    for backbone in ("gla", "gated-deltanet"):
        (ratio,) = json.loads((ROOT / f"benchmarks/results/model-h200-{backbone}.json").read_text())["ratios"]
        found[backbone] = [f"{100 * ratio[f'ccq_over_backbone_{part}'] - 100:.1f} %" for part in ("step", "prefill")]
    (step, prefill), (other_step, other_prefill) = found["gla"], found["gated-deltanet"]
    assert (
        f"{step} more with GLA and {other_step} with Gated DeltaNet, and prefill {prefill} and {other_prefill}" in text
    )


def test_the_speed_table_is_that_of_the_results_file() -> None:
    figures = json.loads((ROOT / "benchmarks/results/operator-cpu.json").read_text())
    for row in figures["times"]:
        line = f"| {row['function']} | {row['forward_ms']:.1f} | {row['forward_backward_ms']:.1f} | "
        line += f"{row['lower_quartile_ms']:.1f} to {row['upper_quartile_ms']:.1f} | {row['ratio']:.2f} |"
        assert line in README
    for row in figures["errors"]:
        assert f"{row['largest_relative_error']:.1e} ({row['dtype']})" in README
