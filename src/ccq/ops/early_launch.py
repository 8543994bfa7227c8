"""Kernels that start while the one before them ends (CUDA's programmatic dependent launch).

A step of decoding is hundreds of kernels of a few microseconds each, and a good part of that goes to starting: code and
arguments are fetched, programs spread over the card. A kernel launched by `early_launch` does that beside the one
before it, and then waits for its end: `follow` must come before anything that it reads or writes.

To ask for weights and states ahead of that (prefetch.global.L2) was tried in a 1.3B model on an H200, and steps got
longer the more was asked for.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def follow(EARLY: tl.constexpr):
    """Waits for the kernels before this one, and lets the next one start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def early_launch(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch of a kernel with a parameter EARLY that calls `follow`. Needs compute capability 9.0, and a
    driver whose graphs know such launches.
    """
    if device.type != "cuda" or not _is_known(device.index):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@functools.cache
def _is_known(index: int | None) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < (9, 0):
        return False
    return _driver_version() >= 12_030


def _driver_version() -> int:
    """Of CUDA that the driver has, 1000 major + 10 minor, which torch does not tell; 0 where it cannot be asked."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value
