"""While a model is planned the cyclic collector stands still, and afterwards it is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler.garbage_collection import uncollected
from autopar.errors import InfeasibleError
from autopar.planning import planner, request


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_stands_still_inside_and_goes_on_behind() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_nothing_is_collected_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    was_on: dict[str, bool] = {}
    for module, name in ((request, "trace"), (request, "build_space"), (planner, "solved_by")):
        stage = getattr(module, name)

        def noted(*args: object, stage=stage, name: str = name, **kwargs: object) -> object:
            was_on[name] = gc.isenabled()
            return stage(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)
    with pytest.raises(InfeasibleError):
        autopar.plan(nn.Linear(4, 4), autopar.Mesh({"dp": 2}), (torch.ones(2, 4),), memory=1)
    assert was_on == {"trace": False, "build_space": False, "solved_by": False}
    assert gc.isenabled()
