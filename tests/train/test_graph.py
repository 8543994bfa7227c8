"""The step as a CUDA graph, without a GPU: a recorder that replays by calling again shows that everything around the
graph is that of a step without. tests/gpu/test_train_graph.py has the real one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import toy
from torch import Tensor

from ccq.models import preset
from ccq.processes import Processes
from ccq.train import graph
from ccq.train.config import OptimizerRecipe, Recipe
from ccq.train.engine import Engine, StepResult, TargetBatch, initial_model
from ccq.train.graph import RecordingError, check_cuda_graph
from ccq.train.metrics import read_metrics
from ccq.train.run import run_recipe

RECIPE = OptimizerRecipe(learning_rate=1e-2, warmup_steps=0)
VOCABULARY = 61
RECIPE_VALUES: dict[str, Any] = {
    "model": {"preset": "gla+ccq-tiny"},
    "data": {"synthetic_tokens": 1000, "length": 64},
    "training": {"steps": 1, "tokens_per_step": 64},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1},
    "system": {"rows": 1, "cuda_graph": True},
}


class CallsAgain:
    """In the place of `GraphRecorder`. As a graph it computes nothing when it records."""

    refuses: str | None = None

    def __init__(self, device: torch.device) -> None:
        self.recorded = 0

    def run(self, work: Callable[[], Any], *, may_wait: bool) -> Any:
        if self.refuses is not None and not may_wait:
            raise RuntimeError(self.refuses)
        return work()

    def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded += 1
        return work


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[CallsAgain]:
    class Own(CallsAgain):
        pass

    monkeypatch.setattr(graph, "GraphRecorder", Own)
    monkeypatch.setattr("ccq.train.engine.check_cuda_graph", lambda processes: None)
    return Own


def pair(arm: str, **options: Any) -> tuple[Engine, Engine]:
    """An engine, and the same one with graphs."""
    sizes = {"hidden_size": 16, "num_layers": 2, "head_dim": 8, "value_head_dim": 8, "vocab_size": VOCABULARY}
    start = initial_model(preset(f"{arm}-tiny", **sizes), 0)
    return Engine(copy.deepcopy(start), RECIPE, **options), Engine(start, RECIPE, cuda_graph=True, **options)


def windows(length: int, rows: int = 2, parts: tuple[str, ...] = ("loss",)) -> TargetBatch:
    tokens = torch.randint(VOCABULARY, (rows, length + 1))
    owner = torch.randint(len(parts), (rows, length))
    return TargetBatch(tokens[:, :-1], tokens[:, 1:], {name: owner == i for i, name in enumerate(parts)})


def assert_same(one: Engine, other: Engine) -> None:
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    for mine, its in zip(one.optimizers, other.optimizers, strict=True):
        first, second = mine.state_dict()["state"], its.state_dict()["state"]
        assert first.keys() == second.keys()
        for key, entries in first.items():
            assert all(torch.equal(value, second[key][name]) for name, value in entries.items())


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_step_is_that_without_a_graph(dtype: str, checkpointing: bool) -> None:
    """Over accumulation, three shapes of which two meet in one step, parts that come and go, measurements between, and
    a step that is not finite.
    """
    engines = pair("gla+ccq", dtype=dtype, activation_checkpointing=checkpointing)
    held_out = [windows(20, rows=3) for _ in range(2)]
    steps = [
        [windows(12), windows(12)],
        [windows(12), windows(17, rows=1)],
        [windows(24, parts=("text", "answer"))],
        [windows(12)],
    ]
    for number, step in enumerate(steps):
        results: list[StepResult] = []
        for engine in engines:
            if number == 2:
                head = engine.model.lm_head.weight.data
                kept = head.clone()
                head[5] = math.nan
                assert not engine.step([windows(12)], 1e-2).is_finite
                head.copy_(kept)
            results.append(engine.step(step, 1e-2))
            engine.look(step[0], 8)
            assert all(parameter.grad is None for parameter in engine.model.parameters())
        assert results[0] == results[1] and results[0].is_finite
        assert_same(*engines)
        assert engines[0].measure(held_out) == engines[1].measure(held_out)
    assert engines[1]._graphs is not None
    shapes = [tuple(shape) for shape in engines[1]._graphs._recorded]
    assert shapes == [(2, 12), (1, 17), (2, 24)]


@pytest.mark.usefixtures("recorder")
def test_a_parameter_that_no_gradient_reaches_stays_as_it_is() -> None:
    """Zeros in the place of its gradient would let weight decay move it."""
    model = initial_model(preset("gla-tiny", num_layers=1, vocab_size=VOCABULARY), 0)
    model.unused = torch.nn.Parameter(torch.ones(3, 3))
    frozen = model.model.layers[0].attn.q_proj.weight.requires_grad_(False)
    before, head = frozen.clone(), model.lm_head.weight.detach().clone()
    Engine(model, RECIPE, cuda_graph=True).step([windows(12)], 1e-2)
    assert torch.equal(model.unused, torch.ones(3, 3)) and torch.equal(frozen, before)
    assert not torch.equal(model.lm_head.weight, head)


@pytest.mark.usefixtures("recorder")
def test_a_run_that_goes_on_is_the_one_that_was_never_interrupted(tmp_path: Path) -> None:
    def lines(folder: Path) -> list[tuple[Any, ...]]:
        names = ("step", "loss", "grad_norm", "gate", "held_out_loss")
        return [tuple(line.get(name) for name in names) for line in read_metrics(folder / "metrics.jsonl")]

    options = {"checkpoint_every": 100, "evaluate_every": 2}
    eager, _ = toy.run(tmp_path / "eager", **options)
    whole, _ = toy.run(tmp_path / "whole", cuda_graph=True, **options)
    toy.run(tmp_path / "stopped", cuda_graph=True, stop_after=3, **options)
    resumed, _ = toy.run(tmp_path / "stopped", cuda_graph=True, **options)
    assert lines(tmp_path / "eager") == lines(tmp_path / "whole") == lines(tmp_path / "stopped")
    assert_same(eager, whole)
    assert_same(eager, resumed)


def test_what_cannot_be_recorded_is_an_error_that_says_why(recorder: type[CallsAgain]) -> None:
    recorder.refuses = "called a synchronizing CUDA operation\nand a long trace"
    _, engine = pair("gla")
    message = r"2 windows of 12 tokens cannot be recorded as a CUDA graph \(called a synchronizing CUDA operation\)"
    with pytest.raises(RecordingError, match=message):
        engine.step([windows(12)], 1e-2)
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_it_may_run_eagerly_instead_and_says_so(recorder: type[CallsAgain]) -> None:
    """Also where the first shape could be recorded and one in the middle of a step cannot."""
    said: list[str] = []
    eager, engine = pair("gla", on_eager=said.append)
    for number, step in enumerate([[windows(12)], [windows(12), windows(16)], [windows(12)]]):
        recorder.refuses = "no" if number else None
        assert engine.step(step, 1e-2) == eager.step(step, 1e-2)
    assert len(said) == 1 and "2 windows of 16 tokens cannot be recorded as a CUDA graph (no)" in said[0]
    assert_same(eager, engine)


def test_what_fails_without_a_graph_too_keeps_its_own_error(recorder: type[CallsAgain]) -> None:
    said: list[str] = []
    _, engine = pair("gla", on_eager=said.append)
    batch = windows(12)
    batch.inputs[0, 0] = VOCABULARY
    with pytest.raises(ValueError, match=r"input_ids must be in 0 \.\.\. 60"):
        engine.step([batch], 1e-2)

    def out_of_memory(self: CallsAgain, work: Callable[[], Tensor]) -> None:
        raise torch.OutOfMemoryError("as large as a house")

    recorder.record = out_of_memory  # type: ignore[method-assign, assignment]
    with pytest.raises(torch.OutOfMemoryError):
        engine.step([windows(12)], 1e-2)
    assert said == []


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (Processes(), "cuda_graph needs a GPU, got the device cpu; leave cuda_graph out"),
        (Processes(count=2, device=torch.device("cuda")), "cuda_graph takes one process, got 2: .*FSDP"),
    ],
)
def test_where_it_cannot_be_had_is_named(processes: Processes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cuda_graph(processes)
    with pytest.raises(ValueError, match=message):
        Engine(initial_model(preset("gla-tiny", vocab_size=5), 0), RECIPE, processes, cuda_graph=True)


@pytest.mark.usefixtures("recorder")
def test_packed_documents_are_refused() -> None:
    _, engine = pair("gla")
    packed = TargetBatch(*(getattr(windows(12, rows=1), name) for name in ("inputs", "targets", "parts")))
    packed = TargetBatch(packed.inputs, packed.targets, packed.parts, torch.tensor([0, 5, 12], dtype=torch.int32))
    with pytest.raises(ValueError, match="cuda_graph takes windows without packed documents"):
        engine.step([packed], 1e-2)
    values = {**RECIPE_VALUES, "data": {**RECIPE_VALUES["data"], "pack_documents": True}}
    with pytest.raises(ValueError, match=r"system\.cuda_graph takes windows without packed .* or data\.pack_documents"):
        Recipe.from_dict(values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_recipe_that_asks_for_it_without_a_gpu_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cuda_graph needs a GPU, got the device cpu"):
        run_recipe(Recipe.from_dict(RECIPE_VALUES), tmp_path / "run")
    assert not (tmp_path / "run").exists()
