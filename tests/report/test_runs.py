"""What is read from runs: who a model is, which runs are repetitions of each other, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ccq.evals.results import read_results
from ccq.models import CCQForCausalLM, preset
from ccq.models.training_record import read_training_record
from ccq.report.runs import ScoreName, Subject, arm_name, read_runs, scale_of

SCALE = "1 layer of 64"
GLA, ON, OFF = Subject(SCALE, "gla", None), Subject(SCALE, "gla+ccq", "on"), Subject(SCALE, "gla+ccq", "off")


def changed(source: Path, target: Path, change: Callable[[Any], None]) -> Path:
    """A copy of a results file with something else in it."""
    content = json.loads(source.read_text())
    change(content)
    target.write_text(json.dumps(content))
    return target


def test_runs_are_grouped_by_what_they_are(measured: Path) -> None:
    runs = read_runs([measured / "results", *sorted((measured / "runs").iterdir())])
    assert runs.subjects() == [GLA, ON, OFF]
    assert all(sorted(runs.seeds(subject)) == [0, 1] for subject in (GLA, ON, OFF))
    assert [len(runs.evaluations), len(runs.trainings)] == [12, 4]
    assert {training.model.subject for training in runs.trainings} == {GLA, ON}
    name = ScoreName("extrapolation", "mine/32", "token_perplexity")
    for subject, file in ((GLA, "gla-1"), (ON, "gla+ccq-1"), (OFF, "gla+ccq-1-off")):
        results = read_results(measured / "results" / f"extrapolation-{file}.json", "eval")
        assert runs.seeds(subject)[1][name].value == results["tasks"][0]["scores"][0]["value"]


def test_a_file_may_be_given_twice(measured: Path) -> None:
    file = measured / "results" / "extrapolation-gla-0.json"
    assert len(read_runs([file, file, measured / "results"]).evaluations) == 12


def test_training_and_evaluation_know_the_seed_from_the_record(measured: Path) -> None:
    record = read_training_record(measured / "runs" / "gla+ccq-1" / "model")
    assert record is not None
    assert (record["seed"], record["steps"], record["tokens"]) == (1, 6, 6 * 128)
    assert record["settings"]["optimizer"]["learning_rate"] == 0.01
    other = read_training_record(measured / "runs" / "gla-0" / "model")
    assert other is not None
    assert other["settings"]["data_sha256"] == record["settings"]["data_sha256"]
    described = read_results(measured / "results" / "language-gla+ccq-1.json", "eval")["model"]
    assert described["training"] == record
    assert described["configuration"] is not None
    assert (described["configuration"]["arm"], described["configuration"]["num_layers"]) == ("gla+ccq", 1)


def test_state_is_that_of_the_cache(measured: Path) -> None:
    """Of models that read one token; off keeps no statistics."""
    runs = read_runs([measured / "results"])
    for subject in (GLA, ON, OFF):
        model = CCQForCausalLM(preset(f"{subject.arm}-tiny", num_layers=1)).to(torch.bfloat16).eval()
        if subject.read == "off":
            model.set_read("off")
        with torch.no_grad():
            assert runs.state_bytes(subject) == model(torch.tensor([[1]]), use_cache=True).cache.state_bytes


def test_samples_are_what_a_score_is_made_of(measured: Path) -> None:
    """Their mean is the score, and to first order they are the jackknife's pseudo-values."""
    seeds = read_runs([measured / "results"]).seeds(ON)[0]
    file = read_results(measured / "results" / "language-gla+ccq-0.json", "eval")
    pairs = np.array([record["word_perplexity"] for record in file["tasks"][1]["records"]])

    def perplexity(kept: Any) -> float:
        return math.exp(-kept[:, 0].sum() / kept[:, 1].sum())

    score = seeds[ScoreName("language", "wikitext", "word_perplexity")]
    assert score.samples is not None
    values = score.samples[0].values
    assert values.mean() == pytest.approx(score.value) == perplexity(pairs)
    # The derivative of the score to the weight of a document, by a small step.
    for number, value in enumerate(values):
        weights = np.ones(len(pairs))
        weights[number] += 1e-6
        step = (perplexity(pairs * weights[:, None]) - score.value) / 1e-6
        assert value == pytest.approx(score.value + len(pairs) * step, rel=1e-4)
    accuracy = seeds[ScoreName("language", "boolq", "acc")]
    assert accuracy.samples is not None and accuracy.samples[0].are_shares
    assert set(accuracy.samples[0].values) <= {0.0, 1.0}
    text = seeds[ScoreName("extrapolation", "mine/64", "token_perplexity")]
    assert text.samples is not None
    windows = read_results(measured / "results" / "extrapolation-gla+ccq-0.json", "eval")["tasks"][1]["records"]
    assert len(text.samples[0].values) == len(windows)
    assert text.samples[0].values.mean() == pytest.approx(text.value)


