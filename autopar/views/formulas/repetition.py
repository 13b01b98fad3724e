"""Layers: the stacks of equal numbered modules of a model, and how often each part of a plan's cost stands in them.

layers      what every layer has: one more layer adds the mean of those that are there
layers - 1  what stands between two layers, or in all but one of them
1           what stands in one layer alone, or in none
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.costs.space.space import Space, TensorEdge
from autopar.ir.program.calls import module_of
from autopar.ir.program.paths import split_at_number
from autopar.ir.program.program import Program
from autopar.views.formulas.symbols import LAYERS, Polynomial


@dataclass(frozen=True, slots=True)
class Stack:
    """`model.layers.0` to `model.layers.31`: the modules below `prefix` whose parameters are alike."""

    prefix: str
    numbers: tuple[str, ...]

    def place(self, name: str) -> tuple[int, str] | None:
        """Return the layer of a module or parameter, and its name inside the layer; None if it is outside the stack."""
        found = split_at_number(name)
        if found is None or found[0] != self.prefix or found[1] not in self.numbers:
            return None
        return self.numbers.index(found[1]), found[2]


def stacks_of(program: Program) -> tuple[Stack, ...]:
    """Return the longest stacks (an encoder and a decoder, if they are equally long), each of two layers at least.

    Modules are layers of one stack where most of them have the same parameters, and these are most of a layer's.
    """
    below: dict[str, dict[str, set[Hashable]]] = defaultdict(lambda: defaultdict(set))
    placeholders = program.placeholders()
    for name, placeholder in program.parameters.items():
        found = split_at_number(name)
        if found is not None:
            prefix, number, inside = found
            shape = placeholders[placeholder].meta["tensor"].shape
            below[prefix][number].add((inside, shape))
    stacks = [Stack(prefix, tuple(layers)) for prefix, layers in below.items() if len(layers) > 1 and _alike(layers)]
    longest = max((len(stack.numbers) for stack in stacks), default=0)
    return tuple(stack for stack in stacks if len(stack.numbers) == longest)


def _alike(layers: dict[str, set[Hashable]]) -> bool:
    common = set.intersection(*layers.values())
    return all(2 * len(common) > len(each) for each in layers.values())


@dataclass(frozen=True, slots=True)
class _Place:
    """Position of a decision: its layer of a stack, and a name that is equal in every layer; no layer in no stack."""

    name: Hashable
    layer: int | None = None
    stack: str = ""


class Repetition:
    """Counts of decisions and edges: one of three polynomials in `layers` that equal one at the current depth."""

    def __init__(self, space: Space, stacks: Sequence[Stack]) -> None:
        self._space = space
        length = self._length = len(stacks[0].numbers) if stacks else 0
        if length:
            self._each = Polynomial.symbol(LAYERS) * Fraction(1, length)
            self._between = (Polynomial.symbol(LAYERS) + -1) * Fraction(1, length - 1)
        self._targets: dict[int, list[TensorEdge]] = defaultdict(list)
        for edge in space.edges:
            self._targets[edge.source].append(edge)
        self._places: dict[int, _Place] = {}
        self._place_all(stacks)
        self._seen: dict[Hashable, set[int]] = defaultdict(set)
        for place in (*self._places.values(), *(self._edge(edge)[0] for edge in space.edges)):
            if place.layer is not None:
                self._seen[place.name].add(place.layer)

    def of_decision(self, number: int) -> Polynomial:
        return self._count(self._places[number], between=False)

    def of_edge(self, edge: TensorEdge) -> Polynomial:
        return self._count(*self._edge(edge))

    def _count(self, place: _Place, between: bool) -> Polynomial:
        here, length = len(self._seen[place.name]), self._length
        if here <= 1 and not between:
            return _ONCE
        return self._between if here < length and (between or here == length - 1) else self._each

    def _edge(self, edge: TensorEdge) -> tuple[_Place, bool]:
        """Return the place of an edge, and whether it lies between two layers of one stack."""
        source, target = self._places[edge.source], self._places[edge.target]
        ends = (edge.source_output, edge.target_input)
        if target.layer is None:
            return replace(source, name=(source.name, edge.target, ends)), False
        if source.layer is None or source.stack != target.stack:
            return replace(target, name=(edge.source, target.name, ends)), False
        return replace(target, name=(source.name, target.name, ends)), source.layer != target.layer

    def _place_all(self, stacks: Sequence[Stack]) -> None:
        parameters = self._space.program.parameter_names
        counts: Counter[Hashable] = Counter()
        shared_reshards = []
        for number, decision in enumerate(self._space.decisions):
            if decision.kind == "shared_reshard":
                shared_reshards.append(number)
                continue
            module = parameters.get(decision.node.name) or module_of(decision.node)
            place = next(((stack.prefix, at) for stack in stacks if (at := stack.place(module))), None)
            if place is None:
                self._places[number] = _Place(number)
                continue
            prefix, (layer, inside) = place
            kind = (prefix, inside, decision.candidates.call.name if decision.candidates.call else decision.kind)
            counts[kind, layer] += 1
            self._places[number] = _Place((kind, counts[kind, layer]), layer, prefix)
        for number in reversed(shared_reshards):  # a shared reshard's consumers first, which may be shared reshards
            self._places[number] = self._of_shared_reshard(number)

    def _of_shared_reshard(self, number: int) -> _Place:
        """Return the place of a shared reshard: its consumers' if that is one layer, else where the tensor was made."""
        edges = self._targets[number]
        places = [self._places[edge.target] for edge in edges]
        inside = all(place.layer is not None for place in places)
        if inside and len({(place.stack, place.layer) for place in places}) == 1:
            consumers = tuple((place.name, edge.target_input) for place, edge in zip(places, edges, strict=True))
            return replace(places[0], name=("shared_reshard", consumers))
        decision = self._space.decisions[number]
        origin, suffix = decision.node.name, decision.name.removeprefix(decision.node.name)
        place = self._places[self._space.index[origin]]
        return replace(place, name=("shared_reshard", place.name, suffix))


_ONCE = Polynomial.of(1)
