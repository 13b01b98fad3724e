"""Local sizes, in symbols, of the tensors that a device holds in a layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.space.expert_rows import padded_share
from autopar.costs.space.space import ExpertRows, Space, TensorEdge
from autopar.ir.sharding.layout import Layout
from autopar.views.formulas.symbolic_shapes import SymbolicShapes
from autopar.views.formulas.symbols import Polynomial, Size, axis_symbols


@dataclass(frozen=True, slots=True)
class Axes:
    """A mesh whose sizes are symbols, for functions that ask no more of one; an axis of one device stays a number."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        return self.sizes[self.names.index(axis)]


class LocalSizes:
    """The shapes of a space's tensors and the sizes of their parts; what must be whole for these is noted."""

    def __init__(self, space: Space, shapes: SymbolicShapes) -> None:
        self._space = space
        named = zip(axis_symbols(space.mesh), space.mesh.sizes, strict=True)
        sizes = tuple(Size.symbol(name, size) if size > 1 else size for name, size in named)
        self.axes = Axes(space.mesh.names, sizes)
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
