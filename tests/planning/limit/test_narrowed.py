"""Where elimination is dear, answers with many rows are looked for in what one row leaves; they are the same."""

from __future__ import annotations

import pytest

from autopar.capture.export import capture, skeleton
from autopar.models.catalogue import built_in
from autopar.planning.limit import memory_limit, narrowed
from autopar.planning.planner import make_plan
from autopar.planning.request import PlanRequest
from autopar.sharding.mesh import Mesh
from autopar.solver.reductions.cuts import Cuts
from autopar.space.space import Space


@pytest.fixture(scope="module")
def space() -> Space:
    model, inputs = built_in("tiny-gpt2", 8, 32)
    program = capture(skeleton(model), inputs, {}, training=True)
    return PlanRequest().space(program, Mesh({"dp": 2}, hardware="h100"))


@pytest.mark.parametrize("shares", [(1e-3, 4e-3), (0.2, 0.5)], ids=["near", "wide"])
def test_what_is_left_of_one_row_has_the_best_plan(
    space: Space, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = make_plan(space, {})[0].peak_bytes
    limits = [int(share * free) for share in (0.8,)]
    plain = [make_plan(space, {}, limit)[0] for limit in limits]
    tried: list[float] = []
    within = Cuts.within
    monkeypatch.setattr(memory_limit, "CHEAP_WORK", 0)
    monkeypatch.setattr(narrowed, "SHARES", shares)
    monkeypatch.setattr(Cuts, "within", lambda cuts, share: tried.append(share) or within(cuts, share))
    for limit, best in zip(limits, plain, strict=True):
        found = make_plan(space, {}, limit)[0]
        assert found.peak_bytes <= limit and found.bound <= best.seconds * (1 + 1e-9)
        assert best.bound <= found.seconds * (1 + 1e-9) and found.verify().ok
        assert found.seconds <= best.seconds * (1 + 1e-3)
    assert tried, "no limit was met at several moments: the test says nothing"
