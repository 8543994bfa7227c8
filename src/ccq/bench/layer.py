"""`ccq bench layer`: a mixer with and without the read step, and flash-linear-attention's layer, on a GPU.

The measurement of the paper's table 5: forward at T and 2 T tokens, forward + backward at T, for both backbones. All
layers of a backbone have the same weights and are measured in one process and in turn, round by round. Device time is
that of CUDA graph replays between two events; eager wall time is that of one call from an idle card until it is idle
again, and holds what the processor needs to launch. "forward" runs without autograd; "forward_backward" gives the
gradients of the input and of every weight.

flash-linear-attention's layers run the kernels of the write rules in the configurations that this library uses, so
that both have them at their best and nothing tunes for minutes; its other kernels tune before they are measured.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ccq.bench.gpu import DTYPES, PASSES
from ccq.bench.machine import environment, gpu_environment
from ccq.bench.measure import (
    WARMUP,
    Card,
    Measurement,
    brief,
    device_timer,
    mebibytes,
    milliseconds,
    rounds,
    wall_timer,
    wrapped,
)
from ccq.nn import CurvatureConditionedQuery
from ccq.nn.mixers import GatedDeltaNet, GatedLinearAttention
from ccq.ops import flash_linear_attention

SCHEMA = "ccq-bench-layer/1"
BACKBONES = ("gla", "gated-deltanet")
RULES = {"gla": "gla", "gated-deltanet": "gated_delta_rule"}
PACKAGE = "flash-linear-attention"
PROFILE_ROWS = 25


class Sizes(NamedTuple):
    """Of a layer."""

    hidden: int
    heads: int
    size: int
    """D"""
    value_size: int
    """V"""


class Case(NamedTuple):
    """What one layer is called with."""

    x: Tensor
    gradient: Tensor
    """Of the output."""

    @classmethod
    def draw(cls, rows: int, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Case:
        random = torch.Generator(device).manual_seed(0)
        x, gradient = (
            torch.randn(rows, tokens, hidden, generator=random, dtype=dtype, device=device) for _ in range(2)
        )
        return cls(x.requires_grad_(), gradient)


class Subject(NamedTuple):
    """One layer."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]

    def run(self, name: str, case: Case) -> Any:
        """One pass, by its name."""
        if name == "forward":
            with torch.no_grad():
                return self.call(case.x)
        return torch.autograd.grad(self.call(case.x), (case.x, *self.module.parameters()), case.gradient)


def _layer(backbone: str, sizes: Sizes, *, read: bool) -> GatedLinearAttention | GatedDeltaNet:
    step = CurvatureConditionedQuery(sizes.heads, sizes.size) if read else None
    made: type[GatedLinearAttention] | type[GatedDeltaNet] = (
        GatedLinearAttention if backbone == "gla" else GatedDeltaNet
    )
    return made(sizes.hidden, sizes.heads, sizes.size, sizes.value_size, read=step)


def _layer_of_the_package(backbone: str, sizes: Sizes) -> nn.Module:
    layers = importlib.import_module("fla.layers")
    if backbone == "gla":
        made = layers.GatedLinearAttention(
            mode="chunk",
            hidden_size=sizes.hidden,
            num_heads=sizes.heads,
            expand_k=sizes.heads * sizes.size / sizes.hidden,
            expand_v=sizes.heads * sizes.value_size / sizes.hidden,
        )
    else:
        made = layers.GatedDeltaNet(
            mode="chunk",
            hidden_size=sizes.hidden,
            num_heads=sizes.heads,
            head_dim=sizes.size,
            expand_v=sizes.value_size / sizes.size,
        )
    layer: nn.Module = made
    return layer


