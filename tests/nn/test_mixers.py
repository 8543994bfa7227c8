"""The mixers: against the token loop, and against themselves for padding, packing, and any cut into calls."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.nn.token_loop import mixer_loop
from torch import Tensor, nn

import ccq.nn.mixers.gated_deltanet as gated_deltanet_module
import ccq.nn.mixers.gated_linear_attention as gated_linear_attention_module
import ccq.nn.read as read_module
from ccq.nn import CurvatureConditionedQuery, GatedDeltaNet, GatedLinearAttention, MixerState

HIDDEN, HEADS, SIZE, VALUE = 12, 2, 4, 6
BACKBONES = ["gla", "gla without convolution", "gated-deltanet"]
READS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "presplit": {"gate": "presplit"},
    "head": {"gate": "head"},
    "attached, kept length": {"gate": "attached", "keep_length": True},
    "fixed, uncentred": {"gate": 0.5, "centred": False},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

Mixer = GatedLinearAttention | GatedDeltaNet


def make(backbone: str, read: dict[str, Any] | None = None, dtype: torch.dtype = torch.float64) -> Mixer:
    """A mixer with weights of size one and a gate away from its start, so that no part of it is negligible."""
    step = None if read is None else CurvatureConditionedQuery(HEADS, SIZE, **read)
    layer: Mixer
    if backbone == "gated-deltanet":
        layer = GatedDeltaNet(HIDDEN, HEADS, SIZE, VALUE, read=step, max_a=2.0)
    else:
        convolution = 4 if backbone == "gla" else None
        layer = GatedLinearAttention(HIDDEN, HEADS, SIZE, VALUE, read=step, short_convolution=convolution)
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
        if step is not None:
            for parameter in step.parameters():
                parameter.normal_()
    return layer.to(dtype)


CASES = [
    pytest.param(backbone, options, id=f"{backbone}, {read}")
    for backbone in BACKBONES
    for read, options in READS.items()
]


def assert_same_state(actual: MixerState, expected: MixerState, tolerance: float) -> None:
    """Every tensor of two states."""
    pairs = [("memory", actual.memory, expected.memory)]
    assert (actual.statistics is None) == (expected.statistics is None)
    if actual.statistics is not None and expected.statistics is not None:
        assert torch.equal(actual.statistics.count, expected.statistics.count)
        pairs.append(("second moment", actual.statistics.second_moment, expected.statistics.second_moment))
        pairs.append(("total", actual.statistics.total, expected.statistics.total))
    assert (actual.convolution is None) == (expected.convolution is None)
    for a, b in zip(actual.convolution or (), expected.convolution or (), strict=True):
        pairs.append(("convolution", a, b))
    for name, a, b in pairs:
        assert_close(name, a, b, tolerance)


def rows_of(state: MixerState, row: int) -> MixerState:
    """The state of one sequence."""
    pick = slice(row, row + 1)
    statistics = None if state.statistics is None else type(state.statistics)(*(x[pick] for x in state.statistics))
    convolution = None if state.convolution is None else tuple(x[pick] for x in state.convolution)
    return MixerState(state.memory[pick], statistics, convolution)


@pytest.mark.parametrize(("backbone", "read"), CASES)
def test_equals_the_token_loop_in_values_and_every_gradient(backbone: str, read: dict[str, Any] | None) -> None:
    layer = make(backbone, read)
    x = torch.randn(1, 19, HIDDEN, dtype=torch.float64, requires_grad=True)
    output, _ = layer(x)
    expected = mixer_loop(layer, x[0]).unsqueeze(0)
    assert_close("output", output, expected, 1e-12)
    upstream = torch.randn_like(output)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    ours = torch.autograd.grad(output, (x, *parameters), upstream)
    theirs = torch.autograd.grad(expected, (x, *parameters), upstream)
    for name, a, b in zip(("x", *names), ours, theirs, strict=True):
        assert b.any(), f"{name} receives no gradient"
        assert_close(name, a, b, 1e-9)


@pytest.mark.parametrize(("backbone", "read"), CASES)
def test_chunked_equals_reference_beyond_one_chunk(
    backbone: str, read: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same layer with every operator replaced by its plain recurrence, on padded rows longer than a chunk."""
    layer = make(backbone, read)
    x = torch.randn(2, 90, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 90)
    mask[0, :7] = 0
    mask[1, 85:] = 0
    upstream = torch.randn_like(x)
    results = []
    for backend in ("torch", "reference"):
        for module, name in (
            (read_module, "curvature_conditioned_query"),
            (gated_linear_attention_module, "gated_linear_attention"),
            (gated_deltanet_module, "gated_delta_rule"),
        ):
            operator = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, f=operator, b=backend, **kw: f(*a, **{**kw, "backend": b}))
        output, state = layer(x, mask=mask)
        gradients = torch.autograd.grad((output * upstream).sum() + state.memory.sum(), (x, *layer.parameters()))
        results.append((output, state, gradients))
        monkeypatch.undo()
    (output, state, gradients), (expected, expected_state, expected_gradients) = results
    assert_close("output", output, expected, 1e-12)
    assert_same_state(state, expected_state, 1e-12)
    for name, a, b in zip(
        ("x", *(name for name, _ in layer.named_parameters())), gradients, expected_gradients, strict=True
    ):
        assert_close(name, a, b, 1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("backbone", "read"), CASES)
