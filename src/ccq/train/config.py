"""What determines a training run, besides the model and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
    """On matrices only: norms, biases and decay parameters are left out, and so is the gate's bias, which decay alone
    would move from 0.01 towards 0.5."""
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = 1.0
    """Largest Euclidean norm of all gradients together."""
    log_every: int = 20
    """Steps between points of the training curve."""
    checkpoint_seconds: float = 15.0
    """Time between checkpoints; what a kill can cost."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages is empty; give at least one Stage(length, steps)")
        for stage in self.stages:
            if stage.length < 2 or stage.batch_size < 1 or stage.steps < 1:
                raise ValueError(f"a stage needs a length of at least 2, and at least 1 window and 1 step, got {stage}")
        for name in ("needles", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "gradient_clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {getattr(self, name)}")
        if self.weight_decay < 0 or self.warmup_steps < 0:
            raise ValueError(
                f"weight_decay and warmup_steps must not be negative, got {self.weight_decay} and {self.warmup_steps}"
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
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]

    def tokens_before(self, step: int) -> int:
        """Tokens read in the first `step` steps."""
        tokens = 0
        for stage in self.stages:
            steps = min(step, stage.steps)
            tokens += steps * stage.batch_size * stage.length
            step -= steps
        return tokens

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        final = self.final_learning_rate_share
        return self.learning_rate * (final + (1 - final) * cosine)
