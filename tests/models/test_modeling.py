"""The language model: against a second writing of it, and against itself for every way of cutting tokens into calls."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from tests.helpers import assert_close
from tests.nn.token_loop import mixer_loop
from torch import Tensor

from ccq.models import (
    ARMS,
    CausalLanguageModel,
    ModelConfig,
    ModelState,
    generate,
    load_model,
    load_state,
    preset,
    save_model,
    save_state,
)

VOCABULARY = 23
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5}


def small(arm: str, **changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 12, "head_dim": 4, "value_head_dim": 6, "intermediate_size": 20, "initializer_range": 0.3}
    return preset("tiny", arm, vocab_size=VOCABULARY, **{**sizes, **changes})


def make(arm: str, dtype: torch.dtype = torch.float64, **changes: Any) -> CausalLanguageModel:
    """Large weights and a gate away from its start, so that every part of the model shows in the logits."""
    model = CausalLanguageModel(small(arm, **changes))
    with torch.no_grad():
        for read in model.read_steps():
            for parameter in read.parameters():
                parameter.normal_()
    return model.to(dtype)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


def tensors_of(state: ModelState) -> list[Tensor]:
    return [x for layer in state.layers for x in (layer.memory, *(layer.statistics or ()), *(layer.convolution or ()))]


def assert_same_state(actual: ModelState, expected: ModelState, tolerance: float) -> None:
    for a, b in zip(tensors_of(actual), tensors_of(expected), strict=True):
        assert_close("state", a, b, tolerance)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def model_loop(model: CausalLanguageModel, tokens: Tensor) -> Tensor:
    """tokens [T] -> logits [T, vocab], written out with the token loop of the mixers."""
    eps = model.config.norm_eps
    x = model.model.embeddings.weight[tokens]
    for block in model.model.layers:
        x = x + mixer_loop(block.attn, rms(x, block.attn_norm.weight, eps))
        y, mlp = rms(x, block.mlp_norm.weight, eps), block.mlp
        x = x + (F.silu(y @ mlp.gate_proj.weight.T) * (y @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    return rms(x, model.model.norm.weight, eps) @ model.lm_head.weight.T


@pytest.mark.parametrize("arm", ARMS)
def test_equals_a_second_writing_in_loss_and_every_gradient(arm: str) -> None:
    model, tokens = make(arm), random_tokens(1, 12)
    ours = F.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:])
    theirs = F.cross_entropy(model_loop(model, tokens[0, :-1]), tokens[0, 1:])
    assert_close("loss", ours, theirs, 1e-12)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(ours, parameters)
    expected = torch.autograd.grad(theirs, parameters)
    for name, a, b in zip(names, gradients, expected, strict=True):
        assert b.any(), f"{name} receives no gradient"
        assert_close(name, a, b, 1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_every_cut_and_token_by_token_equal_one_call(arm: str, dtype: torch.dtype) -> None:
    model, tokens = make(arm, dtype), random_tokens(2, 11)
    whole = model(tokens)
    for cut in range(12):
        first = model(tokens[:, :cut])
        second = model(tokens[:, cut:], state=first.state)
        assert_close("logits", torch.cat((first.logits, second.logits), 1), whole.logits, DTYPES[dtype])
        assert_same_state(second.state, whole.state, DTYPES[dtype])
    state, logits = None, []
    for token in tokens.split(1, 1):
        output = model(token, state=state)
        state = output.state
        logits.append(output.logits)
    assert_close("decode", torch.cat(logits, 1), whole.logits, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_padded_and_packed_equal_single_documents(arm: str, dtype: torch.dtype) -> None:
    model = make(arm, dtype)
    spans = [(3, 9), (0, 4), (2, 7), (0, 9), (8, 9)]
    documents = [random_tokens(end - start) for start, end in spans]
    singles = [model(d.unsqueeze(0)) for d in documents]
    tokens, mask = random_tokens(len(spans), 9), torch.zeros(len(spans), 9, dtype=torch.bool)
    for row, (start, end) in enumerate(spans):
        tokens[row, start:end], mask[row, start:end] = documents[row], True
    padded = model(tokens, mask=mask)
    boundaries = [0, *torch.tensor([len(d) for d in documents]).cumsum(0).tolist()]
    packed = model(torch.cat(documents).unsqueeze(0), cu_seqlens=torch.tensor(boundaries))
    for n, ((start, end), (low, high)) in enumerate(zip(spans, pairwise(boundaries), strict=True)):
        one = torch.tensor([n])
        for name, output, logits in (
            ("padded", padded, padded.logits[n, start:end]),
            ("packed", packed, packed.logits[0, low:high]),
        ):
            assert_close(name, logits, singles[n].logits[0], DTYPES[dtype])
            assert_same_state(output.state.select(one), singles[n].state, DTYPES[dtype])


@pytest.mark.parametrize("arm", ARMS)
def test_generation_of_a_left_padded_batch_equals_its_rows_alone(arm: str) -> None:
    model = make(arm, torch.float32)
    lengths = [1, 7, 4, 2]
    prompts = [random_tokens(1, length) for length in lengths]
    tokens, mask = random_tokens(4, 7), torch.zeros(4, 7, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, 7 - prompt.shape[1] :], mask[row, 7 - prompt.shape[1] :] = prompt[0], 1
    together = generate(model, tokens, max_new_tokens=9, mask=mask)
    for row, prompt in enumerate(prompts):
        # Without a state: the whole text again for each new token.
        text = prompt
        for _ in range(9):
            text = torch.cat((text, model(text).logits[:, -1:].argmax(-1)), 1)
        assert torch.equal(together[row : row + 1], text[:, prompt.shape[1] :])
        alone = generate(model, tokens[row : row + 1], max_new_tokens=9, mask=mask[row : row + 1])
        assert torch.equal(alone, together[row : row + 1])
    assert generate(model, tokens, max_new_tokens=0, mask=mask).shape == (4, 0)
    with pytest.raises(ValueError, match="mask must end with a real token in every row"):
        generate(model, tokens, max_new_tokens=1, mask=mask.flip(1))


@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet"])
@pytest.mark.parametrize("gate", ["presplit", "head", "attached", 0.1])
def test_a_pair_starts_from_the_same_bits_and_the_same_random_stream(backbone: str, gate: str | float) -> None:
    models, streams = [], []
    for arm in (backbone, f"{backbone}+ccq"):
        torch.manual_seed(7)
        models.append(CausalLanguageModel(small(arm, gate=gate)))
        streams.append(torch.get_rng_state())
    assert torch.equal(*streams)
    plain, read = (model.state_dict() for model in models)
    assert all(torch.equal(value, read[name]) for name, value in plain.items())
    own = {name for name in read if name not in plain}
    assert all(".read." in name for name in own)
    assert bool(own) == isinstance(gate, str)
    assert models[1].parameter_count - models[0].parameter_count == models[1].read_parameter_count


@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet"])
def test_attached_models_start_as_their_backbone_bit_for_bit(backbone: str) -> None:
    plain = make(backbone, torch.float32)
    attached = CausalLanguageModel(small(f"{backbone}+ccq", gate="attached", keep_length=True))
    missing, unexpected = attached.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(".read." in name for name in missing)
    tokens = random_tokens(2, 70)
    assert torch.equal(attached(tokens).logits, plain(tokens).logits)


def test_weights_start_as_configured() -> None:
    torch.manual_seed(0)
    model = CausalLanguageModel(preset("tiny", "gla+ccq", initializer_range=0.02))
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("proj.weight", "embeddings.weight", "lm_head.weight", "gk_proj.0.weight", "gk_proj.1.weight")
        ):
            assert math.isclose(parameter.detach().std(), 0.02, rel_tol=0.1), name
        elif name.endswith("norm.weight") or "g_norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("gk_proj.1.bias"):
            assert (parameter == 0).all(), name


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq"])
def test_read_off_keeps_no_statistics_and_unit_queries(arm: str) -> None:
    model, tokens = make(arm), random_tokens(1, 8)
    on = model(tokens)
    model.set_read("off")
    off = model(tokens)
    assert all(layer.statistics is None for layer in off.state.layers)
    statistics = sum(x.numel() * x.element_size() for layer in on.state.layers for x in layer.statistics)
    assert on.state.state_bytes - off.state.state_bytes == statistics
    # Two layers, two heads: second moments of 4 x 4, totals of 4, in float64, and a count.
    assert statistics == 2 * (2 * (4 * 4 + 4) * 8 + 8)
    assert_close("off", off.logits[0], model_loop(model, tokens[0]), 1e-12)
    model.set_read("on")
    assert torch.equal(model(tokens).logits, on.logits)


def test_read_modes_are_checked() -> None:
    with pytest.raises(ValueError, match='mode must be "on" or "off", got \'none\''):
        make("gla+ccq").set_read("none")
    with pytest.raises(ValueError, match="arm 'gla' has no read step to switch off"):
        make("gla").set_read("off")


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_last_logits_only(arm: str) -> None:
    model, tokens = make(arm), random_tokens(3, 6)
    full, last = model(tokens), model(tokens, last_logits_only=True)
    assert last.logits.shape == (3, 1, VOCABULARY)
    assert_close("last", last.logits, full.logits[:, -1:], 1e-12)
    assert_same_state(last.state, full.state, 0.0)


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_repeat_and_select_move_whole_sequences(arm: str) -> None:
    model, tokens, more = make(arm), random_tokens(3, 6), random_tokens(6, 2)
    state = model(tokens).state
    for changed, rows in (
        (state.repeat(2), [0, 0, 1, 1, 2, 2]),
        (state.select(torch.tensor([2, 0, 0, 1, 2, 2])), [2, 0, 0, 1, 2, 2]),
    ):
        expected = model(torch.cat((tokens[rows], more), 1)).logits[:, 6:]
        assert_close("continued", model(more, state=changed).logits, expected, 1e-12)


@pytest.mark.parametrize("read", ["on", "off"])
@pytest.mark.parametrize("arm", ["gla", "gla+ccq", "gated-deltanet+ccq"])
@torch.no_grad()
def test_a_saved_state_continues_bit_for_bit(arm: str, read: str, tmp_path: Path) -> None:
    model, tokens, more = make(arm, torch.float32), random_tokens(3, 6), random_tokens(3, 5)
    if model.read_steps():
        model.set_read(read)
    state = model(tokens).state
    save_state(state, tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    assert_same_state(loaded, state, 0.0)
    expected, got = model(more, state=state), model(more, state=loaded)
    assert torch.equal(got.logits, expected.logits)
    assert_same_state(got.state, expected.state, 0.0)


def test_a_state_without_convolutions_is_saved_too(tmp_path: Path) -> None:
    model = make("gla+ccq", short_convolution=None)
    state = model(random_tokens(2, 3)).state
    save_state(state, tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    assert loaded.layers[0].convolution is None
    assert_same_state(loaded, state, 0.0)


def test_files_that_are_no_state_are_explained(tmp_path: Path) -> None:
    model = make("gla+ccq", torch.float32)
    path = tmp_path / "state.safetensors"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_state(path)
    save_state(model(random_tokens(2, 3)).state, path)
    data = path.read_bytes()
    for damaged in (b"", b"text, not tensors", data[:50], data[: len(data) // 2], data + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged or is not a safetensors file"):
            load_state(path)
    tensors = safetensors.torch.load(data)
    for name, message in (
        ("layers.1.statistics.total", "lacks layers.1.statistics.total"),
        ("layers.1.", "1 of 2 layers"),
    ):
        kept = {key: value for key, value in tensors.items() if not key.startswith(name)}
        path.write_bytes(safetensors.torch.save(kept, {"format": "ccq-state/1", "layers": "2"}))
        with pytest.raises(ValueError, match=message):
            load_state(path)
    save_model(model, tmp_path)
    with pytest.raises(ValueError, match="its format is 'ccq-model/1', accepted: 'ccq-state/1'"):
        load_state(tmp_path / "model.safetensors")


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_returns_bit_for_bit(arm: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(arm, dtype, gate="attached")
    save_model(model, tmp_path / "new" / "folder")
    before = torch.get_rng_state()
    loaded = load_model(tmp_path / "new" / "folder")
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.config == model.config
    expected = model.state_dict()
    assert list(loaded.state_dict()) == list(expected)
    for name, value in loaded.state_dict().items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name])
    marks = [getattr(p, "_no_weight_decay", False) for p in model.parameters()]
    assert [getattr(p, "_no_weight_decay", False) for p in loaded.parameters()] == marks
    tokens = random_tokens(2, 5)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_folders_that_hold_no_model_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no model"):
        load_model(tmp_path)
    save_model(make("gla"), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    save_model(make("gla+ccq"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"missing model\.layers\.0\.attn\.read\.gate_weight; missing"):
        load_model(tmp_path)
    save_model(make("gla", intermediate_size=8), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(
        ValueError, match=r"mlp\.gate_proj\.weight has shape \[20, 12\], the configuration asks for \[8, 12\]"
    ):
        load_model(tmp_path)
    for text in ("{", "[]", '{"arm": "gla"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is not a model configuration"):
            load_model(tmp_path)


def test_bad_tokens_and_states_are_named() -> None:
    model, tokens = make("gla+ccq"), random_tokens(2, 4)
    with pytest.raises(ValueError, match=r"tokens must be in 0 \.\.\. 22, got values from -1 to"):
        model(tokens.index_fill(1, torch.tensor([2]), -1))
    with pytest.raises(ValueError, match="tokens must be in 0"):
        model(torch.full((1, 3), VOCABULARY))
    with pytest.raises(ValueError, match=r"tokens must be an int64 tensor of shape \[B, T\], got \[4\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"got .* float32"):
        model(tokens.float())
    state = model(tokens).state
    with pytest.raises(ValueError, match="state belongs to 2 sequences, but the input has 4"):
        model(tokens.repeat(2, 1), state=state)
    with pytest.raises(ValueError, match="state has 1 layers, but the model has 2"):
        model(tokens, state=ModelState(state.layers[:1]))
    plain = make("gla")(tokens).state
    with pytest.raises(ValueError, match="has no key statistics"):
        model(tokens, state=plain)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("rows", [0, 2])
def test_no_tokens(arm: str, rows: int) -> None:
    model = make(arm)
    state = model(random_tokens(rows, 3)).state
    output = model(random_tokens(rows, 0), state=state)
    assert output.logits.shape == (rows, 0, VOCABULARY)
    assert_same_state(output.state, state, 0.0)


@pytest.mark.parametrize("arm", ARMS)
def test_two_runs_are_bit_equal(arm: str) -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        model, tokens = make(arm, torch.float32), random_tokens(2, 70)
        model(tokens).logits.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
