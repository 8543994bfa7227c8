"""What the benchmarks on a GPU share: the card, timers and rounds, a fresh process, and a run that saves as it goes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ccq.cuda_graphs import GraphRecorder

WARMUP = 5
LEAST_ROUNDS = 3
"""Rounds that are measured even if the time limit has passed: quartiles need some."""
REPLAY_MS = 4.0
"""Replays between two events take about so long together, so that the first launch does not count."""
COPY_BYTES = 2**30

Key = TypeVar("Key", bound=Hashable)


class Card:
    """Everything that is asked of the GPU itself."""

    device = torch.device("cuda")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """A function that replays `step` as a CUDA graph. RuntimeError, and nothing is spoilt, if it waits for the
        GPU.
        """
        recorder = GraphRecorder(self.device)
        for may_wait in (True, True, False):
            recorder.run(step, may_wait=may_wait)
        return recorder.record(step)

    def elapsed_ms(self, work: Callable[[], Any]) -> float:
        """Milliseconds between events before and after `work`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Give memory that nothing uses back to the card."""
        torch.cuda.empty_cache()

    def copy_bytes_per_second(self) -> float:
        """Bytes read plus bytes written by a large copy on the device, median of 20."""
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = [self.elapsed_ms(lambda: target.copy_(source)) for _ in range(WARMUP + 20)][WARMUP:]
        return 2 * COPY_BYTES / (statistics.median(times) / 1000)


def brief(error: BaseException) -> str:
    """The type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="  ")


def milliseconds(value: float) -> str:
    """For a narrow column."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def rounds(timers: Mapping[Key, Callable[[], float]], repeats: int, limit: float) -> dict[Key, dict[str, Any]]:
    """Median and quartiles of each timer's milliseconds, called in turn for `repeats` rounds or `limit` seconds."""
    ends = time.monotonic() + limit
    times: dict[Key, list[float]] = {key: [] for key in timers}
    for timer in timers.values():
        for _ in range(WARMUP):
            timer()
    for done in range(repeats):
        if done >= LEAST_ROUNDS and time.monotonic() > ends:
            break
        for key, timer in timers.items():
            times[key].append(timer())
    found = {}
    for key, values in times.items():
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        found[key] = {
            "median_ms": statistics.median(values),
            "lower_quartile_ms": low,
            "upper_quartile_ms": high,
            "rounds": len(values),
        }
    return found


def device_timer(card: Card, step: Callable[[], Any]) -> Callable[[], float]:
    """A function that returns the milliseconds of one replay, averaged over as many as fill REPLAY_MS."""
    replay = card.capture(step)
    replay()
    count = max(1, min(200, round(REPLAY_MS / max(card.elapsed_ms(replay), 1e-3))))

    def several() -> None:
        for _ in range(count):
            replay()

    return lambda: card.elapsed_ms(several) / count


def wall_timer(card: Card, step: Callable[[], Any]) -> Callable[[], float]:
    """A function that returns the milliseconds of one eager call, from idle to idle."""

    def measure() -> float:
        card.synchronize()
        started = time.perf_counter()
        step()
        card.synchronize()
        return 1000 * (time.perf_counter() - started)

    return measure


def mebibytes(value: int) -> str:
    return f"{value / 2**20:.1f}"


def run_afresh(code: str, limit: float) -> dict[str, float]:
    """Run `code` in a fresh Python process that finds no compiled kernel: what it prints as JSON in its last line, and
    "process_seconds". RuntimeError if it fails or takes more than `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        started = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"not finished after {limit:.0f} s") from error
        seconds = time.perf_counter() - started
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1][:200] if lines else f"it ended with code {done.returncode}")
    return {**json.loads(done.stdout.splitlines()[-1]), "process_seconds": seconds}


class Measurement:
    """One run: `figures` is what goes to the file, `say` prints a line, `save` writes the figures.

    Each part ends with a `save`, and each row is said when it is measured: a run that is cut short leaves what it had.
    """

    def __init__(
        self,
        figures: dict[str, Any],
        *,
        card: Card,
        repeats: int,
        limit: float,
        say: Callable[[str], None],
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        self.figures = figures
        self.card = card
        self.repeats = repeats
        self.limit = limit
        self.say = say
        self.save = save

    def note(self, text: str) -> None:
        self.figures["notes"].append(text)
        self.say(wrapped(f"note: {text}"))
