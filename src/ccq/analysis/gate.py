"""Gate values and the size of the correction, measured on text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ccq.data.corpora import Corpus
from ccq.evals.results import CorrectionResult, GateResult
from ccq.models.cache import fingerprint
from ccq.models.intervention import GateValues, read_steps
from ccq.models.observation import observe_reads
from ccq.nn.read import GatedReadStep

HISTOGRAM_BINS = 50


class ReadMeasurement(NamedTuple):
    gate: GateResult
    correction: CorrectionResult


@torch.no_grad()
def measure_reads(model: nn.Module, tokens: Tensor, *, batch_size: int = 16) -> ReadMeasurement | None:
    """Gate and correction over tokens [B, T] int64; None for a model without a read step.

    The size of the correction is the mean over tokens and heads of |lambda Sigma q| / |q|, q being the query before
    the correction. The histogram divides [0, 1]; a gate outside of it counts in the outermost bin.
    """
    if not read_steps(model):
        return None
    gates: list[list[Tensor]] = []
    sizes: list[list[Tensor]] = []
    for rows in tokens.split(batch_size):
        with observe_reads(model) as observed:
            model(rows, use_cache=False, logits_to_keep=1)
        seen = [layer[0] for layer in observed]
        gates.append([read.gate.float() for read in seen])
        sizes.append([read.relative_size for read in seen])
    gate = [torch.cat(layer) for layer in zip(*gates, strict=True)]  # one [B, T, H] a layer
    size = [torch.cat(layer) for layer in zip(*sizes, strict=True)]
    edges = torch.linspace(0, 1, HISTOGRAM_BINS + 1)
    # torch has no histogram with edges on a GPU.
    counts = torch.histogram(torch.stack(gate).flatten().clamp(0, 1).cpu(), edges).hist
    return ReadMeasurement(
        gate={
            "mean": torch.stack(gate).mean().item(),
            "by_layer": [layer.mean().item() for layer in gate],
            "by_layer_and_head": [layer.mean((0, 1)).tolist() for layer in gate],
            "histogram": {"edges": edges.tolist(), "counts": counts.int().tolist()},
        },
        correction={
            "relative_size": torch.stack(size).mean().item(),
            "by_layer": [layer.mean().item() for layer in size],
        },
    )


@torch.no_grad()
def collect_gate_values(
    model: Any, tokens: Tensor, *, text: Mapping[str, Any] | None = None, batch_size: int = 8
) -> GateValues:
    """lambda at every token of a text, for `set_read("gate=mean")` and `set_read("gate=shuffled")`.

    Args:
        model: of this library, or one of transformers that the read step is attached to; its gate is learned, and no
            intervention is on.
        tokens: [B, T] int64, windows of text that do not see each other; S = B * T.
        text: what they are, for whoever reads the values.
        batch_size: windows in one call; changes the values by rounding alone.

    Raises:
        ValueError: the model has no such gate, or is changed, or does not know a token.
    """
    reads = read_steps(model)
    if not reads or not all(isinstance(read, GatedReadStep) and isinstance(read.gate, str) for read in reads):
        name = getattr(model.config, "arm", type(model).__name__)
        raise ValueError(f"{name} has no gate that is learned, so there are no values to collect")
    if any(read.is_changed for read in reads):
        raise ValueError('the read steps are changed; collect the values of the model as it is: set_read("on")')
    if not tokens.numel():
        raise ValueError("there are no tokens to collect values at")
    largest, known = int(tokens.max()), model.get_input_embeddings().num_embeddings
    if largest >= known:
        raise ValueError(
            f"tokens has {largest}, but the model knows 0 ... {known - 1}: it is not the tokenizer that the model was "
            "trained with"
        )
    seen: list[list[Tensor]] = [[] for _ in reads]
    for rows in tokens.split(batch_size):
        with observe_reads(model) as observed:
            model(rows.to(model.device), use_cache=False, logits_to_keep=1)
        for layer, calls in zip(seen, observed, strict=True):
            layer.append(calls[0].gate.flatten(0, 1).float().cpu())
    return GateValues(tuple(torch.cat(layer) for layer in seen), fingerprint(model), dict(text or {}))


def collect_on_corpus(model: Any, tokenizer: Any, corpus: Corpus, *, tokens: int, length: int) -> GateValues:
    """`collect_gate_values` over the `text_windows` of a corpus, with what they are beside them.

    Args:
        model, tokenizer: see there.
        corpus: whose held-out documents are read.
        tokens: in all, less what is left over by the last whole window.
        length: of a window, at most `tokens`.
    """
    length = min(length, tokens)
    windows = text_windows(corpus, tokenizer, windows=tokens // length, length=length)
    text = {"source": corpus.source, "sha256": corpus.sha256, "windows": len(windows), "length": length}
    return collect_gate_values(model, windows, text=text)


def text_windows(corpus: Corpus, tokenizer: Any, *, windows: int, length: int) -> Tensor:
    """[windows, length] int64: the held-out documents of a corpus one after the other, each with the token that ends a
    text behind it where the tokenizer (of transformers) has one.

    Raises:
        ValueError: they are too short.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens: list[int] = []
    for _, text in corpus.held_out:
        tokens += [*tokenizer(text, add_special_tokens=False, verbose=False).input_ids, *end]
        if len(tokens) >= windows * length:
            return torch.tensor(tokens[: windows * length]).view(windows, length)
    raise ValueError(
        f"the held-out part of {corpus.source} has {len(tokens)} tokens, but {windows} windows of {length} are asked "
        "for; give more text, or ask for fewer tokens"
    )
