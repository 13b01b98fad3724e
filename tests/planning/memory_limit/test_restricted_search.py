"""The restricted master problem finds plans if elimination is expensive and nothing near the bound is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.capture.export import capture, skeleton
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning.memory_limit import memory_limit
from autopar.planning.memory_limit import restricted_search as restricted_search
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.memory_limit.restricted_search import RestrictedSearch
from autopar.planning.options.groups import Memory
from autopar.planning.planner import make_plan
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings

SHARE = 0.85  # of what the plan without a limit takes


def test_a_plan_is_made_of_pieces_that_fit_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built_in("tiny-llama", 8, 64)
    program = capture(skeleton(model), inputs, {}, training=True)
    space = PlanRequest().space(program, Mesh({"dp": 2}, hardware="cpu"))
    limit = int(SHARE * make_plan(space, {})[0].peak_bytes)
    best = make_plan(space, {}, Settings(Memory(limit)))[0]
    made: list[Answer] = []
    by_restricted_master = RestrictedSearch.by_restricted_master

    def noted(search: Any, found: Any, *args: Any) -> list[Answer]:
        assert found.fitting == search.aside, "nothing was found but what fitted at first"
        found.fitting.clear()  # what fits is found here, of pieces alone
        found.moments.clear()
        made.extend(by_restricted_master(search, found, *args))
        return made

    requested: list[int] = []
    full = restricted_search._full

    def later(taken: np.ndarray, limit: int) -> set[int]:
        """At first one moment alone, at which little is held: the others turn out to need a row."""
        requested.append(int(taken.max()))
        return full(taken, limit) if len(requested) > 1 else {0}

    monkeypatch.setattr(memory_limit, "CHEAP_WORK", 0)
    monkeypatch.setattr(memory_limit._Search, "by_all_rows", lambda *_: False)
    monkeypatch.setattr(RestrictedSearch, "by_restricted_master", noted)
    monkeypatch.setattr(restricted_search, "_full", later)
    found = make_plan(space, {}, Settings(Memory(limit)))[0]
    assert len(requested) > 1, "no moment was missing: the test says nothing"
    assert len(made) == 1 and made[0].peak_bytes <= limit
    assert found.seconds == made[0].seconds and found.peak_bytes <= limit and found.verify().ok
    assert found.bound <= best.seconds * (1 + 1e-9) and best.bound <= found.seconds * (1 + 1e-9)
