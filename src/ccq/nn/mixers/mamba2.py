"""Mamba2 as a layer (Dao and Gu, arXiv:2405.21060), with or without a read step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ccq.nn.conv import ShortConvolution
from ccq.nn.mixers.common import (
    MixerOutput,
    MixerState,
    OverwritableState,
    check_call,
    check_read,
    convolve,
    draw_step_bias_,
    read_memory,
    split_heads,
)
from ccq.nn.norm import GatedGroupRMSNorm
from ccq.nn.projection import project
from ccq.nn.read import ReadStep
from ccq.ops.checks import accumulation_dtype
from ccq.ops.ssd import state_space_duality


class Mamba2(nn.Module):
    """Linear attention whose memory decays by one factor per head and token, with keys and queries that heads share.

    Names and shapes of the parameters are those of the official layer (its read step, `read`, has no counterpart
    there). In its words the queries are C, the keys B, the values dt * x; `head_dim` is its state size and
    `value_head_dim` its head size. The defaults are its sizes.

    num_heads
        By default as many as make the values twice as wide as the layer.
    num_groups
        Groups of heads that share queries and keys.
    read
        None leaves the backbone as it is, with raw queries. A read step is made for the groups: it sees the queries and
        keys of G groups, so `CurvatureConditionedQuery(num_groups, head_dim)`. This is experimental: the paper of the
        read step did not test it on Mamba2. With a read step the queries are unit vectors, unless it keeps their
        length, and here the length matters: D * x is added to what is read, and the norm behind sees the sum, so unit
        queries change the balance of the two. `keep_length=True` leaves it as Mamba2 has it.
    conv_size
        The kernel size of the causal convolution on x, B and C.
    min_a, max_a, dt_min, dt_max
        The decay at the start: log decay = -A * dt, dt = softplus(.. + dt_bias), with A uniform in [min_a, max_a] and
        softplus(dt_bias) log-uniform in [dt_min, dt_max].
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int = 128,
        value_head_dim: int = 64,
        *,
        read: ReadStep | None = None,
        num_groups: int = 1,
        conv_size: int = 4,
        min_a: float = 1.0,
        max_a: float = 16.0,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if num_heads is None:
            if 2 * hidden_size % value_head_dim:
                raise ValueError(
                    f"value_head_dim must divide 2 * hidden_size = {2 * hidden_size}, got {value_head_dim}; "
                    "or say how many heads there are with num_heads"
                )
            num_heads = 2 * hidden_size // value_head_dim
        if num_groups < 1 or num_heads % num_groups:
            raise ValueError(f"num_groups must divide the {num_heads} heads, got {num_groups}")
        if not 0 < min_a <= max_a or not 0 < dt_min <= dt_max:
            raise ValueError(
                "0 < min_a <= max_a and 0 < dt_min <= dt_max are needed; got "
                f"min_a={min_a}, max_a={max_a}, dt_min={dt_min}, dt_max={dt_max}"
            )
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_groups = num_groups
        self.min_a, self.max_a, self.dt_min, self.dt_max = min_a, max_a, dt_min, dt_max
        value_size, key_size = num_heads * value_head_dim, num_groups * head_dim
        self.sizes = (value_size, key_size, key_size)
        self.in_proj = nn.Linear(hidden_size, 2 * value_size + 2 * key_size + num_heads, bias=False)
        self.conv1d = ShortConvolution(sum(self.sizes), conv_size, bias=True)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        for parameter in (self.A_log, self.D, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.reset_parameters()
        self.norm = GatedGroupRMSNorm(value_size, groups=num_groups, eps=norm_eps)
        self.out_proj = nn.Linear(value_size, hidden_size, bias=False)
        self.read = check_read(read, num_groups, head_dim, "groups")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw A and the step sizes anew, and D = 1: the layer's own parameters, not those of the layers inside."""
        self.A_log.copy_(torch.empty_like(self.A_log, dtype=torch.float32).uniform_(self.min_a, self.max_a).log())
        self.D.fill_(1)
        draw_step_bias_(self.dt_bias, self.dt_min, self.dt_max)

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
        gate, inputs, step = self.in_proj(x).split((self.sizes[0], sum(self.sizes), self.num_heads), -1)
        (inputs,), convolution = convolve((self.conv1d,), (inputs,), state, mask, cu_seqlens)
        v, k, q = inputs.split(self.sizes, -1)
        q, k = split_heads(q, self.num_groups), split_heads(k, self.num_groups)
        dtype = accumulation_dtype(x.dtype)
        step = F.softplus(step.to(dtype) + self.dt_bias.to(dtype))
        log_decay = -torch.exp(self.A_log.to(dtype)) * step

        statistics = None
        if self.read is not None:
            found = self.read(
                q,
                k,
                log_decay=split_heads(log_decay, self.num_groups),
                statistics=None if state is None else state.statistics,
                mask=mask,
                cu_seqlens=cu_seqlens,
            )
            q, statistics = found.query, found.statistics
            k = k if found.keys is None else found.keys
        values = split_heads(v, self.num_heads)
        output, memory = read_memory(
            state_space_duality,
            q,
            k,
            (values * step.unsqueeze(-1)).to(v.dtype),
            log_decay,
            scale=1.0,
            state=None if state is None else state.memory,
            overwrite_state=isinstance(state, OverwritableState),
            cu_seqlens=cu_seqlens,
            mask=mask,
        )
        skip = self.D.unsqueeze(-1).expand(-1, values.shape[-1]).flatten()
        output = self.norm(output.flatten(2), gate, values=v, skip=skip)
        (output,) = project(output, self.out_proj)
        return MixerOutput(output, MixerState(memory, statistics, convolution))
