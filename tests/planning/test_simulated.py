"""Costs that agree with the simulated step, where several collectives hide behind the same computing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.plans.plan import Plan
from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Space
from autopar.costs.timeline.values import Timeline
from autopar.errors import InfeasibleError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning import planner, record, simulated
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.mesh_search.candidates import of_plan
from autopar.planning.planner import Statements, best_plan_of
from autopar.planning.record import Draft
from autopar.planning.settings import PlanContext, Settings, context_of
from autopar.planning.simulated import (
    Again,
    SimulatedDraft,
    shortest_simulated,
    simulated_seconds,
    simulating,
    timeline_of,
)
from autopar.solver.deadline import NEVER, lasting
from autopar.views.inspection.breakdown import LAUNCHES, breakdown
from tests.runtime.rewrite.test_prefetch import WIDTH, Stack
from tests.support.options import by_flag

HIDING = replace(load("cpu"), communication_share=0.1, dtensor_s=0.0, name="collectives next to computing")
"""Collectives take a little of a device, so that its steps hide them, and wait for what lasts longer."""
X = (torch.zeros(64, WIDTH),)
FAR = 0.02  # of the step, 0.014 of it the share that the loss's sum takes: hidden behind gathers in the timeline


def _plan(hardware: Hardware = HIDING, strategy: str = "zero3", **options: object) -> Plan:
    requested: Any = {"hardware": hardware, "strategy": strategy, **by_flag(**options)}
    return autopar.plan(Stack(), Mesh({"dp": 2, "tp": 2}), X, **requested)


def _draft(
    space: Space, pins: Pins, settings: Settings = Settings(), microbatches: Microbatches | None = None
) -> Draft:
    return best_plan_of([microbatches or Microbatches()], Statements(space), pins, settings)


def _as_simulated(first: Draft, again: Again, space: Space | None = None) -> Plan:
    """The plan that searches with the costs of simulated steps lead to."""
    return shortest_simulated(SimulatedDraft.of(first), simulating(again), NEVER, space).written()


def _by_the_rule(context: PlanContext) -> Draft:
    """The draft of a plan that costs of no simulated step have led to."""
    space = context.space.waiting_for({})
    return _draft(space, context.pins, context.settings, context.memory_model.microbatches)


def test_the_sum_of_a_plan_is_its_simulated_step() -> None:
    plan = _plan()
    timeline = plan.timeline()
    assert plan.waits and all(name.split()[0] in ("all_gather", "reduce_scatter") for name in plan.waits)
    assert plan.seconds == pytest.approx(timeline.seconds, rel=FAR)
    assert (
        plan.step_seconds == plan.simulated == timeline.seconds == simulated_seconds(_draft_of(plan, context_of(plan)))
    )
    assert plan.workload is not None and plan.workload.seconds == timeline.seconds
    first = _by_the_rule(context_of(plan))
    assert abs(first.device_seconds / timeline_of(first).seconds - 1) > 2 * FAR, (
        "the rule of one axis says too little here"
    )


def test_of_all_plans_that_searches_make_one_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    searches, writings = list[object](), list[object]()
    search, write = planner.best_within, record.written_down
    monkeypatch.setattr(planner, "best_within", lambda *args: (searches.append(args), search(*args))[1])
    monkeypatch.setattr(record, "written_down", lambda *args: (writings.append(args), write(*args))[1])
    _plan(SLOW_LINK)
    assert len(searches) > 1 and len(writings) == 1


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"memory": "1GB"}])
def test_a_plan_that_no_search_follows_keeps_the_costs_and_the_bound_of_its_own(options: dict[str, Any]) -> None:
    context = context_of(_plan(**options))

    def again(costs: Space, incumbent: Draft, gap: float) -> Draft:
        raise InfeasibleError("nothing is searched for")

    first = _by_the_rule(context)
    found = _as_simulated(first, again)
    assert not found.waits and found.choices == first.strategies
    assert found.seconds == pytest.approx(first.device_seconds + found.host_seconds)
    assert abs(found.simulated / found.seconds - 1) > 2 * FAR, "its step differs, and is told beside the sum"
    assert found.gap < 1e-6 and found.verify().ok


def test_what_such_a_plan_claims_holds_also_when_it_was_loaded() -> None:
    plan = _plan()
    assert plan.verify().ok
    loaded = Plan.from_json(plan.to_json())
    assert loaded.step_seconds == plan.step_seconds and loaded.waits == plan.waits
    assert loaded.attach(Stack(), X, hardware=HIDING, strategy="zero3").verify().ok
    assert plan.reprice().seconds == pytest.approx(plan.seconds)


def _launched_late(launch_s: float = 0.0, straggling_s: float = 0.0) -> Hardware:
    links = tuple(replace(link, straggling_s=straggling_s) for link in HIDING.links)
    return replace(HIDING, launch_s=launch_s, links=links)


def test_a_sum_has_the_launches_that_its_step_waits_for() -> None:
    plan = _plan(_launched_late(launch_s=2e-3))
    timeline = plan.timeline()
    assert timeline.launching > 0.5 * timeline.seconds, "the host is what is slow"
    assert plan.host_seconds == pytest.approx(timeline.launching)
    assert plan.seconds == pytest.approx(timeline.seconds, rel=FAR)
    assert sum(row.seconds for row in plan.rows) + plan.host_seconds == pytest.approx(plan.seconds)
    assert plan.seconds - plan.bound == pytest.approx(_plan().seconds - _plan().bound, abs=1e-9), "of choices alone"
    assert breakdown(plan)[LAUNCHES].seconds == plan.host_seconds


def test_lateness_that_devices_do_not_wait_for_is_in_no_sum() -> None:
    plan, punctual = (_plan(_launched_late(straggling_s=late), strategy="megatron") for late in (1e-4, 0.0))
    timeline = plan.timeline()
    assert timeline.lateness > 5 * timeline.launching, "hosts are ahead of their devices"
    assert plan.host_seconds == pytest.approx(timeline.launching - timeline.lateness) and not punctual.host_seconds
    further = timeline.seconds - punctual.timeline().seconds
    assert plan.choices == punctual.choices and plan.seconds - punctual.seconds == pytest.approx(further)


def test_what_hosts_add_is_claimed_saved_and_repriced_with_the_sum() -> None:
    hardware = _launched_late(launch_s=2e-3)
    plan = _plan(hardware)
    assert plan.verify().ok and plan.verify().seconds == pytest.approx(plan.seconds)
    loaded = Plan.from_json(plan.to_json())
    assert loaded.host_seconds == plan.host_seconds
    assert loaded.attach(Stack(), X, hardware=hardware, strategy="zero3").verify().ok
    assert plan.reprice().seconds == pytest.approx(plan.seconds)
    assert plan.what_if("head", dp="data").host_seconds == plan.host_seconds, "the same for all choices"


def test_where_nothing_is_hidden_no_second_search_is_made() -> None:
    plan = _plan(load("cpu"))
    assert not plan.waits and plan.step_seconds == plan.timeline().seconds


def test_a_small_plan_has_its_simulated_step_also_if_the_time_of_the_planner_is_over() -> None:
    plan = _plan()
    first = _by_the_rule(context_of(plan))
    with lasting(-1.0):
        found = _as_simulated(first, lambda *_: pytest.fail("no time is left to search"))
    assert found.simulated == timeline_of(first).seconds and found.choices == first.strategies


def test_of_several_micro_batches_the_step_of_all_is_told() -> None:
    plan = autopar.plan(Stack(), Mesh({"dp": 2}), X, hardware=HIDING, strategy="zero3", microbatches=4)
    simulated_again = simulated_seconds(_draft_of(plan, context_of(plan)))
    assert plan.workload is not None
    assert plan.workload.seconds == simulated_again > 2 * plan.step_seconds


def test_a_plan_that_is_written_down_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = autopar.plan(Stack(), Mesh({"dp": 2}), X, hardware=HIDING, microbatches=4)
    monkeypatch.setattr(simulated, "timeline_of", lambda _: pytest.fail("it is simulated again"))
    assert plan.workload is not None
    assert of_plan(plan, 4).seconds == simulated_seconds(plan) == plan.workload.seconds


def _draft_of(plan: Plan, context: PlanContext) -> Draft:
    """The draft of a plan's choices in a context."""
    proof = plan.bound, plan.solver, plan.multiplier, context.problem
    return Draft(context, Answer(context.choices, plan.recompute, plan.device_seconds, *proof))


