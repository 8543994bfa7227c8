"""Gated linear attention as the plain recurrence, token by token: what every other backend must equal."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ccq.ops.write_rule import WriteRuleResult


def gated_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token of every sequence: q, k, log_decay [N, H, D], v [N, H, V], state [N, H, D, V].

    Returns the output [N, H, V] and the new state. Computed in the dtype of the state. Elementwise on purpose, so
    that no matrix unit and no autocast lowers the precision.
    """
    q, k, v, log_decay = (x.to(state.dtype) for x in (q, k, v, log_decay))
    state = log_decay.exp().unsqueeze(-1) * state + k.unsqueeze(-1) * v.unsqueeze(-2)
    return ((scale * q).unsqueeze(-1) * state).sum(-2), state


def gated_linear_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float, boundaries: list[int] | None = None
) -> WriteRuleResult:
    """The loop over tokens, differentiated by autograd. Nothing is checked.

    Shapes as in `ccq.ops.gla.gated_linear_attention`; the documents of a packed row lie between `boundaries`.
    """
    if boundaries is not None:
        documents = []
        for n, (begin, end) in enumerate(pairwise(boundaries)):
            piece = slice(begin, end)
            inputs = q[:, piece], k[:, piece], v[:, piece], log_decay[:, piece]
            documents.append(gated_linear_attention_reference(*inputs, state[n : n + 1], scale))
        if not documents:
            return WriteRuleResult(v.clone(), state.clone())
        return WriteRuleResult(
            torch.cat([document.output for document in documents], 1),
            torch.cat([document.state for document in documents]),
        )
    outputs = [v[:, :0]]
    state = state.clone()
    for t in range(q.shape[1]):
        output, state = gated_linear_attention_step(q[:, t], k[:, t], v[:, t], log_decay[:, t], state, scale)
        outputs.append(output.to(v.dtype).unsqueeze(1))
    return WriteRuleResult(torch.cat(outputs, 1), state)