def subjects(
    backbone: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, *, compiled: bool, notes: list[str]
) -> dict[str, Subject]:
    """The layers of one backbone, all of the same weights; `notes` receives why one cannot be made here."""
    torch.manual_seed(0)
    plain = _layer(backbone, sizes, read=False)
    made: dict[str, nn.Module] = {backbone: plain, f"{backbone}+ccq": _layer(backbone, sizes, read=True)}
    try:
        made[PACKAGE] = _layer_of_the_package(backbone, sizes)
    except Exception as error:  # without Triton, transformers or a GPU the package is there, but not this class
        notes.append(f"{PACKAGE}, {backbone}: left out ({brief(error)})")
    found = {}
    for name, module in made.items():
        # The read step's own parameters start at constants; all others have the same names everywhere.
        missing, unexpected = module.load_state_dict(plain.state_dict(), strict=False)
        if unexpected or any(not key.startswith("read.") for key in missing):
            raise RuntimeError(f"{name} has other weights than {backbone}: {missing}, {unexpected}")
        module.to(device, dtype)
        if name == PACKAGE:
            found[name] = Subject(module, lambda x, module=module: module(x)[0])  # type: ignore[misc]
        else:
            found[name] = Subject(module, lambda x, module=module: module(x).output)  # type: ignore[misc]
            if compiled:
                fast = torch.compile(module, fullgraph=True)
                found[f"{name}, compiled"] = Subject(module, lambda x, fast=fast: fast(x).output)  # type: ignore[misc]
    return found