def test_every_cut_and_token_by_token_equal_one_call(
    backbone: str, read: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    layer = make(backbone, read, dtype)
    x = torch.randn(2, 13, HIDDEN, dtype=dtype)
    whole, last = layer(x)
    for cut in range(14):
        first, state = layer(x[:, :cut])
        second, after = layer(x[:, cut:], state=state)
        assert_close(f"output, cut at {cut}", torch.cat((first, second), 1), whole, TOLERANCE[dtype])
        assert_same_state(after, last, TOLERANCE[dtype])
    state, outputs = None, []
    for t in range(13):
        output, state = layer(x[:, t : t + 1], state=state)
        outputs.append(output)
    assert_close("output, token by token", torch.cat(outputs, 1), whole, TOLERANCE[dtype])
    assert_same_state(state, last, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("backbone", "read"), CASES)
def test_padded_rows_equal_the_rows_alone(backbone: str, read: dict[str, Any] | None, dtype: torch.dtype) -> None:
    """Padding left, right, on both sides, none and nothing else; then a second call that goes on from the states."""
    spans = [(4, 11), (0, 6), (2, 9), (0, 11), (10, 11), (0, 0)]
    layer = make(backbone, read, dtype)
    x = torch.randn(len(spans), 11, HIDDEN, dtype=dtype)
    more = torch.randn(len(spans), 3, HIDDEN, dtype=dtype)
    mask = torch.zeros(len(spans), 11)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1
    output, state = layer(x, mask=mask)
    continued, last = layer(more, state=state)
    for row, (start, end) in enumerate(spans):
        alone = torch.cat((x[row, start:end], more[row])).unsqueeze(0)
        expected, expected_last = layer(alone)
        got = torch.cat((output[row, start:end], continued[row])).unsqueeze(0)
        assert_close("output", got, expected, TOLERANCE[dtype])
        assert_same_state(rows_of(last, row), expected_last, TOLERANCE[dtype])
        if last.statistics is not None:
            assert last.statistics.count[row] == end - start + 3
    assert not output[mask == 0].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("backbone", "read"), CASES)
def test_packed_documents_equal_the_documents_alone(
    backbone: str, read: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    boundaries = [0, 5, 5, 6, 17, 17]
    layer = make(backbone, read, dtype)
    x = torch.randn(1, 17, HIDDEN, dtype=dtype)
    more = torch.randn(5, 2, HIDDEN, dtype=dtype)
    output, state = layer(x, cu_seqlens=torch.tensor(boundaries))
    # The states of packed documents are states of rows: unpacked input goes on from them.
    continued, last = layer(more, state=state)
    for n, (start, end) in enumerate(pairwise(boundaries)):
        expected, expected_last = layer(torch.cat((x[:, start:end], more[n : n + 1]), 1))
        assert_close("output", torch.cat((output[:, start:end], continued[n : n + 1]), 1), expected, TOLERANCE[dtype])
        assert_same_state(rows_of(last, n), expected_last, TOLERANCE[dtype])


@pytest.mark.parametrize(("backbone", "read"), CASES)
def test_gradients_of_padded_and_packed_input_equal_those_of_single_rows(
    backbone: str, read: dict[str, Any] | None
) -> None:
    layer = make(backbone, read)
    documents = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in (5, 1, 7)]

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(layer.parameters())))

    expected = gradients(sum(layer(d.unsqueeze(0))[0].square().sum() for d in documents))
    padded = torch.randn(3, 7, HIDDEN, dtype=torch.float64)
    mask = torch.zeros(3, 7)
    for row, d in enumerate(documents):
        padded[row, 7 - len(d) :], mask[row, 7 - len(d) :] = d, 1
    packed, boundaries = torch.cat(documents).unsqueeze(0), torch.tensor([0, 5, 6, 13])
    results = {
        "padded": gradients(layer(padded, mask=mask)[0].square().sum()),
        "packed": gradients(layer(packed, cu_seqlens=boundaries)[0].square().sum()),
    }
    for kind, result in results.items():
        for (name, _), a, b in zip(layer.named_parameters(), result, expected, strict=True):
            assert_close(f"{kind} {name}", a, b, 1e-10)


@pytest.mark.parametrize(("backbone", "read"), CASES)
def test_gradients_flow_through_the_state(backbone: str, read: dict[str, Any] | None) -> None:
    """Two calls joined by a state that stays in the graph have the gradients of one call."""
    layer = make(backbone, read)
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    expected = torch.autograd.grad(layer(x)[0], (x, *layer.parameters()), upstream)
    for cut in (1, 2, 5):
        first, state = layer(x[:, :cut])
        second, _ = layer(x[:, cut:], state=state)
        ours = torch.autograd.grad(torch.cat((first, second), 1), (x, *layer.parameters()), upstream)
        for name, a, b in zip(("x", *(name for name, _ in layer.named_parameters())), ours, expected, strict=True):
            assert_close(f"{name}, cut at {cut}", a, b, 1e-9)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("rows", [0, 2])
