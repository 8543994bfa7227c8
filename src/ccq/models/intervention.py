"""Interventions: what can be done to the read steps of a trained model, and the gate's values that some of it needs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import safetensors.torch
import torch
from torch import Tensor, nn

from ccq.files import write_bytes_atomically
from ccq.models.cache import fingerprint, read_safetensors
from ccq.models.configuration import CCQConfig, nearest
from ccq.nn.read import GatedReadStep, ReadStep
from ccq.ops.checks import accumulation_dtype

GATE_VALUES_FORMAT = "ccq-gate-values/1"
GATE_VALUES_FILE = "gate_values.safetensors"
"""Where the commands look for them: in a model's folder."""
ACCEPTED = (
    "on, off, or some of scale=X, layers=0,3-5, heads=0,2, gate=mean, gate=shuffled and seed=N (of the latter), joined "
    "by commas"
)
_LARGEST_NUMBER = 9999
_KEYS = ("scale", "layers", "heads", "gate", "seed", "values")
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
# Where a read step keeps the intervention that was done to its model.
_DONE = "_intervention"


@dataclass(frozen=True)
class ReadIntervention:
    """What is done to the correction of a trained model; nothing by default. `parse` reads it from a text and `str`
    gives that text back, so that one string stands for it in commands and results.

    Attributes:
        enabled: False switches the correction off everywhere, and no statistics are kept.
        scale: the correction is multiplied by it.
        layers: the correction is on in these layers alone and off in the others; None for all. Their numbers are
            those of `read_layers`.
        heads: the correction is on in these heads of every layer alone, and zero in the others; None for all. Mamba2's
            are the groups of heads that share keys.
        gate: "own", or in its place "mean", the mean of lambda of each layer and head over the tokens of a text, or
            "shuffled", the values that it had there in an order that has nothing to do with the tokens.
        seed: of that order.
        values: the digest of the `GateValues` they are from; None for whatever is given.
    """

    enabled: bool = True
    scale: float = 1.0
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    gate: Literal["own", "mean", "shuffled"] = "own"
    seed: int = 0
    values: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be a finite number, got {self.scale}")
        if self.gate not in ("own", "mean", "shuffled"):
            raise ValueError(f"gate must be mean or shuffled, got {self.gate!r}")
        if self.seed and self.gate != "shuffled":
            raise ValueError("seed is that of gate=shuffled; leave it out, or add that")
        if self.values is not None and self.gate == "own":
            raise ValueError("values are those of gate=mean and gate=shuffled; leave them out, or add one of these")
        for name in ("layers", "heads"):
            numbers = getattr(self, name)
            if numbers is not None and (not numbers or numbers[0] < 0 or list(numbers) != sorted(set(numbers))):
                raise ValueError(f"{name} must be numbers from 0 on, in ascending order, got {numbers}")
        if not self.enabled and (self.scale, self.layers, self.heads, self.gate) != (1.0, None, None, "own"):
            raise ValueError("a correction that is off cannot be changed besides")

    @classmethod
    def parse(cls, text: str) -> ReadIntervention:
        """Such as "off", "scale=-1", "layers=0,3-5", "scale=0.5,heads=0", "gate=shuffled,seed=1".

        Raises:
            ValueError: it is none, with what is accepted.
        """
        if text in ("on", "off"):
            return cls(enabled=text == "on")
        try:
            fields: dict[str, Any] = {key: _VALUES[key](key, value) for key, value in _pairs(text).items()}
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{text!r} is no read intervention: {error}. Accepted: {ACCEPTED}") from error

    def __str__(self) -> str:
        if not self.enabled:
            return "off"
        parts = []
        if self.scale != 1:
            short = f"{self.scale:g}"
            parts.append(f"scale={short if float(short) == self.scale else repr(self.scale)}")
        for name, numbers in (("layers", self.layers), ("heads", self.heads)):
            if numbers is not None:
                parts.append(f"{name}={_ranges(numbers)}")
        if self.gate != "own":
            parts.append(f"gate={self.gate}")
        if self.gate == "shuffled":
            parts.append(f"seed={self.seed}")
        if self.values is not None:
            parts.append(f"values={self.values}")
        return ",".join(parts) or "on"