def _another(draft: Draft, number: int) -> Draft:
    """The draft with the mode of a segment that no model has, so that it is another plan."""
    return replace(draft, answer=replace(draft.answer, modes={f"search {number}": "none"}))


SLOW_LINK = replace(HIDING, flops={"float32": 1e9}, links=(Link("wire", None, 1e-6, 1e8),))


def _overlapped_by_a_longer_one() -> tuple[Draft, Plan, list[Draft]]:
    """A plan before its costs are those of its step, what it leads to, and the next ones, which split nothing."""
    plan = _plan(SLOW_LINK)
    context = context_of(plan).widened()  # other plans than the preset's take part
    first = _draft_of(plan, replace(context, space=context.space.waiting_for({})))
    splits_nothing = {
        number: np.array([all(choice == "-" for choice in each.choices) for each in decision.candidates.strategies])
        for number, decision in enumerate(context.space.decisions)
        if decision.kind == "call"
    }
    nexts: list[Draft] = []

    def again(costs: Space, incumbent: Draft, gap: float) -> Draft:
        nexts.append(_draft(costs, splits_nothing))
        return nexts[-1]

    return first, _as_simulated(first, again), nexts


def test_a_next_plan_whose_step_is_longer_is_not_taken() -> None:
    first, found, (other,) = _overlapped_by_a_longer_one()
    assert other.context.space.overlapped.waited and not found.waits
    assert found.choices == first.strategies and found.seconds == pytest.approx(first.device_seconds)
    assert found.bound == pytest.approx(first.answer.bound), "of the search that found it"


