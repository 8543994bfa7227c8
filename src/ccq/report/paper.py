"""The values of the paper (arXiv:2606.01294) beside which runs are reported, each with where it comes from.

They are data: paper.yaml. This module reads it and knows the notes that belong to a value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

_APPROXIMATE = "~"


@dataclass(frozen=True)
class PaperValue:
    """A value in the unit that is printed; `deviation` where the paper prints one. `provenance` are keys of
    `Paper.provenance`.
    """

    value: float
    deviation: float | None
    provenance: tuple[str, ...]
    text: str
    """As printed, without the deviation."""


@dataclass(frozen=True)
class PaperNote:
    """A known inconsistency or a trap. `places` are (scale, row, column), None for any; without places it is about the
    whole table.
    """

    text: str
    places: tuple[tuple[str | None, str | None, str | None], ...]

    def is_at(self, scale: str, row: str, column: str) -> bool:
        found = (scale, row, column)
        return any(
            all(part is None or part == here for part, here in zip(place, found, strict=True)) for place in self.places
        )


@dataclass(frozen=True)
class PaperColumn:
    """What a column holds. Of an evaluation: the task and metric that results files have it under, or `is_mean`, the
    suite's mean. Of a layer: pass and length. Else the name of a measure.
    """

    label: str
    task: str | None
    metric: str | None
    is_mean: bool
    layer_pass: str | None
    tokens: int | None
    measure: str | None
    digits: int
    """Behind the point, as printed."""
    factor: float
    """From the unit of results files to the printed one: 100 for shares that are printed in per cent."""
    lower_is_better: bool


@dataclass(frozen=True)
class PaperTable:
    """`values[scale][row]` has a value for each column. A row is an arm, named as `ccq.report.runs` names it."""

    key: str
    title: str
    suite: str
    provenance: tuple[str, ...]
    columns: tuple[PaperColumn, ...]
    values: Mapping[str, Mapping[str, tuple[PaperValue, ...]]]
    notes: tuple[PaperNote, ...]

    def value(self, scale: str, row: str, column: str) -> PaperValue | None:
        found = self.values.get(scale, {}).get(row)
        if found is None:
            return None
        return next((v for c, v in zip(self.columns, found, strict=True) if c.label == column), None)


@dataclass(frozen=True)
class PaperCurves:
    """`values[scale][panel][arm]` has a value for each length in tokens."""

    title: str
    panels: Mapping[str, str]
    """The name of a corpus in results files, and the one that is printed."""
    lengths: tuple[int, ...]
    values: Mapping[str, Mapping[str, Mapping[str, tuple[PaperValue, ...]]]]
    notes: tuple[PaperNote, ...]


@dataclass(frozen=True)
class Paper:
    title: str
    citation: str
    provenance: Mapping[str, str]
    """What the words mean that values carry."""
    models: Mapping[str, str]
    """The paper's names of arms."""
    notes: tuple[str, ...]
    tables: Mapping[str, PaperTable]
    extrapolation: PaperCurves


@functools.cache
def read_paper() -> Paper:
    """The paper's values, from the package's own file."""
    import yaml

    file = resources.files("ccq.report").joinpath("paper.yaml")
    # Every scalar as text: 67.30 stays as it is printed.
    content = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    known = content["provenance"]
    curves = content["figures"]["extrapolation"]
    overlapping = {
        (entry["scale"], entry["panel"], row) for entry in curves["overlaps"] for row in entry["rows"]
    }  # fmt: skip
    return Paper(
        title=content["paper"]["title"],
        citation=content["paper"]["citation"],
        provenance=known,
        models=content["models"],
        notes=tuple(content["notes"]),
        tables={key: _table(key, table) for key, table in content["tables"].items()},
        extrapolation=PaperCurves(
            title=curves["title"],
            panels=curves["panels"],
            lengths=tuple(map(int, curves["lengths"])),
            values={
                scale: {
                    panel: {
                        arm: _values(
                            values, ["overlap"] if (scale, panel, arm) in overlapping else curves["provenance"]
                        )
                        for arm, values in arms.items()
                    }
                    for panel, arms in panels.items()
                }
                for scale, panels in curves["rows"].items()
            },
            notes=_notes(curves["notes"]),
        ),
    )


def _table(key: str, content: Mapping[str, Any]) -> PaperTable:
    printed = next(iter(next(iter(content["rows"].values())).values()))
    return PaperTable(
        key=key,
        title=content["title"],
        suite=content["suite"],
        provenance=tuple(content["provenance"]),
        columns=tuple(
            PaperColumn(
                label=column["label"],
                task=column.get("task"),
                metric=column.get("metric"),
                is_mean="mean" in column,
                layer_pass=column.get("pass"),
                tokens=int(column["tokens"]) if "tokens" in column else None,
                measure=column.get("measure"),
                factor=100.0 if "percent" in column else 1.0,
                lower_is_better=column.get("better") == "lower",
                digits=len(_value(text, ()).text.partition(".")[2]),
            )
            for column, text in zip(content["columns"], printed, strict=True)
        ),
        values={
            scale: {row: _values(values, content["provenance"]) for row, values in rows.items()}
            for scale, rows in content["rows"].items()
        },
        notes=_notes(content["notes"]),
    )


def _values(values: Sequence[str], provenance: Iterable[str]) -> tuple[PaperValue, ...]:
    return tuple(_value(value, tuple(provenance)) for value in values)


def _value(text: str, provenance: tuple[str, ...]) -> PaperValue:
    main, _, deviation = text.partition(" ± ")
    if main.startswith(_APPROXIMATE):
        provenance = ("rough",)
    number = float(main.removeprefix(_APPROXIMATE))
    return PaperValue(number, float(deviation) if deviation else None, provenance, main)


def _notes(content: Sequence[Mapping[str, Any]]) -> tuple[PaperNote, ...]:
    return tuple(
        PaperNote(
            " ".join(note["text"].split()),
            tuple((at.get("scale"), at.get("row"), at.get("column")) for at in note.get("at", ())),
        )
        for note in content
    )
