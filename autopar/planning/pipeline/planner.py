"""Plans for a mesh with a pipeline axis: the model is cut into stages, and every stage planned on the other axes.

blocks    the model is planned on the devices of one stage, without a memory limit: what its blocks take
cuts      `stages.cuts` cuts it where a step of the schedule is shortest; `stages.refinement` moves the cuts while the
          simulated step gets shorter. Under a limit, stages are planned with as many micro-batches in flight as the
          schedule has there (`stage_search`). If a rank has several, the fastest plans of that cut are taken if they
          fit together; else the search looks for cuts within memory budgets (`stages.memory_budgets`)
stages    every stage is planned by itself; tensors go from stage to stage in the layout of the whole plan
timeline  the schedule is simulated with the seconds of those plans
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
from torch import fx

from autopar.console.progress import progress
from autopar.console.units import format_share
from autopar.costs.hardware.collectives import message_ports, message_seconds
from autopar.costs.plans.decision_rows import kept_whole_on_all
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.costs.steps.sends import Send
from autopar.costs.steps.workload import workload
from autopar.errors import PipelineError, TimeLimitError, warn_user
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout
from autopar.planning.offload import Plans, plan_as_offload_asks
from autopar.planning.pipeline.block_costs import boundary_bytes
from autopar.planning.pipeline.finished_stages import StageFinisher
from autopar.planning.pipeline.plan import PipelinePlan, StagePlan
from autopar.planning.pipeline.planned_blocks import PlannedBlocks, planned_blocks
from autopar.planning.pipeline.request import PipelineRequest
from autopar.planning.pipeline.schedules.simulation import simulate
from autopar.planning.pipeline.stage_samples import sampled
from autopar.planning.pipeline.stage_search import TOLERANCE, StageSearch
from autopar.planning.pipeline.stage_seconds import stage_seconds, step_parts
from autopar.planning.pipeline.stages.cheapest_cut import Floats
from autopar.planning.pipeline.stages.cut_search import StageCosts, best_cuts_within
from autopar.planning.pipeline.stages.cuts import (
    CutProblem,
    best_cuts,
    cuts_of,
    least_seconds,
    step_seconds,
    transfers,
)
from autopar.planning.pipeline.stages.memory_budgets import (
    Sample,
    budgets_of_least_peaks,
    estimates_in_budgets,
    fits_together,
    shared_budgets,
)
from autopar.planning.pipeline.stages.refinement import is_allowed, refined
from autopar.planning.pipeline.stages.stage_bytes import MemoryBudget
from autopar.planning.record import choices_of, marked
from autopar.planning.replicated_work import warn_of_kept_whole, warn_of_replicated_work
from autopar.planning.request import PlanRequest
from autopar.planning.settings import context_of
from autopar.solver.deadline import after, is_over, seconds_until, why_over
from autopar.strategies.presets.data import warn_of_gradients

MOST_CUTS = 200
"""Into stages of which several share a rank: so many are looked at one by one where the usual shares leave none."""

REFINING = 0.05
"""Share of the remaining time that is reserved for moving the cuts after stages are planned, at least."""
FINISHING, HALF = 0.1, 0.5
"""Share of the remaining time that is reserved for the plans of the final cut's stages, and its maximum."""
WRITING = 2.5
"""Times what the plan of the whole took, where that is more: all stages are laid out and written down."""

_Cut = tuple[tuple[int, ...], StageSearch, float]
"""The first block of every stage, what is known of stages, and seconds by the formula that no cut is below."""


def plan_pipeline(request: PipelineRequest) -> PipelinePlan:
    """Return the best plan of a pipeline; with Memory(offload="auto") the better of those with, and without it.

    Raises PipelineError and InfeasibleError where there is none, AnnotationError for pins that cannot hold, and
    TimeLimitError where none was found in time.
    """

    def best(wanted: PlanRequest) -> PipelinePlan:
        wanted = wanted.with_activations_on_device() if request.schedule.halves_backwards else wanted
        return _planned(replace(request, wanted=wanted))

    plans = Plans(
        best,
        pieces=lambda plan: tuple(stage.plan for stage in plan.stages),
        seconds=lambda plan: plan.seconds,
        cutoff=lambda plan: math.inf,
        stored=lambda: 0,
        noted=lambda plan, notes, _: replace(plan, notes=notes),
    )
    return plan_as_offload_asks(request.wanted, plans)


