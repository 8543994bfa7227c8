"""The settings of a grid: arms x seeds x tasks, read strictly from one YAML.

    preset: tiny               sizes of the tasks that are named below without any
    model:                     a scale of the model presets, and any field of their configuration to change
    arms: [gla, gla+ccq]
    seeds: 3                   0, 1, 2
    tasks:                     by name, each with what it changes of the task that the preset has under this name
      text:
      recall: {length: 64, pairs: 16}
      mine: {kind: statements, length: 96, ...}
    optimizer:                 as in a recipe
    interventions: [off]       ways of reading to evaluate trained models with
    system:                    what may differ from machine to machine and from call to call

A key that is not known, a value of the wrong kind and a value that cannot work are errors that name the key.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ccq.compare.settings import CompareSettings, compare_preset
from ccq.compare.training import AnyStage, tokens_before
from ccq.data.recall import RecallTask
from ccq.data.tasks import TASKS
from ccq.evals.results import PUT_INTO
from ccq.models.configuration import CCQConfig, nearest, parse_arm
from ccq.models.intervention import ReadIntervention, check_intervention
from ccq.models.modeling import CCQForCausalLM
from ccq.models.presets import SCALES
from ccq.models.presets import preset as model_preset
from ccq.nn.reads import READS
from ccq.train.config import OptimizerRecipe, read_section, read_value, read_yaml, unknown_key

TEXT = "text"
"""The kind of the task with needles in real text, that of a comparison without a grid."""
OFF = "off"
NORMALIZE = "normalize"
"""The read step that is unit queries and nothing else."""
_OWN_KEYS = ("kind", "prompts", "stages", "evaluate")
_TASK_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")


def _stages(short: dict[str, Any], middle: dict[str, Any], **last: Any) -> list[dict[str, Any]]:
    """Short rows first, in large batches, where recall appears soonest; at the end the task with `last`."""
    return [
        {"batch_size": 64, "steps": 200, "length": 16, **short},
        {"batch_size": 64, "steps": 300, "length": 32, **middle},
        {"batch_size": 32, "steps": 300, **last},
    ]


_BUILT_IN: dict[str, dict[str, Any]] = {
    TEXT: {"kind": TEXT},
    "recall": {
        "kind": "recall",
        "length": 64,
        "pairs": 8,
        "queries": 8,
        "keys": 32,
        "values": 32,
        "stages": _stages({"pairs": 2, "queries": 2}, {"pairs": 4, "queries": 4}),
        "evaluate": [{"pairs": 8}, {"pairs": 16}, {"pairs": 24}, {"pairs": 32, "length": 96}],
    },
    "needle": {
        "kind": "statements",
        "length": 64,
        "needles": 4,
        "keys": 32,
        "values": 32,
        "stages": _stages({"needles": 2}, {}),
        "evaluate": [{"length": 64}, {"length": 128}, {"length": 256}],
    },
    "needles": {
        "kind": "statements",
        "length": 64,
        "needles": 8,
        "queries": 4,
        "keys": 32,
        "values": 32,
        "stages": _stages({"needles": 2, "queries": 2}, {"needles": 4, "queries": 4}),
        "evaluate": [{"needles": 8}, {"needles": 16}, {"length": 128}, {"needles": 32, "length": 128}],
    },
    "frequent-needle": {
        "kind": "statements",
        "length": 96,
        "needles": 9,
        "statements": (1, 2, 4),
        "keys": 32,
        "values": 32,
        "stages": _stages({"needles": 2, "statements": (1,)}, {"needles": 3}, queries=3),
        "evaluate": [{"asked_statements": 1}, {"asked_statements": 2}, {"asked_statements": 4}],
    },
    "frequent-words": {
        "kind": "frequent-words",
        "length": 64,
        "words": 8,
        "vocabulary": 32,
        "stages": _stages({"words": 4}, {}),
        "evaluate": [{"steepness": 1.5}, {"steepness": 1.0}, {"steepness": 0.5}, {"length": 128}],
    },
    "common-words": {
        "kind": "common-words",
        "length": 64,
        "often": 8,
        "seldom": 2,
        "vocabulary": 64,
        "stages": _stages({}, {}),
        "evaluate": [{"seldom": 1}, {"seldom": 2}, {"seldom": 4}, {"length": 96}],
    },
}
"""What preset "tiny" has: minutes an arm on one core."""


class SyntheticStage(NamedTuple):
    """A part of the curriculum of a synthetic task."""

    task: RecallTask
    batch_size: int
    steps: int

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self.task.length


class EvaluationSetting(NamedTuple):
    """One difficulty at which a task is evaluated."""

    name: str
    """What differs from training, such as "pairs 16"."""
    task: RecallTask


@dataclass(frozen=True)
class SyntheticTask:
    """A task of `ccq.data.tasks` with its curriculum and the difficulties it is evaluated at."""

    name: str
    kind: str
    task: RecallTask
    """As the last stage trains it, unless that changes it."""
    stages: tuple[SyntheticStage, ...]
    settings: tuple[EvaluationSetting, ...]
    prompts: int
    """Rows at each difficulty, the same for all arms and seeds."""
    values: dict[str, Any]
    """All of it as plain values."""

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return sum(stage.steps for stage in self.stages)


@dataclass(frozen=True)
class TextTask:
    """Needles in real text and the text itself, as a comparison without a grid trains and evaluates them."""

    name: str
    comparison: CompareSettings
    values: dict[str, Any]
    """All of it as plain values."""

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return self.comparison.train.steps


@dataclass(frozen=True)
class GridSystem:
    """What may change from call to call."""

    device: Literal["cpu", "cuda"] | None = None
    """None: every GPU that torch finds, else the CPU."""
    runs_per_device: int | None = None
    """Runs at the same time on each device; None chooses, see `ccq.compare.pool.default_runs_per_device`."""
    checkpoint_every: int = 100
    """Steps between checkpoints; what a kill can cost."""

    def __post_init__(self) -> None:
        for name in ("runs_per_device", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"system.{name} must be at least 1, got {value}")


class Cell(NamedTuple):
    """One run of a grid."""

    task: str
    arm: str
    seed: int

    @property
    def title(self) -> str:
        return f"{self.task}: {self.arm}, seed {self.seed}"


@dataclass(frozen=True)
class GridSettings:
    """A grid of runs. Equal settings give equal figures on one machine, but for the measured times."""

    scale: str
    """Of the model presets, see `ccq.models.presets`."""
    options: dict[str, Any]
    """Fields of `CCQConfig` that replace those of the preset."""
    arms: tuple[str, ...]
    seeds: int
    """Seeds 0 ... seeds - 1, the same for every arm and task."""
    tasks: tuple[SyntheticTask | TextTask, ...]
    optimizer: OptimizerRecipe
    interventions: tuple[str, ...] = ()
    """Ways of reading that trained arms are evaluated with beside their own; "off", where there are any, is the first
    of them and comes with the 2 x 2 of training and reading."""
    system: GridSystem = field(default_factory=GridSystem)

    def __post_init__(self) -> None:
        if not self.arms or not self.tasks:
            raise ValueError("arms and tasks must have at least one entry each")
        for arm in self.arms:
            parse_arm(arm)
        repeated = sorted({arm for arm in self.arms if self.arms.count(arm) > 1})
        if repeated:
            raise ValueError(f"arms are named more than once: {', '.join(repeated)}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be a whole number of at least 1, got {self.seeds!r}")
        if self.scale not in SCALES:
            raise ValueError(
                f"model.scale: unknown scale {self.scale!r}{nearest(self.scale, SCALES)}; accepted: {', '.join(SCALES)}"
            )
        for task in self.tasks:
            vocabulary = task.task.vocabulary_size if isinstance(task, SyntheticTask) else task.comparison.vocabulary
            for arm in self.arms:
                try:
                    self.model_config(arm, vocab_size=vocabulary)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"model: {error}") from error
        self._check_interventions()

    def _check_interventions(self) -> None:
        """Ask models of the arms, so that what cannot be done is found before anything is trained."""
        for name in self.interventions:
            if all(name in self.refused(arm) for arm in self.arms):
                raise ValueError(
                    f"interventions: no arm can be read with {name!r}. {self.refused(self.arms[-1])[name]}"
                )

    @cached_property
    def _refusals(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for arm in self.arms:
            with torch.device("meta"):
                model = CCQForCausalLM(self.model_config(arm, vocab_size=8))
            reads = model.read_steps()
            found[arm] = {}
            for name in self.interventions:
                try:
                    check_intervention(model, ReadIntervention.parse(name))
                except ValueError as error:
                    found[arm][name] = str(error)
                    continue
                if not any(read.has_correction for read in reads):
                    found[arm][name] = f"arm {arm!r} has no correction that {name!r} could change"
        return found

    def refused(self, arm: str) -> dict[str, str]:
        """The interventions that an arm cannot be read with, and why."""
        return self._refusals[arm]

    def readings(self, arm: str) -> list[str]:
        """The ways of reading that belong to an arm beside its own: the interventions that it can be read with, and
        `PUT_INTO` the model that its read step is put into.
        """
        names = [name for name in self.interventions if name not in self.refused(arm)]
        base = self.put_into(arm)
        return names if base is None else [*names, f"{PUT_INTO}{base}"]

    def put_into(self, arm: str) -> str | None:
        """The arm whose models are given this one's read step for the 2 x 2 of training and reading: its backbone, or
        the backbone with unit queries where the arm was trained with such and the grid has that.

        None where there is no 2 x 2: without interventions, without such an arm in the grid, and for a read step that
        has parameters other than a gate, which a backbone never learned.
        """
        return self._bases[arm][0]

    def why_not_put_in(self, arm: str) -> str:
        """Why an arm with a read step has no 2 x 2; empty if it has."""
        return self._bases[arm][1]

    @cached_property
    def _bases(self) -> dict[str, tuple[str | None, str]]:
        return {arm: self._base(arm) for arm in self.arms}

    def _base(self, arm: str) -> tuple[str | None, str]:
        backbone, read = parse_arm(arm)
        if read is None or not self.interventions:
            return None, "nothing is read otherwise"
        if "gate" not in READS[read].takes:
            return None, f"read step {read!r} has no gate whose lambda could be fixed"
        config = copy.copy(self.model_config(arm, vocab_size=8))
        config.gate = 0.5
        with torch.device("meta"):
            has_own = CCQForCausalLM(config).read_parameter_count > 0
        if has_own:
            return None, f"read step {read!r} has parameters other than its gate, which its backbone never learned"
        base = self.control(arm) or (backbone if backbone in self.arms else None)
        return base, "" if base is not None else f"its backbone {backbone!r} is not among the arms"

    def control(self, arm: str) -> str | None:
        """The arm that is this one's backbone with unit queries, where the grid has it and it tells something: where
        the arm reads unit queries and its backbone raw ones.
        """
        backbone, read = parse_arm(arm)
        control = f"{backbone}+{NORMALIZE}"
        is_one = control in self.arms and read not in (None, NORMALIZE)
        return control if is_one and not self.read_alike(arm, backbone) else None

    def read_alike(self, first: str, second: str) -> bool:
        """Whether both arms read unit queries before any correction, or both raw ones."""
        return reads_unit_queries(self.model_config(first)) == reads_unit_queries(self.model_config(second))

    @property
    def cells(self) -> list[Cell]:
        """All runs in the order in which they start: a task, then seed after seed, so that pairs are complete early."""
        return [Cell(task.name, arm, seed) for task in self.tasks for seed in range(self.seeds) for arm in self.arms]

    def all_readings(self) -> dict[str, list[str]]:
        """`readings` of every arm with a read step."""
        return {arm: self.readings(arm) for arm in self.arms if parse_arm(arm)[1] is not None}

    def reading_plan(self) -> tuple[int, list[str]]:
        """How many readings there are over all seeds and tasks, and in lines of text those of each arm, with the
        reasons why there are no others.
        """
        lines = []
        readings = self.all_readings()
        for arm, names in readings.items():
            lines.append(f"{arm}: {'; '.join(names) or 'none'}")
            lines += [f"  {reason}" for reason in self.refused(arm).values()]
            if self.put_into(arm) is None:
                lines.append(f"  no 2 x 2: {self.why_not_put_in(arm)}")
        return self.seeds * len(self.tasks) * sum(map(len, readings.values())), lines

    def plan(self) -> list[tuple[str, str, int, int, int]]:
        """Task, arm, seed, steps and tokens of every run, in the order in which they start."""
        rows = []
        for cell in self.cells:
            task = self.task(cell.task)
            stages: Sequence[AnyStage] = (
                task.stages if isinstance(task, SyntheticTask) else task.comparison.train.stages
            )
            rows.append((*cell, task.steps, tokens_before(stages, task.steps)))
        return rows

    def with_interventions(self, names: Sequence[str]) -> GridSettings:
        """The same grid, read in these ways."""
        return dataclasses.replace(self, interventions=_with_off(names))

    def task(self, name: str) -> SyntheticTask | TextTask:
        return next(task for task in self.tasks if task.name == name)

    def model_config(self, arm: str, **changes: Any) -> CCQConfig:
        """The model of an arm; `changes` stand behind the grid's own options."""
        return model_preset(f"{arm}-{self.scale}", **{**changes, **self.options})

    def to_dict(self) -> dict[str, Any]:
        """Plain values as JSON holds them, in the form of a grid file."""
        optimizer = dataclasses.asdict(self.optimizer)
        optimizer["betas"] = list(self.optimizer.betas)
        return {
            "model": {"scale": self.scale, **self.options},
            "arms": list(self.arms),
            "seeds": self.seeds,
            "tasks": {task.name: task.values for task in self.tasks},
            "optimizer": optimizer,
            "interventions": list(self.interventions),
            "system": dataclasses.asdict(self.system),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GridSettings:
        """The grid that a file's content describes."""
        accepted = ("preset", "model", "arms", "seeds", "tasks", "optimizer", "interventions", "system")
        _check_keys("the file", values)
        for name in values:
            if name not in accepted:
                raise ValueError(unknown_key(name, accepted))
        size = read_value("preset", values.get("preset", "tiny"), str)
        default = compare_preset(size)
        arms = read_value("arms", values.get("arms", default.arms), tuple[str, ...])
        seeds = read_value("seeds", values.get("seeds", 1), int)
        model = {"scale": default.model, **_section("model", values)}
        optimizer = {
            "learning_rate": default.train.learning_rate,
            "warmup_steps": default.train.warmup_steps,
            "final_learning_rate_share": default.train.final_learning_rate_share,
            **_section("optimizer", values),
        }
        tasks = values.get("tasks")
        if isinstance(tasks, list):
            tasks = dict.fromkeys(read_value("tasks", tasks, tuple[str, ...]))
        if not isinstance(tasks, Mapping):
            raise ValueError(f"tasks must be names with their options, or a list of names, got {tasks!r}")
        _check_keys("tasks", tasks)
        return cls(
            scale=read_value("model.scale", model.pop("scale"), str),
            options=model,
            arms=arms,
            seeds=seeds,
            tasks=tuple(_task(name, content, size) for name, content in tasks.items()),
            optimizer=read_section(OptimizerRecipe, "optimizer", optimizer),
            interventions=_with_off(_words_of_yaml(values.get("interventions"))),
            system=read_section(GridSystem, "system", _section("system", values)),
        )


def load_grid(path: Path) -> GridSettings:
    """Read a grid file.

    Raises:
        ValueError: the file is not YAML, a key is unknown or missing, or a value cannot be used.
        OSError: the file cannot be read.
    """
    return GridSettings.from_dict(read_yaml(path, "keys and values: arms, seeds, tasks, ..."))


def choose_grid(
    file: Path | None = None,
    *,
    preset: str | None = None,
    arms: Sequence[str] | None = None,
    seeds: int | None = None,
    tasks: Sequence[str] | None = None,
    text: Path | None = None,
    interventions: Sequence[str] | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    runs_per_device: int | None = None,
) -> GridSettings:
    """The grid of a file, or of built-in tasks where there is none. None leaves a value as it is there.

    Args:
        file: a grid file, which says preset, arms, seeds, tasks and text itself.
        preset, arms, seeds: as in a grid file.
        tasks: names of built-in tasks; default: text.
        text: folder of text files for the task text.
        interventions: replace those of the file; an empty list means "off".
        device, runs_per_device: see `GridSystem`.

    Raises:
        ValueError: arguments do not go together, or a value cannot be used.
        OSError: the file cannot be read.
    """
    ways = None if interventions is None else list(interventions) or [OFF]
    given: dict[str, Any] = {
        "preset": preset,
        "arms": None if arms is None else list(arms),
        "seeds": seeds,
        "tasks": None if tasks is None else dict.fromkeys(tasks),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if file is None:
        given.setdefault("tasks", {TEXT: None})
        if text is not None:
            if TEXT not in given["tasks"]:
                raise ValueError("--text is what the task text is made of; add text to --task, or leave it out")
            given["tasks"][TEXT] = {"folder": str(text)}
        settings = GridSettings.from_dict({**given, "interventions": ways})
    else:
        if given or text is not None:
            raise ValueError(
                f"--preset, --arms, --seeds, --task and --text are what {file} says; leave them out, or it"
            )
        settings = load_grid(file)
        settings = settings if ways is None else settings.with_interventions(ways)
    system = {"device": device, "runs_per_device": runs_per_device}
    changes: dict[str, Any] = {name: value for name, value in system.items() if value is not None}
    return dataclasses.replace(settings, system=dataclasses.replace(settings.system, **changes))


def _with_off(names: Sequence[str]) -> tuple[str, ...]:
    """Each once, in the form that `ReadIntervention` gives it, "off" in front; "on" is how every model is evaluated in
    any case.
    """
    try:
        known = dict.fromkeys(str(ReadIntervention.parse(name)) for name in names)
    except ValueError as error:
        raise ValueError(f"interventions: {error}") from error
    return (OFF, *(name for name in known if name not in (OFF, "on"))) if names else ()


def _words_of_yaml(given: Any) -> list[str]:
    """The interventions of a file, one word or a list; YAML 1.1 takes the words on and off for true and false."""
    if given is None:
        return []
    names = given if isinstance(given, (list, tuple)) else [given]
    words = [{True: "on", False: OFF}[name] if isinstance(name, bool) else name for name in names]
    for word in words:
        if not isinstance(word, str):
            raise ValueError(
                "interventions must be a word or a list of words, such as off, scale=0.5 or, with its comma in quotes, "
                f'"layers=0,1"; got {word!r}'
            )
    return words


def _section(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    content = values.get(name)
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} must be a section of keys and values, got {content!r}")
    _check_keys(name, content)
    return dict(content)


def _check_keys(where: str, content: Mapping[Any, Any]) -> None:
    for key in content:
        if not isinstance(key, str):
            raise ValueError(
                f"{where} has the key {key!r}, but keys are words. YAML takes on, off, yes and no for true and false, "
                "and digits for a number; such a word stands in quotes"
            )


def reads_unit_queries(config: CCQConfig) -> bool:
    """Whether a model reads its memory with queries of unit length, before any correction."""
    if config.backbone == "gated-deltanet":
        return True
    return config.read == NORMALIZE or (config.read is not None and not config.keep_length)


def built_in_task(name: str, size: str) -> dict[str, Any]:
    """The task that preset `size` has under a name, as a grid file would give it; empty for other names."""
    values = dict(_BUILT_IN.get(name, {}))
    if values.get("kind") == TEXT:
        return {**values, "preset": size}
    if values and size == "smoke":
        # Every part of the job in seconds; nothing is learned.
        return {**values, "stages": [{"batch_size": 8, "steps": 6}], "evaluate": values["evaluate"][:2], "prompts": 20}
    return values


def _task(name: str, content: Any, size: str) -> SyntheticTask | TextTask:
    section = f"tasks.{name}"
    if not _TASK_NAME.fullmatch(name):
        raise ValueError(f"a task's name is made of small letters and digits, joined by . or -; got {name!r}")
    if content is not None and not isinstance(content, Mapping):
        raise ValueError(f"{section} must be a section of keys and values, got {content!r}")
    _check_keys(section, content or {})
    values = {**built_in_task(name, size), **(content or {})}
    if "kind" not in values:
        raise ValueError(
            f"{section} names no kind, and no preset has a task {name!r}{nearest(name, _BUILT_IN)}; built in are "
            f"{', '.join(_BUILT_IN)}, kinds are {', '.join((TEXT, *TASKS))}"
        )
    kind = read_value(f"{section}.kind", values["kind"], str)
    if kind == TEXT:
        return _text_task(name, section, values)
    if kind not in TASKS:
        raise ValueError(
            f"{section}.kind: unknown kind {kind!r}{nearest(kind, TASKS)}; accepted: {TEXT}, {', '.join(TASKS)}"
        )
    return _synthetic_task(name, section, kind, values)


def _text_task(name: str, section: str, values: Mapping[str, Any]) -> TextTask:
    accepted = ("kind", "preset", "folder")
    for key in values:
        if key not in accepted:
            raise ValueError(unknown_key(f"{section}.{key}", accepted))
    folder = read_value(f"{section}.folder", values.get("folder"), str | None)
    text = None if folder is None else Path(folder).resolve()
    comparison = compare_preset(read_value(f"{section}.preset", values.get("preset", "tiny"), str), text=text)
    plain = {"kind": TEXT, "preset": comparison.preset, "folder": comparison.text}
    return TextTask(name, comparison, plain)


def _synthetic_task(name: str, section: str, kind: str, values: Mapping[str, Any]) -> SyntheticTask:
    kind_class = TASKS[kind]
    fields = [each.name for each in dataclasses.fields(kind_class)]  # type: ignore[arg-type]
    for key in values:
        if key not in (*_OWN_KEYS, *fields):
            raise ValueError(unknown_key(f"{section}.{key}", (*_OWN_KEYS, *fields)))
    options = {key: value for key, value in values.items() if key not in _OWN_KEYS}

    def changed(where: str, changes: Mapping[str, Any]) -> RecallTask:
        fixed = [key for key in changes if key in kind_class.FIXED and changes[key] != getattr(task, key)]
        if fixed:
            raise ValueError(f"{where}.{fixed[0]} gives tokens their meaning, so it is the same in the whole task")
        try:
            return read_section(kind_class, where, {**options, **changes})
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(section) else f"{where}: {error}") from error

    task = changed(section, {})
    stages, evaluations = [], []
    given = read_value(f"{section}.stages", values.get("stages", ()), tuple[dict[str, Any], ...])
    for number, stage in enumerate(given):
        where = f"{section}.stages[{number}]"
        _check_keys(where, stage)
        sizes = {}
        for key in ("batch_size", "steps"):
            sizes[key] = read_value(f"{where}.{key}", stage.pop(key, None), int)
            if sizes[key] < 1:
                raise ValueError(f"{where}.{key} must be at least 1, got {sizes[key]}")
        stages.append(SyntheticStage(changed(where, stage), **sizes))
    if not stages:
        raise ValueError(f"{section}.stages is empty; give at least one {{batch_size: ..., steps: ...}}")
    asked = read_value(f"{section}.evaluate", values.get("evaluate", ({},)), tuple[dict[str, Any], ...])
    for number, changes in enumerate(asked):
        _check_keys(f"{section}.evaluate[{number}]", changes)
        label = ", ".join(f"{key.replace('_', ' ')} {_words(value)}" for key, value in changes.items())
        evaluations.append(EvaluationSetting(label or "as trained", changed(f"{section}.evaluate[{number}]", changes)))
    labels = [each.name for each in evaluations]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"{section}.evaluate must hold different settings, at least one; got {', '.join(labels)}")
    prompts = read_value(f"{section}.prompts", values.get("prompts", 200), int)
    if prompts < 2:
        raise ValueError(f"{section}.prompts must be at least 2, got {prompts}")
    plain = {
        "kind": kind,
        **_plain(task),
        "prompts": prompts,
        "stages": [{**_plain(each.task), "batch_size": each.batch_size, "steps": each.steps} for each in stages],
        "evaluate": [dict(changes) for changes in asked],
    }
    return SyntheticTask(name, kind, task, tuple(stages), tuple(evaluations), prompts, plain)


def _plain(task: RecallTask) -> dict[str, Any]:
    values = dataclasses.asdict(task)  # type: ignore[call-overload]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _words(value: Any) -> str:
    return " to ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
