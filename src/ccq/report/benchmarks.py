"""What the report takes from results of `ccq bench layer`, `ccq bench model` and `ccq bench decode`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ccq.models.counts import state_bytes
from ccq.models.presets import PRESETS, preset

_SCALES = {"500m": "500M", "1.3b": "1.3B"}


class Times(NamedTuple):
    """Milliseconds: the median and the quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class LayerBenchmark:
    """Times of one row of tokens, by arm, pass, tokens and clock: "wall", from an idle card until it is idle again, or
    "device".
    """

    path: Path
    scale: str
    machine: str
    notes: tuple[str, ...]
    times: Mapping[tuple[str, str, int, str], Times]


@dataclass(frozen=True)
class ModelSpeed:
    """One arm; None where it was not measured. `state_bytes` is of one sequence."""

    arm: str
    state_bytes: int
    peak_bytes: int | None
    step: Times | None
    prefill: Times | None


@dataclass(frozen=True)
class ModelBenchmark:
    """`rows` of `tokens` in a training step and in prefill. `sweep` has tokens a second in training by arm and length,
    `sweep_tokens` a step.
    """

    path: Path
    scale: str
    machine: str
    notes: tuple[str, ...]
    rows: int
    tokens: int
    models: tuple[ModelSpeed, ...]
    sweep_tokens: int | None
    sweep: Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class DecodeSpeed:
    """Milliseconds in which an arm decodes one token of every row: one step after the other, and replayed as a CUDA
    graph; None where it was not measured. `state_bytes` is of one sequence.
    """

    arm: str
    state_bytes: int
    eager: Times | None
    graph: Times | None


@dataclass(frozen=True)
class DecodeBenchmark:
    """`rows` that are decoded at a time, after `context` tokens."""

    path: Path
    scale: str
    machine: str
    notes: tuple[str, ...]
    rows: int
    context: int
    models: tuple[DecodeSpeed, ...]

    def tokens_per_second(self, arm: str) -> float | None:
        """Of one arm, None where it is not there: replayed where all arms were, so that arms are measured alike."""
        replayed = all(model.graph is not None for model in self.models)
        for model in self.models:
            times = model.graph if replayed else model.eager
            if model.arm == arm and times is not None:
                return 1000 * self.rows / times.median
        return None


def scale_name(scale: str) -> str:
    """A scale of the presets, the paper's as the paper writes them."""
    return _SCALES.get(scale, scale)


def preset_scales() -> list[str]:
    """The scales of the presets, as presets are named."""
    return list(dict.fromkeys(name.rpartition("-")[2] for name in PRESETS))


def read_layer_benchmark(path: Path, figures: Mapping[str, Any]) -> LayerBenchmark:
    """KeyError, TypeError or AttributeError where something is not as `ccq bench layer` writes it."""
    times = {
        (str(row["layer"]), str(row["pass"]), int(row["tokens"]), clock): _times(row[clock])
        for row in figures["layers"]
        if row["rows"] == 1 and _is_ours(row["layer"], row["backbone"])
        for clock in ("wall", "device")
        if row[clock] is not None
    }
    settings = figures["settings"]
    sizes = (settings["hidden"], settings["heads"], settings["size"], settings["value_size"])
    machine = f"{_machine(figures)}, {settings['dtype']}"
    return LayerBenchmark(path, _layer_scale(sizes), machine, _notes(figures), times)


def read_model_benchmark(path: Path, figures: Mapping[str, Any]) -> ModelBenchmark:
    """KeyError, TypeError or AttributeError where something is not as `ccq bench model` writes it."""
    settings = figures["settings"]
    models = tuple(
        ModelSpeed(
            arm=row["model"],
            state_bytes=state_bytes(preset(f"{row['model']}-{settings['scale']}")),
            peak_bytes=row["peak_bytes"],
            step=None if row["step"] is None else _times(row["step"]),
            prefill=None if row["prefill"] is None else _times(row["prefill"]),
        )
        for row in figures["models"]
        if _is_ours(row["model"], row["backbone"])
    )
    return ModelBenchmark(
        path=path,
        scale=scale_name(settings["scale"]),
        machine=_machine(figures),
        notes=_notes(figures),
        rows=int(settings["rows"]),
        tokens=int(settings["tokens"]),
        models=models,
        sweep_tokens=settings["sweep_tokens"],
        sweep={(str(row["arm"]), int(row["tokens"])): float(row["tokens_per_second"]) for row in figures["sweep"]},
    )


def read_decode_benchmark(path: Path, figures: Mapping[str, Any]) -> DecodeBenchmark:
    """KeyError, TypeError or AttributeError where something is not as `ccq bench decode` writes it."""
    settings = figures["settings"]
    models = tuple(
        DecodeSpeed(
            arm=row["model"],
            state_bytes=int(row["state_bytes"]),
            eager=None if row["eager"] is None else _times(row["eager"]),
            graph=None if row["graph"] is None else _times(row["graph"]),
        )
        for row in figures["models"]
        if _is_ours(row["model"], row["backbone"])
    )
    return DecodeBenchmark(
        path=path,
        scale=scale_name(settings["scale"]),
        machine=f"{_machine(figures)}, {settings['dtype']}",
        notes=_notes(figures),
        rows=int(settings["rows"]),
        context=int(settings["context"]),
        models=models,
    )


def _times(found: Mapping[str, float]) -> Times:
    return Times(found["median_ms"], found["lower_quartile_ms"], found["upper_quartile_ms"])


def _is_ours(name: str, backbone: str) -> bool:
    """A backbone or an arm of it, not behind torch.compile; the same files have another library's models."""
    return "," not in name and (name == backbone or name.startswith(f"{backbone}+"))


def _machine(figures: Mapping[str, Any]) -> str:
    made = figures["environment"]
    place = made["processor"] if made.get("device") == "cpu" else figures["gpu"]["card"]
    return f"{place}, torch {made['torch']}"


def _notes(figures: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(" ".join(note.split()) for note in figures["notes"])


def _layer_scale(sizes: tuple[int, int, int, int]) -> str:
    """The scale of which this is a layer: hidden size, heads, key and value size."""
    for scale in preset_scales():
        config = preset(f"gla-{scale}")
        if sizes == (config.hidden_size, config.num_heads, config.head_dim, config.value_head_dim):
            return scale_name(scale)
    return f"hidden {sizes[0]}, {sizes[1]} heads of {sizes[2]}/{sizes[3]}"
