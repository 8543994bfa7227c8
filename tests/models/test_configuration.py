"""Configurations: every wrong value is named together with what is accepted, and transformers reads what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ccq.models import ARMS, BACKBONES, CCQConfig, CCQForCausalLM, parse_arm, preset
from ccq.models.modeling import MIXERS


def test_arms() -> None:
    assert ARMS == (
        "gla",
        "gla+ccq",
        "gla-hedgehog",
        "gla-hedgehog+ccq",
        "gated-deltanet",
        "gated-deltanet+ccq",
        "mamba2",
        "mamba2+ccq",
        "transformer",
    )
    assert parse_arm("gla-hedgehog") == ("gla-hedgehog", None)
    assert parse_arm("gated-deltanet+ccq") == ("gated-deltanet", "ccq")
    assert tuple(MIXERS) == BACKBONES


@pytest.mark.parametrize(
    "arm",
    [
        "",
        "mamba",
        "gla+",
        "+ccq",
        "ccq",
        "gla+newton",
        "gla+ccq+ccq",
        "GLA",
        "gla ccq",
        "transformer+ccq",
        "transformer+none",
    ],
)
def test_unknown_arm_lists_what_is_accepted(arm: str) -> None:
    with pytest.raises(ValueError, match=r"BACKBONE or BACKBONE\+READ: gla, gla\+ccq, gla-hedgehog, .*mamba2") as error:
        parse_arm(arm)
    assert repr(arm) in str(error.value)


def test_unknown_arm_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'gated-deltanet\+ccq'"):
        preset("gla-tiny", arm="gated-delta-net+ccq")


@pytest.mark.parametrize("arm", ARMS)
def test_round_trips(arm: str, tmp_path: Path) -> None:
    config = preset(f"{arm}-tiny", vocab_size=700, gate=0.25, eos_token_id=[1, 2], pad_token_id=0)
    assert (config.backbone, config.read) == parse_arm(arm)
    config.save_pretrained(tmp_path)
    own = [name for name in vars(config) if not name.startswith("_")]
    for again in (
        CCQConfig.from_dict(json.loads(config.to_json_string())),
        CCQConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
    ):
        assert type(again) is CCQConfig
        for name in own:
            if name != "transformers_version":
                assert getattr(again, name) == getattr(config, name), name
    assert again.gate == 0.25
    assert CCQConfig.from_pretrained(tmp_path, gate="head").gate == "head"


def test_names_that_transformers_uses() -> None:
    config = preset("gla-1.3b")
    assert (config.num_hidden_layers, config.num_attention_heads) == (21, 6)
    config.num_hidden_layers = 3
    assert config.num_layers == 3


def test_unknown_and_missing_options_are_named() -> None:
    values = json.loads(preset("gla-tiny").to_json_string())
    with pytest.raises(
        ValueError, match=r"unknown model option 'hiden_size' \(did you mean 'hidden_size'\?\); accepted: arm, vocab"
    ):
        CCQConfig.from_dict({**values, "hiden_size": 3})
    with pytest.raises(ValueError, match="unknown model option 'heads'"):
        CCQConfig(heads=3)
    del values["num_heads"], values["arm"]
    with pytest.raises(ValueError, match="lacks arm, num_heads"):
        CCQConfig.from_dict(values)
    with pytest.raises(TypeError, match="got list"):
        CCQConfig.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vocab_size", 0, "vocab_size must be a whole number of at least 1, got 0"),
        ("hidden_size", 64.0, "hidden_size must be a whole number"),
        ("num_layers", True, "num_layers must be a whole number"),
        ("intermediate_size", 0, "intermediate_size must be a whole number of at least 1, or None for blocks without"),
        ("gate", "presplitt", "gate must be one of 'presplit'"),
        ("centred", 1, "centred must be true or false"),
        ("tie_word_embeddings", None, "tie_word_embeddings must be true or false"),
        ("max_a", -1, "max_a must be a finite number above 0"),
        ("norm_eps", float("nan"), "norm_eps must be a finite number above 0"),
        ("initializer_range", "0.02", "initializer_range must be a finite number above 0"),
        ("dt_min", 0.5, "dt_min must not be above dt_max"),
        ("short_convolution", 0, "short_convolution must be a kernel size of at least 1"),
        ("short_convolution", None, "only gla and gla-hedgehog go without"),
        ("num_kv_heads", 3, "num_kv_heads must divide num_heads, got 3 and 2"),
        ("eos_token_id", 512, r"eos_token_id must be a token id in 0 \.\.\. 511, got 512"),
    ],
)
def test_bad_values_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("gated-deltanet-tiny", **{name: value})


@pytest.mark.parametrize(
    ("arm", "changes", "message"),
    [
        ("mamba2", {"num_groups": 3}, "num_groups must divide num_heads, got 3 and 4"),
        ("mamba2", {"min_a": 2.0}, "min_a must not be above max_a, got 2.0 and 1.0"),
        ("mamba2+ccq", {"short_convolution": None}, "must be a kernel size for mamba2"),
        ("transformer", {"head_dim": 5}, "head_dim must be even for transformer .*, got 5"),
        ("gla-hedgehog", {"head_dim": 5}, "head_dim must be even for gla-hedgehog .*, got 5"),
    ],
)
def test_values_that_do_not_fit_their_backbone_are_named(arm: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(f"{arm}-tiny", **changes)


def test_a_configuration_that_was_spoilt_makes_no_model() -> None:
    config = preset("gla+ccq-tiny")
    config.gate = "presplitt"
    with pytest.raises(ValueError, match="gate must be one of"):
        CCQForCausalLM(config)


def test_gla_goes_without_a_convolution() -> None:
    assert preset("gla-tiny", short_convolution=None).short_convolution is None
