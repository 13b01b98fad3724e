"""Exact searches that begin with the plan of an estimate: it is that of the estimate, and no longer one is taken."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from autopar.compiler.offline import subject_of
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.costs.memory.lifetimes import Lifetimes
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.costs.timeline.values import Timeline
from autopar.errors import InfeasibleError
from autopar.models.catalogue import built_in
from autopar.planning import best_plan, simulated
from autopar.planning.best_plan import best_plan as planned
from autopar.planning.mesh_estimates.estimates import Candidate, Estimate, Estimates
from autopar.planning.mesh_estimates.warm_start import _around, warm_start
from autopar.planning.mesh_search.candidates import of_plan
from autopar.planning.options.groups import Memory, Search
from autopar.planning.record import Draft
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from autopar.planning.simulated import simulated_seconds
from tests.support.parity import SLOW_DEVICES

LIMIT = 16_000_000


def estimated(count: int = 1, layers: int = 5) -> tuple[OfflinePlanner, Estimate]:
    settings = Settings(Memory(LIMIT), Search(time_limit=1000, max_axes=2))
    request = PlanRequest(hardware=SLOW_DEVICES, settings=settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = OfflinePlanner(*built_in("tiny-llama", 16, 32, layers), request, PlanCache())
        subject, _ = subject_of(planner, "auto", 8)
        on = next(each for each in subject.meshes if each.axes == {"dp": 8})
        found = Estimates(subject, float("inf")).estimate(Candidate(on, count))
    assert found is not None and found.schedule is None
    return planner, found


def space_of(planner: OfflinePlanner, estimate: Estimate) -> tuple[PlanRequest, Space]:
    """Return a request that begins with an estimate, and the space of the program that this is of."""
    mesh, count, tiles = estimate.mesh, estimate.microbatches, planner.request.tiles
    if estimate.uses[0].short is not planner.shortened(count, 1, tiles):
        tiles = planner.request.tiles._replace(loss=next(key[2] for key in planner.shorter if key[2].loss).loss)
    start = warm_start(estimate.uses, estimate.shares)
    request = replace(planner.request, microbatches=count, warm_start=start).within(mesh)
    return request, request.space(planner.captured(count, 1, tiles), mesh)


def plan(request: PlanRequest, space: Space) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return planned(request, space)


@pytest.mark.parametrize("count", [1, 4])
def test_a_search_without_time_answers_with_the_plan_of_the_estimate(count: int) -> None:
    planner, estimate = estimated(count)
    request, space = space_of(planner, estimate)
    found = plan(replace(request, settings=request.settings.lasting(0.0)), space)
    assert found.solver == "warm start" and "no lower bound is known" in str(found)
    assert simulated_seconds(found) == pytest.approx(estimate.seconds, rel=0.05)
    assert found.peak_bytes <= LIMIT


def test_a_search_that_finds_a_longer_step_keeps_the_plan_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, estimate = estimated()
    request, space = space_of(planner, estimate)
    search, searched = best_plan._Search.again, list[Draft]()

    def again(self: best_plan._Search, costs: Space, incumbent: Draft, gap: float) -> Draft:
        if searched:
            raise InfeasibleError("nothing is searched for")
        searched.append(search(self, costs, incumbent, gap))
        return searched[0]

    def seconds(draft: Draft, timeline: Timeline) -> float:
        return (1 if draft.answer.solver == "warm start" else 2) * simulated_seconds(draft, timeline)

    monkeypatch.setattr(best_plan._Search, "again", again)
    monkeypatch.setattr(simulated, "simulated_seconds", seconds)
    found = plan(request, space)
    assert simulated_seconds(found) == pytest.approx(estimate.seconds, rel=0.05)
    assert found.solver == "warm start" and 0 < found.bound <= found.seconds
    assert found.bound == pytest.approx(searched[0].answer.bound + found.host_seconds), "at the same costs"


def test_neither_the_start_nor_what_is_found_from_it_is_simulated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, timeline = list[object](), simulated.timeline_of

    def noted(draft: Draft) -> Timeline:
        seen.append((id(draft.context.memory_model), draft.answer.choices, *draft.recompute.items()))
        return timeline(draft)

    monkeypatch.setattr(best_plan, "with_storage_settled", lambda draft, *_: draft)
    monkeypatch.setattr(simulated, "timeline_of", noted)
    planner, estimate = estimated()
    candidate = of_plan(plan(*space_of(planner, estimate)), estimate.microbatches)
    assert len(seen) == len(set(seen)) > 1 and candidate.seconds > 0


def test_a_search_with_time_is_no_slower_than_the_estimate_and_has_a_bound() -> None:
    planner, estimate = estimated()
    found = plan(*space_of(planner, estimate))
    assert simulated_seconds(found) <= 1.001 * estimate.seconds
    assert found.gap is not None and found.gap < 0.01


def test_all_blocks_of_a_mixture_are_of_one_plan_or_the_other() -> None:
    planner, estimate = estimated()
    space = space_of(planner, estimate)[1].with_zigzag_axes(estimate.uses[-1].zigzag_axes)
    one = estimate.uses[-1]
    start = warm_start((replace(one, mode="full"), replace(one, mode="none")), (0.5, 0.5))
    lifetimes = Lifetimes(space)
    modes = [list(each.values()) for _, each in start.choices(space, lifetimes)]
    num_none = [each.count("none") for each in modes]
    assert num_none == sorted(num_none, reverse=True) and num_none[0] == len(lifetimes.segments) and num_none[-1] == 0
    assert all(each == sorted(each) for each in modes), "the last blocks save more"


def test_other_programs_have_no_start() -> None:
    _, estimate = estimated()
    other, _ = estimated(layers=7)
    start = warm_start(estimate.uses, estimate.shares)
    space = other.request.space(other.captured(1, 1, other.request.tiles), estimate.mesh)
    assert not list(start.choices(space, Lifetimes(space)))


def test_a_start_that_the_user_excludes_is_not_used() -> None:
    planner, estimate = estimated()
    request, space = space_of(planner, estimate)
    found = plan(replace(request, strategy="data_parallel", settings=Settings()), space)
    weights = [found.choices[each.name] for each in space.decisions if each.kind == "parameter"]
    assert set(weights) == {"I"}


def test_counts_around_a_number_come_largest_first_and_end_with_none() -> None:
    assert _around(5, 12) == [12, 9, 7, 6, 5, 4, 3, 1, 0]
    assert _around(0, 3) == [3, 2, 1, 0]
    assert _around(3, 3) == [3, 2, 1, 0]
