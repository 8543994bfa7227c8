"""Compile the large kernels of the read step for a GPU that need not be there, and print the shared memory they take.

    python tests/ops/query/compile_kernels.py MAJOR MINOR

prints a JSON list of [kernel, dtype, bytes] for D = 256: for keys that are normalised and copied, and for keys that are
read where they are. A process of its own, because Triton's interpreter, which the tests run in, makes kernels that
cannot be compiled.
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
ROWS = ("x", "unit", "blocked", "query", "q", "dy", "dq", "weighted", "beside", "dk")


def compiled_memory(
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
        number = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]

        def tiles(rows: int, columns: int, number: str = number, bulk: bool = config.bulk) -> str:
            return f"tensordesc<{number}[{rows}, {columns}]>" if bulk else f"*{number}"

        block, group = tiles(config.block, SIZE), tiles(config.group, SIZE)
        part, state = tiles(config.block, config.part), tiles(config.part, SIZE)
        types = dict.fromkeys(INTEGERS, "*i64") | dict.fromkeys(ROWS, f"*{number}")
        types |= dict.fromkeys(("sequences", "per_segment", "blocks"), "i32")
        types |= {"rows": block, "parts": part, "unit_blocks": block, "unit_parts": part, "unit_groups": group}
        types |= {"x_groups": group, "weighted_groups": group, "covariances": state, "spreads": state}
        scanned = types | dict.fromkeys(("x", "weighted"), tiles(config.scan_group, config.tile))
        scanned |= {"spreads": f"*{number}"}
        moments = types | {"covariances": f"*{number}"}
        common = {"H": 6, "D": SIZE, "BD": SIZE, "BT": config.block, "C": config.chunk, "CENTRED": True}
        common |= {"ALIGNED": True, "BULK": config.bulk, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
        scan = common | {"BN": config.scan_group, "BS": config.tile, "S": SIZE // config.tile}
        scan |= {"TOTALS_ONLY": False, "INITIAL": True, "FINAL": True}
        keys = common | {"BR": config.row_rows, "STAGES": config.row_stages, "EPS": 1e-6, "SUMS": True}
        scans = config.scan_warps, config.scan_stages
        read, gradient = (config.read_warps, config.read_stages), (config.gradient_warps, config.gradient_stages)
        cases = [(kernels._scan_gradients_kernel, scan, scanned, *scans)]
        for aligned in (False, True):
            copied = keys | {"COPY": not aligned, "NORMALIZE": not aligned}
            wide = common | {"BN": config.group, "BK": config.part, "KEYS_ALIGNED": aligned}
            reads = wide | {"NORMALIZE": True, "CORRECTION": False, "EPS": 1e-6}
            pushes = wide | {"NORMALIZE": not aligned, "S": SIZE // config.tile}
            cases += (
                (kernels._to_blocks_kernel, copied, types, config.row_warps, 1),
                (kernels._scan_moments_kernel, scan | {"KEYS_ALIGNED": aligned}, moments, *scans),
                *((kernels._covariance_kernel, reads | {"GRADIENTS": which}, types, *read) for which in (False, True)),
                *(
                    (kernels._key_gradients_kernel, pushes | {"BESIDE": which}, types, *gradient)
                    for which in (False, True)
                ),
            )
        for kernel, constants, kinds, warps, stages in cases:
            size = compiled_memory(kernel, constants, kinds, warps, stages, 10 * capability[0] + capability[1])
            found.append([kernel.__name__, str(dtype), size])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
