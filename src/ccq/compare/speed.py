"""Training and decode speed of the trained arms, measured in turn in one process."""

from __future__ import annotations

import time
from typing import Any

import torch

from ccq.compare.arm import load_arm_model
from ccq.compare.folder import RunFolder
from ccq.compare.settings import CompareSettings
from ccq.compare.training import NeedleSteps
from ccq.evals.results import DecodeResult
from ccq.models.modeling import CCQForCausalLM
from ccq.train.engine import Engine

ROUNDS = 9
WARMUP_ROUNDS = 2
DECODE_TOKENS = 32


def measure_speeds(folder: RunFolder, settings: CompareSettings) -> dict[str, tuple[float, DecodeResult]]:
    """For each arm: trained tokens a second at the training length, and one-token decode behind a full window.

    Arms take turns in one process on one thread, so that whatever else the machine does meets them alike; medians over
    rounds, the first ones left out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(folder, settings)
    finally:
        torch.set_num_threads(threads)


def _measure(folder: RunFolder, settings: CompareSettings) -> dict[str, tuple[float, DecodeResult]]:
    config = settings.train
    stage = config.stages[-1]
    vocabulary = folder.tokenizer().needle_vocabulary
    batch = NeedleSteps(folder.tokens().train, vocabulary, config, seed=0).batch(config.steps - 1)
    engines = {arm: Engine(load_arm_model(folder, arm, 0), config.optimizer()) for arm in settings.arms}
    step_seconds: dict[str, list[float]] = {arm: [] for arm in engines}
    token_seconds: dict[str, list[float]] = {arm: [] for arm in engines}
    for _ in range(ROUNDS + WARMUP_ROUNDS):
        for arm, engine in engines.items():
            started = time.perf_counter()
            engine.step([batch], config.learning_rate)
            step_seconds[arm].append(time.perf_counter() - started)
            token_seconds[arm].append(_decode_seconds(engine.model, batch.inputs[:1]))
    speeds: dict[str, tuple[float, DecodeResult]] = {}
    for arm in engines:
        token = _median(token_seconds[arm])
        decode: DecodeResult = {
            "batch_size": 1,
            "tokens": DECODE_TOKENS,
            "tokens_per_second": 1 / token,
            "milliseconds_per_token": 1000 * token,
        }
        speeds[arm] = (stage.batch_size * stage.length / _median(step_seconds[arm]), decode)
    return speeds


@torch.no_grad()
def _decode_seconds(model: CCQForCausalLM, prompt: torch.Tensor) -> float:
    """Seconds a token of greedy decoding after `prompt` [1, T]."""
    output = model(prompt, use_cache=True, logits_to_keep=1)
    started = time.perf_counter()
    for _ in range(DECODE_TOKENS):
        output = model(output.logits.argmax(-1), cache=output.cache, logits_to_keep=1)
    return (time.perf_counter() - started) / DECODE_TOKENS


def _median(seconds: list[float]) -> float:
    return sorted(seconds[WARMUP_ROUNDS:])[ROUNDS // 2]


def add_speeds(result: dict[str, Any], speeds: dict[str, tuple[float, DecodeResult]]) -> dict[str, Any]:
    """The figures of an arm with its measured speeds."""
    trained, decode = speeds[result["arm"]]
    return {**result, "training": {**result["training"], "tokens_per_second": trained}, "decode": decode}