def test_samples_are_named_alike_where_the_same_was_asked(measured: Path) -> None:
    runs = read_runs([measured / "results"])
    for name in (ScoreName("extrapolation", "mine/64", "loss"), ScoreName("language", "boolq", "acc")):
        asked = {score.samples[0].identities for s in (GLA, ON) for score in (runs.seeds(s)[1][name],) if score.samples}
        assert len(asked) == 1 and None not in asked
    other = changed(
        measured / "results" / "language-gla-0.json",
        measured / "shorter.json",
        lambda content: content["settings"].update(max_length=32),
    )
    asked_otherwise = read_runs([other]).seeds(GLA)[0][name].samples
    assert asked_otherwise is not None and asked_otherwise[0].identities not in asked


def test_records_that_do_not_give_the_score_are_not_used(measured: Path, tmp_path: Path) -> None:
    def change(content: Any) -> None:
        content["tasks"][0]["records"][0]["acc"] = 1 - content["tasks"][0]["records"][0]["acc"]
        del content["tasks"][1]["records"][0]["word_perplexity"]

    runs = read_runs([changed(measured / "results" / "language-gla-0.json", tmp_path / "r.json", change)])
    scores = runs.seeds(GLA)[0]
    assert scores[ScoreName("language", "boolq", "acc")].samples is None
    assert scores[ScoreName("language", "wikitext", "word_perplexity")].samples is None
    assert scores[ScoreName("language", "wikitext", "byte_perplexity")].samples is not None


def test_models_that_differ_in_more_than_the_seed_get_names_of_their_own(measured: Path, tmp_path: Path) -> None:
    source = measured / "results" / "language-gla-1.json"

    def train_otherwise(content: Any) -> None:
        content["model"]["training"]["settings"]["optimizer"]["learning_rate"] = 0.5

    def read_otherwise(content: Any) -> None:
        content["model"]["configuration"]["short_convolution"] = 2

    first = measured / "results" / "language-gla-0.json"
    arms = {s.arm for s in read_runs([first, changed(source, tmp_path / "a.json", train_otherwise)]).subjects()}
    assert arms == {"gla, optimizer.learning_rate 0.01", "gla, optimizer.learning_rate 0.5"}
    arms = {s.arm for s in read_runs([first, changed(source, tmp_path / "b.json", read_otherwise)]).subjects()}
    assert arms == {"gla, short_convolution 4", "gla, short_convolution 2"}


def test_models_without_a_record_are_not_repetitions(measured: Path, tmp_path: Path) -> None:
    def forget(content: Any) -> None:
        content["model"]["training"] = None
        content["model"]["weights"] += content["tasks"][0]["data"]["sha256"][:1] + str(len(seen))
        seen.append(1)

    seen: list[int] = []
    files = [
        changed(measured / "results" / f"language-gla-{seed}.json", tmp_path / f"{seed}.json", forget)
        for seed in (0, 1)
    ]
    one = read_runs(files[:1])
    assert one.subjects() == [GLA] and list(one.seeds(GLA)) == [None]
    subjects = read_runs(files).subjects()
    assert len(subjects) == 2 and all(subject.arm.startswith("gla, weights ") for subject in subjects)


