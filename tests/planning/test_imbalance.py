"""Unbalanced expert rows: the load of the busiest device is planned for, exactly, and noted."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.console.units import format_bytes, format_seconds
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import bytes_by_moment, memory_use
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.program.operators.expert_operators import DISPATCH
from autopar.ir.program.recompute_segments import MODES, RECOMPUTATIONS
from autopar.planning.expert_notes import BALANCED
from autopar.planning.formulation import Formulation
from autopar.planning.options.groups import Memory
from autopar.planning.planner import make_plan
from autopar.planning.record import evaluate
from autopar.planning.settings import Settings
from tests.support.divided_experts import Form, batches, choices, forced, with_experts
from tests.support.experts import grouped
from tests.support.options import by_flag
from tests.support.planned import SLOW_LINKS, space_of

IMBALANCES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 9.0)
INPUTS = batches(1)[0]
BIASED, EIGHT = Form(bias=True), Form(num_experts=8)
EQUAL = Hardware("neither is free", {"float32": 1e9}, 1e9, 10**9, 0.0, (Link("wire", None, 0.0, 1e8),))


@functools.cache
def _space(axes: tuple[int, ...] = (4,), form: Form = BIASED, hardware: Hardware = SLOW_LINKS) -> Space:
    sizes = dict(zip("ab", axes, strict=False))
    return space_of(with_experts(form), INPUTS, hardware, **sizes)


def _planned(space: Space, *names: str, memory: Memory = Memory()) -> tuple[Plan, tuple[int, ...]]:
    return make_plan(space, forced(choices(*names))(space, {}), Settings(memory))


def _uneven(space: Space, imbalance: float) -> Space:
    return replace(space, imbalance=imbalance)


@pytest.mark.parametrize("microbatches", [Microbatches(), Microbatches(3, 2)], ids=["one", "three"])
@pytest.mark.parametrize("name", ["t", "x", "t+x", "o"])
def test_no_plan_takes_less_where_rows_are_less_balanced(name: str, microbatches: Microbatches) -> None:
    _, made = _planned(_space(), name)
    spaces = [_uneven(_space(), imbalance) for imbalance in IMBALANCES]
    seconds = [evaluate(space, made) for space in spaces]
    peaks = [memory_use(MemoryModel(space, microbatches), made, {})[0] for space in spaces]
    for found in (seconds, peaks):
        assert found == sorted(found)
        divided = name in ("x", "t+x")
        assert len(set(found)) == (len(IMBALANCES) - 1 if divided else 1)  # to four ranks all rows come at 4 and at 9


@pytest.mark.parametrize("imbalance", [1.5, 4.0])
def test_grouped_products_take_as_many_times_as_long_as_there_are_rows(imbalance: float) -> None:
    _, made = _planned(_space(), "x")
    contexts = [make_plan(_uneven(_space(), each), _pinned_to(_space(), made))[0] for each in (1.0, imbalance)]
    balanced, uneven = ([row for row in plan.rows if row.operation == "grouped_mm"] for plan in contexts)
    assert len(balanced) == 2
    for one, other in zip(balanced, uneven, strict=True):
        assert one.forward_seconds > 0
        assert other.forward_seconds == pytest.approx(one.forward_seconds * imbalance, rel=1e-9)
        assert other.backward_seconds == pytest.approx(one.backward_seconds * imbalance, rel=1e-9)


def _pinned_to(space: Space, made: tuple[int, ...]) -> dict[int, np.ndarray]:
    return {
        number: np.arange(len(decision.candidates.strategies)) == choice
        for number, (decision, choice) in enumerate(zip(space.decisions, made, strict=True))
    }


@pytest.mark.parametrize("names", [("t", "x"), ("x", "t+x"), ("t+x", "o"), ("x", "o")], ids="|".join)
def test_the_problem_is_in_seconds_and_bytes_what_is_told_of_its_choices(names: tuple[str, ...]) -> None:
    """Check that the problem's seconds and bytes are those that are predicted for its choices.

    The problem may count too few bytes of choices whose rows are moved by features, but never too many.
    """
    space, rng = _uneven(_space((2, 2)), 1.5), np.random.default_rng(0)
    _, made = _planned(space, *names)
    formulation = Formulation(space, MemoryModel(space))
    segments = formulation.memory.lifetimes.segments
    for modes in ({}, {name: MODES[rng.integers(len(RECOMPUTATIONS))] for name in segments}):
        taken = bytes_by_moment(formulation.memory, made, modes)
        for moment in rng.choice(np.flatnonzero(taken), 10).tolist():
            row = MemoryRow(((moment, 1),))
            problem = formulation.problem({}, row, None, dict.fromkeys(segments, "") if modes else None)
            seconds, num_bytes = problem.cost_of((*made, *(MODES.index(each) for each in modes.values())))
            assert num_bytes <= taken[moment] if modes and "o" in names else num_bytes == taken[moment]
            assert modes or seconds == pytest.approx(evaluate(space, made), rel=1e-12)


class OneProduct(nn.Module):
    """Experts of one product and one call on its rows: a block with few choices. Two experts of four for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, index_TK = (x_TD @ self.router).softmax(-1).topk(2)
        ids_R, perm_R = torch.sort(index_TK.reshape(-1))
        ends_E = torch.histc(ids_R.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        rows_RD = grouped(x_TD[perm_R // 2], self.weight, ends_E).relu()
        rows_RD = rows_RD * weights_TK.reshape(-1)[perm_R].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, perm_R // 2, rows_RD).square().sum()


@pytest.mark.sample(3)
@pytest.mark.parametrize("share", [None, 0.6, 0.2])
@pytest.mark.parametrize("hardware", [SLOW_LINKS, EQUAL], ids=["links", "equal"])
def test_a_plan_is_the_best_of_all_combinations(hardware: Hardware, share: float | None) -> None:
    space, tried = _all_choices(hardware)
    pins = {} if hardware is SLOW_LINKS else dict([_divided_by_expert(space)])  # else there rows are not divided
    for number, mask in pins.items():
        tried = tried[mask[tried[:, number]]]
    seconds, memory = _seconds(space, tried), MemoryModel(space)
    order = np.argsort(seconds, kind="stable")

    def peak(number: int) -> int:
        return memory_use(memory, tried[number].tolist(), {})[0]

    limit = None
    if share is not None:
        peaks = [peak(number) for number in order[:: len(order) // 20]]
        limit = int(min(peaks) + share * (max(peaks) - min(peaks)))
    best = next(number for number in order if limit is None or peak(number) <= limit)
    plan, chosen = make_plan(space, pins, Settings(Memory(limit, recompute="none")))
    assert plan.seconds == pytest.approx(seconds[best], rel=1e-9) and plan.gap <= 1e-9
    assert evaluate(space, chosen) == pytest.approx(seconds[best], rel=1e-9)
    assert limit is None or plan.peak_bytes <= limit


@functools.cache
def _all_choices(hardware: Hardware) -> tuple[Space, np.ndarray]:
    """All choices, in rows, that move nothing that cannot be moved."""
    space = _uneven(space_of(OneProduct(), (torch.ones(4, 8),), hardware, ep=2), 1.5)
    tried = np.zeros((1, len(space.decisions)), dtype=int)
    ends = [{edge.source, edge.target} for edge in space.edges]
    left = set(range(len(space.decisions)))
    while left:  # next what is tied most to what is chosen: fewer choices are left at once
        number = max(left, key=lambda number: sum(number in each and not each & (left - {number}) for each in ends))
        left.remove(number)
        count = len(space.decisions[number].candidates.strategies)
        tried = np.repeat(tried, count, axis=0)
        tried[:, number] = np.tile(np.arange(count), len(tried) // count)
        for edge in space.edges:
            if number in (edge.source, edge.target) and not {edge.source, edge.target} & left:
                tried = tried[np.isfinite(space.reshard_seconds(edge)[tried[:, edge.source], tried[:, edge.target]])]
    return space, tried


def _seconds(space: Space, tried: np.ndarray) -> np.ndarray:
    """Return the seconds of each row of choices: every operation, and every move between two of them."""
    total = np.zeros(len(tried))
    for number, decision in enumerate(space.decisions):
        total += decision.candidates.seconds[tried[:, number]] * _shares(space, number, tried)
    for edge in space.edges:
        moving = space.reshard_seconds(edge)[tried[:, edge.source], tried[:, edge.target]]
        total += moving * _shares(space, edge.target if edge.tensor.ragged else 0, tried)
    return total


def _shares(space: Space, number: int, tried: np.ndarray) -> np.ndarray:
    """Return the rows of a call on the busiest of two ranks, relative to an equal share.

    The factor is 1.5 if experts are divided, and 1 otherwise.
    """
    if number not in space.rows:
        return np.ones(len(tried))
    dispatch, divided = _divided_by_expert(space)
    return np.where(divided[tried[:, dispatch]], 1.5, 1.0)


def _divided_by_expert(space: Space) -> tuple[int, np.ndarray]:
    """The dispatch of a block, and which of its strategies divide experts."""
    (dispatch,) = (n for n, d in enumerate(space.decisions) if d.kind == "call" and d.node.target is DISPATCH)
    return dispatch, np.array(
        ["x" in strategy.choices[0] for strategy in space.decisions[dispatch].candidates.strategies]
    )


def test_where_rows_are_uneven_enough_tokens_are_divided_and_experts_are_not() -> None:
    space = _space((2,), Form(), EQUAL)
    made = {}
    for imbalance in (1.0, 2.0):
        plan = make_plan(_uneven(space, imbalance), {})[0]
        made[imbalance] = next(plan.choices[d.name] for d in space.decisions if d.node.target is DISPATCH)
    assert made == {1.0: "a0+x", 2.0: "a0"}


def test_what_a_limit_survives_is_stated() -> None:
    space = _space((2,), Form(), SLOW_LINKS)
    free, made = _planned(space, "t+x")
    most = memory_use(MemoryModel(_uneven(space, 2.0)), made, {})[0]
    limit = (free.peak_bytes + most) // 2
    plan, made = _planned(space, "t+x", memory=Memory(limit, recompute="none"))
    (note,) = (note for note in plan.notes if note.startswith("the memory limit"))
    survived = re.match(r"the memory limit holds up to an imbalance of (1\.\d\d): ", note)
    assert survived is not None
    pins = _pinned_to(space, made)
    within, beyond = (_uneven(space, float(survived[1]) + more) for more in (0.0, 0.01))
    assert make_plan(within, pins, Settings(Memory(limit, recompute="none")))[0].peak_bytes <= limit
    with pytest.raises(InfeasibleError, match="memory limit"):
        make_plan(beyond, pins, Settings(Memory(limit, recompute="none")))
    assert "the memory limit holds for any routing." in _planned(space, "t+x", memory=Memory(most))[0].notes


def test_a_plan_says_what_is_expected_of_balanced_routing_and_of_what_was_requested() -> None:
    balanced, made = _planned(_space(), "t+x")
    plan = make_plan(_uneven(_space(), 1.5), _pinned_to(_space(), made))[0]
    (note,) = plan.notes
    assert BALANCED in balanced.notes and plan.imbalance == 1.5
    for specified in (balanced, plan):
        assert f"{format_seconds(specified.seconds)} and {format_bytes(specified.peak_bytes)} where" in note
    assert "the busiest has 1.5 times its share, which is planned for." in note
    assert plan.seconds > balanced.seconds and plan.peak_bytes > balanced.peak_bytes


@pytest.mark.parametrize("names", [("t+x", "t+x"), ("x", "o")], ids="|".join)
def test_formulas_say_what_uneven_rows_cost_on_this_mesh_and_on_others(names: tuple[str, ...]) -> None:
    space = _uneven(_space((2, 2), EIGHT), 3.0)
    plan, made = _planned(space, *names, memory=Memory(recompute="full"))
    again = plan.reprice()
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9) and again.memory["memory"] == plan.peak_bytes
    wider = _uneven(_space((4, 2), EIGHT), 3.0)
    same = [
        [str(strategy) for strategy in there.candidates.strategies].index(str(here.candidates.strategies[choice]))
        for here, there, choice in zip(space.decisions, wider.decisions, made, strict=True)
    ]
    fresh = make_plan(wider, _pinned_to(wider, tuple(same)), Settings(Memory(recompute="full")))[0]
    assert plan.reprice(a=4).seconds == pytest.approx(fresh.seconds, rel=1e-9)


def test_the_imbalance_of_a_plan_goes_with_it() -> None:
    model = with_experts(Form())
    autopar.annotate(model, "*.dispatch", ep="factor:a0+x")
    options: dict[str, Any] = {"hardware": SLOW_LINKS, "mode": "semi_auto"}
    plan = autopar.plan(model, autopar.Mesh({"ep": 2}), INPUTS, **by_flag(imbalance=1.5, **options))
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan and loaded.imbalance == 1.5
    assert loaded.attach(model, INPUTS, **by_flag(**options)).verify().ok
    with pytest.raises(PlanError, match="its choices take"):
        replace(loaded, imbalance=1.0).attach(model, INPUTS, **by_flag(**options)).verify()


def test_each_stage_of_a_pipeline_says_what_is_expected_of_it() -> None:
    model = with_experts(Form(num_layers=2))
    autopar.annotate(model, "*.dispatch", ep="factor:a0+x")
    mesh = autopar.Mesh({"pp": 2, "ep": 2})
    plan = autopar.plan(
        model, mesh, INPUTS, hardware=SLOW_LINKS, experts=autopar.Experts(imbalance=1.5), microbatches=2
    )
    expected = [note.partition(": expected: ")[0] for note in plan.notes if "expected: " in note]
    assert expected == ["stage 0", "stage 1"]
    balanced = autopar.plan(model, mesh, INPUTS, hardware=SLOW_LINKS, microbatches=2)
    assert BALANCED in balanced.notes and balanced.seconds < plan.seconds
