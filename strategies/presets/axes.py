"""Which mesh axes a preset uses: those with a telling name, else by position.

tensor      "tp", "tensor", "mp" or "model", else the last axis
sequence    "sp", "cp", "seq", "sequence" or "context", else the last axis
expert      "ep", "expert" or "experts", else the last axis that is not the tensor axis
shard       "fsdp", "shard" or "zero", else the last axis
data        all the others
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import StrategyError
from autopar.sharding.mesh import Mesh
from autopar.strategies.roles import RoledProgram
from autopar.strategies.zigzag import dealt, later_see_more

TENSOR = ("tp", "tensor", "mp", "model")
SEQUENCE = ("sp", "cp", "seq", "sequence", "context")
EXPERT = ("ep", "expert", "experts")
SHARD = ("fsdp", "shard", "zero")


def axis_of(mesh: Mesh, names: tuple[str, ...]) -> str:
    """The axis with one of these names, else the last."""
    return next((axis for axis in mesh.names if axis in names), mesh.names[-1])


def others(mesh: Mesh, *axes: str) -> tuple[str, ...]:
    """The axes that are none of these."""
    return tuple(axis for axis in mesh.names if axis not in axes)


def need_axes(strategy: str, mesh: Mesh, count: int, what: str) -> None:
    """Raise StrategyError where the mesh has fewer axes than the preset needs."""
    if mesh.ndim < count:
        raise StrategyError(
            f"{strategy} needs {count} mesh axes, {what}; the mesh is {mesh}. "
            "Split an axis in two, or use a preset for fewer axes."
        )


def need_exactly(strategy: str, mesh: Mesh, count: int, what: str) -> None:
    """Raise StrategyError where the mesh has more or fewer axes than the preset uses."""
    need_axes(strategy, mesh, count, what)
    if mesh.ndim > count:
        raise StrategyError(
            f"{strategy} needs exactly {count} mesh axes, {what}; the mesh is {mesh}. Join axes of the mesh into one."
        )


def need_positions(strategy: str, graph: RoledProgram, mesh: Mesh, axes: Sequence[str]) -> None:
    """Raise StrategyError where no input has a dim of positions, or these do not divide over the axes."""
    given = {
        name: graph.infos[name, 0] for name in graph.program.inputs if name is not None and (name, 0) in graph.infos
    }
    if not graph.positions:
        found = ", ".join(map(str, given.values())) or "none"
        raise StrategyError(
            f"{strategy} splits the positions of a sequence along dim 1 of an input, token ids [batch, positions] or "
            f"embedded tokens [batch, positions, features]; the inputs are {found}. Positions that the model makes "
            "itself, as a vision transformer its patches, are not split: embed them outside the model, or use another "
            "preset."
        )
    parts = math.prod(map(mesh.size, axes))
    if graph.positions % (2 * parts) == 0:
        return
    rising = any(map(later_see_more, graph.calls.values()))
    wanted = 2 * parts if rising else parts
    pad = f"Pad the sequences to {-(-graph.positions // wanted) * wanted}, {_hidden(graph)}"
    if graph.positions % parts:
        source = next(info for name, info in given.items() if "sequence" in graph.dims[name, 0])
        dealt_too = f", and of {wanted} for causal attention to deal them by zigzag" if rising else ""
        raise StrategyError(
            f"{strategy} splits the positions of a sequence into {parts} parts over {', '.join(axes)}; found "
            f"{graph.positions} positions, if dim 1 of the input {source} is that of positions, and needed is a "
            f"multiple of {parts}{dealt_too}. {pad}, or use an axis whose size divides them; where another dim is "
            "meant, as that of points in [batch, channels, points], use another preset."
        )
    if graph.positions % wanted and len(axes) > 1 and _is_dealt(graph, mesh):
        raise StrategyError(
            f"{strategy} splits positions over {', '.join(axes)}, and causal attention deals them by zigzag, two "
            f"pieces to each of {parts} devices; found {graph.positions} positions, and needed is a multiple of "
            f"{wanted}. {pad}, or use smaller axes."
        )


def _hidden(graph: RoledProgram) -> str:
    """How a model is to be told of padding."""
    causal = all(later_see_more(call) for call in graph.calls.values() if call.is_attention)
    ignored = "with labels that the loss ignores"
    return ignored if causal else f"{ignored} and a mask where attention is not causal"


def _is_dealt(graph: RoledProgram, mesh: Mesh) -> bool:
    """Whether positions of some attention are dealt by zigzag, as they divide over single axes."""
    found = dealt(graph, mesh.sizes)
    return any(found.of((call.name, 0)) for call in graph.calls.values() if later_see_more(call))


def need_batch(strategy: str, samples: int, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Raise StrategyError where the batch does not divide over the axes that are to split it."""
    parts = 1
    for axis in axes:
        parts *= mesh.size(axis)
    if parts > 1 and (samples == 0 or samples % parts):
        raise StrategyError(
            f"{strategy} splits the batch into {parts} parts over {', '.join(axes)}; found a batch of {samples}. "
            f"Use a batch that {parts} divides, or smaller axes."
        )
