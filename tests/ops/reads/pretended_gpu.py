"""A GPU that need not be there, for scripts that compile kernels as they are launched."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


def pretend(major: int, minor: int) -> None:
    """Let Triton compile for a card of this compute capability from now on."""
    driver.set_active(Driver(10 * major + minor))


class Driver:
    """A GPU as far as the compiler asks about it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory, of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert numbers is not None, done.stdout
    return int(numbers[1]), int(numbers[2])
