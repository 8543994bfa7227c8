"""When the read steps of this folder that have Triton kernels of their own take them, and what their operators share.

Nothing here imports triton before it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import check_input, check_sequences
from ccq.ops.operators import TRITON_INSTALLED
from ccq.ops.query.arguments import check_normalize, check_query_dtype
from ccq.ops.query.fused import MAX_SIZE, check_supported, is_supported


def choose_backend(backend: str, q: Tensor, max_size: int = MAX_SIZE) -> str:
    """The backend that "auto" stands for. Refuses what the kernels do not take, where they were asked for."""
    if backend == "triton":
        check_supported(q, max_size)
    if backend != "auto":
        return backend
    return "triton" if q.is_cuda and TRITON_INSTALLED and is_supported(q, max_size) else "torch"


class Call(NamedTuple):
    """Checked arguments, everything else as it was given."""

    sequences: int
    """N"""
    mask: Tensor | None
    """[B, T] bool"""
    boundaries: list[int] | None
    unit_queries: bool
    unit_keys: bool
    query_dtype: torch.dtype
    """Of the query to return."""


def check_call(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    normalize: bool | str,
    query_dtype: torch.dtype | None,
) -> Call:
    """Check the arguments of a read step, beside its gate, whose kernels take q and k as they come."""
    check_input("q", q, ("B", "T", "H", "D"))
    check_input("k", k, tuple(q.shape), q)
    query_dtype = check_query_dtype(query_dtype, q)
    unit_queries, unit_keys = check_normalize(normalize)
    sequences, real, boundaries = check_sequences(q, cu_seqlens, mask)
    return Call(sequences, real, boundaries, unit_queries, unit_keys, query_dtype)


def block_count(x: Tensor, boundaries: Sequence[int] | None, block: int | None = None) -> Any:
    """How many blocks of tokens the kernels cut x [B, T, H, D] into: a number, or the compiler's symbol for one. Blocks
    of None are those of the read step's own kernels.
    """
    rows, tokens, _, size = x.shape
    if block is None:
        from ccq.ops.query import kernels

        block = kernels.configuration(x.dtype, int(size), x.device).block
    if boundaries is None:
        return rows * ((tokens + block - 1) // block)
    return sum((end - begin + block - 1) // block for begin, end in itertools.pairwise(boundaries))
