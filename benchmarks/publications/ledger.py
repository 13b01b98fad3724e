"""A row's plan, priced again on other numbers of the same hardware without being planned again: what a fit needs.

A plan is pinned to the row's strategy, so that its choices do not depend on the numbers. What a call computes is priced
as the planner does, collectives as the timeline does, and both are simulated; where plans of few layers stand for all
(`depths`), the seconds of the others are on a line with them. It meets `planning.predicted` within some per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.costs.hardware.collectives import collective_seconds, lateness, message_seconds
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.space.computing import Work, computing_seconds
from autopar.costs.space.strategy import Strategy
from autopar.costs.steps.step import microbatch_tasks, step_tasks
from autopar.costs.steps.tasks import checking
from autopar.costs.timeline.simulation import simulate
from autopar.costs.timeline.values import COMPUTE, Task
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.planner import messages
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds
from autopar.planning.pipeline.schedules.simulation import simulate as simulate_stages
from autopar.planning.settings import context_of
from benchmarks.publications import planning
from benchmarks.publications.depths import Depths
from benchmarks.publications.rows import Row
from benchmarks.publications.strategies import cuts, pinned

MESSAGE = 10**8  # bytes of a message between stages by which links are compared
WEIGHTS = 0.4  # of a backward: what makes gradients of weights, as in layers of large products

ALMOST = 1e-6  # a share of lateness


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of a micro-batch, of a step of one, and of what a step does once."""

    forward: float
    backward: float
    step: float
    once: float

    def further(self, fewer: Passes, times: int) -> Passes:
        """Return the passes with `times` more layers; `fewer` are the passes with one layer less than these."""
        pairs = zip(self._all(), fewer._all(), strict=True)
        return Passes(*(more + times * (more - less) for more, less in pairs))

    def _all(self) -> tuple[float, ...]:
        return self.forward, self.backward, self.step, self.once


