"""Utilisation, memory and time against counting by hand and against what a run really holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ccq.cli import main
from ccq.models import ARMS, preset
from ccq.models.modeling import Block
from ccq.train.config import Recipe
from ccq.train.engine import Engine, TargetBatch, initial_model
from ccq.train.throughput import (
    activation_bytes_per_token,
    memory_estimate,
    plan,
)

CPU = torch.device("cpu")


def recipe(**system: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "model": {"preset": "gla+ccq-tiny", "vocab_size": 600},
            "data": {"folder": "x", "length": 64},
            "training": {"steps": 10, "tokens_per_step": 1024},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
            "system": {"rows": 4, "dtype": "float32", **system},
        }
    )


def test_states_and_copies_are_what_a_run_holds() -> None:
    wanted = recipe(dtype="bfloat16")
    config = wanted.model.config()
    engine = Engine(initial_model(config, 0), wanted.optimizer, dtype="bfloat16")
    tokens = torch.randint(600, (4, 65))
    batch = TargetBatch(tokens[:, :-1], tokens[:, 1:], {"loss": torch.ones(4, 64, dtype=torch.bool)})
    held = 0

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal held
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = [m for p in parameters for m in optimizer.state[p].values() if m.ndim]
        held = sum(x.nbytes for p in parameters for x in (p, p.grad)) + sum(m.nbytes for m in moments)

    engine.optimizers[0].register_step_post_hook(count)
    engine.step([batch], 1e-3)
    estimate = memory_estimate(wanted, config, 1)
    assert estimate.states == held
    assert estimate.copies == 2 * engine.model.parameter_count


def test_several_processes_share_states_and_gather_weights() -> None:
    config = recipe().model.config()
    parameters = initial_model(config, 0).parameter_count
    one, two = (memory_estimate(recipe(), config, processes) for processes in (1, 2))
    assert (one.states, one.copies) == (16 * parameters, 0)
    # Two micro-batches in each of two processes: gradients wait, unsharded.
    assert (two.states, two.copies) == (8 * parameters, 4 * parameters + 4 * parameters)
    # Both of the two blocks are gathered at once anyway; one micro-batch, so no gradients wait.
    four = memory_estimate(recipe(reshard_after_forward=True), config, 4)
    assert (four.states, four.copies) == (4 * parameters, 4 * parameters)


@pytest.mark.parametrize("arm", ARMS)
def test_activations_are_what_autograd_keeps(arm: str) -> None:
    """Within a quarter: torch's operations on a CPU keep a few vectors more than are counted, and chunk states."""
    values = 32 if arm == "transformer" else 64
    sizes = {"hidden_size": 128, "num_heads": 4, "head_dim": 32, "value_head_dim": values}
    config = preset(f"{arm}-tiny", **sizes, **({} if "mamba2" in arm else {"intermediate_size": 352}))
    block, x = Block(config, 0), torch.randn(2, 256, 128, requires_grad=True)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, None, None, None, False)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    sizes_of = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    measured = sum(size for address, size in sizes_of.items() if address not in own) / (2 * 256)
    assert 1.0 <= measured / activation_bytes_per_token(config, 4) <= 1.25


def test_hours_follow_from_the_rate() -> None:
    found = plan(recipe(), recipe().model.config(), processes=1, device=CPU)
    assert found.tokens == 10 * 1024 and found.is_measured
    assert found.hours == pytest.approx(found.tokens * found.training_flops / (0.4 * found.peak) / 3600)
    two = plan(recipe(), recipe().model.config(), processes=2, device=CPU)
    assert two.hours * two.peak == pytest.approx(found.hours * found.peak / 2)


def test_dry_run_prints_the_plan_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = Path(__file__).parents[2] / "recipes" / "1.3b" / "gla+ccq.yaml"
    assert main(["train", str(shipped), "--dry-run", "--set", "system.dtype=float32"]) == 0
    shown = capsys.readouterr().out
    for part in ("1,387,746,430", "76,294 of 524,288 tokens", "GiB in each of 1 processes", "hours at 40% of that"):
        assert part in shown
    assert list(tmp_path.iterdir()) == []


def test_a_plan_deals_a_step_as_training_does(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = Path(__file__).parents[2] / "recipes" / "1.3b" / "gla+ccq.yaml"
    assert main(["train", str(shipped), "--dry-run", "--set", "system.rows=3"]) == 2
    assert "a step of 128 windows cannot be dealt to 1 processes in micro-batches of 3" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"16 windows cannot be dealt to 3 processes.*multiple of 12"):
        plan(recipe(), recipe().model.config(), processes=3, device=CPU)
