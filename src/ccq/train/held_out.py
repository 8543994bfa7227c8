"""The windows on which the loss is measured during training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ccq.data.loader import TokenWindows
from ccq.data.shards import TokenStream
from ccq.train.engine import TargetBatch


class HeldOutWindows:
    """The first windows of a stream, dealt to the processes in batches, in the order of the text.

    Args:
        stream: such as `TokenFolder.held_out`.
        length: input tokens T of a window.
        tokens: of all windows together, at most; at least one window is read.
        rows: windows of a batch.
        process, processes: which of how many processes this is.
        pack_documents: whether sequences restart at each document (see `ccq.data.TokenBatch`).

    Raises:
        ValueError: the stream is too short for one window.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        length: int,
        tokens: int,
        rows: int,
        process: int = 0,
        processes: int = 1,
        pack_documents: bool = False,
    ) -> None:
        self._windows = TokenWindows(stream, length)
        self._count = max(min(tokens // length, len(self._windows)), 1)
        self._rows, self._process, self._processes = rows, process, processes
        self._pack_documents = pack_documents

    def batches(self) -> Iterator[TargetBatch]:
        """Those of this process: as many as those of any other. Where windows run out, nothing in a batch counts."""
        for first in range(0, self._count, self._rows * self._processes):
            start = first + self._rows * self._process
            own = range(start, min(start + self._rows, self._count))
            batch = self._windows.batch(own or range(1), pack_documents=self._pack_documents)
            targets = TargetBatch.of_tokens(batch)
            if not own:
                targets = dataclasses.replace(targets, parts={"loss": torch.zeros_like(targets.parts["loss"])})
            yield targets
