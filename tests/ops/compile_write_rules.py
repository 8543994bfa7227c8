"""Compile flash-linear-attention's kernels, as the write rules launch them, for a GPU that need not be there.

    python tests/ops/compile_write_rules.py CARD MAJOR MINOR D/V ...

prints a JSON list of {"rule", "sizes", "kernel", "configuration", "offered", "shared", "spilled"}: what the table of
the card says, whether the package itself would try that configuration, the shared memory it takes and the bytes it
spills to local memory. A process of its own, because the package looks at the card when it is imported, and because
kernels that were made for Triton's interpreter, which the tests run in, cannot be compiled.
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

CARD, CAPABILITY = sys.argv[1], tuple(map(int, sys.argv[2:4]))
SHARED = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}
"""KiB a block may take, from the CUDA C++ programming guide."""


class Driver:
    """A GPU as far as the package and the compiler ask about it."""

    class utils:
        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"multiprocessor_count": 132, "max_shared_mem": SHARED[CAPABILITY] * 1024}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


driver.set_active(Driver())
torch.cuda.get_device_name = lambda *_: CARD  # type: ignore[assignment]
torch.cuda.get_device_capability = lambda *_: CAPABILITY  # type: ignore[assignment]
torch.cuda.device_count = lambda: 1

import fla.utils.hardware  # noqa: E402

# Tensors on a CPU have no index to look a card up by.
fla.utils.hardware.get_all_max_shared_mem = lambda: {None: SHARED[CAPABILITY] * 1024, 0: SHARED[CAPABILITY] * 1024}

from ccq.ops import flash_linear_attention, rms_norm_gated  # noqa: E402
from ccq.ops.gated_delta_rule import fused as gated_delta_rule  # noqa: E402, F401
from ccq.ops.gla import fused as gla  # noqa: E402, F401
from ccq.ops.gla import kernels  # noqa: E402
from ccq.ops.ssd import fused as ssd  # noqa: E402, F401

# This library's own have a script beside their tests.
kernels._run = lambda *_, **__: None


class Compiler(flash_linear_attention.Launcher):
    """Compiles in place of launching; outputs stay unwritten."""

    def __init__(self, *which: Any) -> None:
        super().__init__(*which)
        self.found: list[dict[str, Any]] = []

    def launch(self, autotuner: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        configuration = self.configuration(autotuner, args, arguments)
        offered = flash_linear_attention.candidates(autotuner, args, arguments)
        arguments = {name: value for name, value in arguments.items() if name != "warmup"}
        kernel = autotuner.fn.warmup(*args, **arguments, **configuration)
        self.found.append(
            {
                "kernel": autotuner.base_fn.__name__,
                "configuration": dict(configuration),
                "offered": dict(configuration) in offered,
                "shared": kernel.metadata.shared,
                "spilled": spilled(kernel.asm["cubin"]),
            }
        )


def spilled(cubin: bytes) -> int:
    """Bytes of local memory of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    return max(int(size) for size in re.findall(r"STACK:(\d+)", done.stdout))


def launches(rule: str, size: int, value_size: int, table: flash_linear_attention.Table) -> list[dict[str, Any]]:
    """Forward and backward of a rule with states, or of the norm behind it."""
    if rule == rms_norm_gated.OPERATION:
        x = torch.zeros(768, value_size, dtype=torch.bfloat16)
        compiler = Compiler(table.choose(rule, value_size, value_size))
        with flash_linear_attention.using(compiler):
            y, reciprocal = rms_norm_gated.forward(x, x, x[0], 1e-5)
            rms_norm_gated.backward(y, x, x, x[0], reciprocal, 1e-5)
        return [{"rule": rule, "sizes": f"{size}/{value_size}", **found} for found in compiler.found]
    shape = (1, 128, 6, size)
    q = torch.zeros(shape, dtype=torch.bfloat16)
    v = torch.zeros(*shape[:3], value_size, dtype=torch.bfloat16)
    state = torch.zeros(1, 6, size, value_size)
    gates = (torch.zeros(shape),) if rule == "gla" else (torch.zeros(shape[:3]),) * 2
    compiler = Compiler(table.choose(rule, size, value_size))
    with flash_linear_attention.using(compiler):
        if rule == "ssd":
            shared = q[:, :, :2].contiguous()
            _, final, summed = torch.ops.ccq.state_space_duality(shared, shared, v, gates[0], state, 0.1, None)
            torch.ops.ccq.state_space_duality_backward(shared, shared, v, summed, state, v, final, 0.1, None)
        elif rule == "gla":
            _, final, summed, kept = torch.ops.ccq.gated_linear_attention(q, q, v, *gates, state, 0.1, None)
            torch.ops.ccq.gated_linear_attention_backward(q, q, v, summed, kept, state, v, final, 0.1, None)
        else:
            _, final, summed, kept = torch.ops.ccq.gated_delta_rule(q, q, v, *gates, state, 0.1, None)
            torch.ops.ccq.gated_delta_rule_backward(q, q, v, gates[1], summed, kept, state, v, final, 0.1, None)
    return [{"rule": rule, "sizes": f"{size}/{value_size}", **found} for found in compiler.found]


def main() -> None:
    table = flash_linear_attention.table_for(CARD, ".".join(map(str, CAPABILITY)))
    found = []
    for sizes in sys.argv[4:]:
        for operation in flash_linear_attention.OPERATIONS:
            found += launches(operation, *map(int, sizes.split("/")), table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
