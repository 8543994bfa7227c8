"""The read step attached to trained models: exactly nothing at first, the recurrence afterwards, all uses of a cache.

transformers' models are small random ones with grouped heads; the loops below are written from the definitions.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close, relative_error
from tests.models.small import VOCABULARY, make, random_tokens
from tests.nn.token_loop import covariance, mixer_loop, unit
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import ccq
from ccq.models import attach as attach_in_models
from ccq.models import (
    detach,
    load_model,
    read_intervention,
    read_layers,
    read_steps,
    save_gates,
    save_model,
    set_read,
)
from ccq.models.cache import CACHE_NAME, fingerprint
from ccq.models.intervention import GateValues
from ccq.models.observation import observe_reads

OWN = ("gla", "gla-hedgehog", "gated-deltanet", "mamba2")

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "initializer_range": 0.3,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **EXPERTS)),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)),
    "qwen3_5_moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SIZES, **EXPERTS)),
}
# The two forms of the mixer: projections in one or in four.
FORMS = ("qwen3_next", "qwen3_5")


def family(name: str) -> Any:
    return FAMILIES[name]().eval()


def attached(name: str) -> Any:
    """A model whose gates are away from their start."""
    model = ccq.attach(family(name))
    with torch.no_grad():
        for read in read_steps(model):
            for parameter in read.parameters():
                parameter.normal_()
    return model


def new_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def with_cache(cache: Any) -> dict[str, Any]:
    return {CACHE_NAME: cache}


def cache_of(model: Any, tokens: Tensor, **inputs: Any) -> Any:
    return getattr(model(tokens, use_cache=True, **inputs), CACHE_NAME)


def padded_batch() -> tuple[Tensor, Tensor]:
    tokens, mask = random_tokens(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4], mask[2, :8] = 0, 0
    return tokens, mask


def uses(model: Any) -> list[Tensor]:
    """Logits of padded rows in pieces (more than one chunk of the rule, some tokens more, one token), and answers."""
    tokens, mask = random_tokens(3, 80), torch.ones(3, 80, dtype=torch.int64)
    mask[0, :4], mask[2, :70] = 0, 0
    first = model(tokens[:, :72], attention_mask=mask[:, :72], use_cache=True)
    cache = with_cache(getattr(first, CACHE_NAME))
    second = model(tokens[:, 72:79], attention_mask=mask[:, :79], **cache)
    third = model(tokens[:, 79:], attention_mask=mask, **cache)
    tokens, mask = padded_batch()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    answers = [model.generate(tokens, attention_mask=mask, num_beams=beams, **settings) for beams in (1, 3)]
    return [first.logits, second.logits, third.logits, *answers]


@pytest.mark.parametrize("name", [*OWN, *FAMILIES])
@torch.no_grad()
def test_attaching_changes_nothing_to_the_bit(name: str) -> None:
    model = make(name, torch.float32) if name in OWN else family(name)
    before = {key: x.data_ptr() for key, x in model.named_parameters()}
    random = torch.get_rng_state()
    expected = uses(model)
    assert ccq.attach is attach_in_models and ccq.attach(model) is model
    after = {key: x.data_ptr() for key, x in model.named_parameters()}
    assert before.items() < after.items()
    assert all(".read.gate_" in key for key in after.keys() - before.keys())
    torch.set_rng_state(random)
    for a, b in zip(uses(model), expected, strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b)


@pytest.mark.parametrize("name", OWN)
def test_a_model_of_this_library_becomes_its_arm_with_ccq(name: str, tmp_path: Path) -> None:
    model = ccq.attach(make(name))
    config = model.config
    assert (config.arm, config.gate, config.keep_length) == (f"{name}+ccq", "attached", name != "gated-deltanet")
    assert model.model.config is config and config.num_layers == len(model.read_steps())
    with torch.no_grad():
        for read in model.read_steps():
            for parameter in read.parameters():
                parameter.normal_()
        x = torch.randn(7, config.hidden_size).double()
        mixer = model.model.layers[1].attn
        assert_close("mixer", mixer(x.unsqueeze(0)).output[0], mixer_loop(mixer, x), 1e-12)

        model = model.float()
        save_model(model, tmp_path / "model")
        loaded = load_model(tmp_path / "model").eval()
        tokens = random_tokens(2, 6)
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        save_gates(model, tmp_path / "gates")
        plain = detach(copy.deepcopy(model))
        assert plain.config.arm == name and not torch.equal(plain(tokens).logits, model(tokens).logits)
        again = ccq.attach(plain, gates=tmp_path / "gates")
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def token_loop(mixer: Any, x: Tensor) -> Tensor:
    """x [T, hidden] -> [T, hidden]: transformers' layer with its read step, token by token in float64. Both forms give
    the projections of one head of keys, with its share of the heads of values, by rows of their weights.
    """
    dtype = torch.float64
    groups, size, value_size = mixer.num_k_heads, mixer.head_k_dim, mixer.head_v_dim
    shared = mixer.num_v_heads // groups
    x = x.to(dtype)
    if hasattr(mixer, "in_proj_qkvz"):
        blocks = (mixer.in_proj_qkvz.weight.to(dtype) @ x.T).T.unflatten(1, (groups, -1))
        q, k, v, z = blocks.split((size, size, shared * value_size, shared * value_size), 2)
        b, a = (mixer.in_proj_ba.weight.to(dtype) @ x.T).T.unflatten(1, (groups, -1)).split((shared, shared), 2)
        mixed = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)
        z, b, a = z.flatten(1), b.flatten(1), a.flatten(1)
    else:
        mixed, z, b, a = (
            x @ p.weight.to(dtype).T for p in (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
        )
    weight = mixer.conv1d.weight.to(dtype)
    mixed = F.pad(mixed.T.unsqueeze(0), (weight.shape[2] - 1, 0))
    mixed = F.conv1d(mixed, weight, groups=weight.shape[0])[0].T
    mixed = mixed / (1 + torch.exp(-mixed))
    presplit, keys, values = mixed.split((groups * size, groups * size, groups * shared * value_size), 1)
    gate_weight, gate_bias, gate_scale = (
        p.to(dtype) for p in (mixer.read.gate_weight, mixer.read.gate_bias, mixer.read.gate_scale)
    )
    columns = []
    for h in range(groups * shared):
        group = h // shared
        part = slice(group * size, (group + 1) * size)
        k = unit(keys[:, part])
        v = values[:, h * value_size : (h + 1) * value_size]
        memory, rows = torch.zeros(size, value_size, dtype=dtype), []
        for t in range(len(x)):
            query = unit(presplit[t, part])
            strength = gate_scale[group] / (1 + torch.exp(-(gate_weight[group] @ presplit[t] + gate_bias[group])))
            query = query - strength * (covariance(k[: t + 1]) @ query)
            step = torch.log1p(torch.exp(a[t, h] + mixer.dt_bias[h]))
            memory = torch.exp(-torch.exp(mixer.A_log[h].to(dtype)) * step) * memory
            memory = memory + torch.outer(k[t], (v[t] - memory.T @ k[t]) / (1 + torch.exp(-b[t, h])))
            out = memory.T @ query / size**0.5
            out = out / (out.square().mean() + mixer.layer_norm_epsilon).sqrt() * mixer.norm.weight
            gate = z[t, h * value_size : (h + 1) * value_size]
            rows.append(out * gate / (1 + torch.exp(-gate)))
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1) @ mixer.out_proj.weight.to(dtype).T


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_the_attached_mixer_is_the_recurrence(name: str) -> None:
    """With gates of random weights and with one constant gate; one row whole, one behind padding and cut in pieces."""
    model = attached(name)
    mixer = model.model.layers[1].linear_attn
    rows = [torch.randn(n, SIZES["hidden_size"]) for n in (71, 66)]
    padded = torch.randn(2, 71, SIZES["hidden_size"])
    padded[0], padded[1, 5:] = rows
    mask = torch.ones(2, 71, dtype=torch.int64)
    mask[1, :5] = 0
    for gate in ("random", "constant"):
        if gate == "constant":
            # sigmoid(0) = 0.5
            mixer.read.gate_weight.zero_()
            mixer.read.gate_bias.zero_()
            mixer.read.gate_scale.copy_(torch.tensor([1.4, 0.6]))
        expected = [token_loop(mixer, row) for row in rows]
        whole = mixer(padded, attention_mask=mask)
        cache, pieces = new_cache(model), []
        for start, end in ((0, 2), (2, 68), (68, 69), (69, 71)):
            # transformers gives no mask to a call of one token.
            part = None if end - start == 1 else mask[:, start:end]
            pieces.append(mixer(padded[:, start:end], attention_mask=part, cache=cache))
        for kind, output in (("whole", whole), ("pieces", torch.cat(pieces, 1))):
            assert_close(f"{gate} {kind}", output[0], expected[0], 2e-5)
            assert_close(f"{gate} {kind}, padded", output[1, 5:], expected[1], 2e-5)
        mixer.read.enabled = False
        off = mixer(padded, attention_mask=mask)
        mixer.read.enabled = True
        assert relative_error(off[0], expected[0]) > 1e-3
        assert cache.layers[1].statistics.count.tolist() == [71, 66]


@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_the_gates_are_those_of_the_recurrence(name: str) -> None:
    mixer = attached(name).model.layers[0].linear_attn
    x, upstream = torch.randn(11, SIZES["hidden_size"]), torch.randn(11, SIZES["hidden_size"])
    x.requires_grad_()
    inputs = [x, *mixer.read.parameters(), mixer.conv1d.weight, mixer.A_log]
    actual = torch.autograd.grad((mixer(x.unsqueeze(0))[0] * upstream).sum(), inputs)
    expected = torch.autograd.grad((token_loop(mixer, x) * upstream).sum(), inputs)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_close(f"input {i}", a, b, 1e-4)


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_generation_with_a_cache_is_generation_without(name: str) -> None:
    model, (tokens, mask) = attached(name), padded_batch()
    for beams in (1, 3):
        settings = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(tokens, attention_mask=mask, use_cache=False, **settings)
        assert torch.equal(model.generate(tokens, attention_mask=mask, **settings), expected)
        static = model.generate(tokens, attention_mask=mask, cache_implementation="static", **settings)
        assert torch.equal(static, expected)
        for row, (one, real) in enumerate(zip(tokens, mask.bool(), strict=True)):
            alone = one[real].unsqueeze(0)
            answer = model.generate(alone, attention_mask=torch.ones_like(alone), **settings)
            assert answer[0, alone.shape[1] :].tolist() == expected[row, 9:].tolist()


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_a_cache_is_repeated_selected_reordered_and_reset(name: str) -> None:
    model, tokens, more = attached(name), random_tokens(3, 6), random_tokens(6, 2)
    cache = cache_of(model, tokens)
    for method, argument, rows in (
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([2, 0, 0, 1, 2, 2]), [2, 0, 0, 1, 2, 2]),
        ("reorder_cache", torch.tensor([1, 1, 0]), [1, 1, 0]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
    ):
        changed = copy.deepcopy(cache)
        getattr(changed, method)(argument)
        following = more[: len(rows)]
        expected = model(torch.cat((tokens[rows], following), 1)).logits[:, 6:]
        for t in range(2):
            logits = model(following[:, t : t + 1], **with_cache(changed)).logits
            assert_close(f"{method} {t}", logits, expected[:, t : t + 1], 1e-4)
    linear = cache.layers[0]
    states = [*linear.statistics, linear.conv_states[0], linear.recurrent_states[0]]
    addresses = [x.data_ptr() for x in states]
    model(more[:3], **with_cache(cache))
    model(more[:3, :1], **with_cache(cache))
    cache.reorder_cache(torch.tensor([2, 1, 0]))
    with pytest.raises(NotImplementedError, match=r"cannot be cropped: .*deepcopy"):
        cache.crop(-1)
    linear.reset()
    assert [x.data_ptr() for x in (*linear.statistics, linear.conv_states[0], linear.recurrent_states[0])] == addresses
    x = torch.randn(3, 5, SIZES["hidden_size"])
    mixer = model.model.layers[0].linear_attn
    assert torch.equal(mixer(x, cache=cache), mixer(x, cache_params=new_cache(model)))
    with pytest.raises(ValueError, match="cache belongs to 3 sequences, but the input has 1"):
        mixer(x[:1], cache=cache)


@torch.no_grad()
def test_off_is_the_plain_model_and_keeps_no_statistics() -> None:
    plain = family("qwen3_5")
    model, tokens = ccq.attach(copy.deepcopy(plain)), random_tokens(2, 5)
    before = cache_of(plain, tokens)
    for read in read_steps(model):
        read.gate_scale.fill_(1)
        read.enabled = False
    off = cache_of(model, tokens)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    assert off.layers[0].statistics is None
    for read in read_steps(model):
        read.enabled = True
    for cache in (before, off):
        with pytest.raises(ValueError, match=r"no key statistics, .* start again from the first token"):
            model(tokens, **with_cache(cache))
    on = cache_of(model, tokens)
    read_steps(model)[0].enabled = False
    model(tokens, **with_cache(on))
    assert on.layers[0].statistics is None and on.layers[1].statistics is not None


def assert_same_uses(model: Any, expected: Any, tolerance: float) -> None:
    """Of the same tokens: the same logits but for rounding, and the same answers."""
    random = torch.get_rng_state()
    found = uses(model)
    torch.set_rng_state(random)
    for a, b in zip(found, uses(expected), strict=True):
        assert torch.equal(a, b) or (a.is_floating_point() and relative_error(a, b) < tolerance)


# What an intervention does, as factors [layers, heads] of the gate's scale.
FACTORS = {
    "on": [[1, 1], [1, 1], [1, 1]],
    "scale=0.5": [[0.5, 0.5]] * 3,
    "scale=-2": [[-2, -2]] * 3,
    "heads=1": [[0, 1]] * 3,
    "layers=0,2": [[1, 1], [0, 0], [1, 1]],
    "scale=2,layers=1-2,heads=0": [[0, 0], [2, 0], [2, 0]],
}


@pytest.mark.parametrize("change", FACTORS)
@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_an_intervention_is_another_scale(name: str, change: str) -> None:
    """Against gates with these numbers in them, in all uses of a cache; the weights stay as they were."""
    model = attached(name)
    by_hand, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    for read, factors in zip(read_steps(by_hand), FACTORS[change], strict=True):
        read.gate_scale.mul_(torch.tensor(factors))
    assert str(set_read(model, change)) == change
    assert_same_uses(model, by_hand, 1e-5)
    tokens = random_tokens(2, 9)
    set_read(model, "on")
    on = model(tokens).logits
    assert torch.equal(on, by_hand(tokens).logits) or change != "on"
    assert change == "on" or relative_error(by_hand(tokens).logits, on) > 1e-3
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("name", [*OWN, *FORMS])
@torch.no_grad()
def test_off_is_the_model_without_its_read_steps(name: str) -> None:
    model = make(name, torch.float32) if name in OWN else family(name)
    ccq.attach(model)
    for read in read_steps(model):
        read.gate_scale.fill_(5)
        read.gate_bias.fill_(1)
    on, tokens = copy.deepcopy(model), random_tokens(2, 9)
    set_read(model, "off")
    assert_same_uses(model, detach(copy.deepcopy(model)), 1e-6)
    assert relative_error(on(tokens).logits, model(tokens).logits) > 1e-3


@torch.no_grad()
def test_mean_and_shuffled_take_the_place_of_an_attached_gate() -> None:
    model, tokens = attached("qwen3_5"), random_tokens(2, 11)
    layers = tuple(torch.rand(4, 2) - 0.5 for _ in range(3))
    values = GateValues(layers, fingerprint(model), {})
    by_hand = copy.deepcopy(model)
    for read, layer in zip(read_steps(by_hand), layers, strict=True):
        read.gate_weight.zero_()
        read.gate_bias.zero_()
        read.gate_scale.copy_(2 * layer.mean(0))  # sigmoid(0) = 0.5
    assert str(set_read(model, "gate=mean", gate_values=values)) == f"gate=mean,values={values.digest}"
    assert_same_uses(model, by_hand, 1e-5)

    set_read(model, "gate=shuffled,seed=3,scale=2", gate_values=values)
    tables = values.shuffled(3)
    # The second row behind padding, and both in pieces: the real tokens are counted.
    padded, mask = torch.cat((tokens, tokens), 1)[:, :14], torch.ones(2, 14, dtype=torch.int64)
    padded[1, 3:], mask[1, :3] = tokens[1], 0
    cache, positions = new_cache(model), [range(14), range(-3, 11)]
    with observe_reads(model) as observed:
        for start, end in ((0, 6), (6, 13), (13, 14)):
            model(padded[:, start:end], attention_mask=mask[:, :end], **with_cache(cache))
    for calls, table in zip(observed, tables, strict=True):
        gate = torch.cat([call.gate for call in calls], 1)
        for row, real in zip(gate, positions, strict=True):
            for lam, position in zip(row, real, strict=True):
                assert position < 0 or torch.equal(lam, 2 * table[position % 4])
    with pytest.raises(ValueError, match="gate_values are those of another model"):
        set_read(by_hand, "gate=mean", gate_values=values)


@torch.no_grad()
def test_layers_are_counted_as_the_model_counts_them() -> None:
    """Layers of softmax attention have numbers too, and no read step."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    plain, tokens = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, layer_types=kinds)).eval(), random_tokens(2, 9)
    model = attached_with(plain)
    assert read_layers(model) == [0, 2, 3]
    by_hand = copy.deepcopy(model)
    for layer in (0, 3):
        by_hand.model.layers[layer].linear_attn.read.gate_scale.zero_()
    set_read(model, "layers=2")
    assert_close("layer 2", model(tokens).logits, by_hand(tokens).logits, 1e-6)
    with pytest.raises(ValueError, match="layers=0-2: the read steps are in layers 0,2-3, not 1"):
        set_read(model, "layers=0-2")


