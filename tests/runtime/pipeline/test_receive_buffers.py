"""Receive buffers exist for micro-batches in flight only, as many as a schedule's order and the plan say."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import autopar
from autopar.costs.memory.microbatches import Microbatches, Phase
from autopar.planning.pipeline.schedules.receive_buffers import receive_buffers
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.runtime.pipeline import stage as scheduled
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from autopar.runtime.pipeline.stage import ScheduledStage
from tests.support.options import by_flag
from tests.support.pipeline_training import PipelineCase, check
from tests.support.ranks import Ranks, mesh

MICROBATCHES = 8
Most = dict[int, tuple[int, int]]
"""Stage → bytes of inputs and of gradients in receive buffers, where each is most."""


class Chain(nn.Module):
    """Layers that keep the width of what goes from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = torch.tanh(layer(x_BD)) + x_BD
        return x_BD.square().mean()


class _Watch:
    """The buffers that stages receive in, looked at whenever one of them computes."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, bool], list[tuple[StorageWeakRef, int]]] = {}
        self.most: Most = {}

    def posted(self, stage: ScheduledStage, infos: tuple[Any, ...]) -> None:
        of_inputs = any(infos is each for each in stage.args_recv_info.values())
        for info in infos:
            if info.buffer is not None:
                buffer = StorageWeakRef(info.buffer.untyped_storage()), info.buffer.nbytes
                self.buffers.setdefault((stage.stage_index, of_inputs), []).append(buffer)

    def look(self) -> None:
        for stage in {stage for stage, _ in self.buffers}:
            before = self.most.get(stage, (0, 0))
            there = (self._there(stage, of_inputs) for of_inputs in (True, False))
            self.most[stage] = tuple(map(max, before, there))  # type: ignore[assignment]

    def _there(self, stage: int, of_inputs: bool) -> int:
        return sum(size for each, size in self.buffers.get((stage, of_inputs), ()) if not each.expired())


def _held(schedule: str, axes: dict[str, int], options: dict[str, Any]) -> tuple[Most, Most]:
    """Return the bytes of receive buffers per stage in this rank's second step: measured, and by its plan."""
    watch, receive, compute = _Watch(), ScheduledStage._get_recv_ops, ScheduledStage.backward_maybe_with_nosync
    forward = scheduled._Handed.forward

    def receiving(self: ScheduledStage, infos: tuple[Any, ...]) -> Any:
        found = receive(self, infos)
        watch.posted(self, infos)
        return found

    def computing(self: ScheduledStage, *given: Any, **more: Any) -> Any:
        watch.look()
        return compute(self, *given, **more)

    def handing(self: Any, *given: Tensor) -> Any:
        watch.look()
        return forward(self, *given)

    x_BD = torch.randn(4 * MICROBATCHES, 16)
    module = autopar.compile(
        Chain(),
        mesh(tuple(axes.values()), tuple(axes)),
        (x_BD,),
        microbatches=MICROBATCHES,
        **by_flag(schedule=schedule, **options),
    )
    assert isinstance(module, PipelineModule)
    module.train_step(x_BD)
    with (
        mock.patch.object(ScheduledStage, "_get_recv_ops", receiving),
        mock.patch.object(ScheduledStage, "backward_maybe_with_nosync", computing),
        mock.patch.object(scheduled._Handed, "forward", handing),
    ):
        module.train_step(x_BD)
    runs, expected = module.plan.schedule, {}
    for number, executable in module._ready().executables.items():
        one = sum(each.nbytes for each in scheduled.received_tensors(executable))
        back = sum(each.nbytes for each in scheduled.sent_tensors(executable) if each.requires_grad)
        buffers = receive_buffers(runs, number)
        local = number + 1 < runs.num_stages and runs.rank_of(number + 1) == runs.rank_of(number)
        after = number and runs.rank_of(number - 1) == runs.rank_of(number)
        inputs, gradients = 0 if after else buffers.inputs * one, 0 if local else buffers.gradients * back
        if inputs or gradients:
            expected[number] = inputs, gradients
        # The plan counts tensors and gradients that are handed over on one rank, too: the memory is the same.
        planned = Microbatches(MICROBATCHES, runs.in_flight(number), **asdict(buffers))
        at_once = [planned.received(phase) for phase in planned.phases]
        counted = {there * one + gradients * back for there, gradients in at_once}
        plan = module.plan.stages[number].plan
        # A rank counts these for what its stages have in flight at once.
        assert sum(row.saved_bytes for row in plan.rows if row.name in executable.program.received) == one
        memory = plan.memory
        assert memory is not None
        assert sum(memory.parts.get(name, 0) for name in ("received inputs", "received gradients")) in counted
        assert max(counted) == buffers.inputs * one + buffers.gradients * back
    assert not any(watch._there(*each) for each in watch.buffers), "nothing is there between steps"
    return {stage: each for stage, each in watch.most.items() if any(each)}, expected


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "axes", "options"),
    [
        ("1f1b", {"pp": 2}, {}),
        ("zbv", {"pp": 2}, {}),
        ("interleaved_1f1b", {"pp": 2}, {}),
        ("gpipe", {"pp": 2}, {}),
        ("interleaved_zero_bubble", {"pp": 2}, {}),
        ("dualpipev", {"pp": 2}, {}),
        ("1f1b", {"pp": 4}, {}),
        ("zbv", {"pp": 4}, {}),
        ("1f1b", {"pp": 2, "dp": 2}, {"strategy": "zero2"}),
        ("1f1b", {"pp": 2, "tp": 2}, {"recompute": "full"}),
    ],
)
def test_as_many_buffers_are_there_as_the_plan_says(
    ranks: Ranks, schedule: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    world = torch.Size(axes.values()).numel()
    for found, expected in ranks.run(_held, schedule, axes, options, world_size=world, timeout=120):
        assert found == expected and found


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "inputs", "gradients"),
    [
        ("gpipe", 4, 1, [0, 8, 8, 8], [1, 1, 1, 0]),
        ("1f1b", 4, 1, [0, 3, 2, 1], [1, 1, 1, 0]),
        ("pipedream", 4, 1, [0, 3, 2, 1], [1, 1, 1, 0]),
    ],
)
def test_one_stage_per_rank_has_an_input_for_each_in_flight_and_one_gradient(
    name: str, ranks: int, chunks: int, inputs: list[int], gradients: list[int]
) -> None:
    schedule = Schedule(name, ranks, MICROBATCHES, chunks)
    found = [receive_buffers(schedule, stage) for stage in range(schedule.num_stages)]
    assert [each.inputs for each in found] == inputs
    assert [each.gradients for each in found] == gradients


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_several_stages_per_rank_hold_no_more_than_they_have_in_flight_and_receive_ahead(name: str) -> None:
    schedule = Schedule(name, 4, 2 * MICROBATCHES, 2)
    found = [receive_buffers(schedule, stage) for stage in range(schedule.num_stages)]
    assert found[0].inputs == 0 and found[-1].gradients == 0
    assert max(each.inputs for each in found) < schedule.num_microbatches
    for stage, each in enumerate(found[1:], 1):
        assert each.inputs >= schedule.in_flight(stage)


