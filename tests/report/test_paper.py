"""The paper's values, against numbers typed here from its tables and against what follows from them."""

from __future__ import annotations

import math

import pytest

from ccq.report.paper import Paper, PaperTable, read_paper


@pytest.fixture
def paper() -> Paper:
    return read_paper()


@pytest.mark.parametrize(
    ("key", "scale", "row", "column", "value", "text"),
    [
        ("table-2", "500M", "gla", "Wiki ppl", 27.27, "27.27"),
        ("table-2", "500M", "transformer", "Wiki ppl", 331.69, "331.69"),
        ("table-2", "1.3B", "gla+ccq", "Wiki ppl", 16.92, "16.92"),
        ("table-2", "1.3B", "gated-deltanet+ccq", "LMB ppl", 12.52, "12.52"),
        ("table-2", "500M", "mamba2", "PIQA", 67.3, "67.30"),
        ("table-2", "1.3B", "gla-hedgehog", "SIQA", 40.69, "40.69"),
        ("table-2", "1.3B", "gated-deltanet+ccq", "Avg", 56.24, "56.24"),
        ("table-3", "1.3B", "gla", "S1 4K", 47.8, "47.8"),
        ("table-3", "1.3B", "gla+ccq", "S1 4K", 96.8, "96.8"),
        ("table-3", "1.3B", "gated-deltanet", "S3 4K", 6.0, "6.0"),
        ("table-3", "500M", "gated-deltanet+ccq", "S2 8K", 50.8, "50.8"),
        ("table-4", "1.3B", "gla+ccq", "TRC", 39.5, "39.50"),
        ("table-4", "1.3B", "gated-deltanet", "RBP", 25.6, "25.60"),
        ("table-4", "1.3B", "transformer", "Mus", 0.0, "0.00"),
        ("table-5", "1.3B", "gated-deltanet+ccq", "fwd 8K", 3.67, "3.67"),
        ("table-7", "1.3B", "gated-deltanet+ccq-uncentred", "Wiki ppl", 17.3, "17.30"),
        ("table-7", "1.3B", "gated-deltanet+ccq-fixed", "S3 4K", 20.0, "20.0"),
        ("efficiency", "1.3B", "gated-deltanet+ccq", "training k tokens/s", 37.8, "37.8"),
        ("efficiency", "1.3B", "gla+ccq", "decode tokens/s", 298, "298"),
    ],
)
def test_values_are_those_of_the_paper(
    paper: Paper, key: str, scale: str, row: str, column: str, value: float, text: str
) -> None:
    found = paper.tables[key].value(scale, row, column)
    assert found is not None
    assert (found.value, found.text) == (value, text)


@pytest.mark.parametrize(
    ("scale", "panel", "arm", "length", "value"),
    [
        ("500M", "govreport", "gla", 4096, 9.81),
        ("500M", "codeparrot", "gated-deltanet+ccq", 20480, 17.8),
        ("1.3B", "pg19", "gated-deltanet+ccq", 4096, 15.5),
        ("1.3B", "narrativeqa", "gla", 12288, 23.2),
        ("1.3B", "qasper", "mamba2", 10240, 13.12),
    ],
)
def test_curves_are_those_of_the_figures(
    paper: Paper, scale: str, panel: str, arm: str, length: int, value: float
) -> None:
    curves = paper.extrapolation
    assert curves.values[scale][panel][arm][curves.lengths.index(length)].value == value


def test_printed_means_are_the_means_of_the_printed_columns(paper: Paper) -> None:
    """Of seven columns (table 2) and of fourteen (table 4); a value typed wrongly would show here."""
    for key, first, count in (("table-2", 3, 7), ("table-4", 0, 14)):
        for rows in paper.tables[key].values.values():
            for row in rows.values():
                values = [value.value for value in row[first : first + count]]
                assert math.isclose(sum(values) / count, row[-1].value, abs_tol=0.011), row


def test_needle_accuracies_are_of_500_samples(paper: Paper) -> None:
    values = [v.value for rows in paper.tables["table-3"].values.values() for row in rows.values() for v in row]
    assert len(values) == 2 * 7 * 11
    assert all(math.isclose(value * 5, round(value * 5), abs_tol=1e-9) for value in values)


def test_the_ablation_repeats_the_tables_it_is_from(paper: Paper) -> None:
    for row in ("gated-deltanet", "gated-deltanet+ccq"):
        for column in ("Wiki ppl", "LMB ppl", "Avg"):
            values = [paper.tables[key].value("1.3B", row, column) for key in ("table-2", "table-7")]
            assert values[0] is not None and values[1] is not None and values[0].value == values[1].value
        for short, column in (("S2 8K", "S2 8K"), ("S3 4K", "S3 4K")):
            values = [
                paper.tables["table-3"].value("1.3B", row, column),
                paper.tables["table-7"].value("1.3B", row, short),
            ]
            assert values[0] is not None and values[1] is not None and values[0].value == values[1].value


def test_every_value_says_where_it_comes_from(paper: Paper) -> None:
    curves = paper.extrapolation
    values = [v for t in paper.tables.values() for rows in t.values.values() for row in rows.values() for v in row]
    values += [v for ps in curves.values.values() for arms in ps.values() for row in arms.values() for v in row]
    assert len(values) == 154 + 154 + 105 + 12 + 20 + 20 + 2 * 6 * 5 * 9
    assert all(value.provenance and set(value.provenance) <= set(paper.provenance) for value in values)
    first = {key: next(iter(next(iter(t.values.values())).values()))[0].provenance for key, t in paper.tables.items()}
    assert first["table-2"] == first["table-5"] == ("text", "image")
    assert first["table-7"] == first["efficiency"] == ("note",)
    rough = curves.values["500M"]["qmsum"]["mamba2"]
    assert [value.provenance for value in rough[1:4]] == [("digitised",), ("rough",), ("digitised",)]
    assert curves.values["500M"]["govreport"]["gla+ccq"][0].provenance == ("overlap",)
    assert curves.values["1.3B"]["govreport"]["gla+ccq"][0].provenance == ("digitised",)


def test_deviations_are_apart_from_values(paper: Paper) -> None:
    value = paper.tables["table-5"].value("1.3B", "gla", "fwd+bwd 4K")
    assert value is not None and (value.value, value.deviation, value.text) == (2.28, 0.02, "2.28")
    plain = paper.tables["table-2"].value("1.3B", "gla", "PIQA")
    assert plain is not None and plain.deviation is None


def test_notes_stand_at_places_that_exist(paper: Paper) -> None:
    def check(table: PaperTable) -> int:
        columns = {column.label for column in table.columns}
        rows = {row for rows in table.values.values() for row in rows}
        places = [place for note in table.notes for place in note.places]
        for scale, row, column in places:
            assert scale is None or scale in table.values
            assert row is None or row in rows
            assert column is None or column in columns
        return len(places)

    assert sum(check(table) for table in paper.tables.values()) > 15
    (bold,) = [note for note in paper.tables["table-4"].notes if "bold" in note.text]
    assert bold.is_at("1.3B", "gla", "LCC") and not bold.is_at("1.3B", "gla+ccq", "LCC")
    assert not [note for note in paper.tables["table-3"].notes if note.is_at("500M", "gated-deltanet", "S3 4K")]


def test_unknown_cells_are_none(paper: Paper) -> None:
    table = paper.tables["table-2"]
    assert table.value("tiny", "gla", "PIQA") is None
    assert table.value("1.3B", "gla+exact", "PIQA") is None
    assert table.value("1.3B", "gla", "MMLU") is None
