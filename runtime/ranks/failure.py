"""A rank that raises or dies ends all ranks of a pipeline with its message: none waits for what never comes.

A rank that raises inside a step writes its message into the store in which the ranks met. A thread in every rank looks
there each second and writes that it is alive. Where the message of another rank stands, NCCL's groups are aborted,
which ends what waits in them. Gloo's cannot be (torch 2.13: `abort` returns, and who waits goes on waiting until the
process at the other end of its connection has ended), so a rank that still waits after GRACE_SECONDS prints the message
and ends its process. A rank whose connection broke looks for a message, and then for the ranks that stopped to write
that they are alive: those are the ones that died.

    {step}/failure      the first message about this call of the model; steps count the calls, alike on every rank
    {step}/heard/{rank} that a rank knows it: the rank that holds the store must not end sooner
    {step}/refused      how many ranks raised an error of autopar itself: where all did, nothing has been sent
    alive/{rank}        what is written each second: a count, the steps that have ended, whether the rank has left
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from autopar.errors import AutoparError, PipelineRankError
from autopar.runtime.collectives.axes import joined_groups
from autopar.runtime.ranks.agreement import many_processes

POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # within which every rank that lives has written that it does
GRACE_SECONDS = 10.0  # for a rank to come out of a step by itself once another has failed
SILENT_SECONDS = 40.0  # after which a rank counts as dead though no connection broke (NCCL between GPUs of one host)
STORE_SECONDS = 10.0
STOP_SECONDS = 2.0
EXIT_STATUS = 1

_made: Counter[str] = Counter()
"""How many watches there have been for a mesh: ranks make their modules in the same order."""


class Watch:
    """What a rank says about its steps to the other ranks of `mesh`, and what it hears; nothing on one process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._many = many_processes(mesh)
        if not self._many:
            return
        self._rank = dist.get_rank()
        self._ranks: list[int] = mesh.mesh.flatten().tolist()
        self._neighbour = self._ranks[(self._ranks.index(self._rank) + 1) % len(self._ranks)]
        self._groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        shape = hashlib.sha256(str(mesh.mesh.tolist()).encode()).hexdigest()[:16]
        self._store = _store_for(f"autopar/{shape}/{_made[shape]}")
        self._thread_store = _store_for(f"autopar/{shape}/{_made[shape]}")
        _made[shape] += 1
        self._step = 0
        self._refused: int | None = None
        self._failed = ""
        self._news = (-1, "")  # a step, and what has been written down about it
        self._outside = threading.Event()
        self._outside.set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._beats = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One call of the model, made by all ranks.

        Raises PipelineRankError where another rank failed in it, or a rank failed in an earlier one.
        """
        if not self._many:
            yield
            return
        self._check_usable()
        self._begin()
        try:
            yield
            if self._failed:  # the collectives that were aborted may have returned
                raise PipelineRankError(self._failed)
        except PipelineRankError:
            raise
        except BaseException as error:
            first = _first_cause(error)
            if _is_broken_connection(first):
                self._failed = self._reason(first)
                raise PipelineRankError(self._failed) from error
            self._tell(first)
            raise
        finally:
            self._outside.set()
            self._step += 1

    def stop(self) -> None:
        """Say that this rank takes part in no further step."""
        if self._many and not self._stopped.is_set():
            self._stopped.set()
            if self._thread not in (None, threading.current_thread()):
                self._thread.join(STOP_SECONDS)  # an interpreter that ends does not stand threads inside C++
            if not self._failed:  # who failed has said so
                with contextlib.suppress(RuntimeError):  # the store may be gone by now
                    self._beat(self._store)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="autopar-watch", daemon=True)
            self._thread.start()
        self._outside.clear()

    def _check_usable(self) -> None:
        """Raise PipelineRankError where the ranks are out of step."""
        if self._refused is not None and not self._all_refused(self._refused):
            self._failed = f"rank {self._rank} refused call {self._refused} of the model, and not every rank did"
        self._refused = None
        if self._failed:
            raise PipelineRankError(
                f"{self._failed}\nThe ranks of this pipeline are out of step since then; start all of them again, from "
                "a checkpoint."
            )

    def _all_refused(self, step: int) -> bool:
        deadline = time.monotonic() + ANSWER_SECONDS
        while self._store.add(f"{step}/refused", 0) < len(self._ranks):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _tell(self, error: BaseException) -> None:
        """Write down what this rank raises."""
        message = f"rank {self._rank} failed: {type(error).__name__}: {error}"
        if isinstance(error, AutoparError):
            self._refused = self._step
        else:
            self._failed = message
        with contextlib.suppress(RuntimeError):  # what is raised matters more than a store that is gone
            self._store.compare_set(f"{self._step}/failure", "", message)
            if self._refused is not None:
                self._store.add(f"{self._step}/refused", 1)
            self._wait_until_heard()

    def _reason(self, error: BaseException) -> str:
        """Why a connection broke: what the rank that failed has written, else which rank no longer lives."""
        broken = re.sub(r"^\[.*?\] | This is typically .*$", "", str(error).splitlines()[0])  # places in gloo's code
        try:
            message = self._message_of_others(broken)
            self._wait_until_heard()
            return message
        except RuntimeError:
            step, message = self._news
            if step == self._step:
                return message
            return _obituary([], f"{broken}; the store in which ranks write their messages is gone, too")

    def _message_of_others(self, broken: str) -> str:
        """What is written about this step; where that is nothing, who no longer writes that it is alive."""
        before = self._all_beats()
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            if message := _read(self._store, f"{self._step}/failure"):
                return message
            time.sleep(0.1)
        now = self._all_beats()
        dead = [rank for rank in self._ranks if rank != self._rank and now[rank] == before[rank]]
        for rank in dead:
            self._store.set(f"{self._step}/heard/{rank}", "1")  # nobody is to wait for it
        return self._store.compare_set(f"{self._step}/failure", "", _obituary(dead, broken)).decode()

    def _wait_until_heard(self) -> None:
        """Give the other ranks time to read what is written about this step."""
        self._store.set(f"{self._step}/heard/{self._rank}", "1")
        deadline = time.monotonic() + ANSWER_SECONDS
        everyone = [f"{self._step}/heard/{rank}" for rank in self._ranks]
        while not self._store.check(everyone) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _all_beats(self) -> dict[int, str]:
        return {rank: _read(self._store, f"alive/{rank}") for rank in self._ranks}

    def _look(self) -> None:
        """The life of the thread."""
        heard, since = "", time.monotonic()
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self._beat(self._thread_store)
                step = self._step
                message = self._read_news(step)
                if self._outside.is_set():
                    since = time.monotonic()
                    continue
                beat = _read(self._thread_store, f"alive/{self._neighbour}")
                if beat != heard or not beat:
                    heard, since = beat, time.monotonic()
                if not message and _is_gone(beat, step, time.monotonic() - since):
                    said = _obituary([self._neighbour], "it no longer writes that it is alive")
                    self._thread_store.compare_set(f"{step}/failure", "", said)
                    message = self._read_news(step)
            except RuntimeError:
                return  # the rank that holds the store has ended: so do the connections to it
            if message:
                self._end(step, message)

    def _read_news(self, step: int) -> str:
        """What has been written about a step; says that this rank knows."""
        message = _read(self._thread_store, f"{step}/failure")
        if message and self._news[0] != step:
            self._news = step, message
            self._thread_store.set(f"{step}/heard/{self._rank}", "1")
        return message

    def _end(self, step: int, message: str) -> None:
        """Have the main thread raise `message`, or end the process with it."""
        if self._outside.is_set() or self._step != step:
            return
        self._failed = message
        for group in (*self._groups, *joined_groups()):
            if dist.get_backend(group) == "nccl":
                backend: Any = group._get_backend(torch.device("cuda"))
                backend.abort()
        if not self._outside.wait(GRACE_SECONDS) and self._step == step:
            print(f"rank {self._rank} ends, because {message}", file=sys.stderr, flush=True)
            os._exit(EXIT_STATUS)

    def _beat(self, store: Store) -> None:
        self._beats += 1
        store.set(f"alive/{self._rank}", f"{self._beats} {self._step} {int(self._stopped.is_set())}")


def watched(owner: object, mesh: DeviceMesh) -> Watch:
    """A watch that stops with its owner, or with the process."""
    watch = Watch(mesh)
    weakref.finalize(owner, watch.stop)
    return watch


def _store_for(prefix: str) -> Store:
    """The store of the ranks, over a connection of its own: who waits for a key blocks no other."""
    store: Any = _get_default_store()
    store = PrefixStore(prefix, store.clone())
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    return store


def _read(store: Store, key: str) -> str:
    """The value of a key, or nothing; does not wait for it."""
    return store.get(key).decode() if store.check([key]) else ""


def _is_gone(beat: str, step: int, silent_seconds: float) -> bool:
    """Whether the rank that wrote `beat` will not come to `step`."""
    if not beat:
        return False  # it may not have been called yet
    _, ended, left = map(int, beat.split())
    return ended <= step and (bool(left) or silent_seconds > SILENT_SECONDS)


def _first_cause(error: BaseException) -> BaseException:
    """The error behind those of PyTorch's schedules, which say only on which stage it was."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_broken_connection(error: BaseException) -> bool:
    """Whether an error says that another rank is gone; gloo raises RuntimeErrors that only their text tells apart."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in ("gloo", "by peer", "Broken pipe"))


def _obituary(ranks: Sequence[int], evidence: str) -> str:
    if not ranks:
        return f"a rank ended without a message ({evidence})"
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"{named} ended without a message, perhaps killed for its memory ({evidence})"