def test_no_buffers_are_left_at_the_end_of_a_step() -> None:
    runs = Microbatches(8, 3, inputs=4, gradients=2)
    assert runs.received(Phase(2, False)) == (4, 2)
    assert runs.received(Phase(0, False, end=True)) == (0, 0)
    assert runs.received(Phase(2, True, end=True)) == (2, 0)  # those that wait behind an update


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
@pytest.mark.parametrize(("mesh", "options"), [("pp2xdp2", {"strategy": "zero2"}), ("pp2xtp2", {"recompute": "full"})])
def test_stages_train_as_one_process_over_several_steps(
    ranks: Ranks, schedule: str, mesh: str, options: dict[str, Any]
) -> None:
    check(ranks, PipelineCase("llama", mesh, schedule, options=options, steps=4))


class Summed(nn.Module):
    """Layers of which each ends in a sum that no backward saves."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.saves = saves

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD) + x_BD
            x_BD = x_BD.exp() if self.saves else x_BD
        return x_BD.square().mean()


def _sent(schedule: str, saves: bool) -> dict[int, tuple[int, int, int]]:
    """Return by stage of this rank the most outputs that are resident at once, those in flight, and those planned."""
    outputs: dict[int, list[StorageWeakRef]] = {}
    most: dict[int, int] = {}
    send, compute = ScheduledStage.get_fwd_send_ops, ScheduledStage.backward_maybe_with_nosync

    def sending(self: ScheduledStage, number: int) -> Any:
        found = send(self, number)
        if self.is_last:
            return found
        memory = (StorageWeakRef(each.untyped_storage()) for each in self.fwd_cache[number][0])
        outputs.setdefault(self.stage_index, []).extend(memory)
        return found

    def computing(self: ScheduledStage, *given: Any, **more: Any) -> Any:
        for stage, each in outputs.items():
            most[stage] = max(most.get(stage, 0), sum(not one.expired() for one in each))
        return compute(self, *given, **more)

    x_BD = torch.randn(4 * MICROBATCHES, 16)
    module = autopar.compile(
        Summed(saves), mesh((2,), ("pp",)), (x_BD,), microbatches=MICROBATCHES, **by_flag(schedule=schedule)
    )
    assert isinstance(module, PipelineModule)
    with (
        mock.patch.object(ScheduledStage, "get_fwd_send_ops", sending),
        mock.patch.object(ScheduledStage, "backward_maybe_with_nosync", computing),
    ):
        module.train_step(x_BD)
    runs, found = module.plan.schedule, {}
    for stage, there in most.items():
        memory = module.plan.stages[stage].plan.memory
        assert memory is not None
        planned = memory.parts.get("sent tensors", 0) // outputs_bytes(module, stage)
        found[stage] = there, runs.in_flight(stage), planned
    return found


def outputs_bytes(module: PipelineModule, stage: int) -> int:
    """Return the bytes that a stage sends for one micro-batch."""
    return sum(each.nbytes for each in scheduled.sent_tensors(module._ready().executables[stage]))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_what_a_stage_sent_is_freed_when_it_sends_again(ranks: Ranks, schedule: str) -> None:
    stages = {stage: each for found in ranks.run(_sent, schedule, False) for stage, each in found.items()}
    assert stages
    for there, in_flight, planned in stages.values():
        assert there <= planned == min(in_flight, 2)


def test_what_a_backward_saved_stays_when_it_was_sent(ranks: Ranks) -> None:
    for found in ranks.run(_sent, "gpipe", True):
        for there, in_flight, planned in found.values():
            assert (there, planned) == (in_flight, 0)
