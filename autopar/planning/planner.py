"""Planning in a space of plans: state the problem, solve it, and write the answer down as a plan.

`make_plan` solves, `replan` solves again in the same space; `record` writes the answer down.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autopar.console.names import PREFETCH_DEPTHS
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import PricedMemory
from autopar.costs.memory.peak import memory_use
from autopar.costs.memory.resident_parts import gathers_weights
from autopar.costs.plans.plan import Plan
from autopar.costs.space.narrowed import Pins, narrowed
from autopar.costs.space.space import Space
from autopar.costs.steps.step import step_timeline
from autopar.errors import CutOffError, InfeasibleError, TimeLimitError
from autopar.ir.program.recompute_segments import MODES
from autopar.planning.formulation import Formulation, pinned_by
from autopar.planning.memory_limit.answers import Answer, choices_of_nodes
from autopar.planning.memory_limit.bounds import Bounds, bounds_at
from autopar.planning.memory_limit.memory_limit import best_within
from autopar.planning.record import Draft
from autopar.planning.settings import USUAL_DEPTH, Chosen, PlanContext, Settings, Start, WarmStart, context_of
from autopar.planning.step_seconds import step_seconds_of
from autopar.solver.deadline import after, grace, is_over, seconds_until, whole_is_over

WORTH = 1e-3  # share of a step that fetching weights two layers ahead must save, since it takes memory


def make_plan(
    space: Space,
    pins: Pins,
    settings: Settings = Settings(),
    microbatches: Microbatches | None = None,
    stated: Statements | None = None,
) -> tuple[Plan, tuple[int, ...]]:
    """Return the best plan under the pins and the settings, and its choice per decision.

    The space is that of one micro-batch. With several `microbatches` the plan is the best for all of them together: its
    memory is that of the step, and its seconds, rows and traffic are those of a step of one micro-batch (see
    `step_seconds`). With Memory(prefetch="auto") and a limit, weights are gathered one layer ahead if any plan has room
    for it, and two if the best plan leaves room and its timeline is then shorter; no other seconds depend on it.
    `stated` are the problems of the space, if some were stated before.

    Raises InfeasibleError where there is none, and CutOffError where a limit is found to leave none faster than the
    `cutoff` (see `Settings`).
    """
    draft = draft_of(solved_by((stated or Statements(space)).of(settings, microbatches), pins, settings))
    return draft.written(), draft.answer.choices


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Best choices of a space, before it is known whether they fetch weights further ahead than requested.

    Many are made for one plan.
    """

    formulation: Formulation
    """Its model of memory counts the weights that are fetched ahead."""
    pins: Pins
    settings: Settings
    answer: Answer
    """Its seconds are what the search made least: one micro-batch's share of a step."""

    @property
    def space(self) -> Space:
        return self.formulation.space


class Statements:
    """Formulations of one space, built once and shared by all plans that are made in it one after the other.

    Answers found without a limit are cached with them, too. Searches begin at the choices and the prices of memory of
    a plan of the same decisions under other costs, if one is given.
    """

    def __init__(self, space: Space, incumbent: Chosen | None = None) -> None:
        self.space, self._incumbent = space, incumbent
        self._kept: dict[object, tuple[Formulation, ...]] = {}
        self._zigzag_axes: dict[frozenset[str], Statements] = {}
        self._narrowed: dict[object, tuple[Statements, Pins]] = {}

    def of(self, settings: Settings, microbatches: Microbatches | None = None) -> tuple[Formulation, ...]:
        """Return the formulations of plans with these settings (`formulations_of`)."""
        key = microbatches, settings.offloads, settings.depths
        if key not in self._kept:
            self._kept[key] = formulations_of(self._memory_of(settings, microbatches), settings)
            if self._incumbent is not None:
                own = context_of(self._incumbent)
                self.begin_at_prices_of(self._incumbent)
                for formulation in self._kept[key]:
                    formulation.incumbent = own.choices, self._incumbent.recompute
        return self._kept[key]

    def _memory_of(self, settings: Settings, microbatches: Microbatches | None) -> MemoryModel:
        """Return the model of memory; if the incumbent has the same decisions and settings, it shares its arrays."""
        if self._incumbent is not None:
            known = context_of(self._incumbent).memory_model
            runs = replace(microbatches or Microbatches(), works=known.microbatches.works)
            is_same = (runs, settings.offloads) == (known.microbatches, known.lifetimes.offloads)
            if is_same and self.space.moves_alike(known.space):
                return known.on(self.space)
        return MemoryModel(self.space, microbatches, offloads=settings.offloads)

    def narrowed(self, pins: Pins) -> tuple[Statements, Pins]:
        """Return the statements of the space that pins leave, and the pins that still exclude some (`narrowed`)."""
        key = pinned_by(pins)
        if key not in self._narrowed:
            space, others = narrowed(self.space, pins)
            self._narrowed[key] = Statements(space), others
        return self._narrowed[key]

    def with_zigzag_axes(self, axes: Collection[str]) -> Statements:
        """Return the statements of the space in which these axes zigzag-shard positions."""
        if set(axes) == set(self.space.zigzag_axes):
            return self
        if frozenset(axes) not in self._zigzag_axes:
            self._zigzag_axes[frozenset(axes)] = Statements(self.space.with_zigzag_axes(axes))
        return self._zigzag_axes[frozenset(axes)]

    def begin_at_prices_of(self, plan: Chosen) -> None:
        """Ask first at prices of memory that a plan has of the same model, captured otherwise."""
        own, row = context_of(plan).memory_model, context_of(plan).row
        if row is None or not plan.multiplier:
            return
        for formulation in itertools.chain.from_iterable(self._kept.values()):
            formulation.near = PricedMemory(row, plan.multiplier).of_the_same_calls(
                own.presence, formulation.memory.presence
            )
        for each in (*self._zigzag_axes.values(), *(stated for stated, _ in self._narrowed.values())):
            each.begin_at_prices_of(plan)


