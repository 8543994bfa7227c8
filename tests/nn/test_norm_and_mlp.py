"""The gated norms and the SwiGLU layer against their formulas in float64, written out; the norm of the residual stream
against torch's.
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from torch import nn

from ccq.nn import GatedGroupRMSNorm, RMSNormGated, SwiGLU
from ccq.nn.norm import ResidualRMSNorm


def norm_and_torchs() -> tuple[ResidualRMSNorm, nn.RMSNorm]:
    """With one weight, loaded from one into the other."""
    layer, plain = ResidualRMSNorm(6, eps=1e-3), nn.RMSNorm(6, eps=1e-3)
    with torch.no_grad():
        plain.weight.copy_(torch.randn(6))
    layer.load_state_dict(plain.state_dict())
    return layer, plain


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_residual_norm_is_torchs_norm_of_the_sum(added: bool, autocast: bool) -> None:
    """With the gradients of what both outputs go into; under autocast it is rounded as a linear map would."""
    layer, plain = norm_and_torchs()
    x, branch, gradient, elsewhere = (torch.randn(2, 3, 6) for _ in range(4))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        leaves = [each.clone().requires_grad_() for each in ((x, branch) if added else (x,))]
        y, stream = layer(*leaves)
        copies = [each.clone().requires_grad_() for each in leaves]
        total = copies[0] + copies[1] if added else copies[0]
        expected = plain(total)
        if autocast:
            expected = expected.bfloat16()
    gradient = gradient.to(y.dtype)
    assert y.dtype == expected.dtype and torch.equal(y, expected) and torch.equal(stream, total)
    found = torch.autograd.grad((y, stream), (*leaves, layer.weight), (gradient, elsewhere))
    theirs = torch.autograd.grad((expected, total), (*copies, plain.weight), (gradient, elsewhere))
    for ours, value in zip(found, theirs, strict=True):
        assert_close("gradient", ours, value, 1e-6)


def test_residual_norm_without_a_branch_hands_the_stream_on() -> None:
    layer, _ = norm_and_torchs()
    x = torch.randn(2, 3, 6)
    assert layer(x)[1] is x


def test_residual_norm_is_saved_as_torchs() -> None:
    layer, plain = norm_and_torchs()
    assert list(layer.state_dict()) == ["weight"] and torch.equal(layer.state_dict()["weight"], plain.weight)
    layer.reset_parameters()
    assert (layer.weight == 1).all()


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
    expected = (a / (1 + (-a).exp()) * b) @ down.T
    assert_close("output", layer(x), expected, 1e-6)
    assert_close("sum", layer.add_to(x, x), x.double() + expected, 1e-6)
