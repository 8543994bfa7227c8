"""What must hold for any input: bounds on the spectrum, identities, independence of how the input is cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import assert_close
from torch import Tensor

from ccq.ops.query import curvature_conditioned_query, l2_normalize

seeds = st.integers(0, 2**31)
backends = st.sampled_from(["reference", "torch"])


def random_keys(seed: int, tokens: int, size: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Queries and keys of very different geometry: with a mean, anisotropic, some of them zero."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    k = normal(1, tokens, 1, size) * torch.exp(2 * normal(size)) + normal(size) * normal(1)
    k = k * (torch.rand(1, tokens, 1, 1, generator=random, dtype=torch.float64) > 0.1)
    return normal(1, tokens, 1, size), k, random


@given(seed=seeds, tokens=st.integers(1, 80), size=st.integers(1, 9), gate=st.floats(0, 1), backend=backends)
def test_a_gate_in_the_unit_interval_never_lengthens_the_query(
    seed: int, tokens: int, size: int, gate: float, backend: str
) -> None:
    q, k, _ = random_keys(seed, tokens, size)
    result = curvature_conditioned_query(q, k, gate, backend=backend)
    assert (result.query.norm(dim=-1) <= l2_normalize(q).norm(dim=-1) + 1e-12).all()


@given(seed=seeds, tokens=st.integers(1, 80), size=st.integers(1, 6), gate=st.floats(0, 1), backend=backends)
def test_spectrum_and_trace(seed: int, tokens: int, size: int, gate: float, backend: str) -> None:
    """Unit vectors read after the last key give the operator: spectrum in [1 - gate, 1], trace of Sigma at most 1."""
    _, k, _ = random_keys(seed, tokens, size)
    statistics = curvature_conditioned_query(k, k, 0.0, backend=backend).statistics
    rows = type(statistics)(*(field.expand(size, *field.shape[1:]) for field in statistics))
    # A zero key would be counted, so the operator is read from the definition's numbers: M, m and t.
    second_moment, mean = statistics.second_moment[0, 0] / tokens, statistics.total[0, 0] / tokens
    sigma = second_moment - mean.outer(mean)
    assert sigma.trace() <= 1 + 1e-12
    assert torch.linalg.eigvalsh(sigma)[0] >= -1e-12
    read = curvature_conditioned_query(
        torch.eye(size, dtype=torch.float64)[:, None, None],
        torch.zeros(size, 1, 1, size, dtype=torch.float64),
        gate,
        statistics=rows,
        normalize=False,
        backend=backend,
    ).query[:, 0, 0]
    with_zero_key = second_moment * tokens / (tokens + 1) - (mean * tokens / (tokens + 1)).outer(
        mean * tokens / (tokens + 1)
    )
    assert_close("operator", read, torch.eye(size, dtype=torch.float64) - gate * with_zero_key, 1e-12, floor=1e-13)
    spectrum = torch.linalg.eigvalsh(read)
    assert spectrum[0] >= 1 - gate - 1e-12
    assert spectrum[-1] <= 1 + 1e-12


@given(seed=seeds, tokens=st.integers(1, 80), size=st.integers(1, 9), normalize=st.booleans(), backend=backends)
def test_a_zero_gate_returns_the_query_bit_for_bit(
    seed: int, tokens: int, size: int, normalize: bool, backend: str
) -> None:
    q, k, _ = random_keys(seed, tokens, size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        result = curvature_conditioned_query(q.to(dtype), k.to(dtype), 0.0, normalize=normalize, backend=backend)
        expected = l2_normalize(q.to(dtype)).to(dtype) if normalize else q.to(dtype)
        assert torch.equal(result.query, expected)


@given(seed=seeds, size=st.integers(1, 9), gate=st.floats(-3, 3), backend=backends)
def test_the_first_key_has_no_covariance(seed: int, size: int, gate: float, backend: str) -> None:
    q, k, _ = random_keys(seed, 1, size)
    result = curvature_conditioned_query(q, k, gate, return_correction=True, backend=backend)
    assert result.correction.abs().max() <= 1e-15


@given(seed=seeds, tokens=st.integers(1, 100), size=st.integers(1, 9), gate=st.floats(-3, 3))
def test_the_operator_is_linear_in_the_query(seed: int, tokens: int, size: int, gate: float) -> None:
    q, k, random = random_keys(seed, tokens, size)
    other = torch.randn(q.shape, generator=random, dtype=torch.float64)

    def read(x: Tensor) -> Tensor:
        return curvature_conditioned_query(x, l2_normalize(k), gate, normalize=False).query

    assert_close("sum", read(2 * q - other), 2 * read(q) - read(other), 1e-12, floor=1e-13)


@given(seed=seeds, tokens=st.integers(1, 100), size=st.integers(1, 9), shift=st.floats(-2, 2))
def test_a_common_shift_of_the_keys_does_not_matter_when_centred(
    seed: int, tokens: int, size: int, shift: float
) -> None:
    q, k, _ = random_keys(seed, tokens, size)
    unit = l2_normalize(k)
    still, moved = (
        curvature_conditioned_query(q, keys, 1.0, normalize=False, return_correction=True).correction
        for keys in (unit, unit + shift)
    )
    assert (moved - still).abs().max() <= 1e-12 * (1 + q.abs().max())


@given(seed=seeds, tokens=st.integers(1, 60), size=st.integers(1, 6))
def test_opposite_keys_have_no_mean_so_centring_changes_nothing(seed: int, tokens: int, size: int) -> None:
    """At even positions the keys seen so far come in pairs k, -k: their mean is zero."""
    q, k, _ = random_keys(seed, tokens, size)
    q, k = (x.repeat_interleave(2, 1) for x in (q, k))
    k[:, 1::2] *= -1
    centred, plain = (
        curvature_conditioned_query(q, k, 1.0, centred=flag, return_correction=True).correction[:, 1::2]
        for flag in (True, False)
    )
    assert_close("correction", centred, plain, 1e-12, floor=1e-13)


@given(seed=seeds, size=st.integers(1, 6), lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6))
def test_packing_equals_left_padding(seed: int, size: int, lengths: list[int]) -> None:
    """The same documents as one packed row and as a left-padded batch."""
    total, longest = sum(lengths), max(lengths)
    q, k, _ = random_keys(seed, max(total, 1), size)
    q, k = q[:, :total], k[:, :total]
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    packed = curvature_conditioned_query(q, k, 0.7, cu_seqlens=boundaries, return_correction=True)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths).unsqueeze(1)
    batch_q, batch_k = (torch.zeros(len(lengths), longest, 1, size, dtype=torch.float64) for _ in range(2))
    batch_q[mask], batch_k[mask] = q[0], k[0]
    padded = curvature_conditioned_query(batch_q, batch_k, 0.7, mask=mask, return_correction=True)
    assert_close("correction", padded.correction[mask], packed.correction[0], 1e-12, floor=1e-13)
    assert_close("second moment", padded.statistics.second_moment, packed.statistics.second_moment, 1e-12, floor=1e-13)
    assert torch.equal(padded.statistics.count, packed.statistics.count)