def solved(space: Space, pins: Pins, settings: Settings, microbatches: Microbatches | None = None) -> Solved:
    """Return the best choices under pins; InfeasibleError where there are none, TimeLimitError where none came in
    time.
    """
    return solved_by(Statements(space).of(settings, microbatches), pins, settings)


def formulations_of(memory: MemoryModel, settings: Settings) -> tuple[Formulation, ...]:
    """Return one formulation per prefetch depth of these settings, in the order in which they are tried.

    If nothing overlaps with computing, only the last depth is used: "auto" then counts no memory for fetching ahead.
    """
    depths = settings.depths
    if memory.space.hardware.communication_share == 1:
        depths = depths[-1:]
    return tuple(Formulation(memory.space, memory.fetching_ahead(depth)) for depth in depths)


def solved_by(formulations: Sequence[Formulation], pins: Pins, settings: Settings) -> Solved:
    """Return the best choices of the first of these problems that has any; the problems may be solved repeatedly.

    They share the time limit. The error for infeasibility describes the last problem only.
    """
    deadline = after(settings.search.time_limit)
    *first, last = formulations
    for formulation in first:
        try:
            return Solved(formulation, pins, settings, best_within(formulation, pins, settings.without_reasons()))
        except CutOffError as error:
            if error.seconds < math.inf:
                raise
        except InfeasibleError:
            pass
        except TimeLimitError:
            if is_over(deadline):
                raise
    left = settings if not first else settings.lasting(seconds_until(deadline))
    return Solved(last, pins, settings, best_within(last, pins, left))


def draft_of(made: Solved, memory: MemoryModel | None = None) -> Draft:
    """Return the draft of a plan of these choices.

    Weights are fetched as far ahead as a model of `memory` says, or else as there is room for.
    """
    memory = memory or fetched_ahead(made.answer, made.formulation.memory, made.settings)
    answer = _of_a_microbatch(made.answer, memory)
    context = PlanContext(made.space, memory, made.pins, answer.choices, answer.problem, made.settings, row=answer.row)
    return Draft(context, answer)


def best_plan_of(runs: Sequence[Microbatches], stated: Statements, pins: Pins, settings: Settings) -> Draft:
    """Return the draft of the plan with the fastest step among several implementations of micro-batches.

    They share the time limit. Raises CutOffError where no plan is faster than the cut-off of the settings, and else
    what planning for the last of them raises, where there is no plan for any.
    """
    found: list[Draft] = []
    slower: list[float] = []
    start = time.monotonic()
    for number, each in enumerate(runs):
        left = settings.search.time_limit - (time.monotonic() - start)
        cutoff = min(map(seconds_of_microbatch, found), default=math.inf)
        shared = max(left / (len(runs) - number), grace())
        within = replace(settings.lasting(shared), cutoff=min(settings.cutoff, cutoff))
        try:
            found.append(draft_of(solved_by(stated.of(within, each), pins, within)))
        except CutOffError as error:
            slower.append(error.seconds)
        except (InfeasibleError, TimeLimitError):
            if number == len(runs) - 1 and not found and not slower:
                raise
    least = min(slower, default=math.inf)
    if not found:
        raise CutOffError(least)
    best = min(found, key=seconds_of_microbatch)
    if least < seconds_of_microbatch(best):
        raise CutOffError(least)
    return replace(best, context=replace(best.context, settings=settings))


def begun(
    runs: Sequence[Microbatches], stated: Statements, pins: Pins, settings: Settings, start: WarmStart
) -> Draft | None:
    """Return the draft of a warm start that has the fastest step, of several implementations of micro-batches.

    None if the start has no choices that pins allow and a limit has room for. Nothing is proven of it: its bound is 0.
    """
    ways = [stated.of(settings, way) for way in runs]
    known = tuple(start.choices(stated.space, ways[0][0].memory.lifetimes))
    found = (next(filter(None, (_begun(each, pins, settings, known) for each in way)), None) for way in ways)
    return min(filter(None, found), key=seconds_of_microbatch, default=None)


