"""Memory budgets of the stages of a rank: stages take turns, and memory goes to those that gain the most by it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.console.units import format_share
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.errors import PipelineError
from autopar.planning.options.groups import Memory, Pipeline
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.planned_blocks import planned_blocks
from autopar.planning.pipeline.planner import _better_divided, _divide_anew, plan_pipeline
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.stage_search import SearchedStage, StageSearch
from autopar.planning.pipeline.stages.blocks import blocks_of
from autopar.planning.pipeline.stages.cheapest_cut import cheapest_cut
from autopar.planning.pipeline.stages.cuts import BlockCost, CutProblem, best_cuts, step_seconds
from autopar.planning.pipeline.stages.memory_budgets import (
    Sample,
    Sampled,
    budgets_of_least_peaks,
    estimates_in_budgets,
    fastest,
    shared_budgets,
)
from autopar.planning.pipeline.stages.stage_bytes import Limit, MemoryBudget, StageBytes, is_at_least, stage_bytes_of
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings, context_of
from autopar.solver.deadline import NEVER
from tests.planning.pipeline.test_planner import Layered, planned, request
from tests.support.planned import IDS_BS, Attention, space_of

SCHEDULES = (Schedule("interleaved_1f1b", 2, 8, 2), Schedule("zbv", 2, 8, 2), Schedule("interleaved_1f1b", 2, 6, 3))


def _samples(source: random.Random, count: int) -> list[Sample]:
    def one() -> Sample:
        return Sample(source.random(), source.randint(1, 40), source.randint(0, 30), source.randint(0, 4))

    return [one() for _ in range(count)]


@given(st.randoms(use_true_random=False), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_samples_of_a_rank_are_the_fastest_that_fit(source: random.Random, num_stages: int) -> None:
    options, memory = [_samples(source, 4) for _ in range(num_stages)], source.randint(20, 120)
    at_once = [tuple(source.randint(0, 8) for _ in range(num_stages)) for _ in range(2)]

    def takes(chosen: tuple[Sample, ...]) -> float:
        resident = max(sum(each.resident(n) for each, n in zip(chosen, numbers, strict=True)) for numbers in at_once)
        return resident + max(each.running for each in chosen)

    fitting = [each for each in itertools.product(*options) if takes(each) <= memory]
    found = fastest(options, memory, at_once)
    if not fitting:
        assert found is None
        return
    assert found is not None and takes(found) <= memory
    assert sum(each.seconds for each in found) == pytest.approx(min(sum(e.seconds for e in each) for each in fitting))


@given(st.randoms(use_true_random=False), st.sampled_from(SCHEDULES))
@settings(max_examples=50, deadline=None)
def test_stages_that_keep_to_their_budgets_fit_together(source: random.Random, schedule: Schedule) -> None:
    memory, samples = 100, [_samples(source, 3) for _ in range(schedule.num_stages)]
    budgets = shared_budgets(schedule, memory, samples.__getitem__)
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        for numbers in schedule.in_flight_at_once(rank):
            own = [_limit(budgets[stage], number) for stage, number in zip(stages, numbers, strict=True)]
            whole = sum(each.resident for each in own)
            assert all(0 <= each.resident <= each.peak and each.peak + whole - each.resident <= memory for each in own)


def _limit(budget: MemoryBudget, in_flight: int) -> Limit:
    """Return the memory limit of a stage with this number of micro-batches in flight."""
    fewer = [each for each in budget.fewer if each.in_flight == in_flight] or [
        Limit(in_flight, budget.peak, budget.resident)
    ]
    return Limit(in_flight, min(each.peak for each in fewer), min(each.resident for each in fewer))


@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule("interleaved_1f1b", 4, 8, 2)], ids=str)
def test_no_moment_of_a_rank_has_more_in_flight_than_those_that_are_looked_at(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        stages, at_once = schedule.stages_of(rank), schedule.in_flight_at_once(rank)
        for place, stage in enumerate(stages):
            assert max(numbers[place] for numbers in at_once) == schedule.in_flight(stage)
        for each in itertools.product((1, 2, 5), repeat=len(stages)):
            most = max(sum(n * weight for n, weight in zip(numbers, each, strict=True)) for numbers in at_once)
            assert most == schedule.most_waiting(rank, dict(zip(stages, each, strict=True)))


def test_stages_of_a_rank_are_not_at_their_most_at_once() -> None:
    schedule = Schedule("interleaved_1f1b", 4, 8, 2)
    assert schedule.in_flight_at_once(2) == ((4, 3), (7, 0)) and schedule.in_flight(2) + schedule.in_flight(6) == 10
    sample = Sample(1.0, 10, 5, saved=4)  # seven micro-batches in all take 28, and ten of them would take 40
    assert fastest([[sample]] * 2, 53, schedule.in_flight_at_once(2)) == (sample, sample)
    assert fastest([[sample]] * 2, 52, schedule.in_flight_at_once(2)) is None
    first, second = (shared_budgets(schedule, 53, lambda stage: [sample])[stage] for stage in (2, 6))
    held = [StageBytes(10 + number * 4, 15 + number * 4, 10, 4) for number in (7, 3)]
    assert first.bytes_over(held[0]) == second.bytes_over(held[1]) == 0 < first.bytes_over(replace(held[0], lasting=11))


def test_memory_goes_to_the_stage_that_gains_by_it() -> None:
    schedule = Schedule("interleaved_1f1b", 2, 8, 2)
    expensive, cheap = [Sample(1.0, 10, 5), Sample(0.2, 60, 5)], [Sample(1.0, 10, 5), Sample(0.9, 60, 5)]
    budgets = shared_budgets(schedule, 100, lambda stage: expensive if stage < 2 else cheap)
    assert budgets[0].resident >= 60 > budgets[2].resident >= 10


def test_the_cut_that_samples_lead_to_has_longer_stages_where_fewer_micro_batches_are_in_flight() -> None:
    schedule = Schedule("interleaved_1f1b", 4, 8, 2)
    problem = CutProblem((BlockCost(1.0, 1.0, 1.0),) * 32, (0.0,) * 32, schedule)

    sampled = [Sampled([Sample(12.0, 0, 10, 20), Sample(24.0, 0, 20, 4)], 12.0)] * 8

    def cut(memory: int) -> tuple[int, ...] | None:
        table, budgets = estimates_in_budgets(problem, memory, sampled)
        assert len(budgets) == 8
        return cheapest_cut(problem.fill(table), table, 4, problem.pace)

    within = cut(180)
    assert within is not None and cut(10**6) == best_cuts(problem).starts
    lengths = [end - start for start, end in itertools.pairwise((*within, 32))]
    assert lengths[0] < lengths[3] and cut(10) is None


def test_each_stage_has_memory_for_samples_of_its_own_blocks() -> None:
    schedule = Schedule("interleaved_1f1b", 2, 1, 2)
    problem = CutProblem((BlockCost(1.0, 1.0, 1.0),) * 4, (0.0,) * 4, schedule)
    every = [Sampled([Sample(3.0, lasting, 0)], 3.0) for lasting in (30, 30, 30, 70)]  # the head is in the last one
    table, budgets = estimates_in_budgets(problem, 100, every)
    assert budgets[3].peak >= 70 > budgets[2].peak >= 30
    assert all(math.isfinite(table[stage, stage, stage + 1]) for stage in range(4))
    larger = replace(every[3], size=2.0)  # twice as long as the one that was sampled
    assert math.isinf(estimates_in_budgets(problem, 100, [*every[:3], larger])[0][3, 3, 4])


def test_stages_of_one_block_are_not_mixed_of_two_plans() -> None:
    """A rank of two stages has no memory for the fast plan of one of them, but for half of it."""
    schedule = Schedule("interleaved_1f1b", 2, 1, 2)
    problem = CutProblem((BlockCost(1.0, 1.0, 1.0),) * 4, (0.0,) * 4, schedule)

    def seconds(num_blocks: int) -> list[float]:
        samples = [Sample(3.0, 100, 0), Sample(6.0, 20, 0)]
        table, _ = estimates_in_budgets(problem, 110, [Sampled(samples, 3.0, num_blocks)] * 4)
        return sorted(float(table[stage, stage, stage + 1]) for stage in (0, 2))

    assert seconds(1) == [6.0, 6.0]
    assert seconds(2) == [4.5, 6.0]


def test_each_stage_of_a_cut_has_room_for_its_least_peak_or_there_are_no_budgets() -> None:
    schedule, least = Schedule("interleaved_1f1b", 2, 8, 2), {0: 30, 1: 20, 2: 60, 3: 10}
    budgets = budgets_of_least_peaks(schedule, 100, (0, 1, 2, 3), 4, lambda first, end, stage: least[stage])
    assert budgets is not None and all(
        budgets[stage].peak >= least[stage] <= budgets[stage].resident for stage in least
    )
    assert budgets_of_least_peaks(schedule, 89, (0, 1, 2, 3), 4, lambda first, end, stage: least[stage]) is None


def test_memory_that_a_stage_leaves_goes_to_a_known_plan_of_another_one() -> None:
    """The head takes less than the sample of its budget: the fast plan of the layer before it fits on its rank."""
    schedule, fast, slow = Schedule("interleaved_1f1b", 2, 2, 2), Sample(1.0, 80, 0), Sample(2.0, 30, 0)
    known = {0: [slow, fast], 1: [slow], 2: [Sample(1.0, 15, 0)], 3: [Sample(1.0, 15, 0)]}
    planned = SimpleNamespace(blocks=range(4), request=SimpleNamespace(schedule=schedule))
    search: Any = SimpleNamespace(
        planned=planned,
        budgets=(MemoryBudget(50, 50),) * 4,
        fastest=lambda first, end, stage: known[stage][0],
        samples=lambda first, end, stage: known[stage],
    )
    _divide_anew(search, (0, 1, 2, 3), 100)
    assert search.budgets[0].peak >= 80 and search.budgets[2].peak >= 15
    _divide_anew(search, (0, 1, 2, 3), 50)
    assert 30 <= search.budgets[0].peak < 80


def test_of_two_cuts_the_one_whose_known_plans_are_faster_is_taken() -> None:
    schedule = Schedule("interleaved_1f1b", 2, 2, 2)
    problem = CutProblem((BlockCost(1.0, 1.0, 1.0),) * 6, (0.0,) * 6, schedule)
    search: Any = SimpleNamespace(
        planned=SimpleNamespace(blocks=problem.blocks, request=SimpleNamespace(schedule=schedule)),
        budgets=(),
        fastest=lambda first, end, stage: None,
        samples=lambda first, end, stage: [Sample(3.0 * (end - first), 10 * (end - first), 0)],
        at_most=lambda first, end, stage: 3.0 * (end - first),
    )
    uneven, even = ((0, 1, 2, 5), search, 1.0), ((0, 2, 4, 5), search, 1.0)
    assert _better_divided(problem, (uneven, even), 100) is even
    assert search.budgets[1].peak > search.budgets[3].peak, "those of the cut that is taken"


def test_nothing_is_requested_of_stages_behind_one_that_does_not_fit() -> None:
    schedule, requested = Schedule("interleaved_1f1b", 2, 8, 2), list[int]()

    def least(first: int, end: int, stage: int) -> int:
        requested.append(stage)
        return 60

    assert budgets_of_least_peaks(schedule, 100, (0, 1, 2, 3), 4, least) is None and requested == [0, 2]


def test_a_room_is_as_large_as_another_by_all_of_its_limits() -> None:
    assert (
        is_at_least(None, MemoryBudget(1, 1))
        and is_at_least(MemoryBudget(5, 2), MemoryBudget(5, 2))
        and not is_at_least(MemoryBudget(5, 2), None)
    )
    assert not is_at_least(MemoryBudget(5, 2), MemoryBudget(4, 3)) and not is_at_least(
        MemoryBudget(5, 2), MemoryBudget(6, 1)
    )
    less = MemoryBudget(5, 3, (Limit(2, 4, 2),))
    assert (
        is_at_least(MemoryBudget(5, 3), less) and is_at_least(less, less) and not is_at_least(less, MemoryBudget(5, 3))
    )
    assert is_at_least(less, MemoryBudget(5, 3, (Limit(3, 4, 2),))) and not is_at_least(
        less, MemoryBudget(5, 3, (Limit(1, 4, 2),))
    )


@pytest.mark.parametrize("runs", [Microbatches(6, 3), Microbatches(4, 4), Microbatches(4, 1)], ids=str)
def test_a_stage_keeps_what_waits_and_what_lasts_while_others_run(runs: Microbatches) -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2, tp=2)
    plan, choices = make_plan(space, {}, microbatches=runs)
    found = stage_bytes_of(context_of(plan).memory_model, choices, plan.recompute)
    assert plan.memory is not None
    parts = plan.memory.parts
    waiting = runs.in_flight * sum(row.saved_bytes for row in plan.rows)
    lasting = sum(parts.get(name, 0) for name in ("parameters", "optimizer", "buffers and inputs"))
    assert lasting + waiting < found.resident <= found.peak == plan.peak_bytes
    for in_flight in range(1, runs.in_flight):
        memory = MemoryModel(space, replace(runs, in_flight=in_flight))
        less, most = stage_bytes_of(memory, choices, plan.recompute), found.with_fewer(in_flight)
        assert less.resident <= most.resident <= found.resident and less.peak <= most.peak <= found.peak


@pytest.mark.parametrize("runs", [Microbatches(2, 2), Microbatches(4, 4)], ids=str)
def test_a_stage_that_is_fullest_with_few_micro_batches_in_flight_keeps_its_peak_at_most(runs: Microbatches) -> None:
    space = space_of(Attention(False), (IDS_BS[:, :1],), dp=2)
    plan, choices = make_plan(space, {}, microbatches=runs)
    found = stage_bytes_of(context_of(plan).memory_model, choices, plan.recompute)
    assert found.resident == found.peak == plan.peak_bytes
    assert MemoryBudget(found.peak, found.peak).bytes_over(found) == 0
    for in_flight in range(1, runs.in_flight):
        memory = MemoryModel(space, replace(runs, in_flight=in_flight))
        less, most = stage_bytes_of(memory, choices, plan.recompute), found.with_fewer(in_flight)
        assert less.resident <= most.resident <= found.resident and less.peak <= most.peak <= found.peak
    kept = [max(each.resident(n) for n in range(runs.in_flight + 1)) for each in Sample.of(1.0, found, runs.in_flight)]
    assert min(kept) == found.peak < max(kept)


def test_stages_of_one_micro_batch_keep_all_that_they_hold() -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2)
    plan, choices = make_plan(space, {})
    found = stage_bytes_of(context_of(plan).memory_model, choices, plan.recompute)
    assert found == StageBytes(plan.peak_bytes, plan.peak_bytes, plan.peak_bytes)


def test_a_stage_keeps_no_more_than_its_room_says_while_others_run() -> None:
    """Check that a stage saves no more than its budget allows while other stages run.

    Its peak may be higher, because the stages of a rank take turns.
    """
    requested = request({"pp": 2}, Schedule("interleaved_1f1b", 2, 4, 2), num_layers=4)
    blocks = planned_blocks(requested, 4)

    def ask(budget: MemoryBudget | None) -> tuple[SearchedStage, StageBytes | None]:
        search = StageSearch(blocks, NEVER, (budget,) * 4, (0.0,) * (len(blocks.blocks) + 1))
        known = search.ask(0, 3, 0, 0.02)
        return known, None if known.made is None else search.holding(known, search.runs[0])

    free, whole = ask(MemoryBudget(2**40, 2**40))
    assert whole is not None and whole.resident < whole.peak
    same, holding = ask(MemoryBudget(whole.peak, whole.resident))
    assert same.seconds == free.seconds and holding == whole
    less, holding = ask(MemoryBudget(whole.peak, int(0.9 * whole.resident)))
    assert holding is not None and holding.resident <= 0.9 * whole.resident < holding.peak
    assert less.seconds > free.seconds and less.least <= less.seconds
    assert ask(MemoryBudget(whole.peak, 1))[0].seconds == math.inf


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "share"), [("1f1b", None), ("1f1b", 0.95), ("zbv", None)])
def test_no_cut_is_below_the_bound_of_a_plan(name: str, share: float | None) -> None:
    schedule = Schedule(name, 2, 4, 1 if name == "1f1b" else 2)
    requested = request({"pp": 2}, schedule, num_layers=3, vocabulary=256)
    blocks = planned_blocks(requested, schedule.num_stages)
    problem = CutProblem(blocks.costs, blocks.cut_seconds, schedule)
    limit = None if share is None else int(share * plan_pipeline(requested).peak_bytes)

    def plan(*names: str) -> PipelinePlan:
        wanted = replace(
            requested.wanted, settings=Settings(Memory(limit)), pipeline=Pipeline(split_points=names or None)
        )
        return plan_pipeline(replace(requested, wanted=wanted))

    def by_formula(found: PipelinePlan) -> float:
        return step_seconds(problem, found.starts, [stage.seconds for stage in found.stages])

    found, starts = plan(), itertools.combinations(range(1, len(blocks.blocks)), schedule.num_stages - 1)
    assert 0 < found.bound <= found.seconds and found.gap == pytest.approx(1 - found.bound / found.seconds)
    assert f"gap {format_share(found.gap)}" in str(found)
    bound = (1 - found.gap) * by_formula(found)
    for each in starts:
        with contextlib.suppress(PipelineError):
            assert bound <= by_formula(plan(*(blocks.blocks[start].name for start in each))) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_within_a_limit_in_which_the_fastest_stages_fit_no_cut_is_faster(name: str, num_layers: int) -> None:
    """Plan every cut by itself, with two micro-batches: in its last backward a stage has fewer of them in flight."""
    schedule = Schedule(name, 2, 2, 2)
    requested = request({"pp": 2}, schedule, num_layers=num_layers, batch=4)
    blocks = blocks_of(requested.program, schedule.num_stages)

    def plan(limit: int | None, *names: str) -> PipelinePlan:
        wanted = replace(
            requested.wanted, settings=Settings(Memory(limit)), pipeline=Pipeline(split_points=names or None)
        )
        return plan_pipeline(replace(requested, wanted=wanted))

    free = plan(None)
    peaks = [stage.plan.peak_bytes for stage in free.stages]
    limit = max(sum(peaks[stage] for stage in schedule.stages_of(rank)) for rank in range(2))
    assert max(map(free.rank_bytes, range(2))) <= limit
    found, seconds = plan(limit), []
    for starts in itertools.combinations(range(1, len(blocks)), schedule.num_stages - 1):
        with contextlib.suppress(PipelineError):
            seconds.append(plan(limit, *(blocks[start].name for start in starts)).seconds)
    assert found.seconds == pytest.approx(free.seconds) and found.seconds <= min(seconds) * (1 + 1e-9)
    assert max(map(found.rank_bytes, range(2))) <= limit


def test_of_a_plan_that_was_saved_without_a_bound_nothing_is_known() -> None:
    values = json.loads(planned(model=Layered(2), schedule="1f1b", microbatches=4).to_json())
    assert values.pop("bound") > 0
    plan = PipelinePlan.from_json(json.dumps(values))
    assert plan.bound == 0 and plan.gap == 1 and "gap" not in str(plan)