def projection_flops(backbone: str, sizes: Sizes, rows: int, tokens: int) -> int:
    """Floating-point operations of the matrix products with weights in one forward pass: 2 for every weight and token.

    Weights: q, k [hidden, H D], v, output gate and output [hidden, H V]; GLA's decay [hidden, 16] and [16, H D], the
    two gates of Gated DeltaNet [hidden, H]. Backward takes twice as many.
    """
    keys, values = sizes.heads * sizes.size, sizes.heads * sizes.value_size
    weights = sizes.hidden * (2 * keys + 3 * values)
    weights += 16 * (sizes.hidden + keys) if backbone == "gla" else 2 * sizes.hidden * sizes.heads
    return 2 * rows * tokens * weights


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every backbone, batch size, length and pass: the layer with the read step over the one without it, and the
    one without it over flash-linear-attention's, each by device and by wall time, from medians. None where one is
    missing.
    """
    found = []
    times = {
        (row["backbone"], row["rows"], row["tokens"], row["pass"], row["layer"], clock): row[clock]["median_ms"]
        for row in rows
        for clock in ("device", "wall")
        if row.get(clock) is not None
    }
    for key in dict.fromkeys((row["backbone"], row["rows"], row["tokens"], row["pass"]) for row in rows):
        backbone, count, tokens, one = key
        line: dict[str, Any] = {"backbone": backbone, "rows": count, "tokens": tokens, "pass": one}
        for clock in ("device", "wall"):
            pairs = {
                f"ccq_over_backbone_{clock}": (f"{backbone}+ccq", backbone),
                f"ccq_over_backbone_compiled_{clock}": (f"{backbone}+ccq, compiled", f"{backbone}, compiled"),
                f"backbone_over_package_{clock}": (backbone, PACKAGE),
            }
            for name, (above, below) in pairs.items():
                top, bottom = times.get((*key, above, clock)), times.get((*key, below, clock))
                line[name] = None if top is None or bottom is None else top / bottom
        found.append(line)
    return found


def profile(subject: Subject, case: Case, one: str, device: torch.device) -> list[dict[str, Any]]:
    """Where the time of one pass goes: kernels by name with their count and microseconds, the longest first."""
    from torch.profiler import ProfilerActivity

    activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU}
    for _ in range(WARMUP):
        subject.run(one, case)
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        subject.run(one, case)
        if device.type == "cuda":
            torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu == (device.type == "cuda"):
            microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            found.setdefault(event.name, []).append(float(microseconds))
    rows: list[dict[str, Any]] = [
        {"kernel": name, "count": len(times), "microseconds": sum(times)} for name, times in found.items() if sum(times)
    ]
    return sorted(rows, key=lambda row: -row["microseconds"])


class LayerMeasurement(Measurement):
    """One run of the benchmark."""

    def __init__(self, figures: dict[str, Any], *, sizes: Sizes, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(figures, **settings)
        self.sizes = sizes
        self.dtype = dtype

    def save_with_ratios(self) -> None:
        self.figures["ratios"] = ratios(self.figures["layers"])
        self.save(self.figures)

    def part(self, backbone: str, layers: Mapping[str, Subject], rows: int, tokens: int, one: str) -> None:
        """Memory, device time and wall time of every layer for one pass at one shape."""
        case = Case.draw(rows, tokens, self.sizes.hidden, self.dtype, self.card.device)
        self.say(f"{backbone}, B {rows}, T {tokens}, {one.replace('_', ' + ')}")
        known: dict[str, dict[str, Any]] = {}
        for name, subject in layers.items():
            try:
                for _ in range(2):  # compiles, tunes, and allocates what libraries keep
                    subject.run(one, case)
                known[name] = {
                    "backbone": backbone,
                    "layer": name,
                    "rows": rows,
                    "tokens": tokens,
                    "pass": one,
                    "peak_bytes": self._peak(subject, one, case),
                    "projection_flops": projection_flops(backbone, self.sizes, rows, tokens)
                    * (1 if one == "forward" else 3),
                }
            except Exception as failure:  # whatever one layer raises must not cost the rows of the others
                self.note(f"{name}, {backbone}, {one}, B {rows}, T {tokens}: left out ({brief(failure)})")
        wall = {name: wall_timer(self.card, self._step(layers[name], one, case)) for name in known}
        for name, found in rounds(wall, self.repeats, self.limit).items():
            known[name]["wall"] = found
        device = {}
        for name in known:
            try:
                device[name] = device_timer(self.card, self._step(layers[name], one, case))
            except Exception as failure:  # as above
                known[name]["device"] = None
                self.note(f"{name}, {backbone}, {one}, B {rows}, T {tokens}: no device time ({brief(failure)})")
        for name, found in rounds(device, self.repeats, self.limit).items():
            known[name]["device"] = found
        for name, row in known.items():
            self.figures["layers"].append(row)
            times = [
                "-" if row[clock] is None else milliseconds(row[clock]["median_ms"]) for clock in ("device", "wall")
            ]
            self.say(
                f"  {name:<26}{times[0]:>9} ms device{times[1]:>9} ms eager{mebibytes(row['peak_bytes']):>10} MiB peak"
            )
        del device, wall
        self.card.release()
        self.save_with_ratios()

    def _step(self, subject: Subject, one: str, case: Case) -> Callable[[], Any]:
        return lambda: subject.run(one, case)

    def _peak(self, subject: Subject, one: str, case: Case) -> int:
        """Bytes above weights and input."""
        self.card.synchronize()
        self.card.reset_peak()
        before = self.card.allocated()
        subject.run(one, case)
        self.card.synchronize()
        return self.card.peak() - before

    def profiles(self, backbone: str, layers: Mapping[str, Subject], rows: int, tokens: int) -> None:
        """The kernels of forward + backward of every layer."""
        case = Case.draw(rows, tokens, self.sizes.hidden, self.dtype, self.card.device)
        for name, subject in layers.items():
            try:
                found = profile(subject, case, "forward_backward", self.card.device)
            except Exception as failure:  # as above
                self.note(f"{name}, {backbone}, B {rows}, T {tokens}: no profile ({brief(failure)})")
                continue
            total = sum(row["microseconds"] for row in found)
            self.figures["profiles"].append(
                {"backbone": backbone, "layer": name, "rows": rows, "tokens": tokens, "kernels": found}
            )
            self.say(f"{name}, {backbone}, B {rows}, T {tokens}, forward + backward: {total / 1000:.3f} ms in kernels")
            for row in found[:PROFILE_ROWS]:
                share = row["microseconds"] / total
                self.say(
                    f"  {row['microseconds'] / 1000:>8.3f} ms{share:>6.1%}{row['count']:>5} x {row['kernel'][:90]}"
                )
        self.card.release()
        self.save(self.figures)


def bench_layer(
    *,
    backbones: Sequence[str],
    rows: Sequence[int],
    tokens: int,
    sizes: Sizes,
    dtype: str,
    repeats: int,
    limit: float,
    compiled: bool,
    with_profile: bool,
    say: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
    card: Card | None = None,
) -> dict[str, Any]:
    """Measure everything, part by part, with what is needed to measure it again, for benchmarks/results.

    Args:
        backbones: of `BACKBONES`.
        rows: batch sizes B.
        tokens: T; forward is also measured at 2 T.
        sizes: of the layers.
        dtype: a name of DTYPES, for weights and input.
        repeats: rounds of every timing; `limit` seconds end a timing early (after at least three rounds).
        compiled: also measure this library's layers behind torch.compile.
        with_profile: also list the kernels of forward + backward at T.
        say, save: called with each line for the reader, and with the figures after every part.
        card: the GPU; None takes the current one.

    Raises:
        ValueError: for an unknown backbone or dtype, or without a GPU.
    """
    for backbone in backbones:
        if backbone not in BACKBONES:
            raise ValueError(f"unknown backbone {backbone!r}; accepted: {', '.join(BACKBONES)}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; accepted: {', '.join(DTYPES)}")
    if card is None:
        if not torch.cuda.is_available():
            raise ValueError("`ccq bench layer` measures on a GPU, and torch finds none")
        card = Card()
    figures: dict[str, Any] = {
        "schema": SCHEMA,
        "settings": {
            "backbones": list(backbones),
            "rows": list(rows),
            "tokens": tokens,
            **sizes._asdict(),
            "dtype": dtype,
            "repeats": repeats,
            "warmup": WARMUP,
            "limit_seconds": limit,
            "compiled": compiled,
            "configurations": _table(card.device),
        },
        "environment": environment(threads=torch.get_num_threads(), device=card.device.type),
        "gpu": gpu_environment(),
        "layers": [],
        "ratios": [],
        "profiles": [],
        "notes": [],
    }
    run = LayerMeasurement(
        figures, sizes=sizes, card=card, dtype=DTYPES[dtype], repeats=repeats, limit=limit, say=say, save=save
    )
    say(f"{figures['gpu']['card']}, torch {figures['environment']['torch']}, {dtype}")
    save(figures)  # a place that cannot be written is known before minutes are spent
    for backbone in backbones:
        known = len(figures["notes"])
        with _shared(backbone, card.device, sizes, figures["notes"]):
            layers = subjects(backbone, sizes, DTYPES[dtype], card.device, compiled=compiled, notes=figures["notes"])
            for text in figures["notes"][known:]:
                say(wrapped(f"note: {text}"))
            for count in rows:
                for length, one in ((tokens, PASSES[0]), (tokens, PASSES[1]), (2 * tokens, PASSES[0])):
                    run.part(backbone, layers, count, length, one)
                if with_profile:
                    run.profiles(backbone, layers, count, tokens)
    for line in figures["ratios"]:
        say(_ratio_line(line))
    return figures


def _shared(
    backbone: str, device: torch.device, sizes: Sizes, notes: list[str]
) -> contextlib.AbstractContextManager[None]:
    """flash-linear-attention's layers in the configurations of this library's write rules, where it can be used."""
    rule = RULES[backbone]
    index = torch.cuda.current_device() if device.type == "cuda" else None
    if reason := flash_linear_attention.reason_against(rule, index):
        notes.append(f"{backbone}: the write rule runs in PyTorch ({reason})")
        return contextlib.nullcontext()
    return flash_linear_attention.sharing(rule, device, sizes.size, sizes.value_size)


def _table(device: torch.device) -> dict[str, Any]:
    """Whose configurations the write rules' kernels run in, and what they were measured with."""
    if device.type != "cuda":
        return {"card": None, "measured": None}
    table = flash_linear_attention.table_of_device(torch.cuda.current_device())
    return {"card": table.card, "measured": table.measured}


def _ratio_line(line: Mapping[str, Any]) -> str:
    def shown(name: str) -> str:
        return "-" if line[name] is None else f"{line[name]:.3f}"

    return (
        f"{line['backbone']}, B {line['rows']}, T {line['tokens']}, {line['pass'].replace('_', ' + ')}: "
        f"+ccq over backbone {shown('ccq_over_backbone_device')} device, {shown('ccq_over_backbone_wall')} eager; "
        f"backbone over {PACKAGE} {shown('backbone_over_package_device')} device, "
        f"{shown('backbone_over_package_wall')} eager"
    )
