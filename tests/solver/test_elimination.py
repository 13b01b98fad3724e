"""Messages of large bags are computed by threads, block by block: they are the same, and so are errors."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from autopar.solver import elimination
from autopar.solver.elimination import Tables, compile_elimination, evaluate, num_threads
from autopar.solver.problem import Edge, Node, Problem


def _triangle(size: int) -> Problem:
    rng = np.random.default_rng(0)
    nodes = tuple(Node(str(number), rng.random(size), np.zeros(size, dtype=np.int64)) for number in range(4))
    pairs = ((0, 1), (0, 2), (1, 2), (2, 3))
    return Problem(nodes, tuple(Edge(pair, rng.random((size, size))) for pair in pairs), None)


@pytest.mark.parametrize("block", [16, 64, 200], ids=["part of a row", "a row", "rows"])
def test_threads_share_the_blocks_of_a_large_bag_and_find_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _triangle(40)
    tables = Tables(problem)
    compiled, weighted = compile_elimination(problem, tables, balanced=True), tables.weighted(0.0)
    whole = evaluate(compiled, weighted)
    monkeypatch.setattr(elimination, "BLOCK", block)
    seen: set[int] = set()
    added = elimination._add_into

    def add_into(total: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
        seen.add(threading.get_ident())
        time.sleep(1e-5)  # the others get their turn
        return added(total, parts)

    monkeypatch.setattr(elimination, "_add_into", add_into)
    alone = evaluate(compiled, weighted)
    assert seen == {threading.get_ident()}, "a small bag is not shared"
    monkeypatch.setattr(elimination, "SHARED", 0)
    monkeypatch.setattr(elimination, "num_threads", lambda: 4)
    shared = evaluate(compiled, weighted)
    assert len(seen) > 2
    for expected, *found in zip(whole, alone, shared, strict=True):
        assert all(np.array_equal(expected, each) for each in found)


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _triangle(40)
    tables = Tables(problem)
    compiled = compile_elimination(problem, tables, balanced=True)
    monkeypatch.setattr(elimination, "BLOCK", 64)
    monkeypatch.setattr(elimination, "SHARED", 0)
    here, added = threading.get_ident(), elimination._add_into

    def add_into(total: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
        if threading.get_ident() != here:
            raise MemoryError("no memory for a block")
        return added(total, parts)

    monkeypatch.setattr(elimination, "_add_into", add_into)
    with pytest.raises(MemoryError, match="no memory for a block"):
        evaluate(compiled, tables.weighted(0.0))


def test_there_are_as_many_threads_as_cores_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination.os, "sched_getaffinity", lambda pid: set(range(3)), raising=False)
    assert num_threads() == 3
    monkeypatch.setattr(elimination.os, "sched_getaffinity", lambda pid: set(range(99)), raising=False)
    assert num_threads() == elimination.MAX_THREADS
    monkeypatch.delattr(elimination.os, "sched_getaffinity")
    monkeypatch.setattr(elimination.os, "cpu_count", lambda: 2)
    assert num_threads() == 2
    monkeypatch.setattr(elimination.os, "cpu_count", lambda: None)
    assert num_threads() == 1
