"""`ccq diagnose` from a folder with a model to the two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.analysis.tokenizer import prompt_tokenizer

from ccq.analysis.diagnosis import DiagnosisResults, diagnose
from ccq.cli import main
from ccq.evals.results import _check
from ccq.models import CCQForCausalLM, attach, preset, read_steps, save_gates
from ccq.report.diagnosis import headline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    CCQForCausalLM(preset("gla+ccq-tiny", vocab_size=700, initializer_range=0.2)).save_pretrained(path)
    prompt_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccq.report.diagnosis.all_figures", lambda results: [])


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_what_the_function_finds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    arguments = ["diagnose", str(folder), "--out", str(out), "--prompts", "2", "--fillers", "4", "--device", "cpu"]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found: Any = json.loads((out / "diagnosis.json").read_text())
    _check(found, DiagnosisResults, "")
    assert sorted(path.name for path in out.iterdir()) == ["diagnosis.html", "diagnosis.json"]
    model = CCQForCausalLM.from_pretrained(folder).eval()
    expected = diagnose(
        model, prompt_tokenizer(), name=str(folder), environment=found["environment"], prompts=2, fillers=4
    )
    assert found == {**expected, "created": found["created"]}
    assert headline(found) in shown


@pytest.mark.usefixtures("undrawn")
def test_the_read_step_is_changed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["diagnose", str(folder), "--out", str(tmp_path), "--prompts", "1", "--fillers", "4", "--device", "cpu"]
    sizes = []
    for read in ("scale=1", "scale=-2,layers=0"):
        assert main([*command, "--read", read]) == 0
        found = json.loads((tmp_path / "diagnosis.json").read_text())
        sizes.append([layer["relative_size"]["text"] for layer in found["correction"]])
    assert found["model"]["read"] == "scale=-2,layers=0"
    # Nothing before the first correction has changed; sizes have no sign.
    assert sizes[1] == [pytest.approx(2 * sizes[0][0], rel=1e-5), 0]
    assert main([*command, "--read", "gate=mean"]) == 2
    assert "`ccq gates" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_gates_in_a_file_of_their_own(tmp_path: Path) -> None:
    """Named, or in the folder of the backbone."""
    torch.manual_seed(0)
    model = CCQForCausalLM(preset("gla-tiny", vocab_size=700, initializer_range=0.2)).eval()
    model.save_pretrained(tmp_path / "model")
    prompt_tokenizer().save_pretrained(tmp_path / "model")
    for read in read_steps(attach(model)):
        torch.nn.init.ones_(read.gate_scale)
    save_gates(model, tmp_path / "gates")
    command = ["diagnose", str(tmp_path / "model"), "--prompts", "1", "--fillers", "4", "--device", "cpu"]
    found: list[Any] = []
    for options in ([], ["--gates", str(tmp_path / "gates")], []):
        assert main([*command, "--out", str(tmp_path / "out"), *options]) == 0
        found.append(json.loads((tmp_path / "out" / "diagnosis.json").read_text()))
        if options:
            (tmp_path / "gates").rename(tmp_path / "model" / "gates.safetensors")
    alone, *with_gates = found
    assert alone["model"]["read"] is None
    expected = diagnose(
        model, prompt_tokenizer(), name=command[1], environment=alone["environment"], prompts=1, fillers=4
    )
    for each in with_gates:
        assert each == {**expected, "environment": each["environment"], "created": each["created"]}


@pytest.mark.usefixtures("undrawn")
def test_own_text_stands_around_the_needle(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("The first sentence is here. The second sentence is here.\n")
    command = ["diagnose", str(folder), "--out", str(tmp_path), "--prompts", "1", "--fillers", "4", "--device", "cpu"]
    assert main([*command, "--text", str(tmp_path / "text")]) == 0
    settings = json.loads((tmp_path / "diagnosis.json").read_text())["settings"]
    assert settings["text"] == str(tmp_path / "text") and settings["sentences"] == 2
    assert main(command) == 0
    without = json.loads((tmp_path / "diagnosis.json").read_text())["settings"]
    assert without["text"] is None and without["tokens"] != settings["tokens"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--fillers", "1"], "at least 1 prompt with 2 sentences"),
        (["--text", "nowhere"], "text folder nowhere does not exist"),
    ],
)
def test_wrong_input_is_named_and_writes_nothing(
    folder: Path, tmp_path: Path, changes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(folder), "--out", str(tmp_path / "out"), "--device", "cpu", *changes]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
