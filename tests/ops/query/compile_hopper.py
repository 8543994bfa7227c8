"""Compile the kernels of `ccq.ops.query.hopper` as forward and backward launch them, for a GPU that need not be there.

    python tests/ops/query/compile_hopper.py

prints a JSON list of {"kernel", "constants", "shared", "local", "instructions"}: the shared memory, the local memory of
a thread and the instructions that each takes, in bytes. A process of its own, because kernels that were made for
Triton's interpreter, which the tests run in, cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Driver:
    """A GPU as far as the compiler asks about it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


driver.set_active(Driver())
torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]

from ccq.ops.query import hopper, kernels  # noqa: E402

kernels.copies_apart = lambda *_: True  # type: ignore[assignment]  # as if the tensors were on the card
OWN = (hopper._covariance_kernel, hopper._key_gradients_kernel)
found: list[dict[str, Any]] = []


def run(self: kernels.Launcher, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Compiles in place of launching; outputs stay unwritten."""
    # Everything is launched twice: first only to be compiled.
    if kernel not in OWN or self.compile_only:
        return
    flags = {name: value for name, value in constants.items() if isinstance(value, bool)}
    if any((each["kernel"], each["constants"]) == (kernel.__name__, flags) for each in found):
        return
    compiled = kernel.warmup(*arguments, grid=grid, **constants)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        usage, code = (
            subprocess.run([TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    (local,) = re.findall(r"STACK:(\d+)", usage)
    found.append(
        {
            "kernel": kernel.__name__,
            "constants": flags,
            "shared": compiled.metadata.shared,
            "local": int(local),
            "instructions": 16 * len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", code, re.MULTILINE)),
        }
    )


kernels.Launcher.run = run  # type: ignore[method-assign]


def main() -> None:
    q = torch.zeros(1, 256, 2, 256, dtype=torch.bfloat16)
    gate, total, count = torch.zeros(1, 256, 2), torch.zeros(1, 2, 256), torch.zeros(1, dtype=torch.int64)
    config = kernels.configuration(q.dtype, 256, torch.device("cpu"))
    plan = kernels.make_plan(1, 256, None, None, config, q.device)
    # GLA has both normalised here, Gated DeltaNet brings its keys so.
    for unit_keys in (True, False):
        options = {"unit_queries": True, "unit_keys": unit_keys, "centred": True}
        done = kernels.forward(
            q, q, gate, None, total, count, plan, config, return_correction=False, wide=False, **options
        )
        # Without and with a gradient that reaches the keys from elsewhere.
        for beside in (None, q):
            kernels.backward(
                q, q, gate, q, None, None, total, done.kept, None, count, plan, config, state_gradients=False,
                beside=beside, **options,
            )  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
