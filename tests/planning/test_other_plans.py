"""Other plans than those that the shares of one step after the other lead to, where steps wait for large weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.hardware.overlap import OTHERS, Message, OverlappedWork, Pass
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import BuiltIn, LanguageModel, inputs_of
from autopar.planning import best_plan, simulated
from autopar.planning.formulation import Formulation
from autopar.planning.record import Draft
from autopar.planning.settings import context_of
from autopar.planning.simulated import HALF, ROUNDS, SimulatedDraft, is_doubtful, others_by_shares, simulating
from autopar.solver.deadline import NEVER, after
from tests.planning.test_simulated import SLOW_LINK, _by_the_rule, _plan

MIXTRAL = BuiltIn(LanguageModel, "MixtralConfig", {})


def _mixtral(batch: int, sizes: tuple[int, int], **options: Any) -> Plan:
    """The plan of two layers of Mixtral-8x7B on several nodes."""
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = LanguageModel(MIXTRAL.config(2))
    mesh = Mesh({"dp": sizes[0], "ep": sizes[1]}, hardware="h100")
    return autopar.plan(model, mesh, inputs_of(MIXTRAL, batch, 4096), precision="bf16-mixed", **options)


@pytest.mark.parametrize("name", best_plan.COMPARED)
def test_a_plan_begins_at_a_preset_that_has_the_shorter_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_plan, "COMPARED", ("no such preset", name))
    found, preset = (_mixtral(128, (4, 8), strategy=each) for each in (None, name))
    assert found.simulated <= preset.simulated < 0.95 * _without_others(128, (4, 8)).simulated
    assert any(name in note for note in found.notes) and not context_of(found).pins
    assert not found.waits and 0 < found.gap < 0.05 and found.verify().ok


@pytest.mark.slow
def test_a_preset_within_a_limit_has_the_bound_of_all_plans_within_it() -> None:
    memory = autopar.Memory("16GB")
    found, preset = (_mixtral(128, (4, 8), strategy=each, memory=memory) for each in (None, best_plan.COMPARED[0]))
    assert found.multiplier and any(best_plan.COMPARED[0] in note for note in found.notes)
    assert found.step_seconds <= preset.step_seconds < 0.95 * _without_others(128, (4, 8), memory=memory).step_seconds
    assert found.bound < found.seconds <= preset.seconds and found.verify().ok and not context_of(found).pins


def test_the_bound_of_a_plan_with_other_gradient_sums_is_not_taken() -> None:
    context = context_of(_plan())
    found = _by_the_rule(context)
    memory = MemoryModel(found.context.space, Microbatches(2))
    other = replace(found, context=replace(found.context, memory_model=memory))
    assert best_plan._is_bounded_by(found, found) and not best_plan._is_bounded_by(other, found)


def test_the_bound_of_plans_within_a_limit_is_none_of_a_plan_beyond_it() -> None:
    context = context_of(_plan())
    found = _by_the_rule(context)
    row = MemoryRow(((0, 1),))
    problem = Formulation(found.context.space, found.context.memory_model).problem({}, row, limit=1)
    assert not best_plan._is_bounded_by(replace(found, answer=replace(found.answer, problem=problem)), found)


def test_a_plan_that_moves_less_is_found_though_plans_before_it_have_longer_steps() -> None:
    found = _mixtral(64, (8, 8))
    assert found.simulated < 0.8 * _without_others(64, (8, 8)).simulated
    assert found.waits[OTHERS] == HALF and found.verify().ok
    assert Plan.from_json(found.to_json()).waits == found.waits
    assert found.reprice().seconds == pytest.approx(found.seconds)


def _without_others(batch: int, sizes: tuple[int, int], **options: Any) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_plan, "is_doubtful", lambda first, best: False)
        return _mixtral(batch, sizes, **options)


def test_what_a_user_says_of_storage_is_compared_with_no_other_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_plan, "is_doubtful", lambda first, best: pytest.fail("nothing else is allowed"))
    assert _plan(SLOW_LINK, strategy="zero3").simulated


@pytest.mark.parametrize("options", [{}, {"memory": "1GB"}])
def test_a_search_that_proves_nothing_in_time_leaves_the_plan_before_with_its_bound(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, searched = best_plan.best_plan_of, list[Draft]()

    def unproven(*args: Any) -> Draft:
        found = made(*args)
        searched.append(found)
        answer = replace(found.answer, bound=-math.inf) if len(searched) > 1 else found.answer
        return replace(found, answer=answer)

    monkeypatch.setattr(best_plan, "best_plan_of", unproven)
    plan = _plan(SLOW_LINK, **options)
    assert len(searched) == 2 and not plan.waits and plan.gap < 1e-6


def test_a_step_is_in_doubt_that_is_longer_than_the_least_sum_without_its_launches() -> None:
    first = SimulatedDraft.of(_by_the_rule(context_of(_plan())))
    least = first.priced_seconds

    def lasting(seconds: float, launching: float = 0.0) -> SimulatedDraft:
        return replace(first, timeline=replace(first.timeline, seconds=seconds, launching=launching))

    assert is_doubtful(first, lasting(1.1 * least)) and not is_doubtful(first, lasting(1.01 * least))
    assert not is_doubtful(first, lasting(1.1 * least, launching=0.1 * least))


def test_no_step_is_in_doubt_where_nothing_hides() -> None:
    first = SimulatedDraft.of(_by_the_rule(context_of(_plan(load("cpu")))))
    timeline = replace(first.timeline, seconds=2 * first.priced_seconds, launching=0.0)
    assert not is_doubtful(first, replace(first, timeline=timeline))


def test_searches_go_on_with_the_shares_of_longer_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan()
    first, costs = _by_the_rule(context_of(plan)), list[Space]()
    shares = iter(({"a": 0.1}, {"b": 0.2}, {"a": 0.3}))

    def again(space: Space, incumbent: Draft, gap: float) -> Draft:
        costs.append(space)
        return replace(first, answer=replace(first.answer, modes={"segment": str(len(costs))}))

    monkeypatch.setattr(simulated, "waited_shares", lambda space, choices, timeline: (1.0, next(shares)))
    monkeypatch.setattr(SimulatedDraft, "of", lambda draft: replace(made, draft=draft))
    made = SimulatedDraft(first, plan.timeline(), plan.simulated)
    assert len(list(others_by_shares(made, simulating(again), NEVER))) == ROUNDS
    assert [dict(each.overlapped.waited) for each in costs] == [
        {OTHERS: HALF},
        {OTHERS: HALF, "a": 0.1},
        {OTHERS: HALF, "a": 0.1, "b": 0.2},
    ]


def test_searches_for_others_end_where_nothing_is_found_and_where_time_is_over() -> None:
    def again(space: Space, incumbent: Draft, gap: float) -> Draft:
        raise InfeasibleError("nothing is found")

    first = SimulatedDraft.of(_by_the_rule(context_of(_plan())))
    assert not list(others_by_shares(first, simulating(again), NEVER))
    fails = simulating(lambda *_: pytest.fail("no time is left"))
    assert not list(others_by_shares(first, fails, after(-1.0)))


def test_the_share_of_others_holds_for_kinds_that_have_none_of_their_own() -> None:
    work = OverlappedWork(Pass(1.0), Pass(1.0), 1, ((OTHERS, 0.5), ("all_gather dp forward", 0.2)))
    message = Message(1, overlapped=work)
    assert message.waited("all_gather dp forward") == 0.2 and message.waited("all_reduce dp backward") == 0.5
    assert Message(1, overlapped=work.of_gathers).waited("all_gather ep forward") == 0.5
    assert Message(1, overlapped=replace(work, waited=())).waited("all_gather dp forward") is None
