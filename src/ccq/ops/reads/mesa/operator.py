"""The kernels of mesa as operators of torch, with gradients and with shapes for the compiler.

Nothing here imports triton before an operator runs. Operators take and return plain tensors, and never None.

| operator | what it is |
| --- | --- |
| ccq::mesa_read | the solutions of the ridge systems, differentiable |
| ccq::mesa_read_backward | their gradients |
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
    from ccq.ops.reads.mesa import kernels

    return kernels


@custom_operator(
    "mesa_read",
    schema="(Tensor q, Tensor k, Tensor ridge, Tensor log_decay, Tensor? second_moment, Tensor? mask, "
    "int[]? boundaries, int steps, bool unit_queries, bool unit_keys, bool wide)"
    f" -> ({', '.join(['Tensor'] * 6)})",
)
def mesa_read(
    q: Tensor,
    k: Tensor,
    ridge: Tensor,
    log_decay: Tensor,
    second_moment: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    steps: int,
    unit_queries: bool,
    unit_keys: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    """Solution (float32 with `wide`), second moment behind each sequence, and for the backward pass four fields of
    `Sums`. A second moment of None is zero: where training starts.
    """
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        solution, sums = kernels.forward(
            *(x.contiguous() for x in (q, k, ridge, log_decay)),
            None if second_moment is None else second_moment.contiguous(), mask, boundaries, steps=steps,
            unit_queries=unit_queries, unit_keys=unit_keys, wide=wide,
        )  # fmt: skip
    return solution, sums.last_moment, *sums[:4]


@mesa_read.register_fake
def _(
    q: Tensor,
    k: Tensor,
    ridge: Tensor,
    log_decay: Tensor,
    second_moment: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    steps: int,
    unit_queries: bool,
    unit_keys: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    sums = empty_sums(q, boundaries, centred=False)
    return q.new_empty(q.shape, dtype=torch.float32 if wide else q.dtype), sums[6], *sums[:4]


@custom_operator(
    "mesa_read_backward",
    schema="(Tensor q, Tensor k, Tensor ridge, Tensor[] sums, Tensor solution, Tensor dy, Tensor? d_moment, "
    "Tensor? mask, int[]? boundaries, int steps, bool unit_queries, bool unit_keys, bool state_gradients)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def mesa_read_backward(
    q: Tensor,
    k: Tensor,
    ridge: Tensor,
    sums: Sequence[Tensor],
    solution: Tensor,
    dy: Tensor,
    d_moment: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    steps: int,
    unit_queries: bool,
    unit_keys: bool,
    state_gradients: bool,
) -> tuple[Tensor, ...]:
    """The gradients of `mesa_read` in q, k, ridge, log_decay and (else empty) the second moment."""
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        found: tuple[Tensor, ...] = kernels.backward(
            *(x.contiguous() for x in (q, k, ridge)), sums, solution, dy.contiguous(),
            None if d_moment is None else d_moment.contiguous(), mask, boundaries, steps=steps,
            unit_queries=unit_queries, unit_keys=unit_keys, state_gradients=state_gradients,
        )  # fmt: skip
    return found


@mesa_read_backward.register_fake
def _(
    q: Tensor, k: Tensor, ridge: Tensor, sums: Sequence[Tensor], solution: Tensor, *options: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, _, heads, size = q.shape
    boundaries, state_gradients = options[3], options[-1]
    sequences = rows if boundaries is None else len(boundaries) - 1
    moment = ridge.new_empty((sequences, heads, size, size) if state_gradients else (0, heads, size, size))
    return *(x.new_empty(x.shape) for x in (q, k, ridge, sums[0])), moment


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, ridge, *_, mask, boundaries, steps, unit_queries, unit_keys, _ = inputs
    ctx.save_for_backward(q, k, ridge, *output[2:], output[0], mask)
    ctx.options = boundaries, steps, unit_queries, unit_keys
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, d_moment: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, ridge, *sums, solution, mask = ctx.saved_tensors
    state_gradients = ctx.needs_input_grad[4]
    *found, d_first = torch.ops.ccq.mesa_read_backward(
        q,
        k,
        ridge,
        sums,
        solution,
        torch.zeros_like(solution) if dy is None else dy,
        d_moment,
        mask,
        *ctx.options,
        state_gradients,
    )
    return *found, d_first if state_gradients else None, *(None,) * 6


mesa_read.register_autograd(_backward, setup_context=_setup_context)
