"""Forward and backward pass of a micro-batch as a CUDA graph, so that a small model trains at the speed of the device.

A step of a small model is many hundreds of operations of microseconds each, and the processor that launches them one
by one takes longer than the GPU. A graph launches the same kernels on the same numbers in the same order, so losses,
gradients and weights are bit for bit those of a step without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ccq.cuda_graphs import GraphRecorder
from ccq.ops.linear_cross_entropy import WeightedLoss
from ccq.processes import Processes


class RecordingError(ValueError):
    """Forward and backward pass cannot be recorded; the message says why."""


def check_cuda_graph(processes: Processes) -> None:
    """Refuse where no forward and backward pass can be recorded.

    Raises:
        ValueError: there are several processes, or there is no GPU.
    """
    if processes.count > 1:
        raise ValueError(
            f"cuda_graph takes one process, got {processes.count}: between the blocks FSDP gathers weights and sums "
            "gradients; leave cuda_graph out"
        )
    if processes.device.type != "cuda":
        raise ValueError(f"cuda_graph needs a GPU, got the device {processes.device}; leave cuda_graph out")


class _Recorded(NamedTuple):
    """The passes of one shape. Tensors stay where they are; the graph reads and writes them there."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    losses: Tensor
    parameters: tuple[nn.Parameter, ...]
    """Those that a gradient reaches."""
    replay: Callable[[], None]


class GraphedPasses:
    """Forward and backward pass of a loss, recorded at the first micro-batch of every shape [B, T].

    A recording is fixed: it reads the parameters from where they are now, whatever their values, and knows nothing of
    hooks, observers and interventions that are put on the model later. The memory of the largest shape stays taken.

    Args:
        loss: takes inputs, targets, weights and None, as `NextTokenLoss` does.
        parameters: of the loss.
        device: the GPU.
    """

    def __init__(
        self, loss: Callable[..., WeightedLoss], parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        self._loss = loss
        self._parameters = tuple(parameters)
        self._recorder = GraphRecorder(device)
        self._recorded: dict[torch.Size, _Recorded] = {}
        # Not of the parameters between steps, when their gradients are None, as without a graph.
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def __call__(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Add the gradients of a micro-batch to those that are there.

        Args:
            inputs, targets: int64 [B, T].
            weights: float32 [B, T], see `linear_cross_entropy`.

        Returns:
            [B * T], the loss of every target. The next call of this shape writes over it.

        Raises:
            RecordingError: the passes of this shape cannot be recorded.
        """
        recorded = self._recorded.get(inputs.shape)
        if recorded is None:
            recorded = self._recorded[inputs.shape] = self._record(inputs, targets, weights)
        recorded.inputs.copy_(inputs)
        recorded.targets.copy_(targets)
        recorded.weights.copy_(weights)
        self._attach_gradients(recorded.parameters)
        recorded.replay()
        return recorded.losses

    def _attach_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters that have no gradient yet their place for it, with zeros."""
        fresh = [parameter for parameter in parameters if parameter.grad is None]
        for parameter in fresh:
            parameter.grad = self._gradients[parameter]
        if fresh:
            torch._foreach_zero_([self._gradients[parameter] for parameter in fresh])

    def _record(self, *given: Tensor) -> _Recorded:
        inputs, targets, weights = (each.clone() for each in given)

        def passes() -> Tensor:
            loss = self._loss(inputs, targets, weights, None)
            loss.total.backward()
            return loss.each

        # An earlier micro-batch of this step, of another shape, may have left gradients.
        before = [parameter.grad for parameter in self._parameters]
        try:
            self._set_gradients(None for _ in self._parameters)
            # What fails here fails without a graph too.
            losses = torch.empty_like(self._recorder.run(passes, may_wait=True))
            try:
                # Gradients are there now and are added to, as in the recording.
                self._recorder.run(passes, may_wait=False)
                reached = tuple(parameter for parameter in self._parameters if parameter.grad is not None)
                for parameter in reached:
                    if parameter not in self._gradients:
                        self._gradients[parameter] = torch.zeros_like(parameter)
                    parameter.grad = self._gradients[parameter]
                replay = self._recorder.record(lambda: losses.copy_(passes()))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                rows, length = inputs.shape
                raise RecordingError(
                    f"forward and backward pass of {rows} windows of {length} tokens cannot be recorded as a CUDA "
                    f"graph ({_first_line(error)}); leave cuda_graph out"
                ) from error
        finally:
            self._set_gradients(before)
        return _Recorded(inputs, targets, weights, losses, reached, replay)

    def _set_gradients(self, gradients: Iterable[Any]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
