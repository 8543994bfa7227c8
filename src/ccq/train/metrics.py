"""What is recorded along a run: metrics.jsonl, TensorBoard, and the read steps of every layer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ccq.models.observation import observe_reads
from ccq.train.engine import Engine, TargetBatch


class LayerReads(NamedTuple):
    """The read steps of a model on one window, from the first layer to the last."""

    gate: list[float]
    """Mean of lambda over tokens and heads."""
    correction: list[float]
    """Mean of |lambda Sigma q| / |q| over tokens and heads."""


def observe_window(engine: Engine, batch: TargetBatch, length: int) -> LayerReads | None:
    """Gate and correction of every layer on the first window of a micro-batch; None for an arm without a read step.
    Every process must call it.
    """
    with observe_reads(engine.model) as observed:
        if not observed:
            return None
        engine.look(batch, length)
    seen = [layer[0] for layer in observed]
    gate = torch.stack([read.gate.float().mean() for read in seen]).tolist()
    return LayerReads(gate, torch.stack([read.relative_size.mean() for read in seen]).tolist())


def memory_bytes(device: torch.device) -> int | None:
    """The most that this process has had allocated: on its GPU, or in all on a CPU; None where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsFile:
    """One JSON object a line, appended. Lines that could not be written wait for the next time, in their order.

    A run that goes on from a checkpoint calls `cut_back`, which drops the lines of later steps and one that was torn.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""

    def cut_back(self, step: int) -> None:
        """Keep the whole lines of the steps up to this one."""
        if not self.path.exists():
            return
        kept = 0
        with open(self.path, "rb+") as file:
            for line in file:
                try:
                    whole = line.endswith(b"\n") and json.loads(line)["step"] <= step
                except (ValueError, KeyError, TypeError):
                    whole = False
                if not whole:
                    break
                kept += len(line)
            file.truncate(kept)
            file.flush()
            os.fsync(file.fileno())

    def add(self, values: dict[str, Any]) -> None:
        self._waiting += json.dumps(values, allow_nan=False).encode() + b"\n"

    def write(self, *, flush: bool = False) -> None:
        """Append what was added; with `flush` down to the disk.

        Raises:
            OSError: there is no room, say. The file is as it was and the lines still wait.
        """
        with open(self.path, "ab", buffering=0) as file:
            start = file.tell()
            try:
                written = 0
                while written < len(self._waiting):
                    written += file.write(self._waiting[written:])
                if flush:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(start)
                raise
            self._waiting = b""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class TensorBoard:
    """The same numbers for TensorBoard, where it is installed (the extra `train`).

    A run that goes on writes some steps again; TensorBoard shows what was written last.
    """

    def __init__(self, folder: Path, *, active: bool) -> None:
        self._writer: Any = None
        if not active:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(folder))

    def add(self, values: dict[str, Any]) -> None:
        if self._writer is None:
            return
        step = values["step"]
        for name, value in values.items():
            if isinstance(value, list):
                for layer, each in enumerate(value):
                    self._writer.add_scalar(f"{name}/layer {layer}", each, step)
            elif value is not None and name != "step":
                self._writer.add_scalar(name, value, step)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()
