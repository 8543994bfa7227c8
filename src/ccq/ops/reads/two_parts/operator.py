"""Query and correction apart as an operator of torch, with gradients and with shapes for the compiler.

| operator | what it is |
| --- | --- |
| ccq::read_in_parts | q and lambda Sigma q, differentiable |
| ccq::read_in_parts_backward | their gradients |
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
    from ccq.ops.reads.two_parts import kernels

    return kernels


@custom_operator(
    "read_in_parts",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor? second_moment, Tensor total, Tensor count, Tensor? mask, "
    "int[]? boundaries, bool unit_queries, bool unit_keys)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def read_in_parts(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    total: Tensor,
    count: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
) -> tuple[Tensor, ...]:
    """Both parts, second moment, total, count, and for the backward pass what `ccq::read_step` keeps for it. A second
    moment of None is zero.
    """
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        q, k, gate, total, count = (x.contiguous() for x in (q, k, gate, total, count))
        done = kernels.forward(
            q, k, gate, None if second_moment is None else second_moment.contiguous(), total, count, mask, boundaries,
            unit_queries=unit_queries, unit_keys=unit_keys,
        )  # fmt: skip
    _, last, *rest = done.saved
    return done.kept, done.removed, done.second_moment, last, done.count, *rest


@read_in_parts.register_fake
def _(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor | None, total: Tensor, count: Tensor,
    mask: Tensor | None, boundaries: Sequence[int] | None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    heads, size = q.shape[2:]
    kept = torch.float32
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape),
        total.new_empty((*total.shape, size)),
        total.new_empty(total.shape),
        count.new_empty(count.shape),
        q.new_empty(q.shape[:3], dtype=kept),
        q.new_empty((block_count(q, boundaries), heads, size), dtype=kept),
        q.new_empty(q.shape[:3], dtype=kept),
    )


@custom_operator(
    "read_in_parts_backward",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor? second_moment, Tensor count, Tensor last_total, "
    "Tensor reciprocal, Tensor vectors, Tensor mean, Tensor d_kept, Tensor d_removed, Tensor? d_moment, "
    "Tensor? d_total, Tensor? mask, int[]? boundaries, bool unit_queries, bool unit_keys, bool state_gradients)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def read_in_parts_backward(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    count: Tensor,
    last_total: Tensor,
    reciprocal: Tensor,
    vectors: Tensor,
    mean: Tensor,
    d_kept: Tensor,
    d_removed: Tensor,
    d_moment: Tensor | None,
    d_total: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    state_gradients: bool,
) -> tuple[Tensor, ...]:
    """The gradients of `read_in_parts` in q, k, gate and (else empty) second_moment and total."""
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        q, k, gate, count, d_kept, d_removed = (x.contiguous() for x in (q, k, gate, count, d_kept, d_removed))
        saved = kernels.Kept(None, last_total, reciprocal, vectors, mean)
        found = kernels.backward(
            q, k, gate, None if second_moment is None else second_moment.contiguous(), count, saved, d_kept, d_removed,
            None if d_moment is None else d_moment.contiguous(),
            torch.zeros_like(last_total) if d_total is None else d_total.contiguous(), mask, boundaries,
            unit_queries=unit_queries, unit_keys=unit_keys, state_gradients=state_gradients,
        )  # fmt: skip
    return found._replace(gate=found.gate.to(gate.dtype))


@read_in_parts_backward.register_fake
def _(
    q: Tensor, k: Tensor, gate: Tensor, second_moment: Tensor | None, count: Tensor, last_total: Tensor, *options: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = (x.new_empty(x.shape) for x in (q, k, gate))
    shapes = ((*last_total.shape, q.shape[-1]), last_total.shape)
    return *rows, *(last_total.new_empty(shape if options[-1] else 0) for shape in shapes)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gate, second_moment, _, count, mask, *ctx.options = inputs
    *_, last_total, last_count, reciprocal, vectors, mean = output
    ctx.save_for_backward(q, k, gate, second_moment, count, last_total, reciprocal, vectors, mean, mask)
    ctx.mark_non_differentiable(last_count, reciprocal, vectors, mean)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, d_kept: Tensor | None, d_removed: Tensor | None, d_moment: Tensor | None, d_total: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    *saved, mask = ctx.saved_tensors
    state_gradients = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    *rows, d_moment, d_total = torch.ops.ccq.read_in_parts_backward(
        *saved,
        *(torch.zeros_like(saved[0]) if x is None else x for x in (d_kept, d_removed)),
        d_moment,
        d_total,
        mask,
        *ctx.options,
        state_gradients,
    )
    states = (x if needed else None for x, needed in zip((d_moment, d_total), ctx.needs_input_grad[3:5], strict=True))
    return *rows, *states, *(None,) * 5


read_in_parts.register_autograd(_backward, setup_context=_setup_context)
