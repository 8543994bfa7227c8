"""Several processes of their own, told by their environment what torchrun tells its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_processes(count: int, target: Callable[..., Any], *arguments: Any, log: Path) -> list[int | None]:
    """`target(*arguments)` in each; their exit codes. What they print goes to `log`.

    They are forked from one that has only imported the target's module, so that a test does not wait for imports.
    """
    context, port = multiprocessing.get_context("forkserver"), free_port()
    context.set_forkserver_preload([target.__module__])
    started = [context.Process(target=_body, args=(rank, count, port, target, arguments, log)) for rank in range(count)]
    for process in started:
        process.start()
    deadline = time.monotonic() + 150
    for process in started:
        process.join(max(deadline - time.monotonic(), 0))
    for process in started:
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in started]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _body(rank: int, count: int, port: int, target: Callable[..., Any], arguments: tuple[Any, ...], log: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with open(log, "a", buffering=1) as file:
        sys.stdout = sys.stderr = file
        sys.exit(target(*arguments))
