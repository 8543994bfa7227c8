"""RULER's tasks asked to readers that find what they can see, and to models in batches of one and of four."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ccq.data.ruler import NEEDLE_TASKS, SPREAD_TASKS
from ccq.evals.harness import LoadedModel
from ccq.evals.needle import READ_OFF_LENGTHS, needle_tasks
from ccq.evals.results import EvalTaskResult
from ccq.models.text import load_tokenizer

ESSAYS = "It rained all night. Nobody had seen Mr. Grey before noon, and so on it went. " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("essays")
    (root / "essays.txt").write_text(ESSAYS)
    return root


class Rows:
    """All tokens that were read, as a cache."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = self.rows.repeat_interleave(repeats, 0)


class Finder(nn.Module):
    """Says the values stated for the asked keys, if they stand in the last `span` characters of the prompt."""

    def __init__(self, tokenizer: Any, span: int) -> None:
        super().__init__()
        self.tokenizer, self.span = tokenizer, span
        self.embedding = nn.Embedding(257, 1)
        self.generation_config = SimpleNamespace(eos_token_id=None)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, tokens: Tensor, *, use_cache: bool, cache: Rows | None = None, logits_to_keep: int = 0) -> Any:
        assert use_cache
        rows = tokens if cache is None else torch.cat((cache.rows, tokens), 1)
        logits = torch.zeros(len(rows), 1, 257)
        for number, row in enumerate(rows):
            logits[number, 0, self.next_token(self.tokenizer.decode(row.tolist()))] = 1
        return SimpleNamespace(logits=logits, cache=Rows(rows))

    def next_token(self, text: str) -> int:
        question = text.rfind("\nWhat ")
        match = re.search(r"provided text (?:is|are)", text[question:].partition("?")[2])
        if question < 0 or match is None:
            return 0
        begun = text[question:].partition("?")[2][match.end() :]
        asked = text[question:].partition("?")[0]
        end = len(text) - len(begun)
        statements = re.finditer(r"magic (?:numbers|uuids) for ([\w-]+) is: ([\w-]+)\.", text)
        values = [m[2] for m in statements if m[1] in asked and m.start() >= end - self.span]
        said = f" {' '.join(values)}."
        return self.tokenizer.encode(said[len(begun)])[0] if len(begun) < len(said) else 0


class Reckoner(Finder):
    """Follows the assignments, or counts the words, of what is asked last."""

    def next_token(self, text: str) -> int:
        asked = re.fullmatch(r"(.*)\nQuestion: (.*are):(.*)", text, re.DOTALL)
        if asked is None:
            return 0
        context, question, begun = asked.groups()
        if "variables" in question:
            holds = dict(re.findall(r"VAR (\w+) = (\d+)", context))
            for _ in range(5):
                holds |= {to: holds[of] for to, of in re.findall(r"VAR (\w+) = VAR (\w+)", context) if of in holds}
            found = [name for name, value in holds.items() if value == re.findall(r"value (\d+)", question)[0]]
        elif "coded" in question:
            found = [word for word, _ in Counter(re.findall(r"\b[a-z]{6}\b", context)).most_common(3)]
        else:
            found = [word for word, _ in Counter(re.findall(r"\d\. (\S+)", context)).most_common(10)]
        said = f" {' '.join(found)}"
        return self.tokenizer.encode(said[len(begun)])[0] if len(begun) < len(said) else 0


def finder(tokenizer_folder: Path, span: int) -> LoadedModel:
    tokenizer = load_tokenizer(tokenizer_folder)
    return LoadedModel("finder", Finder(tokenizer, span), tokenizer, None, bos=False)


def run(loaded: LoadedModel, folder: Path, task: str, **changes: Any) -> EvalTaskResult:
    arguments: dict[str, Any] = {"samples": 6, "seed": 0, "batch_size": 4}
    (planned,) = needle_tasks(loaded, {task: [1500]}, folder=folder, **arguments | changes)
    return planned.run(lambda done, of: None)


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_a_reader_who_sees_everything_is_always_right(ccq_folder: Path, folder: Path, task: str) -> None:
    result = run(finder(ccq_folder, 10**9), folder, task, samples=3)
    (score,) = result["scores"]
    assert (score["metric"], score["value"], score["samples"]) == ("accuracy", 1, 3)


