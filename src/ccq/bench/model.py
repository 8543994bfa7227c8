"""`ccq bench model`: training step, prefill and peak memory of whole models, on a GPU.

A backbone, the same with the read step, and flash-linear-attention's model of the same sizes are measured in one
process. A training step is forward, backward, AdamW and clearing the gradients; weights are float32 and the forward
pass runs under autocast to bfloat16. Prefill reads the prompt into a cache and gives the logits of the last token, with
weights in bfloat16. Training steps are measured one model after the other, prefill in turns.

"step" and "prefill" are wall times of one eager call, from an idle card until it is idle again, with everything the
processor does in between. "step_device" is the time of the same training step replayed as a CUDA graph: what the card
needs. Where a step is short, as in small models, the first is mostly that of launching kernels. The graph is recorded
after the eager step is measured and its memory given back, so that it takes the place of the eager step's activations:
recorded at its peak it needs what that needed, and a step that fits eagerly but not so gets a note.

Peak memory of a training step is what the model itself needs: its weights, the moments of AdamW, and the most that is
allocated on top during a step.

The sweep is that of the paper's figure 5: a training step at one number of tokens, cut into rows of different lengths.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ccq.bench.layer import PACKAGE, RULES
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
    run_afresh,
    wall_timer,
    wrapped,
)
from ccq.models import CCQConfig, CCQForCausalLM, parse_arm, preset
from ccq.models.counts import flops_per_token
from ccq.models.utilization import card_peak_flops, model_flops_utilization, training_flops_per_token
from ccq.ops import flash_linear_attention
from ccq.ops.linear_cross_entropy import linear_cross_entropy

SCHEMA = "ccq-bench-model/1"
ARMS = ("gla", "gla+ccq", "gated-deltanet", "gated-deltanet+ccq")
SWEEP_ARMS = (*ARMS, "transformer", "mamba2")
SHORTEST = 1024
"""Tokens of the shortest rows of a sweep."""
LEARNING_RATE = 1e-4
PARTS = ("step", "step_device", "prefill")
"""What is timed of a model."""
MOST_OVER_BACKBONE = 1.1
"""Device time of a training step over the backbone's from which on a read step is named at the end."""


