"""What `ccq report` is given: evaluations, comparisons, benchmarks and trainings, told apart by their content.

Every model gets a name by what it is, not by where it lies: its scale, its arm, and how its read steps ran. Models of
one name are repetitions of one training with different seeds; models that differ in anything else get different names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ccq.bench import decode as bench_decode
from ccq.bench import layer as bench_layer
from ccq.bench import model as bench_model
from ccq.evals.results import SCHEMA, CompareResults, EvalResults, EvalScore, EvalTaskResult, read_results
from ccq.models.configuration import CCQConfig, own_fields, parse_arm
from ccq.models.counts import state_bytes
from ccq.models.presets import PRESETS, preset
from ccq.models.training_record import read_training_record
from ccq.nn.reads.fixed import PAPER as FIXED
from ccq.report.benchmarks import (
    DecodeBenchmark,
    LayerBenchmark,
    ModelBenchmark,
    preset_scales,
    read_decode_benchmark,
    read_layer_benchmark,
    read_model_benchmark,
    scale_name,
)
from ccq.report.figures import GatePoint
from ccq.report.html import _plural
from ccq.report.intervals import Samples
from ccq.train.config import Recipe

ACCEPTED = (
    "accepted are results files of `ccq eval`, `ccq compare` and `ccq bench layer`, `model` and `decode` (JSON), run "
    "folders of `ccq train`, and folders that hold such files"
)
RECIPE_FILE, METRICS_FILE, MODEL = "recipe.json", "metrics.jsonl", "model"
COMPARISON = "comparison"
"""The suite of what `ccq compare` measures."""
MEAN = "mean"
"""The task of a suite's mean."""
_WITHOUT_MEANING = (
    "vocab_size",
    "max_position_embeddings",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Fields of a configuration that belong to the data and not to the arm."""
_MOST_NAMED = 3


class Subject(NamedTuple):
    """A model by what it is. `read` says how its read steps ran: "on", "off", another intervention, or None without
    any.
    """

    scale: str
    arm: str
    read: str | None

    @property
    def label(self) -> str:
        if self.read in (None, "on"):
            return self.arm
        return f"{self.arm}, correction off" if self.read == "off" else f"{self.arm}, read {self.read}"

    @property
    def backbone(self) -> str:
        return self.arm.partition("+")[0].partition(",")[0]


@dataclass(frozen=True)
class Score:
    """One figure of one run. `samples` is None where the results do not hold what each sample gave; a mean over tasks
    has the samples of each.
    """

    value: float
    count: int
    lower_is_better: bool
    samples: tuple[Samples, ...] | None


class ScoreName(NamedTuple):
    suite: str
    task: str
    metric: str


@dataclass(frozen=True)
class Model:
    """What results say of a model. `facts` are the values that set it apart from others of its arm and scale."""

    scale: str
    arm: str
    read: str | None
    seed: int | None
    parameters: int | None
    state_bytes: int | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        return Subject(self.scale, self.arm, self.read)


@dataclass(frozen=True)
class Evaluation:
    """`conditions` are the settings that move a number beside the model."""

    path: Path
    model: Model
    suite: str
    complete: bool
    scores: Mapping[ScoreName, Score]
    first_scores: tuple[ScoreName, ...]
    """The one of each task that tables show."""
    depths: Mapping[str, Mapping[tuple[float, float], tuple[float, int]]]
    """Of needle tasks: the mean score and the samples in each stretch of the text, from 0 (start) to 1 (end)."""
    conditions: Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """A run of `ccq train`; speed is the median over its lines of metrics, memory the peak of the first process."""

    path: Path
    model: Model
    step: int
    steps: int
    tokens: int
    loss: float | None
    held_out_loss: float | None
    tokens_per_second: float | None
    processes: int | None
    memory: int | None
    gate: float | None
    correction: float | None
    gates: tuple[GatePoint, ...]
    """The mean of lambda over layers wherever it was looked at."""
    gate_bias_decays: bool


@dataclass(frozen=True)
class Comparison:
    path: Path
    results: CompareResults

    @property
    def scale(self) -> str:
        return f"{self.results['name']} (ccq compare)"


Source = Evaluation | Training | Comparison | LayerBenchmark | ModelBenchmark | DecodeBenchmark


@dataclass(frozen=True)
class Runs:
    """Everything that was given. `left_out` are files of given folders that hold nothing for the report."""

    evaluations: tuple[Evaluation, ...]
    trainings: tuple[Training, ...]
    comparisons: tuple[Comparison, ...]
    layers: tuple[LayerBenchmark, ...]
    models: tuple[ModelBenchmark, ...]
    decodes: tuple[DecodeBenchmark, ...]
    left_out: tuple[Path, ...]

    def subjects(self) -> list[Subject]:
        """The evaluated models, the paper's scales and arms first."""
        found = {evaluation.model.subject for evaluation in self.evaluations}
        found |= {Subject(scale, arm, read) for scale, arm, read, _, _ in _comparison_runs(self.comparisons)}
        return sorted(found, key=subject_order)

    def seeds(self, subject: Subject) -> dict[int | None, dict[ScoreName, Score]]:
        """The scores of a model by the seed of its training, None where that is not known."""
        by_seed: dict[int | None, dict[ScoreName, Score]] = {}
        for evaluation in self.evaluations:
            if evaluation.model.subject == subject:
                by_seed.setdefault(evaluation.model.seed, {}).update(evaluation.scores)
        for scale, arm, read, seed, scores in _comparison_runs(self.comparisons):
            if Subject(scale, arm, read) == subject:
                by_seed.setdefault(seed, {}).update(scores)
        return by_seed

    def depths(self, subject: Subject) -> dict[str, dict[tuple[float, float], float]]:
        """Of each needle task, the mean score by depth over all seeds."""
        sums: dict[str, dict[tuple[float, float], list[float]]] = {}
        for evaluation in self.evaluations:
            if evaluation.model.subject == subject:
                for task, points in evaluation.depths.items():
                    for place, (value, count) in points.items():
                        found = sums.setdefault(task, {}).setdefault(place, [0.0, 0.0])
                        found[0] += value * count
                        found[1] += count
        return {
            task: {place: total / count for place, (total, count) in sorted(points.items())}
            for task, points in sums.items()
        }

    def names(self, suite: str) -> list[ScoreName]:
        """The first score of every task of a suite that was evaluated, in the order of the files."""
        found = [name for e in self.evaluations if e.suite == suite for name in e.first_scores]
        return list(dict.fromkeys(found))

    def state_bytes(self, subject: Subject) -> int | None:
        """Bytes of the state of one sequence, None where it is not known."""
        known = [m.state_bytes for m in self._models() if m.subject == subject and m.state_bytes is not None]
        for comparison in self.comparisons:
            if comparison.scale == subject.scale:
                arm = subject.backbone if subject.read == "off" else subject.arm
                known += [run["state_bytes"] for run in comparison.results["runs"] if run["arm"] == arm]
        return known[0] if known else None

    def _models(self) -> Iterator[Model]:
        yield from (evaluation.model for evaluation in self.evaluations)
        yield from (training.model for training in self.trainings)


def read_runs(paths: Sequence[Path]) -> Runs:
    """Read what is given, each a file or a folder. Of a folder its own JSON files are read, and itself where it is that
    of a run of `ccq train`.

    Raises:
        ValueError: a file is none of the kinds in `ACCEPTED`, or damaged; a folder holds none; or one model has a score
            twice.
        OSError: a file cannot be read.
    """
    sources: list[Source] = []
    left_out: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist; {ACCEPTED}")
        if path.is_file():
            found = _read_file(path)
            if found is None:
                _refuse_grid(path)
                raise ValueError(f"{path} is none of the files of a report ({_what_it_is(path)}); {ACCEPTED}")
            sources.append(found)
            continue
        in_folder, others = _read_folder(path)
        if not in_folder:
            for other in others:
                _refuse_grid(other)
            listed = f" (found: {', '.join(other.name for other in others[:5])})" if others else ""
            raise ValueError(f"{path} holds nothing for a report{listed}; {ACCEPTED}")
        sources += in_folder
        left_out += others
    # A file may be given by its own name and by that of its folder.
    sources = _named(list({source.path.resolve(): source for source in sources}.values()))
    evaluations = tuple(source for source in sources if isinstance(source, Evaluation))
    comparisons = tuple(source for source in sources if isinstance(source, Comparison))
    _refuse_twice(evaluations, comparisons)
    return Runs(
        evaluations,
        tuple(source for source in sources if isinstance(source, Training)),
        comparisons,
        tuple(source for source in sources if isinstance(source, LayerBenchmark)),
        tuple(source for source in sources if isinstance(source, ModelBenchmark)),
        tuple(source for source in sources if isinstance(source, DecodeBenchmark)),
        tuple(left_out),
    )


def _read_folder(path: Path) -> tuple[list[Source], list[Path]]:
    sources: list[Source] = []
    others = []
    is_training = (path / RECIPE_FILE).is_file() and (path / METRICS_FILE).is_file()
    if is_training:
        sources.append(_read_training(path))
    for file in sorted(path.glob("*.json")):
        if is_training and file.name == RECIPE_FILE:
            continue
        found = _read_file(file)
        if found is None:
            others.append(file)
        else:
            sources.append(found)
    return sources, others


def _read_file(path: Path) -> Source | None:
    """The file as what it is; None where it is something else."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    schema, kind = content.get("schema"), content.get("kind")
    try:
        if schema == SCHEMA and kind == "eval":
            return _evaluation(path, read_results(path, "eval"))
        if schema == SCHEMA and kind == "compare":
            return Comparison(path, read_results(path))
        if schema == bench_layer.SCHEMA:
            return read_layer_benchmark(path, content)
        if schema == bench_model.SCHEMA:
            return read_model_benchmark(path, content)
        if schema == bench_decode.SCHEMA:
            return read_decode_benchmark(path, content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or of another version of ccq: {error!r}; make it again") from error
    return None


def _refuse_grid(path: Path) -> None:
    """Say what to do where a file is that of a grid, whose tasks the paper does not have."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return
    if isinstance(content, dict) and (content.get("schema"), content.get("kind")) == (SCHEMA, "grid"):
        folder = path.parent
        raise ValueError(
            f"{path} holds a grid of `ccq compare`, which has a report of its own: {folder / 'report.html'}, written "
            f"anew by the same `ccq compare ... --out {folder}`. Of its models, tasks/TASK/arms/ARM-seedS/model, those "
            f"trained on text can be evaluated with `ccq eval`, whose results this report takes; {ACCEPTED}"
        )


def _what_it_is(path: Path) -> str:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        return f"no JSON: {error}"
    if not isinstance(content, dict):
        return "no JSON object"
    if "schema" not in content:
        return "it names no schema"
    return f"its schema is {content['schema']!r}" + (f", its kind {content['kind']!r}" if "kind" in content else "")


# Models.


def scale_of(config: CCQConfig) -> tuple[str | None, bool]:
    """The scale of the presets whose sizes a configuration has, None where it has none's, and whether it has those of
    the wide control.
    """
    sizes = ("hidden_size", "num_layers", "num_heads", "head_dim", "value_head_dim", "intermediate_size")
    for scale in preset_scales():
        for name, wide in ((f"{config.arm}-{scale}", False), (f"{config.backbone}-wide-{scale}", True)):
            if wide and name not in PRESETS:
                continue
            found = preset(name)
            if all(getattr(config, size) == getattr(found, size) for size in sizes):
                return scale_name(scale), wide
    return None, False


def arm_name(config: CCQConfig) -> str:
    """The arm, with the options of its read step that are another arm or that the paper's table 7 varies."""
    if config.read not in ("ccq", "ccq-fixed"):
        return config.arm
    name, gate = f"{config.backbone}+ccq", config.gate
    if config.read == "ccq" and isinstance(gate, str):
        return name if config.centred else f"{name}-uncentred"
    if not config.centred:
        return config.arm
    if isinstance(gate, (int, float)) and gate != FIXED:
        return f"{name}-fixed, lambda {gate:g}"
    return f"{name}-fixed" if isinstance(gate, (str, int, float)) else f"{name}-fixed, lambda by head"


def _model(
    values: Mapping[str, Any], *, read: str | None, parameters: int | None, seed: int | None, facts: Mapping[str, Any]
) -> Model:
    """A model of this library, of the fields of its configuration."""
    config = CCQConfig(**{name: value for name, value in values.items() if name in own_fields()})
    scale, wide = scale_of(config)
    if scale is None:
        scale = f"{_plural(config.num_layers, 'layer')} of {config.hidden_size}"
    # With the correction off no statistics are kept.
    kept = CCQConfig(**{**_own(config), "arm": config.backbone, "read_options": None}) if read == "off" else config
    described = {name: value for name, value in _own(config).items() if name not in _WITHOUT_MEANING}
    name = arm_name(config)
    return Model(
        scale=scale,
        arm=name.replace(config.backbone, f"{config.backbone}-wide", 1) if wide else name,
        read=read,
        seed=seed,
        parameters=parameters,
        state_bytes=state_bytes(kept),
        facts={**described, **facts},
    )


def _own(config: CCQConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in own_fields()}


def _count_name(parameters: int) -> str:
    """1_321_800_000 -> "1.32B parameters": the scale of a model of another library."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit} parameters"
    return f"{parameters} parameters"


def _training_facts(settings: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What determines a training beside seed and model, flat."""
    facts: dict[str, Any] = {"training.steps": steps}
    for section, values in settings.items():
        if section == "model":
            continue
        if isinstance(values, Mapping):
            facts |= {
                f"{section}.{name}": value for name, value in values.items() if name not in ("seed", "steps", "tokens")
            }
        else:
            facts[section] = values
    return facts


def _named(sources: Sequence[Source]) -> list[Source]:
    """The sources with models of equal names only where they differ in the seed alone.

    Where models of one scale and arm differ in something else that is known of both, the differing values are put
    behind the arm.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for source in sources:
        if isinstance(source, (Evaluation, Training)):
            groups.setdefault((source.model.scale, source.model.arm), []).append(source.model.facts)
    named: list[Source] = []
    for source in sources:
        if isinstance(source, (Evaluation, Training)):
            facts = groups[source.model.scale, source.model.arm]
            suffix = _difference_name(source.model.facts, facts)
            if suffix:
                source = dataclasses.replace(
                    source, model=dataclasses.replace(source.model, arm=f"{source.model.arm}, {suffix}")
                )
        named.append(source)
    return named


def _difference_name(own: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> str:
    differing = [
        name
        for name in dict.fromkeys(name for facts in group for name in facts)
        if len({json.dumps(facts[name], sort_keys=True) for facts in group if name in facts}) > 1
    ]
    parts = [f"{name} {_short(own[name])}" for name in differing if name in own]
    more = len(parts) - _MOST_NAMED
    return ", ".join(parts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 12 else text[:8]


def _refuse_twice(evaluations: Sequence[Evaluation], comparisons: Sequence[Comparison]) -> None:
    """One model has one value of a score."""
    names: dict[str, Comparison] = {}
    for comparison in comparisons:
        known = names.setdefault(comparison.scale, comparison)
        if known is not comparison:
            called = comparison.results["name"]
            raise ValueError(
                f"{known.path} and {comparison.path} are both comparisons named {called!r}; give one of them"
            )
    seen: dict[tuple[Subject, int | None, ScoreName], Evaluation] = {}
    for evaluation in evaluations:
        for name in evaluation.scores:
            if name.task == MEAN:
                continue
            key = (evaluation.model.subject, evaluation.model.seed, name)
            other = seen.setdefault(key, evaluation)
            if other is not evaluation:
                seed = "unknown seed" if evaluation.model.seed is None else f"seed {evaluation.model.seed}"
                raise ValueError(
                    f"{other.path} and {evaluation.path} both hold {name.task} ({name.metric}) of "
                    f"{evaluation.model.subject.label} ({evaluation.model.scale}), {seed}; give one of them"
                )


def subject_order(subject: Subject) -> tuple[Any, ...]:
    """For sorting: the paper's scales and arms first, a backbone before its arms, the correction on before off."""
    scales = ["500M", "1.3B", *map(scale_name, preset_scales())]
    arms = ("mamba2", "gla", "gla-hedgehog", "gated-deltanet", "transformer")
    backbone = subject.backbone
    return (
        scales.index(subject.scale) if subject.scale in scales else len(scales),
        subject.scale,
        arms.index(backbone) if backbone in arms else len(arms),
        backbone,
        "+" in subject.arm,
        subject.arm,
        subject.read not in (None, "on"),
        subject.read or "",
    )


# Evaluations.


def _evaluation(path: Path, results: EvalResults) -> Evaluation:
    described = results["model"]
    record, values = described["training"], described["configuration"]
    seed = None if record is None else int(record["seed"])
    facts: dict[str, Any] = {"trained by a recipe": record is not None}
    if record is not None:
        facts |= _training_facts(record["settings"], record["steps"])
    facts["dtype"] = described["dtype"]
    if values is None:
        model = Model(
            _count_name(described["parameters"]),
            described["name"],
            described["read"],
            seed,
            described["parameters"],
            None,
            facts,
        )
    else:
        model = _model(values, read=described["read"], parameters=described["parameters"], seed=seed, facts=facts)
    if record is None:
        # Two models of unknown trainings are not repetitions of each other because their names are alike.
        model = dataclasses.replace(model, facts={**model.facts, "weights": described["weights"]})
    suite, settings = results["suite"], results["settings"]
    conditions = {name: settings[name] for name in ("max_length", "truncation_side", "bos")}
    scores: dict[ScoreName, Score] = {}
    firsts = []
    for task in results["tasks"]:
        for score in task["scores"]:
            scores[ScoreName(suite, task["task"], score["metric"])] = Score(
                score["value"],
                score["samples"],
                not score["higher_is_better"],
                _samples(suite, task, score, conditions, described["tokenizer"]),
            )
        if task["scores"]:
            firsts.append(ScoreName(suite, task["task"], task["scores"][0]["metric"]))
    for score in results["summary"]:
        scores[ScoreName(suite, MEAN, MEAN)] = _mean_score(score, [scores[name] for name in firsts])
    depths = {
        task["task"]: {(point["start"], point["end"]): (point["value"], point["samples"]) for point in curve["points"]}
        for task in results["tasks"]
        for curve in task["curves"]
        if curve["axis"] == "depth"
    }
    return Evaluation(path, model, suite, results["complete"], scores, tuple(firsts), depths, conditions)


def _mean_score(summary: EvalScore, scores: Sequence[Score]) -> Score:
    """A suite's mean, over those of its scores that are shares; language has two tasks more, which are not."""
    shares = [score for score in scores if score.samples is not None and score.samples[0].are_shares]
    samples = None
    if shares and math.isclose(statistics.fmean(score.value for score in shares), summary["value"], rel_tol=1e-9):
        samples = tuple(score.samples[0] for score in shares if score.samples is not None)
    return Score(summary["value"], summary["samples"], not summary["higher_is_better"], samples)


def _samples(
    suite: str, task: EvalTaskResult, score: EvalScore, conditions: Mapping[str, Any], tokenizer: str
) -> tuple[Samples, ...] | None:
    """What each sample gave, None where the records do not give the score."""
    try:
        found, values = _contributions(suite, score["metric"], task["records"])
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    if not len(values) or not math.isclose(found, score["value"], rel_tol=1e-6, abs_tol=1e-9):
        return None
    are_shares = score["higher_is_better"] and bool(((values >= 0) & (values <= 1)).all())
    return (Samples(values, _identities(suite, task, conditions, tokenizer), are_shares),)


def _contributions(suite: str, metric: str, records: Sequence[Mapping[str, Any]]) -> tuple[float, NDArray[np.float64]]:
    """A score computed from its records, and what each of them contributes, see `Samples`."""

    def column(name: str) -> NDArray[np.float64]:
        return np.array([record[name] for record in records], dtype=np.float64)

    if metric in ("word_perplexity", "byte_perplexity"):
        # lm-eval's pairs: log-likelihood of a document, and its words or bytes.
        pairs = column(metric).reshape(-1, 2)
        losses, weights = -pairs[:, 0], pairs[:, 1]
    elif metric in ("perplexity", "token_perplexity"):
        losses = -column(metric) if metric == "perplexity" else column("loss")
        weights = np.ones_like(losses)
    else:
        values = column("score" if suite == "needle" else metric).reshape(len(records))
        return float(values.mean()), values
    loss = losses.sum() / weights.sum()
    value = math.exp(loss)
    return value, value * (1 + (losses - loss * weights) / weights.mean())


def _identities(
    suite: str, task: EvalTaskResult, conditions: Mapping[str, Any], tokenizer: str
) -> tuple[str, ...] | None:
    """Names of the samples and of how they were asked, so that equal names are equal questions."""
    asked = json.dumps(conditions, sort_keys=True)
    try:
        if suite == "extrapolation":
            settings = task["settings"]
            text = f"{asked} {tokenizer} {task['data']['sha256']} {settings['length']}"
            return tuple(f"{text} {record['window']}" for record in task["records"])
        name = "prompt_sha256" if suite == "needle" else "doc_sha256"
        return tuple(f"{asked} {record[name]}" for record in task["records"])
    except KeyError:
        return None


# Trainings.


def _read_training(path: Path) -> Training:
    try:
        content = json.loads((path / RECIPE_FILE).read_bytes())
        recipe = Recipe.from_dict(content)
        lines = list(_metrics(path / METRICS_FILE))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no run folder of `ccq train`, or damaged ({error}); {ACCEPTED}") from error
    if not lines:
        raise ValueError(f"{path / METRICS_FILE} has no line yet; give the folder once the run has taken a step")
    config = recipe.model.config()
    record = read_training_record(path / MODEL)
    settings = content if record is None else record["settings"]
    facts = _training_facts(
        {name: values for name, values in settings.items() if name != "system"}, recipe.training.total_steps
    )
    for unknown in ("data.folder", "data.stdlib_tokenizer"):
        facts.pop(unknown, None)
    return Training(
        path=path,
        model=_model(
            _own(config),
            read=None if config.read is None else "on",
            parameters=None,
            seed=recipe.training.seed,
            facts=facts,
        ),
        step=lines[-1]["step"],
        steps=recipe.training.total_steps,
        tokens=lines[-1]["tokens"],
        loss=_last(lines, "loss"),
        held_out_loss=_last(lines, "held_out_loss"),
        tokens_per_second=_median(lines, "tokens_per_second"),
        processes=_last(lines, "processes"),
        memory=max((line["memory"] for line in lines if line.get("memory") is not None), default=None),
        gate=_last_mean(lines, "gate"),
        correction=_last_mean(lines, "correction"),
        gates=tuple(
            GatePoint(line["tokens"], statistics.fmean(line["gate"]), line.get("gate_by_decay_alone"))
            for line in lines
            if line.get("gate") is not None
        ),
        gate_bias_decays=recipe.optimizer.decay_gate_bias,
    )


def _metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines; a run that is going on, or was killed, may have a torn one at the end."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)


def _last(lines: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((line[name] for line in reversed(lines) if line.get(name) is not None), None)


def _last_mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = _last(lines, name)
    return None if found is None else statistics.fmean(found)


def _median(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.median(values) if values else None


# Comparisons and benchmarks.


def _comparison_runs(
    comparisons: Sequence[Comparison],
) -> Iterator[tuple[str, str, str | None, int, dict[ScoreName, Score]]]:
    """Scale, arm, read, seed and scores of every run of `ccq compare`, with the correction on and off."""
    for comparison in comparisons:
        for run in comparison.results["runs"]:
            _, read = parse_arm(run["arm"])
            losses = {
                ScoreName(COMPARISON, f"text/{entry['length']}", "loss"): Score(
                    entry["loss"], entry["windows"], True, None
                )
                for entry in run["perplexity"]
            }
            needles = _needle_scores(run["needle_by_length"])
            yield comparison.scale, run["arm"], None if read is None else "on", run["seed"], losses | needles
            if run["needle_read_off"] is not None:
                yield comparison.scale, run["arm"], "off", run["seed"], _needle_scores(run["needle_read_off"])


def _needle_scores(entries: Sequence[Mapping[str, Any]]) -> dict[ScoreName, Score]:
    """A comparison tells how many answers were right, not which: their samples cannot be paired."""
    return {
        ScoreName(COMPARISON, f"needle/{entry['length']}", "accuracy"): Score(
            entry["accuracy"],
            entry["asked"],
            False,
            (Samples(np.repeat([1.0, 0.0], [entry["correct"], entry["asked"] - entry["correct"]]), None, True),),
        )
        for entry in entries
    }
