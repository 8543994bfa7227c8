"""What the mixers share: their state, and the way from a hidden vector to queries, keys and values.

Legend: B rows, N sequences (N = B without cu_seqlens), T tokens, H heads, D key size and V value size per head, W
kernel size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ccq.nn.conv import ShortConvolution
from ccq.nn.read import CurvatureConditionedQuery
from ccq.ops.checks import check_input, check_sequences
from ccq.ops.query import KeyStatistics


class MixerState(NamedTuple):
    """Everything a mixer remembers of its sequences. Its size does not depend on their length."""

    memory: Tensor
    """[N, H, D, V], the state of the write rule."""
    statistics: KeyStatistics | None
    """The state of the read step; None without one, or while its correction is off."""
    convolution: tuple[Tensor, ...] | None
    """The last W - 1 inputs [N, W - 1, channels] of the convolutions of q, k and v; None without convolutions."""


class MixerOutput(NamedTuple):
    output: Tensor
    """[B, T, hidden]"""
    state: MixerState


def check_call(
    x: Tensor,
    hidden_size: int,
    read: CurvatureConditionedQuery | None,
    state: MixerState | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Refuse, before anything is computed, input that does not fit the layer and a state that does not fit the
    input.
    """
    check_input("x", x, ("B", "T", hidden_size))
    sequences, _, _ = check_sequences(x, cu_seqlens, mask)
    if state is None:
        return
    if state.memory.shape[0] != sequences:
        raise ValueError(
            f"state belongs to {state.memory.shape[0]} sequences, but the input has {sequences} (rows, or documents "
            "where cu_seqlens is given); select or repeat its sequences first"
        )
    if read is not None and read.enabled and state.statistics is None:
        raise ValueError(
            "state has no key statistics, because it was made while the correction was off or by a layer without "
            "a read step; continue it with the correction off, or start again from the first token"
        )


def check_read(
    read: CurvatureConditionedQuery | None, num_heads: int, head_dim: int
) -> CurvatureConditionedQuery | None:
    """A read step must be made for the heads of its layer."""
    if read is not None and (read.num_heads, read.head_dim) != (num_heads, head_dim):
        raise ValueError(
            f"read is made for {read.num_heads} heads of {read.head_dim}, but the layer has {num_heads} heads "
            f"of {head_dim}"
        )
    return read


def convolve(
    convolutions: tuple[ShortConvolution, ...],
    inputs: tuple[Tensor, ...],
    state: MixerState | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run each convolution on its input and its part of the state: (outputs, new states)."""
    states: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if state is not None:
        if state.convolution is None:
            raise ValueError("state was made by a layer without convolutions; a layer with them cannot continue it")
        states = state.convolution
    results = [
        convolution(x, state=before, mask=mask, cu_seqlens=cu_seqlens)
        for convolution, x, before in zip(convolutions, inputs, states, strict=True)
    ]
    return tuple(y for y, _ in results), tuple(after for _, after in results)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, H * X] -> [B, T, H, X]"""
    return x.unflatten(-1, (num_heads, -1))
