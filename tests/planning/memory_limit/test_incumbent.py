"""A search within a limit begins at the plan of a search under other costs."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.costs.space.space import Space
from autopar.planning.memory_limit import memory_limit
from autopar.planning.options.groups import Memory
from autopar.planning.planner import Statements, make_plan
from autopar.planning.settings import Settings
from tests.planning.memory_limit.test_cutoff import space as equal_layers

__all__ = ["equal_layers"]
SHARE = 0.7  # of the memory of the fastest plan


@pytest.fixture
def begun_at(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[float, ...], tuple[int, ...] | None]]:
    """Prices and choices that searches begin at."""
    found, search = [], memory_limit.search

    def noted(source: Any, deadline: float, tolerances: Any, prices: Any, gives_up: float, known: Any, at: Any) -> Any:
        found.append((prices, known))
        return search(source, deadline, tolerances, prices, gives_up, known, at)

    monkeypatch.setattr(memory_limit, "search", noted)
    return found


def test_it_begins_at_the_choices_and_the_prices_of_a_plan_under_other_costs(
    equal_layers: Space, begun_at: list[tuple[tuple[float, ...], tuple[int, ...] | None]]
) -> None:
    settings = Settings(Memory(int(SHARE * make_plan(equal_layers, {})[0].peak_bytes)))
    first, choices = make_plan(equal_layers, {}, settings)
    again, same = make_plan(equal_layers, {}, settings, stated=Statements(equal_layers.waiting_for({}), first))
    assert (again.seconds, again.bound, same) == (first.seconds, first.bound, choices)
    (before, nothing), (prices, known) = begun_at
    assert nothing is None and not any(before)
    assert (
        known is not None
        and known[: len(choices)] == choices
        and sum(prices) == pytest.approx(first.multiplier * _total(first))
    )


def test_it_does_not_begin_at_choices_beyond_the_limit(
    equal_layers: Space, begun_at: list[tuple[tuple[float, ...], tuple[int, ...] | None]]
) -> None:
    free = make_plan(equal_layers, {})[0]
    settings = Settings(Memory(int(SHARE * free.peak_bytes)))
    expected, _ = make_plan(equal_layers, {}, settings)
    found, _ = make_plan(equal_layers, {}, settings, stated=Statements(equal_layers, free))
    assert begun_at[-1][1] is None and found.seconds == expected.seconds


def _total(plan: Any) -> int:
    return plan.context.row.total
