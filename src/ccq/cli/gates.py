"""`ccq gates`: the gate's values on a text."""

from __future__ import annotations

import argparse
from pathlib import Path

from ccq.cli.arguments import Commands, add_gates, positive


def add_parser(commands: Commands) -> None:
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
    parser.add_argument("--tokens", type=positive, default=16_384, metavar="N", help="in all; default 16384")
    parser.add_argument("--length", type=positive, default=1024, metavar="N", help="of a window; default 1024")
    parser.add_argument("--device", help="default: cuda if torch finds a GPU, else cpu")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    add_gates(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the means as JSON, as `ccq train --set model.gate=...` takes them"
    )
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from rich.table import Table

    from ccq.analysis.gate import collect_on_corpus
    from ccq.data.corpora import read_corpus
    from ccq.evals.harness import load
    from ccq.models.intervention import gate_values_file, read_layers, save_gate_values

    if parsed.out is None and not Path(parsed.model).is_dir():
        raise ValueError(f"{parsed.model} is no folder to write the values to; give --out FILE")
    loaded = load(parsed.model, device=parsed.device, dtype=parsed.dtype, gates=parsed.gates)
    corpus = read_corpus(parsed.text)
    values = collect_on_corpus(loaded.model, loaded.tokenizer, corpus, tokens=parsed.tokens, length=parsed.length)
    out = gate_values_file(parsed.model, parsed.out)
    save_gate_values(values, out)
    if parsed.json:
        print(json.dumps(values.mean_gate(loaded.model)))
        return 0
    means = values.means()
    console = Console()
    table = Table("mean of lambda", *(f"head {head}" for head in range(len(means[0]))), box=None)
    for layer, row in zip(read_layers(loaded.model), means, strict=True):
        table.add_row(f"layer {layer}", *(f"{mean:.4f}" for mean in row))
    console.print(table)
    console.print(f"{len(values.layers[0]):,} tokens of {corpus.source}: {out} ({values.digest})", soft_wrap=True)
    return 0
