"""First derivatives of what runs on many ranks; a second one is refused in words that say so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

SECOND = (
    "a derivative of a derivative was requested of a model that autopar has compiled: the gradients of its collectives "
    "and experts have none. Compute the first derivative inside of forward with "
    "torch.autograd.grad(..., create_graph=True), which is captured with the model, or call backward() without "
    "create_graph."
)

FunctionClass = TypeVar("FunctionClass", bound=type[torch.autograd.Function])


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Function's backward to run without a graph; its results then have no derivative, as with torch's.

    If no output has a gradient, as for a loss that does not depend on them, the wrapped backward returns no gradients.
    That concerns a Function that does not materialize gradients.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if grad is not None:
                break
        else:
            return (None,) * len(ctx.needs_input_grad)
        return differentiated_once(backward, ctx, grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run


def differentiated_once(backward: Callable[..., Any], ctx: Any, grads: Sequence[Any]) -> Any:
    """Run a backward without a graph, although gradients are on; its results have no derivative."""
    with torch.no_grad():
        found = backward(ctx, *grads)
    if not any(isinstance(x, Tensor) and x.requires_grad for x in grads):
        return found
    outputs = found if isinstance(found, tuple) else (found,)
    given = [x.detach().requires_grad_() for x in outputs if x is not None]
    marked = torch._C._functions.DelayedError(SECOND.encode(), len(given))(*given)  # pyright: ignore[reportAttributeAccessIssue]
    each = iter(marked if isinstance(marked, tuple) else (marked,))
    return tuple(None if x is None else next(each) for x in outputs)


def called_directly(function: FunctionClass) -> FunctionClass:
    """Let the autograd engine call the backward of a Function that runs often without Python code of PyTorch's."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return function


def is_requested(ctx: Any, position: int) -> bool:
    """Return whether the running backward must give the gradient of the tensor that its Function took at a position.

    A stage of a pipeline requests gradients of its inputs, and later those of its weights, which a Function that
    takes both would make twice. Compiled code makes all that any call needs.
    """
    if torch.compiler.is_compiling():
        return True
    node, _ = ctx.next_functions[position]
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for a leaf that torch.autograd.grad differentiates
        return True
