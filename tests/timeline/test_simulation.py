"""When tasks on streams run: bounds that hold for any of them, and small ones by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.timeline.simulation import simulate
from autopar.timeline.values import COMPUTE, Task, Timeline

SHARES = st.sampled_from([0.0, 0.25, 1.0])


@st.composite
def tasks(draw: st.DrawFn, launches: bool = True) -> list[Task]:
    """Tasks of whole seconds that wait for any before them."""
    found: list[Task] = []
    for number in range(draw(st.integers(0, 12))):
        stream = draw(st.sampled_from([COMPUTE, COMPUTE, "dp", "dp, weights", "tp"]))
        axes = frozenset() if stream == COMPUTE else frozenset([stream[:2]])
        after = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        launch = float(draw(st.integers(0, 2))) if launches else 0.0
        seconds = float(draw(st.integers(0, 5)))
        found.append(Task(str(number), stream, seconds, launch=launch, after=after, axes=axes))
    return found


def _compute(seconds: float, *after: int, launch: float = 0.0) -> Task:
    return Task("computes", COMPUTE, seconds, after=after, launch=launch)


def _moves(seconds: float, stream: str, *after: int) -> Task:
    return Task("all_gather", stream, seconds, after=after, axis=stream[:2], axes=frozenset([stream[:2]]))


def _spans(timeline: Timeline) -> list[tuple[float, float]]:
    return [(each.start, each.end) for each in timeline.events]


@given(tasks(), SHARES)
def test_a_step_takes_as_long_as_one_stream_and_no_longer_than_all_of_them(given: list[Task], share: float) -> None:
    found = simulate(given, share)
    streams: dict[str, float] = defaultdict(float)
    for task in given:
        streams[task.stream] += task.seconds
    launches = sum(task.launch for task in given)
    assert found.seconds >= max((*streams.values(), launches)) - 1e-9
    assert found.seconds <= sum(streams.values()) + launches + 1e-9
    assert found.seconds == pytest.approx(max((each.end for each in found.events), default=0.0))


@given(tasks(), SHARES)
def test_no_task_starts_before_what_it_waits_for(given: list[Task], share: float) -> None:
    found = simulate(given, share).events
    launched, free = 0.0, defaultdict(float)
    for each in found:
        launched += each.task.launch
        assert each.start >= max((launched, free[each.task.stream], *(found[n].end for n in each.task.after))) - 1e-9
        assert each.end >= each.start + each.task.seconds - 1e-9
        free[each.task.stream] = each.end


@given(tasks(), SHARES)
def test_its_seconds_are_computing_waiting_and_launching(given: list[Task], share: float) -> None:
    found = simulate(given, share)
    assert found.seconds == pytest.approx(found.computing + found.waiting + found.launching)
    assert -1e-9 <= found.hidden <= found.communicating + 1e-9


@given(tasks(launches=False))
def test_where_collectives_take_the_whole_device_nothing_is_gained(given: list[Task]) -> None:
    assert simulate(given, share=1.0).seconds == pytest.approx(sum(task.seconds for task in given))


@given(tasks(), st.integers(0, 11))
def test_a_task_that_waits_for_less_makes_no_step_of_one_axis_longer(given: list[Task], number: int) -> None:
    alone = [task for task in given if task.stream in (COMPUTE, "tp")]
    alone = [Task(t.name, t.stream, t.seconds, launch=t.launch, axes=t.axes) for t in alone]
    waiting = [
        Task(t.name, t.stream, t.seconds, launch=t.launch, after=(n - 1,) if n == number and n else (), axes=t.axes)
        for n, t in enumerate(alone)
    ]
    assert simulate(alone).seconds <= simulate(waiting).seconds + 1e-9


def test_a_collective_that_nobody_waits_for_passes_beside_computing() -> None:
    found = simulate([_compute(1.0), _moves(2.0, "dp", 0), _compute(3.0), _compute(1.0, 1)])
    assert _spans(found) == [(0, 1), (1, 3), (1, 4), (4, 5)]
    assert (found.waiting, found.hidden) == (0.0, 2.0)


def test_what_waits_for_a_collective_begins_behind_it() -> None:
    found = simulate([_compute(1.0), _moves(2.0, "dp", 0), _compute(3.0, 1)])
    assert _spans(found) == [(0, 1), (1, 3), (3, 6)]
    assert (found.waiting, found.events[1].waited, found.hidden) == (2.0, 2.0, 0.0)


def test_a_collective_slows_what_computes_beside_it_by_its_share() -> None:
    found = simulate([_moves(2.0, "dp"), _compute(3.0)], share=0.25)
    assert _spans(found) == [(0, 2), (0, 3.5)]
    assert found.waiting == 0.5


def test_two_communicators_of_one_axis_divide_its_links_and_others_do_not() -> None:
    assert _spans(simulate([_moves(1.0, "dp"), _moves(2.0, "dp, weights")])) == [(0, 2), (0, 3)]
    assert _spans(simulate([_moves(1.0, "dp"), _moves(2.0, "tp")])) == [(0, 1), (0, 2)]


def test_a_device_that_is_faster_than_the_host_waits_for_launches() -> None:
    found = simulate([_compute(1.0, launch=2.0), _compute(5.0, launch=2.0), _compute(1.0, launch=2.0)])
    assert _spans(found) == [(2, 3), (4, 9), (9, 10)]
    assert found.launching == 3.0
