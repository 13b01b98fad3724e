"""Pipeline for one kind of input on a rank: its plan, the programs of all stages, this rank's graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.program.program import Program
from autopar.ir.program.python_state import PythonState
from autopar.ir.sharding.layout import Layout
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.runtime.module.executable import Executable
from autopar.runtime.pipeline.pipedream import check_not_shared
from autopar.runtime.pipeline.shared_parameters import holders_of


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """Pipeline for one kind of input, as a rank runs it."""

    plan: PipelinePlan
    programs: tuple[Program, ...]
    """Programs of all stages."""
    executables: Mapping[int, Executable]
    """Number of a stage → its executable, for this rank's stages."""
    result_layouts: tuple[Layout | None, ...]
    """Layouts of the user's outputs, which the last stage gives; None for an output that is no tensor."""
    holders: Mapping[str, tuple[int, ...]] = field(init=False)
    """The parameters that several ranks hold."""

    def __post_init__(self) -> None:
        schedule = self.schedule
        stored = [
            [name for stage in schedule.stages_of(rank) for name in self.programs[stage].parameters]
            for rank in range(schedule.num_ranks)
        ]
        object.__setattr__(self, "holders", holders_of(stored))
        check_not_shared(self.schedule.name, tuple(self.holders))

    @property
    def here(self) -> tuple[Executable, ...]:
        """Executables of this rank's stages."""
        return tuple(self.executables.values())

    @property
    def python(self) -> PythonState:
        """Python state that the forward has read."""
        return self.programs[0].python

    @property
    def input_values(self) -> tuple[object, ...]:
        """The leaves of the inputs as the programs have them: values, or descriptions of tensors."""
        return self.programs[0].input_values

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule
