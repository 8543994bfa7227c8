from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from tests.ops.fixtures.write_rules import DECAYS, EXACT, SINGLE, Inputs, WriteRuleBattery

from ccq.ops.gla import gated_linear_attention
from ccq.ops.ssd import chunked_state_space_duality, state_space_duality


class TestStateSpaceDuality(WriteRuleBattery):
    rule = state_space_duality
    chunked = chunked_state_space_duality
    name = "ssd"

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
        return grouped_inputs(rows, tokens, heads, heads, size, value_size, sequences, decay)


def grouped_inputs(
    rows: int,
    tokens: int,
    groups: int,
    heads: int,
    size: int = 8,
    value_size: int = 12,
    sequences: int | None = None,
    decay: str = "mild",
) -> Inputs:
    return {
        "q": torch.randn(rows, tokens, groups, size).double(),
        "k": torch.randn(rows, tokens, groups, size).double(),
        "v": torch.randn(rows, tokens, heads, value_size).double(),
        "log_decay": DECAYS[decay](torch.rand(rows, tokens, heads)).double(),
        "state": torch.randn(rows if sequences is None else sequences, heads, size, value_size).double(),
    }


class TestSharedKeys(TestStateSpaceDuality):
    """The same with queries and keys that all heads share, or every two of them."""

    def inputs(
        self,
        rows: int,
        tokens: int,
        heads: int = 4,
        size: int = 8,
        value_size: int = 12,
        sequences: int | None = None,
        decay: str = "mild",
    ) -> Inputs:
        groups = 2 if heads == 4 else 1
        return grouped_inputs(rows, tokens, groups, heads, size, value_size, sequences, decay)

    # Made for queries of every head.
    test_equals_flash_linear_attention = None
    test_bad_arguments = None


@pytest.mark.parametrize(("groups", "heads"), [(1, 3), (2, 6), (3, 3)])
@pytest.mark.parametrize("decay", ["mild", "0 and -50"])
def test_groups_are_repeated_keys_with_decays_of_their_own(groups: int, heads: int, decay: str) -> None:
    """Every head alone, with the keys of its group and its decay on all channels, through gated linear attention."""
    inputs = grouped_inputs(2, 70, groups, heads, size=5, decay=decay)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    result = state_space_duality(**leaves)
    upstream = torch.randn_like(result.output), torch.randn_like(result.state)
    torch.autograd.backward(result, upstream)
    others = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    for h in range(heads):
        group = h // (heads // groups)
        q, k = (others[name][:, :, group : group + 1] for name in ("q", "k"))
        head = slice(h, h + 1)
        log_decay = others["log_decay"][:, :, head, None].expand_as(q)
        alone = gated_linear_attention(
            q, k, others["v"][:, :, head], log_decay, state=others["state"][:, head], backend="reference"
        )
        assert_close(f"output of head {h}", result.output[:, :, head], alone.output, EXACT)
        assert_close(f"state of head {h}", result.state[:, head], alone.state, EXACT)
        torch.autograd.backward(alone, (upstream[0][:, :, head], upstream[1][:, head]))
    for name, x in leaves.items():
        assert_close(f"gradient of {name}", x.grad, others[name].grad, EXACT)


def test_constant_decay_is_retention() -> None:
    """The parallel form of Sun et al. (arXiv:2307.08621): (Q K^T * D) V with D_ij = gamma^(i - j)."""
    tokens, heads = 150, 3
    q, k = torch.randn(2, 2, tokens, heads, 8).double()
    v = torch.randn(2, tokens, heads, 6).double()
    gamma = 1 - 2.0 ** (-5 - torch.arange(heads).double())
    age = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens)
    weights = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    weights = weights * (gamma[:, None, None] ** age.clamp(min=0)).tril()
    result = state_space_duality(q, k, v, gamma.log().expand(2, tokens, heads))
    assert_close("output", result.output, torch.einsum("bhij,bjhv->bihv", weights, v), EXACT)


def test_small_decay_beside_a_large_one_in_the_same_chunk() -> None:
    """Keys behind a token that erases everything keep their decays to the last digit; differences of sums would not."""
    tokens = 60
    log_decay = torch.full((1, tokens, 1), -1e-3)
    log_decay[:, 10] = -20000.0
    q, k, v = torch.ones(3, 1, tokens, 1, 1)
    result = state_space_duality(q, k, v, log_decay, scale=1.0)
    age = torch.arange(tokens - 10).double()
    expected = torch.exp(-1e-3 * age).cumsum(0)
    assert_close("output", result.output[0, 10:, 0, 0], expected, 3e-7)


def test_shared_keys_in_float32() -> None:
    inputs = grouped_inputs(2, 300, 1, 4, size=16)
    single = {name: x.float() for name, x in inputs.items()}
    expected = state_space_duality(**{name: x.double() for name, x in single.items()}, backend="reference")
    for name, a, b in zip(("output", "state"), state_space_duality(**single), expected, strict=True):
        assert_close(name, a, b, SINGLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.ones(2, 4, 3, 8), "k": torch.ones(2, 4, 3, 8)}, "the 3 groups of q and k must divide the 4 heads"),
        ({"k": torch.ones(2, 4, 4, 8)}, r"k must have shape \[2, 4, 2, 8\]"),
        ({"v": torch.ones(2, 5, 4, 12)}, r"v must have shape \[2, 4, H, V\]"),
        ({"log_decay": torch.zeros(2, 4, 2)}, r"log_decay must have shape \[2, 4, 4\]"),
        ({"log_decay": torch.zeros(2, 4, 4, 8)}, r"log_decay must have shape \[2, 4, 4\]"),
        ({"state": torch.zeros(2, 2, 8, 12)}, r"state must have shape \[2, 4, 8, 12\]"),
    ],
)
def test_bad_groups_are_named(change: dict[str, torch.Tensor], words: str) -> None:
    good = {name: x.float() for name, x in grouped_inputs(2, 4, 2, 4).items()}
    state_space_duality(**good)
    with pytest.raises(ValueError, match=words):
        state_space_duality(**{**good, **change})
