"""Named models: their sizes against the paper's tables, against counts by hand, and against models that were made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.models.small import random_tokens, small
from torch.utils.flop_counter import FlopCounterMode

from ccq.cli import main
from ccq.models import ARMS, PRESETS, CCQForCausalLM, preset
from ccq.models.counts import flops_per_token, parameter_count, state_bytes

MILLION = 1e6
# The gates of the read steps, one linear layer from the pre-split query to the heads: 9,222 parameters a layer.
GATES = 21 * 9222
PAPER = [
    ("gla-500m", False, 512.3),
    ("gla-500m", True, 479.5),
    ("gated-deltanet-500m", False, 512.3),
    ("gated-deltanet-500m", True, 479.5),
    ("gla-1.3b", False, 1387.3),
    ("gla-1.3b", True, 1321.8),
    ("gated-deltanet-1.3b", False, 1387.3),
    ("gated-deltanet-1.3b", True, 1321.8),
    ("transformer-500m", False, 515),
    ("transformer-500m", True, 482),
    ("transformer-1.3b", False, 1364),
    ("transformer-1.3b", True, 1299),
    ("mamba2-500m", False, 495),
    ("mamba2-500m", True, 462),
    ("mamba2-1.3b", False, 1372),
    ("mamba2-1.3b", True, 1306),
]


@pytest.mark.parametrize(("name", "tied", "millions"), PAPER)
def test_parameters_are_those_of_the_paper(name: str, tied: bool, millions: float) -> None:
    count = parameter_count(preset(name, tie_word_embeddings=tied))
    assert abs(count / MILLION - millions) < 0.001 * millions
    arm, _, scale = name.rpartition("-")
    if arm in ("gla", "gated-deltanet"):
        assert parameter_count(preset(f"{arm}+ccq-{scale}", tie_word_embeddings=tied)) - count == GATES


@pytest.mark.parametrize("scale", ["500m", "1.3b"])
def test_hedgehog_adds_its_two_maps(scale: str) -> None:
    # A map has half as many rows as channels, and a bias.
    added = 21 * 2 * (128 * 256 + 128)
    assert parameter_count(preset(f"gla-hedgehog-{scale}")) - parameter_count(preset(f"gla-{scale}")) == added


@pytest.mark.parametrize(("scale", "low", "high"), [("30m", 28, 31), ("60m", 57, 61)])
def test_small_scales_keep_what_they_promise(scale: str, low: float, high: float) -> None:
    for arm in ARMS:
        assert low < parameter_count(preset(f"{arm}-{scale}")) / MILLION < high, arm


@pytest.mark.parametrize("arm", ARMS)
def test_counts_are_those_of_a_model_that_was_made(arm: str) -> None:
    for config in (small(arm, num_layers=3), small(arm, tie_word_embeddings=True)):
        model = CCQForCausalLM(config).eval().to(torch.bfloat16)
        assert parameter_count(config) == model.parameter_count
        tokens = config.max_position_embeddings if arm == "transformer" else 5
        with torch.no_grad():
            cache = model(random_tokens(1, tokens)).cache
        assert state_bytes(config) == cache.state_bytes


def test_state_is_that_of_the_paper_with_half_of_the_second_moments() -> None:
    """64 and 96 MiB a sequence at 1.3B, of which 63 MiB are memories and 31.6 MiB statistics, there; 15.9 MiB here."""
    megabyte = 2**20
    assert round(state_bytes(preset("gated-deltanet-1.3b")) / megabyte) == 64
    assert abs(state_bytes(preset("gated-deltanet+ccq-1.3b")) / megabyte - (95.6 - 31.6 / 2)) < 0.3
    added = state_bytes(preset("gla+ccq-1.3b")) - state_bytes(preset("gla-1.3b"))
    assert added == 21 * (6 * (256 * 257 // 2 + 256) * 4 + 8)
    assert added / (21 * 6 * 256 * 512 * 4) < 0.255


@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet"])
@pytest.mark.parametrize("scale", ["30m", "60m", "500m", "1.3b"])
def test_the_control_has_the_state_and_the_parameters_of_the_read_step(backbone: str, scale: str) -> None:
    wide, read = preset(f"{backbone}-wide-{scale}"), preset(f"{backbone}+ccq-{scale}")
    assert wide.arm == backbone
    assert abs(parameter_count(wide) / parameter_count(read) - 1) < 0.001
    # Whole second moments are matched exactly; totals and counts are not, nor the convolution of the larger values.
    heads, size, layers = wide.num_heads, wide.head_dim, wide.num_layers
    convolution = 0 if wide.short_convolution is None else 2 * 3 * heads * size
    assert state_bytes(wide) - state_bytes(preset(f"{backbone}-{scale}")) == layers * (
        4 * heads * size * size + convolution
    )
    unpacked = state_bytes(read) + layers * 4 * heads * size * (size - 1) // 2
    assert abs(state_bytes(wide) / unpacked - 1) < 0.01


def test_arithmetic_by_hand() -> None:
    # Two layers; hidden 12, two heads of D 4 and V 6, SwiGLU of 20, 23 tokens, convolutions of 4 taps.
    mlp, head = 2 * 3 * 12 * 20, 2 * 12 * 23
    projections = 2 * 12 * (8 + 8 + 12 + 12 + 12)
    convolutions = 2 * 4 * (8 + 8 + 12)
    decay = 2 * (12 * 16 + 16 * 8)
    gla = projections + convolutions + decay + 5 * 2 * 4 * 6 + mlp
    assert flops_per_token(small("gla")) == 2 * gla + head
    read = 4 * 2 * 4 * 4 + 2 * 2 * 8
    assert flops_per_token(small("gla+ccq")) == 2 * (gla + read) + head
    assert flops_per_token(small("gla+ccq", gate=0.1)) == 2 * (gla + 4 * 2 * 4 * 4) + head
    maps = 2 * (2 * 2 * 4 * 2)
    assert flops_per_token(small("gla-hedgehog")) == 2 * (gla + maps) + head
    delta = projections + convolutions + 2 * 12 * (2 + 2) + 7 * 2 * 4 * 6 + mlp
    assert flops_per_token(small("gated-deltanet")) == 2 * delta + head
    # Four heads with one group: gate and values 24 each, keys and queries 4 each, 4 steps; no SwiGLU.
    mamba = 2 * 12 * (24 + 24 + 4 + 4 + 4) + 2 * 24 * 12 + 2 * 4 * (24 + 4 + 4) + 5 * 4 * 4 * 6
    assert flops_per_token(small("mamba2")) == 2 * mamba + head
    attention = 2 * 12 * (8 + 8 + 12 + 12) + mlp
    assert flops_per_token(small("transformer"), context=10) == 2 * (attention + 2 * 2 * (4 + 6) * 10) + head
    assert flops_per_token(small("transformer")) == flops_per_token(small("transformer"), context=128)


@pytest.mark.parametrize("arm", ["gla", "gated-deltanet", "mamba2", "transformer"])
def test_matrix_products_are_those_that_torch_counts(arm: str) -> None:
    """torch counts the products of linear layers under mm and addmm; everything else of a layer is put aside."""
    config = small(arm)
    model, tokens = CCQForCausalLM(config).eval(), random_tokens(2, 8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False)
    counted = counter.get_flop_counts()["Global"]
    linear = sum(count for kind, count in counted.items() if str(kind) in ("aten.mm", "aten.addmm"))
    heads, size, value_size = config.num_heads, config.head_dim, config.value_head_dim
    rest = {
        "gla": 5 * heads * size * value_size + 2 * 4 * (2 * heads * size + heads * value_size),
        "gated-deltanet": 7 * heads * size * value_size + 2 * 4 * (2 * heads * size + heads * value_size),
        "mamba2": 5 * heads * size * value_size + 2 * 4 * (heads * value_size + 2 * size),
        "transformer": 2 * heads * (size + value_size) * 16,
    }[arm]
    assert linear == 16 * (flops_per_token(config, context=16) - config.num_layers * rest)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'gla-tiny'\?\); accepted: gla-tiny, gla\+ccq-tiny"):
        preset("gla-tinny")
    with pytest.raises(ValueError, match="unknown model option 'heads'"):
        preset("gla-tiny", heads=3)


def test_the_command_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(PRESETS)
    config = preset("gla+ccq-1.3b")
    assert rows["gla+ccq-1.3b"] == {
        "name": "gla+ccq-1.3b",
        "parameters": parameter_count(config),
        "state_bytes": state_bytes(config),
        "flops_per_token": flops_per_token(config),
    }
    assert main(["models"]) == 0
    assert re.search(r"gla\+ccq-1\.3b +1,387\.75 M +78\.93 MiB", capsys.readouterr().out)


def test_the_page_has_the_figures_of_the_command() -> None:
    """The table of docs/models.md, line by line."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) >= 20
    for name, parameters, state, operations in rows:
        config = preset(name)
        assert parameters == f"{parameter_count(config) / MILLION:.2f}", name
        assert state == f"{state_bytes(config) / 2**20:.2f}", name
        assert operations == f"{flops_per_token(config) / MILLION:.1f}", name
