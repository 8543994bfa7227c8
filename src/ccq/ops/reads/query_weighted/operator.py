"""The kernels of the query-weighted read step as operators of torch, with gradients and with shapes for the compiler.

| operator | what it is |
| --- | --- |
| ccq::query_weighted_read | the read step, differentiable |
| ccq::query_weighted_read_backward | its gradients |
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

MAX_SIZE = 128
"""The largest D of the kernels."""
MAX_LANDMARKS = 16
"""The largest R of the kernels."""


def _kernels(x: Tensor) -> ModuleType:
    """The module of the kernels, once it is sure that they can run on the device of x."""
    check_device(x)
    from ccq.ops.reads.query_weighted import kernels

    return kernels


@custom_operator(
    "query_weighted_read",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor landmarks, Tensor totals, Tensor shares, Tensor? mask, "
    "int[]? boundaries, bool unit_queries, bool unit_keys, bool return_correction, bool wide)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def query_weighted_read(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    landmarks: Tensor,
    totals: Tensor,
    shares: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query (float32 with `wide`), correction (or an empty tensor), totals, shares, and for the backward pass both
    before each block of keys; landmarks [H, R, D].
    """
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        done = kernels.forward(
            *(x.contiguous() for x in (q, k, gate, landmarks, totals, shares)), mask, boundaries,
            unit_queries=unit_queries, unit_keys=unit_keys, return_correction=return_correction, wide=wide,
        )  # fmt: skip
    query, correction, *rest = done
    totals, shares, totals_before, shares_before = rest
    correction = q.new_empty(0, dtype=torch.float32) if correction is None else correction
    return query, correction, totals, shares, totals_before, shares_before


@query_weighted_read.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    landmarks: Tensor,
    totals: Tensor,
    shares: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from ccq.ops.reads.query_weighted import kernels

    before = (block_count(q, boundaries, kernels.block_size(q)), *landmarks.shape)
    return (
        q.new_empty(q.shape, dtype=torch.float32 if wide else q.dtype),
        q.new_empty(q.shape if return_correction else 0, dtype=torch.float32),
        totals.new_empty(totals.shape),
        shares.new_empty(shares.shape),
        q.new_empty(before, dtype=torch.float32),
        q.new_empty(before[:-1], dtype=torch.float32),
    )


@custom_operator(
    "query_weighted_read_backward",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor landmarks, Tensor totals_before, Tensor shares_before, "
    "Tensor dy, Tensor? dr, Tensor d_totals, Tensor d_shares, Tensor? mask, int[]? boundaries, bool unit_queries, "
    "bool unit_keys) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def query_weighted_read_backward(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    landmarks: Tensor,
    totals_before: Tensor,
    shares_before: Tensor,
    dy: Tensor,
    dr: Tensor | None,
    d_totals: Tensor,
    d_shares: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `query_weighted_read` in q, k, gate, landmarks, totals and shares."""
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        found = kernels.backward(
            *(x.contiguous() for x in (q, k, gate, landmarks, totals_before, shares_before, dy)),
            None if dr is None else dr.contiguous(), d_totals.contiguous(), d_shares.contiguous(), mask, boundaries,
            unit_queries=unit_queries, unit_keys=unit_keys,
        )  # fmt: skip
    d_gate, d_landmarks = found.gate.to(gate.dtype), found.landmarks.to(landmarks.dtype)
    return found.q, found.k, d_gate, d_landmarks, found.totals, found.shares


@query_weighted_read_backward.register_fake
def _(
    q: Tensor, k: Tensor, gate: Tensor, landmarks: Tensor, totals_before: Tensor, shares_before: Tensor, dy: Tensor,
    dr: Tensor | None, d_totals: Tensor, d_shares: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (q, k, gate, landmarks, d_totals, d_shares))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gate, landmarks, totals, shares, mask, *ctx.options, ctx.return_correction, _ = inputs
    ctx.save_for_backward(q, k, gate, landmarks, *output[4:], mask)
    ctx.states = totals.shape, shares.shape
    ctx.mark_non_differentiable(*output[4:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dr: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, mask = ctx.saved_tensors
    states = (
        saved[-1].new_zeros(shape) if gradient is None else gradient
        for gradient, shape in zip(gradients[:2], ctx.states, strict=True)
    )
    found = torch.ops.ccq.query_weighted_read_backward(
        *saved,
        torch.zeros_like(saved[0]) if dy is None else dy,
        dr if ctx.return_correction else None,
        *states,
        mask,
        *ctx.options,
    )
    return *found, *(None,) * 6


query_weighted_read.register_autograd(_backward, setup_context=_setup_context)
