"""One optimizer step, the same for every kind of run: on one process or many, with one micro-batch or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ccq.data.loader import IGNORE_INDEX, TokenBatch
from ccq.models.configuration import CCQConfig
from ccq.models.modeling import CCQForCausalLM
from ccq.ops.linear_cross_entropy import WeightedLoss, linear_cross_entropy
from ccq.processes import Processes
from ccq.train.config import OptimizerRecipe
from ccq.train.distributed import Placed
from ccq.train.graph import GraphedPasses, RecordingError, check_cuda_graph
from ccq.train.optimizer import make_optimizers, no_gradients, set_learning_rate

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TargetBatch:
    """Inputs, targets, and which targets belong to which part of the loss.

    The loss of a step is the sum over the parts of the mean over their targets; a mean is over the targets of all
    micro-batches and processes together.
    """

    inputs: Tensor
    """int64 [B, T]; of packed documents [1, B * T]."""
    targets: Tensor
    """int64, as inputs: the token after each input."""
    parts: Mapping[str, Tensor]
    """bool, as inputs, by the name of the part."""
    cu_seqlens: Tensor | None = None
    """int32 [N + 1], where packed documents start."""

    @classmethod
    def of_tokens(cls, batch: TokenBatch) -> TargetBatch:
        """One part, "loss": every target that counts."""
        return cls(batch.inputs, batch.targets, {"loss": batch.targets != IGNORE_INDEX}, batch.cu_seqlens)

    def to(self, device: torch.device) -> TargetBatch:
        return TargetBatch(
            self.inputs.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            {name: mask.to(device, non_blocking=True) for name, mask in self.parts.items()},
            None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class StepResult:
    losses: dict[str, float]
    """Mean of every part over all processes, in nats a target."""
    grad_norm: float
    """Before clipping."""
    flags: tuple[int, ...] = ()
    """Sums over the processes of the flags that each gave."""

    @property
    def loss(self) -> float:
        return sum(self.losses.values())

    @property
    def is_finite(self) -> bool:
        """Whether the step was taken: weights and optimizer are as before if not."""
        return bool(torch.isfinite(torch.tensor([self.loss, self.grad_norm])).all())


class NextTokenLoss(nn.Module):
    """The model with its loss on top, so that the head is never applied to all tokens at once."""

    def __init__(self, model: CCQForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, weights: Tensor, cu_seqlens: Tensor | None) -> WeightedLoss:
        """inputs, targets int64 and weights float32, all [B, T] -> see `linear_cross_entropy`."""
        hidden = self.model.model(input_ids=inputs, use_cache=False, cu_seqlens=cu_seqlens).last_hidden_state
        head = self.model.lm_head.weight
        return linear_cross_entropy(hidden.flatten(0, 1), head, targets.flatten(), weights.flatten())


def initial_model(config: CCQConfig, seed: int, device: torch.device | str = "cpu") -> CCQForCausalLM:
    """The model of a seed before the first step, drawn on `device`. The caller's random streams are left as they were.

    The read step draws nothing, so both arms of a pair start from the same weights bit for bit, and every process of a
    run draws the same.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return CCQForCausalLM(config)


class _Block(nn.Module):
    """A block by the forward pass that it has now."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, *arguments: Any) -> Any:
        return self._forward(*arguments)


def _recomputed(block: nn.Module, processes: Processes) -> Callable[..., Any]:
    """The forward pass of a block that is computed again in the backward pass."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if processes.count > 1:
        # FSDP puts the weights of a block in place whenever it is computed.
        return partial(again, block.forward)
    inner = _Block(block)

    def forward(*arguments: Any) -> Any:
        # The copies in lower precision that `Placed` has put in place; when the pass is repeated it has taken them out.
        return again(functional_call, inner, dict(inner.named_parameters()), arguments)

    return forward