def test_a_model_knows_what_was_done_to_its_attached_read_steps() -> None:
    model = family("qwen3_5")
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM has no read step that 'off' .* that ccq.attach has put"):
        set_read(model, "off")
    assert read_intervention(model) is None
    assert str(read_intervention(ccq.attach(model))) == "on"
    done = set_read(model, "heads=0,scale=3")
    for bad, message in (
        ("heads=1-2", "heads=1-2: the read steps have heads 0-1, not 2"),
        ("layers=3", "layers=3: the read steps are in layers 0-2, not 3"),
        ("gate=mean", "gate=mean needs gate_values"),
        ("half", "'half' is no read intervention"),
    ):
        with pytest.raises(ValueError, match=message):
            set_read(model, bad)
    for same in (model, model.model, copy.deepcopy(model)):
        assert read_intervention(same) == done
    assert not any(hasattr(model, name) for name in ("set_read", "read_intervention", "_intervention"))
    assert read_intervention(detach(model)) is None
    assert str(read_intervention(ccq.attach(model))) == "on"


@pytest.mark.parametrize("name", ["gla", "qwen3_5"])
def test_only_the_gates_are_trained(name: str) -> None:
    plain = (make(name, torch.bfloat16) if name in OWN else family(name).bfloat16()).train()
    model = ccq.attach(copy.deepcopy(plain), train="gates")
    tokens = random_tokens(2, 8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # the scale moves first; it hides the rest of the gate while it is 0
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    before = dict(plain.named_parameters())
    for key, x in model.named_parameters():
        if key in before:
            assert x.grad is None and torch.equal(x, before[key])
        else:
            assert x.dtype == torch.float32 and x.grad.abs().max() > 0
    assert plain(input_ids=tokens).logits.requires_grad


@pytest.mark.parametrize("name", [*FORMS, "qwen3_5_moe"])
@torch.no_grad()
def test_gates_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    model, tokens = attached(name), random_tokens(2, 7)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "whole", max_shard_size="10KB")
    save_gates(model, tmp_path / "gates.safetensors")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 2
    # The backbone of the folder loads as if nothing had been attached.
    base = type(model).from_pretrained(tmp_path / "whole").eval()
    assert read_steps(base) == []
    for gates in ("whole", "gates.safetensors"):
        again = ccq.attach(copy.deepcopy(base), gates=tmp_path / gates)
        for (key, a), (other, b) in zip(again.named_parameters(), model.named_parameters(), strict=True):
            assert key == other and torch.equal(a, b)
        # The products of experts depend on where in memory their weights lie.
        assert torch.equal(again(tokens).logits, expected) or name != "qwen3_5"
        assert_close("logits", again(tokens).logits, expected, 1e-6)
        half = ccq.attach(copy.deepcopy(base).bfloat16(), gates=tmp_path / gates, train="gates")
        assert all(
            torch.equal(a.gate_bias, b.gate_bias) for a, b in zip(read_steps(half), read_steps(model), strict=True)
        )


