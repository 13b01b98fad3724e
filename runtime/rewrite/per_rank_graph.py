"""Rewrite of a program and a plan's choices into one per-rank graph with collectives.

The graph is the same on every rank: collectives name a mesh axis, shapes are local shapes. A tensor is moved along each
edge of the space exactly as the plan priced it; the collectives of parameters run in buckets. Finally the matmuls with
the slices of one weight that no axis has split become one matmul again (autopar/runtime/rewrite/packing.py).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.costs.pricing.message_sizes import joined_layers, layers_in_order
from autopar.costs.pricing.moves import Move, MovedTensor, makes_parts
from autopar.costs.pricing.reshard import ReshardPath
from autopar.costs.space.parameter_buckets import Bucket, buckets_of, late_casts
from autopar.costs.space.space import Space, TensorEdge
from autopar.costs.space.strategy import running_in
from autopar.ir.program.calls import is_call, module_of, source_of
from autopar.ir.program.effects import writes
from autopar.ir.program.paths import layer_of
from autopar.ir.program.program import TensorInfo, info_of, tensor_inputs
from autopar.ir.program.recompute_segments import OFFLOAD, is_saved, moves_again, offloadable, segments_of
from autopar.ir.sharding.constraint import is_constraint
from autopar.ir.sharding.layout import I, Layout, Placement, R
from autopar.ir.sharding.mesh import Mesh, joined_name
from autopar.runtime.collectives.gradient_buckets import cast_weight, cast_weights, gather_parameters, reduce_gradients
from autopar.runtime.collectives.layout_moves import COMMUNICATING
from autopar.runtime.recompute.marks import CHANGED, MARK, OFFLOADABLE, SEGMENT, Mark, modes_of_calls
from autopar.runtime.rewrite.counts_ahead import count_ahead
from autopar.runtime.rewrite.halves import START, runtime_function, second_half
from autopar.runtime.rewrite.moves import MoveCall, move_call
from autopar.runtime.rewrite.packing import pack_products
from autopar.runtime.rewrite.prefetch import LAYER
from autopar.runtime.rewrite.sharing import IS_SHARED, share_gathers
from autopar.strategies.roles import RoledProgram

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


def rewrite(
    space: Space, choices: Sequence[int], recompute: Mapping[str, str] | None = None, first_key: int = 0
) -> LocalProgram:
    """Return the per-rank graph of a space under one choice per decision; `recompute` is segment → mode.

    Calls that draw random numbers are told apart by keys from `first_key` on.

    Raises PlanError where the program has no such segment, or recomputation no such mode.
    """
    return _Rewriter(space, choices, modes_of_calls(space.program, recompute or {}), first_key).run()


class _Rewriter:
    """One walk over the program's graph; `values` holds what has been emitted so far."""

    def __init__(
        self, space: Space, choices: Sequence[int], modes: Mapping[fx.Node, tuple[str, str]], first_key: int
    ) -> None:
        self.space = space
        self.choices = choices
        self.modes = modes
        self.graph = fx.Graph()
        self.values: dict[Value, fx.Node] = {}
        self.by_edge: dict[Value, fx.Node] = {}
        """Value at the end of an edge that a bucket has moved, by (target, input position)."""
        self.casts_left: dict[Value, dict[Value, tuple[torch.dtype, Layout]]] = {}
        """Values that are cast only when they are used → all that are cast with them, their dtype and layout."""
        self.slices: dict[tuple[fx.Node, tuple[int, ...], Placement], fx.Node] = {}
        """Parts of tensors that are equal everywhere and need no gradient: taken once, for all who want them."""
        self.layouts: dict[str, Layout] = {}
        self.section = ""
        self.travelling: dict[fx.Node, fx.Node] = {}
        """The last call that runs while rows travel → the call that sends them, of which half is emitted."""
        self.reshard_segments: dict[int, tuple[str, str] | None] = {}
        """Hub → name and mode of the segment that it is emitted in."""
        self.segment: tuple[str, str] | None = None
        """Name and mode of the segment whose calls are emitted; None where nothing is computed again."""
        self.products = RoledProgram.of(space.program).products
        self.segment_of: dict[fx.Node, str] = {}
        self.offloadable: frozenset[fx.Node] = frozenset()
        if any(mode == OFFLOAD for _, mode in modes.values()):
            segments = segments_of(space.program)
            self.segment_of = {node: each.name for each in segments for node in each.nodes}
            self.offloadable = offloadable(space.program)
        self.weights: set[fx.Node] = set()
        """Parameters on their way to where they are used: they are stored and gathered, not computed again."""
        self.buckets = buckets_of(space, choices)
        self.bucket_of = {end: bucket for bucket in self.buckets for end in bucket.ends}
        self.cast_late = late_casts(space, self.buckets)
        self.changed = {buffer for node in space.program.graph.nodes for buffer in writes(node)}
        self.next_key = first_key
        self.joined = joined_layers(space.program)
        self.layer_numbers = {layer: number for number, layer in enumerate(layers_in_order(self.joined))}

    def run(self) -> LocalProgram:
        placeholders = [node for node in self.space.program.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self._placeholder(node)
        for bucket in (each for each in self.buckets if each.at_entry):
            self._bucket(bucket)
        for node in self.space.program.graph.nodes:
            self.section = module_of(node)
            if is_call(node):
                self.segment = self.modes.get(node)
                self._call(node)
                if node in self.travelling:
                    self._arrive(self.travelling.pop(node))
            elif node.op == "call_function":
                self.segment = self.modes.get(source_of(node)[0])
                self._getitem(node)
        self.segment = None
        outputs = [self._output(number, value) for number, value in enumerate(self.space.program.output)]
        self.graph.output(tuple(value for value, _ in outputs))
        pack_products(self.graph, self._slice_widths())
        share_gathers(self.graph)
        count_ahead(self.graph, self.weights)
        self.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.graph, "LocalProgram")
        names = tuple(node.name for node in placeholders)
        return LocalProgram(module, names, self.layouts, tuple(layout for _, layout in outputs))

    def _slice_widths(self) -> dict[fx.Node, int]:
        """Return the size that every slice takes its part of; the dim is whole on every rank."""
        slices = [node for node in self.space.program.graph.nodes if node.target is torch.ops.aten.slice.Tensor]
        sizes = (info_of(whole).shape[dim] for whole, dim, *_ in (node.args for node in slices))
        return dict(zip((self.values[self.space.index[node.name], 0] for node in slices), sizes, strict=True))

    def _placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta["module"] = ""
        new.meta[CHANGED] = node in self.changed
        if isinstance(node.meta["tensor"], TensorInfo):
            number = self.space.index[node.name]
            if self.space.decisions[number].kind == "parameter":
                self.weights.add(new)
            layout = self._strategy(number).outputs[0]
            new.meta["layout"] = layout
            self.layouts[node.name] = layout
            self.values[number, 0] = new

    def _call(self, node: fx.Node) -> None:
        number = self.space.index[node.name]
        if (number, 0) in self.values or number in self.cast_late:
            return
        decision = self.space.decisions[number]
        strategy = self._strategy(number)
        arguments = iter([self._input(number, position) for position in range(len(tensor_inputs(node)))])

        def local(argument: fx.Node) -> Any:
            return next(arguments) if argument.meta.get("tensor") is not None else None

        args: Any
        args, kwargs = map_arg((node.args, dict(node.kwargs)), local)
        op, call, bound = decision.candidates.op, decision.candidates.call, decision.candidates.bound
        assert op is not None and call is not None and bound is not None
        if is_constraint(node.target):
            self.values[number, 0] = args[0]
            return
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default  # a part of a tensor may lie in memory as the whole does not
        if op.shape_argument is not None:
            shape = list(strategy.outputs[0].local_shape(call.outputs[0].shape, self.mesh.sizes))
            args = (*args[: op.shape_argument], shape, *args[op.shape_argument + 1 :])
        travels = self.space.travels(number, self.choices[number])
        runs = running_in(self.segment[1] if self.segment else "none", strategy).implementation
        if runs.function:
            target = runtime_function(runs.function, START if travels else "")
            named, split = inspect.signature(target).parameters, strategy.axes_by_factor(self.mesh)
            kwargs = {**kwargs, "axes": split, "sizes": dict(bound.sizes), **runs.keywords}
            if strategy.zigzag and "zigzag" in named:
                kwargs["zigzag"] = strategy.zigzag_by(self.mesh)
            if runs.random:
                kwargs["key"] = self.next_key
                self.next_key += 1
            if "op" in named:
                kwargs["op"] = node.target
        if node.name in self.space.weight_casts and self.space.program.accumulated is not None:
            target = cast_weight
        layout = strategy.outputs[0] if strategy.outputs else None
        new = self._emit(target, args, kwargs, layout, name=node.name)
        self.values[number, 0] = new
        if travels:
            self.travelling[self.space.meanwhile[node][-1]] = node
        new.meta[IS_SHARED] = strategy.shared
        if node.name in self.space.weight_casts:
            self.weights.add(new)
            if node in self.modes and self.modes[node][1] != OFFLOAD:
                new.meta[MARK] = Mark(*self.modes[node], saved=False, weight=True)
            return
        new.meta[SEGMENT], new.meta[OFFLOADABLE] = self.segment_of.get(node, ""), node in self.offloadable
        if self.segment is not None:
            self._mark(new, is_saved(node, self.segment[1], self.products, strategy.communicates))

    def _getitem(self, node: fx.Node) -> None:
        parent, output = source_of(node)
        number = self.space.index[parent.name]
        if parent in self.travelling.values():
            return  # it is emitted with the second half of the call
        whole = self.values.setdefault((number, -1), self.values[number, 0])
        layout = self._strategy(number).outputs[output]
        new = self._emit(operator.getitem, (whole, node.args[1]), {}, layout, name=node.name)
        self.values[number, output] = new
        new.meta[SEGMENT], new.meta[OFFLOADABLE] = whole.meta[SEGMENT], whole.meta[OFFLOADABLE]
        if self.segment is not None:
            self._mark(new, whole.meta[MARK].saved)

    def _arrive(self, call: fx.Node) -> None:
        """Emit the second half of a call, with the outputs of the call."""
        number = self.space.index[call.name]
        function, first = self._strategy(number).implementation.function, self.values[number, 0]
        self.values[number, 0] = second_half(self.graph, function, call, first)
        self.segment, self.section = self.modes.get(call), module_of(call)
        for each in (each for each in call.users if each.target is operator.getitem):
            self._getitem(each)

    def _output(self, number: int, value: Any) -> tuple[Any, Layout | None]:
        if not isinstance(value, fx.Node):
            return value, None
        decision = self.space.index[f"output:{number}"]
        return self._input(decision, 0), self._strategy(decision).inputs[0]

    def _input(self, decision: int, position: int) -> fx.Node:
        """Return the value that arrives at an input, moved to the layout it asks for."""
        if (decision, position) in self.bucket_of and (decision, position) not in self.by_edge:
            self._bucket(self.bucket_of[decision, position])
        if (decision, position) in self.casts_left:
            self._cast(self.casts_left[decision, position])
        edge, end = self.space.inbound[decision, position], (decision, position)
        path = self.space.path(edge, self.choices)
        value = self.by_edge.get(end) or self._value(edge.source, edge.source_output)
        again = self._moves_again(edge, path)
        for move, regathered in zip(path.moves, path.regathered, strict=True):
            if end in self.by_edge and not makes_parts(move):
                continue  # the bucket has made it
            if regathered:
                value = self._gather_alone(value, move, edge.tensor, regather=(0,))
            else:
                value = self._move(value, move, edge.tensor, again)
        return value

    def _moves_again(self, edge: TensorEdge, path: ReshardPath) -> bool:
        """Return whether the collectives of a path run again in the backward (see `costs.memory.second_forward`)."""
        if self.segment is None or not path.moves or edge.tensor.is_of_weights:
            return False
        source = self.space.decisions[edge.source]
        is_moved = source.kind == "shared_reshard"
        segment = self.reshard_segments.get(edge.source) if is_moved else self.modes.get(source.node)
        ends = path.moves[0].before, path.moves[-1].after
        before, after = (edge.tensor.local_bytes(each, self.mesh.sizes) for each in ends)
        return bool(moves_again(self.segment[1], segment == self.segment, before, after))

    def _value(self, decision: int, output: int) -> fx.Node:
        """Return a decision's output; a shared reshard is emitted when it is first used."""
        if (decision, output) not in self.values:
            missing = self.space.decisions[decision]
            if missing.name in self.space.weight_casts:  # a bucket takes its weights before the first of them is used
                self._call(missing.node)
            else:
                assert missing.kind == "shared_reshard", f"{missing.name} is not there yet"
                self.reshard_segments[decision] = self.segment
                self.values[decision, 0] = self._input(decision, 0)
        return self.values[decision, output]

    def _move(self, value: fx.Node, move: Move, tensor: MovedTensor, again: bool) -> fx.Node:
        if move.num_parts(self.mesh.sizes) == 1:
            return value
        if tensor.reduced is not None and move.target is R and (move.source is I or move.source.is_split):
            return self._summed_as(value, move, tensor)
        call = move_call(move, tensor.shape, self.mesh)
        if move.source is I and not tensor.requires_grad:  # a slice of a mask or of rotary tables serves every layer
            key = (value, move.axes, move.target)
            if key not in self.slices:
                self.slices[key] = self._emit_move(call, value, move.after, again)
            return self.slices[key]
        return self._emit_move(call, value, move.after, again)

    def _summed_as(self, value: fx.Node, move: Move, tensor: MovedTensor) -> fx.Node:
        """Move a weight by itself whose gradient is summed in another dtype than its own."""
        if move.source is not I:
            return self._gather_alone(value, move, tensor)
        axis = joined_name(self.mesh.names, move.axes)
        new = self._emit(reduce_gradients, (axis, value), {"reduce": tensor.reduced}, None)
        return self._emit_weight(operator.getitem, (new, 0), move.after)

    def _gather_alone(self, value: fx.Node, move: Move, tensor: MovedTensor, **options: Any) -> fx.Node:
        """Gather a weight that shares its path with no other; with `regather` it is freed after use."""
        axis, dim = joined_name(self.mesh.names, move.axes), move.source.dim
        size = move.after.local_shape(tensor.shape, self.mesh.sizes)[dim]
        options |= {} if tensor.reduced is None else {"reduce": tensor.reduced}
        gathered = self._emit(gather_parameters, (axis, (dim,), (size,), value), options, None)
        return self._emit_weight(operator.getitem, (gathered, 0), move.after)

    def _bucket(self, bucket: Bucket) -> None:
        """Move the parameters of a bucket together, one collective per step of their common path."""
        late = self.cast_late
        values = [self._input(each, 0) if each in late else self._value(each, 0) for each in bucket.sources]
        casts = [late.get(source) for source in bucket.sources]
        layouts = list(bucket.layouts)
        for step in bucket.steps:
            moves = [path.moves[step.number] for path in bucket.paths]
            if step.gathers:
                dims = tuple(move.source.dim for move in moves)
                sizes = tuple(
                    move.after.local_shape(shape, self.mesh.sizes)[dim]
                    for move, shape, dim in zip(moves, bucket.shapes, dims, strict=True)
                )
                kwargs: dict[str, Any] = {"regather": bucket.regathered} if bucket.regathered else {}
                if any(casts):
                    kwargs["to"], casts = tuple(casts), [None] * len(casts)
                if bucket.reduced is not None:
                    kwargs["reduce"] = bucket.reduced
                new = self._emit(gather_parameters, (step.axis, dims, sizes, *values), kwargs, None)
                new.meta[LAYER] = self.layer_numbers[bucket.layer]
            else:
                gathered_later = any(each.gathers and each.number > step.number for each in bucket.steps)
                kwargs = {"in_place": True} if bucket.in_place or gathered_later else {}
                if bucket.reduced is not None and not any(casts):
                    kwargs["reduce"] = bucket.reduced
                new = self._emit(reduce_gradients, (step.axis, *values), kwargs, None)
            layouts = [move.after for move in moves]
            values = [self._emit_weight(operator.getitem, (new, i), layout) for i, layout in enumerate(layouts)]
        together: dict[str, dict[Value, tuple[torch.dtype, Layout]]] = {}
        for end, value, cast, layout in zip(bucket.ends, values, casts, layouts, strict=True):
            self.by_edge[end] = value
            if cast is not None:
                section = module_of(self.space.decisions[end[0]].node)
                self.casts_left[end] = together.setdefault(layer_of(section) or section, {})
                self.casts_left[end][end] = cast, layout

    def _cast(self, weights: Mapping[Value, tuple[torch.dtype, Layout]]) -> None:
        """Cast weights of a layer that have been moved."""
        values = [self.by_edge[end] for end in weights if self.casts_left.pop(end)]
        new = self._emit(cast_weights, (tuple(each for each, _ in weights.values()), *values), {}, None)
        for number, (end, (_, layout)) in enumerate(weights.items()):
            self.by_edge[end] = self._emit_weight(operator.getitem, (new, number), layout)

    def _emit_move(self, call: MoveCall, value: fx.Node, layout: Layout, again: bool) -> fx.Node:
        """Emit a move of a tensor, whose collectives run `again` in the backward or are saved."""
        new = self._emit(call.function, (value, *call.args), call.kwargs, layout)
        new.meta[OFFLOADABLE] = value.meta.get(OFFLOADABLE, False)
        if value in self.weights:
            self.weights.add(new)
        elif self.segment is not None:
            self._mark(new, call.function in COMMUNICATING and not again)
        return new

    def _emit_weight(self, function: Callable[..., Any], args: tuple[Any, ...], layout: Layout) -> fx.Node:
        new = self._emit(function, args, {}, layout)
        self.weights.add(new)
        return new

    def _mark(self, node: fx.Node, kept: bool) -> None:
        """Say what recomputation does with a call of the current segment."""
        assert self.segment is not None
        node.meta[MARK] = Mark(*self.segment, kept)

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
        owner = layer_of(self.section) or self.section
        number = self.layer_numbers.get(self.joined.get(owner, owner))
        if number is not None:
            node.meta[LAYER] = number
        return node

    def _strategy(self, number: int):
        return self.space.decisions[number].candidates.strategies[self.choices[number]]

    @property
    def mesh(self) -> Mesh:
        return self.space.mesh