def _pairs(text: str) -> dict[str, str]:
    """KEY=VALUE,KEY=VALUE; a part without "=" goes on with the list before it."""
    pairs: dict[str, str] = {}
    last = None
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals and last in ("layers", "heads"):
            pairs[last] += f",{key}"
            continue
        if not equals:
            what = "stands alone" if key in ("on", "off") else "is not KEY=VALUE"
            raise ValueError(f"{key!r} {what}")
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}{nearest(key, _KEYS)}")
        if key in pairs:
            raise ValueError(f"{key} is there twice")
        pairs[key] = value
        last = key
    return pairs


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{key} must be a number, got {value!r}") from None


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{key} must be a whole number of at least 0, got {value!r}")
    return int(value)


def _numbers(key: str, value: str) -> tuple[int, ...]:
    """ "0,3-5" -> (0, 3, 4, 5)"""
    found: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        low = _whole(key, first)
        high = _whole(key, last) if dash else low
        if high < low:
            raise ValueError(f"{key} has the range {part}, which ends before it starts")
        if high > _LARGEST_NUMBER:
            raise ValueError(f"{key} goes up to {high}, which no model has")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def _text(key: str, value: str) -> str:
    return value


_VALUES = {"scale": _number, "layers": _numbers, "heads": _numbers, "gate": _text, "seed": _whole, "values": _text}


def _ranges(numbers: tuple[int, ...]) -> str:
    """(0, 3, 4, 5) -> "0,3-5" """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@dataclass(frozen=True, eq=False)
class GateValues:
    """lambda of a model at every token of a text: what gate=mean and gate=shuffled put in the place of the gate.

    Attributes:
        layers: [S, H] float32 for each layer with a read step, from the first to the last: S tokens, H heads.
        model: `ccq.models.cache.fingerprint` of the model they are of.
        text: what the tokens were, for whoever reads the file; JSON values.
    """

    layers: tuple[Tensor, ...]
    model: str
    text: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """12 hexadecimal digits that tell these numbers from others."""
        hashed = hashlib.sha256()
        for layer in self.layers:
            hashed.update(repr(tuple(layer.shape)).encode() + layer.numpy().tobytes())
        return hashed.hexdigest()[:12]

    def means(self) -> list[list[float]]:
        """The mean over the tokens, of each layer and head, of lambda as an observer sees it."""
        return [layer.double().mean(0).tolist() for layer in self.layers]

    def mean_gate(self, model: nn.Module) -> list[list[float]]:
        """The `gate` of a configuration that fixes lambda of each layer and head of `model`, whose values these are, at
        its mean.
        """
        reads = cast("list[GatedReadStep]", read_steps(model))
        return [[read.configured_gate(mean) for mean in means] for read, means in zip(reads, self.means(), strict=True)]

    def shuffled(self, seed: int) -> list[Tensor]:
        """[S, H] for each layer: the values of each head in a random order of its own, which `seed` alone decides."""
        random = torch.Generator("cpu").manual_seed(seed)
        return [
            torch.stack([head[torch.randperm(len(head), generator=random)] for head in layer.unbind(1)], 1)
            for layer in self.layers
        ]

    def tables(self, intervention: ReadIntervention) -> list[Tensor | None]:
        """What stands in the place of each layer's gate, see `ccq.nn.read.GatedReadStep.intervene`."""
        if intervention.gate == "mean":
            return [torch.tensor([mean], dtype=torch.float64) for mean in self.means()]
        return [*self.shuffled(intervention.seed)]


def gate_values_file(name: str, given: str | os.PathLike[str] | None = None) -> Path:
    """The file of the values of a model's gate: `given`, or else the one in its folder."""
    return Path(name, GATE_VALUES_FILE) if given is None else Path(given)


def save_gate_values(values: GateValues, path: str | os.PathLike[str]) -> None:
    """Write them to one safetensors file, whole or not at all."""
    tensors = {f"layers.{i}": layer.contiguous() for i, layer in enumerate(values.layers)}
    metadata = {"format": GATE_VALUES_FORMAT, "model": values.model, "text": json.dumps(values.text)}
    write_bytes_atomically(path, safetensors.torch.save(tensors, metadata))