class Ledger:
    """The tasks of one plan on the hardware that it was made for, with what each of its calls computes."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        context = context_of(plan)
        self.hardware, self.mesh = hardware, context.space.mesh
        self.plan = plan
        self.microbatch = microbatch_tasks(context.memory_model, context.choices, plan.recompute)
        self.step = step_tasks(context.memory_model, context.choices, plan.recompute)
        self.computed: dict[str, tuple[Strategy, Work, float]] = {}
        """Row of a task → the strategy of its call, its work, and its seconds on that hardware."""
        for name, number in context.space.index.items():
            candidates = context.space.decisions[number].candidates
            if candidates.call is not None and candidates.op is not None and candidates.bound is not None:
                strategy = candidates.strategies[context.choices[number]]
                work = Work.of(candidates.call, candidates.op, candidates.bound, hardware)
                self.computed[name] = strategy, work, computing_seconds(strategy, work, self.mesh, hardware)

    def passes(self, hardware: Hardware) -> Passes:
        """On other numbers."""
        ratios = {name: self._ratio(*each, hardware) for name, each in self.computed.items()}
        share = hardware.communication_share
        microbatch, step = (self._repriced(tasks, hardware, ratios) for tasks in (self.microbatch, self.step))
        found = simulate(microbatch, share)
        forward = max((each.end for each in found.events if each.task.phase == "forward"), default=0.0)
        once = sum(each.seconds for each in step) - sum(each.seconds for each in microbatch)
        return Passes(forward, found.seconds - forward, simulate(step, share).seconds, max(0.0, once))

    def _ratio(self, strategy: Strategy, work: Work, before: float, hardware: Hardware) -> float:
        return computing_seconds(strategy, work, self.mesh, hardware) / before if before else 1.0

    def _moving(self, task: Task, hardware: Hardware) -> float:
        """Seconds of a collective alone."""
        return float(collective_seconds(task.name, task.num_bytes, self.mesh, task.axis, hardware))

    def _repriced(self, tasks: Sequence[Task], hardware: Hardware, ratios: dict[str, float]) -> list[Task]:
        found, own = [], self.hardware
        for task in tasks:
            if task.stream != COMPUTE:
                late = lateness(self.mesh, task.axis, own)
                exposed = (task.launch - own.launch_s) / late if late else 0.0
                launch = hardware.launch_s + exposed * lateness(self.mesh, task.axis, hardware)
                if not ALMOST < exposed < 1 - ALMOST:  # the rest of a collective that has begun is not checked again
                    launch += checking(task.name, self.mesh, task.axis, hardware)
                before, now = (self._moving(task, each) for each in (own, hardware))
                seconds = task.seconds * now / before if before else 0.0
            else:
                launch = task.launch / own.launch_s * hardware.launch_s
                seconds = task.seconds * ratios.get(task.row, own.memory_bytes_per_s / hardware.memory_bytes_per_s)
            found.append(replace(task, seconds=seconds, launch=launch))
        return found


@dataclass(frozen=True, slots=True)
class RowLedger:
    """The ledgers of a row: of its model, or of each kind of its pipeline's stages."""

    row: Row
    hardware: Hardware
    stages: tuple[tuple[Ledger, Ledger | None, int, tuple[float, float]], ...]
    """Per kind of stage: longer plan, shorter plan, number of layers to extrapolate, seconds of its two messages."""
    order: tuple[int, ...] = ()
    """The kind of each stage of a pipeline."""
    schedule: Schedule | None = None
    mesh: Mesh | None = None

    @classmethod
    def of(cls, row: Row, hardware: Hardware) -> RowLedger:
        """Planned on some numbers; raises Unexpressed, and the planner's errors.

        Their `launch_s`, and `straggling_s` of all links, are above 0, as tasks tell by their launches what they are,
        and nothing is checked.
        """
        requested = pinned(row)
        if requested.pipeline == 1:
            depths = planning.depths_alone(requested, hardware)
            return cls(row, hardware, (_kind(depths, hardware, (0.0, 0.0)),))
        search = planning.stage_search(requested, hardware)
        schedule = search.planned.request.schedule
        known: dict[tuple[bool, bool, int], int] = {}
        kinds, order, last = [], [], schedule.num_stages - 1
        for stage, layers in enumerate(cuts(row)):
            key = stage == 0, stage == last, layers
            if key not in known:
                known[key] = len(kinds)
                depths = Depths.of(partial(planning.plan_of_stage, search, stage, last), layers, requested.gathered)
                forth, back = messages(search.planned, context_of(depths.longer).space.program)
                kinds.append(_kind(depths, hardware, (forth.seconds, back.seconds)))
            order.append(known[key])
        return cls(row, hardware, tuple(kinds), tuple(order), schedule, search.planned.request.mesh)

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds of a step on other hardware numbers."""
        kinds = [_passes(*each[:3], hardware) for each in self.stages]
        if self.schedule is None or self.mesh is None:
            return kinds[0].step + (self.row.accumulation - 1) * (kinds[0].forward + kinds[0].backward)
        before, now = (message_seconds(MESSAGE, self.mesh, "pp", each) for each in (self.hardware, hardware))
        stages = []
        for kind in self.order:
            own, (forth, back) = kinds[kind], self.stages[kind][3]
            weight = WEIGHTS * own.backward
            sent = forth * now / before, back * now / before
            seconds = StageSeconds(own.forward, own.backward - weight, weight, *sent, own.once)
            stages.append(planning.waited(seconds) if pinned(self.row).waits else seconds)
        return simulate_stages(self.schedule, stages).seconds


def _kind(
    depths: Depths, hardware: Hardware, sent: tuple[float, float]
) -> tuple[Ledger, Ledger | None, int, tuple[float, float]]:
    shorter = None if depths.shorter is None else Ledger(depths.shorter, hardware)
    return Ledger(depths.longer, hardware), shorter, depths.times, sent


def _passes(longer: Ledger, shorter: Ledger | None, times: int, hardware: Hardware) -> Passes:
    found = longer.passes(hardware)
    return found if shorter is None else found.further(shorter.passes(hardware), times)
