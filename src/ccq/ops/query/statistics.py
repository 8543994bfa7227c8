"""The state of the read step: what is kept of the keys seen so far."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype, check_device, check_shape, check_state


class KeyStatistics(NamedTuple):
    """Second moment, total and count of the (normalised) keys of each sequence. Never decayed."""

    second_moment: Tensor
    """[N, H, D, D] float32 (float64 for float64 input): the sum of k k^T, symmetric."""
    total: Tensor
    """[N, H, D], same dtype: the sum of k."""
    count: Tensor  # type: ignore[assignment]  # a field, not the method of tuple
    """[N] int64: how many real (unpadded) tokens the sequence has had."""

    @classmethod
    def zeros(cls, sequences: int, heads: int, size: int, *, dtype: torch.dtype, device: torch.device) -> KeyStatistics:
        """The statistics of N sequences without any key, for input of `dtype`."""
        kept = accumulation_dtype(dtype)
        return cls(
            torch.zeros(sequences, heads, size, size, dtype=kept, device=device),
            torch.zeros(sequences, heads, size, dtype=kept, device=device),
            torch.zeros(sequences, dtype=torch.int64, device=device),
        )


def check_statistics(statistics: KeyStatistics, sequences: int, like: Tensor) -> None:
    """`statistics` must belong to this many sequences and fit `like` [B, T, H, D] in heads, size, dtype and device."""
    if not isinstance(statistics, KeyStatistics):
        raise TypeError(
            f"statistics must be a KeyStatistics, as an earlier call returned it; got {type(statistics).__name__}"
        )
    heads, size = like.shape[2:]
    check_state("statistics.second_moment", statistics.second_moment, (sequences, heads, size, size), like)
    check_state("statistics.total", statistics.total, (sequences, heads, size), like)
    if statistics.count.dtype != torch.int64:
        raise TypeError(f"statistics.count must be int64, got {statistics.count.dtype}")
    check_shape("statistics.count", statistics.count, (sequences,))
    check_device("statistics.count", statistics.count, like)
