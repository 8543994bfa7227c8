"""`ccq bench decode`: one token after another from whole models that have read a prompt.

A step takes the most likely next token of every row, so that what is timed is a decoding loop as a user runs it. Two
ways: eager, many steps one after the other, and the same step captured as a CUDA graph and replayed, which the fixed
addresses of the cache allow (`ccq.models.cache`). flash-linear-attention's model of the same sizes runs eagerly beside
them. The models of a backbone take turns in one process.

The floor of a step is the time in which the card's copy bandwidth moves what must be moved: the weights once, without
the embedding, of which a step needs one line a row, and the states out and in; a softmax cache, which only grows, out.

The paper's figures for 1.3B models and 8 rows after 4K tokens are 457 tokens a second without and 297 with the read
step on Gated DeltaNet (arXiv:2606.01294, v2, appendix C).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    wall_timer,
)
from ccq.bench.model import model_of_the_package, sharing_configurations
from ccq.models import CCQCache, CCQConfig, CCQForCausalLM, parse_arm, preset

SCHEMA = "ccq-bench-decode/1"
STEPS = 16
"""Decoding steps of one eager timing, so that waiting for the card at its end counts little."""
PREFILL_TOKENS = 32_768
"""Tokens of one call that reads the prompt, over all rows; bounds the memory that takes, as in `ccq eval`."""


class Processor(Card):
    """A CPU in the place of the card. It replays no graph and does not tell its memory."""

    device = torch.device("cpu")

    def synchronize(self) -> None:
        """It is never ahead of the program."""

    def release(self) -> None:
        """It keeps nothing back."""


class Decoder:
    """A model that has read a prompt, tokens [B, T], and goes on greedily.

    `token` [B, 1] is the last one of every row. Each step overwrites it and the states in place, so a step can be
    captured as a CUDA graph.
    """

    def __init__(self, module: Any, tokens: Tensor) -> None:
        self.module = module
        self.cache: Any = None
        for piece in tokens.split(max(1, PREFILL_TOKENS // len(tokens)), dim=1):
            logits = self._read(piece)
        self.token = logits.argmax(-1, keepdim=True)

    def step(self) -> None:
        self.token.copy_(self._read(self.token).argmax(-1, keepdim=True))

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> Tensor:
        """Logits [B, vocabulary] after the last token."""
        output = self.module(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        # Transformers calls it the one or the other, depending on its version.
        cache = getattr(output, "cache", None)
        self.cache = output.past_key_values if cache is None else cache
        logits: Tensor = output.logits[:, -1]
        return logits


def weight_bytes(module: Any) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def step_bytes(module: CCQForCausalLM, rows: int, state_bytes: int) -> int:
    """What a step of `rows` rows must move: weights, and the states, of `state_bytes` a row, out and in."""
    weights = weight_bytes(module)
    if not module.config.tie_word_embeddings:
        weights -= module.get_input_embeddings().weight.nbytes
    ways = 1 if module.config.backbone == "transformer" else 2
    return weights + ways * rows * state_bytes


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every arm with a read step over its backbone, and that over flash-linear-attention's model: milliseconds a step
    in each way, and bytes of state, None where one is missing.
    """
    by_name = {(row["backbone"], row["model"]): row for row in rows}
    found = []
    for row in rows:
        backbone = row["backbone"]
        over = PACKAGE if row["model"] == backbone else backbone
        below = by_name.get((backbone, over))
        if row["model"] == PACKAGE or below is None:
            continue
        line: dict[str, Any] = {"model": row["model"], "over": over}
        for way in ("eager", "graph"):
            times = [None if each[way] is None else each[way]["median_ms"] for each in (row, below)]
            line[way] = None if times[0] is None or times[1] is None else times[0] / times[1]
        states = row["state_bytes"], below["state_bytes"]
        line["state_bytes"] = None if states[0] is None or states[1] is None else states[0] / states[1]
        found.append(line)
    return found


