"""Recipes: everything that determines a training run, in one YAML file that is read strictly.

    base: common.yaml          another recipe, beside this one, whose values this one replaces
    model:                     a preset, and any field of its configuration to change
    data:                      where the tokens are, and the windows cut from them
    training:                  how long, in steps of how many tokens
    optimizer:                 AdamW or Muon, and the schedule
    system:                    what may differ from machine to machine without changing what is learned
    evaluation:                how often the loss on held-out text is measured

A key that is not known, a value of the wrong kind and a value that cannot work are errors that name the key.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from ccq.models.configuration import CCQConfig, nearest
from ccq.models.presets import PRESETS, preset

SectionType = TypeVar("SectionType")


@dataclass(frozen=True)
class ModelRecipe:
    preset: str
    """One of `ccq.models.PRESETS`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The other keys of the section: fields of `CCQConfig` that replace those of the preset."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(
                f"model.preset: unknown preset {self.preset!r}{nearest(self.preset, PRESETS)}; `ccq models` lists them"
            )
        try:
            self.config()
        except (TypeError, ValueError) as error:
            raise ValueError(f"model: {error}") from error

    def config(self, **changes: Any) -> CCQConfig:
        """The configuration; `changes` stand behind the recipe's own options."""
        return preset(self.preset, **{**changes, **self.options})


@dataclass(frozen=True)
class DataRecipe:
    length: int
    """Tokens T of a window."""
    folder: str | None = None
    """Made by `ccq data prepare`; relative to the working directory."""
    stdlib_tokenizer: int | None = None
    """Where `folder` does not exist, prepare it from the sources of Python's standard library with a tokenizer of so
    many tokens: a recipe that runs anywhere. It belongs to the folder it was given with: who names another folder, in a
    file or by --set, gives it too or means a folder that exists."""
    synthetic_tokens: int | None = None
    """In place of a folder: so many random tokens, for measuring speed."""
    pack_documents: bool = False
    """Restart states and statistics at each document."""

    def __post_init__(self) -> None:
        _check_at_least("data", self, 1, "length", "stdlib_tokenizer", "synthetic_tokens")
        if (self.folder is None) == (self.synthetic_tokens is None):
            raise ValueError(
                "data: give folder, made by `ccq data prepare`, or synthetic_tokens to measure speed; one of them"
            )
        if self.folder is None and self.stdlib_tokenizer is not None:
            raise ValueError("data.stdlib_tokenizer says how to prepare data.folder; give the folder too")


@dataclass(frozen=True)
class TrainingRecipe:
    tokens_per_step: int
    """Tokens of an optimizer step, over all processes and micro-batches."""
    tokens: int | None = None
    """Tokens of the whole run, rounded to whole steps; or `steps`."""
    steps: int | None = None
    seed: int = 0
    """Of the weights at the start and of the order of the data."""

    def __post_init__(self) -> None:
        _check_at_least("training", self, 1, "tokens_per_step", "tokens", "steps")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"training.seed must be in 0 ... 2**63 - 1, got {self.seed}")
        if (self.tokens is None) == (self.steps is None):
            raise ValueError("training: give tokens or steps, one of them")

    @property
    def total_steps(self) -> int:
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return max(round(self.tokens / self.tokens_per_step), 1)


