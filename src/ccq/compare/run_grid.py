"""A grid of runs: prepare the texts, run every cell, read trained models in other ways, put the figures together."""

from __future__ import annotations

import datetime
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from ccq.bench.machine import environment
from ccq.compare.cell import (
    Scores,
    missing_readings,
    read_cell,
    read_otherwise,
    read_readings,
    run_cell,
)
from ccq.compare.folder import GridFolder, what_is_learned
from ccq.compare.grid import OFF, Cell, GridSettings, SyntheticTask, TextTask
from ccq.compare.pool import Job, devices_for, run_jobs
from ccq.data.tasks import TASKS
from ccq.evals.results import (
    PUT_INTO,
    SCHEMA,
    GridDifference,
    GridReading,
    GridResults,
    GridRunResult,
    GridScore,
    GridTaskResult,
    read_results,
    write_results,
)
from ccq.models.configuration import parse_arm
from ccq.report.grid import grid_figure_png, put_in_title, write_grid_report
from ccq.report.intervals import Samples, of_difference, of_interaction, of_score, over_seeds


def compare_grid(out: Path, settings: GridSettings, *, console: Console | None = None) -> GridResults:
    """Run a grid in the folder `out`, or finish one that was interrupted, or read one that is done.

    Args:
        out: the folder; made if missing.
        settings: must equal those of an earlier call with the same folder, but for interventions and `system`.
        console: where progress is shown.

    Raises:
        ValueError: the folder belongs to other settings, another process is using it, or a text cannot be used.
        RunsFailed: some runs ended with an error.
    """
    console = Console() if console is None else console
    folder = GridFolder(out)
    devices = devices_for(settings.system.device)
    folder.claim(settings)
    with folder.locked():
        results = _finished(folder, settings)
        if results is not None:
            console.print(f"{out} holds a finished grid; nothing is trained again.")
        else:
            try:
                _prepare_texts(folder, settings, console)
            except ValueError:
                folder.release()
                raise
            for jobs in (training_jobs(folder, settings), reading_jobs(folder, settings)):
                run_jobs(jobs, devices=devices, runs_per_device=settings.system.runs_per_device, console=console)
            results = _collect(folder, settings, devices[0])
            write_results(folder.results, results)
            if devices[0].type == "cuda":
                for line in how_trained(folder, settings):
                    console.print(line, markup=False, soft_wrap=True)
        write_grid_report(results, folder.report)
        grid_figure_png(results, folder.figure)
    return results


def _prepare_texts(folder: GridFolder, settings: GridSettings, console: Console) -> None:
    for task in settings.tasks:
        if isinstance(task, TextTask):
            data = folder.text(task.name)
            data.path.mkdir(parents=True, exist_ok=True)
            with console.status(f"{task.name}: reading the text and training the tokenizer"):
                data.prepare(task.comparison)


def training_jobs(folder: GridFolder, settings: GridSettings) -> list[Job]:
    """A run for every cell."""
    return [
        Job(
            cell.title,
            settings.task(cell.task).steps,
            functools.partial(run_cell, str(folder.path), settings, cell),
            functools.partial(_is_trained, folder, cell),
        )
        for cell in settings.cells
    ]


def reading_jobs(folder: GridFolder, settings: GridSettings) -> list[Job]:
    """A run for every trained model that is read in other ways."""
    return [
        Job(
            f"{cell.title}, read otherwise",
            0,
            functools.partial(read_otherwise, str(folder.path), settings, cell),
            functools.partial(_is_read, folder, settings, cell),
        )
        for cell in settings.cells
        if settings.readings(cell.arm)
    ]


def how_trained(folder: GridFolder, settings: GridSettings) -> Iterator[str]:
    """A line for each way in which the steps of the finished cells ran: as CUDA graphs, or not and why."""
    reasons = Counter(read_cell(folder, cell).get("eager_because", "not recorded") for cell in settings.cells)
    for reason, count in reasons.items():
        way = "as CUDA graphs" if reason is None else f"eagerly ({reason})"
        yield f"{count} of {len(settings.cells)} models: forward and backward passes ran {way}."


def _is_trained(folder: GridFolder, cell: Cell) -> bool:
    return (folder.cell(cell) / "result.json").exists()


