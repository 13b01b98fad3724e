"""Estimates of steps beside exact plans, and what mesh="auto" makes of them."""

from __future__ import annotations

import warnings

import pytest

from autopar.arranging.estimates import Estimates
from autopar.compiler.offline import subject_of
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.errors import AutoparError
from autopar.models.catalogue import built_in
from autopar.planning.meshes.search import Turn
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from tests.support.parity import SLOW_DEVICES

LAYERS, DEVICES = 9, 4
MEMORY = 60_000_000


def estimates_of(memory: int | None, pipeline: str | None = "pp", **asked: object) -> tuple[Estimates, object]:
    settings = Settings(memory=memory, time_limit=1000)
    request = PlanRequest(hardware=SLOW_DEVICES, settings=settings, pipeline=pipeline, **asked)  # type: ignore[arg-type]
    planner = OfflinePlanner(*built_in("tiny-llama", 16, 64, LAYERS), request, PlanCache())
    assert planner.is_estimated
    subject, exact = subject_of(planner, "auto", DEVICES, 2)
    return Estimates(subject, float("inf")), exact


@pytest.mark.parametrize("memory", [None, MEMORY], ids=["no limit", "limit"])
def test_estimates_are_near_exact_plans_with_and_without_a_pipeline(memory: int | None) -> None:
    estimates, exact = estimates_of(memory)
    estimates.search()
    found = {}
    for each in estimates.best():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[str(each.mesh)] = each.seconds / exact(each, Turn(100)).seconds  # type: ignore[operator]
            except AutoparError as error:
                found[str(each.mesh)] = str(error)
    print(found)
    assert {
        mesh: ratio for mesh, ratio in found.items() if not (isinstance(ratio, float) and 0.88 < ratio < 1.12)
    } == {}
