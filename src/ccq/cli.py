"""The command `ccq`: parse, call, print."""

from __future__ import annotations

import argparse
import difflib
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ccq import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from ccq.data.shards import TokenFolder
    from ccq.train.throughput import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 if it failed, 2 for wrong input, 130 if it was interrupted."""
    parser: argparse.ArgumentParser = _Parser(
        prog="ccq", description="Curvature-Conditioned Query: linear attention that reads with q - lambda Cov(keys) q."
    )
    parser.add_argument("--version", action="version", version=f"ccq {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_compare(commands)
    _add_data(commands)
    _add_train(commands)
    _add_bench(commands)
    _add_models(commands)
    _add_reads(commands)
    _add_generate(commands)
    _add_eval(commands)
    _add_diagnose(commands)
    _add_report(commands)
    _add_gates(commands)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (ValueError, OSError) as error:
        print(f"ccq: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ccq: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Names an option that is unknown before anything else that is wrong, with the nearest one and the usage of its
    command. argparse would take the value behind it for an argument, say first what is missing, and show the usage of
    `ccq` alone.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        known = [option for action in self._actions for option in action.option_strings]
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        for text in itertools.takewhile(lambda text: text != "--", () if has_commands else given):
            option = text.partition("=")[0]
            # With a space in it, it is an argument.
            if option.startswith("--") and " " not in option and not any(name.startswith(option) for name in known):
                nearest = difflib.get_close_matches(option, known, 1)
                hint = f" (did you mean {nearest[0]}?)" if nearest else ""
                self.error(f"unrecognized arguments: {option}{hint}")
        return super().parse_known_args(args, namespace)


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
    parser.add_argument("--seeds", type=_positive, metavar="N", help="repeat with N seeds and show the spread")
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
        type=_positive,
        metavar="N",
        help="runs at a time, on each device, one thread each; default: one a processor core, on a GPU at most 4",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="of a grid; default: every GPU, else the CPU")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and train nothing")
    parser.set_defaults(run=_compare)


def _compare(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from ccq.compare.pool import RunsFailed
    from ccq.compare.run import compare
    from ccq.compare.settings import compare_preset
    from ccq.report.tables import comparison_table

    console = Console()
    try:
        if parsed.grid is not None or parsed.task is not None or parsed.interventions is not None:
            return _compare_grid(parsed, console)
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


def _compare_grid(parsed: argparse.Namespace, console: Console) -> int:
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


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("data", help="turn text into token shards for training, and look at them")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    prepare = actions.add_parser(
        "prepare",
        help="tokenise text into shards",
        description="Tokenises text into shards that training maps into memory. The same command again goes on after "
        "an interruption at any moment, with the same result.",
    )
    source = prepare.add_argument_group("text, one of").add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--dataset", metavar="NAME", help="data set of the Hugging Face hub, streamed, or a folder of one"
    )
    source.add_argument(
        "--files",
        nargs="+",
        metavar="GLOB",
        help="JSON lines (also .gz, .zst, .bz2), Parquet, or text, a document a file",
    )
    source.add_argument("--stdlib", action="store_true", help="the sources of Python's standard library")
    tokenizer = prepare.add_argument_group("tokenizer, one of").add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="NAME", help="a tokenizer.json, a folder, or a model of the hub")
    tokenizer.add_argument("--train-tokenizer", type=_positive, metavar="N", help="train a byte-level BPE of N tokens")
    prepare.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the shards are written")
    prepare.add_argument("--config", metavar="NAME", help="configuration of the data set, such as sample-100BT")
    prepare.add_argument("--split", default="train", metavar="NAME", help="split of the data set; default train")
    prepare.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the data set; default its newest")
    prepare.add_argument("--text-field", default="text", metavar="NAME", help="field that holds the text; default text")
    prepare.add_argument(
        "--held-out",
        type=_number_or_share,
        default=0.01,
        metavar="N|SHARE",
        help="documents kept out of training: so many of the first, or a share below 1; default 0.01",
    )
    prepare.add_argument("--tokens", type=_positive, metavar="N", help="stop when the training part has so many tokens")
    prepare.add_argument("--eos", metavar="TOKEN", help="token put after each document; default the tokenizer's own")
    prepare.add_argument("--bos", metavar="TOKEN", help="token put before each document; default none")
    prepare.add_argument(
        "--shard-tokens", type=_positive, default=100_000_000, metavar="N", help="tokens in a shard; default 100000000"
    )
    prepare.add_argument("--workers", type=_positive, metavar="N", help="processes; default one a processor core")
    prepare.set_defaults(run=_data_prepare)
    inspect = actions.add_parser("inspect", help="counts, settings and sample text of prepared shards")
    inspect.add_argument("folder", type=Path, metavar="FOLDER")
    inspect.add_argument("--verify", action="store_true", help="also read every file and compare its checksum")
    inspect.set_defaults(run=_data_inspect)


def _number_or_share(text: str) -> int | float:
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a number of documents or a share such as 0.01 is needed, got {text!r}"
        ) from None


def _data_prepare(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from ccq.bench.machine import cores
    from ccq.data.prepare import TokenizerFile, prepare_shards, read_tokenizer
    from ccq.data.sources import dataset_source, embedded_source, file_source

    if parsed.dataset is None and (parsed.config, parsed.split, parsed.revision) != (None, "train", None):
        raise ValueError("--config, --split and --revision are of a --dataset; leave them out")
    if parsed.files is not None:
        source = file_source(parsed.files, text_field=parsed.text_field)
    elif parsed.dataset is not None:
        source = dataset_source(
            parsed.dataset,
            config=parsed.config,
            split=parsed.split,
            revision=parsed.revision,
            text_field=parsed.text_field,
        )
    else:
        source = embedded_source()
    tokenizer: TokenizerFile | int
    if parsed.train_tokenizer is not None:
        tokenizer = parsed.train_tokenizer
    elif parsed.tokenizer.endswith(".json") or any(
        path.is_file() for path in (Path(parsed.tokenizer), Path(parsed.tokenizer, "tokenizer.json"))
    ):
        tokenizer = read_tokenizer(parsed.tokenizer)
    else:
        from ccq.models.auto_tokenizer import read_auto_tokenizer

        found = read_auto_tokenizer(parsed.tokenizer)
        tokenizer = TokenizerFile(found.data, parsed.tokenizer, found.eos)
    console = Console()
    folder = prepare_shards(
        parsed.out,
        source,
        tokenizer,
        held_out=parsed.held_out,
        tokens=parsed.tokens,
        eos=parsed.eos,
        bos=parsed.bos,
        shard_tokens=parsed.shard_tokens,
        workers=cores() if parsed.workers is None else parsed.workers,
        console=console,
    )
    _print_token_folder(folder, console)
    if parsed.held_out and not folder.held_out.documents:
        console.print("No document was held out: the text is short, and --held-out a small share of its documents.")
    return 0


def _data_inspect(parsed: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import track

    from ccq.data.shards import TokenFolder

    console = Console()
    folder = TokenFolder.open(parsed.folder)
    if parsed.verify:
        found = track(folder.verify(), "Reading", len(folder.files()), console=console)
        problems = [problem for problem in found if problem]
        for problem in problems:
            print(f"ccq: {problem}", file=sys.stderr)
        if problems:
            print(f"ccq: copy what is named again, or delete {folder.path} and prepare it again", file=sys.stderr)
            return 1
        console.print(f"All {len(folder.files())} checksums are right.")
    _print_token_folder(folder, console)
    return 0


def _print_token_folder(folder: TokenFolder, console: Console) -> None:
    from rich.table import Table

    index = folder.index
    parts = Table("part", "documents", "tokens", "shards", box=None)
    for part in (folder.train, folder.held_out):
        parts.add_row(part.name, f"{part.documents:,}", f"{part.tokens:,}", f"{len(part.shards):,}")
    vocabulary = f"{folder.vocabulary_size:,} tokens in the vocabulary, {index['dtype']}"
    console.print(f"{folder.path}: {vocabulary}", markup=False, soft_wrap=True)
    console.print(parts)
    special = [
        f"{index[name]['token']} ({index[name]['id']}) {where} every document"
        for name, where in (("bos", "before"), ("eos", "after"))
        if index[name] is not None
    ]
    left_out = index["left_out"]
    console.print(
        f"{'; '.join(special)}; left out: {left_out['empty']:,} documents without text, "
        f"{left_out['same_as_held_out']:,} that repeat a held-out one",
        markup=False,
        soft_wrap=True,
    )
    tokenizer = folder.tokenizer()
    for part in (folder.train, folder.held_out):
        if part.documents:
            text = tokenizer.decode(part.document(0)[:60].tolist(), skip_special_tokens=False)
            console.print(f"{part.name} begins: {text!r}", markup=False, soft_wrap=True)


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
        type=_positive,
        metavar="STEPS",
        help="save and end once so many steps of the run are done, as an interruption would",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print parameters, memory, steps and hours, and train nothing"
    )
    parser.set_defaults(run=_train)


def _train(parsed: argparse.Namespace) -> int:
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
    layer = subjects.add_parser(
        "layer",
        help="mixers with and without the read step, on a GPU",
        description="Forward at T and 2 T, forward + backward at T, of a mixer, of the same with the read step, and of "
        "flash-linear-attention's layer with the same weights: device time, eager time, memory, and their ratios.",
    )
    layer.add_argument("--backbones", nargs="+", metavar="NAME", help="default: gla gated-deltanet")
    layer.add_argument(
        "--rows", type=_positive, nargs="+", default=[1, 8], metavar="N", help="batch sizes; default 1 8"
    )
    for name, default in (("tokens", 4096), ("hidden", 2048), ("heads", 6), ("size", 256), ("value-size", 512)):
        layer.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=f"default {default}")
    layer.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16 or float32")
    layer.add_argument("--repeats", type=_positive, default=40, metavar="N", help="rounds of a timing; default 40")
    layer.add_argument("--limit", type=_positive, default=30, metavar="SECONDS", help="end a timing after; default 30")
    layer.add_argument("--compile", action="store_true", help="also behind torch.compile")
    layer.add_argument("--profile", action="store_true", help="also list the kernels of forward + backward")
    layer.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    layer.set_defaults(run=_bench_layer)
    model = subjects.add_parser(
        "model",
        help="training step, prefill and peak memory of whole models, on a GPU",
        description="A backbone, the same with the read step, and flash-linear-attention's model of the same sizes: "
        "training step (float32 weights, bfloat16 autocast, AdamW), prefill (bfloat16), peak memory, and their ratios.",
    )
    model.add_argument(
        "--arms", nargs="+", metavar="ARM", help="default: gla and gated-deltanet, without and with +ccq"
    )
    model.add_argument("--scale", default="1.3b", help="of the presets; default 1.3b")
    model.add_argument("--rows", type=_positive, default=8, metavar="N", help="default 8")
    model.add_argument("--tokens", type=_positive, default=4096, metavar="N", help="default 4096")
    model.add_argument("--repeats", type=_positive, default=20, metavar="N", help="rounds of a timing; default 20")
    model.add_argument("--limit", type=_positive, default=40, metavar="SECONDS", help="end a timing after; default 40")
    model.add_argument(
        "--sweep",
        metavar="tokens=N",
        help="instead: a training step of N tokens cut into rows of 1024 and more, also of transformer and mamba2",
    )
    model.add_argument("--first-step", action="store_true", help="also the first step of a fresh process, empty caches")
    model.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    model.set_defaults(run=_bench_model)
    decode = subjects.add_parser(
        "decode",
        help="one-token decoding of whole models",
        description="Decoding after a context, greedily: a backbone, the same with the read step, and, on a GPU, the "
        "same step replayed as a CUDA graph and flash-linear-attention's model of the same sizes. Tokens a second, "
        "milliseconds a step, the floor that the card's bandwidth sets, state, peak memory, and ratios. On a CPU, a "
        "tiny model by default, eager only.",
    )
    decode.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu")
    decode.add_argument(
        "--arms", nargs="+", metavar="ARM", help="default: gla and gated-deltanet, without and with +ccq"
    )
    decode.add_argument("--scale", help="of the presets; default 1.3b on a GPU, tiny on a CPU")
    decode.add_argument("--rows", type=_positive, default=8, metavar="N", help="sequences at a time; default 8")
    decode.add_argument(
        "--context", type=_positive, metavar="N", help="tokens read before; default 4096 on a GPU, 256 on a CPU"
    )
    decode.add_argument("--repeats", type=_positive, default=20, metavar="N", help="rounds of a timing; default 20")
    decode.add_argument("--limit", type=_positive, default=40, metavar="SECONDS", help="end a timing after; default 40")
    decode.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    decode.set_defaults(run=_bench_decode)
    tune = subjects.add_parser(
        "tune",
        help="measure configurations of flash-linear-attention's kernels for this card",
        description="Times the configurations of the kernels behind the write rules on this GPU and writes the fastest "
        "into a file, CARD.json, where the write rules look for it. The same command again goes on where it was.",
    )
    tune.add_argument("--out", type=Path, metavar="FOLDER", help="write there; default: the installed package")
    tune.add_argument(
        "--sizes", nargs="+", metavar="D/V", help="head sizes; default 256/512 64/64 64/128 128/128 128/256"
    )
    tune.add_argument("--rows", type=_positive, nargs="+", default=[1, 8], metavar="N", help="batch sizes; default 1 8")
    tune.add_argument(
        "--limit", type=_positive, default=1200, metavar="SECONDS", help="begin nothing after; default 1200"
    )
    tune.add_argument("--jobs", type=_positive, metavar="N", help="processes that compile; default: one a core")
    tune.set_defaults(run=_bench_tune)
    tables = subjects.add_parser(
        "tables",
        help="print docs/speed.md from measured figures",
        description="Prints the page docs/speed.md, made from the operator*.json, layer*.json, model*.json, "
        "decode*.json and answers*.json files of a folder.",
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


def _bench_layer(parsed: argparse.Namespace) -> int:
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


def _bench_model(parsed: argparse.Namespace) -> int:
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


def _bench_decode(parsed: argparse.Namespace) -> int:
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


def _bench_tune(parsed: argparse.Namespace) -> int:
    from ccq.bench.machine import cores
    from ccq.bench.tune import SIZES, tune

    tune(
        parsed.out,
        sizes=parsed.sizes or SIZES,
        rows=parsed.rows,
        limit=parsed.limit,
        jobs=parsed.jobs or cores(),
        say=functools.partial(print, flush=True),
    )
    return 0


def _bench_tables(parsed: argparse.Namespace) -> int:
    from ccq.bench.tables import speed_page

    print(speed_page(parsed.folder), end="")
    return 0


def _add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "models",
        help="list the named models with their sizes",
        description="Lists every preset with its parameters, the state it keeps of one sequence (in bfloat16, memories "
        "and statistics in float32; the transformer's at its training length) and the arithmetic of one token.",
    )
    parser.add_argument("--json", action="store_true", help="print exact figures as JSON")
    parser.set_defaults(run=_models)


def _models(parsed: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from rich.table import Table

    from ccq.models.counts import flops_per_token, parameter_count, state_bytes
    from ccq.models.presets import PRESETS, preset

    configurations = {name: preset(name) for name in PRESETS}
    figures: list[dict[str, Any]] = [
        {
            "name": name,
            "parameters": parameter_count(config),
            "state_bytes": state_bytes(config),
            "flops_per_token": flops_per_token(config),
        }
        for name, config in configurations.items()
    ]
    if parsed.json:
        print(json.dumps(figures, indent=1))
        return 0
    table = Table("name", "parameters", "state a sequence", "FLOPs a token", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in figures:
        table.add_row(
            row["name"],
            f"{row['parameters'] / 1e6:,.2f} M",
            f"{row['state_bytes'] / 2**20:,.2f} MiB",
            f"{row['flops_per_token'] / 1e6:,.1f} M",
        )
    Console().print(table)
    return 0


def _add_reads(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "reads",
        help="list the read steps",
        description="Lists every read step NAME of an arm BACKBONE+NAME with its formula, and the parameters and state "
        "of one layer with the paper's 6 heads of 256. docs/reads.md explains them.",
    )
    parser.add_argument("--json", action="store_true", help="print exact figures, sources and options as JSON")
    parser.set_defaults(run=_reads)


def _reads(parsed: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from rich.table import Table

    from ccq.nn.reads import describe_reads

    rows = describe_reads()
    if parsed.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table("name", "formula", "what it is", "parameters", "state", box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in rows:
        state = f"{row['state_bytes'] / 2**10:,.1f} KiB"
        table.add_row(row["name"], row["formula"], row["summary"], f"{row['parameters']:,}", state)
    Console().print(table)
    return 0


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text with a saved model",
        description="Prints what a model says after a prompt, token by token. A long text can be read once "
        "(--prompt-file FILE --save-state STATE --max-new-tokens 0) and asked many times (--load-state STATE "
        "--prompt ...).",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a model and its tokenizer")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a UTF-8 text")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="default 100; 0 reads only")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample; default: the most likely token")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling; default 0")
    parser.add_argument("--load-state", type=Path, metavar="STATE", help="go on behind the text that was read there")
    parser.add_argument("--save-state", type=Path, metavar="STATE", help="write the state after the prompt")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu")
    _add_read(parser)
    parser.set_defaults(run=_generate)


def _generate(parsed: argparse.Namespace) -> int:
    import torch

    from ccq.models.intervention import switch_read
    from ccq.models.modeling import load_model
    from ccq.models.text import TextStreamer, continue_text, load_tokenizer

    prompt = parsed.prompt if parsed.prompt_file is None else parsed.prompt_file.read_text(encoding="utf-8")
    model = load_model(parsed.model).to(parsed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokenizer = load_tokenizer(parsed.model)
    switch_read(model, str(parsed.model), parsed.read, parsed.gate_values)
    torch.manual_seed(parsed.seed)
    continue_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=parsed.max_new_tokens,
        temperature=parsed.temperature,
        load=parsed.load_state,
        save=parsed.save_state,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    return 0


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    _add_read(common)
    common.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="put the tokenizer's first token before every text; default: as the tokenizer does by itself",
    )
    common.add_argument("--seed", type=int, default=0, metavar="N", help="of samples that are drawn; default 0")
    extrapolation = suites.add_parser(
        "extrapolation",
        parents=[common],
        help="token perplexity in windows of growing length",
        description="Token perplexity in neighbouring windows, by length and by position, on the paper's six corpora, "
        "on texts of a folder, or on the text that every machine has (--tasks stdlib).",
    )
    _add_lengths(extrapolation, "4096 6144 ... 20480")
    extrapolation.add_argument("--batch-size", type=_positive, default=1, metavar="N", help="windows; default 1")
    extrapolation.add_argument(
        "--max-tokens", type=_positive, default=2**21, metavar="N", help="of a corpus and length; default 2097152"
    )
    extrapolation.add_argument("--limit", type=_positive, metavar="N", help="documents of a corpus; default all")
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
    needle.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="prompts; default 32")
    needle.add_argument("--limit", type=_positive, default=500, metavar="N", help="samples a cell; default 500")
    for name, text in (
        ("language", "the nine tasks of the paper's table 2, and the mean of seven"),
        ("longbench", "the 14 English tasks of the paper's table 4, prompts cut in the middle"),
    ):
        suite = suites.add_parser(name, parents=[common], help=text, description=f"Runs {text}, through lm-eval.")
        suite.add_argument(
            "--max-length", type=_positive, metavar="N", help="tokens of prompt and answer; default: the model's own"
        )
        suite.add_argument("--batch-size", type=_positive, default=8, metavar="N", help="prompts; default 8")
        suite.add_argument("--limit", type=_positive, metavar="N", help="samples a task; default all")
    parser.set_defaults(run=_eval)


def _add_read(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--read",
        metavar="CHANGE",
        help="change the read steps' correction: off, or some of scale=X, layers=0,3-5, heads=0, gate=mean, "
        "gate=shuffled, joined by commas; default on",
    )
    parser.add_argument(
        "--gate-values",
        type=Path,
        metavar="FILE",
        help="of `ccq gates`, for gate=mean and gate=shuffled; default: that in the model's folder",
    )


def _add_lengths(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--lengths", type=_positive, nargs="+", metavar="N", help=f"in tokens; default {default}")


def _eval(parsed: argparse.Namespace) -> int:
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


def _add_diagnose(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "diagnose",
        help="where a model's keys lie, and what the correction does to its queries",
        description="Runs a model over prompts that hide a code among everyday sentences, measures its keys, its "
        "queries and its correction, and writes diagnosis.json and diagnosis.html.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a model and its tokenizer, or a name of the hub: of this library, or of transformers with "
        "modules named k_proj",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the two files are written")
    parser.add_argument("--prompts", type=_positive, default=20, metavar="N", help="default 20")
    parser.add_argument(
        "--fillers", type=_positive, default=120, metavar="N", help="sentences around the needle; default 120"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="take them from these text files instead of the built-in ones"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts; default 0")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the model; default: bfloat16 on a GPU, float32 on a CPU",
    )
    _add_read(parser)
    parser.set_defaults(run=_diagnose)


def _diagnose(parsed: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from ccq.analysis.diagnosis import diagnose
    from ccq.analysis.prompts import sentences_of
    from ccq.bench.machine import environment
    from ccq.files import write_json_atomically
    from ccq.models.auto_model import read_auto_model
    from ccq.models.intervention import switch_read
    from ccq.report.diagnosis import headline, write_diagnosis

    console = Console()
    device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = parsed.dtype or ("bfloat16" if device == "cuda" else "float32")
    sentences = None if parsed.text is None else sentences_of(parsed.text)
    with console.status("reading the model") as status:
        model, tokenizer = read_auto_model(parsed.model, dtype=getattr(torch, dtype), device=device)
        switch_read(model, parsed.model, parsed.read, parsed.gate_values)
        results = diagnose(
            model,
            tokenizer,
            name=parsed.model,
            environment=environment(threads=torch.get_num_threads(), device=device),
            prompts=parsed.prompts,
            seed=parsed.seed,
            fillers=parsed.fillers,
            sentences=sentences,
            text=None if parsed.text is None else str(parsed.text),
            say=status.update,
        )
        parsed.out.mkdir(parents=True, exist_ok=True)
        write_json_atomically(parsed.out / "diagnosis.json", results)
        write_diagnosis(results, parsed.out / "diagnosis.html")
    console.print(headline(results))
    console.print(f"Report: {parsed.out / 'diagnosis.html'}")
    return 0


def _add_gates(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "gates",
        help="the gate's values on a text: their means, and a file for --read gate=mean and gate=shuffled",
        description="Runs a model over text, prints the mean of lambda of every layer and head, and writes lambda of "
        "every token to a file, from which --read gate=mean and --read gate=shuffled take what they put in the place "
        "of the gate.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model and its tokenizer, or a name of the hub")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: gate_values.safetensors in MODEL")
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="text files; default: the sources of Python's standard library"
    )
    parser.add_argument("--tokens", type=_positive, default=16_384, metavar="N", help="in all; default 16384")
    parser.add_argument("--length", type=_positive, default=1024, metavar="N", help="of a window; default 1024")
    parser.add_argument("--device", help="default: cuda if torch finds a GPU, else cpu")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument(
        "--json", action="store_true", help="print the means as JSON, as `ccq train --set model.gate=...` takes them"
    )
    parser.set_defaults(run=_gates)


def _gates(parsed: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from rich.table import Table

    from ccq.analysis.gate import collect_gate_values, text_windows
    from ccq.data.corpora import read_corpus
    from ccq.evals.harness import load
    from ccq.models.intervention import GATE_VALUES_FILE, save_gate_values

    if parsed.out is None and not Path(parsed.model).is_dir():
        raise ValueError(f"{parsed.model} is no folder to write the values to; give --out FILE")
    loaded = load(parsed.model, device=parsed.device, dtype=parsed.dtype)
    corpus = read_corpus(parsed.text)
    length = min(parsed.length, parsed.tokens)
    tokens = text_windows(corpus, loaded.tokenizer, windows=parsed.tokens // length, length=length)
    text = {"source": corpus.source, "sha256": corpus.sha256, "windows": len(tokens), "length": length}
    values = collect_gate_values(loaded.model, tokens, text=text)
    out = Path(parsed.model, GATE_VALUES_FILE) if parsed.out is None else parsed.out
    save_gate_values(values, out)
    means = values.means()
    if parsed.json:
        print(json.dumps(means))
        return 0
    console = Console()
    table = Table("mean of lambda", *(f"head {head}" for head in range(len(means[0]))), box=None)
    for layer, row in enumerate(means):
        table.add_row(f"layer {layer}", *(f"{mean:.4f}" for mean in row))
    console.print(table)
    console.print(f"{tokens.numel():,} tokens of {corpus.source}: {out} ({values.digest})", soft_wrap=True)
    return 0


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="put runs beside the paper's tables and figures",
        description="Reads results of `ccq eval`, `ccq compare` and `ccq bench layer`, `model` and `decode`, and run "
        "folders of `ccq train`, and writes the paper's tables and figures with their values beside the paper's own, "
        "paired differences, and quality against cost: report.html, report.md, CSV, PNG and SVG files.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a results file, or a folder")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the report is written")
    parser.set_defaults(run=_report)


def _report(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from ccq.report.paper_report import write_paper_report
    from ccq.report.runs import read_runs

    if parsed.out.exists() and not parsed.out.is_dir():
        raise ValueError(f"{parsed.out} is a file; --out takes the folder of the report, which is made if missing")
    console = Console()
    with console.status("reading"):
        runs = read_runs(parsed.runs)
        for finding in write_paper_report(runs, parsed.out):
            console.print(f"- {finding.text}", markup=False, highlight=False)
    console.print(f"Report: {parsed.out / 'report.html'}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
