"""The best plan of a space for a request.

1. *First plan*: that of a search in which all axes zigzag-shard positions that may, or one that begins at a warm start.
2. *Storage*: a plan with whole parameters is taken in its place if that has the shorter step (`whole_parameters`).
3. *Further searches*: with what the simulated step waits for, and positions in order where attention does not divide
   its queries (`simulated`).
4. *Other plans*: if the step of a small graph is still clearly longer than the least sum, plans that other shares lead
   to, and two presets, are simulated, too. Searches go on from the one of the shortest step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.console.units import format_seconds
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.plans.plan import Plan
from autopar.costs.space.narrowed import Pins, is_large
from autopar.costs.space.notes import notes_on_moves
from autopar.costs.space.space import Space
from autopar.costs.space.zigzag_axes import is_worth_another_search, possible_zigzag_axes, zigzag_axes_of
from autopar.errors import CutOffError, InfeasibleError, TimeLimitError
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.layout import Layout
from autopar.planning.annotations.pins import pins_of
from autopar.planning.expert_notes import warn_of_unknown_experts
from autopar.planning.memory_limit.answers import choices_of_nodes
from autopar.planning.planner import Statements, begun, best_plan_of, seconds_of_microbatch
from autopar.planning.record import Draft
from autopar.planning.replicated_work import (
    unused_axes,
    warn_of_kept_whole,
    warn_of_replicated_work,
    warn_of_unused_axes,
)
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings, context_of
from autopar.planning.simulated import (
    SimulatedDraft,
    is_doubtful,
    others_by_shares,
    shortest_simulated,
    simulating,
)
from autopar.planning.whole_parameters import SMALL, pins_of_preset, planned_under, with_storage_settled
from autopar.solver.deadline import after, is_over, nothing_found, seconds_until, whole_is_over
from autopar.strategies.presets.data import warn_of_gradients

COMPARED = ("zero1+expert_data", "hsdp")
"""Presets that gather large weights over one axis alone, which searches by shares may miss."""


def best_plan(
    request: PlanRequest, space: Space, storage: Mapping[str, Layout] | None = None, stated: Statements | None = None
) -> Plan:
    """Return the best plan of a space; `storage` gives layouts in which parameters, by name, are stored already.

    `stated` are its problems, where some were stated before.
    """
    specified = request.annotations_about(space.program, space.mesh, stored=bool(storage))
    deadline = after(request.settings.search.time_limit)
    stated = stated or Statements(space)
    if request.first_zigzag_axes is not None:
        stated = stated.with_zigzag_axes(())
    search = _Search(request, stated, specified, storage or {}, deadline)
    started = search.begun()
    first, in_order = search.first() if started is None else (started, None)
    plan = search.shortest(first, in_order).written()
    space, choices = context_of(plan).space, context_of(plan).choices
    warn_of_plan(request, plan, space, choices, stored=bool(storage))
    unused = unused_axes(space, choices) if request.strategy is None else ()
    return replace(plan, notes=(*plan.notes, *map(str, unused)))


def warn_of_plan(request: PlanRequest, plan: Plan, space: Space, choices: Sequence[int], stored: bool) -> None:
    """Warn of surprises in a plan of these choices; `stored` as in `PlanRequest.annotations_about`."""
    specified = warn_of_replicated_work(request.strategy, [(space, tuple(choices))], stored)
    if not specified and (request.strategy is not None or not warn_of_unused_axes(space, choices)):
        warn_of_kept_whole(space.mesh, plan.kept_whole)
    warn_of_gradients(request.strategy, request.microbatches or 1)
    warn_of_unknown_experts(space)


@dataclass(frozen=True, slots=True)
class _Search:
    """Searches of one space for one request."""

    request: PlanRequest
    problems: Statements
    """Problems of a space with all positions in order, or zigzag-sharded by all axes if nothing is pinned."""
    specified: tuple[Annotation, ...]
    """Annotations of the user and the preset."""
    storage: Mapping[str, Layout]
    deadline: float

    def first(self) -> tuple[SimulatedDraft, Space | None]:
        """Return the plan of the first search, and the space of the next one if it is another."""
        problems, pins = self._pinned(self.problems)
        problems, pins = self._with_zigzag_axes(possible_zigzag_axes(problems.space, pins))
        plan = self._settled(self._made(pins, self.request.settings, problems), problems)
        space, choices = problems.space, plan.choices
        if is_over(self.deadline):
            return plan, None
        if not is_worth_another_search(space, choices, needed := zigzag_axes_of(space, choices)):
            return plan, None
        in_order = self._with_zigzag_axes(needed)[0].space
        if plan.draft.context.keeps_whole and not space.has_same_candidates(in_order):
            return plan, None  # its pins are of other strategies
        return plan, in_order

    def begun(self) -> SimulatedDraft | None:
        """Return the plan of a search that begins at the warm start, with its costs, or the start if that is shorter.

        None without a warm start that the request allows.
        """
        start = self.request.warm_start
        if start is None:
            return None
        self._pinned(self.problems)  # warns of annotations
        problems, pins = self._with_zigzag_axes(start.zigzag_axes)
        problems = Statements(problems.space.waiting_for(start.waited))
        draft = begun(self._runs(), problems, pins, self.request.searched, start)
        if draft is None:
            return None
        made = self._settled(self._marked(draft), problems)
        if is_over(self.deadline) or whole_is_over():
            return made
        with suppress(CutOffError, InfeasibleError, TimeLimitError):
            found = SimulatedDraft.of(self.again(problems.space, made.draft, 0.0))
            if found.simulated_seconds <= made.simulated_seconds:
                return found
            answer = replace(made.draft.answer, bound=found.draft.answer.bound)
            return replace(made, draft=replace(made.draft, answer=answer))
        return made

    def again(self, costs: Space, incumbent: Draft, gap: float) -> Draft:
        """Return the best plan under the costs of a space, up to a gap, by a search that begins at a plan.

        Raises TimeLimitError if time is over before anything is proven under these costs.
        """
        context, settings = incumbent.context, self.request.settings.lasting(seconds_until(self.deadline))
        if gap:
            settings = replace(settings, search=replace(settings.search, gap=max(gap, settings.search.gap or 0.0)))
        with warnings.catch_warnings(action="ignore"):  # the first search has warned
            stated, same = Statements(costs, incumbent), costs.has_same_candidates(context.space)
            stated, allowed = (stated, context.pins) if same else self._pinned(stated)
            found = self._made(allowed, settings, stated)
        if math.isinf(found.answer.bound):
            raise TimeLimitError(nothing_found())
        kept = {"keeps_whole": context.keeps_whole, "pays_split": context.pays_split}
        own = replace(found.context, settings=context.settings, **kept)
        return replace(found, context=own, notes=(*found.notes, *incumbent.notes[-1:] * context.keeps_whole))

    def _pinned(self, stated: Statements) -> tuple[Statements, Pins]:
        request, space = self.request, stated.space
        pins = {} if space.kept else pins_of(self.specified, space, request.mode, self.storage)
        if request.strategy or is_large(space):
            return stated.narrowed(pins)
        return stated, pins  # parameters may be kept whole

    def _with_zigzag_axes(self, axes: Collection[str]) -> tuple[Statements, Pins]:
        with warnings.catch_warnings(action="ignore"):  # the first space has warned
            return self._pinned(self.problems.with_zigzag_axes(axes))

    def shortest(self, first: SimulatedDraft, in_order: Space | None) -> SimulatedDraft:
        """Return the plan of the shortest simulated step that searches lead to from the first one's."""
        again = simulating(self.again)
        best = shortest_simulated(first, again, self.deadline, in_order)
        is_open = self._is_free and not best.draft.context.keeps_whole
        if not is_open or len(best.space.decisions) > SMALL or not is_doubtful(first, best):
            return best
        compared = [*self._of_presets(first, best), *others_by_shares(best, again, self.deadline)]
        found = min([best, *compared], key=lambda each: each.simulated_seconds)
        return best if found is best else shortest_simulated(found, again, self.deadline)

    @property
    def _is_free(self) -> bool:
        """True if the user leaves the storage of parameters open."""
        request = self.request
        return request.training and request.strategy is None and request.mode != "manual" and not self.storage

    def _of_presets(self, first: SimulatedDraft, best: SimulatedDraft) -> Iterator[SimulatedDraft]:
        """Yield the plans of the presets that are compared, where the request allows one and it is found in time.

        Their costs are those of the rule. Their bound is that of all plans under these costs.
        """
        problems, _ = self._with_zigzag_axes(best.space.zigzag_axes)
        space, own = problems.space, first.space
        is_of_rule = own.zigzag_axes == space.zigzag_axes and not own.overlapped.waited
        with suppress(CutOffError, InfeasibleError, TimeLimitError):
            every = first.draft if is_of_rule else self.again(space, best.draft, 0.0)
            for name in COMPARED:
                pins = pins_of_preset(name, self.specified, space)
                if pins is None:
                    continue
                found = planned_under(self._under(problems), pins, self.request.settings, self.deadline)
                if found is None or not _is_bounded_by(every, found.draft):
                    continue
                note = (
                    f"begun at the preset {name}: its simulated step takes {format_seconds(found.simulated_seconds)}, "
                    f"and {format_seconds(best.simulated_seconds)} with the plan that the sum of costs leads to"
                )
                made = _bounded_by(every, found.draft)
                yield replace(found, draft=replace(made, notes=(*made.notes, note)))

    def _settled(self, draft: Draft, problems: Statements) -> SimulatedDraft:
        """Return the plan, or one with whole parameters, where the user leaves that open."""
        plan = SimulatedDraft.of(draft)
        if not self._is_free:
            return plan
        return with_storage_settled(plan, self.specified, self._under(problems), self.deadline)

    def _under(self, problems: Statements) -> Callable[[Pins, Settings], Draft]:
        """Return the search of these problems under pins and settings."""
        return lambda pins, settings: self._made(pins, settings, problems)

    def _made(self, pins: Pins, settings: Settings, problems: Statements) -> Draft:
        searched = replace(self.request, settings=settings).searched
        return self._marked(best_plan_of(self._runs(), problems, pins, searched))

    def _marked(self, plan: Draft) -> Draft:
        """Return the plan with what the user has specified."""
        context = replace(plan.context, annotations=self.specified, mode=self.request.mode)
        moved = notes_on_moves(context.space, context.choices) if self.request.mode == "manual" else ()
        return replace(plan, context=context, notes=(*plan.notes, *moved))

    def _runs(self) -> list[Microbatches]:
        """Return the ways in which gradients of micro-batches may be added up, of which the fastest is taken."""
        request, count = self.request, self.request.microbatches or 1
        request.optimizer.check_microbatches(count)
        free = count > 1 and request.searched.limit is not None and request.strategy is None
        ways = (False, True) if free else (request.reduces_each and count > 1,)
        lasting = request.conventions.main_gradients and request.training
        return [Microbatches(count, reduce_each=each, main_gradients=lasting) for each in ways]


def _is_bounded_by(every: Draft, found: Draft) -> bool:
    """Return whether the bound of one draft is one of another, which may sum gradients or fetch weights otherwise."""
    runs, problem = every.context.memory_model.microbatches, every.answer.problem
    if found.context.memory_model.microbatches != runs:
        return False
    chosen = choices_of_nodes(found.answer.choices, found.answer.modes.values())
    return problem.budget is None or (len(chosen) == len(problem.nodes) and problem.fits(problem.bytes_of(chosen)))


def _bounded_by(every: Draft, found: Draft) -> Draft:
    """Return the plan that was found under some pins with the bound of all plans, under the same costs."""
    context, answer = every.context, every.answer
    least = seconds_of_microbatch(every) - (answer.seconds - answer.bound)
    seconds = found.answer.seconds
    bound = seconds - max(seconds_of_microbatch(found) - least, 0.0)
    own = replace(found.context, pins=context.pins, settings=context.settings, problem=answer.problem, row=answer.row)
    return replace(
        found,
        context=own,
        answer=replace(answer, choices=found.answer.choices, modes=found.answer.modes, seconds=seconds, bound=bound),
    )
