"""From a space of plans to a plan: the problem is stated, solved, and its answer written down.

`make_plan` solves; `choices_of` reads the choices of a plan that was made before, for the same graph and mesh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost import base_name
from autopar.errors import PlanError
from autopar.plan import Plan, PlanRow
from autopar.problem import Edge, Node, Problem, Solution
from autopar.reshard import Transfer
from autopar.solve import solve
from autopar.space import Decision, Space

Pins = Mapping[int, np.ndarray]
"""Decision → which of its strategies are allowed."""


def make_plan(
    space: Space, pins: Pins, memory: int | None = None, solver: str = "auto", time_limit: float = 120.0
) -> tuple[Plan, tuple[int, ...]]:
    """The best plan under the pins and the memory limit (bytes per device), and its choice per decision.

    Raises InfeasibleError where there is none.
    """
    solution = solve(_problem(space, pins, memory), solver=solver, time_limit=time_limit)  # type: ignore[arg-type]
    return _plan(space, solution, memory), solution.choices


def choices_of(plan: Plan, space: Space) -> tuple[int, ...]:
    """The choices of a plan on a space; PlanError with the difference where it belongs to another graph or mesh."""
    if (plan.mesh.names, plan.mesh.sizes) != (space.mesh.names, space.mesh.sizes):
        raise PlanError(
            f"the plan is for the mesh {plan.mesh}, this mesh is {space.mesh}; "
            "plan again, or load the plan that was made for this mesh."
        )
    here = _descriptions(space)
    if here != plan.descriptions:
        raise PlanError(f"the plan belongs to another model or other inputs: {_difference(plan.descriptions, here)}")
    found = []
    for decision in space.decisions:
        names = [str(strategy) for strategy in decision.menu.strategies]
        wanted = plan.choices.get(decision.name, "nothing")
        if wanted not in names:
            raise PlanError(
                f'{decision.name}: the plan chooses "{wanted}", which is not offered here; offered are '
                f"{', '.join(names[:8])}. The plan was made by another version of the rules: plan again."
            )
        found.append(names.index(wanted))
    return tuple(found)


def evaluate(space: Space, choices: Sequence[int]) -> float:
    """Predicted seconds of a choice per decision, in the space's own cost."""
    seconds = sum(float(d.menu.seconds[choice]) for d, choice in zip(space.decisions, choices, strict=True))
    return seconds + sum(space.path(wire, choices).seconds for wire in space.wires)


def _problem(space: Space, pins: Pins, memory: int | None) -> Problem:
    nodes = []
    for number, decision in enumerate(space.decisions):
        seconds = decision.menu.seconds
        if number in pins:
            seconds = np.where(pins[number], seconds, np.inf)
        nodes.append(Node(decision.name, seconds, decision.num_bytes))
    matrices: dict[object, np.ndarray] = {}
    edges = []
    for wire in space.wires:
        ends = space.decisions[wire.source].menu, space.decisions[wire.target].menu
        key = (id(ends[0]), wire.source_output, id(ends[1]), wire.target_input, wire.tensor)
        if key not in matrices:
            table = space.table(wire)
            rows = [table.index[layout] for layout in space.source_layouts(wire)]
            columns = [table.index[layout] for layout in space.target_layouts(wire)]
            matrices[key] = table.seconds[np.ix_(rows, columns)]
        edges.append(Edge(wire.source, wire.target, matrices[key]))
    return Problem(tuple(nodes), tuple(edges), memory)


def _plan(space: Space, solution: Solution, memory: int | None) -> Plan:
    moved: dict[int, list[Transfer]] = defaultdict(list)
    waits: dict[int, float] = defaultdict(float)
    unused = _without_gradient(space)
    for wire in space.wires:
        path = space.path(wire, solution.choices)
        moved[wire.target].extend(t for t in path.transfers if not (t.backward and wire.target in unused))
        waits[wire.target] += path.seconds
    traffic: dict[tuple[str, str], int] = defaultdict(int)
    rows = []
    parameters = {placeholder: name for name, placeholder in space.program.parameters.items()}
    for number, (decision, choice) in enumerate(zip(space.decisions, solution.choices, strict=True)):
        transfers = (*moved[number], *decision.menu.strategies[choice].transfers)
        for transfer in transfers:
            traffic[transfer.collective, transfer.axis] += transfer.num_bytes
        rows.append(_row(space, parameters, decision, choice, transfers, waits[number]))
    names = [str(d.menu.strategies[c]) for d, c in zip(space.decisions, solution.choices, strict=True)]
    return Plan(
        mesh=space.mesh,
        fingerprint=space.program.fingerprint,
        choices={d.name: name for d, name in zip(space.decisions, names, strict=True)},
        descriptions=_descriptions(space),
        rows=tuple(rows),
        seconds=solution.seconds,
        bound=solution.bound,
        peak_bytes=int(sum(int(d.num_bytes[c]) for d, c in zip(space.decisions, solution.choices, strict=True))),
        traffic=dict(traffic),
        solver=solution.solver,
        memory_limit=memory,
        unruled=space.unruled(),
    )


def _without_gradient(space: Space) -> frozenset[int]:
    """Outputs that no gradient comes back to: where a scalar is returned, the backward begins there and only there."""
    outputs = [number for number, decision in enumerate(space.decisions) if decision.kind == "output"]
    infos = [space.decisions[number].node.meta["tensor"] for number in outputs]
    losses = {n for n, info in zip(outputs, infos, strict=True) if info.requires_grad and not info.shape}
    return frozenset(outputs) - losses if losses else frozenset()


def _row(
    space: Space,
    parameters: Mapping[str, str],
    decision: Decision,
    choice: int,
    transfers: Sequence[Transfer],
    wait: float,
) -> PlanRow:
    strategy = decision.menu.strategies[choice]
    node = decision.node
    module = parameters.get(node.name) or str(node.meta.get("module", ""))
    return PlanRow(
        name=decision.name,
        kind=decision.kind,
        module=module,
        operation=base_name(decision.menu.call) if decision.menu.call else decision.kind,
        roles=tuple(decision.role(choice, axis) for axis in range(space.mesh.ndim)),
        layout=str(strategy.outputs[0]) if strategy.outputs else "",
        seconds=float(decision.menu.seconds[choice]) + wait,
        transfers=tuple((t.collective, t.axis, t.num_bytes) for t in transfers),
    )


def _descriptions(space: Space) -> dict[str, str]:
    def describe(decision: Decision) -> str:
        found = decision.node.meta["tensor"]
        infos = found if isinstance(found, tuple) else (found,)
        operation = base_name(decision.menu.call) if decision.menu.call else decision.kind
        return f"{operation} {' '.join(map(str, infos))}"

    return {decision.name: describe(decision) for decision in space.decisions}


def _difference(planned: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The first things that differ between the graph of a plan and this one."""
    lines = []
    for name in dict.fromkeys((*planned, *here)):
        if planned.get(name) != here.get(name):
            lines.append(f"{name} is {planned.get(name, 'absent')} in the plan and {here.get(name, 'absent')} here")
    shown = "; ".join(lines[:3])
    more = f" (and {len(lines) - 3} more differences)" if len(lines) > 3 else ""
    return f"{shown}{more}. Plan again for this model and these inputs."
