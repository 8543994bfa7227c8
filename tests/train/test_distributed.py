"""Two processes under gloo against one: the same run, checkpoints that either can go on from, and kills."""

from __future__ import annotations

import binascii
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.several import free_port
from tests.train import toy

from ccq.cli import main
from ccq.data import file_source, prepare_shards
from ccq.processes import Processes
from ccq.train.checkpoint import Checkpoints
from ccq.train.config import OptimizerRecipe
from ccq.train.metrics import read_metrics


def weights(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    engine = toy.make_engine(**options)
    Checkpoints(folder / "checkpoints", keep=1, processes=Processes()).load(engine.model, engine.optimizers)
    return engine.model.state_dict()


def assert_nearly_the_same_run(folder: Path, expected: Path, tolerance: float, **options: Any) -> None:
    """Sums over processes are rounded differently; AdamW makes of small differences larger ones."""
    ours, theirs = (read_metrics(each / "metrics.jsonl") for each in (folder, expected))
    assert [line["step"] for line in ours] == list(range(1, toy.STEPS + 1))
    for own, other in zip(ours, theirs, strict=True):
        assert own["tokens"] == other["tokens"]
        assert own["loss"] == pytest.approx(other["loss"], rel=tolerance)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * tolerance)
        if "gate" in other:
            assert own["gate"] == pytest.approx(other["gate"], rel=10 * tolerance)
    found = weights(folder, **options)
    for name, value in weights(expected, **options).items():
        # Where a gradient is nearly zero AdamW's step is its sign, whichever way it was rounded: 1e-2 a step.
        assert_close(name, found[name], value, 0.02, floor=1e-3)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    toy.run(folder, checkpoint_every=2, keep_checkpoints=10)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    assert toy.start(folder, count=2, checkpoint_every=2, keep_checkpoints=10) == [0, 0]
    return folder


def test_two_processes_are_one(one: Path, two: Path) -> None:
    """Step 1 before anything is learned tightly, the others as far as rounding lets them."""
    first, expected = (read_metrics(folder / "metrics.jsonl")[0] for folder in (two, one))
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert_nearly_the_same_run(two, one, 1e-4)


def test_every_file_of_a_checkpoint_has_a_checksum(one: Path, two: Path) -> None:
    for run, writers in ((one, 1), (two, 2)):
        for folder in (run / "checkpoints").iterdir():
            checksums = json.loads((folder / "checksums.json").read_bytes())
            content = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "checksums.json"}
            assert checksums == {name: binascii.crc32(each) for name, each in content.items()}
            assert len([name for name in content if name.endswith(".distcp")]) >= writers


def test_a_damaged_checkpoint_stops_both_processes(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    (part,) = newest.glob("__1_*.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert toy.start(tmp_path / "run", count=2, checkpoint_every=2, keep_checkpoints=10) == [1, 1]
    shutil.rmtree(newest)
    assert toy.start(tmp_path / "run", count=2, checkpoint_every=2, keep_checkpoints=10) == [0, 0]


def test_one_process_goes_on_where_two_were_interrupted(one: Path, two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "run")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08}")
    toy.run(tmp_path / "run", checkpoint_every=100)
    assert_nearly_the_same_run(tmp_path / "run", one, 1e-4)


def test_two_processes_go_on_where_one_was_interrupted(one: Path, tmp_path: Path) -> None:
    """With other micro-batches too, weights gathered twice, and blocks recomputed."""
    shutil.copytree(one, tmp_path / "run")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08}")
    options = {"rows": 1, "reshard_after_forward": True, "activation_checkpointing": True}
    assert toy.start(tmp_path / "run", count=2, checkpoint_every=100, **options) == [0, 0]
    assert_nearly_the_same_run(tmp_path / "run", one, 1e-4)


