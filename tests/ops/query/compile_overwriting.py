"""Compile the kernels that overwrite what they read, for a GPU that need not be there, and see in which order they do.

    python tests/ops/query/compile_overwriting.py

prints a JSON list of [kernel, D, order]: a letter for every load (L), store (S) and barrier (B) of global memory. A
process of its own, because Triton's interpreter, which the tests run in, makes kernels that cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "reads"))
from pretended_gpu import pretend

pretend(9, 0)

from ccq.ops.query import step  # noqa: E402
from ccq.ops.short_convolution import kernels as convolution  # noqa: E402
from ccq.ops.write_rule_step import kernels as rule  # noqa: E402

LETTERS = {"ld.global": "L", "st.global": "S", "bar.sync": "B"}
found: list[tuple[str, int, str]] = []
size = 0


class Compiled:
    """In the place of a kernel: compiles where that would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def compile(*arguments: Any, **constants: Any) -> None:
            code = self.kernel.warmup(*arguments, grid=grid, **constants).asm["ptx"]
            order = "".join(LETTERS[each] for each in re.findall("|".join(LETTERS), code))
            found.append((self.kernel.__name__, size, order))

        return compile


for module, name in (
    (step, "_triangle_kernel"),
    (step, "_finish_kernel"),
    (rule, "_token_kernel"),
    (convolution, "_token_kernel"),
):
    setattr(module, name, Compiled(getattr(module, name)))

if __name__ == "__main__":
    for size in (5, 16, 32, 64, 256):
        q = torch.zeros(2, 1, 3, size, dtype=torch.bfloat16)
        triangle, count = torch.zeros(2, 3, size * (size + 1) // 2), torch.zeros(2, dtype=torch.int64)
        gate, total = torch.zeros(2, 1, 3), torch.zeros(2, 3, size)
        for unit_keys in (True, False):
            step.update_and_read_token(
                q, q, gate, triangle, total, count, unit_queries=True, unit_keys=unit_keys, centred=True,
                return_correction=False, wide=False,
            )  # fmt: skip
        v, state = torch.zeros(2, 1, 3, 2 * size, dtype=torch.bfloat16), torch.zeros(2, 3, size, 2 * size)
        rule.write_token(q, q, v, q.float(), None, state, 1.0, in_place=True)
        rule.write_token(q, q, v, gate, gate, state, 1.0, in_place=True)
        x, weight = torch.zeros(2, 1, size, dtype=torch.bfloat16), torch.zeros(size, 4, dtype=torch.bfloat16)
        convolution.token([x], [weight], [torch.zeros(2, 3, size, dtype=torch.bfloat16)], [x])
    print(json.dumps(found))
