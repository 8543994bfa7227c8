"""What the operators that have decayed statistics in kernels share.

Nothing here imports triton before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ccq.ops.reads.triton_backend import block_count

MAX_SIZE = 128
"""The largest D of the kernels."""


def _width(size: int) -> int:
    """BD, the columns of a state in the kernels."""
    return max(16, 1 << (size - 1).bit_length())


def empty_sums(q: Tensor, boundaries: Sequence[int] | None, *, centred: bool) -> list[Tensor]:
    """Tensors of the shapes and dtypes of `kernels.Sums`."""
    from ccq.ops.reads.decayed import kernels

    rows, tokens, heads, size = q.shape
    sequences = rows if boundaries is None else len(boundaries) - 1
    chunks = block_count(q, boundaries, kernels.configuration(q.dtype, int(size)).chunk)
    width, kept = _width(int(size)), torch.float32
    means = slice(None) if centred else slice(0)
    return [
        q.new_empty((rows, tokens, heads), dtype=kept),
        q.new_empty((rows, tokens, heads), dtype=kept),
        q.new_empty((chunks, heads), dtype=kept),
        q.new_empty(
            (chunks, heads, width, width), dtype=torch.bfloat16 if centred and q.dtype == torch.bfloat16 else kept
        ),
        q.new_empty((chunks, heads, width), dtype=kept)[means],
        q.new_empty((chunks, heads), dtype=kept)[means],
        q.new_empty((sequences, heads, size, size), dtype=kept),
        q.new_empty((sequences, heads, size), dtype=kept)[means],
        q.new_empty((sequences, heads), dtype=kept)[means],
    ]
