"""Local sizes, in symbols, of the tensors that a device holds in a layout."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.space.expert_rows import padded_share
from autopar.costs.space.space import ExpertRows, Space, TensorEdge
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.operation import Call
from autopar.views.formulas.symbolic_shapes import Key, SymbolicShapes
from autopar.views.formulas.symbols import Polynomial, Size, axis_symbols


@dataclass(frozen=True, slots=True)
class Axes:
    """A mesh whose sizes are symbols, for functions that ask no more of one; an axis of one device stays a number."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, axis: str) -> int:
        return self.sizes[self.names.index(axis)]


class LocalSizes:
    """The shapes of a space's tensors and the sizes of their parts; what must be whole for these is noted."""

    def __init__(self, space: Space, shapes: SymbolicShapes) -> None:
        self._space = space
        self._shapes = shapes.shapes
        named = zip(axis_symbols(space.mesh), space.mesh.sizes, strict=True)
        sizes = tuple(Size.symbol(name, size) if size > 1 else size for name, size in named)
        self.axes = Axes(space.mesh.names, sizes)
        self.symbols = shapes.symbols
        self.fractions: set[Polynomial] = set()

    def shape(self, key: Key) -> tuple[int, ...]:
        """Return the global shape; equal ones are one object."""
        return self._shapes[key]

    def of_edge(self, edge: TensorEdge) -> tuple[int, ...]:
        """Return the global shape of an edge's tensor: a shared reshard passes on that of its source."""
        while self._space.decisions[edge.source].kind == "shared_reshard":
            edge = self._space.inbound[edge.source, 0]
        return self._shapes[self._space.decisions[edge.source].node.name, edge.source_output]

    def local(self, shape: Sequence[int], layout: Layout) -> Size:
        """Return the elements that a device holds of a tensor."""
        local = [Size.of(size) for size in layout.local_shape(shape, self.axes.sizes)]
        self.fractions.update(size.polynomial for size in local if size.polynomial.is_fraction)
        return Size.of(math.prod(local))

    def share(self, rows: ExpertRows | None, choices: Sequence[int]) -> str:
        """Return the ratio of the busiest device's expert rows to an equal share, as a formula; "" if it is 1."""
        if self._space.uneven_share(rows, choices) == 0:
            return ""
        assert rows is not None, "uneven, and no rows of experts"
        layout = self._space.decisions[rows.counts].candidates.strategies[choices[rows.counts]].outputs[rows.position]
        ranks = math.prod(size for size, each in zip(self.axes.sizes, layout, strict=True) if each.is_split)
        return f"Min({self._space.imbalance!r}, {Polynomial.of(ranks)})"

    def padded(self, moved: Iterable[Transfer], edge: TensorEdge, choices: Sequence[int]) -> Iterator[Transfer]:
        """Yield the transfers of an edge, those of padded rows of experts with the bytes of their padding."""
        rows = self._space.rows_on(edge)
        share = "" if padded_share(self._space) is None else self.share(rows, choices)
        for each in moved:
            if share:
                num_bytes = math.ceil(each.num_bytes * self._space.share(rows, choices))
                whole = Size.symbol(f"ceiling(({Polynomial.of(each.num_bytes)})*{share})", num_bytes)
                each = replace(each, num_bytes=whole, unpadded=each.num_bytes)
            yield each


def symbolic_call(call: Call, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> Call:
    """Return the call with these shapes, also among its arguments."""
    tensors = tuple(symbolic_info(info, shape) for info, shape in zip(call.inputs, inputs, strict=True))
    left: dict[int, list[TensorInfo]] = defaultdict(list)
    for info, tensor in zip(call.inputs, tensors, strict=True):
        left[id(info)].append(tensor)

    def replaced(value: Any) -> Any:
        if isinstance(value, TensorInfo):
            return left[id(value)].pop(0)
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    arguments = {name: replaced(value) for name, value in call.arguments.items()}
    results = tuple(symbolic_info(info, shape) for info, shape in zip(call.outputs, outputs, strict=True))
    return Call(call.target, tensors, results, arguments)


def symbolic_info(info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    return replace(info, shape=shape)
