"""The command `ccq`: parse, call, print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ccq import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 if it failed, 2 for wrong input, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="ccq", description="Curvature-Conditioned Query: linear attention that reads with q - lambda Cov(keys) q."
    )
    parser.add_argument("--version", action="version", version=f"ccq {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_compare(commands)
    _add_bench(commands)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (ValueError, OSError) as error:
        print(f"ccq: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ccq: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return value


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="train arms side by side and report them",
        description="Trains backbones with and without the read step on the same data, evaluates them, and writes "
        "results.json and report.html. The same command again resumes an interrupted run or shows a finished one.",
    )
    parser.add_argument("--preset", default="tiny", help="sizes and lengths: tiny (minutes) or smoke (seconds)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where everything is written")
    parser.add_argument(
        "--arms", metavar="A,B,...", help="BACKBONE or BACKBONE+READ: gla, gla+ccq, gated-deltanet, gated-deltanet+ccq"
    )
    parser.add_argument("--seeds", type=_positive, metavar="N", help="repeat with N seeds and show the spread")
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="train on these text files instead of Python's standard library"
    )
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="arms at a time, one thread each; default: one a processor core"
    )
    parser.set_defaults(run=_compare)


def _compare(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from ccq.compare.run import ArmsFailed, compare
    from ccq.compare.settings import compare_preset
    from ccq.report.tables import comparison_table

    console = Console()
    arms = None if parsed.arms is None else tuple(parsed.arms.split(","))
    settings = compare_preset(parsed.preset, arms=arms, seeds=parsed.seeds, text=parsed.text)
    try:
        results = compare(parsed.out, settings, jobs=parsed.jobs, console=console)
    except ArmsFailed as error:
        print(f"ccq: {error}", file=sys.stderr)
        return 1
    console.print(comparison_table(results))
    console.print(f"Report: {parsed.out / 'report.html'}")
    return 0


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure speed and numerical error")
    subjects = parser.add_subparsers(required=True, metavar="SUBJECT")
    operator = subjects.add_parser(
        "operator",
        help="read step and write rules on a CPU",
        description="Times forward + backward of each function in turn in one process, beside causal "
        "scaled_dot_product_attention of the same shape, and measures the error of the correction against float64.",
    )
    for name, value in (("rows", 4), ("tokens", 512), ("heads", 4), ("size", 64)):
        operator.add_argument(f"--{name}", type=_positive, default=value, metavar="N", help=f"default {value}")
    operator.add_argument("--threads", type=_positive, metavar="N", help="default: one a processor core")
    operator.add_argument("--repeats", type=_positive, default=50, metavar="N", help="default 50")
    operator.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    operator.set_defaults(run=_bench_operator)


def _bench_operator(parsed: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ccq.bench.machine import cores
    from ccq.bench.operator import Shape, bench_operator
    from ccq.files import write_json_atomically

    console = Console()
    shape = Shape(parsed.rows, parsed.tokens, parsed.heads, parsed.size)
    threads = cores() if parsed.threads is None else parsed.threads
    with console.status("Measuring"):
        figures = bench_operator(shape, threads=threads, repeats=parsed.repeats)
    times = Table("milliseconds", "forward", "both", "quartiles", "ratio", box=None)
    for row in figures["times"]:
        quartiles = f"{row['lower_quartile_ms']:.2f} - {row['upper_quartile_ms']:.2f}"
        numbers = (f"{row['forward_ms']:.2f}", f"{row['forward_backward_ms']:.2f}", quartiles, f"{row['ratio']:.2f}")
        times.add_row(row["function"], *numbers)
    errors = Table("correction", "largest relative error", "at", box=None)
    for row in figures["errors"]:
        errors.add_row(row["dtype"], f"{row['largest_relative_error']:.1e}", row["at"])
    console.print(times, errors)
    if parsed.out is not None:
        write_json_atomically(parsed.out, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
