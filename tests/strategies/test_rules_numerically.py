"""Every rule of the tables against ground truth: no choice is wrong, and none that would be right is missing.

A new row of a table needs sample calls (`tests/support/simulation/samples`); what a rule lacks on purpose is there.
"""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import RuleError
from autopar.ir.sharding.rule import PASS_REPLICATED
from autopar.strategies import RULES, rule_of
from autopar.strategies.rules import expert_rules, kernels
from autopar.tools.validation.whole_call import Whole, fault_of
from tests.support.simulation.samples import SAMPLES
from tests.support.simulation.samples.allowed import ALLOWED, NOT_COMPARED
from tests.support.simulation.samples.draw import Draw
from tests.support.simulation.validate import Report, check, only_implementation
from tests.support.slow_cases import slow_where

SEED = 0
TARGETS = sorted((target for target in RULES if target in SAMPLES and target not in NOT_COMPARED), key=str)


def reports(target: Any) -> list[Report]:
    """One report for each sample call that has a rule."""
    found = []
    for each in SAMPLES[target](Draw(SEED)):
        whole = Whole.of(target, each.args, each.kwargs)
        op = rule_of(whole.call)
        if op is None:
            continue
        try:
            found.append(check(target, each.args, each.kwargs, op, allowed=ALLOWED.get(target, {})))
        except RuleError as error:
            found.append(Report(wrong=[f"{whole}: {error}"]))
    return found


@pytest.mark.parametrize(
    "target",
    slow_where(
        TARGETS,
        "aten.conv1d.default",
        "aten.conv3d.default",
        "aten.conv_transpose3d.input",
        "aten.lstm_cell.default",
        "aten.scaled_dot_product_attention.default",
        "autopar.mlp_in_tiles.default",
    ),
)
def test_no_choice_is_wrong_and_none_is_missing(target: Any) -> None:
    found = reports(target)
    assert found, f"no sample of {target} has a rule"
    lines = [str(report) for report in found if str(report)]
    assert not lines, "\n" + "\n".join(lines)


@pytest.mark.sample(60)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_replicated_values_are_passed_by_any_operation(target: Any) -> None:
    for each in SAMPLES[target](Draw(SEED)):
        whole = Whole.of(target, each.args, each.kwargs)
        op = rule_of(whole.call)
        if op is None or ((one := only_implementation(op)) is not None and one.random):
            continue  # what draws numbers is held to this in tests/strategies/test_implementations.py
        passing = next(choice for choice in whole.bind(op).choices(weight_only=True) if choice.name == PASS_REPLICATED)
        assert not fault_of(whole, passing.inputs, passing.outputs, 2, op.shape_argument), f"{whole}"


def test_every_operation_of_the_tables_has_samples() -> None:
    # The rows that an operator of experts takes and gives mean something between both ends alone (test_experts.py), and
    # most kernels called by name run on a GPU alone (test_kernels.py).
    elsewhere = {*expert_rules.RULES, *kernels.RULES}
    without = sorted(str(target) for target in RULES if target not in SAMPLES and target not in elsewhere)
    assert not without, f"no samples in tests/support/simulation/samples for {', '.join(without)}"


def test_what_rules_lack_on_purpose_concerns_operations_that_have_samples() -> None:
    assert set(ALLOWED) | set(NOT_COMPARED) <= set(SAMPLES)
