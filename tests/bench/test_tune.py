"""What `ccq bench tune` decides, with kernels and a card that say what they are told to."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ccq.bench import tune
from ccq.bench.measure import Card
from ccq.cli import main
from ccq.ops import flash_linear_attention, rms_norm_gated

PRESENT = {"BK": 32, "num_warps": 4, "num_stages": 2}
VERSIONS = {"torch": "2.11", "triton": "3.7.1", "fla": "0.6.0"}


def configuration(block: int, warps: int, stages: int) -> dict[str, int]:
    return {"BK": block, "num_warps": warps, "num_stages": stages}


OFFERED = [configuration(block, warps, stages) for block in (32, 64) for warps in (2, 4) for stages in (2, 3, 4)]


class Config:
    def __init__(self, found: dict[str, int]) -> None:
        self.kwargs = {"BK": found["BK"]}
        self.num_warps, self.num_stages = found["num_warps"], found["num_stages"]


class Kernel:
    """Writes twice x into out, unless its configuration is `broken` (wrong numbers) or `failing`."""

    def __init__(self, name: str, broken: dict[str, int] | None = None, failing: dict[str, int] | None = None) -> None:
        self.base_fn = type(name, (), {})
        self.fn = self
        self.arg_names = ["x", "out"]
        self.configs = [Config(found) for found in OFFERED]
        self.early_config_prune = None
        self.broken, self.failing = broken, failing
        self.now: dict[str, int] = {}

    def run(self, x: Tensor, out: Tensor, grid: Any = None, warmup: bool = False, **found: int) -> None:
        if found == self.failing:
            raise RuntimeError("out of resource: shared memory")
        self.now = found
        out.copy_(2 * x + (0.5 if found == self.broken else 0.0))


class Clock(Card):
    """A replay of a kernel takes what `milliseconds` says of the configuration it was captured in."""

    device = torch.device("cpu")

    def __init__(self, kernels: list[Kernel], milliseconds: Callable[[str, dict[str, int]], float]) -> None:
        self.kernels = kernels
        self.say = milliseconds
        self.passed = 0.0

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        for kernel in self.kernels:
            kernel.now = {}
        step()
        (kernel,) = (kernel for kernel in self.kernels if kernel.now)
        takes = self.say(kernel.base_fn.__name__, kernel.now)

        def replay() -> None:
            self.passed += takes

        return replay

    def elapsed_ms(self, work: Callable[[], Any]) -> float:
        self.passed = 0.0
        work()
        return self.passed


def launch(kernel: Kernel, rows: int = 1) -> tune.Launch:
    arguments = {"grid": (1,), "warmup": False, "x": torch.ones(3), "out": torch.empty(3)}
    return tune.Launch(kernel, (), arguments, {"out": math.nan}, rows)


def test_first_one_stage_count_for_every_tile_then_the_others_of_the_best() -> None:
    first = tune.first_round(OFFERED)
    assert first == [configuration(block, warps, 3) for block in (32, 64) for warps in (2, 4)]
    ranked = [configuration(64, 2, 3), configuration(32, 4, 3), configuration(32, 2, 3), configuration(64, 4, 3)]
    assert tune.second_round(OFFERED, first, ranked) == [
        configuration(32, 4, 2), configuration(32, 4, 4), configuration(64, 2, 2), configuration(64, 2, 4),
    ]  # fmt: skip
    # What did not run, for want of shared memory as a rule, gets its other stage counts too.
    assert tune.second_round(OFFERED, first, [*ranked[:2], ranked[2]]) == [
        configuration(32, 4, 2), configuration(32, 4, 4), configuration(64, 2, 2), configuration(64, 2, 4),
        configuration(64, 4, 2), configuration(64, 4, 4),
    ]  # fmt: skip
    # Where three stages are not offered, the nearest count stands for the tile.
    assert tune.first_round([configuration(32, 2, 1), configuration(32, 2, 2)]) == [configuration(32, 2, 2)]


def test_hopeless_and_known_wrong_candidates_are_left_out() -> None:
    wide = [{"BK": 64, "BV": 128, "num_warps": warps, "num_stages": 2} for warps in (1, 2, 4, 8)]
    assert [found["num_warps"] for found in tune.usable("any", wide, "9.0")] == [4, 8]
    two = [{"num_warps": warps, "num_stages": 2} for warps in (2, 4)]
    assert tune.usable("prepare_wy_repr_bwd_kernel", two, "9.0") == two[:1]
    assert tune.usable("prepare_wy_repr_bwd_kernel", two, "8.0") == two
    # Something is always left.
    assert tune.usable("prepare_wy_repr_bwd_kernel", two[1:], "9.0") == two[1:]


def test_agreement_is_about_numbers_and_about_what_was_written() -> None:
    expected = {"out": torch.tensor([1.0, 2.0, math.nan])}
    assert tune.agrees({"out": torch.tensor([1.0, 2.001, math.nan])}, expected)
    assert not tune.agrees({"out": torch.tensor([1.0, 2.1, math.nan])}, expected)
    assert not tune.agrees({"out": torch.tensor([1.0, 2.0, 0.0])}, expected)
    assert not tune.agrees({"out": torch.tensor([1.0, math.nan, math.nan])}, expected)


def test_what_a_kernel_writes_is_found_out() -> None:
    kernel = Kernel("double")
    recorder = tune.Recorder({"double": PRESENT}, rows=8)
    x, out = torch.ones(3), torch.full((3,), math.nan)
    untouched, given = torch.zeros(3), torch.full((3,), math.nan)

    def run(*args: Any, x: Tensor, out: Tensor, **_: Any) -> None:
        out.copy_(x)

    kernel.run = run  # type: ignore[method-assign]
    recorder.launch(kernel, (), {"grid": (1,), "x": x, "out": out, "zeros": untouched, "unused": given, "H": 6})
    (found,) = recorder.launches
    assert list(found.blank) == ["out"] and math.isnan(found.blank["out"])
    assert (found.kernel, found.rows) == ("double", 8)
    assert found.signature == (
        "double", ("x", "torch.float32"), ("out", "torch.float32"), ("zeros", "torch.float32"),
        ("unused", "torch.float32"), ("H", 6),
    )  # fmt: skip


@pytest.mark.parametrize("rule", flash_linear_attention.RULES)
def test_arguments_are_those_of_the_operators(rule: str) -> None:
    names = [argument.name for argument in tune.OPERATORS[rule].forward.overload._schema.arguments][:-2]
    drawn = dict(zip(names, tune.draw(rule, 2, 5, 32, 48, torch.device("cpu")), strict=True))
    assert list(drawn) == ["q", "k", "v", "log_decay", *(["beta"] if rule == "gated_delta_rule" else []), "state"]
    assert drawn["q"].dtype == drawn["v"].dtype == torch.bfloat16 and drawn["log_decay"].dtype == torch.float32
    heads = {"gla": 6, "gated_delta_rule": 6, "ssd": 32}[rule]
    assert drawn["q"].shape == drawn["k"].shape == (2, 5, 1 if rule == "ssd" else heads, 32)
    assert drawn["v"].shape == (2, 5, heads, 48) and drawn["state"].shape == (2, heads, 32, 48)
    assert drawn["log_decay"].max() <= 0
    assert drawn["log_decay"].shape == ((2, 5, heads, 32) if rule == "gla" else (2, 5, heads))


def test_arguments_of_the_norm() -> None:
    x, gate, weight = tune.draw(rms_norm_gated.OPERATION, 2, 5, 48, 48, torch.device("cpu"))
    assert x.shape == gate.shape == (2 * 5 * 6, 48) and weight.shape == (48,)
    assert x.dtype == gate.dtype == weight.dtype == torch.bfloat16


def make_tuner(
    kernels: list[Kernel],
    milliseconds: Callable[[str, dict[str, int]], float],
    monkeypatch: pytest.MonkeyPatch,
    figures: dict[str, Any] | None = None,
    ends: float = math.inf,
) -> tuple[tune.Tuner, list[dict[str, Any]], list[str]]:
    table = flash_linear_attention.tables()["any.json"]
    present = {kernel.base_fn.__name__: PRESENT for kernel in kernels}
    table = table._replace(operations={name: {"any": present} for name in flash_linear_attention.OPERATIONS})
    monkeypatch.setattr(tune, "record", lambda *args: [launch(kernel, args[1]) for kernel in kernels])
    monkeypatch.setattr(tune, "compile_in_parallel", lambda *_, **__: None)
    saved: list[dict[str, Any]] = []
    said: list[str] = []
    figures = figures or {"capability": "9.0", "operations": {"gla": {}}, "milliseconds": {}, "trying": None}
    tuner = tune.Tuner(
        table,
        figures,
        card=Clock(kernels, milliseconds),
        rows=(1, 8),
        jobs=1,
        ends=ends,
        say=said.append,
        save=lambda value: saved.append(json.loads(json.dumps(value))),
    )
    return tuner, saved, said


def best_is(block: int, warps: int, stages: int) -> Callable[[str, dict[str, int]], float]:
    """Milliseconds that grow with the distance from one configuration."""
    return lambda _, found: (
        1.0
        + 0.5 * (found["BK"] != block)
        + 0.25 * (found["num_warps"] != warps)
        + 0.1 * abs(found["num_stages"] - stages)
    )


def test_the_fastest_that_computes_the_same_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fastest of all is wrong, and one does not run.
    kernel = Kernel("k", broken=configuration(64, 2, 4), failing=configuration(64, 2, 3))
    tuner, saved, said = make_tuner([kernel], best_is(64, 2, 4), monkeypatch)
    tuner.sizes("gla", "64/64")
    assert tuner.figures["operations"]["gla"]["64/64"]["k"] == configuration(64, 2, 2)
    assert tuner.figures["milliseconds"]["gla"]["64/64"]["k"] == pytest.approx(1.2, abs=1e-4)
    assert any("BK=64 warps=2 stages=3: RuntimeError" in line for line in said)
    assert "    k BK=64 warps=2 stages=4: left out" in said
    assert saved[-1]["trying"] is None and ["gla", "64/64", "k"] in [state["trying"] for state in saved]


def test_a_tile_that_fits_with_fewer_stages_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory for two stages: with the stage count of the first round the best tile does not run."""

    class Large(Kernel):
        def run(self, *args: Any, **found: Any) -> None:
            if found["BK"] == 64 and found["num_stages"] > 2:
                raise RuntimeError("out of resource: shared memory")
            super().run(*args, **found)

    tuner, _, _ = make_tuner([Large("k")], best_is(64, 4, 3), monkeypatch)
    tuner.sizes("gla", "64/64")
    assert tuner.figures["operations"]["gla"]["64/64"]["k"] == configuration(64, 4, 2)


