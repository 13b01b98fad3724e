"""Folded labels of the remaining problem: choices of an elimination bag, with those of the children folded into it.

Two choices of a bag that look the same from its neighbours and from its children that stay apart differ in seconds and
bytes alone. One that has no fewer seconds than another, and no fewer bytes in any memory row, need not be looked at
(dominance). A bag without children that stay apart thus mostly has one folded label for each choice of its neighbours,
or a few. It is then folded into the bag of its parent: each choice there is combined with each label of the child that
it leads to, and again only undominated labels are kept.

    labels(x) = Pareto( { choice of the bag that gives x, with a label of each child that is folded in } )

These are labels (`labels`) in every memory row, as long as there are few: a child with many of them stays apart, and is
left to counts (`counting_ilp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.deadline import check
from autopar.solver.problem import Floats, Integers
from autopar.solver.remaining.remaining_choices import RemainingProblem, TooManyChoicesError

MAX_CHOICES = 1_000_000  # of all bags together: more are not looked at
FOLDED = 2.0  # times the labels of a bag and of its folded children: the most that folding a child may give
ROUNDS = 500  # labels of a group that others are compared with, best first


@dataclass(frozen=True, slots=True, eq=False)
class FoldedLabels:
    """Folded labels of a step, one per row; those of one choice of the neighbours (a group) are adjacent."""

    entries: Integers
    """Choices of the bag."""
    reduced_cost: Floats
    seconds: Floats
    """Seconds, including those of folded children."""
    num_bytes: Integers
    """A row for each label, a column for each memory row."""
    apart: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Children that stay apart: their step, and the axes of the bag that their neighbours are on."""
    below: tuple[tuple[tuple[int, tuple[int, ...]], Integers], ...] = ()
    """Folded children, and their label in each of these labels."""

    def __len__(self) -> int:
        return len(self.seconds)

    def taken(self, rows: Integers) -> FoldedLabels:
        return replace(
            self,
            entries=self.entries[rows],
            reduced_cost=self.reduced_cost[rows],
            seconds=self.seconds[rows],
            num_bytes=self.num_bytes[rows],
            below=tuple([(child, way[rows]) for child, way in self.below]),
        )


def folded_labels_of(remaining_problem: RemainingProblem) -> list[FoldedLabels]:
    """Return the folded labels of every step, also of steps that are folded in wherever they are needed.

    Raises TooManyChoicesError, and TimeLimitError where that takes until the deadline.
    """
    if remaining_problem.num_choices > MAX_CHOICES:
        raise TooManyChoicesError
    found: list[FoldedLabels] = []
    groups: list[_Groups] = []
    for step, (entries, reduced_cost) in enumerate(remaining_problem.choices):
        check(remaining_problem.deadline)
        seconds, num_bytes = remaining_problem.own(step)
        labels = FoldedLabels(entries, reduced_cost, seconds, num_bytes.T, tuple(remaining_problem.messages(step)))
        labels, apart = _best(labels), len(labels)
        for child, axes in labels.apart:
            if found[child].apart:
                continue
            at = groups[child].of(labels.entries[:, list(axes)])
            if groups[child].sizes(at).sum() <= FOLDED * (apart + len(found[child])):
                labels = _best(
                    _folded(labels, (child, axes), found[child], groups[child], at, remaining_problem.margin)
                )
                apart += len(found[child])
        ordered = labels.taken(np.lexsort((labels.reduced_cost, *labels.entries[:, :0:-1].T)))
        found.append(ordered)
        groups.append(_Groups(ordered.entries[:, 1:], ordered.reduced_cost, remaining_problem.outside[step]))
    return found


class _Groups:
    """Folded labels of a step, by the choices of the neighbours."""

    def __init__(self, around: Integers, reduced_cost: Floats, outside: Floats) -> None:
        is_first = np.ones(len(around), dtype=bool)
        is_first[1:] = (around[1:] != around[:-1]).any(axis=1)
        firsts = np.flatnonzero(is_first)
        self.starts = np.append(firsts, len(around))
        self._number = {tuple(each): number for number, each in enumerate(around[firsts].tolist())}
        self.above = reduced_cost - outside[tuple(around.T)]
        """Cost of each label above the best label for the same neighbours, at the prices."""

    def of(self, around: Integers) -> Integers:
        """Return the group of each choice of neighbours, or -1."""
        numbers = self._number
        return np.array([numbers.get(tuple(each), -1) for each in around.tolist()], dtype=np.intp)

    def sizes(self, at: Integers) -> Integers:
        """Return the number of labels in each of some groups; 0 for no group (-1)."""
        return np.where(at < 0, 0, np.diff(self.starts, append=0)[at])


def _folded(
    labels: FoldedLabels,
    child: tuple[int, tuple[int, ...]],
    of_child: FoldedLabels,
    groups: _Groups,
    at: Integers,
    margin: float,
) -> FoldedLabels:
    """Combine each label with each of a child's that it leads to, within a margin."""
    sizes = groups.sizes(at)
    rows = np.repeat(np.arange(len(labels)), sizes)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + groups.starts[at][rows]
    reduced_cost = labels.reduced_cost[rows] + groups.above[places]
    near = reduced_cost <= margin
    rows, places = rows[near], places[near]
    apart = list(labels.apart)
    apart.remove(child)
    taken = labels.taken(rows)
    return replace(
        taken,
        reduced_cost=reduced_cost[near],
        seconds=taken.seconds + of_child.seconds[places],
        num_bytes=taken.num_bytes + of_child.num_bytes[places],
        apart=tuple(apart),
        below=(*taken.below, (child, places)),
    )


def _best(labels: FoldedLabels) -> FoldedLabels:
    """Return the undominated labels among those that look alike to neighbours and to children that stay apart."""
    seen = sorted({*range(1, labels.entries.shape[1]), *[axis for _, axes in labels.apart for axis in axes]})
    if not len(labels) or (len(seen) == labels.entries.shape[1] and not labels.below):
        return labels
    _, group = np.unique(labels.entries[:, seen], axis=0, return_inverse=True)
    return labels.taken(_undominated(group.reshape(-1), labels))


def _undominated(group: Integers, labels: FoldedLabels) -> Integers:
    """Return the positions of undominated labels, by group and reduced cost; of equal ones, the first."""
    kept = np.lexsort((labels.reduced_cost, group))
    group, cost = group[kept], np.column_stack((labels.seconds, labels.num_bytes))[kept]
    for rank in range(ROUNDS):
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        sizes = np.diff(starts, append=len(group))
        if not (sizes > rank).any():
            break
        other = np.minimum(np.repeat(starts, sizes) + rank, len(group) - 1)
        is_after = np.arange(len(group)) > other
        stays = ~(is_after & (cost[other] <= cost).all(axis=1))  # none is after one of another group
        kept, group, cost = kept[stays], group[stays], cost[stays]
    return kept


def occurrences(remaining_problem: RemainingProblem, labels: Sequence[FoldedLabels]) -> list[int]:
    """Return the number of buckets of each step that stay apart, that is, are folded into none."""
    found = [remaining_problem.roots.get(step, 0) for step in range(len(labels))]
    for step in reversed(range(len(labels))):
        for child, _ in labels[step].apart if found[step] else ():
            found[child] += found[step]
    return found
