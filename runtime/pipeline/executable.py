"""What runs one kind of input on a rank of a pipeline: its plan, the programs of all stages, this rank's graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedules.schedule import Schedule
from autopar.program.program import Program
from autopar.program.python_state import PythonState
from autopar.runtime.module.executable import Executable
from autopar.runtime.pipeline.pipedream import check_not_shared
from autopar.runtime.pipeline.shared_parameters import holders_of
from autopar.sharding.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """What runs one kind of input on a rank of a pipeline."""

    plan: PipelinePlan
    programs: tuple[Program, ...]
    """Of all stages."""
    executables: Mapping[int, Executable]
    """Of this rank's stages."""
    result_layouts: tuple[Layout | None, ...]
    """Of the user's outputs, which the last stage gives; None where an output is no tensor."""
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
    def python(self) -> PythonState:
        """What the forward has read of Python."""
        return self.programs[0].python

    @property
    def input_values(self) -> tuple[object, ...]:
        """The leaves of the inputs as the programs have them: values, or descriptions of tensors."""
        return self.programs[0].input_values

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule
