"""What the read steps of this folder share: their arguments in one form, and sums over the tokens so far.

Legend: B rows, N sequences, T tokens, H heads, D key size per head, C chunk length, P chunks in all, X any size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ccq.ops.checks import (
    accumulation_dtype,
    check_backend,
    check_device,
    check_input,
    check_sequences,
    check_shape,
    check_state,
)
from ccq.ops.layout import ChunkLayout
from ccq.ops.query import l2_normalize
from ccq.ops.query.arguments import check_gate, check_normalize, check_query_dtype
from ccq.ops.query.chunked import CHUNK


class QueryResult(NamedTuple):
    """What a read step of this folder returns."""

    query: Tensor
    """[B, T, H, D], in the dtype of q or as asked for."""
    correction: Tensor | None
    """[B, T, H, D] float32 (float64 for float64 input): the query is what it was before, minus gate * correction. None
    unless asked for, and not given by backend "reference".
    """
    statistics: Any
    """The state after the last token of each sequence, of the kind that the read step takes."""


class ReadOptions(TypedDict, total=False):
    """What every read step of this folder takes beside q, k and gate, which are [B, T, H, D], [B, T, H, D], and [B, T,
    H] or one number, as in `ccq.ops.query.curvature_conditioned_query`. Errors are as there, too.
    """

    statistics: Any
    """The state that an earlier call returned; None starts at nothing."""
    cu_seqlens: Tensor | None
    """[N + 1] boundaries of packed documents, with B = 1; the state then has one entry a document."""
    mask: Tensor | None
    """[B, T], 1 = real token. Padding is not counted, is not corrected, and has no gradient."""
    normalize: bool | str
    """L2-normalise q and k (True, the default), "queries" or "keys" only, or neither (False)."""
    query_dtype: torch.dtype | None
    """Of the query that comes back: that of q (None), or float32 (float64 for float64 input)."""
    return_correction: bool
    """Also return the correction (the default). Training has no use for it, and it is as large as q in float32."""
    backend: str
    """"reference" is the loop over tokens that defines the result; "auto" is the fastest for device and input."""


class ReadInputs(NamedTuple):
    """Arguments of a read step, checked, normalised as asked for, and empty where there is padding."""

    query: Tensor
    """[B, T, H, D] float32 (float64 for float64 input)"""
    key: Tensor
    """[B, T, H, D], same dtype"""
    gate: Tensor
    """[B, T, H, 1], same dtype"""
    sequences: int
    """N"""
    mask: Tensor | None
    """[B, T] bool"""
    cu_seqlens: Tensor | None
    boundaries: list[int] | None
    padded_query: Tensor | None
    """[B, T, H, D]: the query to return where there is padding; only with a mask."""
    dtype: torch.dtype
    """Of q."""
    query_dtype: torch.dtype
    """Of the query to return."""

    @property
    def layout(self) -> ChunkLayout:
        return ChunkLayout.of(self.query, self.boundaries, CHUNK)

    def finish(self, query: Tensor) -> Tensor:
        """[B, T, H, D] -> the same in the dtype asked for, with padding as it is to come back."""
        if self.mask is not None and self.padded_query is not None:
            query = torch.where(self.mask[..., None, None], query, self.padded_query)
        return query.to(self.query_dtype)

    def detach(self) -> ReadInputs:
        return self._replace(query=self.query.detach(), key=self.key.detach(), gate=self.gate.detach())


def read_inputs(
    q: Tensor,
    k: Tensor,
    gate: Tensor | float,
    *,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
    backend: str = "auto",
    backends: tuple[str, ...] = ("auto", "reference", "torch"),
) -> ReadInputs:
    """Check the arguments and prepare them; `backends` are those that the read step has."""
    check_backend(backend, backends)
    check_input("q", q, ("B", "T", "H", "D"))
    check_input("k", k, tuple(q.shape), q)
    gate = check_gate(gate, q)
    query_dtype = check_query_dtype(query_dtype, q)
    unit_queries, unit_keys = check_normalize(normalize)
    sequences, real, boundaries = check_sequences(q, cu_seqlens, mask)
    kept = accumulation_dtype(q.dtype)
    gate, dtype, padded_query = gate.to(kept).unsqueeze(-1), q.dtype, None
    if real is not None:
        padded_query = l2_normalize(q.detach()) if unit_queries else q.detach().to(kept)
        # Emptied before anything is computed: whatever stands in the padding, NaN included, must not spread.
        q, k, gate = (torch.where(real[..., None, None], x, 0) for x in (q, k, gate))
    q = l2_normalize(q) if unit_queries else q.to(kept)
    k = l2_normalize(k) if unit_keys else k.to(kept)
    return ReadInputs(q, k, gate, sequences, real, cu_seqlens, boundaries, padded_query, dtype, query_dtype)


def check_number(name: str, value: int) -> int:
    """A whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def check_read_state(statistics: Any, kind: type, shapes: dict[str, tuple[int, ...]], like: Tensor) -> None:
    """`statistics` must be of the read step's `kind`, with these shapes of its fields; counts are [N] int64."""
    if not isinstance(statistics, kind):
        raise TypeError(
            f"statistics must be a {kind.__name__}, as an earlier call of this read step returned it; got "
            f"{type(statistics).__name__}"
        )
    for name, shape in shapes.items():
        field = getattr(statistics, name)
        if name != "count":
            check_state(f"statistics.{name}", field, shape, like)
            continue
        if field.dtype != torch.int64:
            raise TypeError(f"statistics.count must be int64, got {field.dtype}")
        check_shape("statistics.count", field, shape)
        check_device("statistics.count", field, like)


def tokens_seen(inputs: ReadInputs, count: Tensor) -> Tensor:
    """t: how many keys each token sees, its own included, at least 1; count [N] of those before -> [B, T, 1]."""
    layout = inputs.layout
    seen = layout.positions(count, inputs.mask).clamp(min=1).to(inputs.query.dtype)
    return layout.merge_scalar(seen)


def running_sum(x: Tensor, initial: Tensor, inputs: ReadInputs) -> tuple[Tensor, Tensor]:
    """x [B, T, H, X], initial [N, H, X] -> the sum up to and with each token [B, T, H, X], and after the last [N, H,
    X].
    """
    layout = inputs.layout
    inside = layout.split(x).cumsum(-2)
    before, last = scan(layout, inside[:, :, -1], initial)
    return layout.merge(inside + before.unsqueeze(-2)), last


def scan(layout: ChunkLayout, update: Tensor, initial: Tensor, decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S <- decay S + update from chunk to chunk, differentiable: update [P, ...], decay [P, ...] (1 if None), initial
    [N, ...] -> the state before each chunk [P, ...], and the last one [N, ...].
    """
    running = layout.states_in(initial)
    if not layout.active:
        return update, layout.states_out(running)
    before = []
    # Split once: a slice a step would make autograd fill zeros for each.
    decays = (None,) * len(layout.active) if decay is None else decay.split(layout.active)
    for factor, part in zip(decays, update.split(layout.active), strict=True):
        going_on = running[: len(part)]
        before.append(going_on)
        new = part + (going_on if factor is None else factor * going_on)
        running = new if len(part) == len(running) else torch.cat((new, running[len(part) :]))
    return torch.cat(before), layout.states_out(running)
