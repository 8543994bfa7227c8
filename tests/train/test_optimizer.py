"""Schedule against its closed form, decay groups by name, and what decay alone does to lambda."""

from __future__ import annotations

import math

import pytest
import torch

from ccq.models import CCQForCausalLM, preset
from ccq.nn.reads import READS
from ccq.train.config import OptimizerRecipe
from ccq.train.engine import Engine, TargetBatch, initial_model
from ccq.train.optimizer import decay_alone, decay_share, decays, learning_rate_at, make_optimizers

RECIPE = OptimizerRecipe(learning_rate=1.0, warmup_steps=4, final_learning_rate_share=0.1)
PAPER = OptimizerRecipe(learning_rate=1e-3, warmup_steps=1024)


def small(arm: str) -> CCQForCausalLM:
    return initial_model(preset(f"{arm}-tiny", vocab_size=64), 0)


def test_learning_rate_rises_to_the_peak_and_falls_on_a_cosine() -> None:
    rates = [learning_rate_at(RECIPE, step, 8) for step in range(9)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    for step in range(4, 9):
        assert rates[step] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 4)) / 2)
    assert rates[8] == pytest.approx(0.1)


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    recipe = OptimizerRecipe(learning_rate=0.5, warmup_steps=0)
    assert [learning_rate_at(recipe, step, 2) for step in range(3)] == pytest.approx([0.5, 0.25, 0])


@pytest.mark.parametrize(
    ("steps", "share", "gate"),
    # Sum of the paper's learning rates in closed form: half the warm-up plus half of the rest, at the peak of 1e-3.
    [(57_220, 0.057, 0.435), (76_294, 0.022, 0.475)],
)
def test_decay_alone_moves_lambda_as_the_paper_s_schedule_implies(steps: int, share: float, gate: float) -> None:
    by_hand = math.exp(-0.1 * 1e-3 * (1024 / 2 + (steps - 1024) / 2))
    assert decay_share(PAPER, steps, steps) == pytest.approx(by_hand, rel=1e-3)
    assert by_hand == pytest.approx(share, abs=6e-4)
    assert decay_alone(math.log(0.01 / 0.99), by_hand) == pytest.approx(gate, abs=1e-3)


def test_decay_alone_is_what_the_optimizer_does_without_gradients() -> None:
    """The bias of a gate that is decayed and never gets a gradient, step by step through AdamW."""
    model = small("gla+ccq")
    recipe = OptimizerRecipe(learning_rate=0.1, warmup_steps=3, weight_decay=0.5, decay_gate_bias=True)
    engine = Engine(model, recipe)
    bias = model.read_steps()[0].gate_bias
    start = bias.detach().mean().item()
    for step in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(recipe, step, 10)
            optimizer.step()
    alone = decay_alone(start, decay_share(recipe, 10, 10))
    assert torch.sigmoid(bias.detach()).mean().item() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("arm", ["gated-deltanet+ccq", "gla-hedgehog+ccq", "mamba2+ccq", "transformer"])
@pytest.mark.parametrize("gate_bias", [False, True])
def test_decay_is_for_matrices_and_never_for_what_it_would_harm(arm: str, gate_bias: bool) -> None:
    model = small(arm)
    for parameter in model.parameters():
        # As after loading: nothing is marked any more.
        parameter.__dict__.pop("_no_weight_decay", None)
    recipe = OptimizerRecipe(learning_rate=1.0, warmup_steps=0, decay_gate_bias=gate_bias)
    (optimizer,) = make_optimizers(model.named_parameters(), recipe)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {group["weight_decay"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert groups.keys() == {0.1, 0.0}
    assert groups[0.1] | groups[0.0] == set(names.values())
    last = {name: name.rpartition(".")[2] for name in names.values()}
    for name in groups[0.0]:
        assert last[name] in ("A_log", "D", "dt_bias", "bias", "gate_bias") or "norm" in name, name
    for name in groups[0.1]:
        assert last[name] in ("weight", "gate_weight") or (gate_bias and last[name] == "gate_bias"), name
        assert "norm" not in name
    expected = {"gate_bias"} if "+ccq" in arm else set()
    assert {last[name] for name in groups[0.1 if gate_bias else 0.0]} & {"gate_bias"} == expected


@pytest.mark.parametrize("read", READS)
def test_what_a_read_step_marks_is_known_by_name_when_the_mark_is_lost(read: str) -> None:
    for name, parameter in small(f"gla+{read}").named_parameters():
        if getattr(parameter, "_no_weight_decay", False):
            assert not decays(name, torch.nn.Parameter(parameter.detach())), name


def test_a_mark_is_obeyed_too() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    assert decays("anything.weight", parameter)
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    assert not decays("anything.weight", parameter)


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    model = small("gated-deltanet+ccq")
    recipe = OptimizerRecipe(learning_rate=0.02, warmup_steps=0, name="muon")
    muon, adamw = make_optimizers(model.named_parameters(), recipe)
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken = {names[p] for group in muon.param_groups for p in group["params"]}
    in_blocks = {name for p, name in names.items() if p.ndim == 2 and ".layers." in name}
    assert taken == {name for name in in_blocks if not name.endswith("gate_weight")}
    assert all("proj" in name for name in taken)
    assert taken | {names[p] for group in adamw.param_groups for p in group["params"]} == set(names.values())


def test_muon_s_step_is_the_orthogonal_factor_of_the_gradient() -> None:
    """The first update is close to U V^T of the gradient's decomposition, scaled to the size of AdamW's."""
    model = small("gla")
    recipe = OptimizerRecipe(learning_rate=0.1, warmup_steps=0, name="muon", weight_decay=0, gradient_clip=1e9)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    tokens = torch.randint(64, (4, 33))
    batch = TargetBatch(tokens[:, :-1], tokens[:, 1:], {"loss": torch.ones(4, 32, dtype=torch.bool)})
    logits = model(batch.inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    (gradient,) = torch.autograd.grad(loss, weight)
    Engine(model, recipe).step([batch], 0.1)
    update = (before - weight.detach()) / 0.1
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    # 0.2 sqrt(larger side) makes the root mean square 0.2, that of AdamW's updates (arXiv:2502.16982, section 2.2).
    expected = 0.2 * max(weight.shape) ** 0.5 * (u @ v)
    cosine = torch.nn.functional.cosine_similarity(update.flatten(), expected.flatten(), dim=0)
    assert cosine > 0.95
    assert update.norm() / expected.norm() == pytest.approx(1, abs=0.25)
