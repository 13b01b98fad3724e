"""The plan of a pipeline: where the model is cut, what each stage is planned to do, and when it does it.

The step is that of the simulated schedule (`schedules.simulation`), from the seconds of the stages' own plans. Like a
plan it is plain JSON; the timeline is not saved but simulated again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from autopar.console.units import format_bytes, format_seconds
from autopar.costs.hardware.reserved import NOTHING, Reserved
from autopar.costs.plans.comparison import COMPARISON, Comparison, comparison_of
from autopar.costs.plans.decision_rows import KeptWhole, kept_whole_on_all
from autopar.costs.plans.plan import Offloaded, Plan
from autopar.costs.plans.schema import (
    BYTES,
    MESH,
    PIPELINE_FORMAT,
    PLAN,
    RESERVED,
    SECONDS,
    TEXT,
    refusing,
)
from autopar.costs.plans.views import view
from autopar.costs.plans.workload import WORKLOAD, Workload, workload_of
from autopar.costs.pricing.offload import ACTIVATIONS, STAGING
from autopar.errors import PlanError
from autopar.files.reading import read_json, read_text
from autopar.files.replace import replace_text
from autopar.files.schema import ListOf, Maybe, OneOf, Record, Whole
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.schedules.schedule import NAMES, Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds, Timeline, simulate
from autopar.planning.pipeline.stages.stage_bytes import running_bytes

FORMAT = 1
MAX_ACTIONS = 10**6
"""Micro-batches of all stages, in a plan that is read: its timeline is simulated."""
REDUCING = ("last_backward", "last_send", "reducing", "reductions")
"""Seconds of a stage that older plans count among those of `once`."""
PIPELINE_PLAN = Record(
    {
        PIPELINE_FORMAT: Whole(FORMAT, FORMAT),
        "mesh": MESH,
        "axis": TEXT,
        "schedule": Record(
            {"name": OneOf(NAMES), "num_ranks": Whole(1), "num_microbatches": Whole(1), "chunks": Whole(1)}
        ),
        "memory_limit": Maybe(BYTES),
        "notes": ListOf(TEXT),
        "starts": ListOf(Whole()),
        "stages": ListOf(
            Record(
                {
                    "number": Whole(),
                    "blocks": ListOf(TEXT, least=1),
                    "plan": PLAN,
                    "seconds": Record(
                        {each.name: SECONDS for each in fields(StageSeconds) if each.name not in REDUCING},
                        optional=dict.fromkeys(REDUCING, SECONDS),
                    ),
                }
            )
        ),
    },
    optional={"bound": SECONDS, "workload": Maybe(WORKLOAD), "reserved": RESERVED, "comparison": Maybe(COMPARISON)},
)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: the blocks of the model that it has, and how it runs one micro-batch and a step."""

    number: int
    """Position in the pipeline, from 0."""
    blocks: tuple[str, ...]
    """Names of its blocks, in the order of the model."""
    plan: Plan
    """Its memory is that of a whole step; its seconds are those of a step of one micro-batch."""
    seconds: StageSeconds
    """Seconds of each part of its work."""

    @property
    def range(self) -> str:
        """The blocks as text.

        >>> stage.range  # doctest: +SKIP
        'model.layers.0 … model.layers.7'
        """
        return self.blocks[0] if len(self.blocks) == 1 else f"{self.blocks[0]} … {self.blocks[-1]}"


