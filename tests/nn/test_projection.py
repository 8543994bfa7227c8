"""Linear maps of one input: when they are one kernel, and that a layer is the same layer then, on a GPU or in Triton's
interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close, relative_error
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ccq.nn import CurvatureConditionedQuery, GatedDeltaNet, GatedLinearAttention, SwiGLU, projection
from ccq.nn.mixers import gated_linear_attention, state_tensors
from ccq.nn.projection import add_projection, gated_projection, is_exactly, plain_weights, project
from ccq.ops import joint_linear

pytest.importorskip("triton")
from ccq.ops.joint_linear import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, HEADS, SIZE, VALUE = 40, 2, 16, 32

by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


class Adapter(nn.Linear):
    """More than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 3


class LowRank(nn.Module):
    """What a library of adapters puts in the place of a linear map."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        shapes = (2, base.in_features), (base.out_features, 2)
        self.down, self.up = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.to(base.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def linear(outputs: int = 3, **options: Any) -> nn.Linear:
    return nn.Linear(HIDDEN, outputs, bias=False, **options)


def with_another_forward() -> nn.Linear:
    """As accelerate changes a module whose weight is elsewhere until it is called."""
    found = linear()
    inner = found.forward
    found.forward = lambda x: inner(x) + 3  # type: ignore[method-assign]
    return found


def watched(register: str) -> nn.Linear:
    found = linear()
    getattr(found, register)(lambda *_: None)
    return found


def parametrized() -> nn.Linear:
    found = linear()
    parametrize.register_parametrization(found, "weight", Doubled())
    return found


MORE_THAN_THEIR_WEIGHT: dict[str, Callable[[], nn.Module]] = {
    "adapter": lambda: Adapter(HIDDEN, 3, bias=False),
    "low rank": lambda: LowRank(linear()),
    "hook": lambda: watched("register_forward_hook"),
    "pre-hook": lambda: watched("register_forward_pre_hook"),
    "parametrization": parametrized,
    "another forward": with_another_forward,
    "no linear map": nn.Identity,
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels run on a CPU too; the names of those that ran."""
    found: list[str] = []
    for name in ("joint", "gated", "added"):
        inner = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *given, name=name, inner=inner: (found.append(name), inner(*given))[1]
        )

    def is_chosen(x: Tensor, weights: list[Tensor]) -> bool:
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *weights))
        few = x.numel() <= joint_linear.MAX_VECTORS * x.shape[-1]
        return few and x.dtype in (torch.float16, torch.bfloat16) and not recorded

    if DEVICE == "cpu":
        for module in (projection, joint_linear):
            monkeypatch.setattr(module, "is_chosen", is_chosen)
    return found


def test_weights_of_plain_maps() -> None:
    first, second = linear(), linear(5)
    found = plain_weights(first, second)
    assert found is not None and found[0] is first.weight and found[1] is second.weight
    assert is_exactly(first, nn.Linear)


@pytest.mark.parametrize("kind", MORE_THAN_THEIR_WEIGHT)
def test_a_map_that_is_more_than_its_weight_has_none(kind: str) -> None:
    other = MORE_THAN_THEIR_WEIGHT[kind]()
    assert not is_exactly(other, nn.Linear)
    for linears in ((other,), (other, linear()), (linear(), other)):
        assert plain_weights(*linears) is None


def test_a_bias_is_no_weight() -> None:
    biased = nn.Linear(HIDDEN, 3)
    assert is_exactly(biased, nn.Linear) and plain_weights(linear(), biased) is None


def test_a_hook_that_is_gone_changes_nothing() -> None:
    plain = linear()
    handle = plain.register_forward_hook(lambda *_: None)
    assert plain_weights(plain) is None
    handle.remove()
    assert plain_weights(plain) is not None


@pytest.mark.usefixtures("gpu_rounding")
@by_dtype
@torch.no_grad()
def test_few_vectors_are_one_kernel(dtype: torch.dtype, used: list[str]) -> None:
    maps = [linear(outputs, device=DEVICE, dtype=dtype) for outputs in (3, 40, 40)]
    x = torch.randn(2, 5, HIDDEN, device=DEVICE).to(dtype)
    residual = torch.randn(2, 5, 40, device=DEVICE).to(dtype)
    found, gated, total = project(x, *maps), gated_projection(x, *maps[1:]), add_projection(residual, x, maps[1])
    assert used == ["joint", "gated", "added"]
    products = [x.double() @ each.weight.double().t() for each in maps]
    for y, product in zip(found, products, strict=True):
        assert y.dtype == dtype
        assert_close("product", y, product, torch.finfo(dtype).eps / 2)
    _, gate, up = products
    assert_close("gated", gated, gate * torch.sigmoid(gate) * up, 2 * torch.finfo(dtype).eps)
    assert_close("total", total, residual.double() + gate, torch.finfo(dtype).eps)


