"""Several linear maps of a few vectors in one kernel, against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import assert_close
from torch import Tensor, library

from ccq.ops import joint_linear as module
from ccq.ops.joint_linear import add_linear, gated_linear, joint_linear

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("gpu_rounding")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = 1e-5
"""Relative error allowed to a sum in float32."""
SHAPES = [
    ((1, 1), 128, (32,)),
    ((3, 1), 70, (40, 33, 1)),
    ((16, 1), 300, (65, 7)),
    ((2, 4), 129, (31, 64, 5, 16)),
    ((8,), 1, (3, 200)),
    ((16, 1), 1300, (70,)),
    ((5,), 512, (33,)),
]
"""Of x without its last dimension, K, and N of each weight: one to four of them, with full and with partial blocks. One
alone has its sums divided among programs, three where there are 1300 inputs.
"""

by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
by_shape = pytest.mark.parametrize(("shape", "inputs", "sizes"), SHAPES)


def draw(
    shape: tuple[int, ...], inputs: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """x, and weights for outputs of size one."""
    x = torch.randn(*shape, inputs).to(dtype)
    return x.to(DEVICE), [(torch.randn(size, inputs) * inputs**-0.5).to(dtype).to(DEVICE) for size in sizes]


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double().unsqueeze(-2) * weight.double()).sum(-1)


@by_shape
@by_dtype
def test_every_map_is_its_product(
    dtype: torch.dtype, shape: tuple[int, ...], inputs: int, sizes: tuple[int, ...]
) -> None:
    """Rounding to nearest is within eps / 2 of every value; the last ones keep the digits of their sums."""
    x, weights = draw(shape, inputs, sizes, dtype)
    for wide in range(len(sizes) + 1):
        found = joint_linear(x, weights, wide=wide)
        assert len(found) == len(sizes)
        for i, (y, weight) in enumerate(zip(found, weights, strict=True)):
            rounded = i < len(sizes) - wide
            assert y.shape == (*shape, len(weight)) and y.dtype == (dtype if rounded else torch.float32)
            assert_close(f"map {i}", y, product(x, weight), torch.finfo(dtype).eps / 2 if rounded else WIDE)


@by_dtype
def test_a_wide_output_has_more_digits_than_a_rounded_one(dtype: torch.dtype) -> None:
    x, weights = draw((8, 1), 200, (40, 40), dtype)
    weights[1] = weights[0]
    narrow, wide = joint_linear(x, weights, wide=1)
    assert torch.equal(wide.to(dtype), narrow) and not torch.equal(wide, narrow.float())


@by_shape
@by_dtype
def test_gated_linear_is_its_formula(
    dtype: torch.dtype, shape: tuple[int, ...], inputs: int, sizes: tuple[int, ...]
) -> None:
    """The products of the formula are rounded as those by themselves: then hardly a number differs."""
    x, weights = draw(shape, inputs, (sizes[0], sizes[0]), dtype)
    found = gated_linear(x, *weights)
    assert found.shape == (*shape, sizes[0]) and found.dtype == dtype
    gate, y = (product(x, weight) for weight in weights)
    assert_close("formula", found, gate / (1 + torch.exp(-gate)) * y, 2 * torch.finfo(dtype).eps)
    gate, y = (each.double() for each in joint_linear(x, weights))
    rounded = (gate / (1 + torch.exp(-gate)) * y).to(dtype)
    assert (found != rounded).sum() <= 0.02 * found.numel()


@by_shape
@by_dtype
def test_add_linear_adds_the_map_that_it_is_by_itself(
    dtype: torch.dtype, shape: tuple[int, ...], inputs: int, sizes: tuple[int, ...]
) -> None:
    x, weights = draw(shape, inputs, sizes[:1], dtype)
    residual = (3 * torch.randn(*shape, sizes[0])).to(dtype).to(DEVICE)
    before = residual.clone()
    found = add_linear(residual, x, *weights)
    assert found.shape == residual.shape and found.dtype == dtype and torch.equal(residual, before)
    assert_close("sum", found, residual.double() + product(x, *weights), torch.finfo(dtype).eps)
    assert torch.equal(found, residual + joint_linear(x, weights)[0])


@by_dtype
def test_strided_vectors_and_weights(dtype: torch.dtype) -> None:
    x, weights = draw((4, 2), 70, (40, 40), dtype)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    views = [weights[0].t().contiguous().t(), torch.cat((weights[1], weights[1]), 1)[:, :70]]
    assert not any(each.is_contiguous() for each in (turned, *views))
    for strided, plain in zip(joint_linear(turned, views, wide=1), joint_linear(x, weights, wide=1), strict=True):
        assert torch.equal(strided, plain)
    assert torch.equal(gated_linear(turned, *views), gated_linear(x, *weights))
    residual = torch.randn(2, 4, 40).to(DEVICE, dtype).transpose(0, 1)
    for weight, view in zip(weights, views, strict=True):
        assert torch.equal(add_linear(residual, turned, view), add_linear(residual.contiguous(), x, weight))
    few, stream = x[:, 0], torch.randn(40, 4).to(DEVICE, dtype).t()
    assert torch.equal(add_linear(stream, few, weights[0]), add_linear(stream.contiguous(), few, weights[0]))


@given(
    rows=st.integers(1, module.MAX_VECTORS),
    inputs=st.integers(1, 300),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    row=st.integers(0, module.MAX_VECTORS - 1),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_a_vector_does_not_depend_on_those_beside_it(
    rows: int, inputs: int, sizes: list[int], row: int, dtype: torch.dtype
) -> None:
    """Not on how many they are, and not on what they hold."""
    x, weights = draw((rows,), inputs, tuple(sizes), dtype)
    row %= rows
    spoilt = torch.full_like(x, float("nan"))
    spoilt[row] = x[row]
    pair = weights[0], weights[0].flip(0).contiguous()
    for other, at in ((x[row : row + 1], 0), (spoilt, row)):
        for together, apart in zip(joint_linear(x, weights, wide=1), joint_linear(other, weights, wide=1), strict=True):
            assert torch.equal(together[row], apart[at])
        assert torch.equal(gated_linear(x, *pair)[row], gated_linear(other, *pair)[at])
        residual, beside = (torch.ones(len(each), sizes[0], device=DEVICE, dtype=dtype) for each in (x, other))
        assert torch.equal(add_linear(residual, x, pair[0])[row], add_linear(beside, other, pair[0])[at])


@pytest.mark.parametrize("installed", [True, False])
def test_the_kernels_are_used_where_they_can_run(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(module, "TRITON_INSTALLED", installed)
    half, other, single, most = torch.bfloat16, torch.float16, torch.float32, module.MAX_VECTORS

    def chosen(
        *shape: int, dtype: torch.dtype = half, weights: tuple[torch.dtype, ...] = (half, half), device: str = "cuda"
    ) -> bool:
        x = torch.empty(*shape, 64, dtype=dtype, device=device)
        return module.is_chosen(x, [torch.empty(5, 64, dtype=each, device=device) for each in weights])

    # Fake tensors of a device that this machine need not have.
    with torch._subclasses.FakeTensorMode():
        for shape in ((1, 1), (most,), (most, 1), (2, most // 2)):
            assert chosen(*shape) == installed
        assert chosen(8, dtype=other, weights=(other,)) == installed
        assert not chosen(8, device="cpu")
        assert not chosen(8, dtype=single, weights=(single, single))
        assert not chosen(8, weights=(half, other)) and not chosen(8, weights=(single, half))
        assert not chosen(most + 1) and not chosen(2, most // 2 + 1) and not chosen(0) and not chosen(3, 0)
        # Without a card torch.autocast("cuda") does nothing but warn.
        for kind in ("cuda", "cpu"):
            monkeypatch.setattr(torch, "is_autocast_enabled", lambda asked, kind=kind: asked == kind)
            assert chosen(8) == (installed and kind == "cpu")


def test_the_kernels_are_not_used_where_a_gradient_is_wanted() -> None:
    with torch._subclasses.FakeTensorMode():
        x, *weights = (torch.empty(8, 64, dtype=torch.float16, device="cuda") for _ in range(3))
        for wanted in (x, weights[1]):
            wanted.requires_grad_()
            assert not module.is_chosen(x, weights)
            with torch.no_grad():
                assert module.is_chosen(x, weights)
            wanted.requires_grad_(False)
        assert module.is_chosen(x, weights)


def test_the_operators_keep_their_promises() -> None:
    x, weights = draw((3,), 70, (40, 33), torch.float16)
    for wide in range(3):
        library.opcheck(torch.ops.ccq.joint_linear.default, (x, weights, wide))
    library.opcheck(torch.ops.ccq.gated_linear.default, (x, weights[0], weights[0].flip(0)))
    library.opcheck(torch.ops.ccq.add_linear.default, (torch.randn_like(x[:, :40]), x, weights[0]))


@pytest.mark.parametrize("wanted", ["x", "weight", "residual", "all"])
def test_a_gradient_asked_of_the_operators_is_refused(wanted: str) -> None:
    x, weights = draw((3,), 20, (4, 4), torch.float16)
    residual = torch.randn(3, 4, device=DEVICE, dtype=x.dtype)
    leaves = {"x": [x], "weight": [weights[1]], "residual": [residual], "all": [x, residual, *weights]}[wanted]
    for leaf in leaves:
        leaf.requires_grad_()
    # A constant would pass here, as a gradient of zero.
    aside = sum(leaf.sum() for leaf in leaves)
    results = {"add": add_linear(residual, x, weights[1])}
    if wanted != "residual":
        results |= {"joint": joint_linear(x, weights)[1], "gated": gated_linear(x, *weights)}
    for name, y in results.items():
        with pytest.raises(RuntimeError, match=f"ccq::{name}_linear has no derivative"):
            (y.sum() + aside).backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
def test_compiles_without_a_break_and_agrees() -> None:
    torch._dynamo.reset()
    x, weights = draw((3, 1), 70, (40, 33), torch.bfloat16)

    def both(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        several = (2 * y for y in joint_linear(x, weights, wide=1))
        return *several, gated_linear(x + 1, weights[0], weights[0]), add_linear(2 * x[..., :40], x, weights[0])

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for eager, found in zip(both(x, *weights), compiled(x, *weights), strict=True):
        assert torch.equal(eager, found)
