"""Softmax attention against transformers' Llama layer. The loop over tokens, and padding, packing and cuts, are in
test_mixers.py."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from ccq.nn import AttentionState, CurvatureConditionedQuery, MixerState, SoftmaxAttention

HIDDEN, HEADS, SIZE = 24, 4, 6


class Peer:
    """Transformers' layer with random weights, with positions and mask made as its model makes them."""

    def __init__(self, num_kv_heads: int, rope_base: float) -> None:
        config = LlamaConfig(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_key_value_heads=num_kv_heads,
            head_dim=SIZE,
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": rope_base},
            attn_implementation="eager",
        )
        self.layer = LlamaAttention(config, 0)
        self.rotary = LlamaRotaryEmbedding(config)
        self.ours = SoftmaxAttention(HIDDEN, HEADS, SIZE, SIZE, num_kv_heads=num_kv_heads, rope_base=rope_base)
        self.ours.load_state_dict(self.layer.state_dict(), strict=True)

    def __call__(self, x: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """x [B, T, hidden] behind whatever the cache holds, mask [B, past + T]."""
        tokens = x.shape[1]
        position = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens:]
        causal = torch.ones(tokens, mask.shape[1]).tril(mask.shape[1] - tokens).bool()
        blocked = ~(causal & mask.bool().unsqueeze(1)).unsqueeze(1)
        additive = torch.zeros(blocked.shape).masked_fill(blocked, torch.finfo(torch.float32).min)
        # By place: the last argument has had two names.
        return self.layer(x, self.rotary(x, position), additive, cache)[0]


@pytest.mark.parametrize("rope_base", [10000.0, 500.0])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_equals_llama_in_output_and_gradients(num_kv_heads: int, rope_base: float) -> None:
    peer = Peer(num_kv_heads, rope_base)
    x = torch.randn(2, 70, HIDDEN)
    upstream = torch.randn_like(x)
    results = []
    for layer, run in ((peer.ours, lambda y: peer.ours(y)[0]), (peer.layer, lambda y: peer(y, torch.ones(2, 70)))):
        leaf = x.clone().requires_grad_()
        output = run(leaf)
        named = dict(layer.named_parameters())
        gradients = torch.autograd.grad(output, (leaf, *named.values()), upstream)
        results.append({"output": output, **dict(zip(("x", *named), gradients, strict=True))})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert_close(name, value, results[1][name], 1e-5)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@torch.no_grad()
def test_left_padding_and_cached_decode_equal_llama(num_kv_heads: int) -> None:
    peer = Peer(num_kv_heads, 10000.0)
    x = torch.randn(3, 16, HIDDEN)
    mask = torch.ones(3, 16)
    mask[1, :7] = 0
    mask[2, :11] = 0
    cache = DynamicCache()
    expected = peer(x[:, :12], mask[:, :12], cache)
    output, state = peer.ours(x[:, :12], mask=mask[:, :12])
    real = mask[:, :12].bool()
    assert_close("prefill", output[real], expected[real], 1e-5)
    for t in range(12, 16):
        expected = peer(x[:, t : t + 1], mask[:, : t + 1], cache)
        output, state = peer.ours(x[:, t : t + 1], state=state)
        assert_close(f"token {t}", output, expected, 1e-5)
    assert state.count.tolist() == [16, 9, 5]


def test_values_of_another_size_than_keys() -> None:
    """With equal keys every token is the mean of the values so far, whatever they measure."""
    layer = SoftmaxAttention(HIDDEN, 2, 4, 10, num_kv_heads=1).double()
    with torch.no_grad():
        layer.k_proj.weight.zero_()
    x = torch.randn(2, 9, HIDDEN).double()
    means = (x @ layer.v_proj.weight.T).cumsum(1) / torch.arange(1, 10).unsqueeze(1)
    assert_close("output", layer(x)[0], torch.cat((means, means), -1) @ layer.o_proj.weight.T, 1e-13)


@torch.no_grad()
def test_unused_slots_of_a_state_change_nothing() -> None:
    """A state with room to spare, as a cache of fixed size would hold it, gives the output of one without."""
    layer = SoftmaxAttention(HIDDEN, HEADS, SIZE, SIZE).double()
    x = torch.randn(2, 9, HIDDEN).double()
    mask = torch.ones(2, 6)
    mask[0, :2] = 0
    _, state = layer(x[:, :6], mask=mask)
    room = [torch.cat((kept, torch.zeros(2, 5, HEADS, SIZE).double()), 1) for kept in state[:2]]
    roomy = AttentionState(*room, state.count)
    for t in range(6, 9):
        (output, state), (expected, roomy) = (layer(x[:, t : t + 1], state=before) for before in (state, roomy))
        assert_close(f"token {t}", output, expected, 1e-13)
        roomy = AttentionState(roomy.keys[:, :11], roomy.values[:, :11], roomy.count)
    assert_close("keys", roomy.keys[:, :9], state.keys, 0)


def test_state_only_where_asked_for() -> None:
    layer = SoftmaxAttention(HIDDEN, HEADS, SIZE, SIZE)
    x, boundaries = torch.randn(1, 9, HIDDEN), torch.tensor([0, 4, 9])
    for options in ({}, {"cu_seqlens": boundaries}):
        with_state, without = (layer(x, **options, return_state=wanted) for wanted in (True, False))
        assert without.state is None
        assert torch.equal(with_state.output, without.output)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"read": CurvatureConditionedQuery(HEADS, SIZE)}, "no linear memory for a read step"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide the 4 heads, got 3"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"rope_base": 0.0}, "rope_base must be above 0"),
    ],
)
def test_what_cannot_work_is_named(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SoftmaxAttention(HIDDEN, HEADS, **{"head_dim": SIZE, "value_head_dim": SIZE, **options})


def test_bad_input_is_named() -> None:
    layer = SoftmaxAttention(HIDDEN, HEADS, SIZE, SIZE)
    x = torch.randn(2, 5, HIDDEN)
    _, state = layer(x)
    with pytest.raises(ValueError, match="state belongs to 2 sequences, but the input has 4"):
        layer(x.repeat(2, 1, 1), state=state)
    with pytest.raises(ValueError, match=r"state.values must have shape \[2, 5, 4, 6\]"):
        layer(x, state=state._replace(values=state.values[:, :3]))
    with pytest.raises(TypeError, match=r"state must be the AttentionState .* got MixerState"):
        layer(x, state=MixerState(state.keys, None, None))
    with pytest.raises(ValueError, match="mask has a hole in row 1"):
        layer(x, mask=torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="must start at 0 and end at T = 5"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 3]))
