"""What the devices of one stage make of a micro-batch: plans of a shorter model, by how its parameters are stored.

The shorter model is planned without a memory limit: as it is fastest, and where that takes too much, with parameters
in as small parts as they are offered,

    free       whatever is fastest
    kept       gathered once a step, and their gradients reduced once (ZeRO-1)
    gathered   gathered again for every backward (ZeRO-3)

and those that are kept also with gradients reduced by every micro-batch (ZeRO-2), as those that are gathered are in any
case. What recomputation costs and saves follows from the choices of each: nothing is searched for again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.annotations.pins import pins_of
from autopar.arranging.block_use import BlockUse, block_use
from autopar.arranging.shortened import Shortened
from autopar.memory.microbatches import Microbatches
from autopar.planning.formulation import Pins
from autopar.planning.planner import Statements, solved_by
from autopar.planning.request import PlanRequest
from autopar.program.recompute_segments import RECOMPUTATIONS
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh
from autopar.solver.deadline import seconds_until
from autopar.space.space import Space

FREE, KEPT, GATHERED = "free", "kept", "gathered"


@dataclass(slots=True)
class Inner:
    """Plans of a shorter model on the devices of a stage, made as they are asked for."""

    request: PlanRequest
    short: Shortened
    mesh: Mesh
    """Of a stage."""
    num_devices: int
    """Of all stages."""
    microbatches: int
    arriving: Mapping[str, Layout]
    deadline: float
    _space: Space | None = None
    _pins: Pins = field(default_factory=dict)
    _stated: Statements | None = None
    _uses: dict[tuple[str, bool], tuple[BlockUse, ...]] = field(default_factory=dict)

    def uses(self, limited: bool) -> Iterator[tuple[BlockUse, ...]]:
        """Yield what blocks take by each plan, in every mode of recomputation, the fastest without a limit first.

        If memory is not `limited`, that is the only one.
        """
        first = FREE, self.request.reduces_each and self.microbatches > 1
        yield self._of(*first, limited)
        further = [(KEPT, False), (KEPT, True), (GATHERED, False)] if limited else []
        for storage, reduces_each in further:
            if self.microbatches > 1 or not reduces_each:
                yield self._of(storage, reduces_each, limited)

    def _of(self, storage: str, reduces_each: bool, limited: bool) -> tuple[BlockUse, ...]:
        key = storage, reduces_each
        if key not in self._uses:
            self._uses[key] = self._planned(storage, reduces_each, limited)
        return self._uses[key]

    def _planned(self, storage: str, reduces_each: bool, limited: bool) -> tuple[BlockUse, ...]:
        space, pins = self._laid_out()
        pins = pins if storage == FREE else stored_in_parts(space, pins, kept=storage == KEPT)
        runs = Microbatches(
            self.microbatches,
            reduce_each=reduces_each,
            main_gradients=self.request.memory_conventions.main_gradients and self.request.training,
        )
        asked = self.request.settings
        modes = RECOMPUTATIONS if asked.recompute == "auto" else (asked.recompute,)
        settings = replace(
            asked.for_tensors(None),
            recompute="none" if asked.recompute == "auto" else asked.recompute,
            time_limit=seconds_until(self.deadline),
        )
        assert self._stated is not None
        found = solved_by(self._stated.of(settings, runs), pins, settings)
        memory, choices = found.formulation.memory, found.answer.choices
        if not memory.weights.gathers(choices):
            memory = memory.fetching_ahead(0)
        is_whole = self.mesh.num_devices == self.num_devices
        return tuple(
            block_use(self.short, memory, choices, dict.fromkeys(memory.lifetimes.segments, mode), is_whole)
            for mode in (modes if limited else modes[:1])
        )

    def _laid_out(self) -> tuple[Space, Pins]:
        if self._space is None:
            program = self.short.program
            here = program.placeholders()
            arriving = {name: each for name, each in self.arriving.items() if name in here}
            self._space = self.request.space(program, self.mesh, arriving, num_devices=self.num_devices)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what there is to say is said of the whole model
                said = self.request.annotations_about(program, self.mesh)
                self._pins = pins_of(said, self._space, self.request.mode, {})
            self._stated = Statements(self._space)
        return self._space, self._pins


def stored_in_parts(space: Space, pins: Pins, kept: bool) -> Pins:
    """Return the pins with parameters in as small parts as are offered, gathered once a step if `kept`."""
    found = dict(pins)
    for number, decision in enumerate(space.decisions):
        info = decision.node.meta.get("tensor") if decision.kind == "parameter" else None
        if info is None:
            continue
        strategies = decision.menu.strategies
        sizes = np.array([_elements(info.shape, each.outputs[0], space.mesh.sizes) for each in strategies], dtype=float)
        allowed = pins.get(number, np.ones(len(strategies), dtype=bool))
        least = allowed & (sizes <= sizes[allowed].min())
        asked = least & np.array([each.kept == kept or not each.outputs[0].is_split for each in strategies])
        found[number] = asked if asked.any() else least
    return found


def _elements(shape: Sequence[int], layout: Layout, sizes: tuple[int, ...]) -> float:
    return float(np.prod(layout.local_shape(tuple(shape), sizes), dtype=float))
