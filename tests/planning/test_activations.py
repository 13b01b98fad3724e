"""Plans whose layers send what they save for their backward to the host: where, at which price, and refusals."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.cli import main
from autopar.costs.hardware.load import load
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import bytes_by_moment, memory_use
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.program.recompute_segments import MODES, OFFLOAD
from autopar.planning.formulation import Formulation
from autopar.planning.options.groups import Memory
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings, context_of
from autopar.planning.step_seconds import step_seconds_of
from autopar.views.report.html import page
from tests.support.options import by_flag
from tests.support.towers import tower

FAST_LINK = replace(load("h100"), name="h100", host_link_bytes_per_s=1e15, host_memory_bytes_per_s=1e16, launch_s=6e-6)
"""Copies take next to nothing."""
SLOW_LINK = replace(FAST_LINK, host_link_bytes_per_s=1e6)
DOWN, UP = "device to host", "host to device"


def _planned(mesh: dict[str, int] | None = None, depth: int = 6, **options: Any) -> Plan:
    on = autopar.Mesh(mesh or {"dp": 2}, hardware="h100")
    inputs = (torch.zeros(4096, 64),)
    requested: dict[str, Any] = {"optimizer": "sgd", "hardware": "h100", "memory_conventions": "tensors", **options}
    return autopar.plan(tower(depth, 64, "meta"), on, inputs, **by_flag(**requested))


@functools.cache
def _peak() -> int:
    """Return the peak bytes of the best plan that saves everything."""
    return _planned(strategy="zero3").peak_bytes


def test_activations_leave_the_device_and_are_on_the_host() -> None:
    here, there = (_planned(strategy="zero3", offload=each) for each in ("none", "activations"))
    assert here.offload == "none" and not here.recompute and not here.host
    assert there.offload == "activations" and set(there.recompute.values()) == {OFFLOAD}
    assert there.choices == here.choices and there.device_seconds >= here.device_seconds
    assert there.peak_bytes < 0.7 * here.peak_bytes
    rows, before = ({row.name: row.saved_bytes for row in plan.rows} for plan in (there, here))
    assert there.host == {"activations": sum(before.values()) - sum(rows.values())}


def test_what_a_limit_asks_for_leaves_where_copies_are_cheaper_than_computing_again() -> None:
    limit = int(0.75 * _peak())
    fast, slow = (
        _planned(strategy="zero3", memory=limit, offload="activations", hardware=each)
        for each in (FAST_LINK, SLOW_LINK)
    )
    assert fast.offload == "activations" and OFFLOAD in fast.recompute.values()
    assert slow.offload == "none" and set(slow.recompute.values()) - {"none"} <= {"selective", "full"}
    for found in (fast, slow):
        assert found.peak_bytes <= limit and found.gap == 0 and found.verify().ok
    assert fast.seconds < slow.seconds
    alone = _planned(strategy="zero3", memory=limit, hardware=SLOW_LINK)
    assert slow.seconds == pytest.approx(alone.seconds, rel=1e-9)
    (note,) = [each for each in fast.notes if "on the host" in each]
    assert note.startswith("what layers save for their backward is on the host") and "without a limit takes" in note


def test_the_cheapest_is_taken_of_itself() -> None:
    limit = int(0.75 * _peak())
    found = _planned(strategy="zero3", memory=limit, offload="auto", optimizer="adamw", hardware=FAST_LINK)
    assert OFFLOAD in found.recompute.values() or found.offloads_optimizer
    assert found.peak_bytes <= limit and found.verify().ok
    slow = _planned(strategy="zero3", memory=limit, offload="auto", optimizer="adamw", hardware=SLOW_LINK)
    assert slow.offload == "none" and slow.seconds >= found.seconds


def test_where_nothing_is_computed_again_a_slow_link_is_better_than_no_plan() -> None:
    limit = int(0.6 * _peak())
    specified: dict[str, Any] = {"strategy": "zero3", "memory": limit, "recompute": "none", "hardware": SLOW_LINK}
    with pytest.raises(InfeasibleError):
        _planned(**specified)
    found = _planned(**specified, offload="activations")
    assert set(found.recompute.values()) == {"none", OFFLOAD} and found.peak_bytes <= limit


@pytest.mark.parametrize(
    ("hardware", "share"), [("h100", 0.75), pytest.param("gb200", 0.9, marks=pytest.mark.slow), ("cpu", 0.8)]
)
def test_the_modes_are_the_best_of_all_combinations(hardware: str, share: float) -> None:
    free = context_of(_planned(depth=3, strategy="zero3", hardware=hardware))
    pins = {
        number: np.arange(len(decision.candidates.strategies)) == choice
        for number, (decision, choice) in enumerate(zip(free.space.decisions, free.choices, strict=True))
    }
    kept, _ = make_plan(free.space, pins, Settings(Memory(prefetch=0)))
    limit = int(share * kept.peak_bytes)
    plan, choices = make_plan(free.space, pins, Settings(Memory(limit, prefetch=0), activations="may_offload"))
    memory = context_of(plan).memory_model
    costs = {}
    for combination in itertools.product(MODES, repeat=len(memory.lifetimes.segments)):
        modes = dict(zip(memory.lifetimes.segments, combination, strict=True))
        if memory_use(memory, choices, modes)[0] <= limit:
            costs[combination] = step_seconds_of(memory, choices, modes).seconds
    assert plan.seconds == pytest.approx(min(costs.values()), rel=1e-9)
    assert costs[tuple(plan.recompute.values())] == pytest.approx(plan.seconds, rel=1e-9)
    assert len(costs) < len(MODES) ** 3 and any(OFFLOAD in each for each in costs)


@pytest.mark.parametrize(("mesh", "hardware"), [({"dp": 2}, "cpu"), ({"dp": 2, "tp": 2}, SLOW_LINK)])
def test_sum_formula_and_rows_agree(mesh: dict[str, int], hardware: Any) -> None:
    plan = _planned(mesh, offload="activations", hardware=hardware)
    again = plan.reprice(**plan.with_formulas().symbols)
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert sum(row.seconds for row in plan.rows) + plan.host_seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert again.memory["host_bytes"] == plan.host_bytes
    assert again.memory["memory"] == plan.peak_bytes


def test_the_timeline_has_the_copies_next_to_what_computes() -> None:
    keeps = _planned(strategy="zero3", hardware=FAST_LINK).timeline()
    fast = _planned(strategy="zero3", offload="activations", hardware=FAST_LINK).timeline()
    assert fast.seconds == pytest.approx(keeps.seconds, rel=1e-3)
    found = _planned(strategy="zero3", offload="activations", hardware=replace(FAST_LINK, host_link_bytes_per_s=1e11))
    events = found.timeline().events
    downs = [each for each in events if each.task.stream == DOWN]
    ups = [each for each in events if each.task.stream == UP]
    assert {each.task.phase for each in downs} == {"forward"} and {each.task.phase for each in ups} == {"backward"}
    assert len(ups) == len(found.recompute) == 6
    sent = sum(each.task.seconds for each in downs)
    assert sent == pytest.approx(sum(each.task.seconds for each in ups))
    assert sent == pytest.approx(found.host_bytes / 1e11, rel=1e-6)
    computed = [each for each in events if each.task.stream == "compute"]
    assert any(each.start < down.end and down.start < each.end for each in computed for down in downs)
    assert found.timeline().seconds > keeps.seconds


def test_what_is_sent_has_left_before_the_layer_after_the_next() -> None:
    hardware = replace(FAST_LINK, host_link_bytes_per_s=1e8)
    plan = _planned(strategy="data_parallel", offload="activations", hardware=hardware)
    segments = {row.name: row.segment for row in plan.rows}
    events = plan.timeline().events
    left = {segments[each.task.row]: each.end for each in events if each.task.stream == DOWN}
    begun: dict[str, float] = {}
    for each in events:
        if each.task.stream == "compute" and each.task.phase == "forward" and segments[each.task.row]:
            begun.setdefault(segments[each.task.row], each.start)
    for segment in range(4):
        assert left[str(segment)] <= begun[str(segment + 2)]
        assert left[str(segment)] > begun[str(segment + 1)]


def test_on_a_host_that_is_the_device_copies_are_computed() -> None:
    keeps, away = (_planned(strategy="zero3", offload=each, hardware="cpu") for each in ("none", "activations"))
    assert not any(each.task.overlapped for each in away.timeline().events)
    link = load("cpu").host_link_bytes_per_s
    assert away.seconds - keeps.seconds == pytest.approx(2 * away.host_bytes / link, rel=1e-6)
    assert away.timeline().seconds - keeps.timeline().seconds == pytest.approx(2 * away.host_bytes / link, rel=1e-6)


def test_a_plan_says_what_is_where_and_is_saved(tmp_path: Path) -> None:
    plan = _planned(strategy="zero3", offload="activations", hardware="h100")
    assert "saved on the host for the backward: 0-5\n" in str(plan) and "per device: activations" in str(plan)
    assert "saved on the host for the backward: 0-5" in page(plan)
    slow = _planned(strategy="zero3", offload="activations", hardware=SLOW_LINK)
    assert "host copies" in str(slow.explain("3.down")) and "computed again" not in str(slow.explain("3.down"))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.offload == "activations"
    again = loaded.attach(
        tower(6, 64, "meta"), (torch.zeros(4096, 64),), strategy="zero3", hardware="h100", optimizer="sgd"
    )
    assert again.verify().ok and again.timeline().seconds == plan.timeline().seconds
    with pytest.raises(PlanError, match="its offload is not what its choices come to"):
        replace(plan, offload="none").verify()


def test_both_are_on_the_host() -> None:
    plan = _planned(strategy="zero3", optimizer="adamw", offload="both")
    assert plan.offload == "both" and plan.offloads_optimizer
    assert set(plan.host) == {"optimizer", "staging", "activations"}
    assert plan.host["activations"] == _planned(strategy="zero3", offload="activations").host_bytes


def test_host_memory_is_that_of_all_devices_of_a_host() -> None:
    specified: dict[str, Any] = {"strategy": "zero3", "offload": "activations"}
    needed = 2 * _planned(**specified).host_bytes
    assert _planned(**specified, host_memory=needed).host_bytes == needed // 2
    with pytest.raises(InfeasibleError, match=rf"takes .* per device, and .* \({needed} bytes\) for the 2 that share"):
        _planned(**specified, host_memory=needed // 7)  # what one of six layers keeps is more
    limit = int(0.75 * _peak())
    free: dict[str, Any] = {"strategy": "zero3", "memory": limit, "hardware": FAST_LINK, "optimizer": "adamw"}
    assert _planned(**free, offload="auto", host_memory=1).offload == "none"


def test_fewer_layers_leave_where_a_host_has_no_room_for_all() -> None:
    specified: dict[str, Any] = {"strategy": "zero3", "offload": "activations"}
    everything = _planned(**specified)
    room = everything.host_bytes  # of two devices: half of it for each
    found = _planned(**specified, host_memory=room)
    assert list(found.recompute.values()) == [OFFLOAD] * 3 + ["none"] * 3
    assert 0.9 * room < 2 * found.host_bytes <= room and found.verify().ok
    (*_, note) = [each for each in found.notes if "the host has room" in each]
    assert note == "the host has room for what 3 layers save, the first ones"
    assert everything.peak_bytes < found.peak_bytes < _peak()
    small = replace(load("h100"), host_memory_bytes=room)
    assert _planned(**specified, hardware=small).recompute == found.recompute


@pytest.mark.slow
def test_a_limit_of_both_memories_is_visited_by_computing_again() -> None:
    limit = int(0.6 * _peak())
    specified: dict[str, Any] = {"strategy": "zero3", "memory": limit, "offload": "activations", "hardware": FAST_LINK}
    free = _planned(**specified)
    host = free.host_bytes  # of two devices: half of what the plan would have there
    found = _planned(**specified, host_memory=host)
    assert 0 < 2 * found.host_bytes <= host and found.peak_bytes <= limit and found.seconds > free.seconds
    assert {"selective", "full"} & set(found.recompute.values()) and found.verify().ok
    assert _planned(**specified, host_memory=1).offload == "none"
    with pytest.raises(InfeasibleError, match=r"(?s)the memory limit is .*With more on the host: .*host_limit=…. is"):
        _planned(**specified, recompute="none", host_memory=host)


def test_layers_alone_leave_what_they_alone_use() -> None:
    """A tensor that two layers save stays: its copy would free nothing."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)))
    mesh = autopar.Mesh({"dp": 2}, hardware="h100")
    plan = autopar.plan(
        model, mesh, (torch.zeros(64, 64),), memory=autopar.Memory(offload="activations"), optimizer="sgd"
    )
    assert plan.offload == "activations" and plan.host_bytes == 0


