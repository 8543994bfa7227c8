"""`ccq eval` by two processes under gloo against one: the same file, whoever began it, and errors that end both."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.several import free_port, run_processes

from ccq.cli import main
from ccq.evals import suites  # noqa: F401  imported once, before processes are forked
from ccq.evals.results import read_results, write_results
from ccq.models import auto_model  # noqa: F401

pytestmark = pytest.mark.filterwarnings(
    # What LongBench's metrics are made of.
    "ignore:Using slow pure-python SequenceMatcher:UserWarning",
    "ignore:pkg_resources is deprecated",
    "ignore:invalid escape sequence",
)

ROWS: dict[str, list[dict[str, Any]]] = {
    # Longer than a window of 64 tokens, with repetitions.
    "wikitext": [{"page": f" = A {n} = \n The cat , it sat . " * n} for n in (1, 5, 2)],
    "lambada_openai": [{"text": f"He gave her {n} old books"} for n in ("two", "many", "no", "his", "new")],
    "hellaswag": [
        {"activity_label": "A", "ctx_a": "B.", "ctx_b": f"c {n}", "endings": ["d", "e f"], "label": "1"}
        for n in range(5)
    ],
    "qasper": [
        {"context": f"{n} It is said that the river rose. " * (9 - n), "input": f"what of {n}?", "answers": ["river"]}
        for n in range(5)
    ],
    "gov_report": [{"context": f"It rose {n} times.", "input": "", "answers": ["it rose"]} for n in range(2)],
}
for row in (*ROWS["qasper"], *ROWS["gov_report"]):
    row |= {"all_classes": [], "length": 60}


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory, ccq_folder: Path, llama_folder: Path) -> dict[str, list[str]]:
    """Arguments of `ccq eval` by suite; batches of every size, the last of a task smaller than the others."""
    root = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "mine.txt").write_text("It was a long night, and so on it went. " * 60)
    common = ["--data", str(root), "--device", "cpu"]
    return {
        "extrapolation": ["--tasks", "mine", "--lengths", "100", "150", "--batch-size", "3", *common],
        "needle": [
            "--tasks",
            "ruler_vt",
            "ruler_fwe",
            "--lengths",
            "1500",
            "--limit",
            "5",
            "--batch-size",
            "2",
            *common,
        ],
        "language": ["--tasks", "wikitext", "lambada_openai", "hellaswag", "--max-length", "64", *common],
        "longbench": ["--tasks", "qasper", "gov_report", "--max-length", "600", "--batch-size", "2", *common],
    }


def evaluate_all(evaluations: dict[str, list[str]], models: list[str], out: Path, ports: list[int]) -> int:
    """One command after the other; several processes meet at a port of its own for each."""
    code, free = 0, iter(ports)
    for model in models:
        for suite, arguments in evaluations.items():
            if "WORLD_SIZE" in os.environ:
                os.environ["MASTER_PORT"] = str(next(free))
            file = out / Path(model).name / f"{suite}.json"
            code = max(code, main(["eval", suite, model, *arguments, "--out", str(file)]))
    return code


def evaluate_by_two(
    evaluations: dict[str, list[str]], models: list[str], out: Path, target: Callable[..., int] = evaluate_all
) -> list[int | None]:
    ports = [free_port() for _ in range(len(evaluations) * len(models))]
    return run_processes(2, target, evaluations, models, out, ports, log=out / "log")


def content(path: Path) -> Any:
    """All of a results file but when, where and how long."""
    results: Any = read_results(path, "eval")
    for name in ("created", "environment"):
        del results[name]
    for task in results["tasks"]:
        del task["seconds"]
    return results


def test_two_processes_write_the_file_of_one(
    ccq_folder: Path, llama_folder: Path, evaluations: dict[str, list[str]], tmp_path: Path
) -> None:
    """All suites, on a model of this library and one of transformers. One of the files was begun by one process."""
    models = [str(ccq_folder), str(llama_folder)]
    one, two = tmp_path / "one", tmp_path / "two"
    assert evaluate_all(evaluations, models, one, []) == 0
    whole = read_results(one / ccq_folder.name / "extrapolation.json", "eval")
    begun = copy.deepcopy(whole)
    begun["tasks"], begun["complete"] = begun["tasks"][:1], False
    (two / ccq_folder.name).mkdir(parents=True)
    write_results(two / ccq_folder.name / "extrapolation.json", begun)
    assert evaluate_by_two(evaluations, models, two) == [0, 0], (two / "log").read_text()
    printed = (two / "log").read_text()
    for model in (ccq_folder.name, llama_folder.name):
        for suite in evaluations:
            expected, found = (content(each / model / f"{suite}.json") for each in (one, two))
            assert found == expected
            assert found["complete"]
            assert all(len(task["records"]) > 1 for task in found["tasks"])
            assert printed.count(f"Results: {two / model / suite}.json") == 1
        needle = content(one / model / "needle.json")["tasks"][0]
        assert needle["settings"]["tokens_read"] < needle["settings"]["prompt_tokens"], "beginnings are shared"
        assert len({record["answer"] for record in needle["records"]}) > 1, "the answers must tell the prompts apart"
        assert {path.stem for path in (two / model).iterdir()} == set(evaluations)
    again = read_results(two / ccq_folder.name / "extrapolation.json", "eval")
    assert again["tasks"][0] == whole["tasks"][0], "with the time that it took before"


def evaluate_with_a_fault(evaluations: dict[str, list[str]], models: list[str], out: Path, ports: list[int]) -> int:
    """The second process fails while it computes."""
    from ccq.evals import perplexity

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("the card is too warm")

    if os.environ["RANK"] == "1":
        perplexity.window_losses = fail
    return evaluate_all(evaluations, models, out, ports)


def test_an_error_in_one_process_ends_both(ccq_folder: Path, evaluations: dict[str, list[str]], tmp_path: Path) -> None:
    asked = {"extrapolation": evaluations["extrapolation"]}
    assert evaluate_by_two(asked, [str(ccq_folder)], tmp_path, evaluate_with_a_fault) == [2, 2]
    assert (tmp_path / "log").read_text().count("ccq: the card is too warm") == 2
    assert not list(tmp_path.rglob("*.json"))


def test_torchrun_evaluates(ccq_folder: Path, evaluations: dict[str, list[str]], tmp_path: Path) -> None:
    """The command a user types."""
    out = tmp_path / "results.json"
    evaluate = ["eval", "extrapolation", str(ccq_folder), *evaluations["extrapolation"], "--out", str(out)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ccq.cli", *evaluate]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Results: ") == 1
    found = content(out)
    assert main([*evaluate[:-1], str(tmp_path / "one.json")]) == 0
    assert found == content(tmp_path / "one.json")
