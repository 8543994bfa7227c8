"""Accuracy on synthetic tasks, with models that know the answer, know some of them, or are asked row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ccq.data.frequency import FrequentWords
from ccq.data.loader import IGNORE_INDEX
from ccq.data.recall import AssociativeRecall
from ccq.evals.recall import EVALUATION_SEED, evaluate_recall
from ccq.models import CCQForCausalLM, preset

TASK = AssociativeRecall(24, pairs=4, queries=3, keys=9, values=5)


def reader(input_ids: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> Any:
    """Says the value that followed the token before, wherever there was one: a dictionary, with no parameters."""
    logits = torch.zeros(*input_ids.shape, TASK.vocabulary_size)
    for row, tokens in enumerate(input_ids.tolist()):
        for place, token in enumerate(tokens):
            if token in tokens[:place]:
                logits[row, place, tokens[tokens.index(token) + 1]] = 1
    return SimpleNamespace(logits=logits)


def test_a_reader_is_always_right() -> None:
    np.testing.assert_array_equal(evaluate_recall(reader, TASK, prompts=7, batch_size=3), np.ones(7))


@pytest.mark.parametrize("task", [TASK, FrequentWords(24, 5, 3, vocabulary=9)])
def test_shares_are_those_of_asking_row_by_row(task: Any) -> None:
    model = CCQForCausalLM(preset("gla+ccq-tiny", vocab_size=task.vocabulary_size)).eval()
    batch = task.batch(seed=EVALUATION_SEED, step=0, batch_size=20)
    expected = []
    with torch.no_grad():
        for tokens, targets in zip(batch.inputs, batch.targets.tolist(), strict=True):
            said = model(tokens[None]).logits[0].argmax(-1).tolist()
            right = [word == target for word, target in zip(said, targets, strict=True) if target != IGNORE_INDEX]
            expected.append(sum(right) / len(right))
    found = evaluate_recall(model, task, prompts=20, batch_size=8)
    np.testing.assert_array_equal(found, expected)
    assert 0 < found.mean() < 1


def test_what_cannot_be_asked_is_named() -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 1"):
        evaluate_recall(reader, TASK, prompts=0, batch_size=1)

    def broken(input_ids: Tensor, **others: Any) -> Any:
        return SimpleNamespace(logits=torch.full((*input_ids.shape, TASK.vocabulary_size), torch.nan))

    with pytest.raises(ValueError, match=r"NaN logits for AssociativeRecall\(length=24"):
        evaluate_recall(broken, TASK, prompts=2, batch_size=1)
