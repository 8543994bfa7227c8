"""The linear cross-entropy against torch's in float64, piece by piece and as a whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import assert_close
from torch import Tensor

from ccq.ops.linear_cross_entropy import linear_cross_entropy


def case(targets: int, hidden: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(targets, hidden, dtype=torch.float64, requires_grad=True)
    head = torch.randn(vocabulary, hidden, dtype=torch.float64, requires_grad=True)
    wanted = torch.randint(vocabulary, (targets,))
    # As the loader marks what does not count.
    weights = torch.rand(targets, dtype=torch.float64)
    ignored = torch.rand(targets) < 0.3
    return x, head, wanted.masked_fill(ignored, -100), weights.masked_fill(ignored, 0)


def reference(x: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(F.linear(x, head), targets, reduction="none", ignore_index=-100)
    return (each * weights).sum(), each


@given(targets=st.integers(1, 40), vocabulary=st.integers(2, 30), logits=st.sampled_from([1, 50, 200, 10_000]))
def test_losses_and_gradients_are_those_of_torch(targets: int, vocabulary: int, logits: int) -> None:
    arguments = case(targets, 7, vocabulary)
    total, each = linear_cross_entropy(*arguments, logits=logits)
    expected, expected_each = reference(*arguments)
    assert_close("total", total, expected, 1e-12)
    assert_close("each", each, expected_each, 1e-12)
    upstream = torch.randn((), dtype=torch.float64)
    ours = torch.autograd.grad(total * upstream, arguments[:2])
    theirs = torch.autograd.grad(expected * upstream, arguments[:2])
    for name, own, wanted in zip(("hidden", "head"), ours, theirs, strict=True):
        assert_close(name, own, wanted, 1e-11)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen: int) -> None:
    arguments = case(9, 5, 11)
    arguments[frozen].requires_grad_(False)
    total, _ = linear_cross_entropy(*arguments, logits=30)
    learned = arguments[1 - frozen]
    (own,) = torch.autograd.grad(total, learned)
    (wanted,) = torch.autograd.grad(reference(*arguments)[0], learned)
    assert_close("gradient", own, wanted, 1e-12)


def test_without_gradients_only_the_losses_are_computed() -> None:
    arguments = case(9, 5, 11)
    with torch.no_grad():
        total, each = linear_cross_entropy(*arguments, logits=30)
    assert not total.requires_grad
    assert_close("each", each, reference(*arguments)[1], 1e-12)


def test_low_precision_adds_up_in_float32() -> None:
    """bfloat16 against the same rounded inputs in float64: no further off than torch's own with all logits at once."""
    x, head, targets, weights = case(400, 32, 50)
    low = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in (x, head)]
    high = [tensor.detach().double().requires_grad_() for tensor in low]
    expected = reference(*high, targets, weights)[0]
    total, each = linear_cross_entropy(*low, targets, weights.float(), logits=50 * 64)
    assert total.dtype == each.dtype == torch.float32
    whole = F.cross_entropy(F.linear(*low).float(), targets, reduction="none", ignore_index=-100)
    rounded = (whole * weights.float()).sum()
    assert abs(total - expected) <= 2 * abs(rounded - expected) + 1e-6 * abs(expected)
    ours, theirs = torch.autograd.grad(total, low), torch.autograd.grad(rounded, low)
    wanted = torch.autograd.grad(expected, high)
    for name, own, other, exact in zip(("hidden", "head"), ours, theirs, wanted, strict=True):
        assert own.dtype == torch.bfloat16
        assert (own.double() - exact).norm() <= 2 * (other.double() - exact).norm(), name


def test_all_logits_are_never_there_at_once() -> None:
    """The largest tensor that is made while a loss of 1,000 targets is computed, seen by its operations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = function(*arguments, **(options or {}))
            if isinstance(made, Tensor):
                largest = max(largest, made.numel())
            return made

    x, head, targets, weights = case(1000, 4, 300)
    with Watch():
        linear_cross_entropy(x, head, targets, weights, logits=300 * 20).total.backward()
    assert largest == 300 * 20
