"""Compile the kernels of the backward pass of the read step ahead, for a GPU that need not be there, and see what a
backward pass then still has to compile.

    python tests/ops/query/compile_ahead.py

prints a JSON list of {"size", "beside", "ahead", "later"}: names of kernels that were compiled ahead, and by the pass.
A process of its own, because Triton's interpreter, which the tests run in, makes kernels that cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs

sys.path.insert(0, str(Path(__file__).parents[1] / "reads"))
from pretended_gpu import pretend

pretend(9, 0)
torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]

from ccq.ops.query import kernels  # noqa: E402

CPU = torch.device("cpu")
OPTIONS = {"unit_queries": True, "unit_keys": True, "centred": True, "state_gradients": False}
compiled: list[str] = []
knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)


def run(self: kernels.Launcher, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Compiles in place of launching, at both times."""
    kernel.warmup(*arguments, grid=grid, **constants)


def passes(size: int, beside: bool) -> dict[str, Any]:
    kernels.copies_apart = lambda *_: size == 256  # type: ignore[assignment]  # as if the tensors were on the card
    q = torch.zeros(1, 512, 2, size, dtype=torch.bfloat16)
    gate, number, total = torch.zeros(1, 512, 2), torch.zeros(1, 512, 2), torch.zeros(1, 2, size)
    compiled.clear()
    described = (q.shape, q.dtype, CPU, gate.dtype, q.dtype)
    kernels.compile_backward_ahead(*described, full=True, padded=False, has_moment=False, **OPTIONS)
    (thread,) = kernels._under_way.values()
    thread.join()
    ahead = sorted(compiled)
    compiled.clear()
    config = kernels.configuration(q.dtype, size, CPU)
    plan = kernels.make_plan(1, 512, None, None, config, CPU)
    kept = kernels.Kept(None, total, number, torch.zeros(len(plan.owner), 2, size), number)
    kernels.backward(
        q, q, gate, q, None, None, None, kept, None, plan.nothing, plan, config, beside=q if beside else None, **OPTIONS
    )
    kernels._under_way.clear()
    return {"size": size, "beside": beside, "ahead": ahead, "later": sorted(compiled)}


kernels.Launcher.run = run  # type: ignore[method-assign]
if __name__ == "__main__":
    print(json.dumps([passes(256, True), passes(64, True), passes(128, False)]))
