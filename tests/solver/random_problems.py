"""Random problems of the shapes that models have: trees, stars, skips, repeated segments, separate parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from autopar.solver.ilp import solve_ilp
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.solve import solve

SHAPES = ("tree", "hub", "skips", "repeated", "parts")


def random_rows(seed: int, shape: str, num_rows: int, num_nodes: int = 8) -> list[Problem]:
    """The same problem with the bytes and the budget of each of so many memory rows; some pairs are forbidden."""
    rng = np.random.default_rng(seed)
    ends = _ends(rng, shape, num_nodes)
    is_equal = shape in ("repeated", "parts")
    sizes = [3] * num_nodes if is_equal else rng.integers(2, 4, num_nodes).tolist()
    candidate_lists = {number % 2 if is_equal else number: rng.random(sizes[number]) for number in range(num_nodes)}
    tables: dict[object, np.ndarray] = {}
    for one, other in ends:
        kind = (one % 2, other % 2) if is_equal else (one, other)
        if kind not in tables:
            table = rng.random((sizes[one], sizes[other]))
            tables[kind] = np.where(rng.random(table.shape) < 0.05, np.inf, table)
    problems = []
    for _ in range(num_rows):
        row_bytes = {key: rng.integers(0, 40, len(candidates)) for key, candidates in candidate_lists.items()}
        moved = {key: rng.integers(0, 9, table.shape) for key, table in tables.items()}
        nodes = tuple(
            Node(str(number), candidate_lists[key], row_bytes[key])
            for number, key in ((number, number % 2 if is_equal else number) for number in range(num_nodes))
        )
        keys = [(one % 2, other % 2) if is_equal else (one, other) for one, other in ends]
        edges = tuple(Edge(pair, tables[key], moved[key]) for pair, key in zip(ends, keys, strict=True))
        most = sum(int(each.num_bytes.max()) for each in nodes) + sum(int(moved[key].max()) for key in keys)
        problems.append(Problem(nodes, edges, int(most * rng.uniform(0.3, 0.8))))
    return problems


def _ends(rng: np.random.Generator, shape: str, num_nodes: int) -> list[tuple[int, int]]:
    chain = [(node - 1, node) for node in range(1, num_nodes)]
    if shape == "tree":
        return [(int(rng.integers(0, node)), node) for node in range(1, num_nodes)]
    if shape == "hub":
        return chain + [(0, node) for node in range(2, num_nodes)]
    if shape == "skips":
        return chain + [(node - 3, node) for node in range(3, num_nodes) if rng.random() < 0.5]
    return chain if shape == "repeated" else [pair for pair in chain if pair[1] % 2]


def reference(problems: list[Problem]) -> float:
    """The seconds of the best choices within all budgets by CP-SAT, which is given the whole; inf where none are."""
    result = solve_ilp(problems[0], 60.0, rows=problems[1:])
    assert result.status in ("optimal", "infeasible")
    return np.inf if result.choices is None else problems[0].seconds_of(result.choices)


def without_limit(problem: Problem) -> Problem:
    """The problem without its memory row."""
    return replace(problem, budget=None)


def least_bytes(problem: Problem) -> int:
    """The fewest bytes that any choices take."""
    return round(solve(problem.in_bytes()).seconds)


def limited(problem: Problem, share: float) -> Problem:
    """The problem with a budget between the fewest bytes and those of the best choices."""
    least, most = least_bytes(problem), solve(without_limit(problem)).num_bytes
    return replace(problem, budget=int(least + share * max(most - least, 0)))


def layered_rows(seed: int, num_layers: int, count: int) -> list[Problem]:
    """Layers of two nodes in a chain, equal but for their bytes, which rows count in other layers each."""
    rng = np.random.default_rng(seed)
    candidate_lists, across, into = rng.random((2, 3)), rng.random((3, 3)), rng.random((3, 3))
    row_bytes, moved = rng.integers(1, 30, (count, 2, 3)), rng.integers(0, 9, (3, 3))
    nothing = np.zeros(3, dtype=np.int64)
    problems = []
    for row in range(count):
        nodes = [
            Node(f"{layer}.{i}", candidate_lists[i], row_bytes[row, i] if (layer + row) % 3 else nothing)
            for layer in range(num_layers)
            for i in range(2)
        ]
        edges = [Edge((2 * layer, 2 * layer + 1), into, moved) for layer in range(num_layers)]
        edges += [Edge((2 * layer - 1, 2 * layer), across) for layer in range(1, num_layers)]
        most = sum(int(node.num_bytes.max()) for node in nodes)
        problems.append(Problem(tuple(nodes), tuple(edges), int(most * rng.uniform(0.4, 0.9))))
    return problems


def brute_force(problems: Sequence[Problem]) -> float:
    """The seconds of the best choices within all budgets, by looking at all; inf where none are."""
    every = np.indices([node.num_strategies for node in problems[0].nodes]).reshape(len(problems[0].nodes), -1)
    seconds = _sums(problems[0], every, "seconds")
    for each in problems:
        if each.budget is not None:
            seconds[_sums(each, every, "num_bytes") > each.budget] = np.inf
    return float(seconds.min(initial=np.inf))


def _sums(problem: Problem, every: np.ndarray, what: Literal["seconds", "num_bytes"]) -> np.ndarray:
    """Return the seconds or bytes that choices take together; each choice is a column."""
    of_nodes = [getattr(node, what)[every[number]] for number, node in enumerate(problem.nodes)]
    of_edges = [
        getattr(edge, what)[tuple(every[list(edge.ends)])] for edge in problem.edges if getattr(edge, what) is not None
    ]
    return np.sum([*of_nodes, *of_edges], axis=0)
