"""`ccq eval` as users call it: files, what is printed, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from ccq.cli import main
from ccq.evals.benchmarks import LANGUAGE, LONGBENCH
from ccq.evals.harness import load
from ccq.evals.results import EvalResults, read_results
from ccq.evals.suites import EXTRAPOLATION_LENGTHS, SUITES
from ccq.models import CCQForCausalLM, detach, preset, save_gates, save_model
from ccq.models.intervention import GATE_VALUES_FILE, load_gate_values

CHOICE = {"goal": "open it", "sol1": "pull", "sol2": "push", "label": 0}
ARC = {"question": "What?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
ROWS: dict[str, dict[str, Any]] = {
    "wikitext": {"page": "A cat sat ."},
    "lambada_openai": {"text": "He gave her books"},
    "piqa": CHOICE,
    "hellaswag": {"activity_label": "A", "ctx_a": "B.", "ctx_b": "c", "endings": ["d", "e"], "label": "1"},
    "winogrande": {"sentence": "As _ left.", "option1": "Ann", "option2": "Bob", "answer": "1"},
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "social_iqa": {"context": "A", "question": "B", "answerA": "c", "answerB": "d", "answerC": "e", "label": "3"},
    "boolq": {"passage": "A.", "question": "b", "label": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, row in ROWS.items():
        (root / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    (root / "mine.txt").write_text("It was a long night. " * 60)
    return root


def evaluate(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str) -> tuple[EvalResults, str]:
    assert main(["eval", *arguments, "--out", str(out), "--device", "cpu"]) == 0
    return read_results(out, "eval"), capsys.readouterr().out


def test_extrapolation(ccq_folder: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["extrapolation", str(ccq_folder), "--data", str(folder), "--tasks", "mine", "--lengths", "100", "200"]
    results, printed = evaluate(capsys, tmp_path / "r.json", *arguments, "--read", "off")
    assert [task["task"] for task in results["tasks"]] == ["mine/100", "mine/200"]
    assert results["complete"]
    assert results["summary"] == []
    assert results["model"]["read"] == "off"
    settings = results["settings"]
    assert (settings["max_length"], settings["truncation_side"], settings["others"]["lengths"]) == (
        None,
        "none",
        [100, 200],
    )
    for task in results["tasks"]:
        assert f"{task['scores'][0]['value']:.4f}" in printed
    other, _ = evaluate(capsys, tmp_path / "on.json", *arguments)
    assert other["tasks"][0]["scores"][0]["value"] != results["tasks"][0]["scores"][0]["value"]
    assert other["tasks"][0]["data"] == results["tasks"][0]["data"]
    assert [*EXTRAPOLATION_LENGTHS] == [4096, 6144, 8192, 10240, 12288, 14336, 16384, 18432, 20480]


def test_an_intervention_is_named_and_another_one_is_refused(
    ccq_folder: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(ccq_folder, model)
    assert main(["gates", str(model), "--tokens", "300", "--length", "100", "--device", "cpu"]) == 0
    assert "300 tokens of Python" in capsys.readouterr().out
    digest = load_gate_values(model / GATE_VALUES_FILE).digest
    arguments = ["extrapolation", str(model), "--data", str(folder), "--tasks", "mine", "--lengths", "100"]
    scores = {}
    for read, named in (
        ("scale=40.0", "scale=40"),
        ("heads=1,layers=0", "layers=0,heads=1"),
        ("gate=mean,scale=40", f"scale=40,gate=mean,values={digest}"),
        ("gate=shuffled", f"gate=shuffled,seed=0,values={digest}"),
    ):
        results, _ = evaluate(capsys, tmp_path / f"{read}.json", *arguments, "--read", read)
        assert results["model"]["read"] == named
        scores[read] = results["tasks"][0]["scores"][0]["value"]
    on, _ = evaluate(capsys, tmp_path / "on.json", *arguments)
    unchanged = on["tasks"][0]["scores"][0]["value"]
    # The gate of a fresh model is 0.01 everywhere: its mean is itself, and so is any order of its values.
    assert scores.pop("gate=shuffled") == pytest.approx(unchanged, rel=1e-6)
    assert scores["gate=mean,scale=40"] == pytest.approx(scores["scale=40.0"], rel=1e-6)
    assert all(score != pytest.approx(unchanged, rel=1e-6) for score in scores.values())
    out = ["--out", str(tmp_path / "scale=40.0.json"), "--device", "cpu"]
    assert main(["eval", *arguments, *out, "--read", "scale=4"]) == 2
    assert 'model.read is "scale=40" there and "scale=4" here' in capsys.readouterr().err
    # Other values of the gate are another intervention.
    assert main(["gates", str(model), "--tokens", "200", "--length", "100", "--device", "cpu", "--json"]) == 0
    means = json.loads(capsys.readouterr().out)
    assert means == load_gate_values(model / GATE_VALUES_FILE).means()
    out = ["--out", str(tmp_path / "gate=shuffled.json"), "--device", "cpu"]
    assert main(["eval", *arguments, *out, "--read", "gate=shuffled"]) == 2
    assert f'model.read is "gate=shuffled,seed=0,values={digest}" there' in capsys.readouterr().err


def test_means_are_printed_as_a_configuration_takes_them(
    ccq_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An observer of ccq-strength sees D times what its configuration holds."""
    model = tmp_path / "model"
    shutil.copytree(ccq_folder, model)
    save_model(CCQForCausalLM(preset("gla+ccq-strength-tiny", vocab_size=257)), model)
    assert main(["gates", str(model), "--tokens", "30", "--length", "30", "--device", "cpu", "--json"]) == 0
    # Of a fresh model, in layers of two heads of 32.
    assert json.loads(capsys.readouterr().out) == [pytest.approx([0.01, 0.01])] * 2
    assert load_gate_values(model / GATE_VALUES_FILE).means() == [pytest.approx([0.32, 0.32])] * 2


