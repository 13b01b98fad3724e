"""Labels: the seconds and bytes that the rest of a graph can take together, computed along an elimination.

Under a memory row a message (`elimination`) is no longer one number for each choice of the neighbours, but a set of
labels, (seconds, bytes): those of which no other has less of both (Pareto labels, as of shortest paths with resources,
Desrochers & Soumis 1988). Bags add the labels of what is below them up, and unite those of one choice of neighbours.

    labels(neighbours) = Pareto( ∪_v  own(v, neighbours) + Σ_children labels_child )

Labels whose reduced cost (`min_marginals`) at the price of memory exceeds a margin are left out. The margin is what the
limit leaves, or where there are too many labels within it a smaller one, which then is all that is proven. Large sets
are thinned, evenly over their seconds; the possible loss of the optimum is known. Several memory rows count as one,
added up at their prices, which bounds; the fastest that meets each of them is the answer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.deadline import check
from autopar.solver.elimination.min_marginals import children_of
from autopar.solver.problem import Floats, Integers
from autopar.solver.remaining.remaining_choices import ROUNDING, Counted, RemainingProblem

PER_STEP = 20_000  # labels of a step that are kept
PER_GROUP = 4_000  # of them for one choice of the neighbours
PER_WHOLE = 2_000  # of several parts of a graph together
MAX_JOINED = 1_000_000  # labels that a bag may make on the way
TIGHTER = 0.75  # of a margin within which there are too many


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Labels of a step; those of a group (choice of the neighbours) are adjacent, by rising reduced cost."""

    starts: Integers
    """Start of each group, followed by the end of the last one."""
    reduced_cost: Floats
    """Above the least of the group at the prices."""
    seconds: Floats
    paid: Floats
    """Price of the bytes of all rows, in seconds."""
    num_bytes: Integers
    """A row for each memory row."""
    entry: Integers
    """Place of the choices of the bag."""
    below: tuple[Integers, ...]
    """Places of the labels of each child."""
    loss: float = 0.0
    """Seconds by which a label that was left out may be faster than one of no more bytes that is kept."""

    def __len__(self) -> int:
        return len(self.seconds)


def best_labels(remaining_problem: RemainingProblem) -> Counted:
    """Return the fastest choices within all budgets that labels lead to, and a bound.

    TimeLimitError where that takes until the deadline.
    """
    return _Labelling(remaining_problem).solve()


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The labels of some roots together."""

    labels: _Labels
    step: int
    """Step of the single root that the labels belong to, or -1."""
    parts: tuple[_Part, ...] = ()

    def unfolded(self, label: int) -> dict[int, list[int]]:
        """Return the labels of each root that one is made of, by step."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        left = [(self, label)]
        while left:
            part, number = left.pop()
            if part.parts:
                left += [(each, int(below[number])) for each, below in zip(part.parts, part.labels.below, strict=True)]
            else:
                found[part.step].append(number)
        return found


