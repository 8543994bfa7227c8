"""Mamba2 against transformers' layer of this name, and its sizes and start against what is published."""

from __future__ import annotations

import math

import pytest
import torch
from tests.helpers import assert_close
from torch import nn
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from ccq.nn import CurvatureConditionedQuery, Mamba2

HIDDEN, HEADS, SIZE, VALUE = 24, 6, 8, 8


def peer(groups: int) -> tuple[Mamba2Mixer, Mamba2, Mamba2Config]:
    """Transformers' layer with random weights, and ours with the same."""
    config = Mamba2Config(
        hidden_size=HIDDEN,
        num_heads=HEADS,
        head_dim=VALUE,
        state_size=SIZE,
        n_groups=groups,
        expand=2,
        chunk_size=16,
        num_hidden_layers=1,
        layer_norm_epsilon=1e-5,
    )
    theirs = Mamba2Mixer(config, layer_idx=0).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name in ("D", "norm.weight"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    ours = Mamba2(HIDDEN, HEADS, SIZE, VALUE, num_groups=groups)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours, config


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_equals_transformers_in_output_and_gradients(groups: int) -> None:
    theirs, ours, _ = peer(groups)
    x = torch.randn(2, 41, HIDDEN)
    upstream = torch.randn_like(x)
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        output = layer(leaf)
        output = output[0] if isinstance(output, tuple) else output
        named = dict(layer.named_parameters())
        gradients = torch.autograd.grad(output, (leaf, *named.values()), upstream)
        results.append({"output": output, **dict(zip(("x", *named), gradients, strict=True))})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert_close(name, value, results[1][name], 1e-5)


@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_left_padding_and_cached_decode_equal_transformers(groups: int) -> None:
    theirs, ours, config = peer(groups)
    x = torch.randn(2, 24, HIDDEN)
    mask = torch.ones(2, 20)
    mask[1, :7] = 0
    cache = DynamicCache(config=config)  # By place below: the argument has had two names.
    expected = theirs(x[:, :20], cache, mask)
    output, state = ours(x[:, :20], mask=mask)
    real = mask.bool()
    assert_close("prefill", output[real], expected[real], 1e-5)
    for t in range(20, 24):
        expected = theirs(x[:, t : t + 1], cache)
        output, state = ours(x[:, t : t + 1], state=state)
        assert_close(f"token {t}", output, expected, 1e-5)
    # Theirs is [N, H, V, D].
    assert_close("memory", state.memory, cache.get_recurrent_state(0).mT, 1e-5)


def shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize(
    ("hidden", "layers", "millions"),
    [(1024, 65, (462, 495)), (2048, 48, (1306, 1372))],
)
def test_default_sizes_are_those_of_the_published_models(hidden: int, layers: int, millions: tuple[int, int]) -> None:
    """Parameters of every layer as in transformers, and of a model of 32,000 tokens as counted for arXiv:2606.01294."""
    with torch.device("meta"):
        layer = Mamba2(hidden)
        config = Mamba2Config(hidden_size=hidden, num_heads=2 * hidden // 64, head_dim=64, state_size=128, n_groups=1)
        assert shapes(layer) == shapes(Mamba2Mixer(config, 0))
    # Every layer has a norm in front and no feed-forward half; a last norm; embeddings, tied or not.
    inner = layers * (sum(parameter.numel() for parameter in layer.parameters()) + hidden) + hidden
    for embeddings, expected in zip((1, 2), millions, strict=True):
        assert math.isclose(inner + embeddings * 32000 * hidden, expected * 1e6, rel_tol=1e-3)


def test_decay_starts_in_the_range_asked_for() -> None:
    layer = Mamba2(8, 4000, 1, 1, min_a=0.5, max_a=1.5, dt_min=0.001, dt_max=0.02)
    a, dt = layer.A_log.detach().exp(), nn.functional.softplus(layer.dt_bias.detach())
    assert 0.5 * 0.999 <= a.min() <= a.max() <= 1.5 * 1.001
    assert math.isclose(a.mean(), 1, rel_tol=0.05)
    assert 0.001 * 0.999 <= dt.min() <= dt.max() <= 0.02 * 1.001
    assert math.isclose(dt.log().mean(), (math.log(0.001) + math.log(0.02)) / 2, rel_tol=0.02)
    assert all(parameter._no_weight_decay for parameter in (layer.A_log, layer.D, layer.dt_bias))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_groups": 4}, "num_groups must divide the 6 heads, got 4"),
        ({"num_heads": None, "value_head_dim": 7}, "value_head_dim must divide 2 \\* hidden_size = 48, got 7"),
        ({"min_a": 2.0, "max_a": 1.0}, "0 < min_a <= max_a"),
        ({"dt_min": 0.0}, "0 < dt_min <= dt_max"),
        ({"read": CurvatureConditionedQuery(6, SIZE)}, "made for 6 heads of 8, but the layer has 1 groups of 8"),
    ],
)
def test_what_cannot_work_is_named(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Mamba2(HIDDEN, **{"num_heads": HEADS, "head_dim": SIZE, "value_head_dim": VALUE, **options})
