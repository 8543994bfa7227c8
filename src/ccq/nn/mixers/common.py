"""What the mixers share: their state, and the way from a hidden vector to queries, keys and values.

Legend: B rows, N sequences (N = B without cu_seqlens), T tokens, H heads, D key size and V value size per head, W
kernel size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from ccq.nn.conv import ShortConvolution, convolve_token_
from ccq.nn.read import QueryInParts, ReadStep
from ccq.ops.checks import check_input, check_sequences
from ccq.ops.query import KeyStatistics, PackedKeyStatistics
from ccq.ops.reads import DecayedKeyStatistics, DecayedSecondMoment, KeyMean, LandmarkStatistics
from ccq.ops.write_rule import WriteRuleResult

ReadStatistics = (
    PackedKeyStatistics | KeyStatistics | KeyMean | DecayedKeyStatistics | DecayedSecondMoment | LandmarkStatistics
)
"""The states of read steps."""


class MixerState(NamedTuple):
    """Everything a mixer remembers of its sequences. Its size does not depend on their length."""

    memory: Tensor
    """[N, H, D, V], the state of the write rule."""
    statistics: ReadStatistics | None
    """The state of the read step; None without one, or while its correction is off."""
    convolution: tuple[Tensor, ...] | None
    """The last W - 1 inputs [N, W - 1, channels] of each convolution, in the order of the layer (q, k, v; one for all
    of Mamba2); None without convolutions."""


class OverwritableState(MixerState):
    """A state whose owner, such as a cache, lets it be overwritten, as `StaticKeyStatistics` those of its read step.

    A mixer that is given it for one token, without gradients, may return its tensors as those of the new state.
    """

    __slots__ = ()


class AttentionState(NamedTuple):
    """The keys and values of softmax attention. It grows with every token.

    Slot i of sequence n holds its i-th real token: padding is never stored. Slots from `count[n]` on are zero.
    """

    keys: Tensor
    """[N, S, K, D] for K heads of keys and values and S slots, rotated to their positions."""
    values: Tensor
    """[N, S, K, V]"""
    count: Tensor  # type: ignore[assignment]  # a field, not the method of tuple
    """[N] int64: how many real tokens the sequence has had; also the position of its next token."""


LayerState = MixerState | AttentionState
"""What any mixer keeps of its sequences. Dimension 0 of every tensor in it is the sequence."""

AnyState = TypeVar("AnyState", MixerState, AttentionState)


class MixerOutput(NamedTuple):
    output: Tensor
    """[B, T, hidden]"""
    state: LayerState | None
    """None only where it was not asked for."""


def map_state(state: AnyState, change: Callable[[Tensor], Tensor]) -> AnyState:
    """The state with `change` applied to each of its tensors: to repeat, select, move or copy its sequences. What comes
    of a state that may be overwritten is nobody's, and may not.
    """
    if isinstance(state, AttentionState):
        return AttentionState(*map(change, state))
    statistics, convolution = state.statistics, state.convolution
    if statistics is not None:
        kind = PackedKeyStatistics if isinstance(statistics, PackedKeyStatistics) else type(statistics)
        statistics = kind(*map(change, statistics))
    return MixerState(
        change(state.memory), statistics, None if convolution is None else tuple(map(change, convolution))
    )


def state_tensors(state: LayerState) -> dict[str, Tensor]:
    """The tensors of a state by name: "memory", "statistics.total", "convolution.0", ...; "keys", "values", "count"."""
    if isinstance(state, AttentionState):
        return state._asdict()
    tensors = {"memory": state.memory}
    if state.statistics is not None:
        tensors |= {f"statistics.{name}": x for name, x in state.statistics._asdict().items()}
    return tensors | {f"convolution.{i}": x for i, x in enumerate(state.convolution or ())}


def state_from_tensors(tensors: Mapping[str, Tensor]) -> LayerState:
    """The inverse of `state_tensors`. Raises KeyError with the name of a tensor that is not there, or with those of
    which there must be one.
    """
    if "memory" not in tensors and "keys" in tensors:
        return AttentionState(*(tensors[name] for name in AttentionState._fields))
    statistics = convolution = None
    fields = {name.removeprefix("statistics.") for name in tensors if name.startswith("statistics.")}
    if fields:
        # No two kinds have the same names.
        kinds = [kind for kind in get_args(ReadStatistics) if fields <= set(kind._fields)] or [KeyStatistics]
        kind = next((kind for kind in kinds if fields == set(kind._fields)), None)
        if kind is None:
            lacking = (f"statistics.{name}" for kind in kinds for name in kind._fields if name not in fields)
            raise KeyError(" or ".join(dict.fromkeys(lacking)))
        statistics = kind(*(tensors[f"statistics.{name}"] for name in kind._fields))
    convolutions = sum(name.startswith("convolution.") for name in tensors)
    if convolutions:
        convolution = tuple(tensors[f"convolution.{i}"] for i in range(convolutions))
    return MixerState(tensors["memory"], statistics, convolution)


def check_call(
    x: Tensor,
    hidden_size: int,
    read: ReadStep | None,
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
    check_owner(state, MixerState, "memory", sequences)
    if read is not None and read.enabled and read.keeps_statistics and state.statistics is None:
        raise ValueError(
            "state has no key statistics, because it was made while the correction was off or by a layer without "
            "a read step; continue it with the correction off, or start again from the first token, with a new state"
        )


def check_owner(state: LayerState, kind: type[LayerState], first: str, sequences: int) -> None:
    """A state must be of the layer's kind, and of as many sequences as the input; `first` names a tensor of it."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be the {kind.__name__} that an earlier call returned, got {type(state).__name__}")
    owned = getattr(state, first).shape[0]
    if owned != sequences:
        raise ValueError(
            f"state belongs to {owned} sequences, but the input has {sequences} (rows, or documents "
            "where cu_seqlens is given); select or repeat its sequences first"
        )


