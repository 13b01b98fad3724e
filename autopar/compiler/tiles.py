"""Losses in tiles where a memory limit asks for them, and nothing was said about tiles.

A model is planned within its limit as it is. Where memory costs time, or nothing fits, it is planned once more with its
losses in tiles, if it has some that can be taken so and their logits are worth it, and the faster plan is kept. Plans
that memory does not bound are those of a model without tiles, and take no longer to make.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.capture.tiled_loss import LOSSES, Fitting, LossTiles, has_tiles
from autopar.errors import InfeasibleError
from autopar.planning.record import choices_of
from autopar.planning.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.program.program import Program
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh
from autopar.solver.deadline import after, is_over, seconds_until
from autopar.space.space import Space

WORTHWHILE = 0.01
"""Logits of a smaller share of the limit cannot make room for much: most of a step of many layers is elsewhere."""
Spaces = Callable[[LossTiles], Space]
"""The space of a model that is captured with its losses in so many tiles."""


def plan_as_memory_asks(
    request: PlanRequest, space: Space, spaces: Spaces, storage: Mapping[str, Layout] | None = None
) -> Plan:
    """The best plan of a model whose space is given; of one with its losses in tiles, where that is the faster."""
    if request.loss_tiles is not None or request.settings.memory is None or not space.program.tileable:
        return request.plan(space, storage)
    deadline = after(request.settings.time_limit)

    def of_tiles() -> Plan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were said of the model as it is
            tiled = spaces(Fitting(space.mesh.num_devices))
        left = replace(request.settings, time_limit=seconds_until(deadline))
        return replace(request, settings=left).plan(tiled, storage)

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            plan = request.plan(space, storage)
    except InfeasibleError as error:
        try:
            return of_tiles()
        except InfeasibleError:
            raise error from None
    worthwhile = _bytes_of_logits(plan, space) >= WORTHWHILE * request.settings.memory
    if _is_bounded(plan, request) and worthwhile and not is_over(deadline):
        try:
            with warnings.catch_warnings(record=True) as said_of_tiles:
                warnings.simplefilter("always")
                tiled = of_tiles()
            if tiled.seconds < plan.seconds:
                plan, said = tiled, said_of_tiles
        except InfeasibleError:
            pass
    for each in said:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return plan


def _is_bounded(plan: Plan, request: PlanRequest) -> bool:
    """Whether a plan within a limit would be another one without: memory has a price, or layers are computed again."""
    again = request.settings.recompute == "auto" and set(plan.recompute.values()) - {"none"}
    return bool(plan.multiplier or plan.gap or again)


def _bytes_of_logits(plan: Plan, space: Space) -> int:
    """Bytes of what the losses of a plan read, on one device."""
    found = 0
    for decision, choice in zip(space.decisions, choices_of(plan, space), strict=True):
        if decision.kind == "call" and decision.node.target in LOSSES and decision.menu.call is not None:
            logits, layout = decision.menu.call.inputs[0], decision.menu.strategies[choice].inputs[0]
            found += math.prod(layout.local_shape(logits.shape, space.mesh.sizes)) * logits.dtype.itemsize
    return found


def tiles_of(plan: Plan, program: Program, asked: LossTiles, mesh: Mesh) -> LossTiles:
    """With how many tiles a plan's model is captured, where `program` is the model without them."""
    in_tiles = any(text.startswith("linear_cross_entropy") for text in plan.descriptions.values())
    return Fitting(mesh.num_devices) if asked is None and in_tiles and not has_tiles(program) else asked
