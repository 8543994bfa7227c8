"""The results schema: what a comparison or an evaluation writes, what a report reads, and nothing else passes between
them.

The TypedDicts below are the schema; reading and writing check a value against them, so a field is declared in one
place.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Final,
    Literal,
    TypedDict,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
    overload,
)

from ccq.files import write_json_atomically

SCHEMA: Final = "ccq-results/1"

PairMetric = Literal["needle accuracy", "perplexity", "loss"]


class EnvironmentResult(TypedDict):
    """Where the figures were measured; versions as their packages report them."""

    ccq: str
    python: str
    torch: str
    platform: str
    processor: str
    cores: int
    threads_per_run: int
    device: str


class CorpusResult(TypedDict):
    """The text: file, character (code point) and token counts; `files` counts both parts."""

    source: str
    files: int
    held_out_files: int
    characters: int
    train_tokens: int
    held_out_tokens: int
    sha256: str


class TokenizerResult(TypedDict):
    vocabulary: int
    sha256: str


class NeedleTaskResult(TypedDict):
    """`chance` is 1 / values; `chance_among_seen` is 1 / needles_per_window, for a guess among the values stated in the
    window.
    """

    keys: int
    values: int
    needles_per_window: int
    chance: float
    chance_among_seen: float
    description: str


class GateByDecay(TypedDict, total=False):
    """Of a point of a training curve: `gate_by_decay_alone`, lambda if weight decay alone had moved it since the start;
    null without a gate whose bias decay could move, and missing in files from before it was recorded.
    """

    gate_by_decay_alone: float | None


class TrainingPoint(GateByDecay):
    """One point of a training curve; losses in nats a token, `tokens` since the start."""

    step: int
    tokens: int
    length: int
    loss: float
    text_loss: float
    answer_loss: float
    gradient_norm: float
    gate_mean: float | None


class TrainingResult(TypedDict):
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    curve: list[TrainingPoint]


class PerplexityResult(TypedDict):
    """Held-out text at one window length. `multiple` is length / training length; `tokens` counts predicted tokens;
    `loss` is in nats a token, its standard error over windows (null with one window)."""

    length: int
    multiple: float
    tokens: int
    windows: int
    loss: float
    standard_error: float | None
    perplexity: float


class NeedleDepthResult(TypedDict):
    """Answers at one length in one depth bin [depth_from, depth_to); low and high bound the accuracy's 95 % Wilson
    interval.
    """

    length: int
    depth_from: float
    depth_to: float
    asked: int
    correct: int
    accuracy: float
    low: float
    high: float


class NeedleLengthResult(TypedDict):
    """Answers at one length over all depths; low and high bound the accuracy's 95 % Wilson interval."""

    length: int
    multiple: float
    asked: int
    correct: int
    accuracy: float
    low: float
    high: float


class GateHistogram(TypedDict):
    """`counts[i]` gates lie between `edges[i]` and `edges[i + 1]`."""

    edges: list[float]
    counts: list[int]


class GateResult(TypedDict):
    mean: float
    by_layer: list[float]
    by_layer_and_head: list[list[float]]
    histogram: GateHistogram


class CorrectionResult(TypedDict):
    """Size of the correction relative to the query it corrects."""

    relative_size: float
    by_layer: list[float]


class DecodeResult(TypedDict):
    batch_size: int
    tokens: int
    tokens_per_second: float
    milliseconds_per_token: float


class RunResult(TypedDict):
    """One trained model. The last fields but `decode` are null for arms without a read step; `needle_read_off` is the
    same model with the correction switched off at inference."""

    arm: str
    seed: int
    parameters: int
    read_parameters: int
    state_bytes: int
    training: TrainingResult
    perplexity: list[PerplexityResult]
    needle: list[NeedleDepthResult]
    needle_by_length: list[NeedleLengthResult]
    needle_read_off: list[NeedleLengthResult] | None
    gate: GateResult | None
    correction: CorrectionResult | None
    decode: DecodeResult


class PairResult(TypedDict):
    """`arm` minus `backbone` in one metric, seed by seed. The 95 % t interval and the standard deviation are null with
    one seed.
    """

    backbone: str
    arm: str
    metric: str
    differences: list[float]
    mean: float
    standard_deviation: float | None
    low: float | None
    high: float | None


