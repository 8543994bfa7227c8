"""What the benchmark compares must be the same computation."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close

from ccq.bench.operator import BASELINE, Shape, bench_operator, read_step_by_autograd
from ccq.ops.query import curvature_conditioned_query


def test_the_composed_read_step_is_the_read_step() -> None:
    q, k = (torch.randn(2, 24, 2, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    gate = torch.rand(2, 24, 2, dtype=torch.float64).requires_grad_()
    composed = read_step_by_autograd(q, k, gate, chunk=8)
    exact = curvature_conditioned_query(q, k, gate, backend="reference").query
    assert_close("query", composed, exact, 1e-12)
    for name, ours, theirs in zip(
        "qkg",
        torch.autograd.grad(composed.square().sum(), (q, k, gate)),
        torch.autograd.grad(exact.square().sum(), (q, k, gate)),
        strict=True,
    ):
        assert_close(name, ours, theirs, 1e-11)


def test_ratios_are_those_of_the_medians_and_errors_are_small_but_not_zero() -> None:
    figures = bench_operator(Shape(1, 64, 1, 8), threads=1, repeats=3)
    times = {row["function"]: row for row in figures["times"]}
    for row in times.values():
        assert row["ratio"] == row["forward_backward_ms"] / times[BASELINE]["forward_backward_ms"]
        assert row["lower_quartile_ms"] <= row["forward_backward_ms"] <= row["upper_quartile_ms"]
        assert 0 < row["forward_ms"] < row["upper_quartile_ms"]
    errors = {row["dtype"]: row["largest_relative_error"] for row in figures["errors"]}
    assert 0 < errors["float64"] < 1e-12
    for dtype in ("float32", "float16", "bfloat16"):
        assert 1e-9 < errors[dtype] < 1e-3


def test_a_length_that_the_yardstick_cannot_take_is_named() -> None:
    with pytest.raises(ValueError, match="T must be a multiple of 64, got 100"):
        bench_operator(Shape(1, 100, 1, 8), threads=1, repeats=2)
