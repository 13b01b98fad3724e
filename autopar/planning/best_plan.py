"""The best plan of a space for a request.

1. *First plan*: that of a search in which all axes zigzag-shard positions that may, or one that begins at a warm start.
2. *Storage*: a plan with whole parameters is taken in its place if that has the shorter step (`whole_parameters`).
3. *Further searches*: with what the simulated step waits for, and positions in order where attention does not divide
   its queries (`simulated`).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

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
from autopar.planning.planner import Statements, begun, best_plan_of
from autopar.planning.record import Draft
from autopar.planning.replicated_work import (
    unused_axes,
    warn_of_kept_whole,
    warn_of_replicated_work,
    warn_of_unused_axes,
)
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings, context_of
from autopar.planning.simulated import SimulatedDraft, as_simulated
from autopar.planning.whole_parameters import with_storage_settled
from autopar.solver.deadline import after, is_over, seconds_until, whole_is_over
from autopar.strategies.presets.data import warn_of_gradients


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
    plan = as_simulated(first, search.again, deadline, in_order)
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
        """Return the best plan under the costs of a space, up to a gap, by a search that begins at a plan."""
        context, settings = incumbent.context, self.request.settings.lasting(seconds_until(self.deadline))
        if gap:
            settings = replace(settings, search=replace(settings.search, gap=max(gap, settings.search.gap or 0.0)))
        with warnings.catch_warnings(action="ignore"):  # the first search has warned
            stated, same = Statements(costs, incumbent), costs.has_same_candidates(context.space)
            stated, allowed = (stated, context.pins) if same else self._pinned(stated)
            found = self._made(allowed, settings, stated)
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

    def _settled(self, draft: Draft, problems: Statements) -> SimulatedDraft:
        """Return the plan, or one with whole parameters, where the user leaves that open."""
        request, plan = self.request, SimulatedDraft.of(draft)
        if not request.training or request.strategy is not None or request.mode == "manual" or self.storage:
            return plan

        def again(pins: Pins, settings: Settings) -> Draft:
            return self._made(pins, settings, problems)

        return with_storage_settled(plan, self.specified, again, self.deadline)

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
