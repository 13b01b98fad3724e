"""Differences between plans, from the plans alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costs.hardware.load import load
from autopar.costs.plans.difference import MAX_LINES, Amount, Difference
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.ir.program.folding import folded
from autopar.planning.planner import make_plan
from autopar.views.inspection.compare import difference
from tests.support.families import FAMILIES
from tests.support.planned import SLOW_LINKS, X_BD, TwoLinears, space_of


@pytest.fixture(scope="module")
def space() -> Space:
    family = FAMILIES["llama"]
    return space_of(family.build(), family.inputs(0)[1], load("h100"), dp=2, tp=2)


@pytest.fixture(scope="module")
def plan(space: Space) -> Plan:
    return make_plan(space, {})[0]


@pytest.fixture(scope="module")
def other(plan: Plan) -> Plan:
    return plan.what_if("mlp.down_proj", tp="row")


@pytest.fixture(scope="module")
def found(plan: Plan, other: Plan) -> Difference:
    return plan.diff(other)


def test_equal_plans_differ_in_nothing(plan: Plan) -> None:
    found = plan.diff(Plan.from_json(plan.to_json()))
    assert found.is_empty
    assert str(found) == "the plans are equal: same choices, same predictions"


def test_totals_stand_side_by_side(plan: Plan, other: Plan, found: Difference) -> None:
    assert found.step == Amount(plan.seconds, other.seconds) and found.step.delta > 0
    assert found.memory == Amount(plan.peak_bytes, other.peak_bytes)
    for key in {*plan.traffic, *other.traffic}:
        assert found.traffic[key] == Amount(plan.traffic.get(key, 0), other.traffic.get(key, 0))


def test_the_difference_the_other_way_is_its_mirror_image(plan: Plan, other: Plan, found: Difference) -> None:
    back = other.diff(plan)
    assert back.step.delta == -found.step.delta and back.memory.delta == -found.memory.delta
    assert {key: -amount.delta for key, amount in back.traffic.items()} == {
        k: a.delta for k, a in found.traffic.items()
    }
    mirrored = {(c.module, c.operation, c.after, c.before, c.count, -c.seconds.delta) for c in back.changes}
    assert mirrored == {(c.module, c.operation, c.before, c.after, c.count, c.seconds.delta) for c in found.changes}


def test_equal_changes_of_numbered_modules_are_one(found: Difference) -> None:
    (change,) = [c for c in found.changes if c.operation == "linear" and c.module.endswith("down_proj")]
    assert (change.module, change.count) == ("model.layers.0-1.mlp.down_proj", 2)
    assert "tp=row" in change.after and "tp=row" not in change.before


def test_every_decision_that_differs_is_counted_once(plan: Plan, other: Plan, found: Difference) -> None:
    rows = {row.name: row for row in other.rows}
    differ = [
        row.name
        for row in plan.rows
        if row.kind not in ("shared_reshard", "parameter") and (row.roles, row.kind) != (rows[row.name].roles, row.kind)
    ]
    calls = [c for c in found.changes if not c.operation.startswith("(")]
    assert sum(c.count for c in calls) == len([name for name in differ if rows[name].kind == "call"]) > 0


def test_a_difference_is_read_as_a_table(found: Difference) -> None:
    text = str(found)
    for word in ("before", "difference", "step", "memory", "all_reduce tp", "model.layers.0-1.mlp.down_proj"):
        assert word in text


def test_loaded_plans_differ_as_those_they_were_saved_from(plan: Plan, other: Plan, found: Difference) -> None:
    again = difference(Plan.from_json(plan.to_json()), Plan.from_json(other.to_json()))
    assert again == found and str(again) == str(found)


def test_plans_for_other_meshes_are_compared_on_the_axes_they_share(plan: Plan) -> None:
    family = FAMILIES["llama"]
    wide = make_plan(space_of(family.build(), family.inputs(0)[1], SLOW_LINKS, tp=4), {})[0]
    found = plan.diff(wide)
    assert found.mismatches[0] == ("the mesh, dp=2 × tp=2 before and tp=4 after; choices are compared on tp alone")
    assert not any("dp=" in change.before + change.after for change in found.changes)
    assert str(found).startswith("not the same: the mesh, ")


def test_plans_without_a_common_axis_are_compared_in_their_totals() -> None:
    one, two = (make_plan(space_of(TwoLinears(), (X_BD,), SLOW_LINKS, **axes), {})[0] for axes in ({"a": 2}, {"b": 2}))
    found = one.diff(two)
    assert "choices are not compared" in found.mismatches[0] and not found.changes
    assert "no choice differs" not in str(found)


def test_plans_of_other_models_say_how_much_of_them_is_the_same() -> None:
    small, large = (make_plan(space_of(TwoLinears(bias=bias), (X_BD,), SLOW_LINKS), {})[0] for bias in (False, True))
    (text,) = small.diff(large).mismatches
    assert text.startswith("the model or its inputs: ") and "2 only in the plan after" in text


def test_limits_and_hardware_that_differ_are_stated(plan: Plan) -> None:
    other = replace(plan, memory_limit=8_000_000_000, mesh=replace(plan.mesh, hardware="a100"))
    assert plan.diff(other).mismatches == (
        "the hardware, cpu before and a100 after",
        "the memory limit, none before and 8.00 GB after",
    )


def test_an_imbalance_that_differs_is_stated(plan: Plan) -> None:
    (text,) = plan.diff(replace(plan, imbalance=1.5)).mismatches
    assert text == "the imbalance of rows of experts, 1 before and 1.5 after"


def test_layers_that_are_computed_again_are_a_change(plan: Plan) -> None:
    segments = ("model.layers.0", "model.layers.1")
    other = replace(plan, recompute=dict.fromkeys(segments, "full"))
    (change,) = plan.diff(other).changes
    assert (change.module, change.before, change.after, change.count) == ("model.layers.0-1", "none", "full", 2)
    assert not plan.diff(other).is_empty


def test_a_long_table_ends_with_how_much_is_left_out(found: Difference) -> None:
    change = found.changes[0]
    many = replace(found, changes=tuple(replace(change, module=f"m{i}") for i in range(MAX_LINES + 3)))
    assert "(3 more kinds)" in str(many)


@pytest.mark.parametrize(
    ("before", "after", "text"), [(1.0, 1.015, "+1.5%"), (1.0, 0.5, "-50.0%"), (1.0, 25.0, "25 times")]
)
def test_a_relative_difference_is_a_percentage_or_a_multiple(
    before: float, after: float, text: str, found: Difference
) -> None:
    assert text in str(replace(found, step=Amount(before, after)))


def test_only_one_number_is_folded_at_a_time() -> None:
    items = [(f"layers.{i}.experts.{j}", "same" if j < 2 else i, None) for i in range(2) for j in range(3)]
    paths = [(".".join(fold.path), len(fold.items)) for fold in folded(items)]
    assert paths == [("layers.0-1.experts.0-1", 4), ("layers.0.experts.2", 1), ("layers.1.experts.2", 1)]
