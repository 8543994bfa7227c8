"""Text in, text out: tokenizers beside weights, continuations, and states that are kept between commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.models.small import make

from ccq.cli import main
from ccq.data.corpora import Corpus
from ccq.data.tokenizer import Tokenizer, train_tokenizer
from ccq.models import CCQForCausalLM, attach, load_model, preset, save_gates, save_model
from ccq.models.intervention import read_steps
from ccq.models.text import continue_text, load_tokenizer, save_tokenizer

TEXT = "The heron stands in the water. The otter swims, and the badger digs. "


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    corpus = Corpus(source="here", train=(("a", TEXT * 20),), held_out=(("b", TEXT),), characters=0, sha256="")
    return train_tokenizer(corpus, vocabulary=330, keys=4, values=4)


@pytest.fixture(scope="module")
def folder(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer."""
    torch.manual_seed(1)
    config = preset(
        "gla+ccq-tiny", vocab_size=trained.vocabulary_size, hidden_size=16, head_dim=8, value_head_dim=8,
        initializer_range=0.4, eos_token_id=trained.separator,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    save_model(CCQForCausalLM(config), path)
    save_tokenizer(trained.to_tokenizers(), path, end="<|separator|>")
    return path


def test_the_saved_tokenizer_has_the_same_ids(trained: Tokenizer, folder: Path) -> None:
    loaded = load_tokenizer(folder)
    text = "The otter stands in the water,\n\tnot the heron: café 猫."
    assert loaded(text).input_ids == trained.encode(text)
    assert loaded.decode(trained.encode(text)) == text
    assert len(loaded) == trained.vocabulary_size
    special = trained.needle_vocabulary
    assert loaded("<|remember|><|heron|><|red|>").input_ids == [special.remember, special.keys[0], special.values[0]]
    assert loaded.eos_token_id == trained.separator
    # Only the end of a text is left out of an answer.
    ids = [special.recall, special.keys[1], special.values[1], trained.separator]
    assert loaded.decode(ids, skip_special_tokens=True) == trained.decode(ids[:3])
    assert loaded.padding_side == "left"


def greedy_text(folder: Path, tokenizer: Tokenizer, ids: list[int], new: int) -> str:
    """Read the whole text again for every token, with the tokenizer of the data."""
    model, said = load_model(folder), []
    for _ in range(new):
        with torch.no_grad():
            token = int(model(torch.tensor([ids + said]), use_cache=False).logits[0, -1].argmax())
        if token == tokenizer.separator:
            break
        said.append(token)
    return tokenizer.decode(said)


def test_gates_in_a_file_of_their_own(
    trained: Tokenizer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named, or in the folder of the backbone."""
    torch.manual_seed(3)
    config = preset(
        "gla-tiny", vocab_size=trained.vocabulary_size, hidden_size=16, head_dim=8, value_head_dim=8,
        initializer_range=0.4, eos_token_id=trained.separator,
    )  # fmt: skip
    model = CCQForCausalLM(config)
    backbone, attached = tmp_path / "backbone", tmp_path / "attached"
    save_model(model, backbone)
    for read in read_steps(attach(model)):
        torch.nn.init.constant_(read.gate_scale, 40.0)
    save_gates(model, tmp_path / "gates")
    save_model(model, attached)
    for path in (backbone, attached):
        save_tokenizer(trained.to_tokenizers(), path, end="<|separator|>")
    said = []
    for path, options in (
        (backbone, []),
        (attached, []),
        (backbone, ["--gates", str(tmp_path / "gates")]),
        (backbone, []),
    ):
        command = ["generate", str(path), "--prompt", TEXT, "--max-new-tokens", "12", "--device", "cpu", *options]
        assert main(command) == 0
        said.append(capsys.readouterr().out)
        if options:
            (tmp_path / "gates").rename(backbone / "gates.safetensors")
    alone, *with_gates = said
    assert with_gates == with_gates[:1] * 3
    assert with_gates[0] != alone


def test_a_text_is_continued(trained: Tokenizer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = greedy_text(folder, trained, trained.encode("The otter"), 12)
    assert expected
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    assert continue_text(model, tokenizer, "The otter", max_new_tokens=12) == expected
    assert main(["generate", str(folder), "--prompt", "The otter", "--max-new-tokens", "12", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_a_text_is_continued_under_an_intervention(
    trained: Tokenizer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(folder), "--prompt", "The otter", "--max-new-tokens", "12", "--device", "cpu", "--read"]
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    said = []
    for read in ("on", "off", "scale=-30,heads=0"):
        assert main([*command, read]) == 0
        model.set_read(read)
        said.append(capsys.readouterr().out)
        assert said[-1] == continue_text(model, tokenizer, "The otter", max_new_tokens=12) + "\n"
    assert len(set(said)) > 1
    assert main([*command, "scale"]) == 2
    assert "'scale' is no read intervention" in capsys.readouterr().err


def test_sampling_follows_the_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(folder), "--prompt", "The", "--temperature", "1.5", "--device", "cpu", "--seed"]
    outputs = []
    for seed in ("1", "1", "2"):
        assert main([*arguments, seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_document_is_read_once_and_asked_often(
    trained: Tokenizer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, state = tmp_path / "document.txt", tmp_path / "document.state"
    document.write_text(TEXT * 5, encoding="utf-8")
    read = ["--prompt-file", str(document), "--save-state", str(state), "--max-new-tokens", "0"]
    assert main(["generate", str(folder), "--device", "cpu", *read]) == 0
    assert capsys.readouterr().out == ""
    kept = state.read_bytes()
    for question in ("Who swims?", " The heron"):
        ask = ["--load-state", str(state), "--prompt", question, "--max-new-tokens", "8"]
        assert main(["generate", str(folder), "--device", "cpu", *ask]) == 0
        ids = trained.encode(TEXT * 5) + trained.encode(question)
        assert capsys.readouterr().out == greedy_text(folder, trained, ids, 8) + "\n"
    assert state.read_bytes() == kept


def test_a_state_is_that_after_the_prompt_and_before_the_answer(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    first = continue_text(model, tokenizer, "The heron stands", max_new_tokens=6, save=tmp_path / "a")
    assert first == continue_text(model, tokenizer, "The heron stands", max_new_tokens=6)
    whole = continue_text(model, tokenizer, "The heron stands in", max_new_tokens=6)
    assert continue_text(model, tokenizer, " in", max_new_tokens=6, load=tmp_path / "a") == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/folder", "--prompt", "a"], "ccq: /no/such/folder holds no model"),
        (["MODEL", "--prompt", ""], "ccq: the prompt is empty"),
        (["MODEL", "--prompt", "a", "--max-new-tokens", "-1"], "ccq: max_new_tokens must be 0 or more, got -1"),
        (["MODEL", "--prompt", "a", "--temperature", "0"], "ccq: temperature must be a finite number above 0, got 0.0"),
        (["MODEL", "--prompt", "a", "--load-state", "/no/such/state"], "ccq: /no/such/state does not exist"),
        (["MODEL", "--prompt-file", "/no/such/text"], "ccq: .*No such file or directory: '/no/such/text'"),
        (["BARE", "--prompt", "a"], "ccq: .*holds no tokenizer .tokenizer.json.: save the one"),
        (["OTHER", "--prompt", "zz"], "ccq: the tokenizer gives token .* but the model knows 0 ... 22"),
    ],
)
def test_wrong_input_ends_with_one_clear_line(
    arguments: list[str], message: str, trained: Tokenizer, folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    save_model(make("gla", torch.float32), tmp_path / "bare")
    save_model(make("gla", torch.float32), tmp_path / "other")
    save_tokenizer(trained.to_tokenizers(), tmp_path / "other")
    places = {"MODEL": folder, "BARE": tmp_path / "bare", "OTHER": tmp_path / "other"}
    assert main(["generate", *(str(places.get(argument, argument)) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
