"""The short convolution against a loop over the tokens of each sequence, for every kind of input and every cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close
from torch import Tensor

from ccq.nn import ShortConvolution, conv
from ccq.ops.short_convolution import MAX_KERNEL_SIZE

CHANNELS = 5


class Way(NamedTuple):
    dtype: torch.dtype
    tolerance: float
    """Relative error allowed to outputs."""


@pytest.fixture(params=["composed", "by the kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """What holds in PyTorch in float64 holds around the kernels, which compute in float32, on a GPU or in Triton's
    interpreter.
    """
    if request.param == "composed":
        yield Way(torch.float64, 1e-14)
        return
    pytest.importorskip("triton")
    monkeypatch.setattr(conv, "is_chosen", lambda x, width: 1 < width <= MAX_KERNEL_SIZE and x.numel() > 0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield Way(torch.float32, 1e-6)


def loop(weight: Tensor, x: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence x [T, C] behind its history [W - 1, C], token by token in float64."""
    width = weight.shape[-1]
    weight, seen = weight.double(), list(history) + list(x)
    y = [F.silu(sum(weight[:, 0, i] * seen[t + i].double() for i in range(width))) for t in range(len(x))]
    return torch.stack(y) if y else x, torch.stack(seen[len(seen) - width + 1 :]) if width > 1 else history


def make(width: int, way: Way) -> ShortConvolution:
    return ShortConvolution(CHANNELS, width).to(way.dtype)


def random_state(rows: int, width: int, way: Way) -> Tensor:
    return torch.randn(rows, width - 1, CHANNELS, dtype=way.dtype)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 9])
def test_dense_equals_the_loop(width: int, tokens: int, way: Way) -> None:
    layer = make(width, way)
    x, state = torch.randn(2, tokens, CHANNELS, dtype=way.dtype), random_state(2, width, way)
    y, after = layer(x, state=state)
    for row in range(2):
        expected, last = loop(layer.weight, x[row], state[row])
        assert_close("y", y[row], expected, way.tolerance)
        assert torch.equal(after[row], last)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_padding_is_skipped_wherever_it_lies(width: int, way: Way) -> None:
    """Left, right, both, none, nothing but padding, and fewer real tokens than the window is wide."""
    spans = [(0, 7), (3, 7), (0, 4), (2, 5), (3, 4), (0, 0), (5, 7), (0, 1)]
    layer = make(width, way)
    mask = torch.zeros(len(spans), 7, dtype=torch.int64)
    x = torch.randn(len(spans), 7, CHANNELS, dtype=way.dtype, requires_grad=True)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1
    for state in (None, random_state(len(spans), width, way)):
        y, after = layer(x, state=state, mask=mask)
        (x_gradient,) = torch.autograd.grad(y.square().sum() + after.sum(), x)
        before = torch.zeros(len(spans), width - 1, CHANNELS, dtype=way.dtype) if state is None else state
        results = [loop(layer.weight, x[r, a:b], before[r]) for r, (a, b) in enumerate(spans)]
        (expected_gradient,) = torch.autograd.grad(sum(o.square().sum() + s.sum() for o, s in results), x)
        for row, (start, end) in enumerate(spans):
            assert_close("y", y[row, start:end], results[row][0], way.tolerance)
            assert torch.equal(after[row], results[row][1])
        assert not y[mask == 0].any()
        assert_close("dx", x_gradient, expected_gradient, 10 * way.tolerance)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("boundaries", [[0, 3, 3, 4, 11, 11], [0, 0, 2], [0, 0, 0], [0], [0, 6]])
def test_packed_documents_are_separate(width: int, boundaries: list[int], way: Way) -> None:
    layer = make(width, way)
    x = torch.randn(1, boundaries[-1], CHANNELS, dtype=way.dtype)
    state = random_state(len(boundaries) - 1, width, way)
    for before in (None, state):
        y, after = layer(x, state=before, cu_seqlens=torch.tensor(boundaries))
        assert y.shape == x.shape
        assert after.shape == state.shape
        for n, (start, end) in enumerate(pairwise(boundaries)):
            history = torch.zeros_like(state[n]) if before is None else state[n]
            expected, last = loop(layer.weight, x[0, start:end], history)
            assert_close("y", y[0, start:end], expected, way.tolerance)
            assert torch.equal(after[n], last)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cut", range(10))
