"""The model benchmark with a CPU in the place of the card: what is computed, not how fast."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.card import Cpu
from torch import Tensor, nn

from ccq.bench import model
from ccq.bench.model import ReadCost, bench_model, ratios, read_costs, sweep_shapes, time_first_step
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


class Replayed(Cpu):
    """A card on which a replay of the n-th recorded step takes n ms."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = 0
        self.clock = 0.0

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded += 1
        mine = float(self.recorded)

        def replay() -> None:
            self.clock += mine

        return replay

    def elapsed_ms(self, work: Callable[[], Any]) -> float:
        before = self.clock
        work()
        return self.clock - before


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
        "limit": 60, "sweep": None, "first_step": False, "card": Replayed(), **SMALL,
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
    # One model after the other is recorded.
    assert [row["step_device"]["median_ms"] for row in figures["models"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
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
    assert (first["ccq_over_backbone_step_device"], first["backbone_over_package_step_device"]) == (2.0, 1 / 3)
    assert figures["read_costs"] == [{"arm": "gla+ccq", "device": 2.0, "eager": first["ccq_over_backbone_step"]}]
    assert first["backbone_over_package_prefill"] == plain["prefill"]["median_ms"] / package_row["prefill"]["median_ms"]
    assert first["ccq_over_backbone_peak_bytes"] == with_read["peak_bytes"] - plain["peak_bytes"] > 0
    assert figures["ratios"][1]["ccq_over_backbone_step"] is None
    assert saved[-1] == json.loads(json.dumps(figures))
    # After every model, and after the prefill of every backbone.
    assert [len(state["models"]) for state in saved] == [0, 1, 2, 3, 3, 4, 5, 5]


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
    device = "2.000 (2.000 to 2.000)"
    cells = f"{row['parameters']:,} | {spread} | {device} | {row['tokens_per_second']:,.0f}"
    assert f"| gla+ccq | {cells} | - | 0.00 |" in page
    line = figures["ratios"][0]
    ratios = f"{line['ccq_over_backbone_step']:.3f} | 2.000 | {line['ccq_over_backbone_prefill']:.3f} | +0.00"
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


def row_of(name: str, step: float, device: float | None, prefill: float | None, peak: int) -> dict[str, Any]:
    times = {"step": step, "step_device": device, "prefill": prefill}
    found = {part: None if time is None else {"median_ms": time} for part, time in times.items()}
    return {"backbone": "gla", "model": name, "peak_bytes": peak, **found}


def test_ratios_by_hand() -> None:
    rows = [
        row_of("gla", 500.0, 400.0, 150.0, 1000),
        row_of("gla+ccq", 525.0, 410.0, 156.0, 3400),
        row_of("flash-linear-attention", 1000.0, None, None, 900),
    ]
    assert ratios(rows) == [
        {
            "backbone": "gla", "ccq_over_backbone_step": 1.05, "ccq_over_backbone_step_device": 1.025,
            "ccq_over_backbone_prefill": 1.04, "ccq_over_backbone_peak_bytes": 2400,
            "backbone_over_package_step": 0.5, "backbone_over_package_step_device": None,
            "backbone_over_package_prefill": None, "backbone_over_package_peak_bytes": 100,
        }
    ]  # fmt: skip


def test_read_steps_that_cost_much_are_named() -> None:
    rows = [
        row_of("gla", 100.0, 40.0, None, 0),
        row_of("gla+ccq", 180.0, 42.0, None, 0),
        row_of("gla+mesa", 150.0, 60.0, None, 0),
        row_of("gla+exact", 200.0, None, None, 0),
        row_of("flash-linear-attention", 90.0, 38.0, None, 0),
    ]
    costs = read_costs(rows)
    expected = [ReadCost("gla+ccq", 1.05, 1.8), ReadCost("gla+mesa", 1.5, 1.5), ReadCost("gla+exact", None, 2.0)]
    assert costs == expected
    lines = [line.split() for line in model._cost_lines(costs[::-1])]
    assert lines[2:5] == [["gla+ccq", "1.050", "1.800"], ["gla+mesa", "1.500", "1.500"], ["gla+exact", "-", "2.000"]]
    assert lines[5] == "more than +10% on the device: gla+mesa".split()
    assert read_costs(rows[1:]) == []


def test_a_read_step_beside_others_is_summed_up(package: list[dict[str, Any]], tmp_path: Path) -> None:
    said: list[str] = []
    figures = measure(said, [], arms=("gla", "gla+ccq", "gla+normalize"))
    assert [(cost["arm"], cost["device"]) for cost in figures["read_costs"]] == [
        ("gla+ccq", 2.0),
        ("gla+normalize", 3.0),
    ]
    assert said[-1] == "more than +10% on the device: gla+ccq, gla+normalize"
    (tmp_path / "model-card.json").write_text(json.dumps(figures))
    eager = figures["read_costs"][1]["eager"]
    assert f"| gla+normalize | 3.000 | {eager:.3f} |" in speed_page(tmp_path)


def test_files_without_a_device_time_make_the_page_they_made(package: list[dict[str, Any]], tmp_path: Path) -> None:
    figures = measure([], [], arms=("gla", "gla+ccq"))
    del figures["read_costs"]
    for row in figures["models"]:
        del row["step_device"]
    for line in figures["ratios"]:
        del line["ccq_over_backbone_step_device"], line["backbone_over_package_step_device"]
    (tmp_path / "model-card.json").write_text(json.dumps(figures))
    page = speed_page(tmp_path)
    assert "| model | parameters | training step ms | tokens/s | share | peak GiB | prefill ms |" in page
    assert "| backbone | of | training step | prefill | peak GiB more |" in page and "device" not in page


def test_a_step_may_be_recorded_only_where_that_is_said() -> None:
    """Outside, an optimizer with this flag warns, and on a CPU it refuses."""
    config = preset("gla-tiny", **SMALL)
    subject = model._subject(CCQForCausalLM(config), config, torch.device("cpu"))

    def flags() -> list[bool]:
        return [group["capturable"] for group in subject.optimizer.param_groups]

    def fail() -> None:
        with subject.recordable():
            assert flags() == [True]
            raise RuntimeError("no card")

    with pytest.raises(RuntimeError, match="no card"):
        fail()
    assert flags() == [False]
    subject.step(torch.randint(11, (1, 6)))


def test_a_step_that_cannot_be_recorded_is_said(package: list[dict[str, Any]]) -> None:
    class NoCapture(Replayed):
        def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
            raise torch.OutOfMemoryError("as large as a house")

    figures = measure([], [], arms=("gla", "gla+ccq"), card=NoCapture())
    assert "gla+ccq, gla: no device time of a training step (OutOfMemoryError: as large as a house)" in figures["notes"]
    assert all(row["step_device"] is None and row["step"]["rounds"] == 3 for row in figures["models"])
    assert (
        figures["ratios"][0]["ccq_over_backbone_step_device"] is None and figures["ratios"][0]["ccq_over_backbone_step"]
    )


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


@pytest.mark.usefixtures("package")
def test_prefill_is_measured_in_turns_and_a_model_that_fails_costs_no_other_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, called = model.Subject.prefill, list[str]()

    def counted(subject: Any, tokens: Any) -> Any:
        called.append(getattr(subject.config, "read", None) or type(subject.module).__name__)
        assert next(subject.module.parameters()).dtype == torch.bfloat16 and not subject.module.training
        assert tokens.shape == (2, 6) and not subject.optimizer.state
        if subject.config.read is not None and failing:
            raise torch.OutOfMemoryError("as large as a house")
        return prefill(subject, tokens)

    monkeypatch.setattr(model.Subject, "prefill", counted)
    monkeypatch.setattr("ccq.bench.measure.WARMUP", 2)
    failing = False
    turn = ["CCQForCausalLM", "ccq", "Plain"]
    figures = measure([], [], arms=("gla", "gla+ccq"))
    # Each once, then each warms up, then the rounds.
    assert called == turn + [name for name in turn for _ in range(2)] + 3 * turn
    assert all(row["prefill"]["rounds"] == 3 for row in figures["models"])
    failing = True
    called.clear()
    figures = measure([], [], arms=("gla", "gla+ccq"))
    assert called == [*turn, turn[0], turn[0], turn[2], turn[2], *(3 * [turn[0], turn[2]])]
    plain, with_read, package_row = figures["models"]
    assert with_read["prefill"] is None and with_read["step"] is not None
    assert plain["prefill"]["rounds"] == package_row["prefill"]["rounds"] == 3
    assert figures["notes"] == ["gla+ccq, gla, prefill: left out (OutOfMemoryError: as large as a house)"]
    assert figures["ratios"][0]["ccq_over_backbone_prefill"] is None


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
