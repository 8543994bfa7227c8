"""The processes of a run: alone without torch.distributed, or any number of them under torchrun with FSDP2."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

_CPU = torch.device("cpu")
TIMEOUT = datetime.timedelta(minutes=30)
"""How long a process waits for the others: long enough for the slowest to compile its kernels."""
_FLOAT32 = ("A_log", "D", "dt_bias", "gate_weight", "gate_bias", "gate_scale", "landmarks", "ridge", "strength")


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

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns in the first process, in all of them; also what it raises."""
        if self.count == 1:
            return make()
        found: list[Any] = [None, None]
        if self.is_first:
            try:
                found[0] = make()
            except Exception as error:  # raised below, in every process
                found[1] = error
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        if found[1] is not None:
            raise found[1]
        return found[0]


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


def float32_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are never computed with in lower precision: those of the decay (A_log, dt_bias, and D of
    Mamba2), whose exponentials bfloat16 would move by percents, and those of the gate. Known by their names, because
    loaders and FSDP put other parameters in the place of the first ones.
    """
    return {name: each for name, each in module.named_parameters() if name.rpartition(".")[2] in _FLOAT32}


class Placed:
    """A module where it computes: called like it, in lower precision, with its weights in float32.

    Alone, a call computes with copies of the weights in `dtype`; the gradients are added up in float32. Over several
    processes FSDP2 does that with its mixed precision policy, and shards what it copies: weights, gradients and
    optimizer. Both leave the parameters of `float32_parameters` as they are. Those are few, so every process keeps them
    whole: a policy of their own would make each of them a communication of its own.

    Args:
        module: its parameters are float32 (or float64, without lower precision).
        blocks: the parts of it that are sharded, gathered and freed together, in the order in which they are called.
        dtype: of the computation.
        reshard_after_forward: free the gathered weights of a block between forward and backward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        processes: Processes,
        *,
        dtype: torch.dtype,
        reshard_after_forward: bool = False,
    ) -> None:
        self.module, self.processes = module, processes
        self._whole = float32_parameters(module)
        self._dtype = dtype
        if processes.count == 1:
            return
        lower = dtype if dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32, cast_forward_inputs=False)
        ignored = set(self._whole.values())
        for block in blocks:
            fully_shard(
                block,
                mesh=processes.mesh,
                mp_policy=policy,
                ignored_params=ignored,
                reshard_after_forward=reshard_after_forward,
            )
        fully_shard(module, mesh=processes.mesh, mp_policy=policy, ignored_params=ignored)
        for each in self._sharded_modules():
            # The loss is divided by the number of targets of all processes, so gradients are summed.
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)

    def __call__(self, *arguments: Any) -> Any:
        if self.processes.count > 1:
            with warnings.catch_warnings():
                # Nothing changes the output of a block in place.
                warnings.filterwarnings("ignore", message=".* returned a view tensor", category=UserWarning)
                return self.module(*arguments)
        if self._dtype == torch.float32:
            return self.module(*arguments)
        copies = {
            name: parameter.to(self._dtype)
            for name, parameter in self.module.named_parameters()
            if name not in self._whole and parameter.dtype == torch.float32
        }
        return functional_call(self.module, copies, arguments)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward pass of a micro-batch. Gradients are communicated after the last one only."""
        if self.processes.count > 1:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(last)
        yield
        if last and self.processes.count > 1:
            self._sum_whole_gradients()

    def _sum_whole_gradients(self) -> None:
        """The sum over the processes of the gradients that FSDP leaves alone, in one communication."""
        parameters = [each for each in self._whole.values() if each.requires_grad]
        if not parameters:
            return
        # A parameter without gradient here may have one in another process.
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        total = self.processes.sum_(torch.cat([each.flatten() for each in gradients]))
        for parameter, part in zip(parameters, total.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        return (each for each in self.module.modules() if isinstance(each, FSDPModule))

    def clip_gradients(self, largest: float) -> Tensor:
        """Scale all gradients together so that their Euclidean norm is at most `largest`. Returns the norm before."""
        by_kind: dict[bool, list[Tensor]] = {}
        parameters = [each for each in self.module.parameters() if each.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            by_kind.setdefault(isinstance(parameter.grad, DTensor), []).append(parameter.grad)
        norms = [nn.utils.get_total_norm(gradients) for gradients in by_kind.values()]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        norm = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
        for kind in by_kind:
            same = [each for each in parameters if isinstance(each.grad, DTensor) == kind]
            nn.utils.clip_grads_with_norm_(same, largest, norm)
        return norm
