"""Keys and queries that are gathered, against those that the layers hand to their memories."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close
from torch import Tensor

from ccq.analysis.collection import collect
from ccq.models import CCQForCausalLM, preset
from ccq.nn.mixers import gated_deltanet, gated_linear_attention, mamba2

VOCABULARY = 40


def own_model(arm: str, **changes: Any) -> CCQForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "head_dim": 16, **changes}
    return CCQForCausalLM(preset(f"{arm}-tiny", **sizes)).double().eval()


def some_tokens(count: int = 11) -> Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("arm", "module", "rule"),
    [
        ("gla", gated_linear_attention, "gated_linear_attention"),
        ("gla+ccq", gated_linear_attention, "gated_linear_attention"),
        ("gla-hedgehog", gated_linear_attention, "gated_linear_attention"),
        ("gated-deltanet", gated_deltanet, "gated_delta_rule"),
        ("gated-deltanet+ccq", gated_deltanet, "gated_delta_rule"),
        ("mamba2", mamba2, "state_space_duality"),
        ("mamba2+ccq", mamba2, "state_space_duality"),
    ],
)
def test_memory_keys_are_those_that_the_write_rule_is_given(
    arm: str, module: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own_model(arm)
    given: list[tuple[Tensor, Tensor]] = []
    original = getattr(module, rule)

    def spy(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append((q[0], k[0]))
        return original(q, k, *args, **kwargs)

    monkeypatch.setattr(module, rule, spy)
    values = collect(model, some_tokens())
    assert len(values) == len(given) == len(model.model.layers)
    for layer, (q, k) in zip(values, given, strict=True):
        assert layer.memory_keys is layer.met_keys and layer.memory_keys is not None and layer.queries is not None
        unit = rule == "gated_delta_rule"
        assert_close("keys", F.normalize(layer.memory_keys, dim=-1) if unit else layer.memory_keys, k, 1e-5)
        if "+" not in arm:
            queries = layer.queries[:, :, 0]
            assert_close("queries", F.normalize(queries, dim=-1) if unit else queries, q, 1e-5)
        else:
            assert layer.read is not None
            assert_close("corrected", layer.read.query - layer.read.gate[..., None] * layer.read.correction, q, 1e-7)


@pytest.mark.parametrize("changes", [{}, {"short_convolution": None}])
def test_projected_keys_are_the_weights_times_the_input(changes: dict[str, Any]) -> None:
    model = own_model("gla+ccq", **changes)
    tokens = some_tokens()
    layer = collect(model, tokens)[0]
    block = model.model.layers[0]
    x, _ = block.attn_norm(model.model.embeddings(tokens))
    assert_close("projected", layer.projected_keys.flatten(1), x @ block.attn.k_proj.weight.T, 1e-12)
    assert layer.name == "model.layers.0.attn"
    assert layer.memory_keys is not None
    if changes:  # nothing stands between projection and memory
        assert_close("memory", layer.memory_keys, layer.projected_keys, 0)


def test_projected_keys_of_mamba2_are_its_b_before_the_convolution() -> None:
    model = own_model("mamba2", num_groups=2)
    tokens = some_tokens()
    layer = collect(model, tokens)[0]
    block = model.model.layers[0]
    mixer = block.attn
    x, _ = block.attn_norm(model.model.embeddings(tokens))
    values, keys, _ = mixer.sizes
    rows = mixer.in_proj.weight[2 * values : 2 * values + keys]
    assert_close("projected", layer.projected_keys.flatten(1), x @ rows.T, 1e-12)
    assert layer.projected_keys.shape == (11, 2, 16)


def test_correction_off_shows_no_read_and_the_same_keys() -> None:
    model = own_model("gated-deltanet+ccq")
    on = collect(model, some_tokens())[0]
    model.set_read("off")
    off = collect(model, some_tokens())[0]
    assert on.read is not None and off.read is None
    assert_close("keys", off.met_keys, on.met_keys, 0)


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotary embedding of x [T, H, D] by complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    rates = base ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(len(x), half, dtype=torch.float64), torch.arange(len(x))[:, None] * rates)
    pairs = pairs * turn[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def test_memory_keys_of_own_softmax_attention_are_rotated() -> None:
    layers = collect(own_model("transformer", num_kv_heads=1), some_tokens())
    for layer in layers:
        assert layer.memory_keys is not None and layer.queries is not None
        assert_close("keys", layer.memory_keys, rotated(layer.projected_keys, 10000.0), 1e-12)
        assert layer.met_keys is layer.projected_keys
        assert layer.queries.shape == (11, 1, 2, 16)


def qwen3(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.3,
    }
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, **changes})).double().eval()


def test_keys_of_qwen3_before_and_behind_norm_and_rotation() -> None:
    model = qwen3()
    tokens = some_tokens()
    layers = collect(model, tokens)
    assert [layer.name for layer in layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    block = model.model.layers[0]
    x = block.input_layernorm(model.model.embed_tokens(tokens))
    keys = (x @ block.self_attn.k_proj.weight.T).view(11, 2, 16)
    assert_close("projected", layers[0].projected_keys, keys, 1e-12)
    assert layers[0].memory_keys is not None and layers[0].queries is not None
    normed = keys / (keys.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    assert_close("memory", layers[0].memory_keys, rotated(normed, model.config.rope_parameters["rope_theta"]), 1e-6)
    queries = (x @ block.self_attn.q_proj.weight.T).view(11, 4, 16)
    for head in range(4):
        assert_close("queries", layers[0].queries[:, head // 2, head % 2], queries[:, head], 1e-12)
    assert layers[0].read is None


def test_a_cache_that_forgets_gives_no_memory_keys() -> None:
    """Layers with a sliding window keep its keys alone."""
    sliding = qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    full, windowed = collect(sliding, some_tokens())
    assert full.memory_keys is not None and windowed.memory_keys is None
    assert windowed.projected_keys.shape == (11, 2, 16)


def test_qwen3_5_shows_its_softmax_layers_and_no_queries_mixed_with_gates() -> None:
    """Its linear layers project all in one; its `q_proj` puts out gates beside queries."""
    transformers = pytest.importorskip("transformers", minversion="5.16")
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    layers = collect(transformers.Qwen3_5ForCausalLM(config).eval(), some_tokens())
    assert [layer.name for layer in layers] == ["model.layers.3.self_attn"]
    assert layers[0].queries is None and layers[0].memory_keys is not None


def test_a_model_without_key_projections_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    # Told before it runs: it would end in an error of its own behind its last position.
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no layer with a module k_proj"):
        collect(transformers.GPT2LMHeadModel(config).eval(), some_tokens())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("GPTNeo", {"attention_types": [[["global"], 2]]}),
        ("GPTJ", {"rotary_dim": 4}),
    ],
)
def test_a_text_beyond_a_table_of_positions_is_refused(kind: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=11,
        bos_token_id=0,
        eos_token_id=0,
        **changes,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    assert len(collect(model, some_tokens(11))) == 2
    with pytest.raises(ValueError, match=r"knows 11 positions, but a text has 12 tokens; .* --fillers"):
        collect(model, some_tokens(12))


def test_computed_positions_have_no_end() -> None:
    assert len(collect(qwen3(max_position_embeddings=8), some_tokens())) == 2
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2}
    config = transformers.XGLMConfig(**sizes, attention_heads=4, max_position_embeddings=8)
    assert len(collect(transformers.XGLMForCausalLM(config).eval(), some_tokens())) == 2


def test_nothing_is_left_behind_in_the_model() -> None:
    model = own_model("gla+ccq")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="input_ids must be in"):
        collect(model, torch.tensor([VOCABULARY]))
    assert not any(module._forward_hooks for module in model.modules())
    assert all(read.observer is None for read in model.read_steps())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
