"""The training loop: steps, checkpoints, metrics, interruptions. What a step reads is the caller's business."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ccq.data.loader import TokenBatch
from ccq.models.utilization import model_flops_utilization, training_flops_per_token
from ccq.train.checkpoint import Checkpoints
from ccq.train.engine import Engine, StepResult, TargetBatch
from ccq.train.metrics import MetricsFile, TensorBoard, memory_bytes, observe_window
from ccq.train.optimizer import decay_alone, decay_share, learning_rate_at
from ccq.train.throughput import peak_flops

CHECKPOINTS, METRICS_FILE, TENSORBOARD = "checkpoints", "metrics.jsonl", "tensorboard"
MOST_SKIPPED = 5
"""Steps in a row whose loss or gradient is not finite, after which a run ends."""


class BatchSource(Protocol):
    """Endless steps, each the micro-batches of this process, as `ccq.data.TokenLoader` gives them."""

    def __iter__(self) -> Iterator[Sequence[TokenBatch | TargetBatch]]: ...

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which the step after the one given out last is reached; the same in every process."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Schedule:
    """How long a run is, and what happens how often, in steps."""

    steps: int
    checkpoint_every: int | None
    log_every: int
    observe_every: int
    evaluate_every: int | None = None
    keep_checkpoints: int = 2
    stop_after: int | None = None
    """End as an interruption would once so many steps are done."""

    def is_due(self, every: int, step: int) -> bool:
        """At the first step, the last one, and every so many."""
        return step == 1 or step % every == 0 or step == self.steps


class Progress(NamedTuple):
    """What a run tells after every step."""

    step: int
    """Steps done."""
    result: StepResult
    tokens_per_second: float
    """Over all processes, since the last line of metrics."""
    utilization: float | None
    """See `model_flops_utilization`."""
    memory: int | None
    """Bytes, see `memory_bytes`."""


class Outcome(NamedTuple):
    step: int
    """Steps done."""
    finished: bool
    """False if the run was interrupted; it goes on from here when it is started again."""
    tokens: int
    seconds: float
    """Time spent in training, in all sittings."""


def train(
    engine: Engine,
    batches: BatchSource,
    folder: Path,
    schedule: Schedule,
    *,
    length: Callable[[int], int],
    on_progress: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda line: None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    held_out_loss: Callable[[], float] | None = None,
    tensorboard: bool = False,
) -> Outcome:
    """Train to the last step of the schedule, going on from the newest checkpoint in `folder`.

    Args:
        engine: the model as it is before the first step.
        batches: what to read.
        folder: made if missing; holds checkpoints and metrics.jsonl.
        schedule: of the run.
        length: tokens of a window at step `step`, counted from 0.
        on_progress: called after every step in every process.
        say: takes a line about something unusual, in the first process.
        asked_to_stop: whether to save and end, asked at every step; one process that was asked stops all.
        held_out_loss: measures it, called as often as the schedule says; must change nothing that training depends on.
        tensorboard: write the metrics for TensorBoard too, where it is installed.

    A run on one process that was interrupted and goes on has the same losses, gradient norms and data bit for bit as
    one that was not; on another number of processes it goes on with the same data, and sums are rounded differently.

    A step whose loss or gradient is not finite is left out: its data are spent, the weights stay. A checkpoint or a
    line of metrics that cannot be written, say because the disk is full, is reported and tried again later.

    Raises:
        FloatingPointError: `MOST_SKIPPED` steps in a row were left out.
        ValueError: the checkpoint is damaged or belongs to another model or other data.
        OSError: the last checkpoint could not be written.
    """
    run = _Run(engine, batches, folder, schedule, length, on_progress, say, asked_to_stop, held_out_loss)
    with TensorBoard(folder / TENSORBOARD, active=tensorboard and engine.processes.is_first) as board:
        return run.train(board)


class _Run:
    def __init__(
        self,
        engine: Engine,
        batches: BatchSource,
        folder: Path,
        schedule: Schedule,
        length: Callable[[int], int],
        on_progress: Callable[[Progress], None],
        say: Callable[[str], None],
        asked_to_stop: Callable[[], bool],
        held_out_loss: Callable[[], float] | None,
    ) -> None:
        self.engine, self.batches, self.schedule, self.length = engine, batches, schedule, length
        self.processes = engine.processes
        self.on_progress, self.asked_to_stop = on_progress, asked_to_stop
        self.held_out_loss = held_out_loss
        self.say: Callable[[str], None] = say if self.processes.is_first else lambda line: None
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, keep=schedule.keep_checkpoints, processes=self.processes)
        self.metrics = MetricsFile(folder / METRICS_FILE)
        self.step = self.tokens = self.skipped = 0
        self.seconds = 0.0
        self.peak = peak_flops(self.processes.device)
        self.flops: dict[int, int] = {}
        self.gate_bias = _gate_bias(engine)

    def train(self, board: TensorBoard) -> Outcome:
        self._go_on()
        self.started = time.perf_counter()
        self.logged_at, self.logged_tokens = self.started, self.tokens
        end = self.schedule.steps
        if self.schedule.stop_after is not None:
            end = min(end, self.schedule.stop_after)
        steps = iter(self.batches)
        stopped = False
        while self.step < end and not stopped:
            given = next(steps)
            batch = [TargetBatch.of_tokens(each) if isinstance(each, TokenBatch) else each for each in given]
            stopped = self._take(batch, board)
            every = self.schedule.checkpoint_every
            if every is not None and self.step % every == 0 and self.step < end and not stopped:
                self._save(last=False)
        if self.schedule.checkpoint_every is not None:
            self._save(last=True)
        return Outcome(self.step, self.step == self.schedule.steps, self.tokens, self._spent())

    def _go_on(self) -> None:
        for path in self.checkpoints.clear_partial():
            self.say(f"{path} is half a checkpoint, left by an interruption; it is deleted and not used")
        state = self.checkpoints.load(
            self.engine.model, self.engine.optimizers, check=lambda state: self.batches.load_state_dict(state["data"])
        )
        if state is not None:
            self.step, self.tokens = state["step"], state["tokens"]
            self.skipped, self.seconds = state["skipped"], state["seconds"]
            self.say(f"going on after step {self.step:,}")
        self.processes.from_first(lambda: self.metrics.cut_back(self.step))

    def _take(self, batch: Sequence[TargetBatch], board: TensorBoard) -> bool:
        """One step; whether some process was asked to stop."""
        optimizer, schedule = self.engine.optimizer, self.schedule
        learning_rate = learning_rate_at(optimizer, self.step, schedule.steps)
        flags = (int(self.asked_to_stop()), int(self.checkpoints.is_written))
        result = self.engine.step(batch, learning_rate, flags=flags)
        stopped, written = result.flags
        window = self.length(self.step)
        self.step += 1
        self.tokens += self.processes.count * sum(each.inputs.numel() for each in batch)
        if written == self.processes.count:
            self._name_checkpoint()
        trained = time.perf_counter()
        speed = (self.tokens - self.logged_tokens) / max(trained - self.logged_at, 1e-9)
        reads = (
            observe_window(self.engine, batch[0], window)
            if schedule.is_due(schedule.observe_every, self.step)
            else None
        )
        device = self.processes.device
        utilization = model_flops_utilization(self._flops(window), speed / self.processes.count, self.peak)
        progress = Progress(self.step, result, speed, utilization, memory_bytes(device))
        held_out = self._held_out()
        # The time of looking and measuring is no time of training.
        self.logged_at += time.perf_counter() - trained
        if schedule.is_due(schedule.log_every, self.step) or not result.is_finite or held_out:
            self.logged_at, self.logged_tokens = time.perf_counter(), self.tokens
            if self.processes.is_first:
                values: dict[str, Any] = {
                    "step": self.step,
                    "tokens": self.tokens,
                    "loss": result.loss if result.is_finite else None,
                    **(result.losses if len(result.losses) > 1 and result.is_finite else {}),
                    "grad_norm": result.grad_norm if result.is_finite else None,
                    "learning_rate": learning_rate,
                    "tokens_per_second": speed,
                    "processes": self.processes.count,
                    "mfu": utilization,
                    "memory": progress.memory,
                }
                if not result.is_finite:
                    values["skipped"] = True
                values |= held_out
                if reads is not None:
                    values |= {"gate": reads.gate, "correction": reads.correction}
                    if self.gate_bias is not None:
                        share = decay_share(optimizer, self.step, schedule.steps)
                        values["gate_by_decay_alone"] = decay_alone(self.gate_bias, share)
                self._record(values, board)
        self._judge(result)
        self.on_progress(progress)
        return bool(stopped)

    def _held_out(self) -> dict[str, float | None]:
        """The loss on held-out text for the line of metrics, where it is due."""
        every = self.schedule.evaluate_every
        if self.held_out_loss is None or every is None or not self.schedule.is_due(every, self.step):
            return {}
        loss = self.held_out_loss()
        return {"held_out_loss": loss if math.isfinite(loss) else None}

    def _judge(self, result: StepResult) -> None:
        if result.is_finite:
            self.skipped = 0
            return
        self.skipped += 1
        losses = ", ".join(f"{name} {value:.4g}" for name, value in result.losses.items())
        what = f"step {self.step:,} is left out: not finite ({losses}, gradient norm {result.grad_norm:.4g})"
        self.say(what)
        if self.skipped == MOST_SKIPPED:
            raise FloatingPointError(
                f"{what}, as are the {MOST_SKIPPED - 1} before it. The run has ended and the checkpoints are as they "
                f"were; a lower learning rate than {self.engine.optimizer.learning_rate} may help"
            )

    def _record(self, values: dict[str, Any], board: TensorBoard) -> None:
        self.metrics.add(values)
        try:
            self.metrics.write()
            board.add(values)
        except OSError as error:
            self.say(f"step {self.step:,}: metrics could not be written ({error}); the lines wait for the next time")

    def _name_checkpoint(self) -> None:
        try:
            self.checkpoints.wait()
        except OSError as error:
            self.say(f"{error}; training goes on, the checkpoints before it are kept")

    def _save(self, *, last: bool) -> None:
        self._name_checkpoint()
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self._spent(),
            "skipped": self.skipped,
            "data": self.batches.state_dict(),
        }
        try:
            self.processes.from_first(lambda: self.metrics.write(flush=True))
            self.checkpoints.save(self.step, self.engine.model, self.engine.optimizers, state)
            if last:
                self.checkpoints.wait()
        except OSError as error:
            if last:
                raise
            self.say(f"step {self.step:,}: no checkpoint ({error}); training goes on, the ones before it are kept")

    def _flops(self, length: int) -> int:
        """See `training_flops_per_token`; counted once for every length of a window."""
        if length not in self.flops:
            self.flops[length] = training_flops_per_token(self.engine.model.config, length)
        return self.flops[length]

    def _spent(self) -> float:
        return self.seconds + time.perf_counter() - self.started


def _gate_bias(engine: Engine) -> float | None:
    """The bias of a gate that is lambda by itself; None for other gates and arms without."""
    for read in engine.model.read_steps():
        bias = getattr(read, "gate_bias", None)
        if isinstance(bias, Tensor) and not hasattr(read, "gate_scale"):
            return float(bias.detach().mean())
    return None
