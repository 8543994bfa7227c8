"""The main job: prepare the data, run every arm, put the figures together, write the report."""

from __future__ import annotations

import datetime
import multiprocessing
import queue
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ccq.bench.machine import cores, environment
from ccq.compare.arm import ArmEvent, arm_is_done, read_arm_result, run_arm
from ccq.compare.folder import RunFolder
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


class ArmsFailed(RuntimeError):
    """Some arms did not finish; what the others found is kept, and the same command tries them again."""


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
        ArmsFailed: some arms ended with an error.
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
            _run_arms(folder, settings, cores() if jobs is None else jobs, console)
            with console.status("Measuring the speed of the arms in turn"):
                results = _collect(folder, settings)
            write_results(folder.results, results)
        write_report(results, folder.report)
        figure_png(results, folder.figure)
    return results


def _run_arms(folder: RunFolder, settings: CompareSettings, jobs: int, console: Console) -> None:
    """Run all arms that are not done, `jobs` at a time, seed after seed so that pairs are complete early."""
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    waiting = [
        (arm, seed) for seed in range(settings.seeds) for arm in settings.arms if not arm_is_done(folder, arm, seed)
    ]
    # A process of its own for each arm, that of an interpreter which has only imported: no state is shared, and the
    # figures do not depend on what ran before. With "forkserver" the imports, which take seconds, are made once.
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(["ccq.compare.arm"])
    events: Any = context.Queue()
    running: dict[tuple[str, int], Any] = {}
    failures: list[str] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        bars: dict[tuple[str, int], TaskID] = {}
        for arm, seed in waiting:
            name = arm if settings.seeds == 1 else f"{arm}, seed {seed}"
            bars[arm, seed] = progress.add_task(name, total=settings.train.steps, start=False, note="waiting")
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    key = waiting.pop(0)
                    arguments = (str(folder.path), settings, *key, events)
                    running[key] = context.Process(target=run_arm, args=arguments, daemon=True)
                    running[key].start()
                    progress.start_task(bars[key])
                    progress.update(bars[key], note="starting")
                ended = [key for key, process in running.items() if not process.is_alive()]
                _show_events(events, progress, bars, failures)
                for key in ended:
                    process = running.pop(key)
                    process.join()
                    if not arm_is_done(folder, *key) and not any(line.startswith(_title(*key)) for line in failures):
                        failures.append(f"{_title(*key)}: its process ended with exit code {process.exitcode}")
                        progress.update(bars[key], note="[red]failed")
        finally:
            for process in running.values():
                process.terminate()
                process.join()
    if failures:
        raise ArmsFailed(
            "Some arms did not finish:\n  "
            + "\n  ".join(failures)
            + "\nThe same command runs them again, the others are kept."
        )


def _title(arm: str, seed: int) -> str:
    return f"{arm}, seed {seed}"


def _show_events(events: Any, progress: Progress, bars: dict[tuple[str, int], TaskID], failures: list[str]) -> None:
    """Show what the arms tell; waits a moment for the first event and then takes all that are there."""
    wait = 0.2
    while True:
        try:
            event: ArmEvent = events.get(timeout=wait)
        except queue.Empty:
            return
        wait = 0.01
        bar = bars[event.arm, event.seed]
        if event.kind == "training":
            progress.update(bar, completed=event.step, note=event.text)
        elif event.kind == "evaluating":
            progress.update(bar, completed=event.step, note="evaluating")
        elif event.kind == "done":
            progress.update(bar, note="done")
            progress.stop_task(bar)
        else:
            failures.append(f"{_title(event.arm, event.seed)}: {event.text}")
            progress.update(bar, note="[red]failed")


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
