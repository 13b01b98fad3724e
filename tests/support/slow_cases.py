"""Cases of a test of which some are left to `make slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_where(cases: Iterable[Any], *names: str) -> list[Any]:
    """The cases, by their names; those that are named are slow. Every name must be that of a case."""
    by_name = {str(each): each for each in cases}
    assert by_name.keys() >= set(names), f"no case is called {sorted(set(names) - by_name.keys())}"
    slow = pytest.mark.slow
    return [pytest.param(each, id=name, marks=slow if name in names else ()) for name, each in by_name.items()]
