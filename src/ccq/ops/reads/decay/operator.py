"""The kernels of ccq-decay as operators of torch, with gradients and with shapes for the compiler.

Nothing here imports triton before an operator runs. Operators take and return plain tensors, and never None: a
correction that was not asked for is an empty tensor.

| operator | what it is |
| --- | --- |
| ccq::decay_read | the read step with decayed statistics, differentiable |
| ccq::decay_read_backward | its gradients |
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ccq.ops.operators import custom_operator
from ccq.ops.query.fused import check_device
from ccq.ops.reads.decayed.operator import empty_sums


def _kernels(q: Tensor) -> ModuleType:
    """The module of the kernels, once it is sure that they can run on the device of q."""
    check_device(q)
    from ccq.ops.reads.decayed import kernels

    return kernels


@custom_operator(
    "decay_read",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor log_decay, Tensor? second_moment, Tensor? total, Tensor? weight, "
    "Tensor? mask, int[]? boundaries, bool unit_queries, bool unit_keys, bool return_correction, bool wide)"
    f" -> ({', '.join(['Tensor'] * 13)})",
)
def decay_read(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    log_decay: Tensor,
    second_moment: Tensor | None,
    total: Tensor | None,
    weight: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    """Query (float32 with `wide`), correction (or an empty tensor); second moment, total and weight behind each
    sequence; and for the backward pass the other fields of `Sums`, mean scores and weights. Statistics of None, all or
    none, are zero: where training starts.
    """
    kernels = _kernels(q)
    state = None
    if second_moment is not None and total is not None and weight is not None:
        state = kernels.State(*(x.contiguous() for x in (second_moment, total, weight)))
    with torch.cuda.device_of(q):
        done = kernels.forward(
            *(x.contiguous() for x in (q, k, gate, log_decay)), state, mask, boundaries, unit_queries=unit_queries,
            unit_keys=unit_keys, return_correction=return_correction, wide=wide,
        )  # fmt: skip
    correction = q.new_empty(0, dtype=torch.float32) if done.correction is None else done.correction
    return done.query, correction, *done.sums[6:], *done.sums[:6], done.mean, done.seen


@decay_read.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    log_decay: Tensor,
    second_moment: Tensor | None,
    total: Tensor | None,
    weight: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    sums = empty_sums(q, boundaries, centred=True)
    query = q.new_empty(q.shape, dtype=torch.float32 if wide else q.dtype)
    correction = q.new_empty(q.shape if return_correction else 0, dtype=torch.float32)
    per_token = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return query, correction, *sums[6:], *sums[:6], *per_token


@custom_operator(
    "decay_read_backward",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor[] sums, Tensor mean, Tensor seen, Tensor dy, Tensor? dr, "
    "Tensor? d_moment, Tensor? d_total, Tensor? d_weight, Tensor? mask, int[]? boundaries, bool unit_queries, "
    "bool unit_keys, bool state_gradients) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def decay_read_backward(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    sums: Sequence[Tensor],
    mean: Tensor,
    seen: Tensor,
    dy: Tensor,
    dr: Tensor | None,
    d_moment: Tensor | None,
    d_total: Tensor | None,
    d_weight: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    state_gradients: bool,
) -> tuple[Tensor, ...]:
    """The gradients of `decay_read` in q, k, gate, log_decay and (else empty) the statistics."""
    kernels = _kernels(q)
    kept = kernels.Sums(*sums)
    given = (d_moment, d_total, d_weight)
    d_last = None
    if any(x is not None for x in given):
        d_last = kernels.State(
            *(torch.zeros_like(last) if x is None else x.contiguous() for x, last in zip(given, kept[6:], strict=True))
        )
    with torch.cuda.device_of(q):
        found = kernels.backward(
            *(x.contiguous() for x in (q, k, gate)), kept, mean, seen, dy.contiguous(),
            None if dr is None else dr.contiguous(), d_last, mask, boundaries, unit_queries=unit_queries,
            unit_keys=unit_keys, state_gradients=state_gradients,
        )  # fmt: skip
    return found.q, found.k, found.gate.to(gate.dtype), found.log_decay, *found.state


@decay_read_backward.register_fake
def _(
    q: Tensor, k: Tensor, gate: Tensor, sums: Sequence[Tensor], mean: Tensor, *options: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = (x.new_empty(x.shape) for x in (q, k, gate, mean))
    wanted = slice(None) if options[-1] else slice(0)
    return *rows, *(x.new_empty(x[wanted].shape) for x in sums[6:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gate, *_, mask, boundaries, unit_queries, unit_keys, return_correction, _ = inputs
    last, (*before, mean, seen) = output[2:5], output[5:]
    ctx.save_for_backward(q, k, gate, *before, *last, mean, seen, mask)
    ctx.options = boundaries, unit_queries, unit_keys
    ctx.return_correction = return_correction
    ctx.mark_non_differentiable(*output[5:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,
    dy: Tensor | None,
    dr: Tensor | None,
    d_moment: Tensor | None,
    d_total: Tensor | None,
    d_weight: Tensor | None,
    *_: Any,
) -> tuple[Tensor | None, ...]:
    q, k, gate, *sums, mean, seen, mask = ctx.saved_tensors
    wanted = ctx.needs_input_grad[4:7]
    *rows, d_moment, d_total, d_weight = torch.ops.ccq.decay_read_backward(
        q,
        k,
        gate,
        sums,
        mean,
        seen,
        torch.zeros_like(q) if dy is None else dy,
        dr if ctx.return_correction else None,
        d_moment,
        d_total,
        d_weight,
        mask,
        *ctx.options,
        any(wanted),
    )
    states = (x if needed else None for x, needed in zip((d_moment, d_total, d_weight), wanted, strict=True))
    return *rows, *states, *(None,) * 6


decay_read.register_autograd(_backward, setup_context=_setup_context)