class CompareResults(TypedDict):
    """Everything one comparison found; `created` is an ISO 8601 time, `settings` holds every setting by its name."""

    schema: Literal["ccq-results/1"]
    kind: Literal["compare"]
    name: str
    created: str
    settings: dict[str, Any]
    environment: EnvironmentResult
    corpus: CorpusResult
    tokenizer: TokenizerResult
    needle_task: NeedleTaskResult
    training_length: int
    runs: list[RunResult]
    pairs: list[PairResult]


class GridPoint(GateByDecay):
    """One point of a training curve: `loss` in nats an answer, `tokens` since the start, `gate` the mean of lambda."""

    step: int
    tokens: int
    length: int
    loss: float
    gate: float | None


class GridScore(TypedDict):
    """The mean over `prompts` of what each contributes: "accuracy", the share of its answers that are right, or "loss",
    nats a token. `low` and `high` bound it in 95 % over the drawing of prompts (null with one).
    """

    setting: str
    metric: Literal["accuracy", "loss"]
    prompts: int
    mean: float
    low: float | None
    high: float | None


PUT_INTO = "put into "


class GridReading(TypedDict):
    """A trained model read in another way: `reading` is an intervention such as "off", or `PUT_INTO` and an arm, as in
    "put into gla", for the model of that arm and the same seed with this arm's read step put in; `gate` is then the
    lambda that it has, as an observer sees it.
    """

    reading: str
    gate: float | None
    scores: list[GridScore]


class GridRunResult(TypedDict):
    """One trained model, read as it was trained. `gate` (mean of lambda) and `correction` (relative size) are null
    without a read step.
    """

    task: str
    arm: str
    seed: int
    parameters: int
    read_parameters: int
    state_bytes: int
    steps: int
    tokens: int
    seconds: float
    curve: list[GridPoint]
    gate: float | None
    correction: float | None
    scores: list[GridScore]
    readings: list[GridReading]


class GridDifference(TypedDict):
    """`first` minus `second` in one metric at one setting of one task, paired by seed and by prompt.

    `kind` says what differs: "arm" (an arm and its backbone, both as trained), "control" (an arm and its backbone with
    unit queries, both as trained), "training" (the correction off, or on, in both of two models that read alike),
    "training and normalisation" (the same where one reads unit queries and the other raw ones), "reading" (one trained
    model, read in two ways) or "interaction" (the difference of two such differences). `over_seeds` is Student's t
    interval over `by_seed` (null with one seed and where all seeds have the same value), `over_prompts` that over
    prompts; both 95 %.
    """

    task: str
    setting: str
    metric: Literal["accuracy", "loss"]
    kind: Literal["arm", "control", "training", "training and normalisation", "reading", "interaction"]
    arm: str
    first: str
    second: str
    by_seed: list[float]
    mean: float
    over_seeds: list[float] | None
    over_prompts: list[float] | None


class GridTaskResult(TypedDict):
    """A task: its kind, what it is in a sentence, and for each setting what guessing scores (null: not known)."""

    task: str
    kind: str
    description: str
    settings: list[str]
    chance: list[float | None]


class GridResults(TypedDict):
    """Everything a grid of runs found; `settings` as the grid's file has them."""

    schema: Literal["ccq-results/1"]
    kind: Literal["grid"]
    name: str
    created: str
    settings: dict[str, Any]
    environment: EnvironmentResult
    tasks: list[GridTaskResult]
    runs: list[GridRunResult]
    differences: list[GridDifference]


class EvalModelResult(TypedDict):
    """The evaluated model. `name` is the folder or hub name that was given; `read` is the intervention on its read
    steps, such as "off" or "scale=2,layers=0", "on" for none, or null for a model without any; `weights` is a hash of
    the beginning of every weight, `tokenizer` one of the whole tokenizer. `configuration` has the fields of this
    library's configuration, its arm among them, and is null for other models; `training` is the record that `ccq train`
    leaves beside a model, its seed among it, null without one.
    """

    name: str
    type: str
    parameters: int
    dtype: str
    read: str | None
    weights: str
    tokenizer: str
    vocabulary: int
    configuration: dict[str, Any] | None
    training: dict[str, Any] | None


class EvalSettings(TypedDict):
    """What moves a number beside model and data.

    `max_length` limits prompt and answer together, in tokens (null where windows set the length), and
    `truncation_side` says where longer prompts lose tokens; `bos` whether the tokenizer's first token was put before
    every text; `limit` how many samples of a task were used at most (null: all); `others` the settings that only this
    suite has.
    """

    max_length: int | None
    truncation_side: Literal["left", "middle", "none"]
    bos: bool
    batch_size: int
    limit: int | None
    seed: int
    tasks: list[str]
    data: str | None
    others: dict[str, Any]


