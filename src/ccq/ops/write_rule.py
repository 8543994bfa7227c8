"""What every write rule returns and checks, so that any of them takes any read step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ccq.ops.checks import accumulation_dtype, check_input, check_sequences, check_state


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
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None
) -> tuple[Sequences, Tensor]:
    """Check what all write rules share. Returns the sequences and the initial state (zeros where none was given)."""
    check_input("q", q, ("B", "T", "H", "D"))
    check_input("k", k, tuple(q.shape), q)
    check_input("v", v, (*q.shape[:3], "V"), q)
    count, mask, boundaries = check_sequences(q, cu_seqlens, mask)
    shape = (count, q.shape[2], q.shape[3], v.shape[3])
    if state is None:
        state = q.new_zeros(shape, dtype=accumulation_dtype(q.dtype))
    else:
        check_state("state", state, shape, q)
    return Sequences(count, mask, boundaries), state
