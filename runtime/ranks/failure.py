"""A rank that raises or dies ends all ranks of a mesh with its message: none waits for what never comes.

A rank that raises inside a step writes its message into the store that the ranks share. A thread in every rank looks
there each second and writes that it is alive. Where the message of another rank stands, NCCL's groups are aborted,
which ends what waits in them. Gloo's cannot be (torch 2.13: `abort` returns, and who waits goes on waiting until the
process at the other end of its connection has ended), so a rank that still waits after GRACE_SECONDS prints the message
and ends its process. A rank whose connection broke looks for a message, and then for the ranks that stopped to write
that they are alive: those are the ones that died. A rank that waits for long prints for whom, and goes on waiting: the
other may be writing a checkpoint; the time-out of the process group ends it.

A step is a call of the model. Backwards are told apart from what lies between steps: a rank waits in them, too. Steps
and backwards together are the events of a rank, which come in the same order on every rank.

    {step}/failure      the first message about this call of the model; steps count the calls, alike on every rank
    {step}/heard/{rank} that a rank knows it: the rank that holds the store must not end sooner
    {step}/refused      how many ranks raised an error that is forgiven: where all did, they are in step
    alive/{rank}        what is written each second: a count, the events that have ended, whether the rank has left, the
                        events that have begun
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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.utils.checkpoint import _StopRecomputationError

from autopar.errors import AutoparError, PeerError
from autopar.runtime.collectives.mesh_axes import made_groups
from autopar.runtime.ranks.agreement import many_processes
from autopar.runtime.ranks.backends import backend_of
from autopar.runtime.ranks.heartbeats import events_of, has_left, is_gone, named, obituary, read, store_for

POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # seconds within which each live rank has written its heartbeat
GRACE_SECONDS = 10.0  # for a rank to come out of a step by itself once another has failed
NAMED_SECONDS = 60.0  # after which a rank that waits says for whom
STOP_SECONDS = 2.0
EXIT_STATUS = 1
IN_STEP = "Every rank must make the same calls and run backward for the same ones."

_made: Counter[str] = Counter()
"""Number of watches made so far for each mesh, which is alike on all ranks: they make modules in the same order."""


class Watch:
    """Messages and heartbeats about steps between this rank and the others of `mesh`; nothing on one process.

    It is the context of a step, and may be entered again inside one. Errors in `forgives` leave it usable if every rank
    raises one in the same step.
    """

    def __init__(self, mesh: DeviceMesh, forgives: type[Exception] = AutoparError) -> None:
        self.many = many_processes(mesh)
        """True if there are other ranks."""
        self.step = 0
        """Number of steps that have ended, alike on every rank."""
        self.depth = 0
        """1 in a step; more where a step is entered again inside one."""
        if not self.many:
            return
        self.rank = dist.get_rank()
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self._neighbour = self.ranks[(self.ranks.index(self.rank) + 1) % len(self.ranks)]
        self._groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        shape = hashlib.sha256(str(mesh.mesh.tolist()).encode()).hexdigest()[:16]
        self.store = store_for(f"autopar/{shape}/{_made[shape]}")
        self._thread_store = store_for(f"autopar/{shape}/{_made[shape]}")
        _made[shape] += 1
        self._forgives = forgives
        self._refused: int | None = None
        self._failed = ""
        self._news = (-1, "")  # a step, and what has been written down about it
        self._begun = self._ended = 0
        self._since = 0.0  # when the last event began
        self._backwards = 0  # backwards that run now
        self._device = mesh.device_type
        self._patience = _patience_of(self._groups[0], mesh.device_type)
        self.on_poll: Callable[[Store], None] = lambda store: None
        """Further work of the thread, done each second."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._beats = 0

    def __enter__(self) -> None:
        """Begin a call of the model, which all ranks make.

        Raises PeerError where a rank failed in an earlier one.
        """
        if self.depth == 0 and self.many:
            self._check_usable()
            self._begin()
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the call; raises PeerError where another rank failed in it."""
        self.depth -= 1
        if self.depth or not self.many:
            return
        try:
            if error is None:
                self.check()  # the collectives that were aborted may have returned
            else:
                self.failed_by(error)
        finally:
            self.step += 1
            self._ended += 1

    def check(self) -> None:
        """Raise PeerError where another rank is known to have failed."""
        if self._failed:
            raise PeerError(self._failed)

    def check_patience(self) -> None:
        """Raise PeerError where a rank has waited in its step for as long as it would in a collective."""
        waited = time.monotonic() - self._since
        if waited > self._patience:
            late = [rank for rank, beat in self._all_beats().items() if events_of(beat) < self._begun]
            self._failed = f"{named(late)} did not come to call {self.step} of the model within {waited:.0f} s"
            raise PeerError(self._failed)

    def backward_begins(self) -> None:
        """Count a backward, until it ends; called inside of it."""
        self._begun, self._since = self._begun + 1, time.monotonic()
        self._backwards += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._ended += 1
        self._backwards = max(0, self._backwards - 1)

    def failed_by(self, error: BaseException) -> None:
        """Tell the others of an error, or raise theirs where a broken connection is all that is known here."""
        first = _first_cause(error)
        if isinstance(first, (PeerError, _StopRecomputationError)):  # the latter ends recomputations that are done
            return
        if _is_broken_connection(first):
            self._failed = self._reason(first)
            raise PeerError(self._failed) from error
        self._announce_failure(first)

    def stop(self) -> None:
        """Say that this rank takes part in no further step."""
        if self.many and not self._stopped.is_set():
            if self._backwards and not self._failed:
                with contextlib.suppress(RuntimeError):
                    self._explain_backward()
            self._stopped.set()
            if self._thread not in (None, threading.current_thread()):
                self._thread.join(STOP_SECONDS)  # an interpreter that ends does not stand threads inside C++
            if not self._failed:  # a failed rank has already written
                with contextlib.suppress(RuntimeError):  # the store may be gone by now
                    self._beat(self.store)

    def _explain_backward(self) -> None:
        """Print who ended a backward that has not ended here: autograd raises what gloo says, which names nobody."""
        beats = self._all_beats()
        late = [rank for rank in self.ranks if events_of(beats[rank]) < self._begun]
        left = [rank for rank in late if has_left(beats[rank])]
        if left:
            self._print(f"{named(left)} left without coming to a backward in which this rank was. {IN_STEP}")
        elif late:
            self._print(f"this rank was in a backward to which {named(late)} did not come. {IN_STEP}")
        else:
            time.sleep(2 * POLL_SECONDS)
            now = self._all_beats()
            if dead := [rank for rank in self.ranks if rank != self.rank and now[rank] == beats[rank]]:
                self._print(obituary(dead, "in a backward"))

    def _print(self, message: str) -> None:
        print(f"rank {self.rank}: {message}", file=sys.stderr, flush=True)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="autopar-watch", daemon=True)
            self._thread.start()
        self._ended, self._backwards = self._begun, 0  # a backward that raised did not record its end
        self._begun, self._since = self._begun + 1, time.monotonic()

    def _check_usable(self) -> None:
        """Raise PeerError where the ranks are out of step."""
        if self._refused is not None and not self._all_refused(self._refused):
            self._failed = f"rank {self.rank} refused call {self._refused} of the model, and not every rank did"
        self._refused = None
        if self._failed:
            raise PeerError(
                f"{self._failed}\nThe ranks are out of step since then; start all of them again, from a checkpoint."
            )

    def _all_refused(self, step: int) -> bool:
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.store.add(f"{step}/refused", 0) < len(self.ranks):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _announce_failure(self, error: BaseException) -> None:
        """Write down what this rank raises."""
        message = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        if isinstance(error, self._forgives):
            self._refused, self._failed = self.step, ""  # the thread may have heard the same of another rank
        else:
            self._failed = message
        with contextlib.suppress(RuntimeError):  # the original error matters more than a store that is gone
            self.store.compare_set(f"{self.step}/failure", "", message)
            if self._refused is not None:
                self.store.add(f"{self.step}/refused", 1)
            self._wait_until_heard()

    def _reason(self, error: BaseException) -> str:
        """Return why a connection broke: what the rank that failed has written, else which rank no longer lives."""
        broken = re.sub(r"^\[.*?\] | This is typically .*$", "", str(error).splitlines()[0])  # places in gloo's code
        try:
            message = self._message_of_others(broken)
            self._wait_until_heard()
            return message
        except RuntimeError:
            step, message = self._news
            if step == self.step:
                return message
            return obituary([], f"{broken}; the store in which ranks write their messages is gone, too")

    def _message_of_others(self, broken: str) -> str:
        """Return the message about this step; if there is none, name the ranks whose heartbeats have stopped."""
        before = self._all_beats()
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            if message := read(self.store, f"{self.step}/failure"):
                return message
            time.sleep(0.1)
        now = self._all_beats()
        dead = [rank for rank in self.ranks if rank != self.rank and now[rank] == before[rank]]
        for rank in dead:
            self.store.set(f"{self.step}/heard/{rank}", "1")  # nobody is to wait for it
        return self.store.compare_set(f"{self.step}/failure", "", obituary(dead, broken)).decode()

    def _wait_until_heard(self) -> None:
        """Give the other ranks time to read what is written about this step."""
        self.store.set(f"{self.step}/heard/{self.rank}", "1")
        deadline = time.monotonic() + ANSWER_SECONDS
        everyone = [f"{self.step}/heard/{rank}" for rank in self.ranks]
        while not self.store.check(everyone) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _all_beats(self) -> dict[int, str]:
        return {rank: read(self.store, f"alive/{rank}") for rank in self.ranks}

    def _watch(self) -> None:
        heard, since, last_named = "", time.monotonic(), 0
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self._beat(self._thread_store)
                self.on_poll(self._thread_store)
                begun, step = self._begun, self.step
                message = self._read_news(step) or self._news_of_backward(step)
                if not self._is_waiting(begun):
                    since = time.monotonic()
                    continue
                beat = read(self._thread_store, f"alive/{self._neighbour}")
                if beat != heard or not beat:
                    heard, since = beat, time.monotonic()
                if not message and is_gone(beat, begun - 1, time.monotonic() - since):
                    found = obituary([self._neighbour], "it no longer writes that it is alive")
                    self._thread_store.compare_set(f"{step}/failure", "", found)
                    message = self._read_news(step)
                if last_named != begun and time.monotonic() - self._since > NAMED_SECONDS:
                    last_named = begun
                    self._name_awaited(begun)
            except RuntimeError:
                return  # the rank that holds the store has ended: so do the connections to it
            if message:
                self._end(begun, message)

    def _is_waiting(self, begun: int) -> bool:
        """Return whether this rank is still in event number `begun`."""
        return self._begun == begun and (self.depth > 0 or self._backwards > 0)

    def _read_news(self, step: int) -> str:
        """Return the message about a step, "" if there is none; note that this rank knows it."""
        message = read(self._thread_store, f"{step}/failure")
        if message and self._news[0] != step:
            self._news = step, message
            self._thread_store.set(f"{step}/heard/{self.rank}", "1")
        return message

    def _news_of_backward(self, step: int) -> str:
        """Return the message about the step whose backward this rank runs.

        Returns "" if there is no message or no backward, or if every rank refused that step.
        """
        if not self._backwards or not step:
            return ""
        message = self._read_news(step - 1)
        everyone = bool(message) and self._thread_store.add(f"{step - 1}/refused", 0) == len(self.ranks)
        return "" if everyone else message

    def _name_awaited(self, begun: int) -> None:
        """Print which ranks have not come to this event."""
        late = [rank for rank in self.ranks if rank != self.rank and events_of(self._beat_of(rank)) < begun]
        if late:
            what = "a backward" if self._backwards else f"call {self.step} of the model"
            seconds = time.monotonic() - self._since
            self._print(f"{seconds:.0f} s in {what}, to which {named(late)} did not come yet. {IN_STEP}")

    def _end(self, begun: int, message: str) -> None:
        """Have the main thread raise `message`, or end the process with it."""
        if self._backwards:
            self._print(message)  # autograd raises what gloo says
        elif self._left_within(POLL_SECONDS, begun):  # it was about to raise the same
            return
        self._failed = message
        for group in (*self._groups, *made_groups()):
            if backend_of(group, self._device) == "nccl":
                backend: Any = group._get_backend(torch.device(self._device))
                backend.abort()
        if not self._left_within(GRACE_SECONDS, begun):
            self._print(f"ends, because {message}")
            os._exit(EXIT_STATUS)

    def _left_within(self, seconds: float, begun: int) -> bool:
        """Wait up to `seconds` for this rank to leave the event; return whether it does."""
        deadline = time.monotonic() + seconds
        while self._is_waiting(begun):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _beat_of(self, rank: int) -> str:
        return read(self._thread_store, f"alive/{rank}")

    def _beat(self, store: Store) -> None:
        self._beats += 1
        store.set(f"alive/{self.rank}", f"{self._beats} {self._ended} {int(self._stopped.is_set())} {self._begun}")


def watched(owner: object, mesh: DeviceMesh, forgives: type[Exception] = AutoparError) -> Watch:
    """Return a watch that stops with its owner, or with the process."""
    watch = Watch(mesh, forgives)
    weakref.finalize(owner, watch.stop)
    return watch


def _patience_of(group: dist.ProcessGroup, device: str) -> float:
    """Return the seconds after which a collective of a group times out."""
    backend: Any = group._get_backend(torch.device(device))
    return backend.options._timeout.total_seconds()


def _first_cause(error: BaseException) -> BaseException:
    """Return the error behind those of PyTorch's schedules, which say only on which stage it was."""
    while error.__cause__ is not None and not isinstance(error, AutoparError):
        error = error.__cause__
    return error


def _is_broken_connection(error: BaseException) -> bool:
    """Return whether an error tells that another rank is gone; gloo's RuntimeErrors are recognized by their text."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in ("gloo", "by peer", "Broken pipe"))
