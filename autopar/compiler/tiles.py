"""Losses, and MLPs, in tiles where a memory limit asks for them.

A model is planned within its limit as it is. If memory costs time, or nothing fits, it is planned once more with its
losses in tiles, unless the user decided on these or their logits are too small to matter; with
`Memory(mlp_tiles="auto")` its MLPs are tiled, too. The fastest of the plans is kept. Plans that memory does not
bound are those of a model without tiles, and take no longer to make.

No two searches go to their ends where one says enough: each ends once it proves that its plan is no faster than the
best so far (`cutoff`). Where logits are a large part of the limit however they are laid out, the model in tiles is
likely the faster, and goes first: of the model as it is no more is known by then than that memory costs time, and a
bound, which mostly suffices.

A pipeline is planned as it is, and once more with its loss in tiles, where nothing fits or memory costs a stage time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from autopar.capture.tiles.mlp import has_mlp_tiles
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.capture.tiles.tiled_losses import AUTO, LOSSES, Fitting, has_tiles
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.errors import CutOffError, InfeasibleError, PipelineError, TimeLimitError
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.best_plan import best_plan
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.planner import Statements, is_bounded, seconds_of_microbatch
from autopar.planning.request import PlanRequest
from autopar.planning.settings import context_of
from autopar.planning.simulated import simulated_seconds
from autopar.solver.deadline import after, is_over, seconds_until

WORTHWHILE = 0.01
"""Logits of a smaller share of the limit cannot make room for much: most of a step of many layers is elsewhere."""
AS_WITHOUT_A_LIMIT = 0.0
"""Cut-off of a plan that is of use only if it pays nothing for memory."""

Spaces = Callable[[Tiles], Space]
"""The space of a model that is captured in these tiles."""


def plan_as_memory_asks(
    request: PlanRequest, space: Space, spaces: Spaces, storage: Mapping[str, Layout] | None = None
) -> Plan:
    """Return the best plan of a model whose space is given; of one in tiles, where that is the faster."""
    losses, mlps = _takes_losses(request, space), _takes_mlps(request, space)
    memory = request.settings.tensor_limit
    if memory is None or not (losses or mlps):
        return best_plan(request, space, storage)
    turns, tiles = _Turns(request, storage), request.tiles
    fitting, logits = Fitting(space.mesh.num_devices), _bytes_of_logits(space)
    in_tiles_first = losses and sum(map(min, logits.values())) >= WORTHWHILE * memory
    at_least = turns.take(space, cutoff=AS_WITHOUT_A_LIMIT if in_tiles_first else math.inf)
    if losses and (in_tiles_first or turns.best is None or _bytes_of_logits_in(turns.best.plan) >= WORTHWHILE * memory):
        tiles = tiles._replace(loss=fitting)
        turns.take_in_tiles(spaces, tiles)
    if at_least is not None:
        turns.take_again(space, at_least)
    if mlps:
        turns.take_in_tiles(spaces, tiles._replace(mlp=fitting))
    return turns.result(space)


class _Planned(NamedTuple):
    """A plan, the warnings issued while it was made, and the seconds of its simulated step."""

    plan: Plan
    warned: list[warnings.WarningMessage]
    seconds: float


class _Turns:
    """Models of which each is planned in its turn, as far as it may have the best plan."""

    def __init__(self, request: PlanRequest, storage: Mapping[str, Layout] | None) -> None:
        self._request, self._storage = request, storage
        self._deadline = after(request.settings.search.time_limit)
        self._refused: dict[int, InfeasibleError] = {}
        """Why a model has no plan, by the id of its space."""
        self._late: TimeLimitError | None = None
        """Error of the time limit that ended the turns; no other model is planned after it."""
        self._at_least = math.inf
        """Seconds that models take at least that were found to be no faster than a cut-off."""
        self._stated: dict[int, Statements] = {}
        """The problems of each space, by its id."""
        self.best: _Planned | None = None

    @property
    def seconds(self) -> float:
        """Seconds per micro-batch of the best plan so far, or of a faster one known elsewhere (`cutoff`)."""
        known = self._request.settings.cutoff
        return known if self.best is None else min(known, seconds_of_microbatch(self.best.plan))

    def take(self, space: Space, cutoff: float = math.inf) -> float | None:
        """Plan a model, and keep its plan if it is the best.

        Return the seconds that it takes at least if that is all that is known, as it is no faster than the cut-off.
        """
        if self._late is not None:
            return None
        cutoff = min(cutoff, math.nextafter(self._request.settings.cutoff, math.inf))
        settings = replace(self._request.settings.lasting(seconds_until(self._deadline)), cutoff=cutoff)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                request = replace(self._request, settings=settings)
                plan = best_plan(request, space, self._storage, self._statements(space))
        except TimeLimitError as error:
            self._late = error
            return None
        except InfeasibleError as error:
            self._refused[id(space)] = error
            return None
        except CutOffError as error:
            if error.seconds >= self.seconds:  # else the model is yet to be planned, or another is the faster
                self._at_least = min(self._at_least, error.seconds)
            return error.seconds
        seconds, is_again = simulated_seconds(plan), cutoff > self.seconds  # as it is, a model is also taken if as fast
        if self.best is None or (seconds <= self.best.seconds if is_again else seconds < self.best.seconds):
            context = replace(context_of(plan), settings=self._request.settings)
            self.best = _Planned(replace(plan, context=context), warned, seconds)
        return None

    def take_again(self, space: Space, at_least: float) -> None:
        """Plan the model as it is, which takes so many seconds at least, if it may be the best, or equal to it."""
        if at_least <= self.seconds and (self.best is None or not is_over(self._deadline)):
            if self.best is not None:
                self._statements(space).begin_at_prices_of(self.best.plan)
            self.take(space, math.nextafter(self.seconds, math.inf))

    def take_in_tiles(self, spaces: Spaces, tiles: Tiles) -> None:
        """Plan the model in these tiles, if that may be faster: where memory costs time, or nothing fits."""
        if self._late is not None:
            return
        if self.best is not None and (
            not is_bounded(self.best.plan, self._request.settings) or is_over(self._deadline)
        ):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were issued for the original model
            tiled = spaces(tiles)
        self.take(tiled, self.seconds)

    def _statements(self, space: Space) -> Statements:
        return self._stated.setdefault(id(space), Statements(space))

    def result(self, space: Space) -> Plan:
        """Return the best plan and issue its warnings; raise why the model as it is, in its space, has none."""
        if self.best is None:
            raise self._late or self._refused.get(id(space)) or CutOffError(self._at_least)
        for each in self.best.warned:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return self.best.plan


def pipeline_as_memory_asks(
    request: PlanRequest, planned: Callable[[Tiles], PipelinePlan], is_tileable: Callable[[], bool], num_devices: int
) -> PipelinePlan:
    """Return the best plan of a pipeline; of one with its loss in tiles, where that is the faster or alone fits.

    Args:
        request: what is wanted of any plan.
        planned: plans the model as it is captured in these tiles.
        is_tileable: whether the model has losses that can be taken in tiles.
        num_devices: those of a stage.
    """
    best, refused = None, None
    try:
        best = planned(request.tiles)
    except (InfeasibleError, PipelineError) as error:
        refused = error
    if request.settings.limit is None or request.tiles.loss is not None or not is_tileable():
        tries = False
    else:
        tries = best is None or _costs_time(best, request.settings.limit)
    if tries:
        with warnings.catch_warnings(), suppress(CutOffError, InfeasibleError, PipelineError, TimeLimitError):
            warnings.simplefilter("ignore")  # they were given for the model as it is
            tiled = planned(request.tiles._replace(loss=Fitting(num_devices)))
            best = tiled if best is None or tiled.seconds < best.seconds else best
    if best is None:
        assert refused is not None
        raise refused
    return best


def _costs_time(plan: PipelinePlan, memory: int) -> bool:
    """Return whether memory costs a stage time, and the logits of the last one are worth it."""
    bound = any(stage.plan.multiplier or set(stage.plan.recompute.values()) - {"none"} for stage in plan.stages)
    return bound and _bytes_of_logits_in(plan.stages[-1].plan) >= WORTHWHILE * memory


def _takes_losses(request: PlanRequest, space: Space) -> bool:
    return request.tiles.loss is None and space.program.tileable


def may_save(program: Program, num_devices: int, limit: int | None) -> bool:
    """Return whether losses in tiles may save a part of a limit that matters, with logits split over all devices."""
    if limit is None or not program.tileable:
        return False
    logits = (node.all_input_nodes[0].meta["tensor"] for node in program.graph.nodes if node.target in LOSSES)
    whole = sum(math.prod(each.shape) * each.dtype.itemsize for each in logits)
    return whole >= WORTHWHILE * limit * num_devices


def _takes_mlps(request: PlanRequest, space: Space) -> bool:
    return request.tiles.mlp == AUTO and space.program.mlp_tileable


def _bytes_of_logits(space: Space) -> dict[int, list[int]]:
    """Return the bytes of what each loss reads on one device, by its strategies; losses by the numbers of their
    decisions.
    """
    found = {}
    for number, decision in enumerate(space.decisions):
        if decision.kind == "call" and decision.node.target in LOSSES and decision.candidates.call is not None:
            logits = decision.candidates.call.inputs[0]
            shapes = (s.inputs[0].local_shape(logits.shape, space.mesh.sizes) for s in decision.candidates.strategies)
            found[number] = [math.prod(shape) * logits.dtype.itemsize for shape in shapes]
    return found


def _bytes_of_logits_in(plan: Plan) -> int:
    """Return the bytes of what the losses of a plan read, on one device."""
    context = context_of(plan)
    return sum(held[context.choices[number]] for number, held in _bytes_of_logits(context.space).items())


def tiles_of(plan: Plan, program: Program, requested: Tiles, mesh: Mesh) -> Tiles:
    """Return the tiles in which a plan's model is captured; `program` is the model captured in the requested tiles."""
    return _tiles_of(plan.descriptions.values(), program, requested, mesh)


def tiles_of_pipeline(plan: PipelinePlan, program: Program, requested: Tiles, mesh: Mesh) -> Tiles:
    """Return the same of a pipeline, on the mesh of a stage."""
    texts = [text for stage in plan.stages for text in stage.plan.descriptions.values()]
    return _tiles_of(texts, program, requested, mesh)


def _tiles_of(texts: Collection[str], program: Program, requested: Tiles, mesh: Mesh) -> Tiles:
    fitting = Fitting(mesh.num_devices)
    losses = any(text.startswith("linear_cross_entropy") for text in texts) and not has_tiles(program)
    mlps = any(text.startswith("mlp_in_tiles") for text in texts) and not has_mlp_tiles(program)
    return Tiles(
        fitting if losses and requested.loss is None else requested.loss,
        fitting if mlps and requested.mlp == AUTO else requested.mlp,
    )
