"""Seed and step of what a module draws: counted by calls, kept in state dicts, the same again where a call is repeated.

A state dict carries them in its metadata, next to the versions of modules: its keys are those of the model, and
torch.save and torch.load keep it. Checkpoints of names and tensors alone (torch.distributed.checkpoint) leave it out,
as they leave out the states of PyTorch's generators; for these `RandomState` is a `Stateful`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.implementations.randomness import Randomness
from autopar.runtime.ranks.agreement import from_first_rank, is_first_rank, many_processes
from autopar.runtime.recompute.generators import generators_at, states_of
from autopar.runtime.recompute.repeated_calls import RepeatedCalls, in_backward

METADATA = "autopar_random"
"""The entry in the metadata of a module's state dict."""


class RandomState:
    """Random state that determines the draws of a module's next call, equal on every rank.

    `seed` is the number below all draws, `step` counts calls (of train_step: micro-batches). If `seed_given`, a
    module's state dict changes the step alone.
    """

    def __init__(self, seed: int = 0, deterministic: bool = False, seed_given: bool = False) -> None:
        self.deterministic = deterministic
        self._state = {"seed": seed, "step": 0}
        """A module's state dict has this very dict, as it has the very tensors of the module."""
        self._seed_given = seed_given
        self._calls = RepeatedCalls()

    @property
    def seed(self) -> int:
        return self._state["seed"]

    @property
    def step(self) -> int:
        return self._state["step"]

    @classmethod
    def agreed(cls, seed: int | None, deterministic: bool, mesh: DeviceMesh) -> RandomState:
        """Build the random state of a new module on all ranks, which call this together.

        Without a seed, the initial seed of the first rank counts.
        """
        found = from_first_rank(lambda: torch.initial_seed() if seed is None else seed, mesh)
        return cls(found, deterministic, seed is not None)

    def copied(self) -> RandomState:
        """Return the same seed and step, which count on by themselves."""
        other = RandomState(self.seed, self.deterministic, self._seed_given)
        other._state["step"] = self.step
        return other

    def at(self, step: int) -> Randomness:
        """Return the state on which the draws of a step depend."""
        return Randomness(self.seed, step, self.deterministic)

    def advance(self, count: int) -> int:
        """Return the first of `count` steps, which are over then."""
        self._state["step"] += count
        return self.step - count

    def begin(self, draws: bool) -> Randomness:
        """Return the randomness of a forward that begins.

        Raises InputError if it repeats a call that is not known.
        """
        step, known = self._state["step"], draws and not self.deterministic  # else the default generators say it all
        if known and in_backward():
            step = self._calls.step()
        elif known:
            self._calls.note(step)
        return Randomness(self._state["seed"], step, self.deterministic)

    def end(self) -> None:
        """Count a forward that has ended well as a step, unless it repeats another."""
        if torch._C._current_graph_task_id() == -1:  # not `in_backward`
            self._state["step"] += 1

    def state_dict(self) -> dict[str, Any]:
        """Seed and step."""
        return dict(self._state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on as after `state_dict()`."""
        self._state.update({name: int(state_dict[name]) for name in self._state})

    def write_into(self, metadata: dict[str, Any]) -> None:
        """Go with a module's state dict, in the metadata of that module."""
        metadata[METADATA] = self._state

    def read_from(self, metadata: Mapping[str, Any]) -> None:
        """Go on as a module's state dict says, if it does; a seed that was given stays."""
        if METADATA in metadata:
            found = metadata[METADATA]
            self.load_state_dict({**found, "seed": self.seed} if self._seed_given else found)


@contextlib.contextmanager
def generators_of_first_rank(mesh: DeviceMesh) -> Iterator[None]:
    """Let every rank draw as the first one would, whose generators go on; those of others stay where they are."""
    if not many_processes(mesh):
        yield
        return
    states = from_first_rank(lambda: states_of([torch.empty(0, device=mesh.device_type)]), mesh)
    with generators_at(None if is_first_rank(mesh) else states):
        yield
