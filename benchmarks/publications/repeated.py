"""Exact extrapolation from plans of few equal layers to a plan of more layers.

Two plans that differ in one layer show what a layer adds. Its tasks are inserted once per further layer, and the longer
list is simulated like any step. Sums are linear in the number of layers. So are the bytes at each moment, counted from
the beginning or from the end of the model; their maximum therefore lies at one of the ends.

`NotRepeated` is raised if the longer plan is not the shorter one with a layer inserted. Examples are messages that join
several layers, and a message that takes so much less in the longer plan that none would be left. The model is then
planned whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from autopar.costs.timeline.values import Task


class NotRepeated(Exception):
    """The longer plan is not the shorter with one more layer in it."""


def extended(shorter: Sequence[Task], longer: Sequence[Task], times: int) -> tuple[Task, ...]:
    """`longer`, with what it has more than `shorter` put in `times` times more, in each of the passes."""
    fewer = {name: (start, kinds) for name, start, kinds in _passes(shorter)}
    order: list[tuple[int, int | None]] = []
    """Positions of the new order's tasks in `longer`, and in `shorter` for tasks that both have."""
    section: dict[int, int] = {}
    for number, (name, start, kinds) in enumerate(_passes(longer)):
        first, given = fewer.get(name, (0, []))
        place, period = _layer(given, kinds, name), len(kinds) - len(given)
        order += [(start + at, first + at) for at in range(place)]
        order += [(start + at, None) for _ in range(times + 1) for at in range(place, place + period)]
        order += [(start + at, first + at - period) for at in range(place + period, len(kinds))]
        section |= dict.fromkeys(range(start, start + len(kinds)), number)
    copies: dict[int, list[int]] = defaultdict(list)
    found: list[Task] = []
    for at, (place, other) in enumerate(order):
        task, after = longer[place], set[int]()
        for each in task.after:
            # Within a pass as far back as there; of an earlier one all that were put in.
            after.update([at - (place - each)] if section[each] == section[place] else copies[each])
        copies[place].append(at)
        # Messages of all layers' norms, and the like, grow with their number.
        seconds = task.seconds if other is None else on_line(shorter[other].seconds, task.seconds, times)
        if seconds < 0:
            raise NotRepeated(
                f"{task.name} takes {shorter[other or 0].seconds} s, and {task.seconds} s with a layer more"
            )
        found.append(replace(task, seconds=seconds, after=tuple(sorted(after))))
    return tuple(found)


def _passes(tasks: Sequence[Task]) -> list[tuple[str, int, list[tuple[str, ...]]]]:
    """Forward, backward with what is computed again, optimizer: each with its first place, and what its tasks are."""
    found, start = [], 0
    for name, group in groupby(tasks, lambda each: "backward" if each.phase == "recomputation" else each.phase):
        kinds = [(each.name, each.stream, each.axis) for each in group]
        found.append((name, start, kinds))
        start += len(kinds)
    return found


def _layer(fewer: list[tuple[str, ...]], kinds: list[tuple[str, ...]], name: str) -> int:
    """Return the position at which the longer list has one more layer; the middle one of several candidates."""
    alike, rest = _alike(fewer, kinds), len(fewer) - _alike(fewer[::-1], kinds[::-1])
    if len(kinds) < len(fewer) or rest > alike:
        raise NotRepeated(
            f"{name}: {len(fewer)} and {len(kinds)} tasks, the first {alike} alike, and those from {rest}"
        )
    return (alike + rest) // 2


def _alike(one: list[tuple[str, ...]], other: list[tuple[str, ...]]) -> int:
    """Return the length of the common prefix of two lists."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def on_line(shorter: float, longer: float, times: int) -> float:
    """The value at `times` layers more than `longer` has, which has one more than `shorter`."""
    return longer + times * (longer - shorter)


def highest(shorter: np.ndarray, longer: np.ndarray, times: int, before: int, behind: int) -> int:
    """The most of what lies along the last dim, one place for each call, at `times` further layers.

    Of the calls of a model so many are before its layers, and behind them; the others are told by their distance from
    the begin, and from the end.
    """
    until, since = shorter.shape[-1] - behind, longer.shape[-1] - shorter.shape[-1]
    ends = (
        (shorter[..., :until], longer[..., :until]),
        (shorter[..., before:], longer[..., since + before :]),
    )
    return max(int((more + times * (more - few)).max()) for few, more in ends)
