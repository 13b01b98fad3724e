"""Ctrl-C ends a search with the best plan so far, as its time limit does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ortools.sat.python import cp_model

from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_search.search import Candidate, Turn, try_meshes
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings
from autopar.solver import deadline
from autopar.solver.deadline import NEVER, interrupt, interruptible, is_interruptible, is_over, seconds_until
from autopar.solver.ilp import solved
from tests.planning.memory_limit.test_time_limit import TICK, _layers


@pytest.fixture(autouse=True)
def _python_hears_of_it() -> Iterator[None]:
    """Install Python's handler of Ctrl-C, because a shell's background processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _pressed_at(monkeypatch: pytest.MonkeyPatch, *moments: float) -> None:
    """A clock that goes on with every look; at these moments somebody presses Ctrl-C."""
    shown, left = [0.0], list(moments)

    def look() -> float:
        shown[0] += TICK
        if left and shown[0] > left[0]:
            del left[0]
            signal.raise_signal(signal.SIGINT)
        return shown[0]

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=look))


def test_the_best_plan_found_by_then_comes_with_its_bound_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    space = _layers(4)
    limit = make_plan(space, {})[0].peak_bytes // 2
    _pressed_at(monkeypatch, 6000 * TICK)
    with (
        pytest.warns(RuntimeWarning, match="the search was interrupted: the plan is within the limit"),
        interruptible(),
    ):
        plan, _ = make_plan(space, {}, Settings(Memory(limit), Search(time_limit=1e6)))
    assert plan.peak_bytes <= limit and 0 < plan.gap < 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not is_over(1e6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("moments", [(4 * TICK,), (2000 * TICK, 2004 * TICK)], ids=["before there is a plan", "twice"])
def test_without_a_plan_or_pressed_again_it_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, moments: tuple[float, ...]
) -> None:
    space = _layers(4)
    limit = make_plan(space, {})[0].peak_bytes // 2
    _pressed_at(monkeypatch, *moments)
    with pytest.raises(KeyboardInterrupt), interruptible():
        make_plan(space, {}, Settings(Memory(limit), Search(time_limit=1e6)))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_meshes_that_are_left_are_not_tried() -> None:
    meshes = [Mesh({"dp": number}) for number in (2, 4, 8)]

    def make(mesh: Mesh, turn: Turn) -> Candidate[Any]:
        if mesh is meshes[1]:
            signal.raise_signal(signal.SIGINT)
            assert is_over(NEVER) and seconds_until(NEVER) == 0
        plan: Any = mesh
        return Candidate(plan, 1.0, 0.0)

    with interruptible():
        tried = try_meshes(make, meshes)
    assert [each.found is None for each in tried] == [False, False, True]
    assert tried[-1].reason == "not tried: the search was interrupted"


class _Searching:
    """Stands for CP-SAT, which searches until it is told to stop."""

    def __init__(self) -> None:
        self.parameters = SimpleNamespace(catch_sigint_signal=True)
        self.stopped = threading.Event()
        self.stop_search = self.stopped.set

    def solve(self, model: cp_model.CpModel) -> Any:
        signal.raise_signal(signal.SIGINT)
        assert self.stopped.wait(30)
        return cp_model.FEASIBLE


def test_cp_sat_stops_with_what_it_has() -> None:
    solver = _Searching()
    with interruptible():
        assert solved(solver, cp_model.CpModel()) == cp_model.FEASIBLE  # type: ignore[arg-type]
    assert solver.parameters.catch_sigint_signal is False  # it would leave the default action behind


def test_cp_sat_leaves_ctrl_c_as_it_is() -> None:
    solver = cp_model.CpSolver()
    assert solved(solver, cp_model.CpModel()) == cp_model.OPTIMAL
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_programs_that_handle_ctrl_c_and_threads_keep_what_they_do() -> None:
    heard: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            assert heard == [True] and not is_interruptible()
    finally:
        signal.signal(signal.SIGINT, before)
    inside: list[bool] = []

    def search() -> None:
        with interruptible():
            inside.append(is_interruptible())

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert inside == [False]


def test_a_block_within_another_ends_with_the_outer_one() -> None:
    with interruptible():
        with interruptible():
            interrupt()
        assert is_over(NEVER)
    assert not is_over(NEVER)
