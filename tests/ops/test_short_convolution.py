"""The kernels of the short convolution against a loop over the tokens in float64, on a GPU or in Triton's interpreter.

The layer around them is tested in tests/nn/test_conv.py, but for its step of one token, which is one kernel for several
layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from torch import Tensor, library

from ccq.nn import ShortConvolution, conv
from ccq.nn.conv import convolve_token_
from ccq.ops import short_convolution as module

pytest.importorskip("triton")

from ccq.ops.short_convolution import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("y", "x", "weight", "bias", "state")
TOLERANCE = 2e-6
"""Relative error allowed to sums in float32."""
FLOOR = 1e-6
"""Absolute error allowed where the exact value is zero."""
PART = kernels.SHORTEST

Inputs = list[Tensor | None]


def draw(
    tokens: int,
    *,
    rows: int = 2,
    channels: int = 5,
    width: int = 4,
    boundaries: list[int] | None = None,
    bias: bool = True,
    state: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """x, weight, bias, state and the gradient that arrives."""
    sequences = rows if boundaries is None else len(boundaries) - 1
    return [
        torch.randn(rows, tokens, channels).to(dtype),
        torch.randn(channels, width).to(dtype),
        torch.randn(channels).to(dtype) if bias else None,
        torch.randn(sequences, width - 1, channels).to(dtype) if state else None,
        torch.randn(rows, tokens, channels).to(dtype),
    ]


def by_loop(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, edges: list[int] | None) -> Tensor:
    """One token at a time, each sequence behind its state."""
    width = weight.shape[1]
    flat = x.flatten(0, 1)
    edges = edges or [row * x.shape[1] for row in range(x.shape[0] + 1)]
    outputs = []
    for n, (begin, end) in enumerate(pairwise(edges)):
        before = x.new_zeros(width - 1, x.shape[2]) if state is None else state[n]
        seen = [*before, *flat[begin:end]]
        for t in range(end - begin):
            s = sum(weight[:, i] * seen[t + i] for i in range(width))
            s = s if bias is None else s + bias
            outputs.append(s / (1 + torch.exp(-s)))
    return torch.stack(outputs).view(x.shape)


def differentiate(inputs: Inputs, edges: list[int] | None, exact: bool) -> dict[str, Tensor]:
    """Outputs and gradients: of the kernels, or of the loop in float64."""
    move = (lambda x: x.double()) if exact else (lambda x: x.to(DEVICE))
    *leaves, gradient = (None if x is None else move(x).detach() for x in inputs)
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    y = by_loop(*leaves, edges) if exact else module.forward(*leaves, edges)
    wanted = {name: x for name, x in zip(NAMES[1:], leaves, strict=True) if x is not None}
    found = torch.autograd.grad(y, list(wanted.values()), gradient)
    return {"y": y.detach().cpu(), **{name: x.cpu() for name, x in zip(wanted, found, strict=True)}}


def check(inputs: Inputs, edges: list[int] | None = None, tolerance: float = TOLERANCE) -> None:
    actual = differentiate(inputs, edges, exact=False)
    for name, value in differentiate(inputs, edges, exact=True).items():
        assert_close(name, actual[name], value, tolerance, floor=FLOOR)


LENGTHS = {w: sorted({1, w - 1, w, w + 1, *range(PART - w, PART + 2), 2 * PART + 3}) for w in (2, 4)}


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("width", "tokens"), [(width, tokens) for width in LENGTHS for tokens in LENGTHS[width]])
def test_any_length(width: int, tokens: int, state: bool) -> None:
    """Around the window, the steps of a program and its part, which begins with a state's W - 1 places."""
    check(draw(tokens, width=width, state=state, bias=not state))


@pytest.mark.parametrize("width", range(2, module.MAX_KERNEL_SIZE + 1))
def test_any_kernel_size(width: int) -> None:
    check(draw(PART + 5, rows=1, width=width))


@pytest.mark.parametrize("channels", [1, 32, 50, 300])
def test_any_number_of_channels(channels: int) -> None:
    """Fewer than a warp has threads, and more than a program takes."""
    check(draw(9, channels=channels))
    check(draw(9, channels=channels, bias=False, state=False))


