"""Read steps as a loop over tokens: the specification that their chunked forms are tested against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ccq.ops.reads.common import ReadInputs

StateT = TypeVar("StateT", bound=NamedTuple)
Step = Callable[..., tuple[Tensor, StateT]]
"""(state, tensors of one token [N, ...]) -> (query [N, H, D], state with the token)"""


def read_loop(step: Step[StateT], tokens: Sequence[Tensor], state: StateT, inputs: ReadInputs) -> tuple[Tensor, StateT]:
    """`step` for one token after the other: tokens [B, T, ...] each, state [N, ...] -> queries [B, T, H, D], state."""
    if inputs.boundaries is not None:
        queries, states = [inputs.query[:, :0]], []
        for n, (begin, end) in enumerate(itertools.pairwise(inputs.boundaries)):
            query, after = _rows(step, [x[:, begin:end] for x in tokens], _select(state, n), None)
            queries.append(query if end > begin else inputs.query[:, begin:end])
            states.append(after)
        if not states:
            return inputs.query, state
        joined = state._make(torch.cat(fields) for fields in zip(*states, strict=True))
        return torch.cat(queries, 1), joined
    query, state = _rows(step, tokens, state, inputs.mask)
    return query if tokens[0].shape[1] else inputs.query, state


def _select(state: StateT, n: int) -> StateT:
    return state._make(field[n : n + 1] for field in state)


def _rows(step: Step[StateT], tokens: Sequence[Tensor], state: StateT, mask: Tensor | None) -> tuple[Tensor, StateT]:
    queries = []
    for i in range(tokens[0].shape[1]):
        query, new = step(state, *(x[:, i] for x in tokens))
        if mask is not None:
            # A row without a token here stays as it was.
            new = state._make(
                torch.where(mask[:, i].view(-1, *(1,) * (after.ndim - 1)), after, before)
                for after, before in zip(new, state, strict=True)
            )
        state = new
        queries.append(query)
    return torch.stack(queries, 1) if queries else tokens[0], state


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix [..., D, D], vector [..., D] -> [..., D]"""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
