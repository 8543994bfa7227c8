"""Differences between runs: with the read step and without, with the correction on and off; beside the paper's.

Paired twice: seed by seed (a difference is between two trainings of one seed) and sample by sample (both models were
asked the same). `ccq.report.intervals` says what the two intervals cover.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ccq.report.intervals import Interval, Samples, of_difference, over_seeds, span
from ccq.report.paper import PaperColumn, PaperValue, read_paper
from ccq.report.paper_tables import MISSING, csv_text, score_columns
from ccq.report.runs import COMPARISON, Runs, Score, ScoreName, Subject
from ccq.report.tables import arm_differences, signed

SCORE_TABLES = ("table-2", "table-3", "table-4")
"""The paper's tables whose scores are compared; those of table 7 are among them."""


class PairedDifference(NamedTuple):
    """First minus second, in the unit of the column. `paper` is the same difference of the paper's values, `samples`
    how many samples the interval over samples is from, and `reason` says why there is no such interval.
    """

    group: str
    scale: str
    first: str
    second: str
    column: str
    digits: int
    lower_is_better: bool
    paper: float | None
    mean: float
    by_seed: tuple[float, ...]
    over_seeds: Interval | None
    over_samples: Interval | None
    samples: int | None
    reason: str

    @property
    def outcome(self) -> str:
        """ "better" or "worse" where both intervals leave out zero, or the one there is; else "level", or "unknown"
        without any, or where several seeds have none because all their differences are equal.
        """
        interval = span((self.over_seeds, self.over_samples))
        if interval is None or (len(self.by_seed) > 1 and self.over_seeds is None):
            return "unknown"
        if interval.low <= 0 <= interval.high:
            return "level"
        return "better" if (self.mean < 0) == self.lower_is_better else "worse"


def paired_differences(runs: Runs) -> list[PairedDifference]:
    """Every model with a read step against its backbone and against itself with the correction off (or another
    intervention), score by score.
    """
    paper = read_paper()
    found: list[PairedDifference] = []
    for first, second in _pairs(runs.subjects()):
        scores = runs.seeds(first), runs.seeds(second)
        for key in SCORE_TABLES:
            table = paper.tables[key]
            for column, name, is_in_paper in score_columns(table, runs):
                values = [table.value(s.scale, s.arm, column.label) if is_in_paper else None for s in (first, second)]
                if first.read not in (None, "on") or second.read not in (None, "on"):
                    values = [None, None]
                found += _difference(key, first, second, column, name, scores, values)
        for name in runs.names("extrapolation"):
            corpus, _, length = name.task.rpartition("/")
            label = f"{paper.extrapolation.panels.get(corpus, corpus)} {length}"
            column = PaperColumn(label, name.task, name.metric, False, None, None, None, 2, 1.0, True)
            values = [_curve_value(subject, corpus, int(length)) for subject in (first, second)]
            found += _difference("extrapolation", first, second, column, name, scores, values)
    return found + _comparison_differences(runs)


def _pairs(subjects: Sequence[Subject]) -> list[tuple[Subject, Subject]]:
    pairs = []
    for subject in subjects:
        if subject.read is None:
            continue
        plain = _backbone_of(subject, subjects)
        if subject.read == "on":
            others = [other for other in subjects if other[:2] == subject[:2] and other.read not in (None, "on")]
            pairs += [(subject, plain)] if plain is not None else []
            pairs += [(subject, other) for other in others]
        elif plain is not None:
            pairs.append((subject, plain))
    return pairs


def _backbone_of(subject: Subject, subjects: Sequence[Subject]) -> Subject | None:
    """The backbone alone at the same scale: the one that differs in the same settings from others, or the only one."""
    plain = [s for s in subjects if s.scale == subject.scale and s.read is None and s.backbone == subject.backbone]
    _, comma, settings = subject.arm.partition(", ")
    named = [other for other in plain if other.arm == f"{subject.backbone}{comma}{settings}"]
    return named[0] if named else plain[0] if len(plain) == 1 else None


def _curve_value(subject: Subject, corpus: str, length: int) -> PaperValue | None:
    curves = read_paper().extrapolation
    values = curves.values.get(subject.scale, {}).get(corpus, {}).get(subject.arm)
    if values is None or length not in curves.lengths or subject.read not in (None, "on"):
        return None
    return values[curves.lengths.index(length)]


