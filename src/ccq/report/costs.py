"""Quality against cost: scores beside the state of a model and its speed, for backbones and models with a read step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ccq.report.intervals import Interval, Samples
from ccq.report.paper import read_paper
from ccq.report.paper_tables import (
    HERE,
    Estimate,
    ReportTable,
    TableCell,
    TableRow,
    estimate,
    optional_cell,
    range_text,
)
from ccq.report.runs import COMPARISON, MEAN, Runs, Score, ScoreName, Subject
from ccq.report.tables import bytes_text


class CostPoint(NamedTuple):
    """One model in one suite. `role` is "backbone", "correction on" or "correction off"; costs are None where nothing
    given tells them.
    """

    group: str
    scale: str
    subject: Subject
    role: str
    score: Estimate
    state_bytes: int | None
    training_tokens_per_second: float | None
    decode_tokens_per_second: float | None


_QUALITY = (
    ("language", "Language tasks: mean accuracy, %", 100.0),
    ("needle", "Needles: mean accuracy, %", 100.0),
    ("longbench", "LongBench: mean score, %", 100.0),
    ("extrapolation", "Text: mean loss, nats a token", 1.0),
    (COMPARISON, "Needles of ccq compare: mean accuracy, %", 100.0),
)
QUALITY_TITLES = {suite: title for suite, title, _ in _QUALITY}


def cost_points(runs: Runs) -> list[CostPoint]:
    """Backbones, and models with a read step with the correction on and off, by suite and scale; those of which no cost
    is known are left out.

    A suite's score is the mean over the tasks that every model of a group has, of shares, or (text) of losses.
    """
    points = []
    subjects = [subject for subject in runs.subjects() if subject.read in (None, "on", "off")]
    for suite, _, factor in _QUALITY:
        for scale in dict.fromkeys(subject.scale for subject in subjects):
            group = {subject: runs.seeds(subject) for subject in subjects if subject.scale == scale}
            names = _common_names(suite, group)
            group = {
                subject: {seed: scores for seed, scores in seeds.items() if set(names) <= set(scores)}
                for subject, seeds in group.items()
            }
            for subject, seeds in group.items():
                if not names or not seeds:
                    continue
                found = estimate([_mean_of([scores[name] for name in names]) for scores in seeds.values()])
                interval = None if found.interval is None else Interval(*(factor * edge for edge in found.interval))
                score = Estimate(
                    tuple(factor * value for value in found.values), factor * found.mean, interval, found.interval_from
                )
                costs = runs.state_bytes(subject), *_speeds(runs, subject)
                if any(cost is not None for cost in costs):
                    points.append(CostPoint(suite, scale, subject, _role(subject), score, *costs))
    return points


def _role(subject: Subject) -> str:
    return "backbone" if subject.read is None else f"correction {subject.read}"


def _common_names(
    suite: str, group: Mapping[Subject, Mapping[int | None, Mapping[ScoreName, Score]]]
) -> list[ScoreName]:
    """The scores of a suite that are averaged and that every model which has any of them has."""
    by_subject = []
    for seeds in group.values():
        names = {
            name
            for scores in seeds.values()
            for name, score in scores.items()
            if name.suite == suite and name.task != MEAN and _is_averaged(name, score)
        }
        if names:
            by_subject.append(names)
    return sorted(set.intersection(*by_subject)) if by_subject else []


def _is_averaged(name: ScoreName, score: Score) -> bool:
    if name.suite == "extrapolation":
        return name.metric == "loss"
    if name.suite == "language":
        columns = read_paper().tables["table-2"].columns
        averaged = {(column.task, column.metric) for column in columns if column.task != "lambada_openai"}
        return (name.task, name.metric) in averaged and not score.lower_is_better
    return not score.lower_is_better


def _mean_of(scores: Sequence[Score]) -> Score:
    samples: tuple[Samples, ...] | None = ()
    for score in scores:
        samples = None if samples is None or score.samples is None else samples + score.samples
    return Score(
        math.fsum(score.value for score in scores) / len(scores),
        sum(score.count for score in scores),
        scores[0].lower_is_better,
        samples,
    )


def _speeds(runs: Runs, subject: Subject) -> tuple[float | None, float | None]:
    """Tokens a second in training (of one process) and in decoding (over all rows). With the correction off a model was
    trained as fast as it was with it; how fast it decodes nobody has measured.
    """
    trained = subject._replace(read=None if subject.read is None else "on")
    training = [
        1000 * benchmark.rows * benchmark.tokens / model.step.median
        for benchmark in runs.models
        for model in benchmark.models
        if (benchmark.scale, model.arm) == trained[:2] and model.step is not None
    ]
    if not training:
        training = [
            run.tokens_per_second / run.processes
            for run in runs.trainings
            if run.model.subject == trained and run.tokens_per_second is not None and run.processes is not None
        ]
    speeds = [
        benchmark.tokens_per_second(subject.arm)
        for benchmark in runs.decodes
        if benchmark.scale == subject.scale and subject.read != "off"
    ]
    decode = [speed for speed in speeds if speed is not None]
    for comparison in runs.comparisons:
        if comparison.scale == subject.scale:
            mine = [run for run in comparison.results["runs"] if run["arm"] == subject.arm]
            training += [run["training"]["tokens_per_second"] for run in mine]
            if subject.read != "off":
                decode += [run["decode"]["tokens_per_second"] for run in mine]
    return (statistics.fmean(training) if training else None, statistics.fmean(decode) if decode else None)


def cost_table(points: Sequence[CostPoint]) -> ReportTable | None:
    if not points:
        return None
    rows = []
    for point in points:
        digits = 3 if point.group == "extrapolation" else 1
        score = point.score
        cells = (
            TableCell(QUALITY_TITLES[point.group]),
            TableCell(
                f"{score.mean:.{digits}f}",
                "" if score.interval is None else range_text(score.interval, digits),
                (),
                score.mean,
                None if score.interval is None else score.interval.low,
                None if score.interval is None else score.interval.high,
                score.interval_from,
            ),
            TableCell()
            if point.state_bytes is None
            else TableCell(bytes_text(point.state_bytes), value=point.state_bytes),
            optional_cell(point.training_tokens_per_second, ",.0f"),
            optional_cell(point.decode_tokens_per_second, ",.0f"),
        )
        rows.append(TableRow(point.scale, point.subject.arm, point.subject.label, HERE, len(score.values), cells))
    lead = (
        "A score is the mean over the tasks that all models of its scale and suite have. The interval is over seeds, "
        "with one seed over samples. The correction off: the same trained model without it at inference, so its "
        "training was as slow as with it, its state is the backbone's, and its speed of decoding was not measured.",
    )
    columns = ("what", "score", "state", "training tokens/s", "decode tokens/s")
    return ReportTable("quality-cost", "Quality against cost", lead, columns, tuple(rows), ())