def _is_read(folder: GridFolder, settings: GridSettings, cell: Cell) -> bool:
    return not missing_readings(folder, settings, cell)


def _finished(folder: GridFolder, settings: GridSettings) -> GridResults | None:
    """The results, where they are of the same ways of reading."""
    if not folder.results.exists():
        return None
    results = read_results(folder.results, "grid")
    same = results["settings"].get("interventions") == list(settings.interventions) and all(
        {reading["reading"] for reading in run["readings"]} == set(settings.readings(run["arm"]))
        for run in results["runs"]
    )
    return results if same else None


def _collect(folder: GridFolder, settings: GridSettings, device: torch.device) -> GridResults:
    """All figures of a grid whose cells are done."""
    name = f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return {
        "schema": SCHEMA,
        "kind": "grid",
        "name": folder.path.resolve().name,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": {**what_is_learned(settings), "interventions": list(settings.interventions)},
        "environment": environment(threads=1, device=name),
        "tasks": [_described(task) for task in settings.tasks],
        "runs": [_run(folder, settings, cell) for cell in settings.cells],
        "differences": list(_differences(folder, settings)),
    }


def _described(task: SyntheticTask | TextTask) -> GridTaskResult:
    if isinstance(task, SyntheticTask):
        first = (TASKS[task.kind].__doc__ or "").partition("\n\n")[0]
        return {
            "task": task.name,
            "kind": task.kind,
            "description": " ".join(first.split()),
            "settings": [setting.name for setting in task.settings],
            "chance": [setting.task.chance for setting in task.settings],
        }
    comparison = task.comparison
    return {
        "task": task.name,
        "kind": "text",
        "description": (
            f"Text with {comparison.train.needles} statements of a key and a value hidden in it; one key is asked at "
            "the end. The loss is that of text without needles."
        ),
        "settings": [f"length {length}" for length in comparison.lengths],
        "chance": [1 / comparison.train.needles for _ in comparison.lengths],
    }


def _summaries(scores: Sequence[Scores]) -> list[GridScore]:
    found: list[GridScore] = []
    for setting, metric, values in scores:
        interval = of_score([Samples(np.array(values), None, metric == "accuracy")])
        found.append(
            {
                "setting": setting,
                "metric": metric,  # type: ignore[typeddict-item]
                "prompts": len(values),
                "mean": float(np.mean(values)),
                "low": None if interval is None else interval.low,
                "high": None if interval is None else interval.high,
            }
        )
    return found


def _run(folder: GridFolder, settings: GridSettings, cell: Cell) -> GridRunResult:
    found = read_cell(folder, cell)
    found_otherwise = read_readings(folder, cell)
    readings: list[GridReading] = [
        {
            "reading": name,
            "gate": found_otherwise[name].get("gate"),
            "scores": _summaries(Scores.read(found_otherwise[name]["scores"])),
        }
        for name in settings.readings(cell.arm)
    ]
    scores = _summaries(Scores.read(found["scores"]))
    return cast(GridRunResult, {**cell._asdict(), **found, "scores": scores, "readings": readings})


class _Model(NamedTuple):
    """A trained model and how it is read."""

    arm: str
    reading: str
    """"on" for as it was trained, an intervention, or `PUT_INTO` and the arm whose model it is."""


class _Contrast(NamedTuple):
    """What is subtracted from what. An interaction is the difference of two differences, (plus[0] - minus[0]) -
    (minus[1] - plus[1]).
    """

    kind: Literal["arm", "control", "training", "training and normalisation", "reading", "interaction"]
    arm: str
    first: str
    second: str
    plus: tuple[_Model, ...]
    minus: tuple[_Model, ...]


