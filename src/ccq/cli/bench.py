"""`ccq bench`: measure speed and numerical error."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from ccq.cli.arguments import Commands, positive


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="measure speed and numerical error")
    subjects = parser.add_subparsers(required=True, metavar="SUBJECT")
    _add_operator(subjects)
    _add_layer(subjects)
    _add_model(subjects)
    _add_decode(subjects)
    _add_tune(subjects)
    _add_tables(subjects)


def _add_operator(subjects: Commands) -> None:
    parser = subjects.add_parser(
        "operator",
        help="read step (and, on a CPU, write rules)",
        description="On a CPU: times forward + backward of the read step and the write rules in turn in one process, "
        "beside causal scaled_dot_product_attention of the same shape, and measures the error of the correction "
        "against float64. On a GPU: device time, eager time, memory, share of the floor and error of the read step in "
        "Triton, in PyTorch, and composed from flash-linear-attention.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu")
    parser.add_argument(
        "--rows", type=positive, nargs="+", metavar="N", help="default 4 on a CPU; on a GPU several may be given: 1 8"
    )
    for name, on_cpu, on_gpu in (("tokens", 512, 4096), ("heads", 4, 6), ("size", 64, 256)):
        text = f"default {on_cpu} on a CPU, {on_gpu} on a GPU"
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=text)
    parser.add_argument("--dtype", help="GPU: bfloat16 (default), float16 or float32; a CPU is measured in float32")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU; default: one a processor core")
    parser.add_argument("--repeats", type=positive, default=50, metavar="N", help="rounds of a timing; default 50")
    parser.add_argument(
        "--limit", type=positive, default=60, metavar="SECONDS", help="GPU: end a timing after so long; default 60"
    )
    parser.add_argument("--long", action="store_true", help="GPU: also time per token at T 8192 and 131072")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.set_defaults(run=_operator)


def _operator(parsed: argparse.Namespace) -> int:
    import torch

    device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _operator_on_gpu(parsed) if device == "cuda" else _operator_on_cpu(parsed)


def _operator_on_gpu(parsed: argparse.Namespace) -> int:
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


def _operator_on_cpu(parsed: argparse.Namespace) -> int:
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


def _add_layer(subjects: Commands) -> None:
    parser = subjects.add_parser(
        "layer",
        help="mixers with and without the read step, on a GPU",
        description="Forward at T and 2 T, forward + backward at T, of a mixer, of the same with the read step, and of "
        "flash-linear-attention's layer with the same weights: device time, eager time, memory, and their ratios.",
    )
    parser.add_argument("--backbones", nargs="+", metavar="NAME", help="default: gla gated-deltanet")
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[1, 8], metavar="N", help="batch sizes; default 1 8"
    )
    for name, default in (("tokens", 4096), ("hidden", 2048), ("heads", 6), ("size", 256), ("value-size", 512)):
        parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16 or float32")
    parser.add_argument("--repeats", type=positive, default=40, metavar="N", help="rounds of a timing; default 40")
    parser.add_argument("--limit", type=positive, default=30, metavar="SECONDS", help="end a timing after; default 30")
    parser.add_argument("--compile", action="store_true", help="also behind torch.compile")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of forward + backward")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.set_defaults(run=_layer)


def _layer(parsed: argparse.Namespace) -> int:
    from ccq.bench.layer import BACKBONES, Sizes, bench_layer
    from ccq.files import write_json_atomically

    bench_layer(
        backbones=parsed.backbones or BACKBONES,
        rows=parsed.rows,
        tokens=parsed.tokens,
        sizes=Sizes(parsed.hidden, parsed.heads, parsed.size, parsed.value_size),
        dtype=parsed.dtype,
        repeats=parsed.repeats,
        limit=parsed.limit,
        compiled=parsed.compile,
        with_profile=parsed.profile,
        say=functools.partial(print, flush=True),
        save=lambda figures: None if parsed.out is None else write_json_atomically(parsed.out, figures),
    )
    return 0


def _add_model(subjects: Commands) -> None:
    parser = subjects.add_parser(
        "model",
        help="training step, prefill and peak memory of whole models, on a GPU",
        description="A backbone, the same with the read step, and flash-linear-attention's model of the same sizes: "
        "training step (float32 weights, bfloat16 autocast, AdamW), prefill (bfloat16), peak memory, and their ratios.",
    )
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help="default: gla and gated-deltanet, without and with +ccq"
    )
    parser.add_argument("--scale", default="1.3b", help="of the presets; default 1.3b")
    parser.add_argument("--rows", type=positive, default=8, metavar="N", help="default 8")
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help="default 4096")
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="rounds of a timing; default 20")
    parser.add_argument("--limit", type=positive, default=40, metavar="SECONDS", help="end a timing after; default 40")
    parser.add_argument(
        "--sweep",
        metavar="tokens=N",
        help="instead: a training step of N tokens cut into rows of 1024 and more, also of transformer and mamba2",
    )
    parser.add_argument(
        "--first-step", action="store_true", help="also the first step of a fresh process, empty caches"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.set_defaults(run=_model)


def _model(parsed: argparse.Namespace) -> int:
    from ccq.bench.model import ARMS, SWEEP_ARMS, bench_model
    from ccq.files import write_json_atomically

    sweep = None
    if parsed.sweep is not None:
        name, _, count = parsed.sweep.partition("=")
        if name != "tokens" or not count.isdigit() or int(count) < 1:
            raise ValueError(f"--sweep wants tokens=N, N tokens a training step; got {parsed.sweep!r}")
        sweep = int(count)
    bench_model(
        arms=parsed.arms or (ARMS if sweep is None else SWEEP_ARMS),
        scale=parsed.scale,
        rows=parsed.rows,
        tokens=parsed.tokens,
        repeats=parsed.repeats,
        limit=parsed.limit,
        sweep=sweep,
        first_step=parsed.first_step,
        say=functools.partial(print, flush=True),
        save=lambda figures: None if parsed.out is None else write_json_atomically(parsed.out, figures),
    )
    return 0


def _add_decode(subjects: Commands) -> None:
    parser = subjects.add_parser(
        "decode",
        help="one-token decoding of whole models",
        description="Decoding after a context, greedily: a backbone, the same with the read step, and, on a GPU, the "
        "same step replayed as a CUDA graph and flash-linear-attention's model of the same sizes. Tokens a second, "
        "milliseconds a step, the floor that the card's bandwidth sets, state, peak memory, and ratios. On a CPU, a "
        "tiny model by default, eager only.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu")
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help="default: gla and gated-deltanet, without and with +ccq"
    )
    parser.add_argument("--scale", help="of the presets; default 1.3b on a GPU, tiny on a CPU")
    parser.add_argument("--rows", type=positive, default=8, metavar="N", help="sequences at a time; default 8")
    parser.add_argument(
        "--context", type=positive, metavar="N", help="tokens read before; default 4096 on a GPU, 256 on a CPU"
    )
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="rounds of a timing; default 20")
    parser.add_argument("--limit", type=positive, default=40, metavar="SECONDS", help="end a timing after; default 40")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.set_defaults(run=_decode)


def _decode(parsed: argparse.Namespace) -> int:
    import torch

    from ccq.bench.decode import bench_decode
    from ccq.bench.model import ARMS
    from ccq.files import write_json_atomically

    device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    scale, context = ("1.3b", 4096) if device == "cuda" else ("tiny", 256)
    bench_decode(
        arms=parsed.arms or ARMS,
        scale=parsed.scale or scale,
        rows=parsed.rows,
        context=parsed.context or context,
        device=device,
        repeats=parsed.repeats,
        limit=parsed.limit,
        say=functools.partial(print, flush=True),
        save=lambda figures: None if parsed.out is None else write_json_atomically(parsed.out, figures),
    )
    return 0


def _add_tune(subjects: Commands) -> None:
    parser = subjects.add_parser(
        "tune",
        help="measure configurations of flash-linear-attention's kernels for this card",
        description="Times the configurations of the kernels behind the write rules on this GPU and writes the fastest "
        "into a file, CARD.json, where the write rules look for it. The same command again goes on where it was.",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write there; default: the installed package")
    parser.add_argument(
        "--sizes",
        nargs="+",
        metavar="D/V",
        help="head sizes; default 256/512 64/64 64/128 128/128 128/256 for GLA and Gated DeltaNet, 128/64 for Mamba2",
    )
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[1, 8], metavar="N", help="batch sizes; default 1 8"
    )
    parser.add_argument(
        "--limit", type=positive, default=1200, metavar="SECONDS", help="begin nothing after; default 1200"
    )
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes that compile; default: one a core")
    parser.set_defaults(run=_tune)


def _tune(parsed: argparse.Namespace) -> int:
    from ccq.bench.machine import cores
    from ccq.bench.tune import tune

    tune(
        parsed.out,
        sizes=parsed.sizes,
        rows=parsed.rows,
        limit=parsed.limit,
        jobs=parsed.jobs or cores(),
        say=functools.partial(print, flush=True),
    )
    return 0


def _add_tables(subjects: Commands) -> None:
    parser = subjects.add_parser(
        "tables",
        help="print docs/speed.md from measured figures",
        description="Prints the page docs/speed.md, made from the operator*.json, layer*.json, model*.json, "
        "decode*.json and answers*.json files of a folder.",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("benchmarks/results"), metavar="FOLDER")
    parser.set_defaults(run=_tables)


def _tables(parsed: argparse.Namespace) -> int:
    from ccq.bench.tables import speed_page

    print(speed_page(parsed.folder), end="")
    return 0
