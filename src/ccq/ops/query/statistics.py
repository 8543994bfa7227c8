"""The state of the read step: what is kept of the keys seen so far."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
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


class PackedKeyStatistics(NamedTuple):
    """The same with the second moment as a triangle: half the bytes to keep, and to move for every token.

    Rows below the middle, i >= (D - 1) / 2, are kept up to their diagonal, and what they leave free of a D x D / 2
    rectangle takes the rows above, which are as much shorter. So every kept row is D numbers wide, and a number of
    either kind has the column of the rectangle that its own column of M says:

        M[i, j] at (D - 1 - i) D + j                for i >= (D - 1) / 2, j <= i
        M[i, j] at i D + D - 1 - j                  for i < (D - 1) / 2, j < i
        M[i, i] at D (D + 1) / 2 - 1 - i            for i < (D - 1) / 2
    """

    triangle: Tensor
    """[N, H, D (D + 1) / 2] float32 (float64 for float64 input)."""
    total: Tensor
    """[N, H, D], same dtype: the sum of k."""
    count: Tensor  # type: ignore[assignment]  # a field, not the method of tuple
    """[N] int64: how many real (unpadded) tokens the sequence has had."""

    @classmethod
    def of(cls, statistics: KeyStatistics) -> PackedKeyStatistics:
        """Of the second moment what is below the diagonal counts. Total and count are the same tensors."""
        return cls(pack_triangle(statistics.second_moment), statistics.total, statistics.count)

    def unpacked(self) -> KeyStatistics:
        """Total and count are the same tensors."""
        return KeyStatistics(unpack_triangle(self.triangle, self.total.shape[-1]), self.total, self.count)


def pack_triangle(matrix: Tensor) -> Tensor:
    """Symmetric [..., D, D] -> [..., D (D + 1) / 2], in the order of `PackedKeyStatistics`. Differentiable."""
    size = matrix.shape[-1]
    above = size // 2
    long = matrix[..., above:, :].tril(above).flip(-2)
    short = F.pad(matrix[..., :above, :].tril(-1).flip(-1), (0, 0, 0, size % 2))
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)[..., :above].flip(-1)
    # Of an odd size the diagonal ends the rectangle, whose last row nothing else shares.
    rectangle = (long + short).flatten(-2)[..., : size * (size + 1) // 2 - above]
    return torch.cat((rectangle, diagonal), -1)


def unpack_triangle(triangle: Tensor, size: int) -> Tensor:
    """The inverse of `pack_triangle` for D = `size`."""
    above = size // 2
    rectangle = triangle[..., : size * (size - above)].unflatten(-1, (size - above, size))
    long = rectangle.flip(-2).tril(above)
    short = rectangle[..., :above, :].flip(-1).tril(-1)
    diagonal = triangle[..., triangle.shape[-1] - above :].flip(-1)
    short = short + F.pad(torch.diag_embed(diagonal), (0, size - above))
    lower = torch.cat((short, long), -2)
    return lower + lower.tril(-1).mT


def check_statistics(statistics: KeyStatistics, sequences: int, like: Tensor) -> None:
    """`statistics` must belong to this many sequences and fit `like` [B, T, H, D] in heads, size, dtype and device."""
    _check_kind(statistics, KeyStatistics)
    heads, size = like.shape[2:]
    check_state("statistics.second_moment", statistics.second_moment, (sequences, heads, size, size), like)
    _check_sums(statistics, sequences, like)


def check_packed_statistics(statistics: PackedKeyStatistics, sequences: int, like: Tensor) -> None:
    """The same for packed statistics."""
    _check_kind(statistics, PackedKeyStatistics)
    heads, size = like.shape[2:]
    check_state("statistics.triangle", statistics.triangle, (sequences, heads, size * (size + 1) // 2), like)
    _check_sums(statistics, sequences, like)


def _check_kind(statistics: KeyStatistics | PackedKeyStatistics, kind: type) -> None:
    if not isinstance(statistics, kind):
        how = "as an earlier call returned it" if kind is KeyStatistics else "made of KeyStatistics by .of()"
        raise TypeError(f"statistics must be a {kind.__name__}, {how}; got {type(statistics).__name__}")


def _check_sums(statistics: KeyStatistics | PackedKeyStatistics, sequences: int, like: Tensor) -> None:
    heads, size = like.shape[2:]
    check_state("statistics.total", statistics.total, (sequences, heads, size), like)
    if statistics.count.dtype != torch.int64:
        raise TypeError(f"statistics.count must be int64, got {statistics.count.dtype}")
    check_shape("statistics.count", statistics.count, (sequences,))
    check_device("statistics.count", statistics.count, like)
