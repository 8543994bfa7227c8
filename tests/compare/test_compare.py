"""The main job on a small scale: figures against the models it leaves, interruptions, folders that do not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ccq.compare import CompareSettings, Stage, TrainConfig, compare, compare_preset
from ccq.compare.arm import load_arm_model
from ccq.compare.folder import RunFolder
from ccq.data.needles import evaluation_windows
from ccq.evals.harness import load
from ccq.evals.results import CompareResults, read_results
from ccq.models.training_record import read_training_record

TEXT = "def area(width, height):\n    '''The area of a rectangle, in square metres.'''\n    return width * height\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text that differs from file to file."""
    folder = tmp_path_factory.mktemp("text")
    for n in range(8):
        (folder / f"part{n}.py").write_text("".join(f"# line {n * 1000 + i}\n{TEXT}" for i in range(60)))
    return folder


def small_settings(text: Path, **changes: object) -> CompareSettings:
    settings = CompareSettings(
        preset="smoke",
        model="tiny",
        train=TrainConfig(stages=(Stage(32, 4, 3), Stage(48, 2, 3)), warmup_steps=2, log_every=2, checkpoint_every=1),
        arms=("gla", "gla+ccq"),
        text=str(text),
        multiples=(1, 2),
        windows=10,
        perplexity_tokens=192,
        read_tokens=96,
    )
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


def run(folder: Path, settings: CompareSettings) -> CompareResults:
    return compare(folder, settings, jobs=2, console=Console(quiet=True))


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, CompareSettings, CompareResults]:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "small")
    settings = small_settings(text, seeds=2)
    return folder, settings, run(folder.path, settings)


Finished = tuple[RunFolder, CompareSettings, CompareResults]


