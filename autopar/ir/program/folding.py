"""Numbered modules folded into one: "layers.0.mlp" to "layers.31.mlp" become "layers.0-31.mlp".

Items fold where they are alike in everything but one number of their path; the innermost number goes first, so that
experts fold inside each layer, and layers then fold where all their experts are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.ir.program.paths import is_number

Item = TypeVar("Item")
Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fold(Generic[Item]):
    """Items that are alike, below one path."""

    path: Parts
    kind: Hashable
    """Key that two items must share to be folded."""
    items: tuple[Item, ...]


def folded(items: Iterable[tuple[str, Hashable, Item]]) -> list[Fold[Item]]:
    """Fold (module path, kind, item) in the order in which each fold's first item came.

    >>> [(".".join(f.path), len(f.items)) for f in folded([("h.0.up", "a", 0), ("h.1.up", "a", 1), ("h.2.up", "b", 2)])]
    [('h.0-1.up', 2), ('h.2.up', 1)]
    """
    found = [Fold(tuple(path.split(".")), kind, (item,)) for path, kind, item in items]
    depth = max((len(fold.path) for fold in found), default=0)
    for place in reversed(range(depth + 1)):
        groups: dict[object, list[Fold[Item]]] = defaultdict(list)
        for fold in found:
            path = (*fold.path[:place], None, *fold.path[place + 1 :]) if _numbered(fold.path, place) else fold.path
            groups[path, fold.kind].append(fold)
        found = [_merged(group, place) for group in groups.values()]
    return found


def _numbered(path: Parts, place: int) -> bool:
    return place < len(path) and is_number(path[place])


def _merged(group: Sequence[Fold[Item]], place: int) -> Fold[Item]:
    path = group[0].path
    if _numbered(path, place):
        path = (*path[:place], ranges(sorted({int(fold.path[place]) for fold in group})), *path[place + 1 :])
    return Fold(path, group[0].kind, tuple(item for fold in group for item in fold.items))


def ranges(numbers: Sequence[int]) -> str:
    """Join ascending numbers into ranges.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