@pytest.mark.parametrize("task", SPREAD_TASKS)
def test_a_reader_who_counts_is_always_right(ccq_folder: Path, task: str) -> None:
    """Nothing is read from a folder, there is no depth, and the answer has as many tokens as lm-eval gives it."""
    tokenizer = load_tokenizer(ccq_folder)
    loaded = LoadedModel("reckoner", Reckoner(tokenizer, 0), tokenizer, None, bos=False)
    (planned,) = needle_tasks(loaded, {task: [3000]}, samples=3, seed=0, batch_size=2)
    result = planned.run(lambda done, of: None)
    (score,) = result["scores"]
    assert (score["metric"], score["value"], score["samples"]) == ("accuracy", 1, 3)
    assert result["curves"] == []
    assert result["data"] == {"haystack": "RULER's own"}
    assert result["settings"]["answer_tokens"] == SPREAD_TASKS[task].answer_tokens
    for record in result["records"]:
        assert "depth" not in record
        assert record["prompt_tokens"] + SPREAD_TASKS[task].answer_tokens <= 3000


def test_a_reader_who_sees_the_end_is_right_where_it_states_the_value(ccq_folder: Path, folder: Path) -> None:
    reader = finder(ccq_folder, 700)
    result = run(reader, folder, "niah_single_1", samples=12)
    characters = 1500 - 128
    for record in result["records"]:
        away = (1 - record["depth"]) * record["prompt_tokens"]
        if abs(away - 700) > 80:
            assert record["score"] == (away < 700)
        assert record["prompt_tokens"] <= characters + 80
    scores = [record["score"] for record in result["records"]]
    assert 0 < sum(scores) < 12
    assert result["scores"][0]["value"] == pytest.approx(sum(scores) / 12)
    (curve,) = result["curves"]
    assert sum(point["samples"] for point in curve["points"]) == 12
    for point in curve["points"]:
        inside = [r["score"] for r in result["records"] if point["start"] <= r["depth"] < point["end"]]
        assert point["value"] == pytest.approx(sum(inside) / len(inside))


def test_part_of_the_values_is_part_of_the_score(ccq_folder: Path, folder: Path) -> None:
    result = run(finder(ccq_folder, 700), folder, "niah_multivalue", samples=8)
    for record in result["records"]:
        found = sum(value in record["answer"] for value in record["expected"])
        assert record["score"] == found / 4
    assert any(0 < record["score"] < 1 for record in result["records"])


def test_batches_change_no_answer(loaded: LoadedModel, folder: Path) -> None:
    one, four = (run(loaded, folder, "niah_single_3", samples=4, batch_size=batch_size) for batch_size in (1, 4))
    assert one["records"] == four["records"]
    assert len({record["answer"] for record in one["records"]}) > 1, "the answers must tell the prompts apart"
    for result in (one, four):
        assert result["settings"]["tokens_read"] < 0.9 * result["settings"]["prompt_tokens"]


def test_the_haystack_is_named(ccq_folder: Path, folder: Path) -> None:
    reader = finder(ccq_folder, 10)
    assert run(reader, folder, "niah_single_1", samples=1)["data"] == {"haystack": "RULER's own"}
    data = run(reader, folder, "niah_single_2", samples=1)["data"]
    assert data["haystack"] == "local text, not the essays of RULER"
    assert data["characters"] == len(ESSAYS)
    (standard,) = needle_tasks(reader, {"niah_single_2": [1500]}, samples=1, seed=0, batch_size=1)
    assert standard.run(lambda done, of: None)["data"]["source"]["kind"] == "embedded"


def test_missing_essays_are_named(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no text 'essays'; put there essays\.txt"):
        run(loaded, tmp_path, "niah_single_2")


def test_the_lengths_of_the_runs_without_correction() -> None:
    ends = {name: (min(lengths), max(lengths)) for name, lengths in READ_OFF_LENGTHS.items()}
    assert ends == {
        "niah_single_1": (4 * 1024, 100 * 1024),
        "niah_single_2": (4 * 1024, 16 * 1024),
        "niah_single_3": (4 * 1024, 16 * 1024),
    }