@dataclass
class Engine:
    """A model, its optimizer, and the step that both take.

    Args:
        model: in float32, the same in every process.
        optimizer: the recipe of the optimizer.
        processes: that take part.
        dtype: of the computation, one of `DTYPES`.
        compile: torch.compile every block.
        activation_checkpointing: recompute every block in the backward pass.
        reshard_after_forward: see `Placed`.
        cuda_graph: run forward and backward pass of a micro-batch as a CUDA graph, see `GraphedPasses`. Takes one
            process, a GPU, and windows without packed documents. A step is the same bit for bit.
        on_eager: told why where the passes cannot be recorded; they then run as without `cuda_graph`. None makes that
            an error.

    Raises:
        ValueError: `cuda_graph` is asked for without a GPU or of several processes; from `step`, of packed documents,
            or (a `RecordingError`) where the passes cannot be recorded.
    """

    model: CCQForCausalLM
    optimizer: OptimizerRecipe
    processes: Processes = field(default_factory=Processes)
    dtype: str = "float32"
    compile: bool = False
    activation_checkpointing: bool = False
    reshard_after_forward: bool = False
    cuda_graph: bool = False
    on_eager: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.cuda_graph:
            check_cuda_graph(self.processes)
        model = self.model.train()
        # The forward pass alone is replaced, so that what FSDP hangs on a block stays outside.
        for layer in model.model.layers:
            if self.compile:
                layer.forward = torch.compile(layer.forward)
            if self.activation_checkpointing:
                layer.forward = _recomputed(layer, self.processes)
        self._loss = Placed(
            NextTokenLoss(model),
            model.model.layers,
            self.processes,
            dtype=DTYPES[self.dtype],
            reshard_after_forward=self.reshard_after_forward,
        )
        self._graphs: GraphedPasses | None = None
        if self.cuda_graph:
            self._graphs = GraphedPasses(self._loss, model.parameters(), self.processes.device)
        self.optimizers = make_optimizers(model.named_parameters(), self.optimizer)

    def step(
        self, micro_batches: Sequence[TargetBatch], learning_rate: float, *, flags: Sequence[int] = ()
    ) -> StepResult:
        """One optimizer step on the micro-batches of this process.

        Every process must call it, with the same number of micro-batches and the same parts. Where loss or gradient is
        not finite, nothing is changed.

        Args:
            flags: what this process has to tell the others, such as that it was asked to stop.
        """
        names = sorted({name for batch in micro_batches for name in batch.parts})
        own = [sum(int(batch.parts[name].sum()) for batch in micro_batches) for name in names]
        sums = self.processes.sum([*own, *flags])
        counts = sums[: len(names)]
        device = self.processes.device
        losses = torch.zeros(len(names), dtype=torch.float32, device=device)
        for number, batch in enumerate(micro_batches):
            moved = batch.to(device)
            weights = torch.zeros(batch.inputs.shape, dtype=torch.float32, device=device)
            for name, count in zip(names, counts, strict=True):
                # A part without any target in this step is no part of its loss.
                weights += moved.parts[name].float() / max(count, 1)
            with self._loss.micro_batch(last=number == len(micro_batches) - 1):
                each = self._passes(moved, weights)
            for place, (name, count) in enumerate(zip(names, counts, strict=True)):
                losses[place] += torch.dot(each, moved.parts[name].flatten().to(each.dtype)) / max(count, 1)
        self.processes.sum_(losses)
        norm = self._loss.clip_gradients(self.optimizer.gradient_clip)
        found = torch.cat((losses, norm.to(torch.float32).reshape(1))).tolist()
        result = StepResult(dict(zip(names, found[:-1], strict=True)), found[-1], tuple(sums[len(names) :]))
        if result.is_finite:
            set_learning_rate(self.optimizers, learning_rate)
            for optimizer in self.optimizers:
                optimizer.step()
        no_gradients(self.model)
        return result

    def _passes(self, batch: TargetBatch, weights: Tensor) -> Tensor:
        """Forward and backward pass of a micro-batch: [B * T], the loss of every target."""
        if self._graphs is not None:
            if batch.cu_seqlens is not None:
                raise ValueError(
                    "cuda_graph takes windows without packed documents, whose places are read on the processor; leave "
                    "cuda_graph out"
                )
            try:
                return self._graphs(batch.inputs, batch.targets, weights)
            except RecordingError as error:
                if self.on_eager is None:
                    raise
                self.on_eager(str(error))
                self._graphs = None
        loss: WeightedLoss = self._loss(batch.inputs, batch.targets, weights, batch.cu_seqlens)
        loss.total.backward()
        return loss.each

    @torch.no_grad()
    def measure(self, batches: Iterable[TargetBatch]) -> float:
        """Mean loss over all targets of one part, "loss", of all batches and processes, in nats a target. Nothing is
        learned or drawn. Every process must call it, with the same number of batches.
        """
        device = self.processes.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.compiler.set_stance("force_eager"):
            for batch in batches:
                moved = batch.to(device)
                counted = moved.parts["loss"]
                loss: WeightedLoss = self._loss(moved.inputs, moved.targets, counted.float(), moved.cu_seqlens)
                total += torch.stack((loss.each.double().sum(), counted.double().sum()))
        loss_sum, targets = self.processes.sum_(total).tolist()
        return loss_sum / targets

    @torch.no_grad()
    def look(self, batch: TargetBatch, length: int) -> None:
        """A forward pass of one window of a micro-batch, for whoever observes the read steps. Every process must call
        it.
        """
        inputs, cu_seqlens = batch.inputs[:1, :length], batch.cu_seqlens
        if cu_seqlens is not None:
            # Boundaries stand at the start of every window, so the first window ends at one of them.
            cu_seqlens = cu_seqlens[cu_seqlens <= length].to(self.processes.device)
        inputs = inputs.to(self.processes.device)
        nothing = torch.zeros_like(inputs)
        with torch.compiler.set_stance("force_eager"):
            self._loss(inputs, nothing, nothing.float(), cu_seqlens)
