"""Optimizer and activation offload: whether they go to the host, and whether the host has memory for them.

If a plan exceeds the memory of a host, it is made again with fewer layers' activations there: the first ones, as many
as fit. It is refused only if even the rest does not fit.

With "auto" under a memory limit, a model is first planned with its optimizer on the device; the search may send the
activations of layers to the host. If memory costs time there, or nothing fits, it is also planned with state and master
copies on the host, and the faster plan is taken. That search ends once it proves that it finds none.
Without a limit nothing is offloaded.

Under a limit, a plan that offloads reports the best plan on the device: within the limit or, if there is none, without
it. Without a limit, an explicit request is planned once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.plan import Offloaded, Plan
from autopar.costs.pricing.offload import ACTIVATIONS
from autopar.errors import CutOffError, InfeasibleError, PipelineError, TimeLimitError
from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.planning.planner import is_bounded, seconds_of_microbatch
from autopar.planning.request import PlanRequest
from autopar.planning.settings import context_of
from autopar.planning.simulated import simulated_seconds
from autopar.solver.deadline import after, seconds_until

ON_HOST = {
    "optimizer": "the optimizer's state is",
    "activations": "what layers save for their backward is",
    "both": "the optimizer's state, and what layers save, is",
}


class AnyPlan(Protocol):
    """A plan without a pipeline, or with one."""

    @property
    def seconds(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def offload(self) -> Offloaded: ...
    @property
    def host(self) -> Mapping[str, int]: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


P = TypeVar("P", bound=AnyPlan)


@dataclass(frozen=True, slots=True)
class Plans(Generic[P]):
    """Operations on one kind of plans: without a pipeline, or with one."""

    best: Callable[[PlanRequest], P]
    """Return the best plan for a request that states whether it offloads."""
    pieces: Callable[[P], tuple[Plan, ...]]
    """The plans that it is made of: itself, or one for each stage."""
    seconds: Callable[[P], float]
    """Seconds of a plan's simulated step, by which plans are compared."""
    cutoff: Callable[[P], float]
    """Seconds of a plan that further searches have to beat; infinite if they take no cut-off."""
    stored: Callable[[], int]
    """The least bytes that a device stores of a model whose optimizer is on the device, as far as that is known."""
    noted: Callable[[P, tuple[str, ...], PlanRequest], P]
    """Return a plan with other notes, as if it had been requested by itself."""


def of_whole(best: Callable[[PlanRequest], Plan], stored: Callable[[], int]) -> Plans[Plan]:
    """Return the operations on plans without a pipeline."""

    def noted(plan: Plan, notes: tuple[str, ...], request: PlanRequest) -> Plan:
        made, specified = context_of(plan), request.settings
        settings = replace(made.settings, cutoff=specified.cutoff, search=specified.search)
        return replace(plan, context=replace(made, settings=settings), notes=notes)

    return Plans(best, lambda plan: (plan,), simulated_seconds, seconds_of_microbatch, stored, noted)


class _HostMemoryError(InfeasibleError):
    """Error for offloaded data that exceeds a host's memory, by `over` bytes of each device."""

    def __init__(self, message: str, over: int) -> None:
        super().__init__(message)
        self.over = over


@dataclass(frozen=True, slots=True)
class _Planned(Generic[P]):
    """A plan, and the warnings issued while it was made."""

    plan: P
    specified: tuple[warnings.WarningMessage, ...]


def plan_as_offload_asks(request: PlanRequest, plans: Plans[P]) -> P:
    """Return the best plan; with Memory(offload="auto") the better of those with, and without it.

    Raises InfeasibleError, or PipelineError of stages, where there is none.
    """
    if request.memory.offload == "none":
        return plans.best(request)
    if request.memory.offload == "auto" and request.settings.limit is None:
        return plans.best(request.offloading_as("none"))
    best, refused, deadline = None, None, after(request.settings.search.time_limit)
    if request.memory.offload == "auto":
        try:
            _check_stored(plans.stored(), request.settings.tensor_limit)
            best = _within_host(request.without_auto(offloads_optimizer=False), plans, deadline)
        except (InfeasibleError, PipelineError) as error:
            refused = error
        if best is not None:
            pieces = plans.pieces(best.plan)
            if not any(is_bounded(each, context_of(each).settings) for each in pieces):
                return _warned_plan(best)
    found = best
    try:
        against = _request_on_host(request, math.inf if best is None else plans.cutoff(best.plan), deadline)
        offloaded = _within_host(against, plans, deadline)
    except (CutOffError, InfeasibleError, PipelineError, TimeLimitError) as error:
        if best is None:
            raise _both_refusals(refused, error) from None
    else:
        found = offloaded if best is None or plans.seconds(offloaded.plan) < plans.seconds(best.plan) else best
    assert found is not None, "one of them is not refused"
    if found.plan.offload == "none" or request.settings.limit is None:
        return _warned_plan(found)
    here = best if best is not None and best.plan.offload == "none" else None
    compared = here or _without_limit(request.offloading_as("none"), plans, deadline)
    notes = (*found.plan.notes, *_note(found, compared, here is None))
    return _warned_plan(replace(found, plan=plans.noted(found.plan, notes, request)))


