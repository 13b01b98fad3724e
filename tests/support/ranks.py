"""A pool of real gloo ranks, started once per test session and reused by every multi-process test.

Importing torch and transformers takes seconds, so a fork server imports them once and every rank is forked from it:
killing ranks that hang costs milliseconds, not another import. Tensors travel as plain pickled bytes, never as shared
memory. Everything below `_serve` runs in a rank; everything in `Ranks` runs in the process of the tests.

A test writes a module-level function, which runs in the requested world:

    def _sum_of_ranks() -> torch.Tensor:
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return total

    def test_ranks_add_up(ranks: Ranks) -> None:
        assert ranks.run(_sum_of_ranks, world_size=4) == [6, 6, 6, 6]
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils import _pytree as pytree

from autopar.runtime.ranks.launch import run_collectives_in_one_thread

T = TypeVar("T")

PRELOADED = [
    "torch.distributed.tensor",
    "torch.export",
    "torch._inductor.compile_fx",
    "transformers.generation.utils",
    "sympy",
    "networkx",
    "ortools.sat.python.cp_model",
    "pytest",
    "hypothesis",
    "autopar.api.entry",
    "autopar.views.formulas",
    "tests.support.parity",
]
START_SECONDS = 120.0  # the fork server's imports, on a busy machine
STACK_SECONDS = 1.0  # how long a hanging rank may take to write down where it hangs


class RankError(Exception):
    """A function failed on a rank, or the rank's process died; the message holds the traceback of that rank."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankTimeoutError(Exception):
    """Some ranks did not answer in time; the message says which, and where each of them hangs."""

    def __init__(self, ranks: tuple[int, ...], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    stack: Path


class Ranks:
    """Up to `max_world_size` processes, started when first needed; after a failure they are killed and started anew."""

    def __init__(self, max_world_size: int = 8) -> None:
        self.max_world_size = max_world_size
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-ranks-")
        self._num_groups = 0
        self._world_size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def run(self, function: Callable[..., T], *args: object, world_size: int = 2, timeout: float = 60.0) -> list[T]:
        """Run `function(*args)` on each rank of a gloo group of `world_size`, and return the results, tensors detached.

        `function` lies at module level. `timeout` is in seconds and begins when all ranks run.
        Raises RankError with the traceback of the first rank to fail, RankTimeoutError when ranks have not answered.
        """
        if not 1 <= world_size <= self.max_world_size:
            raise ValueError(f"world_size={world_size}: this pool has 1 to {self.max_world_size} ranks.")
        call = pickle.dumps((function, args))
        name = f"{function.__module__}.{function.__qualname__}"
        try:
            self._start(world_size)
            if world_size != self._world_size:
                self._num_groups, self._world_size = self._num_groups + 1, world_size
            store = os.path.join(self._folder.name, f"group{self._num_groups}")
            workers = self._workers[:world_size]
            for worker in workers:
                worker.pipe.send_bytes(pickle.dumps((store, world_size, call)))
            answers = self._collect(workers, name, timeout)
        except BaseException:
            # The other ranks may hang in a collective, and the group is in no known state.
            self.kill()
            raise
        return [pickle.loads(answers[rank]) for rank in range(world_size)]

    def kill(self) -> None:
        """End every rank; the next `run` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers.clear()
        self._world_size = 0

    def _start(self, world_size: int) -> None:
        """Start the ranks that are missing and wait until they are ready."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        started = range(len(self._workers), world_size)
        for rank in started:
            ours, theirs = context.Pipe()
            stack = Path(self._folder.name, f"stack{rank}")
            process = context.Process(target=_serve, args=(rank, theirs, str(stack)), name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack))
        self._collect([self._workers[rank] for rank in started], "the start of the ranks", START_SECONDS)

    @staticmethod
    def _collect(workers: list[_Worker], name: str, timeout: float) -> dict[int, bytes]:
        """One answer per worker, by position; raises when one failed, died or did not answer."""
        deadline = time.monotonic() + timeout
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        answers: dict[int, bytes] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                _raise_timeout(workers, sorted(waiting.values()), name, timeout)
            for rank, pipe in sorted((waiting[pipe], pipe) for pipe in ready if isinstance(pipe, Connection)):
                del waiting[pipe]
                try:
                    succeeded, answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    workers[rank].process.join()
                    code = workers[rank].process.exitcode
                    stack = workers[rank].stack.read_text()
                    message = f"rank {rank} of {len(workers)} died in {name} with exit code {code}.\n{stack}"
                    raise RankError(rank, message) from None
                if not succeeded:
                    text = answers[rank].decode()
                    raise RankError(rank, f"rank {rank} of {len(workers)} failed in {name}:\n{text}")
        return answers


def _raise_timeout(workers: list[_Worker], silent: list[int], name: str, timeout: float) -> NoReturn:
    """Ask each silent rank where it hangs and put that into the error."""
    for rank in silent:
        os.kill(workers[rank].process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_SECONDS
    while any(not workers[rank].stack.stat().st_size for rank in silent) and time.monotonic() < deadline:
        time.sleep(0.01)
    stacks = "".join(f"\nrank {rank}: {workers[rank].stack.read_text()}" for rank in silent)
    which = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} of {len(workers)}"
    message = f"{which} had not answered after {timeout:g} s in {name}; the ranks were killed.{stacks}"
    raise RankTimeoutError(tuple(silent), message)


def spare_the_collector() -> None:
    """Keep the garbage collector from walking all objects that stay, tests and modules, and from walking often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The CPU mesh of the running group; created once per rank and group."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _serve(rank: int, pipe: Connection, stack: str) -> None:
    """The life of a rank: answer one call after the other until the tests' process goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process gets it too, and kills us
    spare_the_collector()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    run_collectives_in_one_thread()
    group = ""
    with open(stack, "w") as file, contextlib.suppress(EOFError):
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        pipe.send_bytes(pickle.dumps((True, b"")))
        while True:
            store, world_size, call = pickle.loads(pipe.recv_bytes())
            try:
                if store != group:
                    _join_group(store, rank, world_size)
                    group = store
                function, args = pickle.loads(call)
                torch.manual_seed(0)
                answer = (True, pickle.dumps(pytree.tree_map(_portable, function(*args))))
            except BaseException:  # pytest.fail raises no Exception
                answer = (False, traceback.format_exc().encode())
            pipe.send_bytes(pickle.dumps(answer))


def _join_group(store: str, rank: int, world_size: int) -> None:
    """Leave the group of the call before and meet the other ranks at the file `store`."""
    mesh.cache_clear()
    _clear_sharding_prop_cache()  # which holds meshes of that group, and takes them for equal ones of the next
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def _portable(leaf: Any) -> Any:
    """A leaf of a result as it can be sent: tensors without graph, on the CPU, without the storage they view."""
    if isinstance(leaf, DTensor):
        raise TypeError("a DTensor cannot leave its rank; return its full_tensor() or its to_local().")
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf


def _die_with_parent() -> None:
    """End this process when the tests' process ends, even inside a collective that never returns."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
