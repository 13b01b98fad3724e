"""A step as a timeline: one stream that computes, one for each communicator, and a host that launches all of it.

Streams run their tasks in order. A task starts as soon as

    its stream is free,
    the tasks that it waits for (`after`) have ended, and
    the host has launched it, which launches tasks one after another, in the order they are given, and waits for none,

and runs at a rate, 1 where it is alone. Collectives share the ports of the links that they load (`Task.links`),
whatever mesh axes they run over, and all of them take their share of the device from what computes there:

    rate of a collective    1 / max(1, load of its busiest link, share · running collectives)
    load of a link          sum of the port shares of the running collectives that use it
    rate of computing       1 - share · rates of all running collectives

Tasks that run `overlapped` take nothing of the device, but share the ports of the links that they load: what is sent
from stage to stage of a pipeline.

With a share of 0 collectives overlap with compute entirely, and with 1, as if a host's own cores move the bytes,
overlap gains nothing: a step takes the sum of all its tasks. It never takes longer, but for launches, nor less than one
stream.

Seconds that computing loses are put down to what it waits for, as long as that takes alone. The delay of a collective
by others on its links is attributed to these, and the slowdown of compute to all that runs, in equal parts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.costs.timeline.values import COMPUTE, Event, Task, Timeline


def simulate(tasks: Sequence[Task], share: float = 0.0) -> Timeline:
    """Return the timeline of tasks whose collectives take a `share` of the device, from 0 to 1."""
    assert 0 <= share <= 1, f"a share of {share}"
    assert all(before < number for number, task in enumerate(tasks) for before in task.after), "a task waits for itself"
    launched = list(accumulate(task.launch for task in tasks))
    queues: dict[str, deque[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, deque()).append(number)
    starts, ends, waited = [0.0] * len(tasks), [-1.0] * len(tasks), [0.0] * len(tasks)
    left: dict[int, float] = {}
    """Running task → its seconds that are left."""
    busy: set[str] = set()
    now = launching = 0.0
    while queues or left:
        upcoming = []
        for stream, queue in queues.items():
            head = queue[0]
            if stream in busy or any(ends[each] < 0 for each in tasks[head].after):
                continue
            if launched[head] > now:
                upcoming.append(launched[head] - now)
                continue
            queue.popleft()
            busy.add(stream)
            left[head], starts[head] = tasks[head].seconds, now
        queues = {stream: queue for stream, queue in queues.items() if queue}
        rates = _rates([tasks[number] for number in left], share)
        times = {number: seconds / rate for (number, seconds), rate in zip(left.items(), rates, strict=True) if rate}
        passing = min((*times.values(), *upcoming))
        computed = sum(rate for number, rate in zip(left, rates, strict=True) if tasks[number].stream == COMPUTE)
        lost = passing * (1 - computed)
        if lost > 0:
            rate_of = dict(zip(left, rates, strict=True))
            for number, part in _to_blame(tasks, rate_of, queues.get(COMPUTE), COMPUTE in busy):
                waited[number] += part * lost
        launching += 0.0 if left else passing
        now += passing
        for (number, seconds), rate in zip(list(left.items()), rates, strict=True):
            if times.get(number) == passing:
                ends[number] = now
                busy.discard(tasks[number].stream)
                del left[number]
            else:
                left[number] = max(0.0, seconds - passing * rate)
    return Timeline(tuple(map(Event, tasks, starts, ends, waited)), now, launching)


def behind_another(tasks: Sequence[Task], share: float = 0.0) -> tuple[Event, ...]:
    """Return the events of tasks that follow the same tasks, from where these end.

    The host has launched the first ones while the tasks before them ran, as in all micro-batches but the first.
    """
    count = len(tasks)
    last = tuple({task.stream: number for number, task in enumerate(tasks)}.values())
    again = [replace(task, after=tuple(number + count for number in task.after) or last) for task in tasks]
    events = simulate([*tasks, *again], share).events
    end = max((each.end for each in events[:count]), default=0.0)
    return tuple([replace(each, start=each.start - end, end=each.end - end) for each in events[count:]])


def _to_blame(
    tasks: Sequence[Task], rate_of: Mapping[int, float], computations: Sequence[int] | None, computes: bool
) -> list[tuple[int, float]]:
    """Return the running tasks that computing loses time to, each with its part; `computations` are still to come."""
    running = [number for number in rate_of if tasks[number].stream != COMPUTE]
    awaited: list[int] = []
    if computations and not computes:
        awaited = [number for number in tasks[computations[0]].after if number in rate_of]
    others = [number for number in running if number not in awaited]
    if not awaited or not others:
        return [(number, 1 / len(running)) for number in running]
    own = max(rate_of[number] for number in awaited)
    return [(n, own / len(awaited)) for n in awaited] + [(n, (1 - own) / len(others)) for n in others]


def _rates(running: Sequence[Task], share: float) -> list[float]:
    collectives = [task for task in running if task.stream != COMPUTE and not task.overlapped]
    load: dict[str, float] = defaultdict(float)
    for task in running:
        for link, part in task.links:
            load[link] += part
    found = {
        id(task): 1 / max(1.0, share * len(collectives), *(load[link] for link, _ in task.links))
        for task in collectives
    }
    computing = max(0.0, 1 - share * sum(found.values()))
    found |= {id(task): 1 / max((1.0, *(load[link] for link, _ in task.links))) for task in running if task.overlapped}
    return [found.get(id(task), computing) for task in running]