def _planned(request: PipelineRequest) -> PipelinePlan:
    deadline = after(request.settings.search.time_limit)
    before = seconds_until(deadline)
    planned = planned_blocks(request, request.schedule.num_stages)
    left = seconds_until(deadline)
    starts, search, bound = _cut(planned, deadline - min(max(FINISHING * left, WRITING * (before - left)), HALF * left))
    blocks, storage = planned.blocks, dict(request.storage)
    finisher = StageFinisher(search, deadline)
    stages: list[StagePlan] = []
    for first, end in progress(list(pairwise((*starts, len(blocks)))), "stages"):
        program = search.program(first, end)[0]
        plan = finisher.plan(first, end, len(stages), storage)
        plan = replace(plan, rows=tuple(marked(plan.rows, context_of(plan).space, request.annotations)))
        for name, layout in stored_layouts(program, plan).items():
            storage.setdefault(name, layout)
        names = tuple(block.name for block in blocks[first:end])
        seconds = stage_seconds(plan, *messages(planned, program), request.schedule.halves_backwards)
        stages.append(StagePlan(len(stages), names, plan, seconds))
    contexts = [context_of(stage.plan) for stage in stages]
    planned_stages = [(each.space, each.choices) for each in contexts]
    if not warn_of_replicated_work(request.wanted.strategy, planned_stages, stored=bool(request.storage)):
        warn_of_kept_whole(
            request.mesh, kept_whole_on_all([(each.plan.seconds, each.plan.kept_whole) for each in stages])
        )
    warn_of_gradients(request.wanted.strategy, request.num_microbatches)
    timeline = simulate(request.schedule, [stage.seconds for stage in stages])
    formula = [replace(stage.seconds, once=step_parts(stage.plan).once) for stage in stages]
    least = bound / step_seconds(_cut_problem(planned), starts, formula)
    return PipelinePlan(
        mesh=request.mesh,
        axis=request.axis,
        schedule=request.schedule,
        stages=tuple(stages),
        starts=starts,
        timeline=timeline,
        bound=min(least, 1.0) * timeline.seconds,
        memory_limit=request.settings.limit,
        reserved=request.settings.reserved,
        notes=_notes_of(stages),
        workload=workload(planned.whole.memory, timeline.seconds, request.settings.limit, request.settings.reserved),
    )


def _cut_problem(planned: PlannedBlocks) -> CutProblem:
    return CutProblem(planned.costs, planned.cut_seconds, planned.request.schedule, planned.places())


def _cut(planned: PlannedBlocks, deadline: float) -> _Cut:
    """Return the best cut, and what was found on the way."""
    request, memory = planned.request, planned.request.settings.tensor_limit
    schedule, problem = request.schedule, _cut_problem(planned)
    until = tuple(np.concatenate([[0.0], np.cumsum(problem.own_seconds)]).tolist())
    budget = None if memory is None else MemoryBudget(memory, memory)
    asking = deadline - REFINING * seconds_until(deadline)
    search, best = StageSearch(planned, asking, (budget,) * schedule.num_stages, until), best_cuts(problem)
    if memory is not None and schedule.chunks == 1:
        return _best_cut_within(problem, search, deadline)
    free = refined(problem, best.starts, deadline=deadline)
    if memory is None:
        return free, search, best.seconds
    if (budgets := _budgets_of_fastest(search, free, memory, TOLERANCE)) is not None:
        search.budgets = budgets
        return free, search, best.seconds
    thought, search.budgets = estimates_in_budgets(problem, memory, sampled(search, best.starts, memory))
    try:
        found = _best_cut_within(problem, search, deadline, thought)
        return _better_divided(problem, (found, (free, *found[1:])), memory)
    except PipelineError:
        for starts in _cuts_to_try(problem):
            for budgets in _budgets_of_cut(search, starts, memory):
                search.budgets = budgets
                with suppress(PipelineError):
                    found = _best_cut_within(problem, search, deadline)
                    return _better_divided(problem, (found,), memory)
        raise


def _better_divided(problem: CutProblem, cuts: Sequence[_Cut], memory: int) -> _Cut:
    """Return the cut with the shortest step by known plans, where each rank divides its memory anew."""
    found: list[tuple[float, Sequence[MemoryBudget | None], _Cut]] = []
    moved = transfers(problem)
    for cut in cuts:
        starts, search, _ = cut
        _divide_anew(search, starts, memory)
        spans = enumerate(pairwise((*starts, len(problem.blocks))))
        stages = [search.at_most(*span, stage) + moved[stage, *span] for stage, span in spans]
        found.append((problem.seconds_of(stages), search.budgets, cut))
    _, budgets, cut = min(found, key=lambda each: each[0])
    cut[1].budgets = budgets
    return cut


def _divide_anew(search: StageSearch, starts: Sequence[int], memory: int) -> None:
    """Divide the memory of each rank so that the fastest of all known plans of its stages fit together.

    Budgets come from samples; the plans that were found within them may take less, and leave room for faster ones of
    other stages.
    """
    spans = list(enumerate(pairwise((*starts, len(search.planned.blocks)))))
    with suppress(TimeLimitError):
        for stage, (first, end) in spans:
            search.fastest(first, end, stage)
        known = [search.samples(first, end, stage) for stage, (first, end) in spans]
        schedule = search.planned.request.schedule
        if fits_together(schedule, memory, known.__getitem__):
            search.budgets = shared_budgets(schedule, memory, known.__getitem__)


