"""Tokenizers by name or folder, through transformers' AutoTokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase


class AutoTokenizerFile(NamedTuple):
    """What the `tokenizers` library needs of a tokenizer of transformers."""

    data: bytes
    """Its JSON."""
    eos: str | None
    """The token that ends a text."""


def load_auto_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of transformers in a folder or on the Hugging Face hub.

    Raises:
        OSError, ValueError: as transformers says; or ValueError, its files are missing.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except ValueError as error:
        if Path(name).is_dir() and not Path(name, "tokenizer.json").is_file():
            raise ValueError(f"the folder holds no tokenizer.json, and transformers finds no other: {error}") from error
        raise
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()):
        # What transformers makes of the name of a class of tokenizers alone.
        files = ", ".join(sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()}))
        raise ValueError(f"its tokenizer knows special tokens only, since its files ({files}) are missing or empty.")
    return tokenizer


def read_auto_tokenizer(name: str) -> AutoTokenizerFile:
    """The tokenizer of a model on the Hugging Face hub, or of a folder in any form that transformers converts.

    Raises:
        ValueError: there is no such tokenizer, the hub cannot be reached, or `tokenizers` has no form of it.
    """
    try:
        tokenizer = load_auto_tokenizer(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"tokenizer {name!r}: {reason} Give a tokenizer.json, a folder, or a name of the hub"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer {name!r} is written in Python only; give one that has a tokenizer.json")
    return AutoTokenizerFile(backend.to_str().encode(), tokenizer.eos_token)
