"""Looking at the read steps of a model while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ccq.models.intervention import read_steps
from ccq.nn.read import ReadObservation


@contextmanager
def observe_reads(model: nn.Module) -> Iterator[list[list[ReadObservation]]]:
    """Inside the block, one list per layer collects what its read step did at every call; empty for a model without
    any.
    """
    reads = read_steps(model)
    observed: list[list[ReadObservation]] = [[] for _ in reads]
    before = [read.observer for read in reads]
    try:
        for read, collected in zip(reads, observed, strict=True):
            read.observer = collected.append
        yield observed
    finally:
        for read, observer in zip(reads, before, strict=True):
            read.observer = observer
