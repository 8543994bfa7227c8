"""Looking at the read steps of a model while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ccq.models.modeling import CCQPreTrainedModel
from ccq.nn.read import ReadObservation


@contextmanager
def observe_reads(model: CCQPreTrainedModel) -> Iterator[list[list[ReadObservation]]]:
    """Inside the block, one list per layer collects what its read step did at every call; empty for an arm without."""
    reads = model.read_steps()
    observed: list[list[ReadObservation]] = [[] for _ in reads]
    before = [read.observer for read in reads]
    try:
        for read, collected in zip(reads, observed, strict=True):
            read.observer = collected.append
        yield observed
    finally:
        for read, observer in zip(reads, before, strict=True):
            read.observer = observer
