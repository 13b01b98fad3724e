"""A mask of a traced graph, read as an expression in tensors that have no dim of queries, or none of keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.masks.seen import constant
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of, value_of
from autopar.ir.program.operators.attention.expressions import FUNCTIONS, Call, Expression, Score, Vector

MOST_CALLS = 64
"""Maximum number of calls in an expression; a part that occurs twice counts twice."""
SAME = frozenset({"alias", "clone", "contiguous", "detach", "expand", "lift_fresh_copy"})
"""Give the elements that they are given, or repeat them along whole dims."""
OTHER_NAMES = {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
FILLED = {"full": None, "full_like": None, "new_full": None, "ones": 1, "ones_like": 1, "new_ones": 1}
FILLED |= {"zeros": 0, "zeros_like": 0, "new_zeros": 0}
"""One number everywhere; None: the argument `fill_value`."""
TRIANGLES = {"tril": "le", "triu": "ge"}
"""Keep the keys up to a query's own, or from it on; others become zero."""


class NotByPositionError(Exception):
    """The mask is not made of vectors alone."""


@dataclass(slots=True)
class Reading:
    """State of reading a mask: the vectors and expressions found so far."""

    draft: TracedGraph
    vectors: list[fx.Node] = field(default_factory=list)
    read: dict[fx.Node, Expression] = field(default_factory=dict)
    num_calls: dict[fx.Node, int] = field(default_factory=dict)
    score: fx.Node | None = None
    """The scores, if the expression is a function of them."""
    dims: tuple[int, ...] = ()
    """Negative dims at which vectors that are read get a dim of one element, the most recently added first."""

    def of(self, node: fx.Node) -> Expression:
        """Return the expression of a tensor that is broadcast to the scores."""
        if node not in self.read:
            self.read[node] = self._read(node)
            self.num_calls[node] = 1 + sum(self.num_calls.get(source, 0) for source in node.all_input_nodes)
            if self.num_calls[node] > MOST_CALLS:
                raise NotByPositionError
        return self.read[node]

    def _read(self, node: fx.Node) -> Expression:
        if node is self.score:
            return Score()
        shape = shape_of(node)
        if len(shape) < 2 or 1 in shape[-2:]:
            return self.vector(node)
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise NotByPositionError
        name = node.target._schema.name.partition("::")[2]
        name = OTHER_NAMES.get(name, name)
        given = arguments(node)
        if name in SAME or (name in ("unsqueeze", "view", "reshape") and _adds_leading_dims(node)):
            return self.of(node.args[0])  # type: ignore[arg-type]
        if name == "unsqueeze":
            return self._with_dims((given["dim"] % len(shape) - len(shape),), node.args[0])  # type: ignore[arg-type]
        if name in ("view", "reshape") and (added := _added_dims(node)):
            return self._with_dims(added, node.args[0])  # type: ignore[arg-type]
        if name in FILLED:
            return self._expression_of_fill(node, given["fill_value"] if FILLED[name] is None else FILLED[name])
        if name in TRIANGLES:
            return self._triangle(node, TRIANGLES[name], given["diagonal"])
        return self._call(name, node)

    def _with_dims(self, dims: tuple[int, ...], source: fx.Node) -> Expression:
        """Return the expression of a tensor to whose vectors dims are added."""
        inner = Reading(self.draft, self.vectors, dims=(*dims, *self.dims))
        found = inner.of(source)
        self.num_calls[source] = inner.num_calls[source]
        return found

    def vector(self, node: fx.Node) -> Vector:
        """Return a vector, with the dims that were added to what it is a part of."""
        for dim in self.dims:
            if len(shape_of(node)) >= -dim:
                node = self._made(aten.unsqueeze.default, node, dim)
        for number, known in enumerate(self.vectors):
            if node is known or _are_alike(node, known):
                return Vector(number)
        self.vectors.append(node)
        return Vector(len(self.vectors) - 1)

    def _call(self, name: str, node: fx.Node) -> Expression:
        if name not in FUNCTIONS or any(_is_not_default(node, *item) for item in node.kwargs.items()):
            raise NotByPositionError
        given = [number_of(x) for x in node.args if not (name == "bitwise_and" and _is_true(x))]
        if len(given) < len(node.args):
            return self.of(given[0])  # type: ignore[arg-type]
        if name == "to":
            given = given[:2] if node.target is aten.to.dtype else []
        plain = (bool, int, float, torch.dtype, fx.Node)
        if not given or not all(isinstance(x, plain) for x in given):
            raise NotByPositionError
        if any(isinstance(x, float) and math.isnan(x) for x in given):
            raise NotByPositionError
        return Call(name, tuple(self.of(x) if isinstance(x, fx.Node) else x for x in given))

    def _expression_of_fill(self, node: fx.Node, number: object) -> Expression:
        if not isinstance(number, bool | int | float):
            raise NotByPositionError
        one, dtype = [1] * len(shape_of(node)), value_of(node).dtype
        return self.vector(self._made(aten.full.default, one, number, dtype=dtype))

    def _triangle(self, node: fx.Node, name: str, diagonal: int) -> Expression:
        queries, keys = shape_of(node)[-2:]
        rows = self._made(aten.unsqueeze.default, self._made(aten.arange.start, diagonal, queries + diagonal), 1)
        within = Call(name, (self.vector(self._made(aten.arange.default, keys)), self.vector(rows)))
        kept = self.of(node.args[0])  # type: ignore[arg-type]
        return Call("masked_fill", (kept, Call("logical_not", (within,)), 0))

    def _made(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.draft.call(target, *args, **kwargs)


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two calls give the same by their arguments."""
    return (
        one.op == other.op == "call_function"
        and (one.target, one.args, one.kwargs) == (other.target, other.args, other.kwargs)
        and torch.Tag.nondeterministic_seeded not in getattr(one.target, "tags", ())
    )


def number_of(argument: Any) -> Any:
    """Return the number that a tensor without dims is filled with; any other argument itself."""
    if not isinstance(argument, fx.Node) or argument.target is not aten.full.default or argument.args[0]:
        return argument
    number: Any = argument.args[1]
    return float(number) if value_of(argument).is_floating_point() else number


def _added_dims(node: fx.Node) -> tuple[int, ...]:
    """Return where, from the right and the last one first, a view adds dims of one element, if it does nothing else."""
    left, shape, added = list(shape_of(node.args[0])), shape_of(node), []  # type: ignore[arg-type]
    for dim in reversed(range(len(shape))):
        if left and left[-1] == shape[dim]:
            left.pop()
        elif shape[dim] == 1:
            added.append(dim - len(shape))
        else:
            return ()
    return () if left else tuple(added)


def _is_true(argument: object) -> bool:
    """Return whether an argument is a single boolean element that is true whatever the data."""
    if not isinstance(argument, fx.Node) or shape_of(argument):
        return False
    value = constant(argument, {})
    return value is not None and value.dtype is torch.bool and bool(value)


def _adds_leading_dims(node: fx.Node) -> bool:
    """Return whether a view only adds or removes leading dims of one element."""
    source, shape = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    most = max(len(source), len(shape))
    return (1,) * (most - len(source)) + source == (1,) * (most - len(shape)) + shape


def _is_not_default(node: fx.Node, name: str, value: object) -> bool:
    """Return whether a keyword argument differs from the operator's default."""
    return value != next(each.default_value for each in node.target._schema.arguments if each.name == name)  # type: ignore[union-attr]
