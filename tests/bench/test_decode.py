"""The benchmark of decoding with a CPU in the place of the card: what is computed, not how fast."""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.card import Cpu
from torch import Tensor, nn

from ccq.bench import decode, model
from ccq.bench.decode import Decoder, bench_decode, ratios, step_bytes
from ccq.bench.tables import speed_page
from ccq.cli import main
from ccq.models import CCQForCausalLM, preset
from ccq.models.counts import state_bytes
from ccq.nn.mixers import state_tensors

SMALL = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 11}
BANDWIDTH = 1e9


class Replaying(Cpu):
    """It replays what it captured by doing it again, and every look at its clock takes one millisecond."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = 0

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.captured += 1
        return step

    def elapsed_ms(self, work: Callable[[], Any]) -> float:
        work()
        return 1.0

    def copy_bytes_per_second(self) -> float:
        return BANDWIDTH


class Plain(nn.Module):
    """A model in the place of flash-linear-attention's, which counts the calls with a cache."""

    def __init__(self, config: types.SimpleNamespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor, past_key_values: Any, use_cache: bool, logits_to_keep: int) -> Any:
        logits = self.head(self.embedding(tokens))[:, -logits_to_keep:]
        return types.SimpleNamespace(logits=logits, past_key_values=[*(past_key_values or []), tokens])


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = types.SimpleNamespace
    module = types.SimpleNamespace(
        GLAConfig=configuration, GLAForCausalLM=Plain, GatedDeltaNetConfig=configuration, GatedDeltaNetForCausalLM=Plain
    )
    monkeypatch.setitem(sys.modules, "fla.models", module)
    monkeypatch.setattr(model.flash_linear_attention, "reason_against", lambda *_: "it is not needed here")


def measure(saved: list[Any], **changed: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "arms": ("gla", "gla+ccq", "gated-deltanet+ccq"), "scale": "tiny", "rows": 2, "context": 6, "device": "cuda",
        "repeats": 3, "limit": 60, "card": Replaying(), **SMALL,
    }  # fmt: skip
    save = lambda figures: saved.append(json.loads(json.dumps(figures)))  # noqa: E731
    return bench_decode(**{**settings, **changed}, say=lambda line: None, save=save)


