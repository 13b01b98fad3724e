"""Costs that agree with the simulated step: solve, simulate, count what the step waits for, and solve again.

The solver's sum prices one decision at a time. The hidden share of a weight's collectives depends on all others:
several axes hide behind the same computing, and share links. `costs.hardware.overlap` has a rule for one axis. If the
step of the plan that it leads to waits for clearly more or less, its shares take the place of the rule, by kind of
collective:

    share of a kind = (seconds that its step waits for it - seconds of messages that nothing hides) / seconds of others

and the problem is solved again, from the plan, at most twice. The next plan is taken if its timeline, with all
micro-batches, is shorter, and searched for again if its step waits for more than its costs say. The same plan is taken
with its new costs. Otherwise the plan before is kept, with the costs and the bound of the search that found it, which
its timeline may differ from. If axes zigzag-shard positions that the plan has in order, the next search is of the space
without them, and made in any case.

Shares are averages of what one plan moves, not what more or less of a kind would take. So searches may circle, or end
with a plan that moves too much; where few layers gather large experts, its step took up to 1.5 times as long as
another's. If the step stays clearly longer than the first sum, the least of all, a second series begins with half of
each collective and goes on though its plans become longer (`others_by_shares`).

Hosts launch all choices alike but for collectives. No search prices launches; the plan that is kept counts those that
its step waits for, and the lateness of hosts that its step waits for in place of all that its costs price:

    host seconds = seconds in which devices wait for launches - seconds for which collectives wait for the last host
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

from autopar.costs.hardware.collectives import transfer_seconds
from autopar.costs.hardware.overlap import NOTHING, OTHERS, kind_of
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space, without_gradient
from autopar.costs.steps.step import microbatch_seconds, step_timeline
from autopar.costs.timeline.values import Timeline
from autopar.errors import CutOffError, InfeasibleError, TimeLimitError
from autopar.planning.record import Draft
from autopar.planning.settings import Chosen, context_of
from autopar.solver.deadline import is_over, whole_is_over

ROUNDS = 3
"""Searches at most, with the first one; the last ends where it could gain less than `WORTH`."""
DIFFERENT = 0.02
"""Relative to the step: costs of weights that differ by less from the timeline's are kept."""
WORTH = 1e-3
"""Relative to the step: how much shorter the next plan's timeline has to be."""
DOUBT = 0.05
"""Relative to the least sum: a step that is longer by more may be far from the shortest."""
HALF = 0.5
"""Share of each collective of weights that is waited for, with which searches for other plans begin."""


class Simulated(Protocol):
    """A plan of a search, and its simulated step."""

    @property
    def space(self) -> Space: ...
    @property
    def choices(self) -> Sequence[int]: ...

    @property
    def timeline(self) -> Timeline:
        """The simulated step of one micro-batch."""
        ...

    @property
    def simulated_seconds(self) -> float:
        """Seconds of a simulated step of all micro-batches."""
        ...

    @property
    def priced_seconds(self) -> float:
        """Seconds of a step of one micro-batch by the sum of costs."""
        ...

    def is_same(self, other: Self) -> bool:
        """Return whether another plan has the same choices."""
        ...


S = TypeVar("S", bound=Simulated)
Again = Callable[[Space, Draft, float], Draft]
"""Search a space with other costs from a plan of the same decisions, up to an optimality gap."""


def shortest_simulated(
    best: S, again: Callable[[Space, S, float], S], deadline: float, space: Space | None = None
) -> S:
    """Return the plan of least simulated seconds that searches with the costs of simulated steps lead to.

    Args:
        best: The plan of the first search.
        again: Searches a space with other costs under the same pins and settings.
        deadline: Time after which no further search begins.
        space: Space of further searches, if it is another one than the plan's; one is made in any case.
    """
    gap, known = 0.0, dict(best.space.overlapped.waited)
    for _ in range(ROUNDS - 1):
        seconds = best.timeline.seconds
        apart, shares = _waited(best)
        is_settled = apart <= DIFFERENT * seconds
        if (is_settled and space is None) or is_over(deadline) or whole_is_over():
            break
        known |= {} if is_settled else shares
        try:
            found = again((space or best.space).waiting_for(known), best, gap)
        except (CutOffError, InfeasibleError, TimeLimitError):
            break
        gap = WORTH * min(1.0, seconds / best.priced_seconds)
        best, goes_on = _better(best, found, is_simpler=space is not None)
        space = None
        if not goes_on:
            break
    return best


def is_doubtful(first: Simulated, best: Simulated) -> bool:
    """Return whether a step is clearly longer, without its launches, than the least sum, which the first plan has.

    It is not where nothing hides: shares are the same for all plans.
    """
    step = best.timeline
    return _hides(best.space) and step.seconds - step.launching > (1 + DOUBT) * first.priced_seconds


def others_by_shares(best: S, again: Callable[[Space, S, float], S], deadline: float) -> Iterator[S]:
    """Yield plans of searches that go on though a step becomes longer: each has the shares of the plan before it.

    In the first one half of each collective of weights is waited for.
    """
    found, known = best, {OTHERS: HALF}
    for _ in range(ROUNDS):
        if is_over(deadline) or whole_is_over():
            return
        try:
            before, found = found, again(best.space.waiting_for(known), found, 0.0)
        except (CutOffError, InfeasibleError, TimeLimitError):
            return
        yield found
        if found.is_same(before):
            return
        known |= _waited(found)[1]