@pytest.mark.parametrize("programs", [1, 10**9])
@pytest.mark.parametrize("state", [False, True])
def test_longer_parts_change_nothing(monkeypatch: pytest.MonkeyPatch, state: bool, programs: int) -> None:
    """Few programs make the longest parts, and the second one of a row begins behind 128 places."""
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name)._replace(programs=programs))
    check(draw(kernels.LONGEST + 3, rows=1, state=state))


PACKED = [
    [0, 3, 3, 4, 11, 11],
    [0, 0, 1, 2, 3],
    [0, PART - 3, 2 * PART, 2 * PART + 1, 3 * PART + 6],
    [0, 0, 3 * PART],
]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("boundaries", PACKED, ids=str)
def test_packed_documents(boundaries: list[int], state: bool) -> None:
    check(draw(boundaries[-1], rows=1, boundaries=boundaries, state=state), boundaries)


def test_a_document_sees_nothing_of_the_others() -> None:
    """Not even NaN, which no multiplication by zero would hide."""
    boundaries = [0, PART + 2, PART + 3, PART + 7]
    inputs = draw(boundaries[-1], rows=1, boundaries=boundaries)
    clean = differentiate(inputs, boundaries, exact=False)
    for n in range(3):
        spoilt = [x.clone() for x in inputs]
        here = slice(boundaries[n], boundaries[n + 1])
        for x in (spoilt[0][0, here], spoilt[3][n], spoilt[4][0, here]):
            x.fill_(float("nan"))
        found = differentiate(spoilt, boundaries, exact=False)
        others = torch.ones(boundaries[-1], dtype=torch.bool)
        others[here] = False
        for name in ("y", "x"):
            assert torch.equal(found[name][:, others], clean[name][:, others]), name
            assert found[name][:, here].isnan().all()
        rest = [m for m in range(3) if m != n]
        assert torch.equal(found["state"][rest], clean["state"][rest])


