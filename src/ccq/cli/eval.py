"""`ccq eval`: evaluate a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from ccq.cli.arguments import Commands, add_gates, add_read, positive, seed


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="evaluate a model: perplexity by length, needles, language tasks, LongBench",
        description="Runs a suite on a model, of this library or any causal LM of transformers, and writes scores, "
        "samples and all that moves a number to one file. The same command again goes on after an interruption. Under "
        "torchrun several processes, each with a GPU, divide the samples; the numbers are those of one.",
    )
    suites = parser.add_subparsers(required=True, metavar="SUITE", dest="suite")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("model", metavar="MODEL", help="folder of a model and its tokenizer, or a name of the hub")
    common.add_argument("--out", type=Path, required=True, metavar="FILE", help="results, as JSON")
    common.add_argument("--tasks", nargs="+", metavar="NAME", help="some of the suite's; default: all")
    common.add_argument("--data", type=Path, metavar="FOLDER", help="local data instead of the hub's")
    common.add_argument("--device", help="default: cuda if torch finds a GPU, else cpu")
    common.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    add_gates(common)
    add_read(common)
    common.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="put the tokenizer's first token before every text; default: as the tokenizer does by itself",
    )
    common.add_argument("--seed", type=seed, default=0, metavar="N", help="of samples that are drawn; default 0")
    extrapolation = suites.add_parser(
        "extrapolation",
        parents=[common],
        help="token perplexity in windows of growing length",
        description="Token perplexity in neighbouring windows, by length and by position, on the paper's six corpora, "
        "on texts of a folder, or on the text that every machine has (--tasks stdlib).",
    )
    _add_lengths(extrapolation, "4096 6144 ... 20480")
    extrapolation.add_argument("--batch-size", type=positive, default=1, metavar="N", help="windows; default 1")
    extrapolation.add_argument(
        "--max-tokens", type=positive, default=2**21, metavar="N", help="of a corpus and length; default 2097152"
    )
    extrapolation.add_argument("--limit", type=positive, metavar="N", help="documents of a corpus; default all")
    needle = suites.add_parser(
        "needle",
        parents=[common],
        help="RULER's needles in haystacks, and its tracking and counting tasks",
        description="RULER's tasks at any length, by lm-eval's generators. Default: the three single-needle tasks of "
        "the paper's table 3.",
    )
    _add_lengths(needle, "1024 2048 4096 8192")
    needle.add_argument(
        "--preset",
        choices=("read-off",),
        help="the paper's lengths for runs with the correction off, to 100K; compare --read on and --read off",
    )
    needle.add_argument("--hub-essays", action="store_true", help="haystacks of the essays that RULER uses")
    needle.add_argument("--batch-size", type=positive, default=32, metavar="N", help="prompts; default 32")
    needle.add_argument("--limit", type=positive, default=500, metavar="N", help="samples a cell; default 500")
    for name, text in (
        ("language", "the nine tasks of the paper's table 2, and the mean of seven"),
        ("longbench", "the 14 English tasks of the paper's table 4, prompts cut in the middle"),
    ):
        suite = suites.add_parser(name, parents=[common], help=text, description=f"Runs {text}, through lm-eval.")
        suite.add_argument(
            "--max-length", type=positive, metavar="N", help="tokens of prompt and answer; default: the model's own"
        )
        suite.add_argument("--batch-size", type=positive, default=8, metavar="N", help="prompts; default 8")
        suite.add_argument("--limit", type=positive, metavar="N", help="samples a task; default all")
    parser.set_defaults(run=_run)


def _add_lengths(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--lengths", type=positive, nargs="+", metavar="N", help=f"in tokens; default {default}")


def _run(parsed: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from ccq.bench.machine import environment
    from ccq.evals.harness import load
    from ccq.evals.suites import run_suite, score_table
    from ccq.processes import processes

    with processes() as group:
        console = Console(quiet=not group.is_first)
        loaded = load(
            parsed.model,
            device=parsed.device,
            dtype=parsed.dtype,
            gates=parsed.gates,
            read=parsed.read,
            gate_values=parsed.gate_values,
            bos=parsed.bos,
            processes=group,
        )
        device = str(loaded.model.device)
        if loaded.model.device.type == "cuda":
            device = f"{device} ({torch.cuda.get_device_name(loaded.model.device)})"
        results = run_suite(
            parsed.suite,
            loaded,
            parsed.out,
            tasks=parsed.tasks,
            data=parsed.data,
            batch_size=parsed.batch_size,
            limit=parsed.limit,
            seed=parsed.seed,
            lengths=getattr(parsed, "lengths", None),
            preset=getattr(parsed, "preset", None),
            hub_essays=getattr(parsed, "hub_essays", False),
            max_tokens=getattr(parsed, "max_tokens", None),
            max_length=getattr(parsed, "max_length", None),
            environment=environment(threads=torch.get_num_threads(), device=device),
            console=console,
        )
        console.print(score_table(results))
        console.print(f"Results: {parsed.out}", soft_wrap=True)
        return 0
