"""Folds for cross-validation that leave out whole models, or whole numbers of nodes, the same in every run.

Groups are assigned to folds from the largest to the smallest, each to the fold with the fewest rows so far, so that a
fit never sees a model, or a number of nodes, that it predicts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.publications.rows import Row


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows by their numbers: those that are fitted, and those that are predicted."""

    fitted: tuple[int, ...]
    held_out: tuple[int, ...]


def by_model(row: Row) -> str:
    return row.model


def by_nodes(row: Row) -> str:
    return f"{row.nodes} nodes"


def folds(rows: Sequence[Row], group: Callable[[Row], str], most: int = 5) -> tuple[Fold, ...]:
    """At least two folds, at most so many, of whole groups; none where all rows are of one group."""
    sizes = Counter(map(group, rows))
    count = min(most, len(sizes))
    if count < 2:
        return ()
    fold_of: dict[str, int] = {}
    filled = [0] * count
    for name, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        fold_of[name] = filled.index(min(filled))
        filled[fold_of[name]] += size
    numbers = [fold_of[group(row)] for row in rows]
    return tuple(
        Fold(
            tuple(n for n, fold in enumerate(numbers) if fold != each),
            tuple(n for n, fold in enumerate(numbers) if fold == each),
        )
        for each in range(count)
    )


def both(rows: Sequence[Row], most: int = 5) -> Iterator[tuple[str, Fold]]:
    """The folds that leave out models, and those that leave out numbers of nodes, with what they leave out."""
    for name, group in (("models", by_model), ("nodes", by_nodes)):
        yield from ((name, each) for each in folds(rows, group, most))


def sampled(rows: Sequence[Row], count: int | None) -> list[Row]:
    """So many rows, the same ones every time, by a digest of their contents; all of them for None."""
    if count is None or count >= len(rows):
        return list(rows)
    chosen = _chosen([repr(row) for row in rows], count)
    return [row for n, row in enumerate(rows) if n in chosen]


def of_cells(rows: Sequence[Row], count: int, least: int) -> list[Row]:
    """The rows of so many cells (a model on so many GPUs) with at least so many successful ones."""
    ran = Counter((row.model, row.devices) for row in rows if row.seconds)
    names = sorted(cell for cell, runs in ran.items() if runs >= least)
    chosen = {names[n] for n in _chosen(list(map(repr, names)), count)}
    return [row for row in rows if (row.model, row.devices) in chosen]


def _chosen(specified: Sequence[str], count: int) -> set[int]:
    """The numbers of those with the least digests."""
    digests = [hashlib.sha256(each.encode()).hexdigest() for each in specified]
    return set(sorted(range(len(specified)), key=lambda n: (digests[n], n))[:count])