@torch.no_grad()
def test_a_model_that_sees_images_shares_the_gates_of_its_text_model(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 12}
    config = Qwen3_5Config(text_config=SIZES, vision_config=vision, image_token_id=20, video_token_id=21)
    plain, tokens = Qwen3_5ForConditionalGeneration(config).eval(), random_tokens(2, 7).clamp(max=15)
    model = ccq.attach(copy.deepcopy(plain))
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    text = attached("qwen3_5")
    save_gates(text, tmp_path / "gates")
    model = ccq.attach(copy.deepcopy(plain), gates=tmp_path / "gates")
    for a, b in zip(read_steps(model), read_steps(text), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@torch.no_grad()
def test_gates_that_do_not_fit_are_refused_and_leave_the_model_plain(tmp_path: Path) -> None:
    save_gates(attached("qwen3_5"), tmp_path / "gates")
    other = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 2, "linear_num_key_heads": 4})).eval()
    kind = type(other.model.layers[0].linear_attn)
    with pytest.raises(
        ValueError,
        match=r"unexpected gate_weight of layer 2; .*gate_weight of layer 0 has shape \[2, 12\], .* \[4, 24\]",
    ):
        ccq.attach(other, gates=tmp_path / "gates")
    assert read_steps(other) == [] and type(other.model.layers[0].linear_attn) is kind
    gla = make("gla", torch.float32)
    with pytest.raises(ValueError, match="unexpected gate_bias of layer 2"):
        ccq.attach(gla, gates=tmp_path / "gates")
    assert gla.config.arm == "gla" and torch.isfinite(gla(random_tokens(1, 3)).logits).all()
    other.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"plain holds no gates of a read step"):
        ccq.attach(other, gates=tmp_path / "plain")
    with pytest.raises(FileNotFoundError, match="expected a file written by save_gates"):
        ccq.attach(other, gates=tmp_path / "absent")


