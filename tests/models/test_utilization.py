"""The arithmetic of a training step counted by hand, and the rates of cards."""

from __future__ import annotations

import pytest

from ccq.models import ARMS, preset
from ccq.models.utilization import card_peak_flops, model_flops_utilization, training_flops_per_token


def test_operations_of_gated_linear_attention_by_hand() -> None:
    """Projections of the 1.3B model, five operations a cell of the memory, four of the second moment; times 3."""
    hidden, inner, heads, size, value = 2048, 5632, 6, 256, 512
    keys, values = heads * size, heads * value
    projections = hidden * (2 * keys + 2 * values) + hidden * 16 + 16 * keys + values * hidden + 3 * hidden * inner
    backbone = 2 * projections + 5 * heads * size * value
    head = 2 * 32_000 * hidden
    assert training_flops_per_token(preset("gla-1.3b"), 4096) == 3 * (21 * backbone + head)
    read = 4 * heads * size * size + 2 * heads * keys
    assert training_flops_per_token(preset("gla+ccq-1.3b"), 4096) == 3 * (21 * (backbone + read) + head)


def test_only_softmax_attention_does_more_for_longer_windows() -> None:
    for arm in ARMS:
        short, long = (training_flops_per_token(preset(f"{arm}-tiny"), length) for length in (256, 512))
        # Two layers, two heads of 32 + 32: a multiplication and an addition for each of 128 more positions.
        assert long - short == (3 * 2 * 2 * 2 * (32 + 32) * 128 if arm == "transformer" else 0)


def test_utilization_is_the_share_of_the_dense_peak() -> None:
    """The issue's aim: 55,000 tokens/s of gla+ccq-1.3b on an H200 are somewhat more than 40 %."""
    flops = training_flops_per_token(preset("gla+ccq-1.3b"), 4096)
    share = model_flops_utilization(flops, 55_000, card_peak_flops("NVIDIA H200"))
    assert share == pytest.approx(55_000 * flops / 989e12)
    assert 0.4 < share < 0.5
    assert model_flops_utilization(flops, 55_000, None) is None


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA B200", 2250e12),
        ("A card of tomorrow", None),
    ],
)
def test_cards_are_known_by_their_names(card: str, peak: float | None) -> None:
    assert card_peak_flops(card) == peak