class DecodeMeasurement(Measurement):
    """One run of the benchmark."""

    def __init__(
        self,
        figures: dict[str, Any],
        *,
        scale: str,
        rows: int,
        context: int,
        dtype: torch.dtype,
        changes: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        super().__init__(figures, **settings)
        self.scale = scale
        self.rows = rows
        self.context = context
        self.dtype = dtype
        self.changes = changes

    def save_with_ratios(self) -> None:
        self.figures["ratios"] = ratios(self.figures["models"])
        self.save(self.figures)

    def config(self, arm: str) -> CCQConfig:
        return preset(f"{arm}-{self.scale}", **self.changes)

    @property
    def is_on_a_card(self) -> bool:
        return not isinstance(self.card, Processor)

    def backbone(self, backbone: str, arms: Sequence[str]) -> None:
        """The arms of one backbone and the package's model, in turn."""
        names = [*arms]
        if self.is_on_a_card and backbone in RULES:
            names.append(PACKAGE)
        decoders: dict[str, Decoder] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name in names:
            try:
                decoders[name], rows[name] = self.prepare(name, backbone)
            except Exception as failure:  # what one model raises must not cost the rows of the others
                self.note(f"{name}, {backbone}: left out ({brief(failure)})")
                self.card.release()
                continue
            self.figures["models"].append(rows[name])
        self.time("eager", rows, {name: self.loop_timer(decoder) for name, decoder in decoders.items()})
        if self.is_on_a_card:
            self.time("graph", rows, self.graph_timers(backbone, decoders))

    def prepare(self, name: str, backbone: str) -> tuple[Decoder, dict[str, Any]]:
        """A model behind its prompt, and what is known of it before it is timed."""
        config = self.config(backbone if name == PACKAGE else name)
        torch.manual_seed(0)
        with self.card.device:
            made: Any = model_of_the_package(config) if name == PACKAGE else CCQForCausalLM(config)
        module: nn.Module = made.to(self.card.device, self.dtype).eval()
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocab_size, (self.rows, self.context), generator=random).to(self.card.device)
        Decoder(module, tokens).step()  # compiles, tunes, and lets libraries allocate what they keep
        self.card.synchronize()
        row: dict[str, Any] = {
            "backbone": backbone,
            "model": name,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "state_bytes": None,
            "peak_bytes": None,
            "floor_tokens_per_second": None,
            "eager": None,
            "graph": None,
        }
        if not self.is_on_a_card:
            decoder = Decoder(module, tokens)
        else:
            before = self.card.allocated()
            decoder = Decoder(module, tokens)
            self.card.synchronize()
            self.card.reset_peak()
            decoder.step()
            self.card.synchronize()
            row["peak_bytes"] = weight_bytes(module) + self.card.peak() - before
        if isinstance(module, CCQForCausalLM) and isinstance(decoder.cache, CCQCache):
            row["state_bytes"] = decoder.cache.state_bytes // self.rows
            bandwidth = self.figures["copy_bytes_per_second"]
            if bandwidth is not None:
                seconds = step_bytes(module, self.rows, row["state_bytes"]) / bandwidth
                row["floor_tokens_per_second"] = self.rows / seconds
        return decoder, row

    def loop_timer(self, decoder: Decoder) -> Callable[[], float]:
        """A function that returns the milliseconds of a step in an eager loop."""

        def several() -> None:
            for _ in range(STEPS):
                decoder.step()

        timer = wall_timer(self.card, several)
        return lambda: timer() / STEPS

    def graph_timers(self, backbone: str, decoders: Mapping[str, Decoder]) -> dict[str, Callable[[], float]]:
        """The same of a replayed step, for the arms where that is possible."""
        timers: dict[str, Callable[[], float]] = {}
        for name, decoder in decoders.items():
            if name == PACKAGE:
                continue
            if backbone == "transformer":
                self.note(f"{name}: no CUDA graph, because its state grows with every token")
                continue
            try:
                timers[name] = device_timer(self.card, decoder.step)
            except Exception as failure:  # as above
                self.note(f"{name}, CUDA graph: left out ({brief(failure)})")
        return timers

    def time(self, way: str, rows: Mapping[str, dict[str, Any]], timers: Mapping[str, Callable[[], float]]) -> None:
        """Put what timers of decoders say into their rows."""
        for name, found in rounds(timers, self.repeats, self.limit).items():
            speed = self.rows / (found["median_ms"] / 1000)
            rows[name][way] = {**found, "tokens_per_second": speed}
            parts = [f"  {name:<24}{way:<6}{milliseconds(found['median_ms']):>10} ms a step{speed:>12,.0f} tokens/s"]
            floor, state, peak = (rows[name][key] for key in ("floor_tokens_per_second", "state_bytes", "peak_bytes"))
            if floor is not None:
                parts.append(f"floor {floor:,.0f}")
            if way == "eager" and state is not None:
                parts.append(f"{state / 1024:,.0f} KiB of state a sequence")
            if way == "eager" and peak is not None:
                parts.append(f"{mebibytes(peak)} MiB peak")
            self.say(", ".join(parts))
        self.save_with_ratios()