def test_what_cannot_be_attached_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9))
    with pytest.raises(TypeError, match=r"gated-deltanet, mamba2, or .* Qwen3-Next and Qwen3.5 .* got GPT2LMHeadModel"):
        ccq.attach(gpt2)
    with pytest.raises(TypeError, match="got str"):
        ccq.attach("Qwen/Qwen3-Next-80B-A3B-Instruct")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="arm 'transformer' has no memory"):
        ccq.attach(make("transformer"))
    for model in (make("gla+ccq"), ccq.attach(family("qwen3_5"))):
        with pytest.raises(ValueError, match="has a read step already"):
            ccq.attach(model)
    for model in (make("gla+ccq"), make("gla")):
        for function in (detach, lambda m: save_gates(m, "nowhere")):
            with pytest.raises(ValueError, match="no attached read step"):
                function(model)
    with pytest.raises(ValueError, match="train must be one of 'all', 'gates'; got 'gate'"):
        ccq.attach(make("gla"), train="gate")
    with torch.device("meta"):
        empty = FAMILIES["qwen3_5"]()
    with pytest.raises(ValueError, match="they are on 'meta'"):
        ccq.attach(empty)
    assert read_steps(empty) == []
    # The module's own name for it: another test may have imported transformers anew.
    monkeypatch.setattr(importlib.import_module("ccq.models.attach").transformers, "__version__", "5.12.0")
    with pytest.raises(ImportError, match=r"needs transformers 5.16 or newer, found 5.12.0"):
        ccq.attach(family("qwen3_5"))


