"""One arm with one seed: trained and evaluated in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ccq.analysis.gate import measure_reads
from ccq.compare.folder import RunFolder
from ccq.compare.settings import CompareSettings
from ccq.compare.training import NeedleSteps, train_arm
from ccq.data.needles import evaluation_windows
from ccq.data.tokenizer import SEPARATOR
from ccq.evals.needle import evaluate_needles, summarize_by_depth, summarize_by_length
from ccq.evals.perplexity import evaluate_perplexity
from ccq.files import write_json_atomically
from ccq.models.modeling import CCQForCausalLM, load_model, save_model
from ccq.models.text import save_tokenizer
from ccq.train.loop import CHECKPOINTS, Progress

EVALUATION_SEED = 0
"""All arms and seeds answer the same questions."""
EVALUATION_TOKENS = 16_384
"""Tokens in one call when evaluating; bounds the memory."""
PROGRESS_SECONDS = 0.2
TRAINING = "training"
"""Of an arm's folder: checkpoints while it trains, and its metrics."""


class ArmEvent(NamedTuple):
    """What the process of an arm tells the one that started it."""

    arm: str
    seed: int
    kind: str
    """"training", "evaluating", "done" or "failed"."""
    step: int = 0
    text: str = ""
    """The losses while training; the error if it failed."""


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


def run_arm(path: str, settings: CompareSettings, arm: str, seed: int, events: Queue[ArmEvent]) -> None:
    """Train and evaluate one arm; the body of a worker process.

    Ends by itself when the process that started it is gone, so that a killed comparison leaves nothing running.
    """
    # An interrupt from the keyboard reaches every process; the parent deals with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    torch.set_num_threads(1)
    last_told = 0.0

    def tell(progress: Progress) -> None:
        nonlocal last_told
        if parent is not None and not parent.is_alive():
            os._exit(1)
        now = time.monotonic()
        if now - last_told > PROGRESS_SECONDS:
            last_told = now
            losses = progress.result.losses
            text = f"text {losses['text']:.2f}  answers {losses['answer']:.2f}"
            events.put(ArmEvent(arm, seed, "training", progress.step, text))

    try:
        _train_and_evaluate(RunFolder(Path(path)), settings, arm, seed, tell, events)
        events.put(ArmEvent(arm, seed, "done"))
    except Exception as error:  # the parent shows it and goes on with the other arms
        events.put(ArmEvent(arm, seed, "failed", text=f"{type(error).__name__}: {error}"))


def _train_and_evaluate(
    folder: RunFolder, settings: CompareSettings, arm: str, seed: int, tell: Any, events: Queue[ArmEvent]
) -> None:
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
        on_progress=tell,
    )
    events.put(ArmEvent(arm, seed, "evaluating", config.steps))
    model = engine.model.eval()
    save_model(model, own / "model")
    save_tokenizer(tokenizer.to_tokenizers(), own / "model", end=f"<|{SEPARATOR}|>")

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
    length = config.training_length
    rows = min(settings.read_tokens, len(tokens.held_out)) // length
    text = torch.from_numpy(tokens.held_out[: rows * length].astype("int64")).view(rows, length)
    measured = measure_reads(model, text)
    read_off = None
    if measured is not None:
        model.set_read("off")
        read_off = summarize_by_length(needles(), training_length=length)
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
            "needle_by_length": summarize_by_length(outcomes, training_length=length),
            "needle_read_off": read_off,
            "gate": None if measured is None else measured.gate,
            "correction": None if measured is None else measured.correction,
        },
    )
    shutil.rmtree(own / TRAINING / CHECKPOINTS)
