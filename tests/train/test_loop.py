"""The loop on one process: interruptions at any moment, steps left out, full disks, and what is recorded."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train import toy

from ccq.processes import Processes
from ccq.train import checkpoint, loop, metrics
from ccq.train.checkpoint import Checkpoints
from ccq.train.config import OptimizerRecipe
from ccq.train.engine import Engine
from ccq.train.loop import MOST_SKIPPED, Progress
from ccq.train.metrics import read_metrics

SAME = ("step", "tokens", "loss", "grad_norm", "learning_rate", "gate", "correction", "gate_by_decay_alone")


def recorded(folder: Path) -> list[dict[str, Any]]:
    """What is recorded, without times and memory."""
    return [{name: line.get(name) for name in SAME} for line in read_metrics(folder / "metrics.jsonl")]


def weights(folder: Path, step: int = toy.STEPS) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint."""
    engine = toy.make_engine()
    Checkpoints(folder / "checkpoints", keep=1, processes=Processes()).load(engine.model, engine.optimizers, step)
    return engine.model.state_dict()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    _, outcome = toy.run(folder)
    assert outcome[:3] == (toy.STEPS, True, toy.STEPS * toy.BATCH * toy.LENGTH)
    return folder


def assert_same_run(folder: Path, whole: Path) -> None:
    assert recorded(folder) == recorded(whole)
    found = weights(folder)
    for name, value in weights(whole).items():
        assert torch.equal(found[name], value), name


def test_every_step_is_recorded(whole: Path) -> None:
    lines = read_metrics(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, toy.STEPS + 1))
    assert [line["tokens"] for line in lines] == [toy.BATCH * toy.LENGTH * step for step in range(1, toy.STEPS + 1)]
    assert lines[0]["loss"] == pytest.approx(math.log(toy.VOCABULARY), abs=0.5)
    assert lines[2]["learning_rate"] == toy.OPTIMIZER.learning_rate
    assert all(line["tokens_per_second"] > 0 and line["memory"] > 0 and line["mfu"] is None for line in lines)
    observed = [line["step"] for line in lines if "gate" in line]
    assert observed == [1, 3, 6]
    assert all(len(line["gate"]) == len(line["correction"]) == 1 for line in lines if "gate" in line)
    assert lines[0]["gate"] == pytest.approx([0.01], rel=0.05)
    assert lines[0]["gate_by_decay_alone"] == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("log_every", [1, 2])
