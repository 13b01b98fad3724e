"""Calls that skip Python code of PyTorch's which does nothing for them.

In torch 2.13 a functional collective has an autograd formula in Python, though no gradient passes those inside an
`autograd.Function`; and `Function.apply` looks through its arguments for wrappers that functorch leaves behind. Under
torch.compile, which traces both, calls are as they would be otherwise.
"""

from __future__ import annotations

from typing import Any

import torch


def below_autograd(operation: torch._ops.OpOverload, *arguments: Any, **options: Any) -> Any:
    """Call a collective that no gradient passes."""
    if torch.compiler.is_dynamo_compiling():
        return operation(*arguments, **options)
    with torch._C._AutoDispatchBelowAutograd():
        return operation._op(*arguments, **options)


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply the function like `function.apply`."""
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # pyright: ignore[reportAttributeAccessIssue]


def applied_eagerly(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply the function like `function.apply`, where torch.compile is known not to trace."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # pyright: ignore[reportAttributeAccessIssue]
