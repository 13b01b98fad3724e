"""Find the arguments to make static for a model that needs the values of tensors, by tracing it with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.static.arguments import Arguments, named_args, with_static

MAX_ELEMENTS = 2**16
"""Most elements of an argument that is tried: larger ones differ in every call."""


def static_advice(arguments: Arguments, forward: Callable[..., Any], works: Callable[[Arguments], bool]) -> str:
    """Return a sentence that names arguments which, made static, let the model be traced; "" if there are none.

    `works` tells whether it can be traced for arguments. Each of those that help together is needed.
    """
    args, kwargs = arguments
    named = {name: value for name, value in (*named_args(args, forward), *kwargs.items()) if name}
    sizes = {name: _num_elements(value) for name, value in named.items()}
    names = [name for name, size in sizes.items() if size is not None]

    def helps(tried: list[str]) -> bool:
        return works(with_static(arguments, tried, forward))

    if not names or not helps(names):
        return ""
    for name in sorted(names, key=lambda name: -(sizes[name] or 0)):
        fewer = [each for each in names if each != name]
        if fewer and helps(fewer):
            names = fewer
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        f" Or give Capture(static_argnames=[{listed}]), with which the model can be captured for the values that are "
        "given: they become constants, and other values are planned anew."
    )


def _num_elements(value: Any) -> int | None:
    """Return how many integers with values an argument holds; None if it holds anything else, or too many."""
    leaves = pytree.tree_leaves(value)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor | DTensor) or leaf.is_meta:
            return None
        if leaf.requires_grad or leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            return None
    count = sum(leaf.numel() for leaf in leaves)
    return count if leaves and count <= MAX_ELEMENTS else None
