"""The least sums of two tables over a dimension that both have: their product where plus is min and times is plus.

PyTorch computes max_i |x_i − y_i| (the Chebyshev distance) of all pairs of points in one pass, without an array of all
differences. Where M is at least every sum that may be the least of its pair,

    M − min_i (a_i + b_i) = max_i |(M − a_i) − b_i|

Threads share the pairs, each as it gets to them. PyTorch's own would wait for each other after every product, and spin
until then: on a machine that does other work, too, that takes twice as long as one thread alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from autopar.solver.problem import BLOCK, Floats

MAX_THREADS = 8  # each has a block of its own in memory


def least_sums(ones: Floats, others: Floats) -> Floats:
    """Return min_i ones[b, j, i] + others[b, k, i] as [b, j, k]; infinite where all sums are.

    The minima over each j and each k are subtracted before and added after, and entries above the least sum of any pair
    are cut off: M is near the sums that matter, and rounds them as they would be anyhow.
    """
    least, least_other = _finite_minimum(ones), _finite_minimum(others)
    ones, others = ones - least, others - least_other
    most = (ones.max(axis=1) + others.max(axis=1)).min(axis=1)  # no pair takes more than the i that is good for all
    if not np.isfinite(most).all():
        most = np.where(np.isfinite(most), most, _finite_maximum(ones) + _finite_maximum(others))
    cut = np.where(most > 0, 2 * most, 1.0)[:, None, None]
    found = _distances(2 * cut - np.minimum(ones, cut), np.minimum(others, cut))
    np.subtract(2 * cut, found, out=found)
    found[found >= cut] = np.inf
    found += least
    found += least_other.transpose(0, 2, 1)
    return found


def _finite_minimum(points: Floats) -> Floats:
    """Return the least coordinate of each point, as [b, j, 1]; 0 if none is finite."""
    least = points.min(axis=2, keepdims=True)
    least[np.isinf(least)] = 0.0
    return least


def _finite_maximum(points: Floats) -> float:
    return float(points.max(where=np.isfinite(points), initial=0.0))


def _distances(ones: Floats, others: Floats) -> Floats:
    """Return max_i |ones[b, j, i] − others[b, k, i]| as [b, j, k]."""
    (batch, rows, size), columns = ones.shape, others.shape[1]
    found = np.empty((batch, rows, columns))
    deep, high = max(1, BLOCK // (rows * columns * size)), max(1, BLOCK // (columns * size))

    def fill(place: tuple[int, int]) -> None:
        first, start = place
        each, block = slice(first, first + deep), slice(start, start + high)
        points, other_points = map(
            torch.from_numpy, (ones[each, block], others[each])
        )  # here, where no mode fakes tensors
        found[each, block] = torch.cdist(points, other_points, p=math.inf)

    for _ in _threads().map(fill, itertools.product(range(0, batch, deep), range(0, rows, high))):
        pass
    return found


def num_threads() -> int:
    """Return the number of threads to use: the cores of the process, at most MAX_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return threads whose kernels start no others; the process's other threads are as before."""
    of_others, count = torch.get_num_threads(), num_threads()
    started = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "least sums", initializer=_use_one_thread)
    for _ in range(count):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(of_others)  # threads that start later inherit this number
    return pool


def _use_one_thread() -> None:
    torch.get_num_threads()  # the first call in a thread copies the global setting; later changes then do not apply
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)