@dataclass(frozen=True, slots=True, repr=False)
class PipelinePlan:
    """The stages of a pipeline over one axis of a mesh. `print(plan)` is a table; `save` and `load` keep it as JSON.

    `mesh` is the whole mesh, with the pipeline's `axis`; the stages' plans are on the mesh without it. `timeline` is
    that of the schedule with the stages' seconds.
    """

    mesh: Mesh
    """Axes with their sizes, that of the pipeline too, and the hardware profile."""
    axis: str
    """Axis of the pipeline."""
    schedule: Schedule
    """Schedule of the micro-batches."""
    stages: tuple[StagePlan, ...]
    """A plan for each stage, in order."""
    starts: tuple[int, ...]
    """The number of the first block of each stage, as `stages.splitting.split` takes them."""
    timeline: Timeline = field(repr=False)
    bound: float = 0.0
    """Seconds that no other cut and plans of stages take less than, as far as `gap` says; 0 where nothing is known."""
    memory_limit: int | None = None
    """Bytes per device that the stages of a rank keep to, with what is `reserved`."""
    reserved: Reserved = NOTHING
    """Memory of a device besides tensors."""
    notes: tuple[str, ...] = ()
    """Remarks on the plan, in sentences."""
    workload: Workload | None = field(default=None, compare=False)
    """The model, its inputs, and the computation of one step."""
    comparison: Comparison | None = field(default=None, compare=False)
    """The candidates of `mesh="auto"`; None of a plan on a mesh that was given."""

    def __post_init__(self) -> None:
        assert self.mesh.size(self.axis) == self.schedule.num_ranks, f"{self.mesh} for {self.schedule}"
        assert [stage.number for stage in self.stages] == list(range(self.schedule.num_stages)), "a plan per stage"

    def __repr__(self) -> str:
        step, memory = format_seconds(self.seconds), format_bytes(self.peak_bytes)
        return f"PipelinePlan({self.mesh}, {self.schedule.name}, {step} a step, {memory} per device)"

    def __str__(self) -> str:
        return view("PipelinePlan.__str__")(self)

    @property
    def kept_whole(self) -> tuple[KeptWhole, ...]:
        """The operations without a rule, on all stages."""
        return kept_whole_on_all([(stage.plan.seconds, stage.plan.kept_whole) for stage in self.stages])

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of a step."""
        return self.schedule.num_microbatches

    @property
    def implementations(self) -> frozenset[str]:
        """The names of implementations that calls run by."""
        return frozenset().union(*(stage.plan.implementations for stage in self.stages))

    @property
    def seconds(self) -> float:
        """The predicted step of all micro-batches."""
        return self.timeline.seconds

    @property
    def gap(self) -> float:
        """The share of the step that other cuts and plans of stages could save at most; 1 where nothing is known.

        It is proven of the formula by which a model is cut (`stages.cuts`), not of the simulated step: with tensors
        that go from stage to stage as they do in the plan of the whole, of whose seconds a stage takes no less than the
        share of its blocks; and, where several stages share the memory of a rank, with the parts that were assigned to
        them. A stage's timeline is as far above the least that it can be as the sum of its seconds is proven to be.
        """
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        return self.timeline.bubble

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes on each device of the fullest rank."""
        return max(map(self.rank_bytes, range(self.schedule.num_ranks)))

    @property
    def reserved_bytes(self) -> int:
        """Predicted bytes of a device of the fullest rank: tensors at the peak and what is reserved besides."""
        return self.reserved.on_device(self.peak_bytes)

    def rank_bytes(self, rank: int) -> int:
        """Return the predicted bytes on each device of a rank of the pipeline: no less than its stages take together.

        What waits for a backward counts for the micro-batches that its stages have in flight together, where that is
        most; what a stage holds only while it runs, for that of them which takes the most; all else as if each of them
        were at its fullest at once. None takes more than its peak.
        """
        numbers = self.schedule.stages_of(rank)
        lasting, working, saved = 0, 0, dict[int, int]()
        for number in numbers:
            plan, in_flight = self.stages[number].plan, self.schedule.in_flight(number)
            saved[number] = sum(row.saved_bytes for row in plan.rows)
            running, at_peak = running_bytes(plan.memory.parts if plan.memory else {}, saved[number], in_flight)
            lasting += plan.peak_bytes - running - in_flight * saved[number]
            working = max(working, running, at_peak)
        together = lasting + working + self.schedule.most_waiting(rank, saved)
        return min(together, sum(self.stages[number].plan.peak_bytes for number in numbers))

    @property
    def offload(self) -> Offloaded:
        """State that all stages, or some, have on the host, as a value of the option `offload`."""
        activations = any(ACTIVATIONS in stage.plan.host for stage in self.stages)
        if self.offloads_optimizer:
            return "both" if activations else "optimizer"
        return "activations" if activations else "none"

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer's state is on the host, so that `autopar.optim.OffloadedAdamW` must step."""
        return self.stages[0].plan.offloads_optimizer

    @property
    def host(self) -> Mapping[str, int]:
        """Kind of state in host memory → bytes per device, on the rank that takes the most."""
        return max(map(self.rank_host, range(self.schedule.num_ranks)), key=lambda host: sum(host.values()))

    @property
    def host_bytes(self) -> int:
        """Predicted bytes of host memory for each device of the rank that takes the most."""
        return sum(self.host.values())

    def rank_host(self, rank: int) -> Mapping[str, int]:
        """Return the bytes of host memory per device of a rank, by kind of state; one optimizer steps all its stages.

        Activations count at the moment when the micro-batches in flight of all its stages take the most.
        """
        numbers = self.schedule.stages_of(rank)
        hosts = {number: self.stages[number].plan.host for number in numbers}
        names = dict.fromkeys(name for host in hosts.values() for name in host)
        found = {name: sum(host.get(name, 0) for host in hosts.values()) for name in names}
        if STAGING in found:
            found[STAGING] = max(host.get(STAGING, 0) for host in hosts.values())
        if ACTIVATIONS in found:
            each = {n: host.get(ACTIVATIONS, 0) // self.schedule.in_flight(n) for n, host in hosts.items()}
            found[ACTIVATIONS] = self.schedule.most_waiting(rank, each)
        return found

    def idle(self, rank: int) -> float:
        """Return the share of the step in which a rank waits."""
        busy = sum(each.end - each.start for each in self.timeline.slices if each.rank == rank)
        return max(0.0, 1 - busy / self.seconds) if self.seconds else 0.0

    def compared_with(self, *others: Any) -> PipelinePlan:
        """Return the plan with other plans added to its candidates; see `Plan.compared_with`."""
        return view("PipelinePlan.compared_with")(self, others)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        stages = [
            {
                "number": stage.number,
                "blocks": stage.blocks,
                "plan": json.loads(stage.plan.to_json()),
                "seconds": asdict(stage.seconds),
            }
            for stage in self.stages
        ]
        values = {
            PIPELINE_FORMAT: FORMAT,
            "mesh": {"axes": dict(self.mesh.axes), "hardware": self.mesh.hardware},
            "axis": self.axis,
            "schedule": asdict(self.schedule),
            "bound": self.bound,
            "memory_limit": self.memory_limit,
            "reserved": self.reserved.to_json(self.peak_bytes),
            "notes": self.notes,
            "starts": self.starts,
            "workload": None if self.workload is None else asdict(self.workload),
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "stages": stages,
        }
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """Read a plan from JSON text; PlanError, which names the field, where the text is no plan of a pipeline."""
        with refusing("pipeline plan", "PipelinePlan.save"):
            values = read_json(text)
        if isinstance(values, dict) and "format" in values:
            raise PlanError("this is the plan of a model in one piece, not of a pipeline; read it with Plan.load.")
        if not isinstance(values, dict) or values.get(PIPELINE_FORMAT) != FORMAT:
            raise PlanError(
                f"not a pipeline plan of format {FORMAT}; give what PipelinePlan.save of this version wrote."
            )
        with refusing("pipeline plan", "PipelinePlan.save"):
            PIPELINE_PLAN.check(values, "")
            mesh = Mesh(values["mesh"]["axes"], values["mesh"]["hardware"])
            schedule = Schedule(**values["schedule"])
            stages = tuple(map(_stage, values["stages"]))
            _check(mesh.size(values["axis"]), schedule, stages, values["starts"])
            plan = cls(
                mesh=mesh,
                axis=values["axis"],
                schedule=schedule,
                stages=stages,
                starts=tuple(values["starts"]),
                timeline=simulate(schedule, [stage.seconds for stage in stages]),
                bound=values.get("bound", 0.0),
                memory_limit=values["memory_limit"],
                reserved=Reserved.of_json(values.get("reserved")),
                notes=tuple(values["notes"]),
                workload=workload_of(values.get("workload")),
                comparison=comparison_of(values.get("comparison"), mesh.hardware),
            )
            plan.reserved.check_can_be_written(plan.peak_bytes)
            return plan

    def save(self, path: str | Path) -> None:
        """Write the plan, with the formulas of its stages, to a JSON file; one that is there stays if that fails."""
        stages = tuple(replace(stage, plan=stage.plan.with_formulas()) for stage in self.stages)
        replace_text(path, replace(self, stages=stages).to_json())

    @classmethod
    def load(cls, path: str | Path) -> PipelinePlan:
        """Read a plan from a JSON file; PlanError where it cannot be read or is no plan of a pipeline."""
        with refusing(f"pipeline plan: {str(path)!r}", "PipelinePlan.save"):
            text = read_text(path)
        return cls.from_json(text)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one page, with a Gantt chart of the step, that a browser opens without a network."""
        replace_text(path, view("PipelinePlan.to_html")(self))

    def to_trace(self, path: str | Path) -> None:
        """Write the predicted step as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        replace_text(path, view("PipelinePlan.to_trace")(self))


def _check(num_ranks: int, schedule: Schedule, stages: tuple[StagePlan, ...], starts: Sequence[int]) -> None:
    """Raise PlanError if ranks, stages and starts do not fit the schedule, or it has too many actions."""
    if num_ranks != schedule.num_ranks:
        raise PlanError(f"the axis has {num_ranks} ranks, the schedule {schedule.num_ranks}")
    if [stage.number for stage in stages] != list(range(schedule.num_stages)):
        raise PlanError(f"stages {[stage.number for stage in stages]} of {schedule.num_stages}")
    if len(starts) != schedule.num_stages or any(a >= b for a, b in pairwise((-1, *starts))):
        raise PlanError(f"starts is {list(starts)}; needed {schedule.num_stages} growing numbers")
    if schedule.num_microbatches * schedule.num_stages > MAX_ACTIONS:
        raise PlanError(
            f"schedule has {schedule.num_microbatches} micro-batches for {schedule.num_stages} stages; together they "
            f"may be {MAX_ACTIONS}"
        )


def _stage(values: dict[str, Any]) -> StagePlan:
    plan = Plan.of_values(values["plan"])
    return StagePlan(values["number"], tuple(values["blocks"]), plan, StageSeconds(**values["seconds"]))
