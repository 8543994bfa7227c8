"""The diagnosis against loops over prompts, layers, heads and tokens, written from the paper's protocol."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.analysis.tokenizer import prompt_tokenizer
from torch import Tensor

from ccq.analysis.collection import collect
from ccq.analysis.diagnosis import DiagnosisResults, diagnose
from ccq.analysis.prompts import TokenizedPrompt, TokenKind, needle_prompts, tokenize_prompt
from ccq.evals.results import _check
from ccq.models import CCQForCausalLM, preset

PROMPTS, FILLERS, SEED = 3, 6, 5
ENVIRONMENT: Any = {
    "ccq": "0", "python": "0", "torch": "0", "platform": "a", "processor": "a", "cores": 1, "threads_per_run": 1,
    "device": "cpu",
}  # fmt: skip


def own_model(arm: str, **changes: Any) -> CCQForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 700, "head_dim": 8, "initializer_range": 0.2, **changes}
    model = CCQForCausalLM(preset(f"{arm}-tiny", **sizes)).double().eval()
    for read in model.read_steps():
        for parameter in read.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def diagnosed(model: Any, **changes: Any) -> DiagnosisResults:
    settings: dict[str, Any] = {"prompts": PROMPTS, "fillers": FILLERS, "seed": SEED, "environment": ENVIRONMENT}
    return diagnose(model, prompt_tokenizer(), name="a model", **{**settings, **changes})


def some_prompts() -> list[TokenizedPrompt]:
    return [tokenize_prompt(p, prompt_tokenizer()) for p in needle_prompts(PROMPTS, seed=SEED, fillers=FILLERS)]


def places(prompt: TokenizedPrompt) -> tuple[list[int], list[int]]:
    """Unique tokens of the needle, and the distractors: everything but the needle and the question."""
    ids = prompt.tokens.tolist()
    kinds = prompt.kinds.tolist()
    unique = [t for t, kind in enumerate(kinds) if kind == TokenKind.NEEDLE and ids.count(ids[t]) <= 2]
    return unique, [t for t, kind in enumerate(kinds) if kind == TokenKind.TEXT]


def aligned(keys: Tensor, directions: int) -> list[float]:
    """keys [T, D] of one head -> the alignment of each."""
    unit = keys / keys.norm(dim=-1, keepdim=True)
    vectors = torch.linalg.svd(torch.cov(unit.T, correction=1)).U[:, :directions]
    away = unit - unit.mean(0)
    return [float((vectors.T @ x).norm() ** 2 / x.norm() ** 2) for x in away]


@pytest.mark.parametrize("look", ["projection", "memory"])
def test_alignment_follows_the_protocol(look: str) -> None:
    model = own_model("gated-deltanet")
    found = {keys["keys"]: keys for keys in diagnosed(model)["keys"]}[look]["alignment"]
    assert found["directions"] == 4  # half of a key of 8
    differences: dict[tuple[int, int], list[float]] = {}
    pooled: dict[str, list[float]] = {"unique": [], "text": []}
    needles: dict[int, list[float]] = {}
    rare: dict[int, list[float]] = {}
    for prompt in some_prompts():
        unique, text = places(prompt)
        ids, kinds = prompt.tokens.tolist(), prompt.kinds.tolist()
        for number, layer in enumerate(collect(model, prompt.tokens)):
            keys = layer.projected_keys if look == "projection" else layer.memory_keys
            assert keys is not None
            for head in range(2):
                values = aligned(keys[:, head], 4)
                needle, others = [values[t] for t in unique], [values[t] for t in text]
                differences.setdefault((number, head), []).append(statistics.mean(needle) - statistics.mean(others))
                pooled["unique"] += needle
                pooled["text"] += others
                whole = [values[t] for t, kind in enumerate(kinds) if kind == TokenKind.NEEDLE]
                needles.setdefault(number, []).append(statistics.mean(whole))
                as_rare = [values[t] for t in text if ids.count(ids[t]) <= 2]
                rare.setdefault(number, []).append(statistics.mean(as_rare))
    for number, layer_found in enumerate(found["layers"]):
        by_head = [differences[number, head] for head in range(2)]
        assert layer_found["difference_by_head"] == pytest.approx([statistics.mean(values) for values in by_head])
        by_prompt = [statistics.mean(values) for values in zip(*by_head, strict=True)]
        assert layer_found["difference"] == pytest.approx(statistics.mean(by_prompt))
        assert layer_found["standard_deviation"] == pytest.approx(statistics.stdev(by_prompt))
        assert layer_found["needle"] == pytest.approx(statistics.mean(needles[number]))
        assert layer_found["rare_text"] == pytest.approx(statistics.mean(rare[number]))
    whole_model = [statistics.mean(values) for values in zip(*differences.values(), strict=True)]
    assert found["difference_by_prompt"] == pytest.approx(whole_model)
    means = {cell: statistics.mean(values) for cell, values in differences.items()}
    assert found["difference"] == pytest.approx(statistics.mean(means.values()))
    assert found["heads_above_zero"] == sum(value > 0 for value in means.values())
    assert found["heads"] == len(means)
    for group, values in pooled.items():
        counts = [0] * 50
        for value in values:
            counts[min(int(50 * value), 49)] += 1
        assert found["histogram"][group] == counts  # type: ignore[literal-required]


def test_spectrum_of_the_keys_of_a_layer() -> None:
    model = own_model("gla")
    found = diagnosed(model)["keys"][1]["spectrum"]
    for number in range(2):
        spectra, lengths = [], []
        for prompt in some_prompts():
            keys = collect(model, prompt.tokens)[number].memory_keys
            assert keys is not None
            for head in range(2):
                unit = F.normalize(keys[:, head], dim=-1)
                spectra.append(torch.linalg.svdvals(unit - unit.mean(0)).square() / len(unit))
                lengths.append(float(unit.mean(0).norm()) ** 2)
        values = torch.stack(spectra)
        assert found[number]["eigenvalues"] == pytest.approx(values.mean(0).tolist(), abs=1e-12)
        assert found[number]["largest"] == pytest.approx(values[:, 0].mean().item())
        assert found[number]["top_share"] == pytest.approx((values[:, :4].sum(1) / values.sum(1)).mean().item())
        ranks = values.sum(1).square() / values.square().sum(1)
        assert found[number]["effective_rank"] == pytest.approx(ranks.mean().item())
        assert found[number]["mean_length_squared"] == pytest.approx(statistics.mean(lengths))
        assert found[number]["trace"] == pytest.approx(1 - statistics.mean(lengths))


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet"])
def test_gates_corrections_and_margins_of_every_query(arm: str) -> None:
    """Sigma is written out for every token; without a read step, lambda is 0.3."""
    model = own_model(arm)
    found = diagnosed(model)
    assert found["settings"]["queries"] == "memory"
    assert found["settings"]["nominal_gate"] == (None if "+" in arm else 0.3)
    assert found["correction"] is not None and found["margins"] is not None
    for number in range(2):
        gates: dict[str, list[float]] = {kind: [] for kind in ("text", "needle", "question", "last")}
        sizes: dict[str, list[float]] = {kind: [] for kind in gates}
        figures: dict[str, list[float]] = {}
        changes = []
        for prompt in some_prompts():
            layer = collect(model, prompt.tokens)[number]
            unique, text = places(prompt)
            kinds = [TokenKind(int(kind)).name.lower() for kind in prompt.kinds]
            seen: dict[str, list[tuple[float, float]]] = {kind: [] for kind in gates}
            of_prompt: dict[str, list[float]] = {}
            for head in range(2):
                assert layer.queries is not None and layer.memory_keys is not None
                keys = F.normalize(layer.memory_keys[:, head], dim=-1)
                queries = F.normalize(layer.queries[:, head, 0], dim=-1)
                for t, kind in enumerate(kinds):
                    gate = 0.3 if layer.read is None else float(layer.read.gate[t, head])
                    sigma = torch.cov(keys[: t + 1].T, correction=0)
                    change = gate * sigma @ queries[t]
                    for group in (kind, "last") if t == len(kinds) - 1 else (kind,):
                        seen[group].append((gate, float(change.norm())))
                    cosine = float(F.cosine_similarity(queries[t], queries[t] - change, dim=0))
                    of_prompt.setdefault("angle", []).append(math.degrees(math.acos(min(cosine, 1.0))))
                u = torch.linalg.svd(sigma).U[:, 0]
                pairs = [(keys[i], keys[j]) for i in unique for j in text]
                query = queries[-1]
                holds = [float((j @ u - i @ u) * (u @ query)) > 0 for i, j in pairs]
                of_prompt.setdefault("condition_holds", []).append(statistics.mean(map(float, holds)))
                margins = [float((i - j) @ query) for i, j in pairs]
                clean = [float((i - j) @ (query - change)) for i, j in pairs]
                moved = [after - before for after, before in zip(clean, margins, strict=True)]
                of_prompt.setdefault("margin", []).append(statistics.mean(margins))
                of_prompt.setdefault("change", []).append(statistics.mean(moved))
                rho = float(u @ sigma @ u)
                first = [gate * rho * float((j @ u - i @ u) * (u @ query)) for i, j in pairs]
                of_prompt.setdefault("first_direction", []).append(statistics.mean(first))
                scores = [float(key @ (query - change) - key @ query) for key in keys]
                of_prompt.setdefault("text_scores", []).append(statistics.mean(scores[t] for t in text))
            for kind, values in seen.items():
                gates[kind].append(statistics.mean(gate for gate, _ in values))
                sizes[kind].append(statistics.mean(size for _, size in values))
            for figure, values in of_prompt.items():
                figures.setdefault(figure, []).append(statistics.mean(values))
            changes.append(statistics.mean(of_prompt["change"]))
        correction, margin = found["correction"][number], found["margins"][number]
        # The read step divides by sqrt(|q|^2 + 1e-6), and short keys come out shorter than 1.
        close = {"rel": 2e-4, "abs": 1e-8}
        if "+" in arm:
            assert correction["gate"] == pytest.approx({k: statistics.mean(v) for k, v in gates.items()}, **close)
        else:
            assert correction["gate"] is None
        assert correction["relative_size"] == pytest.approx({k: statistics.mean(v) for k, v in sizes.items()}, **close)
        assert correction["angle"] == pytest.approx(statistics.mean(figures["angle"]), **close)
        for figure in ("condition_holds", "margin", "change", "first_direction"):
            assert margin[figure] == pytest.approx(statistics.mean(figures[figure]), **close)  # type: ignore[literal-required]
        assert margin["standard_deviation"] == pytest.approx(statistics.stdev(changes), **close)
        assert margin["score_change"]["text"] == pytest.approx(statistics.mean(figures["text_scores"]), **close)


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet"])
def test_error_of_rounding_is_a_ratio_of_root_mean_squares(arm: str) -> None:
    """The first tokens have next to no correction, so that a mean of their ratios would be that of a few."""
    model = own_model(arm)
    found = diagnosed(model)["correction"]
    assert found is not None
    for number in range(2):
        errors, changes, unchanged, ratios = [], [], [], []
        for prompt in some_prompts():
            layer = collect(model, prompt.tokens)[number]
            assert layer.queries is not None
            of_prompt: tuple[list[float], list[float], list[float]] = ([], [], [])
            for t in range(len(prompt.tokens)):
                for head in range(2):
                    if layer.read is not None:
                        query = layer.read.query[t, head]
                        change = layer.read.gate[t, head] * layer.read.correction[t, head]
                    else:
                        query = F.normalize(layer.queries[t, head, 0], dim=-1)
                        keys = F.normalize(layer.met_keys[: t + 1, head], dim=-1)
                        change = 0.3 * torch.cov(keys.T, correction=0) @ query
                    error = (query - change).bfloat16().double() - (query - change)
                    of_prompt[0].append(float(error @ error) if t else 0)
                    of_prompt[1].append(float(change @ change))
                    same = (query - change).bfloat16() == query.bfloat16()
                    of_prompt[2].append(float(same.double().mean()))
                    ratios += [float(error.norm() / change.norm())] if t else []
            for values, of_all in zip(of_prompt, (errors, changes, unchanged), strict=True):
                of_all.append(statistics.mean(values))
        expected = math.sqrt(statistics.mean(errors) / statistics.mean(changes))
        assert found[number]["rounding_noise"] == pytest.approx(expected, rel=1e-6)
        assert statistics.mean(ratios) != pytest.approx(expected, rel=0.01)
        assert found[number]["unchanged"] == pytest.approx(statistics.mean(unchanged), abs=1e-3)


def test_a_read_step_without_a_correction_shows_none() -> None:
    found = diagnosed(own_model("gla+normalize"), prompts=1)
    _check(found, DiagnosisResults, "")
    assert found["correction"] is found["margins"] is found["settings"]["nominal_gate"] is None
    assert (found["settings"]["queries"], found["model"]["read"]) == ("memory", "on")


@pytest.mark.parametrize("arm", ["gla", "gla+normalize"])
def test_expansion_at_the_queries_of_four_places(arm: str) -> None:
    model = own_model(arm)
    found = diagnosed(model, prompts=1)["expansion"]
    assert found is not None and [entry["length"] for entry in found] == [1, 4, 16]
    prompt = some_prompts()[0]
    for entry in found:
        figures: dict[str, list[float]] = {}
        for layer in collect(model, prompt.tokens):
            assert layer.queries is not None
            for head in range(2):
                for quarter in (1, 2, 3, 4):
                    count = -(-len(prompt.tokens) * quarter // 4)
                    keys = F.normalize(layer.met_keys[:count, head], dim=-1)
                    query = F.normalize(layer.queries[count - 1, head, 0], dim=-1)
                    scores = entry["length"] * keys @ query
                    exact = float(scores.exp().sum().log())
                    linear = math.log(count) + float(scores.mean())
                    sigma = torch.cov(keys.T, correction=0)
                    quadratic = linear + entry["length"] ** 2 * float(query @ sigma @ query) / 2
                    weighted = torch.cov(keys.T, correction=0, aweights=scores.softmax(0))
                    figures.setdefault("remainder", []).append(abs(exact - quadratic))
                    figures.setdefault("remainder_of_linear", []).append(abs(exact - linear))
                    distance = (weighted - sigma).norm() / sigma.norm()
                    figures.setdefault("covariance_distance", []).append(float(distance))
                    cosine = F.cosine_similarity(weighted @ query, sigma @ query, dim=0)
                    figures.setdefault("action_cosine", []).append(float(cosine))
        for figure, values in figures.items():
            assert entry[figure] == pytest.approx(statistics.mean(values), rel=1e-8)  # type: ignore[literal-required]


def test_results_fit_their_schema_and_one_seed_gives_one_file() -> None:
    model = own_model("gla+ccq")
    told: list[str] = []
    first, second = (diagnosed(model, prompts=2, say=told.append) for _ in range(2))
    _check(first, DiagnosisResults, "")
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert {**first, "created": ""} == {**second, "created": ""}
    assert first["model"] == {
        "name": "a model",
        "type": "ccq",
        "arm": "gla+ccq",
        "read": "on",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": "float64",
    }
    lengths = [len(prompt.tokens) for prompt in some_prompts()[:2]]
    assert first["settings"]["tokens"] == [min(lengths), max(lengths)]
    assert told[0] == f"prompt 1 of 2, {lengths[0]} tokens"
    one = diagnosed(model, prompts=1)
    assert one["keys"][0]["alignment"]["layers"][0]["standard_deviation"] is None


def test_a_layer_that_is_off_beside_others_has_a_gate_of_zero() -> None:
    model = own_model("gla+ccq")
    model.set_read("layers=1,scale=2")
    found = diagnosed(model, prompts=1)
    assert (found["model"]["read"], found["settings"]["nominal_gate"]) == ("scale=2,layers=1", None)
    assert found["correction"] is not None
    off, on = found["correction"]
    assert off["gate"] == off["relative_size"] == {"text": 0, "needle": 0, "question": 0, "last": 0}
    assert (off["angle"], off["rounding_noise"], off["unchanged"]) == (0, None, 1)
    gates = [layer.read for layer in collect(model, some_prompts()[0].tokens)]
    assert gates[0] is None and gates[1] is not None and on["gate"] is not None
    assert on["gate"]["last"] == pytest.approx(float(gates[1].gate[-1].mean()))
    # With all of them off, what a correction would do is told, as of a model without a read step.
    model.set_read("off")
    found = diagnosed(model, prompts=1)
    assert (found["model"]["read"], found["settings"]["nominal_gate"]) == ("off", 0.3)
    assert found["correction"] is not None and found["correction"][0]["gate"] is None


def test_needles_of_a_transformers_model() -> None:
    """Qwen3: both looks at its keys; four query heads read two heads of keys, as projected."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=700,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
    )
    model = transformers.Qwen3ForCausalLM(config).double().eval()
    found = diagnosed(model)
    _check(found, DiagnosisResults, "")
    assert [keys["keys"] for keys in found["keys"]] == ["projection", "memory"]
    assert found["settings"]["queries"] == "projection" and found["settings"]["nominal_gate"] == 0.3
    assert found["correction"] is not None and found["margins"] is not None
    last = 2
    expected, changes = [], []
    for prompt in some_prompts():
        layer = collect(model, prompt.tokens)[last]
        unique, text = places(prompt)
        values = [aligned(layer.projected_keys[:, head], 4) for head in range(2)]
        expected.append(
            statistics.mean(statistics.mean(v[t] for t in unique) - statistics.mean(v[t] for t in text) for v in values)
        )
        for head in range(4):
            assert layer.queries is not None
            keys = F.normalize(layer.projected_keys[:, head // 2], dim=-1)
            query = F.normalize(layer.queries[-1, head // 2, head % 2], dim=-1)
            change = 0.3 * torch.cov(keys.T, correction=0) @ query
            changes.append(float((keys[text].mean(0) - keys[unique].mean(0)) @ change))
    assert found["keys"][0]["alignment"]["layers"][last]["difference"] == pytest.approx(statistics.mean(expected))
    assert found["margins"][last]["change"] == pytest.approx(statistics.mean(changes))


def test_prompts_beyond_the_positions_of_a_model_are_refused_before_the_first_is_run() -> None:
    transformers = pytest.importorskip("transformers")
    lengths = [len(prompt.tokens) for prompt in some_prompts()]
    assert lengths[0] < max(lengths)
    config = transformers.GPTNeoConfig(
        vocab_size=700,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        attention_types=[[["global"], 1]],
        max_position_embeddings=max(lengths) - 1,
        bos_token_id=0,
        eos_token_id=0,
    )
    told: list[str] = []
    with pytest.raises(ValueError, match=rf"knows {max(lengths) - 1} positions, but a text has {max(lengths)} tokens"):
        diagnosed(transformers.GPTNeoForCausalLM(config).eval(), say=told.append)
    assert told == []


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="not the tokenizer that the model was trained with"):
        diagnosed(own_model("gla", vocab_size=40))
