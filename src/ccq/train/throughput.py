"""How much of a machine training uses, and what a run would need: utilisation, memory, time."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from ccq.data.loader import check_micro_batches
from ccq.models.configuration import CCQConfig
from ccq.models.counts import parameter_count
from ccq.models.utilization import card_peak_flops, training_flops_per_token
from ccq.ops.linear_cross_entropy import LOGITS
from ccq.train.config import Recipe
from ccq.train.engine import DTYPES

ASSUMED_UTILIZATION = 0.4
"""Share of the peak with which a planned run is reckoned; of a CPU, of the rate of its matrix products."""
_PRODUCT_SIZE = 1024
_PRODUCT_SECONDS = 0.2


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations a second of a GPU; None for a CPU and for a card that is not in the table."""
    return card_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


class Memory(NamedTuple):
    """Bytes of one process."""

    states: int
    """Weights in float32, their gradients and the moments of AdamW (Muon needs one moment less for its matrices, which
    is not taken off)."""
    copies: int
    """Weights as they are computed with, and gradients that wait for the last micro-batch."""
    activations: int
    """What the blocks keep for the backward pass."""
    head: int
    """Logits of a piece, and the gradients of head and hidden vectors."""

    @property
    def total(self) -> int:
        return sum(self)


def memory_estimate(recipe: Recipe, config: CCQConfig, processes: int) -> Memory:
    """What training needs in each of so many processes.

    With P parameters, W processes, N tokens in a micro-batch, b bytes in a number of the computation:

    - states: 16 P / W, four bytes each for weight, gradient and two moments.
    - copies: b P of weights in lower precision or gathered from W > 1 processes; with `reshard_after_forward` those of
      two blocks, embeddings and head. With W > 1 and several micro-batches, 4 P of gradients that are not yet summed.
    - activations: N `activation_bytes_per_token` a block; with activation checkpointing b N hidden, and one block.
    - head: 4 + b bytes for each logit of a piece, (4 + b) vocabulary hidden, and b N hidden.

    Libraries, fragmentation and what kernels need for a moment come on top; a tenth is a fair guess.
    """
    numbers = parameter_count(config)
    width = DTYPES[recipe.system.dtype].itemsize
    tokens = recipe.system.rows * recipe.data.length
    micro_batches = recipe.batch_size // (recipe.system.rows * processes)
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    gathered = numbers
    if processes > 1 and recipe.system.reshard_after_forward:
        gathered = ends + 2 * (numbers - ends) // config.num_layers
    copies = width * gathered if processes > 1 or width < 4 else 0
    if processes > 1 and micro_batches > 1:
        copies += 4 * numbers
    block = tokens * activation_bytes_per_token(config, width)
    blocks = config.num_layers * block
    if recipe.system.activation_checkpointing:
        blocks = config.num_layers * tokens * width * config.hidden_size + block
    logits = min(LOGITS, tokens * config.vocab_size)
    head = (4 + width) * (logits + config.vocab_size * config.hidden_size) + width * tokens * config.hidden_size
    return Memory(math.ceil(16 * numbers / processes), copies, blocks, head)


def activation_bytes_per_token(config: CCQConfig, width: int) -> int:
    """Bytes that one block keeps of one token for its backward pass; `width` is that of a number of the computation.

    Counted are the inputs of products, convolutions, norms, activations and write rule: of the block, its input and
    that of the SwiGLU, both before and behind a norm, and four inner vectors of the SwiGLU; of the mixer, what is
    projected (queries and keys of K = heads x key size, values and output gate of U = heads x value size), twice more
    behind convolutions (of Mamba2 three times, because its step size multiplies values that the skip reads without it),
    unit queries and keys where there are any, the query of the read step, the decay, the output of the write rule, and,
    but for Mamba2, four times that in float32 inside the gated norm. States at chunk boundaries are left out.
    """
    hidden, inner = config.hidden_size, config.intermediate_size or 0
    keys, values = config.num_heads * config.head_dim, config.num_heads * config.value_head_dim
    block = width * ((4 if inner else 2) * hidden + 4 * inner)
    if config.backbone == "transformer":
        return block + width * 2 * (2 * keys + values)
    if config.backbone == "mamba2":
        keys = config.num_groups * config.head_dim
        convolved = values + 2 * keys
        mixer = width * (values + 4 * convolved + 3 * values)
        return block + mixer + (width * 3 * keys if config.read is not None else 0)
    mixer = width * (2 * keys + 2 * values + values) + 4 * 4 * values + width * values
    if config.short_convolution is not None:
        mixer += width * 2 * (2 * keys + values)
    if config.read is not None or config.backbone == "gated-deltanet":
        mixer += width * 2 * keys
    if config.read is not None:
        mixer += width * keys
    if config.backbone.startswith("gla"):
        mixer += 4 * 2 * keys
    return block + mixer


class Plan(NamedTuple):
    """What a run would be on these devices."""

    processes: int
    """One a device."""
    device: str
    parameters: int
    steps: int
    tokens: int
    memory: Memory
    training_flops: int
    """For one token."""
    peak: float
    """Operations a second of one device: of the table, or measured on this machine."""
    is_measured: bool
    hours: float
    """At `ASSUMED_UTILIZATION` of the peak on every device."""


def plan(recipe: Recipe, config: CCQConfig, *, processes: int, device: torch.device) -> Plan:
    """What the run would need on so many devices of this kind; nothing is trained.

    Raises:
        ValueError: the windows of a step cannot be dealt to so many.
    """
    check_micro_batches(recipe.batch_size, recipe.system.rows, processes)
    flops = training_flops_per_token(config, recipe.data.length)
    known = peak_flops(device)
    peak = known if known is not None else measured_flops(device, DTYPES[recipe.system.dtype])
    tokens = recipe.training.total_steps * recipe.training.tokens_per_step
    seconds = flops * tokens / (peak * ASSUMED_UTILIZATION * processes)
    return Plan(
        processes=processes,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        parameters=parameter_count(config),
        steps=recipe.training.total_steps,
        tokens=tokens,
        memory=memory_estimate(recipe, config, processes),
        training_flops=flops,
        peak=peak,
        is_measured=known is None,
        hours=seconds / 3600,
    )


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in products of square matrices, measured for a moment."""
    factor = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype, device=device)
    (factor @ factor).sum().item()
    products, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < _PRODUCT_SECONDS:
        (factor @ factor)[0, 0].item()
        products += 1
    return products * 2 * _PRODUCT_SIZE**3 / spent