def bench_decode(
    *,
    arms: Sequence[str],
    scale: str,
    rows: int,
    context: int,
    device: str,
    repeats: int,
    limit: float,
    say: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
    card: Card | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Measure everything, backbone by backbone, with what is needed to measure it again, for benchmarks/results.

    Weights are bfloat16 on a GPU and float32 on a CPU; memories and statistics are float32 on both. On a CPU there is
    neither a CUDA graph nor flash-linear-attention, and no memory or floor is told.

    Args:
        arms: BACKBONE or BACKBONE+READ, see `ccq.models.ARMS`.
        scale: of the presets, such as "1.3b".
        rows: B, the sequences that are decoded at a time.
        context: tokens of each that were read before.
        device: "cuda" or "cpu".
        repeats: rounds of every timing; `limit` seconds end a timing early (after at least three rounds).
        say, save: called with each line for the reader, and with the figures after every part.
        card: the GPU or what stands for it; None takes what `device` says.
        changes: fields of the configurations that differ from the presets.

    Raises:
        ValueError: for an unknown arm or scale, or "cuda" without a GPU.
    """
    for arm in arms:
        preset(f"{arm}-{scale}", **changes)
    if card is None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch finds no GPU; `ccq bench decode --device cpu` measures on the processor")
        card = Card() if device == "cuda" else Processor()
    is_on_a_card = not isinstance(card, Processor)
    dtype = torch.bfloat16 if is_on_a_card else torch.float32
    figures: dict[str, Any] = {
        "schema": SCHEMA,
        "settings": {
            "arms": list(arms),
            "scale": scale,
            "rows": rows,
            "context": context,
            "dtype": str(dtype).removeprefix("torch."),
            "steps": STEPS,
            "prefill_tokens": PREFILL_TOKENS,
            "repeats": repeats,
            "warmup": WARMUP,
            "limit_seconds": limit,
            **changes,
        },
        "environment": environment(threads=torch.get_num_threads(), device=card.device.type),
        "gpu": gpu_environment(),
        "copy_bytes_per_second": None,
        "models": [],
        "ratios": [],
        "notes": [],
    }
    run = DecodeMeasurement(
        figures,
        scale=scale,
        rows=rows,
        context=context,
        dtype=dtype,
        changes=changes,
        card=card,
        repeats=repeats,
        limit=limit,
        say=say,
        save=save,
    )
    place = figures["gpu"]["card"] if is_on_a_card else figures["environment"]["processor"]
    say(f"{place}, torch {figures['environment']['torch']}, {scale}, B {rows}, after {context} tokens")
    save(figures)  # a place that cannot be written is known before minutes are spent
    if is_on_a_card:
        figures["copy_bytes_per_second"] = card.copy_bytes_per_second()
        card.release()
    for backbone in dict.fromkeys(parse_arm(arm)[0] for arm in arms):
        mine = [arm for arm in arms if parse_arm(arm)[0] == backbone]
        with (
            sharing_configurations(backbone, card.device, run.config(mine[0]))
            if is_on_a_card
            else contextlib.nullcontext()
        ):
            run.backbone(backbone, mine)
        card.release()
    for line in figures["ratios"]:
        say(_ratio_line(line))
    return figures


def _ratio_line(line: Mapping[str, Any]) -> str:
    parts = [
        f"{line[way]:.3f} {words}"
        for way, words in (("eager", "eager"), ("graph", "CUDA graph"), ("state_bytes", "state"))
        if line[way] is not None
    ]
    return f"{line['model']} over {line['over']}: {', '.join(parts) or '-'}"
