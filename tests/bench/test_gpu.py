"""The GPU benchmark, with a CPU in the place of the card: what is computed, not how fast."""

from __future__ import annotations

import itertools
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
from tests.helpers import assert_close
from torch import Tensor

from ccq.bench import gpu
from ccq.bench.gpu import bench_operator_on_gpu, composed_read_step, floor_bytes, time_first_call
from ccq.bench.machine import gpu_environment
from ccq.bench.measure import WARMUP, Card, rounds
from ccq.bench.operator import Shape
from ccq.bench.tables import speed_page
from ccq.cli import main
from ccq.ops.query import curvature_conditioned_query, l2_normalize


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, normalize: bool) -> tuple[Tensor, None]:
    """Causal linear attention in float64, with the arguments of flash-linear-attention's `chunk_linear_attn`."""
    assert not normalize
    query, key, value = (x.double().transpose(1, 2) for x in (q, k, v))
    return ((query @ key.mT).tril() @ value * scale).transpose(1, 2).to(v.dtype), None


def test_the_composed_read_step_is_the_read_step() -> None:
    q, k = (torch.randn(2, 19, 2, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    gate = torch.rand(2, 19, 2, dtype=torch.float64).requires_grad_()
    query, correction = composed_read_step(q, k, gate, linear_attention)
    exact = curvature_conditioned_query(q, k, gate, return_correction=True, backend="reference")
    assert exact.correction is not None
    assert_close("correction", correction, exact.correction, 1e-11)
    assert_close("query", query, exact.query, 1e-12)
    for name, ours, theirs in zip(
        "qkg",
        torch.autograd.grad(query.square().sum(), (q, k, gate)),
        torch.autograd.grad(exact.query.square().sum(), (q, k, gate)),
        strict=True,
    ):
        assert_close(name, ours, theirs, 1e-11)


def test_the_composed_read_step_gives_the_library_low_precision() -> None:
    q, k = (torch.randn(1, 9, 1, 4).bfloat16() for _ in range(2))
    given: list[Tensor] = []

    def recorded(*tensors: Tensor, **options: Any) -> tuple[Tensor, None]:
        given.extend(tensors)
        return linear_attention(*tensors, **options)

    query, correction = composed_read_step(q, k, torch.rand(1, 9, 1), recorded)
    assert torch.equal(given[0], l2_normalize(q).bfloat16())
    assert torch.equal(given[1], l2_normalize(k).bfloat16())
    assert given[2] is given[1]
    assert (query.dtype, correction.dtype) == (torch.bfloat16, torch.float32)


def test_floor_by_hand() -> None:
    # 4096 x 6 x 256 numbers of 2 bytes a sequence; 32 chunks x 6 heads of ten 64 x 64 tiles (four rows of a triangle).
    sequence, states = 12_582_912, 32 * 6 * 10 * 4096 * 2
    found = floor_bytes(Shape(1, 4096, 6, 256), 2)
    assert found["forward"] == 3 * sequence + 2 * states == 69_206_016
    assert found["forward_backward"] == 8 * sequence + 6 * states == 195_035_136
    assert floor_bytes(Shape(8, 4096, 6, 256), 2)["forward"] == 8 * found["forward"]
    # At 4.27 TB/s: 0.016 and 0.029 ms with states of 2 bytes.
    assert found["forward"] / 4.27e9 == pytest.approx(0.016, abs=5e-4)
    assert (found["forward_backward"] - found["forward"]) / 4.27e9 == pytest.approx(0.029, abs=7e-4)
    # A ragged end is one chunk more, a size under 64 one tile of its own size.
    assert floor_bytes(Shape(1, 129, 1, 32), 4)["forward"] == 4 * (3 * 129 * 32 + 2 * 2 * 32 * 32)


class Clocked(Cpu):
    """A card whose clock runs 2 ms a look and whose memory is what the script says."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], Any]] = []

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        step()
        return step

    def elapsed_ms(self, work: Callable[[], Any]) -> float:
        work()
        return 2.0

    def copy_bytes_per_second(self) -> float:
        return 1e9


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths for a CPU; a linear attention in the place of flash-linear-attention's; no second process."""
    monkeypatch.setattr(gpu, "LONG_TOKENS", (8, 32))
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", types.SimpleNamespace(chunk_linear_attn=linear_attention))
    monkeypatch.setattr(
        gpu,
        "_of_this_library",
        lambda backend, make=gpu._of_this_library: make("torch" if backend == "triton" else backend),
    )
    first = {"first_call_seconds": 3.0, "second_call_seconds": 0.5, "process_seconds": 7.0}
    monkeypatch.setattr(gpu, "time_first_call", lambda shape, dtype, limit: first)


def measure(said: list[str], saved: list[Any], **changed: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "rows": (1, 2), "tokens": 20, "heads": 2, "size": 8, "dtype": "bfloat16", "repeats": 4, "limit": 60,
        "long": True, "card": Clocked(),
    }  # fmt: skip
    return bench_operator_on_gpu(
        **{**settings, **changed}, say=said.append, save=lambda figures: saved.append(json.loads(json.dumps(figures)))
    )


@pytest.mark.usefixtures("small")
def test_figures_follow_from_what_the_card_says() -> None:
    said: list[str] = []
    saved: list[Any] = []
    figures = measure(said, saved)
    assert figures["notes"] == []
    assert [(row["function"], row["rows"]) for row in figures["functions"]] == [
        (name, rows) for rows in (1, 2) for name in ("triton", "torch", "composed")
    ]
    for row in figures["functions"]:
        floor = floor_bytes(Shape(row["rows"], 20, 2, 8), 2)
        for one in gpu.PASSES:
            part = row[one]
            # Two replays of 2 ms fill 4 ms, and both together take the 2 ms of one look at the clock.
            assert part["device"] == {"median_ms": 1.0, "lower_quartile_ms": 1.0, "upper_quartile_ms": 1.0, "rounds": 4}
            assert part["floor_ms"] == floor[one] / 1e6
            assert part["floor_share"] == part["floor_ms"]
            assert part["wall"]["lower_quartile_ms"] <= part["wall"]["median_ms"] <= part["wall"]["upper_quartile_ms"]
        # Peaks are read one look after the start (forward) and two (both), kept memory one after.
        assert row["forward"]["peak_bytes"] == 1500
        assert row["forward_backward"]["peak_bytes"] == 2500
        assert row["forward_backward"]["kept_bytes"] == 1000
        assert row["forward_backward"]["output_bytes"] == row["rows"] * 20 * 2 * 8 * 2
        # bfloat16 operands in the composed form; the backends of this library compute in float32 here.
        low, high = (1e-4, 0.1) if row["function"] == "composed" else (1e-9, 1e-4)
        assert low < row["correction_error"] < high
    assert [(row["tokens"], row["nanoseconds_per_token"]) for row in figures["long"][:2]] == [(8, 125e3), (32, 31250.0)]
    assert all(len(line) <= 80 for text in said for line in text.splitlines()), max(said, key=len)
    # Saved after each part, so that a run that is cut short leaves what it had.
    assert saved[1]["first_call"]["first_call_seconds"] == 3.0 and saved[1]["copy_bytes_per_second"] is None
    assert saved[-1] == json.loads(json.dumps(figures))
    assert len(saved) == 3 + 2 * 3 + 3


@pytest.mark.usefixtures("small")
def test_every_state_of_an_unfinished_file_makes_a_page(tmp_path: Path) -> None:
    saved: list[Any] = []
    figures = measure([], saved)
    pages = []
    for state in saved:
        (tmp_path / "operator-card.json").write_text(json.dumps(state))
        pages.append(speed_page(tmp_path))
    assert [len(page) for page in pages] == sorted(len(page) for page in pages)
    row = figures["functions"][0]["forward"]
    assert f"| 1 | 20 | triton | forward | 1.000 (1.000 to 1.000) | {row['wall']['median_ms']:.3f} (" in pages[-1]
    assert f"| {row['floor_ms']:.3f} | {row['floor_share']:.0%} |" in pages[-1]
    assert "| triton | forward | 125000.00 | 31250.00 | 0.25 |" in pages[-1]
    assert "empty caches: 3.0 s (the whole process 7.0 s)" in pages[-1]


@pytest.mark.usefixtures("small")
def test_what_cannot_be_measured_is_said_and_costs_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)  # as if it were not installed
    library = gpu._of_this_library

    def broken(backend: str) -> gpu.Candidate:
        def fail(*_: Tensor) -> Tensor:
            raise RuntimeError("out of registers\nand a long trace")

        return gpu.Candidate(fail, fail) if backend == "triton" else library(backend)

    monkeypatch.setattr(gpu, "_of_this_library", broken)

    def hangs(*_: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("python", options["timeout"])

    monkeypatch.setattr(gpu, "time_first_call", time_first_call)
    stand_in = types.SimpleNamespace(run=hangs, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("ccq.bench.measure.subprocess", stand_in)

    class NoCapture(Clocked):
        def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
            if not torch.is_grad_enabled():
                raise AssertionError("the step chooses autograd itself")
            raise RuntimeError("operation not permitted when stream is capturing")

    said: list[str] = []
    figures = measure(said, [], rows=(1,), long=False, card=NoCapture())
    notes = "\n".join(figures["notes"])
    assert "first call: not measured (not finished after 120 s)" in notes
    assert "composed: left out, flash-linear-attention cannot be used here (ModuleNotFoundError" in notes
    assert "triton, B 1: left out (RuntimeError: out of registers)" in notes
    assert "torch, forward, B 1, T 20: no device time (RuntimeError: operation not permitted" in notes
    (row,) = figures["functions"]
    assert row["function"] == "torch" and "device" not in row["forward"] and row["forward"]["wall"]["rounds"] == 4
    told = [" ".join(text.split()) for text in said if text.startswith("note: ")]
    assert told == [f"note: {note}" for note in figures["notes"]]


def test_a_timing_ends_at_its_limit_but_not_before_three_rounds() -> None:
    values = itertools.count(1.0)
    found = rounds({"a": lambda: next(values)}, repeats=1000, limit=0.0)
    # After five rounds of warm-up the values are 6, 7, 8.
    assert found["a"] == {"median_ms": 7.0, "lower_quartile_ms": 6.0, "upper_quartile_ms": 8.0, "rounds": 3}


def test_functions_take_turns() -> None:
    order: list[str] = []

    def timer(name: str) -> Callable[[], float]:
        return lambda: float(order.append(name) or len(order))

    rounds({name: timer(name) for name in "ab"}, repeats=3, limit=60.0)
    assert "".join(order[2 * WARMUP :]) == "ababab"


def test_the_fresh_process_prints_what_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.print_first_call((1, 8, 1, 4), "float32", backend="torch", device="cpu")
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"first_call_seconds", "second_call_seconds"}
    assert all(0 < seconds < 60 for seconds in found.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_card_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)  # what is measured is what a user runs
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)  # it would try configurations for a minute
    monkeypatch.setattr(gpu, "LONG_TOKENS", (128, 512))
    figures = measure([], [], tokens=256, size=64, card=Card())
    assert [note.partition(":")[0] for note in figures["notes"]] == ["composed"]
    assert figures["copy_bytes_per_second"] > 1e11
    assert figures["first_call"]["first_call_seconds"] > figures["first_call"]["second_call_seconds"] > 0
    assert [(row["function"], row["rows"]) for row in figures["functions"]] == [
        (name, rows) for rows in (1, 2) for name in ("triton", "torch")
    ]
    for row in figures["functions"]:
        forward, both = row["forward"], row["forward_backward"]
        assert 0 < row["correction_error"] < 1e-2
        assert 0 < forward["device"]["median_ms"] < both["device"]["median_ms"]
        assert forward["device"]["median_ms"] < forward["wall"]["median_ms"]
        assert both["output_bytes"] <= both["kept_bytes"] <= both["peak_bytes"]
        assert forward["peak_bytes"] >= both["output_bytes"]
    assert len(figures["long"]) == 2 * 2 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "operator", "--device", "cuda"]) == 2
    assert "torch finds no GPU; use --device cpu" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=r"(?i)cuda|nvidia"):
        gpu.time_first_call(Shape(1, 8, 1, 4), "float32", limit=120.0)


def test_versions_are_those_of_the_packages() -> None:
    found = gpu_environment()
    assert found["cuda"] == torch.version.cuda
    assert (found["card"] is None) == (not torch.cuda.is_available())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--rows", "1", "8"], "--rows takes one number"),
        (["--device", "cpu", "--dtype", "bfloat16"], "--dtype is float32"),
        (
            ["--device", "cuda", "--dtype", "int8"],
            "unknown dtype 'int8'; accepted on a GPU: bfloat16, float16",
        ),
        (["--device", "cuda", "--threads", "2"], "--threads is of a CPU's benchmark"),
    ],
)
def test_wrong_combinations_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "operator", *arguments]) == 2
    assert message in capsys.readouterr().err
