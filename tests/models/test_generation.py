"""transformers' generate with every arm: against reading the whole text again for every token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.models.small import CASES, greedy, make, random_tokens
from torch import Tensor

from ccq.models import ARMS, CCQCache
from ccq.models.cache import CACHE_NAME

LENGTHS = [1, 7, 4, 2]


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(prompt.shape[1] for prompt in prompts)
    tokens, mask = random_tokens(len(prompts), longest), torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - prompt.shape[1] :], mask[row, longest - prompt.shape[1] :] = prompt[0], 1
    return tokens, mask


@pytest.mark.parametrize(("arm", "read"), CASES)
def test_a_left_padded_batch_equals_its_rows_alone_token_for_token(arm: str, read: str) -> None:
    model = make(arm, torch.float32, read)
    prompts = [random_tokens(1, length) for length in LENGTHS]
    tokens, mask = left_padded(prompts)
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=9)[:, 7:]
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row : row + 1], greedy(model, prompt, 9))
        alone = model.generate(tokens[row : row + 1], attention_mask=mask[row : row + 1], max_new_tokens=9)[:, 7:]
        assert torch.equal(alone, together[row : row + 1])


def test_prompts_padded_on_the_right_are_refused() -> None:
    model = make("gla+ccq", torch.float32)
    tokens, mask = left_padded([random_tokens(1, length) for length in LENGTHS])
    with pytest.raises(ValueError, match=r"must end with a real token in every row: pad prompts on the left"):
        model.generate(tokens.flip(1), attention_mask=mask.flip(1), max_new_tokens=1)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "do_sample": False, "length_penalty": 0.5},
        {"do_sample": True, "temperature": 0.7, "top_k": 5},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "repetition_penalty": 1.3, "prefill_chunk_size": 2},
    ],
    ids=["beams", "sampling", "several", "chunks"],
)
def test_search_and_sampling_with_a_cache_equal_those_without(arm: str, how: dict[str, Any]) -> None:
    model = make(arm)
    tokens, mask = left_padded([random_tokens(1, length) for length in LENGTHS])
    results = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        options = {name: value for name, value in how.items() if use_cache or name != "prefill_chunk_size"}
        results.append(
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=6, use_cache=use_cache, eos_token_id=3, **options
            )
        )
    assert torch.equal(*results)


@pytest.mark.parametrize("arm", ["gla+ccq", "mamba2+ccq", "transformer"])
@pytest.mark.parametrize("form", ["whole text", "new tokens with a wide mask"])
def test_a_given_cache_is_gone_on_with(arm: str, form: str) -> None:
    model = make(arm, torch.float32)
    text, read = random_tokens(1, 9), 4
    expected = greedy(model, text, 5)
    cache = CCQCache(model.config)
    with torch.no_grad():
        model(text[:, :read], cache=cache)
    kept = copy.deepcopy(cache)
    if form == "whole text":
        got = model.generate(text, max_new_tokens=5, **{CACHE_NAME: cache})[:, 9:]
    else:
        got = model.generate(text[:, read:], attention_mask=torch.ones(1, 9), max_new_tokens=5, **{CACHE_NAME: cache})
        got = got[:, 9 - read :]
    assert torch.equal(got, expected)
    assert cache.get_seq_length() == 9 + 4, "the last token is not read"
    with pytest.raises(ValueError, match="has read 4 positions and input_ids has 3: give the whole text"):
        model.generate(text[:, :3], max_new_tokens=1, **{CACHE_NAME: kept})


@pytest.mark.parametrize("arm", ARMS)
def test_embeddings_as_a_prompt(arm: str) -> None:
    model, tokens = make(arm, torch.float32), random_tokens(2, 5)
    embedded = model.model.embeddings(tokens).detach()
    got = model.generate(inputs_embeds=embedded, max_new_tokens=4)
    assert torch.equal(got, torch.cat([greedy(model, row.unsqueeze(0), 4) for row in tokens]))


def test_what_needs_to_take_tokens_back_is_refused() -> None:
    model = make("gla+ccq", torch.float32)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(random_tokens(1, 3), max_new_tokens=2, assistant_model=make("gla", torch.float32))


def test_cache_implementations() -> None:
    model, tokens = make("gla+ccq", torch.float32), random_tokens(1, 3)
    output = model.generate(tokens, max_new_tokens=4, cache_implementation="static", return_dict_in_generate=True)
    assert torch.equal(output.sequences[:, 3:], greedy(model, tokens, 4))
    assert isinstance(output[CACHE_NAME], CCQCache) and output[CACHE_NAME].is_compileable
    output = model.generate(tokens, max_new_tokens=1, return_dict_in_generate=True)
    assert not output[CACHE_NAME].is_compileable, "a GPU would compile without being asked to"
    with pytest.raises(ValueError, match='must be "dynamic" or "static" for this model, got \'quantized\''):
        model.generate(tokens, max_new_tokens=1, cache_implementation="quantized")
    with pytest.raises(ValueError, match='"transformer" grows with every token'):
        make("transformer").generate(tokens, max_new_tokens=1, cache_implementation="static")
