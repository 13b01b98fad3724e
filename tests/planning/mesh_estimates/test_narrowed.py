"""Spaces narrowed to the choices of plans, compared with those that have all of them."""

from __future__ import annotations

import numpy as np

from autopar.capture.export import capture, skeleton
from autopar.costs.space.space import Space
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning.mesh_estimates.narrowed import Choices
from autopar.planning.options.groups import Memory
from autopar.planning.planner import Statements
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from autopar.solver.solve import solve
from tests.support.parity import SLOW_DEVICES

MODEL, INPUTS = built_in("tiny-llama", 8, 64, 1)
PROGRAM = capture(skeleton(MODEL), INPUTS, {}, training=True)
REQUEST = PlanRequest(hardware=SLOW_DEVICES)


def space_on(**axes: int) -> Space:
    return REQUEST.space(PROGRAM, Mesh(axes))


def best(space: Space) -> tuple[float, tuple[int, ...]]:
    """The least seconds of a space, and the choices."""
    formulation = Statements(space).of(Settings(Memory(recompute="none")))[0]
    found = solve(formulation.problem({}), time_limit=100)
    return found.seconds, tuple(found.choices[: len(space.decisions)])


def test_a_space_has_the_choices_of_plans_on_fewer_axes_alone() -> None:
    choices, flat, deep = Choices(), space_on(dp=2, tp=4), space_on(dp=2, tp=2, sp=2)
    _, chosen = best(flat)
    choices.add(flat, chosen)
    narrow = choices.narrowed(deep, {})
    made = {"-"}.union(
        *(d.candidates.strategies[c].choices for d, c in zip(flat.decisions, chosen, strict=True) if d.kind == "call")
    )
    sizes = [[len(each.candidates.strategies) for each in space.decisions] for space in (narrow, deep)]
    assert sum(sizes[0]) < 0.5 * sum(sizes[1])
    for each in narrow.decisions:
        if each.kind == "call":
            assert made.issuperset({name for strategy in each.candidates.strategies for name in strategy.choices})


def test_the_best_plan_remains_where_its_choices_were_made() -> None:
    choices, deep = Choices(), space_on(dp=2, tp=2, sp=2)
    seconds, chosen = best(deep)
    choices.add(deep, chosen)
    narrow = choices.narrowed(deep, {})
    assert best(narrow)[0] <= seconds * (1 + 1e-4)  # no way leads through dims that neither end splits
    alike = {(id(a.candidates), id(b.candidates)) for a, b in zip(deep.decisions, narrow.decisions, strict=True)}
    assert len(alike) < len(deep.decisions), "equal calls do not share their menus"


def test_what_is_pinned_or_not_known_keeps_all_strategies() -> None:
    choices, deep = Choices(), space_on(dp=2, tp=2, sp=2)
    assert [len(each.candidates.strategies) for each in choices.narrowed(deep, {}).decisions] == [
        len(each.candidates.strategies) for each in deep.decisions
    ]
    choices.add(deep, best(deep)[1])
    number = next(
        n for n, each in enumerate(deep.decisions) if each.kind == "call" and len(each.candidates.strategies) > 8
    )
    pins = {number: np.ones(len(deep.decisions[number].candidates.strategies), dtype=bool)}
    assert choices.narrowed(deep, pins).decisions[number].candidates is deep.decisions[number].candidates
    assert choices.narrowed(deep, {}).decisions[number].candidates is not deep.decisions[number].candidates
