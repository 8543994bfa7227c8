"""Optimizer, weight decay and schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ccq.train.config import OptimizerRecipe

# By name as well as by the mark `_no_weight_decay`, which is lost where a loader or FSDP puts another parameter in the
# place of the one that carried it.
_NEVER_DECAYED = ("A_log", "D", "dt_bias", "gate_bias", "gate_scale", "landmarks", "ridge", "strength")
_GATE_BIAS = "gate_bias"


def learning_rate_at(recipe: OptimizerRecipe, step: int, steps: int) -> float:
    """Learning rate of step `step`, counted from 0, of a run of `steps`.

    Linear from peak / warmup_steps to the peak, which is that of the last step of the warm-up; then a cosine, which
    would reach `final_learning_rate_share` of the peak at step `steps`, the first that is not taken.
    """
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    share = (step - recipe.warmup_steps) / max(steps - recipe.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    final = recipe.final_learning_rate_share
    return recipe.learning_rate * (final + (1 - final) * cosine)


def decays(name: str, parameter: Tensor, *, gate_bias: bool = False) -> bool:
    """Whether weight decay is for this parameter: for matrices, embeddings and convolutions, but not for norms, biases,
    the decay parameters of a backbone (A_log, dt_bias, D of Mamba2) and, unless `gate_bias`, the bias of the gate.
    """
    own = name.rpartition(".")[2]
    if own == _GATE_BIAS and gate_bias:
        return True
    marked = getattr(parameter, "_no_weight_decay", False)
    return parameter.ndim >= 2 and own not in _NEVER_DECAYED and not marked


def make_optimizers(parameters: Iterable[tuple[str, Tensor]], recipe: OptimizerRecipe) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for the matrices inside the blocks and AdamW for the rest.

    Args:
        parameters: names and parameters, as `named_parameters` gives them. Sharded and whole ones may be mixed: an
            optimizer updates all of a group in one call, which takes one kind, so they stand in groups of their own.

    Muon is that of torch.optim (K. Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024). Its
    updates are scaled to the size of AdamW's (J. Liu et al., Muon is scalable for LLM training, arXiv:2502.16982), so
    that learning rate and decay mean the same for both. Embeddings, head, convolutions and the gate of the read step,
    which is no map between hidden vectors, stay with AdamW.
    """
    groups: dict[tuple[bool, type, bool], list[Tensor]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        for_muon = recipe.name == "muon" and _is_hidden_matrix(name, parameter)
        key = (for_muon, type(parameter), decays(name, parameter, gate_bias=recipe.decay_gate_bias))
        groups.setdefault(key, []).append(parameter)

    def options(for_muon: bool) -> list[dict[str, object]]:
        return [
            {"params": members, "weight_decay": recipe.weight_decay if decayed else 0.0}
            for (muon, _, decayed), members in groups.items()
            if muon == for_muon
        ]

    made: list[torch.optim.Optimizer] = []
    if matrices := options(True):
        made.append(torch.optim.Muon(matrices, lr=recipe.learning_rate, adjust_lr_fn="match_rms_adamw"))
    if rest := options(False):
        made.append(torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps, fused=True))
    return made


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and ".layers." in f".{name}" and name.rpartition(".")[2] == "weight"


def decay_alone(start: float, share: float) -> float:
    """lambda if its bias, `start`, had only been multiplied by `share` since.

    Beside the measured gate it tells learning from decay: with the paper's schedule and decay 0.1, decay alone takes
    lambda from 0.01 to 0.435 (500M) or 0.475 (1.3B).
    """
    return 1 / (1 + math.exp(-start * share))


def decay_share(recipe: OptimizerRecipe, step: int, steps: int) -> float:
    """What weight decay alone leaves of a decayed parameter after `step` steps: the product of 1 - rate * decay."""
    return math.prod(1 - learning_rate_at(recipe, each, steps) * recipe.weight_decay for each in range(step))


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], learning_rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def no_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None
