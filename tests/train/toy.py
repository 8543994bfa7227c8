"""A run small enough for tests, in this process, in one of its own that may be killed, or in several."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from ccq.data.loader import TokenLoader
from ccq.data.shards import TokenArray
from ccq.models import preset
from ccq.processes import Processes, processes
from ccq.train import checkpoint
from ccq.train.config import OptimizerRecipe
from ccq.train.engine import Engine, initial_model
from ccq.train.held_out import HeldOutWindows
from ccq.train.loop import Outcome, Schedule, train

LENGTH, VOCABULARY, STEPS, BATCH = 16, 61, 6, 4
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 4000).astype(np.uint16)
HELD_OUT = np.random.default_rng(1).integers(0, VOCABULARY, 300).astype(np.uint16)
OPTIMIZER = OptimizerRecipe(learning_rate=1e-2, warmup_steps=3)


def make_engine(group: Processes | None = None, **changes: Any) -> Engine:
    """A model of one block with all kinds of parameters."""
    arm = changes.pop("arm", "gated-deltanet+ccq")
    optimizer = changes.pop("optimizer", OPTIMIZER)
    sizes = {"hidden_size": 16, "num_layers": 1, "head_dim": 8, "value_head_dim": 8, "intermediate_size": 24}
    config = preset(f"{arm}-tiny", vocab_size=VOCABULARY, **sizes)
    return Engine(initial_model(config, 5), optimizer, group or Processes(), **changes)


def make_loader(group: Processes | None = None, *, rows: int = 2) -> TokenLoader:
    group = group or Processes()
    return TokenLoader(
        TokenArray(TOKENS), length=LENGTH, batch_size=BATCH, rows=rows, process=group.rank, processes=group.count
    )


def make_held_out(group: Processes | None = None, *, rows: int = 2, pack_documents: bool = False) -> HeldOutWindows:
    """Seven windows: the last batches of two processes are a smaller one and one without anything that counts."""
    group = group or Processes()
    return HeldOutWindows(
        TokenArray(HELD_OUT, document_starts=[0, 5, 6, 40, 64, 100]),
        length=LENGTH,
        tokens=7 * LENGTH + 3,
        rows=rows,
        process=group.rank,
        processes=group.count,
        pack_documents=pack_documents,
    )


def run(folder: Path, group: Processes | None = None, *, rows: int = 2, **changes: Any) -> tuple[Engine, Outcome]:
    """Train it in a folder, with a checkpoint after every step unless told otherwise."""
    names = (
        "steps",
        "checkpoint_every",
        "log_every",
        "observe_every",
        "keep_checkpoints",
        "stop_after",
        "evaluate_every",
    )
    schedule = {"steps": STEPS, "checkpoint_every": 1, "log_every": 1, "observe_every": 3}
    schedule |= {name: changes.pop(name) for name in names if name in changes}
    options = {name: changes.pop(name) for name in ("say", "asked_to_stop", "on_progress") if name in changes}
    engine = changes.pop("engine", None) or make_engine(group, **changes)
    held_out = make_held_out(group, rows=rows)
    outcome = train(
        engine,
        make_loader(group, rows=rows),
        folder,
        Schedule(**schedule),
        length=lambda step: LENGTH,
        held_out_loss=lambda: engine.measure(held_out.batches()),
        **options,
    )
    return engine, outcome


def start(folder: Path, *, count: int = 1, killed_at: str | None = None, **options: Any) -> list[int | None]:
    """`run` in so many processes of their own; their exit codes.

    They are forked from one that has only imported, so that a test does not wait for imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        context.Process(target=_body, args=(folder, rank, count, port, killed_at, options)) for rank in range(count)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(100)
    for process in started:
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in started]


def _body(folder: Path, rank: int, count: int, port: int, killed_at: str | None, options: dict[str, Any]) -> None:
    # As torchrun tells its processes.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if killed_at is not None:
        _kill_at(killed_at, calls=options.pop("kill_call", 2))
    with processes() as group:
        run(folder, group, **options)


def _kill_at(call: str, *, calls: int) -> None:
    """End this process without warning at a call of a function that writes checkpoints."""
    where, _, name = call.rpartition(".")
    owner: Any = {"checkpoint": checkpoint, "shutil": shutil, "writer": dcp.FileSystemWriter}[where]
    original, called = getattr(owner, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal called
        called += 1
        if called == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(owner, name, counted)
