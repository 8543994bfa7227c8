"""`ccq train` from a recipe to the exported model, and the folder it works in."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ccq.models  # noqa: F401 - tells the Auto classes about the models
from ccq.cli import main
from ccq.data import TokenFolder, file_source, prepare_shards
from ccq.files import lock_folder
from ccq.models import preset
from ccq.train.engine import initial_model
from ccq.train.loop import Progress
from ccq.train.metrics import read_metrics

RECIPE = """
model: {preset: gla+ccq-tiny, num_layers: 1}
data: {folder: data, length: 32}
training: {steps: 6, tokens_per_step: 128}
optimizer: {learning_rate: 1e-2, warmup_steps: 2}
system: {rows: 2, dtype: float32, checkpoint_every: 2}
"""
TRAIN = ["train", "recipe.yaml", "--out", "run"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(1000)))
    prepare_shards(folder / "tokens", file_source([str(text)]), 300, held_out=0)
    return folder / "tokens"


@pytest.fixture
def place(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe and its data."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "data").symlink_to(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "recipe.yaml").write_text(RECIPE.replace("folder: data", f"folder: {data}"))
    assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def loss_of(model: torch.nn.Module, data: Path) -> float:
    """Nats a token of the first window of the data."""
    tokens = torch.from_numpy(TokenFolder.open(data).train.read(0, 33).astype("int64"))[None]
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


def test_the_exported_model_is_the_trained_one(finished: Path, data: Path) -> None:
    """Loaded by transformers alone, it gives the logits of the weights in the last checkpoint."""
    from ccq.processes import Processes
    from ccq.train.checkpoint import Checkpoints
    from ccq.train.config import OptimizerRecipe
    from ccq.train.engine import Engine

    model = AutoModelForCausalLM.from_pretrained(finished / "model").eval()
    assert model.dtype == torch.float32
    config = preset("gla+ccq-tiny", num_layers=1, vocab_size=TokenFolder.open(data).vocabulary_size)
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (config.vocab_size, 32)
    engine = Engine(initial_model(config, 0), OptimizerRecipe(learning_rate=1e-2, warmup_steps=2))
    Checkpoints(finished / "checkpoints", keep=2, processes=Processes()).load(engine.model, engine.optimizers)
    tokens = torch.randint(config.vocab_size, (2, 20))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, engine.model.eval()(tokens).logits)
    # Trained, and more than a little.
    assert loss_of(model, data) < loss_of(initial_model(config, 0), data) - 0.3


def test_the_exported_tokenizer_is_that_of_the_data(finished: Path, data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    folder = TokenFolder.open(data)
    text = "line 5 of a text"
    assert tokenizer(text).input_ids == folder.tokenizer().encode(text, add_special_tokens=False).ids
    config = json.loads((finished / "model" / "config.json").read_bytes())
    assert config["eos_token_id"] == tokenizer.eos_token_id == folder.index["eos"]["id"]


def test_a_finished_run_is_not_trained_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != ".lock" and path.is_file()}
    assert main(["train", str(finished.parent / "recipe.yaml"), "--out", str(finished)]) == 0
    assert "holds a finished run; its model is in" in capsys.readouterr().out.replace("\n", " ")
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_stop_after_ends_as_an_interruption_and_the_command_goes_on(
    finished: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--stop-after", "3"]) == 0
    assert "Stopped after step 3 of 6; the same command goes on from here." in capsys.readouterr().out
    assert not (place / "run" / "model").exists()
    # What may change in between: everything in `system`, and where the data are.
    (place / "moved").symlink_to((place / "data").resolve())
    changes = ["--set", "system.rows=4", "--set", "data.folder=moved", "--set", "system.log_every=1"]
    assert main([*TRAIN, *changes]) == 0
    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (place / "run", finished))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    # Rows in one product are rounded differently from rows in two.
    assert [line["loss"] for line in ours[:3]] == [line["loss"] for line in theirs[:3]]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_and_is_told_to_the_shell(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    from ccq.train import run

    original: Callable[..., None] = run._ProgressLine.update

    def update(line: object, progress: Progress) -> None:
        if progress.step == 3:
            signal.raise_signal(number)
        original(line, progress)

    monkeypatch.setattr(run._ProgressLine, "update", update)
    before = signal.getsignal(number)
    assert main(TRAIN) == 128 + number
    assert signal.getsignal(number) == before
    assert (place / "run" / "checkpoints" / "step-00000004").exists()
    assert len(read_metrics(place / "run" / "metrics.jsonl")) == 4


def test_losses_that_are_never_finite_end_with_an_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "optimizer.learning_rate=1e30", "--set", "training.steps=20"]
    assert main([*TRAIN, *changes, "--set", "optimizer.warmup_steps=0"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("is left out: not finite") == 5
    assert "a lower learning rate than 1e+30 may help" in captured.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.gate=0.1", "model.gate is null there and 0.1 here"),
        ("optimizer.learning_rate=0.02", "optimizer.learning_rate is 0.01 there and 0.02 here"),
        ("training.seed=1", "training.seed is 0 there and 1 here"),
    ],
)
def test_another_recipe_in_the_folder_is_named(
    finished: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    command = ["train", str(finished.parent / "recipe.yaml"), "--out", str(finished), "--set", change]
    assert main(command) == 2
    assert f"holds a run with other settings: {message}. Choose another --out" in capsys.readouterr().err


def test_other_data_are_named(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--stop-after", "2"]) == 0
    (tmp_path / "other.txt").write_text("".join(f"another line {n}\n" for n in range(1000)))
    for vocabulary in (300, 290):  # with another vocabulary the weights do not fit either
        prepare_shards(
            tmp_path / f"other-{vocabulary}", file_source([str(tmp_path / "other.txt")]), vocabulary, held_out=0
        )
        assert main([*TRAIN, "--set", f"data.folder=other-{vocabulary}", "--set", "system.rows=1"]) == 2
        error = capsys.readouterr().err
        assert "the saved data order has data" in error
        assert "damaged" not in error


@pytest.mark.parametrize("wrong", ["data.length=500000", "data.folder=nowhere"])
def test_a_recipe_that_cannot_be_trained_leaves_the_folder_free(
    place: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert main([*TRAIN, "--set", wrong]) == 2
    assert not list(Path("run").glob("[!.]*"))
    assert main([*TRAIN, "--stop-after", "2"]) == 0
    # Once there is something in it, a wrong call leaves all as it is.
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*TRAIN, "--set", wrong]) == 2
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert main(TRAIN) == 0


def test_a_second_run_in_the_folder_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--stop-after", "1"]) == 0
    with lock_folder(place / "run", "training"):
        assert main(TRAIN) == 2
    assert "another training is running in run" in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run").mkdir()
    (place / "run" / "thesis.tex").write_text("")
    assert main(TRAIN) == 2
    assert "run holds other files (thesis.tex) and no run" in capsys.readouterr().err
    assert main(["train", "recipe.yaml", "--out", "recipe.yaml"]) == 2
    assert "recipe.yaml is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.folder=nowhere"], "nowhere does not exist; give a folder made by `ccq data prepare`"),
        (["model.vocab_size=299"], "model.vocab_size is 299, but the data have tokens up to 299"),
        (["system.rows=3"], "give a batch size that is a multiple of 3, or one of these for rows: 1, 2, 4"),
        (["training.steps=0"], "training.steps must be at least 1, got 0"),
        ([f"training.seed={2**63}"], f"training.seed must be in 0 ... 2**63 - 1, got {2**63}"),
        (["training.seed=-1"], "training.seed must be in 0 ... 2**63 - 1, got -1"),
    ],
)
def test_what_cannot_be_trained_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], changes: list[str], message: str
) -> None:
    assert main([*TRAIN, *(part for change in changes for part in ("--set", change))]) == 2
    assert message in capsys.readouterr().err


def test_the_folder_is_needed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe.yaml"]) == 2
    assert "--out is needed" in capsys.readouterr().err


def test_random_tokens_measure_speed_and_leave_nothing(place: Path) -> None:
    changes = ["data.folder=null", "data.synthetic_tokens=2000", "system.checkpoint_every=null", "model.vocab_size=50"]
    assert main([*TRAIN, *(part for change in changes for part in ("--set", change))]) == 0
    lines = read_metrics(place / "run" / "metrics.jsonl")
    assert len(lines) == 6 and lines[0]["loss"] == pytest.approx(math.log(50), abs=0.5)
    assert not (place / "run" / "model").exists() and not list((place / "run" / "checkpoints").iterdir())


def test_data_are_prepared_where_the_recipe_says_how(
    place: Path, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ccq.train import run

    text = tmp_path / "small.txt"
    text.write_text("".join(f"a line with number {n}\n" for n in range(500)))
    monkeypatch.setattr(run, "embedded_source", lambda: file_source([str(text)]))
    monkeypatch.setattr(run, "_STDLIB_HELD_OUT", 0)
    changes = ["--set", "data.folder=made", "--set", "data.stdlib_tokenizer=280"]
    assert main([*TRAIN, *changes, "--stop-after", "1"]) == 0
    folder = TokenFolder.open(place / "made")
    assert folder.vocabulary_size == 280
    assert "number 499" in folder.tokenizer().decode(folder.train.read(0, folder.train.tokens).tolist())
    shutil.rmtree(place / "run")
    stamp = (place / "made" / "index.json").stat().st_mtime_ns
    assert main([*TRAIN, *changes, "--stop-after", "1"]) == 0
    assert (place / "made" / "index.json").stat().st_mtime_ns == stamp


def test_tensorboard_gets_the_same_numbers(place: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert main(TRAIN) == 0
    events = event_accumulator.EventAccumulator(str(place / "run" / "tensorboard"))
    events.Reload()
    lines = read_metrics(place / "run" / "metrics.jsonl")
    for name in ("loss", "grad_norm", "learning_rate"):
        shown = [(point.step, point.value) for point in events.Scalars(name)]
        assert shown == [(line["step"], pytest.approx(line[name])) for line in lines]
    assert events.Scalars("gate/layer 0")[0].value == pytest.approx(lines[0]["gate"][0])