@torch.no_grad()
def test_detached_is_as_before() -> None:
    plain, tokens = family("qwen3_next"), random_tokens(2, 5)
    model = copy.deepcopy(plain)
    with_gates = ccq.attach(model)
    for read in read_steps(with_gates):
        read.gate_scale.fill_(1)
    assert relative_error(model(tokens).logits, plain(tokens).logits) > 1e-6
    assert detach(model) is model and type(model.model.layers[0].linear_attn) is type(plain.model.layers[0].linear_attn)
    assert [*dict(model.named_parameters())] == [*dict(plain.named_parameters())]
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_pickled_model_comes_back_with_its_read_steps(name: str, tmp_path: Path) -> None:
    model, tokens = attached(name), random_tokens(2, 6)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert len(read_steps(loaded)) == len(read_steps(model)) > 0
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert [type(x) for x in loaded.modules()] == [type(x) for x in model.modules()]
    with pytest.raises(AttributeError, match="has no attribute 'Qwen3NextGatedDeltaNet'"):
        importlib.import_module("ccq.models.attach").Qwen3NextGatedDeltaNet  # noqa: B018


@torch.no_grad()
def test_a_dispatched_model_keeps_its_hooks() -> None:
    accelerate = pytest.importorskip("accelerate")
    tokens = random_tokens(2, 5)
    model = family("qwen3_next")
    expected = attached_with(copy.deepcopy(model))(tokens).logits
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)
    mixer = model.model.layers[0].linear_attn
    hook = mixer._hf_hook
    calls = []
    before = hook.pre_forward
    hook.pre_forward = lambda *a, **k: calls.append(1) or before(*a, **k)
    attached_with(model)
    assert mixer._hf_hook is hook and torch.equal(model(tokens).logits, expected) and calls
    detach(model)
    assert relative_error(model(tokens).logits, expected) > 1e-3


