"""The norm of Mamba2 against its formula in float64, differentiated by autograd."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import assert_close
from torch import Tensor

from ccq.ops.gated_group_rms_norm import gated_group_rms_norm

EPS = 1e-3
NAMES = ("x", "gate", "weight", "values", "skip")


def draw(size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, gate, weight, values and skip."""
    x, gate, values = (torch.randn(2, 5, size).to(dtype) for _ in range(3))
    return [x, gate, torch.randn(size), values, torch.randn(size)]


def formula(inputs: list[Tensor], groups: int, skip: bool) -> Tensor:
    x, gate, weight, values, factor = inputs
    z = (x + factor * values if skip else x) * gate / (1 + torch.exp(-gate))
    parts = [part / torch.sqrt((part * part).mean(-1, keepdim=True) + EPS) for part in z.chunk(groups, -1)]
    return torch.cat(parts, -1) * weight


def call(inputs: list[Tensor], groups: int, skip: bool) -> Tensor:
    x, gate, weight, values, factor = inputs
    more = {"values": values, "skip": factor} if skip else {}
    return gated_group_rms_norm(x, gate, weight, groups=groups, eps=EPS, **more)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_outputs_and_gradients(groups: int, skip: bool, dtype: torch.dtype) -> None:
    inputs = draw(12, dtype)
    upstream = torch.randn(2, 5, 12).to(dtype)
    ours = [each.clone().requires_grad_() for each in inputs]
    exact = [each.double().requires_grad_() for each in inputs]
    y, expected = call(ours, groups, skip), formula(exact, groups, skip)
    assert y.dtype == dtype
    # Only what comes out is rounded.
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    assert_close("y", y.detach(), expected.detach(), tolerance)
    used = 5 if skip else 3
    found = torch.autograd.grad(y, ours[:used], upstream)
    for name, mine, value, actual in zip(
        NAMES, ours, torch.autograd.grad(expected, exact[:used], upstream.double()), found, strict=False
    ):
        assert actual.dtype == mine.dtype, name
        assert_close(name, actual, value, max(tolerance, 1e-6) if name in ("weight", "skip") else tolerance)


def test_only_inputs_are_kept() -> None:
    inputs = [each.requires_grad_() for each in draw(12, torch.bfloat16)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        call(inputs, 3, True)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs} and len(kept) == 5


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_compiles_without_a_break_and_agrees() -> None:
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs, results = draw(12, torch.float32), []
    for function in (call, compiled):
        leaves = [each.clone().requires_grad_() for each in inputs]
        y = function(leaves, 3, True)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        assert_close("compiled", ours, theirs, 1e-6)
