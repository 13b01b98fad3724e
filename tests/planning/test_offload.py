"""Plans with the optimizer's state on the host: where memory asks for it, what they say, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.console.units import format_bytes
from autopar.costs.hardware.load import load
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.optimizer import Offload
from autopar.errors import InfeasibleError, InputError, PlanError
from autopar.planning import offload as offloading
from autopar.planning.settings import context_of
from autopar.views.report.html import page
from tests.support.options import by_flag

FAST_HOST = replace(load("h100"), name="h100", host_link_bytes_per_s=1e15, host_memory_bytes_per_s=1e16)
"""Whose steps take next to nothing."""
SLOW_HOST = replace(FAST_HOST, host_memory_bytes_per_s=1e6)


def _model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def _planned(mesh: dict[str, int] | None = None, **options: Any) -> Plan:
    on = autopar.Mesh(mesh or {"dp": 2}, hardware="h100")
    requested: dict[str, Any] = {"hardware": "h100", "memory_conventions": "tensors", **options}
    return autopar.plan(_model(), on, (torch.zeros(16, 64),), **by_flag(**requested))


def _least(**options: Any) -> int:
    return _planned(strategy="zero3", recompute="full", **options).peak_bytes


def test_state_leaves_the_device_and_is_on_the_host() -> None:
    here, there = (_planned(strategy="zero3", offload=each, master_copies=True) for each in ("none", "optimizer"))
    assert here.offload == "none" and not here.host and here.host_bytes == 0
    assert there.offload == "optimizer"
    assert here.memory is not None and there.memory is not None
    assert here.memory.parts["optimizer"] == there.host["optimizer"]
    assert "optimizer" not in there.memory.parts
    assert here.peak_bytes - there.peak_bytes == there.host["optimizer"]
    assert there.choices == here.choices
    assert there.device_seconds > here.device_seconds


GRADIENTS = autopar.Optimizer(gradients="host")
"""Leave for the host in the backward."""


@pytest.mark.parametrize("strategy", ["zero3", "data_parallel"])
def test_gradients_that_leave_in_the_backward_are_on_the_host(strategy: str) -> None:
    here, there = (_planned(strategy=strategy, offload="optimizer", optimizer=each) for each in ("adamw", GRADIENTS))
    assert here.memory is not None and there.memory is not None
    assert {**here.host, "gradients": here.memory.parts["parameters"]} == there.host
    assert there.peak_bytes < here.peak_bytes and there.verify().ok
    again = there.reprice(**there.with_formulas().symbols)
    assert again.seconds == pytest.approx(there.seconds, rel=1e-9)
    assert again.memory["host_bytes"] == there.host["optimizer"] + there.host["gradients"]
    assert again.memory["memory"] == there.peak_bytes


def test_their_copies_run_next_to_the_backward() -> None:
    """Down is the gradient of each parameter as soon as it is there, in the order in which they are made."""
    timeline = _planned(strategy="zero3", offload="optimizer", optimizer=GRADIENTS).timeline()
    downs = [each for each in timeline.events if each.task.stream == "device to host"]
    early, late = ([each for each in downs if each.task.phase == phase] for phase in ("backward", "optimizer"))
    assert len(early) == len(late) == 8  # in the step comes the weight, of which there is no master copy
    assert [each.task.row[:3] for each in early[::2]] == ["p_3", "p_2", "p_1", "p_0"]
    behind = max(each.end for each in timeline.events if each.task.phase == "backward" and not each.task.overlapped)
    assert early[0].end < behind
    reductions = [each for each in timeline.events if each.task.name == "reduce_scatter"]
    assert all(copy.start >= sent.end for copy, sent in zip(early[::2], reductions, strict=True))
    hosts = {each.task.row: each for each in timeline.events if each.task.stream == "host"}
    assert all(hosts[each.task.row].start >= each.end for each in early)
    there = _planned(strategy="zero3", offload="optimizer", optimizer=GRADIENTS, hardware="cpu").timeline()
    assert sum(each.task.name == "device to host" for each in there.events) == 8
    assert not any(each.task.overlapped for each in there.events)


def test_steps_of_the_host_run_next_to_the_backward_that_they_are_in() -> None:
    requested = autopar.Optimizer(gradients="host", in_backward=True)
    specified = {"strategy": "zero3", "offload": "optimizer", "hardware": SLOW_HOST}
    stepping, behind = (_planned(optimizer=each, **specified) for each in (requested, GRADIENTS))
    assert (stepping.peak_bytes, stepping.host) == (behind.peak_bytes, behind.host)
    assert stepping.device_seconds == behind.device_seconds
    early, late = (each.timeline() for each in (stepping, behind))
    assert early.seconds < late.seconds and not any(each.task.phase == "optimizer" for each in early.events)
    hosts = [[each for each in found.events if each.task.stream == "host"] for found in (early, late)]
    assert hosts[0][0].start < hosts[1][0].start
    ups = {each.task.row: each for each in early.events if each.task.stream == "host to device"}
    assert all(ups[each.task.row].start >= each.end for each in hosts[0])


def test_what_auto_leaves_on_the_device_has_its_gradients_there() -> None:
    plan = _planned(offload="auto", optimizer=GRADIENTS)
    assert plan == _planned()
    again = Plan.from_json(plan.to_json()).attach(
        *(_model(), (torch.zeros(16, 64),)), hardware="h100", optimizer=GRADIENTS, memory=autopar.Memory(offload="auto")
    )
    assert again.verify().ok


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}])
def test_sum_formula_and_timeline_agree(mesh: dict[str, int]) -> None:
    plan = _planned(mesh, strategy="zero3", offload="optimizer")
    again = plan.reprice(**plan.with_formulas().symbols)
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert again.memory["host_bytes"] == plan.host["optimizer"]
    assert again.memory["memory"] == plan.peak_bytes
    timeline = plan.timeline()
    assert {"device to host", "host", "host to device"} <= set(timeline.streams)
    waited = sum(each.waited for each in timeline.events if each.task.overlapped)
    rows = [row for row in plan.rows if row.kind == "parameter"]
    assert waited == pytest.approx(sum(row.seconds for row in rows), rel=0.1)
    assert timeline.seconds == pytest.approx(timeline.computing + timeline.waiting + timeline.launching)


def test_copies_run_next_to_steps_of_other_parameters() -> None:
    timeline = _planned(strategy="zero3", offload="optimizer").timeline()
    hosts = [each for each in timeline.events if each.task.stream == "host"]
    downs = [each for each in timeline.events if each.task.stream == "device to host"]
    ups = [each for each in timeline.events if each.task.stream == "host to device"]
    assert len(hosts) == len(downs) == len(ups) > 2
    assert downs[1].start < hosts[0].end and ups[0].start < hosts[1].end
    behind = max(each.end for each in timeline.events if each.task.phase == "backward")
    assert all(each.start >= behind * (1 - 1e-9) for each in downs)
    assert all(
        down.end <= host.start and host.end <= up.start for down, host, up in zip(downs, hosts, ups, strict=True)
    )


def test_a_host_that_is_the_device_steps_in_the_place_of_the_device() -> None:
    timeline = _planned(strategy="zero3", offload="optimizer", hardware="cpu").timeline()
    assert not any(each.task.overlapped for each in timeline.events)


def test_without_a_limit_nothing_is_offloaded_of_itself() -> None:
    assert _planned(offload="auto") == _planned()


def test_what_fits_at_no_cost_stays_on_the_device() -> None:
    free = _planned()
    assert _planned(memory=free.peak_bytes, offload="auto").choices == free.choices


def test_state_goes_to_the_host_where_nothing_fits_without_that() -> None:
    limit = int(1.05 * _least(offload="optimizer"))
    with pytest.raises(InfeasibleError):
        _planned(memory=limit)
    found = _planned(memory=limit, offload="auto")
    assert found.offload == "optimizer" and found.peak_bytes <= limit and found.verify().ok
    free = _planned()
    (note,) = [each for each in found.notes if "on the host" in each]
    assert "the best plan on the device without a limit takes" in note
    assert format_bytes(free.peak_bytes) in note
    assert found.choices == _planned(memory=limit, offload="optimizer").choices


@pytest.mark.slow
def test_the_faster_plan_is_kept_where_both_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second search ends where it finds nothing faster than the first."""
    cut, against = [], offloading._request_on_host

    def seen(*args: Any) -> Any:
        found = against(*args)
        cut.append(found.settings.cutoff)
        return found

    monkeypatch.setattr(offloading, "_request_on_host", seen)
    limit = int(1.02 * _least())
    slow = _planned(memory=limit, offload="auto", hardware=SLOW_HOST)
    fast = _planned(memory=limit, offload="auto", hardware=FAST_HOST)
    assert slow.offload == "none" and cut == [slow.device_seconds] * 2
    assert fast.offload == "optimizer" and fast.step_seconds < slow.step_seconds
    assert any("on the device within the limit takes" in note for note in fast.notes)
    assert context_of(fast).settings.cutoff == math.inf
    assert _planned(memory=limit, offload="auto", hardware=FAST_HOST, host_memory=1).offload == "none"


