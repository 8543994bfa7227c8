"""The mixers against flash-linear-attention's layers: its weights load by name, and give its output and its gradients.

The fixtures are written by scripts/make_layer_fixtures.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers import assert_close
from torch import Tensor, nn

from ccq.nn import GatedDeltaNet, GatedLinearAttention, HedgehogFeatureMap, Mamba2

FIXTURES = Path(__file__).parent / "fixtures"
LAYERS = {
    "gla": lambda: GatedLinearAttention(32, 2, 8, 16),
    "gla_recurrent": lambda: GatedLinearAttention(32, 2, 8, 16),
    "gla_convolution": lambda: GatedLinearAttention(32, 2, 8, 16, short_convolution=4),
    "gated_deltanet": lambda: GatedDeltaNet(32, 2, 8, 16),
    "mamba2": lambda: Mamba2(32, head_dim=8, value_head_dim=16),
}


def assert_equals_stored(layer: nn.Module, stored: dict[str, Tensor]) -> None:
    """The weights load by name; output and all gradients are those of the file."""
    weights = {key.removeprefix("weights."): x for key, x in stored.items() if key.startswith("weights.")}
    layer.load_state_dict(weights, strict=True)
    x = stored["input"].requires_grad_()
    output = layer(x)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(stored["output_gradient"])
    assert_close("output", output, stored["output"], 2e-5)
    assert_close("input gradient", x.grad, stored["input_gradient"], 2e-5)
    for key, parameter in layer.named_parameters():
        assert_close(key, parameter.grad, stored[f"gradients.{key}"], 2e-5)
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("name", LAYERS)
def test_same_weights_same_output_same_gradients(name: str) -> None:
    assert_equals_stored(LAYERS[name](), load_file(FIXTURES / f"{name}.safetensors"))


def test_hedgehog_with_twice_as_many_features_as_channels() -> None:
    """There the map keeps its weights in a linear layer of its own."""
    stored = load_file(FIXTURES / "hedgehog.safetensors")
    assert_equals_stored(HedgehogFeatureMap(32, 64), {key.replace("layer.", ""): x for key, x in stored.items()})
