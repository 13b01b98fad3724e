"""Plans of pipelines on meshes that are not there: cuts, memory, schedules, annotations and refusals."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.export import capture, skeleton
from autopar.compiler.pipelined import check_wish, pipeline_plan_of
from autopar.costs.plans.plan import Plan
from autopar.costs.steps.step import microbatch_seconds, microbatch_tasks
from autopar.costs.timeline.values import COMPUTE, Task
from autopar.errors import AnnotationError, InfeasibleError, InputError, PipelineError, PlanError
from autopar.ir.program.program import Program
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.options.groups import Memory, Pipeline
from autopar.planning.pipeline.block_costs import block_of_decisions
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.planned_blocks import planned_blocks
from autopar.planning.pipeline.planner import plan_pipeline, stage_space
from autopar.planning.pipeline.request import PipelineRequest
from autopar.planning.pipeline.schedule_search import Wish
from autopar.planning.pipeline.schedules.choice import RECOMMENDED
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.stage_search import StageSearch
from autopar.planning.pipeline.stage_seconds import step_parts
from autopar.planning.pipeline.stages.blocks import shared_calls
from autopar.planning.pipeline.stages.cuts import CutProblem, best_cuts, cuts_of, least_seconds
from autopar.planning.pipeline.stages.splitting import split
from autopar.planning.pipeline.stages.stage_bytes import MemoryBudget
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings, context_of
from autopar.planning.step_seconds import StepSeconds, parts_by_decision
from autopar.solver.deadline import NEVER
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES

HERE = "tests.planning.pipeline.test_planner"
HIDDEN, BATCH, SEQUENCE = 16, 16, 8


class Layer(nn.Module):
    """An MLP around which the hidden states go, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.down(F.gelu(self.up(x_BSD)))


class Layered(nn.Module):
    """Tokens through an embedding, layers and a head; `plain` has nothing that two stages need, else positions are
    added in every layer, the head is the embedding, and logits are returned, too."""

    def __init__(self, num_layers: int = 6, vocabulary: int = 64, plain: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, vocabulary, bias=False)
        self.plain = plain
        if not plain:
            self.head.weight = self.embedding.weight

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Any:
        x_BSD = self.embedding(ids_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD if self.plain else x_BSD + torch.arange(HIDDEN) / HIDDEN)
        logits_BSV = self.head(x_BSD)
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
        return loss if self.plain else (loss, logits_BSV)


def inputs(batch: int = BATCH) -> tuple[Tensor, Tensor]:
    ids_BS = torch.zeros(batch, SEQUENCE, dtype=torch.int64)
    return ids_BS, ids_BS