def _begun(formulation: Formulation, pins: Pins, settings: Settings, known: Sequence[Start]) -> Draft | None:
    memory, limit = formulation.memory, settings.tensor_limit
    modes = None if limit is None else settings.modes(memory.lifetimes.segments)
    problem = formulation.problem(pins, modes=modes)
    for choices, chosen in known:
        taken = {name: chosen.get(name, MODES[0]) for name in modes or ()}
        seconds = problem.seconds_of(choices_of_nodes(choices, taken.values()))
        if not math.isfinite(seconds):
            continue
        if limit is None or memory_use(memory, choices, taken)[0] <= limit:
            answer = Answer(choices, taken, seconds, -math.inf, "warm start", 0.0, problem)
            return draft_of(Solved(formulation, pins, settings, answer))
    return None


def seconds_of_microbatch(plan: Chosen) -> float:
    """Return the seconds of one micro-batch with its share of what is done once a step: what a search makes least."""
    context = context_of(plan)
    if not context.memory_model.microbatches.several:
        return plan.device_seconds
    parts = step_seconds_of(context.memory_model, context.choices, plan.recompute)
    return parts.per_microbatch(context.memory_model.microbatches.count)


def is_bounded(plan: Plan, settings: Settings) -> bool:
    """Return whether a plan within a limit could differ from the plan without one.

    It could if memory has a price, if the plan is not proven best, if layers are recomputed or offloaded, or if the
    plan keeps parameters whole in place of one for which memory has a price.
    """
    again = settings.mode not in (None, *MODES) and set(plan.recompute.values()) - {"none"}
    return bool(plan.multiplier or plan.gap or again or context_of(plan).pays_split)


def replan(context: PlanContext, pins: Pins, settings: Settings | None = None) -> Plan:
    """Return the best plan of the same space under other pins, or with other settings too; annotations and mode
    stay.
    """
    settings = settings or context.settings
    narrow, left = Formulation(context.space, context.memory_model).narrowed(pins)
    made = solved_by(formulations_of(narrow.memory, settings), left, settings)
    draft = draft_of(made)
    found = draft.context
    changed = replace(
        context,
        space=found.space,
        memory_model=found.memory_model,
        pins=found.pins,
        choices=found.choices,
        problem=found.problem,
        settings=settings,
        row=found.row,
    )
    plan = replace(draft, context=changed).written()
    return replace(plan, context=changed if changed.space is context.space else changed.widened())


def fetched_ahead(answer: Answer, memory: MemoryModel, settings: Settings) -> MemoryModel:
    """Return the model of memory with weights fetched as far ahead as there is room for and use of.

    `memory` is the model that the answer was found with; choices that gather nothing fetch nothing ahead.
    """
    if not gathers_weights(memory, answer.choices):
        return memory.fetching_ahead(0)
    limit = settings.tensor_limit
    if settings.memory.prefetch != "auto" or limit is None:
        return memory
    found = memory
    for depth in PREFETCH_DEPTHS[1 + memory.prefetch :]:
        ahead = memory.fetching_ahead(depth)
        peak, *_ = memory_use(ahead, answer.choices, answer.modes)
        if peak > limit or (depth > USUAL_DEPTH and not _is_faster(ahead, found, answer)):
            break
        found = ahead
    return found


def _is_faster(further: MemoryModel, less: MemoryModel, answer: Answer) -> bool:
    """Return whether a step is known to be faster, in the simulated timeline, if weights are fetched further ahead."""
    if further.space.hardware.communication_share == 1 or whole_is_over():
        return False  # nothing overlaps with compute, or there is no time to simulate it
    with_more, with_less = (step_timeline(memory, answer.choices, answer.modes).seconds for memory in (further, less))
    return with_more < (1 - WORTH) * with_less


def bounds_near(plan: Plan, formulation: Formulation, pins: Pins, limit: int) -> Bounds:
    """Return the bounds of all plans under pins within a limit (bytes per device) at the plan's prices of memory."""
    context, priced = context_of(plan), None
    if context.row is not None:
        given = PricedMemory(context.row, plan.multiplier)
        priced = given.of_the_same_calls(context.memory_model.presence, formulation.memory.presence)
    modes = context.settings.modes(formulation.memory.lifetimes.segments)
    return bounds_at(formulation, pins, limit, modes, priced, after(context.settings.search.time_limit))


def _of_a_microbatch(answer: Answer, memory: MemoryModel) -> Answer:
    """Return the answer with the seconds of a step of one micro-batch."""
    if not memory.microbatches.several:
        return answer
    # The absolute gap of a micro-batch's share of a step is at least that of the whole step.
    seconds = step_seconds_of(memory, answer.choices, answer.modes).seconds
    return replace(answer, seconds=seconds, bound=seconds - (answer.seconds - answer.bound))
