"""Layers and the language model on a GPU, where the read step and the write rules run in kernels.

Exact values are those of the same weights in float64 on a CPU, which tests/nn and tests/models hold against the token
loop. In bfloat16 an error may be at most twice that of the same layer in bfloat16 on a CPU, where the write rules
compute in float32.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from tests.gpu.capture import capture
from tests.helpers import assert_close, relative_error
from torch import Tensor, nn

from ccq.models import CCQForCausalLM, preset
from ccq.nn import CurvatureConditionedQuery, GatedDeltaNet, GatedLinearAttention, Mamba2
from ccq.nn.mixers import state_tensors

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HIDDEN, HEADS, SIZE, VALUE = 128, 2, 64, 128
BACKBONES = ("gla", "gla with convolution", "gated-deltanet", "mamba2")
READS = (None, "presplit", "head")
FEW = 256
"""Tensors with fewer numbers are judged together: the error of one alone is a draw, and so is that of its yardstick."""
SMALL = 3e-2
"""Relative error that they may have in any case."""

Layer = GatedLinearAttention | GatedDeltaNet | Mamba2
Found = dict[str, Tensor]

by_layer = pytest.mark.parametrize(
    ("backbone", "read"), [pytest.param(b, r, id=f"{b}, {r}") for b in BACKBONES for r in READS]
)
by_arm = pytest.mark.parametrize(
    "arm", ["gla", "gla+ccq", "gated-deltanet", "gated-deltanet+ccq", "mamba2", "mamba2+ccq"]
)


@pytest.fixture(autouse=True)
def memory_as_users_have_it() -> None:
    """Filling what `torch.empty` returns would be part of every captured graph and compiled function."""
    torch.utils.deterministic.fill_uninitialized_memory = False


def make(backbone: str, read: str | None) -> Layer:
    """Weights of size one over the root of the inputs, and gates away from their start, in float64 on a CPU."""
    step = None if read is None else CurvatureConditionedQuery(HEADS, SIZE, gate=read)
    layer: Layer
    if backbone == "gated-deltanet":
        layer = GatedDeltaNet(HIDDEN, HEADS, SIZE, VALUE, read=step, max_a=2.0)
    elif backbone == "mamba2":
        # Two heads to each group.
        layer = Mamba2(HIDDEN, 2 * HEADS, SIZE, VALUE // 2, read=step, num_groups=HEADS)
    else:
        convolution = 4 if backbone == "gla with convolution" else None
        layer = GatedLinearAttention(HIDDEN, HEADS, SIZE, VALUE, read=step, short_convolution=convolution)
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
        if step is not None:
            for parameter in step.parameters():
                parameter.normal_(std=0.1)
        # Exact in bfloat16, so that layers of every dtype have the same weights.
        for parameter in layer.parameters():
            parameter.copy_(parameter.bfloat16())
    return layer.double()


def placed(module: Any, device: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(module).to(device, dtype)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().double()


def differentiate(layer: Any, x: Tensor, gradient: Tensor, module: nn.Module | None = None, **options: Any) -> Found:
    """Output, state and every gradient of one call; of a compiled layer `module` has the parameters."""
    parameters = dict((module or layer).named_parameters())
    x = x.clone().requires_grad_()
    result = layer(x, **options)
    found = torch.autograd.grad(result.output, (x, *parameters.values()), gradient.to(x.device, x.dtype))
    names = ("gradient of x", *(f"gradient of {name}" for name in parameters))
    states = {name: tensor.detach() for name, tensor in state_tensors(result.state).items()}
    return {"output": result.output.detach(), **states, **dict(zip(names, found, strict=True))}


def check(actual: Found, exact: Found, yard: Found) -> None:
    failures, few = [], []
    for name, value in exact.items():
        if name == "statistics.count":
            assert torch.equal(actual[name].cpu(), value)
            continue
        error, allowed = relative_error(actual[name].cpu(), value), 2 * relative_error(yard[name], value)
        print(f"{name}: relative error {error:.2e} (allowed {allowed:.2e})")
        if value.numel() < FEW:
            few.append((error, allowed))
        elif not error <= allowed:
            failures.append(f"{name}: {error:.2e} against {allowed:.2e}")
    if few:
        error, allowed = (float(torch.tensor(each).square().mean().sqrt()) for each in zip(*few, strict=True))
        allowed = max(allowed, SMALL)
        if not error <= allowed:
            failures.append(f"root mean square of {len(few)} small ones: {error:.2e} against {allowed:.2e}")
    assert not failures, "; ".join(failures)


@by_layer
def test_gradients_in_half_precision(backbone: str, read: str | None) -> None:
    layer, x, gradient = make(backbone, read), draw(2, 200, HIDDEN), draw(2, 200, HIDDEN)
    exact = differentiate(layer, x, gradient)
    yard = differentiate(placed(layer, "cpu", torch.bfloat16), x.bfloat16(), gradient)
    actual = differentiate(placed(layer, "cuda", torch.bfloat16), x.to("cuda", torch.bfloat16), gradient)
    check(actual, exact, yard)


@by_layer
def test_gradients_in_float32_are_those_of_a_cpu(backbone: str, read: str | None) -> None:
    layer, x, gradient = make(backbone, read), draw(2, 100, HIDDEN), draw(2, 100, HIDDEN)
    expected = differentiate(placed(layer, "cpu", torch.float32), x.float(), gradient)
    actual = differentiate(placed(layer, "cuda", torch.float32), x.to("cuda", torch.float32), gradient)
    for name, value in expected.items():
        assert_close(name, actual[name].cpu(), value, 2e-4 if value.numel() < FEW else 2e-5)


@pytest.mark.parametrize("cuts", [[0, 130], [0, 1, 66, 130], [0, 64, 65, 67, 130], [*range(31), 130]], ids=str)
@by_layer
@torch.no_grad()
def test_chunks_and_single_tokens_are_the_same_layer(backbone: str, read: str | None, cuts: list[int]) -> None:
    layer, x = make(backbone, read), draw(2, 130, HIDDEN)

    def whole(layer: Layer, x: Tensor) -> Found:
        output, state = layer(x)
        return {"output": output, **state_tensors(state)}

    here, given = placed(layer, "cuda", torch.bfloat16), x.to("cuda", torch.bfloat16)
    state, parts = None, []
    for begin, end in itertools.pairwise(cuts):
        output, state = here(given[:, begin:end], state=state)
        parts.append(output)
    actual = {"output": torch.cat(parts, 1), **state_tensors(state)}
    check(actual, whole(layer, x), whole(placed(layer, "cpu", torch.bfloat16), x.bfloat16()))


@by_layer
def test_packed_documents_are_separate_ones(backbone: str, read: str | None) -> None:
    layer, boundaries = make(backbone, read), [0, 30, 30, 95, 130]
    x, gradient = draw(1, 130, HIDDEN), draw(1, 130, HIDDEN)
    half, given = placed(layer, "cuda", torch.bfloat16), x.to("cuda", torch.bfloat16)
    packed = differentiate(half, given, gradient, cu_seqlens=torch.tensor(boundaries, device="cuda"))
    expected = differentiate(layer, x, gradient, cu_seqlens=torch.tensor(boundaries))
    yard = differentiate(
        placed(layer, "cpu", torch.bfloat16), x.bfloat16(), gradient, cu_seqlens=torch.tensor(boundaries)
    )
    check(packed, expected, yard)
    for begin, end in itertools.pairwise(boundaries):
        if end > begin:
            alone = half(given[:, begin:end]).output
            assert_close(f"{begin} to {end}", packed["output"][:, begin:end], alone, 8e-3)


@by_layer
def test_padding_is_skipped(backbone: str, read: str | None) -> None:
    layer, x, gradient = make(backbone, read), draw(3, 130, HIDDEN), draw(3, 130, HIDDEN)
    mask = torch.ones(3, 130, dtype=torch.int64)
    mask[0, :7], mask[1, 100:], mask[2, :3], mask[2, 120:] = 0, 0, 0, 0
    gradient *= mask.unsqueeze(-1)
    exact = differentiate(layer, x, gradient, mask=mask)
    yard = differentiate(placed(layer, "cpu", torch.bfloat16), x.bfloat16(), gradient, mask=mask)
    actual = differentiate(
        placed(layer, "cuda", torch.bfloat16), x.to("cuda", torch.bfloat16), gradient, mask=mask.cuda()
    )
    for found in (exact, yard, actual):
        found["output"] = found["output"][mask.bool().to(found["output"].device)]
    check(actual, exact, yard)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@by_layer
def test_compiled_without_a_break_it_is_the_same_layer(backbone: str, read: str | None) -> None:
    torch._dynamo.reset()
    layer, x, gradient = make(backbone, read), draw(2, 130, HIDDEN), draw(2, 130, HIDDEN)
    half, given = placed(layer, "cuda", torch.bfloat16), x.to("cuda", torch.bfloat16)
    actual = differentiate(torch.compile(half, fullgraph=True), given, gradient, half)
    yard = differentiate(placed(layer, "cpu", torch.bfloat16), x.bfloat16(), gradient)
    check(actual, differentiate(layer, x, gradient), yard)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the graph is captured on its own stream
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_cuda_graph_captures_a_training_step(backbone: str) -> None:
    half = placed(make(backbone, "presplit"), "cuda", torch.bfloat16)
    inputs = [draw(2, 130, HIDDEN).to("cuda", torch.bfloat16) for _ in range(2)]
    static, gradient = inputs[0].clone().requires_grad_(), draw(2, 130, HIDDEN).to("cuda", torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(half(static).output, (static, *half.parameters()), gradient)

    graph, captured = capture(step)
    for x in inputs:
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        for recorded, eager in zip(captured, step(), strict=True):
            assert torch.equal(recorded, eager)


def language_model(arm: str) -> CCQForCausalLM:
    """Heads of 32, which the kernels take; weights that are exact in bfloat16, in float64 on a CPU."""
    model = CCQForCausalLM(preset(f"{arm}-tiny", vocab_size=50)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def losses(model: Any, tokens: Tensor, parameters: nn.Module | None = None, **options: Any) -> Found:
    """Loss and every gradient of one training step."""
    output = model(tokens, labels=tokens, use_cache=False, **options)
    named = dict((parameters or model).named_parameters())
    found = torch.autograd.grad(output.loss, list(named.values()))
    return {"loss": output.loss.detach(), **dict(zip(named, found, strict=True))}


@by_arm
def test_the_language_model_in_float32_is_that_of_a_cpu(arm: str) -> None:
    model, tokens = language_model(arm), torch.randint(50, (2, 100))
    expected = losses(placed(model, "cpu", torch.float32), tokens)
    actual = losses(placed(model, "cuda", torch.float32), tokens.cuda())
    for name, value in expected.items():
        assert_close(name, actual[name].cpu(), value, 2e-4 if value.numel() < FEW else 2e-5)


@by_arm
def test_the_language_model_in_half_precision(arm: str) -> None:
    model, tokens = language_model(arm), torch.randint(50, (2, 100))
    actual = losses(placed(model, "cuda", torch.bfloat16), tokens.cuda())
    check(actual, losses(model, tokens), losses(placed(model, "cpu", torch.bfloat16), tokens))


@by_arm
@torch.no_grad()
def test_prefill_and_single_tokens_are_the_same_model(arm: str) -> None:
    model, tokens = language_model(arm), torch.randint(50, (2, 90))
    exact = {"logits": model(tokens).logits}
    yard = {"logits": placed(model, "cpu", torch.bfloat16)(tokens).logits}
    half = placed(model, "cuda", torch.bfloat16)
    for cuts in ([0, 90], [0, 1, 66, 90], [0, 70, *range(71, 91)]):
        cache, logits = None, []
        for begin, end in itertools.pairwise(cuts):
            output = half(tokens[:, begin:end].cuda(), cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits)
        check({"logits": torch.cat(logits, 1)}, exact, yard)


@by_arm
@torch.no_grad()
def test_packed_and_padded_documents_are_separate_ones(arm: str) -> None:
    model, tokens = language_model(arm), torch.randint(50, (1, 130))
    half, boundaries = placed(model, "cuda", torch.bfloat16), [0, 30, 95, 130]
    yard = placed(model, "cpu", torch.bfloat16)
    packed = half(tokens.cuda(), cu_seqlens=torch.tensor(boundaries, device="cuda"), use_cache=False).logits
    padded = torch.zeros(3, 65, dtype=torch.int64)
    mask = torch.zeros(3, 65, dtype=torch.int64)
    for row, (begin, end) in enumerate(itertools.pairwise(boundaries)):
        padded[row, 65 - (end - begin) :], mask[row, 65 - (end - begin) :] = tokens[0, begin:end], 1
    logits = half(padded.cuda(), attention_mask=mask.cuda(), use_cache=False).logits
    for row, (begin, end) in enumerate(itertools.pairwise(boundaries)):
        document = tokens[:, begin:end]
        exact, plain = ({"logits": each(document, use_cache=False).logits} for each in (model, yard))
        check({"logits": packed[:, begin:end]}, exact, plain)
        check({"logits": logits[row : row + 1, 65 - (end - begin) :]}, exact, plain)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@by_arm
def test_compiled_without_a_break_it_is_the_same_language_model(arm: str) -> None:
    torch._dynamo.reset()
    model, tokens = language_model(arm), torch.randint(50, (2, 100))
    half = placed(model, "cuda", torch.bfloat16)
    actual = losses(torch.compile(half, fullgraph=True), tokens.cuda(), half)
    check(actual, losses(model, tokens), losses(placed(model, "cpu", torch.bfloat16), tokens))


@by_arm
def test_two_training_runs_are_bit_equal(arm: str) -> None:
    model, tokens = language_model(arm), torch.randint(50, (3, 2, 130), device="cuda")
    finals = []
    for _ in range(2):
        trained = placed(model, "cuda", torch.float32)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
        for batch in tokens:
            with torch.autocast("cuda", torch.bfloat16):
                loss = trained(batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append({name: parameter.detach() for name, parameter in trained.named_parameters()})
    for name, value in finals[0].items():
        assert torch.isfinite(value).all() and torch.equal(finals[1][name], value), name
    # Or that of Mamba2.
    projection = "model.layers.0.attn.in_proj.weight" if "mamba2" in arm else "model.layers.0.attn.q_proj.weight"
    assert not torch.equal(finals[0][projection].cpu(), model.get_parameter(projection).float())
