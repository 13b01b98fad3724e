"""Costs that agree with the simulated step, where several collectives hide behind the same computing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.planner import make_plan
from autopar.planning.settings import context_of
from autopar.planning.simulated import as_simulated, simulated_seconds, timeline_of
from autopar.solver.deadline import NEVER
from tests.runtime.rewrite.test_prefetch import WIDTH, Stack
from tests.support.options import by_flag

HIDING = replace(load("cpu"), communication_share=0.1, dtensor_s=0.0, name="collectives next to computing")
"""Collectives take a little of a device, so that its steps hide them, and wait for what lasts longer."""
X = (torch.zeros(64, WIDTH),)
FAR = 0.02  # of the step, 0.014 of it the share that the loss's sum takes: hidden behind gathers in the timeline


def _plan(hardware: Hardware = HIDING, **options: object) -> Plan:
    return autopar.plan(Stack(), Mesh({"dp": 2, "tp": 2}), X, hardware=hardware, strategy="zero3", **by_flag(**options))  # type: ignore[arg-type]


def test_the_sum_of_a_plan_is_its_simulated_step() -> None:
    plan = _plan()
    timeline = plan.timeline()
    assert plan.waits and all(name.split()[0] in ("all_gather", "reduce_scatter") for name in plan.waits)
    assert plan.seconds == pytest.approx(timeline.seconds - timeline.launching, rel=FAR)
    assert plan.step_seconds == plan.simulated == timeline.seconds == simulated_seconds(plan)
    assert plan.workload is not None and plan.workload.seconds == timeline.seconds
    first, _ = make_plan(context_of(plan).space.waiting_for({}), context_of(plan).pins)
    assert abs(first.seconds / timeline_of(first).seconds - 1) > 2 * FAR, "the rule of one axis says too little here"


def test_what_such_a_plan_claims_holds_also_when_it_was_loaded() -> None:
    plan = _plan()
    assert plan.verify().ok
    loaded = Plan.from_json(plan.to_json())
    assert loaded.step_seconds == plan.step_seconds and loaded.waits == plan.waits
    assert loaded.attach(Stack(), X, hardware=HIDING, strategy="zero3").verify().ok
    assert plan.reprice().seconds == pytest.approx(plan.seconds)


def test_where_nothing_is_hidden_no_second_search_is_made() -> None:
    plan = _plan(load("cpu"))
    assert not plan.waits and plan.step_seconds == plan.timeline().seconds


def test_of_several_micro_batches_the_step_of_all_is_told() -> None:
    plan = autopar.plan(Stack(), Mesh({"dp": 2}), X, hardware=HIDING, strategy="zero3", microbatches=4)
    assert plan.workload is not None
    assert plan.workload.seconds == simulated_seconds(plan) > 2 * plan.step_seconds


def test_a_next_plan_whose_step_is_longer_is_not_taken() -> None:
    plan = _plan(replace(HIDING, flops={"float32": 1e9}, links=(Link("wire", None, 1e-6, 1e8),)))
    context = context_of(plan)
    first = replace(plan, context=replace(context, space=context.space.waiting_for({})))
    splits_nothing = {
        number: np.array([all(choice == "-" for choice in each.choices) for each in decision.menu.strategies])
        for number, decision in enumerate(context.space.decisions)
        if decision.kind == "call"
    }
    asked: list[Space] = []

    def again(costs: Space) -> Plan:
        asked.append(costs)
        return make_plan(costs, splits_nothing)[0]

    found = as_simulated(first, again, NEVER)
    (costs,) = asked
    assert costs.beside.waited and found.waits == dict(costs.beside.waited)
    assert found.choices == plan.choices and found.seconds == pytest.approx(plan.seconds)
    assert found.bound == make_plan(costs, splits_nothing)[0].bound, "of the last search, under the same costs"
    assert any("simulated step is longer" in note for note in found.notes)
