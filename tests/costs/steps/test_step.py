"""The tasks of a step: they take what the planner says, and they gain by what overlaps with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.costs.hardware.collectives import Transfer
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing import message_sizes as messages
from autopar.costs.steps import calls
from autopar.costs.steps.step import microbatch_seconds, step_tasks
from autopar.costs.steps.tasks import Tasks
from autopar.costs.timeline.simulation import simulate
from autopar.costs.timeline.values import COMPUTE, Timeline
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.options.groups import Prefetch
from autopar.planning.settings import context_of
from autopar.planning.step_seconds import step_seconds_of
from tests.runtime.rewrite.test_prefetch import LAYERS, WIDTH, Stack
from tests.support.options import by_flag
from tests.support.parity import FAMILIES

IN_TURNS = Hardware("all in turns", {"float32": 1e9}, 1e9, 10**12, 0.0, (Link("wire", None, 0.0, 1e9),))
"""No message has a latency, which many share or not, and nothing overlaps with compute."""
OVERLAPPED = replace(IN_TURNS, name="collectives beside computing", communication_share=0.0)
LOCAL_MOVES = 1e-4  # of a step: the planner gives each move a nanosecond


def _stack(hardware: Hardware, axes: dict[str, int] | None = None, **options: Any) -> Plan:
    return autopar.plan(
        Stack(), Mesh(axes or {"dp": 2}), (torch.zeros(64, WIDTH),), hardware=hardware, **by_flag(**options)
    )


def _family(name: str, axes: dict[str, int], **options: Any) -> Plan:
    args, kwargs = FAMILIES[name].inputs(0)
    return autopar.plan(FAMILIES[name].build(), Mesh(axes), args or kwargs, hardware=IN_TURNS, **by_flag(**options))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "axes", "options"),
    [
        ("llama", {"dp": 2}, {"strategy": "zero3"}),
        ("llama", {"dp": 2, "tp": 2}, {"strategy": "fsdp_megatron", "recompute": "full"}),
        ("llama", {"cp": 2}, {"strategy": "ring"}),
        ("llama", {"dp": 2}, {"strategy": "zero3", "precision": "bf16-mixed"}),
        ("resnet", {"dp": 2, "tp": 2}, {}),
    ],
    ids=str,
)
def test_a_step_in_which_nothing_runs_next_to_another_takes_the_sum(
    family: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    plan = _family(family, axes, **options)
    assert plan.timeline().hidden == pytest.approx(0.0, abs=1e-9)
    assert plan.timeline().seconds == pytest.approx(plan.seconds, rel=LOCAL_MOVES)


def test_nothing_of_a_loss_waits_for_the_host_that_comes_last() -> None:
    (edge,) = OVERLAPPED.links
    late = replace(OVERLAPPED, links=(replace(edge, straggling_s=1e3),))
    args, kwargs = FAMILIES["llama"].inputs(0)
    plan = autopar.plan(
        FAMILIES["llama"].build(), Mesh({"dp": 2}), args or kwargs, hardware=late, strategy="data_parallel"
    )
    context = context_of(plan)
    assert plan.seconds < 1e3
    assert plan.timeline().seconds < 1e3
    assert sum(microbatch_seconds(context.memory_model, context.choices, plan.recompute)) < 1e3
    assert plan.reprice().seconds == pytest.approx(plan.seconds)


def _moved(timeline: Timeline) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for each in timeline.events:
        if each.task.stream != COMPUTE:
            found[each.task.name, each.task.axis] += each.task.num_bytes
    return found


@pytest.mark.parametrize("strategy", ["zero3", "data_parallel", "hsdp", "fsdp_megatron", None])
def test_its_collectives_move_the_bytes_of_the_plan(strategy: str | None) -> None:
    options = {} if strategy is None else {"strategy": strategy}
    plan = _stack(IN_TURNS, {"dp": 2, "tp": 2}, **options)
    assert plan.traffic
    assert _moved(plan.timeline()) == {key: count for key, count in plan.traffic.items() if count}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weights_that_are_fetched_further_ahead_are_waited_for_less(recompute: str) -> None:
    def seconds(depth: Prefetch) -> float:
        return _stack(OVERLAPPED, strategy="zero3", prefetch=depth, recompute=recompute).timeline().seconds

    none, one, two = map(seconds, (0, 1, 2))
    assert two <= one * (1 + 1e-9) and one < none
    computing = _stack(OVERLAPPED, strategy="zero3", recompute=recompute).timeline().computing
    assert computing < two


def test_only_the_first_gather_and_the_last_message_of_gradients_are_waited_for_where_links_are_fast() -> None:
    fast = replace(OVERLAPPED, links=(Link("wire", None, 0.0, 1e10),))
    timeline = _stack(fast, strategy="zero3", prefetch=1).timeline()
    waited = [(n, each.task.name) for n, each in enumerate(timeline.events) if each.waited > 1e-12]
    gathers = [n for n, each in enumerate(timeline.events) if each.task.name == "all_gather"]
    assert {n for n, name in waited if name == "all_gather"} <= {gathers[0], gathers[LAYERS + 1]}
    assert [name for _, name in waited if name == "reduce_scatter"] == ["reduce_scatter"]


def test_gradients_of_data_parallelism_are_reduced_next_to_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SMALLEST_MESSAGE", 1)  # two messages, the first of the layers that come last
    plan = _stack(OVERLAPPED, strategy="data_parallel")
    in_turns = _stack(IN_TURNS, strategy="data_parallel").seconds
    first, last = (each for each in plan.timeline().events if each.task.num_bytes > 64)
    assert (first.waited, last.waited) == (0.0, pytest.approx(last.task.seconds))
    assert plan.timeline().seconds == pytest.approx(in_turns - first.task.seconds, rel=LOCAL_MOVES)
    assert plan.seconds < in_turns


def test_a_host_that_launches_slowly_is_waited_for_and_views_take_a_launch_too() -> None:
    args, kwargs = FAMILIES["llama"].inputs(0)
    slow = replace(IN_TURNS, launch_s=1.0)
    timeline = autopar.plan(
        FAMILIES["llama"].build(), Mesh({"dp": 1}), args or kwargs, hardware=slow, strategy="fully_replicated"
    ).timeline()
    launches = sum(each.task.launch for each in timeline.events)
    assert launches == pytest.approx(timeline.seconds, rel=1e-2) and timeline.launching > 0.99 * launches
    names = Counter(each.task.name for each in timeline.events)
    assert names["transpose"] and names["linear"]


def test_a_view_takes_a_moment_where_the_device_is_its_own_host() -> None:
    args, kwargs = FAMILIES["llama"].inputs(0)
    plan = autopar.plan(
        FAMILIES["llama"].build(), Mesh({"dp": 1}), args or kwargs, hardware=load("cpu"), strategy="fully_replicated"
    )
    views = [each for each in plan.timeline().events if each.task.name == "transpose"]
    assert views and all(each.task.seconds == load("cpu").op_latency_s for each in views)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("strategy", ["zero3", "data_parallel", "fsdp_megatron"])
def test_a_micro_batch_takes_its_parts_of_the_sum_where_nothing_runs_next_to_another(
    strategy: str, recompute: str
) -> None:
    plan = _stack(IN_TURNS, {"dp": 2, "tp": 2}, strategy=strategy, recompute=recompute)
    context = context_of(plan)
    parts = step_seconds_of(context.memory_model, context.choices, plan.recompute)
    found = microbatch_seconds(context.memory_model, context.choices, plan.recompute)
    assert found == pytest.approx((parts.forward, parts.backward), rel=10 * LOCAL_MOVES)
    assert sum(found) < plan.timeline().seconds


def test_the_host_that_comes_last_is_waited_for_with_each_collective_that_is_waited_for() -> None:
    """Check the launch times on 8 ranks in nodes of 4.

    Each further device of a node, and each further node, adds its lateness to the launch.
    """
    links = Link("node", 4, 0.0, 1e9, straggling_s=0.5), Link("wire", None, 0.0, 1e9, straggling_s=10.0)
    tasks = Tasks(Mesh({"dp": 2, "tp": 4}), replace(IN_TURNS, launch_s=1.0, links=links))
    tasks.compute("mm", 1.0, "row")
    for axis in ("dp", "tp", "dp_tp"):
        tasks.move([Transfer("all_reduce", axis, 1024)], "row")
    tasks.issue(Transfer("all_reduce", "dp_tp", 1024), "row")
    tasks.move([Transfer("all_reduce", "dp", 1024)], "row", exposed=0.5)
    assert [each.launch for each in tasks.found] == [1.0, 11.0, 2.5, 12.5, 1.0, 6.0]


@pytest.mark.parametrize("hardware", [IN_TURNS, OVERLAPPED], ids=lambda each: each.name)
def test_the_messages_of_a_long_ring_are_one_task_of_as_many_seconds(
    hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, kwargs = FAMILIES["llama"].inputs(0)
    plan = autopar.plan(FAMILIES["llama"].build(), Mesh({"cp": 4}), args or kwargs, hardware=hardware, strategy="ring")
    context = context_of(plan)
    apart, together = [], []
    for most, tasks in ((64, apart), (0, together)):
        monkeypatch.setattr(calls, "MOST_APART", most)
        tasks += step_tasks(context.memory_model, context.choices, plan.recompute)
    assert len(together) < len(apart)
    assert sum(each.seconds for each in together) == pytest.approx(sum(each.seconds for each in apart))
    assert sum(each.num_bytes for each in together) == pytest.approx(sum(each.num_bytes for each in apart), rel=0.01)
    assert simulate(together).seconds == pytest.approx(simulate(apart).seconds, rel=0.02)


def test_a_host_checks_each_collective_once_rank_after_rank_and_no_message() -> None:
    links = Link("node", 4, 0.0, 1e9), Link("wire", None, 0.0, 1e9)
    tasks = Tasks(Mesh({"dp": 2, "tp": 4}), replace(IN_TURNS, launch_s=1.0, links=links, collective_check_s=0.5))
    tasks.compute("mm", 1.0, "row")
    for axis in ("dp", "tp", "dp_tp"):
        tasks.move([Transfer("all_reduce", axis, 1024)], "row")
    tasks.issue(Transfer("all_gather", "tp", 1024), "row", weights=True)
    tasks.move([Transfer("permute", "tp", 1024)], "row")
    tasks.move([Transfer("all_gather", "tp", 1024)], "row", times=0.5, exposed=0.5)  # the rest of one that has begun
    assert [each.launch for each in tasks.found] == [1.0, 2.0, 3.0, 5.0, 3.0, 1.0, 1.0]
