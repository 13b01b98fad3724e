"""Conversion of a preset's wishes for each call on each mesh axis to annotations, one per node of the graph.

A preset says which factor of a call an axis splits, or none. Calls on weights alone (a cast, the slice of a packed
projection, positions that are looked up) and the parameters follow from their consumers, last to first. They are split
if all consumers want the same dim split, else whole: their gradients are summed where that costs least. Matrices of
experts of which several matmuls take slices cannot lie split as these want it (a part of gate and up in one is no part
of both). They are stored split along another dim, and slices and their gradients move by all-to-all, 2/n of the bytes
over n devices. Other packed weights are small, and stay whole: one sum more is faster than all-to-alls for each slice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from autopar.ir.sharding.annotation import FACTOR, NODE, Annotation, Specified
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.rule import NONE, factors_of
from autopar.strategies.padding import Padding
from autopar.strategies.roles import EXPERT, RoledCall, RoledProgram, Value

WHOLE = "replicated"
FREE = "?"

Wish = Callable[[RoledCall], str | None]
"""The factor of a call that an axis is to split; None: none; FREE: as the planner will."""


class Split:
    """Splits decided so far for the nodes of one graph on one mesh."""

    def __init__(self, graph: RoledProgram, mesh: Mesh, strategy: str) -> None:
        self.graph = graph
        self.padding = Padding.of(graph)
        self.mesh = mesh
        self.strategy = strategy
        self.factors: dict[str, dict[str, str | None]] = defaultdict(dict)
        """Call → axis → the factor that the axis splits; None: whole."""
        self.dims: dict[str, dict[str, int | None]] = defaultdict(dict)
        """Placeholder of a parameter → axis → the dim along which it is stored; None: whole."""
        self.stored: tuple[str, ...] = ()
        self.regather: bool | None = None

    def along(self, axis: str, wish: Wish) -> Split:
        """Split every call on an axis as `wish` says, where the factor divides; weights follow."""
        for call in self.graph.learned:
            if not call.weight_only:
                factor = wish(call)
                if factor != FREE and call.ruled.splittable:  # the planner decides where scalars are summed
                    self.factors[call.name][axis] = factor if factor and self._divides(call, axis, factor) else None
        for call in reversed([call for call in self.graph.learned if call.weight_only]):
            self.factors[call.name][axis] = self._wanted_factor(call, axis)
        for name in self.graph.parameters:
            dim = self._wanted_dim((name, 0), axis)
            dim = dim if dim is not None and self._can_be_stored_split(name, axis, dim) else None
            self.dims[name][axis] = self._exchanged(name, axis) if dim is None else dim
        return self

    def stored_over(self, axes: Iterable[str], regather: bool | None) -> Split:
        """Store parameters, with their gradients and optimizer state, in parts over axes (ZeRO)."""
        self.stored, self.regather = tuple(axes), regather
        return self

    def annotations(self) -> tuple[Annotation, ...]:
        """Return the decided splits as annotations: calls first, then parameters, then their storage."""
        found = []
        for call in self.graph.learned:
            specified: list[tuple[str, Specified]] = []
            for axis, factor in self.factors[call.name].items():
                # Tensors computed from sharded parameters alone may stay sharded.
                if factor is not None:
                    specified.append((axis, f"{FACTOR}{factor}"))
                elif not (call.weight_only and axis in self.stored):
                    specified.append((axis, WHOLE))
            if specified:
                found.append(Annotation(f"{NODE}{call.name}", tuple(specified), strategy=self.strategy))
        for name in self.graph.program.parameters.values():
            dims = self.dims[name].items()
            # An axis that shards an operation, such as experts, shards its storage, too.
            at = tuple((axis, dim) for axis, dim in dims if dim is not None or axis not in self.stored)
            if any(dim is not None for _, dim in at) and len(self.graph.infos[name, 0].shape) == 1:
                # Parts of a vector's parts would be gathered over every axis; whole, they are a few bytes.
                at += tuple((axis, None) for axis in self.stored if self.dims[name][axis] is None)
            if at:
                found.append(Annotation(f"{NODE}{name}", at, strategy=self.strategy))
        if self.stored:
            found.append(Annotation("*", storage=self.stored, regather=self.regather, strategy=self.strategy))
        return tuple(found)

    def _divides(self, call: RoledCall, axis: str, factor: str) -> bool:
        """Return whether each factor has equal parts over all axes that split it.

        A factor that comes from parameters may be padded instead, if one axis alone splits it.
        """
        return all(self._divides_one(call, axis, each) for each in factors_of(factor))

    def _divides_one(self, call: RoledCall, axis: str, factor: str) -> bool:
        if factor not in call.ruled.splittable:
            return False
        specified = self.factors[call.name].items()
        axes = [other for other, each in specified if each and factor in factors_of(each) and other != axis]
        size, parts = call.bound.sizes[factor], self._parts([*axes, axis])
        return size % parts == 0 or (not axes and size >= parts and factor in self.padding.factors[call.name])

    def _wanted_factor(self, call: RoledCall, axis: str) -> str | None:
        for position, term in enumerate(call.out_terms):
            dim = self._wanted_dim((call.name, position), axis)
            if dim is not None and self._divides(call, axis, term.dims[dim][0]):
                return term.dims[dim][0]
        return None

    def _wanted_dim(self, value: Value, axis: str) -> int | None:
        """The dim that every consumer of a tensor wants split on an axis; None where they differ."""
        wanted = {self._wanted_by(call, position, axis) for call, position in self.graph.users.get(value, ())}
        return wanted.pop() if len(wanted) == 1 else None

    def _wanted_by(self, call: RoledCall, position: int, axis: str) -> int | None:
        """The dim that a call wants split of one of its inputs."""
        factor, term = self.factors[call.name].get(axis), call.in_terms[position]
        dims = [term.dim_of(each) for each in factors_of(factor or NONE)]
        return next((dim for dim in dims if dim is not None), None)

    def _exchanged(self, name: str, axis: str) -> int | None:
        """Return another dim to store learned matrices of experts along, if their slices should be split and cannot be.

        The calls that take the slices are split along it, too.
        """
        info, users = self.graph.infos[name, 0], self.graph.users.get((name, 0), ())
        if not info.requires_grad or not users or not all(call.weight_only for call, _ in users):
            return None
        for dim in reversed(range(len(info.shape))):
            calls = self._passing((name, 0), dim, axis) if self._can_be_stored_split(name, axis, dim) else None
            if calls is not None:
                for call, factor in calls.items():
                    self.factors[call][axis] = factor
                return dim
        return None

    def _passing(self, value: Value, dim: int, axis: str) -> dict[str, str] | None:
        """The factors of calls on weights alone that keep a tensor split along a dim, as far as other calls take it.

        None where one of them cannot, or makes more of it than it takes, and where one of the others is no product by
        experts, or takes it whole.
        """
        found: dict[str, str] = {}
        for call, position in self.graph.users.get(value, ()):
            if not call.weight_only:
                if EXPERT not in call.roles.values() or self._wanted_by(call, position, axis) is None:
                    return None
                continue
            factor = call.in_terms[position].dims[dim][0]
            made = sum(info.num_elements for info in call.call.outputs)
            repeats = made > call.call.inputs[position].num_elements
            if repeats or not self._divides(call, axis, factor):
                return None
            found[call.name] = factor
            for output, term in enumerate(call.out_terms):
                kept = term.dim_of(factor)
                further = None if kept is None else self._passing((call.name, output), kept, axis)
                if further is None:
                    return None
                found |= further
        return found

    def _can_be_stored_split(self, name: str, axis: str, dim: int) -> bool:
        """Return whether a parameter can be stored split: evenly, or padded if one axis alone splits the dim."""
        axes = [other for other, each in self.dims[name].items() if each == dim and other != axis]
        size, parts = self.graph.infos[name, 0].shape[dim], self._parts([*axes, axis])
        return size % parts == 0 or (not axes and size >= parts)

    def _parts(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh.size(axis) for axis in axes)


def data(call: RoledCall) -> str | None:
    """Return the factor of a call's samples: every axis splits the batch."""
    return call.factor_of("data")


def whole(call: RoledCall) -> str | None:
    """Return no factor: nothing is split."""
    return None
