"""The norm of Mamba2, in PyTorch and by its kernels, against its formula in float64, differentiated by autograd, on a
GPU or in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import assert_close
from torch import Tensor, library

from ccq.ops import gated_group_rms_norm as module
from ccq.ops.gated_group_rms_norm import gated_group_rms_norm

EPS = 1e-3
NAMES = ("x", "gate", "weight", "values", "skip")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, gate, weight, values and skip."""
    x, gate, values = (torch.randn(2, 5, size).to(dtype) for _ in range(3))
    return [each.to(DEVICE) for each in (x, gate, torch.randn(size), values, torch.randn(size))]


def formula(inputs: list[Tensor], groups: int, skip: bool) -> Tensor:
    x, gate, weight, values, factor = inputs
    z = (x + factor * values if skip else x) * gate / (1 + torch.exp(-gate))
    parts = [part / torch.sqrt((part * part).mean(-1, keepdim=True) + EPS) for part in z.chunk(groups, -1)]
    return torch.cat(parts, -1) * weight


def call(inputs: list[Tensor], groups: int, skip: bool) -> Tensor:
    x, gate, weight, values, factor = inputs
    more = {"values": values, "skip": factor} if skip else {}
    return gated_group_rms_norm(x, gate, weight, groups=groups, eps=EPS, **more)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used, and a program of the backward pass takes several vectors."""
    pytest.importorskip("triton")
    from ccq.ops.gated_group_rms_norm import kernels

    monkeypatch.setattr(module, "is_chosen", lambda *_: True)
    monkeypatch.setattr(kernels, "PROGRAMS", 6)


with_and_without_skip = pytest.mark.parametrize("skip", [True, False], ids=["skip", "plain"])
by_groups = pytest.mark.parametrize("groups", [1, 3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@with_and_without_skip
@by_groups
def test_outputs_and_gradients(groups: int, skip: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_chosen", lambda *_: False)
    check(draw(12, dtype), groups, skip)


@pytest.mark.usefixtures("kernels", "gpu_rounding")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [12, 48, 105])
@with_and_without_skip
@by_groups
def test_outputs_and_gradients_of_the_kernels(groups: int, skip: bool, size: int, dtype: torch.dtype) -> None:
    check(draw(size, dtype), groups, skip)


def check(inputs: list[Tensor], groups: int, skip: bool) -> None:
    dtype = inputs[0].dtype
    upstream = torch.randn_like(inputs[0])
    ours = [each.clone().requires_grad_() for each in inputs]
    exact = [each.double().requires_grad_() for each in inputs]
    y, expected = call(ours, groups, skip), formula(exact, groups, skip)
    assert y.dtype == dtype
    # Only what comes out is rounded.
    rounding = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2**-11 + 2e-6, torch.bfloat16: 2**-8}
    tolerance = rounding[dtype]
    assert_close("y", y.detach(), expected.detach(), tolerance)
    used = 5 if skip else 3
    found = torch.autograd.grad(y, ours[:used], upstream)
    for name, mine, value, actual in zip(
        NAMES, ours, torch.autograd.grad(expected, exact[:used], upstream.double()), found, strict=False
    ):
        assert actual.dtype == mine.dtype, name
        assert_close(name, actual, value, max(tolerance, 1e-6) if name in ("weight", "skip") else tolerance)


@pytest.mark.usefixtures("kernels", "gpu_rounding")
@by_groups
def test_parts_of_a_projection_are_read_where_they_are(groups: int) -> None:
    """Bit for bit as by themselves, though a vector is further from the next one than it is long."""
    x, gate, weight, values, skip = draw(12, torch.bfloat16)
    wide = torch.cat((gate, values, x), -1)
    parts = wide.split(12, -1)
    views = [parts[2], parts[0], weight, parts[1], skip]
    assert not any(part.is_contiguous() for part in parts)
    # And channels that are not side by side.
    turned = [each if each.ndim == 1 else each.flatten(0, 1).t().contiguous().t() for each in views]
    upstream = torch.randn_like(x)
    results = []
    for inputs in ([x, gate, weight, values, skip], views, turned):
        leaves = [each.detach().requires_grad_() for each in inputs]
        y = call(leaves, groups, True)
        found = torch.autograd.grad(y, leaves, upstream.view(y.shape))
        results.append([each.reshape(-1) for each in (y.detach(), *found)])
    for name, plain, strided, other in zip(("y", *NAMES), *results, strict=True):
        assert torch.equal(plain, strided) and torch.equal(plain, other), name


@pytest.mark.usefixtures("kernels", "gpu_rounding")
@given(
    vectors=st.integers(1, 9),
    groups=st.integers(1, 4),
    each=st.integers(1, 40),
    row=st.integers(0, 8),
    skip=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_vector_does_not_depend_on_those_beside_it(
    vectors: int, groups: int, each: int, row: int, skip: bool, dtype: torch.dtype
) -> None:
    """Nor a group on the others."""
    row %= vectors
    size = groups * each
    inputs = [torch.randn(vectors, size).to(DEVICE, dtype) for _ in range(3)]
    x, gate, values = inputs
    weight, factor = torch.randn(size, device=DEVICE), torch.randn(size, device=DEVICE)
    whole = call([x, gate, weight, values, factor], groups, skip)
    alone = call([x[row : row + 1], gate[row : row + 1], weight, values[row : row + 1], factor], groups, skip)
    assert torch.equal(whole[row], alone[0])
    spoilt = x.clone()
    spoilt[:, :each] = float("nan")
    if groups > 1:
        rest = call([spoilt, gate, weight, values, factor], groups, skip)
        assert torch.equal(rest[:, each:], whole[:, each:])


@pytest.mark.usefixtures("kernels", "gpu_rounding")
@with_and_without_skip
def test_the_operators_keep_their_promises(skip: bool) -> None:
    x, gate, weight, *others = (each.view(-1, 12).squeeze(0) for each in draw(12, torch.float32))
    values, factor = others if skip else (None, None)
    given = [each if each is None else each.requires_grad_() for each in (x, gate, weight, values, factor)]
    library.opcheck(module.forward.overload, (*given, 3, EPS), atol=1e-5, rtol=1e-5)
    still = [each if each is None else each.detach() for each in given]
    library.opcheck(module.backward.overload, (torch.randn_like(still[0]), *still, 3, EPS), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels", "gpu_rounding")
def test_a_gradient_of_a_gradient_is_refused() -> None:
    leaves = [each.requires_grad_() for each in draw(12, torch.float32)]
    (first,) = torch.autograd.grad(call(leaves, 3, True).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="ccq::gated_group_rms_norm has no derivative, and one is asked for"):
        (first.square().sum() + leaves[0].square().sum()).backward()


@pytest.mark.parametrize("installed", [True, False])
def test_the_kernels_are_used_where_they_can_run(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(module, "TRITON_INSTALLED", installed)
    # Fake tensors of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():

        def chosen(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", groups: int = 1) -> bool:
            x = torch.empty(shape, dtype=dtype, device=device)
            return module.is_chosen(x, groups, torch.empty(shape[-1:], device=device))

        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert chosen(2, 3, 8, dtype=dtype) == installed
        assert not chosen(2, 8, device="cpu") and not chosen(2, 8, dtype=torch.float64) and not chosen(0, 8)
        most = module.MAX_SIZE
        assert chosen(1, most) == installed and chosen(1, 4 * most, groups=4) == installed
        assert not chosen(1, most + 1)
        x = torch.empty(1, 8, device="cuda")
        assert not module.is_chosen(x, 1, torch.empty(8, dtype=torch.float64, device="cuda"))


@pytest.mark.parametrize("by_kernels", [False, True])
def test_only_inputs_are_kept(by_kernels: bool, request: pytest.FixtureRequest) -> None:
    if by_kernels:
        request.getfixturevalue("kernels")
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
