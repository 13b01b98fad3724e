"""Whether what an optimizer keeps goes to the host, and whether there is room there for it and for activations.

Asked for "auto" under a memory limit, a model is planned with all of it on the device, but for the activations of
layers, which the search may send to the host. Where memory costs time there, or nothing fits, it is planned with state
and master copies on the host, too, and the faster plan is kept: that search ends once it proves that it finds none.
Without a limit nothing is offloaded.

A plan that offloads says what the best one on the device takes, within the limit or, where none is, without it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.errors import CutOffError, InfeasibleError, TimeLimitError
from autopar.hardware.profile import Hardware
from autopar.planning.planner import is_bounded, seconds_of_microbatch
from autopar.planning.request import PlanRequest
from autopar.planning.settings import context_of
from autopar.plans.plan import Plan
from autopar.solver.deadline import after, seconds_until
from autopar.units import format_bytes, format_seconds

ON_HOST = {
    "optimizer": "what the optimizer keeps is",
    "activations": "what layers keep for their backward is",
    "both": "what the optimizer and layers keep is",
}

PlanFor = Callable[[PlanRequest], Plan]
"""The best plan as it is asked for, where it is said whether that offloads."""


class _NoRoomError(InfeasibleError):
    """What is offloaded takes more of a host than it may."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, and what was said while it was made."""

    plan: Plan
    said: tuple[warnings.WarningMessage, ...]

    @property
    def seconds(self) -> float:
        return seconds_of_microbatch(self.plan)


def plan_as_offload_asks(request: PlanRequest, plan_for: PlanFor, stored: Callable[[], int]) -> Plan:
    """The best plan; with offload="auto" the better of those with, and without it. Raises InfeasibleError for none.

    `stored` gives the least bytes that a device stores of a model whose optimizer is on the device.
    """
    if request.offload == "none":
        return plan_for(request)
    if request.offload == "auto" and request.settings.memory is None:
        return plan_for(request.offloading_as("none"))
    best, refused, deadline = None, None, after(request.settings.time_limit)
    if request.offload == "auto":
        try:
            _check_stored(stored(), request.settings.memory)
            best = _with_room(request.without_auto(offloads_optimizer=False), plan_for, True)
        except InfeasibleError as error:
            refused = error
        if best is not None and not is_bounded(best.plan, context_of(best.plan).settings):
            return _told(best)
    found = best
    try:
        offloaded = _with_room(_against(request, best, deadline), plan_for, request.offload == "auto")
    except (CutOffError, InfeasibleError, TimeLimitError) as error:
        if best is None:
            raise _both(refused, error) from None
    else:
        found = offloaded if best is None or offloaded.seconds < best.seconds else best
    assert found is not None, "one of them is not refused"
    if found.plan.offload == "none":
        return _told(found)
    here = best if best is not None and best.plan.offload == "none" else None
    beside = here or _without_limit(request.offloading_as("none"), plan_for, deadline)
    made = context_of(found.plan)
    settings = replace(made.settings, cutoff=request.settings.cutoff, time_limit=request.settings.time_limit)
    notes = (*found.plan.notes, *_note(found, beside, here is None))
    return _told(replace(found, plan=replace(found.plan, context=replace(made, settings=settings), notes=notes)))


def check_host_memory(num_bytes: int, devices: int, hardware: Hardware, asked: int | None) -> None:
    """Raise InfeasibleError where so many devices, each with so many bytes, take more of their host than they may."""
    limit, needed = hardware.host_memory_bytes if asked is None else asked, num_bytes * devices
    if limit and needed > limit:
        whose = f"hardware {hardware.name!r} has" if asked is None else "host_memory is"
        raise _NoRoomError(
            f"what is offloaded takes {format_bytes(num_bytes)} per device, and {format_bytes(needed)} ({needed} "
            f"bytes) for the {devices} that share a host, but {whose} {format_bytes(limit)}; raise host_memory, use "
            'fewer devices of a host, or store parameters in parts (strategy="zero3").'
        )


def _check_stored(stored: int, limit: int | None) -> None:
    """Raise InfeasibleError where a device cannot even store what it must: no search is needed to know that."""
    if limit is not None and stored > limit:
        raise InfeasibleError(
            f"the memory limit is {format_bytes(limit)} ({limit} bytes) per device, but parameters, gradients and what "
            f"the optimizer keeps are {format_bytes(stored)}, in as many parts as they can be.",
            stored,
        )


def _against(request: PlanRequest, best: _Planned | None, deadline: float) -> PlanRequest:
    """What is asked for with state on the host: something faster than the best on the device."""
    settings = request.settings
    if best is not None:
        settings = replace(settings, cutoff=min(settings.cutoff, best.seconds))
    settings = replace(settings, time_limit=seconds_until(deadline))
    asked = replace(request, settings=settings)
    return asked.without_auto(offloads_optimizer=True)


def _with_room(request: PlanRequest, plan_for: PlanFor, is_free: bool) -> _Planned:
    """A plan that has room on the host; where it `is_free` to, without activations there."""
    try:
        return _made(request, plan_for)
    except _NoRoomError:
        if not is_free or request.offload not in ("activations", "both"):
            raise
        return _made(request.offloading_as("optimizer" if request.offloads_optimizer else "none"), plan_for)


def _made(request: PlanRequest, plan_for: PlanFor) -> _Planned:
    """A plan that has room on the host."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = plan_for(request)
    space = context_of(plan).space
    if plan.host:
        devices = space.hardware.devices_on_host(space.mesh.num_devices)
        check_host_memory(plan.host_bytes, devices, space.hardware, request.host_memory)
    return _Planned(plan, tuple(said))


def _told(found: _Planned) -> Plan:
    for each in found.said:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return found.plan


def _both(refused: InfeasibleError | None, error: InfeasibleError | CutOffError | TimeLimitError) -> Exception:
    """Why there is no plan, neither on the device nor with state on the host."""
    if refused is None or not isinstance(error, InfeasibleError):
        return error
    return InfeasibleError(f"{refused}\nWith what the optimizer keeps on the host: {error}", error.least_bytes)


def _without_limit(here: PlanRequest, plan_for: PlanFor, deadline: float) -> _Planned | None:
    """The best plan that offloads nothing, whatever memory that takes; None where it is not found in time."""
    settings = replace(here.settings, memory=None, cutoff=math.inf, time_limit=seconds_until(deadline))
    with suppress(InfeasibleError, TimeLimitError):
        return _made(replace(here, settings=settings), plan_for)
    return None


def _note(found: _Planned, beside: _Planned | None, is_free: bool) -> tuple[str, ...]:
    if beside is None:
        return ()
    limit = " without a limit" if is_free else " within the limit"
    return (
        f"{ON_HOST[found.plan.offload]} on the host: {format_seconds(found.plan.seconds)} a step and "
        f"{format_bytes(found.plan.peak_bytes)}, where the best plan on the device{limit} takes "
        f"{format_seconds(beside.plan.seconds)} and {format_bytes(beside.plan.peak_bytes)}",
    )
