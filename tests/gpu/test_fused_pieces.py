"""The kernels of what surrounds the read step and the write rule, this library's and flash-linear-attention's, as users
get them.

Exact values are those of the composition in float64 on a CPU, which tests/nn and tests/ops hold against loops. An error
may be at most twice that of the composition in the dtype, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.capture import capture
from tests.helpers import relative_error
from torch import Tensor, library

from ccq.nn import ShortConvolution
from ccq.ops import l2_norm as norm
from ccq.ops import residual_rms_norm as residual
from ccq.ops import short_convolution as convolution
from ccq.ops.l2_norm import l2_norm
from ccq.ops.log_decay import log_sigmoid_decay
from ccq.ops.residual_rms_norm import residual_rms_norm
from ccq.ops.swiglu import swiglu
from ccq.ops.thin_linear import thin_linear, thin_linear_and_input

pytest.importorskip("fla")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
by_any_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
Results = dict[str, Tensor]
NAMES = ("y", "x", "weight", "bias")


def check(run: Callable[[str, torch.dtype], Results], dtype: torch.dtype) -> None:
    actual, plain, exact = run("cuda", dtype), run("cpu", dtype), run("cpu", torch.float64)
    failures = []
    for name, value in exact.items():
        error, allowed = relative_error(actual[name].cpu(), value), max(2 * relative_error(plain[name], value), 1e-6)
        if not error <= allowed:
            failures.append(f"{name}: {error:.2e}, allowed {allowed:.2e}")
    assert not failures, "; ".join(failures)


def convolve(
    case: str, width: int, channels: int, tokens: int, device: str, dtype: torch.dtype, autocast: bool = False
) -> Results:
    """Outputs and gradients, the last state's among them."""
    torch.manual_seed(0)
    layer = ShortConvolution(channels, width, bias=case == "bias")
    rows, sequences, call = 3, 3, {}
    if case == "packed":
        third = tokens // 3
        rows, sequences = 1, 5
        call = {"cu_seqlens": torch.tensor([0, 0, third, third + 1, tokens, tokens], device=device)}
    if case == "padded":
        mask = torch.zeros(rows, tokens, dtype=torch.bool)
        for row, (begin, end) in enumerate(((0, tokens), (tokens // 2, tokens), (0, max(1, tokens // 3)))):
            mask[row, begin:end] = True
        call = {"mask": mask.to(device)}
    x, y_gradient = (torch.randn(rows, tokens, channels).bfloat16() for _ in range(2))
    state, last_gradient = (torch.randn(sequences, width - 1, channels).bfloat16() for _ in range(2))
    layer = layer.to(device, torch.float32 if autocast else dtype)
    x, state = (t.to(device, dtype).requires_grad_() for t in (x, state))
    y, last = layer(x, state=None if case == "no state" else state, **call)
    leaves = [x, *layer.parameters(), *(() if case == "no state" else (state,))]
    gradients = (y_gradient.to(device, dtype), last_gradient.to(device, dtype))
    found = torch.autograd.grad((y, last), leaves, gradients)
    names = ("x", "weight", *(("bias",) if case == "bias" else ()), "state")
    return {"y": y.detach(), "last": last.detach(), **dict(zip(names, found, strict=False))}


@pytest.mark.parametrize("tokens", [1, 3, 63, 65, 1000])
@pytest.mark.parametrize("case", ["state", "no state", "bias", "packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_short_convolution(dtype: torch.dtype, case: str, tokens: int) -> None:
    for width, channels in ((4, 96), (2, 50), (8, 300)):
        check(lambda device, kind, w=width, c=channels: convolve(case, w, c, tokens, device, kind), dtype)


@pytest.mark.parametrize("case", ["state", "no state", "bias", "packed"])
@by_dtype
def test_short_convolution_in_long_parts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, case: str) -> None:
    """As in training, where there is enough to do for programs that walk over 128 tokens."""
    from ccq.ops.short_convolution import kernels

    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name)._replace(programs=1))
    check(lambda device, kind: convolve(case, 4, 1536, 300, device, kind), dtype)


def test_float32_weights_under_autocast() -> None:
    actual = convolve("state", 4, 64, 300, "cuda", torch.bfloat16, autocast=True)
    exact = convolve("state", 4, 64, 300, "cpu", torch.float64)
    assert actual["weight"].dtype == torch.float32
    for name, value in exact.items():
        assert relative_error(actual[name].cpu(), value) < 6e-3, name


@pytest.mark.parametrize("size", [16, 40, 64, 96, 128, 256])
@by_dtype
def test_unit_vectors(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 500, 3, size).bfloat16(), torch.randn(2, 500, 3, size).bfloat16()

    def run(device: str, kind: torch.dtype) -> Results:
        leaf = x.to(device, kind).requires_grad_()
        y = l2_norm(leaf)
        return {"y": y.detach(), "x": torch.autograd.grad(y, leaf, gradient.to(device, kind))[0]}

    check(run, dtype)


def test_two_runs_are_bit_equal_and_nothing_autotunes(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: pytest.fail("a kernel was tuned"))
    first, second = (convolve("state", 4, 1536, 700, "cuda", torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    x = torch.randn(9000, 256, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(l2_norm(x), l2_norm(x))


def test_the_operators_keep_their_promises() -> None:
    def given(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    close: dict[str, Any] = {"atol": 2e-2, "rtol": 2e-2}
    library.opcheck(norm.forward.overload, (given(70, 64),), **close)
    library.opcheck(
        convolution.forward.overload, (given(2, 70, 64), given(64, 4), None, given(2, 3, 64), None), **close
    )


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_compiled_without_a_break_they_agree() -> None:
    torch._dynamo.reset()
    torch.utils.deterministic.fill_uninitialized_memory = False
    layer = ShortConvolution(128, 4).to("cuda", torch.bfloat16)
    x = torch.randn(2, 100, 128, device="cuda", dtype=torch.bfloat16)

    def both(x: Tensor) -> Tensor:
        return l2_norm(layer(x)[0].unflatten(-1, (2, 64)))

    results = []
    for call in (both, torch.compile(both, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        results.append((y, *torch.autograd.grad(y.float().square().sum() + y.float()[..., 0].sum(), leaf)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)


@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (8, 4096)])
@by_any_dtype
def test_thin_linear(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The gradient in the bias sums over all tokens; against float64, where the composition rounds the logits."""
    torch.manual_seed(0)
    x, gradient = torch.randn(*shape, 384).to(dtype), torch.randn(*shape, 6)
    weight, bias = torch.randn(6, 384) / 20, torch.randn(6) - 4.6

    def run(device: str, wide: bool) -> list[Tensor]:
        kept = torch.float64 if wide else torch.float32
        leaves = [
            x.to(device, torch.float64 if wide else dtype),
            weight.to(dtype).to(device, kept) if wide else weight.to(device),
            bias.to(device, kept),
        ]
        leaves = [each.requires_grad_() for each in leaves]
        y = thin_linear(*leaves, sigmoid=True)
        return [y.detach(), *torch.autograd.grad(y, leaves, gradient.to(device, kept))]

    eps = torch.finfo(dtype).eps
    found, again = run("cuda", False), run("cuda", False)
    allowed = (2e-6, max(2 * eps, 2e-6), max(2 * eps, 2e-5), 2e-5)
    for name, ours, value, limit in zip(NAMES, found, run("cpu", True), allowed, strict=True):
        assert relative_error(ours.cpu(), value) <= limit, name
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("outputs", [6, 12])
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (8, 4096)])
@by_any_dtype
def test_thin_linear_and_input(dtype: torch.dtype, shape: tuple[int, int], outputs: int) -> None:
    """Both gradients of x in one, against their sum in float64; what holds NaN and has no gradient is left out."""
    torch.manual_seed(0)
    x, gradient, elsewhere = torch.randn(*shape, 384), torch.randn(*shape, outputs), torch.randn(*shape, 384)
    x, elsewhere = x.to(dtype), elsewhere.to(dtype)
    weight, bias = torch.randn(outputs, 384) / 20, torch.randn(outputs) - 4.6
    dead = slice(1, 1 + shape[1] // 3)
    gradient[0, dead] = 0
    # About as large as what it is added to, behind a gate near 0.01, so that neither hides.
    elsewhere = (elsewhere.float() / 500).to(dtype)

    def run(device: str, wide: bool) -> list[Tensor]:
        kept = torch.float64 if wide else torch.float32
        leaves = [
            x.to(device, torch.float64 if wide else dtype),
            weight.to(dtype).to(device, kept) if wide else weight.to(device),
            bias.to(device, kept),
        ]
        if not wide:
            leaves[0] = leaves[0].clone()
            leaves[0][0, dead] = float("nan")
        leaves = [each.requires_grad_() for each in leaves]
        y, again = thin_linear_and_input(*leaves, sigmoid=True)
        found = torch.autograd.grad((y, again), leaves, (gradient.to(device, kept), elsewhere.to(device, again.dtype)))
        return [y.detach(), *found]

    eps = torch.finfo(dtype).eps
    found, again, exact = run("cuda", False), run("cuda", False), run("cpu", True)
    assert found[0][0, dead].isnan().all()
    assert torch.equal(found[1][0, dead].cpu(), elsewhere[0, dead])
    allowed = (max(2 * eps, 2e-6), max(2 * eps, 2e-5), 2e-5)
    for name, ours, value, limit in zip(NAMES[1:], found[1:], exact[1:], allowed, strict=True):
        assert relative_error(ours.cpu(), value) <= limit, name
    assert all(torch.equal(a, b) for a, b in zip(found[1:], again[1:], strict=True))


def test_thin_linear_and_input_in_a_cuda_graph() -> None:
    torch.manual_seed(0)
    x, elsewhere = (torch.randn(3, 700, 384, device="cuda").bfloat16() for _ in range(2))
    weight, bias, gradient = (torch.randn(*shape, device="cuda") for shape in ((6, 384), (6,), (3, 700, 6)))
    leaves = [each.requires_grad_() for each in (x, weight, bias)]

    def both() -> tuple[Tensor, ...]:
        y, again = thin_linear_and_input(*leaves, sigmoid=True)
        return y.detach(), *torch.autograd.grad((y, again), leaves, (gradient, elsewhere))

    graph, captured = capture(both)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for name, ours, value in zip(NAMES, captured, both(), strict=True):
        assert torch.equal(ours, value), name


# The dtype of the stream and that of branch and norm: of a model under autocast, and of two in low precision.
by_stream = pytest.mark.parametrize(
    ("stream", "low"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)


def draw_residual(shape: tuple[int, ...], stream: torch.dtype, low: torch.dtype) -> list[Tensor]:
    """x, branch, weight, and the gradients of the norm and, from elsewhere, of the sum."""
    torch.manual_seed(0)
    kinds = (stream, low, low, stream)
    x, branch, dy, dz = (torch.randn(shape).to(kind) for kind in kinds)
    return [2 * x, branch, torch.randn(shape[-1]).to(stream), dy, dz / 2]


def differentiate_residual(inputs: list[Tensor], added: bool) -> list[Tensor]:
    """y, z and the gradients of x, weight and, where it is added, of the branch; under autocast where the gradient of y
    has another dtype than x.
    """
    x, branch, weight, dy, dz = inputs
    leaves = [each.detach().requires_grad_() for each in (x, weight, *((branch,) if added else ()))]
    with torch.autocast(x.device.type, dy.dtype, enabled=dy.dtype != x.dtype):
        assert residual.is_chosen(x, branch if added else None) == x.is_cuda
        y, z = residual_rms_norm(*leaves[:2], 1e-5, branch=leaves[2] if added else None)
    return [y.detach(), z.detach(), *torch.autograd.grad((y, z), leaves, (dy, dz))]


@pytest.mark.parametrize("shape", [(1, 1, 2048), (3, 700, 2048), (8, 4096, 2048), (1, 1, 700), (3, 700, 700)])
@pytest.mark.parametrize("added", [False, True])
@by_stream
def test_residual_rms_norm(stream: torch.dtype, low: torch.dtype, added: bool, shape: tuple[int, int, int]) -> None:
    """Against float64, of the sum as it is rounded, whose gradient both of its parts have."""
    inputs = draw_residual(shape, stream, low)
    there = [each.cuda() for each in inputs]
    found, again = differentiate_residual(there, added), differentiate_residual(there, added)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    x, branch, weight, dy, dz = inputs
    z = (x.float() + branch.float()).to(stream) if added else x
    exact = differentiate_residual([each.double() for each in (z, branch, weight, dy, dz)], False)
    exact += exact[2:3] * added
    assert torch.equal(found[1].cpu(), z)
    kinds = (low, stream, stream, stream, low)
    for name, ours, value, kind in zip(("y", "z", "x", "weight", "branch"), found, exact, kinds, strict=False):
        limit = max(2 * torch.finfo(kind).eps, 2e-5 if name == "weight" else 2e-6)
        assert ours.dtype == kind and relative_error(ours.cpu(), value) <= limit, name


@pytest.mark.parametrize("added", [False, True])
@by_stream
def test_residual_rms_norm_in_a_cuda_graph(stream: torch.dtype, low: torch.dtype, added: bool) -> None:
    inputs = [each.cuda() for each in draw_residual((3, 700, 2048), stream, low)]
    graph, captured = capture(lambda: tuple(differentiate_residual(inputs, added)))
    for each in inputs:
        each.copy_(torch.randn_like(each))
    graph.replay()
    for name, ours, value in zip(
        ("y", "z", "x", "weight", "branch"), captured, differentiate_residual(inputs, added), strict=False
    ):
        assert torch.equal(ours, value), name


@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 700, 1056), (4, 4096, 5632)])
@by_dtype
def test_swiglu(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    inputs = [(2 * torch.randn(shape)).to(dtype) for _ in range(3)]

    def run(device: str, kind: torch.dtype) -> Results:
        gate, x, gradient = (each.to(device, kind) for each in inputs)
        leaves = [gate.requires_grad_(), x.requires_grad_()]
        y = swiglu(*leaves)
        return dict(zip(("y", "gate", "x"), (y.detach(), *torch.autograd.grad(y, leaves, gradient)), strict=True))

    check(run, dtype)


@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 700, 1536), (8, 4096, 1536)])
@by_dtype
def test_log_decay(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    x, gradient = (5 * torch.randn(shape)).to(dtype), torch.randn(shape)

    def run(device: str, kind: torch.dtype) -> Results:
        leaf = x.to(device, kind).requires_grad_()
        y = log_sigmoid_decay(leaf, 16.0)
        return {"y": y.detach(), "x": torch.autograd.grad(y, leaf, gradient.to(device, y.dtype))[0]}

    check(run, dtype)
