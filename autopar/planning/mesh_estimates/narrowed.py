"""Spaces of many mesh axes, narrowed to the choices that plans on fewer axes make.

With n choices for each axis a call has n ** axes strategies, and an edge the square of that. Plans on one and on two
axes make few of these choices. On three axes a call has all combinations of those, and of none, over its axes:

    on two axes     data | column,  data | expert         of data, column, row, expert, sequence, partial, none
    on three        {data, column, expert, none} ** 3     instead of 7 ** 3

Equal calls share their candidates, and so what any of them has chosen. Calls not planned on fewer axes have all
strategies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Decision, Space
from autopar.costs.space.strategy import Strategy
from autopar.ir.sharding.layout import I, Layout
from autopar.ir.sharding.rule import NONE

CHOOSING = ("call", "parameter")
"""Kinds of decisions that are narrowed; shared reshards follow them."""
ALWAYS = frozenset((NONE, repr(I)))


@dataclass(slots=True)
class Choices:
    """Decision, by name → what plans have chosen for it on some axis."""

    made: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, space: Space, choices: Sequence[int]) -> None:
        """Take the choices of a plan into account."""
        for decision, choice in zip(space.decisions, choices, strict=True):
            if decision.kind in CHOOSING:
                self.made[decision.name].update(_on_axes(decision, decision.candidates.strategies[choice]))

    def narrowed(self, space: Space, pins: Pins) -> Space:
        """Return the space with strategies of these choices alone; what is pinned keeps all."""
        offered = self._offered(space)
        masks = {
            number: mask
            for number, decision in enumerate(space.decisions)
            if (mask := offered.get(id(decision.candidates))) is not None and number not in pins
        }
        return space.keeping(masks | _of_shared_reshards(space, masks))

    def _offered(self, space: Space) -> dict[int, np.ndarray]:
        """Return which candidate strategies use choices that any decision with the same candidates made."""
        words: dict[int, set[str]] = defaultdict(set)
        by_candidates: dict[int, Decision] = {}
        for decision in space.decisions:
            if decision.kind in CHOOSING and decision.name in self.made:
                words[id(decision.candidates)] |= self.made[decision.name]
                by_candidates[id(decision.candidates)] = decision
        return {
            each: np.array([ALWAYS.union(words[each]).issuperset(_on_axes(d, s)) for s in d.candidates.strategies])
            for each, d in by_candidates.items()
        }


def _on_axes(decision: Decision, strategy: Strategy) -> tuple[str, ...]:
    """Return the choice of a call for each axis, or the placement of a parameter."""
    return strategy.choices if decision.kind == "call" else tuple(map(repr, strategy.outputs[0]))


def _of_shared_reshards(space: Space, masks: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return which strategies of shared reshards have layouts that are left at either end."""

    def left(number: int) -> list[Strategy]:
        every = space.decisions[number].candidates.strategies
        mask = masks.get(number)
        return list(every) if mask is None else [each for each, is_left in zip(every, mask, strict=True) if is_left]

    taken: dict[int, set[Layout]] = defaultdict(set)
    for edge in reversed(space.edges):  # the edges out of a shared reshard lie behind the one into it
        if space.decisions[edge.source].kind != "shared_reshard":
            continue
        if space.decisions[edge.target].kind == "shared_reshard":
            taken[edge.source] |= taken[edge.target]
        else:
            taken[edge.source].update(each.inputs[edge.target_input] for each in left(edge.target))
    found: dict[int, np.ndarray] = {}
    for number, decision in enumerate(space.decisions):
        if decision.kind != "shared_reshard":
            continue
        edge = space.inbound[number, 0]
        while space.decisions[edge.source].kind == "shared_reshard":
            edge = space.inbound[edge.source, 0]
        layouts = taken[number] | {each.outputs[edge.source_output] for each in left(edge.source)}
        found[number] = np.array([each.outputs[0] in layouts for each in decision.candidates.strategies])
    return found
