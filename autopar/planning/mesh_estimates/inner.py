"""Plans of a shorter model on the devices of one stage, for one micro-batch, at several prices of memory.

The shorter model is planned without a memory limit, but for a price of bytes where the backward begins,

    seconds + price * bytes

first at next to nothing, so that of equally fast plans the smaller one is taken, then at more (`PRICES`): parameters
are stored in ever smaller parts, and gathered once a step or again for every backward. This is planned both with
gradients reduced once a step (ZeRO-1, 3) and with every micro-batch (ZeRO-2). A price is that of the whole model:
layers that were taken out would cost and save as much each as those that remain. Where all blocks stand on the same
devices, the search is made again with the costs of the simulated step, and with positions in order, as for exact plans
(`planning.simulated`). The cost and savings of recomputation follow from the choices of each: nothing is searched
again.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.costs.hardware.overlap import OverlappedWork
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.resident_parts import gathers_weights
from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Space
from autopar.costs.space.zigzag_axes import is_worth_another_search, possible_zigzag_axes, zigzag_axes_of
from autopar.costs.steps.step import step_timeline
from autopar.costs.timeline.values import Timeline
from autopar.ir.program.recompute_segments import RECOMPUTATIONS
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.pins import pins_of
from autopar.planning.mesh_estimates.block_use import BlockUse, block_use
from autopar.planning.mesh_estimates.narrowed import Choices
from autopar.planning.mesh_estimates.shortened import Shortened
from autopar.planning.planner import Statements
from autopar.planning.request import PlanRequest
from autopar.planning.simulated import shortest_simulated
from autopar.planning.step_seconds import step_seconds_of
from autopar.solver.deadline import seconds_until
from autopar.solver.problem import Floats, Integers, Problem
from autopar.solver.solve import solve

PRICES = (1e-4, 0.1, 2.0)
"""Prices of the whole memory limit, as multiples of the least seconds that a micro-batch can take."""
FEW_AXES = 2
"""Most mesh axes of a stage for which all choices are searched."""
BETWEEN = 3
"""Most prices between two that are searched for a plan within the limit."""
GAP = 1e-3
"""Relative optimality gap at which the search of the shorter model may stop."""


@dataclass(slots=True)
class Level:
    """A plan of the shorter model, at some price of memory."""

    short: Shortened
    memory: MemoryModel
    choices: tuple[int, ...]
    modes: tuple[str, ...]
    """Recomputations that are compared, the fastest first and the one that saves least last."""
    is_whole: bool
    """True if all blocks stand on the same devices."""
    cost: tuple[float, float]
    """Seconds by the sum of costs, and what memory adds at a price of 1."""
    _uses: dict[str, BlockUse] = field(default_factory=dict, init=False)
    _timeline: Timeline | None = field(default=None, init=False)

    @property
    def space(self) -> Space:
        return self.memory.space

    @property
    def _fastest(self) -> dict[str, str]:
        return dict.fromkeys(self.memory.lifetimes.segments, self.modes[0])

    @property
    def timeline(self) -> Timeline:
        """The simulated step of one micro-batch."""
        if self._timeline is None:
            self._timeline = step_timeline(self.memory, self.choices, self._fastest)
        return self._timeline

    @property
    def priced_seconds(self) -> float:
        """Seconds of a step of one micro-batch by the sum of costs."""
        return step_seconds_of(self.memory, self.choices, self._fastest).seconds

    def is_same(self, other: Level) -> bool:
        """Return whether another plan has the same choices."""
        return self.choices == other.choices and self.space.has_same_candidates(other.space)

    @property
    def simulated_seconds(self) -> float:
        """Seconds of a step of all micro-batches of the whole model, if all blocks stand on the same devices."""
        use = self.use(self.modes[0])
        return use.step_seconds + (self.memory.microbatches.count - 1) * use.microbatch_seconds

    @property
    def num_bytes(self) -> float:
        """Bytes of tensors on a device that has all blocks, at its fullest moment."""
        return float(self.use(self.modes[0]).stages([0]).peak(np.ones(1))[0])

    def use(self, mode: str) -> BlockUse:
        """Return what blocks take where all are recomputed in a mode."""
        if mode not in self._uses:
            self._uses[mode] = block_use(self.short, self.memory, self.choices, mode, self.is_whole)
        return self._uses[mode]


@dataclass
class Inner:
    """Plans of a shorter model on the devices of a stage, built on request."""

    request: PlanRequest
    short: Shortened
    mesh: Mesh
    """Mesh of one stage."""
    num_devices: int
    """Number of devices of all stages together."""
    microbatches: int
    arriving: Mapping[str, Layout]
    deadline: float
    known: Choices
    """Choices of plans so far: on more than FEW_AXES axes no others are looked at."""
    like: Inner | None = None
    """Plans of the same model in another form; the overlap of moves of weights is priced once for both."""
    _zigzag_axes: frozenset[str] | None = None
    """Axes over which the last plan's attention divides its queries; None: all over which it may."""
    _stated: dict[frozenset[str], tuple[Statements, Pins]] = field(default_factory=dict)
    """Problems of the space in which these axes zigzag-shard positions, and its pins."""
    _levels: dict[tuple[float, bool], Level] = field(default_factory=dict)
    _simulated: dict[tuple[float, bool], Level] = field(default_factory=dict)

    def levels(self, limit: float) -> Iterator[Iterator[Level]]:
        """Yield plans at ever higher prices of memory, the fastest without a limit first.

        Where gradients may be reduced by every micro-batch, too, such a plan is the second of a price. If memory has no
        limit (in bytes of tensors), there is one price.
        """
        limited = math.isfinite(limit)
        for price in PRICES if limited else (0.0,):
            several = limited and self.microbatches > 1 and price != PRICES[0]
            ways = (False, True) if several else (self._reduces_each,)
            yield self._levels_at(price, ways, limit)

    def _levels_at(self, price: float, ways: Sequence[bool], limit: float) -> Iterator[Level]:
        for reduces_each in ways:
            key = price, reduces_each
            if key not in self._levels:
                self._levels[key] = self._planned(price, reduces_each, limit)
            yield (first := self._levels[key])
            if first.is_whole:
                if key not in self._simulated:
                    self._simulated[key] = self._as_simulated(first, key, limit)
                if self._simulated[key] is not first:
                    yield self._simulated[key]

    @property
    def _reduces_each(self) -> bool:
        return self.request.reduces_each and self.microbatches > 1

    def _planned(self, price: float, reduces_each: bool, limit: float) -> Level:
        """Return the plan of the first search; of a pipeline's stage with positions in order where it divides none."""
        level = self._solved(*self._laid_out(self._zigzag_axes), price, reduces_each, limit)
        if not level.is_whole and (needed := self._in_order(level)) is not None:
            self._zigzag_axes = needed  # plans at further prices begin here
            level = self._solved(*self._laid_out(needed), price, reduces_each, limit)
        return level

    def _in_order(self, level: Level) -> frozenset[str] | None:
        """Return the axes of a space whose positions are in order where the plan's queries are not divided; None if
        that changes nothing.
        """
        needed = zigzag_axes_of(level.space, level.choices)
        return needed if is_worth_another_search(level.space, level.choices, needed) else None

    def _as_simulated(self, first: Level, key: tuple[float, bool], limit: float) -> Level:
        """Return the plan that searches with the costs of simulated steps lead to, within the limit if the first is."""
        most, needed = limit if first.num_bytes <= limit else math.inf, self._in_order(first)

        def again(costs: Space, best: Level, gap: float) -> Level:
            pins = self._laid_out(frozenset(costs.zigzag_axes))[1]
            return self._within(Statements(costs), pins, key, most, limit)

        in_order = None if needed is None else self._laid_out(needed)[0].space
        best = shortest_simulated(first, again, self.deadline, in_order)
        self._zigzag_axes = frozenset(best.space.zigzag_axes)  # plans at further prices begin here
        return best

    def _within(self, stated: Statements, pins: Pins, key: tuple[float, bool], most: float, limit: float) -> Level:
        """Return the plan at a price, or the fastest of those at higher prices that take at most so many bytes.

        Prices between are those at which the plans around them cost the same, if there are such: a plan that takes more
        memory and no less time was left by the gap of its search.
        """
        price, reduces_each = key
        larger = self._solved(stated, pins, price, reduces_each, limit)
        if larger.num_bytes <= most:
            return larger
        smaller = self._solved(stated, pins, PRICES[-1], reduces_each, limit)
        within = [smaller]
        for _ in range(BETWEEN if smaller.num_bytes <= most else 0):
            seconds, saved = smaller.cost[0] - larger.cost[0], larger.cost[1] - smaller.cost[1]
            if seconds <= 0 or saved <= 0:
                break
            found = self._solved(stated, pins, seconds / saved, reduces_each, limit)
            if found.choices in (smaller.choices, larger.choices):
                break
            if found.num_bytes <= most:
                smaller = found
                within.append(found)
            else:
                larger = found
        return min(within, key=lambda each: each.simulated_seconds)

    def _solved(self, stated: Statements, pins: Pins, price: float, reduces_each: bool, limit: float) -> Level:
        runs = Microbatches(
            self.microbatches,
            reduce_each=reduces_each,
            main_gradients=self.request.conventions.main_gradients and self.request.training,
        )
        requested, limited = self.request.settings, math.isfinite(limit)
        alone = requested.for_tensors(None)
        formulation = stated.of(replace(alone, memory=replace(alone.memory, recompute="none")), runs)[0]
        memory, calls = formulation.memory, len(formulation.memory.lifetimes.calls)
        problem = formulation.problem(pins, MemoryRow(((max(calls - 1, 0), 1),)) if limited else None)
        least = sum(float(each.seconds.min()) for each in problem.nodes) / len(self.short.blocks)
        unit = least * len(self.short.origin) / limit
        limiting = priced(problem, price * unit) if limited else problem
        solution = solve(limiting, time_limit=seconds_until(self.deadline), gap=GAP)
        choices = tuple(solution.choices[: len(stated.space.decisions)])
        seconds, num_bytes = problem.cost_of(solution.choices)
        if self.mesh.ndim <= FEW_AXES:
            self.known.add(stated.space, choices)
        if not gathers_weights(memory, choices):
            memory = memory.fetching_ahead(0)
        recompute = requested.memory.recompute
        modes = RECOMPUTATIONS if recompute == "auto" else (recompute,)
        is_whole = self.mesh.num_devices == self.num_devices
        cost = seconds, unit * num_bytes
        return Level(self.short, memory, choices, modes if limited else modes[:1], is_whole, cost)

    def _laid_out(self, zigzag_axes: frozenset[str] | None) -> tuple[Statements, Pins]:
        """Return the problems of the space in which these axes zigzag-shard positions, and its pins.

        None stands for all over which attention may divide its queries.
        """
        if zigzag_axes is None:
            zigzag_axes = possible_zigzag_axes(self._base, self._pins_of(self._base))
        if zigzag_axes not in self._stated:
            space = self._base.with_zigzag_axes(zigzag_axes)
            pins = self._pins_of(space)
            if self.mesh.ndim > FEW_AXES:
                space = self.known.narrowed(space, pins)
            self._stated[zigzag_axes] = Statements(space), pins
        return self._stated[zigzag_axes]

    @functools.cached_property
    def _base(self) -> Space:
        """Space with all positions in order."""
        here = self.short.program.placeholders()
        arriving = {name: each for name, each in self.arriving.items() if name in here}
        overlapped = self.like.overlapped if self.like else None
        return self.request.space(
            self.short.program, self.mesh, arriving, num_devices=self.num_devices, overlapped=overlapped
        )

    def _pins_of(self, space: Space) -> Pins:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings are issued for the whole model
            specified = self.request.annotations_about(space.program, self.mesh)
            return pins_of(specified, space, self.request.mode, {})

    @property
    def overlapped(self) -> OverlappedWork:
        """Computation that may be overlapped with moves of weights."""
        return self._base.overlapped


def priced(problem: Problem, price: float) -> Problem:
    """Return the problem with bytes at a price (seconds each) in its seconds; equal arrays stay one array."""
    made: dict[tuple[int, int], Floats] = {}

    def of(seconds: Floats, num_bytes: Integers | None) -> Floats:
        if num_bytes is None:
            return seconds
        key = id(seconds), id(num_bytes)
        if key not in made:
            made[key] = seconds + price * num_bytes
        return made[key]

    return Problem(
        tuple(replace(each, seconds=of(each.seconds, each.num_bytes)) for each in problem.nodes),
        tuple(replace(each, seconds=of(each.seconds, each.num_bytes)) for each in problem.edges),
    )