def test_no_tokens_leave_the_state_as_it_is(backbone: str, rows: int) -> None:
    layer = make(backbone, READS["presplit"])
    _, state = layer(torch.randn(rows, 5, HIDDEN, dtype=torch.float64))
    output, after = layer(torch.randn(rows, 0, HIDDEN, dtype=torch.float64), state=state)
    assert output.shape == (rows, 0, HIDDEN)
    assert_same_state(after, state, 0.0)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("gate", ["attached", 0.0])
def test_attaching_changes_no_bit(backbone: str, gate: str | float) -> None:
    """A read step at its start on a trained layer: same output, bit for bit, in one call and token by token."""
    plain = make(backbone, None, torch.float32)
    attached = make(backbone, None, torch.float32)
    attached.load_state_dict(plain.state_dict())
    attached.read = CurvatureConditionedQuery(HEADS, SIZE, gate=gate, keep_length=True)
    x = torch.randn(2, 70, HIDDEN)
    assert torch.equal(attached(x)[0], plain(x)[0])
    states: list[MixerState | None] = [None, None]
    for t in range(3):
        (a, states[0]), (b, states[1]) = (
            layer(x[:, t : t + 1], state=s) for layer, s in zip((attached, plain), states, strict=True)
        )
        assert torch.equal(a, b)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_off_keeps_no_statistics_and_equals_the_loop(backbone: str) -> None:
    layer = make(backbone, READS["presplit"])
    layer.read.enabled = False
    x = torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    output, state = layer(x)
    assert state.statistics is None
    assert_close("output", output, mixer_loop(layer, x[0]).unsqueeze(0), 1e-12)
    second, after = layer(x, state=state)
    assert after.statistics is None
    assert_close("continued", second, mixer_loop(layer, torch.cat((x[0], x[0])))[9:].unsqueeze(0), 1e-12)


def test_decay_starts_in_the_range_asked_for() -> None:
    layer = GatedDeltaNet(8, 4000, 1, 1, max_a=1.5, dt_min=0.001, dt_max=0.02)
    a, dt = layer.A_log.detach().exp(), nn.functional.softplus(layer.dt_bias.detach())
    assert 0 < a.min() <= a.max() <= 1.5
    assert math.isclose(a.mean(), 0.75, rel_tol=0.05)
    assert 0.001 * 0.999 <= dt.min() <= dt.max() <= 0.02 * 1.001
    assert math.isclose(dt.log().mean(), (math.log(0.001) + math.log(0.02)) / 2, rel_tol=0.02)
    assert layer.A_log._no_weight_decay
    assert layer.dt_bias._no_weight_decay


@pytest.mark.parametrize("backbone", BACKBONES)
def test_bfloat16_stays_near_float64(backbone: str) -> None:
    """Weights, input and output in bfloat16, states in float32."""
    layer = make(backbone, READS["presplit"])
    x = torch.randn(2, 40, HIDDEN, dtype=torch.float64).bfloat16()
    half = make(backbone, READS["presplit"], torch.bfloat16)
    half.load_state_dict(layer.state_dict())
    layer.load_state_dict(half.state_dict())
    output, state = half(x)
    assert output.dtype == torch.bfloat16
    assert state.memory.dtype == state.statistics.second_moment.dtype == torch.float32
    assert_close("output", output, layer(x.double())[0], 0.03)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_bad_input_is_named(backbone: str) -> None:
    layer = make(backbone, READS["presplit"])
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    _, state = layer(x)
    with pytest.raises(ValueError, match="state belongs to 2 sequences, but the input has 4"):
        layer(x.repeat(2, 1, 1), state=state)
    with pytest.raises(ValueError, match="state belongs to 2 sequences, but the input has 1"):
        layer(x[:1], state=state)
    with pytest.raises(ValueError, match="state has no key statistics"):
        layer(x, state=state._replace(statistics=None))
    if state.convolution is not None:
        with pytest.raises(ValueError, match="made by a layer without convolutions"):
            layer(x, state=state._replace(convolution=None))
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 12\]"):
        layer(x[..., :5])
    with pytest.raises(ValueError, match="mask has a hole in row 1"):
        layer(x, mask=torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="must start at 0 and end at T = 5"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 3]))


def test_a_read_step_for_other_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="made for 3 heads of 4, but the layer has 2 heads of 4"):
        GatedLinearAttention(HIDDEN, HEADS, SIZE, VALUE, read=CurvatureConditionedQuery(3, SIZE))
    with pytest.raises(ValueError, match="max_a must be above 0"):
        GatedDeltaNet(HIDDEN, HEADS, SIZE, VALUE, max_a=0)