def test_the_speed_is_that_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int) -> None:
    """By a clock on which a step takes a second, and looking at gates or measuring the held-out loss a thousand."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(loop, "time", clock)

    def taking(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            clock.now += seconds
            return work(*arguments, **options)

        return timed

    monkeypatch.setattr(loop, "observe_window", taking(1000, loop.observe_window))
    monkeypatch.setattr(Engine, "measure", taking(1000, Engine.measure))
    monkeypatch.setattr(Engine, "step", taking(1, Engine.step))
    toy.run(tmp_path, log_every=log_every, observe_every=1, evaluate_every=2, checkpoint_every=100)
    speeds = {line["step"]: line["tokens_per_second"] for line in read_metrics(tmp_path / "metrics.jsonl")}
    assert toy.STEPS in speeds and len(speeds) >= toy.STEPS // log_every
    for step, speed in speeds.items():
        assert speed == pytest.approx(toy.BATCH * toy.LENGTH), step


@pytest.mark.parametrize("stop", [1, 4])
def test_a_stopped_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path, stop: int) -> None:
    _, outcome = toy.run(tmp_path, stop_after=stop, checkpoint_every=100)
    assert (outcome.step, outcome.finished) == (stop, False)
    lines: list[str] = []
    _, outcome = toy.run(tmp_path, checkpoint_every=100, say=lines.append)
    assert (outcome.step, outcome.finished) == (toy.STEPS, True)
    assert lines == [f"going on after step {stop}"]
    assert_same_run(tmp_path, whole)


def test_muon_goes_on_bit_for_bit_too(tmp_path: Path) -> None:
    muon = OptimizerRecipe(learning_rate=1e-2, warmup_steps=3, name="muon")
    whole, _ = toy.run(tmp_path / "whole", checkpoint_every=100, optimizer=muon)
    toy.run(tmp_path / "stopped", checkpoint_every=100, optimizer=muon, stop_after=3)
    resumed, _ = toy.run(tmp_path / "stopped", checkpoint_every=100, optimizer=muon)
    assert recorded(tmp_path / "stopped") == recorded(tmp_path / "whole")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_a_run_that_is_asked_to_stop_saves_and_ends(whole: Path, tmp_path: Path) -> None:
    done: list[int] = []

    def note(progress: Progress) -> None:
        done.append(progress.step)

    _, outcome = toy.run(tmp_path, checkpoint_every=100, on_progress=note, asked_to_stop=lambda: len(done) == 3)
    # The step in which the request arrives is taken.
    assert (outcome.step, outcome.finished) == (4, False)
    toy.run(tmp_path, checkpoint_every=100)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize(
    ("moment", "call", "kept"),
    [
        ("checkpoint.write_json_atomically", 1, 0),  # the folder of the first checkpoint is there and empty
        ("writer.write_data", 3, 2),  # before the tensors of the third
        ("writer.finish", 3, 2),  # tensors written, their index not
        ("checkpoint._flush", 5, 2),  # everything written, without its name
        ("shutil.rmtree", 4, 3),  # before an old one is deleted: it has no name any more
    ],
)
def test_a_kill_while_a_checkpoint_is_written_costs_at_most_that_one(
    whole: Path, tmp_path: Path, moment: str, call: int, kept: int
) -> None:
    assert toy.start(tmp_path, killed_at=moment, kill_call=call) == [-signal.SIGKILL]
    (half,) = (tmp_path / "checkpoints").glob("*.partial")
    lines: list[str] = []
    toy.run(tmp_path, checkpoint_every=100, say=lines.append)
    assert lines[0] == f"{half} is half a checkpoint, left by an interruption; it is deleted and not used"
    assert lines[1:] == ([f"going on after step {kept}"] if kept else [])
    assert_same_run(tmp_path, whole)


def test_the_newest_checkpoints_are_kept(whole: Path, tmp_path: Path) -> None:
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["step-00000005", "step-00000006"]
    toy.run(tmp_path, keep_checkpoints=3, checkpoint_every=2, steps=7)
    assert sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()) == [4, 6, 7]


def test_without_checkpoints_a_run_starts_anew(tmp_path: Path) -> None:
    toy.run(tmp_path, checkpoint_every=None, stop_after=3)
    assert not list((tmp_path / "checkpoints").iterdir())
    toy.run(tmp_path, checkpoint_every=None)
    assert [line["step"] for line in recorded(tmp_path)] == list(range(1, toy.STEPS + 1))


@pytest.mark.parametrize("kind", ["cut", "flipped", "missing"])
@pytest.mark.parametrize("damage", ["state.json", "__0_0.distcp", ".metadata", "checksums.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(
    whole: Path, tmp_path: Path, damage: str, kind: str
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000006"
    content = bytearray((folder / damage).read_bytes())
    # The middle of the tensors: numbers that stay numbers.
    content[len(content) // 2] ^= 1
    (folder / damage).write_bytes(content if kind == "flipped" else content[: len(content) // 3])
    if kind == "missing":
        (folder / damage).unlink()
    message = r"step-00000006 is damaged.*delete that folder; the run then goes on from step-00000005"
    with pytest.raises(ValueError, match=message):
        toy.run(tmp_path / "run")
    shutil.rmtree(folder)
    toy.run(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_a_checkpoint_of_another_model_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(ValueError, match=r"step-00000006 is damaged or belongs to another model"):
        toy.run(tmp_path / "run", arm="mamba2")


class FullDisk:
    """Stands for a disk that is full while `full` is set: writing fails as the system does it."""

    def __init__(self, original: Any) -> None:
        self.original, self.full = original, False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.original(*arguments, **options)


@pytest.mark.parametrize("what", ["tensors", "state", "metrics"])
def test_a_full_disk_loses_nothing(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    places = {
        "tensors": (checkpoint.dcp.FileSystemWriter, "write_data"),
        "state": (checkpoint, "write_json_atomically"),
        "metrics": (metrics, "open"),
    }
    owner, name = places[what]
    disk = FullDisk(open if what == "metrics" else getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *given, **options: disk(*given, **options), raising=False)
    lines: list[str] = []

    def fill(progress: Progress) -> None:
        disk.full = progress.step in (1, 2, 3)

    toy.run(tmp_path, checkpoint_every=2, on_progress=fill, say=lines.append)
    assert lines and all("No space left on device" in line for line in lines), lines
    assert_same_run(tmp_path, whole)


def test_a_disk_that_stays_full_ends_the_run_with_whole_checkpoints(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(checkpoint.dcp.FileSystemWriter.write_data)
    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", lambda *given: disk(*given))

    def fill(progress: Progress) -> None:
        disk.full = progress.step >= 4

    with pytest.raises(OSError, match="No space left on device"):
        toy.run(tmp_path, checkpoint_every=2, on_progress=fill)
    disk.full = False
    lines: list[str] = []
    toy.run(tmp_path, checkpoint_every=2, say=lines.append)
    assert lines == ["going on after step 2"]
    assert_same_run(tmp_path, whole)


def poison(engine: Any, steps: set[int]) -> Any:
    """Make the gradient of some steps infinite."""
    state = {"step": 0}

    def count(progress: Progress) -> None:
        state["step"] = progress.step

    engine.model.lm_head.weight.register_hook(
        lambda gradient: gradient * math.inf if state["step"] + 1 in steps else gradient
    )
    return count


def test_a_step_that_is_not_finite_is_left_out_and_said(whole: Path, tmp_path: Path) -> None:
    engine, lines = toy.make_engine(), []
    toy.run(tmp_path, engine=engine, checkpoint_every=100, on_progress=poison(engine, {3}), say=lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("step 3 is left out: not finite (loss 4.")
    found, expected = recorded(tmp_path), recorded(whole)
    assert [line["loss"] for line in found[:2]] == [line["loss"] for line in expected[:2]]
    skipped = read_metrics(tmp_path / "metrics.jsonl")[2]
    assert (skipped["skipped"], skipped["loss"], skipped["grad_norm"]) == (True, None, None)
    # The weights are those of the step before; the data of the step are spent.
    assert found[3]["tokens"] == expected[3]["tokens"] and found[3]["loss"] != expected[3]["loss"]
    assert all(math.isfinite(line["loss"]) for line in found[3:])


def test_a_few_such_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    engine = toy.make_engine()
    steps = set(range(3, 3 + MOST_SKIPPED))
    with pytest.raises(
        FloatingPointError, match=r"step 7 is left out.* as are the 4 before it.*learning rate than 0.01"
    ):
        toy.run(tmp_path, engine=engine, steps=8, checkpoint_every=100, on_progress=poison(engine, steps))
    engine = toy.make_engine()
    count = poison(engine, steps - {5})
    assert toy.run(tmp_path / "other", engine=engine, steps=8, checkpoint_every=100, on_progress=count)[1].finished


def test_losses_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a text that repeats seven tokens in a row, which can be learned to the end."""
    monkeypatch.setattr(toy, "TOKENS", (toy.TOKENS * 0 + torch.arange(4000).numpy() % 7).astype("uint16"))
    toy.run(tmp_path, steps=60, checkpoint_every=100, observe_every=100)
    assert recorded(tmp_path)[-1]["loss"] < 0.5
