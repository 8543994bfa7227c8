"""Grids: their files, and one on a small scale whose figures are recomputed from the models it leaves."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import yaml
from rich.console import Console

from ccq.analysis.gate import measure_reads
from ccq.cli import main
from ccq.compare.cell import TaskSteps, put_in, read_cell, run_cell
from ccq.compare.folder import GridFolder, what_is_learned
from ccq.compare.grid import Cell, GridSettings, GridSystem, SyntheticTask, choose_grid, load_grid
from ccq.compare.pool import Teller, default_runs_per_device, devices_for
from ccq.compare.run_grid import _Contrast, _difference, _Model, compare_grid
from ccq.data.loader import IGNORE_INDEX
from ccq.data.needles import evaluation_windows
from ccq.evals.recall import EVALUATION_SEED
from ccq.evals.results import GridDifference, GridResults, read_results
from ccq.models import CCQForCausalLM, preset
from ccq.models.configuration import BACKBONES
from ccq.models.modeling import load_model
from ccq.models.training_record import read_training_record
from ccq.nn.reads import READS

TEXT = "def area(width, height):\n    '''The area of a rectangle, in square metres.'''\n    return width * height\n"
RECALL: dict[str, Any] = {
    "kind": "recall",
    "length": 12,
    "pairs": 3,
    "queries": 2,
    "keys": 4,
    "values": 4,
    "prompts": 30,
    "stages": [{"batch_size": 4, "steps": 3, "pairs": 1, "queries": 1}, {"batch_size": 8, "steps": 5}],
    "evaluate": [{"pairs": 2}, {"pairs": 4, "length": 16}],
}
SMALL: dict[str, Any] = {
    "model": {"scale": "tiny", "hidden_size": 16, "num_layers": 1, "intermediate_size": 16},
    "arms": ["gla", "gla+ccq"],
    "seeds": 2,
    "tasks": {"pairs": RECALL},
    "optimizer": {"warmup_steps": 2, "learning_rate": 0.02},
    "system": {"device": "cpu", "runs_per_device": 2, "checkpoint_every": 1},
}


def grid(**changes: Any) -> GridSettings:
    return GridSettings.from_dict({**SMALL, **changes})


def run(folder: Path, settings: GridSettings) -> GridResults:
    return compare_grid(folder, settings, console=Console(quiet=True))


Finished = tuple[GridFolder, GridSettings, GridResults]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    text = tmp_path_factory.mktemp("text")
    for n in range(8):
        (text / f"part{n}.py").write_text("".join(f"# line {n * 1000 + i}\n{TEXT}" for i in range(60)))
    folder = GridFolder(tmp_path_factory.mktemp("runs") / "small")
    tasks = {"pairs": RECALL, "words": {"kind": "text", "preset": "smoke", "folder": str(text)}}
    settings = grid(tasks=tasks, interventions=["scale=0.5", "gate=mean"])
    return folder, settings, run(folder.path, settings)


def scores_of(folder: GridFolder, cell: Cell, reading: str = "on") -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    if reading == "on":
        found = json.loads((folder.cell(cell) / "result.json").read_bytes())["scores"]
    else:
        found = json.loads((folder.cell(cell) / "readings.json").read_bytes())[reading]["scores"]
    return {(score["setting"], score["metric"]): np.array(score["values"]) for score in found}


def shares_by_hand(model: CCQForCausalLM, task: Any, prompts: int) -> list[float]:
    batch = task.batch(seed=EVALUATION_SEED, step=0, batch_size=prompts)
    shares = []
    with torch.no_grad():
        for tokens, targets in zip(batch.inputs, batch.targets.tolist(), strict=True):
            said = model(tokens[None]).logits[0].argmax(-1).tolist()
            right = [word == target for word, target in zip(said, targets, strict=True) if target != IGNORE_INDEX]
            shares.append(sum(right) / len(right))
    return shares


def test_every_cell_has_its_figures(finished: Finished) -> None:
    folder, settings, results = finished
    assert read_results(folder.results, "grid") == results
    cells = [(run["task"], run["arm"], run["seed"]) for run in results["runs"]]
    assert cells == [(t, a, s) for t in ("pairs", "words") for s in (0, 1) for a in ("gla", "gla+ccq")]
    for result in results["runs"]:
        readings = [reading["reading"] for reading in result["readings"]]
        has_read = result["arm"] == "gla+ccq"
        assert readings == (["off", "scale=0.5", "gate=mean", "put into gla"] if has_read else [])
        assert (result["gate"] is None) != has_read
        # One layer, two heads: a weight a channel and a bias each.
        assert result["read_parameters"] == (2 * 64 + 2 if has_read else 0)
        if result["task"] == "pairs":
            assert result["tokens"] == 3 * 4 * 12 + 5 * 8 * 12
            assert [score["setting"] for score in result["scores"]] == ["pairs 2", "pairs 4, length 16"]
    assert "gla+ccq" in folder.report.read_text()
    assert folder.figure.read_bytes()[:4] == b"\x89PNG"
    assert settings.plan()[0] == ("pairs", "gla", 0, 8, 3 * 4 * 12 + 5 * 8 * 12)


def test_scores_are_those_of_the_models_that_are_left(finished: Finished) -> None:
    folder, settings, _ = finished
    cell = Cell("pairs", "gla+ccq", 1)
    model = load_model(folder.cell(cell) / "model")
    task = settings.task("pairs")
    assert isinstance(task, SyntheticTask)
    for reading in ("on", "off", "scale=0.5"):
        model.set_read(reading)
        found = scores_of(folder, cell, reading)
        for setting in task.settings:
            expected = shares_by_hand(model, setting.task, task.prompts)
            np.testing.assert_array_equal(found[setting.name, "accuracy"], expected)


def test_a_model_knows_its_training(finished: Finished) -> None:
    folder, _, results = finished
    for result in results["runs"]:
        cell = Cell(result["task"], result["arm"], result["seed"])
        record = read_training_record(folder.cell(cell) / "model")
        assert record is not None
        assert [record[name] for name in ("seed", "steps", "tokens")] == [  # type: ignore[literal-required]
            result[name]
            for name in ("seed", "steps", "tokens")  # type: ignore[literal-required]
        ]
        known = record["settings"]
        sizes = {name: value for name, value in SMALL["model"].items() if name != "scale"}
        assert known["model"] == {"preset": f"{cell.arm}-tiny", **sizes}
        assert known["optimizer"]["learning_rate"] == 0.02 and known["optimizer"]["decay_gate_bias"] is False
        if cell.task == "pairs":
            assert known["task"]["pairs"] == 3 and known["task"]["stages"][0]["pairs"] == 1
            assert not {"prompts", "evaluate"} & set(known["task"])
        else:
            assert known["tokenizer_sha256"] == folder.text("words").tokenizer().sha256


@pytest.mark.parametrize("decayed", [False, True])
def test_the_bias_of_the_gate_decays_where_the_file_says_so(decayed: bool, tmp_path: Path) -> None:
    rate, decay = 1e-3, 100.0
    optimizer = {
        "learning_rate": rate,
        "warmup_steps": 0,
        "final_learning_rate_share": 1.0,
        "weight_decay": decay,
        **({"decay_gate_bias": True} if decayed else {}),
    }
    settings = grid(optimizer=optimizer)
    assert what_is_learned(settings)["optimizer"]["decay_gate_bias"] is decayed
    cell = Cell("pairs", "gla+ccq", 0)
    run_cell(str(tmp_path), settings, cell, Teller(0, multiprocessing.Queue()), torch.device("cpu"))
    model = load_model(GridFolder(tmp_path).cell(cell) / "model")
    (bias,) = (value for name, value in model.named_parameters() if name.endswith("gate_bias"))
    # From lambda 0.01; each of the 8 steps takes a tenth where it decays, and moves by the rate or so in any case.
    start = math.log(0.01 / 0.99)
    expected = start * (1 - rate * decay) ** 8 if decayed else start
    assert bias.tolist() == pytest.approx([expected] * 2, abs=16 * rate)
    # Whether it decays or not, the curve says where decay alone would have taken lambda.
    for point in read_cell(GridFolder(tmp_path), cell)["curve"]:
        alone = 1 / (1 + math.exp(-start * (1 - rate * decay) ** point["step"]))
        assert point["gate_by_decay_alone"] == pytest.approx(alone)


def test_text_is_scored_window_by_window(finished: Finished) -> None:
    folder, _, _ = finished
    cell = Cell("words", "gla", 0)
    model = load_model(folder.cell(cell) / "model")
    data = folder.text("words")
    held_out, tokenizer = data.tokens().held_out, data.tokenizer()
    found = scores_of(folder, cell)
    windows = evaluation_windows(
        held_out, seed=0, length=128, windows=20, vocabulary=tokenizer.needle_vocabulary, needles=4, depth_bins=5
    )
    with torch.no_grad():
        right = [
            float(int(model(tokens[None]).logits[0, -1].argmax()) == int(answer))
            for tokens, answer in zip(windows.tokens, windows.answers, strict=True)
        ]
        np.testing.assert_array_equal(found["length 128", "accuracy"], right)
        tokens = torch.from_numpy(held_out[:1025].astype(np.int64))
        losses = [
            torch.nn.functional.cross_entropy(
                model(tokens[None, start : start + 256]).logits[0].double(), tokens[start + 1 : start + 257]
            ).item()
            for start in range(0, 1024, 256)
        ]
    assert found["length 256", "loss"] == pytest.approx(losses, rel=1e-5)


ALONE = ("none", "normalize", "mesa", "comba", "query-weighted")
"""The read steps that no other model can be given with one fixed lambda."""


@pytest.mark.parametrize("backbone", [backbone for backbone in BACKBONES if backbone != "transformer"])
def test_every_read_step_with_a_gate_alone_has_the_two_by_two(backbone: str) -> None:
    arms = [backbone, *(f"{backbone}+{read}" for read in READS)]
    settings = GridSettings.from_dict({**SMALL, "model": {}, "arms": arms, "interventions": "off"})
    assert [arm for arm in arms if settings.put_into(arm) is None] == [backbone, *(f"{backbone}+{x}" for x in ALONE)]
    for arm in arms[1:]:
        assert (settings.why_not_put_in(arm) == "") == (settings.put_into(arm) is not None)
    # With unit queries where the arm has been trained with such and the backbone has not.
    raw = backbone.startswith("gla")
    assert {settings.put_into(arm) for arm in arms} == {None, f"{backbone}+normalize" if raw else backbone}


@pytest.mark.parametrize("read", [read for read in READS if read not in ALONE])
@pytest.mark.parametrize(
    ("backbone", "base"),
    [("gla", "gla"), ("gla", "gla+normalize"), ("gated-deltanet", "gated-deltanet"), ("mamba2", "mamba2")],
)
@torch.no_grad()
def test_what_is_put_in_is_seen_at_the_mean_lambda_of_its_arm(backbone: str, base: str, read: str) -> None:
    torch.manual_seed(0)
    plain = CCQForCausalLM(preset(f"{base}-tiny", vocab_size=20)).eval()
    trained = CCQForCausalLM(preset(f"{backbone}+{read}-tiny", vocab_size=20)).eval()
    for step in trained.read_steps():
        for parameter in step.parameters():
            parameter.normal_(0.0, 0.5)
    tokens = torch.randint(20, (2, 40))
    measured = measure_reads(trained, tokens)
    assert measured is not None
    model = put_in(plain, trained.config, measured.gate["mean"])
    seen = measure_reads(model, tokens)
    assert seen is not None
    for layer in seen.gate["by_layer_and_head"]:
        assert layer == pytest.approx([measured.gate["mean"]] * len(layer), rel=1e-5)
    on = model(tokens).logits
    model.set_read("off")
    expected = plain(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert (on - expected).abs().max() > 1e-4


def test_what_has_weights_of_its_own_cannot_be_put_in() -> None:
    plain = CCQForCausalLM(preset("gla-tiny", vocab_size=20))
    with pytest.raises(ValueError, match=r"'query-weighted' cannot be put into arm 'gla': missing .*landmarks"):
        put_in(plain, preset("gla+query-weighted-tiny", vocab_size=20), 0.1)
    with pytest.raises(ValueError, match=r"cannot be put into arm 'gla\+ccq': unexpected .*gate_weight"):
        put_in(CCQForCausalLM(preset("gla+ccq-tiny", vocab_size=20)), preset("gla+ccq-tiny", vocab_size=20), 0.1)


def test_the_read_step_is_put_in_at_the_mean_lambda_of_its_arm(finished: Finished) -> None:
    folder, settings, results = finished
    cell = Cell("pairs", "gla+ccq", 1)
    trained = load_model(folder.cell(cell) / "model")
    given = next(run for run in results["runs"] if (run["task"], run["arm"], run["seed"]) == cell)
    config = copy.copy(trained.config)
    config.gate, config.keep_length = given["gate"], True
    model = CCQForCausalLM(config).eval()
    model.load_state_dict(load_model(folder.cell(cell._replace(arm="gla")) / "model").state_dict())
    task = settings.task("pairs")
    assert isinstance(task, SyntheticTask)
    setting = task.settings[1]
    found = scores_of(folder, cell, "put into gla")[setting.name, "accuracy"]
    np.testing.assert_array_equal(found, shares_by_hand(model, setting.task, task.prompts))
    (reading,) = [reading for reading in given["readings"] if reading["reading"] == "put into gla"]
    assert reading["gate"] == given["gate"]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Read steps of every kind: what counts tokens and what does not, has buffers, parameters, or no correction."""
    arms = ["gla", "gla+normalize", "gla+ccq-strength", "gla+random", "gla+ccq-decay", "gla+query-weighted"]
    settings = grid(arms=arms, seeds=1, interventions=["gate=shuffled", "gate=mean"])
    folder = GridFolder(tmp_path_factory.mktemp("several") / "run")
    return folder, settings, run(folder.path, settings)


