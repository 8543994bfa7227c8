"""The schedule against its closed form, and the curriculum against counting."""

from __future__ import annotations

import math

import pytest

from ccq.train import Stage, TrainConfig

CONFIG = TrainConfig(stages=(Stage(32, 4, 3), Stage(64, 2, 5)), warmup_steps=4, learning_rate=1.0)


def test_stages_follow_each_other() -> None:
    assert [CONFIG.stage_at(step).length for step in range(8)] == [32] * 3 + [64] * 5
    assert CONFIG.steps == 8
    assert CONFIG.training_length == 64


def test_tokens_are_those_of_every_step() -> None:
    by_step = [CONFIG.stage_at(step).length * CONFIG.stage_at(step).batch_size for step in range(8)]
    assert [CONFIG.tokens_before(step) for step in range(9)] == [sum(by_step[:step]) for step in range(9)]
    assert CONFIG.tokens == sum(by_step)


def test_learning_rate_rises_to_the_peak_and_falls_on_a_cosine() -> None:
    rates = [CONFIG.learning_rate_at(step) for step in range(8)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    for step in range(4, 8):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 4)) / 2
        assert rates[step] == pytest.approx(expected)
    assert CONFIG.learning_rate_at(8) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ()}, "stages is empty"),
        ({"stages": (Stage(1, 2, 3),)}, "length of at least 2"),
        ({"stages": (Stage(8, 0, 3),)}, "at least 1 window"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number above 0, got inf"),
        ({"needles": 0}, "needles must be at least 1, got 0"),
        ({"weight_decay": -1.0}, "must not be negative, got -1.0"),
    ],
)
def test_impossible_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**({"stages": CONFIG.stages} | change))  # type: ignore[arg-type]
