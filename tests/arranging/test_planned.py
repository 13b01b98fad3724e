"""Candidates that are planned exactly: in which order, until when, and what the note says."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from autopar.arranging.estimates import Estimate
from autopar.arranging.planned import Planned, described
from autopar.errors import InfeasibleError
from autopar.pipeline.schedules.schedule import Schedule
from autopar.planning.meshes.search import Candidate, Turn
from autopar.sharding.mesh import Mesh
from tests.support.meshes import candidate, plans_of


def search(*pairs: tuple[float, float | None], num_bytes: int = 100) -> tuple[Planned, list[str]]:
    """Estimates and exact seconds of some meshes, None for one that does not fit; and the meshes that were planned."""
    plans = plans_of(*((exact or estimate, num_bytes) for estimate, exact in pairs))
    meshes, made = list(plans), []
    exact = dict(zip(meshes, (seconds for _, seconds in pairs), strict=True))
    every = [
        Estimate(mesh, 1, estimate, 50.0 * number, None)
        for number, (mesh, (estimate, _)) in enumerate(zip(meshes, pairs, strict=True))
    ]

    def make(estimate: Estimate, turn: Turn) -> Candidate[Any]:
        made.append(str(estimate.mesh))
        if exact[estimate.mesh] is None:
            raise InfeasibleError("no room")
        return candidate(plans[estimate.mesh], exact[estimate.mesh])

    estimates: Any = SimpleNamespace(
        best=lambda: sorted(every, key=lambda each: each.seconds),
        of=lambda mesh: [each for each in every if each.mesh == mesh],
        subject=SimpleNamespace(axis="pp", meshes=meshes),
        found=dict(enumerate(every)),
        num_bounded=0,
    )
    return Planned(estimates, make, math.inf), made


def test_nothing_is_planned_that_is_worse_by_its_estimate_less_the_error_so_far() -> None:
    planned, made = search((1.0, 1.0), (1.005, 1.2), (1.3, 1.3), (2.0, 0.1))
    found = planned.best()
    assert found is not None and found.lines[0][0].found.seconds == 1.0  # type: ignore[union-attr]
    # The second was 19% off, so that the third may be better than it looks.
    assert len(made) == 2
    assert round(planned.error, 2) == 0.19


def test_what_is_further_from_its_estimate_is_followed_by_more() -> None:
    planned, made = search((1.0, 1.4), (1.3, 1.2), (1.5, 1.5), (9.0, 9.0))
    planned.best()
    assert len(made) == 3


def test_the_next_candidate_follows_one_without_room() -> None:
    planned, made = search((1.0, None), (1.5, 1.5), (1.6, 1.6))
    found = planned.best()
    assert found is not None and len(made) == 2
    assert "no room" in planned.note(found) and "estimated: 1.60 s" in planned.note(found)
    assert "3 were estimated and 2 planned exactly" in planned.note(found)


def test_where_nothing_has_room_there_is_no_answer() -> None:
    assert search((1.0, None), (1.5, None))[0].best() is None


def test_an_estimate_says_that_it_is_one_and_how_its_schedule_runs() -> None:
    schedule = Schedule("interleaved_1f1b", 2, 4, 3)
    found = described(Estimate(Mesh({"pp": 2}), 4, 6.9, 7e10, schedule))
    assert found == "estimated: 6.90 s, 70.00 GB, interleaved_1f1b, 3 stages a rank, 4 micro-batches"
