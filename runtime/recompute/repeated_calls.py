"""Detection of calls of a module that run again: calls inside a user's checkpoint around the module or more.

`torch.utils.checkpoint` runs a forward again in the backward, with the default generators in the state of the first
run, so that it draws the same numbers. A compiled module does not draw from these generators, but their state tells the
calls apart. A call may be inside a checkpoint if it runs without gradients, or below hooks on saved tensors. It notes
the state of the CPU's generator, and takes one number from it, so that the next call finds another state. A call inside
a backward looks its state up.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks

from autopar.errors import InputError

MAX_CALLS = 4096
"""Number of calls that are remembered; a backward comes sooner."""


def in_backward() -> bool:
    """Return whether this thread runs the backward of some graph."""
    return torch._C._current_graph_task_id() != -1


def may_run_again() -> bool:
    """Return whether the running code may be inside a checkpoint."""
    return not torch.is_grad_enabled() or _top_saved_tensors_default_hooks(True) is not None


class RepeatedCalls:
    """The steps of a module's calls, by the state in which they began."""

    def __init__(self) -> None:
        self._steps: OrderedDict[bytes, list[int]] = OrderedDict()
        """Several of one state are two that have both not run again when the second began."""
        self._repeated: set[int] = set()

    def note(self, step: int) -> None:
        """Start a call that is no repetition."""
        if not may_run_again():
            return
        state = _state()
        torch.rand((), device="cpu")
        before = self._steps.pop(state, [])
        waiting = [each for each in before if each not in self._repeated]
        self._repeated.difference_update(before)
        self._steps[state] = [*waiting[-1:], step]
        if len(self._steps) > MAX_CALLS:
            _, old = self._steps.popitem(last=False)
            self._repeated.difference_update(old)

    def step(self) -> int:
        """Return the step of the call that is repeated now; InputError where the state of the generator does not
        tell.
        """
        found = self._steps.get(_state(), [])
        if len(found) != 1:
            raise InputError(_AMBIGUOUS if found else _UNKNOWN)
        self._repeated.update(found)
        torch.rand((), device="cpu")
        return found[0]


_UNKNOWN = (
    "the model draws random numbers (dropout and the like) and is called inside a backward, where the CPU's generator "
    "is in a state in which no call began, so that the numbers of the first call cannot be drawn again. Use "
    "torch.utils.checkpoint with preserve_rng_state=True, or Memory(recompute=…) in its place."
)
_AMBIGUOUS = (
    "the model is called inside a backward, and several calls began with the CPU's generator in this state, so that "
    "the numbers of the first call cannot be drawn again. Do not seed the generator with the same number between calls "
    "whose backward is still to come."
)


def _state() -> bytes:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).digest()
