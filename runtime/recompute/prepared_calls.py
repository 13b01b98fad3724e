"""Calls of a per-rank graph as code: what a run that goes call by call needs of each, worked out once per graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.graph_module import _forward_from_src
from torch.utils import _pytree as pytree

from autopar.runtime.collectives.gradient_buckets import cast_weights
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
    direct = function._op if isinstance(function, OpOverload) else DIRECT.get(function, function)
    scope: dict[str, Any] = {"function": direct}

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


def _cast_outside_of_steps(dtypes: tuple[torch.dtype, ...], *weights: Tensor) -> tuple[Tensor, ...]:
    """Return `cast_weights`, in a graph that a step of several micro-batches does not take its gradients through."""
    return (weights[0].to(dtypes[0]),) if len(weights) == 1 else cast_weights(dtypes, *weights)


DIRECT: dict[Any, Callable[..., Any]] = {cast_weights: _cast_outside_of_steps}
"""Function in a graph → what runs in its place where torch.compile does not trace."""


def code_of(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the code of a graph, in which operations, and functions with a `DIRECT` form, are called directly."""
    operations = {f"torch.ops.{node.target}" for node in module.graph.nodes if isinstance(node.target, OpOverload)}

    def direct(body: list[str]) -> list[str]:
        code = "".join(body)
        for name in operations:
            code = code.replace(f"{name}(", f"{name}._op(")
        return [code]

    with module.graph.on_generate_code(lambda _: direct):
        code = module.graph.python_code("self")
    names = {name: DIRECT.get(value, value) if callable(value) else value for name, value in code.globals.items()}
    return partial(_forward_from_src(code.src, names), module)


@functools.cache
def _code(source: str) -> CodeType:
    return compile(source, "<a call of a per-rank graph>", "eval")


def tensors_of(value: Any) -> tuple[Any, ...] | list[Any]:
    """Return the leaves of what a call takes or gives, most often a tensor or a tuple of tensors."""
    if isinstance(value, Tensor):
        return (value,)
    return pytree.tree_leaves(value)