def test_readings_that_an_arm_does_not_have_are_left_out(several: Finished) -> None:
    _, settings, results = several
    every = ["off", "gate=shuffled,seed=0", "gate=mean", "put into gla+normalize"]
    expected = {
        "gla": [],
        "gla+normalize": [],
        "gla+ccq-strength": every,
        "gla+random": every,
        "gla+ccq-decay": ["off", "gate=mean", "put into gla+normalize"],
        "gla+query-weighted": ["off", "gate=mean"],
    }
    assert {each["arm"]: [r["reading"] for r in each["readings"]] for each in results["runs"]} == expected
    assert {arm: settings.readings(arm) for arm in settings.arms} == expected
    assert "does not count its tokens" in settings.refused("gla+ccq-decay")["gate=shuffled,seed=0"]
    assert "has no correction that 'off' could change" in settings.refused("gla+normalize")["off"]


def test_the_effect_of_training_is_held_against_unit_queries_where_the_grid_has_them(several: Finished) -> None:
    folder, _, results = several
    kinds = {each["kind"] for each in results["differences"]}
    assert kinds == {"arm", "control", "training", "reading", "interaction"}
    pairs = {
        (each["kind"], each["first"], each["second"]): each["by_seed"][0]
        for each in results["differences"]
        if each["arm"] == "gla+random" and each["setting"] == "pairs 2" and each["kind"] != "reading"
    }

    def mean(arm: str, reading: str = "on") -> float:
        return float(scores_of(folder, Cell("pairs", arm, 0), reading)["pairs 2", "accuracy"].mean())

    on, off = mean("gla+random"), mean("gla+random", "off")
    unit, put = mean("gla+normalize"), mean("gla+random", "put into gla+normalize")
    assert pairs == pytest.approx(
        {
            ("arm", "gla+random", "gla"): on - mean("gla"),
            ("control", "gla+random", "gla+normalize"): on - unit,
            ("training", "gla+random, off", "gla+normalize"): off - unit,
            ("training", "gla+random, on", "gla+normalize, random put in"): on - put,
            ("interaction", "gla+random: on − off", "gla+normalize: random put in − as trained"): (on - off)
            - (put - unit),
        }
    )
    # The arm without the 2 x 2 is held against both all the same.
    own = {(each["kind"], each["second"]) for each in results["differences"] if each["arm"] == "gla+query-weighted"}
    assert {("arm", "gla"), ("control", "gla+normalize")} <= own