def test_a_model_of_another_library_has_its_own_name(measured: Path, tmp_path: Path) -> None:
    def change(content: Any) -> None:
        content["model"].update(
            name="some/llama", configuration=None, training=None, read=None, parameters=1_235_814_400
        )

    (subject,) = read_runs(
        [changed(measured / "results" / "language-gla-0.json", tmp_path / "r.json", change)]
    ).subjects()
    assert subject == Subject("1.24B parameters", "some/llama", None)


@pytest.mark.parametrize(
    ("name", "changes", "scale", "wide", "arm"),
    [
        ("gla+ccq-1.3b", {}, "1.3B", False, "gla+ccq"),
        ("gated-deltanet-500m", {"vocab_size": 100}, "500M", False, "gated-deltanet"),
        ("mamba2-1.3b", {}, "1.3B", False, "mamba2"),
        ("gla-wide-500m", {}, "500M", True, "gla"),
        ("gla-tiny", {"num_layers": 5}, None, False, "gla"),
        ("gated-deltanet+ccq-1.3b", {"centred": False}, "1.3B", False, "gated-deltanet+ccq-uncentred"),
        ("gated-deltanet+ccq-uncentred-1.3b", {}, "1.3B", False, "gated-deltanet+ccq-uncentred"),
        ("gated-deltanet+ccq-1.3b", {"gate": 0.1}, "1.3B", False, "gated-deltanet+ccq-fixed"),
        ("gated-deltanet+ccq-fixed-1.3b", {}, "1.3B", False, "gated-deltanet+ccq-fixed"),
        ("gated-deltanet+ccq-fixed-1.3b", {"gate": 0.3}, "1.3B", False, "gated-deltanet+ccq-fixed, lambda 0.3"),
        ("gla+exact-tiny", {}, "tiny", False, "gla+exact"),
    ],
)
def test_scale_and_arm_follow_from_the_configuration(
    name: str, changes: dict[str, Any], scale: str | None, wide: bool, arm: str
) -> None:
    config = preset(name, **changes)
    assert (*scale_of(config), arm_name(config)) == (scale, wide, arm)


