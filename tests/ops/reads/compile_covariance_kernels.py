"""Compile the kernels of functions of the covariance, as they are launched, for a GPU that need not be there.

    python tests/ops/reads/compile_covariance_kernels.py MAJOR MINOR DTYPE D ...

prints a JSON list of {"kernel", "function", "size", "shared", "registers", "spilled"}, of a thread the last two. A
process of its own, because Triton's interpreter, which the tests run in, makes kernels that cannot be compiled.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
import triton
from pretended_gpu import pretend, resources

CAPABILITY = (int(sys.argv[1]), int(sys.argv[2]))


pretend(*CAPABILITY)

from ccq.ops.query import kernels as read_step  # noqa: E402
from ccq.ops.reads.covariance import kernels  # noqa: E402
from ccq.ops.reads.exact import steps_needed  # noqa: E402

OWN = [value for value in vars(kernels).values() if isinstance(value, triton.JITFunction)]
found: list[dict[str, Any]] = []


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
    functions = {"polynomial": kernels.Function((1.0,) * 3, 0), "solution": kernels.Function((), steps)}
    # Keys that are not normalised are read where they are.
    for (name, function), unit_keys in itertools.product(functions.items(), (True, False)):
        Compiler.function = name
        options = {"unit_queries": True, "unit_keys": unit_keys}
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
