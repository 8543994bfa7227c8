"""The diagnosis of a model: where its keys lie, and what the correction does to queries and scores on real prompts.

The TypedDicts are the schema of `diagnosis.json`. Figures of a layer are means over its heads and over the prompts
unless they say otherwise; all keys are normalised to unit length first, as the read step does.

Legend: T tokens, H heads of keys, D key size per head, U directions.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.analysis.collection import LayerValues, ReadValues, check_model, collect
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
from ccq.analysis.prompts import SENTENCES, TokenizedPrompt, TokenKind, needle_prompts, tokenize_prompt
from ccq.evals.results import EnvironmentResult
from ccq.models.intervention import read_intervention, read_steps
from ccq.ops.query import curvature_conditioned_query

SCHEMA: Final = "ccq-diagnosis/1"
DIRECTIONS = 16
"""Eigenvectors of the alignment, as in the paper; half of the key size where that is less."""
NOMINAL_GATE = 0.3
"""lambda of a model without a gate: about what the paper's trained models have on ordinary text."""
QUERY_LENGTHS = (1.0, 4.0, 16.0)
"""Of the queries at which the expansion is tried: unit queries, as linear attention reads, and longer ones. Softmax
attention has lengths of about the square root of the key size."""
BINS = 50

Keys = Literal["projection", "memory"]
_EXPANSION_PLACES = 4


class ByKind(TypedDict):
    """A mean over the tokens of each kind; `last` is the last token alone, where the answer is looked up."""

    text: float
    needle: float
    question: float
    last: float


class AlignmentLayer(TypedDict):
    """Mean alignment of the unique tokens of the needle (`unique`), of all its tokens, of the sentences around it
    (`text`, the distractors) and of those of their tokens that are as rare in the prompt (null where there are none).

    `difference` is `unique` minus `text`, its standard deviation over prompts (null for one prompt).
    """

    layer: int
    name: str
    difference: float
    standard_deviation: float | None
    unique: float
    needle: float
    text: float
    rare_text: float | None
    difference_by_head: list[float]


class AlignmentHistogram(TypedDict):
    """How many tokens of all prompts, layers and heads lie between `edges[i]` and `edges[i + 1]`."""

    edges: list[float]
    unique: list[int]
    text: list[int]


class AlignmentResult(TypedDict):
    """Alignment with the top `directions` directions. `difference` is the mean over layers, `difference_by_prompt` that
    of each prompt.
    """

    directions: int
    difference: float
    difference_by_prompt: list[float]
    unique: float
    text: float
    layers_below_zero: int
    heads_above_zero: int
    heads: int
    layers: list[AlignmentLayer]
    histogram: AlignmentHistogram


class SpectrumLayer(TypedDict):
    """The covariance of all keys of a prompt. `mean_length_squared` is that of the mean key: the trace is one less
    it. `top_share` is the share of the trace in the top directions."""

    layer: int
    name: str
    trace: float
    mean_length_squared: float
    largest: float
    top_share: float
    effective_rank: float
    eigenvalues: list[float]


class KeysResult(TypedDict):
    """One look at the keys: the output of the projection, as in the paper, or what enters the memory."""

    keys: Literal["projection", "memory"]
    alignment: AlignmentResult
    spectrum: list[SpectrumLayer]


class CorrectionLayer(TypedDict):
    """The change lambda Sigma q of the queries. `gate` is null without a read step, or where all corrections are off;
    the change is then that of `nominal_gate`.

    `angle` is in degrees; `rounding_noise` is the error of rounding the corrected query to bfloat16, its root mean
    square over tokens, heads and prompts divided by that of the correction (null where that is 0); `unchanged` the
    share of the coordinates which rounding leaves as they were without a correction.
    """

    layer: int
    name: str
    gate: ByKind | None
    relative_size: ByKind
    angle: float
    rounding_noise: float | None
    unchanged: float


class MarginLayer(TypedDict):
    """At the last token of a prompt: the scores of the needle's unique tokens against those of the sentences.

    `condition_holds` is the share of (needle token, sentence token) pairs with (beta - alpha)(u . q) > 0, u the first
    direction of the covariance. `margin` is the mean score of the former minus that of the latter before the
    correction, `change` what the correction adds to it (with its standard deviation over prompts), `first_direction`
    the part of the first direction in that (for a change that is lambda Sigma q). `score_change` is the mean over
    tokens by their kind. Scores are of unit keys and of the query as the read step takes it.
    """

    layer: int
    name: str
    condition_holds: float
    margin: float
    change: float
    standard_deviation: float | None
    first_direction: float
    score_change: ByKind


