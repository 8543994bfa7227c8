"""Tokenizers of transformers against the `tokenizers` library they were made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from ccq.models.auto_model import read_auto_model
from ccq.models.auto_tokenizer import read_auto_tokenizer

TEXT = "hello world, déjà vu — hello\n"


def small_bpe() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 9, trainer=trainer)
    return tokenizer


def test_a_saved_tokenizer_encodes_as_the_original(tmp_path: Path) -> None:
    original = small_bpe()
    original.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=original, eos_token="<end>").save_pretrained(tmp_path)
    found = read_auto_tokenizer(str(tmp_path))
    assert found.eos == "<end>"
    loaded = tokenizers.Tokenizer.from_buffer(found.data)
    assert loaded.encode(TEXT).ids == original.encode(TEXT).ids
    assert loaded.get_vocab() == original.get_vocab()


def test_older_files_are_converted(tmp_path: Path) -> None:
    original = small_bpe()
    original.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    found = read_auto_tokenizer(str(tmp_path))
    assert found.eos == "<|endoftext|>"
    assert tokenizers.Tokenizer.from_buffer(found.data).encode(TEXT).ids == original.encode(TEXT).ids


@pytest.mark.parametrize(
    ("model_type", "files"),
    [
        # transformers makes one of special tokens alone, or of unknown ones for every text, ...
        ("qwen3", r"\(merges\.txt, tokenizer\.json, vocab\.json\)"),
        ("gemma", r"\(tokenizer\.json\)"),
        # ... or asks for packages that would convert older files.
        ("llama", r"holds no tokenizer\.json"),
        ("ccq", r"holds no tokenizer\.json"),
    ],
)
def test_missing_files_of_a_tokenizer_are_named(model_type: str, files: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=rf"^tokenizer '.*': .*{files}"):
        read_auto_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=rf"^model '.*': .*{files}"):
        read_auto_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer '.*': .* Give a tokenizer\.json, a folder, or a name of"):
        read_auto_tokenizer(str(tmp_path))
