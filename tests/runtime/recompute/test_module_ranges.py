"""Profilers, FLOP counters and memory snapshots see the modules that a per-rank graph was captured from."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.runtime.recompute.module_ranges import is_watched, scopes_of
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

FORWARD = ["model", "first", "blocks.0", "blocks.0.up", "blocks.0", "blocks.1", "blocks.1.up", "blocks.1", "model"]
"""Modules in the order in which the model's calls belong to them."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x.sin()).cos()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


X = torch.ones(8, 16)


def _compiled(**options: Any) -> Any:
    given = {"strategy": "data_parallel", "hardware": SLOW_DEVICES, **options}
    return autopar.compile(Model(), mesh((2,), ("dp",)), (X,), **by_flag(**given))


def _traced(train: Any) -> list[FunctionEvent]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train()
    events: Any = profiler.events()
    return sorted(events, key=lambda event: event.time_range.start)


def _modules_of(events: list[FunctionEvent], operation: str) -> list[str]:
    """The innermost range around each call of an operation, without repetitions."""
    found = []
    for event in events:
        if event.name == operation:
            parent = event.cpu_parent
            while parent is not None and not parent.name.startswith(("model", "first", "blocks")):
                parent = parent.cpu_parent
            found.append("" if parent is None else parent.name)
    return [name for name, _ in itertools.groupby(found)]


def _in_a_profile(options: dict[str, Any]) -> None:
    model = _compiled(**options)
    events = _traced(lambda: model(X).backward())
    assert _modules_of(events, "aten::linear")[:3] == ["first", "blocks.0.up", "blocks.1.up"]
    assert _modules_of(events, "aten::cos")[:2] == ["blocks.0", "blocks.1"]
    backward = ["blocks.1.up (backward)", "blocks.0.up (backward)", "first (backward)"]
    assert [name for name in _modules_of(events, "AddmmBackward0") if name] == backward
    parents = {(event.name, event.cpu_parent.name) for event in events if event.cpu_parent and event.is_user_annotation}
    assert {("blocks.0.up", "blocks.0"), ("blocks.0", "model"), ("blocks.0 (backward)", "model (backward)")} <= parents
    assert not any(event.name == "blocks" for event in events)
    assert _traced(lambda: X.sin())[-1].cpu_parent is None, "all ranges are closed"


@pytest.mark.parametrize("options", [{}, {"strategy": "zero3"}, {"recompute": "full"}], ids=str)
def test_a_profile_has_the_modules_forward_and_backward(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(_in_a_profile, options)


def _with_stages_and_compiled_layers() -> None:
    model = autopar.compile(
        Model(),
        mesh((2,), ("pp",)),
        (X,),
        microbatches=2,
        pipeline=autopar.Pipeline(schedule="1f1b", split_points=["blocks.1"]),
    )
    events = _traced(lambda: model.train_step(X))
    mine = {name for name in _modules_of(events, "aten::linear") if name}
    assert mine in ({"first", "blocks.0.up"}, {"blocks.1.up"})
    model = _compiled()
    model.compile(regional=True, backend="aot_eager")
    model(X).backward()
    events = _traced(lambda: model(X).backward())
    found = [name for name in _modules_of(events, "aten::cos") if name]
    assert found[:2] == ["blocks.0", "blocks.1"]
    assert {"blocks.0 (backward)", "blocks.1 (backward)"} <= {event.name for event in events}


@pytest.mark.slow
def test_stages_and_compiled_layers_have_ranges_too(ranks: Ranks) -> None:
    ranks.run(_with_stages_and_compiled_layers)


def _flops(model: nn.Module) -> Any:
    with FlopCounterMode(display=False) as counter:
        model(X).backward()
    return {
        name: sum(counts.values()) for name, counts in counter.get_flop_counts().items() if counts and name != "Global"
    }


def _counted() -> list[Any]:
    model = autopar.compile(Model(), mesh((2,), ("dp",)), strategy="data_parallel", hardware=SLOW_DEVICES)
    return [_flops(each) for each in (model, model, Model())]


def test_flops_of_modules_are_half_of_one_process_on_each_of_two_ranks_and_capturing_counts_none(ranks: Ranks) -> None:
    *found, alone = ranks.run(_counted)[0]
    assert "Model.blocks.1.up" in alone
    for each in found:
        assert {name.removeprefix("Parallel"): 2 * count for name, count in each.items()} == alone


def _memory() -> list[str]:
    told: list[str] = []
    with (
        mock.patch.object(torch._C, "_cuda_isHistoryEnabled", lambda: True, create=True),
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda.memory, "_set_memory_metadata", told.append),
    ):
        _compiled()(X).backward()
    return told


def test_memory_is_noted_by_module(ranks: Ranks) -> None:
    told = ranks.run(_memory)[0]
    end = told.index("")
    assert [name for name in told[:end] if name != "model"] == [name for name in FORWARD if name != "model"]
    backward = told[end + 1 :]
    assert backward.pop() == ""
    assert all(name.endswith(" (backward)") for name in backward)
    assert backward.index("blocks.1.up (backward)") < backward.index("first (backward)")


def test_a_machine_without_a_driver_is_not_requested_it() -> None:
    requested = mock.Mock(side_effect=RuntimeError("CUDA driver version is insufficient"))
    with (
        mock.patch.object(torch._C, "_cuda_isHistoryEnabled", requested, create=True),
        mock.patch.object(torch.cuda, "is_initialized", lambda: False),
    ):
        assert not is_watched()


def _unwatched() -> None:
    model = _compiled()
    graph = model._ready().graph
    code = graph.runner(None)
    assert graph.runner(None) is code
    with FlopCounterMode(display=False):
        assert graph.runner(None) is not code


def test_where_nobody_looks_the_graph_runs_as_code(ranks: Ranks) -> None:
    ranks.run(_unwatched)


def test_lists_of_modules_have_no_range() -> None:
    assert scopes_of("") == ("model",)
    assert scopes_of("h.0.attn.0.1.proj") == ("model", "h.0", "h.0.attn.0.1", "h.0.attn.0.1.proj")
