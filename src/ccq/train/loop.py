"""The training loop: next-token loss on text plus the loss on needle answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ccq.data.needles import NeedleBatch, training_batch
from ccq.data.tokenizer import NeedleVocabulary
from ccq.models.configuration import CCQConfig
from ccq.models.modeling import CCQForCausalLM
from ccq.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ccq.train.config import TrainConfig
from ccq.train.metrics import mean_gate


class Progress(NamedTuple):
    """What a run reports after every step."""

    step: int
    """Steps done."""
    text_loss: float
    """Nats a token."""
    answer_loss: float
    """Nats an answer."""


class TrainedModel(NamedTuple):
    model: CCQForCausalLM
    curve: list[dict[str, Any]]
    """Points of the training curve, as `ccq.evals.results.TrainingPoint`."""
    seconds: float
    """Time spent in training, in all sittings."""


def initial_model(config: CCQConfig, seed: int) -> CCQForCausalLM:
    """The model of a seed before the first step. The caller's random stream is left as it was.

    The read step draws nothing, so both arms of a pair start from the same weights bit for bit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CCQForCausalLM(config)


def losses(model: CCQForCausalLM, batch: NeedleBatch) -> tuple[Tensor, Tensor]:
    """Mean loss over text targets and mean loss over answers, in nats.

    Each has its own mean: four answers in a window would be lost in a mean over all of its tokens.
    """
    logits = model(batch.inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    text, answer = batch.text.flatten(), batch.answer.flatten()
    return loss[text].mean(), loss[answer].mean()


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def decays(parameter: Tensor) -> bool:
        return parameter.ndim >= 2 and not getattr(parameter, "_no_weight_decay", False)

    groups = [
        {"params": [p for p in parameters if decays(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def training_step(
    model: CCQForCausalLM, optimizer: torch.optim.Optimizer, batch: NeedleBatch, config: TrainConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """One optimizer step. Returns text loss, answer loss and the gradient norm before clipping."""
    text_loss, answer_loss = losses(model, batch)
    (text_loss + answer_loss).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return text_loss.detach(), answer_loss.detach(), norm


def train(
    model_config: CCQConfig,
    config: TrainConfig,
    tokens: NDArray[np.integer[Any]],
    vocabulary: NeedleVocabulary,
    *,
    seed: int,
    checkpoint: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TrainedModel:
    """Train one model on windows drawn from `tokens` [tokens], going on from `checkpoint` if that file is there.

    The data of a step are a function of seed and step alone, so that an interrupted run that goes on ends bit-equal to
    one that was never interrupted, and all arms see the same windows in the same order.

    Raises:
        FloatingPointError: a loss is not finite.
        ValueError: the checkpoint is damaged or belongs to another model.
    """
    model = initial_model(model_config, seed)
    optimizer = make_optimizer(model, config)
    step, curve, seconds = 0, [], 0.0
    saved = load_checkpoint(checkpoint) if checkpoint is not None else None
    if saved is not None:
        try:
            model.load_state_dict(saved.model)
            optimizer.load_state_dict(saved.optimizer)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{checkpoint} belongs to another model ({error}); delete it to train again") from error
        step, curve, seconds = saved.step, saved.curve, saved.seconds

    model.train()
    started = last_saved = time.perf_counter()

    def save() -> None:
        if checkpoint is not None:
            spent = seconds + time.perf_counter() - started
            save_checkpoint(checkpoint, Checkpoint(step, model.state_dict(), optimizer.state_dict(), curve, spent))

    while step < config.steps:
        stage = config.stage_at(step)
        batch = training_batch(
            tokens,
            seed=seed,
            step=step,
            batch_size=stage.batch_size,
            length=stage.length,
            vocabulary=vocabulary,
            needles=config.needles,
        )
        _set_learning_rate(optimizer.param_groups, config.learning_rate_at(step))
        text_loss, answer_loss, norm = training_step(model, optimizer, batch, config)
        step += 1
        if not torch.isfinite(text_loss + answer_loss + norm):
            raise FloatingPointError(
                f"the loss is not finite at step {step} (text {text_loss:.4g}, answers {answer_loss:.4g}, gradient "
                f"norm {norm:.4g}); a lower learning rate than {config.learning_rate} may help"
            )
        if step == 1 or step % config.log_every == 0 or step == config.steps:
            curve.append(
                {
                    "step": step,
                    "tokens": config.tokens_before(step),
                    "length": stage.length,
                    "loss": (text_loss + answer_loss).item(),
                    "text_loss": text_loss.item(),
                    "answer_loss": answer_loss.item(),
                    "gradient_norm": norm.item(),
                    "gate_mean": mean_gate(model, batch.inputs[:1]),
                }
            )
        if time.perf_counter() - last_saved > config.checkpoint_seconds:
            save()
            last_saved = time.perf_counter()
        on_progress(Progress(step, text_loss.item(), answer_loss.item()))
    save()
    return TrainedModel(model, curve, seconds + time.perf_counter() - started)


def _set_learning_rate(groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
    for group in groups:
        group["lr"] = learning_rate
