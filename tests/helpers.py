"""Assertions shared by the tests: errors are measured as norms, and a failure says how far off it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64 (Euclidean norms); |actual| where expected is zero."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: got {list(actual.shape)}, expected {list(expected.shape)}")
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = torch.linalg.vector_norm(actual - expected).item()
    size = torch.linalg.vector_norm(expected).item()
    return difference / size if size > 0 else difference


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float, *, floor: float = 0.0) -> float:
    """Fail unless the relative error is finite and at most `tolerance`; print and return it.

    `floor` is an absolute error (Euclidean norm) that passes anyway: for values that are zero but for rounding.
    """
    error = relative_error(actual, expected)
    print(f"{name}: relative error {error:.2e} (tolerance {tolerance:.0e})")
    difference = torch.linalg.vector_norm(actual.detach().double() - expected.detach().double()).item()
    if not math.isfinite(error) or (error > tolerance and difference > floor):
        raise AssertionError(f"{name}: relative error {error:.3e} is above {tolerance:.0e}")
    return error
