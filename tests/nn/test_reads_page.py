"""The table of docs/reads.md, and what `ccq reads` prints, are those of the registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ccq.cli import main
from ccq.nn.reads import READS, describe_reads
from ccq.ops.reads.exact import steps_needed
from ccq.ops.reads.exponential import terms_needed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reads.md").read_text(encoding="utf-8")


def test_the_table_of_the_page() -> None:
    expected = [
        f"| `{row['name']}` | {row['formula']} | {row['summary']} | {row['source']} | {row['parameters']:,} | "
        f"{row['state_bytes']:,} | {row['operations_per_token'] / 1e6:.2f} |"
        for row in describe_reads()
    ]
    table, *_ = PAGE.partition("\n## ")
    assert [line for line in table.splitlines() if line.startswith("| `")] == expected
    for name in READS:
        assert PAGE.count(f"`{name}`") >= 2, f"the page does not explain {name}"


def test_what_the_page_says_about_products() -> None:
    """In float32: a product for every term; for every step, and two for residuals."""
    assert f"`exponential` {terms_needed(1.2e-7)} in float32, `exact` {steps_needed(1.0, 1.2e-7) + 2}" in PAGE
    assert READS["richardson"].options == {"steps": 3}
    assert READS["query-weighted"].options == {"landmarks": 8}


def test_what_the_page_says_about_costs() -> None:
    figures = json.loads((ROOT / "benchmarks/results/model-h200-reads.json").read_text(encoding="utf-8"))
    times = {row["model"]: row["step_device"]["median_ms"] for row in figures["models"]}
    backbone = times.pop("gla")
    assert f"{backbone:.1f} ms without a read step" in PAGE
    _, _, rest = PAGE.partition("## What they cost")
    found = [line.split(" | ")[:3] for line in rest.splitlines() if line.startswith("| `")]
    expected = sorted((time, name.removeprefix("gla+")) for name, time in times.items())
    assert sorted(found) == sorted(
        [f"| `{name}`", f"{time:.1f}", f"+{time / backbone - 1:.0%}".replace("%", " %")] for time, name in expected
    )
    assert [float(time) for _, time, _ in found] == sorted(float(time) for _, time, _ in found)


def test_figures_by_hand() -> None:
    """Six heads of 256: a gate on 1536 channels; second moment (one triangle where it is packed), total and a count, in
    float32.
    """
    rows = {row["name"]: row for row in describe_reads()}
    assert rows["ccq"]["parameters"] == 6 * (1536 + 1)
    assert rows["ccq"]["state_bytes"] == 4 * 6 * (256 * 257 // 2 + 256) + 8
    assert rows["exact"]["state_bytes"] == 4 * 6 * (256 * 256 + 256) + 8
    assert rows["ccq"]["operations_per_token"] == 4 * 6 * 256 * 256 + 2 * 6 * 1536
    assert rows["mesa"]["parameters"] == 6 * 256
    assert rows["query-weighted"]["state_bytes"] == 4 * 6 * 8 * (256 + 1)
    assert rows["comba"]["parameters"] == 6
    assert rows["none"]["state_bytes"] == rows["normalize"]["state_bytes"] == rows["comba"]["state_bytes"] == 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reads", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe_reads()


@pytest.mark.parametrize("width", [80, 120])
def test_the_command_cuts_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["reads"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= width and "`ccq reads --json`" in lines[-1]
    shown = " ".join(" ".join(lines).split())
    for row in describe_reads():
        options = "".join(f"options: {name} (default {value}) " for name, value in row["options"].items())
        assert (
            f"{row['name']} {row['formula']} {row['summary']} source: {row['source']} {options}"
            f"{row['parameters']:,} parameters, {row['state_bytes'] / 1024:,.1f} KiB of state, "
            f"{row['operations_per_token'] / 1e6:.2f} M operations/token"
        ) in shown
    # Four and an empty one for most.
    assert len(lines) < 6 * len(READS)
