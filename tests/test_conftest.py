"""The guards of conftest.py do guard."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st


def test_uninitialized_memory_is_filled_with_nan() -> None:
    assert torch.empty(1000).isnan().all()
    assert torch.empty_like(torch.ones(3, 5, dtype=torch.bfloat16)).isnan().all()


def test_an_example_draws_the_same_tensors_in_every_run() -> None:
    def draw() -> list[float]:
        drawn: list[float] = []

        @given(st.integers())
        def example(_: int) -> None:
            drawn.append(torch.rand(()).item())

        example()
        return drawn

    first = draw()
    torch.manual_seed(12345)
    assert first == draw()
