"""Estimates of steps compared with exact plans, and the use that mesh="auto" makes of them."""

from __future__ import annotations

import gc
import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import autopar
from autopar.compiler.offline import not_estimated, subject_of
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.costs.hardware.profile import Link
from autopar.costs.memory.model import MemoryModel
from autopar.costs.space.space import Space
from autopar.errors import AutoparError, InfeasibleError, TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning.mesh_estimates.estimates import Candidate, Estimate, Estimates
from autopar.planning.mesh_estimates.inner import PRICES, Inner, Level
from autopar.planning.mesh_estimates.planned import Exact
from autopar.planning.mesh_search.search import Turn
from autopar.planning.options.groups import Memory, Pipeline, Recompute, Search
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from autopar.solver.deadline import after, seconds_until
from tests.support.parity import SLOW_DEVICES

LAYERS, BATCH, SEQUENCE = 9, 16, 64
LIMIT = 35_000_000
WITHIN, BYTES_WITHIN = 0.12, 0.2


def estimates_of(
    memory: int | None,
    pipeline: Pipeline = Pipeline("pp"),
    batch: int = BATCH,
    sequence: int = SEQUENCE,
    devices: int = 4,
    max_axes: int = 2,
    recompute: Recompute = "auto",
    **requested: Any,
) -> tuple[Estimates, Exact]:
    settings = Settings(Memory(memory, recompute=recompute), Search(time_limit=1000, max_axes=max_axes))
    request = PlanRequest(**{"hardware": SLOW_DEVICES, **requested}, settings=settings, pipeline=pipeline)
    planner = OfflinePlanner(*built_in("tiny-llama", batch, sequence, LAYERS), request, PlanCache())
    assert not not_estimated(planner)
    subject, exact = subject_of(planner, "auto", devices)
    return Estimates(subject, float("inf")), exact


def planned(exact: Exact, estimate: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exact(estimate, Turn(100))


@pytest.mark.sample(2)
@pytest.mark.parametrize("memory", [None, LIMIT], ids=["no limit", "limit"])
@pytest.mark.parametrize(
    ("axes", "count"), [({"dp": 4}, 1), ({"dp": 2, "tp": 2}, 1), ({"pp": 2, "dp": 2}, 8), ({"pp": 4}, 8)], ids=str
)
def test_an_estimate_is_near_the_exact_plan(axes: dict[str, int], count: int, memory: int | None) -> None:
    estimates, exact = estimates_of(memory, Pipeline("pp", "1f1b" if "pp" in axes else None))
    mesh = next(each for each in estimates.subject.meshes if each.axes == axes)
    if memory is not None and "pp" not in axes:
        count = 2
    found = estimates.estimate(Candidate(mesh, count))
    assert found is not None
    made = planned(exact, found)
    assert found.seconds == pytest.approx(made.seconds, rel=WITHIN)
    assert found.num_bytes == pytest.approx(made.plan.peak_bytes, rel=BYTES_WITHIN)


@pytest.mark.slow
def test_gradients_of_weights_fill_bubbles_of_one_micro_batch_for_as_long_as_they_take() -> None:
    estimates, exact = estimates_of(None, Pipeline("pp", "interleaved_zero_bubble", 2), sequence=2048)
    mesh = next(each for each in estimates.subject.meshes if each.axes == {"pp": 2, "dp": 2})
    found = estimates.estimate(Candidate(mesh, 1))
    assert found is not None
    assert found.seconds == pytest.approx(planned(exact, found).seconds, rel=0.03)


@pytest.mark.parametrize("has_stages", [False, True])
def test_of_a_candidate_its_numbers_alone_stay_without_the_cyclic_collector(has_stages: bool) -> None:
    def large() -> Counter[str]:
        return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, MemoryModel | Space))

    estimates, exact = estimates_of(None, devices=8, max_axes=3)
    mesh = next(m for m in estimates.subject.meshes if m.sizes == (2, 2, 2) and ("pp" in m.axes) == has_stages)
    gc.collect()
    gc.disable()
    try:
        before = large()
        estimates._try(Candidate(mesh, 2 if has_stages else 1))
        estimate = estimates.found[Candidate(mesh, 2 if has_stages else 1)]
        assert estimate is not None and large() == before
        seconds = planned(exact, estimate).seconds
        assert seconds > 0 and large() == before
    finally:
        gc.enable()