def test_two_processes_go_on_bit_for_bit_after_a_kill(two: Path, tmp_path: Path) -> None:
    """Both killed while the second checkpoint is written; the same number of processes goes on."""
    codes = toy.start(tmp_path, count=2, checkpoint_every=2, killed_at="writer.write_data", kill_call=2)
    assert codes == [-signal.SIGKILL] * 2
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000002", "step-00000004.partial"}
    assert toy.start(tmp_path, count=2, checkpoint_every=2) == [0, 0]
    same = ("step", "tokens", "loss", "grad_norm", "gate", "correction")
    ours, theirs = (
        [{name: line.get(name) for name in same} for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (tmp_path, two)
    )
    assert ours == theirs
    found = weights(tmp_path)
    for name, value in weights(two).items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("options", "tolerance"),
    # bfloat16: what is rounded differs with the number of rows in a product. Muon multiplies matrices in bfloat16.
    [
        ({"dtype": "bfloat16", "arm": "mamba2+ccq"}, 1e-2),
        ({"arm": "gla"}, 1e-4),
        ({"optimizer": OptimizerRecipe(learning_rate=1e-2, warmup_steps=3, name="muon")}, 1e-2),
    ],
)
def test_other_models_and_precisions(tmp_path: Path, options: dict[str, Any], tolerance: float) -> None:
    toy.run(tmp_path / "one", checkpoint_every=100, **options)
    assert toy.start(tmp_path / "two", count=2, checkpoint_every=100, **options) == [0, 0]
    assert_nearly_the_same_run(tmp_path / "two", tmp_path / "one", tolerance, **options)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe and its data."""
    (tmp_path / "recipe.yaml").write_text(
        "model: {preset: gla+ccq-tiny, num_layers: 1}\ndata: {folder: data, length: 32}\n"
        "training: {steps: 400, tokens_per_step: 128}\noptimizer: {learning_rate: 1e-3, warmup_steps: 2}\n"
        "system: {rows: 1, dtype: float32, checkpoint_every: 1000}\n"
    )
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text\n" for n in range(3000)))
    prepare_shards(tmp_path / "data", file_source([str(tmp_path / "text.txt")]), 300, held_out=0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def torchrun(arguments: list[str], *options: str) -> subprocess.Popen[bytes]:
    """The command a user types."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "ccq.cli", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for_steps(process: subprocess.Popen[bytes], metrics: Path) -> None:
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=60)[0]
        time.sleep(0.05)


def test_torchrun_trains_a_recipe_and_sigterm_stops_both_processes(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked to stop it saves, and one process goes on."""
    train = ["train", "recipe.yaml", "--out", "run"]
    process = torchrun(train, "--nproc-per-node", "2")
    metrics = place / "run" / "metrics.jsonl"
    wait_for_steps(process, metrics)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0].decode()
    stopped = re.search(r"Stopped after step (\d+) of 400; the same command goes on from here", output)
    assert stopped, output
    steps = int(stopped[1])
    assert [path.name for path in (place / "run" / "checkpoints").iterdir()] == [f"step-{steps:08}"]
    assert main([*train, "--stop-after", str(steps + 2)]) == 0
    assert f"going on after step {steps}" in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(metrics)] == list(range(1, steps + 3))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_saves_too(place: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches those that read ahead as well."""
    command = [sys.executable, "-m", "ccq.cli", "train", "recipe.yaml", "--out", "run", "--set", "system.workers=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    wait_for_steps(process, place / "run" / "metrics.jsonl")
    os.killpg(process.pid, number)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 128 + number, output
    stopped = re.search(r"Stopped after step (\d+) of 400; the same command goes on from here", output)
    assert stopped, output
    assert [path.name for path in (place / "run" / "checkpoints").iterdir()] == [f"step-{int(stopped[1]):08}"]


def test_two_machines_are_one(place: Path) -> None:
    """Two launchers with a folder that both see, as on two machines: the first process of each is local rank 0."""
    train = ["train", "recipe.yaml", "--set", "training.steps=5", "--out"]
    assert main([*train, "one"]) == 0
    options = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    nodes = [torchrun([*train, "two"], *options, "--node-rank", str(rank)) for rank in range(2)]
    for node in nodes:
        output, _ = node.communicate(timeout=120)
        assert node.returncode == 0, output.decode()
    ours, theirs = (read_metrics(Path(folder, "metrics.jsonl")) for folder in ("two", "one"))
    assert [line["processes"] for line in ours] == [2] * 5
    for own, other in zip(ours, theirs, strict=True):
        assert (own["step"], own["tokens"]) == (other["step"], other["tokens"])
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
