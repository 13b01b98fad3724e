"""Settings of the planner, and the context that a plan was made from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.costs.hardware.reserved import NOTHING, Reserved
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError, InputError, PipelineError, PlanError
from autopar.ir.program.recompute_segments import OFFLOAD, RECOMPUTATIONS
from autopar.planning.formulation import Pins
from autopar.solver.problem import Problem

Activations = Literal["stay", "may leave", "leave"]
TIME_LIMIT = 120.0  # seconds of solving
DEPTHS = (0, 1, 2)
"""Numbers of layers ahead of their use that weights may be fetched."""
USUAL_DEPTH = 1  # as FSDP2's: a second layer helps where gathers take longer than products, and then waits all the same


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the planner: `memory` in bytes per device, `recompute` "auto" or one mode for every segment."""

    memory: int | None = None
    recompute: str = "auto"
    solver: str = "auto"
    time_limit: float = TIME_LIMIT
    gap: float | None = None
    """Relative optimality gap at which the search under a memory limit may stop.

    None: 0, or a thousandth if a smaller gap is expensive.
    """
    prefetch: int | str = "auto"
    """Number of layers ahead of their use that weights are fetched.

    "auto": one, but none if a limit leaves no room; a second one if there is room for it and it helps.
    """
    hurried: bool = False
    """True for one of many plans, none of which is worth a long search."""
    cutoff: float = math.inf
    """Under a memory limit: seconds of a micro-batch with its share of what is done once a step, as another plan takes
    them. A search ends with CutOffError where it proves that no plan takes less."""
    activations: Activations = "stay"
    """Placement of the tensors that segments save for their backward.

    "stay": on the device. "may leave": offloaded if a limit requires it and `recompute` is "auto" or "none". "leave":
    all offloaded.
    """
    leaving: int | None = None
    """The activations of only so many segments, the first ones, may leave; None: of all."""
    reserved: Reserved = NOTHING
    """Memory of the device that `memory` counts besides tensors."""

    def __post_init__(self) -> None:
        if self.solver not in ("auto", "ilp"):
            raise InputError(f'solver={self.solver!r}; solvers are "auto" and "ilp".')
        if self.recompute not in ("auto", *RECOMPUTATIONS):
            raise PlanError(f"recompute={self.recompute!r}; give {', '.join(map(repr, ('auto', *RECOMPUTATIONS)))}.")
        if self.prefetch not in ("auto", *DEPTHS):
            raise PlanError(f"prefetch={self.prefetch!r}; give {', '.join(map(repr, ('auto', *DEPTHS)))}.")
        if self.gap is not None and not 0 <= self.gap < 1:
            raise PlanError(f"gap={self.gap!r}; give a share of the step, 0 for a plan that is proven best.")

    @property
    def tensor_limit(self) -> int | None:
        """The memory limit in bytes of tensors, in which the search counts; None if there is none."""
        return None if self.memory is None else self.reserved.tensors_within(self.memory)

    def for_tensors(self, limit: int | None) -> Settings:
        """Return the settings with a limit on tensors alone, as a stage has that shares its device."""
        return replace(self, memory=limit, reserved=NOTHING)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Put the limit on the device before the text of an error, if that limit counts more than tensors.

        The least bytes that such an error names are those of the device.
        """
        try:
            yield
        except (InfeasibleError, PipelineError) as error:
            if self.memory is None or not self.reserved:
                raise
            if isinstance(error, PipelineError):
                raise PipelineError(f"{self.reserved.explained(self.memory)}\n{error}") from error
            least, told = error.least_bytes, self.reserved.explained(self.memory, error.least_bytes)
            on_device = None if least is None else self.reserved.on_device(least)
            raise InfeasibleError(f"{told}\n{error}", on_device) from error

    @property
    def mode(self) -> str | None:
        """Modes that segments may have, as `Formulation.problem` takes them; None if "none" is the only one."""
        if self.activations == "leave":
            return OFFLOAD
        if self.recompute == "none":
            return None if self.activations == "stay" else f"none|{OFFLOAD}"
        return "" if self.recompute == "auto" else self.recompute

    def modes(self, segments: Sequence[str]) -> dict[str, str] | None:
        """Return the modes that each segment may have, as `Formulation.problem` takes them.

        None if "none" is the only one. With `leaving`, only the first so many segments may be offloaded.
        """
        if self.mode is None:
            return None
        stays = {OFFLOAD: "none", f"none|{OFFLOAD}": "none", "": "|".join(RECOMPUTATIONS)}
        most = len(segments) if self.leaving is None or not self.offloads else self.leaving
        other = stays.get(self.mode, self.mode)
        return {name: self.mode if place < most else other for place, name in enumerate(segments)}

    @property
    def offloads(self) -> bool:
        """True if tensors that segments save for their backward may be offloaded to the host."""
        return self.activations != "stay"

    @property
    def depths(self) -> tuple[int, ...]:
        """Prefetch depths to plan with, in turn, until there is a plan within the limit.

        The search's objective counts gathers as issued ahead: without memory for that a step takes longer.
        """
        if self.prefetch != "auto":
            return (int(self.prefetch),)
        return (USUAL_DEPTH,) if self.memory is None else (USUAL_DEPTH, 0)


@dataclass(frozen=True, slots=True, eq=False)
class PlanContext:
    """Inputs and settings that a plan was made from: enough to plan again with something changed."""

    space: Space
    memory_model: MemoryModel
    pins: Pins
    choices: tuple[int, ...]
    problem: Problem
    """The problem on which the bound is proven."""
    settings: Settings
    annotations: tuple[Any, ...] = ()
    mode: str = "auto"
    keeps_whole: bool = False
    """True if the pins keep every parameter whole for a shorter simulated step, without a request of the user."""
    row: MemoryRow | None = None
    """The moments that the limit of the problem is at; None where it has none, or that is not known."""


def context_of(plan: Plan, asked: str = "context") -> PlanContext:
    """Return the context of a plan; raise PlanError if the plan was loaded, since `asked` then needs its model."""
    if plan.context is None:
        raise PlanError(
            f"plan.{asked} needs the model that the plan is for, and a plan that was loaded does not bring it "
            "along; call plan.attach(model, example_inputs), with the options it was made with, and ask what that "
            "returns."
        )
    assert isinstance(plan.context, PlanContext), f"made from {type(plan.context).__name__}"
    return plan.context
