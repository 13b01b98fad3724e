"""Samples and positions of tokens kept apart, from where a model flattens them for its router, or for its loss.

A split of positions cannot pass a view of [B, S, D] as [B · S, D]; calls that treat every token alone need no such
view. It is put off, call by call, until something needs it, or the model undoes it: calls then work on [B, S, ...], and
a loss takes rows of these dims. Legend: L leading dims, T their product.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.capture.experts.forms import CASTS
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, set_call, shape_of, value_of
from autopar.capture.passes.views import VIEWS
from autopar.capture.rows.labels import NONE, in_rows
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY

ALONG_DIM = (
    aten.softmax.int,
    aten.log_softmax.int,
    aten.topk.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.max.dim,
    aten.amax.default,
    aten.argmax.default,
    aten.cumsum.default,
    aten.gather.default,
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
"""Calls along one dim, or several, that they name."""
PRODUCTS = (aten.linear.default, aten.matmul.default)
"""Products with a matrix, which is the second argument."""
OF_FEATURES = (aten.layer_norm.default, aten.rms_norm.default)
"""Calls along the last dims, of the sizes that they name."""
LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)


def tokens_in_samples(draft: TracedGraph) -> None:
    """Let the calls around experts, and those before losses, work on samples and positions."""
    flat = {node for node in _ancestors(draft.calls(DISPATCH)) if _flattens_all_but_last(node)}
    flat |= {view for loss in draft.calls(aten.cross_entropy_loss.default) for view in _flat_rows(loss)}
    if flat:
        _Lifting(draft, flat).run()


class _Lifting:
    """Rewrite, in one pass over the calls, of computations on flattened tokens to unflattened leading dims."""

    def __init__(self, draft: TracedGraph, flat: set[fx.Node]) -> None:
        self.draft, self.flat = draft, flat
        self.apart: dict[fx.Node, fx.Node] = {}
        """Node of (T, ...) → the same as (*L, ...)."""
        self.leading: dict[fx.Node, tuple[int, ...]] = {}
        """Node → L."""
        self.begins: set[fx.Node] = set()
        """The views that make T of L, on the way to experts or losses."""

    def run(self) -> None:
        for node in self.draft.calls():
            leading = {self.leading[each] for each in node.all_input_nodes if each in self.apart}
            if node in self.flat:
                (source,) = node.all_input_nodes
                source = self.apart.get(source, source)  # the slots of tokens are flattened once more
                self._note(node, source, shape_of(source)[:-1])
                self.begins.add(node)
            elif len(leading) == 1:
                with self.draft.graph.inserting_before(node):
                    self._lift(node, *leading)
        for node, new in self.apart.items():
            if node not in self.begins and _has_one_tensor(node) and node.users:
                with self.draft.graph.inserting_before(node):
                    flat = self._call(node, aten.reshape.default, new, list(shape_of(node)))
                node.replace_all_uses_with(flat)

    def _note(self, node: fx.Node, new: fx.Node, leading: tuple[int, ...]) -> None:
        self.apart[node], self.leading[node] = new, leading

    def _lift(self, node: fx.Node, leading: tuple[int, ...]) -> None:
        """Add a copy of a call on separated samples, if it treats every token alone."""
        target, source = node.target, node.args[0]
        if target in VIEWS and isinstance(source, fx.Node) and shape_of(node) == (*leading, *shape_of(source)[1:]):
            node.replace_all_uses_with(self.apart[source])
        elif target in VIEWS and isinstance(source, fx.Node) and shape_of(node) == _tokens_of_slots(source, leading):
            self._note(node, self.apart[source], leading[:-1])
        elif target is aten.repeat_interleave.self_int and isinstance(source, fx.Node) and arguments(node)["dim"] == 0:
            self._repeat(node, source, leading)
        elif target is DISPATCH:
            self._dispatch(node, leading)
        elif target is COMBINE:
            self._combine(node, leading)
        elif target is aten.cross_entropy_loss.default:
            self._loss(node, leading)
        else:
            changed = self._arguments_apart(node, leading)
            if changed is not None:
                args, kwargs = map_arg((changed, dict(node.kwargs)), lambda each: self.apart.get(each, each))
                target: Any = aten.reshape.default if target in VIEWS else target
                self._note(node, self._call(node, target, *args, **kwargs), leading)

    def _arguments_apart(self, node: fx.Node, leading: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Return the arguments of a call on what is apart; None where it treats tokens otherwise than each alone."""
        target, source = node.target, node.args[0]
        if target is operator.getitem:
            return node.args
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(source, fx.Node):
            return None
        if source not in self.apart or not _has_one_tensor(source):
            return None
        shape, rest = shape_of(source), node.args[1:]
        if target in (*VIEWS, aten.expand.default):
            (sizes,) = rest
            keeps = len(sizes) > 1 and sizes[0] == shape[0] and (target in VIEWS or len(sizes) == len(shape))  # type: ignore[index, arg-type]
            return (source, [*leading, *sizes[1:]]) if keeps else None  # type: ignore[index]
        if target in PRODUCTS:
            return node.args if len(shape) > 1 and rest[0] not in self.apart else None
        if target in OF_FEATURES:
            return node.args if len(rest[0]) < len(shape) else None  # type: ignore[arg-type]
        if target in LIKE:
            return node.args
        if target in ALONG_DIM:
            return self._arguments_along(node, len(shape), len(leading) - 1)
        pointwise = target in CASTS or torch.Tag.pointwise in target.tags
        return node.args if pointwise and self._is_elementwise(node) else None

    def _is_elementwise(self, node: fx.Node) -> bool:
        """Return whether unflattened inputs have as many dims as the result, and other inputs fewer."""
        ndim = len(shape_of(node))
        dims = [(each in self.apart, len(shape_of(each))) for each in node.all_input_nodes]
        return all(found == ndim if apart else found < ndim for apart, found in dims)

    def _arguments_along(self, node: fx.Node, ndim: int, more: int) -> tuple[Any, ...] | None:
        """Return the arguments of a call along dims that are not of tokens, these counted with `more` before them."""
        specified, ndim = arguments(node)["dim"], ndim + (node.target is aten.unsqueeze.default)
        dims = [specified] if isinstance(specified, int) else list(specified or ())
        others = [each for each in node.all_input_nodes if each not in self.apart]
        if not dims or others or any(dim % ndim == 0 for dim in dims):
            return None
        (place,) = (i for i, each in enumerate(node.target._schema.arguments) if each.name == "dim")  # type: ignore[union-attr]
        moved = [dim if dim < 0 else dim + more for dim in dims]
        args = list(node.args)
        if place < len(args):
            args[place] = moved[0] if isinstance(specified, int) else moved
        return tuple(args) if "dim" not in node.kwargs else None

    def _repeat(self, node: fx.Node, source: fx.Node, leading: tuple[int, ...]) -> None:
        """Repeat tokens for each of their slots, along a new leading dim."""
        repeats, rest = arguments(node)["repeats"], shape_of(source)[1:]
        slots = self._call(node, aten.unsqueeze.default, self.apart[source], len(leading))
        leading = (*leading, repeats)
        self._note(node, self._call(node, aten.expand.default, slots, [*leading, *rest]), leading)

    def _dispatch(self, node: fx.Node, leading: tuple[int, ...]) -> None:
        """Require that tokens and their experts are both apart, or neither."""
        x, index, num_experts = node.args
        assert isinstance(x, fx.Node) and isinstance(index, fx.Node)
        if x not in self.apart:
            return
        index = self.apart.get(index) or self._call(node, aten.reshape.default, index, [*leading, shape_of(index)[-1]])
        node.args = (self.apart[x], index, num_experts)
        for user in node.users:
            if user.args[1] == 3:  # the route of slots, which has their dims
                user.meta["val"] = value_of(user).view(*leading, -1)
                self._note(user, user, leading)
                self.begins.add(user)

    def _combine(self, node: fx.Node, leading: tuple[int, ...]) -> None:
        rows, weights, route, *rest = node.args
        assert isinstance(route, fx.Node)
        if route not in self.apart:
            return
        if isinstance(weights, fx.Node):
            weights = self.apart.get(weights) or self._call(
                node, aten.reshape.default, weights, [*leading, shape_of(weights)[-1]]
            )
        new = self._call(node, COMBINE, rows, weights, route, *rest)
        self._note(node, new, leading)

    def _loss(self, node: fx.Node, leading: tuple[int, ...]) -> None:
        """Keep the dims of rows and of their labels."""
        given = arguments(node)
        if given["self"] not in self.apart or value_of(given["target"]).is_floating_point():
            return
        target = in_rows(self.draft, given["target"], leading, node.meta["module"])
        rest = [given[name] for name in ("weight", "reduction", "ignore_index", "label_smoothing")]
        call = (self.apart[given["self"]], target, *rest)
        if given["reduction"] == NONE:
            self._note(node, self._call(node, CROSS_ENTROPY, *call), leading)
        else:
            set_call(node, CROSS_ENTROPY, *call)

    def _call(self, node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.draft.call(target, *args, module=node.meta["module"], **kwargs)


def _tokens_of_slots(slots: fx.Node, leading: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape (T, K, ...) of what is (T · K, ...), where the slots K of a token are the last of the leading
    dims.
    """
    return (math.prod(leading[:-1]), leading[-1], *shape_of(slots)[1:])


def _flattens_all_but_last(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if node.target not in VIEWS or not isinstance(source, fx.Node):
        return False
    before, after = shape_of(source), shape_of(node)
    return len(after) == 2 and len(before) > 2 and before[-1] == after[-1]


def _flat_rows(loss: fx.Node) -> set[fx.Node]:
    """Return the views that make the rows of a loss over a list of them, reached through calls of as many rows."""
    found: set[fx.Node] = set()
    open_nodes = [arguments(loss)["self"]]
    while open_nodes:
        node = open_nodes.pop()
        if _flattens_all_but_last(node):
            found.add(node)
        elif node.op == "call_function" and len(shape_of(node)) == 2:
            open_nodes += [each for each in node.all_input_nodes if _same_rows(each, node)]
    return found


def _same_rows(node: fx.Node, other: fx.Node) -> bool:
    return _has_one_tensor(node) and shape_of(node)[:1] == shape_of(other)[:1]


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    open_nodes = list(nodes)
    while open_nodes:
        for each in open_nodes.pop().all_input_nodes:
            if each not in found:
                found.add(each)
                open_nodes.append(each)
    return found


def _has_one_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)
