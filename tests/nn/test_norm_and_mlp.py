"""The gated norms and the SwiGLU layer against their formulas in float64, written out."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close

from ccq.nn import GatedGroupRMSNorm, RMSNormGated, SwiGLU


def test_gated_norm() -> None:
    layer = RMSNormGated(6, eps=1e-3)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6))
    x, gate = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 4, 6)
    wide, g = x.double(), gate.double()
    expected = (
        wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight.double() * g / (1 + (-g).exp())
    )
    assert_close("float32", layer(x, gate), expected, 1e-6)
    half = layer(x.half(), gate.half())
    assert half.dtype == torch.float16
    # Computed in float32: the error is that of rounding the input and the result.
    assert_close("float16", half, expected, 1e-3)


@pytest.mark.parametrize("groups", [1, 3])
def test_gated_group_norm(groups: int) -> None:
    layer = GatedGroupRMSNorm(6, groups=groups, eps=1e-3)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6))
    x, gate = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    g = gate.double()
    gated = x.double() * g / (1 + (-g).exp())
    parts = [part / (part.square().mean(-1, keepdim=True) + 1e-3).sqrt() for part in gated.chunk(groups, -1)]
    expected = torch.cat(parts, -1) * layer.weight.double()
    assert_close("float32", layer(x, gate), expected, 1e-6)
    half = layer(x.half(), gate.half())
    assert half.dtype == torch.float16
    assert_close("float16", half, expected, 1e-3)
    with pytest.raises(ValueError, match="groups must divide size, got 4 groups of 6"):
        GatedGroupRMSNorm(6, groups=4)


def test_swiglu() -> None:
    layer = SwiGLU(5, 7)
    x = torch.randn(2, 3, 5)
    gate, up, down = (m.weight.double() for m in (layer.gate_proj, layer.up_proj, layer.down_proj))
    a, b = x.double() @ gate.T, x.double() @ up.T
    assert_close("output", layer(x), (a / (1 + (-a).exp()) * b) @ down.T, 1e-6)
