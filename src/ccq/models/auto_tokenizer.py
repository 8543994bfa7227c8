"""Tokenizers by name or folder, through transformers' AutoTokenizer."""

from __future__ import annotations

from typing import NamedTuple

from transformers import AutoTokenizer


class AutoTokenizerFile(NamedTuple):
    """What the `tokenizers` library needs of a tokenizer of transformers."""

    data: bytes
    """Its JSON."""
    eos: str | None
    """The token that ends a text."""


def read_auto_tokenizer(name: str) -> AutoTokenizerFile:
    """The tokenizer of a model on the Hugging Face hub, or of a folder in any form that transformers converts.

    Raises:
        ValueError: there is no such tokenizer, the hub cannot be reached, or `tokenizers` has no form of it.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"tokenizer {name!r}: {reason} Give a tokenizer.json, a folder, or a name of the hub"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer {name!r} is written in Python only; give one that has a tokenizer.json")
    return AutoTokenizerFile(backend.to_str().encode(), tokenizer.eos_token)
