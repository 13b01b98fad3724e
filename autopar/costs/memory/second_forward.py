"""Calls, and the collectives that bring their inputs, that run again in the backward, by mode.

    call    its forward; in the mode full with the collectives that it runs itself, in other modes never if it has any
    edge    its collectives, if something that runs again, or a backward, needs the tensor: in the modes selective and
            full if they enlarge it, so that the smaller one is saved; in the mode full always inside a segment

A gather that runs again is waited for when its value is first used. If only the backward of its target uses it, and no
call that runs again, all that precedes this backward in the segment hides it, but for its `communication_share`.

A call that gathers its input itself, and whose result the mode selective saves, runs as the variant that gathers again
in its backward (`Implementation.regathering`): `running` is the strategy that runs.

An edge's collectives that run again move an equal share of expert rows, however uneven the rows are.

Moves of weights never run again: `costs.pricing.reshard` says which weights are gathered again. Where what a segment
saves leaves for the host, seconds are those of its copies (`host_copies`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.memory.lifetimes import Place, ends_of
from autopar.costs.memory.tensor_bytes import Modes, OfTensors, shared
from autopar.costs.space.space import Decision, TensorEdge
from autopar.costs.space.strategy import Strategy, running_in
from autopar.ir.program.recompute_segments import FULL, MODES, SELECTIVE, is_saved, moves_again

SELECTIVE_MODE, FULL_MODE = MODES.index(SELECTIVE), MODES.index(FULL)


class SecondForward(OfTensors):
    """Seconds of what runs again, by decision and edge."""

    def seconds_of(self, place: Place) -> Modes | None:
        """Return the seconds of a call's second forward, or of what runs again on account of an edge, by mode.

        None if there are none in any mode.
        """
        ends = ends_of(place)
        found = [self._seconds(place, mode) for mode in range(self.lifetimes.num_modes(ends[-1]))]
        if all(each is None for each in found):
            return None
        nothing = self.tensors.nothing(tuple([len(self.space.decisions[end].candidates.strategies) for end in ends]))
        return tuple([nothing if each is None else each for each in found])

    def _seconds(self, place: Place, mode: int) -> np.ndarray | None:
        if not isinstance(place, int):
            moves = self.moves_again(place, mode)
            used_once = not self.lifetimes.reruns(place.target, mode)
            return None if moves is None else self._seconds_on(place, moves, used_once)
        decision, runs = self.space.decisions[place], self.runs_again(place, mode)
        found = None if runs is None else self._second_seconds(decision, runs)
        if not self.variant(decision, mode):
            return found
        nothing = self.tensors.nothing((len(decision.candidates.strategies),))
        return self._with_regathering(decision, nothing if found is None else found)

    @shared
    def _with_regathering(self, decision: Decision, seconds: np.ndarray) -> np.ndarray:
        """Return the seconds of the mode selective with those that variants of a call's strategies add in it."""
        pairs = zip(self.running_in(decision, SELECTIVE_MODE), decision.candidates.strategies, strict=True)
        return seconds + np.array([sum(running.waits) - sum(chosen.waits) for running, chosen in pairs])

    def variant(self, decision: Decision, mode: int) -> int:
        """Return the mode if a call has variants for it, else 0, the mode in which what is chosen runs."""
        return mode if mode == SELECTIVE_MODE and self._regathers(decision) else 0

    @shared
    def _regathers(self, decision: Decision) -> bool:
        return any(each.regathering is not None for each in decision.candidates.strategies)

    def running_in(self, decision: Decision, mode: int) -> tuple[Strategy, ...]:
        """Return what runs a call in a mode, by strategy."""
        strategies = decision.candidates.strategies
        return tuple([running_in(MODES[mode], each) for each in strategies]) if mode else strategies

    def running(self, number: int, choices: Sequence[int], modes: Mapping[str, str]) -> Strategy:
        """Return the strategy that runs a decision: the one chosen, or in its place the variant for its mode."""
        chosen = self.space.decisions[number].candidates.strategies[choices[number]]
        return running_in(modes.get(self.lifetimes.segment[number], MODES[0]), chosen)

    def is_rerun(self, number: int, choices: Sequence[int], modes: Mapping[str, str]) -> bool:
        """Return whether a call that takes time runs again in the backward under choices and modes."""
        again = self.runs_again(number, self.lifetimes.mode_of(number, modes))
        return again is not None and bool(
            self._second_seconds(self.space.decisions[number], again)[choices[number]] > 0
        )

    @shared
    def _second_seconds(self, decision: Decision, again: np.ndarray) -> np.ndarray:
        waits = [sum(wait for _, wait in s.forward_collectives) for s in decision.candidates.strategies]
        return np.where(again, decision.candidates.forward_seconds + np.array(waits), 0.0)

    def runs_again(self, number: int, mode: int) -> np.ndarray | None:
        """Return which strategies of a call run again in a mode; None if none does."""
        decision = self.space.decisions[number]
        if decision.kind != "call" or not self.lifetimes.segment[number]:
            return None
        needed = decision.node in self.lifetimes.recomputations(number)[mode].rerun
        if not needed and (mode != FULL_MODE or not self.lifetimes.saved(decision).inputs):
            return None
        return self._run_again(decision, needed, mode)

    @shared
    def _run_again(self, decision: Decision, needed: bool, mode: int) -> np.ndarray | None:
        strategies = decision.candidates.strategies
        if mode == FULL_MODE:
            found = np.array([needed or (s.communicates and s.implementation.saves_moved) for s in strategies])
        else:
            found = np.array([not is_saved(decision.node, MODES[mode], (), s.communicates) for s in strategies])
        return found if found.any() else None

    def moves_again(self, edge: TensorEdge, mode: int) -> np.ndarray | None:
        """Return between which strategies an edge's collectives run again in a mode; None if between none."""
        if mode == 0 or not self.lifetimes.segment[edge.target] or edge.tensor.is_of_weights:
            return None
        if not self.lifetimes.needs_input(edge) and not self.lifetimes.reruns(edge.target, mode):
            return None
        return self._moves_again(edge, self.lifetimes.is_inside(edge), mode)

    @shared
    def _moves_again(self, edge: TensorEdge, inside: bool, mode: int) -> np.ndarray | None:
        before, after = self.tensors.bytes_at_ends(edge)
        found = self.tensors.communicated(edge) & moves_again(MODES[mode], inside, before[:, None], after[None, :])
        return found if found.any() else None

    @shared
    def _seconds_on(self, edge: TensorEdge, again: np.ndarray, travelling: bool) -> np.ndarray:
        return np.where(again, self.space.forward_seconds(edge, travelling), 0.0)

    def collectives_of(
        self, number: int, choices: Sequence[int], modes: Mapping[str, str]
    ) -> tuple[tuple[Transfer, float], ...]:
        """Return the collectives of a call itself that run again, each with its exposed seconds."""
        is_full = self.lifetimes.mode_of(number, modes) == FULL_MODE
        again = self.runs_again(number, FULL_MODE) if is_full else None
        if again is None or not again[choices[number]]:
            return ()
        return self.space.decisions[number].candidates.strategies[choices[number]].forward_collectives

    def collectives_on(
        self, edge: TensorEdge, choices: Sequence[int], modes: Mapping[str, str]
    ) -> tuple[tuple[Transfer, float], ...]:
        """Return the collectives of an edge that run again, each with its exposed share."""
        mode = self.lifetimes.mode_of(edge.target, modes)
        again = self.moves_again(edge, mode)
        if again is None or not again[choices[edge.source], choices[edge.target]]:
            return ()
        path = self.space.path(edge, choices)
        found = [(each, 1.0) for each in path.transfers if not each.backward]
        if path.moves[-1].gathers and not self.lifetimes.reruns(edge.target, mode):
            found[-1] = (found[-1][0], self.space.hardware.communication_share)
        return tuple(found)

    def travels(self, edge: TensorEdge, choices: Sequence[int], modes: Mapping[str, str]) -> bool:
        """Return whether a gather that runs again brings an edge's tensor while its segment runs."""
        running = self.collectives_on(edge, choices, modes)
        return bool(running) and self.space.path(edge, choices).moves[-1].gathers
