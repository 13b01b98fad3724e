"""Seconds of `solve` against the plain ILP, on a synthetic model of equal (or, with --distinct, unequal) layers.

A layer is a residual block of a transformer in shape: a stream from which two branches of operations part and to which
they return, one parameter per matmul, and a shared reshard wherever a tensor has several consumers. Strategies are
points in a plane, reshard costs the distances between them; splitting a parameter finer saves bytes and costs seconds.

    python benchmarks/solve_speed.py --layers 8 --strategies 9 --memory 0.4
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.solve import solve

# (name, whether it holds a parameter, the operations it reads); "stream" is the layer's input.
LAYER = (
    ("norm1", True, ("stream",)),
    ("hub1", False, ("norm1",)),
    ("query", True, ("hub1",)),
    ("key", True, ("hub1",)),
    ("value", True, ("hub1",)),
    ("attention", False, ("query", "key", "value")),
    ("out", True, ("attention",)),
    ("add1", False, ("stream", "out")),
    ("stream1", False, ("add1",)),
    ("norm2", True, ("stream1",)),
    ("hub2", False, ("norm2",)),
    ("gate", True, ("hub2",)),
    ("up", True, ("hub2",)),
    ("product", False, ("gate", "up")),
    ("down", True, ("product",)),
    ("add2", False, ("stream1", "down")),
)


def layered_problem(num_layers: int, num_strategies: int, distinct: bool = False, seed: int = 0) -> Problem:
    """A model of `num_layers` layers without memory limit; equal layers share their arrays."""
    rng = np.random.default_rng(seed)
    nodes = [Node("embedding", rng.random(num_strategies), np.zeros(num_strategies, dtype=np.int64))]
    edges: list[Edge] = []
    stream = 0
    tables = _layer_tables(rng, num_strategies)
    for layer in range(num_layers):
        if distinct:
            tables = _layer_tables(rng, num_strategies)
        position = {"stream": stream}
        for name, has_parameter, inputs in LAYER:
            position[name] = len(nodes)
            nodes.append(Node(f"layers.{layer}.{name}", *tables[name]))
            edges += [Edge((position[i], position[name]), tables[i, name]) for i in inputs]
            if has_parameter:
                nodes.append(Node(f"layers.{layer}.{name}.weight", *tables[name, "weight"]))
                edges.append(Edge((len(nodes) - 1, position[name]), tables["weight", name]))
        stream = position["add2"]
    return Problem(tuple(nodes), tuple(edges))


def with_memory(problem: Problem, share: float) -> Problem:
    """The problem with a limit `share` of the way from the least bytes to what the fastest choice takes."""
    least, most = round(solve(problem.in_bytes()).seconds), solve(problem).num_bytes
    return Problem(problem.nodes, problem.edges, int(least + share * (most - least)))


def _layer_tables(rng: np.random.Generator, k: int) -> dict:
    """Menus by operation and reshard costs by pair of operations."""
    tables: dict = {}
    places = rng.random((k, 2))
    for name, has_parameter, inputs in LAYER:
        activation_bytes = 0 if name.startswith(("hub", "stream")) else 1
        shards = 2 ** rng.integers(0, 5, k)
        tables[name] = (rng.random(k) * activation_bytes, activation_bytes * (1 << 20) * (16 // shards))
        for source in inputs:
            tables[source, name] = _distances(rng, places)
        if has_parameter:
            shards = 2 ** rng.integers(0, 7, k)
            tables[name, "weight"] = (0.3 * np.log2(shards) + 0.01 * rng.random(k), (1 << 22) * (64 // shards))
            tables["weight", name] = _distances(rng, places)
    return tables


def _distances(rng: np.random.Generator, places: np.ndarray) -> np.ndarray:
    between = np.linalg.norm(places[:, None] - places[None], axis=2)
    return between * (0.8 + 0.4 * rng.random(between.shape))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--strategies", type=int, default=5)
    parser.add_argument("--memory", type=float, help="share of the memory between the least and what is best without")
    parser.add_argument("--distinct", action="store_true", help="every layer has costs of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=300.0)
    parser.add_argument("--only-auto", action="store_true", help="leave the reference out")
    options = parser.parse_args(arguments)
    problem = layered_problem(options.layers, options.strategies, options.distinct, options.seed)
    if options.memory is not None:
        problem = with_memory(problem, options.memory)
    print(f"{len(problem.nodes)} nodes, {len(problem.edges)} edges, {sum(e.seconds.size for e in problem.edges)} pairs")
    seconds = {}
    for solver in ("auto",) if options.only_auto else ("auto", "ilp"):
        start = time.perf_counter()
        solution = solve(problem, solver=solver, time_limit=options.time_limit)
        seconds[solver] = time.perf_counter() - start
        print(
            f"{solver:5} {seconds[solver]:9.3f} s   objective {solution.seconds:.9g}   gap {solution.gap:.1e}   "
            f"{solution.solver}"
        )
    if "ilp" in seconds:
        print(f"ratio {seconds['ilp'] / seconds['auto']:9.1f}")


if __name__ == "__main__":
    main()
