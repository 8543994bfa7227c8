"""Weights and configurations on disk and on their way to other devices: what comes back is what went, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.models.small import make, random_tokens, small
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ccq.models import (
    ARMS,
    CCQConfig,
    CCQForCausalLM,
    CCQModel,
    attach,
    detach,
    from_flash_linear_attention,
    load_model,
    save_gates,
    save_model,
    to_flash_linear_attention,
)


def assert_same_weights(loaded: torch.nn.Module, model: torch.nn.Module) -> None:
    expected = model.state_dict()
    assert list(loaded.state_dict()) == list(expected)
    for name, value in loaded.state_dict().items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name
    assert dict(loaded.named_buffers()).keys() == dict(model.named_buffers()).keys()
    for name, value in model.named_buffers():
        assert torch.equal(loaded.get_buffer(name), value), name
    marks = [getattr(p, "_no_weight_decay", False) for p in model.parameters()]
    assert [getattr(p, "_no_weight_decay", False) for p in loaded.parameters()] == marks


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_returns_bit_for_bit(arm: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(arm, dtype, gate="attached")
    save_model(model, tmp_path / "new" / "folder")
    before = torch.get_rng_state()
    loaded = load_model(tmp_path / "new" / "folder")
    assert torch.equal(torch.get_rng_state(), before)
    assert not loaded.training
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    assert_same_weights(loaded, model)
    tokens = random_tokens(2, 5)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_the_auto_classes_know_the_model(tmp_path: Path) -> None:
    model = make("gated-deltanet+ccq", torch.float32)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is CCQConfig
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), CCQForCausalLM.from_pretrained(tmp_path)):
        assert type(loaded) is CCQForCausalLM
        assert_same_weights(loaded, model)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is CCQModel
    assert_same_weights(base, model.model)
    fresh = AutoModelForCausalLM.from_config(config)
    assert type(fresh) is CCQForCausalLM


def test_shards(tmp_path: Path) -> None:
    model = make("gla+ccq", torch.float32)
    save_model(model, tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_weights(load_model(tmp_path), model)
    # What was there before is not taken for what was saved last.
    for options in ({}, {"max_shard_size": "20KB"}, {"max_shard_size": "4KB"}):
        model = make("gla+ccq", torch.float32)
        save_model(model, tmp_path, **options)
        assert_same_weights(load_model(tmp_path), model)


def test_files_that_are_no_weights_of_transformers_stay(tmp_path: Path) -> None:
    """Gates may lie beside a model under any name."""
    model = make("gla", torch.float32, gate_logit_normalizer=16)
    gates = tmp_path / "model_gates.safetensors"
    others = [gates, tmp_path / "model.backup.safetensors", tmp_path / "model-best.safetensors.txt"]
    attach(model)
    save_gates(model, gates)
    for path in others[1:]:
        path.write_bytes(b"mine")
    detach(model)
    before = {path: path.read_bytes() for path in others}
    stale = tmp_path / "model-00001-of-00002.safetensors"
    for write in (save_model, to_flash_linear_attention):
        stale.write_bytes(b"of an earlier model")
        write(model, tmp_path)
        assert {path: path.read_bytes() for path in others} == before and not stale.exists()
        if write is save_model:
            assert_same_weights(load_model(tmp_path), model)
        else:
            assert_same_weights(from_flash_linear_attention(tmp_path), model)


@pytest.mark.parametrize("arm", ["gla+ccq", "mamba2", "transformer"])
def test_tied_embeddings(arm: str, tmp_path: Path) -> None:
    model = make(arm, torch.float32, tie_word_embeddings=True)
    untied = make(arm, torch.float32)
    assert model.lm_head.weight is model.model.embeddings.weight
    assert untied.parameter_count - model.parameter_count == model.lm_head.weight.numel()
    save_model(model, tmp_path)
    assert "lm_head.weight" not in safetensors.torch.load_file(tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embeddings.weight
    assert_same_weights(loaded, model)
    loaded.resize_token_embeddings(30)
    assert loaded.lm_head.weight is loaded.model.embeddings.weight
    assert loaded(torch.tensor([[29]])).logits.shape == (1, 1, 30)
    with pytest.raises(ValueError, match=r"tied to embeddings of shape \[30, 12\], so it cannot have shape \[7, 12\]"):
        loaded.set_output_embeddings(torch.nn.Linear(12, 7, bias=False))


@pytest.mark.parametrize("how", [{"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}])
@torch.no_grad()
def test_other_dtypes_and_a_device_map(how: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = make("gated-deltanet+ccq", torch.float32), random_tokens(2, 6)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, **how)
    expected = model.to(how.get("dtype", torch.float32))
    assert_same_weights(loaded, expected)
    output, other = loaded(tokens), expected(tokens)
    assert torch.equal(output.logits, other.logits)
    # A cache goes along with a model that changes its dtype: memories stay in float32.
    assert torch.isfinite(loaded.float()(tokens[:, :1], cache=output.cache).logits).all()


def test_weights_made_without_memory_start_as_others_do() -> None:
    """On the meta device, then in memory: init_weights sets every weight, and none is left as it was found."""
    for arm in ARMS:
        torch.manual_seed(0)
        expected = CCQForCausalLM(small(arm))
        with torch.device("meta"):
            model = CCQForCausalLM(small(arm))
        model.to_empty(device="cpu")
        for module in model.modules():
            module._is_hf_initialized = False
        model.init_weights()
        for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.isfinite(value).all(), name
            constant = (other == other.flatten()[0]).all()
            assert torch.equal(value, other) if constant else (value != value.flatten()[0]).any(), name


def test_folders_that_hold_no_model_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no model"):
        load_model(tmp_path)
    save_model(make("gla", torch.float32), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    save_model(make("gla+ccq", torch.float32), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(
        ValueError, match=r"arm 'gla\+ccq': missing model\.layers\.0\.attn\.read\.gate_bias; missing .*Load them with"
    ):
        load_model(tmp_path)
    save_model(make("gla+ccq", torch.float32), tmp_path)
    full = (tmp_path / "model.safetensors").read_bytes()
    save_model(make("gla", torch.float32), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(full)
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0\.attn\.read\.gate_bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    save_model(make("gla", torch.float32, intermediate_size=8), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(
        ValueError, match=r"mlp\.gate_proj\.weight has shape \[20, 12\], the configuration asks for \[8, 12\]"
    ):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_model(tmp_path)
    for values in ("{", "[]", '{"arm": "gla"}', json.dumps({"model_type": "llama"})):
        (tmp_path / "config.json").write_text(values)
        with pytest.raises(ValueError, match=r"config\.json is not a model configuration"):
            load_model(tmp_path)


def test_a_kill_while_saving_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gla", torch.float32)
    save_model(model, tmp_path)

    def cut_short(folder: Path, **options: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    other = make("gla", torch.float32)
    monkeypatch.setattr(other, "save_pretrained", cut_short)
    with pytest.raises(KeyboardInterrupt):
        save_model(other, tmp_path)
    assert_same_weights(load_model(tmp_path), model)
    assert not list(tmp_path.glob(".*"))
