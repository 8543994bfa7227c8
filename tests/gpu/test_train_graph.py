"""Training on a GPU: a step as a CUDA graph is the eager step bit for bit, and a run that goes on is the one that was
never interrupted.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import toy
from torch import Tensor

from ccq.models import CCQForCausalLM, preset
from ccq.processes import Processes
from ccq.train.config import OptimizerRecipe
from ccq.train.engine import Engine, TargetBatch, initial_model
from ccq.train.graph import RecordingError
from ccq.train.metrics import observe_window, read_metrics

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # shown; torch's own about its compiler and streams are no errors here
]

VOCABULARY = toy.VOCABULARY
RECIPE = OptimizerRecipe(learning_rate=1e-2, warmup_steps=0)
GPU = Processes(device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def as_users_have_it() -> None:
    """Filling what `torch.empty` returns would be part of every graph, and deterministic replacements of kernels are
    not what a training run uses.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


def model_of(arm: str, **changes: Any) -> CCQForCausalLM:
    """Two layers with heads of 32, which the kernels take."""
    return initial_model(preset(f"{arm}-tiny", **{"num_layers": 2, "vocab_size": VOCABULARY, **changes}), 0, GPU.device)


def pair(arm: str, **options: Any) -> tuple[Engine, Engine]:
    """An engine, and the same one with graphs."""
    start = model_of(arm)
    return (
        Engine(copy.deepcopy(start), RECIPE, GPU, **options),
        Engine(start, RECIPE, GPU, cuda_graph=True, **options),
    )


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


@pytest.mark.parametrize(
    ("arm", "options"),
    [
        ("gla", {"dtype": "bfloat16"}),
        ("gla+ccq", {"dtype": "bfloat16"}),
        ("gated-deltanet+ccq", {"dtype": "bfloat16"}),
        ("gla+ccq", {"dtype": "bfloat16", "activation_checkpointing": True}),
        # As `ccq compare` trains.
        ("gla+ccq", {"dtype": "float32"}),
        ("gated-deltanet+ccq", {"dtype": "float32"}),
    ],
    ids=str,
)
def test_every_step_is_the_eager_one(arm: str, options: dict[str, Any]) -> None:
    """Over two micro-batches a step, two lengths, two parts of the loss, measurements between, and a step that is not
    finite.
    """
    engines = pair(arm, **options)
    held_out = [windows(70, rows=3)]
    short, parts = windows(70), ("answer", "text")
    long = [windows(130, parts=parts) for _ in range(2)]
    steps = [[windows(70), windows(70)], [short], long, [windows(70)], [windows(130)]]
    for number, step in enumerate(steps):
        results = []
        for engine in engines:
            if number == 3:
                head = engine.model.lm_head.weight.data
                kept = head.clone()
                head[5] = math.nan
                assert not engine.step([short], 1e-2).is_finite
                head.copy_(kept)
            results.append((engine.step(step, 1e-2), observe_window(engine, step[0], 40)))
        assert results[0] == results[1] and results[0][0].is_finite
        assert_same(*engines)
        assert engines[0].measure(held_out) == engines[1].measure(held_out)
    assert engines[1]._graphs is not None and len(engines[1]._graphs._recorded) == 2


def test_muon_and_tied_embeddings_too() -> None:
    start = model_of("gla+ccq", tie_word_embeddings=True)
    muon = OptimizerRecipe(learning_rate=1e-2, warmup_steps=0, name="muon")
    engines = [Engine(copy.deepcopy(start), muon, GPU, dtype="bfloat16", cuda_graph=graph) for graph in (False, True)]
    for _ in range(3):
        step = [windows(70), windows(70)]
        assert engines[0].step(step, 1e-2) == engines[1].step(step, 1e-2)
    assert_same(*engines)


SAME = ("step", "tokens", "loss", "grad_norm", "gate", "correction", "held_out_loss")


def train(folder: Path, options: dict[str, Any], **schedule: Any) -> Engine:
    model = model_of("gated-deltanet+ccq", num_layers=1)
    engine = Engine(model, toy.OPTIMIZER, GPU, dtype="bfloat16", **options)
    toy.run(folder, engine=engine, checkpoint_every=100, evaluate_every=2, **schedule)
    return engine


def recorded(folder: Path) -> list[list[Any]]:
    return [[line.get(name) for name in SAME] for line in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    "options",
    [{}, {"cuda_graph": True}, {"compile": True}, {"compile": True, "cuda_graph": True}],
    ids=["eager", "graph", "compiled", "compiled graph"],
)
def test_a_run_that_goes_on_is_the_one_that_was_never_interrupted(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = train(tmp_path / "whole", options)
    train(tmp_path / "stopped", options, stop_after=3)
    resumed = train(tmp_path / "stopped", options)
    assert recorded(tmp_path / "stopped") == recorded(tmp_path / "whole")
    assert len(recorded(tmp_path / "whole")) == toy.STEPS
    assert_same(whole, resumed)
    if "cuda_graph" in options:
        eager = train(tmp_path / "eager", {name: value for name, value in options.items() if name != "cuda_graph"})
        assert recorded(tmp_path / "eager") == recorded(tmp_path / "whole")
        assert_same(whole, eager)


def test_what_waits_for_the_gpu_is_named_and_spoils_nothing() -> None:
    """The reason, then the same steps eagerly where that is allowed, then a graph again where nothing waits."""
    said: list[str] = []
    start = model_of("gla+ccq")
    eager, strict, lenient = (Engine(copy.deepcopy(start), RECIPE, GPU, dtype="bfloat16", **options) for options in (
        {}, {"cuda_graph": True}, {"cuda_graph": True, "on_eager": said.append}
    ))  # fmt: skip

    def look(module: Any, arguments: Any, output: Tensor) -> None:
        output.sum().item()

    hooks = [engine.model.model.norm.register_forward_hook(look) for engine in (strict, lenient)]
    step = [windows(70), windows(70)]
    with pytest.raises(RecordingError, match=r"2 windows of 70 tokens cannot be recorded .*synchronizing"):
        strict.step(step, 1e-2)
    expected = eager.step(step, 1e-2)
    assert lenient.step(step, 1e-2) == expected
    assert len(said) == 1 and "synchronizing" in said[0]
    for hook in hooks:
        hook.remove()
    assert strict.step(step, 1e-2) == expected
    assert_same(eager, lenient)
    assert_same(eager, strict)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0


def test_packed_documents_are_refused() -> None:
    _, engine = pair("gla", dtype="bfloat16")
    batch = windows(70, rows=1)
    packed = TargetBatch(batch.inputs, batch.targets, batch.parts, torch.tensor([0, 30, 70], dtype=torch.int32))
    with pytest.raises(ValueError, match="cuda_graph takes windows without packed documents"):
        engine.step([packed], 1e-2)