class EvalScore(TypedDict):
    """One figure over `samples`; its standard error is null where none can be given."""

    metric: str
    value: float
    standard_error: float | None
    samples: int
    higher_is_better: bool


class EvalPoint(TypedDict):
    """The mean over what falls into [start, end) of a curve's axis."""

    start: float
    end: float
    value: float
    samples: int


class EvalCurve(TypedDict):
    """`metric` along `axis`, such as the loss along the position in tokens."""

    metric: str
    axis: str
    points: list[EvalPoint]


class EvalTaskResult(TypedDict):
    """One task, under a name that no other task of the file has. The first score is the one that tables show.
    `data` says what text was used, with its SHA-256; `settings` holds what only this task has; `records` has an entry a
    sample.
    """

    task: str
    scores: list[EvalScore]
    curves: list[EvalCurve]
    data: dict[str, Any]
    settings: dict[str, Any]
    seconds: float
    records: list[dict[str, Any]]


class EvalResults(TypedDict):
    """One suite on one model. While `complete` is false, `tasks` are those that are done, and there is no `summary`;
    `versions` are those of the packages that take part, null where one is not installed.
    """

    schema: Literal["ccq-results/1"]
    kind: Literal["eval"]
    suite: str
    created: str
    complete: bool
    model: EvalModelResult
    settings: EvalSettings
    versions: dict[str, Any]
    environment: EnvironmentResult
    tasks: list[EvalTaskResult]
    summary: list[EvalScore]


_KINDS: dict[str, tuple[str, str, Any]] = {
    "compare": ("comparison", "ccq compare", CompareResults),
    "grid": ("grid", "ccq compare GRID.yaml", GridResults),
    "eval": ("evaluation", "ccq eval", EvalResults),
}
"""What makes a results file of each kind, the command, and its schema."""


def write_results(path: str | os.PathLike[str], results: CompareResults | GridResults | EvalResults) -> None:
    """Check `results` against the schema and write them as JSON, whole or not at all. The folder must exist.

    Raises:
        ValueError: a field is missing or of the wrong type, or a number is NaN or infinite; nothing is written.
    """
    try:
        _check(results, _KINDS.get(results.get("kind", ""), _KINDS["compare"])[2], "")
    except ValueError as error:
        raise ValueError(f"results for {path}: {error}; nothing was written") from error
    write_json_atomically(path, results)