def test_positions_of_causal_attention_are_zigzag_in_an_estimate_as_in_a_plan() -> None:
    estimates, exact = estimates_of(None, batch=2, devices=8)
    mesh = next(each for each in estimates.subject.meshes if each.axes == {"dp": 8})
    found, inner = estimated_with(estimates, Candidate(mesh, 1))
    levels = [level for each in inner for level in each._levels.values()]
    assert {each.memory.space.zigzag_axes for each in levels} == {planned(exact, found).plan.zigzag_axes} == {("dp",)}


def estimated_with(estimates: Estimates, candidate: Candidate) -> tuple[Estimate | None, list[Inner]]:
    """Return the estimate of a candidate, and the shorter models that it was made with."""
    made: list[Inner] = []

    def programs(*given: Any) -> Iterator[Inner]:
        for each in Estimates._programs(estimates, *given):
            made.append(each)
            yield each

    with mock.patch.object(estimates, "_programs", programs):
        return estimates.estimate(candidate), made


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_stage_that_receives_its_first_input_does_not_save_it_again(recompute: Recompute) -> None:
    estimates, _ = estimates_of(10 * LIMIT, recompute=recompute)
    mesh = next(each for each in estimates.subject.meshes if each.axes == {"pp": 2, "dp": 2})
    found = estimates.estimate(Candidate(mesh, 4))
    assert found is not None
    use, cut = found.uses[0], LAYERS // 2
    assert use.mode == recompute and use.arriving[cut] == pytest.approx(use.sent[cut]) and use.sent[cut] > 0
    (whole,), (first, last) = (use.stages(starts).saved for starts in ([0], [0, cut]))
    assert first + last + use.sent[cut] == pytest.approx(whole)


def _hidden_by_half() -> tuple[Estimate | None, Inner]:
    """Return an estimate where weights move slowly, overlapped with computing, and its plans."""
    hardware = replace(SLOW_DEVICES, links=(Link("wire", None, 0.0, 3e5),), communication_share=0.5)
    estimates, _ = estimates_of(None, hardware=hardware)
    mesh = next(each for each in estimates.subject.meshes if each.axes == {"dp": 2, "tp": 2})
    found, inner = estimated_with(estimates, Candidate(mesh, 2))
    return found, inner[0]


def test_an_estimate_is_of_the_plan_with_the_shortest_simulated_step() -> None:
    found, inner = _hidden_by_half()
    (first,) = inner._levels.values()
    assert found is not None and found.seconds < 0.97 * first.simulated_seconds
    assert found.seconds == min(each.simulated_seconds for each in inner._simulated.values())


def test_of_plans_by_simulated_costs_one_within_the_limit_is_taken() -> None:
    _, inner = _hidden_by_half()
    stated, pins = inner._laid_out(None)
    largest, smallest = (inner._solved(stated, pins, each, False, LIMIT) for each in (PRICES[0], PRICES[-1]))
    most = (largest.num_bytes + smallest.num_bytes) / 2
    found = inner._within(stated, pins, (PRICES[0], False), most, LIMIT)
    assert found.num_bytes <= most < largest.num_bytes and found.simulated_seconds <= smallest.simulated_seconds