@pytest.mark.usefixtures("package")
def test_figures_follow_from_what_the_card_says() -> None:
    saved: list[Any] = []
    card = Replaying()
    figures = measure(saved, card=card)
    assert figures["notes"] == []
    assert [(row["backbone"], row["model"]) for row in figures["models"]] == [
        ("gla", "gla"),
        ("gla", "gla+ccq"),
        ("gla", "flash-linear-attention"),
        ("gated-deltanet", "gated-deltanet+ccq"),
        ("gated-deltanet", "flash-linear-attention"),
    ]
    assert figures["settings"]["dtype"] == "bfloat16" and card.captured == 3
    for row in figures["models"]:
        assert row["eager"]["rounds"] == 3
        assert row["eager"]["tokens_per_second"] == 2 / (row["eager"]["median_ms"] / 1000)
        if row["model"] == "flash-linear-attention":
            assert row["graph"] is row["state_bytes"] is row["floor_tokens_per_second"] is None
            continue
        # Four replays between two looks at a clock that always says one millisecond.
        assert row["graph"]["median_ms"] == 0.25 and row["graph"]["tokens_per_second"] == 8000
        made = CCQForCausalLM(preset(f"{row['model']}-tiny", **SMALL))
        assert row["parameters"] == sum(x.numel() for x in made.parameters())
        assert row["state_bytes"] == state_bytes(made.config)
        # Weights in two bytes, and one look at the memory.
        assert row["peak_bytes"] == 2 * row["parameters"] + 1500
        moved = 2 * (row["parameters"] - 11 * 16) + 2 * 2 * row["state_bytes"]
        assert row["floor_tokens_per_second"] == pytest.approx(2 * BANDWIDTH / moved)
    plain, with_read, package_row = figures["models"][:3]
    assert figures["ratios"][:2] == [
        {
            "model": "gla",
            "over": "flash-linear-attention",
            "eager": plain["eager"]["median_ms"] / package_row["eager"]["median_ms"],
            "graph": None,
            "state_bytes": None,
        },
        {
            "model": "gla+ccq",
            "over": "gla",
            "eager": with_read["eager"]["median_ms"] / plain["eager"]["median_ms"],
            "graph": 1.0,
            "state_bytes": with_read["state_bytes"] / plain["state_bytes"],
        },
    ]
    assert len(figures["ratios"]) == 2, "gated-deltanet itself was not measured"
    assert saved[-1] == json.loads(json.dumps(figures))


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet", "mamba2+ccq", "transformer"])
def test_what_is_timed_is_greedy_decoding_in_place(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the whole text read again for every token; the prompt is read in pieces."""
    monkeypatch.setattr(decode, "PREFILL_TOKENS", 8)
    torch.manual_seed(0)
    lengths = []
    made = CCQForCausalLM(preset(f"{arm}-tiny", vocab_size=23, initializer_range=0.3)).eval()
    made.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape))
    text = torch.randint(23, (2, 10))
    decoder = Decoder(made, text)
    assert lengths == [(2, 4), (2, 4), (2, 2)]
    place, states = decoder.token.data_ptr(), list(state_tensors(decoder.cache.layers[0].state).values())
    addresses = [x.data_ptr() for x in states]
    for _ in range(6):
        text = torch.cat([text, decoder.token], dim=1)
        with torch.no_grad():
            expected = made(text, use_cache=False).logits[:, -1].argmax(-1)
        decoder.step()
        assert torch.equal(decoder.token[:, 0], expected)
    assert decoder.token.data_ptr() == place
    if arm != "transformer":
        assert [x.data_ptr() for x in state_tensors(decoder.cache.layers[0].state).values()] == addresses


def test_memories_and_statistics_are_float32_beside_half_weights() -> None:
    made = CCQForCausalLM(preset("gla+ccq-tiny", **SMALL)).to(torch.bfloat16).eval()
    states = state_tensors(Decoder(made, torch.zeros(1, 3, dtype=torch.int64)).cache.layers[0].state)
    dtypes = {name: x.dtype for name, x in states.items() if x.is_floating_point()}
    large = {name for name in dtypes if "conv" not in name}
    assert large and all(dtypes[name] == torch.float32 for name in large)


def test_a_time_is_that_of_one_step_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.008)
    monkeypatch.setattr("ccq.bench.measure.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(decode, "STEPS", 4)
    taken: list[int] = []
    stand_in: Any = types.SimpleNamespace(step=lambda: taken.append(1))
    run = decode.DecodeMeasurement(
        {}, scale="tiny", rows=1, context=1, dtype=torch.float32, changes={}, card=Cpu(), repeats=3, limit=60,
        say=lambda line: None, save=lambda figures: None,
    )  # fmt: skip
    assert run.loop_timer(stand_in)() == pytest.approx(2.0)
    assert len(taken) == 4


def test_what_a_step_moves_by_hand() -> None:
    for arm, tied, ways in (("gla", False, 2), ("gla", True, 2), ("transformer", False, 1)):
        made = CCQForCausalLM(preset(f"{arm}-tiny", tie_word_embeddings=tied, **SMALL))
        inside = sum(x.numel() for x in made.model.layers.parameters()) + 16  # and the last norm
        assert step_bytes(made, 3, 1000) == 4 * (inside + 11 * 16) + ways * 3000


def test_ratios_by_hand() -> None:
    def row(name: str, eager: float, graph: float | None, state: int | None) -> dict[str, Any]:
        times = {"eager": {"median_ms": eager}, "graph": None if graph is None else {"median_ms": graph}}
        return {"backbone": "gla", "model": name, "state_bytes": state, **times}

    package_row = row("flash-linear-attention", 20.0, None, None)
    found = ratios([row("gla", 10.0, 2.0, 400), row("gla+ccq", 15.0, 2.1, 500), row("gla+exact", 30.0, None, 800)])
    assert found == [
        {"model": "gla+ccq", "over": "gla", "eager": 1.5, "graph": 1.05, "state_bytes": 1.25},
        {"model": "gla+exact", "over": "gla", "eager": 3.0, "graph": None, "state_bytes": 2.0},
    ]
    assert ratios([row("gla", 10.0, 2.0, 400), package_row]) == [
        {"model": "gla", "over": "flash-linear-attention", "eager": 0.5, "graph": None, "state_bytes": None}
    ]


@pytest.mark.usefixtures("package")
def test_what_cannot_be_measured_is_said_and_costs_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla.models", None)  # as if it were not installed

    class Refusing(Replaying):
        def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
            raise RuntimeError("operation not permitted when stream is capturing")

    figures = measure([], arms=("gla", "transformer"), card=Refusing())
    notes = "\n".join(figures["notes"])
    assert "flash-linear-attention, gla: left out (ModuleNotFoundError" in notes
    assert "gla, CUDA graph: left out (RuntimeError: operation not permitted" in notes
    assert "transformer: no CUDA graph, because its state grows with every token" in notes
    assert [(row["model"], row["graph"]) for row in figures["models"]] == [("gla", None), ("transformer", None)]
    assert all(row["eager"]["median_ms"] > 0 for row in figures["models"])
    (tmp_path / "decode-card.json").write_text(json.dumps(figures))
    assert "| transformer | " in speed_page(tmp_path)


@pytest.mark.usefixtures("package")
def test_every_state_of_an_unfinished_file_makes_a_page(tmp_path: Path) -> None:
    saved: list[Any] = []
    figures = measure(saved)
    for state in [*saved, figures]:
        (tmp_path / "decode-card.json").write_text(json.dumps(state))
        page = speed_page(tmp_path)
    row = figures["models"][1]
    eager = row["eager"]
    spread = f"{eager['median_ms']:.3f} ({eager['lower_quartile_ms']:.3f} to {eager['upper_quartile_ms']:.3f})"
    cells = [spread, f"{eager['tokens_per_second']:,.0f}", "0.250 (0.250 to 0.250)", "8,000"]
    state = f"{row['state_bytes'] / 2**20:.2f}"
    assert f"| gla+ccq | {' | '.join(cells)} | {row['floor_tokens_per_second']:,.0f} | {state} | 0.00 |" in page
    line = figures["ratios"][1]
    assert f"| gla+ccq | gla | {line['eager']:.3f} | 1.000 | {line['state_bytes']:.3f} |" in page
    assert "B 2, after 6 tokens, weights in bfloat16" in page and "Copy on the device: 0.00 TB/s" in page


def test_a_laptop_measures_tiny_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "decode-here.json"
    command = ["bench", "decode", "--device", "cpu", "--rows", "2", "--context", "32", "--repeats", "3"]
    assert main([*command, "--arms", "gla", "gla+ccq", "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["schema"] == "ccq-bench-decode/1"
    assert figures["settings"]["scale"] == "tiny" and figures["settings"]["dtype"] == "float32"
    assert [row["model"] for row in figures["models"]] == ["gla", "gla+ccq"]
    for row in figures["models"]:
        assert row["graph"] is row["peak_bytes"] is row["floor_tokens_per_second"] is None
        with torch.no_grad():
            cache = CCQForCausalLM(preset(f"{row['model']}-tiny")).eval()(torch.tensor([[1]])).cache
        assert row["state_bytes"] == cache.state_bytes
        assert f"{row['eager']['tokens_per_second']:,.0f} tokens/s" in printed
    assert f"gla+ccq over gla: {figures['ratios'][0]['eager']:.3f} eager" in printed
    page = speed_page(tmp_path)
    assert f"## Decoding: {figures['environment']['processor']}, tiny" in page and "weights in float32" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--device", "cuda"]) == 2
    assert "torch finds no GPU; `ccq bench decode --device cpu` measures on the processor" in capsys.readouterr().err
    assert main(["bench", "decode", "--arms", "glass"]) == 2
    assert "unknown preset 'glass-tiny'" in capsys.readouterr().err
