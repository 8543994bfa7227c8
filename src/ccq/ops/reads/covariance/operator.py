"""The kernels of functions of the covariance as operators of torch, with gradients and with shapes for the compiler.

Nothing here imports triton before an operator runs. Operators take and return plain tensors, and never None: a
correction that was not asked for is an empty tensor. `coefficients` and `steps` are those of
`ccq.ops.reads.covariance.kernels.Function`.

| operator | what it is |
| --- | --- |
| ccq::covariance_function | a polynomial in lambda Sigma, or the solution with I + lambda Sigma; differentiable |
| ccq::covariance_function_backward | its gradients |
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.operators import custom_operator
from ccq.ops.query import KeyStatistics
from ccq.ops.query.fused import check_device
from ccq.ops.reads.triton_backend import Call, block_count

MAX_SIZE = 128
"""The largest D of the kernels, which hold a D x D covariance on the chip."""


def fits(q: Tensor) -> bool:
    """Whether the kernels take the size of q, which they need not where there is another way."""
    if q.dtype != torch.float16 or q.shape[-1] <= MAX_SIZE // 2:
        return q.shape[-1] <= MAX_SIZE
    from ccq.ops.query.kernels import configuration

    # States of float16 input are float32, which is more than cards hold that have the smallest blocks.
    return q.shape[-1] <= MAX_SIZE and configuration(q.dtype, q.shape[-1], q.device).block >= 64


def _kernels(q: Tensor) -> ModuleType:
    """The module of the kernels, once it is sure that they can run on the device of q."""
    check_device(q)
    from ccq.ops.reads.covariance import kernels

    return kernels


_INPUTS = "Tensor q, Tensor k, Tensor gate, "
_SEQUENCES = "Tensor? mask, int[]? boundaries, "
_OPTIONS = "float[] coefficients, int steps, bool unit_queries, bool unit_keys, "


@custom_operator(
    "covariance_function",
    schema=f"({_INPUTS}Tensor? second_moment, Tensor total, Tensor count, {_SEQUENCES}{_OPTIONS}"
    "bool return_correction, bool wide) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def covariance_function(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    total: Tensor,
    count: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    coefficients: Sequence[float],
    steps: int,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    """Query (float32 with `wide`), correction (or an empty tensor), second moment, total, count, and for the backward
    pass the totals before each block of keys. A second moment of None is zero.
    """
    kernels = _kernels(q)
    from ccq.ops.query.kernels import make_plan
    from ccq.ops.query.padding import fill_outputs

    q, k, gate, total, count = (x.contiguous() for x in (q, k, gate, total, count))
    with torch.cuda.device_of(q):
        config = kernels.configuration(q.dtype, q.shape[-1], q.device)
        edges = None if boundaries is None else list(boundaries)
        plan = make_plan(q.shape[0], q.shape[1], mask, edges, config, q.device)
        done = kernels.forward(
            q, k, gate, None if second_moment is None else second_moment.contiguous(), total, count, plan, config,
            kernels.Function(tuple(coefficients), steps), unit_queries=unit_queries, unit_keys=unit_keys,
            return_correction=return_correction, wide=wide,
        )  # fmt: skip
        if mask is not None:
            fill_outputs(mask, q, done.query, done.correction, unit_queries)
        last_count = count + plan.length
    correction = q.new_empty(0, dtype=torch.float32) if done.correction is None else done.correction
    return done.query, correction, done.second_moment, done.total, last_count, done.vectors


@covariance_function.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    total: Tensor,
    count: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    coefficients: Sequence[float],
    steps: int,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    heads, size = q.shape[2:]
    return (
        q.new_empty(q.shape, dtype=torch.float32 if wide else q.dtype),
        q.new_empty(q.shape if return_correction else 0, dtype=torch.float32),
        total.new_empty((*total.shape, size)),
        total.new_empty(total.shape),
        count.new_empty(count.shape),
        q.new_empty((block_count(q, boundaries), heads, size), dtype=torch.float32),
    )


@custom_operator(
    "covariance_function_backward",
    schema=f"({_INPUTS}Tensor? second_moment, Tensor count, Tensor? query, Tensor? correction, Tensor last_total, "
    f"Tensor vectors, Tensor dy, Tensor? dr, Tensor? d_moment, Tensor? d_total, {_SEQUENCES}{_OPTIONS}"
    "bool state_gradients) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def covariance_function_backward(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    count: Tensor,
    query: Tensor | None,
    correction: Tensor | None,
    last_total: Tensor,
    vectors: Tensor,
    dy: Tensor,
    dr: Tensor | None,
    d_moment: Tensor | None,
    d_total: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    coefficients: Sequence[float],
    steps: int,
    unit_queries: bool,
    unit_keys: bool,
    state_gradients: bool,
) -> tuple[Tensor, ...]:
    """The gradients of `covariance_function` in q, k, gate and (else empty) second_moment and total; `dr` needs the
    correction, the solution its query.
    """
    kernels = _kernels(q)
    from ccq.ops.query.kernels import make_plan
    from ccq.ops.query.padding import clear_gradients

    q, k, gate, count, dy = (x.contiguous() for x in (q, k, gate, count, dy))
    optional = (dr, d_moment, second_moment)
    dr, d_moment, second_moment = (None if x is None else x.contiguous() for x in optional)
    with torch.cuda.device_of(q):
        config = kernels.configuration(q.dtype, q.shape[-1], q.device)
        edges = None if boundaries is None else list(boundaries)
        plan = make_plan(q.shape[0], q.shape[1], mask, edges, config, q.device)
        found = kernels.backward(
            q, k, gate, dy, dr, d_moment, torch.zeros_like(last_total) if d_total is None else d_total.contiguous(),
            q if query is None else query, correction, second_moment, count, last_total, vectors, plan, config,
            kernels.Function(tuple(coefficients), steps), unit_queries=unit_queries, unit_keys=unit_keys,
            state_gradients=state_gradients,
        )  # fmt: skip
        if mask is not None:
            clear_gradients(mask, found.q, found.k, found.gate)
    return found.q, found.k, found.gate.to(gate.dtype), found.second_moment, found.total


@covariance_function_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    count: Tensor,
    query: Tensor | None,
    correction: Tensor | None,
    last_total: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    rows = (x.new_empty(x.shape) for x in (q, k, gate))
    shapes = ((*last_total.shape, q.shape[-1]), last_total.shape)
    return *rows, *(last_total.new_empty(shape if options[-1] else 0) for shape in shapes)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gate, second_moment, _, count, mask, *ctx.options, return_correction, _ = inputs
    query, correction, _, last_total, last_count, vectors = output
    solution = not ctx.options[1]
    ctx.save_for_backward(
        q, k, gate, second_moment, count, query if solution else None, correction if return_correction else None,
        last_total, vectors, mask,
    )  # fmt: skip
    ctx.mark_non_differentiable(last_count, vectors)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, dr: Tensor | None, d_moment: Tensor | None, d_total: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    *saved, mask = ctx.saved_tensors
    state_gradients = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    *rows, d_moment, d_total = torch.ops.ccq.covariance_function_backward(
        *saved,
        torch.zeros_like(saved[0]) if dy is None else dy,
        dr if saved[6] is not None else None,
        d_moment,
        d_total,
        mask,
        *ctx.options,
        state_gradients,
    )
    states = (x if needed else None for x, needed in zip((d_moment, d_total), ctx.needs_input_grad[3:5], strict=True))
    return *rows, *states, *(None,) * 9


covariance_function.register_autograd(_backward, setup_context=_setup_context)


def read_by_kernels(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    call: Call,
    statistics: KeyStatistics | None,
    coefficients: tuple[float, ...],
    steps: int,
    *,
    return_correction: bool,
) -> tuple[Tensor, Tensor | None, KeyStatistics]:
    """Query, correction and statistics; statistics of None stand for those before the first key."""
    moment: Tensor | None = None
    if statistics is None:
        kept = accumulation_dtype(q.dtype)
        total = q.new_zeros(call.sequences, *q.shape[2:], dtype=kept)
        count = q.new_zeros(call.sequences, dtype=torch.int64)
    else:
        moment, total, count = statistics
    query, correction, *last, _ = torch.ops.ccq.covariance_function(
        q, k, gate, moment, total, count, call.mask, call.boundaries, list(coefficients), steps,
        call.unit_queries, call.unit_keys, return_correction, call.query_dtype != q.dtype,
    )  # fmt: skip
    return query, correction if return_correction else None, KeyStatistics(*last)
