"""The layer benchmark with a CPU in the place of the card: what is computed, not how fast."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.card import Cpu
from tests.helpers import assert_close
from torch import Tensor, nn

from ccq.bench import layer
from ccq.bench.layer import Sizes, bench_layer, projection_flops, ratios
from ccq.bench.tables import speed_page
from ccq.cli import main
from ccq.nn.mixers import GatedDeltaNet, GatedLinearAttention

SIZES = Sizes(hidden=12, heads=2, size=4, value_size=6)


class Replayed(Cpu):
    """A card on which replays of the n-th captured step take n ms."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = 0
        self.replaying = 0

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        step()
        self.captured += 1
        mine = self.captured

        def replay() -> None:
            self.replaying = mine

        return replay

    def elapsed_ms(self, work: Callable[[], Any]) -> float:
        self.replaying = 0
        work()
        return float(self.replaying)

    def release(self) -> None:
        self.captured = 0


class OfThePackage(nn.Module):
    """Another implementation of the same layer, as far as the benchmark can tell."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.load_state_dict = inner.load_state_dict  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        return self.inner(x).output, None, None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Layers in the place of flash-linear-attention's; what they were asked for."""
    asked: dict[str, dict[str, Any]] = {}

    def gla(mode: str, hidden_size: int, num_heads: int, expand_k: float, expand_v: float) -> nn.Module:
        asked["gla"] = {"expand_k": expand_k, "expand_v": expand_v, "mode": mode}
        size, value_size = (round(hidden_size * expand) // num_heads for expand in (expand_k, expand_v))
        return OfThePackage(GatedLinearAttention(hidden_size, num_heads, size, value_size))

    def gated_deltanet(mode: str, hidden_size: int, num_heads: int, head_dim: int, expand_v: float) -> nn.Module:
        asked["gated-deltanet"] = {"head_dim": head_dim, "expand_v": expand_v, "mode": mode}
        return OfThePackage(GatedDeltaNet(hidden_size, num_heads, head_dim, round(head_dim * expand_v)))

    module = types.SimpleNamespace(GatedLinearAttention=gla, GatedDeltaNet=gated_deltanet)
    monkeypatch.setitem(sys.modules, "fla.layers", module)
    monkeypatch.setattr(layer.flash_linear_attention, "reason_against", lambda *_: "it is not needed here")
    return asked


def measure(said: list[str], saved: list[Any], **changed: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "backbones": ("gla", "gated-deltanet"), "rows": (1, 2), "tokens": 6, "sizes": SIZES, "dtype": "float32",
        "repeats": 4, "limit": 60, "compiled": False, "with_profile": False, "card": Replayed(),
    }  # fmt: skip
    return bench_layer(
        **{**settings, **changed}, say=said.append, save=lambda figures: saved.append(json.loads(json.dumps(figures)))
    )


def test_figures_follow_from_what_the_card_says(package: dict[str, dict[str, Any]]) -> None:
    said: list[str] = []
    saved: list[Any] = []
    figures = measure(said, saved)
    # The paper's layer: 1536 of 2048 for keys, 3072 for values; here 8 and 12 of 12.
    assert package == {
        "gla": {"expand_k": 8 / 12, "expand_v": 1.0, "mode": "chunk"},
        "gated-deltanet": {"head_dim": 4, "expand_v": 1.5, "mode": "chunk"},
    }
    names = {one: (one, f"{one}+ccq", "flash-linear-attention") for one in ("gla", "gated-deltanet")}
    assert [(row["rows"], row["tokens"], row["pass"], row["layer"]) for row in figures["layers"]] == [
        (rows, tokens, one, name)
        for backbone in ("gla", "gated-deltanet")
        for rows in (1, 2)
        for tokens, one in ((6, "forward"), (6, "forward_backward"), (12, "forward"))
        for name in names[backbone]
    ]
    for i, row in enumerate(figures["layers"]):
        # The layers of a part are captured in turn, and the n-th takes n ms: 4 ms of replays are 4, 2 or 1 of them.
        assert row["device"]["median_ms"] == (i % 3 + 1) / {0: 4, 1: 2, 2: 1}[i % 3]
        assert row["peak_bytes"] == 1500
        flops = projection_flops(row["backbone"], SIZES, row["rows"], row["tokens"])
        assert row["projection_flops"] == flops * (3 if row["pass"] == "forward_backward" else 1)
        assert 0 < row["wall"]["lower_quartile_ms"] <= row["wall"]["median_ms"] <= row["wall"]["upper_quartile_ms"]
    # 0.25, 1 and 3 ms of the layer, of that with the read step, and of the package's.
    for line in figures["ratios"]:
        assert line["ccq_over_backbone_device"] == 4.0
        assert line["backbone_over_package_device"] == pytest.approx(0.25 / 3)
        assert line["ccq_over_backbone_compiled_device"] is None
    notes = ["gla: the write rule runs in PyTorch (it is not needed here)"]
    assert figures["notes"] == [*notes, "gated-deltanet: the write rule runs in PyTorch (it is not needed here)"]
    assert len(figures["ratios"]) == 12
    # Saved after each part, so that a run that is cut short leaves what it had, with its ratios.
    assert [len(state["layers"]) for state in saved] == list(range(0, 37, 3))
    assert [len(state["ratios"]) for state in saved] == list(range(13))
    assert saved[-1] == json.loads(json.dumps(figures))
    assert "+ccq over backbone 4.000 device" in said[-1]


@pytest.mark.usefixtures("package")
def test_every_state_of_an_unfinished_file_makes_a_page(tmp_path: Path) -> None:
    saved: list[Any] = []
    figures = measure([], saved)
    pages = []
    for state in saved:
        (tmp_path / "layer-card.json").write_text(json.dumps(state))
        pages.append(speed_page(tmp_path))
    assert [len(page) for page in pages] == sorted(len(page) for page in pages)
    page = pages[-1]
    assert "Hidden 12, 2 heads of 4/6, float32, up to 4 rounds;" in page
    wall = figures["layers"][1]["wall"]
    spread = f"{wall['median_ms']:.3f} ({wall['lower_quartile_ms']:.3f} to {wall['upper_quartile_ms']:.3f})"
    assert f"| 1 | 6 | forward | gla+ccq | 1.000 (1.000 to 1.000) | {spread} | 0.0 |" in page
    assert "| 1 | 6 | forward | flash-linear-attention (gla) | 3.000 (3.000 to 3.000) |" in page
    ratio = wall["median_ms"] / figures["layers"][0]["wall"]["median_ms"]
    assert f"| gla | 1 | 6 | forward | 4.000 | {ratio:.3f} | 0.083 |" in page
    assert "compiled" not in page
    assert "- gla: the write rule runs in PyTorch (it is not needed here)" in page


def test_ratios_by_hand() -> None:
    def row(name: str, one: str, device: float | None, wall: float) -> dict[str, Any]:
        found = {"backbone": "gla", "layer": name, "rows": 8, "tokens": 4096, "pass": one, "wall": {"median_ms": wall}}
        return {**found, "device": None if device is None else {"median_ms": device}}

    rows = [
        row("gla", "forward", 2.0, 4.0),
        row("gla+ccq", "forward", 2.5, 5.0),
        row("flash-linear-attention", "forward", None, 8.0),
        row("gla+ccq, compiled", "forward", 1.1, 1.5),
        row("gla, compiled", "forward", 1.0, 1.0),
        row("gla", "forward_backward", 6.0, 9.0),
    ]
    first, second = ratios(rows)
    assert first == {
        "backbone": "gla", "rows": 8, "tokens": 4096, "pass": "forward",
        "ccq_over_backbone_device": 1.25, "ccq_over_backbone_wall": 1.25,
        "ccq_over_backbone_compiled_device": 1.1, "ccq_over_backbone_compiled_wall": 1.5,
        "backbone_over_package_device": None, "backbone_over_package_wall": 0.5,
    }  # fmt: skip
    assert second["pass"] == "forward_backward" and second["ccq_over_backbone_device"] is None


def test_arithmetic_by_hand() -> None:
    """Every weight of a matrix is used once for every token, by a multiplication and an addition."""
    for backbone, made in (("gla", GatedLinearAttention), ("gated-deltanet", GatedDeltaNet)):
        module = made(SIZES.hidden, SIZES.heads, SIZES.size, SIZES.value_size)
        weights = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
        assert projection_flops(backbone, SIZES, 3, 7) == 2 * 3 * 7 * weights
    # The paper's: 2048 x (2 x 1536 + 3 x 3072) weights, and those of the gates.
    assert projection_flops("gla", Sizes(2048, 6, 256, 512), 1, 1) == 2 * (2048 * 12_288 + 16 * (2048 + 1536))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet"])
def test_all_layers_of_a_backbone_compute_the_same(backbone: str) -> None:
    made = layer.subjects(backbone, SIZES, torch.float64, torch.device("cpu"), compiled=False, notes=[])
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    expected = made[backbone].call(x)
    assert_close("package", made["flash-linear-attention"].call(x), expected, 1e-12)
    # With the correction off and the queries' length kept, the read step leaves everything as it was.
    with_read = made[f"{backbone}+ccq"]
    assert relative(with_read.call(x), expected) > 1e-6
    with_read.module.read.enabled, with_read.module.read.keep_length = False, True
    assert_close("off", with_read.call(x), expected, 1e-12)


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.usefixtures("package")
def test_what_cannot_be_measured_is_said_and_costs_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.layers", None)  # as if it were not installed

    class NoCapture(Cpu):
        def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
            raise RuntimeError("operation not permitted when stream is capturing")

    figures = measure([], [], backbones=("gla",), rows=(1,), card=NoCapture())
    notes = "\n".join(figures["notes"])
    assert "flash-linear-attention, gla: left out (ModuleNotFoundError" in notes
    assert "gla+ccq, gla, forward, B 1, T 12: no device time (RuntimeError: operation not permitted" in notes
    assert [row["layer"] for row in figures["layers"]] == ["gla", "gla+ccq"] * 3
    assert all(row["device"] is None and row["wall"]["rounds"] == 4 for row in figures["layers"])
    assert all(
        line["ccq_over_backbone_device"] is None and line["ccq_over_backbone_wall"] for line in figures["ratios"]
    )


@pytest.mark.usefixtures("package")
def test_a_profile_lists_the_kernels(tmp_path: Path) -> None:
    said: list[str] = []
    figures = measure(said, [], backbones=("gla",), rows=(1,), with_profile=True)
    assert [row["layer"] for row in figures["profiles"]] == ["gla", "gla+ccq", "flash-linear-attention"]
    plain, with_read, _ = ({row["kernel"]: row["count"] for row in found["kernels"]} for found in figures["profiles"])
    # Seven matrices of weights (q, k, v, output gate, output, two of the decay): one product forward, two backward.
    products = sum(plain.get(name, 0) for name in ("aten::mm", "aten::addmm"))
    assert products == 3 * 7
    assert sum(with_read.get(name, 0) for name in ("aten::mm", "aten::addmm")) == products + 3
    times = [row["microseconds"] for row in figures["profiles"][0]["kernels"]]
    assert times == sorted(times, reverse=True) and min(times) > 0
    assert any(text.lstrip().endswith("x aten::mm") for text in said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backbones", "glass"], "unknown backbone 'glass'; accepted: gla, gated-deltanet"),
        (["--dtype", "int8"], "unknown dtype 'int8'; accepted: bfloat16, float16, float32"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer"]) == 2
    assert "measures on a GPU, and torch finds none" in capsys.readouterr().err