class ExpansionResult(TypedDict):
    """The log-partition at queries of one length, means over layers, heads and places.

    `remainder` is |exact - quadratic|, `remainder_of_linear` the same of the expansion without its quadratic term, in
    nats. `covariance_distance` is |Cov_q - Sigma| / |Sigma| (Frobenius) for the covariance under softmax weights,
    `action_cosine` the cosine between Cov_q q and Sigma q.
    """

    length: float
    remainder: float
    remainder_of_linear: float
    covariance_distance: float
    action_cosine: float


class DiagnosedModel(TypedDict):
    """`read` is the intervention on the read steps, such as "off" or "scale=2", "on" for none, or null for a model
    without any.
    """

    name: str
    type: str
    arm: str | None
    read: str | None
    parameters: int
    dtype: str


class DiagnosisSettings(TypedDict):
    """`text` is the folder that the sentences are from, null for the built-in ones; `tokens` the shortest and the
    longest prompt; `queries` the keys that the queries were measured with, null where no queries could be told.
    """

    prompts: int
    seed: int
    fillers: int
    text: str | None
    sentences: int
    tokens: list[int]
    queries: Literal["projection", "memory"] | None
    nominal_gate: float | None


class DiagnosisResults(TypedDict):
    """Everything a diagnosis found; `created` is an ISO 8601 time. Null are the parts that need queries, where the
    model's could not be told apart, and `correction` and `margins` of a read step that corrects nothing.
    """

    schema: Literal["ccq-diagnosis/1"]
    created: str
    model: DiagnosedModel
    settings: DiagnosisSettings
    versions: dict[str, Any]
    environment: EnvironmentResult
    keys: list[KeysResult]
    correction: list[CorrectionLayer] | None
    margins: list[MarginLayer] | None
    expansion: list[ExpansionResult] | None


class _Kinds(NamedTuple):
    """Places [T] of a prompt, each a bool tensor."""

    text: Tensor
    needle: Tensor
    question: Tensor
    last: Tensor
    unique: Tensor
    rare_text: Tensor


@dataclass
class _KeysSums:
    """What is gathered of one look at the keys of one layer; a list has one tensor [H] a prompt."""

    name: str
    means: dict[str, list[Tensor]] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    eigenvalues: list[Tensor] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)


def diagnose(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    environment: EnvironmentResult,
    prompts: int = 20,
    seed: int = 0,
    fillers: int = 120,
    sentences: Sequence[str] | None = None,
    text: str | None = None,
    say: Callable[[str], None] | None = None,
) -> DiagnosisResults:
    """Run a model over needle prompts and measure its keys, its queries and its correction.

    Args:
        model, tokenizer: as `ccq.models.auto_model.read_auto_model` returns them; or any model that
            `ccq.analysis.collection.collect` takes and a fast tokenizer of transformers.
        name: of the model, for the file.
        environment: where this runs, for the file.
        prompts, seed, fillers: of `ccq.analysis.prompts.needle_prompts`.
        sentences, text: a pool of sentences in place of the built-in one, and the folder it is from, for the file.
        say: is told about every prompt.

    Raises:
        ValueError: the keys of the model cannot be told apart, its tokenizer does not fit, or a setting is impossible.
    """
    pool = SENTENCES if sentences is None else sentences
    tokenized = [
        tokenize_prompt(prompt, tokenizer)
        for prompt in needle_prompts(prompts, seed=seed, fillers=fillers, sentences=pool)
    ]
    lengths = [len(prompt.tokens) for prompt in tokenized]
    check_model(model, max(lengths))
    largest, known = max(int(x.tokens.max()) for x in tokenized), model.get_input_embeddings().num_embeddings
    if largest >= known:
        raise ValueError(
            f"the tokenizer gives token {largest}, but the model knows 0 ... {known - 1}: it is not the tokenizer that "
            "the model was trained with"
        )
    reads = read_steps(model)
    gathered = _Gathered(corrects=not reads or any(read.has_correction for read in reads))
    for number, prompt in enumerate(tokenized):
        if say is not None:
            say(f"prompt {number + 1} of {prompts}, {len(prompt.tokens)} tokens")
        gathered.add(collect(model, prompt.tokens.to(model.device)), prompt)
    correction, margins, expansion = gathered.query_results()
    intervention = read_intervention(model)
    return {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": {
            "name": name,
            "type": model.config.model_type,
            "arm": getattr(model.config, "arm", None),
            "read": None if intervention is None else str(intervention),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "settings": {
            "prompts": prompts,
            "seed": seed,
            "fillers": fillers,
            "text": text,
            "sentences": len(pool),
            "tokens": [min(lengths), max(lengths)],
            "queries": gathered.queries,
            "nominal_gate": None if gathered.has_gate or correction is None else NOMINAL_GATE,
        },
        "versions": {package: importlib.metadata.version(package) for package in ("torch", "transformers")},
        "environment": environment,
        "keys": gathered.keys_results(),
        "correction": correction,
        "margins": margins,
        "expansion": expansion,
    }


