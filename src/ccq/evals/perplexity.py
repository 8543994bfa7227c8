"""Perplexity of held-out text at several window lengths, and the protocol every evaluated model follows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ccq.evals.results import PerplexityResult


class HasLogits(Protocol):
    """What a model returns: an object with next-token logits, floating point [B, T, vocabulary]."""

    @property
    def logits(self) -> Tensor: ...


class EvaluatedModel(Protocol):
    """A language model as the evaluations call it: any of transformers', this library's among them, or any callable of
    this form.

    input_ids is int64 [B, T]. With `logits_to_keep=1` the logits may be those of the last position alone, [B, 1,
    vocabulary]; only `logits[:, -1]` is read then. `use_cache` is False: no call is continued.
    """

    def __call__(self, input_ids: Tensor, *, use_cache: bool, logits_to_keep: int = 0) -> HasLogits: ...


def evaluate_perplexity(
    model: EvaluatedModel,
    tokens: NDArray[Any],
    *,
    lengths: Sequence[int],
    max_tokens: int,
    batch_size: int,
    training_length: int,
) -> list[PerplexityResult]:
    """Mean loss of the same held-out tokens, read in windows of each length.

    The start of the stream is cut into neighbouring windows. A window of length L feeds L tokens and is scored on the
    token after each of them, so at every length the very same tokens are predicted, each once; only how far back a
    model can look differs. Their number is the largest common multiple of all lengths within `max_tokens` and the
    stream.

    Args:
        model: see `EvaluatedModel`; a module is evaluated in eval mode on its own device, and its modes are restored.
        tokens: integer [tokens], the held-out stream.
        lengths: window lengths in tokens, different and positive.
        max_tokens: upper limit of predicted tokens.
        batch_size: windows in one call; it bounds the memory and does not change which numbers are averaged.
        training_length: the length that `multiple` refers to.

    Returns:
        One result for each length, in the given order; losses in nats a token, summed in float64 from float32
        log-probabilities.

    Raises:
        ValueError: the stream or `max_tokens` holds no common multiple of the lengths, a number is not positive, or a
            loss is not finite.
        TypeError: the stream is not a one-dimensional integer array.
    """
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise TypeError(
            f"tokens is {found}; give a one-dimensional integer numpy array, such as TokenizedCorpus.held_out"
        )
    for name, given in (("batch_size", batch_size), ("training_length", training_length), ("max_tokens", max_tokens)):
        if given < 1:
            raise ValueError(f"{name} is {given}; give at least 1")
    if not lengths or min(lengths) < 1 or len(set(lengths)) < len(lengths):
        raise ValueError(f"lengths are {list(lengths)}; give at least one positive length, each once")
    common = math.lcm(*lengths)
    predicted = min(max_tokens, len(tokens) - 1) // common * common
    if predicted < 1:
        raise ValueError(
            f"max_tokens {max_tokens} and a stream of {len(tokens)} tokens are too little for lengths {list(lengths)}: "
            f"needed are max_tokens of at least {common} and a stream of at least {common + 1}; "
            "give more text, or lengths that divide the largest one"
        )
    with evaluation_mode(model) as device:
        return [
            _at_length(model, tokens[: predicted + 1], length, batch_size, training_length, device)
            for length in lengths
        ]


@contextmanager
def evaluation_mode(model: EvaluatedModel) -> Iterator[torch.device]:
    """Inference without gradients; a module is in eval mode meanwhile, and every submodule gets its own mode back.

    Gives the device that the inputs belong on: the module's, or the CPU for other callables.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    parameter = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        with torch.inference_mode():
            yield torch.device("cpu") if parameter is None else parameter.device
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _at_length(
    model: EvaluatedModel,
    tokens: NDArray[Any],
    length: int,
    batch_size: int,
    training_length: int,
    device: torch.device,
) -> PerplexityResult:
    inputs = tokens[:-1].reshape(-1, length)
    targets = tokens[1:].reshape(-1, length)
    windows = len(inputs)
    losses: list[float] = []
    for start in range(0, windows, batch_size):
        rows = slice(start, start + batch_size)
        logits = model(torch.from_numpy(inputs[rows].astype(np.int64)).to(device), use_cache=False).logits
        expected = torch.from_numpy(targets[rows].astype(np.int64)).to(device)
        # Window by window: the float32 copy stays small, and the sums do not depend on the batch size.
        losses += [
            functional.cross_entropy(row.float(), target, reduction="none").double().mean().item()
            for row, target in zip(logits, expected, strict=True)
        ]
    loss = math.fsum(losses) / windows
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss at length {length} is {loss}; the model gives logits that are not finite: "
            "was its training stable?"
        )
    standard_error = None
    if windows > 1:
        variance = math.fsum((value - loss) ** 2 for value in losses) / (windows - 1)
        standard_error = math.sqrt(variance / windows)
    return PerplexityResult(
        length=length,
        multiple=multiple_of(length, training_length),
        tokens=windows * length,
        windows=windows,
        loss=loss,
        standard_error=standard_error,
        perplexity=math.exp(loss),
    )


def multiple_of(length: int, training_length: int) -> float:
    """length / training_length, as an integer where it is one."""
    return length // training_length if length % training_length == 0 else length / training_length
