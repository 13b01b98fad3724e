"""A graph of calls on a CPU, which stands for a CUDA graph: calls with the arguments and storages that they had.

A replay runs no Python of the step. It calls each recorded operation with its recorded arguments, and writes the
results where they were: a value that came from the host stays as it was, and so does one that comes from a tensor that
is no longer in use.

Messages between two ranks are replayed as they were posted. A receive is waited for by the first call that takes what
it writes, as a stream would wait: two ranks may post theirs before either has come to its send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

WAIT = torch.ops._c10d_functional.wait_tensor.default
SEND, RECEIVE = torch.ops.c10d.send.default, torch.ops.c10d.recv_.default


class RecordedCalls:
    """Recorder of graphs of calls."""

    def __init__(self) -> None:
        self.replays = 0
        self.captures = 0

    def warm_up(self, step: Callable[[], Any]) -> Any:
        return step()

    def capture(self, step: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Callable[[], None]]:
        """Return the result of a step, whose values are spoilt, and its replay; other values are as before.

        What a step draws, it draws by one of the `generators`, each for one call.
        """
        self.captures += 1
        with _Recording() as recording:
            result = step()
        recording.undo()
        kept = recording.calls
        drawn = [x for _, args, kwargs, _ in kept for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        found, expected = (sorted(map(attrgetter("_cdata"), each)) for each in (drawn, generators))
        assert found == expected, "the step draws by other generators"
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor):
                each.fill_(float("nan"))

        def replay() -> None:
            self.replays += 1
            posted = _Posted()
            with torch.no_grad():
                for call in kept:
                    posted.replay(*call)
                posted.wait()

        return result, replay


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        """Operation, arguments, and for each of its results the tensor to write, None for views and in-place ones."""
        self._before: dict[int, tuple[UntypedStorage, UntypedStorage | None]] = {}
        """Storages and their values before the step; None for those that it has made."""

    def undo(self) -> None:
        """Write back what storages had before: a capture calls nothing."""
        for storage, values in self._before.values():
            if values is not None:
                storage.copy_(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        arguments = [x.untyped_storage() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = {each._cdata for each in arguments}
        for each in arguments:
            if each._cdata not in self._before:
                self._before[each._cdata] = each, each.clone()
        result = func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, _alias, (args, kwargs))
        results = [_alias(x) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self.calls.append((func, args, kwargs, [None if _storage(x) in given else x for x in results]))
        for x in results:
            self._before.setdefault(_storage(x), (x.untyped_storage(), None))
        return result


class _Posted:
    """Messages that a replay has posted."""

    def __init__(self) -> None:
        self._sends: list[Any] = []
        self._receives: dict[int, Any] = {}
        """Storage → the receive that writes it."""

    def replay(self, func: Any, args: Any, kwargs: Any, written: list[Tensor | None]) -> None:
        """Call an operation again, and write its results where they were."""
        if func is SEND:
            tensors, *others = args
            self._wait_for(tensors)
            self._sends.append(func([x.clone() for x in tensors], *others))
            return
        if func is RECEIVE:
            work = func(*args)
            self._receives.update({_storage(x): work for x in args[0]})
            return
        self._wait_for(pytree.tree_leaves((args, kwargs)))
        found = pytree.tree_leaves(func(*args, **kwargs))
        if func.namespace == "c10d":
            found[-1].wait()
        for there, new in zip(written, (x for x in found if isinstance(x, Tensor)), strict=True):
            if there is not None:
                there.copy_(WAIT(new) if "c10d" in func.namespace else new)

    def wait(self) -> None:
        """Wait for all messages."""
        for work in (*self._sends, *self._receives.values()):
            work.wait()

    def _wait_for(self, leaves: Sequence[Any]) -> None:
        for each in leaves:
            if isinstance(each, Tensor) and (work := self._receives.pop(_storage(each), None)) is not None:
                work.wait()


def _alias(x: Tensor) -> Tensor:
    """Return a tensor that keeps its storage if `x.data = …` gives another one to `x`."""
    return x.detach() if type(x) in (Tensor, nn.Parameter) else x


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