def layered() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model and inputs that the command line plans."""
    return Layered(2), inputs()


def planned(mesh: Mesh | None = None, model: nn.Module | None = None, **options: Any) -> PipelinePlan:
    """The plan of a layered model, by default on two stages; without tiles, which a limit alone would bring in."""
    given = {"hardware": SLOW_DEVICES, "loss_tiles": "none", **options}
    found = autopar.plan(model or Layered(), mesh or Mesh({"pp": 2}), inputs(), **by_flag(**given))
    assert isinstance(found, PipelinePlan)
    return found


@functools.cache
def program_of(num_layers: int = 6, vocabulary: int = 64, plain: bool = True, batch: int = 4) -> Program:
    return capture(skeleton(Layered(num_layers, vocabulary, plain)), inputs(batch), {}, training=True)


def request(axes: dict[str, int], schedule: Schedule, **model: Any) -> PipelineRequest:
    """Build the request of a pipeline plan for the program of one micro-batch."""
    return PipelineRequest(program_of(**model), Mesh(axes), "pp", schedule, PlanRequest(hardware=SLOW_DEVICES))


MESHES = ({"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2})


def _sum(parts: Sequence[StepSeconds]) -> StepSeconds:
    return StepSeconds(*(sum(values) for values in zip(*parts, strict=True)))


# What blocks and stages take.


def _beyond(requested: PipelineRequest) -> list[dict[str, float]]:
    """Per stage, the seconds of what no block of its own has; the rest is asserted to be that of its blocks.

    A stage takes its simulated time, and blocks what lies between their ends in that of the whole. The stage moves what
    it sends to the layout of its shared reshard, as the block that makes it does.
    """
    planned, plan = planned_blocks(requested, requested.schedule.num_stages), plan_pipeline(requested)
    whole = planned.whole.space
    places = zip(whole.decisions, block_of_decisions(whole, planned.blocks), strict=True)
    home = {decision.name: place for decision, place in places}
    found = []
    for stage, (start, end) in zip(plan.stages, pairwise((*plan.starts, len(planned.blocks))), strict=True):
        context = context_of(stage.plan)
        parts = parts_by_decision(context.memory_model, context.choices, stage.plan.recompute)
        named = dict(zip((decision.name for decision in context.space.decisions), parts, strict=True))
        sent = {f"output:{number}" for number in range(context.space.program.num_sent)}
        of_stage = {name for name in named if name in sent or home.get(name) in range(start, end)}
        own = _sum([each for name, each in named.items() if name in of_stage])
        costs = planned.costs[start:end]
        there, back = microbatch_seconds(context.memory_model, context.choices, stage.plan.recompute)
        shared = sum(each.forward + each.backward for name, each in named.items() if name not in of_stage)
        of_blocks = sum(each.forward + each.backward_input + each.backward_weight for each in costs)
        assert there + back - shared == pytest.approx(of_blocks, rel=1e-2)
        # A weight that two stages use is moved alone in the whole model, and in a message with others on one stage.
        assert own.once == pytest.approx(sum(each.once for each in costs), rel=1e-5)
        more = {name: each.seconds for name, each in named.items() if name not in of_stage}
        assert _sum(list(named.values())) == tuple(pytest.approx(each) for each in step_parts(stage.plan))
        found.append({name: seconds for name, seconds in more.items() if seconds > 0})
    return found


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_without_a_limit_a_stage_takes_what_its_blocks_take(axes: dict[str, int]) -> None:
    first, last = _beyond(request(axes, Schedule("1f1b", 2, 4)))
    assert not first and not last


def test_blocks_take_the_time_of_the_simulated_step_not_the_sum_of_their_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlapped(*given: Any) -> list[Task]:
        return [task if task.stream == COMPUTE else replace(task, seconds=0.0) for task in microbatch_tasks(*given)]

    requested = request({"pp": 2, "tp": 2}, Schedule("1f1b", 2, 4))
    before = planned_blocks(requested, 2).costs
    monkeypatch.setattr("autopar.planning.pipeline.block_costs.microbatch_tasks", overlapped)
    costs = planned_blocks(requested, 2).costs
    assert all(each.forward <= other.forward for each, other in zip(costs, before, strict=True))
    assert sum(each.forward for each in costs) < sum(each.forward for each in before)


def test_a_block_takes_no_less_than_its_host_launches() -> None:
    requested = request({"pp": 2}, Schedule("1f1b", 2, 4))
    launched = replace(requested, wanted=PlanRequest(hardware=replace(SLOW_DEVICES, launch_s=1e6)))
    usual, found = (planned_blocks(each, 2).costs for each in (requested, launched))
    assert [each.forward for each in found[1:3]] == [4e6] * 2, "two products, a function and a sum"
    assert all(each.forward < 1e6 for each in usual) and [each.once for each in found] == [e.once for e in usual]
    assert min(each.backward_input + each.backward_weight for each in found[1:3]) >= 4e6


@pytest.mark.parametrize("axes", MESHES[:2], ids=str)
def test_shared_calls_count_in_every_stage_and_a_tied_weight_on_both(axes: dict[str, int]) -> None:
    requested = request(axes, Schedule("1f1b", 2, 4), plain=False)
    shared = {node.name for node in shared_calls(requested.program)}
    first, last = (set(each) for each in _beyond(requested))
    assert first and first <= shared
    assert {requested.program.parameters["embedding.weight"]} < last and shared & last


# Cuts.

FORMULA_ERROR = 0.01
"""Largest relative difference between the best cut by the formula and the best simulated one."""


def _all_starts(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *cuts) for cuts in combinations(range(1, num_blocks), num_stages - 1)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_cuts_of_a_model_with_a_big_head_are_the_best_of_all(ranks: int) -> None:
    requested = request({"pp": ranks}, Schedule("1f1b", ranks, 4), vocabulary=256)
    planned, plan = planned_blocks(requested, ranks), plan_pipeline(requested)
    problem = CutProblem(planned.costs, planned.cut_seconds, requested.schedule)
    by_formula, by_simulation = {}, {}
    for starts in _all_starts(len(planned.blocks), ranks):
        named = tuple(planned.blocks[start].name for start in starts[1:])
        by_formula[starts] = cuts_of(problem, least_seconds(problem), starts).seconds
        wanted = replace(requested.wanted, pipeline=Pipeline(split_points=named))
        by_simulation[starts] = plan_pipeline(replace(requested, wanted=wanted)).seconds
    assert best_cuts(problem).seconds == pytest.approx(min(by_formula.values()), rel=1e-9)
    assert plan.seconds == pytest.approx(by_simulation[plan.starts], rel=1e-9)
    assert plan.seconds <= (1 + FORMULA_ERROR) * min(by_simulation.values())
    equal = (0, *(1 + 6 * stage // ranks for stage in range(1, ranks)))
    assert plan.starts != equal and plan.seconds < 0.95 * by_simulation[equal]


def test_named_stages_are_followed() -> None:
    plan = planned(schedule="1f1b", microbatches=4, split_points=["layers.1"])
    assert [stage.range for stage in plan.stages] == ["embedding … layers.0", "layers.1 … head"]
    assert plan.starts == (0, 2)


def test_annotated_stages_are_followed() -> None:
    free = planned(schedule="1f1b", microbatches=4)
    assert "layers.4" in free.stages[1].blocks
    pinned = autopar.annotate(Layered(), "layers.4", stage=0)
    plan = planned(model=pinned, schedule="1f1b", microbatches=4)
    assert "layers.4" in plan.stages[0].blocks and plan.seconds > free.seconds
    assert "layers.5" in plan.stages[1].blocks  # of what is left free, the best


def test_a_stage_and_a_layout_of_the_same_module_are_both_followed() -> None:
    mesh = Mesh({"pp": 2, "tp": 2})
    model = autopar.annotate(Layered(2), "layers.0.up", tp="row", stage=1)
    plan = planned(mesh, model, schedule="1f1b", microbatches=4)
    assert "layers.0" in plan.stages[1].blocks
    roles = {row.module: row.roles for row in plan.stages[1].plan.rows if row.operation == "linear"}
    assert roles["layers.0.up"] == ("row",)


# Memory.


def test_with_a_limit_layers_are_computed_again_and_every_rank_is_within_it() -> None:
    free = planned(model=Layered(4), schedule="1f1b", microbatches=4)
    seconds = [free.seconds]
    for share in (0.95, 0.75):
        limit = int(share * free.peak_bytes)
        plan = planned(model=Layered(4), schedule="1f1b", microbatches=4, memory=limit)
        assert all(plan.rank_bytes(rank) <= limit for rank in range(2))
        assert any(mode != "none" for stage in plan.stages for mode in stage.plan.recompute.values())
        assert f"limit {limit / 1e3:.2f} kB" in str(plan)
        seconds.append(plan.seconds)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_what_is_not_proven_of_large_stages_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    free = planned(model=Layered(4), schedule="1f1b", microbatches=4)
    limit = int(0.8 * free.peak_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(model=Layered(4), schedule="1f1b", microbatches=4, memory=limit)
    monkeypatch.setattr("autopar.planning.pipeline.stage_search.MOST_DECISIONS", 0)
    with pytest.warns(RuntimeWarning, match=r"large ones are not proven best: .* at most [\d.]+% of its step"):
        planned(model=Layered(4), schedule="1f1b", microbatches=4, memory=limit)


def test_stages_of_one_rank_share_its_memory() -> None:
    free = planned(model=Layered(4), schedule="zbv", microbatches=4)
    stages = map(free.schedule.stages_of, range(2))
    limit = int(0.8 * max(sum(free.stages[number].plan.peak_bytes for number in each) for each in stages))
    plan = planned(model=Layered(4), schedule="zbv", microbatches=4, memory=limit)
    assert all(plan.rank_bytes(rank) <= limit for rank in range(2))
    assert plan.starts != free.starts or any(set(stage.plan.recompute.values()) - {"none"} for stage in plan.stages)
    budgets = [stage.plan.memory_limit or 0 for stage in plan.stages]
    assert budgets[0] > budgets[3]  # one has more micro-batches in flight


def test_within_a_limit_cuts_are_moved_where_the_simulated_step_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": Layered(6, 512), "schedule": "interleaved_1f1b", "microbatches": 4}
    free = planned(**given)
    limit = int(1.22 * max(map(free.rank_bytes, range(2))))
    plan = planned(memory=limit, **given)
    assert all(plan.rank_bytes(rank) <= limit for rank in range(2))
    monkeypatch.setattr("autopar.planning.pipeline.planner.refined", lambda problem, starts, *known, **given: starts)
    by_formula = planned(memory=limit, **given)
    assert plan.starts != by_formula.starts and plan.seconds < 0.995 * by_formula.seconds


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_what_fits_by_any_cut_is_not_refused(name: str) -> None:
    """The least memory of every stage of every cut, worked out one by one, is enough; one stage a rank needs it."""
    chunks = 1 if name == "1f1b" else 2
    requested = request({"pp": 2}, Schedule(name, 2, 4, chunks), num_layers=3, vocabulary=512)
    blocks = planned_blocks(requested, requested.schedule.num_stages)
    budgets = (MemoryBudget(2**40, 2**40),) * requested.schedule.num_stages
    search = StageSearch(blocks, NEVER, budgets, (0.0,) * (len(blocks.blocks) + 1))
    least = functools.cache(search.least)
    count, needed = len(blocks.blocks), []
    for inner in combinations(range(1, count), len(budgets) - 1):
        spans = list(pairwise((0, *inner, count)))
        own = [least(first, end, stage) for stage, (first, end) in enumerate(spans)]
        needed.append(max(sum(own[stage] for stage in requested.schedule.stages_of(rank)) for rank in range(2)))

    def within(memory: int) -> PipelinePlan:
        return plan_pipeline(replace(requested, wanted=replace(requested.wanted, settings=Settings(Memory(memory)))))

    assert max(within(min(needed)).rank_bytes(rank) for rank in range(2)) <= min(needed)
    if chunks == 1:  # several stages of a rank take less than their peaks together (`PipelinePlan.rank_bytes`)
        with pytest.raises((PipelineError, InfeasibleError)):
            within(int(0.97 * min(needed)))


def test_the_first_stage_of_1f1b_keeps_more_micro_batches_than_the_last() -> None:
    plan = planned(Mesh({"pp": 3}), schedule="1f1b", microbatches=4, split_points=["layers.2", "layers.4"])
    assert [plan.schedule.in_flight(stage) for stage in range(3)] == [3, 2, 1]
    resident = [stage.plan.memory.parts.get("activations", 0) for stage in plan.stages if stage.plan.memory]
    assert resident[0] > resident[1] > resident[2]
    gpipe = planned(Mesh({"pp": 3}), schedule="gpipe", microbatches=4, split_points=["layers.2", "layers.4"])
    assert gpipe.peak_bytes > plan.peak_bytes and gpipe.seconds == pytest.approx(plan.seconds)


def test_what_fits_no_rank_is_an_error_that_says_which_stage() -> None:
    with pytest.raises(PipelineError, match=r"fits into memory: stage . does not fit even with block .* Use a longer"):
        planned(model=Layered(2), schedule="1f1b", microbatches=4, memory=20_000)


# Schedules that are left open.


@pytest.mark.slow
def test_the_recommended_schedule_is_the_best_of_all() -> None:
    free = planned(microbatches=4)
    every = {name: planned(microbatches=4, schedule=name).seconds for name in RECOMMENDED}
    assert free.seconds == pytest.approx(min(every.values()), rel=FORMULA_ERROR)
    assert free.seconds < 0.95 * every["1f1b"]


def test_the_recommended_number_of_micro_batches_is_the_best_of_all() -> None:
    free = planned(model=Layered(2), schedule="1f1b")
    every = {number: planned(model=Layered(2), schedule="1f1b", microbatches=number).seconds for number in (2, 4, 8)}
    assert free.microbatches == min(every, key=every.__getitem__) and free.seconds == every[free.microbatches]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ({"stages_per_rank": 3}, {"chunks": {3}}),
        ({"microbatches": 2}, {"num_microbatches": {2}}),
        ({"schedule": "zbv"}, {"name": {"zbv"}, "chunks": {2}}),
        ({"schedule": "interleaved_1f1b", "microbatches": 8}, {"num_microbatches": {8}, "chunks": {2}}),
        ({"schedule": "pipedream"}, {"name": {"pipedream"}, "chunks": {1}}),
    ],
    ids=str,
)
def test_what_is_wished_holds_and_the_rest_is_chosen(wish: dict[str, Any], found: dict[str, set[object]]) -> None:
    schedule = planned(**wish).schedule
    assert all(getattr(schedule, name) in values for name, values in found.items())


@pytest.mark.parametrize(
    ("specified", "stages"),
    [
        ({"split_points": ["layers.1"]}, 2),
        ({"split_points": ["layers.0", "layers.1", "head"]}, 4),
        ({"split_points": ["layers.0", "layers.1", "head"], "microbatches": 4}, 4),
    ],
    ids=str,
)
def test_the_recommended_schedule_has_as_many_stages_as_are_named(specified: dict[str, Any], stages: int) -> None:
    plan = planned(model=Layered(2), **specified)
    assert plan.schedule.num_stages == stages
    assert [stage.blocks[0] for stage in plan.stages[1:]] == specified["split_points"]


def test_the_recommended_schedule_goes_with_annotated_stages() -> None:
    plan = planned(model=autopar.annotate(Layered(2), "head", stage=1), microbatches=4)
    assert plan.schedule.num_stages == 2 and "head" in plan.stages[1].blocks


@pytest.mark.slow
def test_a_limit_that_the_fastest_schedule_does_not_keep_to_gives_a_slower_one() -> None:
    free = planned(model=Layered(4), microbatches=4)
    limit = int(0.7 * free.peak_bytes)
    plan = planned(model=Layered(4), microbatches=4, memory=limit)
    assert plan.peak_bytes <= limit and plan.seconds > free.seconds


# Plans that are kept.


def test_a_plan_that_is_read_again_is_equal_and_can_be_run(tmp_path: Path) -> None:
    requested = request({"pp": 2, "tp": 2}, Schedule("1f1b", 2, 4))
    plan = plan_pipeline(requested)
    plan.save(tmp_path / "plan.json")
    loaded = PipelinePlan.load(tmp_path / "plan.json")
    assert loaded == plan == PipelinePlan.from_json(plan.to_json())
    programs = split(requested.program, planned_blocks(requested, 2).blocks, loaded.starts)
    for program, stage in zip(programs, loaded.stages, strict=True):
        _, choices = stage_space(requested, program, stage.plan)
        assert choices == context_of(plan.stages[stage.number].plan).choices


@pytest.mark.slow
def test_a_plan_is_the_same_twice_and_in_another_process() -> None:
    script = f"from {HERE} import _digest; print(_digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert _digest() == _digest() == ran.stdout.strip()


def _digest() -> str:
    text = planned(Mesh({"pp": 2, "tp": 2}), schedule="zbv", microbatches=4).to_json()
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_plan_of_another_model_is_refused() -> None:
    plan, other = plan_pipeline(request({"pp": 2}, Schedule("1f1b", 2, 4))), program_of(vocabulary=32)
    blocks = planned_blocks(request({"pp": 2}, Schedule("1f1b", 2, 4), vocabulary=32), 2).blocks
    stage = split(other, blocks, plan.starts)[0]
    with pytest.raises(PlanError, match="the plan belongs to another model or other inputs"):
        stage_space(request({"pp": 2}, Schedule("1f1b", 2, 4), vocabulary=32), stage, plan.stages[0].plan)


def test_a_plan_in_one_piece_is_refused_where_there_is_a_pipeline() -> None:
    plan = autopar.plan(Layered(2), Mesh({"dp": 2}), inputs())
    with pytest.raises(PipelineError, match="the plan is a Plan without stages; plan again"):
        pipeline_plan_of(plan)
    assert pipeline_plan_of(None) is None


def test_a_wish_next_to_a_plan_must_be_that_of_the_plan() -> None:
    plan = planned(model=Layered(2), schedule="1f1b", microbatches=4)
    check_wish(Wish("1f1b", 4), plan)
    with pytest.raises(
        PipelineError, match=r"the plan is for schedule, microbatches and stages_per_rank \('1f1b', 4, 1\)"
    ):
        check_wish(Wish("1f1b", 8), plan)


# What is refused.


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (
            {"pp": 2},
            {"pipeline": "stages"},
            "pipeline=\"stages\" is no axis of the mesh, whose axes are 'pp'; name one",
        ),
        ({"pp": 2}, {"schedule": "1f1b", "microbatches": 3}, "a batch of 16 samples does not divide into 3"),
        ({"pp": 2}, {"microbatches": 3}, "a batch of 16 samples does not divide into 3"),
        ({"pp": 2}, {"schedule": "1f1b", "microbatches": 1}, "found 1 micro-batches for 2 stages"),
        ({"pp": 2}, {"schedule": "zbv", "microbatches": 4, "stages_per_rank": 3}, '"zbv" needs two stages per rank'),
        ({"pp": 2}, {"schedule": "zbv", "microbatches": 4, "split_points": ["layers.1"]}, "needed a list of 3 names"),
        ({"pp": 2}, {"schedule": "1f1b", "microbatches": 4, "split_points": ["nowhere"]}, "nowhere"),
        ({"pp": 2}, {"split_points": ["layers.0", "layers.1"]}, "found 2, needed a list of 1 names"),
        ({"pp": 64}, {"schedule": "gpipe", "microbatches": 4}, "found 64 pipeline stages for"),
        ({"dp": 2}, {"schedule": "1f1b"}, "(schedule='1f1b') is given, but no axis of the mesh dp=2 is a pipeline"),
        ({"dp": 2}, {"stages_per_rank": 2}, "Pipeline(stages_per_rank=2) is given"),
        ({"dp": 2}, {"split_points": ["layers.1"]}, "Pipeline(split_points=('layers.1',)) is given"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(mesh: dict[str, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises((PipelineError, InputError, AnnotationError)) as raised:
        autopar.plan(Layered(2), Mesh(mesh), inputs(), hardware=SLOW_DEVICES, **by_flag(**options))
    assert message in str(raised.value)


def test_a_stage_is_no_question_to_one_piece() -> None:
    plan = autopar.plan(Layered(2), Mesh({"tp": 2}), inputs(), hardware=SLOW_DEVICES)
    assert isinstance(plan, Plan)
    with pytest.raises(PipelineError, match=r"found stage 1, and what_if plans one piece .* without cutting it"):
        plan.what_if("layers.1", stage=1)
    stage = planned(model=Layered(2), schedule="1f1b", microbatches=4).stages[0].plan
    with pytest.raises(PipelineError, match=r'autopar.annotate\(model, "embedding", stage=0\)'):
        stage.what_if("embedding", stage=0)
