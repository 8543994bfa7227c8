"""`ccq compare` trains through CUDA graphs where there is a GPU, and says how each model was trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compare.test_grid import SMALL

from ccq.compare import training
from ccq.compare.cell import run_cell
from ccq.compare.folder import GridFolder, what_is_learned
from ccq.compare.grid import GridSettings
from ccq.compare.run_grid import how_trained
from ccq.compare.training import Stage, Trained, train_stages
from ccq.models import preset
from ccq.train.config import OptimizerRecipe


class Silent:
    """In the place of a `Teller`."""

    def training(self, progress: Any) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def stand_in(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> dict[str, Any]:
    """Train nothing; what the engine was asked for. With a reason the passes could not be recorded."""
    asked: dict[str, Any] = {}

    def engine(model: Any, optimizer: Any, processes: Any, **options: Any) -> None:
        asked.update(options, device=processes.device)

    def train(*_: Any, **__: Any) -> None:
        if reason is not None:
            asked["on_eager"](reason)

    for name, value in {"initial_model": lambda *_: None, "Engine": engine, "train": train}.items():
        monkeypatch.setattr(training, name, value)
    return asked


def train_on(device: str, folder: Path) -> Trained:
    recipe = OptimizerRecipe(learning_rate=1e-2, warmup_steps=0)
    steps: Any = None
    return train_stages(
        preset("gla-tiny"), recipe, (Stage(8, 1, 1),), steps, folder, seed=0, log_every=1, checkpoint_every=1,
        device=torch.device(device), on_progress=lambda progress: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "reason", "expected"),
    [
        ("cuda:1", None, None),
        ("cuda:1", "it waits for the GPU", "it waits for the GPU"),
        ("cpu", None, "the device is cpu"),
    ],
)
def test_a_gpu_gets_graphs_where_they_can_be_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, reason: str | None, expected: str | None
) -> None:
    asked = stand_in(monkeypatch, reason)
    assert train_on(device, tmp_path).eager_because == expected
    assert asked["cuda_graph"] == device.startswith("cuda") and asked["device"] == torch.device(device)


def test_results_say_how_a_model_was_trained_and_settings_do_not(tmp_path: Path) -> None:
    settings = GridSettings.from_dict(SMALL)
    folder, cells = GridFolder(tmp_path), settings.cells
    teller: Any = Silent()
    run_cell(str(tmp_path), settings, cells[0], teller, torch.device("cpu"))
    result = json.loads((folder.cell(cells[0]) / "result.json").read_bytes())
    assert result["eager_because"] == "the device is cpu"
    for cell, reason in zip(cells[1:], (None, None, "it waits"), strict=True):
        folder.cell(cell).mkdir(parents=True)
        (folder.cell(cell) / "result.json").write_text(json.dumps({**result, "eager_because": reason}))
    assert list(how_trained(folder, settings)) == [
        "1 of 4 models: forward and backward passes ran eagerly (the device is cpu).",
        "2 of 4 models: forward and backward passes ran as CUDA graphs.",
        "1 of 4 models: forward and backward passes ran eagerly (it waits).",
    ]
    # A grid that was begun on a CPU goes on on a GPU: nothing that tells them apart is compared.
    other = dataclasses.replace(settings, system=dataclasses.replace(settings.system, device="cuda"))
    assert what_is_learned(other) == what_is_learned(settings)
