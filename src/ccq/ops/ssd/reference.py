"""State-space duality as the plain recurrence, token by token: what every other backend must equal."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ccq.ops.write_rule import WriteRuleResult


def state_space_duality_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token of every sequence: q, k [N, G, D], v [N, H, V], log_decay [N, H], state [N, H, D, V].

    Returns the output [N, H, V] and the new state. Computed in the dtype of the state. Elementwise on purpose, so
    that no matrix unit and no autocast lowers the precision.
    """
    q, k, v, log_decay = (x.to(state.dtype) for x in (q, k, v, log_decay))
    if q.shape[1] != v.shape[1]:
        q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
    state = log_decay.exp()[..., None, None] * state + k.unsqueeze(-1) * v.unsqueeze(-2)
    return ((scale * q).unsqueeze(-1) * state).sum(-2), state


def state_space_duality_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float, boundaries: list[int] | None = None
) -> WriteRuleResult:
    """The loop over tokens, differentiated by autograd. Nothing is checked.

    Shapes as in `ccq.ops.ssd.state_space_duality`; the documents of a packed row lie between `boundaries`.
    """
    if boundaries is not None:
        documents = []
        for n, (begin, end) in enumerate(pairwise(boundaries)):
            piece = slice(begin, end)
            inputs = q[:, piece], k[:, piece], v[:, piece], log_decay[:, piece]
            documents.append(state_space_duality_reference(*inputs, state[n : n + 1], scale))
        if not documents:
            return WriteRuleResult(v.clone(), state.clone())
        return WriteRuleResult(
            torch.cat([document.output for document in documents], 1),
            torch.cat([document.state for document in documents]),
        )
    outputs = [v[:, :0]]
    state = state.clone()
    for t in range(q.shape[1]):
        output, state = state_space_duality_step(q[:, t], k[:, t], v[:, t], log_decay[:, t], state, scale)
        outputs.append(output.to(v.dtype).unsqueeze(1))
    return WriteRuleResult(torch.cat(outputs, 1), state)
