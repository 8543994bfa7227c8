"""The optimizer step on one process: the loss by hand, accumulation, precision, recomputation, steps left out."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close

from ccq.data.loader import TokenWindows
from ccq.data.shards import TokenArray
from ccq.models import CCQConfig, CCQForCausalLM, preset
from ccq.train.config import OptimizerRecipe
from ccq.train.distributed import float32_parameters
from ccq.train.engine import Engine, TargetBatch, initial_model

RECIPE = OptimizerRecipe(learning_rate=1e-2, warmup_steps=0)
VOCABULARY = 61


def config(arm: str) -> CCQConfig:
    sizes = {"hidden_size": 16, "num_layers": 2, "head_dim": 8, "value_head_dim": 8, "vocab_size": VOCABULARY}
    return preset(f"{arm}-tiny", **sizes)


def batches(rows: int, length: int = 24, *, packed: bool = False) -> TargetBatch:
    tokens = torch.randint(VOCABULARY, (rows * length + 1,)).numpy()
    windows = TokenWindows(TokenArray(tokens, [0, 5, 17, 40, 41]), length)
    return TargetBatch.of_tokens(windows.batch(range(rows), pack_documents=packed))


def rows_of(batch: TargetBatch, start: int, stop: int) -> TargetBatch:
    parts = {name: mask[start:stop] for name, mask in batch.parts.items()}
    return TargetBatch(batch.inputs[start:stop], batch.targets[start:stop], parts)


def weights(model: CCQForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet", "mamba2"])
def test_a_pair_starts_from_the_same_weights_bit_for_bit(backbone: str) -> None:
    before = torch.random.get_rng_state()
    plain, read = (initial_model(config(arm), 3).state_dict() for arm in (backbone, f"{backbone}+ccq"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert plain.keys() < read.keys()
    for name, value in plain.items():
        assert torch.equal(value, read[name]), name
    assert not torch.equal(initial_model(config(backbone), 4).lm_head.weight, plain["lm_head.weight"])


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_is_that_of_torch_on_the_whole_logits(packed: bool) -> None:
    batch = batches(3, packed=packed)
    engine = Engine(initial_model(config("gated-deltanet+ccq"), 0), RECIPE)
    other = copy.deepcopy(engine.model)
    logits = other(batch.inputs, cu_seqlens=batch.cu_seqlens, use_cache=False).logits.double()
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in other.parameters()))
    for parameter in other.parameters():
        parameter.grad *= min(1.0, 1.0 / norm)
    vectors = [p for p in other.parameters() if p.ndim < 2]
    matrices = [p for p in other.parameters() if p.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)).step()
    result = engine.step([batch], 1e-2)
    assert result.losses == {"loss": pytest.approx(loss.item(), rel=1e-5)}
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, value in other.state_dict().items():
        # AdamW's first step is nearly the sign of the gradient, so compare where that is not rounding.
        assert_close(name, engine.model.state_dict()[name], value, 2e-3)


def test_parts_have_their_own_means() -> None:
    batch = batches(2)
    rare = torch.zeros_like(batch.parts["loss"])
    rare[1, 3:5] = True
    batch = TargetBatch(batch.inputs, batch.targets, {"text": ~rare, "rare": rare})
    engine = Engine(initial_model(config("gla"), 0), RECIPE)
    logits = engine.model(batch.inputs, use_cache=False).logits.detach().double()
    by_hand: dict[str, list[float]] = {"text": [], "rare": []}
    for row in range(2):
        for place in range(24):
            loss = float(logits[row, place].logsumexp(0) - logits[row, place, batch.targets[row, place]])
            by_hand["rare" if rare[row, place] else "text"].append(loss)
    result = engine.step([batch], 1e-2)
    for name, found in by_hand.items():
        assert result.losses[name] == pytest.approx(sum(found) / len(found), rel=1e-5)
    assert result.loss == pytest.approx(sum(result.losses.values()))


def test_eight_micro_batches_of_one_are_one_of_eight() -> None:
    """Normalised by all targets of the step: rows with different numbers of targets must not get equal weight."""
    whole = batches(8)
    counted = whole.parts["loss"] & (torch.arange(24) < torch.arange(1, 9).unsqueeze(1) * 3)
    whole = TargetBatch(whole.inputs, whole.targets, {"loss": counted})
    start = initial_model(config("gla+ccq"), 1)
    engines = [Engine(copy.deepcopy(start), RECIPE) for _ in range(2)]
    for _ in range(3):
        one = engines[0].step([whole], 1e-2)
        eight = engines[1].step([rows_of(whole, row, row + 1) for row in range(8)], 1e-2)
        assert eight.loss == pytest.approx(one.loss, rel=1e-5)
        assert eight.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


@pytest.mark.parametrize("poisoned", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(poisoned: str) -> None:
    engine = Engine(initial_model(config("gla"), 0), RECIPE)
    engine.step([batches(2)], 1e-2)
    before, moments = weights(engine.model), copy.deepcopy(engine.optimizers[0].state_dict())
    bias = engine.model.model.layers[0].attn.gk_proj[1].bias
    if poisoned == "loss":
        engine.model.lm_head.weight.data[5] = math.nan
    else:
        hook = bias.register_hook(lambda gradient: gradient * math.inf)
    result = engine.step([batches(2)], 1e-2)
    assert not result.is_finite
    assert math.isfinite(result.loss) == (poisoned == "gradient")
    if poisoned == "gradient":
        hook.remove()
        for name, value in weights(engine.model).items():
            assert torch.equal(value, before[name]), name
    after = engine.optimizers[0].state_dict()
    for key, entries in moments["state"].items():
        for name, value in entries.items():
            assert torch.equal(after["state"][key][name], value)
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_bfloat16_rounds_weights_but_those_of_decay_and_gate() -> None:
    """The loss of a step in bfloat16 is that of a model whose other weights were rounded by hand."""
    engine = Engine(initial_model(config("gated-deltanet+ccq"), 0), RECIPE, dtype="bfloat16")
    batch = batches(2)
    kept = {name.removeprefix("model.") for name in float32_parameters(torch.nn.ModuleDict({"model": engine.model}))}
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "dt_bias", "gate_weight", "gate_bias"}
    rounded = copy.deepcopy(engine.model)
    for name, parameter in rounded.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)
    with torch.no_grad():
        logits = rounded(batch.inputs, use_cache=False).logits
    expected = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())
    result = engine.step([batch], 1e-2)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    assert all(parameter.dtype == torch.float32 for parameter in engine.model.parameters())
    # Steps far below the spacing of bfloat16 add up in the float32 weights.
    before = weights(engine.model)
    for _ in range(4):
        engine.step([batch], 1e-6)
    head = engine.model.lm_head.weight.detach()
    assert not torch.equal(head, before["lm_head.weight"])
    assert torch.equal(head.to(torch.bfloat16), before["lm_head.weight"].to(torch.bfloat16)) or (
        (head - before["lm_head.weight"]).abs().max() < 1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq"])
def test_recomputing_blocks_changes_nothing(arm: str, dtype: str) -> None:
    start, batch = initial_model(config(arm), 0), batches(2)
    plain = Engine(copy.deepcopy(start), RECIPE, dtype=dtype)
    saving = Engine(copy.deepcopy(start), RECIPE, dtype=dtype, activation_checkpointing=True)
    for _ in range(2):
        assert plain.step([batch], 1e-2) == saving.step([batch], 1e-2)


# Both are raised inside torch.compile, which hides them from users but not from a filter.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_blocks_give_the_same_step(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Traced as for the real compiler, and run by PyTorch's own operations: what is at stake is what the trace sees."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    start, batch = initial_model(config("gla+ccq"), 0), batches(2)
    plain = Engine(copy.deepcopy(start), RECIPE, dtype=dtype)
    compiled = Engine(copy.deepcopy(start), RECIPE, dtype=dtype, compile=True)
    for _ in range(2):
        expected, found = plain.step([batch], 1e-2), compiled.step([batch], 1e-2)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_tied_embeddings_are_trained_as_one() -> None:
    tied = preset("gla-tiny", hidden_size=16, num_layers=1, vocab_size=VOCABULARY, tie_word_embeddings=True)
    engine = Engine(initial_model(tied, 0), RECIPE, dtype="bfloat16")
    engine.step([batches(2)], 1e-2)
    assert engine.model.lm_head.weight is engine.model.model.embeddings.weight
