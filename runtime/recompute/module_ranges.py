"""The names of modules on what a per-rank graph runs, for those who look: profilers, FLOP counters, memory snapshots.

A graph has no modules; its calls have the paths of those that they were traced in. While somebody looks, each change of
path from one call to the next closes and opens ranges, as modules do that call each other:

    model                    the graph, and what belongs to no module
      layers.0               `layers`, which only numbers what it holds, has none
        layers.0.mlp

and in the backward the same, by hooks on the autograd nodes that a call has made. None of this runs where nobody looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._autograd import _get_sequence_nr, _profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import Variable
from torch.profiler import record_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from autopar.ir.program.paths import is_number

MODEL = "model"
"""Name of the outermost range; also the section in `print_code` for calls that belong to no module."""
BACKWARD = " (backward)"
NO_SEQUENCE = 2**63
"""Nodes that accumulate gradients have greater numbers than any that a call makes."""


def is_watched() -> bool:
    """Return whether a profiler, a FLOP counter or a recorder of memory history is active."""
    if _profiler_enabled() or _history_is_recorded():
        return True
    return bool(torch._C._len_torch_dispatch_stack()) and any(_trackers())


class ModuleRanges:
    """The ranges of one run of a graph, and of its backward."""

    def __init__(self) -> None:
        trackers = tuple(_trackers())
        self._forward, self._backward = _Ranges(trackers), _Ranges(trackers, BACKWARD)
        self._since = 0
        self._ends = False

    @classmethod
    def where_watched(cls) -> ModuleRanges | None:
        return cls() if is_watched() else None

    def enter(self, call: fx.Node) -> None:
        """Say that a call runs next."""
        self._forward.move_to(scopes_of(call.meta.get("module") or ""))
        self._since = _get_sequence_nr()

    def leave(self, call: fx.Node, result: Any) -> None:
        """Say what the call has returned, whose backward is the module's, too."""
        for node in _made_since(self._since, result):
            node.register_prehook(partial(self._enter_backward, call.meta.get("module") or ""))

    def close(self) -> None:
        """Say that the graph has run."""
        self._forward.move_to(())

    def _enter_backward(self, module: str, _: Any) -> None:
        self._backward.move_to(scopes_of(module))
        if not self._ends:
            self._ends = True
            Variable._execution_engine.queue_callback(self._close_backward)

    def _close_backward(self) -> None:
        self._backward.move_to(())
        self._ends = False


class _Ranges:
    """The ranges that are open now, the outermost first."""

    def __init__(self, trackers: tuple[ModuleTracker, ...], suffix: str = "") -> None:
        self._trackers = [(tracker, _innermost(tracker)) for tracker in trackers]
        self._suffix = suffix
        self._open: list[tuple[str, record_function | None]] = []

    def move_to(self, scopes: tuple[str, ...]) -> None:
        """Close what is open and not among `scopes`, and open the rest of them."""
        names = [name for name, _ in self._open]
        if names == list(scopes):
            return
        shared = next((i for i, (a, b) in enumerate(zip(names, scopes, strict=False)) if a != b), None)
        shared = min(len(names), len(scopes)) if shared is None else shared
        while len(self._open) > shared:
            self._close_one()
        for name in scopes[shared:]:
            self._open_one(name)
        if _history_is_recorded():
            torch.cuda.memory._set_memory_metadata(scopes[-1] + self._suffix if scopes else "")

    def _open_one(self, name: str) -> None:
        entered = None
        if _profiler_enabled():
            entered = record_function(name + self._suffix)
            entered.__enter__()
        for tracker, root in self._trackers:
            if name != MODEL:  # MODEL is the compiled module itself, whose call is tracked
                tracker.parents.add(f"{root}.{name}")
        self._open.append((name, entered))

    def _close_one(self) -> None:
        name, entered = self._open.pop()
        for tracker, root in self._trackers:
            tracker.parents.discard(f"{root}.{name}")
        if entered is not None:
            entered.__exit__(None, None, None)


@cache
def scopes_of(path: str) -> tuple[str, ...]:
    """Return the ranges that a call in a module lies in, the outermost first.

    >>> scopes_of("layers.0.mlp")
    ('model', 'layers.0', 'layers.0.mlp')
    """
    parts = path.split(".") if path else []
    ends = (end for end in range(1, len(parts) + 1) if end == len(parts) or not is_number(parts[end]))
    return (MODEL, *(".".join(parts[:end]) for end in ends))


def _trackers() -> Iterator[ModuleTracker]:
    """Yield the module trackers of the active FLOP counters."""
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", mode)
        if isinstance(counter, FlopCounterMode):
            yield counter.mod_tracker


def _innermost(tracker: ModuleTracker) -> str:
    return max(tracker.parents - {"Global"}, key=len, default=MODEL)


def _history_is_recorded() -> bool:
    """Return whether the device's allocator records its history; False without asking it if CUDA is not initialized."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return enabled is not None and torch.cuda.is_initialized() and enabled()


def _made_since(number: int, result: Any) -> Iterator[Any]:
    """Yield the autograd nodes behind a result that were made after a sequence number."""
    outputs = (x.grad_fn for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
    ahead, seen = [node for node in outputs if node is not None], set()
    while ahead:
        node = ahead.pop()
        if node not in seen and number <= node._sequence_nr() < NO_SEQUENCE:
            seen.add(node)
            yield node
            ahead += [each for each, _ in node.next_functions if each is not None]
