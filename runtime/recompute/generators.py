"""The default random generators, set back to where a call found them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def states_of(values: Iterable[Any]) -> dict[str, Tensor]:
    """Map device types to the states of their default generators."""
    states = {"cpu": torch.get_rng_state()}
    if any(isinstance(x, Tensor) and x.is_cuda for x in values):
        states["cuda"] = torch.cuda.get_rng_state()
    return states


@contextlib.contextmanager
def generators_at(states: dict[str, Tensor] | None) -> Iterator[None]:
    """Let the default generators be where they were, and go on after the block as if nothing had been drawn."""
    if states is None:
        yield
        return
    before = {kind: torch.get_rng_state() if kind == "cpu" else torch.cuda.get_rng_state() for kind in states}
    try:
        _set(states)
        yield
    finally:
        _set(before)


def _set(states: dict[str, Tensor]) -> None:
    for kind, state in states.items():
        torch.set_rng_state(state) if kind == "cpu" else torch.cuda.set_rng_state(state)
