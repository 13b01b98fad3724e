"""mesh="auto" within a time limit: who has how much of it, in which order, and what ends without a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.compiler import tiles
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.costs.plans.plan import Plan
from autopar.errors import CutOffError, TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_search.arrangements import meshes_of
from autopar.planning.mesh_search.search import EQUAL_SECONDS, MUCH_SHORTER, Candidate, Turn, best_mesh
from autopar.planning.options.groups import Memory
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from tests.support.loss_alone import Reader, reading
from tests.support.meshes import any_plan, candidate, plans_of, table
from tests.support.parity import SLOW_DEVICES


def test_what_the_time_limit_leaves_is_not_tried_and_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, now = plans_of((1.0, 100), (0.5, 100), (0.2, 100)), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    given = []

    def slow(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        given.append(turn.time_limit)
        now[0] += 7
        return candidate(plans[mesh])

    with pytest.warns(UserWarning, match="time limit of 10 s passed when 2 of 3 meshes had been tried"):
        found = best_mesh(slow, tuple(plans), 10)
    assert found.best.seconds == 0.5 and given == [2, 1.5]  # 6 s for three at first; then 3 s for two
    assert "dp=4 × tp=2" in table(found) and "not tried: the time limit passed" in table(found)


def on_a_clock(
    monkeypatch: pytest.MonkeyPatch, needs: dict[Mesh, float], plans: dict[Mesh, Plan], roughly: float | None = None
) -> tuple[Callable[[Mesh, Turn], Candidate[Plan]], list[tuple[str, float]]]:
    """Plans that need so many seconds each, and the turns that were given.

    Within less a plan takes `roughly` times as long, and as much is left open; None: none is found.
    """
    now, given = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        given.append((str(mesh), turn.time_limit))
        now[0] += min(needs[mesh], turn.time_limit)
        if needs[mesh] <= turn.time_limit:
            return candidate(plans[mesh])
        if roughly is None:
            raise TimeLimitError("the time limit passed")
        found = candidate(plans[mesh], roughly * plans[mesh].seconds)
        return replace(found, gap=1 - 1 / roughly)

    return make, given


def test_every_mesh_has_its_share_of_the_time_and_those_that_are_not_proven_have_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = plans_of((1.0, 100), (0.9, 100), (0.5, 100), (5.0, 100))
    make, given = on_a_clock(monkeypatch, dict(zip(plans, (40, 1, 30, 40), strict=True)), plans, roughly=1.5)
    found = best_mesh(make, tuple(plans), 100)
    dp, tp, both, more = map(str, plans)
    # 60 s for four: a mesh that took 1 s leaves more to those behind it, and what is left to those that need longer.
    assert given == [(dp, 15), (tp, 15), (both, 22), (more, 22), (both, 40)]
    steps = [(line[0].found.seconds, line[0].found.gap) for line in found.lines if line[0].found]
    assert steps == [(0.5, 0), (0.9, 0), (1.5, pytest.approx(1 / 3)), (7.5, pytest.approx(1 / 3))]
    assert table(found).count("search cut short") == 2, "rows that are no verdict are marked"


def test_the_likeliest_is_planned_again_for_longer_and_then_others_that_may_be_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = plans_of((1.0, 100), (0.9, 100), (1.01, 100))
    make, given = on_a_clock(monkeypatch, dict(zip(plans, (90, 120, 120), strict=True)), plans, roughly=1.5)
    found = best_mesh(make, tuple(plans), 300)
    dp, tp, both = map(str, plans)
    # Half of 120 s, or twice as much as before; for the third there is nothing left.
    assert given == [(dp, 60), (tp, 60), (both, 60), (tp, 120)]
    assert [line[0].found.seconds for line in found.lines if line[0].found] == pytest.approx([0.9, 1.5, 1.515])


def test_where_nothing_was_found_more_may_be_than_where_a_plan_is_nearly_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, given = plans_of((1.0, 100), (0.9, 100)), []
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        given.append((str(mesh), turn.time_limit))
        now[0] += min(turn.time_limit, 70)
        if mesh.names == ("dp",):
            return replace(candidate(plans[mesh]), gap=0.02)
        if turn.time_limit < 70:
            raise TimeLimitError("the time limit passed")
        return candidate(plans[mesh])

    assert best_mesh(make, tuple(plans), 200).best.seconds == 0.9
    dp, tp = map(str, plans)
    assert given == [(dp, 60), (tp, 60), (tp, 80)]


def test_a_plan_stays_where_more_time_proves_that_it_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, now = plans_of((1.0, 100), (0.9, 100)), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    given = []

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        given.append((str(mesh), turn.cutoff))
        now[0] += 0.8 * turn.time_limit if len(given) < 3 else 1
        if len(given) > 3:
            raise CutOffError(0.95)
        return replace(candidate(plans[mesh]), gap=0.5 if len(given) < 3 else 0.0)

    found = best_mesh(make, tuple(plans), 60)
    dp, tp = map(str, plans)
    assert given == [(dp, math.inf), (tp, 1 - EQUAL_SECONDS), (tp, 1 - EQUAL_SECONDS), (dp, 0.9)]
    assert [line[0].found.gap for line in found.lines if line[0].found] == [0.0, 0.5]


def test_untilany_plan_is_found_a_mesh_has_all_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of((1.0, 100), (0.5, 100))
    make, given = on_a_clock(monkeypatch, dict(zip(plans, (35, 90), strict=True)), plans)
    with pytest.warns(UserWarning, match="1 of 2 meshes had been tried"):
        found = best_mesh(make, tuple(plans), 100)
    assert found.best.seconds == 1.0 and "before a plan was found" in table(found)
    dp, tp = map(str, plans)
    assert given == [(dp, 30), (tp, 30), (dp, 40)]  # 5 s are left, and the other has had 30


def test_of_meshes_of_more_axes_those_come_first_that_split_an_axis_of_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meshes = meshes_of("auto", 16, SLOW_DEVICES, 3)
    plan, made = any_plan(meshes[0]), []
    seconds = {"dp=2 × tp=8": 3.0, "dp=4 × tp=4": 2.0, "dp=8 × tp=2": 1.0}

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        made.append(str(mesh))
        return candidate(replace(plan, mesh=mesh, peak_bytes=len(made)), seconds.get(str(mesh), 4.0))

    best_mesh(make, meshes)
    # dp=2 × tp=2 × sp=4 is joined to dp=4 × tp=4 and dp=2 × tp=8; the others to dp=8 × tp=2, too.
    assert made[4:] == ["dp=2 × tp=4 × sp=2", "dp=4 × tp=2 × sp=2", "dp=2 × tp=2 × sp=4"]


def test_what_is_much_shorter_than_a_turn_that_found_nothing_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of((1.0, 100), (0.9, 100), (0.8, 100), (0.5, 100))
    now, given = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        given.append((str(mesh), turn.time_limit))
        if mesh.ndim == 1:
            return candidate(plans[mesh])
        now[0] += 1.5 * turn.time_limit
        raise TimeLimitError("the time limit passed")

    with pytest.warns(UserWarning, match="when 1 of 4 meshes had been tried"):
        found = best_mesh(make, tuple(plans), 100)
    dp, tp, _, more = map(str, plans)
    # Of two axes a second turn of 15 s would follow one of 20 s; one of another number of axes is begun.
    assert given[:3] == [(dp, 15), (tp, 20), (more, 30)] and MUCH_SHORTER * 20 > 15
    assert "not tried: what was left of the time was too little" in table(found)


@pytest.mark.parametrize(
    ("in_tiles", "as_it_is", "at_least"), [(1.2, 1.1, 1.1), (math.inf, 1.1, 1.1), (math.inf, math.inf, math.inf)]
)
def test_that_memory_costs_time_is_no_bound_of_a_model_that_is_then_planned_within_it(
    in_tiles: float, as_it_is: float, at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infinite bounds are of what does not fit: a batch is halved then, and its mesh not called slow."""
    bounds = iter((0.5, in_tiles, as_it_is))  # the first is the model's without a limit

    def plan(request: PlanRequest, *_: object) -> Plan:
        raise CutOffError(next(bounds))

    monkeypatch.setattr(tiles, "best_plan", plan)
    requested = PlanRequest(hardware=SLOW_DEVICES, settings=Settings(Memory(10**6), cutoff=1.0))
    planner = OfflinePlanner(Reader(512, 16), reading(0, batch=8, sequence=32, num_classes=512), requested, PlanCache())
    with pytest.raises(CutOffError) as raised:
        planner.on(Mesh({"dp": 2}))
    assert raised.value.seconds == at_least and next(bounds, None) is None
