"""Tables of runs beside the paper's values: which figure stands where, and what is missing."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.report.built_runs import benchmark, decoding, evaluation, runs, times, training

from ccq.report.paper_tables import PAPER, ReportTable, TableCell, TableRow, paper_tables, table_csv, trainings_table
from ccq.report.runs import Comparison, read_runs

LAYERS = Path(__file__).parents[2] / "benchmarks" / "results" / "layer-h200-gla.json"
BOOLQ, WIKITEXT = ("boolq", "acc"), ("wikitext", "word_perplexity")


def table(given: Any, key: str) -> ReportTable:
    return next(found for found in paper_tables(given) if found.key == key)


def cell(found: ReportTable, label: str, column: str, scale: str = "1.3B") -> TableCell:
    row = next(row for row in found.rows if row.label == label and row.scale == scale)
    return row.cells[found.columns.index(column)]


def labels(found: ReportTable) -> list[str]:
    return [row.label for row in found.rows]


def test_a_run_stands_behind_the_papers_row_of_its_arm() -> None:
    given = runs(
        evaluation("gla+ccq", "language", {BOOLQ: [1, 0, 1, 1], WIKITEXT: [20.0, 22.0]}),
        evaluation("gla", "language", {BOOLQ: [1, 0, 0, 1]}),
        evaluation("gla+ccq", "language", {BOOLQ: [1, 0, 1, 0]}, read="off"),
        evaluation("gla+exact", "language", {BOOLQ: [1, 0, 0, 0]}),
    )
    found = table(given, "table-2")
    assert labels(found) == [
        "Mamba2",
        "GLA",
        "gla",
        "GLA-Hedgehog",
        "Gated DeltaNet",
        "CCQ-GLA",
        "gla+ccq",
        "gla+ccq, correction off",
        "CCQ-Gated DeltaNet",
        "Transformer",
        "gla+exact",
    ]
    assert {row.scale for row in found.rows} == {"1.3B"}, "the paper's other scale is not about these runs"
    assert cell(found, "gla+ccq", "BoolQ").text == "75.00"
    assert cell(found, "gla+ccq", "Wiki ppl").text == "21.00"
    assert cell(found, "CCQ-GLA", "Wiki ppl").text == "16.92"


def test_what_was_not_measured_is_missing() -> None:
    found = table(runs(evaluation("gla", "language", {BOOLQ: [1, 0]})), "table-2")
    mine = next(row for row in found.rows if row.label == "gla")
    assert [c.text for c in mine.cells] == ["–"] * 9 + ["50.00", "–"]
    assert all(c.value is None and c.low is None for c in mine.cells[:9])
    assert [found.key for found in paper_tables(runs(evaluation("gla", "language", {BOOLQ: [1, 0]})))] == ["table-2"]


def test_runs_of_no_scale_of_the_paper_stand_behind_all_of_it() -> None:
    found = table(runs(evaluation("gla", "language", {BOOLQ: [1, 0]}, scale="tiny")), "table-2")
    assert [row.scale for row in found.rows] == ["500M"] * 7 + ["1.3B"] * 7 + ["tiny"]


def test_several_seeds_have_a_mean_and_the_interval_over_seeds() -> None:
    given = [
        evaluation("gla", "language", {WIKITEXT: [value, value]}, seed=seed)
        for seed, value in enumerate((18.0, 19.0, 20.0))
    ]
    found = cell(table(runs(*given), "table-2"), "gla", "Wiki ppl")
    # t(0.975, 2) / sqrt(3) = 2.48414
    assert (found.text, found.note, found.interval_from) == ("19.00", "16.52 to 21.48", "seeds")
    one = cell(table(runs(evaluation("gla", "language", {BOOLQ: [1] * 8 + [0] * 2})), "table-2"), "gla", "BoolQ")
    assert (one.text, one.note, one.interval_from) == ("80.00", "49.02 to 94.33", "samples")
    same = [evaluation("gla", "language", {BOOLQ: [1, 1]}, seed=seed) for seed in (0, 1)]
    found = cell(table(runs(*same), "table-2"), "gla", "BoolQ")
    assert (found.text, found.note, found.interval_from) == ("100.00", "", None)


def test_footnotes_are_numbered_where_they_stand() -> None:
    found = table(runs(evaluation("gla", "language", {BOOLQ: [1, 0]})), "table-2")
    marked = {
        (row.label, column): [found.footnotes[mark - 1] for mark in c.marks]
        for row in found.rows
        for column, c in zip(found.columns, row.cells, strict=True)
        if c.marks
    }
    assert set(marked) == {
        ("Transformer", "Wiki ppl"),
        ("Gated DeltaNet", "Wiki ppl"),
        ("CCQ-Gated DeltaNet", "Wiki ppl"),
    }
    assert "17.98 without and 18.01 with" in marked["CCQ-Gated DeltaNet", "Wiki ppl"][0]
    assert any("eight zero-shot tasks" in text for text in found.lead)


def test_needles_of_other_lengths_have_columns_of_their_own() -> None:
    given = {
        ("niah_single_1/4096", "accuracy"): [1, 1, 0, 1],
        ("niah_single_1/16384", "accuracy"): [0, 1],
        ("niah_multikey_1/4096", "accuracy"): [0.5, 0],
    }
    found = table(runs(evaluation("gla", "needle", given)), "table-3")
    assert found.columns[11:] == ("S1 16384", "niah_multikey_1 4096")
    assert [cell(found, "gla", column).text for column in ("S1 4K", "S1 16384", "niah_multikey_1 4096")] == [
        "75.0",
        "50.0",
        "25.0",
    ]
    assert cell(found, "GLA", "S1 16384").text == "–"
    assert cell(found, "GLA", "S1 4K").text == "47.8"


def test_the_ablation_is_shown_where_something_is_varied() -> None:
    plain = [
        evaluation(arm, "language", {WIKITEXT: [18.0, 18.2]}) for arm in ("gated-deltanet", "gated-deltanet+ccq", "gla")
    ]
    assert [found.key for found in paper_tables(runs(*plain))] == ["table-2"]
    varied = evaluation("gated-deltanet+ccq-uncentred", "language", {WIKITEXT: [17.0, 17.2]}, mean=0.5)
    needle = evaluation("gated-deltanet+ccq-uncentred", "needle", {("niah_single_3/4096", "accuracy"): [1, 0]})
    found = table(runs(*plain, varied, needle), "table-7")
    assert cell(found, "gated-deltanet+ccq-uncentred", "Wiki ppl").text == "17.10"
    assert cell(found, "gated-deltanet+ccq-uncentred", "Avg").text == "50.00"
    assert cell(found, "gated-deltanet+ccq-uncentred", "S3 4K").text == "50.0"
    assert cell(found, "CCQ-Gated DeltaNet, uncentred", "S3 4K").text == "55.6"
    assert "gla" not in labels(found)


def test_settings_that_are_not_alike_are_named() -> None:
    given = [
        evaluation(arm, "language", {BOOLQ: [1, 0]}, conditions={"max_length": length, "bos": False})
        for arm, length in (("gla", 2048), ("gla+ccq", 4096))
    ]
    lead = table(runs(*given), "table-2").lead
    assert "Not alike: max_length is 2048 and 4096 in the evaluations of language." in lead
    assert not any("bos" in line for line in lead)


def test_layers_are_those_of_the_benchmark() -> None:
    """Medians and quartiles of one row as the file has them, beside the paper's."""
    found = table(read_runs([LAYERS]), "table-5")
    measured = {
        (row["layer"], row["pass"], row["tokens"]): row
        for row in json.loads(LAYERS.read_text())["layers"]
        if row["rows"] == 1
    }
    for label, column, clock, key in (
        ("gla+ccq, eager", "fwd 4K", "wall", ("gla+ccq", "forward", 4096)),
        ("gla+ccq, device", "fwd 4K", "device", ("gla+ccq", "forward", 4096)),
        ("gla, eager", "fwd+bwd 4K", "wall", ("gla", "forward_backward", 4096)),
        ("gla, device", "fwd 8K", "device", ("gla", "forward", 8192)),
    ):
        mine, times_of = cell(found, label, column), measured[key][clock]
        assert (mine.value, mine.low, mine.high, mine.interval_from) == (
            times_of["median_ms"],
            times_of["lower_quartile_ms"],
            times_of["upper_quartile_ms"],
            "quartiles",
        )
        assert mine.text == f"{times_of['median_ms']:.2f}"
    paper = cell(found, "CCQ-GLA", "fwd 4K")
    assert (paper.text, paper.note, paper.interval_from) == ("1.20", "± 0.02", "standard deviation")
    assert (paper.low, paper.high) == pytest.approx((1.18, 1.22))
    assert not any("flash" in label for label in labels(found))


