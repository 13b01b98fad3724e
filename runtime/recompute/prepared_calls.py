"""Calls of a per-rank graph as code: what a run that goes call by call needs of each, worked out once per graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.runtime.collectives.layout_moves import GATHERS, Travelling
from autopar.runtime.recompute.marks import Mark, is_offloaded, role_of


@dataclass(frozen=True, slots=True, eq=False)
class RunCall:
    """A call of a per-rank graph as it is run."""

    node: fx.Node
    inputs: tuple[fx.Node, ...]
    run: Callable[..., Any]
    """Runs the call on the values of `inputs`."""
    gather: Callable[..., Travelling] | None
    """Begins the gather that the call is on the values of `inputs`; None of all other calls."""
    takes_key: bool
    """True if the call draws random numbers."""
    role: Mark | None
    last_uses: tuple[fx.Node, ...]
    """Values that no later call takes."""
    ends_segment: bool
    stretch: int
    """The number of the calls one after the other, all of one segment or of none, to which it belongs."""
    is_offloaded: bool
    """True if the call's saved tensors are offloaded to the host."""

    @classmethod
    def of(cls, node: fx.Node, last_uses: tuple[fx.Node, ...], ends_segment: bool, stretch: int) -> RunCall:
        """Prepare a call."""
        gather = function_of(node, Travelling.gathered) if node.target in GATHERS else None
        return cls(
            node,
            tuple(node.all_input_nodes),
            function_of(node, node.target),
            gather,
            "key" in node.kwargs,
            role_of(node),
            last_uses,
            ends_segment,
            stretch,
            is_offloaded(node),
        )


def function_of(node: fx.Node, function: Any) -> Callable[..., Any]:
    """Return generated code that calls a function with a node's arguments, given the values of its inputs."""
    names = {each: f"input_{number}" for number, each in enumerate(node.all_input_nodes)}
    scope: dict[str, Any] = {"function": function}

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{text(each)}, ' for each in value)})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {text(each)}' for key, each in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
        name = f"constant_{len(scope)}"
        scope[name] = value
        return name

    given = [*map(text, node.args), *(f"{name}={text(value)}" for name, value in node.kwargs.items())]
    return eval(_code(f"lambda {', '.join(names.values())}: function({', '.join(given)})"), scope)


@functools.cache
def _code(source: str) -> CodeType:
    return compile(source, "<a call of a per-rank graph>", "eval")


def tensors_of(value: Any) -> tuple[Any, ...] | list[Any]:
    """Return the leaves of what a call takes or gives, most often a tensor or a tuple of tensors."""
    if isinstance(value, Tensor):
        return (value,)
    return pytree.tree_leaves(value)
