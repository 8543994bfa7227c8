"""torch.compile of the whole model as one graph: forward and backward, and decoding with a cache.

The graph is run by the backend "aot_eager", which needs no C++ compiler and starts within seconds: what is tested is
that nothing breaks the graph and that tracing keeps every value.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers import assert_close
from tests.models.small import assert_same_cache, make, random_tokens
from torch._dynamo.testing import CompileCounterWithBackend

from ccq.models import CCQCache
from ccq.nn.mixers import state_tensors

# Raised by torch itself while it traces an autograd function.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq"])
def test_one_graph_gives_the_values_and_gradients_of_eager(arm: str) -> None:
    torch._dynamo.reset()
    model, tokens = make(arm, torch.float32, num_layers=1).train(), random_tokens(2, 9)
    mask = torch.ones(2, 9)
    mask[0, :4] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, model):
        output = run(tokens, attention_mask=mask, labels=labels, num_items_in_batch=11, use_cache=True)
        (layer,) = output.cache.layers
        loss = output.loss + sum(x.float().sum() for x in state_tensors(layer.state).values())
        results.append((output, torch.autograd.grad(loss, list(model.parameters()))))
    (output, gradients), (expected, expected_gradients) = results
    real = mask.bool()
    assert_close("logits", output.logits[real], expected.logits[real], 1e-6)
    assert_same_cache(output.cache, expected.cache, 1e-6)
    for (name, _), a, b in zip(model.named_parameters(), gradients, expected_gradients, strict=True):
        assert_close(name, a, b, 1e-5)


@pytest.mark.parametrize("arm", ["gated-deltanet+ccq", "mamba2"])
@torch.no_grad()
def test_one_graph_decodes_every_token(arm: str) -> None:
    torch._dynamo.reset()
    model, tokens = make(arm, torch.float32, num_layers=1), random_tokens(2, 9)
    cache = CCQCache(model.config, static=True)
    model(tokens[:, :4], cache=cache)
    eager = copy.deepcopy(cache)
    addresses = [x.data_ptr() for x in state_tensors(cache.layers[0].state).values()]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for token in tokens[:, 4:].split(1, 1):
        got = compiled(token, cache=cache).logits
        assert_close("logits", got, model(token, cache=eager).logits, 1e-6)
    assert_same_cache(cache, eager, 1e-6)
    assert [x.data_ptr() for x in state_tensors(cache.layers[0].state).values()] == addresses
    assert cache.get_seq_length() == 9
    assert counter.frame_count == 1, "a later token compiled again"
