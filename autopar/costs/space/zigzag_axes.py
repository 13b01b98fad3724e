"""Axes that zigzag-shard positions: those over which some causal attention divides its queries.

Plans are searched for with all axes that pins let a causal attention divide its queries over. If the best plan leaves
some of them to other factors, such as heads, it is searched for once more with positions in order there, which needs no
copies: it is as good or better. That is left out where it changes nothing: no tensor of the plan is zigzag-sharded, and
so many samples lie on each device that collectives copy in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from autopar.costs.space.space import Decision, Space
from autopar.costs.space.strategy import Strategy
from autopar.strategies.roles import RoledProgram
from autopar.strategies.zigzag import QUERIES, later_see_more


def possible_zigzag_axes(space: Space, pins: Mapping[int, np.ndarray]) -> frozenset[str]:
    """Return the axes of more than one device over which pins let some causal attention divide its queries."""
    return _dividing(
        space,
        (
            strategy
            for number, decision in _attentions(space)
            for index, strategy in enumerate(decision.candidates.strategies)
            if number not in pins or pins[number][index]
        ),
    )


def zigzag_axes_of(space: Space, choices: Sequence[int]) -> frozenset[str]:
    """Return the axes over which some causal attention divides its queries by these choices."""
    return _dividing(space, (each.candidates.strategies[choices[number]] for number, each in _attentions(space)))


def is_worth_another_search(space: Space, choices: Sequence[int], needed: Collection[str]) -> bool:
    """Return True if a plan in which only the `needed` axes zigzag-shard may differ from the one of these choices."""
    others = {name for name in space.zigzag_axes if name not in needed}
    samples = RoledProgram.of(space.program).samples
    return any(
        samples * space.mesh.size(name) <= space.mesh.num_devices or _is_zigzag_over(space, choices, name)
        for name in others
    )


def _is_zigzag_over(space: Space, choices: Sequence[int], axis: str) -> bool:
    """Return True if some tensor is zigzag-sharded over an axis."""
    place = space.mesh.names.index(axis)
    chosen = (each.candidates.strategies[choice] for each, choice in zip(space.decisions, choices, strict=True))
    return any(layout[place].zigzag for each in chosen for layout in (*each.inputs, *each.outputs))


def _attentions(space: Space) -> list[tuple[int, Decision]]:
    calls = RoledProgram.of(space.program).calls
    return [
        (number, each)
        for number, each in enumerate(space.decisions)
        if each.kind == "call" and later_see_more(calls[each.name])
    ]


def _dividing(space: Space, strategies: Iterable[Strategy]) -> frozenset[str]:
    named = {axis for each in strategies for axis in each.axes_by_factor(space.mesh).get(QUERIES, ())}
    return frozenset(axis for axis in named if space.mesh.size(axis) > 1)
