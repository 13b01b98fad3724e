"""Default annotations of manual mode, which fix every decision that no annotation names.

They leave the solver nothing to search.

axes        an axis on which an annotation splits something other than samples is the annotations' own: nothing else is
            split there. On every other axis calls are data parallel
following   behind an annotated call, operations that keep the split dim follow the layout of their input, up to a
            product by a weight, or an operation that needs the dim whole (column, then GELU, then row)
parameters  stored as the calls that use them take them: whole, or in the parts of a column or a row
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.costs.space.space import Space
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.rule import factors_of
from autopar.strategies.padding import Padding
from autopar.strategies.presets.regions import product_of
from autopar.strategies.presets.split import Split
from autopar.strategies.roles import RoledCall, RoledProgram, Value

MANUAL = "manual"
_Specified = Mapping[str, str | None]
"""Call → the factor that annotations split on an axis; None: they keep it whole."""


def without_warnings(space: Space, masks: Mapping[int, np.ndarray]) -> tuple[Annotation, ...]:
    """Return annotations for every call and parameter, which give way to the pins `masks` of the user's."""
    graph = RoledProgram.of(space.program)
    split = Split(graph, space.mesh, MANUAL)
    for number, axis in enumerate(space.mesh.names):
        specified = _specified_on(space, masks, number)
        split.along(axis, _Following(graph, space.mesh, axis, specified).factor)
    return split.annotations()


def _specified_on(space: Space, masks: Mapping[int, np.ndarray], axis: int) -> _Specified:
    """Return what pins leave of calls on an axis, for those of which they leave one thing."""
    found: dict[str, str | None] = {}
    for number, mask in masks.items():
        decision = space.decisions[number]
        if decision.kind == "call":
            strategies = decision.candidates.strategies
            left = {factors_of(strategies[each].choices[axis])[-1:] for each in np.flatnonzero(mask)}
            if len(left) == 1:
                found[decision.name] = next(iter(left.pop()), None)
    return found


class _Following:
    """One walk along the calls of a graph, in their order, on one mesh axis."""

    def __init__(self, graph: RoledProgram, mesh: Mesh, axis: str, specified: _Specified) -> None:
        self._graph, self._parts, self._specified = graph, mesh.size(axis), specified
        self._padding = Padding.of(graph)
        roles = ((graph.calls[name], factor) for name, factor in specified.items())
        self._is_taken = any(factor is not None and call.roles.get(factor) != "data" for call, factor in roles)
        self._split: dict[Value, int] = {}
        """Tensor → the dim that is split on account of an annotation."""

    def factor(self, call: RoledCall) -> str | None:
        """Return the factor of a call that the axis is to split; None: none."""
        if call.name in self._specified:
            found = self._specified[call.name]
        else:
            found = self._followed(call)
            if found is None:
                return None if self._is_taken else call.factor_of("data")
        for position, term in enumerate(call.out_terms):
            dim = term.dim_of(found) if found is not None else None
            if dim is not None:
                self._split[call.name, position] = dim
        return found

    def _followed(self, call: RoledCall) -> str | None:
        """Return the factor in which all activations that have it are split already, if the call keeps it split."""
        held = {position: self._split[value] for position, value in enumerate(call.inputs) if value in self._split}
        factors = {call.in_terms[position].dims[dim][0] for position, dim in held.items()}
        if len(factors) != 1 or product_of(self._graph, call) is not None:
            return None
        factor = factors.pop()
        size = call.bound.sizes[factor]
        even = size % self._parts == 0 or (size >= self._parts and factor in self._padding.factors[call.name])
        others = (
            position
            for position, value in enumerate(call.inputs)
            if position not in held and self._graph.is_activation(value)
        )
        whole = any(factor in call.in_terms[position].factors for position in others)
        kept = all(term.dim_of(factor) is not None for term in call.out_terms)
        return factor if even and kept and not whole and factor in call.ruled.splittable else None