def test_a_limit_that_neither_fits_is_refused_by_both() -> None:
    with pytest.raises(InfeasibleError, match=r"(?s)the memory limit is .*With the optimizer's state on the host: the"):
        _planned(memory=1000, offload="auto")


def test_host_memory_is_that_of_all_devices_of_a_host() -> None:
    plan = _planned({"dp": 4}, strategy="zero3", offload="optimizer")
    needed = 4 * plan.host_bytes
    assert _planned({"dp": 4}, strategy="zero3", offload="optimizer", host_memory=needed).choices == plan.choices
    told = rf"takes .* per device, and .* \({needed} bytes\) for the 4 .*, but Memory.host_limit=…. is .*; raise"
    with pytest.raises(InfeasibleError, match=told):
        _planned({"dp": 4}, strategy="zero3", offload="optimizer", host_memory=needed - 1)
    small = replace(load("h100"), host_memory_bytes=needed - 1)
    with pytest.raises(InfeasibleError, match=r"but hardware 'h100' has .*; raise host_limit"):
        _planned({"dp": 4}, strategy="zero3", offload="optimizer", hardware=small)
    two = replace(load("h100"), host_memory_bytes=needed - 1, host_devices=2)
    assert _planned({"dp": 4}, strategy="zero3", offload="optimizer", hardware=two).offload == "optimizer"


