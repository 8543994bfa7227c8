"""Public benchmarks through lm-eval: its task files, templates and metrics, with data from the hub or local files.

lm-eval chooses the prompts, cuts answers and scores them. Models run through its class for models of transformers, in
which tokens, their truncation and the count of what was cut are this module's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ccq.evals.harness import EvalTask, LoadedModel, mean_score
from ccq.evals.local_data import row_files
from ccq.evals.results import EvalScore, EvalTaskResult
from ccq.files import sha256_of_file

_NEEDS_EXTRA = "pip install 'ccq-attention[eval]'"


class Benchmark(NamedTuple):
    """A task that lm-eval ships: its file below lm_eval/tasks, the split that is scored, and the metrics that are
    reported, the one for tables first.
    """

    file: str
    split: str
    metrics: tuple[str, ...]


LANGUAGE: Mapping[str, Benchmark] = {
    "wikitext": Benchmark("wikitext/wikitext.yaml", "test", ("word_perplexity", "byte_perplexity", "bits_per_byte")),
    "lambada_openai": Benchmark("lambada/lambada_openai.yaml", "test", ("perplexity", "acc")),
    "piqa": Benchmark("piqa/piqa.yaml", "validation", ("acc", "acc_norm")),
    "hellaswag": Benchmark("hellaswag/hellaswag.yaml", "validation", ("acc_norm", "acc")),
    "winogrande": Benchmark("winogrande/default.yaml", "validation", ("acc",)),
    "arc_easy": Benchmark("arc/arc_easy.yaml", "test", ("acc_norm", "acc")),
    "arc_challenge": Benchmark("arc/arc_challenge.yaml", "test", ("acc_norm", "acc")),
    "social_iqa": Benchmark("siqa/siqa.yaml", "validation", ("acc",)),
    "boolq": Benchmark("super_glue/boolq/default.yaml", "validation", ("acc",)),
}
"""Table 2 of the paper; its average is that of the last seven."""

LONGBENCH: Mapping[str, Benchmark] = {
    name: Benchmark(f"longbench/{name}.yaml", "test", ("score",))
    for name in (
        "narrativeqa",
        "qasper",
        "multifieldqa_en",
        "hotpotqa",
        "2wikimqa",
        "musique",
        "gov_report",
        "qmsum",
        "multi_news",
        "trec",
        "triviaqa",
        "samsum",
        "lcc",
        "repobench-p",
    )
}
"""Table 4 of the paper: the English tasks of LongBench (Bai et al., 2023, arXiv:2308.14508) without synthetic ones."""

MEANS: Mapping[str, tuple[str, ...]] = {
    "language": ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq"),
    "longbench": tuple(LONGBENCH),
}
"""The tasks whose first scores a suite's mean is over, unweighted."""


def benchmark_tasks(
    loaded: LoadedModel,
    benchmarks: Mapping[str, Benchmark],
    names: Sequence[str],
    *,
    folder: Path | None,
    max_length: int,
    truncation_side: Literal["left", "middle"],
    batch_size: int,
    limit: int | None,
    seed: int,
) -> list[EvalTask]:
    """Zero-shot tasks of lm-eval.

    Args:
        loaded: the model.
        benchmarks: `LANGUAGE` or `LONGBENCH`.
        names: the ones that are run.
        folder: where the data are (see `ccq.evals.local_data.row_files`); None for the hub.
        max_length: prompt and answer together, in tokens; longer prompts are cut.
        truncation_side: where prompts that are continued are cut; those whose continuation is scored lose their
            beginning in any case.
        batch_size: rows of a call.
        limit: the most samples of a task; None for all.
        seed: of the random numbers that a task may draw.

    Raises:
        ValueError: a name is unknown, lm-eval is not installed, a local file is missing, or the tokenizer has no token
            that could stand before a text.
    """
    unknown = [name for name in names if name not in benchmarks]
    if unknown:
        raise ValueError(f"unknown task {unknown[0]!r}; accepted: {', '.join(benchmarks)}")
    if loaded.tokenizer.bos_token_id is None and loaded.tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {loaded.name} has neither a token that begins nor one that ends a text; lm-eval needs "
            "one before texts without a prompt"
        )
    files = {name: None if folder is None else row_files(folder, [name], benchmarks[name].split) for name in names}

    def task(name: str) -> EvalTask:
        def run(advance: Callable[[int, int], None]) -> EvalTaskResult:
            model = _harness_model()(loaded, max_length, truncation_side, batch_size, advance)
            return _run(model, name, benchmarks[name], files[name], limit, seed)

        return EvalTask(name, run)

    return [task(name) for name in names]


def suite_mean(suite: str, results: Sequence[EvalTaskResult]) -> list[EvalScore]:
    """The unweighted mean of `MEANS`, if all of its tasks were run; errors of the tasks are taken as independent."""
    names = MEANS[suite]
    scores = {result["task"]: result["scores"][0] for result in results}
    if not set(names) <= set(scores):
        return []
    errors = [scores[name]["standard_error"] for name in names]
    known = [error for error in errors if error is not None]
    return [
        {
            "metric": f"mean of {len(names)}",
            "value": math.fsum(scores[name]["value"] for name in names) / len(names),
            "standard_error": math.hypot(*known) / len(names) if len(known) == len(names) else None,
            "samples": sum(scores[name]["samples"] for name in names),
            "higher_is_better": True,
        }
    ]


