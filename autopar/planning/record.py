"""Choices written down as a plan (rows, traffic, memory follow from them), and read from one that was made before."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costs.hardware.collectives import Transfer, transfer_seconds
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.decision_rows import Moved, PlanRow
from autopar.costs.plans.plan import Offloaded, Plan
from autopar.costs.plans.workload import Workload
from autopar.costs.pricing.offload import ACTIVATIONS, host_bytes
from autopar.costs.space.expert_rows import padded_share
from autopar.costs.space.narrowed import notes_on_narrowing
from autopar.costs.space.notes import notes_on_order
from autopar.costs.space.space import Decision, Space, without_gradient
from autopar.costs.steps.workload import workload
from autopar.errors import PlanError
from autopar.ir.program.calls import module_of
from autopar.ir.program.operators.capacity import WITHIN_CAPACITY
from autopar.ir.program.operators.expert_operators import DISPATCH
from autopar.ir.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.ir.sharding.annotation import Annotation
from autopar.planning.annotations.matching import Catalog
from autopar.planning.expert_notes import notes_on_experts
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.replicated_work import kept_whole
from autopar.planning.settings import PlanContext
from autopar.planning.step_seconds import step_seconds_of


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan that is not written down yet."""

    context: PlanContext
    answer: Answer
    notes: tuple[str, ...] = ()
    """Notes besides those that follow from the choices."""

    @property
    def recompute(self) -> Mapping[str, str]:
        """Segment → its mode, as in a plan."""
        return self.answer.modes

    @property
    def device_seconds(self) -> float:
        """Seconds per step of one micro-batch, without what hosts add."""
        return self.answer.seconds

    @property
    def multiplier(self) -> float:
        """Seconds per byte in the rows of the memory limit."""
        return self.answer.multiplier

    @property
    def strategies(self) -> Mapping[str, str]:
        """Decision → the name of its strategy."""
        every = zip(self.context.space.decisions, self.answer.choices, strict=True)
        return {decision.name: str(decision.candidates.strategies[choice]) for decision, choice in every}

    def written(self) -> Plan:
        """Return the plan."""
        plan = written_down(self.context, self.answer)
        return replace(plan, notes=(*plan.notes, *self.notes))


def choices_of(plan: Plan, space: Space) -> tuple[int, ...]:
    """Return the choices of a plan on a space; PlanError with the difference where it belongs to another graph or
    mesh.
    """
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
        names = [str(strategy) for strategy in decision.candidates.strategies]
        wanted = plan.choices.get(decision.name, "nothing")
        if wanted not in names:
            raise PlanError(
                f'{decision.name}: the plan chooses "{wanted}", which is not offered here; offered are '
                f"{', '.join(names[:8])}. The plan was made by another version of the rules, or with autopar.register_"
                "rule: register the same rules, or plan again."
            )
        found.append(names.index(wanted))
    return tuple(found)


def is_offered(plan: Plan, space: Space) -> bool:
    """Return whether a space offers all that a plan chooses."""
    offered = ((each.name, set(map(str, each.candidates.strategies))) for each in space.decisions)
    return all(plan.choices.get(name) in strategies for name, strategies in offered)


def evaluate(space: Space, choices: Sequence[int]) -> float:
    """Return the predicted seconds of a choice per decision, in the space's own cost."""
    seconds = sum(
        float(decision.candidates.seconds[choice]) * space.share(space.rows.get(number), choices)
        for number, (decision, choice) in enumerate(zip(space.decisions, choices, strict=True))
    )
    moving = (space.path(edge, choices).seconds * space.share(space.rows_on(edge), choices) for edge in space.edges)
    return seconds + sum(moving)