class _Labelling:
    def __init__(self, remaining_problem: RemainingProblem) -> None:
        self.remaining_problem = remaining_problem
        self.elimination = remaining_problem.elimination
        self.margin = remaining_problem.margin
        """Excess of the labels that are looked at."""
        self.prices = np.array(remaining_problem.prices)
        self.entries: list[Integers] = []
        self.groups: list[dict[tuple[int, ...], int]] = []
        self.labels: list[_Labels] = []

    def solve(self) -> Counted:
        remaining_problem = self.remaining_problem
        if remaining_problem.margin < 0:
            return Counted(None, remaining_problem.limit, True)
        if not self.elimination.buckets:
            return Counted((), min(0.0, remaining_problem.limit), True)
        for step in range(len(self.elimination.steps)):
            check(remaining_problem.deadline)
            lost = self._add(step)
            if lost is not None:
                bound = self._reached - lost
                return Counted(None, bound, bound >= remaining_problem.limit)
        part = self._whole()
        whole = part.labels
        budgets = np.array([math.inf if each is None else each for each in remaining_problem.budgets])
        fits = (whole.num_bytes <= budgets[:, None]).all(axis=0)
        together = whole.paid <= float(self.prices @ budgets) * (1 + ROUNDING)
        # What is kept in place of the best may be slower by the loss, and above the margin on that account.
        bound = min(float(whole.seconds[together].min(initial=math.inf)), self._reached) - whole.loss
        if not fits.any():
            return Counted(None, bound, bound >= remaining_problem.limit)
        fastest = int(np.where(fits, whole.seconds, np.inf).argmin())
        choices = self._choices(part.unfolded(fastest))
        return Counted(choices, bound, float(whole.seconds[fastest]) - bound <= remaining_problem.rounding)

    @property
    def _reached(self) -> float:
        """Return a lower bound on the seconds of labels whose reduced cost exceeds the margin."""
        return self.remaining_problem.limit - (self.remaining_problem.margin - self.margin)

    def _add(self, step: int) -> float | None:
        """Return the labels of a step; where none is within the margin, the seconds by which one that was left out may
        be.
        """
        remaining_problem, children = self.remaining_problem, self.remaining_problem.messages(step)
        entries, reduced_cost = remaining_problem.choices[step]
        if not len(entries):
            return 0.0
        seconds, num_bytes = remaining_problem.own(step)
        around, group = np.unique(entries[:, 1:], axis=0, return_inverse=True)
        group = group.reshape(-1)
        paid: Floats = self.prices @ num_bytes.astype(np.float64)
        found = _Partial(group, reduced_cost, seconds, paid, num_bytes, np.arange(len(entries)), [])
        loss = 0.0
        for number, (child, axes) in enumerate(children):
            numbers = self.groups[child]
            at = [numbers.get(tuple(each), -1) for each in entries[:, list(axes)].tolist()]
            found = self._joined(found, self.labels[child], np.array(at, dtype=np.int64)[found.entry])
            is_last = number == len(children) - 1
            loss += self.labels[child].loss
            if not is_last:
                found, lost = found.thinned(found.entry, MAX_JOINED, PER_GROUP)
                loss += lost
        found, lost = found.thinned(found.group, MAX_JOINED, PER_GROUP)
        if len(found.reduced_cost) > PER_STEP:
            self.margin = min(self.margin, float(np.partition(found.reduced_cost, PER_STEP)[PER_STEP]))
        found = found.taken(np.flatnonzero(found.reduced_cost <= self.margin))
        if not len(found.reduced_cost):
            return loss + lost
        self.entries.append(entries)
        self.groups.append({tuple(each): number for number, each in enumerate(around.tolist())})
        outside = np.reshape(
            remaining_problem.outside[step][tuple(around.T)], -1
        )  # which the bag of the parent has its own of
        self.labels.append(
            replace(found, reduced_cost=found.reduced_cost - outside[found.group]).labels(len(around), loss + lost)
        )
        return None

    def _joined(self, found: _Partial, child: _Labels, at: Integers) -> _Partial:
        """Every label with those of a child's group that it is within the margin with; of no group (-1): none."""
        group_of = np.repeat(np.arange(len(child.starts) - 1), np.diff(child.starts))
        span = 2 * self.margin + float(child.reduced_cost.max(initial=0.0)) + 1e-300
        keys, group = group_of * span + child.reduced_cost, np.maximum(at, 0)
        first = child.starts[group]

        def within() -> Integers:
            slack = np.minimum(self.margin - found.reduced_cost, self.margin)
            last = np.searchsorted(keys, group * span + slack, side="right")
            return np.where(at < 0, 0, np.clip(last, first, child.starts[group + 1]) - first)

        count = within()
        while (total := int(count.sum())) > MAX_JOINED:
            self.margin *= TIGHTER
            count = within()
        rows = np.repeat(np.arange(len(count)), count)
        places = np.arange(total) - np.repeat(np.cumsum(count) - count, count) + first[rows]
        return _Partial(
            found.group[rows],
            found.reduced_cost[rows] + child.reduced_cost[places],
            found.seconds[rows] + child.seconds[places],
            found.paid[rows] + child.paid[places],
            found.num_bytes[:, rows] + child.num_bytes[:, places],
            found.entry[rows],
            [*(each[rows] for each in found.below), places],
        )

    def _whole(self) -> _Part:
        """Return the labels of all parts of a graph together: equal ones by twos, fours, …, then one kind after
        another.
        """
        whole: _Part | None = None
        for step, count in sorted(self.remaining_problem.roots.items(), key=lambda each: len(self.labels[each[0]])):
            power = _Part(self.labels[step], step)
            while count:
                if count % 2:
                    whole = power if whole is None else self._joined_parts(whole, power)
                count //= 2
                power = self._joined_parts(power, power) if count else power
        assert whole is not None, "a problem without a node"
        return whole

    def _joined_parts(self, one: _Part, other: _Part) -> _Part:
        check(self.remaining_problem.deadline)
        first, second = one.labels, other.labels
        none = np.zeros(len(first), dtype=np.int64)
        every = np.arange(len(first))
        found = _Partial(none, first.reduced_cost, first.seconds, first.paid, first.num_bytes, none, [every])
        found = self._joined(found, second, none)
        found, lost = found.thinned(found.group, PER_WHOLE, PER_WHOLE)
        return _Part(found.labels(1, first.loss + second.loss + lost), -1, (one, other))

    def _choices(self, at_roots: dict[int, list[int]]) -> tuple[int, ...]:
        """Return a choice per node, from the labels that are taken at the roots of each step."""
        buckets, children = self.elimination.buckets, children_of(self.elimination)
        taken: dict[int, int] = {}
        chosen: dict[int, int] = {}
        for place, bucket in enumerate(buckets):
            if len(bucket.bag) == 1:
                taken[place] = at_roots[bucket.step].pop()
        for place in reversed(range(len(buckets))):
            bucket, label = buckets[place], taken[place]
            labels = self.labels[bucket.step]
            chosen[bucket.bag[0]] = int(self.entries[bucket.step][labels.entry[label], 0])
            below = [int(number[label]) for number in labels.below]
            messages = zip(self.remaining_problem.messages(bucket.step), below, strict=True)
            taken |= self.remaining_problem.handed_down(place, children[place], messages)
        return tuple(chosen[node] for node in range(len(chosen)))


