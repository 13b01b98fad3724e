"""What a pipeline is to be planned for, and the meshes of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.annotations.pins import Mode
from autopar.cost.optimizer import ADAMW, Optimizer
from autopar.errors import PipelineError
from autopar.hardware.profile import Hardware
from autopar.pipeline.schedules.schedule import Schedule
from autopar.planning.planner import Settings
from autopar.program.program import Program
from autopar.sharding.annotation import Annotation
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh
from autopar.space.build import build_space
from autopar.space.space import Space

ONE_DEVICE = "dp"
"""The axis of a stage on one device."""


def pipeline_axis(mesh: Mesh, asked: str | None) -> str | None:
    """The pipeline axis of a mesh: the one that was asked for, or the one called "pp"; None where there is none."""
    if asked is not None and asked not in mesh.axes:
        raise PipelineError(
            f'pipeline="{asked}" is no axis of the mesh, whose axes are {", ".join(map(repr, mesh.names))}; '
            "name one of them."
        )
    return asked or ("pp" if "pp" in mesh.axes else None)


def stage_mesh(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of one stage: the other axes, or one device."""
    others = {name: size for name, size in mesh.axes.items() if name != axis}
    return Mesh(others or {ONE_DEVICE: 1}, mesh.hardware)


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """What a pipeline is to be planned for."""

    program: Program
    """Of one micro-batch."""
    mesh: Mesh
    axis: str
    hardware: Hardware
    schedule: Schedule
    annotations: tuple[Annotation, ...] = ()
    mode: Mode = "auto"
    stages: tuple[str, ...] | None = None
    """Modules with which the stages after the first begin, where the user says so."""
    settings: Settings = field(default_factory=Settings)
    optimizer: Optimizer = ADAMW
    whole_outputs: bool = False
    input_layouts: Mapping[str, Layout] = field(default_factory=dict)
    storage: Mapping[str, Layout] = field(default_factory=dict)
    """Parameter → the layout in which it is stored already."""
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter or buffer → the stages that hold it already."""

    @property
    def stage_mesh(self) -> Mesh:
        return stage_mesh(self.mesh, self.axis)

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    def space(self, program: Program, received: Mapping[str, Layout]) -> Space:
        """The space of a stage, or of the whole program, which receives nothing."""
        here = program.placeholders()
        inputs = {name: each for name, each in self.input_layouts.items() if name in here}
        layouts = {**inputs, **received}
        return build_space(program, self.stage_mesh, self.hardware, self.whole_outputs, layouts, self.optimizer)
