"""Whole models on a GPU: decoding that is compiled and replayed as a CUDA graph, with states that stay in place."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers import assert_close
from tests.models.small import assert_same_cache, random_tokens

from ccq.models import CCQCache, CCQForCausalLM, preset
from ccq.nn.mixers import state_tensors

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch.compile's own
]
ARMS = ["gla+ccq", "gated-deltanet+ccq", "mamba2+ccq"]


def model_of(arm: str) -> CCQForCausalLM:
    return CCQForCausalLM(preset(f"{arm}-tiny", vocab_size=23, initializer_range=0.3)).eval().cuda()


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_a_cuda_graph_decodes_as_eager_does(arm: str) -> None:
    torch._dynamo.reset()
    torch.utils.deterministic.fill_uninitialized_memory = False
    model, tokens = model_of(arm), random_tokens(2, 12).cuda()
    cache = CCQCache(model.config, static=True)
    model(tokens[:, :4], cache=cache)
    eager = copy.deepcopy(cache)
    addresses = [x.data_ptr() for layer in cache.layers for x in state_tensors(layer.state).values()]
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for token in tokens[:, 4:].split(1, 1):
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(token.clone(), cache=cache).logits.clone()
        assert_close("logits", got, model(token, cache=eager).logits, 1e-4)
    assert_same_cache(cache, eager, 1e-4)
    assert [x.data_ptr() for layer in cache.layers for x in state_tensors(layer.state).values()] == addresses
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("arm", ARMS)
def test_compiled_generation_equals_eager_generation(arm: str) -> None:
    torch._dynamo.reset()
    torch.utils.deterministic.fill_uninitialized_memory = False
    model, tokens = model_of(arm), random_tokens(3, 6).cuda()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False)
    got = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, cache_implementation="static")
    assert torch.equal(got, expected)
