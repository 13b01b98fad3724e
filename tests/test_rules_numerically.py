"""Every rule of the tables against ground truth: no choice is wrong, and none that would be right is missing.

A new row of a table needs sample calls in `tests/samples`.
"""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import RuleError
from autopar.rule import NONE
from autopar.strategies import RULES, rule_of
from tests.samples import SAMPLES
from tests.samples.draw import Draw
from tests.validate import Report, Whole, check

SEEDS = (0,)
TARGETS = sorted((target for target in RULES if target in SAMPLES), key=str)


def reports(target: Any) -> list[Report]:
    found = []
    for seed in SEEDS:
        for each in SAMPLES[target](Draw(seed)):
            whole = Whole.of(target, each.args, each.kwargs)
            op = rule_of(whole.call)
            if op is None:
                continue
            try:
                found.append(check(target, each.args, each.kwargs, op))
            except RuleError as error:
                found.append(Report(wrong=[f"{whole}: {error}"]))
    return found


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_no_choice_is_wrong_and_none_is_missing(target: Any) -> None:
    lines = [str(report) for report in reports(target) if str(report)]
    assert not lines, "\n" + "\n".join(lines)


def test_every_operation_of_the_tables_has_samples() -> None:
    without = sorted(str(target) for target in RULES if target not in SAMPLES)
    assert not without, f"no samples in tests/samples for {', '.join(without)}"
