"""One token after the other on a GPU: the kernels that only decoding has, at the sizes of 1.3B models and at odd ones,
and small models that decode by them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close, relative_error
from tests.models.small import assert_same_cache
from torch import Tensor

from ccq.bench.decode import Decoder
from ccq.bench.measure import Card
from ccq.models import CCQCache, CCQForCausalLM, preset
from ccq.nn.mixers import state_tensors
from ccq.ops.gated_delta_rule import gated_delta_rule_reference
from ccq.ops.gla import gated_linear_attention_reference
from ccq.ops.joint_linear import add_linear, gated_linear, joint_linear
from ccq.ops.query import (
    KeyStatistics,
    LinearGate,
    PackedKeyStatistics,
    curvature_conditioned_query,
    update_and_read_,
)
from ccq.ops.residual_rms_norm import residual_rms_norm
from ccq.ops.short_convolution import forward as short_convolution
from ccq.ops.ssd import state_space_duality_reference
from ccq.ops.write_rule_step import write_token

pytest.importorskip("triton")
from ccq.ops.joint_linear import kernels as linear_kernels
from ccq.ops.query import step as read_kernels
from ccq.ops.short_convolution import kernels as convolution_kernels
from ccq.ops.write_rule_step import kernels as rule_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
WIDE = 1e-5
"""Relative error allowed to sums of 2048 products in float32."""
SINGLE = 1e-6
"""The same to states in float32."""

by_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def memory_as_users_have_it() -> None:
    """Filling what `torch.empty` returns would be part of every captured graph and compiled function."""
    torch.utils.deterministic.fill_uninitialized_memory = False


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def rounding(dtype: torch.dtype) -> float:
    return max(2 * torch.finfo(dtype).eps, 2e-6)


def draw_maps(inputs: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Weights for outputs of size one."""
    return [(draw(size, inputs) * inputs**-0.5).to(dtype) for size in sizes]


@pytest.mark.parametrize(("inputs", "sizes"), [(2048, (1536, 3072, 16, 5632)), (700, (130, 7))])
@by_half
def test_joint_linear(dtype: torch.dtype, inputs: int, sizes: tuple[int, ...]) -> None:
    """For 1, 8 and 16 vectors, with the same bits for a vector that is there every time."""
    weights, x = draw_maps(inputs, sizes, dtype), draw(16, inputs, dtype=dtype)
    found = {}
    for vectors in (1, 8, 16):
        found[vectors] = joint_linear(x[:vectors, None], weights, wide=1)
        for i, (y, weight) in enumerate(zip(found[vectors], weights, strict=True)):
            limit = WIDE if i == len(sizes) - 1 else rounding(dtype)
            assert_close(f"{vectors} vectors, map {i}", y[:, 0], x[:vectors].double() @ weight.double().t(), limit)
    for few, some, most in zip(*found.values(), strict=True):
        assert torch.equal(few[0], some[0]) and torch.equal(some, most[:8])


@pytest.mark.parametrize(("inputs", "size"), [(2048, 5632), (700, 130)])
@by_half
def test_gated_linear(dtype: torch.dtype, inputs: int, size: int) -> None:
    weights, x = draw_maps(inputs, (size, size), dtype), draw(16, inputs, dtype=dtype)
    found = {}
    for vectors in (1, 8, 16):
        found[vectors] = gated_linear(x[:vectors], *weights)
        gate, y = (x[:vectors].double() @ weight.double().t() for weight in weights)
        assert_close(f"{vectors} vectors", found[vectors], F.silu(gate) * y, rounding(dtype))
    assert torch.equal(found[1][0], found[8][0]) and torch.equal(found[8], found[16][:8])


@pytest.mark.parametrize(("inputs", "size"), [(5632, 2048), (700, 130)])
@by_half
def test_add_linear(dtype: torch.dtype, inputs: int, size: int) -> None:
    (weight,), x, residual = (
        draw_maps(inputs, (size,), dtype),
        draw(16, inputs, dtype=dtype),
        draw(16, size, dtype=dtype),
    )
    found = {}
    for vectors in (1, 8, 16):
        found[vectors] = add_linear(residual[:vectors], x[:vectors], weight)
        assert torch.equal(found[vectors], residual[:vectors] + joint_linear(x[:vectors], [weight])[0])
    assert_close("sum", found[16], residual.double() + x.double() @ weight.double().t(), rounding(dtype))
    assert torch.equal(found[1][0], found[8][0]) and torch.equal(found[8], found[16][:8])


REFERENCES: dict[str, Callable[..., Any]] = {
    "gla": gated_linear_attention_reference,
    "gated delta rule": gated_delta_rule_reference,
    "ssd": state_space_duality_reference,
}


