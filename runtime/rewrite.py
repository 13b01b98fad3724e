"""From a program and the choices of a plan to one per-rank graph with collectives.

The graph is the same on every rank: collectives name a mesh axis, shapes are local shapes. A tensor is moved along
each wire of the space exactly as the plan priced it; the collectives of parameters run in buckets.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.layout import I, Layout, Placement
from autopar.mesh import Mesh
from autopar.program import TensorInfo, tensor_inputs
from autopar.reshard import Move, Tensor
from autopar.runtime.bucketing import Bucket, buckets_of
from autopar.runtime.buckets import gather_parameters, reduce_gradients
from autopar.runtime.moves import move_call
from autopar.space import Space, carries_pin, is_call

Value = tuple[int, int]
"""(decision, output position)"""


@dataclass(frozen=True, slots=True)
class LocalProgram:
    """The program of one rank. Placeholders are those of the `Program`, in the same order."""

    module: fx.GraphModule
    placeholders: tuple[str, ...]
    layouts: dict[str, Layout]
    """Placeholder → the layout in which the graph takes it."""
    output_layouts: tuple[Layout | None, ...]
    """Layout of every entry of the graph's flat output; None where it is no tensor."""


def rewrite(space: Space, choices: Sequence[int]) -> LocalProgram:
    """The per-rank graph of a space under one choice per decision."""
    return _Rewriter(space, choices).run()


