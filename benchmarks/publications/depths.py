"""A plan of few layers, and one of a layer more, as they stand for a model or a stage with all of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import Role
from autopar.costs.memory.peak import bytes_by_moment
from autopar.costs.memory.resident_parts import parts_of
from autopar.costs.plans.plan import Plan
from autopar.costs.steps.step import last_microbatch_tasks, microbatch_tasks, step_tasks
from autopar.costs.timeline.values import Task
from autopar.planning.settings import context_of
from benchmarks.publications.repeated import extended, highest, on_line

FEWEST, FEWEST_GATHERED = 1, 3
"""Layers of the shorter plan, and where weights are gathered a layer ahead, whose neighbours then matter, too."""
Make = Callable[[MemoryModel, Sequence[int], Mapping[str, str]], tuple[Task, ...]]


@dataclass(frozen=True, slots=True)
class Depths:
    """`longer` has a layer more than `shorter`, and `times` fewer than it stands for; without a shorter it is whole."""

    longer: Plan
    shorter: Plan | None = None
    times: int = 0
    gathered: bool = False

    @classmethod
    def of(cls, plan: Callable[[int], Plan], layers: int, gathered: bool) -> Depths:
        """Plans that stand for so many layers; `gathered` says whether each gathers its weights."""
        fewest = FEWEST_GATHERED if gathered else FEWEST
        if layers <= fewest + 1:
            return cls(plan(layers), gathered=gathered)
        return cls(plan(fewest + 1), plan(fewest), layers - fewest - 1, gathered)

    def step(self) -> tuple[Task, ...]:
        """The tasks of a step of one micro-batch."""
        return self._tasks(step_tasks)

    def microbatch(self) -> tuple[Task, ...]:
        """The tasks of one of several micro-batches."""
        return self._tasks(microbatch_tasks)

    def last_microbatch(self) -> tuple[Task, ...]:
        """Return the tasks of the last of several micro-batches, with the reductions that overlap with its backward."""
        return self._tasks(last_microbatch_tasks)

    def _tasks(self, make: Make) -> tuple[Task, ...]:
        longer = _made(self.longer, make)
        return longer if self.shorter is None else extended(_made(self.shorter, make), longer, self.times)

    def line(self, value: Callable[[Plan], float]) -> float:
        """A number that each layer adds the same to."""
        longer = value(self.longer)
        return longer if self.shorter is None else on_line(value(self.shorter), longer, self.times)

    @property
    def in_flight(self) -> int:
        """Micro-batches that wait for their backward in the plan itself."""
        return context_of(self.longer).memory_model.microbatches.in_flight

    def part(self, *names: str) -> float:
        """Bytes of parts of a plan's memory."""
        return self.line(
            lambda plan: float(sum(plan.memory.parts.get(each, 0) for each in names) if plan.memory else 0)
        )

    def peak_and_standing(self, runs: Microbatches) -> tuple[int, int]:
        """Bytes at the fullest moment of a step of such micro-batches, and those that stand between several of them."""
        longer = moments(self.longer, runs)
        if self.shorter is None:
            return int(longer.max()), standing_bytes(self.longer, runs, longer)
        shorter = moments(self.shorter, runs)
        before, behind = _next_to_layers(self.longer)
        if self.gathered:  # the last layer has none to gather ahead, the first none whose gathers it hides
            before, behind = (each + longer.shape[-1] - shorter.shape[-1] for each in (before, behind))
        stand = (standing_bytes(self.shorter, runs, shorter), standing_bytes(self.longer, runs, longer))
        return highest(shorter, longer, self.times, before, behind), round(on_line(*stand, self.times))


def standing_bytes(plan: Plan, runs: Microbatches, known: np.ndarray | None = None) -> int:
    """Bytes of parameters, optimizer, moved weights, and gradients of several micro-batches as they are added up.

    That is the end of a step less gradients as they are stored, which are made of those then. `known` are the moments
    of the plan with these runs.
    """
    several = replace(runs, count=max(runs.count, 2))
    context = context_of(plan)
    memory = MemoryModel(context.space, several, context.memory_model.prefetch)
    end = several.phases.index(several.phases[-1])
    reduced = (part for edge in context.space.edges for part in parts_of(memory, edge) if part.role is Role.REDUCED)
    made = sum(int(each.modes[0][tuple(context.choices[end] for end in each.ends)]) for each in reduced)
    found = known if known is not None and several == runs else moments(plan, several)
    return int(found[end, 0]) - made


def _made(plan: Plan, make: Make) -> tuple[Task, ...]:
    context = context_of(plan)
    return make(context.memory_model, context.choices, plan.recompute)


def _next_to_layers(plan: Plan) -> tuple[int, int]:
    """Return the number of calls before the first layer of a model and the number after its last layer."""
    lifetimes = context_of(plan).memory_model.lifetimes
    inside = [n for n, number in enumerate(lifetimes.calls) if lifetimes.segment[number]]
    return inside[0], len(lifetimes.calls) - 1 - inside[-1]


def moments(plan: Plan, runs: Microbatches) -> np.ndarray:
    """Bytes at every moment, [kinds and phases, calls of the model]; the end of a step is in its phase's first row."""
    context = context_of(plan)
    memory = MemoryModel(context.space, runs, context.memory_model.prefetch)
    found = bytes_by_moment(memory, context.choices, plan.recompute)
    return found.reshape(-1, len(memory.lifetimes.calls))
