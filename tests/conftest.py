"""What holds in every test: one thread, fixed seeds, and memory that is visibly wrong until it is written."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

# Deterministic matrix products on a GPU need this before the first one.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Without a GPU Triton's kernels run in its interpreter, which must be asked for before anything imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)

# derandomize: the same examples in every run, so that a red test stays red until it is repaired.
hypothesis.settings.register_profile("ccq", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("ccq")


class _TorchRandom:
    """torch's generator as hypothesis wants it, so that an example draws the same tensors when it is replayed."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# hypothesis keeps only a weak reference.
_TORCH_RANDOM = _TorchRandom()
hypothesis.register_random(_TORCH_RANDOM)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Seed every generator; fill what `torch.empty` returns with NaN, so that reading it before writing cannot pass."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(gradients)


@pytest.fixture
def gpu_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter round as a GPU does; nothing to do on one.

    The units for tf32 of an H200 cut float32 operands off to 10 bits of mantissa, which the interpreter keeps in full:
    with this, its errors are within a few per cent of those seen there. And bfloat16 is rounded to the nearest even and
    multiplied as numbers, where the interpreter cuts it off and multiplies its bits.
    """
    if torch.cuda.is_available():
        return
    from triton import language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def operand(x: Any, precision: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if x.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.TF32:
            bits = np.ascontiguousarray(x.data).view(np.uint32)
            return TensorHandle((bits & np.uint32(0xFFFFE000)).view(np.float32), tl.float32)
        return x

    def create_dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, *rest: Any) -> Any:
        return dot(self, operand(a, precision), operand(b, precision), acc, precision, *rest)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        if x.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, x, to)
        rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16()
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), to.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
