"""Compile the kernels of functions of the covariance, as they are launched, for a GPU that need not be there.

    python tests/ops/reads/compile_covariance_kernels.py MAJOR MINOR DTYPE D ...

prints a JSON list of {"kernel", "function", "size", "shared", "registers", "spilled"}, of a thread the last two. A
process of its own, because Triton's interpreter, which the tests run in, makes kernels that cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CAPABILITY = (int(sys.argv[1]), int(sys.argv[2]))


class Driver:
    """A GPU as far as the compiler asks about it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


driver.set_active(Driver())

from ccq.ops.query import kernels as read_step  # noqa: E402
from ccq.ops.reads.covariance import kernels  # noqa: E402
from ccq.ops.reads.exact import steps_needed  # noqa: E402

OWN = [value for value in vars(kernels).values() if isinstance(value, triton.JITFunction)]
found: list[dict[str, Any]] = []


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


class Compiler(read_step.Launcher):
    """Compiles the kernels of this file's subject in place of launching; outputs stay unwritten."""

    function = ""

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if kernel not in OWN:
            return
        compiled = kernel.warmup(*arguments, grid=grid, **constants)
        registers, spilled = resources(compiled.asm["cubin"])
        found.append(
            {
                "kernel": kernel.__name__,
                "function": self.function,
                "size": self.size,
                "shared": compiled.metadata.shared,
                "registers": registers,
                "spilled": spilled,
            }
        )

    def compiled(self, launch_all: Any, *_: Any) -> Any:
        return launch_all()


def compile_all(dtype: torch.dtype, size: int) -> None:
    q = torch.zeros(1, 128, 6, size, dtype=dtype)
    gate, total, count = torch.zeros(1, 128, 6), torch.zeros(1, 6, size), torch.zeros(1, dtype=torch.int64)
    config = read_step.TABLE[CAPABILITY][dtype == torch.float32]
    read_step.configuration = lambda *_: config  # type: ignore[assignment]
    config = kernels.configuration(dtype, size, q.device)
    plan = read_step.make_plan(1, 128, None, None, config, q.device)
    steps = steps_needed(1.0, torch.finfo(dtype).eps)
    for name, function in {
        "polynomial": kernels.Function((1.0,) * 3, 0),
        "solution": kernels.Function((), steps),
    }.items():
        Compiler.function = name
        options = {"unit_queries": True, "unit_keys": True}
        done = kernels.forward(
            q, q, gate, None, total, count, plan, config, function, return_correction=False, wide=False, **options
        )
        kernels.backward(
            q, q, gate, q, None, None, total, done.query, None, None, count, total, done.vectors, plan, config,
            function, state_gradients=False, **options,
        )  # fmt: skip


def main() -> None:
    kernels.Launcher = Compiler  # type: ignore[misc]
    for size in sys.argv[4:]:
        compile_all(getattr(torch, sys.argv[3]), int(size))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
