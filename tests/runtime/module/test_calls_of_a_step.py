"""Calls of Python and operations in a step: no more than those of its peers, though every call is checked."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.runtime.module.inputs import call_signature, canonical_arguments
from benchmarks.step_counts import Counts, counted
from benchmarks.step_operations import CASES, MACHINE, Setting, ddp, ours
from benchmarks.transformer_model import Size, batch, transformer
from tests.support.simulation.fake_mesh import fake_mesh

SIZE = Size(2, 512, 8, 1024, 8, 8)


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_a_data_parallel_step_makes_no_more_calls_of_python_than_ddp(precision: str | None) -> None:
    found = []
    for build in (ours("data_parallel"), ddp):
        with fake_mesh({"dp": 8}) as devices:
            phases, _ = counted(build(Setting(8, precision, "none", SIZE), devices))
        found.append(phases)
    here, there = found
    assert all(here[phase].calls <= there[phase].calls for phase in ("forward", "backward"))


def test_a_data_parallel_step_runs_hardly_more_operations_than_ddp() -> None:
    found = []
    for build in (ours("data_parallel"), ddp):
        with fake_mesh({"dp": 8}) as devices:
            phases, _ = counted(build(Setting(8, None, "none", SIZE), devices))
        found.append(phases)
    here, there = found
    # Two inputs are split; targets are counted, and their number summed and waited for; the loss is divided and summed.
    assert here["forward"].operations <= there["forward"].operations + 9
    assert here["backward"].operations <= there["backward"].operations


def test_a_step_that_computes_again_runs_no_more_operations_than_with_ddp() -> None:
    found = []
    for build in (ours("data_parallel"), ddp):
        with fake_mesh({"dp": 8}) as devices:
            phases, _ = counted(build(Setting(8, None, "full", SIZE), devices))
        found.append(sum(phases.values(), Counts()).operations)
    assert found[0] <= found[1]


@pytest.mark.parametrize(
    ("name", "precision", "is_counted"),
    [
        ("zero3", None, ("operations", "calls")),
        ("hsdp", "bf16-mixed", ("operations", "calls")),
        ("expert_data", "bf16-mixed", ("calls",)),
    ],
)
def test_a_step_runs_no_more_than_with_a_peer(name: str, precision: str | None, is_counted: tuple[str, ...]) -> None:
    (case,) = (each for each in CASES if each.name == name)
    found = []
    for build in (case.ours, case.theirs):
        with fake_mesh(case.axes(8)) as devices:
            phases, _ = counted(build(Setting(8, precision, "none", SIZE), devices))
        found.append(sum(phases.values(), Counts()))
    assert all(getattr(found[0], each) <= getattr(found[1], each) for each in is_counted)


def test_one_node_waits_for_the_gradients_of_all_plain_parameters() -> None:
    with fake_mesh({"dp": 8}) as devices:
        options: dict[str, Any] = {"strategy": "data_parallel", "hardware": MACHINE}
        model = autopar.compile(transformer(SIZE), devices, batch(SIZE), **options)
        visited: dict[str, set[Any]] = {}
        left: list[Any] = [model(*batch(SIZE)).plain.grad_fn]
        while left:
            node = left.pop()
            if node is not None and node not in visited.setdefault(node.name(), set()):
                visited[node.name()].add(node)
                left += [before for before, _ in node.next_functions]
    (waiting,) = visited["WaitBackward"]
    buckets = visited["_ReduceGradientsBackward"]
    assert len(buckets) > 1 and all(each.pending is waiting.reductions for each in buckets)


class _Takes(nn.Module):
    def forward(self, a: Any, b: Any = 2, *, c: Any = 3, d: Any) -> None:
        """Take arguments of all kinds that have names."""


class _TakesAny(nn.Module):
    def forward(self, a: Any, b: Any = 2, **others: Any) -> None:
        """Take any arguments by name."""


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {"d": 4}),
    ((1, 5), {"d": 4, "c": 6}),
    ((), {"d": 4, "b": 5, "a": 1}),
    ((1,), {}),
    ((1, 2, 3), {"d": 4}),
    ((1,), {"a": 1, "d": 4}),
    ((1,), {"d": 4, "e": 5}),
    ((1, 2), {}),
]


@pytest.mark.parametrize("model", [_Takes(), _TakesAny()])
@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_arguments_get_their_names_as_python_binds_them(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    signature = inspect.signature(model.forward)
    try:
        expected = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        with pytest.raises(InputError, match="do not fit the model's forward"):
            canonical_arguments(call_signature(model), args, kwargs)
        return
    expected.update(expected.pop("others", {}))
    positional, named = canonical_arguments(call_signature(model), args, kwargs)
    assert positional == () and list(named.items()) == list(expected.items())