def attached_with(model: Any) -> Any:
    """With one gate for all."""
    for read in read_steps(ccq.attach(model)):
        read.gate_bias.zero_()
        read.gate_scale.fill_(1.5)
    return model


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@torch.no_grad()
def test_compiled_without_a_break() -> None:
    torch._dynamo.reset()
    config = Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 2}, layer_types=["linear_attention", "full_attention"])
    model, tokens = attached_with(Qwen3_5ForCausalLM(config).eval()), random_tokens(2, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = new_cache(model)
    logits = [compiled(part, use_cache=True, **with_cache(cache)).logits for part in tokens.split((7, 1), 1)]
    assert_close("logits", torch.cat(logits, 1), model(tokens).logits, 1e-5)


def test_packed_documents_are_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' layers keep packed documents apart by flash-linear-attention's and causal-conv1d's kernels only;
    here stand-ins run its functions document by document.
    """
    model = attached("qwen3_next")
    mixer = model.model.layers[0].linear_attn
    documents = [torch.randn(1, n, SIZES["hidden_size"]) for n in (5, 1, 9)]
    cu_seqlens = torch.tensor([0, 5, 6, 15])
    packed = torch.cat(documents, 1)
    library = mixer._library()
    rule, convolution = library.torch_chunk_gated_delta_rule, library.causal_conv1d_fn
    pieces = [slice(0, 5), slice(5, 6), slice(6, 15)]

    def packed_rule(
        *tensors: Tensor, cu_seqlens: Tensor, g: Tensor, beta: Tensor, **others: Any
    ) -> tuple[Tensor, None]:
        assert cu_seqlens.tolist() == [0, 5, 6, 15]
        parts = [rule(*(x[:, i] for x in tensors), g=g[:, i], beta=beta[:, i], **others)[0] for i in pieces]
        return torch.cat(parts, 1), None

    def packed_convolution(x: Tensor, *parameters: Any, cu_seq_lens_q: Tensor, **others: Any) -> Tensor:
        return torch.cat([convolution(x[..., i], *parameters, **others) for i in pieces], -1)

    alone = torch.cat([mixer(x) for x in documents], 1)
    monkeypatch.setattr(library, "torch_chunk_gated_delta_rule", packed_rule)
    monkeypatch.setattr(library, "causal_conv1d_fn", packed_convolution)
    assert_close("packed", mixer(packed, cu_seq_lens_q=cu_seqlens), alone, 1e-5)


def test_checkpointed_gradients() -> None:
    model, tokens = attached("qwen3_5").train(), random_tokens(2, 6)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable()
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append([p.grad.clone() for read in read_steps(model) for p in read.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a.abs().max() > 0 and torch.equal(a, b)


@pytest.mark.filterwarnings("ignore")  # of libraries that the page uses
def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "attach.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, found)
    # What was written for that library says what its classes look for.
    assert json.loads((tmp_path / "for-fla" / "config.json").read_text())["model_type"] == "gated_deltanet"
    assert found["answer"].shape == (2, 15)
