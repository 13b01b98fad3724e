"""Elimination with a memory row: a message holds, for each choice of the neighbours, every trade of seconds for bytes
that can still be part of a better solution.

    labels(x) = nondominated (seconds, bytes) over v and the labels that bucket v received     (x: v's neighbours)

This is multi-objective bucket elimination (Rollón & Larrosa 2006; on a chain, the labels of a shortest path with a
resource, Irnich & Desaulniers 2005). Two things keep it small. With the price λ of memory, L(λ) its bound, m(x) the
message at that price and X(x) what the rest of the graph costs above its optimum when the neighbours take x,

    seconds + λ · bytes − m(x) + X(x) > limit − L(λ)   ⇒   no solution below `limit` holds this label.

And equal layers change places without a trace: whichever of them is split further, the sums are the same label. Where
labels are many, those of nearly equal seconds are one (the ε-dominance of Papadimitriou & Yannakakis 2000): the answer
is then at most a known tolerance above the best, which is a bound as well.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.eliminate import Elimination, Tables, bag_sum, compile_elimination, evaluate
from autopar.marginals import children_of, excesses
from autopar.problem import Floats, Integers, Problem

MAX_LABELS = 50_000  # of one entry; beyond, the search gives up
MAX_PRODUCT = 20_000_000  # sums of two sets of labels that are looked at together
MAX_ENTRIES = 200_000  # choices of a bag
FEW = 500  # labels that are all kept
ROUNDINGS = 256  # how often the labels of an entry are rounded, each time by its share of the tolerance
SAME = 1e-13  # of the margin's scale: seconds that differ by less are equal but for the order of a sum


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Nondominated sums, with what each is made of: the eliminated node's choice, and a label of each child."""

    seconds: Floats
    num_bytes: Integers
    choice: Integers
    origins: tuple[Integers, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    def at(self, index: np.ndarray) -> _Labels:
        return _Labels(
            self.seconds[index], self.num_bytes[index], self.choice[index], tuple(each[index] for each in self.origins)
        )


class TooManyLabelsError(Exception):
    """The trades of seconds for bytes are too many to list."""


def best_below(
    problem: Problem, multiplier: float, limit: float, tolerance: float = 0.0, deadline: float = math.inf
) -> tuple[int, ...] | None:
    """The choices of least seconds within the budget, if they cost no more than `limit` seconds; None if none do.

    Both up to `tolerance` seconds: no choice within the budget costs less than the answer, or the limit, minus that.
    Raises TooManyLabelsError where they cannot be listed, or not before the `deadline` (of time.monotonic).
    """
    assert problem.budget is not None
    return _Search(problem, multiplier, limit, tolerance).run(deadline)


class _Search:
    """The labels of every bucket so far."""

    def __init__(self, problem: Problem, multiplier: float, limit: float, tolerance: float) -> None:
        self.problem = problem
        self.step = tolerance / ROUNDINGS
        self.roundings = 0
        self.multiplier = multiplier
        tables = Tables(problem)
        orders = [compile_elimination(problem, tables, balanced) for balanced in (False, True)]
        self.elimination: Elimination = min(orders, key=lambda each: each.unshared_work)
        if self.elimination.largest > MAX_ENTRIES:
            raise TooManyLabelsError
        self.weighted = evaluate(self.elimination, tables.weighted(multiplier))
        self.plain = tables.pairs()
        found = excesses(problem, self.elimination, self.weighted)
        self.outside = found.of_message
        roots = [b for b in self.elimination.buckets if len(b.bag) == 1]
        least = sum(float(self.weighted[self.elimination.num_tables + b.step]) for b in roots)
        budget = problem.budget or 0
        scale = abs(least) + multiplier * budget + abs(limit)
        self.same = SAME * scale
        # Reduced costs carry the rounding of long sums; a label too many does no harm.
        self.margin = limit - (least - multiplier * budget) + 1e-12 * scale
        self.allowed = [np.flatnonzero(excess <= self.margin) for excess in found.of_node]
        self.children = children_of(self.elimination)
        self.labels: list[dict[tuple[int, ...], _Labels]] = []

    def run(self, deadline: float = math.inf) -> tuple[int, ...] | None:
        if self.margin < 0 or any(len(each) == 0 for each in self.allowed):
            return None
        for place in range(len(self.elimination.buckets)):
            if time.monotonic() >= deadline:
                raise TooManyLabelsError
            self.labels.append(self._bucket(place))
        roots = [place for place, bucket in enumerate(self.elimination.buckets) if len(bucket.bag) == 1]
        total = _Labels(np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), ())
        for place in roots:
            if () not in self.labels[place]:
                return None
            total = self._pruned(_sums(total, self.labels[place][()]))
        fits = np.flatnonzero(total.num_bytes <= (self.problem.budget or 0))
        if not len(fits):
            return None
        best = int(fits[np.argmin(total.seconds[fits])])
        return self._decoded({place: int(origin[best]) for place, origin in zip(roots, total.origins, strict=True)})

    def _bucket(self, place: int) -> dict[tuple[int, ...], _Labels]:
        bucket = self.elimination.buckets[place]
        message = self.weighted[self.elimination.num_tables + bucket.step]
        outside = self.outside[place]
        base = np.where(np.isfinite(message), message, 0.0)
        whole = bag_sum(self.elimination.steps[bucket.step], self.weighted) - base + outside
        options: dict[tuple[int, ...], list[_Labels]] = defaultdict(list)
        for bag in np.argwhere(whole <= self.margin).tolist():
            labels = self._option(place, tuple(bag))
            if labels is not None:
                options[tuple(bag[1:])].append(labels)
        found: dict[tuple[int, ...], _Labels] = {}
        for chosen, sets in options.items():
            labels = _joined(sets)
            slack = self.margin - float(outside[chosen])
            below = labels.seconds + self.multiplier * labels.num_bytes - float(base[chosen]) <= slack
            labels = self._pruned(labels.at(np.flatnonzero(below)))
            if len(labels):
                found[chosen] = labels
        return found

    def _option(self, place: int, chosen: tuple[int, ...]) -> _Labels | None:
        """Labels of one choice of a whole bag; None where it is forbidden."""
        bucket = self.elimination.buckets[place]
        seconds, num_bytes = 0.0, 0
        for table, axes in self.elimination.steps[bucket.step].inputs:
            if table >= self.elimination.num_tables:
                continue
            index = tuple(chosen[axis] for axis in axes)
            pair = self.plain[table]
            seconds += float(pair[0][index])
            num_bytes += 0 if pair[1] is None else int(pair[1][index])
        if seconds == np.inf:
            return None
        value = dict(zip(bucket.bag, chosen, strict=True))
        first = np.array([chosen[0]], dtype=np.int64)
        labels = _Labels(np.array([seconds]), np.array([num_bytes], dtype=np.int64), first, ())
        for child in self.children[place]:
            scope = tuple(value[member] for member in self.elimination.buckets[child].bag[1:])
            if scope not in self.labels[child]:
                return None
            labels = _sums(labels, self.labels[child][scope])
            if len(labels) > 64:
                labels = self._pruned(labels)
        return labels

    def _pruned(self, labels: _Labels) -> _Labels:
        """Without labels for which another has no more bytes and no more seconds."""
        order = np.lexsort((labels.seconds, labels.num_bytes))
        kept = order[_improves(labels.seconds[order], self.same)]
        if len(kept) > FEW and self.step > 0 and self.roundings < ROUNDINGS:
            self.roundings += 1
            kept = kept[_improves(np.floor(labels.seconds[kept] / self.step), 0.0)]
        if len(kept) > MAX_LABELS:
            raise TooManyLabelsError
        return labels.at(kept)

    def _decoded(self, label_of: dict[int, int]) -> tuple[int, ...]:
        """The choices behind the labels of the roots."""
        chosen: dict[int, int] = {}
        for place in reversed(range(len(self.elimination.buckets))):
            bucket = self.elimination.buckets[place]
            labels = self.labels[place][tuple(chosen[member] for member in bucket.bag[1:])]
            number = label_of[place]
            chosen[bucket.bag[0]] = int(labels.choice[number])
            for child, origin in zip(self.children[place], labels.origins, strict=True):
                label_of[child] = int(origin[number])
        return tuple(chosen[node] for node in range(len(chosen)))


def _improves(values: np.ndarray, by: float) -> np.ndarray:
    """Which values are less than every one before."""
    least_before = np.concatenate(([np.inf], np.minimum.accumulate(values)[:-1]))
    return values < least_before - by


def _sums(labels: _Labels, other: _Labels) -> _Labels:
    """Every label of one set with every label of another, whose numbers are noted."""
    if len(labels) * len(other) > MAX_PRODUCT:
        raise TooManyLabelsError
    left = np.repeat(np.arange(len(labels)), len(other))
    right = np.tile(np.arange(len(other)), len(labels))
    return _Labels(
        labels.seconds[left] + other.seconds[right],
        labels.num_bytes[left] + other.num_bytes[right],
        labels.choice[left],
        (*(each[left] for each in labels.origins), right),
    )


def _joined(sets: Sequence[_Labels]) -> _Labels:
    if len(sets) == 1:
        return sets[0]
    return _Labels(
        np.concatenate([each.seconds for each in sets]),
        np.concatenate([each.num_bytes for each in sets]),
        np.concatenate([each.choice for each in sets]),
        tuple(np.concatenate(origins) for origins in zip(*(each.origins for each in sets), strict=True)),
    )
