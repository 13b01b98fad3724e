"""Candidates of a search as values: their order, their front, and their JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.costs.plans.comparison import Comparison, Contender
from autopar.costs.plans.plan import Plan
from autopar.errors import PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.views.report.comparison_table import comparison_text
from tests.planning.pipeline.test_plan import pipeline
from tests.support.meshes import any_plan

ONE, TWO, THREE = (Mesh({"dp": size}, "slow") for size in (8, 4, 2))
PLANNED = Contender(ONE, 1, "", 1, 2.0, 300, is_planned=True, estimate=1.9, splits="dp: data", same_on=(TWO,))
ESTIMATED = Contender(TWO, 4, "1f1b", 2, 1.5, 400, estimate=1.5)
SMALL = Contender(THREE, 2, "", 1, 2.5, 100, estimate=2.5)
DOMINATED = Contender(THREE, 1, "", 1, 2.5, 350, estimate=2.5)
EXCLUDED = Contender(THREE, 8, excluded="memory", reason="needs more\nthan there is")
ALL = Comparison((PLANNED, ESTIMATED, SMALL, DOMINATED, EXCLUDED), 3)


def test_the_front_has_what_no_other_beats_in_both_step_and_memory() -> None:
    assert ALL.front == (ESTIMATED, PLANNED, SMALL)


def test_contenders_stand_with_plans_first_each_kind_by_its_step() -> None:
    faster = replace(PLANNED, seconds=1.0)
    found = Comparison((PLANNED, SMALL, EXCLUDED)).with_contenders(ESTIMATED, faster)
    assert found.contenders == (faster, PLANNED, ESTIMATED, SMALL, EXCLUDED)
    assert (found.planned, found.estimated, found.excluded) == ((faster, PLANNED), (ESTIMATED, SMALL), (EXCLUDED,))


def test_a_plan_keeps_its_candidates_in_json() -> None:
    plan = any_plan(Mesh({"dp": 8}, "slow"))
    again = Plan.from_json(replace(plan, comparison=ALL).to_json())
    assert again.comparison == ALL and again == plan
    assert Plan.from_json(plan.to_json()).comparison is None


def test_the_json_of_candidates_is_checked() -> None:
    values = json.loads(replace(any_plan(Mesh({"dp": 8}, "slow")), comparison=ALL).to_json())
    values["comparison"]["contenders"][0]["seconds"] = -1
    with pytest.raises(PlanError, match=r"comparison.contenders\[0\].seconds is -1"):
        Plan.from_json(json.dumps(values))


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_has_a_line_for_each_answer_and_fits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long = replace(ESTIMATED, mesh=Mesh({"pp": 16, "dp": 16, "tp": 8, "sp": 4}, "slow"), schedule="interleaved_1f1b")
    text = "\n\n".join(comparison_text(Comparison((*ALL.contenders, long), 3)))
    assert max(map(len, text.splitlines())) <= columns
    assert "→  dp=8" in text and "+5.3%" in text and "≈ 1.50 s" in text
    assert text.count("dp=2") == 2, "one line for the best estimate of a mesh, and one with a reason"
    assert "7 candidates" in text, "with the one that is the same"
    flat = " ".join(text.split())
    assert "1 planned, 4 estimated, 1 no plan within the memory limit, 1 the same with axes joined" in flat
    assert "the time ended before 3 more" in flat and "dp=2: needs more" in flat


def test_a_plan_of_the_user_stands_next_to_the_candidates() -> None:
    plan, mesh = any_plan(Mesh({"dp": 8})), Mesh({"dp": 2, "tp": 4})
    other = replace(any_plan(mesh), seconds=9.0, simulated=0.0, workload=None, context=None)
    found = replace(plan, comparison=ALL).compared_with(other)
    assert found.comparison is not None and found.comparison.planned[1].is_compared
    assert found.compared_with(other).comparison == found.comparison, "once"
    alone = plan.compared_with(other).comparison
    assert alone is not None and [each.is_compared for each in alone.planned] == [False, True]
    assert "+  dp=2 × tp=4" in "\n".join(comparison_text(alone))


def test_a_recipe_is_what_next_to_takes() -> None:
    assert ESTIMATED.recipe == "dp=4 --microbatches 4 --schedule 1f1b --stages-per-rank 2"
    assert replace(ESTIMATED, requested="dp=4 --strategy zero3").recipe == "dp=4 --strategy zero3"


def test_a_pipeline_keeps_its_candidates_in_json() -> None:
    plan = pipeline(Schedule("1f1b", 2, 4))
    again = PipelinePlan.from_json(replace(plan, comparison=ALL).to_json()).comparison
    assert again is not None and [each.recipe for each in again.contenders] == [each.recipe for each in ALL.contenders]
    assert again.contenders[0].mesh.hardware == plan.mesh.hardware
