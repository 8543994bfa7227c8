"""`ccq generate`: continue a text with a saved model."""

from __future__ import annotations

import argparse
from pathlib import Path

from ccq.cli.arguments import Commands, add_gates, add_read, seed


def add_parser(commands: Commands) -> None:
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
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the sampling; default 0")
    parser.add_argument("--load-state", type=Path, metavar="STATE", help="go on behind the text that was read there")
    parser.add_argument("--save-state", type=Path, metavar="STATE", help="write the state after the prompt")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU, else cpu")
    add_gates(parser)
    add_read(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    import torch

    from ccq.models.auto_model import attach_stored, check_device
    from ccq.models.intervention import switch_read
    from ccq.models.modeling import load_model
    from ccq.models.text import TextStreamer, continue_text, load_tokenizer

    device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    prompt = parsed.prompt if parsed.prompt_file is None else parsed.prompt_file.read_text(encoding="utf-8")
    model = load_model(parsed.model)
    attach_stored(model, str(parsed.model), parsed.model, parsed.gates)
    model.to(device)
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
