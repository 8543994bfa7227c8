"""The kernels of comba as operators of torch, with gradients and with shapes for the compiler.

| operator | what it is |
| --- | --- |
| ccq::comba_read | the read step, differentiable |
| ccq::comba_read_backward | its gradients |
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ccq.ops.operators import custom_operator
from ccq.ops.query.fused import check_device


def _kernels(x: Tensor) -> ModuleType:
    """The module of the kernels, once it is sure that they can run on the device of x."""
    check_device(x)
    from ccq.ops.reads.comba import kernels

    return kernels


@custom_operator(
    "comba_read",
    schema="(Tensor q, Tensor k, Tensor strength, Tensor? mask, bool unit_queries, bool unit_keys, "
    "bool return_correction, bool wide) -> (Tensor, Tensor)",
)
def comba_read(
    q: Tensor,
    k: Tensor,
    strength: Tensor,
    mask: Tensor | None,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Query (float32 with `wide`) and correction (or an empty tensor); strength [H]."""
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        done = kernels.forward(
            *(x.contiguous() for x in (q, k, strength)), mask, unit_queries=unit_queries, unit_keys=unit_keys,
            return_correction=return_correction, wide=wide,
        )  # fmt: skip
    return done.query, q.new_empty(0, dtype=torch.float32) if done.correction is None else done.correction


@comba_read.register_fake
def _(
    q: Tensor,
    k: Tensor,
    strength: Tensor,
    mask: Tensor | None,
    unit_queries: bool,
    unit_keys: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    query = q.new_empty(q.shape, dtype=torch.float32 if wide else q.dtype)
    return query, q.new_empty(q.shape if return_correction else 0, dtype=torch.float32)


@custom_operator(
    "comba_read_backward",
    schema="(Tensor q, Tensor k, Tensor strength, Tensor? mask, Tensor dy, Tensor? dr, bool unit_queries, "
    "bool unit_keys) -> (Tensor, Tensor, Tensor)",
)
def comba_read_backward(
    q: Tensor,
    k: Tensor,
    strength: Tensor,
    mask: Tensor | None,
    dy: Tensor,
    dr: Tensor | None,
    unit_queries: bool,
    unit_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `comba_read` in q, k and strength."""
    kernels = _kernels(q)
    with torch.cuda.device_of(q):
        found = kernels.backward(
            *(x.contiguous() for x in (q, k, strength)), mask, dy.contiguous(),
            None if dr is None else dr.contiguous(), unit_queries=unit_queries, unit_keys=unit_keys,
        )  # fmt: skip
    return found.q, found.k, found.strength.to(strength.dtype)


@comba_read_backward.register_fake
def _(q: Tensor, k: Tensor, strength: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), strength.new_empty(strength.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, strength, mask, ctx.unit_queries, ctx.unit_keys, ctx.return_correction, _ = inputs
    ctx.save_for_backward(q, k, strength, mask)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dr: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, strength, mask = ctx.saved_tensors
    found = torch.ops.ccq.comba_read_backward(
        q,
        k,
        strength,
        mask,
        torch.zeros_like(q) if dy is None else dy,
        dr if ctx.return_correction else None,
        ctx.unit_queries,
        ctx.unit_keys,
    )
    return *found, *(None,) * 5


comba_read.register_autograd(_backward, setup_context=_setup_context)