def check_read(read: ReadStep | None, num_heads: int, head_dim: int, what: str = "heads") -> ReadStep | None:
    """A read step must be made for the heads (or groups of heads that share their keys) of its layer."""
    if read is not None and (read.num_heads, read.head_dim) != (num_heads, head_dim):
        raise ValueError(
            f"read is made for {read.num_heads} heads of {read.head_dim}, but the layer has {num_heads} {what} "
            f"of {head_dim}"
        )
    return read


def read_memory(
    rule: Callable[..., WriteRuleResult],
    q: Tensor | QueryInParts,
    *arguments: Any,
    overwrite_state: bool = False,
    **options: Any,
) -> WriteRuleResult:
    """Call a write rule for q, which may be a query in parts: both then read the same memory, o = S kept - S
    removed. With `overwrite_state`, which the rule must take then, the memory given need not be kept.
    """
    if not isinstance(q, QueryInParts):
        return rule(q, *arguments, **options, **({"overwrite_state": True} if overwrite_state else {}))
    output, memory = rule(q.kept, *arguments, **options)
    removed, _ = rule(q.removed, *arguments, **options)
    return WriteRuleResult(output - removed, memory)


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
        if isinstance(state, OverwritableState) and mask is None and cu_seqlens is None:
            outputs = convolve_token_(convolutions, inputs, state.convolution)
            if outputs is not None:
                return outputs, state.convolution
    results = [
        convolution(x, state=before, mask=mask, cu_seqlens=cu_seqlens)
        for convolution, x, before in zip(convolutions, inputs, states, strict=True)
    ]
    return tuple(y for y, _ in results), tuple(after for _, after in results)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, H * X] -> [B, T, H, X]"""
    return x.unflatten(-1, (num_heads, -1))


@torch.no_grad()
def draw_step_bias_(bias: Tensor, dt_min: float, dt_max: float) -> None:
    """Fill `bias` so that softplus(bias), the size of a step of the decay, is log-uniform in [dt_min, dt_max]."""
    uniform = torch.rand(bias.shape, dtype=torch.float32, device=bias.device)
    dt = torch.exp(uniform * math.log(dt_max / dt_min) + math.log(dt_min))
    # The inverse of softplus.
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))
