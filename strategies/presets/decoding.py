"""Presets for generation with a cache of keys and values."""

from __future__ import annotations

from autopar.errors import StrategyError
from autopar.ir.program.operators.attention.cached import CACHED_ATTENTION, WRITE_CACHE
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.presets import preset_axes
from autopar.strategies.presets.split import Split, data
from autopar.strategies.roles import RoledProgram

POSITIONS = "t"


def flash_decoding(program: Program, mesh: Mesh, strict: bool = True) -> tuple[Annotation, ...]:
    """Positions of the cache over one axis, the batch over the others ("Flash-Decoding", Dao et al., 2023).

    Each device attends to its part of the cache, and results are merged by their log-sum-exp. Each layer moves the
    output of attention for one token a sample, and two float32 numbers for each head. The planner decides what the axis
    splits of matmuls, weights and a prompt's tokens.
    """
    graph = RoledProgram.of(program)
    positions = preset_axes.axis_of(mesh, preset_axes.SEQUENCE)
    batch = preset_axes.others(mesh, positions)
    cached = [call for call in graph.learned if call.call.target in (CACHED_ATTENTION, WRITE_CACHE)]
    if not cached:
        raise StrategyError(
            "flash_decoding divides the positions of a cache of keys and values; found a forward without one. It is "
            "for generate, of a model compiled with training=False; ring and ulysses divide positions in training."
        )
    if strict:
        preset_axes.need_batch("flash_decoding", graph.samples, mesh, batch)
    split = Split(graph, mesh, "flash_decoding")
    for axis in batch:
        split.along(axis, data)
    for call in cached:
        size = call.bound.sizes[POSITIONS]
        if size % mesh.size(positions):
            raise StrategyError(
                f"flash_decoding divides the positions of a cache into {mesh.size(positions)} parts over {positions}; "
                f"found a cache of {size}. Give Buckets(lengths=…) whose lengths the axis divides."
            )
        split.factors[call.name][positions] = POSITIONS
    return split.annotations()
