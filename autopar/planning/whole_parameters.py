"""Choice between whole and sharded parameters, decided by the simulated step.

The solver's sum prices each parameter by itself, but sharded storage has a price for all of them together: if any is
sharded, all become DTensors, and the optimizer takes longer for each (`Hardware.dtensor_s`). The timeline counts that.
If the price matters, a plan that shards parameters is compared with the best plan under the same pins whose parameters
are all whole. That plan is taken unless its simulated step is longer. For a small graph the timeline may still be
clearly longer than the sum, so that the sum may have chosen wrongly; then the preset data_parallel is compared, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from autopar.console.units import format_seconds
from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Space, stores_dtensors
from autopar.errors import AnnotationError, CutOffError, InfeasibleError, StrategyError, TimeLimitError
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.layout import replicated
from autopar.planning.annotations.pins import pins_of
from autopar.planning.planner import seconds_of_microbatch
from autopar.planning.record import Draft
from autopar.planning.settings import PlanContext, Settings
from autopar.planning.simulated import SimulatedDraft
from autopar.solver.deadline import is_over, seconds_until
from autopar.strategies.presets import annotations_for
from autopar.strategies.presets.data import data_parallel

WORTH = 5e-3
"""Relative: steps that differ by less count as equally fast, and the simpler plan is taken."""
DOUBT = 1e-2
"""Relative: if the timeline is longer than the sum by more, the sum may have chosen wrongly."""
SMALL = 2000
"""Decisions of a graph that is planned and simulated in a few seconds, so that plans are compared in any case."""
Again = Callable[[Pins, Settings], Draft]
"""Plan once more under pins and settings; raises what planning raises."""


def with_storage_settled(
    free: SimulatedDraft, annotations: tuple[Annotation, ...], again: Again, deadline: float
) -> SimulatedDraft:
    """Return `free`, or a plan with whole parameters if its simulated step is not slower.

    `annotations` are those that the pins of `free` follow from.
    """
    context = free.draft.context
    space, settings = context.space, context.settings
    splits, small = stores_dtensors(space, context.choices), len(space.decisions) <= SMALL
    trained = sum(_is_trained(space, number) for number in range(len(space.decisions)))
    if space.mesh.num_devices == 1 or not trained:
        return free
    price = trained * space.hardware.dtensor_s if splits else 0.0
    if splits and not space.hardware.is_host:  # launches cost what nothing hides
        price = min(price, free.timeline.launching)
    best = free
    if _is_significant(price, free):
        for pins in _with_whole_parameters(space, context.pins):
            found = planned_under(again, pins, settings, deadline)
            if found is not None and found.simulated_seconds <= (1 + WORTH) * best.simulated_seconds:
                best = _noted(found, free, best)
    if small and best.simulated_seconds > (1 + DOUBT) * _summed_seconds(best):
        for pins in _of_data_parallel(context, annotations):
            if all(mask[best.choices[number]] for number, mask in pins.items()):
                continue  # it has the least sum of more plans than these
            found = planned_under(again, pins, settings, deadline)
            if found is not None and found.simulated_seconds < (1 - WORTH) * best.simulated_seconds:
                best = _noted(found, free, best)
    return best


def planned_under(again: Again, pins: Pins, settings: Settings, deadline: float) -> SimulatedDraft | None:
    """Return the plan under other pins; None if there is none in time within the limits of the settings."""
    if is_over(deadline):
        return None
    with warnings.catch_warnings(), suppress(InfeasibleError, CutOffError, TimeLimitError):
        warnings.simplefilter("ignore")  # the plan that is compared has warned
        found = again(pins, settings.lasting(seconds_until(deadline)).without_reasons())
        return SimulatedDraft.of(replace(found, context=replace(found.context, settings=settings)))
    return None


def _is_significant(seconds: float, plan: SimulatedDraft) -> bool:
    return seconds > WORTH * _summed_seconds(plan)


def _summed_seconds(plan: SimulatedDraft) -> float:
    """Return the seconds of a step of all micro-batches, by the solver's sum."""
    return seconds_of_microbatch(plan.draft) * plan.draft.context.memory_model.microbatches.count


def _of_data_parallel(context: PlanContext, annotations: tuple[Annotation, ...]) -> Iterator[Pins]:
    """Yield the pins of the preset with whole parameters, if the batch divides."""
    pins = pins_of_preset(data_parallel.__name__, annotations, context.space)
    if pins is not None:
        yield from _with_whole_parameters(context.space, pins)


def pins_of_preset(name: str, annotations: tuple[Annotation, ...], space: Space) -> Pins | None:
    """Return the pins of a preset and of annotations; None if they do not suit each other or the space."""
    with warnings.catch_warnings(), suppress(StrategyError, AnnotationError):
        warnings.simplefilter("ignore")  # the plan that is compared has warned
        preset = annotations_for(name, space.program, space.mesh)
        return pins_of((*annotations, *preset), space, "auto", {})
    return None


def _with_whole_parameters(space: Space, pins: Pins) -> Iterator[Pins]:
    """Yield the pins that keep every parameter whole, unless `pins` split one."""
    whole, kept = replicated(space.mesh.ndim), dict(pins)
    for number, decision in enumerate(space.decisions):
        if decision.kind == "parameter":
            mask = np.array([strategy.outputs[0] == whole for strategy in decision.candidates.strategies])
            kept[number] = mask & pins[number] if number in pins else mask
            if not kept[number].any():
                return
    yield kept


def _is_trained(space: Space, number: int) -> bool:
    decision = space.decisions[number]
    if decision.kind != "parameter":
        return False
    return bool(space.optimizer.step_bytes(decision.node.meta["tensor"], space.is_matrix(number)))


def _noted(found: SimulatedDraft, free: SimulatedDraft, before: SimulatedDraft) -> SimulatedDraft:
    """Return the plan that is taken, with a note on the one that it was compared with."""
    note = (
        f"parameters stay plain tensors: the simulated step takes {format_seconds(found.simulated_seconds)}, and "
        f"{format_seconds(before.simulated_seconds)} with the plan that the sum of costs prefers"
    )
    draft, preferred = found.draft, free.draft
    specified = {"settings": preferred.context.settings, "annotations": preferred.context.annotations}
    pays_split = preferred.answer.multiplier > 0
    context = replace(draft.context, keeps_whole=True, pays_split=pays_split, **specified)
    return replace(found, draft=replace(draft, notes=(*draft.notes, note), context=context))
