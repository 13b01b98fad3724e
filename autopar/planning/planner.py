"""From a space of plans to a plan: the problem is stated, solved, and its answer written down.

`make_plan` solves; `choices_of` reads the choices of a plan that was made before, for the same graph and mesh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.operations import base_name, num_backward
from autopar.errors import InfeasibleError, PlanError
from autopar.formulas.formulas import outputs_without_gradient
from autopar.hardware.collectives import Transfer, transfer_seconds
from autopar.memory.microbatches import Microbatches
from autopar.memory.model import MemoryModel
from autopar.planning.formulation import Pins, Statement
from autopar.planning.memory_limit import Answer, best_within
from autopar.planning.step_seconds import parts_of
from autopar.plans.plan import Moved, Plan, PlanRow
from autopar.program.recompute_segments import MODES
from autopar.solver.infeasibility import MemoryLimitError
from autopar.solver.problem import Problem
from autopar.space.space import Decision, Space


@dataclass(frozen=True, slots=True)
class Settings:
    """How to plan: `memory` in bytes per device, `recompute` "auto" or one mode for every segment."""

    memory: int | None = None
    recompute: str = "auto"
    solver: str = "auto"
    time_limit: float = 120.0
    gap: float = 0.0
    """Under a memory limit: how far from the best, as a share of the step, a plan may be proven to be."""

    def __post_init__(self) -> None:
        if self.recompute not in ("auto", *MODES):
            raise PlanError(f"recompute={self.recompute!r}; give {', '.join(map(repr, ('auto', *MODES)))}.")
        if not 0 <= self.gap < 1:
            raise PlanError(f"gap={self.gap!r}; give a share of the step, 0 for a plan that is proven best.")


@dataclass(frozen=True, slots=True, eq=False)
class PlanContext:
    """What a plan was made from, and how: enough to ask again with something changed."""

    space: Space
    memory_model: MemoryModel
    pins: Pins
    choices: tuple[int, ...]
    problem: Problem
    """The problem on which the bound is proven."""
    settings: Settings
    annotations: tuple[Any, ...] = ()
    mode: str = "auto"


def make_plan(
    space: Space,
    pins: Pins,
    memory: int | None = None,
    solver: str = "auto",
    time_limit: float = 120.0,
    recompute: str = "auto",
    gap: float = 0.0,
    microbatches: Microbatches | None = None,
) -> tuple[Plan, tuple[int, ...]]:
    """The best plan under the pins and the memory limit (bytes per device), and its choice per decision.

    `recompute` is "auto" (where the limit asks for it), "none", "selective" or "full" for every segment. The space is
    that of one micro-batch; with several `microbatches` the plan is the best for all of them together, its memory
    that of the step, and its seconds, rows and traffic those of a step of one micro-batch (see `step_parts`).

    Raises InfeasibleError where there is none.
    """
    settings = Settings(memory, recompute, solver, time_limit, gap)
    statement = Statement(space, MemoryModel(space, microbatches))
    answer = answer_of(statement, pins, settings)
    context = PlanContext(space, statement.memory, pins, answer.choices, answer.problem, settings)
    return written_down(context, answer), answer.choices


def replan(context: PlanContext, pins: Pins, settings: Settings | None = None) -> Plan:
    """The best plan of the same space under other pins, or with other settings too; annotations and mode stay."""
    settings = settings or context.settings
    answer = answer_of(Statement(context.space, context.memory_model), pins, settings)
    changed = replace(context, pins=pins, choices=answer.choices, problem=answer.problem, settings=settings)
    return written_down(changed, answer)


def answer_of(statement: Statement, pins: Pins, settings: Settings) -> Answer:
    """The best choices under pins; InfeasibleError where there are none. A statement may be asked again and again."""
    segments, asked = statement.memory.segments, settings.recompute
    modes = None if asked == "none" else dict.fromkeys(segments, "" if asked == "auto" else asked)
    try:
        answer = best_within(
            statement, pins, settings.memory, modes, settings.solver, settings.time_limit, settings.gap
        )
    except MemoryLimitError as error:
        raise InfeasibleError(str(error)) from error  # its text is worked out when it is asked for: here, once
    if not statement.memory.microbatches.several:
        return answer
    # What the search made least is a micro-batch's share; what could be saved of that is no more in a whole step.
    seconds = parts_of(statement.memory, answer.choices, answer.modes).seconds
    return replace(answer, seconds=seconds, bound=seconds - (answer.seconds - answer.bound))


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


def written_down(context: PlanContext, answer: Answer) -> Plan:
    """The plan that an answer comes to: rows, traffic and memory follow from the choices alone."""
    space, choices = context.space, answer.choices
    moved: dict[int, list[tuple[Transfer, float]]] = defaultdict(list)
    waits: dict[int, float] = defaultdict(float)
    held: dict[int, int] = defaultdict(int)
    unused = outputs_without_gradient(space)
    paths: dict[object, tuple[list[tuple[Transfer, float]], float]] = {}  # equal layers move alike
    for wire in space.wires:
        ends = choices[wire.source], choices[wire.target]
        key = space.kind(wire), ends
        if key not in paths:
            path = space.path(wire, choices)
            each = zip(path.transfers, path.bucketed, strict=True)
            paths[key] = [(t, transfer_seconds(t, space.mesh, space.hardware, b)) for t, b in each], path.seconds
        transfers, seconds = paths[key]
        moved[wire.target].extend(each for each in transfers if not (each[0].backward and wire.target in unused))
        waits[wire.target] += seconds
        kept = context.memory_model.wire(wire)
        if kept is not None:
            mode = _mode(context.memory_model, answer, wire.target) if len(kept) > 1 else 0
            held[wire.target] += int(kept[mode][ends])
    traffic: dict[tuple[str, str], int] = defaultdict(int)
    rows = []
    parameters = space.program.parameter_names
    for number, (decision, choice) in enumerate(zip(space.decisions, choices, strict=True)):
        own = decision.menu.strategies[choice].transfers
        every = (*moved[number], *((t, transfer_seconds(t, space.mesh, space.hardware)) for t in own))
        for transfer, _ in every:
            traffic[transfer.collective, transfer.axis] += transfer.num_bytes
        module = parameters.get(decision.node.name) or str(decision.node.meta.get("module", ""))
        rows.append(_row(context, answer, number, module, every, waits[number], held[number]))
    names = [str(d.menu.strategies[c]) for d, c in zip(space.decisions, choices, strict=True)]
    return Plan(
        mesh=space.mesh,
        fingerprint=space.program.fingerprint,
        choices={d.name: name for d, name in zip(space.decisions, names, strict=True)},
        descriptions=_descriptions(space),
        rows=tuple(rows),
        seconds=answer.seconds,
        bound=answer.bound,
        peak_bytes=answer.peak_bytes,
        traffic=dict(traffic),
        solver=answer.solver,
        memory_limit=context.settings.memory,
        unruled=space.unruled(),
        memory=answer.memory,
        recompute=answer.modes,
        multiplier=answer.multiplier,
        context=context,
    )


def _mode(model: MemoryModel, answer: Answer, number: int) -> int:
    """The number of the mode in which a decision's segment is computed again."""
    return MODES.index(answer.modes.get(model.segment[number], MODES[0]))


