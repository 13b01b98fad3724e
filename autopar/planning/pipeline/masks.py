"""Masks of a stage's strategies: constraints by the user, by neighbouring stages and by stored parameters.

A decision of a stage has the strategies that it has in the whole model, by name. One choice may be the stage's own: a
weight that several stages share, as a tied embedding, has one call in each, and may be gathered again for its backward.
Annotations constrain that choice in the stage itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import fx

from autopar.costs.space.call_candidates import Candidates
from autopar.costs.space.space import Decision, Space
from autopar.costs.space.strategy import Strategy
from autopar.ir.sharding.layout import Layout
from autopar.planning.annotations.pins import regather_pins
from autopar.planning.pipeline.planned_blocks import PlannedBlocks


def masks_of(planned: PlannedBlocks, space: Space, storage: Mapping[str, Layout]) -> dict[int, np.ndarray]:
    """Return the user's pins on the decisions of a stage, the layouts of what it sends, and those of stored
    parameters.
    """
    program, whole, pins = space.program, planned.space, planned.pins
    found: dict[int, np.ndarray] = {}
    known: dict[object, np.ndarray] = {}  # equal layers are pinned alike

    def left_of(decision: Decision, there: int, left: np.ndarray) -> np.ndarray:
        """Return the strategies of a stage's decision that are left of those of the whole model."""
        candidates = whole.decisions[there].candidates
        key = id(candidates), id(decision.candidates), left.tobytes()
        if key not in known:
            known[key] = offered(decision, candidates, left)
        return known[key]

    def offered(decision: Decision, candidates: Candidates, left: np.ndarray) -> np.ndarray:
        pinned = [each for each, is_left in zip(candidates.strategies, left, strict=True) if is_left]
        is_chosen = all(any(s.saved for s in each.strategies) for each in (candidates, decision.candidates))
        names = {_name(each, is_chosen) for each in pinned}
        return np.array([_name(each, is_chosen) in names for each in decision.candidates.strategies])

    for here, decision in enumerate(space.decisions):
        if decision.kind == "output":
            continue
        there = whole.index.get(decision.name, -1)
        if there not in pins or whole.decisions[there].kind != decision.kind:
            continue
        left = left_of(decision, there, pins[there])
        if left.any():
            found[here] = left
        elif there in planned.specified:  # if a value has no gradient, a stage may lack all of these strategies
            found[here] = left_of(decision, there, planned.specified[there])
    for number, value in enumerate(program.output[: program.num_results]):
        if not isinstance(value, fx.Node):
            continue
        here = space.index[f"output:{number}"]
        there = whole.index[f"output:{number - program.num_sent}"] if number >= program.num_sent else -1
        strategies = space.decisions[here].candidates.strategies
        if number < program.num_sent and len(strategies) > 1:
            wanted = planned.boundary(value.name)
            found[here] = np.array([s.outputs[0] == wanted for s in strategies])
        elif there in pins:
            found[here] = pins[there]
    for here, mask in regather_pins(planned.request.annotations, space, planned.request.storage).items():
        both = mask & found.get(here, True)
        if both.any():
            found[here] = both
    for name, layout in storage.items():
        if name in program.parameters:
            here = space.index[program.parameters[name]]
            stored = np.array([s.outputs[0] == layout for s in space.decisions[here].candidates.strategies])
            found[here] = stored & found.get(here, True)
    return found


def _name(strategy: Strategy, is_chosen: bool) -> str:
    """Return the name of a strategy: one for a weight that is gathered again and one that is saved, unless that is
    chosen.
    """
    return str(strategy if is_chosen else replace(strategy, saved=False))
