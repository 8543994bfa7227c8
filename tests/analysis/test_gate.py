"""Gate and correction of a model against the covariance written out, and the gate's values and decay."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from ccq.analysis.gate import collect_gate_values, collect_on_corpus, measure_reads, text_windows
from ccq.data.corpora import Corpus
from ccq.models import attach, detach, read_steps, set_read
from ccq.models.cache import fingerprint
from ccq.models.modeling import CCQForCausalLM
from ccq.models.observation import observe_reads
from ccq.models.presets import preset
from ccq.train import initial_model


def model_of(arm: str, **changes: object) -> CCQForCausalLM:
    return initial_model(preset(f"{arm}-tiny", vocab_size=64, **changes), 0)


def test_correction_is_the_covariance_of_the_keys_times_the_query() -> None:
    """A fixed gate and one layer: keys and queries are recomputed from the weights."""
    model = model_of("gla+ccq", gate=0.5, num_layers=1).double()
    tokens = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(0))
    measured = measure_reads(model, tokens, batch_size=2)
    assert measured is not None
    layer = model.model.layers[0]
    x, _ = layer.attn_norm(model.model.embeddings(tokens))
    q, k = (
        convolution(projection(x))[0].view(3, 12, 2, 32)
        for projection, convolution in (
            (layer.attn.q_proj, layer.attn.q_conv1d),
            (layer.attn.k_proj, layer.attn.k_conv1d),
        )
    )
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    sizes = []
    for row in range(3):
        for i in range(12):
            for head in range(2):
                sigma = torch.cov(k[row, : i + 1, head].T, correction=0)
                query = q[row, i, head]
                sizes.append(0.5 * (sigma @ query).norm() / query.norm())
    assert measured.correction["relative_size"] == pytest.approx(torch.stack(sizes).mean().item(), rel=1e-5)
    assert measured.correction["by_layer"] == [pytest.approx(measured.correction["relative_size"])]
    assert measured.gate["mean"] == pytest.approx(0.5)


def test_gate_figures_count_every_token_layer_and_head() -> None:
    model = model_of("gated-deltanet+ccq")
    with torch.no_grad():
        for layer, read in enumerate(model.read_steps()):
            read.gate_bias.copy_(torch.tensor([-1.0, 2.0]) + layer)
    tokens = torch.randint(0, 64, (5, 9), generator=torch.Generator().manual_seed(0))
    measured = measure_reads(model, tokens, batch_size=2)
    assert measured is not None
    expected = torch.sigmoid(torch.tensor([[-1.0, 2.0], [0.0, 3.0]]))
    assert torch.allclose(torch.tensor(measured.gate["by_layer_and_head"]), expected)
    assert measured.gate["by_layer"] == pytest.approx(expected.mean(1).tolist())
    assert measured.gate["mean"] == pytest.approx(expected.mean().item())
    counts = enumerate(measured.gate["histogram"]["counts"])
    assert {bin: count for bin, count in counts if count} == {int(50 * gate): 5 * 9 for gate in expected.flatten()}


def test_an_arm_without_a_read_step_has_no_figures() -> None:
    assert measure_reads(model_of("gla"), torch.zeros(1, 4, dtype=torch.int64)) is None


def test_observers_are_put_back() -> None:
    model = model_of("gla+ccq")
    read = model.read_steps()[0]
    seen: list[object] = []
    read.observer = seen.append
    with pytest.raises(RuntimeError), observe_reads(model):
        raise RuntimeError
    assert read.observer is not None
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert len(seen) == 1


def test_values_are_lambda_at_every_token() -> None:
    """One layer: the gate is recomputed from the weights, row by row."""
    model = model_of("gla+ccq", num_layers=1).double()
    read = model.read_steps()[0]
    with torch.no_grad():
        read.gate_weight.normal_()
        read.gate_bias.copy_(torch.tensor([-1.0, 2.0]))
    tokens = torch.randint(0, 64, (5, 7), generator=torch.Generator().manual_seed(0))
    values = collect_gate_values(model, tokens, text={"source": "drawn"}, batch_size=2)
    layer = model.model.layers[0]
    expected = []
    for row in tokens:
        x, _ = layer.attn_norm(model.model.embeddings(row[None]))
        presplit = layer.attn.q_conv1d(layer.attn.q_proj(x))[0][0]
        expected += [1 / (1 + (-(read.gate_weight @ each + read.gate_bias)).exp()) for each in presplit]
    (found,) = values.layers
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), torch.stack(expected), rtol=1e-6)
    assert values.means() == [pytest.approx(torch.stack(expected).mean(0).tolist())]
    assert (values.text, values.model) == ({"source": "drawn"}, fingerprint(model))
    assert not read.is_changed and read.observer is None


@torch.no_grad()
def test_an_attached_gate_is_measured_too() -> None:
    """One layer of a model of transformers: the gate is recomputed from its weights, column by column."""
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_key_head_dim=6, linear_value_head_dim=4, linear_num_key_heads=2,
        linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"], initializer_range=0.3,
    )  # fmt: skip
    model = attach(Qwen3_5ForCausalLM(config).eval())
    (read,) = read_steps(model)
    for parameter in read.parameters():
        parameter.normal_()
    tokens = torch.randint(0, 64, (5, 7), generator=torch.Generator().manual_seed(0))
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(tokens))
    # The first 12 channels of the convolution are the queries.
    mixed, weight = layer.linear_attn.in_proj_qkv(x)[..., :12], layer.linear_attn.conv1d.weight[:12, 0]
    expected = []
    for row in mixed:
        for i in range(7):
            taps = [row[j] * weight[:, 3 - (i - j)] for j in range(max(0, i - 3), i + 1)]
            query = torch.stack(taps).sum(0)
            query = query / (1 + (-query).exp())
            expected.append(read.gate_scale / (1 + (-(read.gate_weight @ query + read.gate_bias)).exp()))
    values = collect_gate_values(model, tokens, batch_size=2)
    assert torch.allclose(values.layers[0], torch.stack(expected), atol=1e-5)
    assert values.model == fingerprint(model)
    measured = measure_reads(model, tokens, batch_size=2)
    assert measured is not None
    assert measured.gate["by_layer_and_head"] == [pytest.approx(torch.stack(expected).mean(0).tolist(), rel=1e-4)]
    set_read(model, "scale=2")
    doubled = measure_reads(model, tokens)
    assert doubled is not None
    assert doubled.correction["relative_size"] == pytest.approx(2 * measured.correction["relative_size"])
    with pytest.raises(ValueError, match="the read steps are changed"):
        collect_gate_values(model, tokens)
    set_read(model, "on")
    with pytest.raises(ValueError, match=r"tokens has 64, but the model knows 0 \.\.\. 63"):
        collect_gate_values(model, torch.full_like(tokens, 64))
    with pytest.raises(ValueError, match="Qwen3_5ForCausalLM has no gate that is learned"):
        collect_gate_values(detach(model), tokens)


def test_values_are_those_of_a_model_as_it_is() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for arm in ("gla", "gla+comba", "gla+ccq-fixed"):
        with pytest.raises(ValueError, match=f"{re.escape(arm)} has no gate that is learned"):
            collect_gate_values(model_of(arm), tokens)
    model = model_of("gla+ccq")
    model.set_read("heads=0")
    with pytest.raises(ValueError, match="the read steps are changed"):
        collect_gate_values(model, tokens)
    model.set_read("on")
    with pytest.raises(ValueError, match=r"tokens has 64, but the model knows 0 \.\.\. 63"):
        collect_gate_values(model, tokens + 64)
    with pytest.raises(ValueError, match="there are no tokens"):
        collect_gate_values(model, tokens[:, :0])


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id: int | None = 0

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(letter) - 96 for letter in text])


def test_windows_are_the_held_out_text() -> None:
    corpus = Corpus("here", train=(("x", "zzzzz"),), held_out=(("a", "abc"), ("b", "de")), characters=0, sha256="")
    assert text_windows(corpus, Letters(), windows=2, length=3).tolist() == [[1, 2, 3], [0, 4, 5]]
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    assert text_windows(corpus, tokenizer, windows=1, length=5).tolist() == [[1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="the held-out part of here has 7 tokens, but 4 windows of 2 are asked for"):
        text_windows(corpus, Letters(), windows=4, length=2)


@pytest.mark.parametrize(("tokens", "length", "windows"), [(7, 3, [[1, 2, 3], [0, 4, 5]]), (4, 9, [[1, 2, 3, 0]])])
def test_values_on_a_corpus_say_what_it_was(tokens: int, length: int, windows: list[list[int]]) -> None:
    """As many whole windows as there are tokens for, none longer than these."""
    model = model_of("gla+ccq", num_layers=1)
    corpus = Corpus("here", train=(("x", "zz"),), held_out=(("a", "abc"), ("b", "dede")), characters=0, sha256="12")
    values = collect_on_corpus(model, Letters(), corpus, tokens=tokens, length=length)
    assert values.text == {"source": "here", "sha256": "12", "windows": len(windows), "length": len(windows[0])}
    assert torch.equal(values.layers[0], collect_gate_values(model, torch.tensor(windows)).layers[0])