def test_a_row_sees_nothing_of_the_others() -> None:
    inputs = draw(PART + 1, rows=3)
    clean = differentiate(inputs, None, exact=False)
    for x in (inputs[0], inputs[3], inputs[4]):
        x[1] = float("nan")
    found = differentiate(inputs, None, exact=False)
    for name in ("y", "x", "state"):
        assert torch.equal(found[name][[0, 2]], clean[name][[0, 2]]), name


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Rounding to nearest is within eps / 2 of every value, so within that of the norm."""
    check(draw(2 * PART + 3, channels=40, dtype=dtype), tolerance=torch.finfo(dtype).eps / 2)


@pytest.mark.usefixtures("gpu_rounding")
def test_parameters_keep_their_dtype_and_are_not_rounded() -> None:
    """As under autocast: x and state half, weight and bias float32."""
    inputs = draw(PART + 3)
    halves = [x.half() if i in (0, 3, 4) else x for i, x in enumerate(inputs)]
    actual, exact = differentiate(halves, None, exact=False), differentiate(halves, None, exact=True)
    half = torch.finfo(torch.float16).eps / 2
    for name, value in exact.items():
        wide = name in ("weight", "bias")
        assert actual[name].dtype == (torch.float32 if wide else torch.float16)
        assert_close(name, actual[name], value, TOLERANCE if wide else half)


def test_strided_input() -> None:
    """Every argument a view: rows turned, columns cut out of something wider, a gradient that is one number."""
    x, weight, bias, state, gradient = draw(PART + 3, channels=6)
    inputs = [
        torch.cat((x, x), 2)[..., 3:9],
        weight.t().contiguous().t(),
        torch.stack((bias, bias), 1)[:, 0],
        state.transpose(0, 1).contiguous().transpose(0, 1),
        gradient[:1, :1, :1].expand_as(x),
    ]
    assert not any(x.is_contiguous() for x in inputs)
    check(inputs)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_large_sums_saturate() -> None:
    """exp(100) is above float32, and exp(1000) above the float64 of the loop."""
    inputs = draw(9, bias=False, state=False)
    inputs[0] *= 40
    check(inputs)


@pytest.mark.parametrize("boundaries", [None, [0, 3, 3, 7]])
@pytest.mark.parametrize("extras", [False, True])
def test_the_operators_keep_their_promises(extras: bool, boundaries: list[int] | None) -> None:
    rows = 2 if boundaries is None else 1
    inputs = draw(7, rows=rows, boundaries=boundaries, bias=extras, state=extras)
    *given, gradient = (None if x is None else x.to(DEVICE) for x in inputs)
    leaves = [None if x is None else x.clone().requires_grad_() for x in given]
    library.opcheck(module.forward.overload, (*leaves, boundaries), atol=1e-5, rtol=1e-5)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(module.backward.overload, (gradient, *given, boundaries), test_utils=checks)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@pytest.mark.parametrize("boundaries", [None, [0, 3, 3, 7]])
def test_compiles_without_a_break_and_agrees(boundaries: list[int] | None) -> None:
    torch._dynamo.reset()
    inputs = draw(7, rows=1, boundaries=boundaries)
    eager = differentiate(inputs, boundaries, exact=False)

    def call(*leaves: Tensor) -> Tensor:
        return torch.ops.ccq.short_convolution(*leaves, boundaries)

    *leaves, gradient = (x.to(DEVICE) for x in inputs)
    leaves = [x.clone().requires_grad_() for x in leaves]
    y = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    for name, ours in zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, gradient)), strict=True):
        assert torch.equal(ours.cpu(), eager[name]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_compile_for_hopper(dtype: str) -> None:
    """At the kernel size of every known model registers hold all; the largest one compiles."""
    script = Path(__file__).with_name("compile_short_convolution.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), "9", "0", dtype], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 8
    for entry in found:
        assert entry["width"] > 4 or entry["spilled"] == 0, entry


@pytest.mark.parametrize(
    ("device", "dtype", "kernel_size", "expected"),
    [
        ("cuda", torch.bfloat16, 4, True),
        ("cuda", torch.float16, 2, True),
        ("cuda", torch.float32, 8, True),
        ("cuda", torch.bfloat16, 1, False),
        ("cuda", torch.bfloat16, 9, False),
        ("cuda", torch.float64, 4, False),
        ("cpu", torch.bfloat16, 4, False),
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_the_kernels_are_used_where_they_can_run(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, kernel_size: int, expected: bool, installed: bool
) -> None:
    monkeypatch.setattr(module, "TRITON_INSTALLED", installed)
    # Fake tensors of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, 6, dtype=dtype, device=device)
        assert module.is_chosen(x, kernel_size) == (expected and installed)
        assert not module.is_chosen(torch.empty(2, 0, 6, dtype=dtype, device=device), kernel_size)


# One token of every sequence, of several convolutions at once.


CHANNELS = (5, 300, 256, 1)
"""Of each convolution; programs take 256."""


def draw_tokens(
    tokens: int, width: int, dtype: torch.dtype = torch.float32, rows: int = 3
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """xs, weights and states, of each convolution."""
    drawn = [draw(tokens, rows=rows, channels=each, width=width, dtype=dtype) for each in CHANNELS]
    xs, weights, _, states, _ = (
        [x.to(DEVICE) if x is not None else x for x in each] for each in zip(*drawn, strict=True)
    )
    return xs, weights, states


def step(xs: list[Tensor], weights: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    """The outputs; the states are overwritten."""
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
    torch.ops.ccq.short_convolution_token_(xs, weights, states, outputs)
    return outputs


def check_tokens(
    xs: list[Tensor], weights: list[Tensor], states: list[Tensor], rounding: float, floor: float = FLOOR
) -> None:
    """Token by token: each output against the loop over all of them, each state against the last inputs."""
    exact = [
        by_loop(*(each.double().cpu() for each in (x, weight)), None, state.double().cpu(), None)
        for x, weight, state in zip(xs, weights, states, strict=True)
    ]
    histories = [torch.cat((state, x), 1) for state, x in zip(states, xs, strict=True)]
    width = weights[0].shape[1]
    for t in range(xs[0].shape[1]):
        given = [x[:, t : t + 1] for x in xs]
        outputs = step(given, weights, states)
        for i, (y, x) in enumerate(zip(outputs, given, strict=True)):
            assert y.dtype == x.dtype
            assert_close(f"convolution {i}, token {t}", y.cpu(), exact[i][:, t : t + 1], rounding, floor=floor)
            assert torch.equal(states[i], histories[i][:, t + 1 : t + width])


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [2, 3, 4, module.MAX_KERNEL_SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_single_tokens_equal_the_loop(dtype: torch.dtype, width: int, rows: int) -> None:
    """An output is rounded once, and a state moves on bit for bit."""
    check_tokens(
        *draw_tokens(5, width, dtype, rows), TOLERANCE if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    )


@pytest.mark.usefixtures("gpu_rounding")
def test_single_tokens_with_weights_that_are_not_rounded() -> None:
    """As under autocast."""
    xs, weights, states = draw_tokens(3, 4)
    halves = ([each.half() for each in some] for some in (xs, states))
    xs, states = halves
    check_tokens(xs, weights, states, torch.finfo(torch.float16).eps / 2)


def test_single_tokens_of_strided_input() -> None:
    """Columns of something wider, as of one product for all convolutions, and turned weights."""
    xs, weights, states = draw_tokens(1, 4)
    joint = torch.cat(xs, 2)
    views = list(joint.split(CHANNELS, 2))
    turned = [weight.t().contiguous().t() for weight in weights]
    assert not any(each.is_contiguous() for each in views[:-1])
    again = [state.clone() for state in states]
    plain = step(xs, weights, states)
    for a, b in zip(step(views, turned, again), plain, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(again, states, strict=True):
        assert torch.equal(a, b)


def test_a_single_token_is_that_of_the_kernel_of_many() -> None:
    xs, weights, states = draw_tokens(1, 4)
    several = [
        module.forward(x, weight, None, state, None) for x, weight, state in zip(xs, weights, states, strict=True)
    ]
    for a, b in zip(step(xs, weights, states), several, strict=True):
        assert_close("y", a, b, 3e-7)


def test_a_sequence_sees_nothing_of_the_others() -> None:
    xs, weights, states = draw_tokens(1, 4)
    spoilt = [[each.clone() for each in some] for some in (xs, states)]
    for each in (*spoilt[0], *spoilt[1]):
        each[1] = float("nan")
    clean = step(xs, weights, states)
    found = step(spoilt[0], weights, spoilt[1])
    for a, b in zip((*found, *spoilt[1]), (*clean, *states), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_the_operator_of_one_token_keeps_its_promises() -> None:
    xs, weights, states = draw_tokens(1, 3)
    outputs = [torch.empty_like(x) for x in xs]
    library.opcheck(torch.ops.ccq.short_convolution_token_.default, (xs, weights, states, outputs))


def test_autograd_learns_that_the_states_are_others() -> None:
    xs, weights, states = draw_tokens(1, 4)
    factor = torch.ones((), device=DEVICE, requires_grad=True)
    products = [(state * factor).sum() for state in states]
    with torch.no_grad():
        step(xs, weights, states)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    weights[1].requires_grad_()
    with pytest.raises(RuntimeError, match=r"ccq::short_convolution_token_ .*no_grad"):
        step(xs, weights, states)


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers use the kernels on a CPU too."""
    if DEVICE == "cpu":
        monkeypatch.setattr(conv, "is_chosen", lambda x, width: 1 < width <= module.MAX_KERNEL_SIZE and x.numel() > 0)


