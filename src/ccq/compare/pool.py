"""Runs in processes of their own, several at a time on each device."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ccq.bench.machine import cores
from ccq.train.loop import Progress as TrainingProgress

MOST_ON_A_GPU = 4
"""Runs on one GPU at a time unless asked for: small models leave most of it idle, waiting for their process to launch
the next kernel, and every process holds a few hundred MB for itself."""
_PRELOADED = ["ccq.compare.arm", "ccq.compare.cell"]
_TELL_SECONDS = 0.2


class RunsFailed(RuntimeError):
    """Some runs did not finish; what the others found is kept, and the same command tries them again."""


class Event(NamedTuple):
    """What a process tells the one that started it."""

    number: int
    kind: str
    """"training", "note", "done" or "failed"."""
    step: int = 0
    text: str = ""


class Teller:
    """What a run has to say how far it is. Ends the process when the one that started it is gone, so that a killed
    comparison leaves nothing running.
    """

    def __init__(self, number: int, events: Queue[Event]) -> None:
        self._number, self._events = number, events
        self._parent = multiprocessing.parent_process()
        self._told = 0.0

    def training(self, progress: TrainingProgress) -> None:
        """After every step; what is said too often is left out."""
        if self._parent is not None and not self._parent.is_alive():
            os._exit(1)
        now = time.monotonic()
        if now - self._told > _TELL_SECONDS:
            self._told = now
            losses = progress.result.losses
            names = {"answer": "answers"}
            text = "  ".join(f"{names.get(name, name)} {losses[name]:.2f}" for name in sorted(losses, reverse=True))
            self._events.put(Event(self._number, "training", progress.step, text))

    def note(self, text: str) -> None:
        """What comes after the training."""
        self._events.put(Event(self._number, "note", text=text))


@dataclass(frozen=True)
class Job:
    """One run. `body` goes to another process: a function of a module, or a `functools.partial` of one."""

    title: str
    steps: int
    """How long its bar is; 0 for one that does not train."""
    body: Callable[[Teller, torch.device], None]
    is_done: Callable[[], bool]
    """Whether what it leaves is there."""


def devices_for(device: str | None) -> list[torch.device]:
    """The devices that runs are spread over: all GPUs, or the CPU.

    Args:
        device: "cuda" or "cpu"; None for the GPUs where torch finds some.
    """
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return [torch.device("cpu")]
    if not torch.cuda.is_available():
        raise ValueError('device is "cuda", but torch finds no GPU; leave it out, or give "cpu"')
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def default_runs_per_device(devices: Sequence[torch.device]) -> int:
    """On the CPU a run a core; on a GPU `MOST_ON_A_GPU`, or fewer where there is no core for each."""
    share = max(cores() // len(devices), 1)
    return share if devices[0].type == "cpu" else min(share, MOST_ON_A_GPU)


def run_jobs(
    jobs: Sequence[Job], *, devices: Sequence[torch.device], runs_per_device: int | None, console: Console
) -> None:
    """Run all jobs that are not done, in their order, each on the device that has fewest.

    Args:
        jobs: what to run.
        devices: see `devices_for`.
        runs_per_device: at the same time, one processor thread each; None for `default_runs_per_device`.
        console: where progress is shown.

    Raises:
        RunsFailed: some ended with an error; the others ran to their end.
    """
    limit = default_runs_per_device(devices) if runs_per_device is None else runs_per_device
    if limit < 1:
        raise ValueError(f"jobs must be at least 1, got {limit}")
    waiting = [number for number, job in enumerate(jobs) if not job.is_done()]
    # A process of its own for each run, that of an interpreter which has only imported: no state is shared, and the
    # figures do not depend on what ran before. With "forkserver" the imports, which take seconds, are made once.
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(_PRELOADED)
    events: Any = context.Queue()
    running: dict[int, Any] = {}
    placed: dict[int, torch.device] = {}
    failures: dict[int, str] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        bars = {
            number: progress.add_task(jobs[number].title, total=jobs[number].steps, start=False, note="waiting")
            for number in waiting
        }
        try:
            while waiting or running:
                while waiting and len(running) < limit * len(devices):
                    number = waiting.pop(0)
                    busy = [placed[other] for other in running]
                    placed[number] = min(devices, key=busy.count)
                    arguments = (number, jobs[number].body, placed[number], events)
                    running[number] = context.Process(target=_work, args=arguments, daemon=True)
                    running[number].start()
                    progress.start_task(bars[number])
                    progress.update(bars[number], note="starting")
                ended = [number for number, process in running.items() if not process.is_alive()]
                _show_events(events, progress, bars, failures)
                for number in ended:
                    process = running.pop(number)
                    process.join()
                    if not jobs[number].is_done() and number not in failures:
                        failures[number] = f"its process ended with exit code {process.exitcode}"
                        progress.update(bars[number], note="[red]failed")
        finally:
            for process in running.values():
                process.terminate()
                process.join()
    if failures:
        raise RunsFailed(
            "Some runs did not finish:\n  "
            + "\n  ".join(f"{jobs[number].title}: {text}" for number, text in failures.items())
            + "\nThe same command runs them again, the others are kept."
        )


def _work(
    number: int, body: Callable[[Teller, torch.device], None], device: torch.device, events: Queue[Event]
) -> None:
    """The body of a worker process."""
    # An interrupt from the keyboard reaches every process; the parent deals with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        body(Teller(number, events), device)
        events.put(Event(number, "done"))
    except Exception as error:  # the parent shows it and goes on with the other runs
        events.put(Event(number, "failed", text=f"{type(error).__name__}: {error}"))


def _show_events(events: Any, progress: Progress, bars: dict[int, TaskID], failures: dict[int, str]) -> None:
    """Show what the runs tell; waits a moment for the first event and then takes all that are there."""
    wait = 0.2
    while True:
        try:
            event: Event = events.get(timeout=wait)
        except queue.Empty:
            return
        wait = 0.01
        bar = bars[event.number]
        if event.kind == "training":
            progress.update(bar, completed=event.step, note=event.text)
        elif event.kind == "note":
            progress.update(bar, completed=progress.tasks[bar].total, note=event.text)
        elif event.kind == "done":
            progress.update(bar, completed=progress.tasks[bar].total, note="done")
            progress.stop_task(bar)
        else:
            failures[event.number] = event.text
            progress.update(bar, note="[red]failed")
