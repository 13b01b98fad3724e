"""The messages of an elimination at given tables, the optimum, and choices that attain it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.solver.deadline import NEVER, check
from autopar.solver.elimination.bucket_elimination import Elimination, EliminationStep
from autopar.solver.elimination.min_plus import least_sums
from autopar.solver.problem import BLOCK, Floats


def evaluate(elimination: Elimination, tables: Sequence[Floats], deadline: float = NEVER) -> list[Floats]:
    """Return the given tables followed by the message of every step; TimeLimitError where that takes until the
    deadline.
    """
    found = list(tables)
    for step in elimination.steps:
        check(deadline)
        found.append(_message(step, found))
    return found


def optimum(elimination: Elimination, tables: Sequence[Floats]) -> float:
    """Return the least sum, from the tables that `evaluate` returned; inf if everything is forbidden."""
    roots = (bucket for bucket in elimination.buckets if len(bucket.bag) == 1)
    return sum(float(tables[elimination.num_tables + bucket.step]) for bucket in roots)


def choices_of(elimination: Elimination, tables: Sequence[Floats]) -> tuple[int, ...]:
    """Return a choice per node that attains the optimum, from the tables of `evaluate`."""
    chosen = [0] * len(elimination.buckets)
    fill_in(elimination, chosen, tables)
    return tuple(chosen)


def fill_in(elimination: Elimination, chosen: list[int], tables: Sequence[Floats]) -> None:
    """Choose for all eliminated nodes what is best, given the choices of the others; the first index among equals."""
    best: dict[tuple[int, ...], int] = {}  # best choice of a step by its neighbours' choices; equal layers choose alike
    for bucket in reversed(elimination.buckets):
        node, *neighbours = bucket.bag
        given = (bucket.step, *[chosen[other] for other in neighbours])
        if given not in best:
            row: Floats | float = 0.0
            for table, axes in elimination.steps[bucket.step].inputs:
                row = row + tables[table][tuple(given[axis] if axis else slice(None) for axis in axes)]
            best[given] = int(np.argmin(row))
        chosen[node] = best[given]


def bag_sum(step: EliminationStep, tables: Sequence[Floats], out: Floats | None = None) -> Floats:
    """Add up all tables of a step over its bag, in the memory of `out` (one dim) if given."""
    if out is None:
        out = np.empty(math.prod(step.sizes))
    total = out[: math.prod(step.sizes)].reshape(step.sizes)
    return _add_into(total, _partial_sums(step, tables))


def _message(step: EliminationStep, tables: Sequence[Floats]) -> Floats:
    """Return the minimum over the bag's first axis, without building the whole bag where it is large."""
    if math.prod(step.sizes) <= BLOCK or len(step.sizes) == 1:
        return np.asarray(bag_sum(step, tables).min(axis=0))
    parts = _partial_sums(step, tables)
    if len(parts) == 2:
        return _product(parts[0], parts[1])
    found, row = np.empty(step.sizes[1:]), np.empty(step.sizes[1:])
    _add_into(found, [part[0] for part in parts])
    for choice in range(1, step.sizes[0]):
        np.minimum(found, _add_into(row, [part[choice % len(part)] for part in parts]), out=found)
    return found


def _product(one: Floats, other: Floats) -> Floats:
    """Return the message of two broadcast parts."""
    dims = range(1, one.ndim)
    shared = [dim for dim in dims if one.shape[dim] > 1 and other.shape[dim] > 1]
    of_one = [dim for dim in dims if one.shape[dim] > 1 and dim not in shared]
    of_other = [dim for dim in dims if dim not in (*shared, *of_one)]
    size = max(len(one), len(other))

    def points(part: Floats, own: list[int], rest: list[int]) -> Floats:
        part = np.broadcast_to(part, (size, *part.shape[1:])).transpose(*shared, *own, 0, *rest)
        return part.reshape(math.prod(part.shape[: len(shared)]), -1, size)

    found = least_sums(points(one, of_one, of_other), points(other, of_other, of_one))
    order = (*shared, *of_one, *of_other)
    found = found.reshape([max(one.shape[dim], other.shape[dim]) for dim in order])
    return np.ascontiguousarray(found.transpose(np.argsort(order)))


def _add_into(total: Floats, parts: Sequence[Floats]) -> Floats:
    if len(parts) == 1:
        total[...] = parts[0]
        return total
    np.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total += part
    return total


def _partial_sums(step: EliminationStep, tables: Sequence[Floats]) -> list[Floats]:
    """Return the tables of a step, broadcast to its bag, added up as far as that leaves them smaller than the bag."""
    whole = math.prod(step.sizes)
    parts: list[Floats] = []
    for number, axes in step.inputs:
        table = tables[number].transpose(sorted(range(len(axes)), key=axes.__getitem__))
        table = table.reshape([step.sizes[axis] if axis in axes else 1 for axis in range(len(step.sizes))])
        for place, part in enumerate(parts):
            if math.prod(map(max, part.shape, table.shape)) < whole or table.shape == part.shape:
                parts[place] = part + table
                break
        else:
            parts.append(table)
    return parts
