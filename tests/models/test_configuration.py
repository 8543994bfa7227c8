"""Configurations and presets: every wrong value is named together with what is accepted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ccq.models import ARMS, ModelConfig, parse_arm, preset


def test_arms() -> None:
    assert ARMS == ("gla", "gla+ccq", "gated-deltanet", "gated-deltanet+ccq")
    assert [parse_arm(arm) for arm in ARMS] == [
        ("gla", None),
        ("gla", "ccq"),
        ("gated-deltanet", None),
        ("gated-deltanet", "ccq"),
    ]


@pytest.mark.parametrize("arm", ["", "mamba", "gla+", "+ccq", "ccq", "gla+mesa", "gla+ccq+ccq", "GLA", "gla ccq"])
def test_unknown_arm_lists_what_is_accepted(arm: str) -> None:
    with pytest.raises(
        ValueError, match=r"BACKBONE or BACKBONE\+READ: gla, gla\+ccq, gated-deltanet, gated-delta"
    ) as error:
        parse_arm(arm)
    assert repr(arm) in str(error.value)


def test_unknown_arm_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'gated-deltanet\+ccq'"):
        preset("tiny", "gated-delta-net+ccq")


@pytest.mark.parametrize("arm", ARMS)
def test_round_trip_through_json(arm: str) -> None:
    config = preset("tiny", arm, vocab_size=700, gate=0.25, keep_length=True)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.vocab_size == 700
    assert (config.backbone, config.read) == parse_arm(arm)


def test_unknown_and_missing_options_are_named() -> None:
    values = preset("tiny", "gla").to_dict()
    with pytest.raises(
        ValueError, match=r"unknown model option 'hiden_size' \(did you mean 'hidden_size'\?\); accepted: vocab"
    ):
        ModelConfig.from_dict({**values, "hiden_size": 3})
    del values["num_heads"], values["arm"]
    with pytest.raises(ValueError, match="lacks num_heads, arm"):
        ModelConfig.from_dict(values)
    with pytest.raises(TypeError, match="got list"):
        ModelConfig.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vocab_size", 0, "vocab_size must be a whole number of at least 1, got 0"),
        ("hidden_size", 64.0, "hidden_size must be a whole number"),
        ("num_layers", True, "num_layers must be a whole number"),
        ("gate", "presplitt", "gate must be one of 'presplit'"),
        ("centred", 1, "centred must be true or false"),
        ("max_a", -1, "max_a must be a finite number above 0"),
        ("norm_eps", float("nan"), "norm_eps must be a finite number above 0"),
        ("initializer_range", "0.02", "initializer_range must be a finite number above 0"),
        ("dt_min", 0.5, "dt_min must not be above dt_max"),
        ("short_convolution", 0, "short_convolution must be a kernel size of at least 1"),
        ("short_convolution", None, "only gla goes without"),
    ],
)
def test_bad_values_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("tiny", "gated-deltanet", **{name: value})


def test_gla_goes_without_a_convolution() -> None:
    assert preset("tiny", "gla", short_convolution=None).short_convolution is None


def test_unknown_preset_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'tinny' \(did you mean 'tiny'\?\); accepted: tiny"):
        preset("tinny", "gla")
    with pytest.raises(ValueError, match="unknown model option 'heads'"):
        preset("tiny", "gla", heads=3)


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("tiny", "gla").arm = "gla+ccq"  # type: ignore[misc]
