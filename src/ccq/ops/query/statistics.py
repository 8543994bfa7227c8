"""The state of the read step: what is kept of the keys seen so far."""

from __future__ import annotations

import functools
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
    _, kept = _places(matrix, matrix.shape[-1])
    return _take(matrix.flatten(-2), kept)


def unpack_triangle(triangle: Tensor, size: int) -> Tensor:
    """The inverse of `pack_triangle` for D = `size`."""
    places, _ = _places(triangle, size)
    return _take(triangle, places).unflatten(-1, (size, size))


def _take(x: Tensor, places: Tensor) -> Tensor:
    # On a CPU many times as fast as index_select.
    return x.gather(-1, places.expand(*x.shape[:-1], -1))


def _places(like: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where each number of the matrix stands in the triangle [D D], and of the matrix each number of the triangle
    [D (D + 1) / 2]: int64 on the device of `like`.
    """
    # A compiler's tensors go with none that are real, and what is made in a capture is empty until that is replayed.
    if type(like) is not Tensor or torch.compiler.is_compiling():
        return _make_places(size, like.device)
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return _make_places(size, like.device)
    return _kept_places(size, like.device)


@functools.lru_cache(maxsize=16)
def _kept_places(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # Tensors of the inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return _make_places(size, device)


def _make_places(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row = torch.arange(size, device=device)
    i, j = torch.maximum(row[:, None], row), torch.minimum(row[:, None], row)
    short = torch.where(i == j, size * (size + 1) // 2 - 1 - i, i * size + size - 1 - j)
    places = torch.where(2 * i >= size - 1, (size - 1 - i) * size + j, short).flatten()
    # The numbers in the order of their places, without those above the diagonal.
    above = (row > row[:, None]).flatten()
    kept = (places + above * size * size).argsort()[: size * (size + 1) // 2]
    return places, kept


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
