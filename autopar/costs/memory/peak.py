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
from autopar.costs.memory.moments import FORWARD, KINDS, Role, kind_in
from autopar.costs.memory.resident_parts import Part, all_parts
from autopar.costs.plans.decision_rows import Instant, MemoryUse
from autopar.costs.space.space import ExpertRows

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
    names = memory.lifetimes.names
    if not names:
        parts = moments.standing(phases[0])
        return sum(parts.values()), MemoryUse(parts, ()), 0
    by_phase = moments.by_moment().swapaxes(0, 1)
    number, kind, place = map(int, np.unravel_index(by_phase.argmax(), by_phase.shape))
    most = [int(each.max()) for each in by_phase]
    fullest = by_phase[max((n for n, phase in enumerate(phases) if not phase.end), key=most.__getitem__)]
    forward = fullest[FORWARD] if memory.live is None else fullest.max(axis=0)
    timeline = [Instant(name, False, int(n)) for name, n in zip(names, forward, strict=True)]
    after = reversed(list(zip(names, fullest[:FORWARD].max(axis=0), strict=True)))
    timeline += [Instant(name, True, int(n)) for name, n in after if memory.live is None]
    ends = [(STEPPING if each.steps else END_OF_STEP, n) for each, n in zip(phases, most, strict=True) if each.end]
    timeline += [Instant(name, True, n) for name, n in ends]
    use = MemoryUse(moments.at(kind, phases[number], place), tuple(timeline))
    return most[number], use, place + (number + kind * len(phases)) * len(names)


def bytes_by_moment(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> np.ndarray:
    """Return the bytes at every moment, by its number (see `Presence.moment`); 0 at those that are none."""
    return PlanMoments(memory, choices, modes).by_moment().reshape(-1)


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

    def by_moment(self) -> np.ndarray:
        """Return the bytes at every moment, by kind, phase and place; 0 at those that are none."""
        return np.stack([self.totals(phase) for phase in self.memory.microbatches.phases], axis=1)

    def totals(self, phase: Phase) -> np.ndarray:
        """Return the bytes at every moment of a phase, by kind and place; 0 at those that are none."""
        found = np.zeros((len(KINDS), self.count), dtype=np.int64)
        for kind in KINDS[:1] if phase.end else KINDS:
            is_moment = np.arange(self.count) == 0 if phase.end else self.presence.moments[kind]
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
                yield name, times * self.presence.span(scope, kind).spread(num_bytes)


class _Sums:
    """Byte totals of a plan's choices by name and place; parts with equal arrays are read together."""

    def __init__(self, parts: Sequence[tuple[Part, int, int]], width: int) -> None:
        """`parts` come with the place where they add, and with a sign."""
        self._width, order = width, list(Role)
        names = dict.fromkeys((part.role, part.name) for part, _, _ in parts)
        self._names = {each: n for n, each in enumerate(sorted(names, key=lambda name: order.index(name[0])))}
        alike: dict[object, list[tuple[int, ...]]] = defaultdict(list)
        first: dict[object, Part] = {}
        for part, place, sign in parts:
            key = part.rows, len(part.ends), *map(id, part.modes)
            first.setdefault(key, part)
            alike[key].append((sign, self._names[part.role, part.name] * width + place, part.of, *part.ends))
        self._reads = [(part.modes, part.rows, np.array(alike[key]).T) for key, part in first.items()]

    def at(
        self, choices: Sequence[int], modes: np.ndarray, uneven_share: Callable[[ExpertRows], float]
    ) -> dict[Name, np.ndarray]:
        """Return the bytes by place, by name, at a choice per decision and the number of a mode for each."""
        chosen, found = np.array(choices, dtype=np.intp), np.zeros(len(self._names) * self._width, dtype=np.int64)
        for arrays, rows, (signs, places, of, *ends) in self._reads:
            at_ends = [each[tuple([chosen[end] for end in ends])] for each in arrays]
            num_bytes = np.choose(np.minimum(modes[of], len(arrays) - 1), at_ends)
            if rows is not None:
                num_bytes = np.ceil(uneven_share(rows) * num_bytes).astype(np.int64)
            np.add.at(found, places, signs * num_bytes)
        sums = zip(self._names, found.reshape(-1, self._width), strict=True)
        return {name: num_bytes for name, num_bytes in sums if num_bytes.any()}


def _sums_of(memory: MemoryModel, with_uneven_rows: bool) -> _Sums:
    """Return all that choices hold of a model; of expert rows an equal share, or with those above it."""
    count = len(memory.lifetimes.calls)

    def make() -> _Sums:
        parts = [part for part in all_parts(memory) if part.rows is None or with_uneven_rows]
        added = [(part, min(part.used, count), 1) for part in parts]
        gone = [(part, part.until, -1) for part in parts if part.until <= count]
        return _Sums(added + gone, count + 1)

    return memory.cached(("sums", with_uneven_rows), make)
