"""The live set: what a device holds at every moment of a step by a choice per decision, and when that is most.

`moments` says where each part (`resident_parts`) is resident. With many micro-batches in a step (`microbatches`,
`accumulation`) places of later backwards are counted on from those of the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from autopar.costs.memory.microbatches import Phase
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import FORWARD, KINDS, Role, Scope, kind_in
from autopar.costs.memory.resident_parts import Part, all_parts
from autopar.costs.plans.decision_rows import Instant, MemoryUse
from autopar.costs.space.space import ExpertRows
from autopar.ir.program.recompute_segments import OFFLOAD

END_OF_STEP = "end of the step"  # the instant of it, in timelines of many micro-batches
STEPPING = "optimizer"  # the instant of its step, where that works on more than it updates
Name = tuple[Role, str]


def memory_use(
    memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], imbalance: float | None = None
) -> tuple[int, MemoryUse, int]:
    """Return the bytes at the peak, what they are at every moment, and the number of the fullest moment (see
    `Presence.moment`).

    `imbalance` of the rows of experts is that of the space, unless it is given. Where several backwards of a step can
    be the fullest, the timeline is that of the one that is, with the end.
    """
    moments, phases = PlanMoments(memory, choices, modes, imbalance), memory.microbatches.phases
    if not memory.lifetimes.calls:
        parts = moments.standing(phases[0])
        return sum(parts.values()), MemoryUse(parts, ()), 0
    found = [_phase_use(memory, moments, number) for number, phase in enumerate(phases) if not phase.end]
    peak, use, moment = max(found, key=lambda each: each[0])
    for number, phase in enumerate(phases):
        if not phase.end:
            continue
        parts = moments.at(0, phase, 0)
        end = sum(parts.values())
        timeline = (*use.timeline, Instant(STEPPING if phase.steps else END_OF_STEP, True, end))
        use = MemoryUse(use.parts if end <= peak else parts, timeline)
        peak, moment = (peak, moment) if end <= peak else (end, number * len(memory.lifetimes.calls))
    return peak, use, moment


def _phase_use(memory: MemoryModel, moments: PlanMoments, number: int) -> tuple[int, MemoryUse, int]:
    """Return the peak, the memory use and the fullest moment of one phase, as `memory_use` does for the step."""
    phases = memory.microbatches.phases
    names = memory.lifetimes.names
    totals = moments.totals(phases[number])
    forward = totals[FORWARD] if memory.live is None else totals.max(axis=0)
    timeline = [Instant(name, False, int(n)) for name, n in zip(names, forward, strict=True)]
    after = reversed(list(zip(names, totals[:FORWARD].max(axis=0), strict=True)))
    timeline += [Instant(name, True, int(n)) for name, n in after if memory.live is None]
    kind, place = divmod(int(np.argmax(totals)), len(names))
    parts = moments.at(kind, phases[number], place)
    return int(totals.max()), MemoryUse(parts, tuple(timeline)), place + (number + kind * len(phases)) * len(names)


def bytes_by_moment(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> np.ndarray:
    """Return the bytes at every moment, by its number (see `Presence.moment`); 0 at those that are none."""
    moments, phases = PlanMoments(memory, choices, modes), memory.microbatches.phases
    found = np.zeros((len(KINDS), len(phases), moments.count), dtype=np.int64)
    for number, phase in enumerate(phases):
        if phase.end:
            found[0, number, :1] = sum(moments.at(0, phase, 0).values())
        else:
            found[:, number] = moments.totals(phase)
    return found.reshape(-1)


class PlanMoments:
    """The bytes of one plan over the places of its calls."""

    def __init__(
        self, memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], imbalance: float | None = None
    ) -> None:
        self.memory, self.presence, self.count = memory, memory.presence, len(memory.lifetimes.calls)
        requested = memory.space.imbalance if imbalance is None else imbalance
        uneven_share = lambda rows: memory.space.uneven_share(rows, choices, imbalance)  # noqa: E731
        self.sums = _sums_of(memory, requested > 1).at(choices, memory.lifetimes.modes_by_number(modes), uneven_share)
        """By role and name, the bytes by the place that uses them first; the last place is of what no call uses."""
        away = {name for name, mode in modes.items() if mode == OFFLOAD}
        self._is_away = np.array([memory.lifetimes.segment[n] in away for n in memory.lifetimes.calls] + [False])

    def of(self, *roles: Role) -> np.ndarray:
        """Return the bytes of these roles, by the place that uses them first."""
        found = [num_bytes for (role, _), num_bytes in self.sums.items() if role in roles]
        return np.sum(found, axis=0) if found else np.zeros(self.count + 1, dtype=np.int64)

    def standing(self, phase: Phase) -> dict[str, int]:
        """Return the bytes, by what they are, that are resident at every moment of a phase, whatever calls do."""
        found: dict[str, int] = defaultdict(int)
        for (role, name), num_bytes in self.sums.items():
            if role in (Role.STORED, Role.MOVED, Role.RECEIVED, Role.RETURNED, Role.SENT):
                found[name] += self.presence.times(role, phase) * int(num_bytes.sum())
        return dict(found)

    def totals(self, phase: Phase) -> np.ndarray:
        """Return the bytes at every moment of a phase, by kind and place; 0 at those that are none."""
        found = np.zeros((len(KINDS), self.count), dtype=np.int64)
        for kind in KINDS:
            is_moment = self.presence.moments[kind]
            if is_moment.any():
                found[kind] = sum(each for _, each in self._parts(kind, phase)) * is_moment
        return found

    def at(self, kind: int, phase: Phase, place: int) -> dict[str, int]:
        """Return the bytes at a moment by what they are."""
        found: dict[str, int] = defaultdict(int)
        for name, num_bytes in self._parts(kind, phase):
            found[name] += int(num_bytes[place])
        return {name: num_bytes for name, num_bytes in found.items() if num_bytes}

    def _parts(self, kind: int, phase: Phase) -> Iterable[tuple[str, np.ndarray]]:
        """Yield the bytes that are resident at moments of a kind, by place, with their names."""
        kind = kind_in(phase, kind)
        for (role, name), num_bytes in self.sums.items():
            scope, times = self.presence.scope(role, kind, phase), self.presence.times(role, phase)
            if scope is not None and times:
                yield name, times * self._spread(scope, kind, num_bytes)

    def _spread(self, scope: Scope, kind: int, num_bytes: np.ndarray) -> np.ndarray:
        if scope is Scope.ALWAYS:
            return np.full(max(self.count, 1), num_bytes.sum())
        found = self.presence.span(scope, kind).spread(num_bytes)
        if scope in (Scope.SAVED, Scope.WHOLE) and self._is_away.any():
            away = np.where(self._is_away, num_bytes, 0)
            found += self.presence.span(scope, kind, True).spread(away) - self.presence.span(scope, kind).spread(away)
        return found


class _Read:
    """Parts of the same arrays: numbers of the decisions at their ends, and where in all sums they add."""

    def __init__(self, parts: Sequence[Part], places: Sequence[int], signs: Sequence[int]) -> None:
        self.modes, self.rows = parts[0].modes, parts[0].rows
        self.ends = tuple(np.array([part.ends for part in parts], dtype=np.intp).T)
        self.of = np.array([part.of for part in parts], dtype=np.intp)
        self.places, self.signs = np.array(places, dtype=np.intp), np.array(signs)

    def at(self, chosen: np.ndarray, modes: np.ndarray) -> np.ndarray:
        """Return the bytes of each part at the choice and the mode of every decision."""
        index = tuple([chosen[end] for end in self.ends])
        if len(self.modes) == 1:
            return self.modes[0][index]
        of_each = np.minimum(modes[self.of], len(self.modes) - 1)
        return np.choose(of_each, [each[index] for each in self.modes])


class _Sums:
    """Byte totals of a plan's choices by name and place; parts with equal arrays are read together."""

    def __init__(self, parts: Iterable[tuple[Part, int, int]], width: int) -> None:
        """`parts` come with the place where they add, and with a sign."""
        self._width = width
        alike: dict[object, list[tuple[Part, int, int]]] = defaultdict(list)
        names: dict[Name, None] = {}
        for part, place, sign in parts:
            names[part.role, part.name] = None
            alike[part.rows, len(part.ends), *map(id, part.modes)].append((part, place, sign))
        order = list(Role)
        self._names = {each: number for number, each in enumerate(sorted(names, key=lambda name: order.index(name[0])))}
        self._reads = [
            _Read(
                [part for part, _, _ in each],
                [self._names[part.role, part.name] * width + place for part, place, _ in each],
                [sign for _, _, sign in each],
            )
            for each in alike.values()
        ]

    def at(
        self, choices: Sequence[int], modes: np.ndarray, uneven_share: Callable[[ExpertRows], float]
    ) -> dict[Name, np.ndarray]:
        """Return the bytes by place, by name, at a choice per decision and the number of a mode for each."""
        chosen, found = np.array(choices, dtype=np.intp), np.zeros(len(self._names) * self._width, dtype=np.int64)
        for each in self._reads:
            num_bytes = each.at(chosen, modes)
            if each.rows is not None:
                num_bytes = np.ceil(uneven_share(each.rows) * num_bytes).astype(np.int64)
            np.add.at(found, each.places, each.signs * num_bytes)
        sums = zip(self._names, found.reshape(-1, self._width), strict=True)
        return {name: num_bytes for name, num_bytes in sums if num_bytes.any()}


def _sums_of(memory: MemoryModel, with_uneven_rows: bool) -> _Sums:
    """Return all that choices hold of a model; of expert rows an equal share, or with those above it."""
    added, width = _added(memory, with_uneven_rows), len(memory.lifetimes.calls) + 1
    return memory.cached(("sums", with_uneven_rows), lambda: _Sums(added, width))


def _added(memory: MemoryModel, with_uneven_rows: bool) -> Iterable[tuple[Part, int, int]]:
    """Yield parts with the place at which they add to their sum, and with their sign."""
    count = len(memory.lifetimes.calls)
    for part in all_parts(memory):
        if part.rows is None or with_uneven_rows:
            yield part, min(part.used, count), 1
            if part.until <= count:
                yield part, part.until, -1
