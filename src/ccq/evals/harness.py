"""The frame of `ccq eval`: a model with its tokenizer, tasks one after the other, and a results file that is written
after each of them, so that a run that was killed goes on.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ccq import __version__
from ccq.evals.results import (
    SCHEMA,
    EnvironmentResult,
    EvalModelResult,
    EvalResults,
    EvalScore,
    EvalSettings,
    EvalTaskResult,
    read_results,
    write_results,
)
from ccq.files import setting_differences
from ccq.models.cache import fingerprint
from ccq.models.configuration import CCQConfig, own_fields
from ccq.models.training_record import read_training_record
from ccq.processes import Processes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_PACKAGES = (
    "torch",
    "triton",
    "flash-linear-attention",
    "transformers",
    "tokenizers",
    "lm_eval",
    # What its generators and metrics are made of.
    "nltk",
    "wonderwords",
    "rouge",
    "fuzzywuzzy",
    "Levenshtein",
)
_LARGEST_LENGTH = 1 << 20
"""Tokenizers without a limit name an astronomical one."""


@dataclass(frozen=True)
class LoadedModel:
    """A model and all that decides how text becomes its tokens.

    Attributes:
        name: folder or hub name, as given.
        model: a causal LM of transformers, in eval mode on its device.
        tokenizer: of transformers.
        read: the intervention on its read steps as `ReadIntervention` prints it, "on" for none; None for a model
            without read steps.
        bos: put the tokenizer's first token before every text.
        processes: that hold the same model and share its work.
    """

    name: str
    model: Any
    tokenizer: Any
    read: str | None
    bos: bool
    processes: Processes = field(default_factory=Processes)

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Token ids; special tokens of the tokenizer's own are left out, but for the first one where `bos` says so
        (None: as the model's setting does).

        Raises:
            ValueError: the model has no embedding for a token.
        """
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if self.bos if bos is None else bos:
            tokens = [self.tokenizer.bos_token_id, *tokens]
        largest, vocabulary = max(tokens, default=0), self.model.get_input_embeddings().weight.shape[0]
        if largest >= vocabulary:
            raise ValueError(
                f"the tokenizer of {self.name} gives token {largest}, but the model knows 0 ... {vocabulary - 1}: it "
                "is not the tokenizer that the model was trained with"
            )
        return tokens

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens at which an answer ends."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        found = configured if isinstance(configured, list) else [configured, self.tokenizer.eos_token_id]
        return frozenset(token for token in found if token is not None)

    @property
    def max_length(self) -> int:
        """The longest text it was made for, in tokens, as far as it says so, else 2048."""
        stated = getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length
        return int(stated) if stated is not None and stated < _LARGEST_LENGTH else 2048

    def described(self) -> EvalModelResult:
        """For a results file."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        content = json.dumps(self.tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
        config, record = self.model.config, read_training_record(self.name)
        is_ours = isinstance(config, CCQConfig)
        return {
            "name": self.name,
            "type": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "read": self.read,
            "weights": fingerprint(self.model),
            "tokenizer": hashlib.sha256(content.encode()).hexdigest(),
            "vocabulary": len(self.tokenizer),
            "configuration": {name: getattr(config, name) for name in own_fields()} if is_ours else None,
            "training": None if record is None else {**record},
        }


def load(
    name: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    gates: Path | None = None,
    read: str | None = None,
    gate_values: Path | None = None,
    bos: bool | None = None,
    processes: Processes | None = None,
) -> LoadedModel:
    """Load a model for evaluation.

    Args:
        name: a folder with a model and its tokenizer, or a name of the hub; of this library or any causal LM of
            transformers.
        device: default cuda if torch finds a GPU, else cpu.
        dtype: of the weights; default bfloat16 on a GPU, float32 on a CPU.
        gates: see `ccq.models.auto_model.read_auto_model`.
        read, gate_values: see `ccq.models.intervention.switch_read`.
        bos: put the tokenizer's first token before every text; None does what the tokenizer does by itself.
        processes: that load it too, each for itself, and share its work; None for this one alone.

    Raises:
        ValueError: there is no such model, or it has no read step that this could be done to, or no first token to be
            set, or the gates do not fit.
        FileNotFoundError: there is no such file of gates.
    """
    from ccq.models.auto_model import read_auto_model
    from ccq.models.intervention import switch_read

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    accepted = ("float32", "bfloat16", "float16")
    if dtype not in accepted:
        raise ValueError(f"dtype is {dtype!r}; accepted are {', '.join(accepted)}")
    model, tokenizer = read_auto_model(name, dtype=getattr(torch, dtype), device=device, gates=gates)
    read = switch_read(model, name, read, gate_values)
    first = tokenizer.bos_token_id
    if bos and first is None:
        raise ValueError(f"the tokenizer of {name!r} has no token that begins a text; leave --bos out")
    if bos is None:
        bos = first is not None and tokenizer("a").input_ids[:1] == [first]
    return LoadedModel(name, model, tokenizer, read, bos, processes or Processes())


@dataclass(frozen=True)
class EvalTask:
    """One task of a suite: `run(advance)` gives its result and calls `advance(done, of)` as it goes on."""

    name: str
    run: Callable[[Callable[[int, int], None]], EvalTaskResult]


def run_tasks(
    out: Path,
    suite: str,
    loaded: LoadedModel,
    settings: EvalSettings,
    tasks: Sequence[EvalTask],
    *,
    summarize: Callable[[Sequence[EvalTaskResult]], list[EvalScore]],
    environment: EnvironmentResult,
    console: Console,
) -> EvalResults:
    """Run the tasks that `out` does not hold yet, and write it after each.

    Every process of the model must call it. The tasks divide the work among them so that all numbers are those of one
    process, and the first process reads and writes the file.

    Args:
        out: the results file. If it is there, it must be of the same model, settings and versions.
        suite: its name.
        loaded: the model.
        settings: all that moves a number; compared with those of an existing file.
        tasks: in the order in which they are run and written.
        summarize: gives the scores over all tasks, at the end.
        environment: where this runs; for the file.
        console: shows the progress.

    Raises:
        ValueError: `out` holds something else, or a task cannot be run.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    results: EvalResults = {
        "schema": SCHEMA,
        "kind": "eval",
        "suite": suite,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "complete": False,
        "model": loaded.described(),
        "settings": settings,
        "versions": versions(),
        "environment": environment,
        "tasks": [],
        "summary": [],
    }
    processes = loaded.processes
    results = processes.from_first(functools.partial(_begun, out, results))
    done = {task["task"] for task in results["tasks"]}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        everything = progress.add_task(suite, total=len(tasks), completed=len(done))
        for task in tasks:
            if task.name in done:
                continue
            bar = progress.add_task(task.name, total=None)
            start = time.perf_counter()
            result = task.run(functools.partial(_advance, progress, bar))
            result["seconds"] = time.perf_counter() - start
            progress.remove_task(bar)
            results["tasks"].append(result)
            processes.from_first(functools.partial(write_results, out, results))
            progress.advance(everything)
    if not results["complete"]:
        order = {task.name: number for number, task in enumerate(tasks)}
        results["tasks"].sort(key=lambda result: order[result["task"]])
        results["summary"] = summarize(results["tasks"])
        results["complete"] = True
        processes.from_first(functools.partial(write_results, out, results))
    return results


def _advance(progress: Progress, bar: TaskID, done: int, of: int) -> None:
    progress.update(bar, completed=done, total=of)


def _begun(out: Path, asked: EvalResults) -> EvalResults:
    """What `out` holds, or `asked` if there is no such file yet."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return asked
    found = read_results(out, "eval")
    compared = ("suite", "model", "settings", "versions")
    differences = [
        line
        for name in compared
        for line in setting_differences(found[name], asked[name], name)  # type: ignore[literal-required]
    ]
    if differences:
        raise ValueError(
            f"{out} holds another evaluation: {'; '.join(differences)}; give another --out, or delete the file"
        )
    return found


def versions() -> dict[str, str | None]:
    """The packages that take part, as installed."""
    found: dict[str, str | None] = {"ccq": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def mean_score(metric: str, values: Sequence[float], *, higher_is_better: bool = True) -> EvalScore:
    """The mean with its standard error, sample standard deviation / sqrt(n); none for one sample."""
    count = len(values)
    mean = math.fsum(values) / count
    error = None
    if count > 1:
        error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    return {
        "metric": metric,
        "value": mean,
        "standard_error": error,
        "samples": count,
        "higher_is_better": higher_is_better,
    }