def layers(width: int = 4, **options: Any) -> list[ShortConvolution]:
    return [ShortConvolution(each, width, **options).to(DEVICE) for each in CHANNELS]


@pytest.mark.usefixtures("on_any_device")
@torch.no_grad()
def test_layers_take_one_token_together() -> None:
    convolutions, (xs, _, states) = layers(), draw_tokens(1, 4)
    apart = [each(x, state=state) for each, x, state in zip(convolutions, xs, states, strict=True)]
    outputs = convolve_token_(convolutions, xs, states)
    assert outputs is not None and len(outputs) == len(CHANNELS)
    for y, state, (expected, after) in zip(outputs, states, apart, strict=True):
        assert_close("y", y, expected, 3e-7)
        assert torch.equal(state, after)


class Louder(ShortConvolution):
    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        y, state = super().forward(x, **options)
        return 2 * y, state


Given = tuple[list[ShortConvolution], list[Tensor], list[Tensor]]


def with_bias(given: Given) -> None:
    given[0][2] = ShortConvolution(CHANNELS[2], 4, bias=True).to(DEVICE)


def with_another_width(given: Given) -> None:
    given[0][2] = ShortConvolution(CHANNELS[2], 3).to(DEVICE)
    given[2][2] = given[2][2][:, :2].contiguous()


