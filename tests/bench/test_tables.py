"""docs/speed.md says what the result files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ccq.bench.operator import Shape, bench_operator
from ccq.bench.tables import speed_page
from ccq.cli import main

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_files() -> None:
    page = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    assert page == speed_page(ROOT / "benchmarks/results"), "ccq bench tables benchmarks/results > docs/speed.md"


def test_every_figure_of_a_cpu_is_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "operator-here.json"
    shape = ["--rows", "1", "--tokens", "64", "--heads", "1", "--size", "8", "--threads", "1", "--repeats", "3"]
    assert main(["bench", "operator", "--device", "cpu", *shape, "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    assert main(["bench", "tables", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["schema"] == "ccq-bench-operator/2"
    assert "B 1, T 64, H 1, D 8, float32, 3 rounds on 1 thread;" in page
    for row in figures["times"]:
        low, high = row["lower_quartile_ms"], row["upper_quartile_ms"]
        both = f"{row['forward_backward_ms']:.1f} ({low:.1f} to {high:.1f})"
        assert f"| {row['function']} | {row['forward_ms']:.1f} | {both} | {row['ratio']:.2f} |" in page
        assert f"{row['forward_backward_ms']:.2f}" in printed
    for row in figures["errors"]:
        assert f"| {row['dtype']} | {row['largest_relative_error']:.1e} | {row['at']} |" in page


def test_files_come_in_the_order_of_their_names_and_both_schemas_are_read(tmp_path: Path) -> None:
    figures = bench_operator(Shape(1, 64, 1, 4), threads=1, repeats=2)
    for name, schema, processor in (("b", 1, "Older"), ("a", 2, "Newer")):
        figures["schema"] = f"ccq-bench-operator/{schema}"
        figures["environment"]["processor"] = processor
        (tmp_path / f"operator-{name}.json").write_text(json.dumps(figures))
    (tmp_path / "other.json").write_text("{}")  # of another benchmark
    page = speed_page(tmp_path)
    assert 0 < page.index("## CPU: Newer") < page.index("## CPU: Older")
    assert page.count("## ") == 2


def test_the_figures_of_long_prompts(tmp_path: Path) -> None:
    figures = {
        "schema": "ccq-bench-answers/1",
        "settings": {
            "arm": "gla+ccq",
            "scale": "60m",
            "length": 4096,
            "samples": 8,
            "batch_size": 4,
            "answer_tokens": 20,
        },
        "environment": {"torch": "2.11.0", "ccq": "0.1.0"},
        "gpu": {"card": "A card", "cuda": None, "driver": None, "triton": None, "fla": None},
        "reading_tokens_per_second": 160_000.0,
        "apart": {"samples_per_second": 31.25, "prompt_tokens_per_second": 128_000.0, "share_of_reading": 0.8},
        "long": [{"tokens": 131_072, "seconds": 1.5, "peak_bytes": 3 * 2**30}],
    }
    (tmp_path / "answers-x.json").write_text(json.dumps(figures))
    page = speed_page(tmp_path)
    assert "## Answers to long prompts: A card, gla+ccq, 60m" in page
    assert "8 prompts of 4096 tokens in batches of 4, answers of 20 tokens" in page
    assert "Reading speed: 160,000 tokens/s." in page
    assert "| apart | 31.2 | 128,000 | 0.80 |" in page and "| together |" not in page
    assert "| 131,072 | 1.50 | 3.00 |" in page


def test_a_folder_without_files_and_a_strange_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no file operator\*\.json or layer\*\.json or model\*\.json"):
        speed_page(tmp_path)
    (tmp_path / "operator-x.json").write_text('{"schema": "ccq-bench-operator/9"}')
    with pytest.raises(ValueError, match=r"operator-x\.json has the schema 'ccq-bench-operator/9'"):
        speed_page(tmp_path)
