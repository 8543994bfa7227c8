"""The norm of Mamba2 by its kernels on a GPU, at the sizes of its models.

Exact values are those of the formula in float64. An error may be at most 1.2 times that of the composition in PyTorch,
which computes in float32 and rounds once.
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers import relative_error
from torch import Tensor

from ccq.ops.gated_group_rms_norm import gated_group_rms_norm

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NAMES = ("y", "x", "gate", "weight", "values", "skip")


def draw(tokens: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """x, gate, weight, values, skip and the gradient that arrives, on a CPU."""
    x, gate, values, gradient = (torch.randn(2, tokens, size).to(dtype) for _ in range(4))
    return [x, gate, torch.randn(size), values, torch.randn(size), gradient]


def differentiate(inputs: list[Tensor], groups: int, device: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    *leaves, gradient = (x.to(device, dtype) for x in inputs)
    x, gate, weight, values, skip = (leaf.requires_grad_() for leaf in leaves)
    y = gated_group_rms_norm(x, gate, weight, groups=groups, eps=1e-5, values=values, skip=skip)
    return [y.detach().cpu(), *(each.cpu() for each in torch.autograd.grad(y, leaves, gradient))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "size", "groups"), [(700, 2048, 1), (3, 4096, 1), (150, 1536, 8), (9, 16_384, 1)])
def test_errors_and_that_two_runs_are_bit_equal(tokens: int, size: int, groups: int, dtype: torch.dtype) -> None:
    inputs = draw(tokens, size, dtype)
    found, again = (differentiate(inputs, groups, "cuda") for _ in range(2))
    plain, exact = differentiate(inputs, groups, "cpu"), differentiate(inputs, groups, "cpu", torch.float64)
    for name, ours, repeated, theirs, value in zip(NAMES, found, again, plain, exact, strict=True):
        assert torch.equal(ours, repeated) and ours.dtype == theirs.dtype, name
        error, allowed = relative_error(ours, value), 1.2 * relative_error(theirs, value) + 1e-6
        print(f"{name}: relative error {error:.2e} (allowed {allowed:.2e})")
        assert error <= allowed, name


def test_a_replayed_norm_is_the_eager_one() -> None:
    """As in decoding: kernels that start early, inputs that are overwritten between replays."""
    x, gate, weight, values, skip, _ = (each.cuda() for each in draw(4, 2048, torch.bfloat16))
    more = {"groups": 1, "eps": 1e-5, "values": values, "skip": skip}
    torch.utils.deterministic.fill_uninitialized_memory = False
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            gated_group_rms_norm(x, gate, weight, **more)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = gated_group_rms_norm(gated_group_rms_norm(2 * x, gate, weight, **more), gate, weight, **more)
        for _ in range(3):
            x.normal_()
            expected = gated_group_rms_norm(gated_group_rms_norm(2 * x, gate, weight, **more), gate, weight, **more)
            graph.replay()
            assert torch.equal(y, expected)
