"""The kernels of running means as operators of torch, with gradients and with shapes for the compiler.

Nothing here imports triton before an operator runs. Operators take and return plain tensors, and never None: a
correction that was not asked for is an empty tensor.

| operator | what it is |
| --- | --- |
| ccq::mean_read | the read step ccq-mean, differentiable |
| ccq::mean_read_backward | its gradients |
| ccq::inverse_trace | one over the trace of the covariance of the keys so far, differentiable |
| ccq::inverse_trace_backward | its gradients |
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ccq.ops.operators import custom_operator
from ccq.ops.query.fused import check_device
from ccq.ops.reads.triton_backend import block_count


def _kernels(x: Tensor) -> ModuleType:
    """The module of the kernels, once it is sure that they can run on the device of x."""
    check_device(x)
    from ccq.ops.reads.mean import kernels

    return kernels


@custom_operator(
    "mean_read",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor total, Tensor count, Tensor? mask, int[]? boundaries, "
    "bool unit_queries, bool unit_keys, bool return_correction, bool wide)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def mean_read(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    total: Tensor,
    count: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query (float32 with `wide`), correction (or an empty tensor), total, count, and for the backward pass the totals
    before each block of keys.
    """
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        done = kernels.forward(
            *(x.contiguous() for x in (q, k, gate, total, count)), mask, boundaries, unit_queries=unit_queries,
            unit_keys=unit_keys, return_correction=return_correction, wide=wide,
        )  # fmt: skip
    correction = q.new_empty(0, dtype=torch.float32) if done.correction is None else done.correction
    return done.query, correction, done.total, done.count, done.vectors


@mean_read.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    total: Tensor,
    count: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, size = q.shape[2:]
    return (
        q.new_empty(q.shape, dtype=torch.float32 if wide else q.dtype),
        q.new_empty(q.shape if return_correction else 0, dtype=torch.float32),
        total.new_empty(total.shape),
        count.new_empty(count.shape),
        q.new_empty((block_count(q, boundaries), heads, size), dtype=torch.float32),
    )


@custom_operator(
    "mean_read_backward",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor vectors, Tensor count, Tensor dy, Tensor? dr, Tensor d_total, "
    "Tensor? mask, int[]? boundaries, bool unit_queries, bool unit_keys) -> (Tensor, Tensor, Tensor, Tensor)",
)
def mean_read_backward(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    vectors: Tensor,
    count: Tensor,
    dy: Tensor,
    dr: Tensor | None,
    d_total: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `mean_read` in q, k, gate and total."""
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        found = kernels.backward(
            *(x.contiguous() for x in (q, k, gate, vectors, count, dy)), None if dr is None else dr.contiguous(),
            d_total.contiguous(), mask, boundaries, unit_queries=unit_queries, unit_keys=unit_keys,
        )  # fmt: skip
    return found.q, found.k, found.gate.to(gate.dtype), found.total


@mean_read_backward.register_fake
def _(
    q: Tensor, k: Tensor, gate: Tensor, vectors: Tensor, count: Tensor, dy: Tensor, dr: Tensor | None,
    d_total: Tensor, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), gate.new_empty(gate.shape), d_total.new_empty(d_total.shape)


def _setup_mean_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gate, total, count, mask, boundaries, unit_queries, unit_keys, return_correction, _ = inputs
    ctx.save_for_backward(q, k, gate, output[4], count, mask)
    ctx.options = (boundaries, unit_queries, unit_keys)
    ctx.return_correction, ctx.total = return_correction, total.shape
    ctx.mark_non_differentiable(output[3], output[4])
    ctx.set_materialize_grads(False)


def _mean_backward(
    ctx: Any, dy: Tensor | None, dr: Tensor | None, d_total: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    q, k, gate, vectors, count, mask = ctx.saved_tensors
    found = torch.ops.ccq.mean_read_backward(
        q,
        k,
        gate,
        vectors,
        count,
        torch.zeros_like(q) if dy is None else dy,
        dr if ctx.return_correction else None,
        vectors.new_zeros(ctx.total) if d_total is None else d_total,
        mask,
        *ctx.options,
    )
    return *found, *(None,) * 7


mean_read.register_autograd(_mean_backward, setup_context=_setup_mean_context)


@custom_operator(
    "inverse_trace",
    schema="(Tensor k, Tensor sums, Tensor count, Tensor? mask, int[]? boundaries, bool unit_keys, float floor)"
    " -> (Tensor, Tensor)",
)
def inverse_trace(
    k: Tensor,
    sums: Tensor,
    count: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_keys: bool,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """1 / max(tr Sigma, floor) [B, T, H] float32, zero at a first key and at padding, and for the backward pass the
    sums before each block of keys. sums [N, H, D + 1]: of the keys before the call, and of their squared lengths.
    """
    kernels = _kernels(k)
    with torch.cuda.device_of(k):
        found: tuple[Tensor, Tensor] = kernels.inverse_trace(
            *(x.contiguous() for x in (k, sums, count)), mask, boundaries, unit_keys=unit_keys, floor=floor
        )
    return found


@inverse_trace.register_fake
def _(
    k: Tensor,
    sums: Tensor,
    count: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_keys: bool,
    floor: float,
) -> tuple[Tensor, Tensor]:
    heads, size = k.shape[2:]
    before = (block_count(k, boundaries), heads, size + 1)
    return k.new_empty(k.shape[:3], dtype=torch.float32), k.new_empty(before, dtype=torch.float32)


@custom_operator(
    "inverse_trace_backward",
    schema="(Tensor d_inverse, Tensor inverse, Tensor k, Tensor before, Tensor count, Tensor? mask, "
    "int[]? boundaries, bool unit_keys, float floor) -> (Tensor, Tensor)",
)
def inverse_trace_backward(
    d_inverse: Tensor,
    inverse: Tensor,
    k: Tensor,
    before: Tensor,
    count: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_keys: bool,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of `inverse_trace` in k and sums."""
    kernels = _kernels(k)
    with torch.cuda.device_of(k):
        found: tuple[Tensor, Tensor] = kernels.inverse_trace_backward(
            *(x.contiguous() for x in (d_inverse, inverse, k, before, count)), mask, boundaries,
            unit_keys=unit_keys, floor=floor,
        )  # fmt: skip
    return found


@inverse_trace_backward.register_fake
def _(
    d_inverse: Tensor, inverse: Tensor, k: Tensor, before: Tensor, count: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return k.new_empty(k.shape), before.new_empty((count.shape[0], *before.shape[1:]))


def _setup_trace_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    k, _, count, mask, *ctx.options = inputs
    ctx.save_for_backward(output[0], k, output[1], count, mask)
    ctx.mark_non_differentiable(output[1])


def _trace_backward(ctx: Any, d_inverse: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, mask = ctx.saved_tensors
    found = torch.ops.ccq.inverse_trace_backward(d_inverse, *saved, mask, *ctx.options)
    return *found, *(None,) * 5


inverse_trace.register_autograd(_trace_backward, setup_context=_setup_trace_context)
