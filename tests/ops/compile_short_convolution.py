"""Compile the kernels of the short convolution, as they are launched, for a GPU that need not be there.

    python tests/ops/compile_short_convolution.py MAJOR MINOR DTYPE

prints a JSON list of {"kernel", "width", "extras", "registers", "spilled"}, of a thread the last two. A process of its
own, because Triton's interpreter, which the tests run in, makes kernels that cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).with_name("reads")))
from pretended_gpu import pretend, resources

pretend(int(sys.argv[1]), int(sys.argv[2]))

from ccq.ops.short_convolution import MAX_KERNEL_SIZE, kernels  # noqa: E402

CHANNELS = 1536
found: list[dict[str, Any]] = []


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """In place of a launch; outputs stay unwritten."""

    def launch(*arguments: Any, **constants: Any) -> None:
        compiled = kernel.warmup(*arguments, grid=grid, **constants)
        registers, spilled = resources(compiled.asm["cubin"])
        width, extras = constants["W"], constants["STATE"]
        found.append(
            {
                "kernel": kernel.__name__,
                "width": width,
                "extras": extras,
                "registers": registers,
                "spilled": spilled,
            }
        )

    return launch


triton.JITFunction.__getitem__ = compile_only


def main() -> None:
    dtype = getattr(torch, sys.argv[3])
    for width in (4, MAX_KERNEL_SIZE):
        for extras in (False, True):
            x, weight = torch.zeros(2, 64, CHANNELS, dtype=dtype), torch.zeros(CHANNELS, width, dtype=dtype)
            bias = torch.zeros(CHANNELS, dtype=dtype) if extras else None
            state = torch.zeros(2, width - 1, CHANNELS, dtype=dtype) if extras else None
            kernels.forward(x, weight, bias, state, None)
            kernels.backward(x, x, weight, bias, state, None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
