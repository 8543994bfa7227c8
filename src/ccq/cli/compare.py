"""`ccq compare`: train arms side by side and report them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ccq.cli.arguments import Commands, positive

if TYPE_CHECKING:
    from rich.console import Console


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
            _print_runs(console, settings.plan())
            return 0
        results = compare(parsed.out, settings, jobs=parsed.jobs, console=console)
    except RunsFailed as error:
        print(f"ccq: {error}", file=sys.stderr)
        return 1
    console.print(comparison_table(results))
    console.print(f"Report: {parsed.out / 'report.html'}")
    return 0


def _run_grid(parsed: argparse.Namespace, console: Console) -> int:
    from ccq.compare.grid import choose_grid
    from ccq.compare.run_grid import compare_grid
    from ccq.report.grid import grid_table

    settings = choose_grid(
        parsed.grid,
        preset=parsed.preset,
        arms=None if parsed.arms is None else parsed.arms.split(","),
        seeds=parsed.seeds,
        tasks=None if parsed.task is None else parsed.task.split(","),
        text=parsed.text,
        interventions=parsed.interventions,
        device=parsed.device,
        runs_per_device=parsed.jobs,
    )
    if parsed.dry_run:
        _print_runs(console, settings.plan())
        if settings.interventions:
            count, lines = settings.reading_plan()
            console.print(f"{count} readings, with every seed and task:")
            for line in lines:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    results = compare_grid(parsed.out, settings, console=console)
    console.print(grid_table(results))
    console.print(f"Report: {parsed.out / 'report.html'}")
    return 0


def _print_runs(console: Console, runs: Sequence[tuple[str, str, int, int, int]]) -> None:
    from rich.table import Table

    table = Table("task", "arm", "seed", "steps", "tokens", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for task, arm, seed, steps, tokens in runs:
        table.add_row(task, arm, str(seed), f"{steps:,}", f"{tokens:,}")
    console.print(table)
    console.print(f"{len(runs)} runs")