def with_two_tokens(given: Given) -> None:
    given[1][:] = [torch.cat((x, x), 1) for x in given[1]]


def with_another_dtype(given: Given) -> None:
    given[2][2] = given[2][2].half()


def with_a_turned_state(given: Given) -> None:
    given[2][2] = given[2][2].transpose(0, 1).contiguous().transpose(0, 1)


def with_a_state_of_one_sequence(given: Given) -> None:
    """Which a layer by itself refuses."""
    given[2][2] = given[2][2][:1]


def with_a_subclass(given: Given) -> None:
    given[0][2] = Louder(CHANNELS[2], 4).to(DEVICE)


def with_another_forward(given: Given) -> None:
    """As accelerate changes a module whose weight is elsewhere until it is called."""
    inner = given[0][2].forward
    given[0][2].forward = lambda *x, **options: inner(*x, **options)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Given], Any]] = {
    "bias": with_bias,
    "another kernel size": with_another_width,
    "two tokens": with_two_tokens,
    "a state of another dtype": with_another_dtype,
    "a turned state": with_a_turned_state,
    "a state of one sequence": with_a_state_of_one_sequence,
    "a hook": lambda given: given[0][2].register_forward_hook(lambda *_: None),
    "a pre-hook": lambda given: given[0][2].register_forward_pre_hook(lambda *_: None),
    "a subclass": with_a_subclass,
    "another forward": with_another_forward,
    "gradients": lambda given: torch.set_grad_enabled(True),
    "a state with a gradient": lambda given: given[2][2].requires_grad_(),
}


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_do_not_fit_are_left_alone(change: str) -> None:
    """None of the states is touched, so that the layers can be called one by one."""
    xs, _, states = draw_tokens(1, 4)
    given: Given = layers(), xs, states
    with torch.no_grad():
        CHANGES[change](given)
        before = [state.clone() for state in states]
        assert convolve_token_(*given) is None
    for a, b in zip(states, before, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_layers_whose_kernels_are_not_chosen_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "is_chosen", lambda x, width: x.shape[-1] != CHANNELS[2])
    xs, _, states = draw_tokens(1, 4)
    before = [state.clone() for state in states]
    assert convolve_token_(layers(), xs, states) is None
    assert all(torch.equal(a, b) for a, b in zip(states, before, strict=True))


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@torch.no_grad()
def test_one_token_of_layers_compiles_without_a_break_and_agrees() -> None:
    torch._dynamo.reset()
    convolutions, (xs, _, states) = layers(), draw_tokens(2, 4)

    def decode(xs: list[Tensor], states: list[Tensor]) -> list[Tensor]:
        outputs = convolve_token_(convolutions, [x + 1 for x in xs], states)
        assert outputs is not None
        return [2 * y for y in outputs]

    results = []
    for function in (decode, torch.compile(decode, fullgraph=True, backend="aot_eager")):
        own, outputs = [state.clone() for state in states], []
        for t in range(2):
            outputs += function([x[:, t : t + 1] for x in xs], own)
        results.append((*outputs, *own))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)