@dataclass(frozen=True)
class OptimizerRecipe:
    learning_rate: float
    """Peak of the schedule: linear warm-up, then a cosine."""
    warmup_steps: int
    final_learning_rate_share: float = 0.0
    """Where the cosine ends, in peaks."""
    name: Literal["adamw", "muon"] = "adamw"
    """Muon updates the matrices of the blocks; AdamW the rest, at the same learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only; see `ccq.train.optimizer.decays`."""
    decay_gate_bias: bool = False
    """Decay the bias of the gate too. Decay alone moves lambda from 0.01 to nearly 0.5 in a run of the paper's length,
    so this is an experiment."""
    gradient_clip: float = 1.0
    """Largest Euclidean norm of all gradients together."""

    def __post_init__(self) -> None:
        _check_positive("optimizer", self, "learning_rate", "eps", "gradient_clip")
        _check_at_least("optimizer", self, 0, "warmup_steps", "weight_decay")
        if not 0 <= self.final_learning_rate_share <= 1:
            raise ValueError(
                f"optimizer.final_learning_rate_share must be in 0 ... 1, got {self.final_learning_rate_share}"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be in 0 ... 1, 1 left out, got {list(self.betas)}")


@dataclass(frozen=True)
class SystemRecipe:
    rows: int
    """Windows of a micro-batch of one process."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the computation; weights, their gradients over all processes and the optimizer are float32."""
    compile: bool = False
    """torch.compile of every block."""
    activation_checkpointing: bool = False
    """Recompute the blocks in the backward pass: a third more arithmetic for the memory of one block's activations."""
    reshard_after_forward: bool = False
    """Of several processes: gather the weights of a block again for the backward pass instead of keeping them."""
    cuda_graph: bool = False
    """Forward and backward pass as a CUDA graph, the same bit for bit: below some hundred million parameters a GPU
    waits for the processor that launches its kernels. Needs one process, a GPU, and no `data.pack_documents`; off
    because recording takes seconds and the memory of a step stays taken."""
    workers: int = 0
    """Processes that read data ahead, for each training process."""
    checkpoint_every: int | None = 500
    """Steps between checkpoints; what a kill can cost. None writes none, for measuring speed."""
    keep_checkpoints: int = 2
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""
    observe_every: int = 100
    """Steps between measurements of gate and correction, which cost a forward pass of one window."""

    def __post_init__(self) -> None:
        _check_at_least("system", self, 1, "rows", "checkpoint_every", "keep_checkpoints", "log_every", "observe_every")
        _check_at_least("system", self, 0, "workers")


@dataclass(frozen=True)
class EvaluationRecipe:
    every: int | None = None
    """Steps between measurements of the loss on the held-out part of the data; None for none."""
    tokens: int = 2**20
    """Held-out tokens of a measurement, in whole windows: the first ones, the same each time, or all there are."""

    def __post_init__(self) -> None:
        _check_at_least("evaluation", self, 1, "every", "tokens")


@dataclass(frozen=True)
class Recipe:
    """One training run."""

    model: ModelRecipe
    data: DataRecipe
    training: TrainingRecipe
    optimizer: OptimizerRecipe
    system: SystemRecipe
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)

    def __post_init__(self) -> None:
        if self.evaluation.every is not None:
            if self.data.folder is None:
                raise ValueError("evaluation.every needs held-out text, which data.folder has; leave it out here")
            if self.evaluation.tokens < self.data.length:
                raise ValueError(
                    f"evaluation.tokens must be at least data.length, got {self.evaluation.tokens} and "
                    f"{self.data.length}"
                )
        if self.system.cuda_graph and self.data.pack_documents:
            raise ValueError(
                "system.cuda_graph takes windows without packed documents, whose places are read on the processor; "
                "leave it out, or data.pack_documents"
            )
        if self.training.tokens_per_step % self.data.length:
            raise ValueError(
                f"training.tokens_per_step must be a multiple of data.length, got {self.training.tokens_per_step} and "
                f"{self.data.length}"
            )

    @property
    def batch_size(self) -> int:
        """Windows of an optimizer step."""
        return self.training.tokens_per_step // self.data.length

    def to_dict(self) -> dict[str, Any]:
        """Plain values as JSON holds them, in the form of a recipe file."""
        values = dataclasses.asdict(self)
        values["model"] = {"preset": self.model.preset, **self.model.options}
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe that a file's content describes."""
        sections = {section.name: section for section in dataclasses.fields(cls)}
        for name in values:
            if name not in sections:
                raise ValueError(unknown_key(name, sections))
        kinds = typing.get_type_hints(cls)
        made = {}
        for name in sections:
            content = values.get(name, {})
            if not isinstance(content, Mapping):
                raise ValueError(f"{name} must be a section of keys and values, got {content!r}")
            if name == "model":
                content = {
                    "preset": content.get("preset", ""),
                    "options": {key: value for key, value in content.items() if key != "preset"},
                }
            made[name] = read_section(kinds[name], name, content)
        return cls(**made)


