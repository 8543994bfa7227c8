"""Runs made by hand, so that a test knows every figure in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccq.report.benchmarks import DecodeBenchmark, ModelBenchmark, read_decode_benchmark, read_model_benchmark
from ccq.report.intervals import Samples
from ccq.report.runs import MEAN, Evaluation, Model, Runs, Score, ScoreName, Training

Given = Mapping[tuple[str, str], Sequence[float]]
"""(task, metric) -> what each sample gave."""


def evaluation(
    arm: str,
    suite: str,
    given: Given,
    *,
    scale: str = "1.3B",
    seed: int | None = 0,
    read: str | None = None,
    **changes: Any,
) -> Evaluation:
    """Shares where all values lie in 0 ... 1, else losses; samples are named by their number."""
    scores = {}
    for (task, metric), values in given.items():
        array = np.asarray(values, dtype=np.float64)
        shares = bool(((array >= 0) & (array <= 1)).all())
        names = tuple(f"{task} {number}" for number in range(len(array)))
        samples = (Samples(array, names, shares),)
        scores[ScoreName(suite, task, metric)] = Score(float(array.mean()), len(array), not shares, samples)
    firsts = tuple(scores)
    if "mean" in changes:
        parts = tuple(score.samples[0] for score in scores.values() if score.samples and score.samples[0].are_shares)
        scores[ScoreName(suite, MEAN, MEAN)] = Score(changes["mean"], 1, False, parts)
    model = Model(scale, arm, read if read or "+" not in arm else "on", seed, None, changes.get("state"))
    conditions = changes.get("conditions", {"max_length": 4096})
    return Evaluation(
        Path(f"{suite}-{arm}-{seed}-{read}.json"),
        model,
        suite,
        changes.get("complete", True),
        scores,
        firsts,
        changes.get("depths", {}),
        conditions,
    )


def training(arm: str, seed: int, speed: float, **changes: Any) -> Training:
    model = Model(changes.get("scale", "1.3B"), arm, "on" if "+" in arm else None, seed, None, changes.get("state"))
    return Training(
        path=Path(f"runs/{arm}-{seed}"),
        model=model,
        step=10,
        steps=10,
        tokens=1000,
        loss=2.5,
        held_out_loss=changes.get("held_out_loss"),
        tokens_per_second=speed,
        processes=changes.get("processes", 1),
        memory=changes.get("memory"),
        gate=None,
        correction=None,
        gates=changes.get("gates", ()),
        gate_bias_decays=changes.get("gate_bias_decays", False),
    )


def benchmark(rows: Sequence[Mapping[str, Any]], sweep: Sequence[Mapping[str, Any]] = ()) -> ModelBenchmark:
    """Of rows as `ccq bench model` writes them."""
    figures = {
        "settings": {"scale": "1.3b", "rows": 8, "tokens": 4096, "sweep_tokens": 32768 if sweep else None},
        "environment": {"torch": "2.11.0"},
        "gpu": {"card": "NVIDIA H200"},
        "models": list(rows),
        "sweep": list(sweep),
        "notes": ["gla+ccq, gla, training step: left out\n(no room)"],
    }
    return read_model_benchmark(Path("model.json"), figures)


def decoding(*rows: tuple[str, float, float | None], scale: str = "1.3b") -> DecodeBenchmark:
    """As `ccq bench decode` writes it, of arms with milliseconds of an eager and of a replayed step of 8 rows."""
    models = [
        {
            "backbone": arm.partition("+")[0],
            "model": arm,
            "state_bytes": 3 * 2**20,
            "eager": times(eager),
            "graph": None if graph is None else times(graph),
        }
        for arm, eager, graph in rows
    ]
    package = {"backbone": "gla", "model": "flash-linear-attention", "state_bytes": None, "eager": times(1.0)}
    figures = {
        "settings": {"scale": scale, "rows": 8, "context": 4096, "dtype": "bfloat16"},
        "environment": {"torch": "2.11.0", "device": "cuda"},
        "gpu": {"card": "NVIDIA H200"},
        "models": [*models, {**package, "graph": None}],
        "notes": ["gla+exact: left out"],
    }
    return read_decode_benchmark(Path("decode.json"), figures)


def times(median: float) -> dict[str, float]:
    return {"median_ms": median, "lower_quartile_ms": 0.9 * median, "upper_quartile_ms": 1.25 * median, "rounds": 20}


def runs(*sources: Any, comparisons: Sequence[Any] = (), layers: Sequence[Any] = ()) -> Runs:
    return Runs(
        tuple(source for source in sources if isinstance(source, Evaluation)),
        tuple(source for source in sources if isinstance(source, Training)),
        tuple(comparisons),
        tuple(layers),
        tuple(source for source in sources if isinstance(source, ModelBenchmark)),
        tuple(source for source in sources if isinstance(source, DecodeBenchmark)),
        (),
    )
