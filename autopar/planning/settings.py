"""Settings of the planner, and the context that a plan was made from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from autopar.costs.hardware.reserved import NOTHING, Reserved
from autopar.costs.memory.lifetimes import Lifetimes
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError, PipelineError, PlanError
from autopar.ir.program.recompute_segments import OFFLOAD, RECOMPUTATIONS
from autopar.planning.formulation import Formulation
from autopar.planning.options.groups import Memory, Search
from autopar.solver.problem import Problem

Activations = Literal["on_device", "may_offload", "offloaded"]
USUAL_DEPTH = 1  # layers ahead, as FSDP2; two help only if gathers take longer than products


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the planner: the user's, and those of one search among several."""

    memory: Memory = Memory()
    search: Search = Search()
    is_brief: bool = False
    """True for one of many plans: no count takes long, and a refusal works nothing out for its reader."""
    cutoff: float = math.inf
    """Under a memory limit: seconds of a micro-batch with its share of what is done once a step, as another plan takes
    them. A search ends with CutOffError where it proves that no plan takes less."""
    activations: Activations = "on_device"
    """Placement of the tensors that segments save for their backward.

    "stay": on the device. "may leave": offloaded if a limit requires it and `recompute` is "auto" or "none". "leave":
    all offloaded.
    """
    offloaded: int | None = None
    """The activations of only so many segments, the first ones, may leave; None: of all."""
    reserved: Reserved = NOTHING
    """Memory of the device that `memory` counts besides tensors."""

    @property
    def limit(self) -> int | None:
        """The memory limit in bytes per device; None if there is none."""
        return self.memory.limit_bytes

    @property
    def tensor_limit(self) -> int | None:
        """The memory limit in bytes of tensors, in which the search counts; None if there is none."""
        return None if self.limit is None else self.reserved.tensors_within(self.limit)

    def for_tensors(self, limit: int | None) -> Settings:
        """Return the settings with a limit on tensors alone, as a stage has that shares its device."""
        return replace(self.limited(limit), reserved=NOTHING)

    def limited(self, limit: int | None) -> Settings:
        """Return the settings with another memory limit in bytes per device, of at least one byte."""
        return replace(self, memory=self.memory.limited(None if limit is None else max(limit, 1)))

    def lasting(self, seconds: float) -> Settings:
        """Return the settings with another time limit."""
        return replace(self, search=replace(self.search, time_limit=seconds))

    def without_reasons(self) -> Settings:
        """Return the settings with a cut-off, under which it is not worked out why nothing fits."""
        return replace(self, cutoff=min(self.cutoff, sys.float_info.max))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Put the limit on the device before the text of an error, if that limit counts more than tensors.

        The least bytes that such an error names are those of the device.
        """
        try:
            yield
        except (InfeasibleError, PipelineError) as error:
            if self.limit is None or not self.reserved:
                raise
            if isinstance(error, PipelineError):
                raise PipelineError(f"{self.reserved.explained(self.limit)}\n{error}") from error
            least, told = error.least_bytes, self.reserved.explained(self.limit, error.least_bytes)
            on_device = None if least is None else self.reserved.on_device(least)
            raise InfeasibleError(f"{told}\n{error}", on_device) from error

    @property
    def mode(self) -> str | None:
        """Modes that segments may have, as `Formulation.problem` takes them; None if "none" is the only one."""
        if self.activations == "offloaded":
            return OFFLOAD
        if self.memory.recompute == "none":
            return None if self.activations == "on_device" else f"none|{OFFLOAD}"
        return "" if self.memory.recompute == "auto" else self.memory.recompute

    def modes(self, segments: Sequence[str]) -> dict[str, str] | None:
        """Return the modes that each segment may have, as `Formulation.problem` takes them.

        None if "none" is the only one. With `offloaded`, only the first so many segments may be offloaded.
        """
        if self.mode is None:
            return None
        stays = {OFFLOAD: "none", f"none|{OFFLOAD}": "none", "": "|".join(RECOMPUTATIONS)}
        most = len(segments) if self.offloaded is None or not self.offloads else self.offloaded
        other = stays.get(self.mode, self.mode)
        return {name: self.mode if place < most else other for place, name in enumerate(segments)}

    @property
    def offloads(self) -> bool:
        """True if tensors that segments save for their backward may be offloaded to the host."""
        return self.activations != "on_device"

    @property
    def depths(self) -> tuple[int, ...]:
        """Prefetch depths to plan with, in turn, until there is a plan within the limit.

        The search's objective counts gathers as issued ahead: without memory for that a step takes longer.
        """
        if self.memory.prefetch != "auto":
            return (self.memory.prefetch,)
        return (USUAL_DEPTH,) if self.limit is None else (USUAL_DEPTH, 0)


Start = tuple[tuple[int, ...], Mapping[str, str]]
"""Choices of decisions, and modes of segments."""


@dataclass(frozen=True, slots=True, eq=False)
class WarmStart:
    """A plan that is known of a model before it is searched for, as an estimate has it."""

    zigzag_axes: frozenset[str]
    """Axes over which it zigzag-shards positions."""
    waited: Mapping[str, float]
    """Shares of weights' collectives that its step waits for (`OverlappedWork.waited`)."""
    choices: Callable[[Space, Lifetimes], Iterable[Start]]
    """Returns choices of decisions and modes of segments, the fastest first; nothing for a program of other calls."""


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
    pays_split: bool = False
    """True if they are kept whole in place of a plan that pays for memory."""
    row: MemoryRow | None = None
    """The moments that the limit of the problem is at; None where it has none, or that is not known."""
    host_seconds: float = 0.0
    """Seconds that hosts add to each sum of costs (`Plan.host_seconds`)."""

    def widened(self) -> PlanContext:
        """Return the context in the space before it was narrowed to what pins leave, which has all strategies."""
        if self.space.kept is None:
            return self
        whole, pins = Formulation(self.space, self.memory_model).widened(self.pins)
        kept = {number: np.flatnonzero(mask) for number, mask in self.space.kept[1].items()}
        choices = tuple([int(kept[n][choice]) if n in kept else choice for n, choice in enumerate(self.choices)])
        return replace(self, space=whole.space, memory_model=whole.memory, pins=pins, choices=choices)


class Chosen(Protocol):
    """A plan, or a draft of one (`planning.record.Draft`)."""

    @property
    def context(self) -> object: ...
    @property
    def recompute(self) -> Mapping[str, str]: ...
    @property
    def device_seconds(self) -> float: ...
    @property
    def multiplier(self) -> float: ...


def context_of(plan: Chosen, requested: str = "context") -> PlanContext:
    """Return the context of a plan; raise PlanError if the plan was loaded, since `requested` then needs its model."""
    if plan.context is None:
        raise PlanError(
            f"plan.{requested} needs the model that the plan is for, and a plan that was loaded does not bring it "
            "along; call plan.attach(model, example_inputs), with the options it was made with, and ask what that "
            "returns."
        )
    assert isinstance(plan.context, PlanContext), f"made from {type(plan.context).__name__}"
    return plan.context
