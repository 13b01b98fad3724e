"""Calls, and the collectives that bring their inputs, that run again in the backward, by mode.

    call    its forward; in the mode full with the collectives that it runs itself, in other modes never if it has any
    wire    its collectives, if something that runs again, or a backward, needs the tensor: in the modes selective and
            full if they enlarge it, so that the smaller one is saved; in the mode full always inside a segment

Of rows of experts a wire's collectives that run again move an equal share of them, however uneven the rows are.

Moves of weights never run again: `cost.reshard` says which weights are gathered again. Where what a segment saves
leaves for the host, seconds are those of its copies (`host_copies`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.hardware.collectives import Transfer
from autopar.memory.host_copies import HostCopies
from autopar.memory.lifetimes import Lifetimes
from autopar.memory.tensor_bytes import Bytes, Modes, TensorBytes
from autopar.program.recompute_segments import FULL, GATHERING_AGAIN, MODES
from autopar.space.space import Decision, Wire

FULL_MODE = MODES.index(FULL)
GATHERING_MODES = tuple(map(MODES.index, GATHERING_AGAIN))


class SecondForward:
    """Seconds of what runs again by decision and wire; arrays as those of `TensorBytes`."""

    def __init__(self, tensors: TensorBytes, lifetimes: Lifetimes, host_copies: HostCopies) -> None:
        self.tensors, self.lifetimes, self.host_copies, self.space = tensors, lifetimes, host_copies, tensors.space
        self._again: dict[tuple[int, int, int], np.ndarray | None] = {}

    def communicates(self, decision: Decision) -> np.ndarray:
        """Return which strategies of a call run collectives of their own in the forward."""
        strategies = decision.menu.strategies
        return self.tensors.cached(
            ("communicates", id(decision.menu)), lambda: np.array([s.communicates for s in strategies])
        )

    def seconds_of(self, number: int) -> Modes | None:
        """Return the seconds of a call's second forward, by mode; None if it has none in any mode."""
        decision = self.space.decisions[number]
        if decision.kind != "call" or not self.lifetimes.segment[number]:
            return None
        copying = self.host_copies.seconds_of(number)
        again = [self.runs_again(number, mode) for mode in range(self.lifetimes.num_modes(number))]
        if copying is None and all(each is None for each in again):
            return None
        nothing = self._nothing((len(decision.menu.strategies),))
        found = [nothing if each is None else self._second(decision, each) for each in again]
        return tuple(found) if copying is None else (*found[:-1], copying)

    def _second(self, decision: Decision, again: np.ndarray) -> Bytes:
        def make() -> Bytes:
            waits = [sum(wait for _, wait in s.forward_collectives) for s in decision.menu.strategies]
            return np.where(again, decision.menu.forward_seconds + np.array(waits), 0.0)

        return self.tensors.cached(("second forward", id(again)), make)

    def runs_again(self, number: int, mode: int) -> np.ndarray | None:
        """Return which strategies of a call run again in a mode; None if none does."""
        decision, strategies = self.space.decisions[number], self.space.decisions[number].menu.strategies
        if decision.kind != "call" or not self.lifetimes.segment[number]:
            return None
        needed = decision.node in self.lifetimes.recomputations(number)[mode].rerun
        if not needed and (mode != FULL_MODE or not self.lifetimes.saved(decision).inputs):
            return None

        def make() -> np.ndarray:
            if mode == FULL_MODE:
                return np.array([needed or (s.communicates and s.saves_moved) for s in strategies])
            return np.array([not s.communicates for s in strategies])

        found = self.tensors.cached(("runs again", id(decision.menu), needed, mode == FULL_MODE), make)
        return found if found.any() else None

    def moves_again(self, wire: Wire, mode: int) -> np.ndarray | None:
        """Return between which strategies a wire's collectives run again in a mode; None if between none."""
        key = wire.target, wire.target_input, mode
        if key not in self._again:
            found = self._moves_again(wire, mode) if self._needs_again(wire, mode) else None
            self._again[key] = found if found is not None and found.any() else None
        return self._again[key]

    def _needs_again(self, wire: Wire, mode: int) -> bool:
        if mode not in GATHERING_MODES or not self.lifetimes.segment[wire.target] or wire.tensor.is_of_weights:
            return False
        return self.lifetimes.needs_input(wire) or self.lifetimes.reruns(wire.target, mode)

    def _moves_again(self, wire: Wire, mode: int) -> np.ndarray:
        inside = mode == FULL_MODE and self.lifetimes.is_inside(wire)

        def make() -> np.ndarray:
            before, after = self.tensors.wire_ends(wire)
            return self.tensors.communicated(wire) & (inside | (before[:, None] < after[None, :]))

        return self.tensors.cached(("moves again", inside, self.space.kind(wire)), make)

    def seconds_on(self, wire: Wire) -> Modes | None:
        """Return the seconds of what runs again on account of a wire, by mode; None if there are none in any mode."""
        copying = self.host_copies.seconds_on(wire)
        again = [self.moves_again(wire, mode) for mode in range(self.lifetimes.num_modes(wire.target))]
        if copying is None and all(each is None for each in again):
            return None
        shape = tuple(len(self.space.decisions[end].menu.strategies) for end in (wire.source, wire.target))
        found = [self._nothing(shape) if each is None else self._seconds_on(wire, each) for each in again]
        if copying is not None:
            found[-1] = copying
        return tuple(found)

    def _seconds_on(self, wire: Wire, again: np.ndarray) -> Bytes:
        return self.tensors.cached(
            ("seconds again", id(again), self.space.kind(wire)),
            lambda: np.where(again, self.space.forward_seconds(wire), 0.0),
        )

    def at(self, number: int, choices: Sequence[int], modes: Mapping[str, str]) -> float:
        """Return the seconds of a call's second forward under choices and modes."""
        again = self.seconds_of(number)
        return 0.0 if again is None else float(again[self.lifetimes.mode_of(number, modes)][choices[number]])

    def at_wire(self, wire: Wire, choices: Sequence[int], modes: Mapping[str, str]) -> float:
        """Return the seconds of what runs again on account of a wire under choices and modes."""
        if modes.get(self.lifetimes.segment[wire.target], MODES[0]) == MODES[0]:
            return 0.0
        again = self.seconds_on(wire)
        if again is None:
            return 0.0
        return float(again[self.lifetimes.mode_of(wire.target, modes)][choices[wire.source], choices[wire.target]])

    def collectives_of(
        self, number: int, choices: Sequence[int], modes: Mapping[str, str]
    ) -> tuple[tuple[Transfer, float], ...]:
        """Return the collectives of a call itself that run again, each with its exposed seconds."""
        again = self.runs_again(number, FULL_MODE) if self._is_full(number, modes) else None
        if again is None or not again[choices[number]]:
            return ()
        return self.space.decisions[number].menu.strategies[choices[number]].forward_collectives

    def collectives_on(self, wire: Wire, choices: Sequence[int], modes: Mapping[str, str]) -> tuple[Transfer, ...]:
        """Return the collectives of a wire that run again."""
        again = self.moves_again(wire, self.lifetimes.mode_of(wire.target, modes))
        if again is None or not again[choices[wire.source], choices[wire.target]]:
            return ()
        return tuple(each for each in self.space.path(wire, choices).transfers if not each.backward)

    def _is_full(self, number: int, modes: Mapping[str, str]) -> bool:
        return modes.get(self.lifetimes.segment[number]) == FULL

    def _nothing(self, shape: tuple[int, ...]) -> Bytes:
        return self.tensors.cached(("no seconds", shape), lambda: np.zeros(shape))
