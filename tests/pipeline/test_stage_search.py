"""How much of the time a stage of a pipeline gets that is planned within a memory limit."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InfeasibleError
from autopar.pipeline import stage_search
from autopar.pipeline.planned_blocks import planned_blocks
from autopar.pipeline.schedules.schedule import Schedule
from autopar.pipeline.stage_search import ROUGHLY, TOLERANCE, StageSearch
from autopar.pipeline.stages.held import Room
from autopar.planning.settings import Settings
from autopar.solver.deadline import after
from tests.pipeline.test_planner import request


def test_what_is_planned_more_closely_gets_more_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request({"pp": 2}, Schedule("1f1b", 2, 4), num_layers=3)
    blocks = planned_blocks(asked, 2)
    nothing_known = (0.0,) * (len(blocks.blocks) + 1)
    search = StageSearch(blocks, after(1000.0), (Room(2**40, 2**40),) * 2, (2, 1), nothing_known)
    given: list[float] = []

    def solved(space: Any, pins: Any, settings: Settings, *more: Any) -> None:
        given.append(settings.time_limit)
        raise InfeasibleError("nothing is looked for")

    monkeypatch.setattr(stage_search, "solved", solved)
    search.ask(0, 2, 0, ROUGHLY)
    search.ask(0, 2, 0, TOLERANCE)
    roughly, closely = given
    assert 50 < roughly < 70
    assert closely == pytest.approx(200, rel=0.05)
