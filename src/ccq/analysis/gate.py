"""Gate values and the size of the correction, measured on text."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.evals.results import CorrectionResult, GateResult
from ccq.models.modeling import CCQForCausalLM
from ccq.models.observation import observe_reads

HISTOGRAM_BINS = 50


class ReadMeasurement(NamedTuple):
    gate: GateResult
    correction: CorrectionResult


@torch.no_grad()
def measure_reads(model: CCQForCausalLM, tokens: Tensor, *, batch_size: int = 16) -> ReadMeasurement | None:
    """Gate and correction over tokens [B, T] int64; None for an arm without a read step.

    The size of the correction is the mean over tokens and heads of |lambda Sigma q| / |q|, q being the query before
    the correction. The histogram divides [0, 1]; a gate outside of it counts in the outermost bin.
    """
    if not model.read_steps():
        return None
    gates: list[list[Tensor]] = []
    sizes: list[list[Tensor]] = []
    for rows in tokens.split(batch_size):
        with observe_reads(model) as observed:
            model(rows, use_cache=False, logits_to_keep=1)
        seen = [layer[0] for layer in observed]
        gates.append([read.gate.float() for read in seen])
        sizes.append(
            [
                (read.gate.float() * read.correction.norm(dim=-1)).abs()
                / read.query.float().norm(dim=-1).clamp(min=1e-12)
                for read in seen
            ]
        )
    gate = [torch.cat(layer) for layer in zip(*gates, strict=True)]  # one [B, T, H] a layer
    size = [torch.cat(layer) for layer in zip(*sizes, strict=True)]
    edges = torch.linspace(0, 1, HISTOGRAM_BINS + 1)
    counts = torch.histogram(torch.stack(gate).flatten().clamp(0, 1), edges).hist
    return ReadMeasurement(
        gate={
            "mean": torch.stack(gate).mean().item(),
            "by_layer": [layer.mean().item() for layer in gate],
            "by_layer_and_head": [layer.mean((0, 1)).tolist() for layer in gate],
            "histogram": {"edges": edges.tolist(), "counts": counts.int().tolist()},
        },
        correction={
            "relative_size": torch.stack(size).mean().item(),
            "by_layer": [layer.mean().item() for layer in size],
        },
    )