def test_more_devices_on_a_host_make_its_step_slower() -> None:
    alone = replace(load("h100"), host_devices=1)
    shared, own = (
        _planned({"dp": 4}, offload="optimizer", strategy="zero3", hardware=each) for each in ("h100", alone)
    )
    assert shared.seconds > own.seconds


def test_a_plan_says_what_is_where_and_is_saved(tmp_path: Path) -> None:
    plan = _planned(strategy="zero3", offload="optimizer")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.host == plan.host and loaded.offload == "optimizer"
    specified = [line for line in str(loaded).splitlines() if line.startswith("  host ")]
    assert specified == [line for line in str(plan).splitlines() if line.startswith("  host ")]
    assert len(specified) == 1 and "per device: optimizer" in specified[0] and "staging" in specified[0]
    assert "of its memory per device" in page(plan)
    loaded.to_trace(tmp_path / "loaded.json")
    plan.to_trace(tmp_path / "trace.json")
    names = [
        each["args"].get("name")
        for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if each["ph"] == "M"
    ]
    assert {"device to host", "host", "host to device"} <= set(names)
    again = loaded.attach(_model(), (torch.zeros(16, 64),), strategy="zero3", hardware="h100")
    assert again.verify().ok
    values = json.loads(plan.to_json())
    values["offload"] = "weights"
    with pytest.raises(
        PlanError, match="offload is 'weights'; needed one of 'none', 'optimizer', 'activations', 'both'"
    ):
        Plan.from_json(json.dumps(values))
    values["offload"] = "none"
    with pytest.raises(PlanError, match="its offload is not what its choices come to"):
        replace(plan, offload="none").verify()


