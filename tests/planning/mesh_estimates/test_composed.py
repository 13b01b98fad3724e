"""Steps composed of what blocks take: cuts, micro-batches in flight, and mixtures of plans within a limit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.costs.steps.step import forward_and_backward
from autopar.costs.timeline.values import COMPUTE, Task
from autopar.planning.mesh_estimates.block_use import _Seconds
from autopar.planning.mesh_estimates.composed import Part, Staged, even_cuts, in_flight, mixed, schedules_of
from autopar.planning.pipeline.block_costs import paced
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.schedules.simulation import simulate

BLOCKS = (("layer", 1.0, 3.0), ("layer2", 1.0, 3.0), ("head", 4.0, 1.0))
"""Name of a block, seconds of its computing, and of its launches."""
HOSTS = [(0, 0, 0, 0, 0, 0), (2, 2, 2, 2, 2, 0)]


@pytest.mark.parametrize("seconds", [(1, 1, 1, 1, 1, 1), (5, 1, 1, 1, 1, 3), (1, 2, 3, 4, 5, 6), (9, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("hosts", HOSTS, ids=["devices", "hosts"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_the_slowest_stage_of_an_even_cut_takes_least_of_all_cuts(
    seconds: tuple[int, ...], hosts: tuple[int, ...], num_stages: int
) -> None:
    def slowest(starts: tuple[int, ...]) -> int:
        ends = (*starts[1:], len(seconds))
        return max(sum(each[a:b]) for a, b in zip(starts, ends, strict=True) for each in (seconds, hosts))

    found = even_cuts(np.array([seconds, hosts], dtype=float), num_stages)
    every = [(0, *rest) for rest in itertools.combinations(range(1, len(seconds)), num_stages - 1)]
    assert slowest(found) == min(map(slowest, every))


def test_the_lead_of_a_host_from_one_block_is_spent_in_another() -> None:
    """The head keeps devices busy while the host launches layers, and a micro-batch follows another."""
    tasks = [
        Task(row, COMPUTE, seconds, phase, launch=launch, row=row)
        for phase, order in (("forward", (0, 1, 2)), ("backward", (2, 1, 0)))
        for row, seconds, launch in (BLOCKS[place] for place in order)
    ]
    busy = _seconds_of(tuple(row for row, *_ in BLOCKS), (0, 1, 2))
    own = busy.of([replace(each, launch=0.0) for each in tasks])
    there, back = np.array([own.forward.sum()]), np.array([own.backward.sum()])
    forward, backward = paced(there, back, busy.launching(tasks).sum(axis=1)[:, None])
    exact = forward_and_backward(tasks, 0.0)
    assert forward + backward == pytest.approx(sum(exact))


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("1f1b", 4, 8),
        Schedule("gpipe", 4, 8),
        Schedule("interleaved_1f1b", 4, 8, 2),
        Schedule("interleaved_1f1b", 4, 4, 3),
        Schedule("interleaved_1f1b", 2, 8, 4),
        Schedule("interleaved_zero_bubble", 4, 8, 2),
        Schedule("zbv", 4, 12, 2),
    ],
    ids=str,
)
def test_micro_batches_in_flight_are_those_of_the_order_in_which_ranks_run(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        assert tuple(in_flight(schedule, rank)) in schedule.in_flight_at_once(rank)


def test_of_two_plans_as_much_of_the_faster_one_is_taken_as_fits() -> None:
    seconds, num_bytes = np.array([[1.0], [3.0]]), np.array([[100.0], [20.0]])
    found = mixed(seconds, num_bytes, 65.0, [4])
    assert found is not None and np.allclose(found, [[0.5, 0.5]])


def test_every_column_has_a_mixture_of_its_own_and_none_has_one_where_one_has_no_room() -> None:
    seconds, num_bytes = np.array([[1.0, 1.0], [3.0, 3.0]]), np.array([[100.0, 50.0], [20.0, 30.0]])
    found = mixed(seconds, num_bytes, 60.0, [2, 2])
    assert found is not None and np.allclose(found, [[0.5, 0.5], [1.0, 0.0]])
    assert mixed(seconds, num_bytes, 25.0, [2, 2]) is None


def test_without_a_limit_the_fastest_plan_is_taken() -> None:
    found = mixed(np.array([[2.0], [1.0]]), np.array([[1.0], [9.0]]), math.inf, [2])
    assert found is not None and np.allclose(found, [[0.0, 1.0]])


def test_schedules_have_as_many_stages_a_rank_as_there_are_blocks_for() -> None:
    names = ("1f1b", "interleaved_1f1b")
    found = {(each.name, each.chunks) for each in schedules_of(names, 4, 8, 34, None)}
    assert found == {("1f1b", 1), ("interleaved_1f1b", 8), ("interleaved_1f1b", 4), ("interleaved_1f1b", 2)}
    assert [each.chunks for each in schedules_of(names, 4, 8, 34, 3)] == [3]
    assert not list(schedules_of(names, 64, 64, 34, None))


@pytest.mark.parametrize(("name", "within"), [("interleaved_zero_bubble", 0.01), ("zbv", 0.08), ("dualpipev", 0.05)])
@pytest.mark.parametrize("weights", [0.1, 0.2, 0.35])
def test_gradients_of_weights_fill_as_much_of_a_bubble_as_they_take(name: str, within: float, weights: float) -> None:
    """Layers of long sequences spend little of their backward on weights."""
    schedule = Schedule(name, 8, 32, 2)
    all_stages, forward = np.ones(16), 0.3
    part = Part(
        forward * all_stages,
        (1 - forward) * all_stages,
        weights * all_stages,
        *(0 * all_stages for _ in range(4)),
        num_bytes=np.ones(8),
        num_blocks=np.ones(16, dtype=np.intp),
    )
    found = Staged.of(schedule).of_plans([part])
    assert found is not None and found.seconds == pytest.approx(simulate(schedule, found.stages).seconds, rel=within)


@pytest.mark.parametrize(("name", "overlapped"), [("interleaved_1f1b", 3.0), ("interleaved_zero_bubble", 1.0)])
def test_reductions_overlap_with_what_a_schedule_runs_last(name: str, overlapped: float) -> None:
    """A block of two is left; a schedule that makes the gradients of weights apart ends with these."""
    four = np.ones(4)
    part = Part(four, 6 * four, 2 * four, 0 * four, 5 * four, 0 * four, 0 * four, np.ones(2), np.full(4, 2))
    found = Staged.of(Schedule(name, 2, 2, 2)).of_plans([part])
    assert found is not None and [each.reducing for each in found.stages] == [5 - overlapped] * 4


def _seconds_of(rows: tuple[str, ...], origin: tuple[int, ...]) -> _Seconds:
    """Return the seconds of blocks of one row each."""
    memory: Any = SimpleNamespace(
        space=SimpleNamespace(
            hardware=SimpleNamespace(communication_share=0.0), decisions=[SimpleNamespace(name=row) for row in rows]
        ),
        lifetimes=SimpleNamespace(layer=rows),
    )
    short: Any = SimpleNamespace(blocks=rows, origin=origin)
    return _Seconds(memory, (), range(len(rows)), short)


@pytest.mark.parametrize(("launches", "backward"), [(1.0, 4.0), (8.0, 4.0), (10.0, 6.0)])
def test_a_repeated_block_takes_what_its_launches_take(launches: float, backward: float) -> None:
    """The host may launch the one block that stands for many ahead of the last one's long computation."""
    rows = ("first", "repeated", "last")
    forward = [Task(row, COMPUTE, seconds, launch=1.0, row=row) for row, seconds in zip(rows, (2, 5, 40), strict=True)]
    back = [Task(row, COMPUTE, 4.0, "backward", launch=launches, row=row) for row in reversed(rows)]
    found = _seconds_of(rows, (0, 1, 1, 1, 2)).of([*forward, *back])
    assert found.forward[1] == 5.0 and found.backward[1] == backward


@pytest.mark.parametrize(("total", "slowed"), [(6.0, [3.0, 3.0]), (8.0, [4.0, 4.0])])
def test_a_message_of_several_layers_slows_what_waits_behind_it_in_each(total: float, slowed: list[float]) -> None:
    """Messages are of no layer; each layer has the share of them that its weights have of all reductions."""
    rows = ("first", "last")

    def back(row: str, place: int, of: str, seconds: float) -> list[Task]:
        made, reduced = Task(row, COMPUTE, 1.0, "backward", row=row), (place,)
        reduction = Task("reduction", "tp", seconds, "backward", after=reduced, row=of, of_sums=True)
        exchange = Task("exchange", "tp", 1.0, "backward", after=reduced, row=row)
        return [made, reduction, exchange, Task(row, COMPUTE, 1.0, "backward", after=(place + 2,), row=row)]

    tasks = [*back("last", 0, "", total / 4), *back("first", 4, "", 3 * total / 4)]
    found = _seconds_of(rows, (0, 1)).slowed(tasks, np.array([1.0, 1.0]))
    assert found.tolist() == slowed
