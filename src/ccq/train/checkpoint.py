"""Checkpoints: everything a run needs to go on exactly where it was, each in a folder that is whole or has no name.

    step-00000500/             a whole one: state.json, what torch.distributed.checkpoint wrote, checksums.json
    step-00001000.partial/     one that is being written, or whose writing was cut off

A checkpoint is copied to memory between two steps and written by a thread during the next ones. When every process has
written and flushed its part, the folder gets its name. Any number of processes can read it. Nothing of it is used
before the checksums of all its files are right: torch notices a file that is too short, not one with other numbers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ccq.files import write_json_atomically
from ccq.processes import Processes

FORMAT = "ccq-checkpoint/3"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_STATE_FILE = "state.json"
_CHECKSUMS_FILE = "checksums.json"
_OF_A_PROCESS = re.compile(r"__(\d+)_")
_BYTES_AT_ONCE = 1 << 24
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class _Writing(NamedTuple):
    """A checkpoint on its way to the disk."""

    step: int
    written: Future[dict[str, int]]
    """The checksums of the files of this process."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: made if missing.
        keep: how many of the newest are kept.
        processes: that take part; the methods below are called by all of them.
    """

    def __init__(self, folder: Path, *, keep: int, processes: Processes) -> None:
        self.folder, self.keep, self.processes = folder, keep, processes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums")
        self._writing: _Writing | None = None

    def steps(self) -> list[int]:
        """The steps after which there is a whole checkpoint, rising."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def clear_partial(self) -> list[Path]:
        """Delete what a kill left half-written or half-deleted. Returns the folders."""

        def clear() -> list[Path]:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = sorted(self.folder.glob(f"*{_PARTIAL}"))
            for path in found:
                shutil.rmtree(path)
            return found

        found: list[Path] = self.processes.from_first(clear)
        return found

    def load(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        step: int | None = None,
        *,
        check: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> dict[str, Any] | None:
        """Put the newest checkpoint, or that of a step, into model and optimizers. Returns the state it was saved with,
        or None where there is none.

        Args:
            check: given that state before the weights are read; what it raises is raised as it is. A checkpoint of
                other data with another vocabulary would else be called damaged.

        Raises:
            ValueError: the checkpoint is damaged or belongs to another model.
        """
        steps = self.processes.from_first(self.steps)
        if not steps:
            return None
        path = self._path(steps[-1] if step is None else step)
        before = f"; the run then goes on from {self._path(steps[-2]).name}" if len(steps) > 1 else ""
        remedy = f"delete that folder{before or ' to start anew'}"

        def unusable(error: BaseException) -> ValueError:
            reason = " ".join(str(error).split())[:300]
            return ValueError(f"{path} is damaged or belongs to another model ({reason}); {remedy}")

        try:
            state: dict[str, Any] = json.loads((path / _STATE_FILE).read_bytes())
            if state.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            self.processes.gather(lambda: self._verify(path))
        except Exception as error:
            raise unusable(error) from error
        check(state)
        try:
            weights, moments = get_state_dict(model, optimizers, options=_OPTIONS)
            content: dict[str, Any] = {"model": weights, "optimizer": moments}
            with warnings.catch_warnings():
                _expect_one_process()
                dcp.load(content, checkpoint_id=path, process_group=self.processes.checkpoint_group)
            set_state_dict(
                model,
                optimizers,
                model_state_dict=content["model"],
                optim_state_dict=content["optimizer"],
                options=_OPTIONS,
            )
        except (Exception, CheckpointException) as error:  # damaged bytes make the readers raise errors of any kind
            raise unusable(error) from error
        return state

    def save(self, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]) -> None:
        """Start writing a checkpoint, when the one before is written.

        Args:
            state: JSON values that are saved with it, the same in every process.

        Raises:
            OSError: the one before could not be written; or this one could not be begun.
        """
        self.wait()
        if step in self.processes.from_first(self.steps):
            return
        path = self._path(step, _PARTIAL)

        def begin() -> None:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            write_json_atomically(path / _STATE_FILE, {"format": FORMAT, **state})

        self.processes.from_first(begin)
        weights, moments = get_state_dict(model, optimizers, options=_OPTIONS)
        _expect_one_process()
        written = dcp.async_save(
            {"model": weights, "optimizer": moments},
            storage_writer=dcp.FileSystemWriter(path, sync_files=True),
            process_group=self.processes.checkpoint_group,
            no_dist=self.processes.count == 1,
        )
        assert isinstance(written, Future)
        self._writing = _Writing(step, self._thread.submit(_checksums, written, path, self.processes.rank))

    @property
    def is_written(self) -> bool:
        """Whether this process has written its part of a checkpoint that has no name yet."""
        return self._writing is not None and self._writing.written.done()

    def wait(self) -> None:
        """Until the checkpoint that is being written has its name.

        Raises:
            OSError: it could not be written; the ones before it are as they were.
        """
        if self._writing is None:
            return
        step, written = self._writing
        self._writing = None
        problem: str | None = None
        mine: dict[str, int] = {}
        try:
            mine = written.result()
        except BaseException as error:  # torch wraps what its threads and other processes raise
            problem = " ".join(str(error).split())[-300:]
        problems = self.processes.sum([problem is not None])[0]
        checksums = {name: number for each in self.processes.gather(lambda: mine) for name, number in each.items()}

        def name_it() -> None:
            partial = self._path(step, _PARTIAL)
            if problems:
                shutil.rmtree(partial, ignore_errors=True)
                raise OSError(f"{self._path(step)} could not be written: {problem or 'another process failed'}")
            write_json_atomically(partial / _CHECKSUMS_FILE, checksums)
            _flush(partial)
            os.replace(partial, self._path(step))
            _flush(self.folder)
            for old in self.steps()[: -self.keep]:
                # Without its name first, so that a kill leaves no half checkpoint with one.
                os.replace(self._path(old), self._path(old, _PARTIAL))
                shutil.rmtree(self._path(old, _PARTIAL), ignore_errors=True)

        self.processes.from_first(name_it)

    def _verify(self, path: Path) -> None:
        """Raise ValueError for a file that is not as it was written; every process reads its share of them."""
        checksums: dict[str, int] = json.loads((path / _CHECKSUMS_FILE).read_bytes())
        for name in sorted(checksums)[self.processes.rank :: self.processes.count]:
            if _checksum(path / name) != checksums[name]:
                raise ValueError(f"{name} is not as it was written")

    def _path(self, step: int, ending: str = "") -> Path:
        return self.folder / f"step-{step:08}{ending}"


def _checksums(written: Future[Any], folder: Path, rank: int) -> dict[str, int]:
    """Of the files that a process has written; the first's are also those that are no process's."""
    written.result()
    owned = {path: _OF_A_PROCESS.match(path.name) for path in folder.iterdir()}
    return {path.name: _checksum(path) for path, owner in owned.items() if (int(owner[1]) if owner else 0) == rank}


def _checksum(path: Path) -> int:
    """CRC-32: against damage, not against malice."""
    number = 0
    with path.open("rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            number = zlib.crc32(part, number)
    return number


def _expect_one_process() -> None:
    """torch warns where torch.distributed is not in use, and here that is meant. The thread that writes checkpoints
    shares the filter.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _flush(folder: Path) -> None:
    """Names in a folder reach the disk when the folder is flushed."""
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
