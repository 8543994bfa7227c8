"""The Triton kernels inside the chunks of gated linear attention, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import relative_error
from torch import Tensor

pytest.importorskip("triton")

from ccq.ops.flash_linear_attention import packing
from ccq.ops.gla import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(
    tokens: int, size: int, dtype: torch.dtype, *, rows: int = 2, heads: int = 2, decay: float = 1 / 16
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, and decays of every token, in units of log 2."""
    random = torch.Generator().manual_seed(tokens + size)
    q, k, g = (torch.randn(rows, tokens, heads, size, generator=random) for _ in range(3))
    decays = decay * torch.nn.functional.logsigmoid(g) / math.log(2)
    return q.to(DEVICE, dtype), k.to(DEVICE, dtype), decays.to(DEVICE)


def chunks(tokens: int, chunk: int, boundaries: list[int] | None) -> list[slice]:
    edges = [0, tokens] if boundaries is None else boundaries
    return [slice(i, min(i + chunk, end)) for begin, end in pairwise(edges) for i in range(begin, end, chunk)]


def sums(decays: Tensor, cut: list[slice]) -> Tensor:
    return torch.cat([decays[:, here].cumsum(1) for here in cut], 1)


def exact_weights(q: Tensor, k: Tensor, decays: Tensor, scale: float, cut: list[slice], chunk: int) -> Tensor:
    """One number after the other: the decay between two tokens is the product of the decays on the way."""
    found = torch.zeros(*q.shape[:3], chunk, dtype=torch.float64, device=q.device)
    for here in cut:
        queries, keys, factors = (x[:, here].double() for x in (q, k, torch.exp2(decays.double())))
        for j in range(queries.shape[1]):
            reached = keys[:, j]
            for i in range(j, queries.shape[1]):
                reached = reached if i == j else reached * factors[:, i]
                found[:, here.start + i, :, j] = scale * (queries[:, i] * reached).sum(-1)
    return found


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def check(
    tokens: int, size: int, dtype: torch.dtype, tolerance: float, *, decay: float = 1 / 16, chunk: int = 64,
    boundaries: list[int] | None = None,
) -> None:  # fmt: skip
    q, k, decays = draw(tokens, size, dtype, rows=2 if boundaries is None else 1, decay=decay)
    cut = chunks(tokens, chunk, boundaries)
    packed = packing(boundaries, q)
    places = {"chunk": chunk, "cu_seqlens": packed.cu_seqlens, "chunk_indices": packed.chunk_indices}
    summed = sums(decays, cut)
    # Sums in float32 are what the kernels are given; their own rounding is not asked about here.
    exact = torch.cat([torch.diff(summed[:, here].double(), dim=1, prepend=0 * decays[:, :1]) for here in cut], 1)
    inputs = leaves(q, k)
    expected = exact_weights(*inputs, exact, 0.5, cut, chunk)
    found = kernels.chunk_weights(q, k, summed, 0.5, **places)
    assert found.dtype == dtype
    assert relative_error(found, expected.detach()) <= tolerance
    # What is later is given as NaN: nothing may read it.
    random = torch.Generator().manual_seed(0)
    gradient = torch.randn(*found.shape, generator=random).to(DEVICE)
    for here in cut:
        later = torch.ones(here.stop - here.start, chunk, device=DEVICE).triu(1).bool()[None, :, None]
        gradient[:, here] = torch.where(later, math.nan, gradient[:, here])
    expected_gradients = torch.autograd.grad((expected * gradient.double().nan_to_num()).sum() / 0.5, inputs)
    for actual, right in zip(
        kernels.chunk_gradients(q, k, summed, gradient, **places), expected_gradients, strict=True
    ):
        assert actual.dtype == torch.float32
        # float16 operands for bfloat16, whose products are summed up in float32.
        assert relative_error(actual, right) <= (1e-3 if dtype == torch.bfloat16 else 3e-6)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_every_length(tokens: int) -> None:
    check(tokens, 16, torch.float32, 1e-6)


