"""The kernels of the read step that have a warp for copies alone, on the card they are written for.

They are held against the chunked form in float64, beside the kernels that take every input, and against themselves:
what passes between their warps goes through barriers, and a missing one shows as numbers that differ now and then.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
from tests.gpu.capture import capture
from tests.helpers import relative_error
from tests.ops.query.test_curvature_conditioned_query import Case, make_case, run, spread_keys
from torch import Tensor

from ccq.ops.query import curvature_conditioned_query, curvature_conditioned_query_and_keys, l2_normalize

triton = pytest.importorskip("triton")
from ccq.ops.query import kernels  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or not triton.__version__.startswith(kernels.GLUON_RELEASE),
    reason="needs a GPU of compute capability 9.0 and the release of Triton that these kernels are written for",
)

SHAPES = [(1, 128, 1), (3, 256, 2), (2, 384, 5), (1, 640, 3), (150, 128, 1), (8, 1024, 6), (1, 4096, 6)]
"""Rows, tokens, heads: fewer items than processors, as many, several times as many; chunks that end early."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often each of the kernels was launched."""
    hopper = kernels._hopper()
    counted: collections.Counter[str] = collections.Counter()

    def count(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def counting(*arguments: Any, **options: Any) -> None:
            counted[name] += 1
            function(*arguments, **options)

        return counting

    for name in ("covariance_times", "key_gradients"):
        monkeypatch.setattr(hopper, name, count(name, getattr(hopper, name)))
    return counted


def gradients(q: Tensor, k: Tensor, gate: Tensor, dy: Tensor, **options: Any) -> list[Tensor]:
    """The query and the gradients of q, k and the gate."""
    leaves = [x.detach().requires_grad_() for x in (q, k, gate)]
    query = curvature_conditioned_query(*leaves, backend="triton", **options).query
    return [query.detach(), *torch.autograd.grad(query, leaves, dy)]


def gradients_with_keys(q: Tensor, k: Tensor, gate: Tensor, dy: Tensor, beside: Tensor, **options: Any) -> list[Tensor]:
    """As `gradients`, where `beside` reaches the keys that come back."""
    leaves = [x.detach().requires_grad_() for x in (q, k, gate)]
    result, keys = curvature_conditioned_query_and_keys(*leaves, **{"backend": "triton"} | options)
    return [result.query.detach(), *torch.autograd.grad((result.query, keys), leaves, (dy, beside))]


def draw(rows: int, tokens: int, heads: int) -> tuple[Tensor, ...]:
    random = torch.Generator("cuda").manual_seed(0)
    shape = (rows, tokens, heads, 256)
    q, k, dy = (torch.randn(*shape, generator=random, device="cuda").bfloat16() for _ in range(3))
    return q, k, torch.rand(shape[:3], generator=random, device="cuda"), dy


def check(case: Case, calls: collections.Counter[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    given = case.to(torch.bfloat16)
    # So strong a gate that the query is the correction, more or less: it does not hide behind the query before.
    given = given._replace(gate=given.gate * 256)
    options |= {"want": ("query", "second_moment", "total"), "device": "cuda"}
    actual = run(given, backend="triton", **options)
    assert calls["covariance_times"] >= 2
    assert calls["key_gradients"] >= 1
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "copies_apart", lambda *_: False)
        launched = calls.total()
        plain = run(given, backend="triton", **options)
        assert calls.total() == launched
    exact = run(given.to(torch.float64), backend="torch", **options)
    for name, value in exact.items():
        error, usual = relative_error(actual[name], value), relative_error(plain[name], value)
        assert error <= 1.25 * usual + 1e-6, f"{name}: {error:.2e}, where the other kernels err by {usual:.2e}"


@pytest.mark.parametrize("kind", ["flat", "common mean"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(
    shape: tuple[int, int, int], kind: str, calls: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(spread_keys(kind, make_case(*shape, 256, seen=0)), calls, monkeypatch)


@pytest.mark.parametrize("normalize", [True, "queries", "keys", False])
def test_statistics_and_what_is_normalised(
    normalize: bool | str, calls: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(2, 640, 3, 256)
    if normalize in ("queries", False):
        case = case._replace(k=l2_normalize(case.k))
    check(case, calls, monkeypatch, normalize=normalize)


@pytest.mark.parametrize("normalize", [True, "queries"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_from_elsewhere_is_added_to_that_of_the_keys(
    shape: tuple[int, int, int], normalize: bool | str, calls: collections.Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, k, gate, dy = draw(*shape)
    if normalize is not True:
        k = l2_normalize(k).bfloat16()
    gate, beside = 256 * gate, torch.randn_like(k)
    # As large as what it is added to, so that neither hides.
    own = gradients(q, k, gate, dy, normalize=normalize)[2].float().norm()
    beside = (beside.float() * (own / beside.float().norm())).bfloat16()
    calls.clear()
    actual = gradients_with_keys(q, k, gate, dy, beside, normalize=normalize)
    # A new variant is called twice, the first time only to be compiled.
    called = calls["key_gradients"]
    assert called > 0
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "copies_apart", lambda *_: False)
        plain = gradients_with_keys(q, k, gate, dy, beside, normalize=normalize)
    assert calls["key_gradients"] == called
    doubles = [x.double() for x in (q, k, gate, dy, beside)]
    exact = gradients_with_keys(*doubles, normalize=normalize, backend="torch")
    for name, x, usual, value in zip(("query", "d_q", "d_k", "d_gate"), actual, plain, exact, strict=True):
        error, allowed = relative_error(x, value), relative_error(usual, value)
        assert error <= 1.25 * allowed + 1e-6, f"{name}: {error:.2e}, where the other kernels err by {allowed:.2e}"
    # Rounded once: no worse than the read step's own gradient, rounded, and then added.
    added = gradients(q, k, gate, dy, normalize=normalize)[2] + beside
    assert relative_error(actual[2], exact[2]) <= 1.01 * relative_error(added, exact[2])


def test_a_gradient_from_elsewhere_may_lie_anywhere() -> None:
    q, k, gate, dy = draw(2, 384, 3)
    beside = torch.randn_like(k)
    moved = beside.new_empty(beside.numel() + 1)[1:].view(beside.shape).copy_(beside)
    assert moved.data_ptr() % 16
    strided = torch.stack((beside, beside), -1)[..., 0]
    assert not strided.is_contiguous()
    expected = gradients_with_keys(q, k, gate, dy, beside)
    for other in (moved, strided):
        for found, value in zip(gradients_with_keys(q, k, gate, dy, other), expected, strict=True):
            assert torch.equal(found, value)


@pytest.mark.parametrize("normalize", [True, "queries"])
def test_a_hundred_runs_with_a_gradient_from_elsewhere_are_bit_equal(normalize: bool | str) -> None:
    inputs = draw(8, 1024, 6)
    beside = torch.randn_like(inputs[1])
    first = gradients_with_keys(*inputs, beside, normalize=normalize)
    for _ in range(100):
        for before, now in zip(first, gradients_with_keys(*inputs, beside, normalize=normalize), strict=True):
            assert torch.equal(now, before)


@pytest.mark.parametrize("shape", [(8, 1024, 6), (2, 4096, 5)], ids=str)
def test_a_hundred_runs_are_bit_equal(shape: tuple[int, int, int]) -> None:
    inputs = draw(*shape)
    first = gradients(*inputs)
    for _ in range(100):
        for before, now in zip(first, gradients(*inputs), strict=True):
            assert torch.equal(now, before)


def test_runs_beside_other_work_are_bit_equal() -> None:
    """Whoever has to wait for a processor, or for memory, waits for a slot longer than usual."""
    inputs = draw(4, 2048, 6)
    first = gradients(*inputs)
    other, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(4):
                busy = torch.nn.functional.normalize(busy @ busy)
        for before, now in zip(first, gradients(*inputs), strict=True):
            assert torch.equal(now, before)
    assert busy.isfinite().all()


@pytest.mark.parametrize("row", [0, 4, 8])
def test_rows_do_not_depend_on_the_rows_beside_them(row: int) -> None:
    inputs = draw(9, 384, 2)
    found = gradients(*inputs)
    others = [row != other for other in range(9)]
    for x in inputs:
        x[others] = float("nan")
    for before, now in zip(found, gradients(*inputs), strict=True):
        assert torch.equal(now[row], before[row])
        assert not now[others].isfinite().any()


def test_a_cuda_graph_replays_them() -> None:
    inputs = draw(2, 1024, 6)
    expected = gradients(*inputs)
    graph, outputs = capture(lambda: tuple(gradients(*inputs)))
    for x in outputs:
        x.fill_(float("nan"))
    graph.replay()
    for found, value in zip(outputs, expected, strict=True):
        assert torch.equal(found, value)
