"""torch.compile of a mixer as one graph: prefill with padding and its gradients, and one more token. Gated DeltaNet and
plain GLA are compiled as whole models, in tests/models.

The graph is run by the backend "aot_eager", which needs no C++ compiler and starts within seconds: what is tested is
that nothing breaks the graph and that tracing keeps every value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from torch import Tensor, nn

from ccq.nn import CurvatureConditionedQuery, GatedLinearAttention, Mamba2, SoftmaxAttention
from ccq.nn.mixers import map_state, state_tensors

HIDDEN = 12
MIXERS: dict[str, Callable[[], nn.Module]] = {
    "gla-hedgehog": lambda: GatedLinearAttention(HIDDEN, 2, 4, 6, feature_map="hedgehog"),
    "mamba2": lambda: Mamba2(HIDDEN, 4, 4, 6, read=CurvatureConditionedQuery(2, 4, keep_length=True), num_groups=2),
    "transformer": lambda: SoftmaxAttention(HIDDEN, 4, 4, 6, num_kv_heads=2),
}


# Raised by torch itself while it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", MIXERS)
def test_one_graph_gives_the_values_and_gradients_of_eager(name: str) -> None:
    torch._dynamo.reset()
    layer = MIXERS[name]()
    x = torch.randn(2, 5, HIDDEN)
    mask = torch.ones(2, 4)
    mask[0, :2] = 0
    upstream = torch.randn(2, 4, HIDDEN)
    results: list[dict[str, Tensor]] = []
    run: Any
    for run in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
        output, state = run(x[:, :4], mask=mask)
        gradients = torch.autograd.grad(output, list(layer.parameters()), upstream)
        named = {key: gradient for (key, _), gradient in zip(layer.named_parameters(), gradients, strict=True)}
        with torch.no_grad():
            token, state = run(x[:, 4:], state=map_state(state, Tensor.detach))
        results.append({"output": output, "token": token, **state_tensors(state), **named})
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        assert_close(key, value, results[1][key], 1e-5)
