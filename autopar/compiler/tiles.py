"""Losses, and MLPs, in tiles where a memory limit asks for them.

A model is planned within its limit as it is. Where memory costs time, or nothing fits, it is planned once more with its
losses in tiles, if nothing was said of these, it has some that can be taken so and their logits are worth it; and where
`mlp_tiles="auto"` with its MLPs in tiles, too. The fastest of the plans is kept. Plans that memory does not bound are
those of a model without tiles, and take no longer to make.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from autopar.capture.tiles.asked import Tiles
from autopar.capture.tiles.loss import AUTO, LOSSES, Fitting, has_tiles
from autopar.capture.tiles.mlp import has_mlp_tiles
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


Spaces = Callable[[Tiles], Space]
"""The space of a model that is captured in these tiles."""


def tiles_asked(request: PlanRequest) -> Tiles:
    """Those that the user asked for."""
    return Tiles(request.loss_tiles, request.mlp_tiles)


def plan_as_memory_asks(
    request: PlanRequest, space: Space, spaces: Spaces, storage: Mapping[str, Layout] | None = None
) -> Plan:
    """The best plan of a model whose space is given; of one in tiles, where that is the faster."""
    if request.settings.memory is None or not (_takes_losses(request, space) or _takes_mlps(request, space)):
        return request.plan(space, storage)
    deadline = after(request.settings.time_limit)
    best, refused = _planned(request, space, storage)
    for tiles in _further(request, space, best):
        if best is not None and (not _is_bounded(best.plan, request) or is_over(deadline)):
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were said of the model as it is
            tiled = spaces(tiles)
        left = replace(request.settings, time_limit=seconds_until(deadline))
        found, _ = _planned(replace(request, settings=left), tiled, storage)
        if best is None or (found is not None and found.plan.seconds < best.plan.seconds):
            best = found
    if best is None:
        assert refused is not None, "a model that is not refused has a plan"
        raise refused
    for each in best.said:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return best.plan


class _Planned(NamedTuple):
    """A plan, and what was said while it was made."""

    plan: Plan
    said: list[warnings.WarningMessage]


def _planned(
    request: PlanRequest, space: Space, storage: Mapping[str, Layout] | None
) -> tuple[_Planned | None, InfeasibleError | None]:
    """The best plan of a space, or why there is none."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            return _Planned(request.plan(space, storage), said), None
    except InfeasibleError as error:
        return None, error


def _takes_losses(request: PlanRequest, space: Space) -> bool:
    return request.loss_tiles is None and space.program.tileable


def _takes_mlps(request: PlanRequest, space: Space) -> bool:
    return request.mlp_tiles == AUTO and space.program.mlp_tileable


def _further(request: PlanRequest, space: Space, as_it_is: _Planned | None) -> Iterator[Tiles]:
    """In which tiles a model may be planned besides."""
    tiles, fitting, memory = tiles_asked(request), Fitting(space.mesh.num_devices), request.settings.memory
    assert memory is not None
    if _takes_losses(request, space) and (
        as_it_is is None or _bytes_of_logits(as_it_is.plan, space) >= WORTHWHILE * memory
    ):
        tiles = tiles._replace(loss=fitting)
        yield tiles
    if _takes_mlps(request, space):
        yield tiles._replace(mlp=fitting)


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


def tiles_of(plan: Plan, program: Program, asked: Tiles, mesh: Mesh) -> Tiles:
    """In which tiles a plan's model is captured, where `program` is the model as it was asked for."""
    fitting, texts = Fitting(mesh.num_devices), plan.descriptions.values()
    losses = any(text.startswith("linear_cross_entropy") for text in texts) and not has_tiles(program)
    mlps = any(text.startswith("mlp_in_tiles") for text in texts) and not has_mlp_tiles(program)
    return Tiles(
        fitting if losses and asked.loss is None else asked.loss, fitting if mlps and asked.mlp == AUTO else asked.mlp
    )