class _Gathered:
    """Figures of the prompts so far. `corrects` is False for a read step that has no correction."""

    def __init__(self, *, corrects: bool) -> None:
        self._corrects = corrects
        self._keys: dict[Keys, dict[int, _KeysSums]] = {"projection": {}, "memory": {}}
        self._queries: dict[int, dict[str, list[Any]]] = {}
        self._names: dict[int, str] = {}
        self._directions = 0
        self.queries: Keys | None = None
        self.has_gate = False

    def add(self, layers: Sequence[LayerValues], prompt: TokenizedPrompt) -> None:
        kinds = _kinds(prompt, layers[0].projected_keys.device)
        # One number for all layers, so that they can be compared.
        self._directions = min(DIRECTIONS, *(layer.projected_keys.shape[-1] // 2 for layer in layers))
        for number, layer in enumerate(layers):
            self._names[number] = layer.name
            self._add_keys("projection", number, layer.projected_keys, kinds)
            if layer.memory_keys is not None:
                self._add_keys("memory", number, layer.memory_keys, kinds)
        if all(layer.queries is not None for layer in layers):
            self.queries = "memory" if all(layer.met_keys is layer.memory_keys for layer in layers) else "projection"
            self.has_gate = any(layer.read is not None for layer in layers)
            for number, layer in enumerate(layers):
                self._add_queries(number, layer, kinds)

    def _add_keys(self, look: Keys, number: int, keys: Tensor, kinds: _Kinds) -> None:
        sums = self._keys[look].setdefault(number, _KeysSums(self._names[number]))
        unit = F.normalize(keys, dim=-1).transpose(0, 1)  # [H, T, D]
        directions = min(self._directions, keys.shape[-1])
        aligned = alignment(unit, directions)
        for group in ("unique", "needle", "text", "rare_text"):
            chosen = aligned[:, getattr(kinds, group)]
            if chosen.shape[1]:
                sums.means.setdefault(group, []).append(chosen.mean(1).cpu())
        for group in ("unique", "text"):
            values = aligned[:, getattr(kinds, group)].flatten().float().cpu().clamp(0, 1)
            counted = torch.histogram(values, bins=BINS, range=(0.0, 1.0)).hist
            sums.counts[group] = sums.counts.get(group, torch.zeros(BINS)) + counted
        found = spectrum(covariance(unit), directions)
        sums.eigenvalues.append(found.eigenvalues.mean(0).cpu())
        _append(
            sums.figures,
            trace=found.trace,
            mean_length_squared=unit.mean(1).square().sum(-1),
            largest=found.eigenvalues[:, 0],
            top_share=found.top_share,
            effective_rank=found.effective_rank,
        )

    def _add_queries(self, number: int, layer: LayerValues, kinds: _Kinds) -> None:
        assert layer.queries is not None
        sums = self._queries.setdefault(number, {})
        shared = layer.queries.shape[2]
        keys = F.normalize(layer.met_keys, dim=-1).repeat_interleave(shared, 1)  # [T, H * G, D]
        unit = F.normalize(layer.queries.flatten(1, 2), dim=-1)
        _add_expansion(sums, keys.transpose(0, 1), unit)
        if not self._corrects:
            return
        if self.has_gate:
            # Off in this layer alone is a gate of 0.
            read = layer.read or ReadValues(unit, torch.zeros_like(unit[..., 0]), torch.zeros_like(unit))
            query, gate = read.query.to(unit.dtype), read.gate.to(unit.dtype)
            change = gate.unsqueeze(-1) * read.correction.to(unit.dtype)
            _append(sums, **{f"gate_{kind}": gate[getattr(kinds, kind)] for kind in ByKind.__annotations__})
        else:
            query = unit
            nominal = curvature_conditioned_query(
                unit[None], keys[None], NOMINAL_GATE, normalize=False, return_correction=True
            )
            assert nominal.correction is not None
            change = NOMINAL_GATE * nominal.correction[0]
        size = relative_size(query, change)
        _append(sums, **{f"size_{kind}": size[getattr(kinds, kind)] for kind in ByKind.__annotations__})
        length = change.norm(dim=-1)
        _append(
            sums,
            angle=angle(query, change),
            # Not the mean of the shares: at the first tokens next to nothing is corrected, and the share is huge.
            squared_change=length.square(),
            squared_error=(rounding_noise(query, change) * length).square(),
            unchanged=unchanged_share(query, change),
        )
        self._add_margins(sums, keys.transpose(0, 1), query[-1], change[-1], kinds)

    @staticmethod
    def _add_margins(sums: dict[str, list[Any]], keys: Tensor, query: Tensor, change: Tensor, kinds: _Kinds) -> None:
        """keys [H, T, D], query and change [H, D], of the last token."""
        first = top_directions(covariance(keys), 1)[..., 0]  # [H, D]
        along_keys = (keys @ first.unsqueeze(-1)).squeeze(-1)
        along_query = (query * first).sum(-1)
        # Along u alone, so that pairs of tokens need no vectors.
        condition = sign_condition(
            along_keys[:, kinds.unique, None, None],
            along_keys[:, None, kinds.text, None],
            along_query[:, None, None, None],
            torch.ones_like(first[:1, None, None, :1]),
        )
        target, distractor = keys[:, kinds.unique].mean(1), keys[:, kinds.text].mean(1)
        along_change = (change * first).sum(-1)
        _append(
            sums,
            condition_holds=(condition > 0).to(keys.dtype),
            margin=((target - distractor) * query).sum(-1),
            change=margin_change(target, distractor, change),
            first_direction=((distractor - target) * first).sum(-1) * along_change,
        )
        moved = score_change(keys, change)
        _append(sums, **{f"score_{kind}": moved[:, getattr(kinds, kind)] for kind in ByKind.__annotations__})

    def keys_results(self) -> list[KeysResult]:
        return [
            {
                "keys": look,
                "alignment": self._alignment(layers),
                "spectrum": [
                    {
                        "layer": number,
                        "name": sums.name,
                        "trace": _mean(sums.figures["trace"]),
                        "mean_length_squared": _mean(sums.figures["mean_length_squared"]),
                        "largest": _mean(sums.figures["largest"]),
                        "top_share": _mean(sums.figures["top_share"]),
                        "effective_rank": _mean(sums.figures["effective_rank"]),
                        "eigenvalues": torch.stack(sums.eigenvalues).mean(0).tolist(),
                    }
                    for number, sums in layers.items()
                ],
            }
            for look, layers in self._keys.items()
            if layers
        ]

    def _alignment(self, layers: dict[int, _KeysSums]) -> AlignmentResult:
        results: list[AlignmentLayer] = []
        by_layer = []
        for number, sums in layers.items():
            means = {group: torch.stack(values).double() for group, values in sums.means.items()}  # [P, H] each
            difference = means["unique"] - means["text"]
            by_layer.append(difference.mean(1))
            rare = means.get("rare_text")
            results.append(
                {
                    "layer": number,
                    "name": sums.name,
                    "difference": difference.mean().item(),
                    "standard_deviation": _deviation(difference.mean(1).tolist()),
                    "unique": means["unique"].mean().item(),
                    "needle": means["needle"].mean().item(),
                    "text": means["text"].mean().item(),
                    "rare_text": None if rare is None else rare.mean().item(),
                    "difference_by_head": difference.mean(0).tolist(),
                }
            )
        cells = [cell for result in results for cell in result["difference_by_head"]]
        counts = {group: sum(sums.counts[group] for sums in layers.values()) for group in ("unique", "text")}
        return {
            "directions": self._directions,
            "difference": _mean([result["difference"] for result in results]),
            "difference_by_prompt": torch.stack(by_layer).mean(0).tolist(),
            "unique": _mean([result["unique"] for result in results]),
            "text": _mean([result["text"] for result in results]),
            "layers_below_zero": sum(result["difference"] < 0 for result in results),
            "heads_above_zero": sum(cell > 0 for cell in cells),
            "heads": len(cells),
            "layers": results,
            "histogram": {
                "edges": torch.linspace(0, 1, BINS + 1).tolist(),
                "unique": [int(count) for count in torch.as_tensor(counts["unique"])],
                "text": [int(count) for count in torch.as_tensor(counts["text"])],
            },
        }

    def query_results(
        self,
    ) -> tuple[list[CorrectionLayer] | None, list[MarginLayer] | None, list[ExpansionResult] | None]:
        """`correction`, `margins` and `expansion`."""
        if self.queries is None:
            return None, None, None
        if not self._corrects:
            return None, None, self._expansion()
        correction: list[CorrectionLayer] = []
        margins: list[MarginLayer] = []
        for number, sums in self._queries.items():
            means = {figure: _mean(values) for figure, values in sums.items() if not figure.startswith("expansion")}
            name = self._names[number]
            correction.append(
                {
                    "layer": number,
                    "name": name,
                    "gate": _by_kind(means, "gate") if "gate_text" in means else None,
                    "relative_size": _by_kind(means, "size"),
                    "angle": means["angle"],
                    "rounding_noise": _root_ratio(means["squared_error"], means["squared_change"]),
                    "unchanged": means["unchanged"],
                }
            )
            margins.append(
                {
                    "layer": number,
                    "name": name,
                    "condition_holds": means["condition_holds"],
                    "margin": means["margin"],
                    "change": means["change"],
                    "standard_deviation": _deviation(sums["change"]),
                    "first_direction": means["first_direction"],
                    "score_change": _by_kind(means, "score"),
                }
            )
        return correction, margins, self._expansion()

    def _expansion(self) -> list[ExpansionResult]:
        def everywhere(figure: str) -> float:
            return _mean([value for sums in self._queries.values() for value in sums[f"expansion_{figure}"]])

        return [
            {
                "length": length,
                "remainder": everywhere(f"{i}_remainder"),
                "remainder_of_linear": everywhere(f"{i}_remainder_of_linear"),
                "covariance_distance": everywhere(f"{i}_covariance_distance"),
                "action_cosine": everywhere(f"{i}_action_cosine"),
            }
            for i, length in enumerate(QUERY_LENGTHS)
        ]


def _add_expansion(sums: dict[str, list[Any]], keys: Tensor, unit: Tensor) -> None:
    """keys [H, T, D], unit queries [T, H, D]: at places spread over the prompt, the last token among them, each with
    the keys up to it.
    """
    tokens = keys.shape[1]
    for place in range(1, _EXPANSION_PLACES + 1):
        count = math.ceil(tokens * place / _EXPANSION_PLACES)
        seen, query = keys[:, :count], unit[count - 1]
        sigma = covariance(seen)
        action = (sigma @ query.unsqueeze(-1)).squeeze(-1)
        for i, length in enumerate(QUERY_LENGTHS):
            taylor = log_partition(length * query, seen)
            weighted = query_weighted_covariance(length * query, seen)
            distance = torch.linalg.matrix_norm(weighted - sigma) / torch.linalg.matrix_norm(sigma).clamp(min=1e-12)
            weighted_action = (weighted @ query.unsqueeze(-1)).squeeze(-1)
            _append(
                sums,
                **{
                    f"expansion_{i}_remainder": taylor.remainder.abs(),
                    f"expansion_{i}_remainder_of_linear": (taylor.exact - taylor.linear).abs(),
                    f"expansion_{i}_covariance_distance": distance,
                    f"expansion_{i}_action_cosine": F.cosine_similarity(weighted_action, action, dim=-1, eps=1e-12),
                },
            )


def _kinds(prompt: TokenizedPrompt, device: torch.device) -> _Kinds:
    text, needle, question = (
        (prompt.kinds == kind).to(device) for kind in (TokenKind.TEXT, TokenKind.NEEDLE, TokenKind.QUESTION)
    )
    last = torch.zeros_like(text)
    last[-1] = True
    rare = prompt.rare.to(device)
    return _Kinds(text, needle, question, last, needle & rare, text & rare)


def _append(sums: dict[str, list[Any]], **values: Tensor) -> None:
    """The mean of each tensor, one more number of this prompt."""
    for name, value in values.items():
        sums.setdefault(name, []).append(value.mean().item())


def _by_kind(means: dict[str, float], figure: str) -> ByKind:
    return {
        "text": means[f"{figure}_text"],
        "needle": means[f"{figure}_needle"],
        "question": means[f"{figure}_question"],
        "last": means[f"{figure}_last"],
    }


def _root_ratio(part: float, whole: float) -> float | None:
    return math.sqrt(part / whole) if whole > 0 else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None for one value."""
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
