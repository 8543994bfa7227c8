"""What every write rule returns and checks, so that any of them takes any read step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import (
    accumulation_dtype,
    check_device,
    check_input,
    check_sequences,
    check_state,
    short,
    values_can_be_read,
)


class WriteRuleResult(NamedTuple):
    """The output of a write rule."""

    output: Tensor
    """[B, T, H, V], in the dtype of v; zero at masked tokens."""
    state: Tensor
    """[N, H, D, V], float32 (float64 for float64 input): the memory after the last token of each sequence."""


class Sequences(NamedTuple):
    """How the rows of a call divide into sequences."""

    count: int  # type: ignore[assignment]  # a field, not the method of tuple
    """N"""
    mask: Tensor | None
    """[B, T] bool, or None where every token is real."""
    boundaries: list[int] | None
    """The N + 1 document boundaries of packed input."""


def check_write_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    *,
    grouped: bool = False,
) -> tuple[Sequences, Tensor]:
    """Check what all write rules share. Returns the sequences and the initial state (zeros where none was given).

    `grouped`: q and k are [B, T, G, D] and shared by the H heads of v, H a multiple of G.
    """
    check_input("q", q, ("B", "T", "G" if grouped else "H", "D"))
    check_input("k", k, tuple(q.shape), q)
    check_input("v", v, (*q.shape[:2], "H" if grouped else q.shape[2], "V"), q)
    groups, heads = q.shape[2], v.shape[2]
    if grouped and (groups == 0 or heads % groups):
        raise ValueError(f"the {groups} groups of q and k must divide the {heads} heads of v")
    count, mask, boundaries = check_sequences(q, cu_seqlens, mask)
    shape = (count, heads, q.shape[3], v.shape[3])
    if state is None:
        state = q.new_zeros(shape, dtype=accumulation_dtype(q.dtype))
    else:
        check_state("state", state, shape, q)
    return Sequences(count, mask, boundaries), state


def check_gate(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor, highest: float | None = None) -> None:
    """A gate of a write rule: `shape`, the dtype of `like` or its accumulation type, finite, and at most `highest`.

    Values are checked where `values_can_be_read`.
    """
    check_input(name, x, shape)
    check_device(name, x, like)
    accepted = (like.dtype, accumulation_dtype(like.dtype))
    if x.dtype not in accepted:
        names = " or ".join(dict.fromkeys(short(dtype) for dtype in accepted))
        raise TypeError(f"{name} must be {names} for {short(like.dtype)} input, got {short(x.dtype)}")
    if values_can_be_read(x) and x.numel():
        least, largest = (float(value) for value in torch.aminmax(x.detach()))
        if not (least > -float("inf") and largest < float("inf")):
            raise ValueError(f"{name} must be finite, got values from {least} to {largest}")
        if highest is not None and largest > highest:
            raise ValueError(f"{name} must be at most {highest:g}, got {largest:g}")
