"""Models by name or folder: one with an attached read step comes back with its gates, not as the backbone alone."""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import tokenizers
import torch
from tests.models.small import make
from tests.models.test_attach import FORMS, attached
from transformers import LlamaConfig, LlamaForCausalLM

from ccq.models import attach, detach, read_steps, save_gates, set_read
from ccq.models.auto_model import read_auto_model
from ccq.models.text import save_tokenizer

TOKENS = torch.arange(12).view(2, 6)


def with_random_gates(model: Any) -> Any:
    """The plain model, in place, with a read step that is away from its start."""
    with torch.no_grad():
        for parameter in itertools.chain(*(read.parameters() for read in read_steps(attach(model)))):
            parameter.normal_()
    return model


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    words = {str(number): number for number in range(model.config.vocab_size)}
    save_tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0")), folder)
    return str(folder)


def read(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model, _ = read_auto_model(name, dtype=dtype, device="cpu", **options)
    return model


def assert_same_logits(actual: Any, expected: Any) -> None:
    # The products of experts depend on where in memory their weights lie.
    assert torch.allclose(actual(TOKENS).logits, expected(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_an_attached_read_step_comes_back(name: str, tmp_path: Path) -> None:
    model = attached(name)
    plain = detach(copy.deepcopy(model))
    assert not torch.allclose(model(TOKENS).logits, plain(TOKENS).logits, atol=1e-2)
    folder = saved(model, tmp_path)
    loaded = read(folder)
    assert not loaded.training
    assert_same_logits(loaded, model)
    for change in ("off", "scale=0.5,layers=1", "heads=0"):
        set_read(loaded, change)
        set_read(model, change)
        assert_same_logits(loaded, model)
    half = read(folder, torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    for gate, expected in zip(read_steps(half), read_steps(model), strict=True):
        assert torch.equal(gate.gate_weight, expected.gate_weight)


@pytest.mark.parametrize("name", [*FORMS, "gla"])
@torch.no_grad()
def test_gates_in_a_file_of_their_own_come_back(name: str, tmp_path: Path) -> None:
    model = attached(name) if name in FORMS else with_random_gates(make(name, torch.float32))
    plain = detach(copy.deepcopy(model))
    folder = saved(plain, tmp_path / "backbone")
    assert read_steps(read(folder)) == []
    save_gates(model, tmp_path / "elsewhere")
    assert_same_logits(read(folder, gates=tmp_path / "elsewhere"), model)
    save_gates(model, Path(folder, "any name.safetensors"))
    loaded = read(folder)
    assert not loaded.training
    assert_same_logits(loaded, model)
    set_read(loaded, "off")
    assert_same_logits(loaded, plain)
    for gate, expected in zip(read_steps(read(folder, torch.bfloat16)), read_steps(model), strict=True):
        assert torch.equal(gate.gate_weight, expected.gate_weight)
    # What is named is taken, whatever the folder holds.
    with_random_gates(other := copy.deepcopy(plain))
    save_gates(other, tmp_path / "elsewhere")
    assert_same_logits(read(folder, gates=tmp_path / "elsewhere"), other)
    assert not torch.allclose(other(TOKENS).logits, model(TOKENS).logits, atol=1e-2)


@pytest.mark.parametrize("name", ["qwen3_5", "gla"])
@torch.no_grad()
def test_gates_beside_those_of_the_weights_must_be_the_same(name: str, tmp_path: Path) -> None:
    model = attached(name) if name in FORMS else with_random_gates(make(name, torch.float32))
    folder = saved(model, tmp_path / "model")
    save_gates(model, tmp_path / "model" / "gates.safetensors")
    assert_same_logits(read(folder), model)
    read_steps(model)[1].gate_bias[0] += 1
    save_gates(model, tmp_path / "model" / "later.safetensors")
    with pytest.raises(
        ValueError, match=r"attached read step, but .*/gates.safetensors and later.safetensors hold different .*bias"
    ):
        read(folder)
    (tmp_path / "model" / "gates.safetensors").unlink()
    with pytest.raises(ValueError, match=r"later.safetensors and model.safetensors .* of gate_bias of layer \d; name"):
        read(folder)
    if name == "gla":
        with pytest.raises(ValueError, match=r"is to have the gates in .*, but the model has a read step already"):
            read(folder, gates=tmp_path / "model" / "later.safetensors")
    else:
        assert_same_logits(read(folder, gates=tmp_path / "model" / "later.safetensors"), model)


@torch.no_grad()
def test_it_comes_back_from_the_hub_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a model that was downloaded before."""
    model, commit = attached("qwen3_5"), "0" * 40
    repository = tmp_path / "models--somebody--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(saved(model, tmp_path / "model"), repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_same_logits(read("somebody/something"), model)


def test_gates_that_fit_nothing_are_an_error(tmp_path: Path) -> None:
    folder = saved(attached("qwen3_5"), tmp_path / "attached")
    weights = safetensors.torch.load_file(tmp_path / "attached" / "model.safetensors")
    gate = weights.pop("model.layers.0.linear_attn.read.gate_bias")
    safetensors.torch.save_file(weights, tmp_path / "attached" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has the gates of an attached read step, but .*missing gate_bias of layer 0"):
        read(folder)
    sizes = {"vocab_size": 23, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1))
    folder = saved(llama, tmp_path / "llama")
    weights = {**llama.state_dict(), "model.layers.0.self_attn.read.gate_bias": gate}
    safetensors.torch.save_file(weights, tmp_path / "llama" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"attached read step, but model must be .* got LlamaForCausalLM"):
        read(folder)


def test_files_of_gates_that_fit_nothing_are_an_error(tmp_path: Path) -> None:
    folder = saved(detach(attached("qwen3_5")), tmp_path / "backbone")
    with pytest.raises(FileNotFoundError, match=r"absent does not exist .* expected a file written by save_gates"):
        read(folder, gates=tmp_path / "absent")
    with pytest.raises(ValueError, match=r"to have the gates in .*, but .* is not a file written by save_gates"):
        read(folder, gates=tmp_path / "backbone" / "model.safetensors")
    gates = tmp_path / "backbone" / "gates.safetensors"
    save_gates(with_random_gates(make("gla")), gates)
    for options in ({}, {"gates": gates}):
        with pytest.raises(ValueError, match=r"but the gates in .* do not fit the model: .*missing gate_bias of layer"):
            read(folder, **options)
    gates.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"gates.safetensors is damaged or is not a safetensors file"):
        read(folder)
