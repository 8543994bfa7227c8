"""A small tokenizer of transformers for needle prompts."""

from __future__ import annotations

import functools
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from ccq.analysis.prompts import SENTENCES, needle_prompts
from ccq.data.tokenizer import train_byte_level_bpe


@functools.cache
def prompt_tokenizer(start: str | None = None) -> Any:
    """Byte-level BPE, learned from the prompts themselves; `start` is put before every text."""
    bpe = train_byte_level_bpe([*SENTENCES, *(p.text for p in needle_prompts(5, seed=9, fillers=2))], 700)
    if start is not None:
        bpe.add_special_tokens([start])
        bpe.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, bpe.token_to_id(start))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe)
