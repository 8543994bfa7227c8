"""The comparison as one self-contained HTML page: a verdict in plain words, the tables, the figures, and what was run.

The page needs no network and no script. Its sentences are computed from the results and say no more than the intervals
allow: with one seed they rank nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ccq.files import write_bytes_atomically
from ccq.report.figures import all_figures, arm_styles
from ccq.report.pages import render_page
from ccq.report.tables import (
    ComparisonRow,
    Difference,
    Measured,
    arm_differences,
    arms_of,
    backbone_of,
    bytes_text,
    comparison_rows,
    difference_text,
    interval_text,
    runs_of,
    seed_count,
    share_text,
    text_tables,
)

if TYPE_CHECKING:
    from ccq.evals.results import CompareResults

ONE_SEED = "One seed ranks nothing."


class Finding(NamedTuple):
    """A sentence of the verdict. `kind` chooses the mark beside it: better, worse, level, unknown, or note."""

    kind: str
    text: str


class CardLine(NamedTuple):
    label: str
    before: str
    after: str
    difference: str
    kind: str


class Card(NamedTuple):
    """A backbone beside its arm with a read: the few figures to look at first."""

    backbone: str
    arm: str
    lines: tuple[CardLine, ...]


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def headline(results: CompareResults) -> str:
    """The verdict in one or two sentences."""
    arms, seeds = arms_of(results), seed_count(results)
    differences = arm_differences(results)
    if not arms:
        return "No run has finished, so there is nothing to report yet."
    if not differences:
        text = "No arm was trained beside its own backbone, so there is nothing to compare."
        return f"{ONE_SEED} {text}" if seeds < 2 else text
    if seeds < 2:
        return f"{ONE_SEED} The figures below show what one run of each arm did, not which arm is better."
    return verdict(
        seeds,
        [difference.outcome for difference in differences],
        none="none is larger than its 95 % interval",
        one="is larger than the 95 % interval",
        several="are larger than the 95 % interval",
    )


def verdict(seeds: int, outcomes: Sequence[str], *, none: str, one: str, several: str) -> str:
    """How many differences between arms and their backbones are clear, in the words for none, one and several."""
    better, worse = outcomes.count("better"), outcomes.count("worse")
    start = f"{seeds} seeds; of {_plural(len(outcomes), 'difference')} between an arm and its backbone, "
    if not better and not worse:
        return f"{start}{none}, so these runs settle nothing."
    sides = f"{better or 'none'} in favour of the read step, {worse or 'none'} against it"
    return f"{start}{better + worse} {one if better + worse == 1 else several}: {sides}."


def findings(results: CompareResults) -> list[Finding]:
    """The sentences under the headline: one for each arm and outcome, then what limits them."""
    differences = arm_differences(results)
    one_seed = seed_count(results) < 2
    found = []
    for backbone, arm in dict.fromkeys((difference.backbone, difference.arm) for difference in differences):
        own = [difference for difference in differences if (difference.backbone, difference.arm) == (backbone, arm)]
        for outcome, words in (
            ("better", "better than {backbone} by more than the interval in"),
            ("worse", "worse than {backbone} by more than the interval in"),
            ("level", "no difference from {backbone} beyond the interval in"),
            ("unknown", "no interval is known for"),
        ):
            chosen = [difference for difference in own if difference.outcome == outcome]
            if chosen:
                clear = outcome in ("better", "worse")
                start = "In this one run, " if one_seed and clear else ""
                which = _metrics_listed(chosen, with_figures=clear)
                found.append(Finding(outcome, f"{start}{arm}: {words.format(backbone=backbone)} {which}."))
    if one_seed and any(difference.interval_from == "samples" for difference in differences):
        text = (
            "With one seed an interval covers only which questions and windows were drawn. Training again from "
            "another seed can move a figure further."
        )
        found.append(Finding("note", text))
    elif sum(difference.interval_from == "seeds" for difference in differences) > 5:
        count = len(differences)
        by_chance = max(1, round(count / 20))
        text = (
            f"{count} comparisons at 95 %: even if no arm differed from its backbone, about {by_chance} could look "
            "like a difference."
        )
        found.append(Finding("note", text))
    return found + _chance_findings(results) + _read_off_findings(results)


def _metrics_listed(differences: Sequence[Difference], with_figures: bool) -> str:
    """ "loss at 256, 512 and 1024; needle accuracy at 256", each with its difference if asked."""
    places: dict[str, list[str]] = {}
    for difference in differences:
        name, at, place = difference.metric.rpartition(" at ")
        text = place if at else ""
        if with_figures:
            text += f" ({difference_text(difference.metric, difference.mean)})"
        places.setdefault(name if at else place, []).append(text)
    return "; ".join(
        f"{name}{' at ' if any(text[:1].isdigit() for text in texts) else ''}{_listed(texts)}"
        for name, texts in places.items()
    )


def _chance_findings(results: CompareResults) -> list[Finding]:
    """Which arms do not beat guessing among the values they saw; a difference between two guessers means nothing."""
    chance = results["needle_task"]["chance_among_seen"]
    guessing: dict[int, list[str]] = {}
    measured: dict[int, int] = {}
    for arm in arms_of(results):
        lows: dict[int, list[float]] = {}
        for run in runs_of(results, arm):
            for entry in run["needle_by_length"]:
                lows.setdefault(entry["length"], []).append(entry["low"])
        for length, group in lows.items():
            measured[length] = measured.get(length, 0) + 1
            if min(group) <= chance:
                guessing.setdefault(length, []).append(arm)
    if not measured:
        return []
    if not guessing:
        return [
            Finding(
                "note",
                f"Every arm answers needles better than guessing among the values seen ({share_text(chance)}) at "
                "every length.",
            )
        ]
    parts = []
    for length in sorted(guessing):
        arms = guessing[length]
        parts.append(f"at {length} tokens {'every arm' if len(arms) == measured[length] else _listed(arms)}")
    text = (
        f"Not clearly above guessing among the values seen ({share_text(chance)}): {'; '.join(parts)}. A difference "
        "between two such arms says little."
    )
    return [Finding("note", text)]


def _read_off_findings(results: CompareResults) -> list[Finding]:
    found = []
    for row in comparison_rows(results):
        both = [length for length in row.needle_read_off if length in row.needle]
        if not both:
            continue
        length = max(both, key=lambda length: abs(row.needle[length].mean - row.needle_read_off[length].mean))
        on, off = row.needle[length].mean, row.needle_read_off[length].mean
        start = f"Switching the correction off in the trained {row.arm}"
        if on == off:
            text = f"{start} leaves its needle accuracy as it is at every length."
        else:
            moved = f"{100 * abs(on - off):.1f} points at most"
            figures = f"{100 * on:.1f} % on, {100 * off:.1f} % off"
            text = f"{start} moves its needle accuracy by {moved} (at {length} tokens: {figures})."
        found.append(Finding("note", text))
    return found


def _cards(results: CompareResults, rows: Sequence[ComparisonRow]) -> list[Card]:
    by_arm = {row.arm: row for row in rows}
    known = {
        (difference.backbone, difference.arm, difference.metric): difference for difference in arm_differences(results)
    }
    training_length = results["training_length"]
    cards = []
    for row in rows:
        base = by_arm.get(backbone_of(row.arm))
        if base is None or base is row:
            continue
        lines = []
        needle_lengths = sorted(set(row.needle) & set(base.needle))
        for length in dict.fromkeys([*needle_lengths[:1], *needle_lengths[-1:]]):
            difference = known.get((base.arm, row.arm, f"needle accuracy at {length}"))
            before, after = base.needle[length].mean, row.needle[length].mean
            change = difference_text("accuracy", after - before)
            kind = difference.outcome if difference else "unknown"
            lines.append(CardLine(f"needle at {length}", f"{100 * before:.1f} %", f"{100 * after:.1f} %", change, kind))
        text_lengths = sorted(set(row.loss) & set(base.loss))
        if text_lengths:
            length = training_length if training_length in text_lengths else text_lengths[0]
            names = (f"loss at {length}", f"text loss at {length}")
            difference = next(
                (known[base.arm, row.arm, name] for name in names if (base.arm, row.arm, name) in known), None
            )
            loss, base_loss = row.loss[length].mean, base.loss[length].mean
            kind = difference.outcome if difference else "unknown"
            change = difference_text("loss", loss - base_loss)
            lines.append(CardLine(f"text loss at {length}", f"{base_loss:.3f}", f"{loss:.3f}", change, kind))
        lines += [line for line in map(lambda cost: _cost_line(base, row, *cost), _COSTS) if line is not None]
        cards.append(Card(base.arm, row.arm, tuple(lines)))
    return cards


_COSTS = (
    ("training_tokens_per_second", "training tokens/s"),
    ("decode_tokens_per_second", "decoded tokens/s"),
    ("state_bytes", "state"),
)


def _cost_line(base: ComparisonRow, row: ComparisonRow, field: str, label: str) -> CardLine | None:
    before: Measured | None = getattr(base, field)
    after: Measured | None = getattr(row, field)
    if before is None or after is None or before.mean == 0:
        return None
    text = bytes_text if field == "state_bytes" else lambda value: f"{value:,.0f}"
    return CardLine(label, text(before.mean), text(after.mean), f"{after.mean / before.mean:.2f}×", "cost")


def losses(results: CompareResults) -> list[str]:
    """Every figure in which an arm with a read is behind its backbone, whether or not the interval excludes zero."""
    lines = []
    rows = {row.arm: row for row in comparison_rows(results)}
    differences = arm_differences(results)
    for arm in rows:
        behind = [difference for difference in differences if difference.arm == arm and difference.favours_arm is False]
        if behind:
            lines.append(f"{arm} against {behind[0].backbone}: {_metrics_listed(behind, with_figures=True)}.")
        base = rows.get(backbone_of(arm))
        if base is None or base.arm == arm:
            continue
        costs = []
        for field, words in (("training_tokens_per_second", "training"), ("decode_tokens_per_second", "decoding")):
            before, after = getattr(base, field), getattr(rows[arm], field)
            if before is not None and after is not None and before.mean > after.mean:
                costs.append(f"{100 * (1 - after.mean / before.mean):.0f} % slower {words}")
        before, after = base.state_bytes, rows[arm].state_bytes
        if before is not None and after is not None and before.mean and after.mean > before.mean:
            costs.append(f"{100 * (after.mean / before.mean - 1):.0f} % more state")
        if costs:
            lines.append(f"{arm} against {base.arm}: {_listed(costs)}.")
    return lines


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_value_text(item) for item in value)
    return str(value)


def _flattened(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in mapping.items():
        label = prefix + str(name).replace("_", " ")
        pairs += _flattened(value, f"{label}: ") if isinstance(value, Mapping) else [(label, _value_text(value))]
    return pairs


def _training_facts(results: CompareResults) -> list[tuple[str, str]]:
    facts = []
    for arm in arms_of(results):
        runs = runs_of(results, arm)
        seconds = sum(run["training"]["seconds"] for run in runs)
        first = runs[0]["training"]
        seeds = f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(run['seed']) for run in runs)}"
        facts.append(
            (arm, f"{first['steps']:,} steps, {first['tokens']:,} tokens a run, {seeds}, {seconds:,.0f} s in all")
        )
    return facts


def _facts(results: CompareResults) -> list[tuple[str, list[tuple[str, str]]]]:
    sections = [("Training", _training_facts(results))]
    described: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("Settings", results["settings"]),
        ("Needle task", results["needle_task"]),
        ("Corpus", results["corpus"]),
        ("Tokenizer", results["tokenizer"]),
        ("Machine and versions", results["environment"]),
    )
    return sections + [(title, _flattened(mapping)) for title, mapping in described]


def _all_differences(results: CompareResults) -> list[tuple[str, str, str, str, str]]:
    """(pair, metric, difference, interval, outcome) for the full list."""
    return [
        (
            f"{difference.arm} − {difference.backbone}",
            difference.metric,
            difference_text(difference.metric, difference.mean),
            interval_text(difference.metric, difference.low, difference.high) or "–",
            difference.outcome,
        )
        for difference in arm_differences(results)
    ]


def render_report(results: CompareResults) -> str:
    """The page as text; equal results give equal text."""
    arms = arms_of(results)
    task = results["needle_task"]
    return render_page(
        "template.html.j2",
        all_figures(results),
        name=results["name"],
        created=results["created"],
        arms=arms,
        seeds=seed_count(results),
        styles=arm_styles(arms),
        headline=headline(results),
        findings=findings(results),
        cards=_cards(results, comparison_rows(results)),
        tables=text_tables(results) if arms else [],
        differences=_all_differences(results),
        losses=losses(results),
        facts=_facts(results),
        chance=share_text(task["chance"]),
        chance_among_seen=share_text(task["chance_among_seen"]),
        task_description=task["description"],
        values=task["values"],
        needles=task["needles_per_window"],
        version=results["environment"]["ccq"],
    )


def write_report(results: CompareResults, path: str | os.PathLike[str]) -> None:
    """Write the self-contained HTML report of a comparison to `path`, whole or not at all. The folder must exist.

    `results` as `ccq.evals.results.read_results` returns them, which has checked them against the schema.
    """
    write_bytes_atomically(path, render_report(results).encode())
