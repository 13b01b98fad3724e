"""Presets that split the positions of every sequence over one axis, and differ in what attention does."""

from __future__ import annotations

from autopar.errors import StrategyError
from autopar.program.program import Program
from autopar.sharding.annotation import Annotation
from autopar.sharding.mesh import Mesh
from autopar.strategies.presets import axes
from autopar.strategies.presets.regions import LOSS, regions_of
from autopar.strategies.presets.rows import along_rows
from autopar.strategies.presets.split import Split, data
from autopar.strategies.roles import RoledCall, RoledProgram


def ulysses(program: Program, mesh: Mesh) -> tuple[Annotation, ...]:
    """Positions split, heads instead of them in attention, by all-to-all (Jacobs et al., "DeepSpeed Ulysses", 2023).

    Over an axis c of positions and an axis d of the batch; parameters are whole, except the head, which is split by
    classes where the loss flattens positions into rows:

        all_to_all/c = 4·L·(A + K)/(c·d)
        all_gather/c = A/d
        reduce_scatter/c = A/d
        all_reduce/d_c = P - H
        all_reduce/c = 3·R/d
        all_reduce/d = H/c + 16
    """
    return _sequence_split("ulysses", program, mesh, "column")


def gather_kv(program: Program, mesh: Mesh) -> tuple[Annotation, ...]:
    """Positions split, also the queries' in attention, for which keys and values are gathered (Dubey et al., "The Llama
    3 Herd", 2024).

    Over an axis c of positions and an axis d of the batch:

        all_gather/c = 2·L·K/d + A/d
        reduce_scatter/c = 2·L·K/d + A/d
        all_reduce/d_c = P - H
        all_reduce/c = 3·R/d
        all_reduce/d = H/c + 16
    """
    return _sequence_split("gather_kv", program, mesh, "sequence")


def _sequence_split(strategy: str, program: Program, mesh: Mesh, in_attention: str) -> tuple[Annotation, ...]:
    graph = RoledProgram.of(program)
    sequence = axes.axis_of(mesh, axes.SEQUENCE)
    batch = axes.others(mesh, sequence)
    axes.need_batch(strategy, graph.samples, mesh, batch)
    axes.need_positions(strategy, graph, mesh, sequence)
    attentions = [call for call in graph.learned if call.is_attention]
    if not attentions:
        raise StrategyError(f"{strategy}: no attention in this model. Use megatron_sequence, or split the batch.")
    for call in attentions:
        _check_attention(strategy, call, in_attention, mesh, sequence)
    classes = _class_factors(graph, mesh.size(sequence))

    def wish(call: RoledCall) -> str | None:
        if call.name in classes:
            return classes[call.name]
        return call.factor_of(in_attention if call.is_attention else "sequence")

    split = Split(graph, mesh, strategy)
    for axis in mesh.names:
        split.along(axis, along_rows(graph, wish) if axis == sequence else data)
    return split.annotations()


def _check_attention(strategy: str, call: RoledCall, role: str, mesh: Mesh, axis: str) -> None:
    """Raise StrategyError where a call cannot be split by its heads, or by its queries."""
    what = "heads" if role == "column" else "queries"
    factor = call.factor_of(role)
    if factor is None:
        raise StrategyError(
            f"{strategy} splits the {what} of attention over {axis}; {call.name} has none. "
            f"Use {'ulysses' if role == 'sequence' else 'gather_kv'} or megatron_sequence."
        )
    if call.bound.sizes[factor] % mesh.size(axis):
        raise StrategyError(
            f"{strategy} splits the {what} of attention into {mesh.size(axis)} parts over {axis}; {call.name} has "
            f"{call.bound.sizes[factor]} of them{' (of keys and values)' if what == 'heads' else ''}. "
            "Use an axis whose size divides them."
        )


def _class_factors(graph: RoledProgram, parts: int) -> dict[str, str]:
    """The factors of the calls that make a loss whose rows are no positions any more, split by classes.

    A loss over (batch, positions) flattened to rows cannot keep the positions split, unless the batch is one sample:
    its classes are split instead, from the product that makes the logits on.
    """
    regions = regions_of(graph, parts)
    losses = [graph.calls[name] for name in regions.names(LOSS)]
    if not losses or all(call.factor_of("sequence") for call in losses):
        return {}
    return {name: regions.factors[name] for name in regions.heads}
