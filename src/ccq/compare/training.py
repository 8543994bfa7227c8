"""How an arm is trained: a curriculum of window lengths, with needles in every window."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ccq.data.loader import TokenBatch
from ccq.data.needles import NeedleBatch, training_batch
from ccq.data.tokenizer import NeedleVocabulary
from ccq.evals.results import TrainingPoint
from ccq.models.configuration import CCQConfig
from ccq.processes import Processes
from ccq.train.config import OptimizerRecipe
from ccq.train.engine import Engine, TargetBatch, initial_model
from ccq.train.loop import METRICS_FILE, BatchSource, Outcome, Progress, Schedule, train
from ccq.train.metrics import read_metrics

_CPU = torch.device("cpu")


class AnyStage(Protocol):
    """A part of a curriculum: `steps` optimizer steps on batches of `batch_size` rows of `length` tokens."""

    @property
    def length(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def steps(self) -> int: ...


StageType = TypeVar("StageType", bound=AnyStage)
BatchType = TypeVar("BatchType", TokenBatch, TargetBatch)


def stage_at(stages: Sequence[StageType], step: int) -> StageType:
    """The stage of step `step`, counted from 0."""
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return stages[-1]


def tokens_before(stages: Sequence[AnyStage], step: int) -> int:
    """Tokens read in the first `step` steps."""
    tokens = 0
    for stage in stages:
        steps = min(step, stage.steps)
        tokens += steps * stage.batch_size * stage.length
        step -= steps
    return tokens


@dataclass(frozen=True)
class Stage:
    """A part of the length curriculum."""

    length: int
    """Tokens in a window."""
    batch_size: int
    """Windows in a step."""
    steps: int
    """Optimizer steps at this length."""


@dataclass(frozen=True)
class TrainConfig:
    """Optimizer, schedule and length curriculum. Two runs with equal configurations, seeds and data are bit-equal."""

    stages: tuple[Stage, ...]
    """Lengths in the order in which they are trained; the last one is the training length."""
    needles: int = 4
    """Statements in a window, all of them asked."""
    learning_rate: float = 3e-3
    """Peak of the schedule: linear warm-up, then a cosine to `final_learning_rate_share` of it."""
    warmup_steps: int = 50
    final_learning_rate_share: float = 0.1
    weight_decay: float = 0.1
    """On matrices only; see `ccq.train.optimizer.decays`."""
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = 1.0
    """Largest Euclidean norm of all gradients together."""
    log_every: int = 20
    """Steps between points of the training curve."""
    checkpoint_every: int = 100
    """Steps between checkpoints; what a kill can cost."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages is empty; give at least one Stage(length, batch_size, steps)")
        for stage in self.stages:
            if stage.length < 2 or stage.batch_size < 1 or stage.steps < 1:
                raise ValueError(f"a stage needs a length of at least 2, and at least 1 window and 1 step, got {stage}")
        for name in ("needles", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not math.isfinite(self.learning_rate):
            raise ValueError(f"learning_rate must be a finite number above 0, got {self.learning_rate}")
        self.optimizer()

    def optimizer(self) -> OptimizerRecipe:
        """The part of it that the trainer knows. Raises ValueError for values that cannot work."""
        return OptimizerRecipe(
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            final_learning_rate_share=self.final_learning_rate_share,
            weight_decay=self.weight_decay,
            betas=self.betas,
            gradient_clip=self.gradient_clip,
        )

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Tokens read in all."""
        return self.tokens_before(self.steps)

    @property
    def training_length(self) -> int:
        """Window length of the last stage."""
        return self.stages[-1].length

    def stage_at(self, step: int) -> Stage:
        """The stage of step `step`, counted from 0."""
        return stage_at(self.stages, step)

    def tokens_before(self, step: int) -> int:
        """Tokens read in the first `step` steps."""
        return tokens_before(self.stages, step)


class CountedSteps(ABC, Generic[BatchType]):
    """The steps of an arm. The data of a step are a function of seed and step alone, so all arms see the same in the
    same order, and how far it is is all that a checkpoint must hold.
    """

    def __init__(self) -> None:
        self._step = 0

    @abstractmethod
    def batch(self, step: int) -> BatchType:
        """The rows of step `step`, counted from 0."""

    def __iter__(self) -> Iterator[tuple[BatchType]]:
        while True:
            self._step += 1
            yield (self.batch(self._step - 1),)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]


class NeedleSteps(CountedSteps[TargetBatch]):
    """Windows of text with needles.

    Args:
        tokens: integer [tokens], the training stream.
        vocabulary: ids of the needle tokens.
        config: the curriculum.
        seed: of the windows.
    """

    def __init__(
        self, tokens: NDArray[np.integer[Any]], vocabulary: NeedleVocabulary, config: TrainConfig, seed: int
    ) -> None:
        super().__init__()
        self._tokens, self._vocabulary, self._config, self._seed = tokens, vocabulary, config, seed

    def batch(self, step: int) -> TargetBatch:
        stage = self._config.stage_at(step)
        return with_needles(
            training_batch(
                self._tokens,
                seed=self._seed,
                step=step,
                batch_size=stage.batch_size,
                length=stage.length,
                vocabulary=self._vocabulary,
                needles=self._config.needles,
            )
        )


def with_needles(batch: NeedleBatch) -> TargetBatch:
    """Two parts of the loss, text and answers, each with its own mean: four answers in a window would be lost in a mean
    over all of its tokens.
    """
    return TargetBatch(batch.inputs, batch.targets, {"text": batch.text, "answer": batch.answer})


def train_arm(
    model_config: CCQConfig,
    config: TrainConfig,
    steps: NeedleSteps,
    folder: Path,
    *,
    seed: int,
    device: torch.device = _CPU,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Engine, Outcome, list[TrainingPoint]]:
    """Train one arm, going on from the newest checkpoint in `folder`. Returns it with its training curve."""
    engine, outcome, _ = train_stages(
        model_config,
        config.optimizer(),
        config.stages,
        steps,
        folder,
        seed=seed,
        log_every=config.log_every,
        checkpoint_every=config.checkpoint_every,
        device=device,
        on_progress=on_progress,
    )
    return engine, outcome, _curve(folder / METRICS_FILE, config)


class Trained(NamedTuple):
    engine: Engine
    outcome: Outcome
    eager_because: str | None
    """Why forward and backward passes did not run as CUDA graphs; None if they did."""


def train_stages(
    model_config: CCQConfig,
    optimizer: OptimizerRecipe,
    stages: Sequence[AnyStage],
    batches: BatchSource,
    folder: Path,
    *,
    seed: int,
    log_every: int,
    checkpoint_every: int,
    device: torch.device,
    on_progress: Callable[[Progress], None],
) -> Trained:
    """Train one model through the stages of a curriculum, going on from the newest checkpoint in `folder`.

    An interrupted run that goes on ends bit-equal to one that was never interrupted. On a GPU forward and backward
    passes run as CUDA graphs, one for each stage, where they can be recorded: models are small here, and it is the same
    training bit for bit, so no setting asks for it.
    """
    on_gpu = device.type == "cuda"
    eager = [] if on_gpu else [f"the device is {device}"]
    engine = Engine(
        initial_model(model_config, seed, device),
        optimizer,
        Processes(device=device),
        cuda_graph=on_gpu,
        on_eager=eager.append,
    )
    schedule = Schedule(
        steps=sum(stage.steps for stage in stages),
        checkpoint_every=checkpoint_every,
        log_every=log_every,
        observe_every=log_every,
        keep_checkpoints=1,
    )
    outcome = train(
        engine, batches, folder, schedule, length=lambda step: stage_at(stages, step).length, on_progress=on_progress
    )
    return Trained(engine, outcome, eager[0] if eager else None)


def _curve(metrics: Path, config: TrainConfig) -> list[TrainingPoint]:
    """The points of the training curve; of steps that were left out there is none."""
    return [
        {
            "step": line["step"],
            "tokens": config.tokens_before(line["step"]),
            "length": config.stage_at(line["step"] - 1).length,
            "loss": line["loss"],
            "text_loss": line["text"],
            "answer_loss": line["answer"],
            "gradient_norm": line["grad_norm"],
            "gate_mean": sum(line["gate"]) / len(line["gate"]) if "gate" in line else None,
            "gate_by_decay_alone": line.get("gate_by_decay_alone"),
        }
        for line in read_metrics(metrics)
        if not line.get("skipped")
    ]
