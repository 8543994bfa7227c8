"""torch.compile of the whole model, forward and backward, as one graph.

The graph is run by the backend "aot_eager", which needs no C++ compiler and starts within seconds: what is tested is
that nothing breaks the graph and that tracing keeps every value.
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close

from ccq.models import CausalLanguageModel, preset


# Raised by torch itself while it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq"])
def test_one_graph_gives_the_values_and_gradients_of_eager(arm: str) -> None:
    torch._dynamo.reset()
    sizes = {"num_layers": 1, "hidden_size": 12, "head_dim": 4, "value_head_dim": 6, "intermediate_size": 8}
    model = CausalLanguageModel(preset("tiny", arm, vocab_size=11, initializer_range=0.3, **sizes))
    tokens = torch.randint(11, (2, 9))
    mask = torch.ones(2, 9)
    mask[0, :4] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, model):
        output = run(tokens, mask=mask)
        loss = output.logits.square().sum() + output.state.layers[0].memory.sum()
        results.append((output, torch.autograd.grad(loss, list(model.parameters()))))
    (output, gradients), (expected, expected_gradients) = results
    assert_close("logits", output.logits, expected.logits, 1e-6)
    assert_close("second moment", *(o.state.layers[0].statistics.second_moment for o in (output, expected)), 1e-6)
    for (name, _), a, b in zip(model.named_parameters(), gradients, expected_gradients, strict=True):
        assert_close(name, a, b, 1e-5)
