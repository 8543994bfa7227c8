"""The curriculum against counting, the loss of an arm by hand, and arms that are interrupted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ccq.compare.training import NeedleSteps, Stage, TrainConfig, train_arm
from ccq.data.needles import training_batch
from ccq.data.tokenizer import NeedleVocabulary
from ccq.models import CCQConfig, preset
from ccq.train.engine import Engine, initial_model
from ccq.train.loop import Progress

CONFIG = TrainConfig(stages=(Stage(32, 4, 3), Stage(64, 2, 5)), warmup_steps=2, log_every=3)
VOCABULARY = NeedleVocabulary(remember=50, recall=51, keys=tuple(range(52, 60)), values=tuple(range(60, 64)))
TOKENS = np.random.default_rng(0).integers(0, 50, 4000).astype(np.uint16)


def model_config(arm: str) -> CCQConfig:
    sizes = {"hidden_size": 16, "num_layers": 1, "head_dim": 8, "value_head_dim": 8, "intermediate_size": 16}
    return preset(f"{arm}-tiny", vocab_size=64, **sizes)


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def test_stages_follow_each_other() -> None:
    assert [CONFIG.stage_at(step).length for step in range(8)] == [32] * 3 + [64] * 5
    assert CONFIG.steps == 8
    assert CONFIG.training_length == 64


def test_tokens_are_those_of_every_step() -> None:
    by_step = [CONFIG.stage_at(step).length * CONFIG.stage_at(step).batch_size for step in range(8)]
    assert [CONFIG.tokens_before(step) for step in range(9)] == [sum(by_step[:step]) for step in range(9)]
    assert CONFIG.tokens == sum(by_step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ()}, "stages is empty"),
        ({"stages": (Stage(1, 2, 3),)}, "length of at least 2"),
        ({"stages": (Stage(8, 0, 3),)}, "at least 1 window"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number above 0, got inf"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number above 0, got 0.0"),
        ({"needles": 0}, "needles must be at least 1, got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
    ],
)
def test_impossible_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**({"stages": CONFIG.stages} | change))  # type: ignore[arg-type]


def test_the_loss_is_the_mean_over_text_plus_the_mean_over_answers() -> None:
    engine = Engine(initial_model(model_config("gla+ccq"), 0), CONFIG.optimizer())
    (given,) = next(iter(NeedleSteps(TOKENS, VOCABULARY, CONFIG, seed=7)))
    tokens = training_batch(TOKENS, seed=7, step=0, batch_size=4, length=32, vocabulary=VOCABULARY, needles=4).tokens
    with torch.no_grad():
        logits = engine.model(tokens[:, :-1], use_cache=False).logits.double()
    by_hand: dict[str, list[float]] = {"text": [], "answer": []}
    for row in range(4):
        for position in range(31):
            target = int(tokens[row, position + 1])
            loss = float(logits[row, position].logsumexp(0) - logits[row, position, target])
            questions_begun = VOCABULARY.recall in tokens[row, : position + 1].tolist()
            if target in VOCABULARY.values and questions_begun:
                by_hand["answer"].append(loss)
            elif target not in VOCABULARY.values and target not in VOCABULARY.keys:
                by_hand["text"].append(loss)
    assert len(by_hand["answer"]) == 4 * 4
    result = engine.step([given], 1e-3)
    assert result.losses == {name: pytest.approx(np.mean(each), rel=1e-5) for name, each in by_hand.items()}


def test_all_arms_see_the_same_windows() -> None:
    steps = iter(NeedleSteps(TOKENS, VOCABULARY, CONFIG, seed=1))
    for step in range(8):
        (given,) = next(steps)
        stage = CONFIG.stage_at(step)
        expected = training_batch(
            TOKENS,
            seed=1,
            step=step,
            batch_size=stage.batch_size,
            length=stage.length,
            vocabulary=VOCABULARY,
            needles=4,
        )
        assert torch.equal(given.inputs, expected.inputs) and torch.equal(given.targets, expected.targets)


@pytest.mark.parametrize("stop", [3, 7])
def test_a_killed_arm_goes_on_bit_for_bit(tmp_path: Path, stop: int) -> None:
    def train(name: str, every: int, on_progress: object = lambda progress: None) -> tuple[object, ...]:
        config = TrainConfig(stages=CONFIG.stages, warmup_steps=2, log_every=3, checkpoint_every=every)
        steps = NeedleSteps(TOKENS, VOCABULARY, config, seed=3)
        folder = tmp_path / name
        return train_arm(model_config("gla+ccq"), config, steps, folder, seed=3, on_progress=on_progress)  # type: ignore[arg-type]

    def kill(progress: Progress) -> None:
        if progress.step == stop:
            raise Killed

    whole, _, curve = train("whole", 100)
    with pytest.raises(Killed):
        train("killed", 2, kill)
    resumed, outcome, resumed_curve = train("killed", 100)
    assert resumed_curve == curve and outcome.finished  # type: ignore[attr-defined]
    for name, value in whole.model.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(resumed.model.state_dict()[name], value), name  # type: ignore[attr-defined]
    assert [point["step"] for point in curve] == [1, 3, 6, 8]  # type: ignore[attr-defined]
    assert [point["length"] for point in curve] == [32, 32, 64, 64]  # type: ignore[attr-defined]
    assert curve[0]["gate_mean"] == pytest.approx(0.01, abs=1e-3)  # type: ignore[index]
    assert curve[0]["gate_by_decay_alone"] == pytest.approx(0.01, rel=0.01)  # type: ignore[index]


def test_losses_fall_to_what_the_text_allows(tmp_path: Path) -> None:
    config = TrainConfig(stages=(Stage(40, 8, 150),), warmup_steps=5, log_every=50, checkpoint_every=1000)
    steps = NeedleSteps(TOKENS % 7, VOCABULARY, config, seed=0)
    _, _, curve = train_arm(model_config("gla"), config, steps, tmp_path, seed=0)
    assert [point["tokens"] for point in curve] == [320 * step for step in (1, 50, 100, 150)]
    assert curve[0]["gate_mean"] is curve[0]["gate_by_decay_alone"] is None
    assert curve[0]["text_loss"] == pytest.approx(np.log(64), abs=0.3)
    # Text of seven equally likely tokens, ln 7 nats each; the markers between them cost a little less.
    assert curve[-1]["text_loss"] == pytest.approx(np.log(7), abs=0.3)