def test_readings_of_other_models_are_made_anew(several: Finished) -> None:
    """As a file has them in which the read step was put into another model."""
    folder, settings, results = several
    stale = json.loads(folder.results.read_bytes())
    for each in stale["runs"]:
        for reading in each["readings"]:
            reading["reading"] = reading["reading"].replace("put into gla+normalize", "put into gla")
    folder.results.write_text(json.dumps(stale))
    again = run(folder.path, settings)
    assert {**again, "created": ""} == {**results, "created": ""}


def test_seeds_that_agree_have_no_interval_whatever_the_rounding() -> None:
    """Thirds in another order: their sums differ in the last digit, which is no spread."""
    model = _Model("gla+ccq", "on"), _Model("gla", "on")
    contrast = _Contrast("arm", "gla+ccq", "gla+ccq", "gla", (model[0],), (model[1],))
    rows = np.array([[1 / 3, 1, 2 / 3, 0.1, 0.7], [0.7, 2 / 3, 0.1, 1, 1 / 3]])
    assert len({row.mean() for row in rows}) == 2
    found = _difference(contrast, "pairs", "pairs 2", "accuracy", [rows], [np.zeros((2, 5))])
    assert found["over_seeds"] is None and found["over_prompts"] is not None


def test_differences_are_paired_by_seed_and_by_prompt(finished: Finished) -> None:
    folder, _, results = finished

    def corner(arm: str, reading: str, key: tuple[str, str]) -> np.ndarray[Any, Any]:
        return np.stack([scores_of(folder, Cell("words", arm, seed), reading)[key] for seed in (0, 1)])

    def difference(kind: str, first: str, second: str, key: tuple[str, str]) -> GridDifference:
        (found,) = (
            each
            for each in results["differences"]
            if (each["task"], each["kind"], each["first"], each["second"]) == ("words", kind, first, second)
            and (each["setting"], each["metric"]) == key
        )
        return found

    key = ("length 64", "loss")
    plain, put = corner("gla", "on", key), corner("gla+ccq", "put into gla", key)
    off, on = corner("gla+ccq", "off", key), corner("gla+ccq", "on", key)
    half = corner("gla+ccq", "scale=0.5", key)
    expected = {
        ("arm", "gla+ccq", "gla"): on - plain,
        ("training and normalisation", "gla+ccq, off", "gla"): off - plain,
        ("training and normalisation", "gla+ccq, on", "gla, ccq put in"): on - put,
        ("reading", "gla+ccq, on", "gla+ccq, off"): on - off,
        ("reading", "gla, ccq put in", "gla"): put - plain,
        ("reading", "gla+ccq, scale=0.5", "gla+ccq, on"): half - on,
        ("interaction", "gla+ccq: on − off", "gla: ccq put in − as trained"): (on - off) - (put - plain),
    }
    for names, values in expected.items():
        found = difference(*names, key)
        assert found["by_seed"] == pytest.approx(values.mean(1))
        assert found["mean"] == pytest.approx(values.mean())
        for name, sample in (("over_seeds", values.mean(1)), ("over_prompts", values.mean(0))):
            interval = scipy.stats.ttest_1samp(sample, 0).confidence_interval(0.95)
            assert found[name] == pytest.approx(list(interval)), name  # type: ignore[literal-required]
    # Of answers a sample is added, spread over what four models can do: of mean 0 and mean square 1.
    key = ("length 64", "accuracy")
    corners = [corner("gla+ccq", "on", key), corner("gla+ccq", "off", key)]
    corners += [corner("gla+ccq", "put into gla", key), corner("gla", "on", key)]
    sample = (corners[0] - corners[1] - corners[2] + corners[3]).mean(0)
    centre, square = sample.sum() / 21, ((sample**2).sum() + 1) / 21
    half = 1.959964 * math.sqrt((square - centre**2) / 21)
    found = difference("interaction", "gla+ccq: on − off", "gla: ccq put in − as trained", key)
    assert found["over_prompts"] == pytest.approx([centre - half, centre + half], rel=1e-5)


