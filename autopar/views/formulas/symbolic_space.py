"""The space of one plan in symbols: each decision has its chosen strategy alone, and tensors and axes have symbols."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.space.call_candidates import Candidates
from autopar.costs.space.expert_rows import padded_share
from autopar.costs.space.space import Decision, ExpertRows, Space, TensorEdge
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import Call
from autopar.strategies import rule_of
from autopar.views.formulas.symbolic_shapes import SymbolicShapes, input_keys
from autopar.views.formulas.symbols import Polynomial, Size, axis_symbols

Shapes = Sequence[tuple[int, ...]]


class Axes(Mesh):
    """A mesh whose sizes are symbols; an axis of one device stays a number. It equals no mesh of numbers."""


class LocalSizes:
    """The shapes of a space's tensors and the sizes of their parts; what must be whole for these is noted."""

    def __init__(self, space: Space, shapes: SymbolicShapes) -> None:
        self._space = space
        named = zip(axis_symbols(space.mesh), space.mesh.sizes, strict=True)
        sizes = tuple(Size.symbol(name, size) if size > 1 else size for name, size in named)
        self.axes = Axes(dict(zip(space.mesh.names, sizes, strict=True)), space.mesh.hardware)
        self.shapes, self.symbols = shapes.shapes, shapes.symbols
        self.fractions: set[Polynomial] = set()

    def local(self, shape: Sequence[int], layout: Layout) -> Size:
        """Return the elements that a device holds of a tensor."""
        local = [Size.of(size) for size in layout.local_shape(shape, self.axes.sizes)]
        self.fractions.update(size.polynomial for size in local if size.polynomial.is_fraction)
        return Size.of(math.prod(local))

    def share(self, rows: ExpertRows | None, choices: Sequence[int]) -> Polynomial:
        """Return the ratio of the busiest device's expert rows to an equal share."""
        if self._space.uneven_share(rows, choices) == 0:
            return Polynomial.of(1)
        assert rows is not None, "uneven, and no rows of experts"
        layout = self._space.decisions[rows.counts].candidates.strategies[choices[rows.counts]].outputs[rows.position]
        ranks = math.prod(size for size, each in zip(self.axes.sizes, layout, strict=True) if each.is_split)
        return Polynomial.smaller(self._space.imbalance, ranks)

    def padded(self, moved: Iterable[Transfer], edge: TensorEdge, choices: Sequence[int]) -> Iterator[Transfer]:
        """Yield the transfers of an edge, those of padded rows of experts with the bytes of their padding."""
        rows = self._space.rows_on(edge)
        share = self._space.share(rows, choices) if padded_share(self._space) is not None else 1
        for each in moved:
            if share != 1:
                num_bytes = math.ceil(int(each.num_bytes) * share)
                whole = Size.symbol(f"ceiling({self.share(rows, choices) * each.num_bytes})", num_bytes)
                each = replace(each, num_bytes=whole, unpadded=each.num_bytes)
            yield each


def symbolic_space(space: Space, choices: Sequence[int], sizes: LocalSizes) -> Space:
    """Return the space; decisions of equal candidates, choices and shapes share theirs."""
    known: dict[Hashable, Candidates] = {}

    def chosen(number: int, decision: Decision) -> Candidates:
        call, choice = decision.candidates.call, choices[number]
        if call is not None:
            results = ((decision.name, position) for position in range(len(call.outputs)))
            shapes = [sizes.shapes[key] for key in (*input_keys(space, decision), *results)]
        else:
            shapes = [passed_on(number, 0)]
        key = (id(decision.candidates), choice, *map(id, shapes))
        if key not in known:
            known[key] = _chosen(decision.candidates, choice, shapes)
        return known[key]

    def passed_on(number: int, output: int) -> tuple[int, ...]:
        """Return the shape of a tensor: a shared reshard passes on that of its source, and so does an output."""
        while (edge := space.inbound.get((number, 0))) is not None and space.decisions[number].kind != "call":
            number, output = edge.source, edge.source_output
        return sizes.shapes[space.decisions[number].node.name, output]

    decisions = [replace(each, candidates=chosen(number, each)) for number, each in enumerate(space.decisions)]
    shapes_on = [(edge, passed_on(edge.source, edge.source_output)) for edge in space.edges]
    edges = [replace(edge, tensor=replace(edge.tensor, shape=shape)) for edge, shape in shapes_on]
    return replace(space, decisions=decisions, edges=edges, inbound={edge.end: edge for edge in edges})


def _chosen(candidates: Candidates, choice: int, shapes: Shapes) -> Candidates:
    found, some = replace(candidates, strategies=(candidates.strategies[choice],)), slice(choice, choice + 1)
    found = replace(found, seconds=candidates.seconds[some], forward_seconds=candidates.forward_seconds[some])
    if candidates.call is None or candidates.bound is None:
        return found
    inputs, outputs = shapes[: len(candidates.call.inputs)], shapes[len(candidates.call.inputs) :]
    call = _call(candidates.call, inputs, outputs)
    op = candidates.op if candidates.reason else rule_of(call)  # it may state FLOPs by the shapes
    return replace(found, call=call, op=op, bound=candidates.bound.rule.bind(inputs, outputs))


def _call(call: Call, inputs: Shapes, outputs: Shapes) -> Call:
    """Return the call with these shapes, also among its arguments."""
    tensors = tuple(replace(info, shape=shape) for info, shape in zip(call.inputs, inputs, strict=True))
    left: dict[int, list[TensorInfo]] = defaultdict(list)
    for info, tensor in zip(call.inputs, tensors, strict=True):
        left[id(info)].append(tensor)

    def replaced(value: Any) -> Any:
        if isinstance(value, TensorInfo):
            return left[id(value)].pop(0)
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    arguments = {name: replaced(value) for name, value in call.arguments.items()}
    results = tuple(replace(info, shape=shape) for info, shape in zip(call.outputs, outputs, strict=True))
    return Call(call.target, tensors, results, arguments)
