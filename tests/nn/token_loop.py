"""The mixers written a second time: one sequence, token by token, the covariance taken over all keys seen so far."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ccq.nn import CurvatureConditionedQuery, GatedDeltaNet, GatedLinearAttention, Mamba2, SoftmaxAttention


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


def hedgehog(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """x [T, H * D] -> [T, H * D]: exp(2y) and exp(-2y) of every head over their sum."""
    heads = x.shape[1] // weight.shape[1]
    features = []
    for part in x.chunk(heads, 1):
        y = part @ weight.T + bias
        grown = torch.cat((torch.exp(2 * y), torch.exp(-2 * y)), 1)
        features.append(grown / grown.sum(1, keepdim=True))
    return torch.cat(features, 1)


def mixer_loop(layer: GatedLinearAttention | GatedDeltaNet | Mamba2 | SoftmaxAttention, x: Tensor) -> Tensor:
    """x [T, hidden], one sequence from its first token -> output [T, hidden]."""
    if isinstance(layer, Mamba2):
        return mamba2_loop(layer, x)
    if isinstance(layer, SoftmaxAttention):
        return attention_loop(layer, x)
    heads, read = layer.num_heads, layer.read
    delta = isinstance(layer, GatedDeltaNet)
    q, k, v = (x @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if delta or layer.has_convolution:
        q, k, v = (
            convolution(c.weight, y)
            for c, y in zip((layer.q_conv1d, layer.k_conv1d, layer.v_conv1d), (q, k, v), strict=True)
        )
    presplit = q
    scale = 1 / math.sqrt(q.shape[1] // heads)
    if not delta and layer.has_feature_map:
        q, k = (hedgehog(f.weight, f.bias, y) for f, y in ((layer.feature_map_q, q), (layer.feature_map_k, k)))
        scale = q.shape[1] // heads
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
                strength = gate_of(read, presplit[t], unit_query, h)
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
            out = memory.T @ query * scale
            out = out / (out.square().mean() + norm.eps).sqrt() * norm.weight
            g = gate[t, value_slice]
            rows.append(out * g / (1 + torch.exp(-g)))
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1) @ layer.o_proj.weight.T


def mamba2_loop(layer: Mamba2, x: Tensor) -> Tensor:
    heads, groups, read = layer.num_heads, layer.num_groups, layer.read
    rows = x @ layer.in_proj.weight.T
    step = F.softplus(rows[:, -heads:] + layer.dt_bias)
    width = layer.out_proj.weight.shape[1]
    gate, inputs = rows[:, :width], rows[:, width:-heads]
    weight, padded = layer.conv1d.weight, F.pad(inputs.T.unsqueeze(0), (layer.conv1d.weight.shape[-1] - 1, 0))
    inputs = F.silu(F.conv1d(padded, weight, layer.conv1d.bias, groups=weight.shape[0])[0].T)
    size, value_size = (inputs.shape[1] - width) // (2 * groups), width // heads
    values, shared = inputs[:, :width], inputs[:, width:]
    columns = []
    for h in range(heads):
        group = h // (heads // groups)
        k = shared[:, group * size : (group + 1) * size]
        q = shared[:, (groups + group) * size : (groups + group + 1) * size]
        v = values[:, h * value_size : (h + 1) * value_size]
        memory = torch.zeros(size, value_size, dtype=x.dtype)
        column = []
        for t in range(len(x)):
            query = q[t]
            if read is not None and not read.keep_length:
                query = unit(query)
            if read is not None and read.enabled:
                strength = gate_of(read, shared[t, groups * size :], unit(q[t]), group)
                query = query - strength * (covariance(unit(k[: t + 1]), read.centred) @ query)
            memory = torch.exp(-torch.exp(layer.A_log[h]) * step[t, h]) * memory + torch.outer(k[t], step[t, h] * v[t])
            column.append(memory.T @ query + layer.D[h] * v[t])
        columns.append(torch.stack(column))
    gated = torch.cat(columns, 1) * gate / (1 + torch.exp(-gate))
    normed = [part / (part.square().mean(1, keepdim=True) + layer.norm.eps).sqrt() for part in gated.chunk(groups, 1)]
    return torch.cat(normed, 1) * layer.norm.weight @ layer.out_proj.weight.T


def attention_loop(layer: SoftmaxAttention, x: Tensor) -> Tensor:
    heads, size = layer.num_heads, layer.head_dim
    q, k, v = (x @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    pairs = torch.arange(size // 2, dtype=x.dtype)
    # Channel i and channel i + D / 2 are the real and the imaginary part of one number, which turns with the position.
    turn = torch.polar(
        torch.ones(len(x), size // 2, dtype=x.dtype),
        torch.arange(len(x), dtype=x.dtype).unsqueeze(1) * layer.rope_base ** (-2 * pairs / size),
    )

    def rotated(y: Tensor) -> Tensor:
        z = torch.complex(y[:, : size // 2], y[:, size // 2 :]) * turn
        return torch.cat((z.real, z.imag), 1)

    columns = []
    for h in range(heads):
        shared = h // (heads // layer.num_kv_heads)
        query = rotated(q[:, h * size : (h + 1) * size])
        key = rotated(k[:, shared * size : (shared + 1) * size])
        value = v[:, shared * layer.value_head_dim : (shared + 1) * layer.value_head_dim]
        rows = []
        for t in range(len(x)):
            weights = torch.exp(key[: t + 1] @ query[t] / math.sqrt(size))
            rows.append(weights @ value[: t + 1] / weights.sum())
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1) @ layer.o_proj.weight.T