@overload
def read_results(path: str | os.PathLike[str], kind: Literal["compare"] = "compare") -> CompareResults: ...
@overload
def read_results(path: str | os.PathLike[str], kind: Literal["grid"]) -> GridResults: ...
@overload
def read_results(path: str | os.PathLike[str], kind: Literal["eval"]) -> EvalResults: ...
def read_results(
    path: str | os.PathLike[str], kind: Literal["compare", "grid", "eval"] = "compare"
) -> CompareResults | GridResults | EvalResults:
    """Read and check a results file. Fields the schema does not know are kept and ignored.

    Raises:
        ValueError: the file is not JSON, of another schema or kind, or a field is missing or of the wrong type.
        OSError: the file cannot be read.
    """
    activity, command, schema = _KINDS[kind]
    accepted = f'accepted is a results file of schema "{SCHEMA}", as written by `{command}`'
    try:
        content = json.loads(Path(path).read_bytes(), parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {accepted}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {_describe(content)}; {accepted}")
    if content.get("schema") != SCHEMA:
        found = f"schema {content['schema']!r}" if "schema" in content else "no schema field"
        raise ValueError(f"{path} has {found}; {accepted}: run the {activity} again with this version of ccq")
    try:
        _check(content, schema, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {accepted}") from error
    return cast("CompareResults | GridResults | EvalResults", content)


def paired_differences(runs: Sequence[RunResult], backbone: str, arm: str, metric: str) -> PairResult:
    """Compare two arms seed by seed: `arm` minus `backbone`, sorted by seed.

    Args:
        runs: all runs of a comparison; only those of the two arms are used.
        backbone, arm: names of the arms, such as "gla" and "gla+ccq".
        metric: "needle accuracy at L", "perplexity at L" or "loss at L", L being an evaluated length in tokens ("loss"
            is the held-out loss behind the perplexity).

    Returns:
        Differences, their mean, their sample standard deviation, and mean -+ t(0.975, n - 1) * standard deviation /
        sqrt(n).

    Raises:
        ValueError: the metric or its length is unknown, an arm has no runs, a seed appears twice or in one arm only.
    """
    values = {name: _by_seed(runs, name, metric) for name in (backbone, arm)}
    unpaired = sorted(values[backbone].keys() ^ values[arm].keys())
    if unpaired:
        raise ValueError(
            f"seeds {unpaired} were run for only one of {backbone!r} and {arm!r}; run both arms with the same seeds"
        )
    differences = [values[arm][seed] - values[backbone][seed] for seed in sorted(values[arm])]
    count = len(differences)
    mean = math.fsum(differences) / count
    deviation = low = high = None
    if count > 1:
        from scipy.stats import t

        deviation = math.sqrt(math.fsum((difference - mean) ** 2 for difference in differences) / (count - 1))
        half_width = float(t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)
        low, high = mean - half_width, mean + half_width
    return PairResult(
        backbone=backbone,
        arm=arm,
        metric=metric,
        differences=differences,
        mean=mean,
        standard_deviation=deviation,
        low=low,
        high=high,
    )


def _by_seed(runs: Sequence[RunResult], arm: str, metric: str) -> dict[int, float]:
    values: dict[int, float] = {}
    for run in runs:
        if run["arm"] != arm:
            continue
        if run["seed"] in values:
            raise ValueError(f"runs hold arm {arm!r} with seed {run['seed']} twice; keep one of them")
        values[run["seed"]] = _metric_of(run, metric)
    if not values:
        known = ", ".join(sorted({run["arm"] for run in runs})) or "none"
        raise ValueError(f"runs hold no arm {arm!r}; they hold: {known}")
    return values


def _metric_of(run: RunResult, metric: str) -> float:
    names = get_args(PairMetric)
    match = re.fullmatch(rf"({'|'.join(names)}) at (\d+)", metric)
    if match is None:
        accepted = ", ".join(f'"{name} at LENGTH"' for name in names)
        raise ValueError(f"metric is {metric!r}; accepted are {accepted}")
    name, length = match[1], int(match[2])
    entries: Sequence[Mapping[str, Any]] = run["needle_by_length"] if name == "needle accuracy" else run["perplexity"]
    field = "accuracy" if name == "needle accuracy" else name
    for entry in entries:
        if entry["length"] == length:
            return float(entry[field])
    known = ", ".join(str(entry["length"]) for entry in entries) or "none"
    raise ValueError(
        f"metric is {metric!r}, but {run['arm']!r} with seed {run['seed']} was evaluated at lengths: {known}"
    )


def _check(value: Any, expected: Any, field: str) -> None:
    """Raise ValueError naming the field (a path such as `runs[0].gate.mean`) where `value` is not of the type
    `expected`.

    Written here because the schema is small and a validation library would be a dependency of everything that reads a
    file.
    """
    origin = get_origin(expected)
    if expected is Any:
        return
    if is_typeddict(expected):
        _expect(isinstance(value, dict), value, "an object", field)
        for name, hint in get_type_hints(expected).items():
            inner = f"{field}.{name}" if field else name
            if name in value:
                _check(value[name], hint, inner)
            elif name in expected.__required_keys__:
                raise ValueError(f"field {inner} is missing")
    elif origin is list:
        _expect(isinstance(value, list), value, "a list", field)
        for index, item in enumerate(value):
            _check(item, get_args(expected)[0], f"{field}[{index}]")
    elif origin is dict:
        _expect(isinstance(value, dict), value, "an object", field)
    elif origin is Literal:
        _expect(value in get_args(expected), value, " or ".join(map(repr, get_args(expected))), field)
    elif origin in (Union, UnionType):
        (inner,) = (member for member in get_args(expected) if member is not NoneType)
        if value is not None:
            _check(value, inner, field)
    elif expected is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _expect(is_number and math.isfinite(value), value, "a finite number", field)
    elif expected is int:
        _expect(isinstance(value, int) and not isinstance(value, bool), value, "an integer", field)
    else:
        _expect(isinstance(value, expected), value, f"a {expected.__name__}", field)


def _expect(fits: bool, value: Any, accepted: str, field: str) -> None:
    if not fits:
        raise ValueError(f"field {field} is {_describe(value)}, but must be {accepted}")


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return f"{value!r} ({type(value).__name__})"


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")