@pytest.mark.parametrize(("rows", "heads", "size", "value_size"), [(8, 6, 256, 512), (3, 4, 48, 80), (1, 2, 5, 6)])
@by_dtype
@pytest.mark.parametrize("rule", REFERENCES)
def test_one_token_of_a_write_rule(
    rule: str, dtype: torch.dtype, rows: int, heads: int, size: int, value_size: int
) -> None:
    """Of state space duality with keys that two heads share."""
    groups = heads // 2 if rule == "ssd" else heads
    q, k = (draw(rows, 1, groups, size, dtype=dtype) for _ in range(2))
    v, state = draw(rows, 1, heads, value_size, dtype=dtype), draw(rows, heads, size, value_size)
    log_decay = -0.3 * draw(rows, 1, heads, *((size,) if rule == "gla" else ())).abs()
    beta = torch.sigmoid(draw(rows, 1, heads)) if rule == "gated delta rule" else None
    if beta is not None:
        k = F.normalize(k.float(), dim=-1).to(dtype)
    scale, before = size**-0.5, state.clone()
    arguments = [x for x in (q, k, v, log_decay, beta, state) if x is not None]
    expected = REFERENCES[rule](*(x.double().cpu() for x in arguments), scale)
    found = write_token(q, k, v, log_decay, beta, state, scale, in_place=False)
    assert torch.equal(state, before)
    assert found.output.dtype == dtype
    assert_close("output", found.output.cpu(), expected.output, rounding(dtype))
    assert_close("state", found.state.cpu(), expected.state, SINGLE)
    there = write_token(q, k, v, log_decay, beta, state, scale, in_place=True)
    assert there.state is state and torch.equal(state, found.state) and torch.equal(there.output, found.output)


@pytest.mark.parametrize(("rows", "channels", "width"), [(8, (1536, 1536, 3072), 4), (3, (5, 300), 2)])
@by_dtype
def test_one_token_of_short_convolutions(dtype: torch.dtype, rows: int, channels: tuple[int, ...], width: int) -> None:
    """Several in a row, each as by the kernel of many tokens; states move on bit for bit."""
    weights = [draw(each, width, dtype=dtype) for each in channels]
    states = [draw(rows, width - 1, each, dtype=dtype) for each in channels]
    for _ in range(3):
        xs = [draw(rows, 1, each, dtype=dtype) for each in channels]
        outputs, before = [torch.empty_like(x) for x in xs], [state.clone() for state in states]
        torch.ops.ccq.short_convolution_token_(xs, weights, states, outputs)
        for x, weight, old, state, y in zip(xs, weights, before, states, outputs, strict=True):
            assert torch.equal(state, torch.cat((old, x), 1)[:, 1:])
            several = short_convolution(x, weight, None, old, None)
            assert_close("y", y, several, rounding(dtype))
            window = (torch.cat((old, x), 1).double() * weight.t().double()).sum(1, keepdim=True)
            assert_close("formula", y, F.silu(window), rounding(dtype))


@pytest.mark.parametrize(("rows", "heads", "size"), [(8, 6, 256), (3, 2, 40), (2, 3, 71), (1, 1, 5)])
@by_dtype
@torch.no_grad()
def test_one_token_of_the_read_step(dtype: torch.dtype, rows: int, heads: int, size: int) -> None:
    """Several in a row, with new statistics and with packed ones that are overwritten, against the recurrence in
    float64; every sequence has a count of its own, and the gate is one that the kernel computes.
    """
    keys = F.normalize(draw(rows, 30, heads, size).double(), dim=-1)
    sums = torch.einsum("nthd,nthe->nhde", keys, keys).float(), keys.sum(1).float()
    anew = KeyStatistics(*sums, 30 + torch.arange(rows, device=DEVICE))
    packed = PackedKeyStatistics(*(x.clone() for x in PackedKeyStatistics.of(anew)))
    places = [x.data_ptr() for x in packed]
    exact = KeyStatistics(*(x.double().cpu() for x in sums), anew.count.cpu())
    weight, bias = draw(heads, heads * size, dtype=dtype) * (heads * size) ** -0.5, draw(heads)
    for _ in range(4):
        q, k = (draw(rows, 1, heads, size, dtype=dtype) for _ in range(2))
        linear = LinearGate(q.flatten(2), weight, bias, None)
        gate = torch.sigmoid(linear.inputs.double() @ weight.double().T + bias.double())
        inputs = [x.double().cpu() for x in (q, k, gate)]
        options = {"return_correction": True, "query_dtype": torch.float32}
        expected = curvature_conditioned_query(*inputs, statistics=exact, return_correction=True, backend="reference")
        apart = curvature_conditioned_query(q, k, gate, statistics=anew, backend="triton", **options)
        together = update_and_read_(q, k, linear, packed, backend="triton", **options)
        anew, exact = apart.statistics, expected.statistics
        for found, statistics in ((apart, anew), (together, packed.unpacked())):
            assert_close("correction", found.correction.cpu(), expected.correction, 5e-6)
            assert_close("query", found.query.cpu(), expected.query, 5e-6)
            assert_close("second moment", statistics.second_moment.cpu(), exact.second_moment, SINGLE)
            assert_close("total", statistics.total.cpu(), exact.total, SINGLE)
            assert torch.equal(statistics.count.cpu(), exact.count)
    assert [x.data_ptr() for x in packed] == places