def written_down(context: PlanContext, answer: Answer) -> Plan:
    """Return the plan that an answer comes to: rows, traffic and memory follow from the choices alone."""
    space, choices, model = context.space, answer.choices, context.memory_model
    second = model.second_forward
    moved: dict[int, list[tuple[Transfer, float]]] = defaultdict(list)
    waits: dict[int, float] = defaultdict(float)
    again: dict[int, float] = defaultdict(float)
    held: dict[int, int] = defaultdict(int)
    unused, pads = without_gradient(space), padded_share(space) is not None
    paths: dict[object, tuple[list[tuple[Transfer, float]], float]] = {}  # equal layers move alike
    for edge in space.edges:
        ends, share = (choices[edge.source], choices[edge.target]), space.share(space.rows_on(edge), choices)
        padding = share if pads else 1.0
        key = space.kind(edge), ends, share
        if key not in paths:
            path = space.path(edge, choices)
            each = zip(path.transfers, path.messages, strict=True)
            timed = [
                (_of_padded(t, padding), transfer_seconds(t, space.mesh, space.hardware, b) * share) for t, b in each
            ]
            paths[key] = timed, path.seconds * share
        transfers, seconds = paths[key]
        moved[edge.target].extend(each for each in transfers if not (each[0].backward and edge.target in unused))
        waits[edge.target] += seconds
        more = model.backward_seconds_at(edge, choices, answer.modes)
        rerun = second.collectives_on(edge, choices, answer.modes)
        if rerun:
            timed = [(t, transfer_seconds(t, space.mesh, space.hardware) * exposed) for t, exposed in rerun]
            moved[edge.target].extend((replace(_of_padded(t, padding), backward=True), s) for t, s in timed)
            waits[edge.target] += more
        else:
            again[edge.target] += more
        kept = model.saved.edge(edge)
        if kept is not None:
            mode = model.lifetimes.mode_of(edge.target, answer.modes) if len(kept) > 1 else 0
            held[edge.target] += math.ceil(int(kept[mode][ends]) * share)
    traffic: dict[tuple[str, str], int] = defaultdict(int)
    rows = []
    parameters = space.program.parameter_names
    for number, decision in enumerate(space.decisions):
        own = second.running(number, choices, answer.modes)
        share = space.share(space.rows.get(number), choices)
        mine = zip(own.transfers, own.waits, strict=True)
        every = (
            *moved[number],
            *((t, wait * share) for t, wait in mine if not (t.backward and number in unused)),
            *(
                (replace(t, backward=True), wait * share)
                for t, wait in second.collectives_of(number, choices, answer.modes)
            ),
        )
        for transfer, _ in every:
            traffic[transfer.collective, transfer.axis] += transfer.num_bytes
        module = parameters.get(decision.node.name) or module_of(decision.node)
        rows.append(_row(context, answer, number, module, every, waits[number], again[number], held[number]))
    rows = marked(rows, space, context.annotations)
    peak_bytes, memory, _ = memory_use(model, choices, answer.modes)
    return Plan(
        mesh=space.mesh,
        fingerprint=space.program.fingerprint,
        choices=Draft(context, answer).strategies,
        descriptions=_descriptions(space),
        rows=tuple(rows),
        seconds=answer.seconds + context.host_seconds,
        bound=max(0.0, answer.bound + context.host_seconds) if answer.bound > 0 else 0.0,
        host_seconds=context.host_seconds,
        peak_bytes=peak_bytes,
        traffic=dict(traffic),
        solver=answer.solver,
        memory_limit=context.settings.limit,
        reserved=context.settings.reserved,
        imbalance=space.imbalance,
        unruled=space.unruled(),
        kept_whole=kept_whole(space, choices, rows),
        notes=(
            *(f"assumed, not checked: {each}" for each in space.program.assumed),
            *notes_on_experts(context, answer),
            *_notes_on_calls(context, answer),
            *notes_on_order(space, choices),
            *notes_on_narrowing(space),
        ),
        memory=memory,
        recompute=answer.modes,
        prefetch=model.prefetch,
        mode=context.mode,
        reduce_each=model.microbatches.reduce_each,
        zigzag_axes=space.zigzag_axes,
        offload=_offloaded(space, answer.modes),
        host=_on_host(model, choices, answer.modes),
        waits=dict(space.overlapped.waited),
        multiplier=answer.multiplier,
        workload=_workload(context, answer),
        context=context,
    )


def marked(rows: Sequence[PlanRow], space: Space, annotations: Sequence[Annotation]) -> list[PlanRow]:
    """Return the rows of a space's decisions, those pinned that the user's own annotations say something about."""
    own = [each for each in annotations if not each.strategy]
    if not own:
        return [replace(row, pinned=False) if row.pinned else row for row in rows]
    catalog = Catalog(space)
    found = {
        number for each in map(catalog.find, own) if each for number in (*each.calls, *each.outputs, *each.parameters)
    }
    return [replace(row, pinned=number in found) for number, row in enumerate(rows)]


def _notes_on_calls(context: PlanContext, answer: Answer) -> tuple[str, ...]:
    """Return what the implementations of calls have to note, each once."""
    mesh, found = context.space.mesh, dict[str, None]()
    for decision, choice in zip(context.space.decisions, answer.choices, strict=True):
        candidates = decision.candidates
        if candidates.call is not None and candidates.bound is not None:
            strategy = candidates.strategies[choice]
            sizes = strategy.local_sizes(candidates.bound.sizes, mesh)
            found[strategy.implementation.note(candidates.call, sizes, module_of(decision.node))] = None
    return tuple(filter(None, found))


def _workload(context: PlanContext, answer: Answer) -> Workload | None:
    """Return the workload of a whole model; None of a stage of one."""
    program, memory = context.space.program, context.memory_model
    if program.received or program.num_sent:
        return None
    runs, seconds = memory.microbatches, answer.seconds
    if runs.several:
        seconds = step_seconds_of(memory, answer.choices, answer.modes).of(runs.count)
    return workload(memory, seconds, context.settings.limit, context.settings.reserved)


