"""Plans for a mesh with a pipeline axis: the model is cut into stages, and every stage planned on the other axes.

blocks    the model is planned on the devices of one stage, without a memory limit: what its blocks take
cuts      `stages.cuts` cuts it where a step of the schedule is shortest, and `stages.refinement` moves the cuts
          while the simulated step gets shorter; under a limit, each stage that `stages.cuts` thinks of is planned
          within the limit, with as many micro-batches in flight as the schedule has there
stages    every stage is planned by itself; tensors go from stage to stage in the layout of the whole plan
timeline  the schedule is simulated with the seconds of those plans
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from torch import fx

from autopar.errors import InfeasibleError
from autopar.hardware.collectives import message_seconds
from autopar.memory.microbatches import Microbatches
from autopar.pipeline.block_costs import boundary_bytes
from autopar.pipeline.plan import PipelinePlan, StagePlan
from autopar.pipeline.planned_blocks import PlannedBlocks, planned_blocks
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.schedules.simulation import simulate
from autopar.pipeline.stage_seconds import stage_seconds, step_parts
from autopar.pipeline.stages.cuts import CutProblem, best_cuts
from autopar.pipeline.stages.refinement import refined
from autopar.pipeline.stages.splitting import split, stage_between
from autopar.pipeline.structure import kinds, structure
from autopar.planning.planner import make_plan
from autopar.planning.record import choices_of
from autopar.planning.replicated_work import warn_of_replicated_work
from autopar.planning.settings import context_of
from autopar.plans.plan import Plan
from autopar.program.program import Program
from autopar.sharding.layout import Layout
from autopar.space.space import Space
from autopar.strategies.presets.data import warn_of_gradients

TOLERANCE = 0.02
"""Under a memory limit: how far from the best a cut may be, and the plan of a stage, as a share; many are planned."""


def plan_pipeline(request: PipelineRequest, notes: Sequence[str] = ()) -> PipelinePlan:
    """The best plan of a pipeline.

    Raises PipelineError and InfeasibleError where there is none, AnnotationError for pins that cannot hold.
    """
    planner = StagePlanner(planned_blocks(request, request.schedule.num_stages))
    blocks, starts = planner.planned.blocks, planner.starts()
    storage = dict(request.storage)
    stages: list[StagePlan] = []
    for program, (start, end) in zip(
        split(request.program, blocks, starts), pairwise((*starts, len(blocks))), strict=True
    ):
        plan = planner.known_plan(program, len(stages), storage)
        for name, layout in stored_layouts(program, plan).items():
            storage.setdefault(name, layout)
        names = tuple(block.name for block in blocks[start:end])
        stages.append(StagePlan(len(stages), names, plan, stage_seconds(plan, *planner.messages(program))))
    contexts = [context_of(stage.plan) for stage in stages]
    warn_of_replicated_work(request.wanted.strategy, [(each.space, each.choices) for each in contexts])
    warn_of_gradients(request.wanted.strategy, request.num_microbatches)
    return PipelinePlan(
        mesh=request.mesh,
        axis=request.axis,
        schedule=request.schedule,
        stages=tuple(stages),
        starts=starts,
        timeline=simulate(request.schedule, [stage.seconds for stage in stages]),
        memory_limit=request.settings.memory,
        notes=(*notes, *_notes_of(stages)),
    )


def _notes_of(stages: Sequence[StagePlan]) -> tuple[str, ...]:
    """What the plans of stages say: once what all of them do, else with the stage."""
    by_note: dict[str, list[int]] = defaultdict(list)
    for stage in stages:
        for note in stage.plan.notes:
            by_note[note].append(stage.number)
    return tuple(
        note if len(where) == len(stages) else f"stage {', '.join(map(str, where))}: {note}"
        for note, where in by_note.items()
    )


def stored_layouts(program: Program, plan: Plan) -> dict[str, Layout]:
    """Parameter → the layout in which a stage's plan stores it."""
    return {name: plan.layout_of(placeholder) for name, placeholder in program.parameters.items()}


def stage_space(request: PipelineRequest, program: Program, plan: Plan) -> tuple[Space, tuple[int, ...]]:
    """The space of a stage that was planned before, and the choices of its plan."""
    space = request.space(program, {name: plan.layout_of(name) for name in program.received})
    return space, choices_of(plan, space)


