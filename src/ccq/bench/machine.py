"""Where a figure was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from ccq import __version__
from ccq.evals.results import EnvironmentResult


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(*, threads: int, device: str = "cpu") -> EnvironmentResult:
    """Machine and versions, for a results file."""
    return {
        "ccq": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "threads_per_run": threads,
        "device": device,
    }


def _processor() -> str:
    """The name of the processor; `platform` knows it on few systems only."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
