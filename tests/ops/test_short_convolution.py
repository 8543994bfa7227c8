"""The kernels of the short convolution against a loop over the tokens in float64, on a GPU or in Triton's interpreter.

The layer around them is tested in tests/nn/test_conv.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.helpers import assert_close
from torch import Tensor, library

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
