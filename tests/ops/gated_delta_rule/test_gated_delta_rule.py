from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close
from tests.ops.fixtures.write_rules import DECAYS, EXACT, SINGLE, Inputs, WriteRuleBattery

from ccq.ops.gated_delta_rule import chunked_gated_delta_rule, gated_delta_rule


class TestGatedDeltaRule(WriteRuleBattery):
    rule = gated_delta_rule
    chunked = chunked_gated_delta_rule
    name = "gated_delta_rule"

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
            "k": F.normalize(torch.randn(shape).double(), dim=-1),
            "v": torch.randn(*shape[:3], value_size).double(),
            "log_decay": DECAYS[decay](torch.rand(shape[:3]).double()),
            "beta": torch.rand(shape[:3]).double(),
            "state": torch.randn(rows if sequences is None else sequences, heads, size, value_size).double(),
        }

    @pytest.mark.parametrize("strength", [1.0, 2.0])
    @pytest.mark.parametrize("spread", [0.0, 1e-4])
    def test_equal_keys(self, strength: float, spread: float) -> None:
        """All keys of a chunk (nearly) the same and beta at its limit: the triangular inverse must not grow."""
        inputs = self.inputs(2, 200, size=16, decay="none")
        same = inputs["k"][:, :1] + spread * torch.randn(inputs["k"].shape)
        inputs["k"] = F.normalize(same, dim=-1)
        inputs["beta"] = torch.full_like(inputs["beta"], strength)
        grads = self.random_gradients(inputs)
        self.compare(self.run(inputs, *grads), self.run(inputs, *grads, backend="reference"), 10 * EXACT)
        single = {name: x.float() for name, x in inputs.items()}
        expected = self.run({name: x.double() for name, x in single.items()}, *grads, backend="reference")
        self.compare(self.run(single, *grads), expected, 10 * SINGLE)

    def test_bad_beta(self) -> None:
        inputs = self.inputs(2, 4)
        inputs["beta"][1, 2, 0] = float("nan")
        with pytest.raises(ValueError, match="beta must be finite"):
            gated_delta_rule(**inputs)
        with pytest.raises(ValueError, match=r"beta must have shape \[2, 4, 2\]"):
            gated_delta_rule(**{**inputs, "beta": torch.ones(2, 4, 2, 8).double()})


def test_one_unit_key_recalls_its_last_value() -> None:
    """With a single unit key, beta = 1 and no decay the state holds the newest value and nothing else."""
    tokens = 150
    key = F.normalize(torch.randn(8), dim=0)
    q, v = torch.randn(1, tokens, 1, 8), torch.randn(1, tokens, 1, 6)
    none, all_of_it = torch.zeros(1, tokens, 1), torch.ones(1, tokens, 1)
    result = gated_delta_rule(q, key.expand_as(q), v, none, all_of_it, scale=1.0)
    assert_close("output", result.output, (q @ key).unsqueeze(-1) * v, 1e-5)
    assert_close("state", result.state[0, 0], key.unsqueeze(-1) * v[0, -1], 1e-5)


def test_orthogonal_keys_are_linear_attention() -> None:
    """Orthogonal keys overwrite nothing: the rule is linear attention with values scaled by beta."""
    tokens = 12
    k = torch.linalg.qr(torch.randn(16, 16).double())[0][:tokens].view(1, tokens, 1, 16)
    q, v = torch.randn(1, tokens, 1, 16).double(), torch.randn(1, tokens, 1, 6).double()
    beta = torch.rand(1, tokens, 1).double()
    result = gated_delta_rule(q, k, v, torch.zeros_like(beta), beta)
    weights = torch.einsum("bihd,bjhd->bhij", q, k).tril() / 4
    expected = torch.einsum("bhij,bjhv->bihv", weights, v * beta.unsqueeze(-1))
    assert_close("output", result.output, expected, EXACT)
