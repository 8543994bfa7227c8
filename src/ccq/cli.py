"""The command `ccq`: parse, call, print."""

from __future__ import annotations

import argparse
import functools
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
        help="read step (and, on a CPU, write rules)",
        description="On a CPU: times forward + backward of the read step and the write rules in turn in one process, "
        "beside causal scaled_dot_product_attention of the same shape, and measures the error of the correction "
        "against float64. On a GPU: device time, eager time, memory, share of the floor and error of the read step in "
        "Triton, in PyTorch, and composed from flash-linear-attention.",
    )
    operator.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu")
    operator.add_argument(
        "--rows", type=_positive, nargs="+", metavar="N", help="default 4 on a CPU; on a GPU several may be given: 1 8"
    )
    for name, on_cpu, on_gpu in (("tokens", 512, 4096), ("heads", 4, 6), ("size", 64, 256)):
        text = f"default {on_cpu} on a CPU, {on_gpu} on a GPU"
        operator.add_argument(f"--{name}", type=_positive, metavar="N", help=text)
    operator.add_argument("--dtype", help="GPU: bfloat16 (default), float16 or float32; a CPU is measured in float32")
    operator.add_argument("--threads", type=_positive, metavar="N", help="CPU; default: one a processor core")
    operator.add_argument("--repeats", type=_positive, default=50, metavar="N", help="rounds of a timing; default 50")
    operator.add_argument(
        "--limit", type=_positive, default=60, metavar="SECONDS", help="GPU: end a timing after so long; default 60"
    )
    operator.add_argument("--long", action="store_true", help="GPU: also time per token at T 8192 and 131072")
    operator.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    operator.set_defaults(run=_bench_operator)
    tables = subjects.add_parser(
        "tables",
        help="print docs/speed.md from measured figures",
        description="Prints the page docs/speed.md, made from the operator*.json files of a folder.",
    )
    tables.add_argument("folder", type=Path, nargs="?", default=Path("benchmarks/results"), metavar="FOLDER")
    tables.set_defaults(run=_bench_tables)


def _bench_operator(parsed: argparse.Namespace) -> int:
    import torch

    device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _bench_operator_on_gpu(parsed) if device == "cuda" else _bench_operator_on_cpu(parsed)


def _bench_operator_on_gpu(parsed: argparse.Namespace) -> int:
    from ccq.bench.gpu import bench_operator_on_gpu
    from ccq.files import write_json_atomically

    if parsed.threads is not None:
        raise ValueError("--threads is of a CPU's benchmark; leave it out, or add --device cpu")
    bench_operator_on_gpu(
        rows=parsed.rows or (1, 8),
        tokens=parsed.tokens or 4096,
        heads=parsed.heads or 6,
        size=parsed.size or 256,
        dtype=parsed.dtype or "bfloat16",
        repeats=parsed.repeats,
        limit=parsed.limit,
        long=parsed.long,
        say=functools.partial(print, flush=True),
        save=lambda figures: None if parsed.out is None else write_json_atomically(parsed.out, figures),
    )
    return 0


def _bench_operator_on_cpu(parsed: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ccq.bench.machine import cores
    from ccq.bench.operator import Shape, bench_operator
    from ccq.files import write_json_atomically

    rows = parsed.rows or [4]
    if len(rows) > 1 or parsed.long or parsed.dtype not in (None, "float32"):
        raise ValueError("on a CPU, --rows takes one number, --dtype is float32, and there is no --long")
    console = Console()
    shape = Shape(rows[0], parsed.tokens or 512, parsed.heads or 4, parsed.size or 64)
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


def _bench_tables(parsed: argparse.Namespace) -> int:
    from ccq.bench.tables import speed_page

    print(speed_page(parsed.folder), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
