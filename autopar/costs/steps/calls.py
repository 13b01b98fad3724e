"""Computation and communication of calls themselves, as tasks.

Collectives that a call's implementation overlaps with its compute run in parallel with it. Those begun ahead of it are
issued in front of the forward, and waited for here. The sum of a loss over ranks overlaps with the backward, which does
not wait.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.memory.model import MemoryModel
from autopar.costs.pricing.operations import backward_launches
from autopar.costs.steps.tasks import Tasks
from autopar.ir.sharding.operation import is_view

MOST_APART = 64
"""Collectives of a call that are tasks of their own: as each is another event, a ring of thousands takes minutes."""


class Calls:
    """The calls of one step; `unused` are those that no gradient comes back to."""

    def __init__(
        self,
        memory: MemoryModel,
        choices: Sequence[int],
        modes: Mapping[str, str],
        tasks: Tasks,
        unused: Collection[int],
    ) -> None:
        self.memory, self.space, self.choices, self.modes = memory, memory.space, choices, modes
        self.tasks, self.unused = tasks, unused
        self._travelling: dict[tuple[int, bool], list[int]] = {}
        """Call, and whether in the backward → what it has sent while others run."""
        self._ahead: dict[int, list[int]] = defaultdict(list)
        """Call → what was issued ahead of it."""

    def begin_ahead(self, numbers: Iterable[int]) -> None:
        """Issue what calls have begun in front of the forward."""
        for number in numbers:
            for each in self.space.decisions[number].candidates.strategies[self.choices[number]].transfers:
                if each.ahead:
                    self._ahead[number].append(self.tasks.issue(each, self.space.decisions[number].name))

    def sum_losses(self) -> None:
        """Issue the sums of outputs that ranks have parts of, for which the user waits."""
        for number, decision in enumerate(self.space.decisions):
            if decision.kind == "output":
                for each in decision.candidates.strategies[self.choices[number]].transfers:
                    self.tasks.issue(each, decision.name)

    def run(self, number: int, backward: bool) -> None:
        """Add the tasks of a call in one pass: what it computes, and what it moves overlapped with or after that.

        If others run while what it moves travels, it is waited for on arrival, and in the backward here.
        """
        decision, choice = self.space.decisions[number], self.choices[number]
        strategy = self.memory.second_forward.running(number, self.choices, self.modes)
        call, op = decision.candidates.call, decision.candidates.op
        bound = decision.candidates.bound
        share = self.space.share(self.space.rows.get(number), self.choices)
        seconds = forward = float(decision.candidates.forward_seconds[choice])
        launches = 1
        if backward:
            chosen = decision.candidates.strategies[choice]
            seconds = max(0.0, float(decision.candidates.seconds[choice]) - forward - sum(chosen.waits))
            launches = backward_launches(call, op) if call is not None and op is not None else 0
        if not launches:
            return
        if call is not None and is_view(call) and not self.space.hardware.launch_s:
            seconds += self.space.hardware.op_latency_s
        own = _grouped_transfers([each for each in strategy.transfers if each.backward == backward and not each.ahead])
        travels = self.space.travels(number, choice)
        if travels and backward:
            self.tasks.wait(self._travelling.pop((number, True), ()))
            own = []
        overlapped = 0.0
        if strategy.implemented and call is not None and bound is not None:
            local = strategy.local_sizes(bound.sizes, self.space.mesh)
            launches *= strategy.implementation.launches(call, local)
            overlapped = strategy.implementation.hidden_share(call, local) if own else 0.0
        running = [
            self.tasks.issue(each, decision.name, times=share * overlapped * count, launches=count)
            for each, count in own
            if overlapped
        ]
        self.tasks.compute(_name(call), seconds * share, decision.name, launches)
        self.tasks.wait(running)
        if overlapped < 1 and not (backward and number in self.unused):
            for each, count in own[: len(own) - travels]:
                self.tasks.move([each], decision.name, share * (1 - overlapped) * count, 1 - overlapped, count)
            if travels and own:
                self._send(number, [own[-1][0]], share, backward)
        self.tasks.wait(self._ahead.pop(number, ()))

    def arrive(self, number: int, backward: bool) -> None:
        """Wait for what a call has sent in the forward; in the backward begin to send the gradients back."""
        if not backward:
            self.tasks.wait(self._travelling.pop((number, False)))
        elif number not in self.unused:
            strategy = self.memory.second_forward.running(number, self.choices, self.modes)
            share = self.space.share(self.space.rows.get(number), self.choices)
            self._send(number, [each for each in strategy.transfers if each.backward], share, backward)

    def _send(self, number: int, transfers: Sequence[Transfer], share: float, backward: bool) -> None:
        """Issue collectives of a call, during which others run."""
        row = self.space.decisions[number].name
        self._travelling[number, backward] = [self.tasks.issue(each, row, times=share) for each in transfers]


def _grouped_transfers(transfers: Sequence[Transfer]) -> list[tuple[Transfer, int]]:
    """Return the transfers of a call with a count: of many, as of a long ring, equal ones in a row are one task."""
    if len(transfers) <= MOST_APART:
        return [(each, 1) for each in transfers]
    return [(each, len(list(equal))) for each, equal in itertools.groupby(transfers)]


def _name(call: object) -> str:
    return getattr(call, "name", "")
