"""Accuracy on the synthetic tasks of `ccq.data.tasks`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ccq.data.loader import IGNORE_INDEX
from ccq.data.recall import RecallTask
from ccq.evals.perplexity import EvaluatedModel, evaluation_mode

EVALUATION_SEED = 2**64 - 1
"""Of the prompts, so that training with any smaller seed never meets them."""


def evaluate_recall(
    model: EvaluatedModel, task: RecallTask, *, prompts: int, batch_size: int, seed: int = EVALUATION_SEED
) -> NDArray[np.float64]:
    """The share of a prompt's answers that are right: [prompts]. All models that are asked the same task with the same
    seed get the same prompts in the same order, so their shares can be compared pair by pair.

    An answer is right when the largest logit of the whole vocabulary is the target's. Behind the first token of an
    answer of several, the right tokens before it have been read.

    Args:
        model: see `EvaluatedModel`; in eval mode on its own device, and its modes are restored.
        task: what is asked.
        prompts: rows.
        batch_size: rows in one call.

    Raises:
        ValueError: `prompts` or `batch_size` is not positive, or the model gives NaN.
    """
    if prompts < 1 or batch_size < 1:
        raise ValueError(f"prompts and batch_size must be at least 1, got {prompts} and {batch_size}")
    batch = task.batch(seed=seed, step=0, batch_size=prompts)
    shares = np.empty(prompts)
    with evaluation_mode(model) as device:
        for start in range(0, prompts, batch_size):
            rows = slice(start, start + batch_size)
            targets = batch.targets[rows]
            logits = model(batch.inputs[rows].to(device), use_cache=False).logits
            if logits.isnan().any():
                raise ValueError(f"the model gives NaN logits for {task}; was its training stable?")
            asked = targets != IGNORE_INDEX
            right = (logits.argmax(dim=-1).cpu() == targets) & asked
            shares[rows] = (right.sum(1).double() / asked.sum(1)).numpy()
    return shares
