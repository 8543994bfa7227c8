"""The Triton kernels as operators of torch, with gradients and with shapes for the compiler.

Nothing here imports triton before an operator runs. Operators take and return plain tensors, and never None: a
correction that was not asked for is an empty tensor.

| operator | what it is |
| --- | --- |
| ccq::read_step | the read step over any number of tokens, differentiable |
| ccq::read_step_backward | its gradients |
| ccq::read_token | one token of every sequence, new statistics |
| ccq::read_token_ | the same, packed statistics overwritten: their addresses stay, as CUDA graphs want it |
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ccq.ops.operators import TRITON_INSTALLED, custom_operator
from ccq.ops.query.gate import LinearGate
from ccq.ops.query.statistics import KeyStatistics, PackedKeyStatistics

MAX_SIZE = 256
"""The largest D of the kernels."""


def is_supported(q: Tensor, max_size: int = MAX_SIZE) -> bool:
    """Whether the kernels, of which some take smaller heads only, take input like q."""
    return q.dtype != torch.float64 and q.shape[-1] <= max_size


def check_supported(q: Tensor, max_size: int = MAX_SIZE) -> None:
    """Refuse what the kernels do not take."""
    if not TRITON_INSTALLED:
        raise ImportError(
            "backend 'triton' needs the package triton: pip install 'ccq-attention[gpu]', or take backend='torch'"
        )
    if q.dtype == torch.float64:
        raise TypeError(
            "backend 'triton' takes float32, float16 or bfloat16, got float64; take backend='torch' for float64"
        )
    if q.shape[-1] > max_size:
        raise ValueError(f"backend 'triton' takes D up to {max_size}, got {q.shape[-1]}; take backend='torch'")


def _kernels() -> ModuleType:
    from ccq.ops.query import kernels

    return kernels


def _padding() -> ModuleType:
    from ccq.ops.query import padding

    return padding


def check_device(q: Tensor) -> None:
    """Refuse tensors on a CPU, unless Triton's interpreter is on."""
    from ccq.ops.query import step

    if not q.is_cuda and not step.interpreted():
        raise RuntimeError(
            f"backend 'triton' needs tensors on a GPU, got {q.device}; on a CPU it runs in Triton's interpreter only: "
            "set the environment variable TRITON_INTERPRET=1 before the first call, or take backend='torch'"
        )


def _step(q: Tensor) -> ModuleType:
    """The module of the one-token kernel, once it is sure that kernels can run on the device of q."""
    check_device(q)
    from ccq.ops.query import step

    return step


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x.contiguous() for x in tensors]


_INPUTS = "Tensor q, Tensor k, Tensor gate, "
_OPTIONS = "bool unit_queries, bool unit_keys, bool centred, "
_RESULTS = "bool return_correction, bool wide"
_SEQUENCES = "Tensor? mask, int[]? boundaries, "


