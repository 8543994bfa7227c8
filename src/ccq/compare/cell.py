"""One run of a grid: a task, an arm and a seed, trained and evaluated in a process of its own; and trained models read
in other ways than they were trained with.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ccq.analysis.gate import collect_gate_values, measure_reads
from ccq.compare.arm import (
    EVALUATION_SEED,
    EVALUATION_TOKENS,
    TRAINING,
    save_trained,
    text_facts,
    text_windows_of,
)
from ccq.compare.folder import GridFolder
from ccq.compare.grid import Cell, GridSettings, SyntheticStage, SyntheticTask, TextTask, reads_unit_queries
from ccq.compare.pool import Teller
from ccq.compare.training import AnyStage, CountedSteps, NeedleSteps, stage_at, tokens_before, train_stages
from ccq.data.loader import TokenBatch
from ccq.data.needles import evaluation_windows
from ccq.evals.needle import evaluate_needles
from ccq.evals.perplexity import window_losses
from ccq.evals.recall import evaluate_recall
from ccq.evals.results import PUT_INTO, GridPoint
from ccq.files import write_json_atomically
from ccq.models.configuration import CCQConfig
from ccq.models.intervention import ReadIntervention
from ccq.models.modeling import CCQForCausalLM, load_model, make_read, save_model
from ccq.models.training_record import write_training_record
from ccq.nn.read import GatedReadStep
from ccq.train.loop import CHECKPOINTS, METRICS_FILE, BatchSource
from ccq.train.metrics import read_metrics

_CURVE_POINTS = 100
_LOGITS = 2**25
"""Logits in one call when evaluating; bounds the memory."""
_READ_ROWS = 64
"""Rows over which gate and correction are measured."""


class Scores(NamedTuple):
    """What every prompt contributes to one score; the mean is the score."""

    setting: str
    """The difficulty, such as "length 256"."""
    metric: str
    """"accuracy", the share of a prompt's answers that are right, or "loss", nats a token of a window of text."""
    values: list[float]

    @classmethod
    def read(cls, given: list[Mapping[str, Any]]) -> list[Scores]:
        """From JSON."""
        return [cls(**each) for each in given]


class Work(Protocol):
    """A task as its runs see it."""

    stages: tuple[AnyStage, ...]

    def model_config(self, arm: str) -> CCQConfig: ...

    def batches(self, seed: int) -> BatchSource:
        """The steps of a seed: the same for all arms."""
        ...

    def score(self, model: CCQForCausalLM) -> list[Scores]:
        """The same prompts for all arms and seeds."""
        ...

    def rows(self) -> Tensor:
        """[B, T] int64 for measuring gate and correction: rows beside those of `score`, or held-out text."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the steps depend on beside the seed, as plain values."""
        ...

    def save(self, model: CCQForCausalLM, folder: Path) -> None: ...


class TaskSteps(CountedSteps[TokenBatch]):
    """Rows of a synthetic task."""

    def __init__(self, stages: tuple[SyntheticStage, ...], seed: int) -> None:
        super().__init__()
        self._stages, self._seed = stages, seed

    def batch(self, step: int) -> TokenBatch:
        stage = stage_at(self._stages, step)
        return stage.task.batch(seed=self._seed, step=step, batch_size=stage.batch_size)


