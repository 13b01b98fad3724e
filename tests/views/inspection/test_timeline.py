"""A plan's timeline, and where it and the sum differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.errors import PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.views.inspection.timeline import compared_with_the_sum, parts
from tests.runtime.rewrite.test_prefetch import WIDTH, Stack
from tests.support.options import by_flag


def _plan(hardware: Hardware | str, **options: object) -> Plan:
    inputs = (torch.zeros(64, WIDTH),)
    return autopar.plan(Stack(), Mesh({"dp": 2}), inputs, hardware=hardware, **by_flag(**options))  # type: ignore[arg-type]


def test_its_parts_add_up_to_it() -> None:
    timeline = _plan("h100", strategy="zero3", recompute="full").timeline()
    assert sum(parts(timeline).values()) == pytest.approx(timeline.seconds)
    assert {"compute", "recomputation", "optimizer", "launches", "all_gather dp"} <= parts(timeline).keys()


def test_what_it_differs_in_adds_up_to_how_far_it_is_from_the_sum() -> None:
    plan = _plan("h100", strategy="zero3")
    apart = compared_with_the_sum(plan, plan.timeline())
    assert sum(apart.values()) == pytest.approx(plan.timeline().seconds - plan.seconds, rel=1e-3)
    assert [abs(seconds) for seconds in apart.values()] == sorted(map(abs, apart.values()), reverse=True)


def test_a_plan_that_was_loaded_has_none_before_it_has_its_model_again() -> None:
    plan = _plan("cpu", strategy="zero3")
    loaded = Plan.from_json(plan.to_json())
    with pytest.raises(PlanError, match=r"plan\.timeline needs the model.*plan\.attach"):
        loaded.timeline()
    assert loaded.attach(Stack(), (torch.zeros(64, WIDTH),), strategy="zero3").timeline() == plan.timeline()


def test_a_table_shows_both_figures_and_where_they_differ() -> None:
    overlapped = replace(load("cpu"), communication_share=0.0, dtensor_s=0.0, name="collectives beside computing")
    text = str(_plan(overlapped, strategy="zero3"))
    assert "step     " in text and "  timeline " in text and " of collectives hidden" in text
    assert "next to the sum" not in text, "costs of gathers and reductions are those of the simulated step"
    plan = _plan("cpu", strategy="zero3")
    assert "next to the sum: optimizer " in str(plan), "parameters are DTensors, which the timeline alone counts"
    assert "hidden" not in str(plan).split("memory")[0]
    assert "timeline" not in str(Plan.from_json(plan.to_json()))
