"""A hand-written results dict of the comparison, as small or as full as a test asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ALL_ARMS = ("gla", "gla+ccq", "gated-deltanet", "gated-deltanet+ccq")


def _wilson(correct: int, asked: int) -> tuple[float, float]:
    z = 1.96
    p, centre = correct / asked, (correct + z * z / 2) / (asked + z * z)
    half = z / (asked + z * z) * math.sqrt(asked * p * (1 - p) + z * z / 4)
    return centre - half, centre + half


def _answers(length: int, asked: int, correct: int, **more: Any) -> dict[str, Any]:
    low, high = _wilson(correct, asked)
    return {
        "length": length,
        "asked": asked,
        "correct": correct,
        "accuracy": correct / asked,
        "low": low,
        "high": high,
        **more,
    }


def _run(arm: str, seed: int, position: int) -> dict[str, Any]:
    read = "+" in arm
    jitter = (7 * seed + 3 * position + 2 * seed * position) % 5 - 2  # differs between seeds and arms
    skill = 150 + (30, 48, 8, 2)[position % 4] + 6 * jitter
    curve = []
    for step in range(1, 21):
        length = 64 if step <= 6 else 128 if step <= 12 else 256
        fall = math.exp(-step / (5 + 0.8 * position))
        text = 3.1 + 2.9 * fall + 0.01 * position + 0.01 * jitter
        answer = 0.4 + 0.2 * position + 2.4 * fall**0.7 + 0.05 * math.sin(step + seed + position)
        curve.append(
            {
                "step": 50 * step,
                "tokens": 102400 * step,
                "length": length,
                "loss": text + 0.3 * answer,
                "text_loss": text,
                "answer_loss": answer,
                "gradient_norm": 0.8,
                "gate_mean": 0.2 if read else None,
            }
        )
    by_length = [_answers(256 * m, 256, max(20, skill - 40 * (m - 1)), multiple=m) for m in (1, 2, 4)]
    off = [_answers(256 * m, 256, max(18, skill - 6 + jitter - 40 * (m - 1)), multiple=m) for m in (1, 2, 4)]
    cells = [
        _answers(
            256 * m,
            50,
            min(50, max(2, (skill - 40 * (m - 1)) // 6 + 4 * depth)),
            depth_from=depth / 5,
            depth_to=(depth + 1) / 5,
        )
        for m in (1, 2, 4)
        for depth in range(5)
    ]
    losses = {m: 3.1 + 0.012 * position + 0.02 * math.log2(m) + 0.01 * jitter for m in (1, 2, 4)}
    counts = [0] * 50
    for index in range(12):
        counts[index] = (index + 1) * (12 - index) * 10
    return {
        "arm": arm,
        "seed": seed,
        "parameters": 123456 + (130 if read else 0),
        "read_parameters": 130 if read else 0,
        "state_bytes": 36864 if read else 24576,
        "training": {
            "steps": 1000,
            "tokens": 2048000,
            "seconds": 81.2,
            "tokens_per_second": 25222.0 - 3000 * position + 150 * jitter,
            "curve": curve,
        },
        "perplexity": [
            {
                "length": 256 * m,
                "multiple": m,
                "tokens": 65536,
                "windows": 256 // m,
                "loss": loss,
                "standard_error": 0.02,
                "perplexity": math.exp(loss),
            }
            for m, loss in losses.items()
        ],
        "needle": cells,
        "needle_by_length": by_length,
        "needle_read_off": off if read else None,
        "gate": {
            "mean": 0.07,
            "by_layer": [0.05, 0.09],
            "by_layer_and_head": [[0.02, 0.04, 0.06, 0.08], [0.12, 0.1, 0.06, 0.08]],
            "histogram": {"edges": [index / 50 for index in range(51)], "counts": counts},
        }
        if read
        else None,
        "correction": {"relative_size": 0.013, "by_layer": [0.01, 0.016]} if read else None,
        "decode": {
            "batch_size": 1,
            "tokens": 64,
            "tokens_per_second": 420.0 - 50 * position + 4 * jitter,
            "milliseconds_per_token": 2.4,
        },
    }


def _pair(backbone: str, arm: str, metric: str, differences: list[float]) -> dict[str, Any]:
    count = len(differences)
    mean = sum(differences) / count
    pair: dict[str, Any] = {
        "backbone": backbone,
        "arm": arm,
        "metric": metric,
        "differences": differences,
        "mean": mean,
    }
    if count == 1:
        return {**pair, "standard_deviation": None, "low": None, "high": None}
    deviation = math.sqrt(sum((value - mean) ** 2 for value in differences) / (count - 1))
    half = {2: 12.706, 3: 4.303}[count] * deviation / math.sqrt(count)
    return {**pair, "standard_deviation": deviation, "low": mean - half, "high": mean + half}


def _results(arms: Sequence[str] = ALL_ARMS, seeds: int = 1) -> dict[str, Any]:
    runs = [_run(arm, seed, position) for position, arm in enumerate(arms) for seed in range(seeds)]
    pairs = []
    for arm in arms:
        backbone = arm.partition("+")[0]
        if arm == backbone or backbone not in arms:
            continue
        both = [[run for run in runs if run["arm"] == name] for name in (backbone, arm)]
        for index, length in enumerate((256, 512, 1024)):
            for section, field, name in (
                ("needle_by_length", "accuracy", "needle accuracy"),
                ("perplexity", "loss", "loss"),
            ):
                differences = [b[section][index][field] - a[section][index][field] for a, b in zip(*both, strict=True)]
                pairs.append(_pair(backbone, arm, f"{name} at {length}", differences))
    return {
        "schema": "ccq-results/1",
        "kind": "compare",
        "name": "demo",
        "created": "2026-11-30T12:00:00+00:00",
        "settings": {
            "preset": "tiny",
            "seeds": seeds,
            "arms": list(arms),
            "batch_tokens": 2048,
            "model": {"hidden_size": 64, "layers": 2},
        },
        "environment": {
            "ccq": "0.1.0",
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "platform": "Linux-6.1-x86_64",
            "processor": "x86_64",
            "cores": 2,
            "threads_per_run": 1,
            "device": "cpu",
        },
        "corpus": {
            "source": "Python 3.11.7 standard library",
            "files": 700,
            "held_out_files": 70,
            "characters": 12000000,
            "train_tokens": 5000000,
            "held_out_tokens": 400000,
            "sha256": "ab" * 32,
        },
        "tokenizer": {"vocabulary": 512, "sha256": "cd" * 32},
        "needle_task": {
            "keys": 32,
            "values": 16,
            "needles_per_window": 4,
            "chance": 0.0625,
            "chance_among_seen": 0.25,
            "description": "Four facts are written into a window of text and asked for at its end.",
        },
        "training_length": 256,
        "runs": runs,
        "pairs": pairs,
    }


@pytest.fixture
def build_results() -> Callable[..., dict[str, Any]]:
    """Call as build_results(arms=..., seeds=...)."""
    return _results


RECIPE = """
model: {preset: PRESET, num_layers: 1}
data: {folder: DATA, length: 32}
training: {steps: 6, tokens_per_step: 128}
optimizer: {learning_rate: 1e-2, warmup_steps: 2}
system: {rows: 2, dtype: float32, checkpoint_every: 3, observe_every: 3}
"""
BOOLQ = [{"passage": f"Fact {i}.", "question": "is it so", "label": i % 2} for i in range(6)]
WIKITEXT = [{"page": "The cat , it sat . " * n} for n in (1, 5, 2, 3)]


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What users have: gla and gla+ccq trained by `ccq train` with two seeds in runs/ARM-SEED, evaluated by `ccq eval`
    in results/SUITE-ARM-SEED[-off].json.
    """
    from ccq.cli import main
    from ccq.data import file_source, prepare_shards

    root = tmp_path_factory.mktemp("measured")
    text = root / "text.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(1000)))
    prepare_shards(root / "tokens", file_source([str(text)]), 300, held_out=0)
    (root / "results").mkdir()
    (root / "data").mkdir()
    (root / "data" / "mine.txt").write_text("".join(f"line {n * n} of another text\n" for n in range(300)))
    for name, rows in (("boolq", BOOLQ), ("wikitext", WIKITEXT)):
        (root / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arm in ("gla", "gla+ccq"):
        for seed in (0, 1):
            recipe, run = root / f"{arm}.yaml", root / "runs" / f"{arm}-{seed}"
            recipe.write_text(RECIPE.replace("PRESET", f"{arm}-tiny").replace("DATA", str(root / "tokens")))
            assert main(["train", str(recipe), "--out", str(run), "--set", f"training.seed={seed}"]) == 0
            for read in ("", "-off") if "+" in arm else ("",):
                for suite, options in (
                    ("extrapolation", ["--tasks", "mine", "--lengths", "32", "64", "--max-tokens", "512"]),
                    ("language", ["--tasks", "boolq", "wikitext", "--max-length", "64"]),
                ):
                    out = root / "results" / f"{suite}-{arm}-{seed}{read}.json"
                    options = [*options, *(["--read", "off"] if read else [])]
                    common = ["--data", str(root / "data"), "--device", "cpu", "--out", str(out)]
                    assert main(["eval", suite, str(run / "model"), *options, *common]) == 0
    return root
