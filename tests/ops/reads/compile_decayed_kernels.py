"""Compile the kernels of decayed statistics for a GPU that need not be there, and print what they take of it.

    python tests/ops/reads/compile_decayed_kernels.py MAJOR MINOR bf16|fp16|fp32 SIZE...

prints a JSON list of [kernel, D, bytes of shared memory]. A process of its own, because Triton's interpreter,
which the tests run in, makes kernels that cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ccq.ops.reads.decayed import kernels as decayed_kernels
from ccq.ops.reads.mesa import kernels as mesa_kernels

INTEGERS = ("begin", "end", "owner", "block_start")
ROWS = ("q", "k", "x", "right", "dy", "dq", "dk", "query", "solution", "adjoint")
NUMBERS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel: Any, constants: dict[str, Any], types: dict[str, str], warps: int, target: int) -> Any:
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "*fp32")
        if name in constants:
            values[(i,)] = constants[name]
        elif signature[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def cases(dtype: torch.dtype, size: int) -> list[tuple[Any, dict[str, Any], int]]:
    """Kernels with their constants and warps."""
    config = decayed_kernels.configuration(dtype, size)
    single = dtype == torch.float32
    common = {"H": 6, "D": size, "BD": size, "C": config.chunk, "PRECISION": "ieee" if single else "tf32"}
    chunk = common | {"EPS": 1e-6}
    unit = chunk | {"BK": min(size, decayed_kernels.PART), "UNIT_QUERIES": True, "UNIT_KEYS": True}
    scan = common | {"STEP": decayed_kernels.STEP, "CENTRED": True, "PRECISION": "ieee" if single else "tf32x3"}
    solve = chunk | {"UNIT_KEYS": True, "UNIT_QUERIES": True, "HALF": not single, "TOLERANCE": 1e-9}
    return [
        (decayed_kernels._chunk_sums_kernel, chunk | {"NORMALIZE": True, "CENTRED": True}, config.warps),
        (decayed_kernels._scan_sums_kernel, scan | {"INITIAL": True}, config.scan_warps),
        (decayed_kernels._read_kernel, unit | {"CORRECTION": True}, config.warps),
        (decayed_kernels._query_gradients_kernel, unit | {"SCALED": True}, config.warps),
        (decayed_kernels._scan_gradients_kernel, scan | {"INITIAL": True, "FINAL": True}, config.scan_warps),
        (decayed_kernels._key_gradients_kernel, unit | {"SCALED": True, "CENTRED": True}, config.warps),
        (decayed_kernels._key_gradients_kernel, unit | {"SCALED": True, "CENTRED": False}, config.warps),
        *((mesa_kernels._solve_kernel, solve | {"GRADIENTS": which}, config.warps) for which in (False, True)),
    ]


def types_of(dtype: torch.dtype, kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    # Without means, states stay in float32.
    number, state = NUMBERS[dtype], "bf16" if dtype == torch.bfloat16 and constants.get("CENTRED", True) else "fp32"
    types = dict.fromkeys(INTEGERS, "*i64") | dict.fromkeys(ROWS, f"*{number}") | {"steps": "i32"}
    if kernel is mesa_kernels._solve_kernel:
        return types
    # The gradients of the keys read W in `spreads`, the other kernels the sums that it is made of.
    own = {"states": f"*{state}", "spreads_behind": f"*{state}"}
    return types | own | ({"spreads": f"*{state}"} if kernel is decayed_kernels._key_gradients_kernel else {})


def main() -> None:
    target = 10 * int(sys.argv[1]) + int(sys.argv[2])
    dtype = next(dtype for dtype, name in NUMBERS.items() if name == sys.argv[3])
    found = []
    for size in map(int, sys.argv[4:]):
        for kernel, constants, warps in cases(dtype, size):
            done = compiled(kernel, constants, types_of(dtype, kernel, constants), warps, target)
            found.append([kernel.__name__, size, done.metadata.shared])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