@pytest.mark.parametrize("size", [16, 32, 48, 64, 80])
def test_every_size(size: int) -> None:
    """Also those that are no power of two, or more than a program takes."""
    check(40, size, torch.float32, 1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("decay", [0.0, 1 / 16, 1.0, 30.0])
def test_half_precision(dtype: torch.dtype, tolerance: float, decay: float) -> None:
    """Weights are rounded to the dtype once, and have the mantissa of float16 before. A decay of 30 is one of 2^-35 a
    token in the mean: nothing overflows.
    """
    check(70, 32, dtype, tolerance, decay=decay)


@pytest.mark.parametrize("decay", [0.0, 1.0, 30.0, 1000.0])
def test_every_decay(decay: float) -> None:
    check(64, 16, torch.float32, 1e-6, decay=decay)


def test_numbers_that_float16_does_not_hold() -> None:
    q, k, decays = draw(20, 16, torch.bfloat16)
    summed, places = sums(decays, [slice(0, 20)]), {"chunk": 64, "cu_seqlens": None, "chunk_indices": None}
    gradient = torch.ones(2, 20, 2, 64, device=DEVICE)
    weights = kernels.chunk_weights(q, k, summed, 1.0, **places)
    gradients = kernels.chunk_gradients(q, k, summed, gradient, **places)
    large, small = 2.0**40, 2.0**-50
    assert torch.equal(kernels.chunk_weights(q * large, k * small, summed, 1.0, **places), weights * (large * small))
    scaled = kernels.chunk_gradients(q * large, k * small, summed, gradient * small, **places)
    for actual, expected, factor in zip(scaled, gradients, (small * small, large * small), strict=True):
        assert torch.equal(actual, expected * factor)


@pytest.mark.parametrize("power", [-118, -124, -130, -math.inf])
def test_the_least_numbers_are_divided_by_no_more_than_has_an_inverse(power: float) -> None:
    q, k, decays = draw(20, 16, torch.bfloat16)
    summed, places = sums(decays, [slice(0, 20)]), {"chunk": 64, "cu_seqlens": None, "chunk_indices": None}
    q, k = q * 2.0**power, k * 2.0**100
    cut = [slice(0, 20)]
    exact = torch.diff(summed.double(), dim=1, prepend=0 * decays[:, :1].double())
    expected = exact_weights(*leaves(q, k), exact, 1.0, cut, 64).detach()
    found = kernels.chunk_weights(q, k, summed, 1.0, **places)
    gradient = torch.ones(2, 20, 2, 64, device=DEVICE)
    gradients = kernels.chunk_gradients(q, k, summed, gradient * 2.0**power, **places)
    assert all(x.isfinite().all() for x in (found, *gradients))
    # Numbers that float32 does not hold as normal ones may be taken for zero.
    if power == -118:
        assert relative_error(found, expected) <= 4e-3
    elif power == -math.inf:
        assert not found.any()


@pytest.mark.parametrize("boundaries", [[0, 5, 5, 70, 71], [0, 64, 128], [0, 1]], ids=str)
def test_packed_documents(boundaries: list[int]) -> None:
    check(boundaries[-1], 16, torch.float32, 1e-6, boundaries=boundaries)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 40),
    size=st.sampled_from([16, 32]),
    decay=st.floats(0, 100),
    chunk=st.sampled_from([16, 32]),
)
def test_any_input(tokens: int, size: int, decay: float, chunk: int) -> None:
    check(tokens, size, torch.float32, 1e-6, decay=decay, chunk=chunk)


def test_the_kernels_compile_and_spill_nothing() -> None:
    """Needs no GPU."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 4
    for row in found:
        assert row["local"] == 0, row
        assert row["shared"] <= 99 * 1024, row


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e2, 3e4])
def test_no_token_changes_what_stands_before_it(size: float, dtype: torch.dtype) -> None:
    """Operands have the range of float16, and tokens of a chunk meet in one tile."""
    q, k, decays = draw(40, 16, dtype)
    q, k = 0.01 * q, 0.01 * k
    summed, places = sums(decays, [slice(0, 40)]), {"chunk": 64, "cu_seqlens": None, "chunk_indices": None}
    before = kernels.chunk_weights(q, k, summed, 1.0, **places)
    k[:, 39] = size
    after = kernels.chunk_weights(q, k, summed, 1.0, **places)
    assert torch.equal(after[:, :39], before[:, :39])


def test_a_gradient_of_one_token_does_not_drown_those_of_others() -> None:
    q, k, decays = draw(40, 16, torch.bfloat16)
    summed, places = sums(decays, [slice(0, 40)]), {"chunk": 64, "cu_seqlens": None, "chunk_indices": None}
    random = torch.Generator().manual_seed(0)
    gradient = torch.randn(2, 40, 2, 64, generator=random).to(DEVICE)
    gradient[:, :39] *= 1e-7
    dq, _ = kernels.chunk_gradients(q, k, summed, gradient, **places)
    expected, _ = kernels.chunk_gradients(q.float(), k.float(), summed, gradient, **places)
    assert relative_error(dq[:, :39], expected[:, :39]) <= 1e-3
