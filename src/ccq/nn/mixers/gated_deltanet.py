"""Gated DeltaNet as a layer (Yang et al., arXiv:2412.06464), with or without a read step."""

from __future__ import annotations

import torch
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
from ccq.nn.norm import RMSNormGated
from ccq.nn.projection import plain_weights, project
from ccq.nn.read import ReadStep
from ccq.ops import joint_linear, thin_linear
from ccq.ops.gated_delta_rule import gated_delta_rule
from ccq.ops.l2_norm import l2_norm
from ccq.ops.log_decay import delta_gates


class GatedDeltaNet(nn.Module):
    """Linear attention whose memory decays by a factor per head and token and corrects, rather than adds to, what it
    holds for a key.

    Names and shapes of the parameters are those of flash-linear-attention's layer of this name (its read step,
    `read`, has no counterpart there). Queries and keys are unit vectors with and without a read step, so keeping the
    length of the query changes nothing here.

    read
        None leaves the backbone as it is.
    conv_size
        The kernel size of the causal convolutions on q, k and v.
    max_a, dt_min, dt_max
        The decay at the start: log decay = -A * softplus(a_proj(x) + dt_bias), with A uniform in (0, max_a] and
        softplus(dt_bias) log-uniform in [dt_min, dt_max]. The defaults are flash-linear-attention's; small models
        learn recall from slower decay only.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        value_head_dim: int,
        *,
        read: ReadStep | None = None,
        conv_size: int = 4,
        max_a: float = 16.0,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if not max_a > 0 or not 0 < dt_min <= dt_max:
            raise ValueError(
                f"max_a must be above 0 and 0 < dt_min <= dt_max; got max_a={max_a}, dt_min={dt_min}, dt_max={dt_max}"
            )
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        key_size, value_size = num_heads * head_dim, num_heads * value_head_dim
        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.max_a, self.dt_min, self.dt_max = max_a, dt_min, dt_max
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.reset_parameters()
        self.q_conv1d = ShortConvolution(key_size, conv_size)
        self.k_conv1d = ShortConvolution(key_size, conv_size)
        self.v_conv1d = ShortConvolution(value_size, conv_size)
        self.g_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.o_norm = RMSNormGated(value_head_dim, eps=norm_eps)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)
        self.read = check_read(read, num_heads, head_dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw A and the step sizes anew: the layer's own parameters, not those of the layers inside."""
        # 1 - rand is in (0, 1], so the logarithm is finite.
        uniform = torch.rand(self.num_heads, dtype=torch.float32, device=self.A_log.device)
        self.A_log.copy_(torch.log(self.max_a * (1 - uniform)))
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
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        *inputs, gate, steps, strengths = self._project(x)
        (presplit_query, k, v), convolution = convolve(convolutions, tuple(inputs), state, mask, cu_seqlens)
        q, k, v = (split_heads(y, self.num_heads) for y in (presplit_query, k, v))
        k = l2_norm(k)
        # A read step normalises the query itself, and it is not normalised again behind it.
        by_read = self.read is not None and not self.read.keep_length
        if not by_read:
            q = l2_norm(q)
        log_decay, beta = delta_gates(steps, strengths, self.A_log, self.dt_bias)

        statistics = None
        if self.read is not None:
            found = self.read(
                q,
                k,
                presplit_query=None if by_read else presplit_query,
                log_decay=log_decay,
                statistics=None if state is None else state.statistics,
                mask=mask,
                cu_seqlens=cu_seqlens,
                normalized="keys" if by_read else True,
            )
            q, statistics = found.query, found.statistics
            k = k if found.keys is None else found.keys
        output, memory = read_memory(
            gated_delta_rule,
            q,
            k,
            v,
            log_decay,
            beta,
            state=None if state is None else state.memory,
            overwrite_state=isinstance(state, OverwritableState),
            cu_seqlens=cu_seqlens,
            mask=mask,
        )
        output = self.o_norm(output, split_heads(gate, self.num_heads))
        (output,) = project(output.flatten(2), self.o_proj)
        return MixerOutput(output, MixerState(memory, statistics, convolution))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values and output gate before the head split, a_proj(x) and b_proj(x) [B, T, H]."""
        wide = (self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        thin = (self.a_proj, self.b_proj)
        weights = plain_weights(*wide, *thin)
        if weights is not None and joint_linear.is_chosen(x, weights):
            # The logits of the gates keep the digits that they have in more tokens.
            return joint_linear.joint_linear(x, weights, wide=len(thin))
        projected = tuple(linear(x) for linear in wide)
        weights = plain_weights(*thin)
        # Without the kernels, one product for both wins nothing.
        if weights is None or not thin_linear.is_chosen(x, 2 * self.num_heads):
            return *projected, self.a_proj(x), self.b_proj(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return *projected, *thin_linear.thin_linear(x, torch.cat(weights)).chunk(2, dim=-1)
