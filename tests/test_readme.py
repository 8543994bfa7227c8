"""The README's example runs as it stands, and continuing with a state gives what the whole sequence gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from ccq import curvature_conditioned_query, gated_linear_attention
from tests.helpers import assert_close

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_continues_the_sequence() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    q, k, v, log_decay, gate = (
        torch.cat((x, x[:, :1]), 1) for x in (found[name] for name in ("q", "k", "v", "log_decay", "gate"))
    )
    read = curvature_conditioned_query(q, k, gate, backend="reference")
    whole = gated_linear_attention(read.query, k, v, log_decay, backend="reference")
    assert_close("last output", found["out"].output[:, 0], whole.output[:, -1], 1e-5)
    assert_close("memory", found["out"].state, whole.state, 1e-5)


def test_the_speed_table_is_that_of_the_results_file() -> None:
    figures = json.loads((ROOT / "benchmarks/results/operator-cpu.json").read_text())
    for row in figures["times"]:
        line = f"| {row['function']} | {row['forward_ms']:.1f} | {row['forward_backward_ms']:.1f} | "
        line += f"{row['lower_quartile_ms']:.1f} to {row['upper_quartile_ms']:.1f} | {row['ratio']:.2f} |"
        assert line in README
    for row in figures["errors"]:
        assert f"{row['largest_relative_error']:.1e} ({row['dtype']})" in README