def _better(best: S, found: S, is_simpler: bool) -> tuple[S, bool]:
    """Return a next plan if its simulated step is shorter, or as long and the plan is the same or simpler.

    A plan is simpler if its positions are in order. Also return whether another search may follow: not after a shorter
    plan whose step is within its costs.
    """
    most, is_same = (1 + WORTH) * best.simulated_seconds, found.is_same(best)
    if not is_same and found.simulated_seconds < (1 - WORTH) * best.simulated_seconds:
        return found, found.timeline.seconds > (1 + DIFFERENT) * found.priced_seconds
    if (is_same or is_simpler) and found.simulated_seconds <= most:
        return found, True
    return best, False


@dataclass(frozen=True, slots=True)
class SimulatedDraft:
    """A draft of a plan, and its simulated step."""

    draft: Draft
    timeline: Timeline
    """The simulated step of one micro-batch."""
    simulated_seconds: float
    """Seconds of a simulated step of all micro-batches."""

    @classmethod
    def of(cls, draft: Draft) -> Self:
        """Simulate a draft."""
        timeline = timeline_of(draft)
        return cls(draft, timeline, simulated_seconds(draft, timeline))

    @property
    def space(self) -> Space:
        return self.draft.context.space

    @property
    def choices(self) -> tuple[int, ...]:
        return self.draft.answer.choices

    @property
    def priced_seconds(self) -> float:
        return self.draft.device_seconds

    def is_same(self, other: SimulatedDraft) -> bool:
        return self.draft.strategies == other.draft.strategies and self.draft.recompute == other.draft.recompute

    def written(self) -> Plan:
        """Return the plan with the seconds of its timeline, and those that hosts add to its sum."""
        hosts = self.timeline.launching - self.timeline.lateness
        context = replace(self.draft.context, host_seconds=hosts)
        plan = replace(self.draft, context=context).written()
        workload = plan.workload and replace(plan.workload, seconds=self.simulated_seconds)
        return replace(plan, simulated=self.timeline.seconds, workload=workload)


def simulating(again: Again) -> Callable[[Space, SimulatedDraft, float], SimulatedDraft]:
    """Return the search that simulates what it finds."""
    return lambda costs, best, gap: SimulatedDraft.of(again(costs, best.draft, gap))


def simulated_seconds(plan: Chosen, timeline: Timeline | None = None) -> float:
    """Return the seconds of a step of all micro-batches, by the timeline, which is simulated unless it is given.

    A whole model's plan that was written down with its timeline has them. Of a plan that was loaded what it says is
    returned, which may be the sum of its costs.
    """
    if isinstance(plan, Plan) and (plan.context is None or (plan.simulated and plan.workload)):
        return plan.workload.seconds if plan.workload else plan.step_seconds
    context = context_of(plan)
    seconds, further = (timeline or timeline_of(plan)).seconds, context.memory_model.microbatches.count - 1
    each = microbatch_seconds(context.memory_model, context.choices, plan.recompute) if further else ()
    return seconds + further * sum(each)


def timeline_of(plan: Chosen) -> Timeline:
    """Return the simulated step of one micro-batch."""
    context = context_of(plan)
    return step_timeline(context.memory_model, context.choices, plan.recompute)


def waited_shares(space: Space, choices: Sequence[int], timeline: Timeline) -> tuple[float, Mapping[str, float]]:
    """Return by how many seconds costs of weights differ from what the step waits for, and the share of each kind."""
    waited: dict[str, float] = defaultdict(float)
    for each in timeline.events:
        if each.task.weights:
            waited[kind_of(each.task.name, each.task.axis, each.task.phase != "forward")] += each.waited
    unused = without_gradient(space)
    priced: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)
    for edge in space.edges:
        path = space.path(edge, choices)
        for transfer, message in zip(path.transfers, path.messages, strict=True):
            if message is None or (transfer.backward and edge.target in unused):
                continue
            kind = kind_of(transfer.collective, transfer.axis, transfer.backward)
            whole = transfer_seconds(transfer, space.mesh, space.hardware, replace(message, overlapped=NOTHING))
            priced[kind] += transfer_seconds(transfer, space.mesh, space.hardware, message)
            (others if message.overlaps(transfer.collective) else exposed)[kind] += whole
    apart = sum(abs(waited[kind] - priced[kind]) for kind in priced)
    shares = {kind: max(0.0, (waited[kind] - exposed[kind]) / whole) for kind, whole in others.items() if whole}
    return apart, shares


def _waited(found: Simulated) -> tuple[float, Mapping[str, float]]:
    """Return the same of a plan; nothing where nothing hides."""
    space = found.space
    return waited_shares(space, found.choices, found.timeline) if _hides(space) else (0.0, {})


def _hides(space: Space) -> bool:
    return space.hardware.communication_share < 1 and space.program.learns
