"""Compile the kernels of running sums and of comba, as they are launched, for a GPU that need not be there.

    python tests/ops/reads/compile_sum_kernels.py MAJOR MINOR DTYPE D ...

prints a JSON list of {"kernel", "size", "shared", "registers", "spilled"}, of a thread the last two. A process of its
own, because Triton's interpreter, which the tests run in, makes kernels that cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from pretended_gpu import pretend, resources

pretend(int(sys.argv[1]), int(sys.argv[2]))

from ccq.ops.reads.comba import kernels as comba  # noqa: E402
from ccq.ops.reads.mean import kernels as mean  # noqa: E402
from ccq.ops.reads.query_weighted import kernels as query_weighted  # noqa: E402

OWN = [
    value
    for module in (comba, mean, query_weighted)
    for value in vars(module).values()
    if isinstance(value, triton.JITFunction)
]
found: list[dict[str, Any]] = []


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """In place of a launch; outputs stay unwritten."""

    def launch(*arguments: Any, **constants: Any) -> None:
        if kernel not in OWN:
            return
        compiled = kernel.warmup(*arguments, grid=grid, **constants)
        registers, spilled = resources(compiled.asm["cubin"])
        found.append(
            {
                "kernel": kernel.__name__,
                "size": constants["D"],
                "shared": compiled.metadata.shared,
                "registers": registers,
                "spilled": spilled,
            }
        )

    return launch


triton.JITFunction.__getitem__ = compile_only


def main() -> None:
    dtype = getattr(torch, sys.argv[3])
    for size in map(int, sys.argv[4:]):
        q, k, dy = (torch.zeros(2, 128, 6, size, dtype=dtype) for _ in range(3))
        gate, total, count = torch.zeros(2, 128, 6), torch.zeros(2, 6, size), torch.zeros(2, dtype=torch.int64)
        units: dict[str, Any] = {"unit_queries": True, "unit_keys": True}
        results: dict[str, Any] = units | {"return_correction": False, "wide": False}
        sequences = (None, None)
        vectors = mean.forward(q, k, gate, total, count, *sequences, **results).vectors
        mean.backward(q, k, gate, vectors, count, dy, None, total, *sequences, **units)
        sums = torch.zeros(2, 6, size + 1)
        inverse, before = mean.inverse_trace(k, sums, count, *sequences, unit_keys=True, floor=1e-3)
        mean.inverse_trace_backward(inverse, inverse, k, before, count, *sequences, unit_keys=True, floor=1e-3)
        strength = torch.zeros(6)
        comba.forward(q, k, strength, None, **results)
        comba.backward(q, k, strength, None, dy, None, **units)
        landmarks, state = torch.zeros(6, 8, size), (torch.zeros(2, 6, 8, size), torch.zeros(2, 6, 8))
        done = query_weighted.forward(q, k, gate, landmarks, *state, *sequences, **results)
        query_weighted.backward(q, k, gate, landmarks, *done[4:], dy, None, *state, *sequences, **units)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
