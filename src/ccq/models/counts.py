"""What a model of a configuration has and needs: parameters, state, arithmetic. No weights are made for it.

Legend: H heads, D key size and V value size per head.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from ccq.models.configuration import CCQConfig
from ccq.models.modeling import CCQForCausalLM
from ccq.nn.conv import ShortConvolution
from ccq.nn.read import ReadStep

_COUNT = 8  # bytes of a number of tokens
# Multiplications and additions of one token with a memory of D x V: decay 1, write 2, read 2; the delta rule reads
# once more, before it writes.
_MEMORY_OPERATIONS = {"gla": 5, "gla-hedgehog": 5, "gated-deltanet": 7, "mamba2": 5}


def parameter_count(config: CCQConfig) -> int:
    """All parameters, those of the read steps included."""
    model = _one_layer(config)
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    return model.parameter_count + (config.num_layers - 1) * block


def state_bytes(config: CCQConfig) -> int:
    """The size of what a model in bfloat16 keeps of one sequence, memories and statistics in float32. The transformer's
    grows with the sequence: given is that of `max_position_embeddings` tokens.
    """
    heads, size, value_size = config.num_heads, config.head_dim, config.value_head_dim
    if config.backbone == "transformer":
        key_heads = heads if config.num_kv_heads is None else config.num_kv_heads
        return config.num_layers * (2 * key_heads * (size + value_size) * config.max_position_embeddings + _COUNT)
    kept = 4 * heads * size * value_size
    for module in _one_layer(config).modules():
        if isinstance(module, ShortConvolution):
            kept += 2 * (module.kernel_size - 1) * module.channels
        elif isinstance(module, ReadStep):
            kept += module.state_bytes
    return config.num_layers * kept


def flops_per_token(config: CCQConfig, *, context: int | None = None) -> int:
    """Floating-point operations of one forward pass for one token; a multiplication and an addition count as two.

    Counted are the matrix products of projections, feature maps, gates and head, the convolutions, and what is done
    with the state, in the form of one token at a time: 5 D V a head for a memory that decays, is written and read,
    7 D V for the delta rule, 4 D^2 for the read step "ccq" and what `operations_per_token` says for others; 2 (D + V) a
    head and position for softmax attention over `context` positions, by default half of `max_position_embeddings`, the
    mean of such a sequence. Chunked forms do more arithmetic in fewer and larger products. A training step takes three
    times the forward pass.
    """
    model = _one_layer(config)
    block = model.model.layers[0]
    heads, size, value_size = config.num_heads, config.head_dim, config.value_head_dim
    operations = 2 * sum(m.weight.numel() for m in block.modules() if isinstance(m, (nn.Linear, ShortConvolution)))
    if config.backbone == "transformer":
        positions = config.max_position_embeddings // 2 if context is None else context
        operations += 2 * heads * (size + value_size) * positions
    else:
        operations += _MEMORY_OPERATIONS[config.backbone] * heads * size * value_size
    if config.backbone == "gla-hedgehog":
        # One map for queries and one for keys, half of the features each, applied to every head.
        operations += 2 * 2 * heads * size * (size // 2)
    for read in block.modules():
        if isinstance(read, ReadStep):
            operations += read.operations_per_token
    return config.num_layers * operations + 2 * model.lm_head.weight.numel()


def _one_layer(config: CCQConfig) -> CCQForCausalLM:
    """The model with one of its blocks, which are all alike, without memory for its weights."""
    config = copy.deepcopy(config)
    config.num_layers = 1
    if isinstance(config.gate, list):
        config.gate = config.gate[:1]
    with torch.device("meta"):
        return CCQForCausalLM(config).eval()