def test_a_model_with_an_attached_read_step(
    attached_folder: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved by `save_pretrained`: with the gates that are in its folder, and changed by the same words."""
    values = tmp_path / "values.safetensors"
    command = ["gates", str(attached_folder), "--tokens", "300", "--length", "100", "--device", "cpu"]
    assert main([*command, "--out", str(values)]) == 0
    assert "300 tokens of Python" in capsys.readouterr().out
    backbone = tmp_path / "backbone"
    shutil.copytree(attached_folder, backbone)
    weights = safetensors.torch.load_file(backbone / "model.safetensors")
    plain = {name: x for name, x in weights.items() if ".read." not in name}
    safetensors.torch.save_file(plain, backbone / "model.safetensors", {"format": "pt"})
    scores, named = {}, {}
    for read in ("none", "on", "off", "scale=0.5", "layers=2", "gate=mean"):
        model, options = (backbone, []) if read == "none" else (attached_folder, ["--read", read])
        if read == "gate=mean":
            options += ["--gate-values", str(values)]
        arguments = ["extrapolation", str(model), "--data", str(folder), "--tasks", "mine", "--lengths", "100"]
        results, _ = evaluate(capsys, tmp_path / f"{read}.json", *arguments, *options)
        named[read] = results["model"]["read"]
        scores[read] = results["tasks"][0]["scores"][0]["value"]
    digest = load_gate_values(values).digest
    same = {read: read for read in ("on", "off", "scale=0.5", "layers=2")}
    assert named == {"none": None, **same, "gate=mean": f"gate=mean,values={digest}"}
    assert scores.pop("none") == scores["off"]
    assert len(set(scores.values())) == 5


def test_gates_in_a_file_of_their_own(
    attached_folder: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named, or in the folder of the backbone: the same as gates among the weights."""
    model = load(str(attached_folder), device="cpu").model
    save_gates(model, tmp_path / "gates.safetensors")
    backbone = tmp_path / "backbone"
    shutil.copytree(attached_folder, backbone)
    detach(model).save_pretrained(backbone)
    arguments = ["--data", str(folder), "--tasks", "mine", "--lengths", "100"]
    scores, means = {}, {}
    for case, given in (
        ("weights", [str(attached_folder)]),
        ("backbone", [str(backbone)]),
        ("named", [str(backbone), "--gates", str(tmp_path / "gates.safetensors")]),
        ("found", [str(backbone)]),
    ):
        if case == "found":
            shutil.copy(tmp_path / "gates.safetensors", backbone)
        results, _ = evaluate(capsys, tmp_path / f"{case}.json", "extrapolation", *given, *arguments)
        assert results["model"]["read"] == (None if case == "backbone" else "on")
        scores[case] = results["tasks"][0]["scores"][0]["value"]
        if case != "backbone":
            values = tmp_path / f"{case}.safetensors"
            command = ["gates", *given, "--tokens", "200", "--length", "100", "--device", "cpu", "--out", str(values)]
            assert main(command) == 0
            means[case] = load_gate_values(values).means()
    assert scores["named"] == scores["found"] == pytest.approx(scores["weights"], rel=1e-6)
    assert scores["backbone"] != pytest.approx(scores["weights"], rel=1e-6)
    assert means["named"] == means["found"] == [pytest.approx(row, rel=1e-5) for row in means["weights"]]
    capsys.readouterr()
    out = ["--out", str(tmp_path / "r.json"), "--device", "cpu"]
    assert main(["eval", "extrapolation", str(backbone), *arguments, *out, "--gates", str(tmp_path / "no file")]) == 2
    assert "no file does not exist or is not a file; expected a file written by save_gates" in capsys.readouterr().err


def test_language(llama_folder: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["language", str(llama_folder), "--data", str(folder), "--max-length", "512", "--limit", "1"]
    results, printed = evaluate(capsys, tmp_path / "r.json", *arguments)
    assert "Maximum length: 512 tokens" in printed
    assert [task["task"] for task in results["tasks"]] == list(LANGUAGE)
    assert all(score["samples"] == 1 for task in results["tasks"] for score in task["scores"])
    by_name = {task["task"]: task["scores"][0]["value"] for task in results["tasks"]}
    seven = ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq")
    (mean,) = results["summary"]
    assert mean["value"] == pytest.approx(math.fsum(by_name[name] for name in seven) / 7)
    assert (results["settings"]["max_length"], results["settings"]["limit"]) == (512, 1)


def test_the_models_own_length_is_the_default(
    llama_folder: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["language", str(llama_folder), "--data", str(folder), "--tasks", "boolq"]
    results, printed = evaluate(capsys, tmp_path / "r.json", *arguments)
    assert results["settings"]["max_length"] == 4096
    assert results["summary"] == []
    assert "Maximum length: 4096 tokens" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["language", "MODEL", "--data", "/no/such"], "the data folder /no/such does not exist"),
        (["language", "MODEL", "--tasks", "pica"], "unknown task 'pica'; accepted: wikitext, "),
        (
            ["longbench", "MODEL", "--data", "DATA"],
            r"holds no data of 'narrativeqa'; put there narrativeqa/test\.jsonl",
        ),
        (["needle", "MODEL", "--tasks", "niah"], "unknown needle task 'niah'; accepted: niah_single_1, "),
        (["needle", "MODEL", "--preset", "read-off", "--lengths", "9"], "leave --tasks and --lengths out"),
        (["extrapolation", "MODEL", "--tasks", "x"], r"no text 'x' is known; give --data FOLDER with x\.txt"),
        (["extrapolation", "/no/such", "--tasks", "stdlib"], "Give a folder with a model and its tokenizer"),
    ],
)
def test_wrong_input_ends_with_one_clear_line(
    arguments: list[str],
    message: str,
    llama_folder: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [{"MODEL": str(llama_folder), "DATA": str(folder)}.get(argument, argument) for argument in arguments]
    assert main(["eval", *given, "--out", str(tmp_path / "r.json"), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("ccq: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0])


def test_the_suites_are_those_of_the_paper() -> None:
    assert SUITES == ("extrapolation", "needle", "language", "longbench")
    assert (len(LANGUAGE), len(LONGBENCH)) == (9, 14)
