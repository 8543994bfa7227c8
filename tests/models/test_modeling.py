"""The language model: against a second writing of it, and against itself for every way of cutting tokens into calls."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from tests.helpers import assert_close
from tests.models.small import (
    CASES,
    VOCABULARY,
    assert_same_cache,
    assert_same_sequence,
    make,
    random_tokens,
    small,
)
from tests.nn.token_loop import mixer_loop
from torch import Tensor
from transformers import DynamicCache

from ccq.models import ARMS, BACKBONES, CCQCache, CCQForCausalLM, modeling, preset

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5}
PAIRS = [backbone for backbone in BACKBONES if f"{backbone}+ccq" in ARMS]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def model_loop(model: CCQForCausalLM, tokens: Tensor) -> Tensor:
    """tokens [T] -> logits [T, vocab], written out with the token loop of the mixers."""
    eps = model.config.norm_eps
    x = model.model.embeddings.weight[tokens]
    for block in model.model.layers:
        x = x + mixer_loop(block.attn, rms(x, block.attn_norm.weight, eps))
        if block.mlp is not None:
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
@pytest.mark.parametrize(("arm", "read"), CASES)
@torch.no_grad()
def test_every_cut_and_token_by_token_equal_one_call(arm: str, read: str, dtype: torch.dtype) -> None:
    model, tokens = make(arm, dtype, read), random_tokens(2, 9)
    whole = model(tokens)
    for cut in range(10):
        first = model(tokens[:, :cut])
        second = model(tokens[:, cut:], cache=first.cache)
        assert_close("logits", torch.cat((first.logits, second.logits), 1), whole.logits, DTYPES[dtype])
        assert_same_cache(second.cache, whole.cache, DTYPES[dtype])
        assert second.cache.get_seq_length() == 9
    cache, logits = None, []
    for token in tokens.split(1, 1):
        output = model(token, cache=cache)
        cache = output.cache
        logits.append(output.logits)
    assert_close("decode", torch.cat(logits, 1), whole.logits, DTYPES[dtype])
    assert_same_cache(cache, whole.cache, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("arm", "read"), CASES)
@torch.no_grad()
def test_padded_and_packed_equal_single_documents(arm: str, read: str, dtype: torch.dtype) -> None:
    model = make(arm, dtype, read)
    spans = [(3, 9), (0, 4), (2, 7), (0, 9), (8, 9)]
    documents = [random_tokens(end - start) for start, end in spans]
    singles = [model(d.unsqueeze(0)) for d in documents]
    tokens, mask = random_tokens(len(spans), 9), torch.zeros(len(spans), 9, dtype=torch.bool)
    for row, (start, end) in enumerate(spans):
        tokens[row, start:end], mask[row, start:end] = documents[row], True
    padded = model(tokens, attention_mask=mask)
    boundaries = [0, *torch.tensor([len(d) for d in documents]).cumsum(0).tolist()]
    packed = model(torch.cat(documents).unsqueeze(0), cu_seqlens=torch.tensor(boundaries))
    for n, ((start, end), (low, high)) in enumerate(zip(spans, pairwise(boundaries), strict=True)):
        for name, output, logits in (
            ("padded", padded, padded.logits[n, start:end]),
            ("packed", packed, packed.logits[0, low:high]),
        ):
            assert_close(name, logits, singles[n].logits[0], DTYPES[dtype])
            assert_same_sequence(output.cache, n, singles[n].cache, 0, DTYPES[dtype])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("arm", "read"), CASES)
@torch.no_grad()
def test_decoding_goes_on_behind_padding_on_either_side(arm: str, read: str, wide: bool) -> None:
    """Prompts padded on the left, the right and both, then two tokens each, one at a time; the mask of a step is that
    of its token or of all positions so far. In the last step one row has no token.
    """
    model = make(arm, read=read)
    spans = [(2, 5), (0, 3), (1, 4), (0, 5)]
    tokens, mask = random_tokens(4, 7), torch.zeros(4, 7, dtype=torch.int64)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1
    mask[:, 5:] = 1
    mask[3, 6] = 0
    cache, logits = CCQCache(model.config), []
    for first, last in ((0, 5), (5, 6), (6, 7)):
        own = mask[:, :last] if wide else mask[:, first:last]
        logits.append(model(tokens[:, first:last], attention_mask=own, cache=cache).logits)
    together = torch.cat(logits, 1)
    for row in range(4):
        real = mask[row].bool()
        alone = model(tokens[row, real].unsqueeze(0))
        assert_close("logits", together[row, real], alone.logits[0], 1e-12)
        assert_same_sequence(cache, row, alone.cache, 0, 1e-12)


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq", "mamba2+ccq", "transformer"])
@hypothesis.settings(max_examples=10)
@hypothesis.given(
    spans=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 11), max_size=4),
)
@torch.no_grad()
def test_any_padding_and_any_cuts_give_what_each_row_gives_alone(
    arm: str, spans: list[list[int]], cuts: set[int]
) -> None:
    model = make(arm)
    tokens, mask = random_tokens(len(spans), 12), torch.zeros(len(spans), 12, dtype=torch.bool)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = True
    cache, logits = CCQCache(model.config), []
    for first, last in pairwise((0, *sorted(cuts), 12)):
        logits.append(model(tokens[:, first:last], attention_mask=mask[:, first:last], cache=cache).logits)
    together = torch.cat(logits, 1)
    for row, (start, end) in enumerate(spans):
        alone = model(tokens[row : row + 1, start:end])
        assert_close("logits", together[row, start:end], alone.logits[0], 1e-11)
        assert_same_sequence(cache, row, alone.cache, 0, 1e-11)


@pytest.mark.parametrize("backbone", PAIRS)
@pytest.mark.parametrize("gate", ["presplit", "head", "attached", 0.1])
def test_a_pair_starts_from_the_same_bits_and_the_same_random_stream(backbone: str, gate: str | float) -> None:
    models, streams = [], []
    for arm in (backbone, f"{backbone}+ccq"):
        torch.manual_seed(7)
        models.append(CCQForCausalLM(small(arm, gate=gate)))
        streams.append(torch.get_rng_state())
    assert torch.equal(*streams)
    plain, read = (model.state_dict() for model in models)
    assert all(torch.equal(value, read[name]) for name, value in plain.items())
    own = {name for name in read if name not in plain}
    assert all(".read." in name for name in own)
    assert bool(own) == isinstance(gate, str)
    assert models[1].parameter_count - models[0].parameter_count == models[1].read_parameter_count


@pytest.mark.parametrize("backbone", PAIRS)
def test_attached_models_start_as_their_backbone_bit_for_bit(backbone: str) -> None:
    plain = make(backbone, torch.float32)
    attached = CCQForCausalLM(small(f"{backbone}+ccq", gate="attached", keep_length=True))
    missing, unexpected = attached.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(".read." in name for name in missing)
    tokens = random_tokens(2, 70)
    assert torch.equal(attached(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("arm", ARMS)
def test_weights_start_as_configured(arm: str) -> None:
    torch.manual_seed(0)
    model = CCQForCausalLM(preset(f"{arm}-tiny", initializer_range=0.02))
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("proj.weight", "embeddings.weight", "lm_head.weight", "gk_proj.0.weight", "gk_proj.1.weight")
        ):
            assert math.isclose(parameter.detach().std(), 0.02, rel_tol=0.1), name
        elif name.endswith("norm.weight") or "g_norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("gk_proj.1.bias"):
            assert (parameter == 0).all(), name
        elif name.endswith("gate_bias"):
            assert_close(name, parameter.sigmoid(), torch.full_like(parameter, 0.01), 1e-6)
        elif name.endswith("A_log"):
            low = 0.1 if "mamba2" in arm else 0.0
            assert ((parameter.exp() >= low) & (parameter.exp() <= 1.0)).all(), name
        elif name.endswith("dt_bias"):
            step = F.softplus(parameter)
            assert ((step > 0.00099) & (step < 0.0201)).all(), name


@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet"])
@torch.no_grad()
def test_read_off_keeps_no_statistics_and_unit_queries(backbone: str) -> None:
    model, tokens = make(f"{backbone}+ccq"), random_tokens(1, 8)
    on = model(tokens)
    model.set_read("off")
    off = model(tokens)
    assert all(layer.state.statistics is None for layer in off.cache.layers)
    statistics = sum(x.numel() * x.element_size() for layer in on.cache.layers for x in layer.state.statistics)
    assert on.cache.state_bytes - off.cache.state_bytes == statistics
    # Two layers, two heads: triangles of 4 x 4 second moments, totals of 4, in float64, and a count.
    assert statistics == 2 * (2 * (10 + 4) * 8 + 8)
    assert_close("off", off.logits[0], model_loop(model, tokens[0]), 1e-12)
    # A cache goes on without its statistics, but not the other way round.
    more = random_tokens(1, 1)
    got = model(more, cache=on.cache)
    assert got.cache.layers[0].state.statistics is None
    model.set_read("on")
    assert torch.equal(model(tokens).logits, on.logits)
    with pytest.raises(ValueError, match="has no key statistics"):
        model(more, cache=off.cache)


def test_read_modes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"'none' is no read intervention.*Accepted: on, off, or some of"):
        make("gla+ccq").set_read("none")
    with pytest.raises(ValueError, match="arm 'gla' has no read step that 'off' could be done to"):
        make("gla").set_read("off")


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_kept_logits_and_hidden_states(arm: str) -> None:
    model, tokens = make(arm), random_tokens(3, 6)
    full = model(tokens, output_hidden_states=True)
    for keep, chosen in ((1, slice(5, 6)), (2, slice(4, 6)), (torch.tensor([0, 3]), [0, 3])):
        kept = model(tokens, logits_to_keep=keep)
        assert_close("kept", kept.logits, full.logits[:, chosen], 1e-12)
        assert_same_cache(kept.cache, full.cache, 0.0)
    assert len(full.hidden_states) == model.config.num_layers + 1
    assert torch.equal(full.hidden_states[0], model.model.embeddings(tokens))
    assert_close("head", model.lm_head(full.hidden_states[-1]), full.logits, 1e-12)
    embedded = model(inputs_embeds=model.model.embeddings(tokens))
    assert torch.equal(embedded.logits, full.logits)
    assert model(tokens, use_cache=False).cache is None
    assert model.train()(tokens).cache is None
    values = model.eval()(tokens, return_dict=False)
    assert torch.equal(values[0], full.logits)


@pytest.mark.parametrize("arm", ["gla+ccq", "transformer"])
@torch.no_grad()
def test_a_hook_sees_what_the_mlp_puts_out_by_itself(arm: str) -> None:
    """Not added to the stream, as a block otherwise has it; nor is that expected of a module in its place."""
    model, tokens = make(arm), random_tokens(2, 5)
    before = model(tokens, output_hidden_states=True)
    block, seen = model.model.layers[0], list[tuple[Tensor, Tensor]]()
    handle = block.mlp.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    assert_close("logits", model(tokens).logits, before.logits, 1e-12)
    handle.remove()
    ((given, found),) = seen
    mlp = block.mlp
    expected = (F.silu(given @ mlp.gate_proj.weight.T) * (given @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    assert_close("branch", found, expected, 1e-12)

    class Nothing(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    block.mlp = Nothing()
    without = model(tokens, output_hidden_states=True).hidden_states[1]
    assert_close("stream", without, before.hidden_states[1] - found, 1e-12)


def test_rows_of_few_tokens_on_a_gpu_are_gathered() -> None:
    def chosen(tokens: int, *, device: str = "cuda", table: torch.nn.Embedding | None = None) -> bool:
        embeddings = torch.nn.Embedding(7, 3, device="cuda") if table is None else table
        return modeling._can_gather(embeddings, torch.zeros(1, tokens, dtype=torch.int64, device=device))

    class Scaled(torch.nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with torch._subclasses.FakeTensorMode():
        watched = torch.nn.Embedding(7, 3, device="cuda")
        watched.register_forward_hook(lambda *_: None)
        with torch.no_grad():
            assert chosen(1) and chosen(16) and not chosen(17) and not chosen(8, device="cpu")
            assert not chosen(8, table=torch.nn.Embedding(7, 3, device="cuda", max_norm=1.0))
            assert not chosen(8, table=watched) and not chosen(8, table=Scaled(7, 3, device="cuda"))
        assert not chosen(8)
        assert chosen(8, table=torch.nn.Embedding(7, 3, device="cuda").requires_grad_(False))


@torch.no_grad()
def test_gathered_rows_are_those_of_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make("gla+ccq"), random_tokens(3, 2)
    expected = model.model.embeddings(tokens)
    monkeypatch.setattr(modeling, "_can_gather", lambda *_: True)
    assert torch.equal(model.model._embed(tokens, None), expected)


def test_bad_tokens_and_caches_are_named() -> None:
    model, tokens = make("gla+ccq"), random_tokens(2, 4)
    with pytest.raises(ValueError, match=r"input_ids must be in 0 \.\.\. 22, got values from -1 to"):
        model(tokens.index_fill(1, torch.tensor([2]), -1))
    with pytest.raises(ValueError, match="input_ids must be in 0"):
        model(torch.full((1, 3), VOCABULARY))
    with pytest.raises(ValueError, match=r"input_ids must be an int64 tensor of shape \[B, T\], got \[4\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"got .* float32"):
        model(tokens.float())
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with torch.no_grad():
        cache = model(tokens).cache
    with pytest.raises(ValueError, match="state belongs to 2 sequences, but the input has 4"):
        model(tokens.repeat(2, 1), cache=cache)
    with pytest.raises(ValueError, match="cache has 3 layers, but the model has 2"):
        model(tokens, cache=CCQCache(small("gla+ccq", num_layers=3)))
    with pytest.raises(TypeError, match=r"cache must be a CCQCache, got DynamicCache; make one with CCQCache\("):
        model(tokens, cache=DynamicCache())
    with pytest.raises(ValueError, match="two names of one argument"):
        model(tokens, cache=cache, past_key_values=cache)


def test_bad_masks_and_arguments_are_named() -> None:
    model, tokens = make("gla+ccq"), random_tokens(2, 4)
    with pytest.raises(ValueError, match=r"hole in row 1: real tokens must be one run .* got \[1, 0, 1, 1\]"):
        model(tokens, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]))
    with pytest.raises(ValueError, match=r"shape \[B, T\] = \[2, 4\].* got \[2, 3\]"):
        model(tokens, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="2 columns in front of the 4 tokens, but the cache has read 0"):
        model(tokens, attention_mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match="mask and cu_seqlens exclude each other"):
        model(tokens[:1], attention_mask=torch.tensor([[0, 1, 1, 1]]), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(TypeError, match=r"position_ids are not taken: .* cu_seqlens"):
        model(tokens, position_ids=torch.arange(4).expand(2, -1))
    with pytest.raises(TypeError, match="does not take: token_type_ids"):
        model(tokens, token_type_ids=tokens)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("rows", [0, 2])
@torch.no_grad()
def test_no_tokens(arm: str, rows: int) -> None:
    model = make(arm)
    cache = model(random_tokens(rows, 3)).cache
    before = copy.deepcopy(cache)
    output = model(random_tokens(rows, 0), cache=cache)
    assert output.logits.shape == (rows, 0, VOCABULARY)
    assert_same_cache(output.cache, before, 0.0)
    assert output.cache.get_seq_length() == 3


@pytest.mark.parametrize("arm", ARMS)
def test_two_runs_are_bit_equal(arm: str) -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        model, tokens = make(arm, torch.float32), random_tokens(2, 70)
        model(tokens).logits.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
