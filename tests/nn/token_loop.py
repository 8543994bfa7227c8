"""The mixers written a second time: one sequence, token by token, the covariance taken over all keys seen so far."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.nn import CurvatureConditionedQuery, GatedDeltaNet, GatedLinearAttention


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def covariance(keys: Tensor, centred: bool = True) -> Tensor:
    """keys [T, D] -> [D, D]"""
    if centred:
        keys = keys - keys.mean(0)
    return keys.T @ keys / len(keys)


def convolution(weight: Tensor, x: Tensor) -> Tensor:
    """x [T, channels] behind zeros, by torch's own depthwise convolution."""
    padded = F.pad(x.T.unsqueeze(0), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, groups=weight.shape[0])[0].T)


def gate_of(read: CurvatureConditionedQuery, presplit: Tensor, unit_query: Tensor, head: int) -> Tensor | float:
    """lambda of one token and head."""
    if isinstance(read.gate, float):
        return read.gate
    x = unit_query if read.gate == "head" else presplit
    value = 1 / (1 + torch.exp(-(read.gate_weight[head] @ x + read.gate_bias[head])))
    return value * read.gate_scale[head] if read.gate == "attached" else value


def mixer_loop(layer: GatedLinearAttention | GatedDeltaNet, x: Tensor) -> Tensor:
    """x [T, hidden], one sequence from its first token -> output [T, hidden]."""
    heads, read = layer.num_heads, layer.read
    delta = isinstance(layer, GatedDeltaNet)
    q, k, v = (x @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if delta or layer.has_convolution:
        q, k, v = (
            convolution(c.weight, y)
            for c, y in zip((layer.q_conv1d, layer.k_conv1d, layer.v_conv1d), (q, k, v), strict=True)
        )
    gate = x @ layer.g_proj.weight.T
    norm = layer.o_norm if delta else layer.g_norm_swish_gate
    rows = []
    size, value_size = q.shape[1] // heads, v.shape[1] // heads
    columns = []
    for h in range(heads):
        key_slice, value_slice = slice(h * size, (h + 1) * size), slice(h * value_size, (h + 1) * value_size)
        memory = torch.zeros(size, value_size, dtype=x.dtype)
        rows = []
        for t in range(len(x)):
            query, key, value = q[t, key_slice], k[t, key_slice], v[t, value_slice]
            keys = unit(k[: t + 1, key_slice])
            write_key = keys[t] if delta else key
            unit_query = unit(query)
            if delta or (read is not None and not read.keep_length):
                query = unit_query
            if read is not None and read.enabled:
                strength = gate_of(read, q[t], unit_query, h)
                query = query - strength * (covariance(keys, read.centred) @ query)
            if delta:
                step = F.softplus(layer.a_proj.weight[h] @ x[t] + layer.dt_bias[h])
                memory = torch.exp(-torch.exp(layer.A_log[h]) * step) * memory
                beta = 1 / (1 + torch.exp(-(layer.b_proj.weight[h] @ x[t])))
                memory = memory + torch.outer(write_key, beta * (value - memory.T @ write_key))
            else:
                inner, outer = layer.gk_proj
                logit = outer.weight[key_slice] @ (inner.weight @ x[t]) + outer.bias[key_slice]
                decay = (1 / (1 + torch.exp(-logit))) ** (1 / layer.gate_logit_normalizer)
                memory = decay.unsqueeze(1) * memory + torch.outer(write_key, value)
            out = memory.T @ query / math.sqrt(size)
            out = out / (out.square().mean() + norm.eps).sqrt() * norm.weight
            g = gate[t, value_slice]
            rows.append(out * g / (1 + torch.exp(-g)))
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1) @ layer.o_proj.weight.T
