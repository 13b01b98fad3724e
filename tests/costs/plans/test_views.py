"""The seam between plans and what shows them: every row is a method, and resolves to a function that takes a plan."""

from __future__ import annotations

import inspect

import pytest

from autopar.costs.plans.answers import ParallelizePlan
from autopar.costs.plans.plan import Plan
from autopar.costs.plans.views import VIEWS, view
from autopar.planning.pipeline.plan import PipelinePlan

CLASSES = {"Plan": Plan, "PipelinePlan": PipelinePlan, "ParallelizePlan": ParallelizePlan}


@pytest.mark.parametrize("row", VIEWS)
def test_a_row_is_a_method_and_resolves_to_a_function_that_takes_a_plan_first(row: str) -> None:
    owner, _, method = row.partition(".")
    assert inspect.isfunction(getattr(CLASSES[owner], method))
    function = view(row)
    assert inspect.isfunction(function)
    first = next(iter(inspect.signature(function).parameters.values()))
    assert first.name in ("plan", "before") and first.default is first.empty


@pytest.mark.parametrize("owner", CLASSES)
def test_a_class_asks_the_seam_for_its_own_rows_only(owner: str) -> None:
    source = inspect.getsource(CLASSES[owner])
    requested = {row for row in VIEWS if f'view("{row}")' in source}
    assert requested == {row for row in VIEWS if row.startswith(f"{owner}.")}
    assert source.count("view(") == len(requested)


def test_a_method_that_is_not_in_the_table_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        view("Plan.fly")
