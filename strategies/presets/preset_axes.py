"""Dims that a preset splits besides samples, and their mesh axes: by a telling name, else by position.

tensor      "tp", "tensor", "mp" or "model", else the last axis
sequence    "sp", "cp", "seq", "sequence" or "context", else the last axis
expert      "ep", "expert" or "experts", else the last axis that is not the tensor axis
shard       "fsdp", "shard" or "zero", else the last axis
data        all the others

Next to an axis with a name for columns, an axis "cp" or "context" has positions, as in Megatron-LM, though no part of
the strategy says so.

No part of a strategy of several parts, as "fsdp+tp+cp", takes an axis whose name tells of another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.console.names import JOINED
from autopar.errors import StrategyError
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.roles import RoledProgram
from autopar.strategies.zigzag import later_see_more, zigzag_dims

TENSOR = ("tp", "tensor", "mp", "model")
SEQUENCE = ("sp", "cp", "seq", "sequence", "context")
CONTEXT = ("cp", "context")
EXPERT = ("ep", "expert", "experts")
SHARD = ("fsdp", "shard", "zero", "dp_shard")
DATA = ("dp", "ddp", "data", "replica", "replicate", "dp_replicate")
STATED_ONCE = {
    "tensor": "what the axis of columns and rows splits between blocks, or how its products run",
    "experts": "which axes have the experts",
    "storage": "how parameters are stored",
}
TELLING = frozenset((*TENSOR, *SEQUENCE, *EXPERT, *SHARD, *DATA))


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns and rows of matrix products over one axis."""

    between: str = ""
    """The role of what the axis splits between blocks; "" for none."""
    products: str = ""
    """The implementation of products between split positions; "" for the plain one."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions over one axis."""

    attention: str
    """Role of the dim that the axis splits in attention (`sequence.py`); "" leaves it to the planner."""
    names: tuple[str, ...] = SEQUENCE
    """The names of axes that tell of it."""
    what: str = "positions"


@dataclass(frozen=True, slots=True)
class Storage:
    """Parameters stored in parts (ZeRO)."""

    regather: bool
    """True if the backward gathers again what the forward has gathered."""
    replicas: bool = False
    """True if some axis has whole copies of what another one stores in parts."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the work that a strategy splits besides samples, which all remaining axes split."""

    tensor: Columns | None = None
    positions: tuple[Positions, ...] = ()
    experts: Literal["", "exchanged", "folded"] = ""
    """Experts over an axis of their own, or over the axes of attention."""
    storage: Storage | None = None
    left: bool | None = None
    """True if an axis must be left for samples (True), or none may be (False)."""

    def joined(self, other: Parts, strategy: str) -> Parts:
        """Return what both split; raise StrategyError if they contradict each other.

        Plain columns give way to those with something split between blocks.
        """
        found: dict[str, object] = {"positions": tuple(dict.fromkeys((*self.positions, *other.positions)))}
        for name, what in STATED_ONCE.items():
            both = [each for each in (getattr(self, name), getattr(other, name)) if each]
            telling = {each for each in both if each != Columns()} or set(both)
            if len(telling) > 1:
                raise StrategyError(f"{strategy}: two of its parts say {what}. Leave one of them out.")
            found |= {name: telling.pop()} if telling else {}
        return dataclasses.replace(self, **found, left=None)  # type: ignore[arg-type]

    @property
    def needs(self) -> list[str]:
        """Purposes that each need a mesh axis of their own, as texts for errors."""
        found = ["for the batch"] if self.left else []
        found += ["to replicate over"] if self.storage and self.storage.replicas else []
        if self.storage and (self.storage.replicas or (self.tensor and not self.positions and not self.experts)):
            found.append("to store parameters over")
        found += ["for experts"] if self.experts == "exchanged" else []
        found += [f"for {each.what}" for each in self.positions]
        return [*found, "for columns and rows"] if self.tensor else found


@dataclass(frozen=True, slots=True)
class Taken:
    """The mesh axes that each part of a strategy has."""

    tensor: str
    """"" for none."""
    positions: Mapping[str, Positions]
    experts: tuple[str, ...]
    stored: tuple[str, ...]
    samples: tuple[str, ...]
    """The axes that split the batch: those of experts among them that do nothing else there."""


def with_context(parts: Parts, mesh: Mesh) -> Parts:
    """Return the parts with positions over the mesh's context-parallel axis, if it has one besides columns."""
    columns = parts.tensor is not None and any(axis in TENSOR for axis in mesh.names)
    if not columns or parts.positions or not any(axis in CONTEXT for axis in mesh.names):
        return parts
    return dataclasses.replace(parts, positions=(Positions("", CONTEXT),))


