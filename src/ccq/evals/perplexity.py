"""Perplexity of text at several window lengths, and the protocol every evaluated model follows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ccq.evals.harness import EvalTask, LoadedModel
from ccq.evals.local_data import HubText, read_text, text_source
from ccq.evals.results import EvalTaskResult, PerplexityResult

_FLOAT_TOKENS = 4096
"""Positions whose logits are converted to float32 at a time."""
POSITION_BIN = 256
"""Positions in one point of a curve."""


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
    return [_at_length(model, tokens[: predicted + 1], length, batch_size, training_length) for length in lengths]


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


def window_losses(
    model: EvaluatedModel, tokens: NDArray[Any], *, length: int, batch_size: int, bos: int | None = None
) -> NDArray[np.float32]:
    """Loss of every predicted token, in nats, computed in float32: [windows, length].

    Args:
        model: see `EvaluatedModel`; evaluated in eval mode, and its modes are restored.
        tokens: integer [windows * length + 1].
        length: tokens of a window; see `evaluate_perplexity`.
        batch_size: windows in one call.
        bos: a token put before every window, which is itself not predicted.
    """
    inputs = tokens[:-1].reshape(-1, length).astype(np.int64)
    targets = torch.from_numpy(tokens[1:].reshape(-1, length).astype(np.int64))
    if bos is not None:
        inputs = np.concatenate([np.full((len(inputs), 1), bos), inputs], axis=1)
    losses = np.empty(targets.shape, dtype=np.float32)
    with evaluation_mode(model) as device:
        for start in range(0, len(inputs), batch_size):
            rows = slice(start, start + batch_size)
            logits = model(torch.from_numpy(inputs[rows]).to(device), use_cache=False).logits[:, -length:]
            # Piece by piece: the float32 copy stays small, and no number depends on the batch size.
            for row, (given, expected) in enumerate(zip(logits, targets[rows].to(device), strict=True)):
                pieces = zip(given.split(_FLOAT_TOKENS), expected.split(_FLOAT_TOKENS), strict=True)
                found = [functional.cross_entropy(x.float(), target, reduction="none") for x, target in pieces]
                losses[start + row] = torch.cat(found).cpu().numpy()
    return losses


def _at_length(
    model: EvaluatedModel, tokens: NDArray[Any], length: int, batch_size: int, training_length: int
) -> PerplexityResult:
    windows = window_losses(model, tokens, length=length, batch_size=batch_size).mean(axis=1, dtype=np.float64)
    loss, standard_error = mean_loss(windows, length)
    return PerplexityResult(
        length=length,
        multiple=multiple_of(length, training_length),
        tokens=len(windows) * length,
        windows=len(windows),
        loss=loss,
        standard_error=standard_error,
        perplexity=math.exp(loss),
    )


def mean_loss(windows: NDArray[np.float64], length: int) -> tuple[float, float | None]:
    """Mean of the windows' losses and its standard error, None for one window.

    Raises:
        ValueError: it is not finite.
    """
    loss = math.fsum(windows) / len(windows)
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss at length {length} is {loss}; the model gives logits that are not finite: "
            "was its training stable?"
        )
    if len(windows) == 1:
        return loss, None
    variance = math.fsum((value - loss) ** 2 for value in windows) / (len(windows) - 1)
    return loss, math.sqrt(variance / len(windows))


def multiple_of(length: int, training_length: int) -> float:
    """length / training_length, as an integer where it is one."""
    return length // training_length if length % training_length == 0 else length / training_length


CORPORA: Mapping[str, HubText] = {
    **{
        name: HubText("Xnhyacinth/LongBench", config, "test", "context")
        for name, config in (
            ("govreport", "gov_report"),
            ("qmsum", "qmsum"),
            ("narrativeqa", "narrativeqa"),
            ("qasper", "qasper"),
        )
    },
    "pg19": HubText("emozilla/pg19", None, "test", "text"),
    "codeparrot": HubText("codeparrot/codeparrot-clean-valid", None, "train", "content"),
}
"""The six corpora of the paper (figures 3 and 4). It does not say which copies and fields were used; these are a choice
of this library."""

_CHARACTERS_PER_TOKEN = 8
"""So much text is read for a token that is wanted: more than a vocabulary of words needs."""


def extrapolation_tasks(
    loaded: LoadedModel,
    corpora: Sequence[str],
    *,
    folder: Path | None,
    lengths: Sequence[int],
    batch_size: int,
    max_tokens: int,
    limit: int | None,
) -> list[EvalTask]:
    """Token perplexity of each corpus in neighbouring windows of each length, one task each.

    The documents of a corpus, each with the tokenizer's end of text behind it where it has one, are one stream. As many
    windows are read as fit; as all are of one length, the mean over windows is weighted by tokens.

    Args:
        loaded: the model.
        corpora: names of `CORPORA`, "stdlib", or of texts in `folder`.
        folder: where the texts are; None for the hub.
        lengths: window lengths in tokens.
        batch_size: windows in one call.
        max_tokens: the most predicted tokens of a corpus and a length.
        limit: the most documents of a corpus; None for no limit.
    """

    @functools.cache
    def stream(name: str) -> tuple[NDArray[np.int64], dict[str, Any]]:
        return loaded.processes.from_first(functools.partial(read_stream, name))

    def read_stream(name: str) -> tuple[NDArray[np.int64], dict[str, Any]]:
        source = text_source(name, folder, CORPORA.get(name))
        text = read_text(source, characters=_CHARACTERS_PER_TOKEN * max_tokens, limit=limit)
        separator = loaded.tokenizer.eos_token_id
        tokens: list[int] = []
        for document in text.documents:
            tokens += loaded.encode(document, bos=False)
            if separator is not None:
                tokens.append(separator)
            if len(tokens) > max_tokens:
                break
        return np.array(tokens[: max_tokens + 1], dtype=np.int64), text.description

    def task(name: str, length: int) -> EvalTask:
        return EvalTask(
            f"{name}/{length}", lambda advance: _extrapolate(loaded, name, *stream(name), length, batch_size, advance)
        )

    return [task(name, length) for name in corpora for length in lengths]


def _extrapolate(
    loaded: LoadedModel,
    name: str,
    tokens: NDArray[np.int64],
    description: dict[str, Any],
    length: int,
    batch_size: int,
    advance: Callable[[int, int], None],
) -> EvalTaskResult:
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(
            f"text {name!r} has {len(tokens)} tokens; a window of length {length} needs {length + 1}: give more text, "
            "or shorter --lengths"
        )
    bos = loaded.tokenizer.bos_token_id if loaded.bos else None
    group = loaded.processes
    starts = range(0, count, batch_size)

    def own_pieces() -> list[NDArray[np.float32]]:
        pieces = []
        for start in starts[group.rank :: group.count]:
            end = min(start + batch_size, count)
            part = tokens[start * length : end * length + 1]
            pieces.append(window_losses(loaded.model, part, length=length, batch_size=batch_size, bos=bos))
            advance(end, count)
        return pieces

    by_process = [iter(pieces) for pieces in group.gather(own_pieces)]
    losses = np.concatenate([next(by_process[place % group.count]) for place in range(len(starts))])
    windows = losses.mean(axis=1, dtype=np.float64)
    loss, error = mean_loss(windows, length)
    # The error of exp(loss), to first order.
    perplexity_error = None if error is None else math.exp(loss) * error
    edges = [*range(0, length, POSITION_BIN), length]
    return {
        "task": f"{name}/{length}",
        "scores": [
            {
                "metric": "token_perplexity",
                "value": math.exp(loss),
                "standard_error": perplexity_error,
                "samples": count,
                "higher_is_better": False,
            },
            {
                "metric": "loss",
                "value": loss,
                "standard_error": error,
                "samples": count,
                "higher_is_better": False,
            },
        ],
        "curves": [
            {
                "metric": "loss",
                "axis": "position in tokens",
                "points": [
                    {
                        "start": start,
                        "end": end,
                        "value": float(losses[:, start:end].mean(dtype=np.float64)),
                        "samples": count * (end - start),
                    }
                    for start, end in itertools.pairwise(edges)
                ],
            }
        ],
        "data": description,
        "settings": {"corpus": name, "length": length, "tokens": count * length},
        "seconds": 0.0,
        "records": [{"window": number, "loss": float(value)} for number, value in enumerate(windows)],
    }