def test_what_there_was_is_kept_if_it_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    # The present configuration is not among the first of its tile, nor is its tile among the two best.
    favourite: Callable[[str, dict[str, int]], float] = lambda _, found: 0.5 if found == PRESENT else found["num_warps"]  # noqa: E731
    tuner, _, _ = make_tuner([Kernel("k")], favourite, monkeypatch)
    tuner.sizes("gla", "64/64")
    assert tuner.figures["operations"]["gla"]["64/64"]["k"] == PRESENT


def test_a_kernel_that_is_done_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [Kernel("done"), Kernel("died"), Kernel("new")]
    figures = {
        "capability": "9.0",
        "operations": {"gla": {"64/64": {"done": configuration(64, 4, 2)}}},
        "milliseconds": {"gla": {"64/64": {"done": 0.5, "died": None}}},
        "trying": None,
    }
    tuner, _, _ = make_tuner(kernels, best_is(32, 2, 2), monkeypatch, figures)
    tuner.sizes("gla", "64/64")
    assert tuner.figures["operations"]["gla"]["64/64"] == {
        "done": configuration(64, 4, 2), "died": PRESENT, "new": configuration(32, 2, 2),
    }  # fmt: skip
    assert tuner.figures["milliseconds"]["gla"]["64/64"] == {"done": 0.5, "died": None, "new": pytest.approx(1.0)}


