"""Optimizer steps on the host, overlapped with the backward: a thread steps parameters as their gradients arrive.

The thread lives from the first gradient of a backward to its end, which waits for it: behind `backward()` all weights
are new ones. The host's operators let go of the interpreter's lock, so that the backward goes on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class BackwardThread(Generic[T]):
    """Runs `step` on a thread, over what hooks of a backward put there; `finished` runs behind it, in the backward."""

    def __init__(self, step: Callable[[Iterable[T]], None], finished: Callable[[], None]) -> None:
        self._step, self._finished = step, finished
        self._waiting: SimpleQueue[T | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._backward = -1
        """The number of the backward that waits for the thread at its end; one that fails does not come to that."""

    def put(self, each: T) -> None:
        """Have `each` stepped; called by a hook of a backward."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autopar-host-steps", daemon=True)
            self._thread.start()
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._waiting.put(each)

    @torch.no_grad()
    def _run(self) -> None:
        try:
            self._step(self._arriving())
        except BaseException as error:  # raised where it is waited for
            self._error = error

    def _arriving(self) -> Iterator[T]:
        while (each := self._waiting.get()) is not None:
            yield each

    def _finish(self) -> None:
        """Wait for all that was put; raises what the thread has raised."""
        thread, self._thread = self._thread, None
        assert thread is not None, "a backward that has put something"
        self._waiting.put(None)
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            self._waiting = SimpleQueue()
            raise error
        self._finished()
