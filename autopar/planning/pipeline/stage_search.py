"""Seconds of pipeline stages within their memory budgets, searched for as few stages as the cut needs.

A stage is given by its structure (its calls, without their names), its micro-batches in flight (and with them its
receive buffers), and its memory budget: at its peak, and while other stages of its rank run (`budgets`, per-rank memory
budgets). Stages of equal structure have the same choices, so that a result for one serves others:

    in flight f, budget M  →  f' <= f, M' >= M      its choices fit there, too: they bound what that stage takes
    in flight f, budget M  →  any f', M'            its choices may fit there: memory is counted, nothing is solved
    does not fit in M with f                      does not fit in M' <= M with f' >= f

The search for choices limits the peak alone, which gives a lower bound. If its result saves too much while other stages
run, the search is repeated with a lower limit on the peak.

A stage is first planned with a large optimality gap, which gives choices that fit and a bound; both come soon and are
mostly close. It is planned within the tolerance only if the cut depends on it, which can take a hundred times as long.

Stages keep memory for weights that are fetched a layer ahead, if that fits at all, because waiting for weights sets the
pace. So the seconds of a stage are those of its timeline, and its lower bound is as far below as the proven gap of its
sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.pricing.optimizer import STATES
from autopar.costs.space.narrowed import Pins, narrowed
from autopar.costs.space.space import Space
from autopar.costs.steps.step import microbatch_seconds
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout
from autopar.planning.memory_limit.answers import share
from autopar.planning.memory_limit.least_peak import least_peak
from autopar.planning.pipeline.masks import masks_of
from autopar.planning.pipeline.planned_blocks import PlannedBlocks
from autopar.planning.pipeline.stages.cut_search import Visited
from autopar.planning.pipeline.stages.memory_budgets import Sample
from autopar.planning.pipeline.stages.splitting import Splitter
from autopar.planning.pipeline.stages.stage_bytes import MemoryBudget, StageBytes, is_at_least, stage_bytes_of
from autopar.planning.pipeline.structure import kinds, structure
from autopar.planning.planner import Solved, formulations_of, solved
from autopar.planning.settings import Settings
from autopar.planning.step_seconds import step_seconds_of
from autopar.solver.deadline import grace, is_over, seconds_until

TOLERANCE = 0.02
"""Under a memory limit: how far from the best a cut may be, and the plan of a stage, as a share; many are planned."""
ROUGHLY = 0.5
"""Relative optimality gap of a stage's first plan."""
MOST_PLANNED = 32
"""Stages that are planned within a memory limit before the best cut so far, if there is one, is taken."""
MOST_DECISIONS = 400
"""Decisions of a stage up to which it is planned again within the tolerance; larger ones would take minutes."""
STORED = ("parameters", "older weights", *STATES, "gradients", "constants")
"""Parts of a stage's memory that do not grow with micro-batches in flight."""
BUDGET_SLACK = 1.02
"""Factor on a budget: choices whose memory, scaled by micro-batches in flight, exceeds it are skipped."""
SHARE_OF_TIME = 0.06
"""Share of the remaining time for the plan of each stage, at most.

Most stages take less than a hundredth of it, and few of the others are planned.
"""
SHARE_OF_CLOSER = 0.2
"""The same for each that is planned within the tolerance where its first plan was not."""
TIGHTER = 0.97
"""Share of the last limit on the peak that the next one is at most, if choices save too much."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchedStage:
    """A stage that was searched: its micro-batches in flight, its memory budget, and its choices, if any fit."""

    span: tuple[int, int]
    """Its first block and its end."""
    runs: Microbatches
    budget: MemoryBudget | None
    made: Solved | None
    seconds: float
    """Seconds of one micro-batch, including its share of work once per step; infinite if the stage does not fit."""
    least: float
    """Lower bound on the seconds of any choices."""
    is_close: bool
    """True if it was planned within the tolerance, as far as time allowed."""


@dataclass(slots=True)
class StageSearch:
    """Planner of the stages of one pipeline until a deadline; equal stages are solved only once."""

    planned: PlannedBlocks
    deadline: float
    budgets: Sequence[MemoryBudget | None]
    """Memory budgets of the stages; None is unlimited."""
    until: tuple[float, ...]
    """Seconds of the blocks before each, and of all, by the plan of the whole."""
    roughly: float = ROUGHLY
    """Relative optimality gap of a stage's first plan."""
    most_planned: int = MOST_PLANNED
    """Stages that are planned before the best cut so far, if there is one, is taken."""
    by_structure: dict[int, list[SearchedStage]] = field(default_factory=lambda: defaultdict(list))
    kinds: Sequence[int] = ()
    """Kinds of the blocks, numbered when the search begins; equal stages have equal kinds."""
    planned_kinds: set[tuple[int, ...]] = field(default_factory=set)
    """Kinds of the blocks of each stage that was planned."""
    numbers: dict[object, int] = field(default_factory=dict)
    programs: dict[tuple[int, int], tuple[Program, int]] = field(default_factory=dict)
    spaces: dict[int, tuple[Space, Pins]] = field(default_factory=dict)
    """Structure → the space of the first stage that has it, and its pins."""
    leasts: dict[tuple[int, Microbatches], int] = field(default_factory=dict)
    """Structure and micro-batches in flight → the least bytes at the fullest moment."""
    uses: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Choices (by identity) → the bytes that they take with their own micro-batches, as `_use` returns them."""
    holds: dict[tuple[int, Microbatches], StageBytes] = field(default_factory=dict)
    """Choices (by identity) and micro-batches in flight → the bytes that they take."""
    memories: dict[tuple[int, Microbatches, int], MemoryModel] = field(default_factory=dict)
    """Space (by identity), micro-batches in flight, layers fetched ahead → what choices hold; equal stages share it."""
    runs: tuple[Microbatches, ...] = field(init=False)
    """The micro-batches of each stage."""
    splitter: Splitter = field(init=False)

    def __post_init__(self) -> None:
        request = self.planned.request
        self.runs = tuple(map(request.microbatches, range(request.schedule.num_stages)))
        self.kinds = kinds(self.planned)
        self.splitter = Splitter.of(self.planned.request.program, self.planned.blocks)

    @property
    def num_planned(self) -> int:
        """Number of stages that were planned."""
        return sum(map(len, self.by_structure.values()))

    def is_over(self, requested: int, has_cut: bool) -> bool:
        """Return whether to stop: time is over, or there is a cut and `most_planned` stages were planned."""
        return (has_cut and requested >= self.most_planned) or is_over(self.deadline)

    def own_seconds(self, first: int, end: int) -> float:
        """Return the seconds of the blocks from one to another, by the plan of the whole."""
        return self.until[end] - self.until[first]

    def seconds(self, first: int, end: int, stage: int) -> float:
        """Return the seconds of one micro-batch within the stage's memory budget; infinite if it does not fit."""
        known = self.find(first, end, stage) or self.ask(first, end, stage, self.roughly)
        return known.seconds

    def at_least(self, first: int, end: int, stage: int) -> float:
        """Return the lower bound on the seconds of a stage that was planned."""
        known = self.find(first, end, stage)
        assert known is not None, "a stage that was not planned"
        return known.least

    def closer(self, first: int, end: int, stage: int) -> bool:
        """Plan a searched stage within the tolerance; return False if it already is, or if it is too large for that."""
        known = self.find(first, end, stage)
        assert known is not None, "a stage that was not planned"
        is_large = known.made is not None and len(known.made.space.decisions) > MOST_DECISIONS
        if is_large or known.is_close or known.seconds <= known.least * (1 + TOLERANCE) or is_over(self.deadline):
            return False
        self.ask(first, end, stage, TOLERANCE)
        return True

    def at_most(self, first: int, end: int, stage: int) -> float:
        """Return an upper bound on the seconds of a stage from known plans; infinite if none fits."""
        known = self.best_searched(first, end, stage)
        return math.inf if known is None else known.seconds

    def beyond(self, stage: int, first: int, end: int) -> float:
        """Return the upper bound on the seconds of a stage beyond the sum of its blocks."""
        return self.at_most(first, end, stage) - self.own_seconds(first, end)

    def fuller(self, stage: int) -> Sequence[int]:
        """Return the stages with no larger budget and at least as many micro-batches in flight."""
        runs, budget = self.runs[stage], self.budgets[stage]
        pairs = zip(self.runs, self.budgets, strict=True)
        return [s for s, (more, less) in enumerate(pairs) if runs.holds_no_more(more) and is_at_least(budget, less)]

    def visited(self) -> Iterator[Visited]:
        """Yield each known plan's blocks, its lower bound in seconds, and the stages for which the bound holds."""
        for known in (each for every in self.by_structure.values() for each in every if each.made is not None):
            pairs = enumerate(zip(self.runs, self.budgets, strict=True))
            fuller = [
                s for s, (more, less) in pairs if known.runs.holds_no_more(more) and is_at_least(known.budget, less)
            ]
            yield known.span, known.least, fuller

    def find(self, first: int, end: int, stage: int) -> SearchedStage | None:
        """Return the result for exactly this stage, or one that proves that it does not fit; None if there is
        neither.
        """
        runs, budget = self.runs[stage], self.budgets[stage]
        for each in reversed(self.by_structure[self.program(first, end)[1]]):  # closer results first
            if (each.runs, each.budget) == (runs, budget):
                return each
            if each.made is None and each.runs.holds_no_more(runs) and is_at_least(each.budget, budget):
                return each
        return None

    def best_searched(self, first: int, end: int, stage: int) -> SearchedStage | None:
        """Return the fastest of the choices that are known to fit into a stage's memory budget."""
        if tuple(self.kinds[first:end]) not in self.planned_kinds:
            return None
        known = sorted(self.by_structure[self.program(first, end)[1]], key=lambda each: each.seconds)
        return next((each for each in known if each.made is not None and self._fits(each, stage)), None)

    def fastest(self, first: int, end: int, stage: int) -> SearchedStage | None:
        """Return the fastest choices known to fit into a stage's memory budget, planned if none is known; None if none
        is found.
        """
        if self.best_searched(first, end, stage) is None:
            self.seconds(first, end, stage)
        return self.best_searched(first, end, stage)

    def sample(self, known: SearchedStage, stage: int) -> tuple[Sample, ...]:
        """Return the seconds of known choices, and the memory that they take on a stage."""
        runs = self.runs[stage]
        return Sample.of(known.seconds, self.holding(known, runs), runs.in_flight)

    def samples(self, first: int, end: int, stage: int) -> list[Sample]:
        """Return the samples of all choices that are known for a stage, whatever its memory budget."""
        known = self.by_structure[self.program(first, end)[1]]
        return [sample for each in known if each.made is not None for sample in self.sample(each, stage)]

    def program(self, first: int, end: int) -> tuple[Program, int]:
        """Return the program of a stage, and the number of its structure."""
        if (first, end) not in self.programs:
            program = self.splitter.between(first, end)
            number = self.numbers.setdefault(structure(self.planned, program), len(self.numbers))
            self.programs[first, end] = program, number
        return self.programs[first, end]

    def least(self, first: int, end: int, stage: int) -> int:
        """Return the least bytes of a stage at its fullest moment, as far as they are found; found once for equal
        stages.
        """
        key = self.program(first, end)[1], self.runs[stage]
        if key not in self.leasts:
            (space, pins), settings = self._first_alike(first, end), self.settings(stage)
            formulation = formulations_of(self.memory_of(space, stage), settings)[-1]
            modes = settings.modes(formulation.memory.lifetimes.segments) or None
            self.leasts[key] = least_peak(formulation, pins, modes, self.deadline).peak_bytes
        return self.leasts[key]

    def _first_alike(self, first: int, end: int) -> tuple[Space, Pins]:
        """Return the space of the first stage that has the structure of one, and its pins."""
        program, number = self.program(first, end)
        if number not in self.spaces:
            self.spaces[number] = self.narrowed(program, self.planned.request.storage)
        return self.spaces[number]

    def solve(self, program: Program, stage: int, storage: Mapping[str, Layout]) -> Solved:
        """Return a stage's best choices within its budget and the tolerance; InfeasibleError if there are none."""
        return self._solved(*self.narrowed(program, storage), stage, TOLERANCE)

    def _solved(self, space: Space, pins: Pins, stage: int, gap: float) -> Solved:
        """Return the best choices within a gap, which save no more than they may while others run."""
        budget = self.budgets[stage]
        found = self._best_within(space, pins, stage, gap, None if budget is None else budget.peak)
        if budget is None:
            return found
        made, bound, most = found, found.answer.bound, budget.peak
        while (over := budget.bytes_over(stage_bytes := self._stage_bytes(made))) > 0 and most > budget.least_resident:
            # Other choices may need the same additional bytes while the stage runs.
            most = max(min(stage_bytes.peak - over, int(TIGHTER * most)), budget.least_resident)
            made = self._best_within(space, pins, stage, gap, most)
        if over > 0:
            raise InfeasibleError("no choices that were found keep as little as they may while others run")
        return replace(made, answer=replace(made.answer, bound=min(bound, made.answer.seconds)))

    def _best_within(self, space: Space, pins: Pins, stage: int, gap: float, peak: int | None) -> Solved:
        """Return the best choices within a gap and a peak; with all of the time where a share of it was too little for
        any.
        """
        runs, most = self.runs[stage], SHARE_OF_CLOSER if gap <= TOLERANCE else SHARE_OF_TIME
        try:
            return solved(space, pins, self.settings(stage, most, gap, peak), runs)
        except TimeLimitError:
            return solved(space, pins, self.settings(stage, 1.0, gap, peak), runs)

    @staticmethod
    def _stage_bytes(made: Solved) -> StageBytes:
        return stage_bytes_of(made.formulation.memory, made.answer.choices, made.answer.modes)

    def narrowed(self, program: Program, storage: Mapping[str, Layout]) -> tuple[Space, Pins]:
        """Return the space of a stage that its masks leave, and the pins that still hold in it."""
        received = {name: self.planned.boundary(name) for name in program.received}
        space = self.planned.request.space(program, received)
        return narrowed(space, masks_of(self.planned, space, storage))

    def settings(self, stage: int, share: float = 1.0, gap: float = TOLERANCE, peak: int | None = None) -> Settings:
        """Return the settings to plan a stage, within less than its budget if a peak is given.

        The gap counts only under a memory limit.
        """
        requested, budget = self.planned.request.settings, self.budgets[stage]
        memory = peak if budget is None or peak is not None else budget.peak
        within = requested.search.gap if memory is None else max(requested.search.gap or 0.0, gap)
        left = max(share * seconds_until(self.deadline), grace())
        search = replace(requested.search, time_limit=left, gap=within)
        return replace(requested.for_tensors(memory), search=search, is_brief=True)

    def memory_of(self, space: Space, stage: int) -> MemoryModel:
        """Return the memory model of a stage."""
        return MemoryModel(space, self.runs[stage], offloads=self.planned.request.settings.offloads)

    def ask(self, first: int, end: int, stage: int, gap: float) -> SearchedStage:
        """Plan a stage within a gap, and note what was found."""
        number = self.program(first, end)[1]
        self.planned_kinds.add(tuple(self.kinds[first:end]))
        before = self.find(first, end, stage)
        # Alone a stage may cost a little less than its share of the whole, which bounds the search.
        own = self.own_seconds(first, end)
        made, seconds, least = None, math.inf, math.inf
        with suppress(InfeasibleError):
            made = self._solved(*self._first_alike(first, end), stage, gap)
        if made is not None:
            memory, choices, modes = made.formulation.memory, made.answer.choices, made.answer.modes
            once = step_seconds_of(memory, choices, modes).once / self.planned.request.num_microbatches
            forward, backward = microbatch_seconds(memory, choices, modes)
            seconds = max(forward + backward + once, own)
            least = max((1 - share(made.answer)) * seconds, own)
        if (fits := self.best_searched(first, end, stage)) is not None and fits.seconds < seconds:
            # An unsuccessful search proves nothing, and one that ends at a gap may miss what is known.
            made, seconds, least = fits.made, fits.seconds, own if made is None else least
        if before is not None and before.made is not None:
            least = max(min(least, seconds), before.least)
            if before.seconds <= seconds:
                made, seconds = before.made, before.seconds
        is_close, least = gap <= TOLERANCE, min(least, seconds)
        known = SearchedStage((first, end), self.runs[stage], self.budgets[stage], made, seconds, least, is_close)
        self.by_structure[number].append(known)
        return known

    def _fits(self, known: SearchedStage, stage: int) -> bool:
        """Return whether choices fit into a stage's memory budget with its micro-batches in flight."""
        runs, budget = self.runs[stage], self.budgets[stage]
        if budget is None or (runs.holds_no_more(known.runs) and is_at_least(budget, known.budget)):
            return True
        peak, stored = self._use(known)
        if stored + (peak - stored) * runs.in_flight / known.runs.in_flight > BUDGET_SLACK * budget.peak:
            return False  # far from it: memory need not be counted
        return budget.bytes_over(self.holding(known, runs)) <= 0

    def _use(self, known: SearchedStage) -> tuple[int, int]:
        """Return the bytes of known choices at their fullest moment, and those that micro-batches do not add to."""
        made = known.made
        assert made is not None
        if id(made) not in self.uses:
            peak, use, _ = memory_use(made.formulation.memory, made.answer.choices, made.answer.modes)
            self.uses[id(made)] = peak, sum(use.parts.get(name, 0) for name in STORED)
        return self.uses[id(made)]

    def holding(self, known: SearchedStage, runs: Microbatches) -> StageBytes:
        """Return the bytes that known choices hold with other micro-batches in flight."""
        key, made = (id(known), runs), known.made
        assert made is not None
        if key not in self.holds:
            self.holds[key] = stage_bytes_of(self._memory_with(made, runs), made.answer.choices, made.answer.modes)
        return self.holds[key]

    def _memory_with(self, made: Solved, runs: Microbatches) -> MemoryModel:
        """Return the memory of a stage that was planned, with other micro-batches in flight."""
        memory = made.formulation.memory
        runs, ahead = replace(runs, reduce_each=memory.microbatches.reduce_each), memory.prefetch
        key = id(made.space), runs, ahead
        if key not in self.memories:
            self.memories[key] = MemoryModel(made.space, runs, ahead, made.settings.offloads)
        return self.memories[key]
