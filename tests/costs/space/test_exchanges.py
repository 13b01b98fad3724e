"""Exchanges of experts' rows cost what the calls that run meanwhile do not hide, in the sum as in the timeline."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

import autopar
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.pricing.reshard import transfer_seconds
from autopar.costs.space.unsharded import seconds_alone
from autopar.costs.steps.step import step_timeline
from autopar.ir.program.effects import EXCHANGES
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import is_view
from autopar.planning.settings import PlanContext, context_of
from autopar.views.formulas.formulas import with_formulas
from autopar.views.formulas.reprice import reprice
from tests.support.divided_experts import Form, batches, with_experts

NUM_DEVICES = 4
SHARED = Form(shared="after", num_layers=2)


def hardware(bytes_per_s: float) -> Hardware:
    """Devices that compute slowly, and links of this speed."""
    slow = Hardware("slow", {"float32": 1e6}, 1e9, 10**9, 1e-6, (Link("wire", None, 1e-6, bytes_per_s),))
    return replace(slow, communication_share=0.2)


def planned(form: Form, bytes_per_s: float) -> autopar.Plan:
    devices, mesh = hardware(bytes_per_s), Mesh({"ep": NUM_DEVICES}, "cpu")
    return autopar.plan(with_experts(form), mesh, batches(1)[0], strategy="expert_data", hardware=devices)


def exposed(context: PlanContext, number: int) -> list[float]:
    """The seconds of what an exchange moves that the calls meanwhile do not hide, by the formula of the docs."""
    space = context.space
    strategy = space.decisions[number].candidates.strategies[context.choices[number]]
    others = [
        space.decisions[space.index[node.name]].candidates for node in space.meanwhile[space.decisions[number].node]
    ]
    forward = backward = 0.0
    for each in others:
        assert each.call is not None and each.op is not None and each.bound is not None
        if not is_view(each.call):
            alone, latency = seconds_alone(each.call, each.op, each.bound, space.hardware), space.hardware.op_latency_s
            products = 2 if len(each.call.inputs) > 1 else 1.5
            forward += alone / NUM_DEVICES + latency
            backward += products * (alone / NUM_DEVICES + latency)
    found = []
    for place, transfer in enumerate(strategy.transfers):
        whole = transfer_seconds(transfer, space.mesh, space.hardware)
        counts = place == 0 and len(strategy.transfers) == 3  # how many rows go where is waited for
        hiding = 0.0 if counts else backward if transfer.backward else forward
        found.append(max((1.0 if counts else 0.2) * whole, whole - hiding))
    return found


@pytest.mark.parametrize(("bytes_per_s", "is_whole"), [(1e8, True), (2e4, False)])
def test_calls_that_run_meanwhile_hide_an_exchange_in_sum_and_timeline(bytes_per_s: float, is_whole: bool) -> None:
    plan = planned(SHARED, bytes_per_s)
    context = context_of(plan)
    space, waited = context.space, defaultdict[str, float](float)
    for event in step_timeline(context.memory_model, context.choices, plan.recompute).events:
        waited[event.task.row] += event.waited
    exchanges = [n for n, each in enumerate(space.decisions) if each.node.target in EXCHANGES and each.kind == "call"]
    assert len(exchanges) == 4
    for number in exchanges:
        decision = space.decisions[number]
        strategy = decision.candidates.strategies[context.choices[number]]
        assert space.travels(number, context.choices[number])
        assert strategy.waits == pytest.approx(exposed(context, number))
        whole = [transfer_seconds(each, space.mesh, space.hardware) for each in strategy.transfers]
        assert (strategy.waits[-1] == pytest.approx(0.2 * whole[-1])) == is_whole
        assert waited[decision.name] == pytest.approx(sum(strategy.waits), rel=0.1)
    assert plan.seconds == pytest.approx(plan.simulated, rel=0.05)


def test_formulas_count_what_is_hidden() -> None:
    for bytes_per_s in (1e8, 2e4):
        plan = with_formulas(planned(SHARED, bytes_per_s))
        assert reprice(plan, dict(plan.symbols)).seconds == pytest.approx(plan.seconds)


def test_without_a_shared_expert_exchanges_are_exposed() -> None:
    context = context_of(planned(Form(num_layers=2), 1e8))
    assert not context.space.meanwhile
    for number, decision in enumerate(context.space.decisions):
        if decision.node.target in EXCHANGES and decision.kind == "call":
            strategy = decision.candidates.strategies[context.choices[number]]
            whole = [transfer_seconds(each, context.space.mesh, context.space.hardware) for each in strategy.transfers]
            assert list(strategy.waits) == pytest.approx(whole)
            assert not context.space.travels(number, context.choices[number])
