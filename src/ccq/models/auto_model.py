"""Causal language models by name or folder, of this library or any of transformers', each with its tokenizer."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def read_auto_model(
    name: str, *, dtype: torch.dtype, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode and its tokenizer, from a folder or the Hugging Face hub.

    Raises:
        ValueError: there is no such model or tokenizer, the hub cannot be reached, or the weights do not fit.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model {name!r}: {reason} Give a folder with a model and its tokenizer, or a name of the hub"
        ) from error
    return model.to(device).eval(), tokenizer
