"""Ctrl-C in a search of meshes: the best plan so far, or a KeyboardInterrupt where there is none."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

import autopar
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.models.catalogue import built_in
from autopar.planning.formulation import Formulation
from autopar.planning.mesh_estimates.estimates import Estimates
from autopar.solver.deadline import NEVER, is_over
from tests.support.parity import SLOW_DEVICES

Calls = list[str]


@pytest.fixture(autouse=True)
def _python_hears_of_it() -> Iterator[None]:
    """Install Python's handler of Ctrl-C, because a shell's background processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pressing(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int, *, before: bool) -> Calls:
    """Press Ctrl-C at a call of a method, before its work or behind it; return the calls."""
    calls, work = Calls(), getattr(owner, name)

    def pressed(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if before and len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        found = work(*args, **kwargs)
        if not before and len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(owner, name, pressed)
    return calls


def planned() -> Any:
    model, inputs = built_in("tiny-llama", 16, 64, 9)
    return autopar.plan(model, "auto", inputs, devices=4, hardware=SLOW_DEVICES)


@pytest.mark.parametrize(
    ("name", "at", "before"),
    [("estimate", 2, False), ("estimate", 1, True)],
    ids=["with an estimate", "without"],
)
def test_before_there_is_a_plan_it_is_an_interrupt(
    name: str, at: int, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated = pressing(monkeypatch, Estimates, name, at, before=before)
    exact = pressing(monkeypatch, OfflinePlanner, "exact", 0, before=True)
    alone = pressing(monkeypatch, OfflinePlanner, "candidate", 0, before=True)
    with pytest.raises(KeyboardInterrupt):
        planned()
    assert (len(estimated), exact, alone) == (at, [], [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not is_over(NEVER)


@pytest.fixture
def _several_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the search plan several candidates exactly, where one plan may be enough."""
    monkeypatch.setattr("autopar.planning.mesh_estimates.planned.LEAST_ERROR", 0.9)
    monkeypatch.setattr("autopar.planning.mesh_estimates.planned.are_same", lambda *_: False)


def in_the_middle(monkeypatch: pytest.MonkeyPatch, at: int) -> Calls:
    """Press Ctrl-C when an exact plan states its problem; return the calls of `exact`."""
    calls, stated, state = pressing(monkeypatch, OfflinePlanner, "exact", 0, before=True), [], Formulation.problems

    def pressed(*args: Any, **kwargs: Any) -> Any:
        if len(calls) == at and not stated:
            stated.append(at)
            signal.raise_signal(signal.SIGINT)
        return state(*args, **kwargs)

    monkeypatch.setattr(Formulation, "problems", pressed)
    return calls


@pytest.mark.usefixtures("_several_plans")
@pytest.mark.parametrize("at", [1, 2])
def test_in_the_middle_of_an_exact_plan_it_is_the_best_plan_so_far(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = in_the_middle(monkeypatch, at)
    found = planned()
    assert len(exact) == at and found.verify().ok
    assert len(found.comparison.planned) == 1 and not is_over(NEVER)


@pytest.mark.usefixtures("_several_plans")
def test_after_an_exact_plan_it_is_that_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = pressing(monkeypatch, OfflinePlanner, "exact", 1, before=False)
    found = planned()
    assert len(exact) == 1 and found.mesh.num_devices == 4
    assert [each.mesh for each in found.comparison.planned] == [found.mesh]
    assert not is_over(NEVER)