class _Rewriter:
    """One walk over the program's graph; `values` holds what has been emitted so far."""

    def __init__(self, space: Space, choices: Sequence[int]) -> None:
        self.space = space
        self.choices = choices
        self.graph = fx.Graph()
        self.values: dict[Value, fx.Node] = {}
        self.by_wire: dict[Value, fx.Node] = {}
        """Value at the end of a wire that a bucket has moved, by (target, input position)."""
        self.slices: dict[tuple[fx.Node, int, Placement], fx.Node] = {}
        """Parts of tensors that are equal everywhere and need no gradient: taken once, for all who want them."""
        self.layouts: dict[str, Layout] = {}
        self.section = ""
        self.buckets = buckets_of(space, choices)
        self.bucket_of = {end: bucket for bucket in self.buckets for end in bucket.ends}
        self.num_random = 0

    def run(self) -> LocalProgram:
        placeholders = [node for node in self.space.program.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self._placeholder(node)
        for bucket in self.buckets:
            if bucket.at_entry:
                self._bucket(bucket)
        for node in self.space.program.graph.nodes:
            self.section = str(node.meta.get("module", ""))
            if is_call(node):
                self._call(node)
            elif node.op == "call_function":
                self._getitem(node)
        outputs = [self._output(number, value) for number, value in enumerate(self.space.program.output)]
        self.graph.output(tuple(value for value, _ in outputs))
        self.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.graph, "LocalProgram")
        names = tuple(node.name for node in placeholders)
        return LocalProgram(module, names, self.layouts, tuple(layout for _, layout in outputs))

    def _placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta["module"] = ""
        if isinstance(node.meta["tensor"], TensorInfo):
            number = self.space.index[node.name]
            layout = self._strategy(number).outputs[0]
            new.meta["layout"] = layout
            self.layouts[node.name] = layout
            self.values[number, 0] = new

    def _call(self, node: fx.Node) -> None:
        number = self.space.index[node.name]
        decision = self.space.decisions[number]
        strategy = self._strategy(number)
        arguments = iter([self._input(number, position) for position in range(len(tensor_inputs(node)))])

        def local(argument: fx.Node) -> object:
            return next(arguments) if argument.meta.get("tensor") is not None else None

        args, kwargs = map_arg((node.args, dict(node.kwargs)), local)
        op, call, bound = decision.menu.op, decision.menu.call, decision.menu.bound
        assert op is not None and call is not None and bound is not None
        if carries_pin(node):
            self.values[number, 0] = args[0]
            return
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default  # a part of a tensor may lie in memory as the whole does not
        if op.shape_argument is not None:
            shape = list(strategy.outputs[0].local_shape(call.outputs[0].shape, self.mesh.sizes))
            args = (*args[: op.shape_argument], shape, *args[op.shape_argument + 1 :])
        if strategy.implemented:
            assert op.implementation is not None
            target = _runtime_function(op.implementation.function)
            split = strategy.axes_by_factor(self.mesh)
            kwargs = {**kwargs, "axes": split, "sizes": dict(bound.sizes)}
            if op.implementation.random:
                kwargs["key"] = self.num_random
                self.num_random += 1
        layout = strategy.outputs[0] if strategy.outputs else None
        self.values[number, 0] = self._emit(target, args, kwargs, layout, name=node.name)

    def _getitem(self, node: fx.Node) -> None:
        parent, position = node.args
        assert isinstance(parent, fx.Node) and isinstance(position, int)
        number = self.space.index[parent.name]
        output = sum(each is not None for each in parent.meta["tensor"][:position])
        whole = self.values[number, 0] if (number, -1) not in self.values else self.values[number, -1]
        self.values[number, -1] = whole
        layout = self._strategy(number).outputs[output]
        self.values[number, output] = self._emit(operator.getitem, (whole, position), {}, layout, name=node.name)

    def _output(self, number: int, value: object) -> tuple[object, Layout | None]:
        if not isinstance(value, fx.Node):
            return value, None
        decision = self.space.index[f"output:{number}"]
        return self._input(decision, 0), self._strategy(decision).inputs[0]

    def _input(self, decision: int, position: int) -> fx.Node:
        """The value that arrives at an input, moved to the layout it asks for."""
        if (decision, position) in self.bucket_of and (decision, position) not in self.by_wire:
            self._bucket(self.bucket_of[decision, position])
        if (decision, position) in self.by_wire:
            return self.by_wire[decision, position]
        wire = self.space.inbound[decision, position]
        value = self._value(wire.source, wire.source_output)
        path = self.space.path(wire, self.choices)
        for move, again in zip(path.moves, path.regathered, strict=True):
            if again:
                value = self._gather_alone(value, move, wire.tensor.shape)
            else:
                value = self._move(value, move, wire.tensor)
        return value

    def _value(self, decision: int, output: int) -> fx.Node:
        """A decision's output; a hub is emitted when it is first asked for."""
        if (decision, output) not in self.values:
            assert self.space.decisions[decision].kind == "hub", (
                f"{self.space.decisions[decision].name} is not there yet"
            )
            self.values[decision, 0] = self._input(decision, 0)
        return self.values[decision, output]

    def _move(self, value: fx.Node, move: Move, tensor: Tensor) -> fx.Node:
        if self.mesh.sizes[move.axis] == 1:
            return value
        function, args = move_call(move, tensor.shape, self.mesh)
        if move.source is I and not tensor.requires_grad:  # a slice of a mask or of rotary tables serves every layer
            key = (value, move.axis, move.target)
            if key not in self.slices:
                self.slices[key] = self._emit(function, (value, *args), {}, move.after)
            return self.slices[key]
        return self._emit(function, (value, *args), {}, move.after)

    def _gather_alone(self, value: fx.Node, move: Move, shape: Sequence[int]) -> fx.Node:
        """Gather a weight that shares its path with no other, to be freed after use and gathered again."""
        axis, dim = self.mesh.names[move.axis], move.source.dim
        size = move.after.local_shape(shape, self.mesh.sizes)[dim]
        gathered = self._emit(gather_parameters, (axis, (dim,), (size,), value), {"regather": True}, None)
        return self._emit(operator.getitem, (gathered, 0), {}, move.after)

    def _bucket(self, bucket: Bucket) -> None:
        """Move the parameters of a bucket together, one collective per step of their common path."""
        values = [self._value(source, 0) for source in bucket.sources]
        layouts = list(bucket.layouts)
        for step in bucket.steps:
            axis = self.mesh.names[step.axis]
            moves = [path.moves[step.number] for path in bucket.paths]
            if step.gathers:
                dims = tuple(move.source.dim for move in moves)
                sizes = tuple(
                    move.after.local_shape(shape, self.mesh.sizes)[dim]
                    for move, shape, dim in zip(moves, bucket.shapes, dims, strict=True)
                )
                new = self._emit(gather_parameters, (axis, dims, sizes, *values), {"regather": bucket.regather}, None)
            else:
                new = self._emit(reduce_gradients, (axis, *values), {}, None)
            layouts = [move.after for move in moves]
            values = [self._emit(operator.getitem, (new, i), {}, layout) for i, layout in enumerate(layouts)]
        for end, value in zip(bucket.ends, values, strict=True):
            self.by_wire[end] = value

    def _emit(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layout: Layout | None,
        name: str = "",
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name or None)
        node.meta["module"] = self.section
        node.meta["layout"] = layout
        return node

    def _strategy(self, number: int):
        return self.space.decisions[number].menu.strategies[self.choices[number]]

    @property
    def mesh(self) -> Mesh:
        return self.space.mesh


def _runtime_function(name: str) -> Callable[..., Any]:
    """The runtime function that `Implementation.function` names, "module:name"."""
    module, function = name.split(":")
    return getattr(importlib.import_module(f"autopar.runtime.{module}"), function)
