"""Geometry against brute force, automatic differentiation and closed forms, in float64."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import assert_close
from torch import Tensor

from ccq.analysis.geometry import (
    alignment,
    angle,
    covariance,
    log_partition,
    margin_change,
    query_weighted_covariance,
    relative_size,
    rounding_noise,
    score_change,
    sign_condition,
    spectrum,
    top_directions,
    unchanged_share,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_covariance_of_every_head_is_torchs_own() -> None:
    keys = drawn(3, 9, 5) + 2
    for head in range(3):
        for sample in (False, True):
            expected = torch.cov(keys[head].T, correction=int(sample))
            assert_close("covariance", covariance(keys, sample=sample)[head], expected, 1e-14)
    with pytest.raises(ValueError, match="at least 2 keys, got 1"):
        covariance(keys[:, :1], sample=True)


def test_spectrum_of_a_known_covariance() -> None:
    """Diag(4, 3, 2, 1, 0) turned by an orthogonal matrix."""
    values = torch.arange(4.0, -1, -1, dtype=torch.float64)
    turn = torch.linalg.qr(drawn(5, 5)).Q
    found = spectrum(turn @ values.diag() @ turn.T, 2)
    assert_close("eigenvalues", found.eigenvalues, values, 1e-14)
    assert found.trace.item() == pytest.approx(10)
    assert found.top_share.item() == pytest.approx(0.7)
    assert found.effective_rank.item() == pytest.approx(100 / 30)
    directions = top_directions(turn @ values.diag() @ turn.T, 2)
    assert_close("directions", (directions.T @ turn[:, :2]).abs(), torch.eye(2, dtype=torch.float64), 1e-13)


def test_spectrum_of_equal_keys_is_zero_and_finite() -> None:
    found = spectrum(covariance(torch.ones(6, 3, dtype=torch.float64)), 1)
    assert [float(found.trace), float(found.top_share), float(found.effective_rank)] == [0, 0, 0]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), tokens=st.integers(2, 40), size=st.integers(2, 12))
def test_trace_of_unit_keys_is_one_less_their_squared_mean(seed: int, tokens: int, size: int) -> None:
    keys = F.normalize(drawn(tokens, size, seed=seed) + 0.5, dim=-1)
    found = spectrum(covariance(keys), 1)
    assert found.trace.item() == pytest.approx(1 - keys.mean(0).square().sum().item(), abs=1e-12)
    assert 1 - 1e-9 <= found.effective_rank.item() <= size + 1e-9


def test_alignment_is_equation_28_written_out() -> None:
    keys = F.normalize(drawn(2, 11, 6), dim=-1)
    found = alignment(keys, 3)
    for head in range(2):
        mean = keys[head].mean(0)
        matrix = torch.zeros(6, 6, dtype=torch.float64)
        for key in keys[head]:
            matrix += torch.outer(key - mean, key - mean) / 10
        vectors = torch.linalg.svd(matrix).U[:, :3]
        for token, key in enumerate(keys[head]):
            inside = sum(float(vectors[:, i] @ (key - mean)) ** 2 for i in range(3))
            assert found[head, token].item() == pytest.approx(inside / float((key - mean).square().sum()), rel=1e-10)


def test_alignment_with_every_direction_is_one_and_that_of_the_mean_zero() -> None:
    keys = drawn(8, 4)
    keys = torch.cat((keys, keys.mean(0, keepdim=True)))
    found = alignment(keys, 4)
    assert_close("alignment", found[:8], torch.ones(8, dtype=torch.float64), 1e-13)
    assert found[8] == 0
    with pytest.raises(ValueError, match="from 1 to the size of a key, 4; got 5"):
        alignment(keys, 5)


def test_alignment_of_keys_on_one_line_beside_one_off_it() -> None:
    """Many keys along u, one across: the first direction is nearly u, and the odd key is nearly unaligned."""
    keys = torch.zeros(101, 3, dtype=torch.float64)
    keys[:50, 0], keys[50:100, 0], keys[100, 1] = 1, -1, 1
    found = alignment(keys, 1)
    assert found[:100].min() > 0.999
    assert found[100] < 1e-6


@pytest.mark.parametrize("degrees", [0.0, 1e-6, 0.02, 30.0, 90.0, 120.0, 180.0])
def test_angle_and_size_of_a_known_turn(degrees: float) -> None:
    query = drawn(7)
    across = drawn(7, seed=1)
    across -= (across @ query) / (query @ query) * query
    across *= query.norm() / across.norm()
    after = 0.8 * (math.cos(math.radians(degrees)) * query + math.sin(math.radians(degrees)) * across)
    change = query - after
    assert angle(query, change).item() == pytest.approx(degrees, rel=1e-9, abs=1e-12)
    # The law of cosines, for sides 1 and 0.8.
    expected = math.sqrt(1 + 0.64 - 1.6 * math.cos(math.radians(degrees)))
    assert relative_size(query, change).item() == pytest.approx(expected, rel=1e-9)


def test_angle_of_a_change_far_below_the_spacing_of_float32() -> None:
    query = torch.tensor([1.0, 0.0])
    assert angle(query, torch.tensor([0.0, 1e-9])).item() == pytest.approx(math.degrees(1e-9), rel=1e-5)
    assert angle(query, torch.zeros(2)) == 0 and angle(torch.zeros(2), torch.zeros(2)) == 0


def test_rounding_to_bfloat16_of_numbers_with_a_known_grid() -> None:
    """Between 1 and 2 bfloat16 has steps of 2^-7; from 2 to 4, of 2^-6."""
    query = torch.tensor([1.0, 1.0, 2.0, 1.5], dtype=torch.float64)
    step = 2.0**-7
    change = torch.tensor([-step, -step / 4, -step / 2, -step / 2], dtype=torch.float64)
    # Rounded: the first is kept; the second and third are lost; the fourth, half a step, goes to the even 1.5.
    lost = math.hypot(step / 4, step / 2, step / 2)
    assert rounding_noise(query, change).item() == pytest.approx(lost / float(change.norm()), rel=1e-12)
    assert unchanged_share(query, change).item() == 0.75
    assert rounding_noise(query, torch.zeros(4, dtype=torch.float64)) == 0
    assert unchanged_share(query, change, torch.float32).item() == 0


def test_scores_and_margins_change_as_the_corrected_query_says() -> None:
    keys, query = drawn(2, 9, 5), drawn(2, 5, seed=1)
    change = 0.3 * (covariance(keys) @ query.unsqueeze(-1)).squeeze(-1)
    before, after = ((keys @ x.unsqueeze(-1)).squeeze(-1) for x in (query, query - change))
    assert_close("scores", score_change(keys, change), after - before, 1e-12)
    widened = (after[:, 0] - after[:, 1]) - (before[:, 0] - before[:, 1])
    assert_close("margin", margin_change(keys[:, 0], keys[:, 1], change), widened, 1e-12)
    # Equation 11: the change of a score is minus lambda times the covariance of two scores.
    for head in range(2):
        for j in range(9):
            pair = torch.stack((keys[head] @ keys[head, j], keys[head] @ query[head]))
            expected = -0.3 * torch.cov(pair, correction=0)[0, 1]
            assert score_change(keys, change)[head, j].item() == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize(
    ("alpha", "beta", "along", "helps"),
    [(0.2, 0.8, 0.9, 1), (0.8, 0.2, 0.9, -1), (0.2, 0.8, -0.5, -1), (0.5, 0.5, 0.9, 0), (0.2, 0.8, 0.0, 0)],
)
def test_worked_example_in_two_dimensions(alpha: float, beta: float, along: float, helps: int) -> None:
    """The paper's toy (equation 26): keys that vary along u alone make Sigma = rho u u^T exactly, and the margin moves
    by lambda rho (beta - alpha)(u . q), to either side, or not at all.
    """

    def unit(x: float) -> Tensor:
        return torch.tensor([x, math.sqrt(1 - x * x)], dtype=torch.float64)

    c, gate = 0.9, 0.4
    keys = torch.stack((unit(c), unit(-c))).repeat(3, 1)
    u = torch.tensor([1.0, 0.0], dtype=torch.float64)
    sigma = covariance(keys)
    assert_close("Sigma", sigma, c * c * torch.outer(u, u), 1e-14)
    target, distractor, query = unit(alpha), unit(beta), unit(along)
    condition = sign_condition(target, distractor, query, u).item()
    assert condition == pytest.approx((beta - alpha) * along)
    clean = query - gate * sigma @ query
    moved = float((target - distractor) @ clean - (target - distractor) @ query)
    assert moved == pytest.approx(gate * c * c * condition, abs=1e-14)
    assert margin_change(target, distractor, gate * sigma @ query).item() == pytest.approx(moved, abs=1e-14)
    assert (moved > 1e-12) - (moved < -1e-12) == helps


def test_worked_example_of_a_query_near_its_target() -> None:
    """Equation 27: with a distractor on u (beta = 1) and q = target + noise, the margin moves by
    lambda rho (1 - alpha)(alpha + u . noise).
    """
    alpha, gate, rho = 0.3, 0.5, 0.7
    u = torch.tensor([1.0, 0.0], dtype=torch.float64)
    target = torch.tensor([alpha, math.sqrt(1 - alpha**2)], dtype=torch.float64)
    for noise in (0.1, -0.1, -0.3, -0.6):
        query = target + torch.tensor([noise, 0.2], dtype=torch.float64)
        change = gate * rho * torch.outer(u, u) @ query
        expected = gate * rho * (1 - alpha) * (alpha + noise)
        assert margin_change(target, u, change).item() == pytest.approx(expected, abs=1e-14)
        assert gate * rho * sign_condition(target, u, query, u).item() == pytest.approx(expected, abs=1e-14)


def test_sign_condition_summed_over_all_directions_is_the_margin() -> None:
    keys, (target, distractor, query) = drawn(30, 4), drawn(3, 4, seed=1)
    sigma = covariance(keys)
    values, directions = torch.linalg.eigh(sigma)
    terms = sign_condition(target, distractor, query, directions.T)
    expected = margin_change(target, distractor, sigma @ query)
    assert (values * terms).sum().item() == pytest.approx(expected.item(), rel=1e-12)


def test_log_partition_and_its_derivatives() -> None:
    """Value, mean and covariance are the first three terms at 0, by automatic differentiation."""
    keys = drawn(12, 4)
    query = drawn(4, seed=1)

    def partition(q: Tensor) -> Tensor:
        return torch.log(torch.exp(keys @ q).sum())

    found = log_partition(query, keys)
    assert found.exact.item() == pytest.approx(partition(query).item(), rel=1e-13)
    zero = torch.zeros(4, dtype=torch.float64)
    gradient = torch.autograd.functional.jacobian(partition, zero)
    hessian = torch.autograd.functional.hessian(partition, zero)
    quadratic = partition(zero) + gradient @ query + query @ hessian @ query / 2
    assert found.quadratic.item() == pytest.approx(quadratic.item(), rel=1e-12)
    assert found.linear.item() == pytest.approx(float(partition(zero) + gradient @ query), rel=1e-12)
    assert found.remainder.item() == pytest.approx(partition(query).item() - quadratic.item(), rel=1e-10)
    assert_close("Sigma", hessian, covariance(keys), 1e-13)
    there = torch.autograd.functional.hessian(partition, query)
    assert_close("at q", query_weighted_covariance(query, keys), there, 1e-12)
    assert_close("at 0", query_weighted_covariance(zero, keys), covariance(keys), 1e-13)


def test_remainder_is_of_the_third_order() -> None:
    """The third cumulant over 6 of skewed scores, and a tenth of the length makes a thousandth of the remainder."""
    keys = drawn(5, 40, 3).exp()
    query = F.normalize(drawn(5, 3, seed=1), dim=-1)
    remainders = [log_partition(length * query, keys).remainder for length in (1e-2, 1e-3)]
    assert_close("thousandth", remainders[1], remainders[0] / 1000, 3e-2)
    scores = (keys @ query.unsqueeze(-1)).squeeze(-1)
    third = (scores - scores.mean(-1, keepdim=True)).pow(3).mean(-1)
    assert_close("cumulant", remainders[0], 1e-6 * third / 6, 3e-2)


def test_weighted_covariance_of_every_head_is_that_of_repeated_keys() -> None:
    """Weights that are multiples of one number are the same as repeating keys."""
    distinct = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
    counts = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    query = torch.linalg.lstsq(torch.cat((distinct, torch.ones(3, 1, dtype=torch.float64)), 1), counts.log()).solution
    found = query_weighted_covariance(query[:2].expand(2, 2), distinct.expand(2, 3, 2))
    assert_close("weighted", found[1], covariance(distinct.repeat_interleave(counts.long(), 0)), 1e-13)


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], found)  # type: ignore[index]
    # Of keys in general directions, the mean alignment is the share of the variance in those directions.
    aligned = found["alignment"](found["keys"], 16).mean().item()
    assert aligned == pytest.approx(found["found"].top_share.mean().item(), abs=0.02)