def taken(strategy: str, parts: Parts, mesh: Mesh) -> Taken:
    """Return the axes of each part; raise StrategyError if the mesh has not as many, or not of these names."""
    needs = parts.needs
    what = f"one {', one '.join(needs[:-1])} and one {needs[-1]}" if len(needs) > 1 else ""
    (need_exactly if parts.left is False else need_axes)(strategy, mesh, len(needs), what)
    claims: list[tuple[object, str, tuple[str, ...]]] = []
    claims += [("tensor", "columns and rows", TENSOR)] if parts.tensor else []
    claims += [("experts", "experts", EXPERT)] if parts.experts == "exchanged" else []
    claims += [(each, each.what, each.names) for each in parts.positions]
    claims += [("shard", "the parts of parameters", SHARD)] if parts.storage and parts.storage.replicas else []
    found: dict[object, str] = {}
    for claim, _, names in claims:
        named = next((axis for axis in mesh.names if axis in names and axis not in found.values()), None)
        found |= {claim: named} if named else {}
    # An axis for experts that share those of attention is none for columns and rows.
    apart = set(EXPERT) if parts.experts == "folded" and mesh.ndim > 1 else set()
    for claim, what, names in claims:
        if claim not in found:
            others = TELLING - set(names) if JOINED in strategy else apart
            free = [axis for axis in mesh.names if axis not in found.values() and axis not in others]
            if not free:
                raise StrategyError(
                    f"{strategy} needs a mesh axis for {what}, called {' or '.join(names)}; the mesh is {mesh}. "
                    "Rename one of its axes, split one in two, or leave this part of the strategy out."
                )
            found[claim] = free[-1]
    return _shared(parts, mesh, found)


def _shared(parts: Parts, mesh: Mesh, found: Mapping[object, str]) -> Taken:
    """The same with the axes of experts and of parameters, which other parts have, too."""
    tensor = found.get("tensor", "")
    by_axis = {found[each]: each for each in parts.positions}
    positions = {axis: by_axis[axis] for axis in mesh.names if axis in by_axis}
    experts = (found["experts"],) if "experts" in found else ()
    if parts.experts == "folded":
        named = any(axis in EXPERT for axis in mesh.names)
        experts = tuple(axis for axis in mesh.names if not named or axis in EXPERT or axis == tensor)
    stored = others(mesh, tensor) if parts.storage else ()
    if parts.storage and parts.storage.replicas:
        stored = tuple(axis for axis in mesh.names if axis == found["shard"] or axis in positions)
    return Taken(tensor, positions, experts, stored, others(mesh, tensor, *positions))


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


def need_positions(strategy: str, graph: RoledProgram, mesh: Mesh, axes: Sequence[str], queries: Sequence[str]) -> None:
    """Raise StrategyError where no input has a dim of positions, or these do not divide over the axes.

    Over the axes of `queries` attention may divide its queries.
    """
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
    rising = bool(queries) and any(map(later_see_more, graph.calls.values()))
    wanted = 2 * parts if rising else parts
    pad = f"Pad the sequences to {-(-graph.positions // wanted) * wanted}, {_hidden(graph)}"
    if graph.positions % parts:
        source = next(info for name, info in given.items() if "sequence" in graph.dims[name, 0])
        zigzag_too = f", and of {wanted} for causal attention to zigzag-shard them" if rising else ""
        raise StrategyError(
            f"{strategy} splits the positions of a sequence into {parts} parts over {', '.join(axes)}; found "
            f"{graph.positions} positions, if dim 1 of the input {source} is that of positions, and needed is a "
            f"multiple of {parts}{zigzag_too}. {pad}, or use an axis whose size divides them; where another dim is "
            "meant, as that of points in [batch, channels, points], use another preset."
        )
    if graph.positions % wanted and len(axes) > 1 and _is_zigzag(graph, mesh, queries):
        raise StrategyError(
            f"{strategy} splits positions over {', '.join(axes)}, and causal attention zigzag-shards them, two "
            f"chunks on each of {parts} devices; found {graph.positions} positions, and needed is a multiple of "
            f"{wanted}. {pad}, or use smaller axes."
        )


def _hidden(graph: RoledProgram) -> str:
    """Return how padding can be hidden from a model, as text for errors."""
    causal = all(later_see_more(call) for call in graph.calls.values() if call.is_attention)
    ignored = "with labels that the loss ignores"
    return ignored if causal else f"{ignored} and a mask where attention is not causal"


def _is_zigzag(graph: RoledProgram, mesh: Mesh, axes: Sequence[str]) -> bool:
    """Return True if positions of some attention are zigzag-sharded over axes, as they divide over single ones."""
    found = zigzag_dims(graph, [mesh.size(axis) for axis in axes])
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
