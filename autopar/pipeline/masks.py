"""Which strategies the decisions of a stage may have: what the user, its neighbours and stored parameters ask for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import fx

from autopar.pipeline.planned_blocks import PlannedBlocks
from autopar.sharding.layout import Layout
from autopar.space.space import Space


def masks_of(planned: PlannedBlocks, space: Space, storage: Mapping[str, Layout]) -> dict[int, np.ndarray]:
    """The user's pins on the decisions of a stage, the layouts of what it sends, and those of stored parameters."""
    program, whole, pins = space.program, planned.whole.space, planned.pins
    found: dict[int, np.ndarray] = {}
    for here, decision in enumerate(space.decisions):
        if decision.kind == "output":
            continue
        there = whole.index.get(decision.name, -1)
        if there in pins and whole.decisions[there].kind == decision.kind:
            menu = whole.decisions[there].menu
            names = {str(s) for s, kept in zip(menu.strategies, pins[there], strict=True) if kept}
            found[here] = np.array([str(s) in names for s in decision.menu.strategies])
    for number, value in enumerate(program.output[: program.num_results]):
        if not isinstance(value, fx.Node):
            continue
        here = space.index[f"output:{number}"]
        there = whole.index[f"output:{number - program.num_sent}"] if number >= program.num_sent else -1
        strategies = space.decisions[here].menu.strategies
        if number < program.num_sent and len(strategies) > 1:
            wanted = planned.boundary(value.name)
            found[here] = np.array([s.outputs[0] == wanted for s in strategies])
        elif there in pins:
            found[here] = pins[there]
    for name, layout in storage.items():
        if name in program.parameters:
            here = space.index[program.parameters[name]]
            stored = np.array([s.outputs[0] == layout for s in space.decisions[here].menu.strategies])
            found[here] = stored & found.get(here, True)
    return found
