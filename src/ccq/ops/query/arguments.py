"""Checks of the arguments that every read step takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ccq.ops.checks import FLOATS, accumulation_dtype, check_device, check_shape, describe, short, values_can_be_read


def check_normalize(normalize: bool | str) -> tuple[bool, bool]:
    """Whether queries are normalised, and whether keys are."""
    if isinstance(normalize, bool):
        return normalize, normalize
    if normalize in ("queries", "keys"):
        return normalize == "queries", normalize == "keys"
    raise ValueError(f"normalize must be True, 'queries', 'keys' or False, got {normalize!r}")


def check_query_dtype(query_dtype: torch.dtype | None, q: Tensor) -> torch.dtype:
    """The dtype of the query that comes back."""
    accepted = dict.fromkeys((q.dtype, accumulation_dtype(q.dtype)))
    if query_dtype is None or query_dtype in accepted:
        return query_dtype or q.dtype
    names = " or ".join(map(short, accepted))
    given = short(query_dtype) if isinstance(query_dtype, torch.dtype) else repr(query_dtype)
    raise ValueError(f"query_dtype must be {names} for {short(q.dtype)} input, got {given}")


def check_gate(gate: Tensor | float, q: Tensor) -> Tensor:
    """The gate as a tensor [B, T, H]."""
    if isinstance(gate, Tensor):
        if gate.dtype not in FLOATS:
            raise TypeError(f"gate must be a floating-point tensor or a number, got {describe(gate)}")
        check_shape("gate", gate, tuple(q.shape[:3]))
        check_device("gate", gate, q)
        if values_can_be_read(gate) and not torch.isfinite(gate).all():
            bad = int((~torch.isfinite(gate)).sum())
            raise ValueError(f"gate must be finite, got {bad} NaN or infinite values in {describe(gate)}")
        return gate
    if isinstance(gate, bool) or not isinstance(gate, (int, float)):
        raise TypeError(f"gate must be a tensor [B, T, H] or a number, got {type(gate).__name__}")
    if not math.isfinite(gate):
        raise ValueError(f"gate must be finite, got {gate}")
    return torch.full(q.shape[:3], float(gate), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
