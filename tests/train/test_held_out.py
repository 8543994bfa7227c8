"""The loss on held-out text: the value of a plain loop, in one process and two, and a training that does not notice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import toy
from torch.nn import functional
from transformers import AutoModelForCausalLM

import ccq.models  # noqa: F401 - tells the Auto classes about the models
from ccq.cli import main
from ccq.data import TokenFolder, file_source, prepare_shards
from ccq.train.metrics import read_metrics

RECIPE = """
model: {preset: gla+ccq-tiny, num_layers: 1}
data: {folder: data, length: 32}
training: {steps: 6, tokens_per_step: 128}
optimizer: {learning_rate: 1e-2, warmup_steps: 2}
system: {rows: 2, dtype: float32, checkpoint_every: 2}
"""
EVALUATION = ["--set", "evaluation.every=4", "--set", "evaluation.tokens=200"]
TRAINED = ("step", "tokens", "loss", "grad_norm", "gate", "correction")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"line {n} of a text"}) + "\n" for n in range(900)))
    for held_out in (0, 60):
        prepare_shards(folder / f"{held_out}", file_source([str(folder / "text.jsonl")]), 300, held_out=held_out)
    return folder


@pytest.fixture
def place(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "data").symlink_to(data / "60")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(folder: Path, names: tuple[str, ...] = TRAINED) -> list[dict[str, Any]]:
    return [{name: line.get(name) for name in names} for line in read_metrics(folder / "metrics.jsonl")]


def test_training_does_not_notice_and_the_value_is_that_of_a_plain_loop(place: Path) -> None:
    train = ["train", "recipe.yaml", "--out"]
    assert main([*train, "without"]) == 0
    assert main([*train, "with", *EVALUATION]) == 0
    assert lines(place / "with") == lines(place / "without")
    measured = {line["step"]: line.get("held_out_loss") for line in read_metrics(place / "with" / "metrics.jsonl")}
    assert [step for step, loss in measured.items() if loss is not None] == [1, 4, 6]
    assert all("held_out_loss" not in line for line in read_metrics(place / "without" / "metrics.jsonl"))
    for step, file in ((6, "with"), (6, "without")):
        tokens = TokenFolder.open(place / "data").held_out.read(0, 200).astype("int64")
        model = AutoModelForCausalLM.from_pretrained(place / file / "model")
        losses = []
        for start in range(0, 6 * 32, 32):
            window = torch.from_numpy(tokens[start : start + 33])
            with torch.no_grad():
                logits = model(window[None, :-1]).logits[0].double()
            losses += functional.cross_entropy(logits, window[1:], reduction="none").tolist()
        assert measured[step] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)


def test_a_run_that_goes_on_measures_the_same(place: Path) -> None:
    """Interrupted behind a measurement, between two, and with the measurement changed meanwhile."""
    train, names = ["train", "recipe.yaml", "--out"], (*TRAINED, "held_out_loss")
    assert main([*train, "whole", *EVALUATION]) == 0
    for step in (3, 4):
        assert main([*train, f"at {step}", *EVALUATION, "--stop-after", str(step)]) == 0
        assert main([*train, f"at {step}", *EVALUATION]) == 0
        assert lines(place / f"at {step}", names) == lines(place / "whole", names)
    assert main([*train, "other", *EVALUATION, "--stop-after", "3"]) == 0
    assert main([*train, "other", "--set", "evaluation.every=5"]) == 0
    assert lines(place / "other") == lines(place / "whole")


def test_a_measurement_is_written_where_no_line_is_due(place: Path) -> None:
    assert main(["train", "recipe.yaml", "--out", "run", *EVALUATION, "--set", "system.log_every=100"]) == 0
    assert [line["step"] for line in read_metrics(place / "run" / "metrics.jsonl")] == [1, 4, 6]
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(place / "run" / "tensorboard"))
    events.Reload()
    shown = [(point.step, point.value) for point in events.Scalars("held_out_loss")]
    written = read_metrics(place / "run" / "metrics.jsonl")
    assert shown == [(line["step"], pytest.approx(line["held_out_loss"])) for line in written]


@pytest.mark.parametrize("pack_documents", [False, True])
def test_what_counts_is_every_target_inside_of_its_document(pack_documents: bool) -> None:
    engine = toy.make_engine()
    found = engine.measure(toy.make_held_out(pack_documents=pack_documents).batches())
    starts = (0, 5, 6, 40, 64, 100)
    losses = []
    for first in range(0, 7 * toy.LENGTH, toy.LENGTH):
        end = first + toy.LENGTH
        inside = [start for start in starts if first < start < end] if pack_documents else []
        for start, stop in zip([first, *inside], [*inside, end], strict=True):
            tokens = torch.from_numpy(toy.HELD_OUT[start : stop + 1].astype("int64"))
            with torch.no_grad():
                logits = engine.model(tokens[None, :-1]).logits[0].double()
            each = functional.cross_entropy(logits, tokens[1:], reduction="none").tolist()
            # The last target of a document is the first token of the next one.
            losses += each[:-1] if pack_documents and stop in starts else each
    assert found == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)


def test_two_processes_measure_what_one_measures(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 3, "evaluate_every": 2, "checkpoint_every": 100}
    toy.run(tmp_path / "one", **options)
    assert toy.start(tmp_path / "two", count=2, **options) == [0, 0]
    assert toy.start(tmp_path / "unmeasured", count=2, **options | {"evaluate_every": None}) == [0, 0]
    one, two = (
        [line["held_out_loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")
    )
    assert len(one) == 3
    assert two == pytest.approx(one, rel=1e-5)
    assert lines(tmp_path / "two") == lines(tmp_path / "unmeasured")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.folder=DATA/0"], "holds out 0 tokens and a window takes 33; prepare the data with a larger --held-out"),
        (["data.folder=null", "data.synthetic_tokens=9000"], "evaluation.every needs held-out text"),
        (["evaluation.tokens=31"], "evaluation.tokens must be at least data.length, got 31 and 32"),
        (["evaluation.every=0"], "evaluation.every must be at least 1, got 0"),
        (["evaluation.token=64"], "unknown key evaluation.token"),
    ],
)
def test_what_cannot_be_measured_is_named(
    place: Path, data: Path, changes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text for change in changes for text in ("--set", change.replace("DATA", str(data)))]
    assert main(["train", "recipe.yaml", "--out", "run", *EVALUATION, *given]) == 2
    assert message in capsys.readouterr().err
