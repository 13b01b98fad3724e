"""The blocks of a model that is to be cut: what they take by the best plan of the whole, and where they may stand."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.plan import Plan
from autopar.costs.space.narrowed import Pins, narrowed
from autopar.costs.space.space import Space
from autopar.costs.space.zigzag_axes import possible_zigzag_axes, zigzag_axes_of
from autopar.ir.sharding.layout import Layout
from autopar.planning.annotations.pins import pins_of
from autopar.planning.options.groups import Memory
from autopar.planning.pipeline.block_costs import PlannedWhole, block_costs, boundary_layout, cut_seconds
from autopar.planning.pipeline.request import PipelineRequest
from autopar.planning.pipeline.stages.blocks import Block, blocks_of
from autopar.planning.pipeline.stages.cuts import BlockCost
from autopar.planning.pipeline.stages.pins import allowed
from autopar.planning.planner import make_plan
from autopar.planning.settings import Activations, Settings


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBlocks:
    """Blocks, the plan of the whole model on the devices of one stage, without a memory limit, and its pins."""

    request: PipelineRequest
    blocks: tuple[Block, ...]
    whole: PlannedWhole
    """In the space that pins leave."""
    space: Space
    """The space of the whole model before pins narrowed it."""
    specified: Pins
    """The user's pins on that space."""
    pins: Pins
    """The same, restricted to the strategies that are looked at."""
    costs: tuple[BlockCost, ...]
    cut_seconds: tuple[float, ...]
    nodes: Mapping[str, fx.Node]
    """The nodes of the whole model by name, which they keep in stages."""

    def boundary(self, name: str) -> Layout:
        """Return the layout in which a value goes from stage to stage."""
        return boundary_layout(self.whole, self.nodes[name])

    def places(self) -> dict[int, int]:
        """Return block → its stage, if the user specified it or its parameters were assigned before."""
        requested = self.request
        ranges = allowed(
            self.blocks, requested.annotations, requested.wanted.pipeline.split_points, requested.schedule.num_stages
        )
        specified = {block: stages[0] for block, stages in enumerate(ranges) if len(stages) == 1}
        return specified | _held_already(requested, self.blocks)


def planned_blocks(request: PipelineRequest, at_least: int) -> PlannedBlocks:
    """Plan the whole model, and count for each of at least so many blocks what it takes."""
    request.wanted.optimizer.check_microbatches(request.num_microbatches)
    blocks = blocks_of(request.program, at_least)
    settings, count = request.settings, request.num_microbatches
    schedule = request.schedule
    runs = Microbatches(
        count,
        reduce_each=request.wanted.reduces_each,
        stashes=schedule.updates_each,
        saves_older=schedule.delays_updates,
    )
    recompute = settings.memory.recompute
    activations: Activations = (
        "offloaded" if settings.activations == "offloaded" else "on_device"
    )  # nothing else needs a limit
    alone = Settings(
        Memory(recompute="none" if recompute == "auto" else recompute),
        replace(settings.search, gap=None),
        activations=activations,
        offloaded=settings.offloaded,
    )

    def planned(space: Space, pins: Pins) -> tuple[Plan, tuple[int, ...], Space]:
        left, others = narrowed(space, pins)
        plan, choices = make_plan(left, others, alone, runs)
        return plan, choices, left

    space, specified, pins = _pinned(request)
    if possible := possible_zigzag_axes(space, pins):
        space, specified, pins = _pinned(request, possible)
    plan, choices, left = planned(space, pins)
    needed = zigzag_axes_of(left, choices)
    if needed < set(space.zigzag_axes):
        space, specified, pins = _pinned(request, needed)
        plan, choices, left = planned(space, pins)
    request = replace(request, zigzag_axes=space.zigzag_axes)
    whole = PlannedWhole(MemoryModel(left, runs, offloads=activations == "offloaded"), choices, plan.recompute)
    sent = cut_seconds(whole, blocks, request.mesh, request.axis, request.hardware)
    nodes = {node.name: node for node in request.program.graph.nodes}
    return PlannedBlocks(request, blocks, whole, space, specified, pins, block_costs(whole, blocks), sent, nodes)


def _restricted_pins(request: PipelineRequest, space: Space, pins: Pins) -> Pins:
    """Return the pins that leave the strategies that are looked at, where these are offered and pins allow them."""
    found = dict(pins)
    for number, decision in enumerate(space.decisions):
        names = request.strategies.get(decision.name)
        if names is None:
            continue
        mask = np.array([str(each) in names for each in decision.candidates.strategies]) & pins.get(number, True)
        if mask.any():
            found[number] = mask
    return found


def _pinned(request: PipelineRequest, zigzag_axes: Collection[str] = ()) -> tuple[Space, Pins, Pins]:
    """Return the whole model's space in which these axes zigzag-shard positions, the user's pins, and these restricted
    to what is looked at; warn only once.
    """
    space = replace(request, zigzag_axes=tuple(zigzag_axes)).space(request.program, {})
    with warnings.catch_warnings():
        if zigzag_axes:
            warnings.simplefilter("ignore")
        specified = pins_of(request.annotations, space, request.wanted.mode, request.storage)
        return space, specified, _restricted_pins(request, space, specified)


def _held_already(request: PipelineRequest, blocks: tuple[Block, ...]) -> dict[int, int]:
    program, owners = request.program, request.owners
    names = {placeholder: name for name, placeholder in (*program.parameters.items(), *program.buffers.items())}
    found: dict[int, int] = {}
    for number, block in enumerate(blocks):
        taken = {node.name for call in block.nodes for node in call.all_input_nodes}
        used = {names[each] for each in taken if each in names}
        held = [set(owners[name]) for name in used if name in owners]
        common = set.intersection(*held) if held else set()
        if len(common) == 1:
            found[number] = common.pop()
    return found
