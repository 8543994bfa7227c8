"""torch.compile of the whole model as one graph: forward and backward, and decoding with a cache.

The graph is run by the backend "aot_eager", which needs no C++ compiler and starts within seconds: what is tested is
that nothing breaks the graph and that tracing keeps every value.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from tests.helpers import assert_close
from tests.models.small import assert_same_cache, make, random_tokens
from torch._dynamo.backends.common import aot_autograd
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


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet", "mamba2+ccq", "transformer"])
def test_a_block_without_a_cache_goes_back_from_its_output_alone(arm: str) -> None:
    """The graph of the backward pass takes the gradient of everything that the block puts out and that has one."""
    torch._dynamo.reset()
    block, x = make(arm, torch.float32).model.layers[0], torch.randn(2, 9, 12, requires_grad=True)
    gradients: list[str] = []

    def backward(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        gradients.extend(name for name in names if name.startswith("tangents"))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        block.forward,
        fullgraph=True,
        backend=aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward),
    )
    output, state = compiled(x, None, None, None, False)
    output.sum().backward()
    assert state is None and gradients == ["tangents_1"]
    got, x.grad = x.grad, None
    block(x, None, None, None, False)[0].sum().backward()
    assert_close("gradient", got, x.grad, 1e-6)


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