def test_a_training_is_read_from_its_folder(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(measured / "runs" / "gla+ccq-1", folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, speed in zip(lines, (5.0, 100.0, 300.0, 200.0, 150.0, 1000.0), strict=True):
        line["tokens_per_second"] = speed
        line["processes"] = 2
    # As a run that is going on leaves it.
    torn = b"".join(json.dumps(line).encode() + b"\n" for line in lines[:5]) + b'{"step": 6, "lo'
    (folder / "metrics.jsonl").write_bytes(torn)
    (training,) = read_runs([folder]).trainings
    assert (training.step, training.steps, training.tokens) == (5, 6, 5 * 128)
    assert (training.tokens_per_second, training.processes) == (150.0, 2)
    assert training.loss == lines[4]["loss"]
    assert training.gate == pytest.approx(lines[2]["gate"][0])
    assert training.correction == pytest.approx(lines[2]["correction"][0])
    looked = [line for line in lines[:5] if "gate" in line]
    assert [point.tokens for point in training.gates] == [line["tokens"] for line in looked] == [128, 3 * 128]
    assert [point.gate for point in training.gates] == pytest.approx([line["gate"][0] for line in looked])
    # Decay 0.1 of a bias that starts at lambda 0.01, at rates of 0.005 and 0.01 in the warm-up and below after it.
    assert [point.by_decay_alone for point in training.gates] == pytest.approx([0.01, 0.01], rel=0.02)
    assert training.gates[0].by_decay_alone < training.gates[1].by_decay_alone  # type: ignore[operator]
    assert not training.gate_bias_decays
    assert training.memory == max(line["memory"] for line in lines[:5])
    assert training.model.subject == ON and training.model.seed == 1


def test_other_files_of_a_folder_are_named_as_not_used(measured: Path, tmp_path: Path) -> None:
    shutil.copy(measured / "results" / "language-gla-0.json", tmp_path)
    (tmp_path / "other.json").write_text('{"schema": "ccq-bench-operator/1"}')
    (tmp_path / "notes.txt").write_text("x")
    runs = read_runs([tmp_path])
    assert [path.name for path in runs.left_out] == ["other.json"]
    assert len(runs.evaluations) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no", "is none of the files of a report .no JSON: .*; accepted are results files of `ccq eval`"),
        ("[1]", "is none of the files of a report .no JSON object.; accepted are"),
        ("{}", "it names no schema"),
        ('{"schema": "ccq-bench-operator/1"}', "its schema is 'ccq-bench-operator/1'"),
        ('{"schema": "ccq-results/1", "kind": "diagnosis"}', "its schema is 'ccq-results/1', its kind 'diagnosis'"),
        ('{"schema": "ccq-results/1", "kind": "eval"}', "field suite is missing"),
        ('{"schema": "ccq-bench-layer/1"}', r"is damaged or of another version of ccq: KeyError\('layers'\)"),
        ('{"schema": "ccq-bench-decode/1"}', r"is damaged or of another version of ccq: KeyError\('settings'\)"),
        ('{"schema": "ccq-bench-model/1", "settings": {"scale": "1.3b"}, "models": [3], "sweep": []}', "is damaged"),
    ],
)
def test_a_file_of_another_kind_is_an_error_that_names_it(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_runs([file])
    assert str(file) in str(error.value)


def test_a_grid_is_an_error_that_says_where_its_report_is(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text('{"schema": "ccq-results/1", "kind": "grid"}')
    (tmp_path / "grid.json").write_text("{}")
    for given in (file, tmp_path):
        with pytest.raises(ValueError, match="holds a grid of `ccq compare`, which has a report of its own") as error:
            read_runs([given])
        assert str(tmp_path / "report.html") in str(error.value) and "`ccq eval`" in str(error.value)


def test_a_benchmark_of_decoding_is_read_as_it_is_written(tmp_path: Path) -> None:
    from ccq.cli import main

    file = tmp_path / "decode.json"
    command = ["bench", "decode", "--device", "cpu", "--rows", "2", "--context", "8", "--repeats", "3"]
    assert main([*command, "--arms", "gla", "--out", str(file)]) == 0
    (found,) = read_runs([file]).decodes
    (row,) = json.loads(file.read_text())["models"]
    assert (found.scale, found.rows, found.context) == ("tiny", 2, 8)
    assert found.tokens_per_second("gla") == pytest.approx(row["eager"]["tokens_per_second"])
    assert found.tokens_per_second("gla+ccq") is None
    assert found.models[0].state_bytes == row["state_bytes"]


def test_a_missing_path_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist; accepted are"):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds nothing for a report .found: a\.json.; accepted are"):
        read_runs([tmp_path])


def test_a_damaged_training_is_an_error_that_names_it(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(measured / "runs" / "gla-0", folder)
    (folder / "metrics.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="run is no run folder of `ccq train`, or damaged"):
        read_runs([folder])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no line yet"):
        read_runs([folder])


def test_one_score_twice_is_an_error_that_names_both_files(measured: Path, tmp_path: Path) -> None:
    first = measured / "results" / "language-gla-0.json"
    copy = shutil.copy(first, tmp_path / "copy.json")
    with pytest.raises(ValueError, match=r"boolq \(acc\) of gla .*, seed 0; give one of them") as error:
        read_runs([first, Path(copy)])
    assert str(first) in str(error.value) and str(copy) in str(error.value)


def test_two_comparisons_of_one_name_are_an_error(tmp_path: Path, build_results: Callable[..., Any]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(build_results(arms=["gla"])))
    with pytest.raises(ValueError, match="are both comparisons named 'demo'"):
        read_runs([tmp_path])
