"""Answers to a forward's queries of PyTorch's gradient modes during tracing: those of the place of the call.

A model is always traced with gradients, so that one graph serves training and evaluation. A forward that asks gets the
answer that it would have where the call is made, and the graph is one for calls with this answer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch

from autopar.capture.python.user_code import is_users

MODES: dict[str, Callable[[], bool]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
}
TRACED = {"is_grad_enabled": True, "is_inference_mode_enabled": False}

_caller: dict[str, bool] = TRACED


@contextlib.contextmanager
def of_this_call() -> Iterator[None]:
    """Let captures inside take the modes of now for those of the call."""
    global _caller
    before, _caller = _caller, {name: ask() for name, ask in MODES.items()}
    try:
        yield
    finally:
        _caller = before


@contextlib.contextmanager
def read_modes() -> Iterator[dict[str, bool]]:
    """Answer the user's queries of gradient modes inside with the modes of the call; yield the answers by name."""
    requested: dict[str, bool] = {}

    def answering(name: str) -> Callable[[], bool]:
        def answer() -> bool:
            here = MODES[name]()
            if not is_users(sys._getframe(1).f_globals.get("__name__")):
                return here
            requested[name] = _caller[name]
            return here if here != TRACED[name] else requested[name]  # a block of the forward itself counts first

        return answer

    with contextlib.ExitStack() as stack:
        for name, ask in MODES.items():
            stack.callback(setattr, torch, name, ask)
            setattr(torch, name, answering(name))
        yield requested
