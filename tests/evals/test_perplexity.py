"""Perplexity against a plain count over tokens, with models whose probabilities are known."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ccq.evals.perplexity import evaluate_perplexity

VOCABULARY = 11
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = np.random.Generator(np.random.Philox(key=1)).integers(0, VOCABULARY, 500).astype(np.uint16)


class Recurrent(nn.Module):
    """Logits depend on every token since the start of the window, so window borders matter; dropout would show."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(TABLE.clone())
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.calls: list[tuple[int, int]] = []

    def forward(self, tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        assert not self.training
        assert not torch.is_grad_enabled()
        assert tokens.dtype == torch.int64
        self.calls.append(tuple(tokens.shape))
        memory = torch.zeros(len(tokens), VOCABULARY, dtype=torch.float64)
        logits = []
        for t in range(tokens.shape[1]):
            memory = 0.5 * memory + self.table[tokens[:, t]]
            logits.append(memory)
        return SimpleNamespace(logits=self.frozen(self.dropout(torch.stack(logits, dim=1))))


def brute_force(tokens: list[int], length: int, predicted: int) -> list[float]:
    """Loss of every predicted token, one at a time in Python floats."""
    table = TABLE.tolist()
    losses = []
    for target in range(1, predicted + 1):
        start = (target - 1) // length * length
        memory = [0.0] * VOCABULARY
        for token in tokens[start:target]:
            memory = [0.5 * old + new for old, new in zip(memory, table[token], strict=True)]
        losses.append(math.log(sum(map(math.exp, memory))) - memory[tokens[target]])
    return losses


def evaluate(model: Any = None, tokens: Any = TOKENS, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"lengths": [8, 32, 16], "max_tokens": 200, "batch_size": 3, "training_length": 16}
    return evaluate_perplexity(model or Recurrent(), tokens, **arguments | changes)


def test_losses_agree_with_a_count_token_by_token() -> None:
    for result, length in zip(evaluate(), (8, 32, 16), strict=True):
        losses = np.array(brute_force(TOKENS.tolist(), length, 192)).reshape(-1, length)
        assert result["length"] == length
        assert result["multiple"] == length / 16
        assert result["tokens"] == 192
        assert result["windows"] == 192 // length
        assert result["loss"] == pytest.approx(losses.mean(), rel=1e-6)
        assert result["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-6)
        error = losses.mean(axis=1).std(ddof=1) / math.sqrt(len(losses))
        assert result["standard_error"] == pytest.approx(error, rel=1e-5)


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    def uniform(tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        return SimpleNamespace(logits=torch.zeros(*tokens.shape, VOCABULARY))

    for result in evaluate(uniform):
        assert result["perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)
        assert result["standard_error"] == pytest.approx(0, abs=1e-7)


def test_every_length_scores_the_same_tokens() -> None:
    """A model without memory cannot tell the lengths apart, because no token is left out at a window's start."""

    def bigram(tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        return SimpleNamespace(logits=TABLE[tokens])

    losses = [result["loss"] for result in evaluate(bigram, lengths=[1, 3, 48, 192])]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-12)


@given(st.integers(1, 30))
def test_batch_size_does_not_change_a_score(batch_size: int) -> None:
    assert evaluate(batch_size=batch_size) == evaluate(batch_size=1000)


def test_batches_bound_what_the_model_sees_at_once() -> None:
    model = Recurrent()
    evaluate(model, batch_size=5)
    assert model.calls == [(5, 8)] * 4 + [(4, 8)] + [(5, 32), (1, 32)] + [(5, 16)] * 2 + [(2, 16)]


@given(st.integers(33, 500), st.integers(32, 500))
def test_how_many_tokens_are_scored(available: int, max_tokens: int) -> None:
    def uniform(tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        return SimpleNamespace(logits=torch.zeros(*tokens.shape, VOCABULARY))

    expected = max(n for n in range(0, 500, 32) if n <= max_tokens and n + 1 <= available)
    for result in evaluate(uniform, TOKENS[:available], max_tokens=max_tokens):
        assert result["tokens"] == expected


def test_lengths_that_do_not_divide_each_other_share_a_common_multiple() -> None:
    assert [r["tokens"] for r in evaluate(lengths=[6, 9, 4], max_tokens=100)] == [72, 72, 72]


def test_one_window_has_no_standard_error() -> None:
    (result,) = evaluate(lengths=[32], max_tokens=40)
    assert result["windows"] == 1
    assert result["standard_error"] is None


def test_low_precision_logits_are_scored_in_float32() -> None:
    def half(tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        return SimpleNamespace(logits=TABLE[tokens].bfloat16())

    (result,) = evaluate(half, lengths=[32])
    rounded = torch.log_softmax(TABLE.bfloat16().double(), dim=-1)
    text = torch.from_numpy(TOKENS[:193].astype(np.int64))
    assert result["loss"] == pytest.approx(-rounded[text[:-1], text[1:]].mean().item(), rel=1e-6)


def test_modes_are_restored_even_after_an_error() -> None:
    model = Recurrent()
    evaluate(model)
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
    model.forward = lambda tokens, **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        evaluate(model)
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
    assert torch.is_grad_enabled()
    model.eval()
    del model.forward
    evaluate(model)
    assert not model.training


def test_a_model_that_diverged_is_named() -> None:
    def diverged(tokens: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
        return SimpleNamespace(logits=torch.full((*tokens.shape, VOCABULARY), math.nan))

    with pytest.raises(ValueError, match=r"loss at length 8 is nan; .*was its training stable\?"):
        evaluate(diverged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": TOKENS[:32]}, r"stream of 32 tokens .*at least 32 and a stream of at least 33"),
        ({"tokens": TOKENS[:0]}, r"stream of 0 tokens are too little"),
        ({"max_tokens": 31}, r"max_tokens 31 and .*max_tokens of at least 32"),
        ({"lengths": []}, r"lengths are \[\]; give at least one"),
        ({"lengths": [8, 8]}, r"lengths are \[8, 8\]; .*each once"),
        ({"lengths": [0, 8]}, r"lengths are \[0, 8\]; .*positive"),
        ({"batch_size": 0}, r"batch_size is 0; give at least 1"),
        ({"training_length": 0}, r"training_length is 0; give at least 1"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(**changes)


@pytest.mark.parametrize("tokens", [TOKENS.astype(float), TOKENS.reshape(2, -1), torch.from_numpy(TOKENS)])
def test_streams_of_another_kind_are_refused(tokens: Any) -> None:
    with pytest.raises(TypeError, match="one-dimensional integer numpy array"):
        evaluate(tokens=tokens)
