from __future__ import annotations

import torch
from tests.helpers import assert_close
from tests.ops.fixtures.write_rules import DECAYS, EXACT, Inputs, WriteRuleBattery

from ccq.ops.gla import chunked_gated_linear_attention, gated_linear_attention


class TestGatedLinearAttention(WriteRuleBattery):
    rule = gated_linear_attention
    chunked = chunked_gated_linear_attention
    name = "gla"

    def inputs(
        self,
        rows: int,
        tokens: int,
        heads: int = 2,
        size: int = 8,
        value_size: int = 12,
        sequences: int | None = None,
        decay: str = "mild",
    ) -> Inputs:
        shape = (rows, tokens, heads, size)
        return {
            "q": torch.randn(shape).double(),
            "k": torch.randn(shape).double(),
            "v": torch.randn(*shape[:3], value_size).double(),
            "log_decay": DECAYS[decay](torch.rand(shape).double()),
            "state": torch.randn(rows if sequences is None else sequences, heads, size, value_size).double(),
        }


def test_without_decay_it_is_causal_linear_attention() -> None:
    q, k, v = torch.randn(3, 2, 100, 2, 8).double()
    result = gated_linear_attention(q, k, v, torch.zeros_like(q))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).tril() / 8**0.5
    assert_close("output", result.output, torch.einsum("bhij,bjhv->bihv", weights, v), EXACT)
    assert_close("state", result.state, torch.einsum("bjhd,bjhv->bhdv", k, v), EXACT)


def test_small_decay_beside_a_large_one_in_the_same_chunk() -> None:
    """Keys behind a token that erases everything keep their decays to the last digit; differences of sums would not."""
    tokens = 60
    log_decay = torch.full((1, tokens, 1, 1), -1e-3)
    log_decay[:, 10] = -20000.0
    q, k, v = torch.ones(3, 1, tokens, 1, 1)
    result = gated_linear_attention(q, k, v, log_decay, scale=1.0)
    age = torch.arange(tokens - 10).double()
    expected = torch.exp(-1e-3 * age).cumsum(0)
    assert_close("output", result.output[0, 10:, 0, 0], expected, 3e-7)
