"""Candidates that are planned exactly: in which order, until when, and what the note says."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import InfeasibleError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_estimates.estimates import Estimate
from autopar.planning.mesh_estimates.planned import Planned
from autopar.planning.mesh_search.search import Candidate, Turn
from autopar.solver.deadline import after
from tests.support.meshes import candidate, plans_of

BOUNDED, LARGE = Mesh({"dp": 64}), Mesh({"dp": 128})


def search(*pairs: tuple[float, float | None], num_bytes: int = 100, apart: float = 50.0) -> tuple[Planned, list[str]]:
    """Estimates and exact seconds of some meshes, None for one that does not fit; and the meshes that were planned."""
    plans = plans_of(*((exact or estimate, num_bytes) for estimate, exact in pairs))
    meshes, made = list(plans), []
    exact = dict(zip(meshes, (seconds for _, seconds in pairs), strict=True))
    every = [
        Estimate(mesh, 1, estimate, 100 + apart * number, None)
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
        subject=SimpleNamespace(
            axis="pp",
            meshes=meshes,
            at_least=lambda mesh, microbatches: 9.0 if mesh == BOUNDED else 0.0,
            limit=lambda mesh: 1e9,
        ),
        slower_at=lambda mesh, count: None,
        found={(each.mesh, 1): each for each in every} | {(BOUNDED, 1): None, (LARGE, 2): None},
    )
    return Planned(estimates, make, math.inf), made


def test_nothing_is_planned_that_is_worse_by_its_estimate_less_the_error_so_far() -> None:
    planned, made = search((1.0, 1.0), (1.005, 1.2), (1.3, 1.3), (2.0, 0.1))
    found = planned.best()
    assert found is not None and found.lines[0][0].found.seconds == 1.0  # type: ignore[union-attr]
    # The second was 19% off, so that the third may be better than it looks.
    assert len(made) == 2
    assert round(planned.error, 2) == 0.19


@pytest.mark.parametrize(
    ("axis", "estimates", "shares"),
    [
        (None, (1.0, 1.005, 1.3), [500.0, 1000.0]),  # the third is too slow by its estimate
        (None, (1.0, 1.001, 1.005), [500.0, 500.0, 1000.0]),
        ("dp", (1.0, 1.001, 1.005), [500.0, 1000.0, 1000.0]),  # all are pipelines, the first without an answer
    ],
)
def test_the_last_candidate_and_pipelines_behind_an_answer_have_all_that_is_left_of_the_time(
    axis: str | None, estimates: tuple[float, ...], shares: list[float]
) -> None:
    planned, _ = search(*((each, each) for each in estimates))
    subject: Any = planned.estimates.subject
    subject.axis = axis
    planned.deadline, given, exact = after(1000.0), list[float](), planned.exact

    def make(estimate: Estimate, turn: Turn) -> Candidate[Any]:
        given.append(turn.time_limit)
        return exact(estimate, turn)

    planned.exact = make
    planned.best()
    assert given == pytest.approx(shares, rel=0.01)


@pytest.mark.parametrize(("axis", "num_planned"), [("dp", 2), (None, 3)])
def test_no_pipeline_is_planned_in_less_time_than_any_took(
    axis: str | None, num_planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, made = search((1.0, 1.0), (1.001, 1.001), (1.002, 1.002))
    subject: Any = planned.estimates.subject
    subject.axis = axis
    seconds, exact = [0.0], planned.exact
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    planned.deadline = 10.0

    def make(estimate: Estimate, turn: Turn) -> Candidate[Any]:
        seconds[0] += 4.0
        return exact(estimate, turn)

    planned.exact = make
    assert planned.best() is not None
    assert len(made) == num_planned and planned.num_left == 3 - num_planned, "2 s are left for the third"


def test_what_is_further_from_its_estimate_is_followed_by_more() -> None:
    planned, made = search((1.0, 1.4), (1.3, 1.2), (1.5, 1.5), (9.0, 9.0))
    planned.best()
    assert len(made) == 3


def test_the_next_candidate_follows_one_without_room() -> None:
    planned, made = search((1.0, None), (1.5, 1.5), (1.6, 1.6))
    found = planned.best()
    assert found is not None and len(made) == 2
    compared = planned.comparison(found)
    assert [(each.seconds, each.estimate, each.is_planned) for each in compared.contenders[:2]] == [
        (1.5, 1.5, True),
        (1.6, 1.6, False),
    ]
    assert [(each.excluded, each.estimate) for each in compared.excluded] == [
        ("memory", 1.0),
        ("bound", None),
        ("memory", None),
    ]
    assert compared.excluded[0].reason == "no room" and compared.excluded[2].microbatches == 2


def test_a_candidate_that_is_slower_by_an_estimate_is_listed_as_slower() -> None:
    planned, _ = search((1.0, 1.0))
    estimates: Any = planned.estimates
    estimates.slower_at = lambda mesh, count: 3.0 if mesh == LARGE else None
    found = planned.best()
    assert found is not None
    (excluded,) = (each for each in planned.comparison(found).excluded if each.mesh == LARGE)
    assert excluded.excluded == "estimate"
    assert excluded.reason == "clearly slower by an estimate: a step takes about 3.00 s"


def test_estimates_of_the_same_plan_are_one_candidate() -> None:
    planned, _ = search((1.0, 1.0), (2.0, 2.0), (2.001, 2.0), apart=0.0)
    found = planned.best()
    assert found is not None
    compared = planned.comparison(found)
    assert [(each.seconds, len(each.same_on)) for each in compared.contenders[:2]] == [(1.0, 0), (2.0, 1)]


def test_where_nothing_has_room_there_is_no_answer() -> None:
    assert search((1.0, None), (1.5, None))[0].best() is None