def _row(
    context: PlanContext,
    answer: Answer,
    number: int,
    module: str,
    transfers: Sequence[tuple[Transfer, float]],
    wait: float,
    held: int,
) -> PlanRow:
    space, model = context.space, context.memory_model
    decision, choice = space.decisions[number], answer.choices[number]
    strategy, call = decision.menu.strategies[choice], decision.menu.call
    forward = float(decision.menu.forward_seconds[choice])
    mode = _mode(model, answer, number)
    again, own, gradients = model.recompute_seconds(number), model.own(number), model.gradients(number)
    recomputed = float(again[mode][choice]) if again else 0.0
    stored = sum(int(array[choice]) for array in model.stored(number).values())
    return PlanRow(
        name=decision.name,
        kind=decision.kind,
        module=module,
        operation=base_name(call) if call else decision.kind,
        roles=tuple(decision.role(choice, axis) for axis in range(space.mesh.ndim)),
        layout=str(strategy.outputs[0]) if strategy.outputs else "",
        seconds=float(decision.menu.seconds[choice]) + wait + recomputed,
        transfers=tuple(Moved(t.collective, t.axis, t.num_bytes, s, t.backward) for t, s in transfers),
        forward_seconds=forward,
        backward_seconds=forward * num_backward(call) if call else 0.0,
        recompute_seconds=recomputed,
        saved_bytes=held + (int(own[mode if len(own) > 1 else 0][choice]) if own else 0),
        stored_bytes=stored + (int(gradients[choice]) if gradients is not None else 0),
        segment=model.segment[number] if decision.kind == "call" else "",
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