def test_costs_whose_cheapest_moves_make_the_step_longer_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(plan: Draft) -> Timeline:
        found = timeline_of(plan)
        return replace(found, seconds=2 * found.seconds) if context_of(plan).space.overlapped.waited else found

    plan = _plan()
    context, nexts = context_of(plan), list[Draft]()

    def again(costs: Space, incumbent: Draft, gap: float) -> Draft:
        nexts.append(_draft(costs, context.pins))
        return nexts[-1]

    first = _by_the_rule(context)
    monkeypatch.setattr(simulated, "timeline_of", longer)
    found = _as_simulated(first, again)
    assert nexts[0].strategies == first.strategies and nexts[0].context.space.overlapped.waited
    assert not found.waits and found.simulated == timeline_of(first).seconds


def test_a_space_with_other_axes_is_searched_once_also_where_costs_agree() -> None:
    plan = _plan(load("cpu"))
    context, searched = context_of(plan), []

    def again(costs: Space, incumbent: Draft, gap: float) -> Draft:
        searched.append((costs, incumbent, gap))
        return _draft(costs, context.pins)

    first, other = _draft_of(plan, context), context.space.waiting_for({})
    found = _as_simulated(first, again, other)
    ((costs, incumbent, gap),) = searched
    assert costs.edges == other.edges and incumbent is first and gap == 0.0
    assert found.choices == plan.choices and context_of(found).space is costs


def test_a_later_search_ends_where_it_could_gain_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    context, gaps, seconds = context_of(_plan()), list[float](), iter((1.0, 0.9, 0.8))

    def shorter(plan: Draft) -> Timeline:
        return replace(timeline_of(plan), seconds=next(seconds))

    def again(costs: Space, incumbent: Draft, gap: float) -> Draft:
        gaps.append(gap)
        return _another(_draft(costs, context.pins), len(gaps))

    monkeypatch.setattr(simulated, "timeline_of", shorter)
    monkeypatch.setattr(simulated, "waited_shares", lambda space, choices, timeline: (1.0, {}))
    _as_simulated(_by_the_rule(context), again)
    assert gaps[0] == 0.0 and 0 < gaps[1] <= simulated.WORTH and len(gaps) == simulated.ROUNDS - 1


@pytest.mark.parametrize(("simulated_seconds", "searches"), [((1.0, 0.9, 0.8), 2), ((2e-9, 1e-9), 1)])
def test_a_shorter_plan_is_searched_for_again_if_its_step_waits_for_more_than_its_costs_say(
    simulated_seconds: tuple[float, ...], searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, searched = _plan(), list[Space]()
    seconds = iter(simulated_seconds)

    def again(costs: Space, incumbent: Draft, gap: float) -> Draft:
        searched.append(costs)
        return _another(_draft(costs, context_of(plan).pins), len(searched))

    monkeypatch.setattr(simulated, "timeline_of", lambda draft: replace(timeline_of(draft), seconds=next(seconds)))
    monkeypatch.setattr(simulated, "waited_shares", lambda space, choices, timeline: (1.0, {}))
    found = _as_simulated(_draft_of(plan, context_of(plan)), again)
    assert len(searched) == searches and found.simulated == simulated_seconds[-1]
