"""Where a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import TypedDict

import torch

from ccq import __version__
from ccq.evals.results import EnvironmentResult


class GpuEnvironment(TypedDict):
    """The GPU and the software that belongs to it; None where there is none."""

    card: str | None
    memory_bytes: int | None
    capability: str | None
    driver: str | None
    cuda: str | None
    """The version torch was built with."""
    triton: str | None
    fla: str | None
    """flash-linear-attention."""


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


def gpu_environment() -> GpuEnvironment:
    """The current GPU and its versions, for a results file."""
    card, memory, capability = None, None, None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        card, memory = properties.name, properties.total_memory
        capability = f"{properties.major}.{properties.minor}"
    return {
        "card": card,
        "memory_bytes": memory,
        "capability": capability,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "fla": _version("flash-linear-attention"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The version of NVIDIA's driver, which torch does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def _processor() -> str:
    """The name of the processor; `platform` knows it on few systems only."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
