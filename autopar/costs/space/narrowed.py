"""The space that pins leave, and a smaller one where the problem would still be too large."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.costs.space.space import Decision, Space
from autopar.ir.sharding.layout import Layout, Placement
from autopar.ir.sharding.mesh import Mesh

Pins = Mapping[int, np.ndarray]
"""Decision → which of its strategies are allowed."""
MAX_ENTRIES = 1 << 21  # pairs of strategies at the ends of an edge: 16 MB for their seconds


def narrowed(space: Space, pins: Pins) -> tuple[Space, Pins]:
    """Return the space of the strategies that pins leave, and the pins that still exclude some there.

    Presets on several axes leave one strategy of hundreds, and less than a thousandth of the entries of edges. If more
    than half of these are left, the space stays, so that what is computed of it serves plans under other pins. If an
    edge still has more entries than are worked on at once, shared reshards lose placements that no end of theirs has.
    If that is not enough, neighbouring axes choose alike, those of the fewest devices first.
    """
    masks = {number: mask for number, mask in pins.items() if mask.any()}
    kept = {number: mask for number, mask in masks.items() if not mask.all()}
    found = space.keeping(kept)
    if is_large(found):
        limited, pairs = _of_shared_reshards(space, kept), _neighbours(space.mesh)
        for count in range(len(pairs) + 1):
            limited = {**limited, **_choosing_alike(space, kept, pairs[:count])}
            found = space.keeping({**kept, **limited}, limited)
            if not is_large(found):
                break
    elif 2 * sum(found.entries) > sum(space.entries):
        return space, pins
    return found, {number: mask for number, mask in pins.items() if number not in masks}


def is_large(space: Space) -> bool:
    """Return whether an edge has more entries than are worked on at once."""
    return max(space.entries, default=0) > MAX_ENTRIES


def notes_on_narrowing(space: Space) -> tuple[str, ...]:
    """Return a note if decisions lose strategies that no pin excludes (`narrowed`)."""
    if not space.limited:
        return ()
    calls = [each for number, each in enumerate(space.decisions) if number in space.limited and each.kind == "call"]
    if not calls:
        return (
            "a tensor with several consumers takes, on each axis, only placements that its producer or a consumer has "
            "there; the optimality gap is measured without its other layouts, which make the problem too large",
        )
    pairs = [pair for pair in _neighbours(space.mesh) if all(_alike(each, [pair]).all() for each in calls)]
    alike = ", ".join(" and ".join(space.mesh.names[axis] for axis in pair) for pair in pairs)
    return (
        f"{alike} split tensors alike, as one axis would; the optimality gap is measured without other choices, "
        "which make the problem too large",
    )


def _neighbours(mesh: Mesh) -> list[tuple[int, int]]:
    """Return neighbouring axes, those of the fewest devices together first."""
    pairs = itertools.pairwise(axis for axis, size in enumerate(mesh.sizes) if size > 1)
    return sorted(pairs, key=lambda pair: mesh.sizes[pair[0]] * mesh.sizes[pair[1]])


def _choosing_alike(space: Space, kept: Pins, pairs: Sequence[tuple[int, int]]) -> dict[int, np.ndarray]:
    """Return the strategies in which each pair of axes chooses alike, of decisions that no pin has narrowed."""
    masks = {n: _alike(each, pairs) for n, each in enumerate(space.decisions) if n not in kept}
    return {number: mask for number, mask in masks.items() if mask.any() and not mask.all()}


def _alike(decision: Decision, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the strategies in which each pair of axes chooses alike."""
    strategies = decision.candidates.strategies
    chosen = (each.choices if decision.kind == "call" else each.outputs[0] for each in strategies)
    return np.array([all(each[one] == each[other] for one, other in pairs) for each in chosen])


def _of_shared_reshards(space: Space, masks: Pins) -> dict[int, np.ndarray]:
    """Return the layouts of shared reshards that take, on each axis, a placement that some end of theirs has there."""
    ends: dict[int, set[tuple[int, Placement]]] = defaultdict(set)
    outermost: dict[int, int] = {}
    for edge in space.edges:
        leaves, enters = (space.decisions[end].kind == "shared_reshard" for end in (edge.source, edge.target))
        if enters:
            outermost[edge.target] = outermost.get(edge.source, edge.target)
        if enters and not leaves:
            ends[edge.target] |= _placements(space.source_layouts(edge), masks.get(edge.source))
        if leaves and not enters:
            ends[outermost[edge.source]] |= _placements(space.target_layouts(edge), masks.get(edge.target))
    found = {}
    for number, first in outermost.items():
        layouts = (each.outputs[0] for each in space.decisions[number].candidates.strategies)
        mask = np.array([ends[first].issuperset(enumerate(layout)) for layout in layouts])
        if mask.any() and not mask.all():
            found[number] = mask
    return found


def _placements(layouts: Sequence[Layout], mask: np.ndarray | None) -> set[tuple[int, Placement]]:
    """Return the placements of the layouts that a mask leaves, each with its axis."""
    left = layouts if mask is None else itertools.compress(layouts, mask)
    return set(itertools.chain.from_iterable(map(enumerate, left)))