def test_every_arm_and_seed_has_its_figures(finished: Finished) -> None:
    folder, settings, results = finished
    assert read_results(folder.results) == results
    assert [(r["arm"], r["seed"]) for r in results["runs"]] == [(a, s) for s in (0, 1) for a in ("gla", "gla+ccq")]
    assert results["name"] == "small"
    assert results["settings"] == settings.to_dict()
    for result in results["runs"]:
        assert result["training"]["tokens"] == 3 * 4 * 32 + 3 * 2 * 48
        assert [entry["length"] for entry in result["needle_by_length"]] == [48, 96]
        has_read = "+ccq" in result["arm"]
        for name in ("gate", "correction", "needle_read_off"):
            assert (result[name] is not None) == has_read  # type: ignore[literal-required]
    by_arm = {r["arm"]: r for r in results["runs"]}
    assert by_arm["gla+ccq"]["read_parameters"] == 2 * (2 * 64 + 2)
    assert by_arm["gla+ccq"]["parameters"] - by_arm["gla"]["parameters"] == 2 * (2 * 64 + 2)
    # Two layers, two heads: float32 triangles of 32 x 32 second moments, totals of 32, and an int64 count.
    assert by_arm["gla+ccq"]["state_bytes"] - by_arm["gla"]["state_bytes"] == 2 * (2 * (32 * 33 // 2 + 32) * 4 + 8)


def test_figures_are_those_of_the_model_that_is_left(finished: Finished) -> None:
    """Perplexity and needle answers recomputed from the stored model, token by token and question by question."""
    folder, _, results = finished
    model = load_arm_model(folder, "gla+ccq", 1)
    result = next(r for r in results["runs"] if (r["arm"], r["seed"]) == ("gla+ccq", 1))
    held_out = torch.from_numpy(np.load(folder.path / "held_out.npy").astype(np.int64))
    with torch.no_grad():
        losses = []
        for start in range(0, 192, 48):
            logits = model(held_out[None, start : start + 48]).logits[0].double()
            losses += torch.nn.functional.cross_entropy(
                logits, held_out[start + 1 : start + 49], reduction="none"
            ).tolist()
        assert result["perplexity"][0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        windows = evaluation_windows(
            np.load(folder.path / "held_out.npy"),
            seed=0,
            length=96,
            windows=10,
            vocabulary=folder.tokenizer().needle_vocabulary,
            needles=4,
            depth_bins=5,
        )
        correct = sum(
            int(model(tokens[None]).logits[0, -1].argmax()) == int(answer)
            for tokens, answer in zip(windows.tokens, windows.answers, strict=True)
        )
    assert result["needle_by_length"][1]["correct"] == correct


def test_a_model_knows_its_training(finished: Finished) -> None:
    folder, settings, results = finished
    records = {
        (arm, seed): read_training_record(folder.arm(arm, seed) / "model") for arm in settings.arms for seed in (0, 1)
    }
    for (arm, seed), record in records.items():
        assert record is not None
        assert (record["seed"], record["steps"], record["tokens"]) == (seed, 6, 3 * 4 * 32 + 3 * 2 * 48)
        assert record["settings"]["model"] == {"preset": f"{arm}-tiny"}
        assert record["settings"]["task"]["stages"][1] == {"length": 48, "batch_size": 2, "steps": 3}
        assert record["settings"]["optimizer"]["learning_rate"] == 3e-3
        assert record["settings"]["corpus_sha256"] == results["corpus"]["sha256"]
        # But for the seed, one arm's trainings are the same.
        assert record["settings"] == records[arm, 0]["settings"]  # type: ignore[index]
    described = load(str(folder.arm("gla+ccq", 1) / "model"), device="cpu").described()
    assert described["training"] == records["gla+ccq", 1]


def test_a_finished_comparison_is_only_reported(finished: Finished) -> None:
    folder, settings, results = finished
    stamps = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*.json")}
    folder.report.unlink()
    assert run(folder.path, settings) == results
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*.json")} == stamps
    assert "gla+ccq" in folder.report.read_text()


def test_other_settings_in_the_same_folder_are_named(finished: Finished) -> None:
    folder, settings, _ = finished
    changed = dataclasses.replace(settings, windows=11, train=dataclasses.replace(settings.train, needles=2))
    message = r"train.needles is 4 there and 2 here; windows is 10 there and 11 here. Choose another --out"
    with pytest.raises(ValueError, match=message):
        run(folder.path, changed)


def test_a_killed_comparison_goes_on_and_ends_the_same(text: Path, tmp_path: Path, finished: Finished) -> None:
    """Killed without warning while the arms train, as a power cut would; then the same call again."""
    code = (
        "import sys, dataclasses; from pathlib import Path; from rich.console import Console\n"
        "from tests.compare.test_compare import small_settings\n"
        "from ccq.compare import compare\n"
        "if __name__ == '__main__':\n"
        "    compare(Path(sys.argv[2]), small_settings(Path(sys.argv[1]), seeds=2), jobs=2,"
        " console=Console(quiet=True))\n"
    )
    script = tmp_path / "job.py"
    script.write_text(code)
    folder = tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    process = subprocess.Popen([sys.executable, str(script), str(text), str(folder)], env=environment)
    deadline = time.monotonic() + 120
    while not list(folder.glob("arms/*/training/checkpoints/step-????????")):
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)  # the arms notice that their parent is gone after the step they are in
    _, settings, expected = finished
    results = run(folder, settings)
    for ours, theirs in zip(results["runs"], expected["runs"], strict=True):
        for name in ("perplexity", "needle", "needle_by_length", "gate", "correction"):
            assert ours[name] == theirs[name], name  # type: ignore[literal-required]
        assert ours["training"]["curve"] == theirs["training"]["curve"]


def test_an_arm_that_fails_is_named_and_the_others_are_kept(text: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    settings = small_settings(text)
    folder.claim(settings)
    broken = folder.arm("gla", 0) / "training" / "checkpoints" / "step-00000002"
    broken.mkdir(parents=True)
    (broken / "state.json").write_bytes(b"half a file")
    with pytest.raises(RuntimeError, match=r"gla, seed 0: ValueError: .*step-00000002 is damaged"):
        run(folder.path, settings)
    assert (folder.arm("gla+ccq", 0) / "result.json").exists()
    shutil.rmtree(broken)
    assert len(run(folder.path, settings)["runs"]) == 2


def test_a_second_comparison_in_the_folder_is_refused(text: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(small_settings(text))
    with folder.locked(), pytest.raises(ValueError, match=r"another comparison is running"):
        run(folder.path, small_settings(text))


def test_a_folder_with_other_files_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex\) and no comparison"):
        run(tmp_path, small_settings(text))
    with pytest.raises(ValueError, match=r"thesis.tex is a file"):
        run(tmp_path / "thesis.tex", small_settings(text))


def test_damaged_settings_are_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"preset": ')
    with pytest.raises(ValueError, match=r"settings.json is damaged"):
        run(tmp_path, small_settings(text))


def test_an_unreadable_text_is_named_before_anything_is_trained(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for file in text.iterdir():
        (folder / file.name).write_text(file.read_text())
    (folder / "picture.png").write_bytes(b"\x89PNG\x00\x01")
    with pytest.raises(ValueError, match=r"picture.png"):
        run(tmp_path / "run", small_settings(folder))
    assert not (tmp_path / "run" / "arms").exists()
    # The folder is not spent: the same --out serves for another text.
    RunFolder(tmp_path / "run").claim(small_settings(text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "tini"}, r"unknown preset 'tini' \(did you mean 'tiny'\?\); accepted: tiny, smoke"),
        ({"name": "tiny", "arms": ("gla", "gla+ccx")}, r"unknown arm 'gla\+ccx'.*gla, gla\+ccq"),
        ({"name": "tiny", "arms": ("gla", "gla")}, "named more than once: gla"),
        ({"name": "tiny", "arms": ()}, "arms is empty"),
        ({"name": "tiny", "seeds": 0}, "seeds must be a whole number of at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_preset(**arguments)  # type: ignore[arg-type]


def test_settings_survive_json(text: Path) -> None:
    settings = small_settings(text).to_dict()
    assert json.loads(json.dumps(settings)) == settings


def test_the_plan_has_every_run_with_its_steps_and_tokens(text: Path) -> None:
    # Stages of 3 steps of 4 rows of 32 tokens, and 3 of 2 rows of 48.
    assert small_settings(text, seeds=2).plan() == [
        ("text", arm, seed, 6, 3 * 4 * 32 + 3 * 2 * 48) for seed in (0, 1) for arm in ("gla", "gla+ccq")
    ]