def _run(
    model: Any, name: str, benchmark: Benchmark, file: Path | None, limit: int | None, seed: int
) -> EvalTaskResult:
    import lm_eval
    import numpy as np

    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    # lm-eval and datasets draw bars of their own.
    with tempfile.TemporaryDirectory(prefix="ccq-eval-") as scratch, contextlib.redirect_stderr(io.StringIO()):
        task = _load_task(name, benchmark, file, Path(scratch))
        output = lm_eval.evaluate(
            lm=model,
            task_dict={"tasks": {task.task_name: task}, "groups": {}, "group_map": {}},
            limit=limit,
            bootstrap_iters=0,
        )
    samples = sorted(output["samples"][task.task_name], key=lambda sample: sample["doc_id"])
    digest = hashlib.sha256("".join(sample["doc_hash"] for sample in samples).encode()).hexdigest()
    records = [
        {
            "sample": sample["doc_id"],
            "doc_sha256": sample["doc_hash"],
            "target": _plain(sample["target"]),
            "responses": _plain(sample["filtered_resps"]),
            **{metric: _plain(sample[metric]) for metric in sample["metrics"]},
        }
        for sample in samples
    ]
    config = task.dump_config()
    source = {"dataset": task.config.dataset_path, "config": task.config.dataset_name}
    if file is not None:
        source = {"file": str(file), "file_sha256": sha256_of_file(file)}
    return {
        "task": name,
        "scores": [_score(metric, [record[metric] for record in records]) for metric in benchmark.metrics],
        "curves": [],
        "data": {**source, "split": benchmark.split, "documents": len(records), "sha256": digest},
        "settings": {
            "lm_eval_task": task.task_name,
            "version": str(task.VERSION),
            "shots": 0,
            "generation": _plain(config.get("generation_kwargs")),
            "requests": model.requests,
            "truncated": model.truncated,
        },
        "seconds": 0.0,
        "records": records,
    }


def _load_task(name: str, benchmark: Benchmark, file: Path | None, scratch: Path) -> Any:
    """lm-eval's own task, its data replaced by `file` through a task file that includes the shipped one."""
    import datasets
    import lm_eval.tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    shipped = Path(lm_eval.tasks.__file__).parent / benchmark.file
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    path = shipped
    if file is not None:
        rows = _rows(file)
        # `question` is what lm-eval's copy of LongBench calls the `input` of the official files.
        if rows and benchmark.file.startswith("longbench/") and "question" not in rows[0] and "input" in rows[0]:
            rows = [{**row, "question": row["input"]} for row in rows]
        copied = scratch / "rows.jsonl"
        copied.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        changes: dict[str, Any] = {
            "include": str(shipped),
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {benchmark.split: str(copied)},
                "cache_dir": str(scratch / "cache"),
            },
            **{f"{split}_split": None for split in ("training", "validation", "test") if split != benchmark.split},
        }
        path = scratch / "task.yaml"
        # JSON is YAML.
        path.write_text(json.dumps(changes), encoding="utf-8")
    try:
        (task,) = manager.load([str(path)])["tasks"].values()
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"data of {name!r} in {file}: {error.__cause__ or error}") from error
    except Exception as error:  # which one tells that the hub cannot be reached depends on the releases of its clients
        if file is not None:
            raise
        raise ValueError(
            f"task {name!r}: its data cannot be had from the hub ({' '.join(str(error).split())}); give --data FOLDER "
            f"with {name}/{benchmark.split}.jsonl, a JSON object on every line with the fields of the data set"
        ) from error
    task.set_config(key="num_fewshot", value=0)
    return task


def _rows(file: Path) -> list[dict[str, Any]]:
    """The rows of JSON lines or Parquet."""
    if file.suffix == ".parquet":
        from pyarrow import parquet

        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        return rows
    rows = []
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}; a JSON object on every line is needed") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number} holds no JSON object; one on every line is needed")
            rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    return json.loads(json.dumps(value, default=str))


def _score(metric: str, values: Sequence[Any]) -> EvalScore:
    """What lm-eval's aggregations of these metrics give, with a standard error from the samples alone.

    The errors of perplexities and of bits are to first order: those of the mean log-likelihood, or of the ratio of
    sums where words or bytes weigh it, carried through.
    """
    if metric == "perplexity":
        mean = mean_score(metric, values, higher_is_better=False)
        value = math.exp(-mean["value"])
        error = mean["standard_error"]
        return {**mean, "value": value, "standard_error": None if error is None else value * error}
    if metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        count, weight = len(values), math.fsum(value[1] for value in values)
        ratio = -math.fsum(value[0] for value in values) / weight
        error = None
        if count > 1:
            squares = math.fsum((-value[0] - ratio * value[1]) ** 2 for value in values)
            error = math.sqrt(squares * count / (count - 1)) / weight
        value, slope = (ratio / math.log(2), 1 / math.log(2)) if metric == "bits_per_byte" else (math.exp(ratio),) * 2
        return {
            "metric": metric,
            "value": value,
            "standard_error": None if error is None else slope * error,
            "samples": count,
            "higher_is_better": False,
        }
    return mean_score(metric, [float(value) for value in values])