def load_recipe(path: Path, changes: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and the ones it is based on.

    Args:
        path: the file.
        changes: texts such as "training.steps=100", which replace single values; the value is YAML.

    Raises:
        ValueError: the file is not YAML, a key is unknown or missing, or a value cannot be used.
        OSError: the file cannot be read.
    """
    values = _read(path, ())
    replaced: dict[str, dict[str, Any]] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise ValueError(f"--set takes SECTION.KEY=VALUE, such as training.steps=100; got {change!r}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {change}: {text!r} is not a value of YAML") from error
        if not isinstance(values.setdefault(section, {}), dict):
            raise ValueError(f"{section} must be a section of keys and values, got {values[section]!r}")
        replaced.setdefault(section, {})[key] = value
    return Recipe.from_dict(_over(values, replaced))


def _read(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """The content of a file over that of its base."""
    path = path.resolve()
    if path in readers:
        raise ValueError(f"{path} is based on itself, through {' and '.join(str(reader) for reader in readers)}")
    values = read_yaml(path, "sections of keys and values: model, data, training, optimizer, system")
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ValueError(f"base must be the name of a file beside the recipe, got {base!r}")
    return _over(_read(path.parent / base, (*readers, path)), values)


def _over(values: dict[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those that were replaced."""
    merged = dict(values)
    for name, content in replaced.items():
        if not (isinstance(content, dict) and isinstance(merged.get(name), dict)):
            merged[name] = content
            continue
        before, merged[name] = merged[name], {**merged[name], **content}
        moved = name == "data" and merged[name].get("folder") != before.get("folder")
        if moved and "stdlib_tokenizer" not in content:
            # It was said of another folder: one whose name is mistyped must not be filled with the standard library.
            merged[name].pop("stdlib_tokenizer", None)
    return merged


def read_yaml(path: Path, wanted: str) -> dict[str, Any]:
    """The keys and values of a YAML file; `wanted` says in the error what it must hold.

    Raises:
        ValueError: the file is not YAML, or holds something else.
        OSError: the file cannot be read.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold {wanted}")
    return values


def read_section(kind: type[SectionType], section: str, values: Mapping[str, Any]) -> SectionType:
    """The dataclass `kind` made from a section of a file; errors name keys as SECTION.KEY."""
    fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    kinds = typing.get_type_hints(kind)
    for name in values:
        if name not in fields:
            raise ValueError(unknown_key(f"{section}.{name}", fields))
    missing = [
        name
        for name, each in fields.items()
        if name not in values and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"the file lacks {', '.join(f'{section}.{name}' for name in missing)}")
    return kind(**{name: read_value(f"{section}.{name}", value, kinds[name]) for name, value in values.items()})


def unknown_key(name: str, accepted: Iterable[str]) -> str:
    """The message for a key SECTION.KEY that is not known, with the nearest one that is."""
    section, dot, key = name.rpartition(".")
    accepted = list(accepted)
    return f"unknown key {section}{dot}{key}{nearest(key, accepted)}; accepted: {', '.join(accepted)}"


def read_value(name: str, value: Any, kind: Any) -> Any:
    """The value as the field wants it, or an error that says what it wants."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (each for each in arguments if each is not types.NoneType)
        return read_value(name, value, kind)
    if origin is Literal:
        if value not in arguments:
            hint = nearest(value, arguments) if isinstance(value, str) else ""
            raise ValueError(f"{name} must be one of {', '.join(arguments)}{hint}, got {value!r}")
        return value
    if origin is tuple:
        if arguments[1:] == (...,):
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{name} must be a list, got {value!r}")
            arguments = (arguments[0],) * len(value)
        if not isinstance(value, (list, tuple)) or len(value) != len(arguments):
            raise ValueError(f"{name} must be a list of {len(arguments)} numbers, got {value!r}")
        return tuple(read_value(name, each, wanted) for each, wanted in zip(value, arguments, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be keys and values, got {value!r}")
        return dict(value)
    if kind is float and isinstance(value, str):
        # YAML 1.1 takes 1e-3, without a point, for a text.
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, got {value!r}") from None
    accepted = {
        bool: ("true or false", isinstance(value, bool)),
        int: ("a whole number", isinstance(value, int) and not isinstance(value, bool)),
        float: ("a number", isinstance(value, (int, float)) and not isinstance(value, bool)),
        str: ("a text", isinstance(value, str)),
    }
    wanted, fits = accepted[kind]
    if not fits:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return kind(value)


def _check_at_least(section: str, values: Any, least: float, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None and not least <= value < math.inf:
            wanted = f"at least {least}" if value < least else f"a finite number of at least {least}"
            raise ValueError(f"{section}.{name} must be {wanted}, got {value}")


def _check_positive(section: str, values: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(values, name) < math.inf:
            raise ValueError(f"{section}.{name} must be a finite number above 0, got {getattr(values, name)}")
