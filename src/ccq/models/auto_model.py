"""Causal language models by name or folder, of this library or any of transformers', each with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ccq.models.attach import are_gates, attach
from ccq.models.auto_tokenizer import load_auto_tokenizer


def read_auto_model(
    name: str, *, dtype: torch.dtype, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode and its tokenizer, from a folder or the Hugging Face hub. Where gates of `ccq.attach` were
    saved with its weights, the read step is attached with them, in their own dtype.

    Raises:
        ValueError: there is no such model or tokenizer, the hub cannot be reached, or the weights or gates do not fit.
    """
    try:
        tokenizer = load_auto_tokenizer(name)
        model, found = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model {name!r}: {reason} Give a folder with a model and its tokenizer, or a name of the hub"
        ) from error
    if are_gates(found["unexpected_keys"]):
        # transformers' classes know nothing of read steps: they have left the gates behind, and said so.
        config_file = cached_file(name, "config.json", local_files_only=True)
        assert config_file is not None
        try:
            attach(model, gates=Path(config_file).parent)
        except (ImportError, TypeError, ValueError) as error:
            raise ValueError(f"model {name!r} has the gates of an attached read step, but {error}") from error
    return model.to(device).eval(), tokenizer