def _of_its_process(scores: Sequence[tuple[float, bool]]) -> tuple[float, bool]:
    """The score of the process that asked the model; the others have NaN."""
    return next((score for score in scores if not math.isnan(score[0])), scores[0])


@functools.cache
def _harness_model() -> Any:
    """lm-eval's class for models of transformers, made to take ours."""
    try:
        from lm_eval.models.huggingface import HFLM
        from lm_eval.models.utils import truncate_tokens
    except ImportError as error:
        raise ValueError(f"this suite needs lm-eval ({error}): {_NEEDS_EXTRA}") from error

    class HarnessModel(HFLM):
        """`requests` and `truncated` count what was asked and which of it was too long."""

        def __init__(
            self,
            loaded: LoadedModel,
            max_length: int,
            truncation_side: Literal["left", "middle"],
            batch_size: int,
            advance: Callable[[int, int], None],
        ) -> None:
            tokenizer = copy.deepcopy(loaded.tokenizer)
            if tokenizer.pad_token_id is None:
                # Any token will do: padding is masked, or stands behind what is scored.
                tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
            super().__init__(
                pretrained=loaded.model,
                backend="causal",
                tokenizer=tokenizer,
                max_length=max_length,
                batch_size=batch_size,
                add_bos_token=loaded.bos,
            )
            self.loaded, self.truncation_side, self.advance = loaded, truncation_side, advance
            self.rows_of_a_call, self.calls = batch_size, 0
            self.vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
            self.requests = self.truncated = self.answered = 0
            self.bos = loaded.bos
            self.set_cache_hook(self)

        def add_partial(self, *_: Any) -> None:
            """lm-eval tells a cache of every answer; here it moves the progress bar."""
            self.answered += 1
            self.advance(self.answered, self.requests)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self.requests += len(requests)
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self.requests += len(requests)
            # A text is read in windows, before the first of which lm-eval puts the first token itself.
            self.bos = False
            # All windows in one call of `_loglikelihood_tokens`, which divides them into batches. What lm-eval shares
            # between equal texts is meant for choices of one token, and mixes up windows that are scored differently.
            self.batch_size_per_gpu, self.logits_cache = sys.maxsize, False
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm=True)
            finally:
                self.bos = self.loaded.bos
                self.batch_size_per_gpu, self.logits_cache = self.rows_of_a_call, True

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self.requests += len(requests)
            self.calls = 0
            answer = functools.partial(super().generate_until, requests, disable_tqdm=True)
            # Only the process that asked the model has more than an empty answer.
            return ["".join(answers) for answers in zip(*self.loaded.processes.gather(answer), strict=True)]

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            self.truncated += sum(len(before) + len(after) > self.max_length + 1 for _, before, after in requests)
            self.batch_size_per_gpu = self.rows_of_a_call
            self.calls = 0
            score = functools.partial(super()._loglikelihood_tokens, requests, *args, **kwargs)
            return [_of_its_process(scores) for scores in zip(*self.loaded.processes.gather(score), strict=True)]

        def _is_own_call(self) -> bool:
            """Whether this call of the model, by its number, falls to this process. lm-eval goes through all of them in
            every process, with the same batches, so that no number depends on how many processes there are.
            """
            self.calls += 1
            return (self.calls - 1) % self.loaded.processes.count == self.loaded.processes.rank

        def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._is_own_call():
                return super()._model_call(inps, *args, **kwargs)
            return torch.full((1, 1, 1), math.nan, device=inps.device).expand(*inps.shape, self.vocabulary)

        def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super()._model_generate(context, *args, **kwargs) if self._is_own_call() else context

        def tok_encode(self, string: str, *_: Any, **__: Any) -> list[int]:
            return self.loaded.encode(string, bos=self.bos)

        def tok_batch_encode(
            self, strings: Sequence[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            rows = [self.tok_encode(string) for string in strings]
            if left_truncate_len is not None:
                self.truncated += sum(len(row) > left_truncate_len for row in rows)
                rows = [
                    truncate_tokens(row, left_truncate_len, self.truncation_side)
                    if len(row) > left_truncate_len
                    else row
                    for row in rows
                ]
            longest = max(map(len, rows))
            tokens = torch.full((len(rows), longest), self.tokenizer.pad_token_id)
            mask = torch.zeros_like(tokens)
            for number, row in enumerate(rows):
                tokens[number, longest - len(row) :] = torch.tensor(row)
                mask[number, longest - len(row) :] = 1
            return tokens, mask

    return HarnessModel
