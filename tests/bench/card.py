"""A card for the tests of the benchmarks."""

from __future__ import annotations

import itertools

import torch

from ccq.bench.measure import Card


class Cpu(Card):
    """A processor whose memory grows by 1000 bytes a look, and peaks 500 above."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.memory = itertools.count(0, 1000)

    def synchronize(self) -> None:
        pass

    def allocated(self) -> int:
        return next(self.memory)

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int:
        return next(self.memory) + 500

    def release(self) -> None:
        pass