class SyntheticWork:
    """A task of `ccq.data.tasks`."""

    def __init__(self, settings: GridSettings, task: SyntheticTask) -> None:
        self._settings, self._task = settings, task
        self.stages: tuple[AnyStage, ...] = task.stages

    def model_config(self, arm: str) -> CCQConfig:
        task = self._task.task
        return self._settings.model_config(
            arm, vocab_size=task.vocabulary_size, max_position_embeddings=self.stages[-1].length
        )

    def batches(self, seed: int) -> BatchSource:
        return TaskSteps(self._task.stages, seed)

    def score(self, model: CCQForCausalLM) -> list[Scores]:
        scores = []
        for name, task in self._task.settings:
            rows = max(1, _LOGITS // (task.length * task.vocabulary_size))
            shares = evaluate_recall(model, task, prompts=self._task.prompts, batch_size=rows)
            scores.append(Scores(name, "accuracy", shares.tolist()))
        return scores

    def rows(self) -> Tensor:
        # Training never comes to this step.
        return self._task.task.batch(seed=0, step=2**63, batch_size=_READ_ROWS).inputs

    def facts(self) -> dict[str, Any]:
        of_evaluation = ("prompts", "evaluate")
        return {"task": {name: value for name, value in self._task.values.items() if name not in of_evaluation}}

    def save(self, model: CCQForCausalLM, folder: Path) -> None:
        save_model(model, folder)


class TextWork:
    """Needles in real text, and the text itself."""

    def __init__(self, folder: GridFolder, settings: GridSettings, task: TextTask) -> None:
        self._settings, self._comparison = settings, task.comparison
        self._data = folder.text(task.name)
        self._tokens, self._tokenizer = self._data.tokens(), self._data.tokenizer()
        self.stages: tuple[AnyStage, ...] = task.comparison.train.stages

    def model_config(self, arm: str) -> CCQConfig:
        tokenizer = self._tokenizer
        return self._settings.model_config(arm, vocab_size=tokenizer.vocabulary_size, eos_token_id=tokenizer.separator)

    def batches(self, seed: int) -> BatchSource:
        return NeedleSteps(self._tokens.train, self._tokenizer.needle_vocabulary, self._comparison.train, seed)

    def score(self, model: CCQForCausalLM) -> list[Scores]:
        comparison, held_out = self._comparison, self._tokens.held_out
        scores = []
        for length in comparison.lengths:
            windows = evaluation_windows(
                held_out,
                seed=EVALUATION_SEED,
                length=length,
                windows=comparison.windows,
                vocabulary=self._tokenizer.needle_vocabulary,
                needles=comparison.train.needles,
                depth_bins=comparison.depth_bins,
            )
            rows = max(1, EVALUATION_TOKENS // length)
            outcome = evaluate_needles(model, windows, batch_size=rows)
            scores.append(Scores(f"length {length}", "accuracy", outcome.correct.astype(float).tolist()))
        # At every length the same tokens are predicted, as in `evaluate_perplexity`.
        common = math.lcm(*comparison.lengths)
        tokens = min(comparison.perplexity_tokens, len(held_out) - 1) // common * common
        for length in comparison.lengths:
            rows = max(1, EVALUATION_TOKENS // length)
            losses = window_losses(model, held_out[: tokens + 1], length=length, batch_size=rows)
            scores.append(Scores(f"length {length}", "loss", losses.mean(axis=1, dtype=np.float64).tolist()))
        return scores

    def rows(self) -> Tensor:
        return text_windows_of(self._comparison, self._tokens.held_out)

    def facts(self) -> dict[str, Any]:
        return text_facts(self._data, self._comparison.train)

    def save(self, model: CCQForCausalLM, folder: Path) -> None:
        save_trained(model, folder, self._tokenizer)


def work_of(folder: GridFolder, settings: GridSettings, task: str) -> Work:
    """The task of that name, ready to run."""
    found = settings.task(task)
    return SyntheticWork(settings, found) if isinstance(found, SyntheticTask) else TextWork(folder, settings, found)


def run_cell(path: str, settings: GridSettings, cell: Cell, tell: Teller, device: torch.device) -> None:
    """Train and evaluate one model; the body of a worker process."""
    folder = GridFolder(Path(path))
    own = folder.cell(cell)
    own.mkdir(parents=True, exist_ok=True)
    work = work_of(folder, settings, cell.task)
    steps = sum(stage.steps for stage in work.stages)
    engine, outcome, eager_because = train_stages(
        work.model_config(cell.arm),
        settings.optimizer,
        work.stages,
        work.batches(cell.seed),
        own / TRAINING,
        seed=cell.seed,
        log_every=max(1, steps // _CURVE_POINTS),
        checkpoint_every=settings.system.checkpoint_every,
        device=device,
        on_progress=tell.training,
    )
    tell.note("evaluating")
    model = engine.model.eval()
    write_training_record(
        own / "model",
        seed=cell.seed,
        steps=steps,
        tokens=outcome.tokens,
        settings={
            "model": {"preset": f"{cell.arm}-{settings.scale}", **settings.options},
            **work.facts(),
            "optimizer": dataclasses.asdict(settings.optimizer),
        },
    )
    work.save(model, own / "model")
    rows = work.rows().to(device)
    measured = measure_reads(model, rows)
    with torch.no_grad():
        cache = model(rows[:1, :1]).cache
    write_json_atomically(
        own / "result.json",
        {
            "parameters": model.parameter_count,
            "read_parameters": model.read_parameter_count,
            "state_bytes": cache.state_bytes,
            "steps": steps,
            "tokens": outcome.tokens,
            "seconds": outcome.seconds,
            # For whoever compares the seconds; what was learned is the same in both ways.
            "eager_because": eager_because,
            "curve": _curve(own / TRAINING / METRICS_FILE, work.stages),
            "gate": None if measured is None else measured.gate["mean"],
            "correction": None if measured is None else measured.correction["relative_size"],
            "scores": [score._asdict() for score in work.score(model)],
        },
    )
    shutil.rmtree(own / TRAINING / CHECKPOINTS)


def read_cell(folder: GridFolder, cell: Cell) -> dict[str, Any]:
    """What `run_cell` left."""
    return _read(folder.cell(cell) / "result.json")


def read_readings(folder: GridFolder, cell: Cell) -> dict[str, Any]:
    """What `read_otherwise` left: for each way of reading its scores, and for a read step put in the lambda."""
    path = folder.cell(cell) / "readings.json"
    return _read(path) if path.exists() else {}


def read_otherwise(path: str, settings: GridSettings, cell: Cell, tell: Teller, device: torch.device) -> None:
    """Evaluate the trained model of a cell with every intervention, and the model that its read step is put into; the
    body of a worker process. What is done already is kept.
    """
    folder = GridFolder(Path(path))
    work = work_of(folder, settings, cell.task)
    found = read_readings(folder, cell)
    model = load_model(folder.cell(cell) / "model").to(device).eval()
    for name in missing_readings(folder, settings, cell):
        tell.note(f"reading: {name}")
        result: dict[str, Any] = {}
        if name.startswith(PUT_INTO):
            base = load_model(folder.cell(cell._replace(arm=name.removeprefix(PUT_INTO))) / "model").to(device)
            result["gate"] = read_cell(folder, cell)["gate"]
            evaluated = put_in(base, model.config, result["gate"])
        else:
            evaluated = model
            intervention = ReadIntervention.parse(name)
            values = None
            if intervention.gate != "own":
                model.set_read("on")
                values = collect_gate_values(model, work.rows())
            model.set_read(intervention, gate_values=values)
        result["scores"] = [score._asdict() for score in work.score(evaluated)]
        found[name] = result
        write_json_atomically(folder.cell(cell) / "readings.json", found)


def missing_readings(folder: GridFolder, settings: GridSettings, cell: Cell) -> list[str]:
    """The ways of reading that are asked for and not evaluated yet; none for an arm without a read step."""
    wanted = settings.readings(cell.arm)
    found = read_readings(folder, cell) if wanted else {}
    return [name for name in wanted if name not in found]


def put_in(base: CCQForCausalLM, config: CCQConfig, observed: float) -> CCQForCausalLM:
    """A model with the weights of `base`, on its device, that reads as `config` says, but with one lambda for all
    tokens, heads and layers: what an observer of it sees is `observed`. It reads with unit or raw queries as `base` was
    trained to, so that with the correction off it is `base`.

    Raises:
        ValueError: the weights are not those of such a model.
    """
    changed = copy.copy(config)
    changed.keep_length = not reads_unit_queries(base.config)
    with torch.device("meta"):
        read = make_read(config, 0)
    assert isinstance(read, GatedReadStep)
    changed.gate = read.configured_gate(observed)
    model = CCQForCausalLM(changed).to(base.device).eval()
    # What a read step without parameters keeps, such as a rotation, is made from a seed of its own.
    own = {
        f"{name}.{buffer}"
        for name, module in model.named_modules()
        if isinstance(module, GatedReadStep)
        for buffer, _ in module.named_buffers()
    }
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    wrong = [f"missing {name}" for name in missing if name not in own] + [f"unexpected {name}" for name in unexpected]
    if wrong:
        raise ValueError(f"read step {config.read!r} cannot be put into arm {base.config.arm!r}: {', '.join(wrong)}")
    return model


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to make it again") from error
    return result


def _curve(metrics: Path, stages: tuple[AnyStage, ...]) -> list[GridPoint]:
    """The loss on answers along the training; of steps that were left out there is no point."""
    return [
        {
            "step": line["step"],
            "tokens": tokens_before(stages, line["step"]),
            "length": stage_at(stages, line["step"] - 1).length,
            "loss": line.get("answer", line["loss"]),
            "gate": sum(line["gate"]) / len(line["gate"]) if "gate" in line else None,
            "gate_by_decay_alone": line.get("gate_by_decay_alone"),
        }
        for line in read_metrics(metrics)
        if not line.get("skipped")
    ]