def _contrasts(settings: GridSettings) -> Iterator[_Contrast]:
    """Everything that is compared, an arm with a read step at a time."""
    for arm in settings.arms:
        backbone, read = parse_arm(arm)
        if read is None:
            continue
        trained = _Model(arm, "on")
        if backbone in settings.arms:
            yield _Contrast("arm", arm, arm, backbone, (trained,), (_Model(backbone, "on"),))
        control = settings.control(arm)
        if control is not None:
            yield _Contrast("control", arm, arm, control, (trained,), (_Model(control, "on"),))
        for name in settings.readings(arm):
            other = _Model(arm, name)
            if name == OFF:
                yield _Contrast("reading", arm, f"{arm}, on", f"{arm}, {OFF}", (trained,), (other,))
            elif not name.startswith(PUT_INTO):
                yield _Contrast("reading", arm, f"{arm}, {name}", f"{arm}, on", (other,), (trained,))
        base = settings.put_into(arm)
        if base is not None:
            plain, off, put = _Model(base, "on"), _Model(arm, OFF), _Model(arm, f"{PUT_INTO}{base}")
            title = put_in_title(arm, base)
            training: Literal["training", "training and normalisation"] = (
                "training" if settings.read_alike(arm, base) else "training and normalisation"
            )
            yield _Contrast("reading", arm, title, base, (put,), (plain,))
            yield _Contrast(training, arm, f"{arm}, {OFF}", base, (off,), (plain,))
            yield _Contrast(training, arm, f"{arm}, on", title, (trained,), (put,))
            yield _Contrast(
                "interaction",
                arm,
                f"{arm}: on − off",
                f"{base}: {read} put in − as trained",
                (trained, plain),
                (off, put),
            )


def _differences(folder: GridFolder, settings: GridSettings) -> Iterator[GridDifference]:
    for task in settings.tasks:
        tables = _tables(folder, settings, task.name)
        for contrast in _contrasts(settings):
            for setting, metric in tables[_Model(contrast.arm, "on")]:
                plus = [tables[model][setting, metric] for model in contrast.plus]
                minus = [tables[model][setting, metric] for model in contrast.minus]
                yield _difference(contrast, task.name, setting, metric, plus, minus)


Table = Mapping[tuple[str, str], NDArray[np.float64]]


def _tables(folder: GridFolder, settings: GridSettings, task: str) -> dict[_Model, Table]:
    """For each model and each setting and metric what every seed and prompt scored: [seeds, prompts]."""
    by_seed: dict[_Model, list[list[Scores]]] = {}
    for seed in range(settings.seeds):
        for arm in settings.arms:
            cell = Cell(task, arm, seed)
            by_seed.setdefault(_Model(arm, "on"), []).append(Scores.read(read_cell(folder, cell)["scores"]))
            for name, reading in read_readings(folder, cell).items():
                by_seed.setdefault(_Model(arm, name), []).append(Scores.read(reading["scores"]))
    return {
        model: {
            (scores[0].setting, scores[0].metric): np.array([score.values for score in scores])
            for scores in zip(*seeds, strict=True)
        }
        for model, seeds in by_seed.items()
        if len(seeds) == settings.seeds
    }


def _difference(
    contrast: _Contrast,
    task: str,
    setting: str,
    metric: str,
    plus: Sequence[NDArray[np.float64]],
    minus: Sequence[NDArray[np.float64]],
) -> GridDifference:
    """Paired by seed and by prompt: all models of a seed started alike and saw the same rows, and all of them answer
    the same prompts, so differences are taken prompt by prompt and then averaged.
    """
    # Rounding must not look like a spread: seeds that agree agree exactly.
    by_seed = (np.sum(plus, axis=0) - np.sum(minus, axis=0)).mean(axis=1).round(12)
    asked = (f"{task}: {setting}",)
    by_model = zip(plus[0], *minus, *plus[1:], strict=True)
    samples = [[Samples(values, asked, metric == "accuracy") for values in models] for models in by_model]
    seeds = over_seeds(by_seed.tolist())
    if contrast.kind == "interaction":
        prompts = of_interaction([(a, b, c, d) for a, b, c, d in samples])
    else:
        prompts = of_difference([[(a, b) for a, b in samples]])
    return {
        "task": task,
        "setting": setting,
        "metric": metric,  # type: ignore[typeddict-item]
        "kind": contrast.kind,
        "arm": contrast.arm,
        "first": contrast.first,
        "second": contrast.second,
        "by_seed": by_seed.tolist(),
        "mean": float(by_seed.mean()),
        "over_seeds": None if seeds is None else list(seeds),
        "over_prompts": None if prompts is None else list(prompts),
    }
