"""Operators of torch made of Python functions, with as little as can be between the caller and the function.

`torch.library.custom_op` makes them too, and looks at every call for more than these functions need: for outputs that
share memory with inputs, for hooks, for trees in the arguments. Forward and backward that costs the processor about
80 us more than this does, which is what launching four kernels costs; a layer of a linear-attention model calls four to
ten operators, and at batch 1 the card waits for the processor. In a compiled model there is no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

NAMESPACE = "ccq"
_library = library.Library(NAMESPACE, "FRAGMENT")
_DEVICES = ("CPU", "CUDA")


class Operator:
    """An operator of the library, called like the function it is made of. Overwrites none of its arguments, and returns
    none of them. Where a gradient is wanted of one that has no formula for it, the backward pass raises RuntimeError.
    """

    def __init__(self, name: str, schema: str, function: Callable[..., Any]) -> None:
        self.name = f"{NAMESPACE}::{name}"
        self.__doc__ = function.__doc__
        _library.define(name + schema)
        # The compiler sees the operator; what happens in it is not for its eyes.
        for device in _DEVICES:
            _library.impl(name, torch._disable_dynamo(function), device)
        _library.impl(name, torch._disable_dynamo(lambda *arguments: self._run(*arguments)), "Autograd")
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), name).default
        self.register_autograd(self._refuse, setup_context=lambda *_: None)

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """`function` makes empty outputs of the right shapes, for the compiler."""
        library.register_fake(self.name, function, lib=_library)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Formulas as `torch.library.register_autograd` takes them."""
        run = self._run_below

        class Recorded(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                outputs = run(*arguments)
                setup_context(ctx, arguments, outputs)
                return outputs

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return backward(ctx, *gradients)

        self._recorded = Recorded

    def _run(self, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return self._recorded.apply(*arguments)
        return self._run_below(*arguments)

    def _run_below(self, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*arguments)

    def _refuse(self, *_: Any) -> None:
        raise RuntimeError(f"{self.name} has no derivative, and one is asked for: a gradient of a gradient, perhaps?")


def custom_operator(name: str, *, schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function the operator torch.ops.ccq.NAME; `schema` is written as for `torch.library.custom_op`."""
    return lambda function: Operator(name, schema, function)