def test_others_are_the_maps_themselves(used: list[str]) -> None:
    """Many vectors, float32, and where a gradient is wanted."""
    half = [linear(3, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    single = [linear(3, device=DEVICE) for _ in range(2)]
    many, few = torch.randn(joint_linear.MAX_VECTORS + 1, HIDDEN, device=DEVICE), torch.randn(2, HIDDEN, device=DEVICE)
    with torch.no_grad():
        for maps, x in ((half, many.bfloat16()), (single, few)):
            assert all(torch.equal(a, b(x)) for a, b in zip(project(x, *maps), maps, strict=True))
            gated_projection(x, *maps)
            residual = torch.randn(len(x), 3, device=DEVICE).to(x)
            assert torch.equal(add_projection(residual, x, maps[0]), residual + maps[0](x))
        # The stream of a model under autocast has more digits than its maps.
        wide = torch.randn(2, 3, device=DEVICE)
        assert torch.equal(add_projection(wide, few.bfloat16(), half[0]), wide + half[0](few.bfloat16()))
    stream = torch.zeros(2, 3, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    add_projection(stream, few.bfloat16(), half[0].requires_grad_(False)).sum().backward()
    assert stream.grad is not None and torch.equal(stream.grad, torch.ones_like(stream))
    half[0].requires_grad_()
    project(few.bfloat16(), *half)[0].sum().backward()
    gated_projection(few.bfloat16(), *half).sum().backward()
    assert all(each.weight.grad is not None for each in half) and used == []


@pytest.mark.parametrize("kind", ["adapter", "low rank", "parametrization", "another forward"])
@torch.no_grad()
def test_a_map_that_is_more_than_its_weight_is_called(kind: str, used: list[str]) -> None:
    other = MORE_THAN_THEIR_WEIGHT[kind]().to(DEVICE, torch.bfloat16)
    plain, x = linear(device=DEVICE, dtype=torch.bfloat16), torch.randn(2, HIDDEN, device=DEVICE).bfloat16()
    for maps in ((other, plain), (plain, other)):
        for found, each in zip(project(x, *maps), maps, strict=True):
            assert torch.equal(found, each(x))
        residual = torch.ones(2, 3, device=DEVICE, dtype=x.dtype)
        if maps[0] is other:
            assert torch.equal(add_projection(residual, x, other), residual + other(x))
        gate, up = (each(x).float() for each in maps)
        assert_close("gated", gated_projection(x, *maps), gate * torch.sigmoid(gate) * up, 0.01)
    assert used == []


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@torch.no_grad()
def test_a_hook_sees_its_calls(register: str, used: list[str]) -> None:
    seen: list[Tensor] = []
    maps = [linear(device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(2, HIDDEN, device=DEVICE).bfloat16()
    getattr(maps[1], register)(lambda module, inputs, *output: seen.append(inputs[0]))
    project(x, *maps)
    gated_projection(x, *maps)
    add_projection(x[:, :3], x, maps[1])
    assert len(seen) == 3 and all(each is x for each in seen) and used == []


class AddedSwiGLU(SwiGLU):
    """To its input, as in a block."""

    def forward(self, x: Tensor) -> Tensor:
        return self.add_to(x, x)


def make(name: str, dtype: torch.dtype) -> nn.Module:
    read = CurvatureConditionedQuery(HEADS, SIZE)
    layer = {
        "gla": lambda: GatedLinearAttention(HIDDEN, HEADS, SIZE, VALUE, read=read),
        "gla with convolution": lambda: GatedLinearAttention(HIDDEN, HEADS, SIZE, VALUE, short_convolution=4),
        "gated deltanet": lambda: GatedDeltaNet(HIDDEN, HEADS, SIZE, VALUE, read=read, max_a=2.0),
        "swiglu": lambda: SwiGLU(HIDDEN, 70),
        "added swiglu": lambda: AddedSwiGLU(HIDDEN, 70),
    }[name]()
    return layer.to(DEVICE, dtype)


def results(layer: nn.Module, x: Tensor, state: Any = None) -> list[Tensor]:
    if isinstance(layer, SwiGLU):
        return [layer(x)]
    output, state = layer(x, state=state)
    return [output, *(each for name, each in state_tensors(state).items() if name != "statistics.count")]


LAYERS = {
    "gla": ["joint", "joint"],
    "gla with convolution": ["joint", "joint"],
    "gated deltanet": ["joint", "joint"],
    "swiglu": ["gated", "joint"],
    "added swiglu": ["gated", "added"],
}
"""The kernels of each: of all maps of the input together, and of the one behind."""


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize("name", LAYERS)
@by_dtype
@torch.no_grad()
def test_a_layer_is_the_same_layer(
    name: str, dtype: torch.dtype, used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against itself in float64, for one token of several sequences and for several of one."""
    layer = make(name, dtype)
    exact = copy.deepcopy(layer).double()
    for shape in ((5, 1), (1, 7)):
        x = torch.randn(*shape, HIDDEN, device=DEVICE).to(dtype)
        used.clear()
        together = results(layer, x)
        assert used == LAYERS[name]
        with monkeypatch.context() as patch:
            for module in (projection, joint_linear):
                patch.setattr(module, "is_chosen", lambda *_: False)
            apart = results(layer, x)
        assert len(used) == 2
        eps = torch.finfo(dtype).eps
        for number, values in enumerate(zip(together, apart, results(exact, x.double()), strict=True)):
            ours, theirs, value = values
            error, allowed = relative_error(ours, value), 1.2 * relative_error(theirs, value) + eps / 4
            assert error <= allowed, f"{number}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.usefixtures("gpu_rounding")
@by_dtype
@torch.no_grad()
def test_logits_of_the_delta_rules_gates_are_not_rounded(dtype: torch.dtype, used: list[str]) -> None:
    layer, x = make("gated deltanet", dtype), torch.randn(5, 1, HIDDEN, device=DEVICE).to(dtype)
    assert isinstance(layer, GatedDeltaNet)
    *_, steps, strengths = layer._project(x)
    assert used == ["joint"]
    for logits, each in ((steps, layer.a_proj), (strengths, layer.b_proj)):
        assert_close("logits", logits, x.double() @ each.weight.double().t(), 1e-5)


@pytest.mark.usefixtures("gpu_rounding")
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_hears_what_is_around_its_maps(name: str, used: list[str]) -> None:
    """A hook, or an adapter in the place of any one of them. Of two tokens, because decays do nothing to the first."""
    layer, x = make(name, torch.bfloat16), torch.randn(3, 2, HIDDEN, device=DEVICE).bfloat16()
    maps = {path: each for path, each in layer.named_modules() if isinstance(each, nn.Linear)}
    names = [path for path, each in maps.items() if each.in_features == HIDDEN or path in ("o_proj", "down_proj")]
    assert len(names) >= (3 if isinstance(layer, SwiGLU) else 6)
    for path in names:
        parent, _, last = path.rpartition(".")
        owner, plain = layer.get_submodule(parent), layer.get_submodule(path)
        before = results(layer, x)[0]
        calls: list[Any] = []
        handle = plain.register_forward_hook(lambda *call, calls=calls: calls.append(call))
        used.clear()
        results(layer, x)
        handle.remove()
        # The maps of the input are together or apart, the one behind goes by itself.
        first, last_one = LAYERS[name]
        expected = [first if path in ("o_proj", "down_proj") else last_one]
        assert len(calls) == 1 and used == expected, path
        used.clear()
        setattr(owner, last, LowRank(plain))
        heard = results(layer, x)[0]
        setattr(owner, last, plain)
        assert used == expected and not torch.allclose(heard, before), path


@pytest.mark.usefixtures("gpu_rounding")
@torch.no_grad()
def test_the_decay_of_gla_in_one_kernel_and_what_is_around_its_maps(
    used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make("gla", torch.float16), torch.randn(3, 1, HIDDEN, device=DEVICE).half()
    assert isinstance(layer, GatedLinearAttention)
    exact = F.logsigmoid(copy.deepcopy(layer.gk_proj).double()(x.double())) / layer.gate_logit_normalizer
    inner, calls = gated_linear_attention.low_rank_log_decay, list[Any]()
    if DEVICE == "cpu":
        monkeypatch.setattr(gated_linear_attention, "low_rank_is_chosen", lambda *_: True)
    monkeypatch.setattr(
        gated_linear_attention, "low_rank_log_decay", lambda *given: (calls.append(given), inner(*given))[1]
    )
    assert_close("log decay", layer._project(x)[-1], exact, 1e-3)
    assert len(calls) == 1 and used == ["joint"]
    for module in (layer.gk_proj, layer.gk_proj[1]):
        heard: list[Any] = []
        handle = module.register_forward_hook(lambda *call, heard=heard: heard.append(call))
        assert_close("log decay", layer._project(x)[-1], exact, 1e-3)
        handle.remove()
        assert len(heard) == 1 and len(calls) == 1
    layer.gk_proj[1] = nn.Sequential(layer.gk_proj[1], Doubled())
    assert_close("log decay", layer._project(x)[-1], F.logsigmoid(layer.gk_proj(x).double()) / 16, 1e-3)
    assert len(calls) == 1


@torch.no_grad()
def test_a_weight_that_is_more_than_a_tensor_stays_with_its_map() -> None:
    class Packed(Tensor):
        pass

    plain = linear()
    plain.weight = nn.Parameter(plain.weight.as_subclass(Packed), requires_grad=False)
    assert type(plain.weight) is Packed and plain_weights(plain) is None
