"""Perplexity by length and position, against whole windows read one at a time."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ccq.evals.harness import LoadedModel
from ccq.evals.perplexity import POSITION_BIN, extrapolation_tasks
from ccq.evals.results import EvalTaskResult

DOCUMENTS = ["The river rose. " * 20, "Nobody saw it; " * 30, "x = [1, 2]\n" * 25]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    (root / "mine.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return root


def run(loaded: LoadedModel, folder: Path, length: int, **changes: Any) -> EvalTaskResult:
    arguments: dict[str, Any] = {"batch_size": 2, "max_tokens": 10_000, "limit": None}
    (task,) = extrapolation_tasks(loaded, ["mine"], folder=folder, lengths=[length], **arguments | changes)
    assert task.name == f"mine/{length}"
    return task.run(lambda done, of: None)


@torch.inference_mode()
def brute_force(loaded: LoadedModel, length: int, first: int | None = None) -> NDArray[np.float64]:
    """Losses [windows, length] of the documents, each with token 0 behind it."""
    tokens = [token for text in DOCUMENTS for token in [*text.encode(), -1]]
    ids = [0 if token < 0 else loaded.encode(chr(token))[0] for token in tokens]
    rows = []
    for start in range(0, len(ids) - length, length):
        window, targets = ids[start : start + length], ids[start + 1 : start + length + 1]
        before = [] if first is None else [first]
        logits = loaded.model(torch.tensor([before + window]), use_cache=False).logits[0, len(before) :].double()
        rows.append(torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="none").numpy())
    return np.stack(rows)


@pytest.mark.parametrize("length", [64, 300])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_perplexity_is_that_of_single_windows(loaded: LoadedModel, folder: Path, length: int, batch_size: int) -> None:
    losses = brute_force(loaded, length)
    result = run(loaded, folder, length, batch_size=batch_size)
    perplexity, loss = result["scores"]
    assert loss["value"] == pytest.approx(losses.mean(), rel=1e-5)
    assert perplexity["value"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    error = losses.mean(axis=1).std(ddof=1) / math.sqrt(len(losses))
    assert loss["standard_error"] == pytest.approx(error, rel=1e-3)
    assert perplexity["standard_error"] == pytest.approx(math.exp(losses.mean()) * error, rel=1e-3)
    assert perplexity["samples"] == len(losses)
    assert result["settings"]["tokens"] == losses.size
    found = [record["loss"] for record in result["records"]]
    assert found == pytest.approx(losses.mean(axis=1).tolist(), rel=1e-5)
    (curve,) = result["curves"]
    for point in curve["points"]:
        part = losses[:, int(point["start"]) : int(point["end"])]
        assert point["value"] == pytest.approx(part.mean(), rel=1e-5)
        assert point["samples"] == part.size
    assert [point["start"] for point in curve["points"]] == list(range(0, length, POSITION_BIN))
    assert curve["points"][-1]["end"] == length


def test_a_first_token_is_read_but_not_predicted(loaded: LoadedModel, folder: Path) -> None:
    tokenizer = loaded.tokenizer
    try:
        tokenizer.bos_token = "Q"
        first = tokenizer.bos_token_id
        with_bos = run(dataclasses.replace(loaded, bos=True), folder, 64)
    finally:
        tokenizer.bos_token = None
    losses = brute_force(loaded, 64, first)
    assert with_bos["scores"][1]["value"] == pytest.approx(losses.mean(), rel=1e-5)
    assert with_bos["scores"][1]["value"] != pytest.approx(brute_force(loaded, 64).mean(), rel=1e-5)


def test_limits_cut_documents_and_tokens(loaded: LoadedModel, folder: Path) -> None:
    assert run(loaded, folder, 64, limit=1)["settings"]["tokens"] == len(DOCUMENTS[0]) // 64 * 64
    assert run(loaded, folder, 64, max_tokens=200)["settings"]["tokens"] == 192
    one, two = (run(loaded, folder, 64, limit=limit)["data"] for limit in (1, 2))
    assert (one["documents"], two["documents"]) == (1, 2)
    assert one["sha256"] != two["sha256"]


def test_texts_that_are_short_or_missing_are_named(loaded: LoadedModel, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"text 'mine' has \d+ tokens; a window of length 4096 needs 4097"):
        run(loaded, folder, 4096)
    (task,) = extrapolation_tasks(
        loaded, ["pg19"], folder=folder, lengths=[64], batch_size=1, max_tokens=99, limit=None
    )
    with pytest.raises(ValueError, match=r"holds no text 'pg19'; put there pg19\.txt"):
        task.run(lambda done, of: None)
