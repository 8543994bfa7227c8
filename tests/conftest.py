"""What holds in every test: one thread, fixed seeds, and memory that is visibly wrong until it is written."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

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
