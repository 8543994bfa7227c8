"""Compile the kernels inside the chunks of gated linear attention for sm_90 without a GPU; print what they take."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "reads"))
from pretended_gpu import pretend, resources

pretend(9, 0)

from ccq.ops.gla import kernels  # noqa: E402


def main() -> None:
    found = []
    for size in (64, 256):
        x, g = torch.zeros(1, 128, 6, size, dtype=torch.bfloat16), torch.zeros(1, 128, 6, size)
        weights, d_weights = torch.zeros(1, 128, 6, 64, dtype=torch.bfloat16), torch.zeros(1, 128, 6, 64)
        constants = {"H": 6, "D": size, "C": 64, "LEVELS": 6, "PACKED": False, "HALF": True, "PRECISION": "ieee"}
        for name, kernel, arguments in (
            ("weights", kernels._weights_kernel, (x, x, g, weights, x, x, 128, 2, 0.1)),
            ("gradients", kernels._gradients_kernel, (x, x, g, d_weights, g, g, x, x, 128, 2)),
        ):
            compiled = kernel.warmup(
                *arguments, grid=(2, 6, 1), BD=kernels.COLUMNS[name], num_warps=kernels.WARPS[name], num_stages=1,
                **constants,
            )  # fmt: skip
            registers, local = resources(compiled.asm["cubin"])
            shared = compiled.metadata.shared
            found.append({"kernel": name, "size": size, "registers": registers, "local": local, "shared": shared})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
