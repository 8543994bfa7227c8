"""Sums over the keys so far in which older keys count less, by chunks.

Legend: B rows, N sequences, T tokens, H heads, D key size per head, C chunk length, P chunks in all, X any size.

With M the sum before a chunk, g_i the sum of the log decays up to and with token i, and L_ij = exp(g_i - g_j) where
j <= i, the sum at token i is e^{g_i} M + sum of L_ij k_j k_j^T over j <= i. No exponent is above 0, and those of L are
formed from the token behind j on, without cancellation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, check_device, check_input, describe, values_can_be_read
from ccq.ops.layout import ChunkLayout
from ccq.ops.reads.common import ReadInputs, scan


class DecayedChunks(NamedTuple):
    """Keys, decays and real tokens in chunk order."""

    layout: ChunkLayout
    key: Tensor
    """[P, H, C, D]"""
    real: Tensor
    """[P, 1, C, 1]: 1, or 0 where there is padding."""
    from_start: Tensor
    """[P, H, C, 1], e^{g_i}"""
    decay: Tensor
    """[P, H, C, C], L, zero for j > i."""

    @classmethod
    def of(cls, inputs: ReadInputs, log_decay: Tensor) -> DecayedChunks:
        """log_decay [B, T, H], in the dtype of the sums."""
        layout = inputs.layout
        real = torch.ones_like(log_decay[..., :1]) if inputs.mask is None else inputs.mask.unsqueeze(-1)
        if inputs.mask is not None:
            log_decay = torch.where(real, log_decay, 0)
        steps = layout.split_scalar(log_decay).unsqueeze(-1)
        later = torch.ones(layout.chunk, layout.chunk, dtype=steps.dtype, device=steps.device).tril(-1)
        return cls(
            layout,
            layout.split(inputs.key),
            layout.split_scalar(real.to(steps.dtype)).unsqueeze(-1),
            steps.cumsum(2).exp(),
            (steps * later).cumsum(2).exp().tril(),
        )

    @property
    def to_end(self) -> Tensor:
        """[P, H, C, 1], L_Cj"""
        return self.decay[:, :, -1].unsqueeze(-1)

    def totals(self, summand: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The decayed sum of `summand` [P, H or 1, C, X] before each chunk [P, H, 1, X], and the last one [N, H, X];
        initial [N, H, X].
        """
        update = torch.matmul(self.to_end.mT, summand)
        before, last = scan(self.layout, update, initial.unsqueeze(-2), self.from_start[:, :, -1:])
        return before, last.squeeze(-2)

    def second_moments(self, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The decayed sum of k k^T before each chunk [P, H, D, D], and the last one; initial [N, H, D, D]."""
        update = torch.matmul((self.key * self.to_end).mT, self.key)
        return scan(self.layout, update, initial, self.from_start[:, :, -1:])

    def second_moment_times(self, x: Tensor, second_moment: Tensor) -> Tensor:
        """x [P, H, C, D] -> the decayed sum of k (k . x_i) at each token i; second_moment is that before each chunk."""
        inside = torch.matmul(self.decay * torch.matmul(x, self.key.mT), self.key)
        return torch.addcmul(inside, self.from_start, torch.matmul(x, second_moment))

    def detach(self) -> DecayedChunks:
        return DecayedChunks(self.layout, *(x.detach() for x in self[1:]))


def head_decay(log_decay: Tensor | None, like: Tensor) -> Tensor:
    """log_decay [B, T, H] of each head, or [B, T, H, X] of its X parts -> that of each head, the mean of its parts, in
    the dtype of sums over `like` [B, T, H, D].
    """
    if log_decay is None:
        raise ValueError(
            "this read step forgets as the memory does and needs log_decay, the backbone's own, [B, T, H] or "
            "[B, T, H, X]; got None"
        )
    check_input("log_decay", log_decay, (*like.shape[:3], *(("X",) if log_decay.ndim == 4 else ())))
    check_device("log_decay", log_decay, like)
    if values_can_be_read(log_decay) and log_decay.numel() and not log_decay.detach().max() <= 0:
        raise ValueError(f"log_decay must be at most 0, got {float(log_decay.detach().max())} in {describe(log_decay)}")
    log_decay = log_decay.to(accumulation_dtype(like.dtype))
    # The gradient of a mean is written out for every part, that of a sum is the same number seen X times.
    return log_decay.sum(-1) / log_decay.shape[-1] if log_decay.ndim == 4 else log_decay