@pytest.mark.parametrize("costs", [((1.0, 5.0), (2.0, 5.0)), ((2.0, 5.0), (1.0, 4.0))])
def test_no_price_is_between_plans_of_which_one_is_no_worse_in_time_and_memory(
    costs: tuple[tuple[float, float], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches end at a gap, so that one at a higher price may save nothing, or find a faster plan."""
    _, inner = _hidden_by_half()
    levels = [
        SimpleNamespace(cost=cost, num_bytes=num_bytes, simulated_seconds=1.0, choices=(num_bytes,))
        for cost, num_bytes in zip(costs, (9, 7), strict=True)
    ]
    found = iter(levels)
    monkeypatch.setattr(inner, "_solved", lambda *_: next(found))
    assert inner._within(*inner._laid_out(None), (PRICES[0], False), 8, LIMIT) is levels[1]


def test_an_estimate_is_searched_with_positions_in_order_as_a_plan_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions in order are taken where the simulated step is no longer, as `shortest_simulated` decides."""
    _, inner = _hidden_by_half()
    (key, first), *_ = inner._levels.items()
    given: list[object] = []

    def shortest(best: Level, again: object, deadline: float, space: Space | None) -> Level:
        given.append((best, space))
        return best

    monkeypatch.setattr(inner, "_in_order", lambda level: frozenset())
    monkeypatch.setattr("autopar.planning.mesh_estimates.inner.shortest_simulated", shortest)
    assert inner._as_simulated(first, key, math.inf) is first
    assert given == [(first, inner._laid_out(frozenset())[0].space)]


@pytest.mark.parametrize("axes", [{"dp": 4}, {"pp": 2, "dp": 2}], ids=str)
def test_of_a_candidate_that_is_left_out_the_step_within_its_limit_is_known(axes: dict[str, int]) -> None:
    estimates, _ = estimates_of(LIMIT)
    mesh = next(each for each in estimates.subject.meshes if each.axes == axes)
    found = estimates.estimate(Candidate(mesh, 2))
    assert found is not None and estimates.slower_at(mesh, 2) is None
    assert estimates.estimate(Candidate(mesh, 2), 1e-9) is None
    alone = estimates.slower_at(mesh, 2)
    assert alone is not None and alone < found.seconds, "the limit costs time"
    assert estimates.estimate(Candidate(mesh, 2), (alone + found.seconds) / 2) is None
    assert estimates.slower_at(mesh, 2) == found.seconds


@pytest.mark.slow
def test_a_stage_of_one_layer_waits_for_its_weights() -> None:
    overlapped = replace(SLOW_DEVICES, links=(Link("wire", None, 0.0, 1e6),), communication_share=0.0)
    estimates, exact = estimates_of(None, Pipeline("pp", "interleaved_1f1b", 5), hardware=overlapped, strategy="zero3")
    mesh = next(each for each in estimates.subject.meshes if each.axes == {"pp": 2, "dp": 2})
    found = estimates.estimate(Candidate(mesh, 2))
    assert found is not None
    assert found.seconds == pytest.approx(planned(exact, found).seconds, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "share", "within"), [("data_parallel", 0.0, 0.07), ("zero1", 0.5, 0.12)])
def test_reductions_of_a_pipeline_are_those_of_its_layers(strategy: str, share: float, within: float) -> None:
    """Gradients of replicated weights are reduced in messages of several layers; others slow the last backward."""
    overlapped = replace(SLOW_DEVICES, links=(Link("wire", None, 0.0, 2e5),), communication_share=share)
    estimates, exact = estimates_of(None, Pipeline("pp", "interleaved_1f1b", 5), hardware=overlapped, strategy=strategy)
    mesh = next(each for each in estimates.subject.meshes if each.axes == {"pp": 2, "dp": 2})
    found = estimates.estimate(Candidate(mesh, 2))
    assert found is not None
    made = planned(exact, found)
    assert found.seconds == pytest.approx(made.seconds, rel=within)
    if share:
        slowing = [each.seconds.last_backward for each in made.plan.stages]
        assert max(slowing) > 0 and found.uses[0].slowing.max() == pytest.approx(max(slowing))


@pytest.mark.slow
def test_no_candidate_is_better_than_the_answer() -> None:
    """Every mesh and number of micro-batches of four devices is planned exactly, as far as it has an estimate."""
    estimates, exact = estimates_of(LIMIT)
    every = [Candidate(mesh, count) for mesh in estimates.subject.meshes for count in estimates.counts(mesh)]
    least = float("inf")
    for each in every:
        estimate = estimates.estimate(each)
        try:
            least = min(least, planned(exact, estimate).seconds if estimate else least)
        except AutoparError:
            continue
    model, inputs = built_in("tiny-llama", BATCH, SEQUENCE, LAYERS)
    found = autopar.plan(
        model,
        "auto",
        inputs,
        devices=4,
        hardware=SLOW_DEVICES,
        memory=LIMIT,
        pipeline="pp",
        search=autopar.Search(max_axes=2),
    )
    workload = found.workload
    assert workload is not None
    seconds = found.seconds if isinstance(found, PipelinePlan) else workload.seconds
    assert seconds <= 1.01 * least


@pytest.mark.slow
def test_the_same_question_has_the_same_answer_and_a_count_of_what_was_estimated() -> None:
    model, inputs = built_in("tiny-llama", BATCH, SEQUENCE, LAYERS)
    first, second = (
        autopar.plan(model, "auto", inputs, devices=2, hardware=SLOW_DEVICES, memory=2 * LIMIT) for _ in range(2)
    )
    assert (first.mesh, first.seconds, first.comparison) == (second.mesh, second.seconds, second.comparison)
    assert first.comparison is not None and first.comparison.estimated and first.comparison.planned[0].apart is not None


@pytest.mark.slow
def test_without_a_plan_in_time_the_best_estimate_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built_in("tiny-llama", BATCH, SEQUENCE, LAYERS)

    def late(*arguments: object) -> None:
        monkeypatch.setattr("autopar.planning.mesh_estimates.planned.is_over", lambda deadline: True)
        monkeypatch.setattr("autopar.compiler.offline.is_over", lambda deadline: True)
        raise TimeLimitError("too late")

    monkeypatch.setattr(OfflinePlanner, "exact", late)
    monkeypatch.setattr("autopar.planning.mesh_estimates.estimates.EXPANDED", 0)
    with pytest.raises(
        TimeLimitError, match=r"by estimates the best candidate is \w+=\d.*, with a step of about .*longer"
    ):
        autopar.plan(model, "auto", inputs, devices=4, hardware=SLOW_DEVICES, memory=LIMIT)


def test_estimates_end_when_one_is_found_after_their_time_and_at_the_last_without_any() -> None:
    estimates, _ = estimates_of(LIMIT)
    estimates.deadline = estimates.last = 0.0
    estimates.search()
    assert not estimates.found and estimates.is_over
    estimates.last = float("inf")
    estimates.search()
    assert len(estimates.best()) == 1 and estimates.is_over


def test_without_any_estimate_in_time_no_mesh_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built_in("tiny-llama", BATCH, SEQUENCE, LAYERS)
    monkeypatch.setattr("autopar.compiler.offline.ESTIMATING", 0.0)
    monkeypatch.setattr("autopar.compiler.offline.WITHOUT_ANY", 0.0)
    with pytest.raises(TimeLimitError, match=r"time limit passed before any of \d+ meshes was estimated.*of your own"):
        autopar.plan(model, "auto", inputs, devices=4, hardware=SLOW_DEVICES, memory=LIMIT)


def test_a_pipeline_with_its_loss_in_tiles_and_without_has_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, seen = Settings(Memory(LIMIT), Search(time_limit=1000)), list[float]()
    request = PlanRequest(hardware=SLOW_DEVICES, pipeline=Pipeline("pp"), settings=settings)
    planner = OfflinePlanner(*built_in("tiny-llama", BATCH, SEQUENCE, 3), request, PlanCache())

    def asks(*arguments: object) -> PipelinePlan:
        seen.append(seconds_until(after(float("inf"))))
        raise InfeasibleError("no room")

    monkeypatch.setattr("autopar.compiler.offline_planner.pipeline_as_memory_asks", asks)
    with pytest.raises(InfeasibleError):
        short = replace(request, settings=settings.lasting(5))
        planner.in_stages(Mesh({"pp": 2, "dp": 2}, SLOW_DEVICES.name), "pp", short)
    assert len(seen) == 1 and seen[0] <= 5


def test_a_limit_below_what_is_stored_names_the_devices_that_would_do() -> None:
    model, inputs = built_in("tiny-llama", BATCH, SEQUENCE, LAYERS)
    with pytest.raises(
        InfeasibleError, match=r"on each of 2 devices, and the memory limit leaves .* for tensors"
    ) as raised:
        autopar.plan(model, "auto", inputs, devices=2, hardware=SLOW_DEVICES, memory="1MB")
    found = re.search(r"use at least (\d+) devices", str(raised.value))
    stored = 16 * sum(each.numel() for each in model.parameters())
    assert found is not None and 0.5 * stored / 1e6 < int(found[1]) < 1.5 * stored / 1e6


@pytest.mark.slow
def test_a_plan_comes_within_the_time_limit() -> None:
    model, inputs = built_in("tiny-llama", 64, SEQUENCE, 24)
    start = time.monotonic()
    found = autopar.plan(
        model, "auto", inputs, devices=64, hardware=SLOW_DEVICES, memory=LIMIT, search=autopar.Search(time_limit=40)
    )
    assert time.monotonic() - start < 1.2 * 40
    assert found.mesh.num_devices == 64


def test_a_mesh_of_one_axis_joins_those_that_split_the_same() -> None:
    estimates, _ = estimates_of(None)
    one, two = (
        estimates.estimate(Candidate(Mesh(axes, SLOW_DEVICES.name), 1)) for axes in ({"dp": 4}, {"dp": 2, "tp": 2})
    )
    assert one is not None and two is not None
    assert one.seconds <= two.seconds * 1.2


@pytest.mark.parametrize("best", [{"dp": 2, "tp": 2, "sp": 4}, {"pp": 4, "dp": 2, "tp": 2}], ids=str)
def test_neighbours_of_the_best_are_estimated_before_those_of_others(
    best: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds grow with the distance of a mesh from the best one; three axes do not wait for all of two."""
    request = PlanRequest(
        hardware=SLOW_DEVICES, settings=Settings(Memory(LIMIT), Search(1000, max_axes=3)), pipeline=Pipeline("pp")
    )
    planner = OfflinePlanner(*built_in("tiny-llama", BATCH, SEQUENCE, LAYERS), request, PlanCache())
    estimates = Estimates(subject_of(planner, "auto", 16)[0], float("inf"))

    def away(mesh: Mesh) -> float:
        sizes = ((mesh.axes.get(axis, 1), best.get(axis, 1)) for axis in ("pp", "dp", "tp", "sp"))
        return sum(abs(one.bit_length() - other.bit_length()) for one, other in sizes)

    def estimate(candidate: Candidate, below: float) -> Estimate:
        return Estimate(*candidate, 100 + away(candidate.mesh) + candidate.microbatches / 1000, 0.0, None)

    monkeypatch.setattr(estimates, "estimate", estimate)
    estimates.search()
    order = list(estimates.found)
    assert estimates.best()[0].mesh.axes == best
    found = next(place for place, each in enumerate(order) if each.mesh.axes == best)
    assert found < 0.45 * len(order)


def test_candidates_that_do_not_divide_the_batch_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates, _ = estimates_of(None, devices=36)

    def divides(candidate: Candidate) -> bool:
        """Return whether the first axis divides a micro-batch, or a stage is on one host."""
        axes = candidate.mesh.axes
        if 36 / axes.get("pp", 1) <= 8:
            return True
        return BATCH % (candidate.microbatches * next(size for axis, size in axes.items() if axis != "pp")) == 0

    assert all(map(divides, estimates._first_candidates()))

    def estimate(each: Candidate, below: float) -> Estimate:
        return Estimate(each.mesh, each.microbatches, float(each.mesh.ndim), 0.0, None)

    monkeypatch.setattr(estimates, "estimate", estimate)
    estimates.search()
    tried = [divides(each) for each in estimates.found]
    assert True in tried and False in tried
    first = tried.index(False)
    assert sum(tried[:first]) > 0.8 * sum(tried)


def test_stages_of_one_host_begin_with_data_and_with_tensor_parallelism() -> None:
    estimates, _ = estimates_of(None, devices=16)
    counts = [each.microbatches for each in estimates._first_candidates() if each.mesh.axes == {"pp": 2, "dp": 8}]
    assert min(counts) == BATCH // 8 and max(counts) == BATCH


def test_pipelines_with_too_few_samples_for_all_hosts_begin_with_a_third_axis() -> None:
    estimates, _ = estimates_of(None, devices=32 * BATCH, max_axes=3)
    first = {(each.mesh.axes["pp"], each.mesh.axes["dp"]): each for each in estimates._of_few_samples()}
    assert first.keys() == {(length, BATCH // length) for length in (2, 4, 8)}
    for (length, samples), each in first.items():
        assert list(each.mesh.axes.values()) == [length, samples, 4, 8] and each.microbatches == length
        assert each in set(estimates._first_candidates())
    enough, _ = estimates_of(None, devices=2 * BATCH, max_axes=3)
    assert not list(enough._of_few_samples())


@pytest.mark.parametrize(("memory", "num_programs"), [(None, 1), (16 * 2**20, 2), (2**30, 1)])
def test_losses_in_tiles_are_estimated_where_logits_are_a_part_of_the_limit(
    memory: int | None, num_programs: int
) -> None:
    estimates, _ = estimates_of(memory)
    assert len(list(estimates._programs(Candidate(Mesh({"dp": 4}), 1)))) == num_programs


def test_a_candidate_is_bounded_by_its_own_micro_batches() -> None:
    """Tensor parallelism leaves a stage's devices more micro-batches than a sample for each would."""
    estimates, _ = estimates_of(None)
    subject = estimates.subject
    first, mesh = subject.meshes[0], next(each for each in subject.meshes if each.axes == {"pp": 2, "dp": 2})
    few, many = Candidate(mesh, 4), Candidate(mesh, 16)
    least = (subject.at_least(*few) + subject.at_least(*many)) / 2
    estimates.found[Candidate(first, 1)] = Estimate(first, 1, least, num_bytes=0.0, schedule=None)
    with mock.patch.object(estimates, "estimate", return_value=None) as estimated:
        estimates._try(few)
        estimates._try(many)
    assert [call.args[0] for call in estimated.call_args_list] == [many]
