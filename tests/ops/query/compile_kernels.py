"""Compile the large kernels of the read step for a GPU that need not be there, and print the shared memory they take.

    python tests/ops/query/compile_kernels.py MAJOR MINOR

prints a JSON list of [kernel, dtype, bytes] for D = 256. A process of its own, because Triton's interpreter, which the
tests run in, makes kernels that cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ccq.ops.query import kernels

SIZE = 256
INTEGERS = ("begin", "end", "owner", "block_start", "chunk_start", "count")
ROWS = ("x", "unit", "weighted", "query", "dk")


def shared_memory(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], warps: int, stages: int, capability: int
) -> int:
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "*fp32")
        if name in constants:
            values[(i,)] = constants[name]
        elif signature[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def main() -> None:
    capability = tuple(map(int, sys.argv[1:3]))
    found = []
    pairs = zip(kernels.TABLE[capability], (torch.bfloat16, torch.float32), strict=True)
    for config, dtype in pairs:
        number = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
        types = {name: "*i64" for name in INTEGERS} | {name: number for name in (*ROWS, "covariances", "spreads")}
        types |= {"sequences": "i32", "per_segment": "i32"}
        precision = "ieee" if dtype == torch.float32 else "tf32"
        common = {"H": 6, "D": SIZE, "BN": config.group, "C": config.chunk, "CENTRED": True, "PRECISION": precision}
        wide = common | {"BD": SIZE, "BK": config.part, "STATE_PRECISION": precision}
        tiles = {"BS": config.tile, "S": SIZE // config.tile, "TOTALS_ONLY": False}
        cases = (
            (
                kernels._covariance_kernel,
                wide | {"BT": config.read_rows, "BO": config.read_columns, "QUERY": True, "CORRECTION": False},
                config.read_warps,
                config.read_stages,
            ),
            (
                kernels._key_gradients_kernel,
                wide | {"BT": config.gradient_rows, "S": SIZE // config.tile, "NORMALIZE": True},
                config.gradient_warps,
                config.gradient_stages,
            ),
            (kernels._scan_gradients_kernel, common | tiles, config.scan_warps, config.scan_stages),
        )
        for kernel, constants, warps, stages in cases:
            size = shared_memory(kernel, constants, types, warps, stages, 10 * capability[0] + capability[1])
            found.append([kernel.__name__, str(dtype), size])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
