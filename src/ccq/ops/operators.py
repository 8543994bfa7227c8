"""Operators of torch made of Python functions, with as little as can be between the caller and the function.

torch's `custom_op` makes them too, and looks at every call for more than these functions need: for outputs that share
memory with inputs (which its `opcheck` does in the tests), for hooks, for trees in the arguments.
Forward and backward that costs the processor about 80 us more than this does, which is what launching four kernels
costs; a layer of a linear-attention model calls four to ten operators, and at batch 1 the card waits for the processor.
In a compiled model there is no difference.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

NAMESPACE = "ccq"
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
"""Whether operators can have kernels in Triton."""
_library = library.Library(NAMESPACE, "FRAGMENT")
_DEVICES = ("CPU", "CUDA")


class Operator:
    """An operator of the library, called like the function it is made of. Overwrites those of its arguments that the
    schema says, "Tensor(a!)", and returns none of them. Derivatives that there is no formula for (the second, those of
    forward mode, and any of an operator that overwrites) are refused with a RuntimeError, not taken for zero.
    """

    def __init__(self, name: str, schema: str, function: Callable[..., Any]) -> None:
        self.name = f"{NAMESPACE}::{name}"
        self.__doc__ = function.__doc__
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        # The compiler sees the operator; what happens in it is not for its eyes.
        for device in _DEVICES:
            _library.impl(name, torch._disable_dynamo(function), device)
        _library.impl(name, torch._disable_dynamo(lambda *arguments: self._run(*arguments)), "Autograd")
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), name).default
        self.register_autograd(self._refuse, setup_context=lambda *_: None)
        self._returns_list = [str(each.type) for each in self.overload._schema.returns] == ["List[Tensor]"]
        aliases = [argument.alias_info for argument in self.overload._schema.arguments]
        self._overwritten = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]
        if self._overwritten:
            _library.impl(name, self._count_versions, "ADInplaceOrView", with_keyset=True)

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """`function` makes empty outputs of the right shapes, for the compiler."""
        library.register_fake(self.name, function, lib=_library)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None], passed: int | None = None
    ) -> None:
        """`backward(ctx, *gradients)` and `setup_context(ctx, inputs, output)`, as for torch's `register_autograd`.
        `passed` is the argument that `with_passed` hands on; its gradient then comes behind those of the outputs.
        """
        self._passed = passed
        self._recorded = self._function(backward, setup_context, None)
        self._recorded_with_passed: Any = None if passed is None else self._function(backward, setup_context, passed)

    def with_passed(self, *arguments: Any) -> Any:
        """The outputs and, behind them, the argument `passed`, so that `backward` gets the gradient that reaches it, to
        add it where it writes its own. Without gradients, and in a compiled graph, the argument itself.
        """
        assert self._passed is not None
        passed = arguments[self._passed]
        recorded = torch.is_grad_enabled() and passed.requires_grad and not torch.compiler.is_compiling()
        if not recorded:
            return *_several(self.overload(*arguments)), passed
        self._refuse_tangents(arguments)
        return self._recorded_with_passed.apply(*arguments)

    def _function(self, backward: Callable[..., Any], setup_context: Callable[..., None], passed: int | None) -> Any:
        """The autograd.Function of the operator, which returns the argument number `passed` as well."""

        def forward(ctx: Any, *arguments: Any) -> Any:
            outputs = self._run_below(*arguments)
            setup_context(ctx, arguments, outputs)
            return outputs if passed is None else (*_several(outputs), arguments[passed].view_as(arguments[passed]))

        methods = {
            "forward": staticmethod(forward),
            "backward": staticmethod(differentiable_once(self.name)(backward)),
        }
        # The name is that of the node in a graph.
        return type(self.name.replace("::", "_"), (torch.autograd.Function,), methods)

    def _count_versions(self, keys: Any, *arguments: Any) -> Any:
        """Autograd learns that what it may have saved is another now."""
        for i in self._overwritten:
            torch.autograd.graph.increment_version(arguments[i])
        return self.overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)

    def _run(self, *arguments: Any) -> Any:
        self._refuse_tangents(arguments)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return self._run_below(*arguments)
        if self._overwritten:
            raise RuntimeError(f"{self.name} overwrites an argument and has no derivative: call it in torch.no_grad()")
        if not self._returns_list and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return self._recorded.apply(*arguments)
        # Of tensors in a list, given or returned, a Function knows nothing.
        found = _refusing(self._run_below(*arguments), self.name)
        return list(found) if self._returns_list else found

    def _run_below(self, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*arguments)

    def _refuse_tangents(self, arguments: tuple[Any, ...]) -> None:
        if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in arguments):
            self._refuse()

    def _refuse(self, *_: Any) -> None:
        _refuse(self.name)


def differentiable_once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the backward pass of an autograd.Function, under its staticmethod: what it returns cannot be differentiated.

    torch's `once_differentiable` refuses where the gradients that arrive have a history, and takes the result for a
    constant where they have none, as behind a sum, though it depends on what was saved.
    """

    def wrap(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            # With create_graph.
            with torch.no_grad():
                found = backward(ctx, *gradients)
            return found if torch.compiler.is_compiling() else _refusing(found, name)

        return once

    return wrap


def _refuse(name: str) -> None:
    raise RuntimeError(
        f"{name} has no derivative, and one is asked for: a gradient of a gradient, or one in forward mode?"
    )


def _refusing(found: Any, name: str) -> Any:
    """The same gradients, as results of something that cannot be differentiated."""
    methods = {
        "forward": staticmethod(lambda ctx, x: x.view_as(x)),
        "backward": staticmethod(lambda *_: _refuse(name)),
    }
    mark: Any = type(f"{name.replace('::', '_')}_gradient", (torch.autograd.Function,), methods)
    one = isinstance(found, Tensor)
    marked = [x if x is None else mark.apply(x.detach().requires_grad_()) for x in ((found,) if one else found)]
    return marked[0] if one else tuple(marked)


def _several(outputs: Any) -> tuple[Any, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def custom_operator(name: str, *, schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function the operator torch.ops.ccq.NAME; `schema` is written as for torch's `custom_op`."""
    return lambda function: Operator(name, schema, function)