@torch.no_grad()
def test_a_kernel_waits_for_the_one_before_it() -> None:
    """Kernels that start early, each reading what the one before it writes last, many times over."""
    size, rows = 2048, 8
    weights = [(draw(size, size) * size**-0.5).bfloat16() for _ in range(2)]
    x, norm = draw(rows, 1, size, dtype=torch.bfloat16), torch.ones(size, device=DEVICE)

    def chain(wait: Callable[[], None]) -> Tensor:
        y = x
        for _ in range(200):
            for weight in weights:
                (y,) = joint_linear(y, [weight])
                wait()
            y, _ = residual_rms_norm(y, norm, 1e-6)
            wait()
        return y

    expected = chain(torch.cuda.synchronize)
    for _ in range(5):
        assert torch.equal(chain(lambda: None), expected)
    found = torch.empty_like(expected)
    replay = Card().capture(lambda: found.copy_(chain(lambda: None)))
    for _ in range(5):
        found.zero_()
        replay()
        assert torch.equal(found, expected)


# Models that decode by them.


def language_model(arm: str, **changes: Any) -> CCQForCausalLM:
    """Weights that are exact in bfloat16, in float32 on a CPU, with gates away from their start."""
    model = CCQForCausalLM(preset(f"{arm}-tiny", vocab_size=50, initializer_range=0.1, **changes)).eval()
    with torch.no_grad():
        for step in model.read_steps():
            for parameter in step.parameters():
                parameter.normal_(std=0.3)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def placed(model: CCQForCausalLM) -> CCQForCausalLM:
    return copy.deepcopy(model).to(DEVICE, torch.bfloat16)


KERNELS = {
    "joint linear": (linear_kernels, "joint"),
    "gated linear": (linear_kernels, "gated"),
    "convolution": (convolution_kernels, "token"),
    "write rule": (rule_kernels, "write_token"),
    "read step": (read_kernels, "update_and_read_token"),
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that ran; of those that can overwrite a state or not, where they did."""
    found: set[str] = set()

    def watched(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            if options.get("in_place", True):
                found.add(name)
            return inner(*given, **options)

        return run

    for name, (module, function) in KERNELS.items():
        monkeypatch.setattr(module, function, watched(name, getattr(module, function)))
    return found


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq"])
@torch.no_grad()
def test_decoding_is_reading_at_once(arm: str, used: set[str]) -> None:
    """Behind a prompt; against float32 on a CPU, with at most twice the error of reading all at once on the GPU."""
    model, tokens = language_model(arm), torch.randint(50, (8, 90))
    half, given = placed(model), tokens.to(DEVICE)
    exact, at_once = model(tokens).logits[:, 70:], half(given).logits[:, 70:]
    assert used == set()
    cache = CCQCache(half.config)
    half(given[:, :70], cache=cache)
    places = [x.data_ptr() for layer in cache.layers for x in state_tensors(layer.state).values()]
    single = torch.cat([half(token, cache=cache).logits for token in given[:, 70:].split(1, 1)], 1)
    assert used == set(KERNELS)
    assert [x.data_ptr() for layer in cache.layers for x in state_tensors(layer.state).values()] == places
    error, allowed = relative_error(single.cpu(), exact), 2 * relative_error(at_once.cpu(), exact)
    print(f"relative error {error:.2e} (allowed {allowed:.2e})")
    assert error <= allowed


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq"])
@torch.no_grad()
def test_a_replayed_step_is_an_eager_one_bit_for_bit(arm: str) -> None:
    half, text = placed(language_model(arm)), torch.randint(50, (4, 70)).to(DEVICE)
    eager, replayed = Decoder(half, text), Decoder(half, text)
    replay = Card().capture(replayed.step)
    for _ in range(3):  # as often as the step ran before it was captured
        eager.step()
    for _ in range(8):
        eager.step()
        replay()
        assert torch.equal(replayed.token, eager.token)
    assert_same_cache(replayed.cache, eager.cache, 0.0)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@torch.no_grad()
def test_one_graph_decodes_every_token() -> None:
    torch._dynamo.reset()
    half = placed(language_model("gated-deltanet+ccq", num_layers=1))
    tokens = torch.randint(50, (4, 76)).to(DEVICE)
    cache = CCQCache(half.config, static=True)
    half(tokens[:, :70], cache=cache)
    eager = copy.deepcopy(cache)
    places = [x.data_ptr() for layer in cache.layers for x in state_tensors(layer.state).values()]
    compiled = torch.compile(half, fullgraph=True, backend="aot_eager")
    for token in tokens[:, 70:].split(1, 1):
        assert_close("logits", compiled(token, cache=cache).logits, half(token, cache=eager).logits, 5e-2)
    assert_same_cache(cache, eager, 5e-2)
    assert [x.data_ptr() for layer in cache.layers for x in state_tensors(layer.state).values()] == places
