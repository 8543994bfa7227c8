"""How much of a card's rate a model uses: the rates of cards, and the arithmetic of a training step."""

from __future__ import annotations

from ccq.models.configuration import CCQConfig
from ccq.models.counts import flops_per_token

PEAK_FLOPS = {
    # The more special name first: the boards differ in clock.
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""Dense bfloat16 operations a second by a part of the card's name, from NVIDIA's data sheets. Some of these print the
rate for matrices half of zeros, which is twice as much."""


def card_peak_flops(card: str) -> float | None:
    """Of the card of this name, as its driver gives it; None if it is not in the table."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in card), None)


def training_flops_per_token(config: CCQConfig, length: int) -> int:
    """Operations of a training step for one token: forward pass, and twice that for the backward pass.

    Those of the model itself, see `ccq.models.counts.flops_per_token`: what is computed again (activation
    checkpointing, chunked forms) does not count. Softmax attention sees half of the window of `length` on average.
    """
    return 3 * flops_per_token(config, context=length // 2)


def model_flops_utilization(training_flops: int, tokens_per_second: float, peak: float | None) -> float | None:
    """Share of a device's peak that goes into the model (MFU; A. Chowdhery et al., PaLM, arXiv:2204.02311).

    Args:
        training_flops: for one token, see `training_flops_per_token`.
        tokens_per_second: trained on this one device.
        peak: of the device, see `card_peak_flops`; None, where it is not known, gives None.
    """
    return None if peak is None else training_flops * tokens_per_second / peak
