"""Models of few calls are planned to the end within a limit, also where elimination takes seconds."""

from __future__ import annotations

import pytest

from autopar.capture.export import capture, skeleton
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning.options.groups import Memory
from autopar.planning.planner import make_plan
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings


@pytest.mark.slow
def test_what_is_better_than_what_the_first_cut_has_is_found_in_a_wider_one() -> None:
    model, inputs = built_in("tiny-moe", 8, 64)
    program = capture(skeleton(model), inputs, {}, training=True)
    space = PlanRequest().space(program, Mesh({"dp": 2, "tp": 2}, hardware="cpu"))
    limit = int(0.95 * make_plan(space, {})[0].peak_bytes)
    found = make_plan(space, {}, Settings(Memory(limit, prefetch=0)))[0]
    assert found.gap == 0 and found.peak_bytes <= limit and found.verify().ok
