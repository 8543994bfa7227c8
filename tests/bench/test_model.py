"""The model benchmark with a CPU in the place of the card: what is computed, not how fast."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.card import Cpu
from torch import Tensor, nn

from ccq.bench import model
from ccq.bench.model import bench_model, ratios, sweep_shapes, time_first_step
from ccq.bench.tables import speed_page
from ccq.cli import main
from ccq.models import CCQForCausalLM, preset
from ccq.models.counts import flops_per_token

SMALL = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 11}


class Plain(nn.Module):
    """A model in the place of flash-linear-attention's: an embedding and a head."""

    def __init__(self, config: types.SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor, labels: Any = None, use_cache: bool = True, logits_to_keep: int = 0) -> Any:
        logits = self.head(self.embedding(tokens))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return types.SimpleNamespace(loss=loss, logits=logits[:, -logits_to_keep:])


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What configurations were asked for."""
    asked: list[dict[str, Any]] = []

    def configuration(**fields: Any) -> types.SimpleNamespace:
        asked.append(fields)
        return types.SimpleNamespace(**fields)

    module = types.SimpleNamespace(
        GLAConfig=configuration, GLAForCausalLM=Plain, GatedDeltaNetConfig=configuration, GatedDeltaNetForCausalLM=Plain
    )
    monkeypatch.setitem(sys.modules, "fla.models", module)
    monkeypatch.setattr(model.flash_linear_attention, "reason_against", lambda *_: "it is not needed here")
    return asked


def measure(said: list[str], saved: list[Any], **changed: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "arms": ("gla", "gla+ccq", "gated-deltanet+ccq"), "scale": "tiny", "rows": 2, "tokens": 6, "repeats": 3,
        "limit": 60, "sweep": None, "first_step": False, "card": Cpu(), **SMALL,
    }  # fmt: skip
    return bench_model(
        **{**settings, **changed}, say=said.append, save=lambda figures: saved.append(json.loads(json.dumps(figures)))
    )


def test_figures_follow_from_what_the_card_says(package: list[dict[str, Any]]) -> None:
    said: list[str] = []
    saved: list[Any] = []
    figures = measure(said, saved)
    assert figures["notes"] == []
    assert [(row["backbone"], row["model"]) for row in figures["models"]] == [
        ("gla", "gla"),
        ("gla", "gla+ccq"),
        ("gla", "flash-linear-attention"),
        ("gated-deltanet", "gated-deltanet+ccq"),
        ("gated-deltanet", "flash-linear-attention"),
    ]
    common = {
        "vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 24,
        "norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    assert package == [
        {**common, "expand_k": 4.0, "expand_v": 4.0, "use_short_conv": True},
        {**common, "head_dim": 32, "expand_v": 1.0},
    ]
    for row in figures["models"]:
        assert row["tokens_per_second"] == 12 / (row["step"]["median_ms"] / 1000)
        assert row["prefill"]["rounds"] == row["step"]["rounds"] == 3
        # Weights and two moments, float32 each, a step count of four bytes for each tensor; and one look at the memory.
        if row["model"] != "flash-linear-attention":
            made = CCQForCausalLM(preset(f"{row['model']}-tiny", **SMALL))
            tensors = list(made.parameters())
            assert row["parameters"] == sum(x.numel() for x in tensors)
            assert row["peak_bytes"] == 12 * row["parameters"] + 4 * len(tensors) + 1500
            assert row["flops_per_token"] == flops_per_token(made.config, context=3)
            assert row["flops_share"] is None
    plain, with_read, package_row = figures["models"][:3]
    first = figures["ratios"][0]
    assert first["ccq_over_backbone_step"] == with_read["step"]["median_ms"] / plain["step"]["median_ms"]
    assert first["backbone_over_package_prefill"] == plain["prefill"]["median_ms"] / package_row["prefill"]["median_ms"]
    assert first["ccq_over_backbone_peak_bytes"] == with_read["peak_bytes"] - plain["peak_bytes"] > 0
    assert figures["ratios"][1]["ccq_over_backbone_step"] is None
    assert saved[-1] == json.loads(json.dumps(figures))
    assert [len(state["models"]) for state in saved] == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures("package")
def test_every_state_of_an_unfinished_file_makes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"first_step_seconds": 12.3, "second_step_seconds": 0.5, "process_seconds": 20.1}
    monkeypatch.setattr(model, "time_first_step", lambda *_, **__: first)
    monkeypatch.setattr(model, "SHORTEST", 4)
    saved: list[Any] = []
    figures = measure([], saved, first_step=True)
    sweep = measure([], saved, arms=("gla", "mamba2"), sweep=8)
    for state in saved:
        (tmp_path / "model-card.json").write_text(json.dumps(state))
        speed_page(tmp_path)
    (tmp_path / "model-card.json").write_text(json.dumps(figures))
    (tmp_path / "model-sweep.json").write_text(json.dumps(sweep))
    page = speed_page(tmp_path)
    row = figures["models"][1]
    step = row["step"]
    spread = f"{step['median_ms']:.3f} ({step['lower_quartile_ms']:.3f} to {step['upper_quartile_ms']:.3f})"
    assert f"| gla+ccq | {row['parameters']:,} | {spread} | {row['tokens_per_second']:,.0f} | - | 0.00 |" in page
    line = figures["ratios"][0]
    ratios = f"{line['ccq_over_backbone_step']:.3f} | {line['ccq_over_backbone_prefill']:.3f} | +0.00"
    assert f"| gla | +ccq over backbone | {ratios} |" in page
    assert "gla+ccq in a fresh process with empty caches: 12.3 s (the whole process 20.1 s)" in page
    cells = [f"{row['tokens_per_second']:,.0f} (0.0)" for row in sweep["sweep"]]
    assert "| arm | 2 x 4 | 1 x 8 |" in page
    assert f"| gla | {cells[0]} | {cells[1]} |" in page and f"| mamba2 | {cells[2]} | {cells[3]} |" in page


def test_a_step_trains(package: list[dict[str, Any]]) -> None:
    config = preset("gla+ccq-tiny", **SMALL)
    torch.manual_seed(0)
    subject = model._subject(CCQForCausalLM(config), config, torch.device("cpu"))
    for group in subject.optimizer.param_groups:
        group["lr"] = 1e-2
    tokens = torch.randint(11, (2, 6))
    losses = [subject.step(tokens).item() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad is None for parameter in subject.module.parameters())
    subject.module.eval()
    expected = subject.module(tokens).logits[:, -1:]
    assert torch.equal(subject.prefill(tokens), expected)


@pytest.mark.usefixtures("package")
def test_a_sweep_cuts_the_same_tokens_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SHORTEST", 2)
    said: list[str] = []
    saved: list[Any] = []
    figures = measure(said, saved, arms=("gla", "transformer"), sweep=8)
    assert [(row["arm"], row["rows"], row["tokens"]) for row in figures["sweep"]] == [
        (arm, *shape) for arm in ("gla", "transformer") for shape in ((4, 2), (2, 4), (1, 8))
    ]
    assert all(row["tokens_per_second"] == 8 / (row["step"]["median_ms"] / 1000) for row in figures["sweep"])
    assert [len(state["sweep"]) for state in saved] == list(range(7))
    assert figures["models"] == []


def test_shapes_of_a_sweep_by_hand() -> None:
    assert sweep_shapes(32_768) == [(32, 1024), (16, 2048), (8, 4096), (4, 8192), (2, 16_384), (1, 32_768)]
    assert sweep_shapes(3072) == [(3, 1024)]
    assert sweep_shapes(700) == [(1, 700)]


def test_ratios_by_hand() -> None:
    def row(name: str, step: float, prefill: float | None, peak: int) -> dict[str, Any]:
        found = {"backbone": "gla", "model": name, "step": {"median_ms": step}, "peak_bytes": peak}
        return {**found, "prefill": None if prefill is None else {"median_ms": prefill}}

    rows = [
        row("gla", 500.0, 150.0, 1000),
        row("gla+ccq", 525.0, 156.0, 3400),
        row("flash-linear-attention", 1000.0, None, 900),
    ]
    assert ratios(rows) == [
        {
            "backbone": "gla", "ccq_over_backbone_step": 1.05, "ccq_over_backbone_prefill": 1.04,
            "ccq_over_backbone_peak_bytes": 2400, "backbone_over_package_step": 0.5,
            "backbone_over_package_prefill": None, "backbone_over_package_peak_bytes": 100,
        }
    ]  # fmt: skip


@pytest.mark.usefixtures("package")
def test_what_cannot_be_measured_is_said_and_costs_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.models", None)  # as if it were not installed

    def hangs(*_: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("python", options["timeout"])

    stand_in = types.SimpleNamespace(run=hangs, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("ccq.bench.measure.subprocess", stand_in)
    monkeypatch.setattr(model, "ARMS", ("gla",))
    figures = measure([], [], arms=("gla", "gla+ccq"), first_step=True)
    notes = "\n".join(figures["notes"])
    assert "gla+ccq: first step not measured (not finished after 180 s)" in notes
    assert "flash-linear-attention, gla: left out (ModuleNotFoundError" in notes
    assert [row["model"] for row in figures["models"]] == ["gla", "gla+ccq"]
    assert figures["ratios"][0]["backbone_over_package_step"] is None


@pytest.mark.usefixtures("package")
def test_a_model_whose_step_does_not_fit_keeps_its_prefill_and_costs_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = model.Subject.step

    def too_large(subject: Any, tokens: Any) -> Any:
        if subject.config.read is not None:
            raise torch.OutOfMemoryError("as large as a house")
        return step(subject, tokens)

    monkeypatch.setattr(model.Subject, "step", too_large)
    figures = measure([], [], arms=("gla", "gla+ccq"))
    plain, with_read, _ = figures["models"]
    assert any("gla+ccq, gla, training step: left out" in note for note in figures["notes"])
    assert with_read["step"] is None and with_read["peak_bytes"] is None
    assert with_read["prefill"]["median_ms"] > 0 and plain["step"]["median_ms"] > 0
    assert figures["ratios"][0]["ccq_over_backbone_step"] is None
    (tmp_path / "model-card.json").write_text(json.dumps(figures))
    assert f"| gla+ccq | {with_read['parameters']:,} | - | - | - | - |" in speed_page(tmp_path)


def test_the_fresh_process_prints_what_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    model.print_first_step("gla+ccq", "tiny", 1, 8, device="cpu")
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"first_step_seconds", "second_step_seconds"}
    assert all(0 < seconds < 60 for seconds in found.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model"]) == 2
    assert "measures on a GPU, and torch finds none" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=r"(?i)cuda|nvidia"):
        time_first_step("gla+ccq", "tiny", 1, 8, limit=120.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "glass"], "unknown preset 'glass-1.3b'"),
        (["--sweep", "32768"], "--sweep wants tokens=N, N tokens a training step; got '32768'"),
        (["--sweep", "tokens=0"], "got 'tokens=0'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", *arguments]) == 2
    assert message in capsys.readouterr().err
