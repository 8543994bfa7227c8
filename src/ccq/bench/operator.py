"""`ccq bench operator` on a CPU: time and error of the read step and the write rules.

Every function is timed in the same process and in turn, forward + backward, beside causal
`torch.nn.functional.scaled_dot_product_attention` of the same shape, so that whatever else the machine does meets all
of them alike. Medians with their quartiles; warm-up rounds are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.bench.machine import environment
from ccq.ops.gated_delta_rule import gated_delta_rule
from ccq.ops.gla import gated_linear_attention
from ccq.ops.query import curvature_conditioned_query, l2_normalize

SCHEMA = "ccq-bench-operator/2"
"""Also of the figures that `ccq.bench.gpu` measures on a GPU; those have "functions", these have "times"."""
BASELINE = "scaled_dot_product_attention"
WARMUP = 5
CHUNK = 64
"""Tokens a chunk of `read_step_by_autograd`."""
ERROR_LENGTHS = (2, 3, 7, 15, 16, 17, 63, 64, 65, 127, 1000)
ERROR_SIZE = 64


class Shape(NamedTuple):
    """B rows, T tokens, H heads, D key and value size."""

    rows: int
    tokens: int
    heads: int
    size: int


def read_step_by_autograd(q: Tensor, k: Tensor, gate: Tensor, chunk: int = CHUNK) -> Tensor:
    """The read step as one would compose it from PyTorch, by chunks, with automatic differentiation. T in whole chunks.

    The yardstick for the closed-form backward.
    """
    q, k = l2_normalize(q), l2_normalize(k)
    chunks = [x.unflatten(1, (-1, chunk)).transpose(2, 3) for x in (q, k)]  # [B, T / C, H, C, D]
    query, key = chunks
    moment = key.mT @ key
    total = key.sum(-2, keepdim=True)
    before_moment = F.pad(moment.cumsum(1), (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
    before_total = F.pad(total.cumsum(1), (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
    count = torch.arange(1, q.shape[1] + 1, dtype=q.dtype, device=q.device).view(-1, 1, chunk, 1)
    scores = (query @ key.mT).tril()
    mean = (scores.sum(-1, keepdim=True) + query @ before_total.mT) / count
    centred = (scores - mean).tril()
    correction = (query @ before_moment - mean * before_total + centred @ key) / count
    return q - gate.unsqueeze(-1) * correction.transpose(2, 3).flatten(1, 2)


def _cases(shape: Shape, random: torch.Generator) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Each function with its inputs; what it returns is differentiated."""
    rows, tokens, heads, size = shape

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random).requires_grad_()

    def sequence() -> Tensor:
        return normal(rows, tokens, heads, size)

    def decay(*sizes: int) -> Tensor:
        """Logarithms of decays as a model has them at the start."""
        return (F.logsigmoid(torch.randn(*sizes, generator=random)) / 16).requires_grad_()

    def share() -> Tensor:
        return torch.rand(rows, tokens, heads, generator=random).requires_grad_()

    def unit() -> Tensor:
        return l2_normalize(sequence()).detach().requires_grad_()

    return {
        BASELINE: (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            [normal(rows, heads, tokens, size) for _ in range(3)],
        ),
        "read step": (
            lambda q, k, gate: curvature_conditioned_query(q, k, gate).query,
            [sequence(), sequence(), share()],
        ),
        "read step, autograd": (read_step_by_autograd, [sequence(), sequence(), share()]),
        "gated linear attention": (
            lambda *x: gated_linear_attention(*x).output,
            [sequence(), sequence(), sequence(), decay(rows, tokens, heads, size)],
        ),
        "gated delta rule": (
            lambda *x: gated_delta_rule(*x).output,
            [unit(), unit(), sequence(), decay(rows, tokens, heads), share()],
        ),
    }


def time_functions(shape: Shape, *, threads: int, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of forward and of forward + backward, and the ratio to the baseline, for every function."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cases = _cases(shape, torch.Generator().manual_seed(0))
        forward: dict[str, list[float]] = {name: [] for name in cases}
        both: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(WARMUP + repeats):
            for name, (function, inputs) in cases.items():
                started = time.perf_counter()
                output = function(*inputs)
                middle = time.perf_counter()
                output.backward(torch.ones_like(output))
                ended = time.perf_counter()
                forward[name].append(1000 * (middle - started))
                both[name].append(1000 * (ended - started))
                for x in inputs:
                    x.grad = None
    finally:
        torch.set_num_threads(before)
    medians = {name: statistics.median(times[WARMUP:]) for name, times in both.items()}
    rows = []
    for name in cases:
        quartiles = statistics.quantiles(both[name][WARMUP:], n=4)
        rows.append(
            {
                "function": name,
                "threads": threads,
                "forward_ms": statistics.median(forward[name][WARMUP:]),
                "forward_backward_ms": medians[name],
                "lower_quartile_ms": quartiles[0],
                "upper_quartile_ms": quartiles[2],
                "ratio": medians[name] / medians[BASELINE],
            }
        )
    return rows


def _correction(q: Tensor, k: Tensor, backend: str) -> Tensor:
    result = curvature_conditioned_query(q, k, 0.3, return_correction=True, backend=backend)
    assert result.correction is not None
    return result.correction


def measure_errors() -> list[dict[str, Any]]:
    """Largest relative error of the correction, |r - exact| / |exact|, by dtype, over lengths and kinds of keys.

    Exact is the recurrence in float64 on the same rounded inputs. Kinds of keys: independent normal numbers, a steep
    spectrum, and a common mean that carries 95 % of each key.
    """
    random = torch.Generator().manual_seed(0)
    rows = []
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        largest, where = 0.0, ""
        for tokens in ERROR_LENGTHS:
            q, noise = (torch.randn(1, tokens, 2, ERROR_SIZE, generator=random, dtype=torch.float64) for _ in range(2))
            mean = torch.randn(1, 1, 2, ERROR_SIZE, generator=random, dtype=torch.float64)
            kinds = {
                "flat": noise,
                "steep": noise / torch.arange(1, ERROR_SIZE + 1).sqrt(),
                "common mean": 0.95**0.5 * l2_normalize(mean) + 0.05**0.5 * l2_normalize(noise),
            }
            for kind, k in kinds.items():
                given = q.to(dtype), k.to(dtype)
                exact = _correction(given[0].double(), given[1].double(), "reference")
                actual = _correction(given[0], given[1], "torch")
                error = ((actual.double() - exact).norm() / exact.norm()).item()
                if error > largest:
                    largest, where = error, f"{kind} keys, T {tokens}"
        rows.append({"dtype": str(dtype).removeprefix("torch."), "largest_relative_error": largest, "at": where})
    return rows


def bench_operator(shape: Shape, *, threads: int, repeats: int) -> dict[str, Any]:
    """Times and errors with everything needed to measure them again, for benchmarks/results.

    Raises ValueError if T is not a multiple of 64.
    """
    if shape.tokens % CHUNK:
        raise ValueError(f"T must be a multiple of {CHUNK}, got {shape.tokens}")
    return {
        "schema": SCHEMA,
        "settings": {
            "shape": shape._asdict(),
            "dtype": "float32",
            "repeats": repeats,
            "warmup": WARMUP,
            "baseline": BASELINE,
        },
        "environment": environment(threads=threads),
        "times": time_functions(shape, threads=threads, repeats=repeats),
        "errors": measure_errors(),
    }
