"""The memory of weights on their way: in rows, predictions and formulas alike, and never beyond a limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import bytes_by_moment, memory_use
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing import message_sizes as messages
from autopar.errors import InfeasibleError, InputError, PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.options.groups import Memory, Prefetch
from autopar.planning.settings import context_of
from tests.costs.memory.test_microbatches import at_moment
from tests.runtime.rewrite.test_prefetch import WIDTH, Stack
from tests.support.options import by_flag

INPUTS = (torch.zeros(2, WIDTH),)


def _plan(depth: Prefetch = "auto", **options: Any) -> Plan:
    options = {"strategy": "zero3", "recompute": "none", **options}
    return autopar.plan(Stack(), Mesh({"dp": 2}), INPUTS, **by_flag(prefetch=depth, **options))


@pytest.mark.parametrize("microbatches", [Microbatches(), Microbatches(4, 2)], ids=["one", "several"])
def test_rows_count_what_the_prediction_counts(microbatches: Microbatches) -> None:
    context = context_of(_plan())
    peaks = []
    for depth in (0, 1, 2):
        memory = MemoryModel(context.space, microbatches, depth)
        by_moment = bytes_by_moment(memory, context.choices, {})
        moments = [number for number, num_bytes in enumerate(by_moment) if num_bytes]
        assert [at_moment(memory, context.choices, number) for number in moments] == by_moment[moments].tolist()
        peaks.append(memory_use(memory, context.choices, {})[0])
        assert peaks[-1] == by_moment.max()
    assert peaks[0] < peaks[1] < peaks[2]


def test_a_forward_alone_has_a_layers_weights_at_once_and_in_their_message_as_they_arrive() -> None:
    found = autopar.plan(Stack(), Mesh({"dp": 2}), INPUTS, strategy="zero3", training=False)
    assert isinstance(found, Plan)
    context = context_of(found)
    layers = [sum(x.nbytes for x in layer.parameters()) for layer in Stack().layers]
    for depth in (0, 1, 2):
        memory = MemoryModel(context.space, Microbatches(), depth)
        by_moment = bytes_by_moment(memory, context.choices, {})
        moments = [number for number, num_bytes in enumerate(by_moment) if num_bytes]
        assert [at_moment(memory, context.choices, number) for number in moments] == by_moment[moments].tolist()
        peak, use, moment = memory_use(memory, context.choices, {})
        assert peak == by_moment.max() == by_moment[moment] == max(each.num_bytes for each in use.timeline)
        # Used and arriving; or used, and as many on their way, each with the part of two that is sent.
        assert use.parts["gathered weights"] == max(2, 1 + 1.5 * depth) * layers[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_formulas_count_what_the_prediction_counts(depth: Literal[1, 2], recompute: str) -> None:
    plan = _plan(depth, recompute=recompute)
    assert plan.reprice().memory["memory"] == plan.peak_bytes
    assert plan.verify().ok


@pytest.mark.slow
def test_under_a_limit_weights_are_fetched_ahead_where_there_is_room() -> None:
    none, one, two = _plan(0).peak_bytes, _plan(1).peak_bytes, _plan(2).peak_bytes
    assert (_plan().prefetch, _plan(memory=none).prefetch, _plan(memory=one - 1).prefetch) == (1, 0, 0)
    assert (_plan(memory=one).prefetch, _plan(memory=two).prefetch) == (1, 1)
    for limit in (none, one - 1, one, two):
        plan = _plan(memory=limit)
        assert plan.peak_bytes == (one if limit >= one else none)
        assert plan.verify().ok
    with pytest.raises(InfeasibleError, match=r"the memory limit is .*, but"):
        _plan(1, memory=one - 1)
    assert _plan(2, memory=two).prefetch == 2


class _Uneven(nn.Module):
    """A layer that computes for long, a small one, and one with many weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1024)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for _ in range(8):
            x = self.layers[0](torch.tanh(x))
        return self.layers[2](self.layers[1](x)).square().mean()


@pytest.mark.parametrize(("share", "depth"), [(0.0, 2), (1.0, 1)])
def test_with_room_for_two_layers_both_are_fetched_ahead_where_that_is_faster(
    share: float, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "SMALLEST_MESSAGE", 0)  # each layer by itself
    hardware = Hardware(
        "beside", {"float32": 1e9}, 1e9, 10**9, 0.0, (Link("wire", None, 0.0, 1e8),), communication_share=share
    )
    inputs, options = (torch.zeros(64, 8),), {"strategy": "zero3", "hardware": hardware}
    assert autopar.plan(_Uneven(), Mesh({"dp": 2}), inputs, **by_flag(memory="1GB", **options)).prefetch == depth  # type: ignore[arg-type]


def test_a_plan_that_is_requested_again_keeps_to_its_limit() -> None:
    limit = _plan(1).peak_bytes
    plan = _plan(memory=limit)
    assert plan.prefetch == 1
    other = plan.what_if("head", storage=None, dp="data")
    assert other.prefetch == 1
    assert other.peak_bytes <= limit
    loaded = Plan.from_json(plan.to_json()).attach(
        Stack(), INPUTS, strategy="zero3", memory=autopar.Memory(recompute="none")
    )
    assert loaded.verify().ok
    assert loaded.prefetch == 1
    with pytest.raises(PlanError, match="its choices take"):
        replace(plan, prefetch=2).verify()


def test_a_depth_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"Memory\(prefetch=3\); give one of 'auto', or a whole number .* at most 2"):
        Memory(prefetch=3)  # type: ignore[arg-type]