def test_any_cut_gives_the_same_result(cut: int) -> None:
    layer = ShortConvolution(CHANNELS)
    x = torch.randn(2, 9, CHANNELS)
    whole, last = layer(x)
    first, state = layer(x[:, :cut])
    second, after = layer(x[:, cut:], state=state)
    assert_close("y", torch.cat((first, second), 1), whole, 1e-6)
    assert torch.equal(after, last)


def test_left_padded_prefill_then_decode_equals_each_row_alone(way: Way) -> None:
    layer = make(4, way)
    x = torch.randn(3, 8, CHANNELS, dtype=way.dtype)
    lengths = [1, 6, 3]
    mask = torch.zeros(3, 6)
    for row, length in enumerate(lengths):
        mask[row, 6 - length :] = 1
    y, state = layer(x[:, :6], mask=mask)
    z, _ = layer(x[:, 6:], state=state)
    for row, length in enumerate(lengths):
        expected, _ = loop(layer.weight, x[row, 6 - length :], torch.zeros(3, CHANNELS, dtype=way.dtype))
        assert_close("y", torch.cat((y[row, 6 - length :], z[row])), expected, way.tolerance)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torch_conv1d_with_its_gradients(bias: bool) -> None:
    layer = ShortConvolution(CHANNELS, bias=bias)
    x = torch.randn(2, 33, CHANNELS, requires_grad=True)
    weights = [None if w is None else w.double() for w in (layer.weight, layer.bias)]
    expected = F.silu(F.conv1d(F.pad(x.double().mT, (3, 0)), *weights, groups=CHANNELS).mT)
    y, _ = layer(x)
    upstream = torch.randn_like(y)
    assert_close("y", y, expected, 1e-6)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    ours = torch.autograd.grad(y, (x, *parameters), upstream)
    theirs = torch.autograd.grad(expected, (x, *parameters), upstream.double())
    for name, a, b in zip(("x", *names), ours, theirs, strict=True):
        assert_close(name, a, b, 1e-6)
    assert names == (("weight", "bias") if bias else ("weight",))


def test_starts_like_torch_conv1d() -> None:
    """Weight and bias uniform within the bound of torch's layer, drawn as they always were: weights of a seed last."""
    torch.manual_seed(5)
    layer = ShortConvolution(4000, 4, bias=True)
    torch.manual_seed(5)
    assert torch.equal(layer.weight, torch.empty(4000, 1, 4).uniform_(-0.5, 0.5))
    theirs = torch.nn.Conv1d(4000, 4000, 4, groups=4000)
    for ours, other in ((layer.weight, theirs.weight), (layer.bias, theirs.bias)):
        assert 0.49 < ours.abs().max() <= 0.5
        assert_close("spread", ours.std(), other.std(), 0.05)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("state of another batch", r"state must have shape \[2, 3, 5\], got \[4, 3, 5\]"),
        ("other channels", r"x must have shape \[B, T, 5\], got \[2, 6, 4\]"),
        ("hole", "mask has a hole in row 0"),
        ("boundaries", "must start at 0 and end at T = 6"),
        ("both", "mask and cu_seqlens exclude each other"),
    ],
)
def test_bad_input_is_named(kind: str, message: str) -> None:
    layer, x = ShortConvolution(CHANNELS), torch.randn(2, 6, CHANNELS)
    hole = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    calls = {
        "state of another batch": lambda: layer(x, state=torch.zeros(4, 3, CHANNELS)),
        "other channels": lambda: layer(x[..., :4]),
        "hole": lambda: layer(x, mask=hole),
        "boundaries": lambda: layer(x[:1], cu_seqlens=torch.tensor([0, 5])),
        "both": lambda: layer(x[:1], mask=hole[1:], cu_seqlens=torch.tensor([0, 6])),
    }
    with pytest.raises(ValueError, match=message):
        calls[kind]()
