"""Every entry of the table of configurations compiles for its target and fits its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from ccq.ops.query import kernels

LIMITS = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}
"""KiB of shared memory a block may take, from the CUDA C++ programming guide, table of compute capabilities."""


def test_the_limits_cover_the_table() -> None:
    assert set(kernels.TABLE) - {None} == set(LIMITS)
    assert kernels.TABLE[None] == kernels.TABLE[(8, 9)], "other cards take the entry with the smallest limit"


@pytest.mark.parametrize("capability", LIMITS)
def test_kernels_fit(capability: tuple[int, int]) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, capability)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 26
    for kernel, dtype, size in found:
        assert 0 < size <= LIMITS[capability] * 1024, f"{kernel} for {dtype} takes {size} bytes"
