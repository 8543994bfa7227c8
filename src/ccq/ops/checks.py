"""Argument checks shared by the read step and the write rules; messages say what was given and what is accepted."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 input, float32 for every other: the type of sums and states."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def short(dtype: torch.dtype) -> str:
    """A dtype without the name of the library."""
    return str(dtype).removeprefix("torch.")


def describe(x: Tensor) -> str:
    """A tensor as error messages show it."""
    return f"{list(x.shape)} {short(x.dtype)} on {x.device}"


def values_can_be_read(x: Tensor) -> bool:
    """Whether the values may be looked at: not while compiling, and not on a GPU, which would have to be waited for."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a gradient in any of them is being recorded."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def check_input(name: str, x: Tensor, shape: tuple[int | str, ...], like: Tensor | None = None) -> None:
    """`x` must be a floating-point tensor of `shape` (text = any size), of the dtype and device of `like` if given."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {describe(x)}")
    check_shape(name, x, shape)
    if like is not None and x.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of q, {short(like.dtype)}, got {describe(x)}")
    if like is not None:
        check_device(name, x, like)


def check_shape(name: str, x: Tensor, shape: tuple[int | str, ...]) -> None:
    matches = x.ndim == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(x.shape, shape, strict=True)
    )
    if not matches:
        expected = "[" + ", ".join(map(str, shape)) + "]"
        raise ValueError(f"{name} must have shape {expected}, got {describe(x)}")


def check_device(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(
            f"{name} must be on the device of q, {like.device}, got {describe(x)}; "
            f"move it with .to({str(like.device)!r})"
        )


def check_state(name: str, state: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """A state: its first size must be the number of sequences, its dtype the accumulation type of `like`."""
    if not isinstance(state, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(state).__name__}")
    if state.ndim == len(shape) and state.shape[0] != shape[0]:
        raise ValueError(
            f"{name} belongs to {state.shape[0]} sequences, but the input has {shape[0]} "
            f"(rows, or documents where cu_seqlens is given); got {describe(state)}"
        )
    check_shape(name, state, shape)
    expected = accumulation_dtype(like.dtype)
    if state.dtype != expected:
        raise TypeError(f"{name} must be {short(expected)} for {short(like.dtype)} input, got {describe(state)}")
    check_device(name, state, like)


def check_mask(mask: Tensor, rows: int, tokens: int, like: Tensor) -> Tensor:
    """[B, T] of zeros and ones, the ones of a row without a gap -> bool. Checked where `values_can_be_read`."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor, got {type(mask).__name__}")
    check_shape("mask", mask, (rows, tokens))
    check_device("mask", mask, like)
    real = mask.to(torch.bool)
    if values_can_be_read(mask):
        if not torch.equal(real.to(mask.dtype), mask):
            raise ValueError("mask must hold only 0 (padding) and 1 (real token)")
        starts = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
        if rows and tokens and int(starts.max()) > 1:
            row = int(starts.argmax())
            raise ValueError(
                f"mask has a hole in row {row}: real tokens must be one run without a gap, with padding only on "
                f"the left, the right, or both; got {real[row].int().tolist()[:64]}"
            )
    return real


def check_boundaries(cu_seqlens: Tensor, rows: int, tokens: int) -> list[int]:
    """[N + 1] integers from 0 to T that never fall, with B = 1 -> the same as Python numbers."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be a one-dimensional int32 or int64 tensor of N + 1 boundaries, "
            f"got {describe(cu_seqlens)}"
        )
    if rows != 1:
        raise ValueError(f"cu_seqlens needs packed input with one row, [1, T, H, D]; got {rows} rows")
    boundaries: list[int] = cu_seqlens.tolist()
    if boundaries[0] != 0 or boundaries[-1] != tokens:
        raise ValueError(
            f"cu_seqlens must start at 0 and end at T = {tokens}, got {boundaries[0]} and {boundaries[-1]}"
        )
    if any(after < before for before, after in itertools.pairwise(boundaries)):
        raise ValueError(f"cu_seqlens must never fall, got {boundaries[:32]}")
    return boundaries


def check_sequences(
    q: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None
) -> tuple[int, Tensor | None, list[int] | None]:
    """The number of sequences N, the mask as bool, and the document boundaries as Python numbers."""
    rows, tokens = q.shape[:2]
    if cu_seqlens is not None and mask is not None:
        raise ValueError("mask and cu_seqlens exclude each other: packed documents have no padding; drop one of them")
    if cu_seqlens is not None:
        boundaries = check_boundaries(cu_seqlens, rows, tokens)
        return len(boundaries) - 1, None, boundaries
    return rows, None if mask is None else check_mask(mask, rows, tokens, q), None


def check_backend(backend: str, accepted: tuple[str, ...]) -> None:
    if backend not in accepted:
        raise ValueError(f"backend must be one of {', '.join(accepted)}; got {backend!r}")
