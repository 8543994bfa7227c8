"""Tiny models with a tokenizer of bytes, saved as users save them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from ccq.evals.harness import LoadedModel, load
from ccq.models import CCQForCausalLM, attach, preset, read_steps, save_model
from ccq.models.text import save_tokenizer

END = "<|end|>"


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token a byte, and one that ends a text: 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({END: 0, **{c: i for i, c in enumerate(alphabet, 1)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


@pytest.fixture(scope="session")
def ccq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ccq")
    torch.manual_seed(0)
    # Weights larger than those of a fresh model, so that answers depend on the prompts.
    save_model(CCQForCausalLM(preset("gated-deltanet+ccq-tiny", vocab_size=257, initializer_range=0.2)), folder)
    save_tokenizer(byte_tokenizer(), folder, end=END)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(byte_tokenizer(), folder, end=END)
    return folder


@pytest.fixture(scope="session")
def attached_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with linear and softmax attention, whose linear layers have read steps."""
    folder = tmp_path_factory.mktemp("attached")
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=3,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    model = attach(Qwen3_5ForCausalLM(config))
    with torch.no_grad():
        for read in read_steps(model):
            read.gate_weight.normal_()
            read.gate_scale.fill_(1)
    model.save_pretrained(folder)
    save_tokenizer(byte_tokenizer(), folder, end=END)
    return folder


@pytest.fixture(scope="session", params=["ccq", "llama", "attached"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    """A model of this library, one of transformers, and one of transformers with read steps."""
    return load(str(request.getfixturevalue(f"{request.param}_folder")), device="cpu")