def _refusal(plan: AnyPlan, plans: Plans[Any], requested: int | None) -> _HostMemoryError | None:
    """Return why a plan exceeds the memory of the hosts; None if it does not."""
    space = context_of(plans.pieces(plan)[0]).space
    hardware, devices = space.hardware, space.devices_on_host
    limit, needed = hardware.host_memory_bytes if requested is None else requested, plan.host_bytes * devices
    if not limit or needed <= limit:
        return None
    whose = f"hardware {hardware.name!r} has" if requested is None else "Memory(host_limit=…) is"
    return _HostMemoryError(
        f"what is offloaded takes {format_bytes(plan.host_bytes)} per device, and {format_bytes(needed)} ({needed} "
        f"bytes) for the {devices} that share a host, but {whose} {format_bytes(limit)}; raise host_limit, use "
        'fewer devices of a host, or store parameters in parts (strategy="zero3").',
        plan.host_bytes - limit // devices,
    )


def _check_stored(stored: int, limit: int | None) -> None:
    """Raise InfeasibleError where a device cannot even store what it must: no search is needed to know that."""
    if limit is not None and stored > limit:
        raise InfeasibleError(
            f"the memory limit is {format_bytes(limit)} ({limit} bytes) per device, but parameters, gradients and what "
            f"the optimizer keeps are {format_bytes(stored)}, in as many parts as they can be.",
            stored,
        )


def _request_on_host(request: PlanRequest, cutoff: float, deadline: float) -> PlanRequest:
    """Return the request for a plan with optimizer state on the host, to be faster than the best on the device."""
    settings = request.settings
    settings = replace(settings.lasting(seconds_until(deadline)), cutoff=min(settings.cutoff, cutoff))
    return replace(request, settings=settings).without_auto(offloads_optimizer=True)


def _within_host(request: PlanRequest, plans: Plans[P], deadline: float) -> _Planned[P]:
    """Return a plan that fits on the host: if needed, only as many layers as fit offload their activations.

    If those of no layer fit, none are offloaded, provided that offloading served a memory limit. Raises _NoRoomError if
    the plan still does not fit, or if all activations had to be offloaded.
    """
    found, settings = _made(request, plans), request.settings
    while (refusal := _refusal(found.plan, plans, request.memory.host_limit_bytes)) is not None:
        activations = found.plan.host.get(ACTIVATIONS, 0)
        if not activations:
            raise refusal
        pieces = plans.pieces(found.plan)
        offloaded = max(list(each.recompute.values()).count(OFFLOAD) for each in pieces)
        room = activations - refusal.over
        fewer = min(offloaded - 1, offloaded * room // activations)
        if fewer < 1 and settings.limit is None:
            raise refusal
        left = settings.lasting(seconds_until(deadline))
        requested = replace(request, settings=replace(left, offloaded=fewer))
        if fewer < 1:
            requested = replace(request, settings=left).with_activations_on_device()
        try:
            found = _made(requested, plans)
        except (InfeasibleError, PipelineError) as error:
            told = f"{error}\nWith more on the host: {refusal}"
            least = error.least_bytes if isinstance(error, InfeasibleError) else None
            raise InfeasibleError(told, least) from None
        if ACTIVATIONS in found.plan.host and _refusal(found.plan, plans, request.memory.host_limit_bytes) is None:
            note = f"the host has room for what {fewer} layers{' of a stage' * (len(pieces) > 1)} save, the first ones"
            return replace(found, plan=plans.noted(found.plan, (*found.plan.notes, note), request))
    return found


def _made(request: PlanRequest, plans: Plans[P]) -> _Planned[P]:
    with warnings.catch_warnings(record=True) as specified:
        warnings.simplefilter("always")
        plan = plans.best(request)
    return _Planned(plan, tuple(specified))


def _warned_plan(found: _Planned[P]) -> P:
    for each in found.specified:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return found.plan


def _both_refusals(refused: Exception | None, error: Exception) -> Exception:
    """Return why there is no plan with state on the device nor on the host."""
    if refused is None or isinstance(error, (CutOffError, TimeLimitError)) or str(refused) == str(error):
        return error
    told = f"{refused}\nWith the optimizer's state on the host: {error}"
    return InfeasibleError(told, error.least_bytes) if isinstance(error, InfeasibleError) else PipelineError(told)


def _without_limit(here: PlanRequest, plans: Plans[P], deadline: float) -> _Planned[P] | None:
    """Return the best plan that offloads nothing, whatever memory that takes; None where it is not found in time."""
    settings = replace(here.settings.limited(None).lasting(seconds_until(deadline)), cutoff=math.inf)
    with suppress(InfeasibleError, TimeLimitError):
        return _made(replace(here, settings=settings), plans)
    return None


def _note(found: _Planned[P], compared: _Planned[P] | None, is_free: bool) -> tuple[str, ...]:
    if compared is None:
        return ()
    limit = " without a limit" if is_free else " within the limit"
    return (
        f"{ON_HOST[found.plan.offload]} on the host: {format_seconds(found.plan.seconds)} a step and "
        f"{format_bytes(found.plan.peak_bytes)}, where the best plan on the device{limit} takes "
        f"{format_seconds(compared.plan.seconds)} and {format_bytes(compared.plan.peak_bytes)}",
    )
