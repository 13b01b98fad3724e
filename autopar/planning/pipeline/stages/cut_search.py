"""The best cut into stages whose seconds are expensive to compute, as under a memory limit.

The search finds the best cut by lower bounds on stages' seconds, plans stages of it, and repeats until a cut is within
the tolerance of its bound. No other cut can be better then, as the rest of the table is below the truth. A planned
stage has seconds and a lower bound, which may differ: it is planned more closely only if that decides between cuts. So
only stages that set the pace have to be proven.

Stages of a cut without any result are planned first, the one with the most micro-batches in flight before others:
stages of equal blocks with fewer in flight can use its choices. The one whose unproven seconds make the step longest is
next. A stage that does not fit (infinite) is taken not to fit with more blocks either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import PipelineError, TimeLimitError
from autopar.planning.pipeline.stages.alike import raise_alike
from autopar.planning.pipeline.stages.cheapest_cut import Floats, cheapest_cut
from autopar.planning.pipeline.stages.cuts import CutProblem, Cuts, Place, cuts_of, own_seconds, stages_of, transfers
from autopar.solver.deadline import why_over

_EQUAL = 1e-12
"""Relative: what float sums in another order differ by."""
CLOSER = 10.0
"""So many times longer it takes to ask for a stage more closely than for another one, roughly."""
PACE_SLACK = 1.05
"""Factor on the pace of a pass: a stage known to take no more is not planned."""
StageCost = Callable[[int, int, int], float]
"""(first block, end block, stage) to the seconds of the stage, transfers left out; infinite if it does not fit."""
Visited = tuple[tuple[int, int], float, Sequence[int]]
"""First block and end block, and seconds that some stages take at least if they have these blocks, or equal ones."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of stages, found stage by stage because each is expensive to plan.

    `seconds` plans a stage. `at_most` gives a known upper bound without planning (infinite: none is known). `fuller`
    gives the stages in which the same blocks take at least as many seconds: those with no more memory and as many
    micro-batches in flight.
    """

    seconds: StageCost
    at_most: StageCost = lambda first, end, stage: np.inf
    fuller: Callable[[int], Sequence[int]] | None = None
    """None: those with as many micro-batches in flight, or more."""
    is_over: Callable[[int, bool], bool] = lambda requested, has_cut: False
    """(number of planned stages, whether a cut that fits is known) → True if the search ends."""
    at_least: StageCost | None = None
    """Lower bound on the seconds of a stage that was planned; None: the seconds that were found."""
    closer: Callable[[int, int, int], bool] = lambda first, end, stage: False
    """Plans a stage more closely that was planned before; returns False if it did not."""
    visited: Callable[[], Iterable[Visited]] = tuple
    """Lower bounds that are known before the search plans any stage."""


def best_cuts_within(
    problem: CutProblem,
    costs: StageCosts,
    tolerance: float = 0.0,
    kinds: Sequence[int] | None = None,
    thought: Floats | None = None,
) -> Cuts:
    """Return the cut of least seconds by `costs`, within the tolerance (relative), with seconds that no cut is below.

    The sums of blocks are lower bounds of `costs` (asserted). With `kinds`, a number per block that is the same for
    equal blocks, what a stage takes beyond its blocks says of other stages what these take at least (`alike`). With
    what stages are `thought` to take, [stage, first block, end block], the search begins with the best cut by that.

    Raises:
        PipelineError: No cut fits; names a stage and the smallest range of blocks that did not fit into it.
        TimeLimitError: The time or number of stages is used up, and no cut is known to fit.
    """
    search = _Search.of(problem, costs, kinds)
    best = None if thought is None else search.cut_as_thought(thought)
    while True:
        found = search.cheapest()
        enough = found.seconds * (1 + max(tolerance, _EQUAL))
        if best is not None and best.seconds <= enough:
            break
        if costs.is_over(len(search.requested), best is not None):
            if best is None:
                raise TimeLimitError(
                    f"{why_over()} before stages that fit into memory were found; give it longer, raise the memory "
                    "limit, or say the stages."
                )
            break
        places = stages_of(found.starts, len(problem.blocks))
        before = len(search.requested)
        try:
            known = search.known_of_all(places)
            if known is None:
                continue
            exact = search.cut_that_takes(found.starts, known)
            if best is None or exact.seconds < best.seconds:
                best = exact
            if best.seconds <= enough:
                break
            # Is it that what is known of these stages does not tell this cut from the best?
            if len(search.requested) == before and not search.learn_of_one(places, known):
                break
        except TimeLimitError:
            if best is None:
                raise
            break
    return replace(best, bound=min(best.seconds, found.seconds))


@dataclass(slots=True)
class _Search:
    """State of the search: known bounds on the seconds of stages."""

    problem: CutProblem
    costs: StageCosts
    kinds: Sequence[int] | None
    transfers: Floats
    own: Floats
    """[stage, first block, end block]: seconds of the blocks alone."""
    least: Floats
    """The same with transfers."""
    table: Floats
    """The same, by what is known."""
    in_flight: tuple[int, ...]
    requested: dict[Place, float] = field(default_factory=dict)
    """Seconds of planned stages, without transfers."""
    at_least: dict[Place, float] = field(default_factory=dict)
    """Lower bounds on the seconds of these stages."""
    settled: set[Place] = field(default_factory=set)
    """Stages among these that are not planned more closely."""

    @classmethod
    def of(cls, problem: CutProblem, costs: StageCosts, kinds: Sequence[int] | None) -> _Search:
        sent, own = transfers(problem), own_seconds(problem)
        in_flight = tuple(map(problem.schedule.in_flight, range(problem.schedule.num_stages)))
        least, table = own + sent, own + sent
        for (first, end), seconds, stages in costs.visited() if kinds is not None else ():
            more = max(seconds - sum(problem.own_seconds[first:end]), 0.0)
            raise_alike(table, least, more, (first, end), kinds or (), stages)
        return cls(problem, costs, kinds, sent, own, least, table, in_flight)

    def cheapest(self) -> Cuts:
        """Return the best cut by what stages take at least: a bound."""
        problem = self.problem
        starts = cheapest_cut(problem.fill(self.table), self.table, problem.schedule.num_ranks, problem.pace)
        if starts is None:
            raise PipelineError(self._why_none_fits())
        return cuts_of(problem, self.table, starts)

    def known_of_all(self, places: Sequence[Place]) -> dict[Place, float] | None:
        """Return upper bounds on the seconds of stages, and plan those without one.

        Returns None as soon as one does not fit, or if time is over before all are known.
        """
        known = {place: self._known(place) for place in places}
        for place in sorted(places, key=lambda place: -self.in_flight[place[0]]):
            if np.isinf(known[place]):
                known[place] = self._known(place)  # by stages planned since
            if np.isinf(known[place]):
                if self.costs.is_over(len(self.requested), False):
                    return None
                known[place] = self._plan_stage(place)
                if np.isinf(known[place]):
                    return None
        return known

    def cut_as_thought(self, thought: Floats) -> Cuts | None:
        """Return the best cut that fits, by the stages' assumed seconds, with their actual seconds.

        Stages are planned if they are not known, or are slower than what sets the pace of their pass. Returns None if
        no cut is assumed to fit, or the time is over.
        """
        problem, ranks = self.problem, self.problem.schedule.num_ranks
        while True:
            table = np.maximum(thought, self.table)
            starts = cheapest_cut(problem.fill(table), table, ranks, problem.pace)
            if starts is None:
                return None
            places = stages_of(starts, len(problem.blocks))
            by_flight = sorted(places, key=lambda place: -self.in_flight[place[0]])
            unknown = [place for place in by_flight if np.isinf(self._known(place))]
            if not unknown:
                break
            for place in unknown:
                if self.costs.is_over(len(self.requested), False):
                    return None
                if np.isinf(self._known(place)) and np.isinf(self._plan_stage(place)):
                    break  # another cut then
        taken = np.array([table[place] for place in places]).reshape(-1, ranks)
        paces = np.repeat(taken.max(axis=1), ranks)
        for place in by_flight:
            stage, first, end = place
            most = PACE_SLACK * float(paces[stage]) - float(self.transfers[place])
            if (
                self._known(place) > most
                and place not in self.requested
                and not self.costs.is_over(len(self.requested), False)
            ):
                self._plan_stage(place)
            if self._known(place) > most and place in self.requested and self.costs.closer(first, end, stage):
                self._note(place, self.costs.seconds(first, end, stage))
        return self.cut_that_takes(starts, {place: self._known(place) for place in places})

    def learn_of_one(self, places: Sequence[Place], known: dict[Place, float]) -> bool:
        """Ask for the stage, or more closely, of whose open seconds the most are learned; False where there is none."""
        floor = [float(self.table[place]) for place in places]
        open_seconds: dict[Place, float] = {}
        for number, place in enumerate(places):
            raised = list(floor)
            raised[number] = max(floor[number], known[place] + float(self.transfers[place]))
            open_seconds[place] = self.problem.seconds_of(raised) - self.problem.seconds_of(floor)
        while True:
            worth = {
                place: each / (CLOSER if place in self.requested else 1.0)
                for place, each in open_seconds.items()
                if place not in self.settled
            }
            if not worth:
                return False
            place = max(worth, key=worth.__getitem__)
            if place not in self.requested:
                self._plan_stage(self._middle(place, places))
                return True
            stage, first, end = place
            if self.costs.closer(first, end, stage):
                self._note(place, self.costs.seconds(first, end, stage))
                return True
            self.settled.add(place)

    def _middle(self, place: Place, places: Sequence[Place]) -> Place:
        """Return the stage with median micro-batches in flight, among unplanned ones with blocks like those of `place`.

        Its lower bound holds for fuller stages, its upper bound for the others, so that half of the stages profit from
        each.
        """
        if self.kinds is None:
            return place
        wanted = tuple(self.kinds[slice(*place[1:])])
        alike = [
            each for each in places if each not in self.requested and tuple(self.kinds[slice(*each[1:])]) == wanted
        ]
        return sorted(alike, key=lambda each: self.in_flight[each[0]])[len(alike) // 2]

    def cut_that_takes(self, starts: tuple[int, ...], known: dict[Place, float]) -> Cuts:
        """Return a cut whose stages take what is known."""
        places = stages_of(starts, len(self.problem.blocks))
        own = tuple(known[place] + float(self.transfers[place]) for place in places)
        seconds = self.problem.seconds_of(own)
        return Cuts(starts, own, seconds, seconds)

    def _known(self, place: Place) -> float:
        """Return the least known upper bound on the seconds of a stage."""
        stage, first, end = place
        return min(self.costs.at_most(first, end, stage), self.requested.get(place, np.inf))

    def _plan_stage(self, place: Place) -> float:
        stage, first, end = place
        seconds = self.costs.seconds(first, end, stage)
        if self.costs.at_least is None or np.isinf(seconds):
            self.settled.add(place)
        return self._note(place, seconds)

    def _note(self, place: Place, seconds: float) -> float:
        """Record the seconds of a stage, and raise the lower bounds of other stages that follow."""
        stage, first, end = place
        own = float(self.own[place])
        assert seconds >= own * (1 - 1e-9), f"stage {stage}, blocks {first}-{end}: below its blocks"
        is_open = self.costs.at_least is not None and np.isfinite(seconds)
        least = max(self.costs.at_least(first, end, stage), own) if is_open else seconds  # type: ignore[misc]
        self.requested[place], self.at_least[place] = seconds, least
        if self.kinds is not None:
            fuller = [other for other, held in enumerate(self.in_flight) if held >= self.in_flight[stage]]
            fuller = self.costs.fuller(stage) if self.costs.fuller else fuller
            raise_alike(self.table, self.least, max(least - own, 0.0), (first, end), self.kinds, fuller)
        for known, each in self.at_least.items():  # holds for every stage
            self.table[known] = each + self.transfers[known]
        if np.isinf(seconds):
            self.table[stage, : first + 1, end:] = np.inf  # more blocks do not fit either
        return seconds

    def _why_none_fits(self) -> str:
        """Describe the stage that rules out every cut: the last one found too large, up to where no block is
        reachable.
        """
        reached, reachable = np.arange(len(self.problem.blocks) + 1) == 0, []
        for stage in self.table:
            reached = (reached[:, None] & np.isfinite(stage)).any(axis=0)
            reachable.append(reached.any())
        stopped = reachable.index(False)
        too_large = [
            (stage, first, end) for (stage, first, end), seconds in self.requested.items() if np.isinf(seconds)
        ]
        named = max(stage for stage, _, _ in too_large if stage <= stopped)
        _, first, end = min((end - first, first, end) for stage, first, end in too_large if stage == named)
        name_of = self.problem.name_of
        which = name_of(first) if end == first + 1 else f"{name_of(first)} to {name_of(end - 1)}"
        return (
            f"no cut into {len(self.table)} stages fits into memory: stage {named} does not fit even with {which}. "
            "Use a longer pipeline axis, smaller micro-batches, a schedule with fewer of them in flight, or another "
            "axis to split storage."
        )