@dataclass(frozen=True, slots=True, eq=False)
class _Partial:
    """Labels on the way, in any order: of a bag with some of its children."""

    group: Integers
    reduced_cost: Floats
    seconds: Floats
    paid: Floats
    num_bytes: Integers
    entry: Integers
    below: list[Integers]

    def taken(self, rows: Integers) -> _Partial:
        return _Partial(
            self.group[rows],
            self.reduced_cost[rows],
            self.seconds[rows],
            self.paid[rows],
            self.num_bytes[:, rows],
            self.entry[rows],
            [each[rows] for each in self.below],
        )

    def thinned(self, group: Integers, most: int, most_each: int) -> tuple[_Partial, float]:
        """Return the Pareto front of each group, thinned; also return the seconds that thinning may cost at most."""
        order = np.lexsort((self.seconds, self.paid, group))
        group, seconds = group[order], self.seconds[order]
        _, ranks = np.unique(seconds, return_inverse=True)
        best = _new_minima(group, ranks.reshape(-1))
        order, group, seconds = order[best], group[best], seconds[best]
        sizes = np.bincount(group) if len(group) else np.zeros(0, dtype=np.int64)
        each = max(1, min(most_each, most // max(int(np.count_nonzero(sizes)), 1)))
        loss = 0.0
        if len(sizes) and sizes.max() > each:
            ends = np.flatnonzero(np.diff(group, append=-1))  # of falling seconds in each group: its least
            starts = np.concatenate(([0], ends[:-1] + 1))
            place = np.repeat(np.arange(len(ends)), ends - starts + 1)
            least, span = seconds[ends][place], (seconds[starts] - seconds[ends])[place]
            bins = np.where(sizes[group] > each, np.ceil((seconds - least) / np.maximum(span, 1e-300) * each), -1.0)
            is_first = np.ones(len(group), dtype=bool)  # of its bin: of the fewest bytes
            is_first[1:] = (bins[1:] != bins[:-1]) | (bins[1:] < 0) | (group[1:] != group[:-1])
            kept = np.flatnonzero(is_first)
            loss = float((seconds[kept][np.cumsum(is_first) - 1] - seconds).max())
            order = order[kept]
        return self.taken(order), loss

    def labels(self, num_groups: int, loss: float) -> _Labels:
        order = np.lexsort((self.reduced_cost, self.group))
        found = self.taken(order)
        starts = np.searchsorted(found.group, np.arange(num_groups + 1))
        return _Labels(
            starts,
            found.reduced_cost,
            found.seconds,
            found.paid,
            found.num_bytes,
            found.entry,
            tuple(found.below),
            loss,
        )


def _new_minima(group: Integers, ranks: Integers) -> Integers:
    """Places whose rank is below all before it in the group; groups rise."""
    if not len(ranks):
        return np.zeros(0, dtype=np.int64)
    keys = ranks - group * (int(ranks.max()) + 1)
    least = np.minimum.accumulate(keys)
    is_less = np.ones(len(keys), dtype=bool)
    is_less[1:] = keys[1:] < least[:-1]
    return np.flatnonzero(is_less)