@dataclass(slots=True)
class StagePlanner:
    """Plans stages; equal ones once."""

    planned: PlannedBlocks
    known: dict[object, float] = field(default_factory=dict)
    """Structure of a stage and micro-batches in flight → its seconds."""
    plans: dict[tuple[object, ...], Plan] = field(default_factory=dict)
    """Stage and names of its calls → a plan that was made in the search."""

    def starts(self) -> tuple[int, ...]:
        """The first block of every stage."""
        planned, request = self.planned, self.planned.request
        problem = CutProblem(planned.costs, planned.cut_seconds, request.schedule, planned.places())
        if request.settings.memory is None:
            return refined(problem, best_cuts(problem).starts)
        until = np.concatenate([[0.0], np.cumsum(problem.own_seconds)])

        def seconds_of(first: int, end: int, stage: int) -> float:
            program = stage_between(request.program, planned.blocks, first, end)
            # Alone a stage may cost a little less than its share of the whole, which bounds the search.
            return max(self._seconds(program, stage), float(until[end] - until[first]))

        return best_cuts(problem, seconds_of, TOLERANCE, kinds(self.planned)).starts

    def _seconds(self, program: Program, stage: int) -> float:
        """Seconds of one micro-batch within the memory limit; infinite where the stage does not fit."""
        request = self.planned.request
        key = request.schedule.in_flight(stage), structure(self.planned, program)
        if key not in self.known:
            try:
                plan = self.plan(program, stage, request.storage)
                self.plans[_names(program, stage)] = plan
                self.known[key] = step_parts(plan).per_microbatch(request.num_microbatches)
            except InfeasibleError:
                self.known[key] = math.inf
        return self.known[key]

    def known_plan(self, program: Program, stage: int, storage: Mapping[str, Layout]) -> Plan:
        """The plan of a stage, from the search unless parameters are stored that the search knew nothing of."""
        found = self.plans.get(_names(program, stage))
        new = (name for name in program.parameters if name in storage and name not in self.planned.request.storage)
        return self.plan(program, stage, storage) if found is None or any(new) else found

    def plan(self, program: Program, stage: int, storage: Mapping[str, Layout]) -> Plan:
        """The plan of a stage, within its share of its rank's memory."""
        request = self.planned.request
        settings, schedule = request.settings, request.schedule
        space = request.space(program, {name: self.planned.boundary(name) for name in program.received})
        found, _ = make_plan(
            space,
            self._pins(space, storage),
            None if settings.memory is None else settings.memory // schedule.chunks,
            settings.solver,
            settings.time_limit,
            settings.recompute,
            settings.gap if settings.memory is None else max(settings.gap or 0.0, TOLERANCE),
            Microbatches(schedule.num_microbatches, schedule.in_flight(stage), request.wanted.reduces_each),
            settings.prefetch,
            hurried=True,
        )
        return found

    def messages(self, program: Program) -> tuple[float, float]:
        """Seconds in which a stage sends its outputs on, and the gradients of its inputs back."""
        later = [value for value in program.output[: program.num_sent] if isinstance(value, fx.Node)]
        earlier = [node for name, node in program.placeholders().items() if name in program.received]
        return self._message(later), self._message([n for n in earlier if n.meta["tensor"].requires_grad])

    def _message(self, nodes: Sequence[fx.Node]) -> float:
        request, whole = self.planned.request, self.planned.whole
        num_bytes = sum(boundary_bytes(whole, self.planned.nodes[node.name]) for node in nodes)
        return message_seconds(num_bytes, request.mesh, request.axis, request.hardware) if nodes else 0.0

    def _pins(self, space: Space, storage: Mapping[str, Layout]) -> dict[int, np.ndarray]:
        """The user's pins on the decisions of a stage, the layouts of what it sends, and those of stored parameters."""
        program, whole, pins = space.program, self.planned.whole.space, self.planned.pins
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
                wanted = self.planned.boundary(value.name)
                found[here] = np.array([s.outputs[0] == wanted for s in strategies])
            elif there in pins:
                found[here] = pins[there]
        for name, layout in storage.items():
            if name in program.parameters:
                here = space.index[program.parameters[name]]
                stored = np.array([s.outputs[0] == layout for s in space.decisions[here].menu.strategies])
                found[here] = stored & found.get(here, True)
        return found


def _names(program: Program, stage: int) -> tuple[object, ...]:
    return stage, tuple(node.name for node in program.graph.nodes)
