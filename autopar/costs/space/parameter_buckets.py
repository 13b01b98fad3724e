"""Buckets of parameters that move together: those that take the same kind of path, in the order of their first use.

Gradient reductions (I → R) are gathered into few buckets at the graph's entry. The backward thus reduces a bucket as
soon as its last gradient is there. Gathers (S → R) form one bucket per layer, right before use. A small layer
shares the bucket of the next one (`costs.pricing.message_sizes.joined_layers`). A large weight that need not be copied
out of a message is a bucket by itself (`costs.pricing.message_sizes.gathered_alone`).

The gradients of a bucket are copied into one message. A large parameter is a bucket by itself: if its gradient belongs
to it alone, as that of a matrix product does, it is reduced in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.costs.pricing.message_sizes import gathered_alone, joined_layers, layers_read, messages
from autopar.costs.pricing.moves import is_gather, makes_parts
from autopar.costs.pricing.reshard import ReshardPath
from autopar.costs.space.space import Decision, Space, TensorEdge
from autopar.ir.program.program import info_of
from autopar.ir.sharding.layout import I, Layout, R
from autopar.ir.sharding.mesh import joined_name

PRODUCTS = frozenset(("linear", "mm", "matmul", "bmm", "conv1d", "conv2d", "conv3d", "convolution"))

REDUCTIONS = frozenset(("all_reduce", "reduce_scatter"))
MOST_RUNNING = 2  # messages of gradients: each holds what it sends until it is waited for

End = tuple[int, int]
"""(decision, input position) where an edge ends."""


@dataclass(frozen=True, slots=True)
class BucketMove:
    """The move number `number` of every path in a bucket."""

    number: int
    axis: str
    """The axis, or joined ones."""
    gathers: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are moved together. The first five tuples run in parallel."""

    sources: tuple[int, ...]
    ends: tuple[End, ...]
    paths: tuple[ReshardPath, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    steps: tuple[BucketMove, ...]
    regathered: tuple[int, ...]
    """Positions of those that are freed after use and gathered again in the backward."""
    in_place: bool
    """True if the bucket is one parameter whose gradient may be overwritten."""
    reduced: torch.dtype | None
    """The dtype in which gradients are summed, where it is not their own."""
    layer: str
    """The layer whose weights it gathers; "" where it gathers none."""

    @property
    def at_entry(self) -> bool:
        """True if the bucket only reduces gradients; such buckets open the graph, so that they close its backward."""
        return not any(step.gathers for step in self.steps)


@dataclass(frozen=True, slots=True)
class _Member:
    edge: TensorEdge
    path: ReshardPath
    steps: tuple[BucketMove, ...]
    regather: bool
    layer: str


def buckets_of(space: Space, choices: Sequence[int]) -> tuple[Bucket, ...]:
    """Return every bucket of a plan."""
    groups: dict[object, list[_Member]] = {}
    layers, first_uses = _layers(space), _first_uses(space)
    for edge in sorted(space.edges, key=lambda edge: first_uses.get(edge.target, edge.target)):
        if not space.is_weight(edge.source):
            continue
        path = space.path(edge, choices)
        steps = _steps(space, edge, path)
        if steps:
            gathers = any(step.gathers for step in steps)
            member = _Member(edge, path, steps, any(path.regathered), _layer(space, edge, layers) if gathers else "")
            key = (steps, edge.tensor.requires_grad, member.layer, edge.tensor.reduced)
            groups.setdefault(key, []).append(member)
    return tuple(bucket for group in groups.values() for bucket in _closed(space, group))


def axes_apart(backward: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the axes with a communicator of their own for weights that are gathered ahead, by the collectives and
    axes of the backward.

    Those over which it reduces gradients, or activations, too.
    """
    moved = set(backward)
    axes = {axis for collective, axis in moved if collective in REDUCTIONS}
    return tuple(sorted(axis for axis in axes if ("all_gather", axis) in moved))


def _steps(space: Space, edge: TensorEdge, path: ReshardPath) -> tuple[BucketMove, ...]:
    """Return the steps of a path that a bucket can take; none where the path has a move of another kind.

    Moves at the end that make parts of a sum are left to each parameter.
    """
    steps, moves = [], list(path.moves)
    while moves and makes_parts(moves[-1]):
        moves.pop()
    for number, move in enumerate(moves):
        gathers = is_gather(move, edge.tensor)
        reduces = move.source is I and move.target is R
        if not (gathers or reduces):
            return ()
        if move.num_parts(space.mesh.sizes) > 1:
            steps.append(BucketMove(number, joined_name(space.mesh.names, move.axes), gathers))
    return tuple(steps)


def _closed(space: Space, members: Sequence[_Member]) -> list[Bucket]:
    """Cut a group into buckets; gathers stay one bucket per layer, but for weights that are gathered alone."""

    def num_bytes(member: _Member) -> int:
        return member.edge.tensor.local_bytes(member.path.moves[-1].after, space.mesh.sizes)

    gathers = any(step.gathers for step in members[0].steps)
    if gathers:
        alone = [m for m in members if _is_alone(space, m, num_bytes(m))]
        shared = [m for m in members if m not in alone]
        return [_bucket(space, each) for each in ([shared] if shared else []) + [[m] for m in alone]]
    together = messages([num_bytes(member) for member in members])
    return [_bucket(space, [members[number] for number in numbers]) for numbers in together]


def _is_alone(space: Space, member: _Member, num_bytes: int) -> bool:
    moves = member.path.moves
    return gathered_alone(moves[0].before, moves[-1].after, num_bytes, space.mesh, space.hardware)


def _bucket(space: Space, members: Sequence[_Member]) -> Bucket:
    return Bucket(
        sources=tuple(m.edge.source for m in members),
        ends=tuple((m.edge.target, m.edge.target_input) for m in members),
        paths=tuple(m.path for m in members),
        shapes=tuple(m.edge.tensor.shape for m in members),
        layouts=tuple(m.path.moves[0].before for m in members),
        steps=members[0].steps,
        regathered=tuple(position for position, member in enumerate(members) if member.regather),
        in_place=len(members) == 1 and _makes_its_gradient(space.decisions[members[0].edge.target], members[0].edge),
        reduced=members[0].edge.tensor.reduced,
        layer=members[0].layer,
    )


def late_casts(space: Space, buckets: Sequence[Bucket]) -> dict[int, torch.dtype]:
    """Map decisions to the dtypes of casts in buckets that wait for the first gather, or for the end of the bucket.

    They do where gradients are summed as the weight is stored: the sums are not rounded to the dtype of its use.
    """
    found: dict[int, torch.dtype] = {}
    uses = Counter(edge.source for edge in space.edges)
    for bucket in buckets:
        for source in bucket.sources:
            decision = space.decisions[source]
            if decision.name in space.weight_casts and uses[source] == 1:
                edge = space.inbound[source, 0]
                if edge.tensor.dtype == bucket.reduced:
                    found[source] = info_of(decision.node).dtype
    return found


def _makes_its_gradient(target: Decision, edge: TensorEdge) -> bool:
    """Return whether the gradient that the call gives to the edge is a new tensor.

    It is for a product of matrices; other calls may pass on the gradient that came in.
    """
    is_product = target.kind == "call" and getattr(target.node.target, "_opname", "") in PRODUCTS
    return is_product and len(edge.tensor.shape) > 1  # a bias may get the gradient that came in


def _first_uses(space: Space) -> dict[int, int]:
    """Return the position of the first call that uses each shared reshard, through others."""
    found: dict[int, int] = {}
    for edge in reversed(space.edges):  # the edges out of a shared reshard lie behind the one into it
        if space.decisions[edge.source].kind == "shared_reshard":
            use = found.get(edge.target, edge.target)
            found[edge.source] = min(use, found.get(edge.source, use))
    return found


def _layers(space: Space) -> dict[str, str]:
    """Return the layer in whose message each parameter, by its placeholder, is gathered."""
    joined = joined_layers(space.program)
    return {placeholder: joined[layer] for placeholder, layer in layers_read(space.program).items()}


def _layer(space: Space, edge: TensorEdge, layers: Mapping[str, str]) -> str:
    source = space.decisions[edge.source].name
    return layers[space.weight_casts.get(source, source)]
