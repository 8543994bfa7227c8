"""The cache: its surgery, its addresses, and its file."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.helpers import assert_close
from tests.models.small import CASES, assert_same_cache, checkpoint_blocks, make, random_tokens
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ccq.nn.read as read_module
from ccq.models import ARMS, CCQCache, CCQForCausalLM, load_state, save_state
from ccq.models.cache import CACHE_NAME, fingerprint
from ccq.nn import ShortConvolution, conv
from ccq.nn.mixers import common as common
from ccq.nn.mixers import map_state, state_tensors
from ccq.ops import write_rule_step
from ccq.ops.query import update_and_read_

LINEAR = [arm for arm in ARMS if arm != "transformer"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OVERWRITTEN = ["gla", "gla+ccq", "gated-deltanet+ccq", "mamba2", "mamba2+ccq"]
"""Their write rules overwrite the memory."""


def addresses(cache: CCQCache) -> list[int]:
    return [x.data_ptr() for layer in cache.layers for x in state_tensors(layer.state).values()]


@pytest.mark.parametrize(("arm", "read"), CASES)
@torch.no_grad()
def test_repeat_select_and_reorder_move_whole_sequences(arm: str, read: str) -> None:
    model, tokens, more = make(arm, read=read), random_tokens(3, 6), random_tokens(6, 2)
    cache = model(tokens).cache
    for method, argument, rows in (
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([2, 0, 0, 1, 2, 2]), [2, 0, 0, 1, 2, 2]),
        ("reorder_cache", torch.tensor([1, 1, 0]), [1, 1, 0]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
    ):
        changed = copy.deepcopy(cache)
        getattr(changed, method)(argument)
        assert changed.batch_size == len(rows)
        next_tokens = more[: len(rows)]
        expected = model(torch.cat((tokens[rows], next_tokens), 1))
        assert_close("continued", model(next_tokens, cache=changed).logits, expected.logits[:, 6:], 1e-12)
        assert_same_cache(changed, expected.cache, 1e-12)


@pytest.mark.parametrize("arm", LINEAR)
@torch.no_grad()
def test_addresses_stay(arm: str) -> None:
    model = make(arm, torch.float32)
    cache = model(random_tokens(2, 5)).cache
    before = addresses(cache)
    model(random_tokens(2, 1), cache=cache)
    model(random_tokens(2, 4), cache=cache)
    model(random_tokens(2, 1), attention_mask=torch.tensor([[1], [0]]), cache=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([0, 0]))
    cache.reset()
    tokens = random_tokens(2, 3)
    output = model(tokens, cache=cache)
    assert addresses(cache) == before
    fresh = model(tokens)
    assert_close("after reset", output.logits, fresh.logits, 1e-6)
    assert_same_cache(cache, fresh.cache, 1e-6)
    assert cache.get_seq_length() == 3


@torch.no_grad()
def test_a_reset_transformer_starts_again() -> None:
    model, tokens = make("transformer"), random_tokens(2, 3)
    cache = model(random_tokens(2, 5)).cache
    cache.reset()
    assert_close("after reset", model(tokens, cache=cache).logits, model(tokens).logits, 1e-12)


@pytest.mark.parametrize("arm", ARMS)
def test_gradients_reach_back_through_a_cache(arm: str) -> None:
    model, tokens = make(arm), random_tokens(2, 9)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(tokens).logits[:, 4:].square().sum(), parameters)
    cache = CCQCache(model.config)
    model(tokens[:, :4], cache=cache)
    first = model(tokens[:, 4:8], cache=cache)
    second = model(tokens[:, 8:], cache=cache)
    loss = first.logits.square().sum() + second.logits.square().sum()
    for (name, _), a, b in zip(model.named_parameters(), torch.autograd.grad(loss, parameters), expected, strict=True):
        assert_close(name, a, b, 1e-9)


@pytest.mark.parametrize("arm", [*ARMS, "gla+ccq-mean", "gla+ccq-decay"])
def test_gradients_begin_again_behind_a_call_without(arm: str) -> None:
    """Read with gradients, then without, then with: the first backward pass has its values, the second starts where the
    gradients do.
    """
    model, tokens = make(arm), random_tokens(2, 9)
    parameters = list(model.parameters())
    expected_first = torch.autograd.grad(model(tokens[:, :5]).logits.square().sum(), parameters)
    with torch.no_grad():
        before = model(tokens[:, :8]).cache
    expected_last = torch.autograd.grad(model(tokens[:, 8:], cache=before).logits.square().sum(), parameters)

    cache = CCQCache(model.config)
    first = torch.cat([model(part, cache=cache).logits for part in (tokens[:, :3], tokens[:, 3:5])], 1)
    with torch.no_grad():
        for part in (tokens[:, 5:6], tokens[:, 6:8]):
            model(part, cache=cache)
    last = model(tokens[:, 8:], cache=cache).logits
    for logits, expected in ((last, expected_last), (first, expected_first)):
        found = torch.autograd.grad(logits.square().sum(), parameters)
        for (name, _), a, b in zip(model.named_parameters(), found, expected, strict=True):
            assert_close(name, a, b, 1e-9)


@pytest.mark.parametrize("arm", LINEAR)
def test_a_state_that_gradients_reach_through_can_be_reset_and_reordered(arm: str) -> None:
    model, tokens, more = make(arm), random_tokens(2, 4), random_tokens(2, 3)
    parameters = list(model.parameters())
    for rows in (None, [1, 0], [1, 1]):
        cache = CCQCache(model.config)
        first = model(tokens, cache=cache).logits.square().sum()
        with torch.no_grad():
            if rows is None:
                cache.reset()
            else:
                cache.reorder_cache(torch.tensor(rows))
            before = CCQCache(model.config)
            if rows is not None:
                model(tokens[rows], cache=before)
        last = model(more, cache=cache).logits.square().sum()
        expected_last = model(more, cache=before).logits.square().sum()
        expected_first = model(tokens).logits.square().sum()
        for loss, expected in ((last, expected_last), (first, expected_first)):
            pairs = [torch.autograd.grad(x, parameters) for x in (loss, expected)]
            for (name, _), a, b in zip(model.named_parameters(), *pairs, strict=True):
                assert_close(name, a, b, 1e-9)


def gradients(model: CCQForCausalLM, loss: Tensor) -> dict[str, Tensor]:
    """Not by autograd.grad, which reentrant checkpointing refuses."""
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("arm", [*ARMS, "gla+ccq-mean"])
@pytest.mark.parametrize("after", ["nothing", "a call", "reset", "select"])
def test_blocks_are_computed_again_from_the_state_that_they_had(arm: str, after: str) -> None:
    """Where nothing in the state has a gradient: behind a prompt, and behind mixers that are frozen."""
    plain = make(arm).train()
    tokens, more = random_tokens(2, 9), random_tokens(2, 2)

    def losses(model: CCQForCausalLM) -> Iterator[Tensor]:
        with torch.no_grad():
            cache = model(tokens[:, :4], use_cache=True).cache
        loss = model(tokens[:, 4:], cache=cache).logits.square().sum()
        with torch.no_grad():
            if after == "a call":
                model(more, cache=cache)
            elif after == "reset":
                cache.reset()
            elif after == "select":
                cache.reorder_cache(torch.tensor([1, 0]))
        yield loss
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name or model.config.intermediate_size is None)
        cache = CCQCache(model.config)
        yield sum((model(part, cache=cache).logits.square().sum() for part in tokens.split(3, 1)), torch.zeros(()))

    again = copy.deepcopy(plain)
    checkpoint_blocks(again, reentrant=True)
    again.enable_input_require_grads()
    expected, found = losses(plain), losses(again)
    first, second = gradients(plain, next(expected)), gradients(again, next(found))
    for name, value in first.items():
        assert_close(name, second[name], value, 1e-9)

    wrapped = copy.deepcopy(plain)
    for block in wrapped.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    found = losses(wrapped)
    next(found)
    first, second = gradients(plain, next(expected)), gradients(wrapped, next(found))
    for name, value in first.items():
        assert_close(name, second[name], value, 1e-9)


@pytest.mark.parametrize("arm", ARMS)
def test_a_copy_is_a_branch_for_gradients_too(arm: str) -> None:
    model, tokens = make(arm), random_tokens(2, 7)
    expected = gradients(model, model(tokens).logits[:, 4:].square().sum())
    cache = CCQCache(model.config)
    model(tokens[:, :4], cache=cache)
    branch = copy.deepcopy(cache)
    model(random_tokens(2, 3), cache=cache)
    for name, value in gradients(model, model(tokens[:, 4:], cache=branch).logits.square().sum()).items():
        assert_close(name, value, expected[name], 1e-9)


@pytest.mark.parametrize("arm", ARMS)
def test_a_cache_of_inference_mode_goes_on_outside_of_it(arm: str) -> None:
    model, tokens = make(arm), random_tokens(2, 7)
    with torch.inference_mode():
        cache = model(tokens[:, :4]).cache
        kept = copy.deepcopy(cache)
        other = copy.deepcopy(cache)
    with torch.no_grad():
        expected = model(tokens).logits
        generated = model.generate(tokens, max_new_tokens=3, do_sample=False)
        text = model.generate(tokens[:, :5], **{CACHE_NAME: copy.deepcopy(cache)}, max_new_tokens=1, do_sample=False)
        assert torch.equal(text, model.generate(tokens[:, :5], max_new_tokens=1, do_sample=False))
        assert_close("continued", model(tokens[:, 4:], cache=cache).logits, expected[:, 4:], 1e-12)
        assert cache.get_seq_length() == 7 and generated.shape == (2, 10)
        kept.reorder_cache(torch.tensor([1, 0]))
        turned = model(tokens.flip(0)[:, 4:], cache=kept).logits
        assert_close("turned", turned, expected.flip(0)[:, 4:], 1e-12)
        other.reset()
        assert_close("begun again", model(tokens, cache=other).logits, expected, 1e-12)
        assert other.get_seq_length() == 7
    with torch.inference_mode():
        recorded = model(tokens[:, :4]).cache
    value = model(tokens[:, 4:], cache=recorded).logits.square().sum()
    assert all(torch.isfinite(x).all() for x in gradients(model, value).values())


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq", "mamba2", "transformer"])
@torch.no_grad()
def test_a_cache_takes_over_the_dtype_of_what_it_is_given(arm: str) -> None:
    """A prompt in bfloat16 leaves nothing rounded behind a reset, nor once its tokens have left the convolutions."""
    model, tokens = make(arm, torch.float32), random_tokens(2, 12)
    rounded = copy.deepcopy(model).bfloat16()
    expected = model(tokens).cache
    for name, x in state_tensors(expected.layers[0].state).items():
        assert x.dtype in (torch.float32, torch.int64), name
    cache = rounded(tokens[:, :4]).cache
    cache.reset()
    for token in tokens.split(1, 1):
        model(token, cache=cache)
    assert_same_cache(cache, expected, 1e-5)
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        kinds = [{name: x.dtype for name, x in state_tensors(each.state).items()} for each in (ours, theirs)]
        assert kinds[0] == kinds[1]


def test_a_fingerprint_is_that_of_what_a_call_computes() -> None:
    model = make("gla+ccq", torch.float32)
    same = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) == same == fingerprint(copy.deepcopy(model).bfloat16())
    for name, parameter in model.named_parameters():
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_parameter(name).flatten()[-1] += 1
        assert fingerprint(other) != same, name
        assert parameter.numel() > 0
    for field, value in {"gate": 0.5, "centred": False, "norm_eps": 0.1, "gate_logit_normalizer": 3.0}.items():
        other = copy.deepcopy(model)
        setattr(other.config, field, value)
        assert fingerprint(other) != same, field
    for field, value in {"use_cache": False, "max_position_embeddings": 7, "eos_token_id": 3, "dt_max": 0.2}.items():
        other = copy.deepcopy(model)
        setattr(other.config, field, value)
        assert fingerprint(other) == same, field


@torch.no_grad()
def test_a_state_of_one_sequence_does_not_spread_over_a_batch() -> None:
    model = make("gla+ccq")
    four, one = model(random_tokens(4, 3)).cache, model(random_tokens(1, 3)).cache
    before = copy.deepcopy(four)
    with pytest.raises(ValueError, match="a state of other sequences cannot take the place of this one"):
        four.layers[0].update(one.layers[0].state)
    assert_same_cache(four, before, 0.0)
    with pytest.raises(ValueError, match="state belongs to 1 sequences, but the input has 4"):
        model(random_tokens(4, 1), cache=one)


@torch.no_grad()
def test_a_copy_is_a_branch() -> None:
    model, tokens = make("gated-deltanet+ccq"), random_tokens(1, 5)
    cache = model(tokens).cache
    branch = copy.deepcopy(cache)
    model(random_tokens(1, 1), cache=branch)
    more = random_tokens(1, 1)
    expected = model(torch.cat((tokens, more), 1)).logits[:, 5:]
    assert_close("trunk", model(more, cache=cache).logits, expected, 1e-12)


def test_a_cache_cannot_be_cropped() -> None:
    cache = CCQCache(make("gla").config)
    with pytest.raises(NotImplementedError, match=r"cannot be cropped: .* Copy it"):
        cache.crop(-1)
    assert not cache.layers[0].is_croppable
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(("arm", "read"), CASES)
@torch.no_grad()
def test_a_saved_state_continues_bit_for_bit(arm: str, read: str, tmp_path: Path) -> None:
    model, tokens, more = make(arm, torch.float32, read), random_tokens(3, 6), random_tokens(3, 5)
    cache = model(tokens).cache
    save_state(cache, tmp_path / "state.safetensors", model)
    loaded = load_state(tmp_path / "state.safetensors", model)
    assert_same_cache(loaded, cache, 0.0)
    assert loaded.get_seq_length() == 6
    expected, got = model(more, cache=cache), model(more, cache=loaded)
    assert torch.equal(got.logits, expected.logits)
    assert_same_cache(got.cache, expected.cache, 0.0)


@torch.no_grad()
def test_a_state_without_convolutions_is_saved_too(tmp_path: Path) -> None:
    model = make("gla+ccq", short_convolution=None)
    cache = model(random_tokens(2, 3)).cache
    save_state(cache, tmp_path / "state.safetensors", model)
    loaded = load_state(tmp_path / "state.safetensors", model)
    assert loaded.layers[0].state.convolution is None
    assert_same_cache(loaded, cache, 0.0)


@torch.no_grad()
def test_files_that_are_no_state_are_explained(tmp_path: Path) -> None:
    model = make("gla+ccq", torch.float32)
    path = tmp_path / "state.safetensors"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_state(path, model)
    with pytest.raises(ValueError, match="the cache is empty"):
        save_state(CCQCache(model.config), path, model)
    save_state(model(random_tokens(2, 3)).cache, path, model)
    # The same weights in another precision are the same model; other weights are not.
    assert load_state(path, copy.deepcopy(model).to(torch.bfloat16)).batch_size == 2
    with pytest.raises(ValueError, match="was made by another model"):
        load_state(path, make("gla+ccq", torch.float32))
    data = path.read_bytes()
    for damaged in (b"", b"text, not tensors", data[:50], data[: len(data) // 2], data + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged or is not a safetensors file"):
            load_state(path, model)
    path.write_bytes(data)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load(data)
    for name, message in (
        ("layers.1.statistics.total", "lacks layers.1.statistics.total"),
        ("layers.1.statistics.triangle", "lacks layers.1.statistics.triangle or statistics.second_moment"),
        ("layers.1.", "1 of 2 layers"),
    ):
        kept = {key: value for key, value in tensors.items() if not key.startswith(name)}
        path.write_bytes(safetensors.torch.save(kept, metadata))
        with pytest.raises(ValueError, match=message):
            load_state(path, model)
    path.write_bytes(safetensors.torch.save(tensors, {**metadata, "format": "pt"}))
    with pytest.raises(ValueError, match="its format is 'pt', accepted: 'ccq-state/3'"):
        load_state(path, model)


@torch.no_grad()
def test_the_size_of_a_cache() -> None:
    model = make("gla+ccq", torch.float32, short_convolution=None)
    cache = model(random_tokens(3, 5)).cache
    # Two layers, two heads: memories 4 x 6, triangles of 4 x 4 and totals 4 in float32, and a count.
    assert cache.state_bytes == 3 * 2 * (4 * 2 * (4 * 6 + 10 + 4) + 8)
    assert sum(block.attn.read.state_bytes for block in model.base_model.layers) == 2 * (4 * 2 * (10 + 4) + 8)
    halved = map_state(cache.layers[0].state, lambda x: x[:1])
    assert sum(x.numel() for x in state_tensors(halved).values()) == 2 * (4 * 6 + 10 + 4) + 1


# One token by the kernels that overwrite the states, on a GPU or in Triton's interpreter.


Calls = dict[str, list[bool]]
by_overwriting_arm = pytest.mark.parametrize("arm", OVERWRITTEN)


@contextmanager
def in_pytorch() -> Iterator[None]:
    """None of these kernels is used, on a GPU neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_rule_step, "is_chosen", lambda *_: False)
        patch.setattr(conv, "is_chosen", lambda *_: False)
        patch.setattr(read_module, "update_and_read_", partial(update_and_read_, backend="torch"))
        yield