class Subject(NamedTuple):
    """One model."""

    module: Any
    """Takes tokens, labels, use_cache and logits_to_keep as transformers' models do."""
    config: CCQConfig
    optimizer: torch.optim.Optimizer

    def step(self, tokens: Tensor) -> Tensor:
        """One training step; the loss."""
        loss = self.loss(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def loss(self, tokens: Tensor) -> Tensor:
        """Of the next tokens. Neither library holds all logits at a time in training."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            if not isinstance(self.module, CCQForCausalLM):
                loss: Tensor = self.module(tokens, labels=tokens, use_cache=False).loss
                return loss
            hidden = self.module.model(tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        hidden, head = hidden.bfloat16(), self.module.lm_head.weight.bfloat16()
        weights = torch.full(hidden.shape[:1], 1 / max(len(hidden), 1), device=hidden.device)
        return linear_cross_entropy(hidden, head, tokens[:, 1:].flatten(), weights).total

    @contextlib.contextmanager
    def recordable(self) -> Iterator[None]:
        """Inside the block a step may be recorded as a CUDA graph.

        The fused AdamW keeps its count of steps on the card in any case, so that the flag lets torch record it and
        changes nothing else.
        """
        with warnings.catch_warnings():
            # Of steps that run with the flag and without being recorded, such as those before the recording.
            warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
            for group in self.optimizer.param_groups:
                group["capturable"] = True
            try:
                yield
            finally:
                for group in self.optimizer.param_groups:
                    group["capturable"] = False

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.module(tokens, use_cache=True, logits_to_keep=1).logits
        return logits

    def resident_bytes(self) -> int:
        """Weights and moments, as far as they are there."""
        moments = (x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
        return sum(x.nbytes for x in (*self.module.parameters(), *moments))


def _subject(module: nn.Module, config: CCQConfig, device: torch.device) -> Subject:
    module.to(device).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    return Subject(module, config, optimizer)


def model_of_the_package(config: CCQConfig) -> nn.Module:
    """flash-linear-attention's model of the sizes of a backbone."""
    models = importlib.import_module("fla.models")
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.backbone == "gla":
        widths = {
            "expand_k": config.num_heads * config.head_dim / config.hidden_size,
            "expand_v": config.num_heads * config.value_head_dim / config.hidden_size,
            "use_short_conv": config.short_convolution is not None,
        }
        made = models.GLAForCausalLM(models.GLAConfig(**common, **widths))
    else:
        widths = {"head_dim": config.head_dim, "expand_v": config.value_head_dim / config.head_dim}
        made = models.GatedDeltaNetForCausalLM(models.GatedDeltaNetConfig(**common, **widths))
    model: nn.Module = made
    return model


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every backbone: the model with the read step against the one without it, and that against
    flash-linear-attention's, from medians: times as ratios, memory as a difference. None where one is missing.
    """
    found = []
    by_name = {(row["backbone"], row["model"]): row for row in rows}
    for backbone in dict.fromkeys(row["backbone"] for row in rows):
        line: dict[str, Any] = {"backbone": backbone}
        for name, pair in {
            "ccq_over_backbone": (f"{backbone}+ccq", backbone),
            "backbone_over_package": (backbone, PACKAGE),
        }.items():
            above, below = (by_name.get((backbone, each), {}) for each in pair)
            for part in PARTS:
                line[f"{name}_{part}"] = _time_ratio(above, below, part)
            peaks = [row.get("peak_bytes") for row in (above, below)]
            line[f"{name}_peak_bytes"] = None if peaks[0] is None or peaks[1] is None else peaks[0] - peaks[1]
        found.append(line)
    return found


def _time_ratio(above: Mapping[str, Any], below: Mapping[str, Any], part: str) -> float | None:
    times = [row.get(part) for row in (above, below)]
    ratio: float | None = None
    if times[0] is not None and times[1] is not None:
        ratio = times[0]["median_ms"] / times[1]["median_ms"]
    return ratio


class ReadCost(NamedTuple):
    """A training step of an arm with a read step over that of its backbone; None where one is missing."""

    arm: str
    device: float | None
    eager: float | None

    @property
    def is_high(self) -> bool:
        return self.device is not None and self.device > MOST_OVER_BACKBONE


def read_costs(rows: Sequence[Mapping[str, Any]]) -> list[ReadCost]:
    """Of every arm with a read step whose backbone was measured too."""
    by_name = {row["model"]: row for row in rows}
    return [
        ReadCost(name, _time_ratio(row, by_name[backbone], "step_device"), _time_ratio(row, by_name[backbone], "step"))
        for name, row in by_name.items()
        for backbone in (row["backbone"],)
        if name not in (backbone, PACKAGE) and backbone in by_name
    ]


def sweep_shapes(tokens: int) -> list[tuple[int, int]]:
    """(rows, length) of one number of tokens, from rows of `SHORTEST` (or all of them) to one row."""
    length = min(SHORTEST, tokens)
    shapes = []
    while length <= tokens:
        if tokens % length == 0:
            shapes.append((tokens // length, length))
        length *= 2
    return shapes


class ModelMeasurement(Measurement):
    """One run of the benchmark."""

    def __init__(self, figures: dict[str, Any], *, scale: str, changes: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(figures, **settings)
        self.scale = scale
        self.changes = changes

    def save_with_ratios(self) -> None:
        self.figures["ratios"] = ratios(self.figures["models"])
        self.figures["read_costs"] = [cost._asdict() for cost in read_costs(self.figures["models"])]
        self.save(self.figures)

    def config(self, arm: str) -> CCQConfig:
        return preset(f"{arm}-{self.scale}", **self.changes)

    def tokens(self, config: CCQConfig, rows: int, tokens: int) -> Tensor:
        random = torch.Generator().manual_seed(0)
        return torch.randint(config.vocab_size, (rows, tokens), generator=random).to(self.card.device)

    def make(self, name: str, config: CCQConfig) -> Subject | None:
        """A model, or None with a note where it cannot be made."""
        torch.manual_seed(0)
        try:
            with self.card.device:
                module = model_of_the_package(config) if name == PACKAGE else CCQForCausalLM(config)
            return _subject(module, config, self.card.device)
        except Exception as failure:  # what one model raises must not cost the rows of the others
            self.note(f"{name}, {config.backbone}: left out ({brief(failure)})")
            return None

    def backbone(self, backbone: str, arms: Sequence[str], rows: int, tokens: int) -> None:
        """Training step and prefill of the arms of one backbone and of the package's model.

        Of training one model after the other, because two with their moments and a step's activations do not fit on a
        card. Prefill in turns: under load a card lowers its clock, by more than a read step takes.
        """
        trained: dict[str, tuple[Subject, dict[str, Any]]] = {}
        for name in (*arms, *((PACKAGE,) if backbone in RULES else ())):
            subject = self.make(name, self.config(backbone if name == PACKAGE else name))
            if subject is not None:
                trained[name] = subject, self.model(name, backbone, subject, rows, tokens)
                subject.optimizer.state.clear()
                subject.optimizer.zero_grad()
                subject.module.to("cpu", torch.bfloat16).eval()
            del subject
            self.card.release()
            self.save_with_ratios()
        self.prefill(backbone, trained, rows, tokens)
        self.save_with_ratios()

    def prefill(
        self, backbone: str, trained: Mapping[str, tuple[Subject, dict[str, Any]]], rows: int, tokens: int
    ) -> None:
        """Into the rows of the figures."""
        timers = {}
        for name, (subject, _) in trained.items():
            work = functools.partial(subject.prefill, self.tokens(subject.config, rows, tokens))
            try:
                subject.module.to(self.card.device)
                work()
            except Exception as failure:  # as above
                subject.module.to("cpu")
                self.note(f"{name}, {backbone}, prefill: left out ({brief(failure)})")
                continue
            timers[name] = wall_timer(self.card, work)
        for name, found in rounds(timers, self.repeats, self.limit).items():
            trained[name][1]["prefill"] = found
            self.say(f"  {name:<24}{milliseconds(found['median_ms']):>10} ms prefill")

    def model(self, name: str, backbone: str, subject: Subject, rows: int, tokens: int) -> dict[str, Any]:
        """One row of the figures, but for the prefill."""
        given = self.tokens(subject.config, rows, tokens)
        row: dict[str, Any] = {
            "backbone": backbone,
            "model": name,
            "parameters": sum(parameter.numel() for parameter in subject.module.parameters()),
            "peak_bytes": None,
            "step": None,
            "step_device": None,
            "prefill": None,
        }
        try:
            row["peak_bytes"] = self.peak(subject, given)
            row["step"] = self.time(name, lambda: subject.step(given))
        except Exception as failure:  # as above
            self.note(f"{name}, {backbone}, training step: left out ({brief(failure)})")
        else:
            row["tokens_per_second"] = rows * tokens / (row["step"]["median_ms"] / 1000)
            if name != PACKAGE:
                row["flops_per_token"] = flops_per_token(subject.config, context=tokens // 2)
                row["flops_share"] = model_flops_utilization(
                    training_flops_per_token(subject.config, tokens),
                    row["tokens_per_second"],
                    card_peak_flops(self.figures["gpu"]["card"] or ""),
                )
            self.say(
                f"  {name:<24}{milliseconds(row['step']['median_ms']):>10} ms a step"
                f"{row['tokens_per_second']:>12,.0f} tokens/s{mebibytes(row['peak_bytes']):>12} MiB peak"
            )
            self.card.release()
            row["step_device"] = self.device_step(name, backbone, subject, given)
        self.figures["models"].append(row)
        return row

    def peak(self, subject: Subject, tokens: Tensor) -> int:
        """Bytes: weights, moments, and what a step allocates on top."""
        for _ in range(2):  # compiles, tunes, allocates the moments and what libraries keep
            subject.step(tokens)
        self.card.synchronize()
        self.card.reset_peak()
        before = self.card.allocated()
        subject.step(tokens)
        self.card.synchronize()
        return subject.resident_bytes() + self.card.peak() - before

    def device_step(self, name: str, backbone: str, subject: Subject, tokens: Tensor) -> dict[str, Any] | None:
        """Milliseconds of the replayed step; None, with a note, where it cannot be recorded."""
        try:
            with subject.recordable():
                timer = device_timer(self.card, lambda: subject.step(tokens))
            found = rounds({name: timer}, self.repeats, self.limit)[name]
        except Exception as failure:  # as above
            self.note(f"{name}, {backbone}: no device time of a training step ({brief(failure)})")
            return None
        self.say(f"  {name:<24}{milliseconds(found['median_ms']):>10} ms a step on the device")
        return found

    def time(self, name: str, work: Callable[[], Any]) -> dict[str, Any]:
        return rounds({name: wall_timer(self.card, work)}, self.repeats, self.limit)[name]

    def sweep(self, arms: Sequence[str], tokens: int) -> None:
        """A training step of every arm at every shape."""
        self.say(f"sweep, {tokens} tokens a step")
        for arm in arms:
            subject = self.make(arm, self.config(arm))
            if subject is None:
                continue
            with sharing_configurations(arm, self.card.device, subject.config):
                for rows, length in sweep_shapes(tokens):
                    given = self.tokens(subject.config, rows, length)
                    try:
                        peak = self.peak(subject, given)
                        found = self.time(arm, functools.partial(subject.step, given))
                    except Exception as failure:  # as above
                        self.note(f"{arm}, {rows} x {length}: left out ({brief(failure)})")
                        self.card.release()
                        continue
                    speed = tokens / (found["median_ms"] / 1000)
                    self.figures["sweep"].append(
                        {
                            "arm": arm,
                            "rows": rows,
                            "tokens": length,
                            "step": found,
                            "tokens_per_second": speed,
                            "peak_bytes": peak,
                        }
                    )
                    self.say(
                        f"  {arm:<24}{rows:>4} x {length:<7}{speed:>12,.0f} tokens/s{mebibytes(peak):>12} MiB peak"
                    )
                    self.save(self.figures)
            del subject
            self.card.release()


@contextlib.contextmanager
def sharing_configurations(arm: str, device: torch.device, config: CCQConfig) -> Iterator[None]:
    """flash-linear-attention's models in the configurations of this library's write rules, where it can be used."""
    rule = RULES.get(parse_arm(arm)[0])
    index = torch.cuda.current_device() if device.type == "cuda" else None
    if rule is None or flash_linear_attention.reason_against(rule, index):
        yield
        return
    with flash_linear_attention.sharing(rule, device, config.head_dim, config.value_head_dim):
        yield


def time_first_step(arm: str, scale: str, rows: int, tokens: int, *, limit: float) -> dict[str, float]:
    """Seconds of the first training step in a fresh process that finds no compiled kernel.

    "first_step_seconds" begins with the model on the card; "second_step_seconds" is the next one; "process_seconds"
    adds Python, torch, CUDA and making the model. RuntimeError if it fails or takes more than `limit` seconds.
    """
    code = f"from ccq.bench.model import print_first_step; print_first_step({arm!r}, {scale!r}, {rows}, {tokens})"
    return run_afresh(code, limit)


def print_first_step(arm: str, scale: str, rows: int, tokens: int, device: str = "cuda") -> None:
    """What `time_first_step` runs in the fresh process."""
    config = preset(f"{arm}-{scale}")
    place = torch.device(device)
    with place:
        subject = _subject(CCQForCausalLM(config), config, place)
    given = torch.randint(config.vocab_size, (rows, tokens)).to(place)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        subject.step(given).item()
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"first_step_seconds": seconds[0], "second_step_seconds": seconds[1]}))


def bench_model(
    *,
    arms: Sequence[str],
    scale: str,
    rows: int,
    tokens: int,
    repeats: int,
    limit: float,
    sweep: int | None,
    first_step: bool,
    say: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
    card: Card | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Measure everything, part by part, with what is needed to measure it again, for benchmarks/results.

    Args:
        arms: BACKBONE or BACKBONE+READ, see `ccq.models.ARMS`; with a sweep, its arms.
        scale: of the presets, such as "1.3b".
        rows, tokens: B and T of training step and prefill.
        repeats: rounds of every timing; `limit` seconds end a timing early (after at least three rounds).
        sweep: a number of tokens: measure the sweep instead.
        first_step: also the first training step of a fresh process, of every arm with a read step.
        say, save: called with each line for the reader, and with the figures after every part.
        card: the GPU; None takes the current one.
        changes: fields of the configurations that differ from the presets.

    Raises:
        ValueError: for an unknown arm or scale, or without a GPU.
    """
    for arm in arms:
        preset(f"{arm}-{scale}", **changes)
    if card is None:
        if not torch.cuda.is_available():
            raise ValueError("`ccq bench model` measures on a GPU, and torch finds none")
        card = Card()
    figures: dict[str, Any] = {
        "schema": SCHEMA,
        "settings": {
            "arms": list(arms),
            "scale": scale,
            "rows": rows,
            "tokens": tokens,
            "precision": "float32 weights, bfloat16 autocast; prefill: bfloat16 weights",
            "optimizer": "AdamW",
            "repeats": repeats,
            "warmup": WARMUP,
            "limit_seconds": limit,
            "sweep_tokens": sweep,
            **changes,
        },
        "environment": environment(threads=torch.get_num_threads(), device=card.device.type),
        "gpu": gpu_environment(),
        "models": [],
        "ratios": [],
        "read_costs": [],
        "sweep": [],
        "first_steps": [],
        "notes": [],
    }
    run = ModelMeasurement(
        figures, scale=scale, changes=changes, card=card, repeats=repeats, limit=limit, say=say, save=save
    )
    say(f"{figures['gpu']['card']}, torch {figures['environment']['torch']}, {scale}, B {rows}, T {tokens}")
    save(figures)  # a place that cannot be written is known before minutes are spent
    if first_step:
        for arm in (arm for arm in arms if parse_arm(arm)[1] is not None):
            try:
                found = time_first_step(arm, scale, rows, tokens, limit=max(limit, 180.0))
            except RuntimeError as error:
                run.note(f"{arm}: first step not measured ({error})")
            else:
                figures["first_steps"].append({"arm": arm, **found})
                say(f"{arm}: first step of a fresh process, empty caches: {found['first_step_seconds']:.1f} s")
            save(figures)
    if sweep is not None:
        run.sweep(arms, sweep)
        return figures
    for backbone in dict.fromkeys(parse_arm(arm)[0] for arm in arms):
        mine = [arm for arm in arms if parse_arm(arm)[0] == backbone]
        with sharing_configurations(backbone, card.device, run.config(mine[0])):
            run.backbone(backbone, mine, rows, tokens)
        card.release()
    for line in figures["ratios"]:
        say(_ratio_line(line))
    costs = read_costs(figures["models"])
    if any(parse_arm(cost.arm)[1] != "ccq" for cost in costs):
        for text in _cost_lines(costs):
            say(text)
    return figures


def _cost_lines(costs: Sequence[ReadCost]) -> Iterator[str]:
    """The cheapest read step first, those without a device time last."""
    yield ""
    yield f"  {'step over backbone':<30}{'device':>8}{'eager':>8}"
    for cost in sorted(costs, key=lambda cost: math.inf if cost.device is None else cost.device):
        shown = ("-" if ratio is None else f"{ratio:.3f}" for ratio in (cost.device, cost.eager))
        yield f"  {cost.arm:<30}" + "".join(f"{each:>8}" for each in shown)
    high = [cost.arm for cost in costs if cost.is_high]
    yield wrapped(f"more than {MOST_OVER_BACKBONE - 1:+.0%} on the device: {', '.join(high) or 'none'}")


def _ratio_line(line: Mapping[str, Any]) -> str:
    def shown(name: str) -> str:
        return "-" if line[name] is None else f"{line[name]:.3f}"

    peak = line["ccq_over_backbone_peak_bytes"]
    more = "-" if peak is None else mebibytes(peak)
    return (
        f"{line['backbone']}: +ccq over backbone {shown('ccq_over_backbone_step')} step "
        f"({shown('ccq_over_backbone_step_device')} on the device), {shown('ccq_over_backbone_prefill')} prefill, "
        f"{more} MiB more at the peak; backbone over {PACKAGE} {shown('backbone_over_package_step')} step "
        f"({shown('backbone_over_package_step_device')} on the device), "
        f"{shown('backbone_over_package_prefill')} prefill"
    )
