"""Recording work on a GPU as CUDA graphs, in one place for training and benchmarks.

A graph launches recorded kernels at once, where the processor would launch them one by one. Whatever the processor does
between them is not repeated, and nothing in it may wait for the GPU or look at a number that is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


class GraphRecorder:
    """Records graphs on one stream. They share the memory between their kernels, so none may be replayed while another
    is running, and what a graph leaves there holds until the next replay of any.

    Args:
        device: the GPU; without a number the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, work: Callable[[], Made], *, may_wait: bool) -> Made:
        """Call `work` as it will be recorded. The first call compiles, tunes, and loads kernels, which no recording
        may do.

        Args:
            may_wait: False makes it an error if `work` waits for the GPU: a copy from or to the processor, `item`,
                `nonzero`. In a recording such a wait would spoil the state of torch's allocator; here it costs nothing.

        Raises:
            RuntimeError: torch's own, where `work` waits and must not.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), nullcontext() if may_wait else _waiting_refused():
                return work()
        finally:
            current.wait_stream(self._stream)

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        """A function that replays what `work` launches on the GPU. Nothing is computed now. The caller keeps alive all
        tensors from outside that `work` reads or writes.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        try:
            # What other threads do meanwhile, such as writing a checkpoint, is no part of it.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            # Where the recording cannot be ended, torch leaves its stream the current one.
            torch.cuda.set_stream(current)
            raise
        return graph.replay


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Inside the block, waiting for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch calls it a prototype that does not see every way to wait.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