def _difference(
    group: str,
    first: Subject,
    second: Subject,
    column: PaperColumn,
    name: ScoreName,
    scores: tuple[Mapping[int | None, Mapping[ScoreName, Score]], Mapping[int | None, Mapping[ScoreName, Score]]],
    paper: Sequence[PaperValue | None],
) -> list[PairedDifference]:
    """One difference, or none where the two have no seed in common with this score."""
    seeds = [seed for seed in scores[0] if name in scores[0][seed] and name in scores[1].get(seed, {})]
    if not seeds:
        return []
    pairs = [(scores[0][seed][name], scores[1][seed][name]) for seed in seeds]
    by_seed = [column.factor * (mine.value - other.value) for mine, other in pairs]
    interval, samples, reason = _sample_interval(pairs)
    return [
        PairedDifference(
            group=group,
            scale=first.scale,
            first=first.label,
            second=second.label,
            column=column.label,
            digits=column.digits,
            lower_is_better=pairs[0][0].lower_is_better,
            paper=None if None in paper else paper[0].value - paper[1].value,  # type: ignore[union-attr]
            mean=statistics.fmean(by_seed),
            by_seed=tuple(by_seed),
            over_seeds=over_seeds(by_seed),
            over_samples=None if interval is None else Interval(*(column.factor * edge for edge in interval)),
            samples=samples,
            reason=reason,
        )
    ]


def _sample_interval(pairs: Sequence[tuple[Score, Score]]) -> tuple[Interval | None, int | None, str]:
    given = [(mine.samples, other.samples) for mine, other in pairs]
    if any(mine is None or other is None or len(mine) != len(other) for mine, other in given):
        return None, None, "the results do not hold the samples"
    count = len(given[0][0] or ())
    tasks: list[list[tuple[Samples, Samples]]] = [
        [(mine[task], other[task]) for mine, other in given if mine is not None and other is not None]
        for task in range(count)
    ]
    asked = [{samples.identities for pair in task for samples in pair} for task in tasks]
    if any(len(found) != 1 or None in found for found in asked):
        return None, None, "not the same samples"
    interval = of_difference(tasks)
    return interval, sum(len(task[0][0].values) for task in tasks), "" if interval is not None else "one sample"


def _comparison_differences(runs: Runs) -> list[PairedDifference]:
    """What comparisons have found by themselves."""
    found = []
    for comparison in runs.comparisons:
        for difference in arm_differences(comparison.results):
            factor = 100.0 if "accuracy" in difference.metric else 1.0
            interval = None
            if difference.low is not None and difference.high is not None:
                interval = Interval(factor * difference.low, factor * difference.high)
            found.append(
                PairedDifference(
                    group=COMPARISON,
                    scale=comparison.scale,
                    first=difference.arm,
                    second=difference.backbone,
                    column=difference.metric + (", %" if factor != 1 else ""),
                    digits=1 if factor != 1 else 3,
                    lower_is_better=factor == 1,
                    paper=None,
                    mean=factor * difference.mean,
                    by_seed=tuple(factor * value for value in difference.differences),
                    over_seeds=interval if difference.interval_from == "seeds" else None,
                    over_samples=interval if difference.interval_from == "samples" else None,
                    samples=None,
                    reason="" if difference.interval_from == "samples" else "the results do not hold the samples",
                )
            )
    return found


def differences_csv(differences: Sequence[PairedDifference]) -> str:
    header = (
        "group scale first second column paper difference seeds seeds_low seeds_high samples samples_low samples_high "
        "no_sample_interval by_seed"
    ).split()
    lines = []
    for each in differences:
        seeds, samples = each.over_seeds or ("", ""), each.over_samples or ("", "")
        what = each.group, each.scale, each.first, each.second, each.column, each.paper, each.mean
        by_seed = " ".join(map(str, each.by_seed))
        lines.append((*what, len(each.by_seed), *seeds, each.samples, *samples, each.reason, by_seed))
    return csv_text(header, lines)


def difference_cells(difference: PairedDifference) -> tuple[str, str, str, str]:
    """Paper, here, over seeds, over samples, as text."""
    digits = difference.digits
    paper = MISSING if difference.paper is None else signed(difference.paper, digits)
    count = len(difference.by_seed)
    seeds = "one seed" if count == 1 else f"all {count} seeds equal"
    if difference.over_seeds is not None:
        seeds = f"{signed_range(difference.over_seeds, digits)} ({count} seeds)"
    samples = difference.reason or MISSING
    if difference.over_samples is not None:
        number = "" if difference.samples is None else f" ({difference.samples:,})"
        samples = f"{signed_range(difference.over_samples, digits)}{number}"
    return paper, signed(difference.mean, digits), seeds, samples


def signed_range(interval: Interval, digits: int) -> str:
    return f"{signed(interval.low, digits)} to {signed(interval.high, digits)}"
