"""Times at which tasks on streams run: bounds that hold for any tasks, and small cases by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.timeline.simulation import behind_another, simulate
from autopar.costs.timeline.values import COMPUTE, Task, Timeline

SHARES = st.sampled_from([0.0, 0.25, 1.0])


@st.composite
def tasks(draw: st.DrawFn, launches: bool = True) -> list[Task]:
    """Tasks of whole seconds that wait for any before them."""
    found: list[Task] = []
    for number in range(draw(st.integers(0, 12))):
        stream = draw(st.sampled_from([COMPUTE, COMPUTE, "dp", "dp, weights", "tp"]))
        links = () if stream == COMPUTE else ((stream[:2], draw(st.sampled_from([0.25, 1.0]))), ("all", 0.5))
        after = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        launch = float(draw(st.integers(0, 2))) if launches else 0.0
        seconds = float(draw(st.integers(0, 5)))
        found.append(Task(str(number), stream, seconds, launch=launch, after=after, links=links))
    return found


def _compute(seconds: float, *after: int, launch: float = 0.0) -> Task:
    return Task("computes", COMPUTE, seconds, after=after, launch=launch)


def _moves(seconds: float, stream: str, *after: int) -> Task:
    return Task("all_gather", stream, seconds, after=after, axis=stream[:2], links=((stream[:2], 1.0),))


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
    alone = [Task(t.name, t.stream, t.seconds, launch=t.launch, links=t.links) for t in alone]
    waiting = [
        Task(t.name, t.stream, t.seconds, launch=t.launch, after=(n - 1,) if n == number and n else (), links=t.links)
        for n, t in enumerate(alone)
    ]
    assert simulate(alone).seconds <= simulate(waiting).seconds + 1e-9


def test_a_collective_that_nobody_waits_for_passes_next_to_computing() -> None:
    found = simulate([_compute(1.0), _moves(2.0, "dp", 0), _compute(3.0), _compute(1.0, 1)])
    assert _spans(found) == [(0, 1), (1, 3), (1, 4), (4, 5)]
    assert (found.waiting, found.hidden) == (0.0, 2.0)


def test_what_waits_for_a_collective_begins_behind_it() -> None:
    found = simulate([_compute(1.0), _moves(2.0, "dp", 0), _compute(3.0, 1)])
    assert _spans(found) == [(0, 1), (1, 3), (3, 6)]
    assert (found.waiting, found.events[1].waited, found.hidden) == (2.0, 2.0, 0.0)


def test_a_collective_slows_what_computes_next_to_it_by_its_share() -> None:
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


def _over(seconds: float, stream: str, links: dict[str, float], *after: int) -> Task:
    return Task("all_gather", stream, seconds, after=after, axis=stream, links=tuple(links.items()))


def test_collectives_of_several_axes_share_the_card_that_they_cross() -> None:
    found = simulate([_over(4, "dp", {"card": 1.0}), _over(4, "sp", {"card": 1.0}), _over(4, "tp", {"nvlink": 1.0})])
    assert _spans(found) == [(0, 8), (0, 8), (0, 4)]


def test_a_micro_batch_behind_another_waits_for_the_slower_of_device_and_host() -> None:
    tasks = [Task("norm", COMPUTE, 0.1, "forward", 1.0), Task("linear", COMPUTE, 5.0, "forward", 0.1)]
    assert simulate(tasks).seconds == pytest.approx(6.1), "the first one waits for its first launch"
    assert behind_another(tasks)[-1].end == pytest.approx(5.1), "the host is ahead"
    slow = [Task("norm", COMPUTE, 0.1, "forward", 1.0), Task("add", COMPUTE, 0.2, "forward", 1.0)]
    assert behind_another(slow)[-1].end == pytest.approx(2.0), "the host is behind"


@given(tasks(launches=False), st.floats(0.0, 1.0))
def test_without_launches_a_micro_batch_takes_as_long_behind_another(given: list[Task], share: float) -> None:
    end = max((each.end for each in behind_another(given, share)), default=0.0)
    assert end == pytest.approx(simulate(given, share).seconds)


def test_what_leaves_room_on_a_link_is_not_slowed() -> None:
    found = simulate([_over(4, "dp", {"card": 0.5}), _over(4, "sp", {"card": 0.5}), _over(4, "tp", {"card": 0.0})])
    assert _spans(found) == [(0, 4)] * 3
    found = simulate([_over(3, "dp", {"nvlink": 0.5, "card": 1.0}), _over(3, "sp", {"card": 0.5})])
    assert _spans(found) == [(0, 4.5), (0, 4.5)]


def test_a_wait_is_put_down_to_what_is_waited_for_and_its_delay_to_who_shares_its_link() -> None:
    gather, reduction = _over(6, "dp", {"card": 1.0}), _over(2, "tp", {"card": 1.0})
    found = simulate([gather, reduction, _compute(10, 1)])
    assert found.seconds == 14  # two seconds of the reduction, and two more since the gather shares its card
    assert [each.waited for each in found.events] == [2, 2, 0]
    apart = simulate([gather, _over(2, "tp", {"nvlink": 1.0}), _compute(10, 1)])
    assert [each.waited for each in apart.events] == [0, 2, 0]