def _offloaded(space: Space, modes: Mapping[str, str]) -> Offloaded:
    if OFFLOAD not in modes.values():
        return "none" if space.optimizer.offload is None else "optimizer"
    return "activations" if space.optimizer.offload is None else "both"


def _on_host(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> Mapping[str, int]:
    """Return the bytes of host memory for each device, by what they are."""
    space = memory.space
    parameters = [
        (decision.node.meta["tensor"], decision.candidates.strategies[choice].outputs[0])
        for decision, choice in zip(space.decisions, choices, strict=True)
        if decision.kind == "parameter"
    ]
    offloaded = memory.host_copies.total(choices, modes) * memory.microbatches.in_flight
    found = host_bytes(parameters, space.mesh.sizes, space.optimizer)
    return {**found, ACTIVATIONS: offloaded} if offloaded else found


def _row(
    context: PlanContext,
    answer: Answer,
    number: int,
    module: str,
    transfers: Sequence[tuple[Transfer, float]],
    wait: float,
    again: float,
    held: int,
) -> PlanRow:
    space, model = context.space, context.memory_model
    decision, choice = space.decisions[number], answer.choices[number]
    strategy, call = decision.candidates.strategies[choice], decision.candidates.call
    share = space.share(space.rows.get(number), answer.choices)
    forward = float(decision.candidates.forward_seconds[choice]) * share
    computing = float(decision.candidates.seconds[choice]) - sum(strategy.waits)
    mode = model.lifetimes.mode_of(number, answer.modes)
    own, rerun = model.saved.own(number), model.second_forward.collectives_of(number, answer.choices, answer.modes)
    gradients = None if model.presence.frees_gradients else model.tensors.gradients(number)
    running = model.second_forward.running(number, answer.choices, answer.modes)
    waits = (sum(each for _, each in rerun) + sum(running.waits) - sum(strategy.waits)) * share
    recomputed = model.backward_seconds_at(number, answer.choices, answer.modes) * share - waits + again
    kept = math.ceil(int(own[mode if len(own) > 1 else 0][choice]) * share) if own else 0
    if model.accumulation.is_received(number):
        kept += int(buffer[choice]) if (buffer := model.accumulation.buffer(number)) is not None else 0
    stored = sum(int(array[choice]) for array in model.stored(number).values())
    return PlanRow(
        name=decision.name,
        kind=decision.kind,
        module=module,
        operation=call.name if call else decision.kind,
        roles=tuple(decision.role(choice, axis) for axis in range(space.mesh.ndim)),
        layout=str(strategy.outputs[0]) if strategy.outputs else "",
        seconds=float(decision.candidates.seconds[choice]) * share + wait + waits + recomputed,
        transfers=tuple(Moved(t.collective, t.axis, t.num_bytes, s, t.backward) for t, s in transfers),
        forward_seconds=forward,
        backward_seconds=max(0.0, computing * share - forward) if call else 0.0,
        recompute_seconds=recomputed,
        saved_bytes=held + kept,
        stored_bytes=stored + (int(gradients[choice]) if gradients is not None else 0),
        segment=model.lifetimes.segment[number] if decision.kind == "call" else "",
    )


def _of_padded(transfer: Transfer, share: float) -> Transfer:
    """Return a transfer of rows of experts that are so many times as many."""
    return replace(transfer, num_bytes=math.ceil(transfer.num_bytes * share), unpadded=transfer.num_bytes)


def _descriptions(space: Space) -> dict[str, str]:
    def describe(decision: Decision) -> str:
        found = decision.node.meta["tensor"]
        infos = found if isinstance(found, tuple) else (found,)
        operation = decision.candidates.call.name if decision.candidates.call else decision.kind
        requested = ""
        if decision.node.target is WITHIN_CAPACITY:
            requested = f" (capacity_factor={decision.node.args[2]})"
        elif decision.node.target is DISPATCH and decision.candidates.call and decision.candidates.call["padded"]:
            requested = f" (padded={decision.candidates.call['padded']})"
        elif decision.node.target is LINEAR_CROSS_ENTROPY:
            requested = f" (loss_tiles={decision.node.args[-1] or 'auto'})"
        elif decision.node.target is MLP_IN_TILES:
            requested = f" (mlp_tiles={decision.node.args[-1]})"
        return f"{operation}{requested} {' '.join(map(str, infos))}"

    return {decision.name: describe(decision) for decision in space.decisions}


def _difference(planned: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return the first things that differ between the graph of a plan and this one."""
    lines = []
    for name in dict.fromkeys((*planned, *here)):
        if planned.get(name) != here.get(name):
            lines.append(f"{name} is {planned.get(name, 'absent')} in the plan and {here.get(name, 'absent')} here")
    shown = "; ".join(lines[:3])
    more = f" (and {len(lines) - 3} more differences)" if len(lines) > 3 else ""
    return f"{shown}{more}. Plan again for this model and these inputs."
