"""lm-eval's tasks on small local files, against sums over single texts without batch, padding or state."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ccq.evals.benchmarks import LANGUAGE, LONGBENCH, MEANS, _load_task, _score, benchmark_tasks, suite_mean
from ccq.evals.harness import LoadedModel
from ccq.evals.results import EvalTaskResult

pytestmark = pytest.mark.filterwarnings(
    # What LongBench's metrics are made of.
    "ignore:Using slow pure-python SequenceMatcher:UserWarning",
    "ignore:pkg_resources is deprecated",
    "ignore:invalid escape sequence",
)

ENDINGS = ["ran home", "sat", "flew over it", "slept"]
ROWS: dict[str, list[dict[str, Any]]] = {
    "wikitext": [{"page": " = A = \n The cat , it sat . " * n} for n in (1, 5, 2)],
    "lambada_openai": [{"text": f"He gave her {n} old books"} for n in ("two", "many", "no")],
    "piqa": [
        {"goal": f"open {x}", "sol1": "pull", "sol2": "push it hard", "label": i % 2}
        for i, x in enumerate(("a door", "the old box", "it", "jars"))
    ],
    "hellaswag": [
        {"activity_label": "Cats", "ctx_a": f"A cat {i}.", "ctx_b": "then it", "endings": ENDINGS, "label": str(i)}
        for i in range(4)
    ],
    "winogrande": [
        {"sentence": f"Ann saw Bob {i} as _ left.", "option1": "Ann", "option2": "Bob", "answer": str(1 + i % 2)}
        for i in range(3)
    ],
    "arc_easy": [
        {"question": f"What is {i}?", "choices": {"text": ENDINGS, "label": list("ABCD")}, "answerKey": "ABCD"[i]}
        for i in range(3)
    ],
    "social_iqa": [
        {
            "context": f"Jo won {i}.",
            "question": "Why?",
            "answerA": "luck",
            "answerB": "skill",
            "answerC": "no idea",
            "label": "2",
        }
        for i in range(3)
    ],
    "boolq": [{"passage": f"Fact {i}.", "question": "is it so", "label": i % 2} for i in range(3)],
}
ROWS["arc_challenge"] = ROWS["arc_easy"]
ARTICLE = "It is said that the river rose. " * 12


def longbench_row(number: int) -> dict[str, Any]:
    """As the official files have it."""
    return {
        "input": f"what of {number}?",
        "context": f"{number} {ARTICLE[: 300 - 60 * number]}",
        "answers": ["the river"],
        "all_classes": ["Date", "Place"],
        "length": 60,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        (root / name).mkdir()
        write(root / name / f"{LANGUAGE[name].split}.jsonl", rows)
    for name in LONGBENCH:
        write(root / f"{name}.jsonl", [longbench_row(number) for number in range(3)])
    return root


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(loaded: LoadedModel, folder: Path, name: str, **changes: Any) -> EvalTaskResult:
    arguments: dict[str, Any] = {
        "folder": folder,
        "max_length": 2048,
        "truncation_side": "left",
        "batch_size": 2,
        "limit": None,
        "seed": 0,
    }
    (task,) = benchmark_tasks(loaded, LANGUAGE if name in LANGUAGE else LONGBENCH, [name], **arguments | changes)
    return task.run(lambda done, of: None)


@torch.inference_mode()
def log_likelihood(loaded: LoadedModel, before: list[int], after: list[int]) -> tuple[float, bool]:
    logits = loaded.model(torch.tensor([before + after[:-1]]), use_cache=False).logits[0, len(before) - 1 :]
    losses = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(after), reduction="none")
    return -losses.sum().item(), logits.argmax(-1).tolist() == after


# Prompt, choices, right one: as a reader of the benchmark's description would write them.
CHOICES = {
    "piqa": lambda r: (f"Question: {r['goal']}\nAnswer:", [r["sol1"], r["sol2"]], r["label"]),
    "hellaswag": lambda r: (f"Cats: {r['ctx_a']} Then it", r["endings"], int(r["label"])),
    "arc_easy": lambda r: (f"Question: {r['question']}\nAnswer:", r["choices"]["text"], "ABCD".index(r["answerKey"])),
    "social_iqa": lambda r: (
        f"Q: {r['context']} {r['question']}\nA:",
        [r["answerA"], r["answerB"], r["answerC"]],
        int(r["label"]) - 1,
    ),
    "boolq": lambda r: (f"{r['passage']}\nQuestion: {r['question']}?\nAnswer:", ["no", "yes"], r["label"]),
}
CHOICES["arc_challenge"] = CHOICES["arc_easy"]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_choices_are_scored_as_single_texts_are(loaded: LoadedModel, folder: Path, name: str, batch_size: int) -> None:
    result = run(loaded, folder, name, batch_size=batch_size)
    right, right_by_length = [], []
    for row, record in zip(ROWS[name], result["records"], strict=True):
        prompt, choices, gold = CHOICES[name](row)
        whole = [loaded.encode(f"{prompt} {choice}") for choice in choices]
        before = len(loaded.encode(prompt))
        scores = [log_likelihood(loaded, tokens[:before], tokens[before:])[0] for tokens in whole]
        assert [float(response[0]) for response in record["responses"]] == pytest.approx(scores, rel=1e-4)
        right.append(scores.index(max(scores)) == gold)
        by_length = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
        right_by_length.append(by_length.index(max(by_length)) == gold)
    found = {score["metric"]: score for score in result["scores"]}
    count = len(ROWS[name])
    assert found["acc"]["value"] == pytest.approx(sum(right) / count)
    if "acc_norm" in found:
        assert found["acc_norm"]["value"] == pytest.approx(sum(right_by_length) / count)
    assert found["acc"]["samples"] == count
    assert result["scores"][0]["metric"] == LANGUAGE[name].metrics[0]


def test_winogrande_scores_what_follows_the_choice(loaded: LoadedModel, folder: Path) -> None:
    result = run(loaded, folder, "winogrande")
    right = []
    for row in ROWS["winogrande"]:
        before, after = row["sentence"].split("_")
        scores = [
            log_likelihood(loaded, loaded.encode(before + name), loaded.encode(after))[0]
            for name in (row["option1"], row["option2"])
        ]
        right.append(scores.index(max(scores)) == int(row["answer"]) - 1)
    assert result["scores"][0]["value"] == pytest.approx(sum(right) / 3)


def test_lambada_is_the_last_word(loaded: LoadedModel, folder: Path) -> None:
    result = run(loaded, folder, "lambada_openai")
    found = [
        log_likelihood(loaded, loaded.encode(row["text"][: -len(" books")]), loaded.encode(" books"))
        for row in ROWS["lambada_openai"]
    ]
    perplexity, accuracy = result["scores"]
    losses = [-value for value, _ in found]
    mean = sum(losses) / 3
    assert perplexity["value"] == pytest.approx(math.exp(mean), rel=1e-4)
    deviation = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / 2)
    assert perplexity["standard_error"] == pytest.approx(math.exp(mean) * deviation / math.sqrt(3), rel=1e-3)
    assert accuracy["value"] == pytest.approx(sum(greedy for _, greedy in found) / 3)


@pytest.mark.parametrize("max_length", [2048, 32])
def test_wikitext_counts_words_of_the_page_and_reads_it_in_windows(
    loaded: LoadedModel, folder: Path, max_length: int
) -> None:
    result = run(loaded, folder, "wikitext", max_length=max_length)
    total, words = 0.0, 0
    for row in ROWS["wikitext"]:
        page = row["page"]
        text = page.replace(" , ", ", ").replace(" . ", ". ").replace(" \n", "\n").replace("\n ", "\n")
        tokens = [loaded.tokenizer.eos_token_id, *loaded.encode(text)]
        # Whole windows, and a last one that reaches back for as much context as fits.
        for start in range(0, len(tokens) - 1, max_length):
            end = min(start + max_length, len(tokens) - 1)
            first = start if end - start == max_length or start == 0 else end - max_length
            total += log_likelihood(loaded, tokens[first : start + 1], tokens[start + 1 : end + 1])[0]
        words += len(re.split(r"\s+", page))
    assert result["scores"][0]["metric"] == "word_perplexity"
    assert result["scores"][0]["value"] == pytest.approx(math.exp(-total / words), rel=1e-4)


@torch.inference_mode()
def greedy(loaded: LoadedModel, tokens: list[int], count: int, stop: str | None) -> str:
    answer: list[int] = []
    for _ in range(count):
        token = int(loaded.model(torch.tensor([tokens + answer]), use_cache=False).logits[0, -1].argmax())
        if token == loaded.tokenizer.eos_token_id:
            break
        answer.append(token)
    text = loaded.tokenizer.decode(answer)
    return text if stop is None else text.split(stop)[0]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_longbench_cuts_prompts_in_the_middle(loaded: LoadedModel, folder: Path, batch_size: int) -> None:
    changes = {"max_length": 400, "truncation_side": "middle", "batch_size": batch_size}
    result = run(loaded, folder, "triviaqa", **changes)
    assert result["settings"]["truncated"] == 2
    for number, record in enumerate(result["records"]):
        row = longbench_row(number)
        prompt = loaded.encode(
            "Answer the question based on the given passage. Only give me the answer and do not output any other "
            f"words. The following are some examples.\n\n{row['context']}\n{row['input']}"
        )
        room = 400 - 32
        if len(prompt) > room:
            prompt = prompt[: room // 2] + prompt[len(prompt) - room // 2 :]
        assert record["responses"] == [greedy(loaded, prompt, 32, "\n")]


def test_longbench_scores_an_answer_by_its_words(loaded: LoadedModel, folder: Path, tmp_path: Path) -> None:
    def answer(expected: list[str]) -> EvalTaskResult:
        write(tmp_path / "hotpotqa.jsonl", [longbench_row(1) | {"answers": expected}])
        return run(loaded, tmp_path, "hotpotqa", truncation_side="middle")

    (said,) = answer(["nothing of the kind"])["records"][0]["responses"]
    (score,) = answer(["nothing of the kind", said])["scores"]
    assert said.strip()
    assert score["value"] == 1
    assert score["standard_error"] is None


@pytest.mark.parametrize("name", [*LANGUAGE, *LONGBENCH])
def test_every_task_reads_its_local_file(folder: Path, tmp_path: Path, name: str) -> None:
    benchmark = LANGUAGE[name] if name in LANGUAGE else LONGBENCH[name]
    file = folder / f"{name}.jsonl" if name in LONGBENCH else folder / name / f"{benchmark.split}.jsonl"
    task = _load_task(name, benchmark, file, tmp_path)
    docs = list(task.eval_docs)
    assert len(docs) == (len(ROWS[name]) if name in LANGUAGE else 3)
    assert set(benchmark.metrics) <= set(task.aggregation())
    if name in LONGBENCH:
        prompt = task.doc_to_text(docs[1])
        assert longbench_row(1)["context"] in prompt
        # The official generation lengths.
        lengths = {32: ("hotpotqa", "2wikimqa", "musique", "triviaqa"), 512: ("gov_report", "qmsum", "multi_news")}
        lengths |= {128: ("narrativeqa", "qasper", "samsum"), 64: ("multifieldqa_en", "trec", "lcc", "repobench-p")}
        assert name in lengths[task.config.generation_kwargs["max_gen_toks"]]
        if name not in ("gov_report", "multi_news", "lcc"):
            assert longbench_row(1)["input"] in prompt


def test_limit_data_hash_and_settings(loaded: LoadedModel, folder: Path) -> None:
    # One row a call: with other rows beside it, a sum may be rounded in another order.
    full, cut = (run(loaded, folder, "boolq", batch_size=1, limit=limit) for limit in (None, 2))
    assert [record["sample"] for record in cut["records"]] == [0, 1]
    assert cut["records"] == full["records"][:2]
    assert full["data"]["documents"] == 3
    assert full["data"]["sha256"] != cut["data"]["sha256"]
    assert full["data"]["sha256"] == run(loaded, folder, "boolq")["data"]["sha256"]
    assert full["settings"]["shots"] == 0


def test_a_ratio_of_sums_has_the_error_of_its_residuals() -> None:
    values = [(-3.0, 2.0), (-5.0, 2.0), (-1.0, 1.0)]
    score = _score("bits_per_byte", values)
    ratio = 9 / 5
    residuals = [3 - ratio * 2, 5 - ratio * 2, 1 - ratio]
    error = math.sqrt(sum(x * x for x in residuals) * 3 / 2) / 5
    assert score["value"] == pytest.approx(ratio / math.log(2))
    assert score["standard_error"] == pytest.approx(error / math.log(2))
    # Equal weights: the error of a mean.
    equal = _score("word_perplexity", [(-1.0, 1), (-2.0, 1), (-4.0, 1)])
    deviation = math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    assert equal["standard_error"] == pytest.approx(math.exp(7 / 3) * deviation / math.sqrt(3))


def test_the_mean_is_unweighted_and_needs_all_tasks() -> None:
    def result(name: str, value: float, samples: int) -> Any:
        score = {"metric": "acc", "value": value, "standard_error": 0.1, "samples": samples, "higher_is_better": True}
        return {"task": name, "scores": [score]}

    results = [result(name, i / 10, 10**i) for i, name in enumerate(MEANS["language"])]
    (mean,) = suite_mean("language", [*results, result("wikitext", 99.0, 1)])
    assert mean["value"] == pytest.approx(0.3)
    assert mean["standard_error"] == pytest.approx(0.1 / math.sqrt(7))
    assert suite_mean("language", results[1:]) == []


def test_missing_and_unknown_data_are_named(loaded: LoadedModel, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no data of 'piqa'; put there piqa/validation\.jsonl"):
        run(loaded, tmp_path, "piqa")
    with pytest.raises(ValueError, match="unknown task 'pica'; accepted: wikitext, "):
        benchmark_tasks(
            loaded,
            LANGUAGE,
            ["pica"],
            folder=folder,
            max_length=9,
            truncation_side="left",
            batch_size=1,
            limit=None,
            seed=0,
        )
    (tmp_path / "piqa.jsonl").write_text('{"goal": "a"}\n{"goal"\n')
    with pytest.raises(ValueError, match=r"piqa\.jsonl, line 2: .*a JSON object on every line"):
        run(loaded, tmp_path, "piqa")