def test_a_pipeline_has_state_on_the_host(tmp_path: Path) -> None:
    inputs = (torch.zeros(16, 64),)
    mesh = autopar.Mesh({"pp": 2, "dp": 2}, hardware="h100")
    specified: dict[str, Any] = {
        "strategy": "zero3",
        "microbatches": 2,
        "schedule": "1f1b",
        "memory_conventions": "tensors",
    }
    plan: Any = autopar.plan(_model(), mesh, inputs, **by_flag(offload="optimizer", **specified))
    assert plan.offload == "optimizer"
    assert plan.host_bytes == max(stage.plan.host_bytes for stage in plan.stages) > 0
    assert "of its memory per device" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert autopar.PipelinePlan.load(tmp_path / "plan.json").host_bytes == plan.host_bytes
    for stage in plan.stages:
        assert context_of(stage.plan).space.optimizer.offload == Offload(4)
    with pytest.raises(InfeasibleError, match="for the 4 that share a host"):
        autopar.plan(
            _model(), mesh, inputs, **by_flag(offload="optimizer", host_memory=4 * plan.host_bytes - 1, **specified)
        )
    within = autopar.plan(_model(), mesh, inputs, **by_flag(offload="optimizer", memory=plan.peak_bytes, **specified))
    assert any("the optimizer's state is on the host" in note for note in within.notes)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2, "dp": 2}])
def test_a_word_without_a_limit_is_planned_once(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    requested, made = [], offloading._made

    def seen(request: Any, plans: Any) -> Any:
        requested.append(request.memory.offload)
        return made(request, plans)

    monkeypatch.setattr(offloading, "_made", seen)
    specified = {"microbatches": 2, "schedule": "1f1b"} if "pp" in mesh else {}
    plan = _planned(mesh, offload="optimizer", **specified)
    assert (
        requested == ["optimizer"] and plan.offload == "optimizer" and not any("on the host" in n for n in plan.notes)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"offload": "weights"},
            r"offload='weights'\); give one of 'none', 'optimizer', 'activations', 'both', 'auto'",
        ),
        (
            {"offload": "both", "recompute": "full"},
            r"offload='both'\) sends .* Memory\(recompute='full'\) .* next to nothing; give",
        ),
        (
            {"offload": "activations", "imbalance": 1.5},
            r"offload='activations'\) is given with Experts\(imbalance=1.5\): copies .* equal",
        ),
        (
            {"optimizer": GRADIENTS},
            r"gradients=\"host\"\) is given with Memory\(offload='none'\): gradients wait .*; give",
        ),
        ({"offload": "auto", "optimizer": "sgd"}, "offload was given with optimizer='sgd'"),
        (
            {"host_memory": "1GB"},
            r'host_limit=.1GB.\) limits what is offloaded.*offload="optimizer"\), "activations",',
        ),
        ({"offload": "auto", "host_memory": -1}, r"host_limit=-1\); give bytes per host"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _planned(**options)


def test_a_profile_without_its_host_plans_nothing_for_it() -> None:
    with pytest.raises(PlanError, match="does not say how fast its host is"):
        _planned(offload="optimizer", hardware=replace(load("h100"), host_memory_bytes_per_s=0.0))


def test_meshes_are_compared_with_state_on_the_host() -> None:
    limit, inputs = int(1.05 * _least(offload="optimizer")), (torch.zeros(16, 64),)
    specified: dict[str, Any] = {"devices": 2, "hardware": "h100", "memory_conventions": "tensors"}
    found = autopar.plan(_model(), "auto", inputs, **by_flag(memory=limit, offload="auto", **specified))
    assert found.offload == "optimizer" and found.peak_bytes <= limit


def test_the_command_line_offloads(capsys: pytest.CaptureFixture[str]) -> None:
    specified = ["plan", "tiny-mlp", "--mesh", "dp=2", "--strategy", "zero3", "--offload", "optimizer"]
    assert main([*specified, "--host-memory", "1kB"]) != 0
    assert "raise --host-memory" in capsys.readouterr().err