def test_a_finished_grid_is_only_reported(finished: Finished) -> None:
    folder, settings, results = finished
    stamps = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*.json")}
    folder.report.unlink()
    assert run(folder.path, settings) == results
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*.json")} == stamps
    assert folder.report.exists()


def test_other_interventions_train_nothing_again(finished: Finished) -> None:
    folder, settings, results = finished
    stamps = {path: path.stat().st_mtime_ns for path in folder.path.rglob("result.json")}
    changed = run(folder.path, settings.with_interventions(["scale=0"]))
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("result.json")} == stamps
    readings = {r["reading"]: r for r in changed["runs"][1]["readings"]}
    assert set(readings) == {"off", "scale=0", "put into gla"}
    # A correction of size zero reads as one that is off.
    assert [s["mean"] for s in readings["scale=0"]["scores"]] == [s["mean"] for s in readings["off"]["scores"]]
    again = run(folder.path, settings)
    assert {**again, "created": ""} == {**results, "created": ""}


def test_other_settings_in_the_same_folder_are_named(finished: Finished) -> None:
    folder, settings, _ = finished
    with pytest.raises(ValueError, match=r"holds a grid with other settings: seeds is 2 there and 3 here"):
        run(folder.path, dataclasses.replace(settings, seeds=3))


def test_a_killed_grid_goes_on_and_ends_the_same(tmp_path: Path, finished: Finished) -> None:
    """Killed without warning while its cells train, as a power cut would; then the same call again."""
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    folder = tmp_path / "killed"
    code = "import sys; from ccq.cli import main\nif __name__ == '__main__':\n    sys.exit(main(sys.argv[1:]))\n"
    script = tmp_path / "job.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), "compare", str(file), "--out", str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(folder.glob("tasks/pairs/arms/*/training/checkpoints/step-????????")):
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)  # the cells notice that their parent is gone after the step they are in
    results = run(folder, load_grid(file))
    expected = [each for each in finished[2]["runs"] if each["task"] == "pairs"]
    for ours, theirs in zip(results["runs"], expected, strict=True):
        assert ours["scores"] == theirs["scores"] and ours["gate"] == theirs["gate"]
        assert ours["curve"] == theirs["curve"]


def test_an_unreadable_text_leaves_the_folder_free(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG\x00\x01")
    task = {"kind": "text", "preset": "smoke", "folder": str(tmp_path / "text")}
    with pytest.raises(ValueError, match=r"picture.png"):
        run(tmp_path / "run", grid(tasks={"words": task}))
    GridFolder(tmp_path / "run").claim(grid())


def test_all_arms_see_the_same_rows_of_the_stage_that_a_step_is_in() -> None:
    task = grid().task("pairs")
    assert isinstance(task, SyntheticTask)
    steps = iter(TaskSteps(task.stages, seed=1))
    for step in range(8):
        (given,) = next(steps)
        easy = step < 3
        made = dataclasses.replace(task.task, pairs=1, queries=1) if easy else task.task  # type: ignore[type-var]
        expected = made.batch(seed=1, step=step, batch_size=4 if easy else 8)
        assert torch.equal(given.inputs, expected.inputs) and torch.equal(given.targets, expected.targets)


def test_a_grid_survives_its_file(tmp_path: Path) -> None:
    names = ["text", "recall", "needle", "needles", "frequent-needle", "frequent-words", "common-words"]
    for settings in (grid(interventions=["gate=mean"]), grid(tasks=names), grid(tasks=names, preset="smoke")):
        file = tmp_path / "grid.yaml"
        file.write_text(yaml.safe_dump(json.loads(json.dumps(settings.to_dict())), sort_keys=False))
        assert load_grid(file) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, r"unknown key seed \(did you mean 'seeds'\?\); accepted: preset, model, arms"),
        ({"arms": "gla"}, "arms must be a list, got 'gla'"),
        ({"arms": ["gla", "gla+cqc"]}, r"unknown arm 'gla\+cqc' \(did you mean 'gla\+ccq'\?\)"),
        ({"arms": ["gla", "gla"]}, "named more than once: gla"),
        ({"seeds": 0}, "seeds must be a whole number of at least 1"),
        ({"model": {"hiden_size": 3}}, r"model: unknown model option 'hiden_size' \(did you mean 'hidden_size'\?\)"),
        ({"optimizer": {"learning_rat": 1}}, r"unknown key optimizer.learning_rat \(did you mean 'learning_rate'"),
        ({"system": {"runs_per_device": 0}}, "system.runs_per_device must be at least 1, got 0"),
        ({"system": {"device": "gpu"}}, "system.device must be one of cpu, cuda"),
        ({"tasks": 3}, "tasks must be names with their options"),
        ({"tasks": ["recal"]}, r"no preset has a task 'recal' \(did you mean 'recall'\?\)"),
        ({"tasks": {"a/b": RECALL}}, "a task's name is made of small letters and digits"),
        ({"tasks": {"mine": {**RECALL, "kind": "recal"}}}, r"tasks.mine.kind: unknown kind 'recal' \(did you mean"),
        ({"tasks": {"mine": {**RECALL, "pares": 3}}}, r"unknown key tasks.mine.pares \(did you mean 'pairs'\?\)"),
        ({"tasks": {"mine": {**RECALL, "length": 5}}}, "tasks.mine: length 5 is too short for 3 pairs"),
        ({"tasks": {"mine": {**RECALL, "stages": []}}}, "tasks.mine.stages is empty"),
        (
            {"tasks": {"mine": {**RECALL, "stages": [{"batch_size": 2}]}}},
            r"tasks.mine.stages\[0\].steps must be a whole number, got None",
        ),
        (
            {"tasks": {"mine": {**RECALL, "evaluate": [{"pairs": 2}, {"pairs": 9}]}}},
            r"tasks.mine.evaluate\[1\]: 9 pairs need as many different keys",
        ),
        (
            {"tasks": {"mine": {**RECALL, "evaluate": [{"keys": 9}]}}},
            r"tasks.mine.evaluate\[0\].keys gives tokens their meaning",
        ),
        ({"tasks": {"text": {"preset": "tinny"}}}, "unknown preset 'tinny'"),
        ({"interventions": ["of"]}, "interventions: 'of' is no read intervention"),
        ({"interventions": ["layers=7"]}, "interventions: no arm can be read with 'layers=7'"),
        ({"interventions": "of"}, "interventions: 'of' is no read intervention"),
        ({"interventions": 2}, "interventions must be a word or a list of words, such as off.*; got 2"),
        ({"interventions": ["layers=0", 1]}, r'such as off, .* in quotes, "layers=0,1"; got 1'),
        ({"interventions": {"scale": 2}}, r"interventions must be a word or a list of words.*got \{'scale': 2\}"),
        ({"model": {"scale": "huge"}}, "model.scale: unknown scale 'huge'; accepted: tiny, 30m, 60m, 500m, 1.3b"),
        ({"model": {"scale": "30"}}, r"model.scale: unknown scale '30' \(did you mean '30m'\?\); accepted: tiny"),
        *(
            ({name: False}, f"{name} must be a section of keys and values, got False")
            for name in ("model", "optimizer", "system")
        ),
        ({"tasks": False}, "tasks must be names with their options, or a list of names, got False"),
        ({"arms": [False]}, "arms must be a text, got False"),
        ({"preset": False}, "preset must be a text, got False"),
        *(
            (changes, f"{where} has the key (True|1), but keys are words. YAML takes on, off")
            for where, changes in {
                "the file": {True: 1},
                "model": {"model": {True: 1}},
                "optimizer": {"optimizer": {1: 1}},
                "system": {"system": {True: 1}},
                "tasks": {"tasks": {True: RECALL}},
                "tasks.mine": {"tasks": {"mine": {**RECALL, True: 1}}},
                r"tasks.mine.stages\[0\]": {
                    "tasks": {"mine": {**RECALL, "stages": [{True: 1, "batch_size": 1, "steps": 1}]}}
                },
                r"tasks.mine.evaluate\[0\]": {"tasks": {"mine": {**RECALL, "evaluate": [{True: 1}]}}},
            }.items()
        ),
        ({"arms": ["gla"], "interventions": [False]}, "interventions: no arm can be read with 'off'"),
    ],
)
def test_what_a_grid_cannot_be_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GridSettings.from_dict({**SMALL, **changes})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", ("off",)),
        ("no", ("off",)),
        ("scale=2", ("off", "scale=2")),
        ("[off, scale=2]", ("off", "scale=2")),
        ("['layers=0,1', on]", ("off", "layers=0-1")),
        ("layers=0,1", ("off", "layers=0-1")),
        ("", ()),
        ("[]", ()),
    ],
)
def test_a_file_names_one_intervention_or_several(text: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    settings = {**SMALL, "model": {"scale": "tiny"}}
    file.write_text(yaml.safe_dump(settings, sort_keys=False) + f"interventions: {text}\n")
    assert load_grid(file).interventions == expected


def test_files_that_are_no_grid_are_named(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    for content, message in (("a: [", "is not YAML"), ("- 1", "must hold keys and values")):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_grid(file)


def test_a_dry_run_lists_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    assert main(["compare", str(file), "--out", str(tmp_path / "run"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:-1]] == [
        ["pairs", arm, str(seed), "8", "624"] for seed in (0, 1) for arm in ("gla", "gla+ccq")
    ]
    assert lines[-1] == "4 runs"
    arms = ["gla", "gla+ccq", "gla+ccq-decay", "gla+mesa", "mamba2+ccq"]
    changes = {"arms": arms, "interventions": ["gate=shuffled", "scale=0.5"]}
    file.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    assert main(["compare", str(file), "--out", str(tmp_path / "run"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("10 runs")
    # Two seeds of one task: 4 + 3 + 2 + 3 ways of reading.
    assert lines[first + 1] == "24 readings, with every seed and task:"
    assert lines[first + 2 :] == [
        "gla+ccq: off; gate=shuffled,seed=0; scale=0.5; put into gla",
        "gla+ccq-decay: off; scale=0.5; put into gla",
        "  gate=shuffled,seed=0: the state of read step 'ccq-decay' does not count its tokens, by whose positions "
        "values are shuffled; accepted: on, off, scale=X, layers=..., heads=..., gate=mean",
        "gla+mesa: off; scale=0.5",
        "  gate=shuffled,seed=0: read step 'mesa' has no gate; accepted: on, off, scale=X, layers=..., heads=...",
        "  no 2 x 2: read step 'mesa' has no gate whose lambda could be fixed",
        "mamba2+ccq: off; gate=shuffled,seed=0; scale=0.5",
        "  no 2 x 2: its backbone 'mamba2' is not among the arms",
    ]
    assert main(["compare", "--out", str(tmp_path / "run"), "--arms", "gla", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 runs"
    assert not (tmp_path / "run").exists()


def test_a_grid_is_chosen_by_a_file_or_by_values(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "interventions": ["scale=2"]}, sort_keys=False))
    assert choose_grid(file).to_dict() == grid(interventions=["scale=2"]).to_dict()
    assert choose_grid(file, interventions=[]).interventions == ("off",)
    changed = choose_grid(file, interventions=["scale=0.5"], runs_per_device=5)
    system = GridSystem(device="cpu", runs_per_device=5, checkpoint_every=1)
    assert (changed.interventions, changed.system) == (("off", "scale=0.5"), system)
    assert choose_grid(interventions=[]).to_dict() == grid_of(tasks=["text"], interventions=["off"])
    given = choose_grid(preset="smoke", arms=["gla"], seeds=3, tasks=["recall", "text"], text=tmp_path, device="cpu")
    tasks = {"recall": None, "text": {"folder": str(tmp_path)}}
    assert given.to_dict() == grid_of(preset="smoke", arms=["gla"], seeds=3, tasks=tasks, system={"device": "cpu"})


def grid_of(**content: Any) -> dict[str, Any]:
    return GridSettings.from_dict(content).to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grid.yaml", "--seeds", "2"], "--preset, --arms, --seeds, --task and --text are what grid.yaml says"),
        (["--device", "cpu"], "--device is of a grid"),
        (["--task", "recall", "--text", "x"], "--text is what the task text is made of"),
        (["--task", "needels"], r"no preset has a task 'needels' \(did you mean 'needles'\?\)"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(["compare", "--out", str(tmp_path / "run"), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_runs_are_spread_over_devices() -> None:
    assert devices_for("cpu") == [torch.device("cpu")]
    assert default_runs_per_device(devices_for("cpu")) == len(os.sched_getaffinity(0))
    gpus = [torch.device("cuda", number) for number in range(2)]
    assert default_runs_per_device(gpus) == min(max(len(os.sched_getaffinity(0)) // 2, 1), 4)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no GPU"):
            devices_for("cuda")
