"""The short convolution in front of a mixer, with a state, for dense, padded and packed input.

Legend: B rows, N sequences (N = B without cu_seqlens), T tokens, W kernel size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ccq.nn.projection import is_exactly
from ccq.ops.checks import check_input, check_sequences, check_shape
from ccq.ops.short_convolution import is_chosen


class ShortConvolution(nn.Module):
    """Causal depthwise convolution followed by SiLU: y_t = silu(bias + sum_i weight[:, 0, i] * x_{t - (W - 1) + i}).

    The weight [channels, 1, W] has the shape and name of flash-linear-attention's layer of this name; a bias
    [channels] is there on request (Mamba2). The state holds the last W - 1 real inputs of each sequence, oldest first,
    zeros where fewer have been seen.
    """

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"kernel_size must be at least 1, got {kernel_size}")
        self.channels = channels
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The default of torch.nn.Conv1d for one input channel per group."""
        bound = 1 / math.sqrt(self.kernel_size)
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    def forward(
        self, x: Tensor, *, state: Tensor | None = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, channels], state [N, W - 1, channels], mask [B, T], cu_seqlens [N + 1] -> (y like x, state).

        Masked tokens are skipped as if they were not there: they enter no window and no state, and their output is 0.
        Documents of packed input do not see each other. The returned state continues each sequence at its next real
        token.
        """
        check_input("x", x, ("B", "T", self.channels))
        sequences, mask, boundaries = check_sequences(x, cu_seqlens, mask)
        length = self.kernel_size - 1
        shape = (sequences, length, self.channels)
        if state is None:
            history = x.new_zeros(shape)
        else:
            check_shape("state", state, shape)
            history = state = state.to(x.dtype)
        fused = is_chosen(x, self.kernel_size)
        if boundaries is not None and cu_seqlens is not None:
            if fused:
                return self._fused(x, state, boundaries), _behind_documents(x, history, cu_seqlens)
            return self._packed(x, history, cu_seqlens)
        if mask is not None:
            return self._padded(x, history, state, mask)
        if fused:
            return self._fused(x, state), torch.cat((history, x[:, -length:]), 1)[:, -length:]
        window = torch.cat((history, x), 1)
        return self._convolve(window), window[:, x.shape[1] :]

    def _fused(self, x: Tensor, state: Tensor | None, boundaries: list[int] | None = None) -> Tensor:
        """x [B, T, channels] behind the state, in one kernel."""
        y: Tensor = torch.ops.ccq.short_convolution(x, self.weight.squeeze(1), self.bias, state, boundaries)
        return y

    def _convolve(self, window: Tensor) -> Tensor:
        """[B, W - 1 + T, channels] -> [B, T, channels].

        W multiply-adds of shifted views: on a CPU, forward and backward take two thirds of the time of a depthwise
        F.conv1d with 64 channels and a third with 192 (B 8, T 256, W 4, one thread), because nothing is transposed.
        """
        tokens = window.shape[1] - self.kernel_size + 1
        taps = self.weight.to(window.dtype).squeeze(1).t().contiguous().unbind(0)
        y = window[:, :tokens] * taps[0]
        if self.bias is not None:
            y = y + self.bias.to(window.dtype)
        for i, tap in enumerate(taps[1:], 1):
            y = torch.addcmul(y, window[:, i : i + tokens], tap)
        return F.silu(y)

    def _padded(self, x: Tensor, history: Tensor, state: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Roll every row so that its real tokens come first, convolve behind the state, and roll back."""
        tokens = x.shape[1]
        if tokens == 0:
            return x, history
        first = mask.to(torch.int64).argmax(1, keepdim=True)
        place = torch.arange(tokens, device=x.device)
        rolled = _take(x, (place + first) % tokens)
        window = torch.cat((history, rolled), 1)
        y = self._fused(rolled, state) if is_chosen(x, self.kernel_size) else self._convolve(window)
        y = _take(y, (place - first) % tokens)
        last = mask.sum(1, keepdim=True) + torch.arange(self.kernel_size - 1, device=x.device)
        return y.masked_fill(~mask.unsqueeze(-1), 0), _take(window, last)

    def _packed(self, x: Tensor, state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Lay the documents out one behind the other, each with its own history of W - 1 inputs in front."""
        history = self.kernel_size - 1
        sequences, tokens = state.shape[0], x.shape[1]
        ends = cu_seqlens[1:].to(torch.int64)
        token = torch.arange(tokens, device=x.device)
        # The document of a token is the number of documents that have ended: right for empty ones too.
        place = token + history * torch.searchsorted(ends, token, right=True)
        document = torch.arange(sequences, device=x.device).unsqueeze(1)
        offset = torch.arange(history, device=x.device)
        before = cu_seqlens[:-1].to(torch.int64).unsqueeze(1) + history * document + offset
        after = ends.unsqueeze(1) + history * document + offset
        # `order` says which row of (all histories, all tokens) lies at each place of the layout.
        order = torch.empty(tokens + history * sequences, dtype=torch.int64, device=x.device)
        order = order.index_put((place + history,), token + history * sequences)
        order = order.index_put((before,), history * document + offset)
        window = torch.cat((state.flatten(0, 1), x[0]))[order]
        if tokens == 0:
            return x, window[after]
        return self._convolve(window.unsqueeze(0))[:, place], window[after]

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}, bias={self.bias is not None}"


def convolve_token_(
    convolutions: Sequence[ShortConvolution], inputs: Sequence[Tensor], states: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """Run each convolution on one token of every sequence, x [N, 1, channels], with all states overwritten, in one
    kernel; None, and nothing done, where there is none for it.
    """
    width = convolutions[0].kernel_size
    for convolution, x, state in zip(convolutions, inputs, states, strict=True):
        alike = convolution.bias is None and convolution.kernel_size == width
        # Others are refused by the layer itself.
        fits = x.shape[1:] == (1, convolution.channels) and state.shape == (len(x), width - 1, convolution.channels)
        if not (alike and fits and is_exactly(convolution, ShortConvolution) and is_chosen(x, width)):
            return None
        if torch.is_grad_enabled() or state.requires_grad or state.dtype != x.dtype or not state.is_contiguous():
            return None
    weights = [convolution.weight.squeeze(1) for convolution in convolutions]
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    torch.ops.ccq.short_convolution_token_(list(inputs), weights, list(states), outputs)
    return tuple(outputs)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, X], index [B, S] -> [B, S, X]: token index[b, s] of row b."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def _behind_documents(x: Tensor, history: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The last inputs of each document of x [1, T, channels] behind its `history` [N, W - 1, channels]."""
    begin, end = (edge.to(torch.int64).unsqueeze(1) for edge in (cu_seqlens[:-1], cu_seqlens[1:]))
    length = history.shape[1]
    token = end - length + torch.arange(length, device=x.device)
    earlier = history.gather(1, (token - begin + length).clamp(max=length - 1).unsqueeze(-1).expand_as(history))
    return torch.where((token < begin).unsqueeze(-1), earlier, x[0][token.clamp(min=0)])
