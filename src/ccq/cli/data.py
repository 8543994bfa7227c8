"""`ccq data`: turn text into token shards, and look at them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ccq.cli.arguments import Commands, positive

if TYPE_CHECKING:
    from rich.console import Console

    from ccq.data.shards import TokenFolder


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("data", help="turn text into token shards for training, and look at them")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_prepare(actions)
    _add_inspect(actions)


def _add_prepare(actions: Commands) -> None:
    parser = actions.add_parser(
        "prepare",
        help="tokenise text into shards",
        description="Tokenises text into shards that training maps into memory. The same command again goes on after "
        "an interruption at any moment, with the same result.",
    )
    source = parser.add_argument_group("text, one of").add_mutually_exclusive_group(required=True)
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
    tokenizer = parser.add_argument_group("tokenizer, one of").add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="NAME", help="a tokenizer.json, a folder, or a model of the hub")
    tokenizer.add_argument("--train-tokenizer", type=positive, metavar="N", help="train a byte-level BPE of N tokens")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the shards are written")
    parser.add_argument("--config", metavar="NAME", help="configuration of the data set, such as sample-100BT")
    parser.add_argument("--split", default="train", metavar="NAME", help="split of the data set; default train")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the data set; default its newest")
    parser.add_argument("--text-field", metavar="NAME", help="field that holds the text of a row; default text")
    parser.add_argument(
        "--held-out",
        type=_number_or_share,
        default=0.01,
        metavar="N|SHARE",
        help="documents kept out of training: so many of the first, or a share below 1; default 0.01",
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help="stop when the training part has so many tokens")
    parser.add_argument("--eos", metavar="TOKEN", help="token put after each document; default the tokenizer's own")
    parser.add_argument("--bos", metavar="TOKEN", help="token put before each document; default none")
    parser.add_argument(
        "--shard-tokens", type=positive, default=100_000_000, metavar="N", help="tokens in a shard; default 100000000"
    )
    parser.add_argument("--workers", type=positive, metavar="N", help="processes; default one a processor core")
    parser.set_defaults(run=_prepare)


def _number_or_share(text: str) -> int | float:
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a number of documents or a share such as 0.01 is needed, got {text!r}"
        ) from None


def _prepare(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from ccq.bench.machine import cores
    from ccq.data.prepare import find_tokenizer, prepare_shards
    from ccq.data.sources import choose_source

    source = choose_source(
        files=parsed.files,
        dataset=parsed.dataset,
        config=parsed.config,
        split=parsed.split,
        revision=parsed.revision,
        text_field=parsed.text_field,
    )
    console = Console()
    folder = prepare_shards(
        parsed.out,
        source,
        parsed.train_tokenizer or find_tokenizer(parsed.tokenizer, _read_auto_tokenizer),
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


def _read_auto_tokenizer(name: str) -> tuple[bytes, str | None]:
    # Here, as no other tokenizer should wait for transformers.
    from ccq.models.auto_tokenizer import read_auto_tokenizer

    return read_auto_tokenizer(name)


def _add_inspect(actions: Commands) -> None:
    parser = actions.add_parser("inspect", help="counts, settings and sample text of prepared shards")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--verify", action="store_true", help="also read every file and compare its checksum")
    parser.set_defaults(run=_inspect)


def _inspect(parsed: argparse.Namespace) -> int:
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
    for name, text in folder.beginnings().items():
        console.print(f"{name} begins: {text!r}", markup=False, soft_wrap=True)
