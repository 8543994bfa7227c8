"""What is reported along a training curve."""

from __future__ import annotations

import torch
from torch import Tensor

from ccq.models.modeling import CCQForCausalLM
from ccq.models.observation import observe_reads


def mean_gate(model: CCQForCausalLM, tokens: Tensor) -> float | None:
    """Mean of lambda over layers, heads and tokens [B, T]; None for an arm without a read step."""
    with torch.no_grad(), observe_reads(model) as observed:
        if not observed:
            return None
        model(tokens, use_cache=False, logits_to_keep=1)
    return torch.stack([layer[0].gate.mean() for layer in observed]).mean().item()
