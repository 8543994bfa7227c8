"""`ccq diagnose`: where a model's keys lie, and what the correction does to its queries."""

from __future__ import annotations

import argparse
from pathlib import Path

from ccq.cli.arguments import Commands, add_gates, add_read, positive, seed


def add_parser(commands: Commands) -> None:
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
    parser.add_argument("--prompts", type=positive, default=20, metavar="N", help="default 20")
    parser.add_argument(
        "--fillers", type=positive, default=120, metavar="N", help="sentences around the needle; default 120"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="take them from these text files instead of the built-in ones"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the prompts; default 0")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the model; default: bfloat16 on a GPU, float32 on a CPU",
    )
    add_gates(parser)
    add_read(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
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
        model, tokenizer = read_auto_model(parsed.model, dtype=getattr(torch, dtype), device=device, gates=parsed.gates)
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
