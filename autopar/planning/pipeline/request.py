"""Request of a pipeline plan, and the meshes of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.space.space import Space
from autopar.errors import PipelineError
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.schedules.receive_buffers import receive_buffers
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings

ONE_DEVICE = "dp"
"""The axis of a stage on one device."""


def pipeline_axis(mesh: Mesh, requested: str | None) -> str | None:
    """Return the pipeline axis of a mesh: the requested one, or the one called "pp"; None if there is none."""
    if requested is not None and requested not in mesh.axes:
        raise PipelineError(
            f'pipeline="{requested}" is no axis of the mesh, whose axes are {", ".join(map(repr, mesh.names))}; '
            "name one of them."
        )
    return requested or ("pp" if "pp" in mesh.axes else None)


def stage_mesh(mesh: Mesh, axis: str) -> Mesh:
    """Return the mesh of one stage: the other axes, or one device."""
    others = {name: size for name, size in mesh.axes.items() if name != axis}
    return Mesh(others or {ONE_DEVICE: 1}, mesh.hardware)


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """Request of a pipeline plan: a program, a mesh and a schedule, and the options of any plan."""

    program: Program
    """Program of one micro-batch."""
    mesh: Mesh
    axis: str
    schedule: Schedule
    wanted: PlanRequest = field(default_factory=PlanRequest)
    annotations: tuple[Annotation, ...] = ()
    """About the program on the mesh of a stage, those of the preset too."""
    input_layouts: Mapping[str, Layout] = field(default_factory=dict)
    storage: Mapping[str, Layout] = field(default_factory=dict)
    """Parameter → the layout in which it is stored already."""
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter or buffer → the stages that hold it already."""
    strategies: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Decision → the strategies, by name, that are looked at; of others all are."""
    zigzag_axes: tuple[str, ...] = ()
    """Axes that zigzag-shard positions in every stage."""

    @classmethod
    def of(
        cls,
        wanted: PlanRequest,
        program: Program,
        mesh: Mesh,
        axis: str,
        schedule: Schedule,
        input_layouts: Mapping[str, Layout] | None = None,
        storage: Mapping[str, Layout] | None = None,
        owners: Mapping[str, tuple[int, ...]] | None = None,
    ) -> PipelineRequest:
        """Return the request with the program's annotations; StrategyError if the preset does not apply to it."""
        specified = wanted.annotations_about(program, stage_mesh(mesh, axis), stored=bool(storage))
        return cls(
            program,
            wanted.named(mesh),
            axis,
            schedule,
            wanted,
            specified,
            input_layouts or {},
            storage or {},
            owners or {},
        )

    @property
    def stage_mesh(self) -> Mesh:
        return stage_mesh(self.mesh, self.axis)

    @property
    def hardware(self) -> Hardware:
        return self.wanted.hardware_of(self.mesh)

    @property
    def settings(self) -> Settings:
        """Settings with which stages are planned, including whether activations may be offloaded."""
        return self.wanted.searched

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    def microbatches(self, stage: int) -> Microbatches:
        """Return the micro-batches of a stage, as the schedule runs them."""
        schedule, buffers = self.schedule, receive_buffers(self.schedule, stage)
        return Microbatches(
            schedule.num_microbatches,
            schedule.in_flight(stage),
            self.wanted.reduces_each,
            main_gradients=self.wanted.conventions.main_gradients,
            stashes=schedule.updates_each,
            inputs=buffers.inputs,
            gradients=buffers.gradients,
            saves_older=schedule.delays_updates,
        )

    def space(self, program: Program, received: Mapping[str, Layout]) -> Space:
        """Return the space of a stage, or of the whole program, which receives nothing."""
        here = program.placeholders()
        inputs = {name: each for name, each in self.input_layouts.items() if name in here}
        received = {**inputs, **received}
        devices = self.mesh.num_devices
        return self.wanted.space(program, self.stage_mesh, received, self.program, devices, self.zigzag_axes)
