"""Text in, text out: the tokenizer beside a model's weights, and a prompt continued, from a saved state or into one."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import tokenizers
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, TextStreamer
from transformers.generation.streamers import BaseStreamer

from ccq.models.cache import CACHE_NAME, CCQCache, load_state, save_state
from ccq.models.modeling import CCQForCausalLM, write_whole

__all__ = ["TextStreamer", "continue_text", "load_tokenizer", "save_tokenizer"]


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: str | os.PathLike[str], *, end: str | None = None) -> None:
    """Write a tokenizer into a model's folder, where transformers' AutoTokenizer finds it; each file whole or not at
    all. `end` is the token at which a text ends.
    """
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, padding_side="left")
    write_whole(folder, fast.save_pretrained)


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder."""
    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise FileNotFoundError(
            f"{folder} holds no tokenizer (tokenizer.json): save the one the model was trained with there, with "
            "save_tokenizer or tokenizer.save_pretrained"
        )
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def continue_text(
    model: CCQForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    load: str | os.PathLike[str] | None = None,
    save: str | os.PathLike[str] | None = None,
    streamer: BaseStreamer | None = None,
) -> str:
    """What the model says after `prompt`.

    Args:
        max_new_tokens: the most tokens of the answer; it ends earlier at the token that ends a text. 0 reads only.
        temperature: of the sampling; None takes the most likely token.
        load: a file of `save_state`, in whose text the prompt goes on: a document is read once and asked many times.
        save: write the state after the prompt, before the answer, to this file.
        streamer: is given every token as it comes.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a finite number above 0, got {temperature}; leave it out for greedy")
    cache = CCQCache(model.config) if load is None else load_state(load, model)
    # A text that goes on has had its first token.
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=load is None).input_ids.to(model.device)
    if tokens.shape[1] == 0:
        raise ValueError("the prompt is empty; give the model at least one token to read")
    largest = int(tokens.max())
    if largest >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {largest}, but the model knows 0 ... {model.config.vocab_size - 1}: it is not "
            "the tokenizer that the model was trained with"
        )
    if tokens.shape[1] > 1:
        model(tokens[:, :-1], cache=cache, logits_to_keep=1)
    if save is not None:
        after = copy.deepcopy(cache)
        model(tokens[:, -1:], cache=after)
        save_state(after, save, model)
    if max_new_tokens == 0:
        return ""
    end = model.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end
    answer = model.generate(
        tokens[:, -1:],
        attention_mask=tokens.new_ones(1, cache.get_seq_length() + 1),
        max_new_tokens=max_new_tokens,
        do_sample=temperature is not None,
        temperature=temperature,
        eos_token_id=end,
        pad_token_id=end[0] if isinstance(end, list) else end,
        streamer=streamer,
        **{CACHE_NAME: cache},
    )
    return tokenizer.decode(answer[0, 1:], skip_special_tokens=True)