def convolve_in_pytorch(layer: ShortConvolution, x: Tensor, state: Tensor | None, *_: Any) -> Tensor:
    history = x.new_zeros(len(x), layer.kernel_size - 1, layer.channels) if state is None else state
    return layer._convolve(torch.cat((history, x), 1))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The kernels are used on a CPU too; of each call of one, whether it overwrites."""
    pytest.importorskip("triton")
    found: Calls = {"memory": [], "convolution": []}

    def is_chosen(q: Tensor, *others: Tensor) -> bool:
        return not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others)))

    if DEVICE == "cpu":
        monkeypatch.setattr(write_rule_step, "is_chosen", is_chosen)
        monkeypatch.setattr(conv, "is_chosen", lambda x, width: x.shape[1] == 1)
        # That of many tokens takes long in the interpreter, and overwrites nothing.
        monkeypatch.setattr(ShortConvolution, "_fused", convolve_in_pytorch)
        monkeypatch.setattr(read_module, "update_and_read_", partial(update_and_read_, backend="triton"))
    write_token, convolve_token_ = write_rule_step.write_token, common.convolve_token_

    def write(*given: Any, in_place: bool) -> Any:
        found["memory"].append(in_place)
        return write_token(*given, in_place=in_place)

    def convolve(*given: Any) -> Any:
        outputs = convolve_token_(*given)
        found["convolution"].append(outputs is not None)
        return outputs

    monkeypatch.setattr(write_rule_step, "write_token", write)
    monkeypatch.setattr(common, "convolve_token_", convolve)
    return found


def decode(model: CCQForCausalLM, tokens: Tensor, cache: CCQCache, **options: Any) -> Tensor:
    """Logits [N, T, vocabulary] of tokens read one after the other."""
    return torch.cat([model(token, cache=cache, **options).logits for token in tokens.split(1, 1)], 1)


@pytest.mark.parametrize("arm", [*OVERWRITTEN, "gla-hedgehog+ccq", "gla+ccq-two-reads", "gated-deltanet+ccq-two-reads"])
@torch.no_grad()
def test_kernels_decode_in_place(arm: str, calls: Calls) -> None:
    model, tokens = make(arm, torch.float32).to(DEVICE), random_tokens(2, 9).to(DEVICE)
    with in_pytorch():
        plain = CCQCache(model.config)
        model(tokens[:, :4], cache=plain)
        cache = copy.deepcopy(plain)
        expected = decode(model, tokens[:, 4:], plain)
    before, places = copy.deepcopy(cache), addresses(cache)
    calls["convolution"].clear()
    found = decode(model, tokens[:, 4:], cache)
    assert_close("logits", found, expected, 1e-5)
    assert_same_cache(cache, plain, 1e-5)
    assert addresses(cache) == places
    # A query in parts reads the memory twice, and the convolution of Mamba2 has a bias.
    twice = "two-reads" in arm
    assert calls["memory"] == [not twice] * (20 if twice else 10)
    assert calls["convolution"] == ["mamba2" not in arm] * 10
    # What was copied before is a branch of its own.
    with in_pytorch():
        assert_close("branch", decode(model, tokens[:, 4:], before), expected, 1e-5)


@by_overwriting_arm
@torch.no_grad()
def test_kernels_begin_with_an_empty_cache(arm: str, calls: Calls) -> None:
    model, tokens = make(arm, torch.float32).to(DEVICE), random_tokens(2, 4).to(DEVICE)
    cache, plain = CCQCache(model.config), CCQCache(model.config)
    found = decode(model, tokens, cache)
    with in_pytorch():
        expected = decode(model, tokens, plain)
    assert_close("logits", found, expected, 1e-5)
    assert_same_cache(cache, plain, 1e-5)
    assert calls["memory"] == [False] * 2 + [True] * 6


@by_overwriting_arm
@torch.no_grad()
def test_kernels_skip_padding(arm: str, calls: Calls) -> None:
    """Row by row; where a row has no token its state stays as it is, bit for bit, and in its place."""
    model, tokens = make(arm, torch.float32).to(DEVICE), random_tokens(3, 5).to(DEVICE)
    cache = model(random_tokens(3, 4).to(DEVICE)).cache
    plain, places = copy.deepcopy(cache), addresses(cache)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]], device=DEVICE)
    start = [map_state(layer.state, torch.clone) for layer in cache.layers]
    for t in range(3):
        here = slice(t, t + 1)
        found = model(tokens[:, here], attention_mask=mask[:, here], cache=cache).logits
        with in_pytorch():
            expected = model(tokens[:, here], attention_mask=mask[:, here], cache=plain).logits
        real = mask[:, t].bool()
        assert_close("logits", found[real], expected[real], 1e-5)
    assert_same_cache(cache, plain, 1e-5)
    assert addresses(cache) == places
    for layer, old in zip(cache.layers, start, strict=True):
        for name, x in state_tensors(layer.state).items():
            assert torch.equal(x[2], state_tensors(old)[name][2]), name
    assert len(calls["memory"]) == 6


@by_overwriting_arm
def test_kernels_overwrite_nothing_that_gradients_need(arm: str, calls: Calls) -> None:
    """As `test_gradients_begin_again_behind_a_call_without`, in float32."""
    model, tokens = make(arm, torch.float32).to(DEVICE), random_tokens(2, 8).to(DEVICE)
    parameters = list(model.parameters())
    with in_pytorch():
        expected_first = torch.autograd.grad(model(tokens[:, :5]).logits.square().sum(), parameters)
        with torch.no_grad():
            before = model(tokens[:, :7]).cache
        expected_last = torch.autograd.grad(model(tokens[:, 7:], cache=before).logits.square().sum(), parameters)

    cache = CCQCache(model.config)
    first = torch.cat([model(part, cache=cache).logits for part in (tokens[:, :4], tokens[:, 4:5])], 1)
    with torch.no_grad():
        decode(model, tokens[:, 5:7], cache)
    # The first of the two finds a state that gradients reach back through.
    assert calls["memory"] == [False] * 2 + [True] * 2
    assert [*filter(None, calls["convolution"])] == ([] if "mamba2" in arm else [True] * 2)
    last = model(tokens[:, 7:], cache=cache).logits
    assert len(calls["memory"]) == 4
    for logits, expected in ((last, expected_last), (first, expected_first)):
        found = torch.autograd.grad(logits.square().sum(), parameters)
        for (name, _), a, b in zip(model.named_parameters(), found, expected, strict=True):
            assert_close(name, a, b, 1e-4, floor=1e-5)


@by_overwriting_arm
def test_kernels_overwrite_nothing_while_gradients_are_recorded(arm: str, calls: Calls) -> None:
    """Not even where no gradient is wanted in anything."""
    model, tokens = make(arm, torch.float32).to(DEVICE).requires_grad_(False), random_tokens(2, 6).to(DEVICE)
    cache = CCQCache(model.config)
    model(tokens[:, :4], cache=cache)
    found = decode(model, tokens[:, 4:], cache)
    assert calls["memory"] == [False] * 4 and not any(calls["convolution"])
    with in_pytorch():
        assert_close("logits", found, model(tokens).logits[:, 4:], 1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@torch.no_grad()
def test_kernels_in_one_graph_decode_every_token(calls: Calls) -> None:
    torch._dynamo.reset()
    model = make("gated-deltanet+ccq", torch.float32, num_layers=1).to(DEVICE)
    tokens = random_tokens(2, 8).to(DEVICE)
    cache = CCQCache(model.config, static=True)
    model(tokens[:, :4], cache=cache)
    eager, places = copy.deepcopy(cache), addresses(cache)
    expected = decode(model, tokens[:, 4:], eager)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close("logits", decode(compiled, tokens[:, 4:], cache), expected, 1e-6)
    assert_same_cache(cache, eager, 1e-6)
    assert addresses(cache) == places
    assert calls["memory"].count(True) >= 5