def load_gate_values(path: str | os.PathLike[str]) -> GateValues:
    """What `save_gate_values` wrote, bit for bit.

    Raises:
        FileNotFoundError, ValueError: it is not there, or is something else.
    """
    tensors, metadata = read_safetensors(path, GATE_VALUES_FORMAT, "the values of a gate, written by `ccq gates`")
    layers = [tensors.get(f"layers.{i}") for i in range(len(tensors))]
    if not layers or any(layer is None or layer.ndim != 2 or not len(layer) for layer in layers):
        raise ValueError(
            f"{path} does not hold a table [tokens, heads] for each layer; write it again with `ccq gates`"
        )
    return GateValues(tuple(layers), metadata.get("model", ""), json.loads(metadata.get("text", "{}")))  # type: ignore[arg-type]


def read_steps(model: nn.Module) -> list[ReadStep]:
    """The read steps of any model, from the first layer to the last; empty where it has none."""
    return [module for module in model.modules() if isinstance(module, ReadStep)]


def read_layers(model: nn.Module) -> list[int]:
    """The number of the layer that each of its read steps is in, as the model counts them: in the name of the module
    the number behind "layers", or else the first by which the read steps differ. Layers of softmax attention among the
    others count too. Where names have no such number, the read steps are counted.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, ReadStep)]
    behind = [[int(number) for number in _LAYER_NUMBER.findall(name)] for name in names]
    every = [[int(part) for part in name.split(".") if part.isdecimal()] for name in names]
    for numbers in (behind, every):
        for column in zip(*numbers, strict=False):
            if len(set(column)) == len(names):
                return list(column)
    return [*range(len(names))]


def set_read(
    model: nn.Module, intervention: str | ReadIntervention, *, gate_values: GateValues | None = None
) -> ReadIntervention:
    """Change what the read steps of a model do, until the next call of this; "on" is what was trained, bit for bit.
    Weights and saved files stay as they are.

    "off" keeps the query normalisation the model was trained with, and keeps no statistics. With `layers` so do the
    layers that are not named.

    Args:
        model: any with read steps: of this library, where `model.set_read` is the same, or another that `attach` has
            put them into.
        intervention: see `ReadIntervention.parse`: "on", "off", "scale=2", "layers=0,3-5", "heads=1", "gate=mean",
            "gate=shuffled,seed=1", or several as "scale=0.5,layers=3-5".
        gate_values: of this model, for gate=mean and gate=shuffled; `ccq.analysis.gate.collect_gate_values` makes them.

    Returns:
        The intervention, with the digest of the values it uses.

    Raises:
        ValueError: there is no read step, or none that this can be done to; a layer or head does not exist; the values
            are missing or those of another model. Nothing is changed then.
    """
    if isinstance(intervention, str):
        intervention = ReadIntervention.parse(intervention)
    check_intervention(model, intervention)
    reads, layers = read_steps(model), read_layers(model)
    tables: list[Tensor | None] = [None] * len(reads)
    if intervention.gate != "own":
        values = _check_gate_values(model, intervention, gate_values)
        tables, intervention = values.tables(intervention), replace(intervention, values=values.digest)
    mixers = {id(child): module for module in model.modules() for child in module.children()}
    for read, layer, table in zip(reads, layers, tables, strict=True):
        near = chain(mixers.get(id(read), read).parameters(), model.parameters())
        like = next((x for x in near if x.is_floating_point()), torch.empty(()))
        kind: dict[str, Any] = {"dtype": accumulation_dtype(like.dtype), "device": like.device}
        factors = None
        if intervention.scale != 1 or intervention.heads is not None:
            factors = torch.full((read.num_heads,), intervention.scale, **kind)
            if intervention.heads is not None:
                off = [head for head in range(read.num_heads) if head not in intervention.heads]
                factors[off] = 0
        enabled = intervention.enabled and (intervention.layers is None or layer in intervention.layers)
        options = {} if table is None else {"table": table.to(**kind)}
        read.intervene(enabled=enabled, factors=factors, **options)
        # With the read steps, so that it goes where they go: into copies, and away when they are detached.
        vars(read)[_DONE] = intervention
    return intervention


def read_intervention(model: nn.Module) -> ReadIntervention | None:
    """What the last `set_read` did to a model; None without a read step."""
    reads = read_steps(model)
    return vars(reads[0]).get(_DONE, ReadIntervention()) if reads else None


def check_intervention(model: nn.Module, intervention: ReadIntervention) -> None:
    """Refuse, with a ValueError, what cannot be done to a model, whatever values its gate has; changes nothing."""
    config, reads = getattr(model, "config", None), read_steps(model)
    if not reads:
        name = f"arm {config.arm!r}" if isinstance(config, CCQConfig) else type(model).__name__
        raise ValueError(
            f"{name} has no read step that {str(intervention)!r} could be done to; accepted: a model of an arm with "
            "one, or a model that ccq.attach has put one into"
        )
    if intervention in (ReadIntervention(), ReadIntervention(enabled=False)):
        return
    _check_numbers(intervention, intervention.layers, read_layers(model), "are in layers")
    _check_numbers(intervention, intervention.heads, range(max(read.num_heads for read in reads)), "have heads")
    for read in reads:
        name = repr(config.read) if isinstance(config, CCQConfig) else type(read).__name__
        _check_step(intervention, read, name)


def _check_step(intervention: ReadIntervention, read: ReadStep, name: str) -> None:
    accepted = ["on", "off"]
    if not read.has_correction:
        raise ValueError(f"{intervention}: read step {name} has no correction; accepted: {', '.join(accepted)}")
    if intervention.gate == "own":
        return
    accepted += ["scale=X", "layers=...", "heads=..."]
    gate = getattr(read, "gate", None)
    if not isinstance(gate, str):
        reason = "has no gate" if gate is None else "has a fixed lambda, the same for every token"
        raise ValueError(f"{intervention}: read step {name} {reason}; accepted: {', '.join(accepted)}")
    if intervention.gate == "shuffled" and not read.counts_tokens:
        accepted.append("gate=mean")
        raise ValueError(
            f"{intervention}: the state of read step {name} does not count its tokens, by whose positions values are "
            f"shuffled; accepted: {', '.join(accepted)}"
        )


def _check_numbers(
    intervention: ReadIntervention, asked: tuple[int, ...] | None, known: Collection[int], what: str
) -> None:
    absent = [number for number in asked or () if number not in known]
    if absent:
        there = _ranges(tuple(sorted(set(known))))
        raise ValueError(f"{intervention}: the read steps {what} {there}, not {_ranges(tuple(absent))}")


def _check_gate_values(model: nn.Module, intervention: ReadIntervention, values: GateValues | None) -> GateValues:
    if values is None:
        raise ValueError(
            f"{intervention} needs gate_values, those of the gate on a text: make them with "
            "ccq.analysis.gate.collect_gate_values, or `ccq gates`"
        )
    if values.model != fingerprint(model):
        raise ValueError(f"{intervention}: gate_values are those of another model; make them of this one")
    if intervention.values not in (None, values.digest):
        raise ValueError(f"{intervention} asks for other gate_values than the given, which are {values.digest}")
    return values


def switch_read(
    model: nn.Module, name: str, read: str | None, gate_values: str | os.PathLike[str] | None = None
) -> str | None:
    """What --read and --gate-values of a command do to a model.

    Args:
        model: any, with or without read steps.
        name: its folder or name, as given.
        read: the intervention; None for none.
        gate_values: file of the values that gate=mean and gate=shuffled need; default: that in the model's folder.

    Returns:
        The intervention as it is carried out, for results; None for a model without a read step.

    Raises:
        ValueError: the model has no read step, or none that this can be done to; the file is missing or of another
            model.
    """
    has_read = bool(read_steps(model))
    intervention = ReadIntervention() if read is None else ReadIntervention.parse(read)
    if read is not None and not has_read:
        raise ValueError(f"model {name!r} has no read step that {read!r} could be done to; leave --read out")
    if intervention.gate == "own":
        if gate_values is not None:
            raise ValueError(
                "--gate-values is for --read gate=mean and gate=shuffled; leave it out, or add one of them"
            )
        values = None
    else:
        path = gate_values_file(name, gate_values)
        if not path.is_file():
            raise ValueError(
                f"gate={intervention.gate} needs the values that the gate has on a text, but {path} does not exist; "
                f"`ccq gates {name}` writes them, or give --gate-values FILE"
            )
        values = load_gate_values(path)
    if read is None:
        return "on" if has_read else None
    return str(set_read(model, intervention, gate_values=values))
