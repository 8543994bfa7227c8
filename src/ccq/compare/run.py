"""The main job: prepare the data, run every arm, put the figures together, write the report."""

from __future__ import annotations

import datetime
import functools
from pathlib import Path
from typing import cast

from rich.console import Console

from ccq.bench.machine import environment
from ccq.compare.arm import arm_is_done, read_arm_result, run_arm
from ccq.compare.folder import RunFolder
from ccq.compare.pool import Job, devices_for, run_jobs
from ccq.compare.settings import CompareSettings
from ccq.compare.speed import add_speeds, measure_speeds
from ccq.evals.results import (
    SCHEMA,
    CompareResults,
    PairResult,
    RunResult,
    paired_differences,
    read_results,
    write_results,
)
from ccq.models.configuration import parse_arm
from ccq.report.figures import figure_png
from ccq.report.html import write_report


def compare(
    out: Path, settings: CompareSettings, *, jobs: int | None = None, console: Console | None = None
) -> CompareResults:
    """Run a comparison in the folder `out`, or finish one that was interrupted, or read one that is done.

    Args:
        out: the folder; made if missing.
        settings: must equal those of an earlier call with the same folder.
        jobs: arms that run at the same time, one thread each; as many as there are processor cores unless given.
        console: where progress is shown.

    Raises:
        ValueError: the folder belongs to other settings, another process is using it, or the text cannot be used.
        RunsFailed: some arms ended with an error.
    """
    console = Console() if console is None else console
    folder = RunFolder(out)
    folder.claim(settings)
    with folder.locked():
        if folder.results.exists():
            console.print(f"{out} holds a finished comparison; nothing is trained again.")
            results = read_results(folder.results)
        else:
            try:
                with console.status("Reading the text and training the tokenizer"):
                    folder.prepare(settings)
            except ValueError:
                folder.release()
                raise
            run_jobs(arm_jobs(folder, settings), devices=devices_for("cpu"), runs_per_device=jobs, console=console)
            with console.status("Measuring the speed of the arms in turn"):
                results = _collect(folder, settings)
            write_results(folder.results, results)
        write_report(results, folder.report)
        figure_png(results, folder.figure)
    return results


def arm_jobs(folder: RunFolder, settings: CompareSettings) -> list[Job]:
    """A run for every arm and seed, seed after seed so that pairs are complete early."""
    return [
        Job(
            f"{arm}, seed {seed}",
            settings.train.steps,
            functools.partial(run_arm, str(folder.path), settings, arm, seed),
            functools.partial(arm_is_done, folder, arm, seed),
        )
        for seed in range(settings.seeds)
        for arm in settings.arms
    ]


def _collect(folder: RunFolder, settings: CompareSettings) -> CompareResults:
    """All figures of a comparison whose arms are done."""
    speeds = measure_speeds(folder, settings)
    runs = [
        cast(RunResult, add_speeds(read_arm_result(folder, arm, seed), speeds))
        for seed in range(settings.seeds)
        for arm in settings.arms
    ]
    tokenizer = folder.tokenizer()
    needles = settings.train.needles
    return {
        "schema": SCHEMA,
        "kind": "compare",
        "name": folder.path.resolve().name,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": settings.to_dict(),
        "environment": environment(threads=1),
        "corpus": folder.corpus(),
        "tokenizer": {"vocabulary": tokenizer.vocabulary_size, "sha256": tokenizer.sha256},
        "needle_task": {
            "keys": settings.keys,
            "values": settings.values,
            "needles_per_window": needles,
            "chance": 1 / settings.values,
            "chance_among_seen": 1 / needles,
            "description": (
                f"{needles} statements of a key and a value, both single tokens drawn without replacement, stand in "
                "held-out text; one key is asked for at the end, and the model's most likely next token must be its "
                "value"
            ),
        },
        "training_length": settings.train.training_length,
        "runs": runs,
        "pairs": _pairs(runs, settings),
    }


def _pairs(runs: list[RunResult], settings: CompareSettings) -> list[PairResult]:
    """Differences between every arm with a read step and its backbone."""
    return [
        paired_differences(runs, backbone, arm, f"{metric} at {length}")
        for arm in settings.arms
        for backbone, read in (parse_arm(arm),)
        if read is not None and backbone in settings.arms
        for metric in ("needle accuracy", "perplexity")
        for length in settings.lengths
    ]