def test_when_time_is_up_what_there_was_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, _, _ = make_tuner([Kernel("k")], best_is(64, 2, 4), monkeypatch, ends=time.monotonic() - 1)
    tuner.sizes("gla", "64/64")
    assert tuner.figures["operations"]["gla"]["64/64"] == {"k": PRESENT}
    assert tuner.figures["milliseconds"]["gla"]["64/64"] == {}


def test_a_run_goes_on_with_its_file_and_passes_over_the_kernel_it_died_of(tmp_path: Path) -> None:
    path = tmp_path / "a_card.json"
    _, figures = tune._start(path, "A card", "7.5", VERSIONS)
    assert figures["operations"] == json.loads(json.dumps(flash_linear_attention.tables()["any.json"].operations))
    assert figures["card"] == "A card" and figures["milliseconds"] == {}
    figures["milliseconds"] = {"gla": {"64/64": {"done": 0.5}}}
    figures["trying"] = ["gla", "64/64", "deadly"]
    path.write_text(json.dumps(figures))
    table, again = tune._start(path, "A card", "7.5", VERSIONS)
    assert table.card == "A card"
    assert again["milliseconds"] == {"gla": {"64/64": {"done": 0.5, "deadly": None}}}
    # Other versions are other kernels: start anew, from what the file says.
    _, anew = tune._start(path, "A card", "7.5", {**VERSIONS, "triton": "3.8.0"})
    assert anew["milliseconds"] == {} and anew["measured"]["triton"] == "3.8.0"


def test_the_default_folder_is_where_tables_are_read() -> None:
    assert {path.name for path in tune.default_folder().glob("*.json")} == set(flash_linear_attention.tables())


def test_sizes_of_the_shipped_table_are_those_that_are_tuned() -> None:
    table = flash_linear_attention.tables()["nvidia_h200.json"]
    for operation in flash_linear_attention.OPERATIONS:
        planned = {sizes for planned, sizes in tune.plan(None) if planned == operation}
        assert set(table.operations[operation]) - {"any"} == planned


def test_sizes_that_were_asked_for_are_tuned_for_every_operation() -> None:
    assert tune.plan(["64/128", "128/64"]) == [
        ("gla", "64/128"), ("gated_delta_rule", "64/128"), ("ssd", "64/128"), ("rms_norm_gated", "128/128"),
        ("gla", "128/64"), ("gated_delta_rule", "128/64"), ("ssd", "128/64"), ("rms_norm_gated", "64/64"),
    ]  # fmt: skip
    assert tune.plan(None)[:3] == [
        ("gla", "256/512"), ("gated_delta_rule", "256/512"), ("rms_norm_gated", "512/512"),
    ]  # fmt: skip
    assert tune.plan(None)[-1] == ("ssd", "128/64")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tune"]) == 2
    assert "measured on a GPU, and torch finds none" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["256", "256/500", "a/b", "16/16/16"])
def test_sizes_that_are_none_are_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(flash_linear_attention, "reason_against", lambda *_: "")
    with pytest.raises(ValueError, match=r"sizes are D/V, both multiples of 16, got '" + text):
        tune.tune(None, sizes=(text,), rows=(1,), limit=1, jobs=1, say=print)
