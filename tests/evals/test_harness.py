"""Loading, resuming and the file of `ccq eval`."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from ccq.evals.harness import EvalTask, LoadedModel, load, mean_score, run_tasks
from ccq.evals.results import EvalResults, EvalSettings, EvalTaskResult, read_results, write_results

ENVIRONMENT: Any = {
    "ccq": "0",
    "python": "3",
    "torch": "2",
    "platform": "p",
    "processor": "p",
    "cores": 1,
    "threads_per_run": 1,
    "device": "cpu",
}
SETTINGS: EvalSettings = {
    "max_length": None,
    "truncation_side": "none",
    "bos": False,
    "batch_size": 1,
    "limit": None,
    "seed": 0,
    "tasks": ["a", "b", "c"],
    "data": None,
    "others": {"lengths": [4]},
}


class Killed(BaseException):
    """As a signal would end a run."""


def planned(done: list[str], *, killed_at: str | None = None) -> list[EvalTask]:
    def task(name: str) -> EvalTask:
        def run(advance: Callable[[int, int], None]) -> EvalTaskResult:
            if name == killed_at:
                raise Killed
            advance(1, 2)
            done.append(name)
            return {
                "task": name,
                "scores": [mean_score("acc", [float(ord(name)), 1.0])],
                "curves": [],
                "data": {},
                "settings": {},
                "seconds": 0.0,
                "records": [{"sample": 0}],
            }

        return EvalTask(name, run)

    return [task(name) for name in "abc"]


def run(out: Path, loaded: LoadedModel, tasks: list[EvalTask], **changes: Any) -> EvalResults:
    return run_tasks(
        out,
        "suite",
        loaded,
        {**SETTINGS, **changes},  # type: ignore[typeddict-item]
        tasks,
        summarize=lambda results: [mean_score("mean", [result["scores"][0]["value"] for result in results])],
        environment=ENVIRONMENT,
        console=Console(file=StringIO()),
    )


def test_a_killed_run_goes_on_after_the_last_whole_task(loaded: LoadedModel, tmp_path: Path) -> None:
    out, done = tmp_path / "inner" / "results.json", list[str]()
    with pytest.raises(Killed):
        run(out, loaded, planned(done, killed_at="c"))
    partial = read_results(out, "eval")
    assert ([task["task"] for task in partial["tasks"]], partial["complete"], partial["summary"]) == (
        ["a", "b"],
        False,
        [],
    )
    results = run(out, loaded, planned(done))
    assert done == ["a", "b", "c"]
    assert results == read_results(out, "eval")
    assert results["complete"]
    assert results["created"] == partial["created"]
    assert results["summary"][0]["value"] == pytest.approx((ord("a") + ord("b") + ord("c") + 3) / 6)
    # Nothing is left to do.
    before = out.read_bytes()
    assert run(out, loaded, planned(done)) == results
    assert out.read_bytes() == before
    assert done == ["a", "b", "c"]


def test_a_run_without_a_result_leaves_no_file(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "results.json", loaded, planned([], killed_at="a"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_evaluation_is_left_alone(loaded: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    run(out, loaded, planned([]))
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"settings.batch_size is 1 there and 4 here.*give another --out"):
        run(out, loaded, planned([]), batch_size=4)
    other = load(loaded.name, device="cpu", dtype="bfloat16")
    with pytest.raises(ValueError, match=r'model.dtype is "float32" there and "bfloat16" here'):
        run(out, other, planned([]))
    weights = json.loads(before)
    weights["model"]["weights"] = "0"
    out.write_text(json.dumps(weights))
    with pytest.raises(ValueError, match=r'model.weights is "0" there'):
        run(out, loaded, planned([]))


def test_the_file_says_what_moves_a_number(loaded: LoadedModel, tmp_path: Path) -> None:
    results = run(tmp_path / "results.json", loaded, planned([]))
    assert results["model"]["parameters"] == sum(p.numel() for p in loaded.model.parameters())
    assert results["model"]["vocabulary"] == 257
    assert results["model"]["read"] == (None if "Llama" in results["model"]["type"] else "on")
    assert results["versions"]["lm_eval"] == importlib.metadata.version("lm_eval")
    assert results["settings"] == SETTINGS
    broken = {**results, "settings": {**SETTINGS, "truncation_side": "right"}}
    with pytest.raises(ValueError, match=r"settings.truncation_side is 'right' \(str\), but must be 'left' or"):
        write_results(tmp_path / "other.json", broken)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"field kind is 'eval'.*as written by `ccq compare`"):
        read_results(tmp_path / "results.json")


def test_switching_the_read_step_off(ccq_folder: Path, llama_folder: Path) -> None:
    tokens = torch.randint(1, 257, (1, 40))
    on, off = (load(str(ccq_folder), device="cpu", read=read) for read in ("on", "off"))
    by_default = load(str(ccq_folder), device="cpu")
    with torch.no_grad():
        logits = [loaded.model(tokens).logits for loaded in (by_default, on, off)]
        off.model.set_read("on")
        again = off.model(tokens).logits
    assert (by_default.read, on.read, off.read) == ("on", "on", "off")
    assert logits[0].equal(logits[1])
    assert not logits[1].equal(logits[2])
    assert again.equal(logits[1])
    with pytest.raises(ValueError, match="has no read step that 'off' could be done to; leave --read out"):
        load(str(llama_folder), device="cpu", read="off")


def test_tokens_of_a_text(loaded: LoadedModel) -> None:
    text = "Grüße, 7!"
    tokens = loaded.encode(text)
    assert loaded.tokenizer.decode(tokens) == text
    assert len(tokens) == len(text.encode())
    assert loaded.end_tokens == {loaded.tokenizer.convert_tokens_to_ids("<|end|>")}
    with pytest.raises(ValueError, match="has no token that begins a text; leave --bos out"):
        load(loaded.name, device="cpu", bos=True)


def test_a_first_token_is_put_before_texts(loaded: LoadedModel) -> None:
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.bos_token = "A"
    with_bos = dataclasses.replace(loaded, tokenizer=tokenizer, bos=True)
    assert with_bos.encode("bc") == [tokenizer.bos_token_id, *loaded.encode("bc")]
    assert with_bos.encode("bc", bos=False) == loaded.encode("bc")


def test_a_tokenizer_of_another_model_is_named(loaded: LoadedModel) -> None:
    tokenizer = copy.deepcopy(loaded.tokenizer)
    assert tokenizer.add_tokens(["<more>"]) == 1
    with pytest.raises(ValueError, match=r"gives token 257, but the model knows 0 \.\.\. 256"):
        dataclasses.replace(loaded, tokenizer=tokenizer).encode("a <more>")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("/no/such/folder", {}, "model '/no/such/folder': .*Give a folder with a model and its tokenizer"),
        ("here", {"dtype": "float8"}, "dtype is 'float8'; accepted are float32, bfloat16, float16"),
    ],
)
def test_models_that_cannot_be_had_are_named(name: str, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, device="cpu", **changes)


def test_a_mean_has_the_error_of_a_mean() -> None:
    values = np.array([0.0, 1.0, 1.0, 0.5])
    score = mean_score("acc", values.tolist())
    assert score["value"] == pytest.approx(values.mean())
    assert score["standard_error"] == pytest.approx(values.std(ddof=1) / math.sqrt(4))
    assert mean_score("acc", [1.0])["standard_error"] is None
