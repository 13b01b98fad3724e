"""At high treewidth the optimum given fixed nodes comes first, with its prices: mostly it is near enough."""

from __future__ import annotations

import itertools
import math
from typing import Any, NoReturn

import numpy as np
import pytest

from autopar.solver.bounds.prices import Mixture
from autopar.solver.low_treewidth import EXACT, Tolerances
from autopar.solver.memory_rows import several_rows
from autopar.solver.memory_rows.several_rows import Best, solve_rows
from autopar.solver.problem import Edge, Node, Problem

FASTEST = (0,) * 6


def _crowd() -> list[Problem]:
    """Return six connected nodes; one strategy is the fastest of all of them, and with two rows it takes too much."""
    rng = np.random.default_rng(1)
    pairs = list(itertools.combinations(range(6), 2))
    edges = tuple(Edge(ends, np.where(np.eye(3, dtype=bool), 0.0, 0.1 + 0.01 * rng.random((3, 3)))) for ends in pairs)
    seconds, rows = np.array([1.0, 1.1, 1.2]), (np.array([9, 5, 0]), np.array([8, 0, 4]))
    return [
        Problem(tuple([Node(f"n{i}", seconds, row_bytes) for i in range(6)]), edges, 6 * int(row_bytes[0]) - 3)
        for row_bytes in rows
    ]


def _found(tolerances: Tolerances = EXACT, **more: object) -> Best:
    given: dict[str, Any] = {"tolerances": tolerances, "visited": [FASTEST], "is_wide": True, **more}
    return solve_rows(_crowd(), [0.0, 0.0], math.inf, 60.0, **given)


def _unexpected(*_: object, **__: object) -> NoReturn:
    raise AssertionError("not asked for")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit bags to two nodes, given fixed ones."""
    monkeypatch.setattr(several_rows, "FIXED_BAG", 9)
    monkeypatch.setattr(several_rows, "FIXED_ENTRIES", 0)


def test_what_is_next_to_held_nodes_is_found_with_its_prices_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problems, started, best_prices = _crowd(), [], several_rows.best_prices

    def noted(rows: object, start: tuple[float, ...], *more: object, **options: object) -> object:
        started.append((type(rows).__name__, start))
        return best_prices(rows, start, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(several_rows, "best_prices", noted)
    found = _found(Tolerances(wide_gap=1.0))
    assert [name for name, _ in started] == ["Rows", "WideRows"]
    assert sum(started[1][1]) > 0, "those of the choices beside held nodes"
    assert found.choices is not None and all(each.fits(each.bytes_of(found.choices)) for each in problems)


def test_what_is_within_a_wider_gap_is_enough_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = _found()
    monkeypatch.setattr(several_rows, "best_below", _unexpected)
    monkeypatch.setattr(several_rows, "_best_nearby", lambda *_: Best(exact.choices, 0.0, exact.prices))
    monkeypatch.setattr(several_rows.WideRows, "finely", _unexpected)
    found = _found(Tolerances(wide_gap=1.0))
    assert found.choices == exact.choices and found.bound < exact.bound


def test_it_is_requested_whether_that_is_over_a_budget_elsewhere_before_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_rows.WideRows, "at", _unexpected)
    requested: list[Mixture] = []

    def is_over(mixture: Mixture) -> bool:
        requested.append(mixture)
        return True

    found = _found(is_over_elsewhere=is_over)
    assert found.is_over_elsewhere and found.bound == -math.inf
    assert [choices for choices, _ in requested[-1]] == [found.choices]


def test_next_to_a_cutoff_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_rows, "_best_nearby", _unexpected)
    assert _found(Tolerances(cutoff=0.5)).bound >= 0.5
