"""The message of a large bag is a product of two tables, or grows choice by choice: no other than that of the whole."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.solver.elimination import evaluation, min_plus
from autopar.solver.elimination.bucket_elimination import EliminationStep, compile_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate
from autopar.solver.elimination.min_plus import least_sums, num_threads
from autopar.solver.problem import Edge, Floats, Node, Problem

ROUNDING = 2.0**-50  # a few units in the last place

seeds = st.integers(0, 2**32 - 1)
forbidden = st.sampled_from([0.0, 0.1, 0.7, 1.0])
sizes = st.integers(1, 5)


def _points(rng: np.random.Generator, shape: tuple[int, ...], share: float, scale: float = 1.0) -> Floats:
    points = rng.random(shape) * scale ** rng.random(shape)
    points[rng.random(shape) < share] = np.inf
    return points


def _greatest(points: Floats) -> float:
    return float(points.max(where=np.isfinite(points), initial=0.0))


@settings(deadline=None, max_examples=200)
@given(seeds, st.tuples(sizes, sizes, sizes, sizes), forbidden, st.sampled_from([1.0, 1e-9, 1e9]))
def test_least_sums_are_those_of_all_sums(seed: int, shape: tuple[int, ...], share: float, scale: float) -> None:
    rng = np.random.default_rng(seed)
    batch, one, other, shared = shape
    ones, others = _points(rng, (batch, one, shared), share, scale), _points(rng, (batch, other, shared), share, scale)
    given_ones, given_others = ones.copy(), others.copy()
    found = least_sums(ones, others)
    expected = (ones[:, :, None] + others[:, None]).min(axis=-1)
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    most = (ones.max(axis=1) + others.max(axis=1)).min(axis=1)  # of the choice that is good for all: no sum is above it
    most = np.where(np.isfinite(most), most, _greatest(ones) + _greatest(others))
    off = np.abs(np.subtract(found, expected, where=np.isfinite(expected), out=np.zeros_like(expected)))
    assert (off <= ROUNDING * most[:, None, None]).all()
    assert np.array_equal(ones, given_ones) and np.array_equal(others, given_others), "arguments are as they were"


def test_least_sums_are_exact_next_to_sums_far_above_them() -> None:
    # A price may make a choice a billion times as expensive as the least.
    ones, others = np.array([[[1.0, 1e15], [2.0, 1e15]]]), np.array([[[1e-6, 1e15], [1e-9, 1e15]]])
    assert least_sums(ones, others).tolist() == [[[1.0 + 1e-6, 1.0 + 1e-9], [2.0 + 1e-6, 2.0 + 1e-9]]]


def test_tensors_that_a_mode_fakes_are_no_matter() -> None:
    ones = np.arange(6.0).reshape(1, 2, 3)
    with FakeTensorMode(), torch.device("meta"):
        assert least_sums(ones, ones).tolist() == [[[0.0, 3.0], [3.0, 6.0]]]


@pytest.mark.parametrize("block", [1, 70, 500, 10**9], ids=["a row", "some rows", "two of three", "all"])
def test_threads_share_a_product_and_find_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ones, others = rng.random((3, 7, 5)), rng.random((3, 6, 5))
    monkeypatch.setattr(min_plus, "BLOCK", block)
    monkeypatch.setattr(min_plus, "num_threads", lambda: 4)
    seen, distances = set[int](), torch.cdist

    def slowly(*args: Any, **options: Any) -> torch.Tensor:
        seen.add(threading.get_ident())
        time.sleep(1e-3)  # the others get their turn
        return distances(*args, **options)

    monkeypatch.setattr(torch, "cdist", slowly)
    min_plus._threads.cache_clear()
    try:
        found = least_sums(ones, others)
    finally:
        min_plus._threads.cache_clear()
    assert np.allclose(found, (ones[:, :, None] + others[:, None]).min(axis=-1), rtol=1e-15)
    assert threading.get_ident() not in seen and (len(seen) > 2 or block > 70)


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*args: Any, **options: Any) -> None:
        raise MemoryError("no memory for a block")

    monkeypatch.setattr(torch, "cdist", without_memory)
    with pytest.raises(MemoryError, match="no memory for a block"):
        least_sums(np.ones((1, 2, 3)), np.ones((1, 2, 3)))


def test_its_threads_start_no_others_and_leave_those_of_the_process_as_they_are() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        min_plus._threads.cache_clear()
        threads = min_plus._threads()
        assert {each.result() for each in [threads.submit(torch.get_num_threads) for _ in range(20)]} == {1}
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on POSIX")
def test_a_forked_process_has_threads_of_its_own() -> None:
    ones = np.arange(6.0).reshape(1, 2, 3)
    least_sums(ones, ones)
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads running, which this tests
        child = context.Process(target=least_sums, args=(ones, ones))
        child.start()
    child.join(60)
    alive = child.is_alive()
    child.kill()
    assert not alive and child.exitcode == 0


def test_there_are_as_many_threads_as_cores_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(min_plus.os, "sched_getaffinity", lambda pid: set(range(3)), raising=False)
    assert num_threads() == 3
    monkeypatch.setattr(min_plus.os, "sched_getaffinity", lambda pid: set(range(99)), raising=False)
    assert num_threads() == min_plus.MAX_THREADS
    monkeypatch.delattr(min_plus.os, "sched_getaffinity")
    monkeypatch.setattr(min_plus.os, "cpu_count", lambda: 2)
    assert num_threads() == 2
    monkeypatch.setattr(min_plus.os, "cpu_count", lambda: None)
    assert num_threads() == 1


@st.composite
def _steps(draw: st.DrawFn) -> tuple[EliminationStep, list[Floats]]:
    """A bag of up to four dims, and tables over some of them that have the first one or have it not."""
    lengths = tuple(draw(st.lists(sizes, min_size=2, max_size=4)))
    dims = range(len(lengths))
    scopes = draw(st.lists(st.lists(st.sampled_from(dims), min_size=1, max_size=3, unique=True), max_size=4))
    scopes = [[0], *scopes, *[[dim] for dim in dims]]
    rng, share = np.random.default_rng(draw(seeds)), draw(forbidden.filter(lambda each: each < 1))
    tables = [_points(rng, tuple(lengths[dim] for dim in scope), share) for scope in scopes]
    return EliminationStep(lengths, tuple((number, tuple(scope)) for number, scope in enumerate(scopes))), tables


@settings(deadline=None, max_examples=300)
@given(_steps())
def test_a_message_is_the_same_however_it_is_found(drawn: tuple[EliminationStep, list[Floats]]) -> None:
    step, tables = drawn
    expected = evaluation.bag_sum(step, tables).min(axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "BLOCK", 0)
        found = evaluation._message(step, tables)
    assert found.shape == expected.shape
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    assert np.allclose(found, expected, rtol=1e-14, atol=0.0)


def test_a_large_bag_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 130
    rng = np.random.default_rng(0)
    nodes = tuple(Node(str(number), rng.random(size), np.zeros(size, dtype=np.int64)) for number in range(4))
    problem = Problem(
        nodes, tuple(Edge(pair, rng.random((size, size))) for pair in ((0, 1), (0, 2), (1, 2), (2, 3))), None
    )
    tables = Tables(problem)
    compiled, weighted = compile_elimination(problem, tables, balanced=True), tables.weighted(0.0)
    assert compiled.largest > evaluation.BLOCK
    built: list[int] = []
    whole = evaluation.bag_sum

    def bag_sum(step: EliminationStep, found: list[Floats]) -> Floats:
        built.append(math.prod(step.sizes))
        return whole(step, found)

    monkeypatch.setattr(evaluation, "bag_sum", bag_sum)
    evaluate(compiled, weighted)
    assert built and max(built) <= evaluation.BLOCK
