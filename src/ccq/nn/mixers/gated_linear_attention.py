"""Gated linear attention as a layer (Yang et al., arXiv:2312.06635), with or without a read step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ccq.nn.conv import ShortConvolution
from ccq.nn.feature_map import HedgehogFeatureMap
from ccq.nn.mixers.common import (
    MixerOutput,
    MixerState,
    OverwritableState,
    check_call,
    check_read,
    convolve,
    read_memory,
    split_heads,
)
from ccq.nn.norm import RMSNormGated
from ccq.nn.projection import is_exactly, project
from ccq.nn.read import ReadStep
from ccq.ops.gla import gated_linear_attention
from ccq.ops.log_decay import log_sigmoid_decay, low_rank_is_chosen, low_rank_log_decay

FEATURE_MAPS = (None, "hedgehog")


class GatedLinearAttention(nn.Module):
    """Linear attention whose memory decays by a learned factor per key channel and token.

    Names and shapes of the parameters are those of flash-linear-attention's layer of this name (its read step,
    `read`, has no counterpart there).

    read
        None leaves the backbone as it is, with raw queries. With a read step the queries are unit vectors, unless it
        keeps their length.
    short_convolution
        The kernel size of causal convolutions on q, k and v, or None for none.
    gate_low_rank_dim
        The inner size of the projection that gives the decay.
    gate_logit_normalizer
        log decay = logsigmoid(..) / gate_logit_normalizer: the larger, the longer the memory at the start.
    feature_map
        "hedgehog" writes and reads learned features of the keys and queries in place of themselves: GLA-Hedgehog. The
        heads share one map for q and one for k. The features of a head are as many as its channels, so that memory and
        decay have the sizes of plain GLA. The read step sees the features, its gate the query before the head split.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        value_head_dim: int,
        *,
        read: ReadStep | None = None,
        short_convolution: int | None = None,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16,
        feature_map: str | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {', '.join(map(repr, FEATURE_MAPS))}; got {feature_map!r}")
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.gate_logit_normalizer = gate_logit_normalizer
        key_size, value_size = num_heads * head_dim, num_heads * value_head_dim
        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.g_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.has_convolution = short_convolution is not None
        if short_convolution is not None:
            self.q_conv1d = ShortConvolution(key_size, short_convolution)
            self.k_conv1d = ShortConvolution(key_size, short_convolution)
            self.v_conv1d = ShortConvolution(value_size, short_convolution)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False), nn.Linear(gate_low_rank_dim, key_size)
        )
        self.has_feature_map = feature_map is not None
        if feature_map is not None:
            self.feature_map_q = HedgehogFeatureMap(head_dim, head_dim)
            self.feature_map_k = HedgehogFeatureMap(head_dim, head_dim)
        # Features are 1 / D in size, and so is q . k. Without this factor the eps of the norm behind the memory would
        # be what it sees of the first tokens.
        self.scale = float(head_dim) if feature_map is not None else head_dim**-0.5
        self.g_norm_swish_gate = RMSNormGated(value_head_dim, eps=norm_eps)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)
        self.read = check_read(read, num_heads, head_dim)

    def forward(
        self,
        x: Tensor,
        *,
        state: MixerState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> MixerOutput:
        """x [B, T, hidden], mask [B, T] (1 = real token), cu_seqlens [N + 1] (packed documents, B = 1) -> output [B,
        T, hidden] and state.

        Training, prefill and decode are this one call; `state` continues the sequences where an earlier call left them.
        """
        check_call(x, self.hidden_size, self.read, state, mask, cu_seqlens)
        q, k, v, gate, log_decay = self._project(x)
        convolution = None
        if self.has_convolution:
            convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            (q, k, v), convolution = convolve(convolutions, (q, k, v), state, mask, cu_seqlens)
        presplit_query = q if self.has_feature_map else None
        q, k, v = (split_heads(y, self.num_heads) for y in (q, k, v))
        if self.has_feature_map:
            q, k = self.feature_map_q(q), self.feature_map_k(k)
        log_decay = split_heads(log_decay, self.num_heads)

        statistics = None
        if self.read is not None:
            found = self.read(
                q,
                k,
                presplit_query=presplit_query,
                log_decay=log_decay,
                statistics=None if state is None else state.statistics,
                mask=mask,
                cu_seqlens=cu_seqlens,
            )
            q, statistics = found.query, found.statistics
            k = k if found.keys is None else found.keys
        output, memory = read_memory(
            gated_linear_attention,
            q,
            k,
            v,
            log_decay,
            scale=self.scale,
            state=None if state is None else state.memory,
            overwrite_state=isinstance(state, OverwritableState),
            cu_seqlens=cu_seqlens,
            mask=mask,
        )
        output = self.g_norm_swish_gate(output, split_heads(gate, self.num_heads))
        (output,) = project(output.flatten(2), self.o_proj)
        return MixerOutput(output, MixerState(memory, statistics, convolution))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values, output gate and log decay before the head split."""
        linears = (self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        if not is_exactly(self.gk_proj, nn.Sequential):
            return *(linear(x) for linear in linears), log_sigmoid_decay(self.gk_proj(x), self.gate_logit_normalizer)
        *projected, low_rank = project(x, *linears, self.gk_proj[0])
        return *projected, self._log_decay(low_rank)

    def _log_decay(self, low_rank: Tensor) -> Tensor:
        """From gk_proj[0](x), [B, T, rank] -> [B, T, H * D]."""
        linear: Any = self.gk_proj[1]
        if is_exactly(linear, nn.Linear) and low_rank_is_chosen(low_rank, linear.weight, linear.bias):
            return low_rank_log_decay(low_rank, linear.weight, linear.bias, self.gate_logit_normalizer)
        return log_sigmoid_decay(linear(low_rank), self.gate_logit_normalizer)