@custom_operator(
    "read_step",
    schema=f"({_INPUTS}Tensor? second_moment, Tensor? total, Tensor? count, {_SEQUENCES}{_OPTIONS}{_RESULTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def read_step(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    total: Tensor | None,
    count: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    """The read step. Query (float32 with `wide`), correction (or an empty tensor), second moment, total, count; and for
    the backward pass the reciprocal lengths of the queries, the totals before each group of keys, and the mean scores.

    Statistics of None are those before the first key: where training starts, and every layer would make zeros and keep
    them.
    """
    _step(q)
    kernels = _kernels()
    q, k, gate = _contiguous(q, k, gate)
    second_moment, total, count = (None if x is None else x.contiguous() for x in (second_moment, total, count))
    with torch.cuda.device_of(q):
        config = kernels.configuration(q.dtype, q.shape[-1], q.device)
        edges = None if boundaries is None else list(boundaries)
        plan = kernels.make_plan(q.shape[0], q.shape[1], mask, edges, config, q.device)
        done = kernels.forward(
            q, k, gate, second_moment, total, plan.nothing if count is None else count, plan, config,
            unit_queries=unit_queries, unit_keys=unit_keys, centred=centred, return_correction=return_correction,
            wide=wide,
        )  # fmt: skip
        if mask is not None:
            _padding().fill_outputs(mask, q, done.query, done.kept.correction, unit_queries)
        _, last_total, *rest = done.kept
        correction = q.new_empty(0, dtype=torch.float32) if done.kept.correction is None else done.kept.correction
        last_count = plan.length.clone() if count is None else count + plan.length
    return done.query, correction, done.second_moment, last_total, last_count, *rest


@read_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    total: Tensor | None,
    count: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    rows, tokens, heads, size = q.shape
    block = _kernels().configuration(q.dtype, int(size), q.device).block
    blocks: Any = rows * ((tokens + block - 1) // block)
    sequences = rows if boundaries is None else len(boundaries) - 1
    if boundaries is not None:
        blocks = sum((end - begin + block - 1) // block for begin, end in itertools.pairwise(boundaries))
    kept = torch.float32
    return (
        q.new_empty(q.shape, dtype=kept if wide else q.dtype),
        q.new_empty(q.shape if return_correction else 0, dtype=kept),
        q.new_empty((sequences, heads, size, size), dtype=kept),
        q.new_empty((sequences, heads, size), dtype=kept),
        q.new_empty(sequences, dtype=torch.int64),
        q.new_empty((rows, tokens, heads), dtype=kept),
        q.new_empty((blocks, heads, size), dtype=kept),
        q.new_empty((rows, tokens, heads), dtype=kept),
    )


@custom_operator(
    "read_step_backward",
    schema=f"({_INPUTS}Tensor? second_moment, Tensor? count, Tensor correction, Tensor last_total, Tensor reciprocal, "
    "Tensor vectors, Tensor mean, Tensor dy, Tensor? dr, Tensor? d_moment, Tensor? d_total, Tensor? beside, "
    f"{_SEQUENCES}{_OPTIONS}bool state_gradients) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def read_step_backward(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    count: Tensor | None,
    correction: Tensor,
    last_total: Tensor,
    reciprocal: Tensor,
    vectors: Tensor,
    mean: Tensor,
    dy: Tensor,
    dr: Tensor | None,
    d_moment: Tensor | None,
    d_total: Tensor | None,
    beside: Tensor | None,
    mask: Tensor | None,
    boundaries: Sequence[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    state_gradients: bool,
) -> tuple[Tensor, ...]:
    """The gradients of `read_step` in q, k, gate and (else empty) second_moment and total; `dr` needs the saved
    correction. beside, [B, T, H, D] in the dtype of k, is added to the gradient of k, also at padding.
    """
    _step(q)
    kernels = _kernels()
    q, k, gate, dy = _contiguous(q, k, gate, dy)
    second_moment, count = (None if x is None else x.contiguous() for x in (second_moment, count))
    # The kernels leave padding alone, and what comes from elsewhere stays there.
    added = beside.contiguous() if beside is not None and mask is None else None
    with torch.cuda.device_of(q):
        config = kernels.configuration(q.dtype, q.shape[-1], q.device)
        edges = None if boundaries is None else list(boundaries)
        plan = kernels.make_plan(q.shape[0], q.shape[1], mask, edges, config, q.device)
        kept = kernels.Kept(None if dr is None else correction, last_total, reciprocal, vectors, mean)
        gradients = kernels.backward(
            q, k, gate, dy, None if dr is None else dr.contiguous(),
            None if d_moment is None else d_moment.contiguous(),
            None if d_total is None else d_total.contiguous(),
            kept, second_moment, plan.nothing if count is None else count, plan, config, unit_queries=unit_queries,
            unit_keys=unit_keys, centred=centred, state_gradients=state_gradients, beside=added,
        )  # fmt: skip
        d_gate = gradients.gate.contiguous()
        if mask is not None:
            _padding().clear_gradients(mask, gradients.q, gradients.k, d_gate)
            if beside is not None:
                gradients.k.add_(beside)
    return gradients.q, gradients.k, d_gate.to(gate.dtype), gradients.second_moment, gradients.total


@read_step_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor | None,
    count: Tensor | None,
    correction: Tensor,
    last_total: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    rows = (x.new_empty(x.shape) for x in (q, k, gate))
    shapes = ((*last_total.shape, q.shape[-1]), last_total.shape)
    return *rows, *(last_total.new_empty(shape if options[-1] else 0) for shape in shapes)


def _compiles_ahead(q: Tensor) -> bool:
    """Whether kernels of the backward pass can be compiled while the forward pass runs: not for the tensors of a
    compiler, which hold nothing, and not into a capture.
    """
    return q.is_cuda and type(q) is Tensor and not torch.cuda.is_current_stream_capturing()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gate, second_moment, _, count, mask, boundaries, unit_queries, unit_keys, centred, return_correction, _ = (
        inputs
    )
    _, correction, _, last_total, last_count, reciprocal, vectors, mean = output
    ctx.save_for_backward(q, k, gate, second_moment, count, correction, last_total, reciprocal, vectors, mean, mask)
    ctx.boundaries, ctx.unit_queries, ctx.unit_keys, ctx.centred, ctx.return_correction = (
        boundaries,
        unit_queries,
        unit_keys,
        centred,
        return_correction,
    )
    ctx.mark_non_differentiable(last_count, reciprocal, vectors, mean)
    ctx.set_materialize_grads(False)
    if _compiles_ahead(q):
        _kernels().compile_backward_ahead(
            q.shape, q.dtype, q.device, gate.dtype, output[0].dtype, full=mask is None and boundaries is None,
            padded=mask is not None, has_moment=second_moment is not None, unit_queries=unit_queries,
            unit_keys=unit_keys, centred=centred, state_gradients=ctx.needs_input_grad[3] or ctx.needs_input_grad[4],
        )  # fmt: skip


def _backward(
    ctx: Any,
    dy: Tensor | None,
    dr: Tensor | None,
    d_moment: Tensor | None,
    d_total: Tensor | None,
    _count: None,
    _reciprocal: None,
    _vectors: None,
    _mean: None,
    beside: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    if beside is not None and all(x is None for x in (dy, dr, d_moment, d_total)):
        return None, beside, *(None,) * 11
    *saved, mask = ctx.saved_tensors
    state_gradients = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    *rows, d_moment, d_total = torch.ops.ccq.read_step_backward(
        *saved,
        torch.zeros_like(saved[0]) if dy is None else dy,
        dr if ctx.return_correction else None,
        d_moment,
        d_total,
        beside,
        mask,
        ctx.boundaries,
        ctx.unit_queries,
        ctx.unit_keys,
        ctx.centred,
        state_gradients,
    )
    states = (x if needed else None for x, needed in zip((d_moment, d_total), ctx.needs_input_grad[3:5], strict=True))
    return *rows, *states, *(None,) * 8


read_step.register_autograd(_backward, setup_context=_setup_context, passed=1)


@custom_operator(
    "read_token",
    schema=f"({_INPUTS}Tensor second_moment, Tensor total, Tensor count, {_OPTIONS}{_RESULTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def read_token(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor,
    total: Tensor,
    count: Tensor,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    """One token of every sequence, q and k [N, 1, H, D]: query, correction (or an empty tensor), new statistics."""
    step = _step(q)
    with torch.cuda.device_of(q):
        done = step.read_token(
            *_contiguous(q, k, gate, second_moment, total, count),
            unit_queries=unit_queries, unit_keys=unit_keys, centred=centred, return_correction=return_correction,
            wide=wide,
        )  # fmt: skip
    correction = done.correction if return_correction else q.new_empty(0, dtype=torch.float32)
    return done.query, correction, done.second_moment, done.total, done.count


@read_token.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    second_moment: Tensor,
    total: Tensor,
    count: Tensor,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, ...]:
    correction = q.new_empty(q.shape if return_correction else 0, dtype=torch.float32)
    query = q.new_empty(q.shape, dtype=torch.float32 if wide else q.dtype)
    return query, correction, *(x.new_empty(x.shape) for x in (second_moment, total, count))


@custom_operator(
    "read_token_",
    schema="(Tensor q, Tensor k, Tensor gate, Tensor? weight, Tensor? bias, Tensor? scale, "
    f"Tensor(a!) triangle, Tensor(b!) total, Tensor(c!) count, {_OPTIONS}{_RESULTS}) -> (Tensor, Tensor)",
)
def read_token_(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    triangle: Tensor,
    total: Tensor,
    count: Tensor,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    return_correction: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Query and correction as `read_token`, of packed (contiguous) statistics that are overwritten. With a weight the
    gate is the inputs of a `LinearGate`.
    """
    step = _step(q)
    with torch.cuda.device_of(q):
        q, k, gate = _contiguous(q, k, gate)
        linear = None
        if weight is not None and bias is not None:
            scale = None if scale is None else scale.contiguous()
            linear = LinearGate(gate, weight.contiguous(), bias.contiguous(), scale)
        query, correction = step.update_and_read_token(
            q, k, gate if linear is None else linear, triangle, total, count, unit_queries=unit_queries,
            unit_keys=unit_keys, centred=centred, return_correction=return_correction, wide=wide,
        )  # fmt: skip
    return query, q.new_empty(0, dtype=torch.float32) if correction is None else correction


@read_token_.register_fake
def _(q: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return_correction, wide = options[-2:]
    correction = q.new_empty(q.shape if return_correction else 0, dtype=torch.float32)
    return q.new_empty(q.shape, dtype=torch.float32 if wide else q.dtype), correction


def fused_curvature_conditioned_query(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    statistics: KeyStatistics | None,
    *,
    mask: Tensor | None,
    boundaries: list[int] | None,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    return_correction: bool,
    query_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, KeyStatistics, Tensor]:
    """The read step by Triton kernels; arguments and results as in `chunked_curvature_conditioned_query`, and
    statistics of None stand for those before the first key. Returns k too, as an output of the read step, whose kernel
    adds the gradient that reaches it to its own.

    Raises:
        ImportError: without triton.
        TypeError, ValueError: on float64 input, or D above 256.
        RuntimeError: on a CPU, unless Triton's interpreter is on.
    """
    check_supported(q)
    rows, tokens, heads, size = q.shape
    inputs = (q, k, gate, *(() if statistics is None else statistics))
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    options = (unit_queries, unit_keys, centred, return_correction, query_dtype != q.dtype)
    if tokens == 1 and mask is None and boundaries is None and not gradient:
        if statistics is None:
            statistics = KeyStatistics.zeros(rows, heads, size, dtype=q.dtype, device=q.device)
        query, correction, *last = torch.ops.ccq.read_token(q, k, gate, *statistics, *options)
    else:
        known = (None, None, None) if statistics is None else statistics
        query, correction, *last, k = read_step.with_passed(q, k, gate, *known, mask, boundaries, *options)
    return query, correction if return_correction else None, KeyStatistics(*last[:3]), k


def fused_update_and_read_(
    q: Tensor,
    k: Tensor,
    gate: Tensor | LinearGate,
    statistics: PackedKeyStatistics,
    *,
    unit_queries: bool,
    unit_keys: bool,
    centred: bool,
    return_correction: bool,
    query_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """One token, q and k [N, 1, H, D], with the statistics overwritten."""
    check_supported(q)
    gate_and_map = gate if isinstance(gate, LinearGate) else (gate, None, None, None)
    options = (unit_queries, unit_keys, centred, return_correction, query_dtype != q.dtype)
    query, correction = torch.ops.ccq.read_token_(q, k, *gate_and_map, *statistics, *options)
    return query, correction if return_correction else None
