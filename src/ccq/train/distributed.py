"""A model over the processes of a run: as it is in one, sharded by FSDP2 over several."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ccq.processes import Processes

_FLOAT32 = ("A_log", "D", "dt_bias", "gate_weight", "gate_bias", "gate_scale", "landmarks", "ridge", "strength")


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
