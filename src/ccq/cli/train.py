"""`ccq train`: train a model from a recipe."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ccq.cli.arguments import Commands, positive

if TYPE_CHECKING:
    from ccq.train.throughput import Plan


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model from a recipe",
        description="Trains the model of a recipe, on this machine alone or under torchrun on any number of processes "
        "(torchrun --nproc-per-node 8 -m ccq.cli train ...). The same command again goes on after an interruption.",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="checkpoints, metrics.jsonl and the trained model")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="replace a value of the recipe, such as training.steps=100; may be given several times",
    )
    parser.add_argument(
        "--stop-after",
        type=positive,
        metavar="STEPS",
        help="save and end once so many steps of the run are done, as an interruption would",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print parameters, memory, steps and hours, and train nothing"
    )
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from ccq.train.config import load_recipe
    from ccq.train.run import plan_recipe, run_recipe

    recipe = load_recipe(parsed.recipe, parsed.set)
    if parsed.dry_run:
        _print_plan(plan_recipe(recipe))
        return 0
    if parsed.out is None:
        raise ValueError("--out is needed: the folder for checkpoints, metrics and the trained model")
    try:
        run = run_recipe(recipe, parsed.out, stop_after=parsed.stop_after)
    except FloatingPointError as error:
        print(f"ccq: {error}", file=sys.stderr)
        return 1
    # A shell's way of saying which signal ended a command.
    return 0 if run.signal is None else 128 + run.signal


def _print_plan(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from ccq.train.throughput import ASSUMED_UTILIZATION

    memory = plan.memory
    parts = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in memory._asdict().items())
    origin = "measured here" if plan.is_measured else "from its data sheet"
    table = Table(show_header=False, box=None)
    table.add_row("parameters", f"{plan.parameters:,}")
    table.add_row("steps", f"{plan.steps:,} of {plan.tokens // plan.steps:,} tokens, {plan.tokens:,} in all")
    table.add_row("memory", f"{memory.total / 2**30:,.2f} GiB in each of {plan.processes} processes: {parts}")
    table.add_row("arithmetic", f"{plan.training_flops / 1e9:,.3f} GFLOP a token")
    table.add_row("device", f"{plan.device}, {plan.peak / 1e9:,.1f} GFLOP/s ({origin})")
    table.add_row("time", f"{plan.hours:,.2f} hours at {ASSUMED_UTILIZATION:.0%} of that")
    Console().print(table)
