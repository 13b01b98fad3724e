"""Stages with equal blocks are not solved again: the seconds of one of them bound those of the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.capture.export import capture, skeleton
from autopar.ir.sharding.layout import Layout, S
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.planned_blocks import planned_blocks
from autopar.planning.pipeline.request import PipelineRequest
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.stages.alike import raise_alike
from autopar.planning.pipeline.stages.cut_search import StageCosts, Visited, best_cuts_within
from autopar.planning.pipeline.stages.cuts import BlockCost, CutProblem, Cuts
from autopar.planning.pipeline.structure import kinds
from tests.planning.pipeline.test_planner import Layered, inputs, planned, request

STAGES, LAYERS = 4, 12


def _problem(seconds: list[float]) -> CutProblem:
    blocks = tuple(BlockCost(each, 0, 0) for each in seconds)
    return CutProblem(blocks, (0.0,) * len(blocks), Schedule("1f1b", STAGES, 8))


@given(
    seconds=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=2),
    penalty=st.floats(0.0, 1.0),
    budget=st.integers(3, 20),
)
@settings(max_examples=60, deadline=None)
def test_what_is_known_of_equal_blocks_changes_no_cut(seconds: list[float], penalty: float, budget: int) -> None:
    plain, fast, _ = _with_and_without_kinds(seconds, penalty, budget)
    assert abs(plain.seconds - fast.seconds) <= 1e-9 * plain.seconds


def test_what_is_known_of_equal_blocks_need_not_be_requested() -> None:
    *_, (without, with_kinds) = _with_and_without_kinds([1.0, 1.0], 0.5, 6)
    assert with_kinds < without


def test_what_was_visited_before_the_search_bounds_what_equal_stages_take() -> None:
    problem = _problem([1.0] * LAYERS)
    in_flight = problem.schedule.in_flight

    def stage_cost(first: int, end: int, stage: int) -> float:
        return (end - first) * in_flight(stage)

    def cuts(visited: tuple[Visited, ...], in_haste: bool) -> Cuts:
        costs = StageCosts(stage_cost, is_over=lambda requested, has_cut: has_cut and in_haste, visited=lambda: visited)
        return best_cuts_within(problem, costs, kinds=[0] * LAYERS)

    visited = tuple(((4, 5), stage_cost(4, 5, each), range(each + 1)) for each in range(STAGES))
    assert cuts((), in_haste=True).bound < cuts(visited, in_haste=True).bound <= cuts(visited, in_haste=False).seconds
    assert cuts(visited, in_haste=False).seconds == cuts((), in_haste=False).seconds


def _with_and_without_kinds(seconds: list[float], penalty: float, budget: int) -> tuple[Cuts, Cuts, tuple[int, int]]:
    """Return cuts, and the number of solved stages, of two kinds of blocks.

    Beyond a limit, activations cost time that grows with the micro-batches in flight.
    """
    of_block = [seconds[0], *[seconds[1]] * LAYERS]
    numbers = [0, *[1] * LAYERS]
    problem = _problem(of_block)
    requested: list[list[tuple[int, int, int]]] = [[], []]

    def stage_cost(first: int, end: int, stage: int) -> float:
        held = (end - first) * problem.schedule.in_flight(stage)
        return sum(of_block[first:end]) + penalty * max(0, held - budget)

    def counted(which: int, first: int, end: int, stage: int) -> float:
        requested[which].append((first, end, stage))
        return stage_cost(first, end, stage)

    plain = best_cuts_within(problem, StageCosts(lambda *span: counted(0, *span)))
    fast = best_cuts_within(problem, StageCosts(lambda *span: counted(1, *span)), kinds=numbers)
    return plain, fast, (len(requested[0]), len(requested[1]))


def test_what_does_not_fit_fits_no_fuller_stage_of_the_same_blocks() -> None:
    problem = _problem([1.0] * LAYERS)
    requested: list[tuple[int, int, int]] = []

    def stage_cost(first: int, end: int, stage: int) -> float:
        requested.append((first, end, stage))
        return float("inf") if (end - first) * problem.schedule.in_flight(stage) > 8 else float(end - first)

    cuts = best_cuts_within(problem, StageCosts(stage_cost), kinds=[0] * LAYERS)
    ends = (*cuts.starts[1:], LAYERS)
    lengths = [end - first for first, end in zip(cuts.starts, ends, strict=True)]
    assert lengths == [2, 2, 4, 4]
    refused = [(end - first) for first, end, stage in requested if (end - first) * (STAGES - stage) > 8]
    assert len(refused) <= 3


def test_only_what_holds_the_blocks_is_raised() -> None:
    kinds = [0, 1, 1, 2]
    least = np.zeros((2, 5, 5))
    table = least.copy()
    raise_alike(table, least, 3.0, (1, 2), kinds, [1])
    assert not table[0].any()
    for first, end in combinations(range(5), 2):
        assert table[1, first, end] == (3.0 if 1 in kinds[first:end] else 0.0)


def test_equal_layers_are_of_one_kind_unless_one_is_stored_in_its_own_way() -> None:
    requested = request({"pp": 2, "tp": 2}, Schedule("1f1b", 2, 4), num_layers=4)
    found = _kinds_by_name(requested)
    layers = {number for name, number in found.items() if name.startswith("layers.")}
    assert len(layers) == 1 and len(set(found.values())) == len(found) - 3
    other = _kinds_by_name(replace(requested, storage={"layers.2.up.weight": Layout((S(0),))}))
    assert other["layers.2"] != other["layers.1"] == other["layers.0"]


def test_a_pin_that_leaves_all_strategies_makes_no_kind_of_its_own() -> None:
    blocks = planned_blocks(request({"pp": 2, "tp": 2}, Schedule("1f1b", 2, 4), num_layers=4), 2)
    here = next(number for number, each in enumerate(blocks.whole.space.decisions) if "layers_2" in each.name)
    count = len(blocks.whole.space.decisions[here].candidates.strategies)
    assert count > 1
    free, pinned = np.ones(count, dtype=bool), np.arange(count) == 0
    usual, all_left, one_left = (kinds(replace(blocks, pins=pins)) for pins in ({}, {here: free}, {here: pinned}))
    assert usual == all_left != one_left


def test_a_layer_whose_input_takes_no_gradient_is_of_another_kind() -> None:
    """Check that the first layer after a frozen embedding is of a kind of its own.

    It sends no gradient back, so no shared reshard joins the gradients there.
    """
    model = Layered(4)
    model.embedding.requires_grad_(False)
    plan = planned(Mesh({"pp": 4, "tp": 2}), model, microbatches=4)
    assert len(plan.stages) == 4 and all(stage.plan.verify().ok for stage in plan.stages)
    requested = request({"pp": 2, "tp": 2}, Schedule("1f1b", 2, 4), num_layers=4)
    frozen = capture(skeleton(model), inputs(4), {}, training=True)
    found = _kinds_by_name(replace(requested, program=frozen))
    assert found["layers.0"] != found["layers.1"] == found["layers.3"]


def _kinds_by_name(requested: PipelineRequest) -> dict[str, int]:
    planned = planned_blocks(requested, 2)
    return dict(zip([each.name for each in planned.blocks], kinds(planned), strict=True))
