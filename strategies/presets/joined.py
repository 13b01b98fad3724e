"""Annotations of a strategy from its parts (`preset_axes.Parts`): one wish for each mesh axis, by the part that has it.

    axis of              a call's factor
    columns and rows     that of its region, or of what lies between blocks
    positions            positions; in attention heads, queries, a ring, or what the planner likes
    anything else        samples
    experts besides      at experts and both ends of their blocks the exchange of rows; elsewhere the same as without

Parameters that are stored in parts are stored over all axes except that of columns and rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.presets import preset_axes
from autopar.strategies.presets.expert_presets import at_experts, tokens_parted, whole_next_to_experts
from autopar.strategies.presets.preset_axes import Parts, Taken
from autopar.strategies.presets.sequence import HEADS, SHARED_HEADS, check_attentions, positions_wish
from autopar.strategies.presets.split import Split, Wish, data
from autopar.strategies.presets.tensor import found_regions, tensor_wish
from autopar.strategies.roles import RoledProgram


def joined(strategy: str, parts: Parts, program: Program, mesh: Mesh, strict: bool) -> tuple[Annotation, ...]:
    """Return the annotations of a strategy with these parts; raise StrategyError as `annotations_for` does."""
    parts = preset_axes.with_context(parts, mesh)
    graph, taken = RoledProgram.of(program), preset_axes.taken(strategy, parts, mesh)
    positions = _axes_of_positions(parts, taken)
    if strict:
        preset_axes.need_batch(strategy, graph.samples, mesh, taken.samples)
        if positions:
            queries = tuple(axis for axis, each in taken.positions.items() if each.attention != HEADS)
            preset_axes.need_positions(strategy, graph, mesh, positions, queries)
    check_attentions(strategy, graph, *_next_to_columns(mesh, taken), strict)
    parted = tokens_parted(strategy, graph, mesh, taken, strict) if parts.experts else {}
    wishes = _wishes(strategy, parts, graph, mesh, taken)
    wishes |= {axis: at_experts(graph, role, wishes[axis]) for axis, role in parted.items()}
    split = Split(graph, mesh, strategy)
    for axis in mesh.names:
        split.along(axis, wishes[axis])
    if parts.storage:
        split.stored_over(taken.stored, parts.storage.regather)
    return split.annotations()


def _axes_of_positions(parts: Parts, taken: Taken) -> tuple[str, ...]:
    between = (taken.tensor,) if parts.tensor and parts.tensor.between == "sequence" else ()
    return (*taken.positions, *between)


def _next_to_columns(mesh: Mesh, taken: Taken) -> tuple[Mapping[str, str], Mapping[str, int]]:
    """Return what each axis of positions splits in attention, and into how many parts: columns split heads, too."""
    ways = {axis: each.attention for axis, each in taken.positions.items()}
    parts = {axis: mesh.size(axis) for axis in ways}
    if taken.tensor:
        shared = [axis for axis, way in ways.items() if way == HEADS]
        ways |= dict.fromkeys(shared, SHARED_HEADS)
        parts |= {axis: mesh.size(axis) * mesh.size(taken.tensor) for axis in shared}
    return ways, parts


def _wishes(strategy: str, parts: Parts, graph: RoledProgram, mesh: Mesh, taken: Taken) -> dict[str, Wish]:
    """Axis → its wish, as if there were no experts on it."""
    found: dict[str, Wish] = dict.fromkeys(taken.samples, data)
    ways, counts = _next_to_columns(mesh, taken)
    found |= {axis: positions_wish(graph, way, counts[axis]) for axis, way in ways.items()}
    if parts.tensor:
        axis = taken.tensor
        regions = found_regions(strategy, graph, mesh, axis)
        found[axis] = tensor_wish(strategy, graph, regions, parts.tensor, mesh.size(axis))
        if parts.experts and axis not in taken.experts:
            found[axis] = whole_next_to_experts(strategy, graph, regions, mesh, axis, found[axis])
    return found