def test_efficiency_puts_benchmarks_trainings_and_comparisons_side_by_side(build_results: Callable[..., Any]) -> None:
    row = {"backbone": "gla", "model": "gla", "peak_bytes": 60 * 2**30, "step": times(800.0), "prefill": times(200.0)}
    failed = {"backbone": "gla", "model": "gla+ccq", "peak_bytes": None, "step": None, "prefill": None}
    other = {"backbone": "gla", "model": "flash-linear-attention", "peak_bytes": 1, "step": times(1.0), "prefill": None}
    results = build_results(arms=["gla"], seeds=2)
    results["runs"][0]["decode"]["tokens_per_second"], results["runs"][1]["decode"]["tokens_per_second"] = 300.0, 500.0
    given = runs(
        benchmark([row, failed, other]),
        training("gla", 0, 80_000.0, processes=2, memory=3 * 2**30, state=64 * 2**20),
        training("gla", 1, 120_000.0, processes=2, memory=5 * 2**30, state=64 * 2**20),
        comparisons=[Comparison(Path("results.json"), results)],
    )
    found = table(given, "efficiency")
    bench = "gla, ccq bench model"
    # 8 rows of 4096 tokens in 800 ms (slower quartile 1000, faster 720).
    speed = cell(found, bench, "training k tokens/s")
    assert (speed.text, speed.note) == ("41.0", "32.8 to 45.5")
    assert cell(found, bench, "peak memory GiB").text == "60.0"
    assert (cell(found, bench, "prefill ms").text, cell(found, bench, "decode tokens/s").text) == ("200", "–")
    # 21 layers of 6 heads of 256 x 512 in float32.
    assert cell(found, bench, "state MiB").text == "63"
    assert [cell(found, "gla+ccq, ccq bench model", c).text for c in found.columns] == ["–", "–", "–", "–", "79"]
    assert [cell(found, "gla, ccq train", c).text for c in found.columns] == ["50.0", "4.00", "–", "–", "64"]
    assert "model.json: gla+ccq, gla, training step: left out (no room)" in found.lead
    compared = cell(found, "gla, ccq compare", "decode tokens/s", "demo (ccq compare)")
    assert compared.text == "400"
    assert not any("flash" in label for label in labels(found))


