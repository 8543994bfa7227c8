"""One arm with one seed: trained and evaluated in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ccq.analysis.gate import measure_reads
from ccq.compare.folder import RunFolder
from ccq.compare.pool import Teller
from ccq.compare.settings import CompareSettings
from ccq.compare.training import NeedleSteps, TrainConfig, train_arm
from ccq.data.needles import evaluation_windows
from ccq.data.tokenizer import SEPARATOR, Tokenizer
from ccq.evals.needle import evaluate_needles, summarize_by_depth, summarize_by_length
from ccq.evals.perplexity import evaluate_perplexity
from ccq.files import write_json_atomically
from ccq.models.modeling import CCQForCausalLM, load_model, save_model
from ccq.models.text import save_tokenizer
from ccq.models.training_record import write_training_record
from ccq.train.loop import CHECKPOINTS

EVALUATION_SEED = 0
"""All arms and seeds answer the same questions."""
EVALUATION_TOKENS = 16_384
"""Tokens in one call when evaluating; bounds the memory."""
TRAINING = "training"
"""Of an arm's folder: checkpoints while it trains, and its metrics."""


def arm_is_done(folder: RunFolder, arm: str, seed: int) -> bool:
    return (folder.arm(arm, seed) / "result.json").exists()


def read_arm_result(folder: RunFolder, arm: str, seed: int) -> dict[str, Any]:
    """The figures of a finished arm, but for the speeds."""
    path = folder.arm(arm, seed) / "result.json"
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to train and evaluate this arm again") from error
    return result


def load_arm_model(folder: RunFolder, arm: str, seed: int) -> CCQForCausalLM:
    return load_model(folder.arm(arm, seed) / "model")


def run_arm(path: str, settings: CompareSettings, arm: str, seed: int, tell: Teller, device: torch.device) -> None:
    """Train and evaluate one arm; the body of a worker process."""
    folder = RunFolder(Path(path))
    own = folder.arm(arm, seed)
    own.mkdir(parents=True, exist_ok=True)
    tokens, tokenizer = folder.tokens(), folder.tokenizer()
    vocabulary = tokenizer.needle_vocabulary
    config = settings.train
    engine, outcome, curve = train_arm(
        settings.model_config(arm, tokenizer),
        config,
        NeedleSteps(tokens.train, vocabulary, config, seed),
        own / TRAINING,
        seed=seed,
        device=device,
        on_progress=tell.training,
    )
    tell.note("evaluating")
    model = engine.model.eval()
    write_training_record(
        own / "model",
        seed=seed,
        steps=config.steps,
        tokens=config.tokens,
        settings={
            "model": {"preset": f"{arm}-{settings.model}"},
            **text_facts(folder, config),
            "optimizer": dataclasses.asdict(config.optimizer()),
        },
    )
    save_trained(model, own / "model", tokenizer)

    def needles() -> list[Any]:
        outcomes = []
        for length in settings.lengths:
            windows = evaluation_windows(
                tokens.held_out,
                seed=EVALUATION_SEED,
                length=length,
                windows=settings.windows,
                vocabulary=vocabulary,
                needles=config.needles,
                depth_bins=settings.depth_bins,
            )
            outcomes.append(evaluate_needles(model, windows, batch_size=max(1, EVALUATION_TOKENS // length)))
        return outcomes

    perplexity = evaluate_perplexity(
        model,
        tokens.held_out,
        lengths=settings.lengths,
        max_tokens=settings.perplexity_tokens,
        batch_size=max(1, EVALUATION_TOKENS // max(settings.lengths)),
        training_length=config.training_length,
    )
    outcomes = needles()
    text = text_windows_of(settings, tokens.held_out)
    measured = measure_reads(model, text)
    read_off = None
    if measured is not None:
        model.set_read("off")
        read_off = summarize_by_length(needles(), training_length=config.training_length)
        model.set_read("on")
    with torch.no_grad():
        cache = model(text[:1, :1]).cache
    write_json_atomically(
        own / "result.json",
        {
            "arm": arm,
            "seed": seed,
            "parameters": model.parameter_count,
            "read_parameters": model.read_parameter_count,
            "state_bytes": cache.state_bytes,
            "training": {
                "steps": config.steps,
                "tokens": config.tokens,
                "seconds": outcome.seconds,
                "curve": curve,
            },
            "perplexity": perplexity,
            "needle": summarize_by_depth(outcomes),
            "needle_by_length": summarize_by_length(outcomes, training_length=config.training_length),
            "needle_read_off": read_off,
            "gate": None if measured is None else measured.gate,
            "correction": None if measured is None else measured.correction,
        },
    )
    shutil.rmtree(own / TRAINING / CHECKPOINTS)


def save_trained(model: CCQForCausalLM, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a model with its tokenizer, as `from_pretrained` reads them."""
    save_model(model, folder)
    save_tokenizer(tokenizer.to_tokenizers(), folder, end=f"<|{SEPARATOR}|>")


def text_facts(folder: RunFolder, config: TrainConfig) -> dict[str, Any]:
    """What the steps of a training on text depend on beside its seed, for its record."""
    return {
        "task": {
            "kind": "text",
            "needles": config.needles,
            "stages": [dataclasses.asdict(stage) for stage in config.stages],
        },
        "corpus_sha256": folder.corpus()["sha256"],
        "tokenizer_sha256": folder.tokenizer().sha256,
    }


def text_windows_of(settings: CompareSettings, held_out: NDArray[np.integer[Any]]) -> Tensor:
    """int64 [B, training length]: the held-out text over which gate and correction are measured."""
    length = settings.train.training_length
    rows = min(settings.read_tokens, len(held_out)) // length
    return torch.from_numpy(held_out[: rows * length].astype("int64")).view(rows, length)
