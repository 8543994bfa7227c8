"""The processes of a command: this one alone without torch.distributed, or any number of them under torchrun."""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Made = TypeVar("Made")
_CPU = torch.device("cpu")
TIMEOUT = datetime.timedelta(minutes=30)
"""How long a process waits for the others: long enough for the slowest to compile its kernels."""


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is, and what they do together. Alone, nothing is communicated."""

    rank: int = 0
    count: int = 1
    device: torch.device = _CPU
    mesh: DeviceMesh | None = None
    checkpoint_group: dist.ProcessGroup | None = None
    """A group of its own for the thread that writes checkpoints beside the training."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Sums over the processes. They go through the processors, so that no GPU has to be waited for."""
        if self.count == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(total)
        return [int(each) for each in total]

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place, on the device."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.count > 1:
            self.sum([0])

    def from_first(self, make: Callable[[], Made]) -> Made:
        """What `make` returns in the first process, in all of them; also what it raises."""
        if self.count == 1:
            return make()
        found = [_attempt(make) if self.is_first else None]
        dist.broadcast_object_list(found, src=0, device=_CPU)
        assert found[0] is not None
        return found[0].result()

    def gather(self, make: Callable[[], Made]) -> list[Made]:
        """What `make` returns in each process, in the order of their ranks, in all of them. What it raises in one, all
        raise: the error of the first process that has one.
        """
        if self.count == 1:
            return [make()]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, _attempt(make))
        return [each.result() for each in found]


class _Attempt(NamedTuple):
    """What a call returned or raised."""

    value: Any
    error: Exception | None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def _attempt(make: Callable[[], Any]) -> _Attempt:
    try:
        return _Attempt(make(), None)
    except Exception as error:  # raised in every process
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # such as one whose class wants more arguments than it passes on
            return _Attempt(None, RuntimeError(f"{type(error).__name__}: {error}"))
        return _Attempt(None, error)


@contextmanager
def processes(*, connect: bool = True) -> Iterator[Processes]:
    """The processes that torchrun has started, or this one alone. Without `connect` they are only counted."""
    use_gpu = torch.cuda.is_available()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(device=torch.device("cuda" if use_gpu else "cpu"))
        return
    if not connect:
        yield Processes(int(os.environ["RANK"]), count, torch.device("cuda" if use_gpu else "cpu"))
        return
    device = torch.device("cpu")
    if use_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo", timeout=TIMEOUT)
    try:
        yield Processes(
            rank=dist.get_rank(),
            count=count,
            device=device,
            mesh=init_device_mesh(device.type, (count,)),
            checkpoint_group=dist.new_group(backend="gloo", timeout=TIMEOUT),
        )
    finally:
        dist.destroy_process_group()