def test_efficiency_has_a_row_for_each_way_of_decoding() -> None:
    found = table(runs(decoding(("gla", 20.0, 1.6), ("gla+ccq", 25.0, None))), "efficiency")
    mine = [label for label in labels(found) if "bench" in label]
    assert mine == [
        "gla, ccq bench decode, eager",
        "gla, ccq bench decode, replayed",
        "gla+ccq, ccq bench decode, eager",
    ]
    # 8 rows in 1.6 ms, slower quartile 2 ms, faster 1.44.
    speed = cell(found, mine[1], "decode tokens/s")
    assert (speed.text, speed.note, speed.value) == ("5,000", "4,000 to 5,556", 5000.0)
    assert [cell(found, mine[2], column).text for column in found.columns] == ["–", "–", "–", "320", "3.00"]
    assert any("one NVIDIA H200, torch 2.11.0, bfloat16, 8 rows after 4096 tokens" in line for line in found.lead)
    assert "decode.json: gla+exact: left out" in found.lead
    assert cell(found, "CCQ-Gated DeltaNet", "decode tokens/s").text == "297"


def test_trainings_are_listed_by_arm_and_seed() -> None:
    found = trainings_table(
        runs(training("gla+ccq", 1, 1.0), training("gla", 0, 1.0, held_out_loss=2.75), training("gla+ccq", 0, 1.0))
    )
    assert found is not None
    assert [(row.arm, row.cells[0].text) for row in found.rows] == [("gla", "0"), ("gla+ccq", "0"), ("gla+ccq", "1")]
    column = found.columns.index("held-out loss")
    assert [row.cells[column].text for row in found.rows] == ["2.750", "–", "–"]
    assert trainings_table(runs()) is None


def test_csv_has_a_line_a_figure_with_its_provenance() -> None:
    given = runs(evaluation("gla", "language", {WIKITEXT: [20.0, 22.0]}))
    lines = list(csv.DictReader(io.StringIO(table_csv(table(given, "table-2")))))
    assert len(lines) == 8 * 11
    mine = next(line for line in lines if line["source"] == "here" and line["column"] == "Wiki ppl")
    assert (float(mine["value"]), mine["interval"], mine["provenance"]) == (21.0, "samples", "")
    missing = next(line for line in lines if line["source"] == "here" and line["column"] == "PIQA")
    assert missing["value"] == missing["low"] == missing["interval"] == ""
    paper = next(line for line in lines if line["model"] == "Transformer" and line["column"] == "Wiki ppl")
    assert (paper["source"], paper["value"], paper["provenance"]) == (PAPER, "41.55", "text+image")
    assert "windows of 4K" in paper["notes"]


def test_csv_quotes_what_needs_it() -> None:
    row = TableRow("tiny", 'a,"b"\nc', 'a,"b"\nc', "here", 1, (TableCell("1", value=1),))
    (line,) = csv.DictReader(io.StringIO(table_csv(ReportTable("k", "t", (), ("x",), (row,), ()))))
    assert line["model"] == 'a,"b"\nc' and json.loads(line["value"]) == 1