def _budgets_of_fastest(
    search: StageSearch, starts: Sequence[int], memory: int, gap: float = math.inf
) -> tuple[MemoryBudget, ...] | None:
    """Return memory budgets for the fastest plans of a cut's stages; None if these do not fit together.

    None, too, if a stage has no plan that is proven within a relative gap, each having all memory of its rank.
    """
    schedule = search.planned.request.schedule
    search.budgets = (MemoryBudget(memory, memory),) * schedule.num_stages
    found: list[Sequence[Sample]] = []
    for stage, (first, end) in enumerate(pairwise((*starts, len(search.planned.blocks)))):
        try:
            known = search.best_searched(first, end, stage) or search.ask(first, end, stage, search.roughly)
        except TimeLimitError:
            return None
        if known.made is None or known.seconds > known.least * (1 + gap):
            return None
        found.append(search.sample(known, stage))
    fits = fits_together(schedule, memory, found.__getitem__)
    return shared_budgets(schedule, memory, found.__getitem__) if fits else None


def _budgets_of_cut(search: StageSearch, starts: Sequence[int], memory: int) -> Iterator[tuple[MemoryBudget, ...]]:
    """Yield memory budgets in which the stages of a cut are known to fit: by fastest plans, then by smallest."""
    schedule, num_blocks = search.planned.request.schedule, len(search.planned.blocks)
    if (fastest := _budgets_of_fastest(search, starts, memory)) is not None:
        yield fastest
    search.budgets = (MemoryBudget(memory, memory),) * schedule.num_stages
    least = budgets_of_least_peaks(schedule, memory, starts, num_blocks, search.least)
    if least is not None:
        yield least


def _cuts_to_try(problem: CutProblem) -> list[tuple[int, ...]]:
    """Return the cuts, the fastest without a limit first: all if they are few, else only the fastest."""
    num_blocks, num_stages = len(problem.blocks), problem.schedule.num_stages
    if math.comb(num_blocks - 1, num_stages - 1) > MOST_CUTS:
        return [best_cuts(problem).starts]
    every = ((0, *starts) for starts in combinations(range(1, num_blocks), num_stages - 1))
    allowed = (starts for starts in every if is_allowed(problem, starts))
    least = least_seconds(problem)
    return sorted(allowed, key=lambda starts: cuts_of(problem, least, starts).seconds)


def _best_cut_within(problem: CutProblem, search: StageSearch, deadline: float, thought: Floats | None = None) -> _Cut:
    """Return the best cut whose stages fit into their memory budgets; warn if it is not proven to be nearly the best.

    Cuts whose stages, or equal ones, were planned are compared by simulation.
    """
    costs = StageCosts(
        search.seconds, search.at_most, search.fuller, search.is_over, search.at_least, search.closer, search.visited
    )
    with search.planned.request.settings.explaining():
        found = best_cuts_within(problem, costs, TOLERANCE, search.kinds, thought)
    if found.seconds > found.bound * (1 + TOLERANCE):
        number = search.num_planned
        why = f"{why_over()} when {number} stages had been planned"
        if not is_over(search.deadline):
            why = f"of {number} stages that were planned, large ones are not proven best"
        warn_user(
            f"{why}: the best pipeline so far is taken, and at most "
            f"{format_share(1 - found.bound / found.seconds)} of its step could be saved by other cuts and plans.",
            RuntimeWarning,
        )
    return refined(problem, found.starts, search.beyond, deadline), search, found.bound


def _notes_of(stages: Sequence[StagePlan]) -> tuple[str, ...]:
    """Merge the notes of stages' plans: a note of all stages appears once, others name their stages."""
    by_note: dict[str, list[int]] = defaultdict(list)
    for stage in stages:
        for note in stage.plan.notes:
            by_note[note].append(stage.number)
    return tuple(
        note if len(where) == len(stages) else f"stage {', '.join(map(str, where))}: {note}"
        for note, where in by_note.items()
    )


def stored_layouts(program: Program, plan: Plan) -> dict[str, Layout]:
    """Map each parameter to the layout in which a stage's plan stores it."""
    return {name: plan.layout_of(placeholder) for name, placeholder in program.parameters.items()}


def stage_space(request: PipelineRequest, program: Program, plan: Plan) -> tuple[Space, tuple[int, ...]]:
    """Return the space of a stage that was planned before, and the choices of its plan."""
    received = {name: plan.layout_of(name) for name in program.received}
    space = replace(request, zigzag_axes=plan.zigzag_axes).space(program, received)
    return space, choices_of(plan, space)


def messages(planned: PlannedBlocks, program: Program) -> tuple[Send, Send]:
    """Return the messages of a stage: its outputs on, and the gradients of its inputs back."""
    later = [value for value in program.output[: program.num_sent] if isinstance(value, fx.Node)]
    earlier = [node for name, node in program.placeholders().items() if name in program.received]
    return _message(planned, later), _message(planned, [n for n in earlier if n.meta["tensor"].requires_grad])


def _message(planned: PlannedBlocks, nodes: Sequence[fx.Node]) -> Send:
    request, whole = planned.request, planned.whole
    if not nodes:
        return Send()
    num_bytes = sum(boundary_bytes(whole, planned.nodes[node.name]) for node in nodes)
    crossed = num_bytes, request.mesh, request.axis, request.hardware
    return Send(message_seconds(*crossed), message_ports(*crossed))