def test_a_profile_without_its_host_plans_nothing_for_it() -> None:
    with pytest.raises(PlanError, match="does not say how fast its host is"):
        _planned(offload="activations", hardware=replace(load("h100"), host_link_bytes_per_s=0.0))


def test_the_command_line_offloads_activations(capsys: pytest.CaptureFixture[str]) -> None:
    specified = ["plan", "tiny-llama", "--mesh", "dp=2", "--offload", "activations"]
    assert main([*specified]) == 0
    told = capsys.readouterr().out
    assert "saved on the host for the backward: decoder.model.layers.0-1" in told
    assert main([*specified, "--host-memory", "1kB"]) != 0
    assert "raise --host-memory" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)])
def test_the_problem_is_in_seconds_and_bytes_what_is_told_of_its_choices(mesh: tuple[int, ...]) -> None:
    axes: dict[str, int] = dict(zip(("dp", "tp"), mesh, strict=False))
    plan = _planned(
        axes, 4, offload="activations", hardware=SLOW_LINK, strategy="fsdp_megatron" if mesh[1:] else "zero2"
    )
    context, rng = context_of(plan), np.random.default_rng(0)
    memory = context.memory_model
    for _ in range(3):
        modes = {name: MODES[rng.integers(len(MODES))] for name in memory.lifetimes.segments}
        taken = bytes_by_moment(memory, context.choices, modes)
        told = step_seconds_of(memory, context.choices, modes).seconds
        for moment in rng.choice(np.flatnonzero(taken), 8).tolist():
            problem = Formulation(context.space, memory).problem(
                {}, MemoryRow(((moment, 1),)), None, dict.fromkeys(modes, "")
            )
            seconds, num_bytes = problem.cost_of((*context.choices, *(MODES.index(each) for each in modes.values())))
            assert num_bytes == taken[moment]
            assert seconds == pytest.approx(told, rel=1e-12)
