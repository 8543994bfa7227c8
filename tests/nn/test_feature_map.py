"""The Hedgehog feature map; flash-linear-attention's form of it is compared with in test_layer_parity.py."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from torch import nn

from ccq.nn import CurvatureConditionedQuery, GatedLinearAttention, HedgehogFeatureMap


@pytest.mark.parametrize(("size", "features"), [(6, 6), (6, 12), (6, 4), (6, 2)])
def test_features_are_exponentials_of_both_signs_over_their_sum(size: int, features: int) -> None:
    layer = HedgehogFeatureMap(size, features).double()
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    x = torch.randn(2, 3, 4, size).double()
    y = torch.einsum("btcd,fd->btcf", x, layer.weight) + layer.bias
    grown = torch.cat((torch.exp(2 * y), torch.exp(-2 * y)), -1)
    assert_close("features", layer(x), grown / grown.sum(-1, keepdim=True), 1e-13)


def test_large_inputs_stay_finite() -> None:
    """One feature takes it all; the exponentials themselves would overflow."""
    layer = HedgehogFeatureMap(2, 4)
    x = torch.tensor([[900.0, 0.0], [0.0, -900.0]], requires_grad=True)
    features = layer(x)
    assert features.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    features.square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_starts_at_the_identity_folded_where_there_are_fewer_rows() -> None:
    x = torch.randn(5, 4).double()
    wide, same, narrow = (HedgehogFeatureMap(4, features).double() for features in (8, 4, 2))
    folded = {
        wide: x,
        same: (x[:, :2] + x[:, 2:]) / 2**0.5,
        narrow: x.sum(1, keepdim=True) / 2,
    }
    for layer, y in folded.items():
        assert_close("features", layer(x), torch.cat((2 * y, -2 * y), -1).softmax(-1), 1e-7)


def test_half_precision_only_rounds_input_product_and_result() -> None:
    layer = HedgehogFeatureMap(8, 8)
    x = torch.randn(3, 8).bfloat16()
    half = HedgehogFeatureMap(8, 8).bfloat16()
    features = half(x)
    assert features.dtype == torch.bfloat16
    assert_close("features", features, layer.double()(x.double()), 0.01)
    with torch.autocast("cpu", torch.bfloat16):
        assert half(x).dtype == torch.bfloat16


def test_a_layer_with_it_has_the_other_weights_of_one_without() -> None:
    """The map draws no random numbers, and has 2 (D / 2 * D + D / 2) parameters of its own."""
    layers = []
    for feature_map in (None, "hedgehog"):
        torch.manual_seed(3)
        layers.append(GatedLinearAttention(12, 2, 6, 8, feature_map=feature_map))
    plain, mapped = (layer.state_dict() for layer in layers)
    assert all(torch.equal(mapped[name], x) for name, x in plain.items())
    assert sum(x.numel() for name, x in mapped.items() if name not in plain) == 2 * (3 * 6 + 3)


@torch.no_grad()
def test_the_read_step_sees_the_features() -> None:
    """Its statistics are those of the features that are written, at the length of 1."""
    layer = GatedLinearAttention(12, 2, 6, 8, read=CurvatureConditionedQuery(2, 6), feature_map="hedgehog").double()
    nn.init.normal_(layer.feature_map_k.weight)
    x = torch.randn(1, 9, 12).double()
    keys = layer.feature_map_k((x @ layer.k_proj.weight.T).unflatten(-1, (2, 6)))
    keys = keys / keys.norm(dim=-1, keepdim=True)
    _, state = layer(x)
    # The unit vectors of the read step are a little shorter, for its epsilon of 1e-6.
    assert_close("total", state.statistics.total, keys.sum(1), 1e-4)


@torch.no_grad()
def test_the_norm_sees_the_first_token() -> None:
    """What the first token reads must not drown in the epsilon of the norm: its output then would not be of size 1."""
    layer = GatedLinearAttention(64, 1, 256, 512, feature_map="hedgehog")
    for module in (layer.q_proj, layer.k_proj, layer.v_proj):
        nn.init.normal_(module.weight, std=0.1)
    x = torch.randn(1, 1, 64)
    normed = torch.zeros(0)

    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal normed
        normed = inputs[0] / (inputs[0].square().mean(-1, keepdim=True) + module.eps).sqrt()

    layer.g_norm_swish_gate.register_forward_hook(keep)
    layer(x)
    assert normed.square().mean().sqrt() > 0.99


@pytest.mark.parametrize(("size", "features"), [(6, 5), (6, 0), (6, 8)])
def test_sizes_that_do_not_fit_are_named(size: int, features: int) -> None:
    with pytest.raises(ValueError, match=f"got {features} features of {size} channels"):
        HedgehogFeatureMap(size, features)


def test_an_unknown_map_is_named() -> None:
    with pytest.raises(ValueError, match="feature_map must be one of None, 'hedgehog'; got 'elu'"):
        GatedLinearAttention(12, 2, 6, 8, feature_map="elu")
