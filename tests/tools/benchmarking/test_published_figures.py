"""Errors, regret, contradicted runs and folds of published steps are right."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import pytest

from benchmarks.publications import report
from benchmarks.publications.accuracy import confusion, errors, pairs_in_order
from benchmarks.publications.choice import cells, share_within
from benchmarks.publications.contradicted import TIMES, contradicted, enough
from benchmarks.publications.folds import both, by_model, by_nodes, folds, of_cells, sampled
from benchmarks.publications.memory import (
    runs_out,
)
from benchmarks.publications.rows import Row
from tests.support.published_rows import LARGE, LLAMA, outcome, row


def test_errors_are_shares_of_what_was_measured() -> None:
    found = errors([1.0, 2.0, 6.0], [2.0, 2.0, 4.0])
    assert (found.count, found.median, found.median_absolute) == (3, 0.0, 0.5)
    assert found.mean == pytest.approx(1 / 3)
    assert found.spearman == pytest.approx(math.sqrt(3) / 2)


def test_out_of_memory_is_told_right_where_runs_fail_and_where_they_do_not() -> None:
    found = confusion([True, True, False, False], [True, False, False, False])
    assert (found.failing_told, found.failing, found.fitting_told, found.fitting) == (1, 2, 2, 2)
    assert found.share == 0.75


def test_pairs_in_order_leave_out_equal_ones() -> None:
    assert pairs_in_order([1.0, 3.0, 2.0], [1.0, 2.0, 3.0]) == (2, 3)
    assert pairs_in_order([1.0, 2.0], [5.0, 5.0]) == (0, 0)


def test_regret_is_of_the_run_that_is_predicted_fastest_and_fits() -> None:
    runs = [outcome(seconds, label=str(measured), seconds=measured) for seconds, measured in ((3, 1), (2, 2), (9, 3))]
    failed = outcome(1.0, 1e12, seconds=None, out_of_memory=True)  # fastest, and predicted to fail
    (cell,) = cells([*runs, failed], runs_out, least=3)
    assert (cell.chosen, cell.fastest, cell.runs) == ("2", "1", 3)
    assert cell.regret == 1.0 and cell.by_chance == pytest.approx(1.0)
    assert cells([*runs, failed], runs_out, least=4) == ()
    assert share_within((cell,), 0.15) == 0 and share_within((cell,), 1.0) == 1


def test_runs_of_other_numbers_of_heads_are_another_cell_of_blooms_tuning() -> None:
    shape = dataclasses.replace(LLAMA, heads=2 * LLAMA.heads)
    first, second = (outcome(seconds, label=str(seconds), seconds=seconds, source="bloom") for seconds in (1.0, 2.0))
    other = outcome(0.5, seconds=0.5, source="bloom", shape=shape)
    (cell,) = cells([first, second, other], lambda each: False, least=2)
    assert (cell.chosen, cell.regret, cell.runs) == ("1.0", 0.0, 2)


def test_choosing_a_run_that_fails_costs_all() -> None:
    runs = [outcome(seconds, label=str(seconds), seconds=1.0) for seconds in (2.0, 3.0)]
    failed = outcome(1.0, label="1.0", seconds=None, out_of_memory=True)
    (cell,) = cells([*runs, failed], runs_out, least=2)
    assert cell.regret == math.inf
    again = outcome(1.0, label="2.0", seconds=None, out_of_memory=True)  # the same configuration as a run that ended
    (cell,) = cells([*runs, again], runs_out, least=2)
    assert (cell.chosen, cell.regret) == ("2.0", 0.0)


# Runs that others contradict.

NETWORK = {"intra_all_reduce": 450e9, "all_gather": 1e9}
OTHER = {"tp": 2, "dp": 2, "micro_batch": 4, "accumulation": 2, "seconds": 1.0, "bandwidths": NETWORK}


def test_what_another_run_took_is_enough_for_its_slots_its_share_and_its_gradients() -> None:
    other = row(**OTHER, pp=2)  # three slots of the pipeline
    assert enough(row(**{**OTHER, "pp": 2, "dp": 1}), other) == 1.0
    assert enough(row(**{**OTHER, "pp": 2, "dp": 1, "accumulation": 4}), other) == pytest.approx(5 / 3)
    assert enough(row(**{**OTHER, "pp": 2, "dp": 1, "tp": 1}), other) == 2.0
    assert enough(row(**{**OTHER, "pp": 2, "dp": 1, "micro_batch": 1}), other) == 1.0, "as many launches"
    gradients = 8 * LLAMA.parameters / 4 / 1e9
    assert enough(row(**OTHER, pp=2), other) == pytest.approx(1.0 + gradients)


@pytest.mark.parametrize(
    "changes",
    [{"tp": 1, "dp": 4}, {"dp": 1}, {"bandwidths": {"intra_all_reduce": 4e11}}, {"pp": 2}, {"shape": LARGE}],
)
def test_only_runs_of_as_many_pieces_in_the_same_state_contradict(changes: dict[str, object]) -> None:
    slow = row(**{**OTHER, "seconds": 3.0})
    (found,) = contradicted([slow, row(**OTHER)])
    assert (found.row, found.by.seconds) == (slow, 1.0)
    assert contradicted([slow, row(**{**OTHER, **changes})]) == []


def test_a_run_that_takes_less_than_twice_what_is_enough_is_not_contradicted() -> None:
    assert contradicted([row(**{**OTHER, "seconds": 0.99 * TIMES}), row(**OTHER)]) == []


def test_figures_are_given_with_and_without_contradicted_runs() -> None:
    runs = [outcome(1.0, **{**OTHER, "seconds": seconds}) for seconds in (1.0, 1.1, 5.0)]
    contradictions = contradicted([each.row for each in runs])
    assert "nanotron pp = 1, not contradicted" in report.times(runs, contradictions)
    assert "not contradicted" not in report.times(runs)
    (whole,) = re.findall(r"^all rows +(\d+)", report.times([*runs, outcome(1.0, source="vtrain", seconds=1.0)]), re.M)
    assert whole == "4" and "all rows" not in report.times(runs)
    assert "5 " in report.contradicted_runs(contradictions) and report.contradicted_runs([]) == ""
    specified = report.choices(cells(runs, runs_out, least=3), cells(runs[:2], runs_out, least=2))
    assert "without contradicted runs regret of at most 5% in 100%" in specified


# Folds.


def many() -> list[Row]:
    return [
        row(shape=dataclasses.replace(LLAMA, layers=layers), dp=dp, accumulation=more)
        for layers in (2, 3, 4)
        for dp in (8, 16)
        for more in range(1, 1 + layers)
    ]


@pytest.mark.parametrize("group", [by_model, by_nodes])
def test_a_fold_never_fits_what_it_asks_about(group: Callable[[Row], str]) -> None:
    rows = many()
    made = folds(rows, group)
    for each in made:
        assert not {group(rows[n]) for n in each.fitted} & {group(rows[n]) for n in each.held_out}
        assert sorted((*each.fitted, *each.held_out)) == list(range(len(rows)))
    assert sorted(n for each in made for n in each.held_out) == list(range(len(rows)))


def test_folds_leave_out_models_and_nodes_and_one_group_has_none() -> None:
    assert [name for name, _ in both(many())] == ["models"] * 3 + ["nodes"] * 2
    assert folds([row(), row(accumulation=2)], by_model) == ()
    assert len(folds(many(), by_model, most=2)) == 2


def test_a_sample_is_the_same_whatever_the_order() -> None:
    rows = many()
    assert sampled(rows, 4) == [each for each in rows if each in sampled(rows[::-1], 4)]
    assert sampled(rows, None) == rows and len(sampled(rows, 4)) == 4


def test_whole_cells_with_enough_runs_are_chosen() -> None:
    rows = many()
    (chosen,) = {(each.model, each.devices) for each in of_cells(rows, 1, least=4)}
    assert chosen[0] == by_model(row(shape=dataclasses.replace(LLAMA, layers=4)))
    assert len(of_cells(rows, 1, least=4)) == 4 and of_cells(rows, 5, least=5) == []
