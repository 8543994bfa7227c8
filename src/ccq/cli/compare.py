"""`ccq compare`: train arms side by side and report them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ccq.cli.arguments import Commands, positive

if TYPE_CHECKING:
    from rich.console import Console

    from ccq.compare.grid import GridSettings


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="train arms side by side and report them",
        description="Trains backbones with and without the read step on the same data, evaluates them, and writes "
        "results.json and report.html; on text with hidden needles, or on the tasks of --task or GRID.yaml. The same "
        "command again resumes an interrupted run or shows a finished one.",
    )
    parser.add_argument(
        "grid", type=Path, nargs="?", metavar="GRID.yaml", help="arms x seeds x tasks, see docs/comparison.md"
    )
    parser.add_argument("--preset", help="sizes and lengths: tiny (minutes, default) or smoke (seconds)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where everything is written")
    parser.add_argument(
        "--arms",
        metavar="A,B,...",
        help="BACKBONE or BACKBONE+READ; default: gla,gla+ccq,gated-deltanet,gated-deltanet+ccq",
    )
    parser.add_argument("--seeds", type=positive, metavar="N", help="repeat with N seeds and show the spread")
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="train on these text files instead of Python's standard library"
    )
    parser.add_argument(
        "--task",
        metavar="A,B,...",
        help="a grid of these tasks, each with models of its own: text, recall, needle, needles, frequent-needle, "
        "frequent-words, common-words",
    )
    parser.add_argument(
        "--interventions",
        nargs="*",
        metavar="CHANGE",
        help="also read the trained arms with the correction off, and their backbones with it put in; and in other "
        "ways, such as scale=0.5 or gate=mean",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="runs at a time, on each device, one thread each; default: one a processor core, on a GPU at most 4",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="of a grid; default: every GPU, else the CPU")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and train nothing")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from ccq.compare.pool import RunsFailed
    from ccq.compare.run import compare
    from ccq.compare.settings import compare_preset
    from ccq.report.tables import comparison_table

    console = Console()
    try:
        if parsed.grid is not None or parsed.task is not None or parsed.interventions is not None:
            return _run_grid(parsed, console)
        if parsed.device is not None:
            raise ValueError("--device is of a grid; a comparison on text alone runs on the CPU: add --task text")
        arms = None if parsed.arms is None else tuple(parsed.arms.split(","))
        settings = compare_preset(parsed.preset or "tiny", arms=arms, seeds=parsed.seeds, text=parsed.text)
        if parsed.dry_run:
            train = settings.train
            runs = [
                ("text", arm, seed, train.steps, train.tokens)
                for seed in range(settings.seeds)
                for arm in settings.arms
            ]
            _print_runs(console, runs)
            return 0
        results = compare(parsed.out, settings, jobs=parsed.jobs, console=console)
    except RunsFailed as error:
        print(f"ccq: {error}", file=sys.stderr)
        return 1
    console.print(comparison_table(results))
    console.print(f"Report: {parsed.out / 'report.html'}")
    return 0


def _run_grid(parsed: argparse.Namespace, console: Console) -> int:
    import dataclasses

    from ccq.compare.grid import GridSettings, load_grid
    from ccq.compare.run_grid import compare_grid
    from ccq.report.grid import grid_table

    given: dict[str, Any] = {
        "preset": parsed.preset,
        "arms": None if parsed.arms is None else parsed.arms.split(","),
        "seeds": parsed.seeds,
        "tasks": None if parsed.task is None else dict.fromkeys(parsed.task.split(",")),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if parsed.grid is None:
        given.setdefault("tasks", {"text": None})
        if parsed.text is not None:
            if "text" not in given["tasks"]:
                raise ValueError("--text is what the task text is made of; add text to --task, or leave it out")
            given["tasks"]["text"] = {"folder": str(parsed.text)}
        settings = GridSettings.from_dict({**given, "interventions": _interventions(parsed)})
    else:
        if given or parsed.text is not None:
            raise ValueError(
                f"--preset, --arms, --seeds, --task and --text are what {parsed.grid} says; leave them out, or it"
            )
        settings = load_grid(parsed.grid)
        if parsed.interventions is not None:
            settings = settings.with_interventions(_interventions(parsed))
    system = {"device": parsed.device, "runs_per_device": parsed.jobs}
    changes = {name: value for name, value in system.items() if value is not None}
    settings = dataclasses.replace(settings, system=dataclasses.replace(settings.system, **changes))
    if parsed.dry_run:
        _print_runs(console, settings.plan())
        _print_readings(console, settings)
        return 0
    results = compare_grid(parsed.out, settings, console=console)
    console.print(grid_table(results))
    console.print(f"Report: {parsed.out / 'report.html'}")
    return 0


def _interventions(parsed: argparse.Namespace) -> list[str]:
    """Those of --interventions; "off" where none is named."""
    return [] if parsed.interventions is None else parsed.interventions or ["off"]


def _print_runs(console: Console, runs: Sequence[tuple[str, str, int, int, int]]) -> None:
    from rich.table import Table

    table = Table("task", "arm", "seed", "steps", "tokens", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for task, arm, seed, steps, tokens in runs:
        table.add_row(task, arm, str(seed), f"{steps:,}", f"{tokens:,}")
    console.print(table)
    console.print(f"{len(runs)} runs")


def _print_readings(console: Console, settings: GridSettings) -> None:
    """In which ways trained models are read beside their own, and why some are not; nothing without interventions."""
    if not settings.interventions:
        return
    readings = settings.all_readings()
    each = settings.seeds * len(settings.tasks)
    console.print(f"{each * sum(map(len, readings.values()))} readings, with every seed and task:")
    for arm, names in readings.items():
        lines = [f"{arm}: {'; '.join(names) or 'none'}"]
        lines += [f"  {reason}" for reason in settings.refused(arm).values()]
        if settings.put_into(arm) is None:
            lines.append(f"  no 2 x 2: {settings.why_not_put_in(arm)}")
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
