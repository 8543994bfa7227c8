"""The feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from ccq.nn.projection import add_projection, gated_projection, project


class SwiGLU(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)) (Shazeer, 2020), without biases; named as in
    flash-linear-attention.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        (y,) = project(gated_projection(x, self.gate_proj, self.up_proj), self.down_proj)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), both [..., hidden]."""
        return add_projection(residual, gated_projection(x, self.gate_proj, self.up_proj), self.down_proj)
