"""Shared experts run while rows of the others travel, forward and backward, and training stays as on one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.collectives.direct import below_autograd
from autopar.runtime.collectives.layout_moves import waited_for
from autopar.runtime.collectives.mesh_axes import axis_of, record_traffic, use_mesh
from autopar.runtime.implementations import exchanges
from autopar.runtime.implementations.exchanges import Way, leaving
from tests.support.divided_experts import Form, batches, choices, forced, with_experts
from tests.support.parity import SLOW_DEVICES
from tests.support.pipeline_training import PipelineCase, check
from tests.support.ranks import Ranks
from tests.support.simulation.fake_mesh import fake_mesh
from tests.support.simulation.training import Steps, Training, fault_of, train_alone, train_on_ranks

aten = torch.ops.aten
STEPS = Steps(batches(3))
BEFORE, AFTER = Form(shared="before", num_layers=2), Form(shared="after", bias=True)
CASES = {
    "called before": (BEFORE, ("t+x",), {}),
    "called after, next to experts": (AFTER, ("x", "t+x"), {}),
    "two exchanges as one, weighted before": (Form(shared="after", early=True), ("t+x", "t+x"), {}),
    "without an exchange": (AFTER, ("x",), {}),
    "a capacity": (Form(shared="after"), ("t+x",), {"capacity_factor": 8.0}),
}
PRODUCTS = (aten.mm.default, aten.addmm.default)


@functools.lru_cache
def alone(form: Form) -> Training:
    return train_alone(with_experts(form), STEPS)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("form", "names", "options"), CASES.values(), ids=CASES)
def test_ranks_train_as_one_process(form: Form, names: tuple[str, ...], options: dict[str, Any]) -> None:
    axes = dict(zip("ab"[: len(names)], (2,) * len(names), strict=True))
    found = train_on_ranks(with_experts(form), STEPS, axes, options, forced(choices(*names)))
    fault = fault_of(found, alone(form))
    assert not fault, fault


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["full", "full_save_collectives", "selective"])
def test_what_is_computed_again_is_bit_identical(mode: str) -> None:
    found, moved = {}, {}
    for each in ("none", mode):
        with record_traffic() as record:
            found[each] = train_on_ranks(
                with_experts(BEFORE), STEPS, {"ep": 2}, {"recompute": each}, forced(choices("t+x"))
            )
        moved[each] = dict(record.calls)
    more = {key: calls - moved["none"][key] for key, calls in moved[mode].items()}
    # A layer sends counts and rows to experts and rows home: three times in each of three steps.
    assert {key: each for key, each in more.items() if each} == ({("all_to_all", "ep"): 18} if mode == "full" else {})
    for name, values in found["none"].gradients.items():
        assert all(torch.equal(a, b) for a, b in zip(found[mode].gradients[name], values, strict=True)), name


@dataclass
class _Recorder(TorchDispatchMode):
    """The products that run during each all-to-all, from where it is issued to where it is waited for."""

    products: int = 0
    running: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    found: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func in PRODUCTS
        if func._opname == "all_to_all_single":
            self.running[result.untyped_storage()._cdata] = result, self.products
        elif func._opname == "wait_tensor" and args[0].untyped_storage()._cdata in self.running:
            _, before = self.running.pop(args[0].untyped_storage()._cdata)
            self.found.append(self.products - before)
        return result


def _during(form: Form) -> tuple[list[int], list[int]]:
    """The products that run during the all-to-alls of a forward and of a backward, in the order of their ends."""
    (batch,) = batches(1)
    with fake_mesh({"ep": 2}) as axes:
        compiled = autopar.compile(with_experts(form), axes, batch, hardware=SLOW_DEVICES, strategy="expert_data")
        forward, backward = _Recorder(), _Recorder()
        with forward:
            loss = compiled(**batch)
        with backward:
            loss.backward()
    assert not forward.running and not backward.running
    return forward.found, backward.found


@pytest.mark.parametrize("called", ["before", "after"])
def test_a_shared_expert_computes_while_rows_travel(called: Any) -> None:
    # Forward: counts, rows to experts while the shared one goes up, rows home while it goes down. Backward: the
    # same back, with two products for each of the forward's.
    assert _during(Form(shared=called)) == ([0, 1, 1], [2, 2])


@dataclass
class _Watched:
    """Collectives of rows that are issued outside of compiled graphs, and the products of the graphs between."""

    products: int = 0
    running: dict[int, int] = field(default_factory=dict)
    found: list[int] = field(default_factory=list)

    def issued(self, *args: Any) -> Tensor:
        result = below_autograd(*args)
        self.running[result.untyped_storage()._cdata] = self.products
        return result

    def waited_for(self, x: Tensor) -> Tensor:
        self.found.append(self.products - self.running.pop(x.untyped_storage()._cdata))
        return waited_for(x)

    def compiled(self, graph: fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            self.products += sum(node.target in PRODUCTS for node in graph.graph.nodes)
            return graph(*args)

        return make_boxed_func(run)


def test_graphs_of_torch_compile_compute_while_rows_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,), watched = batches(1), _Watched()
    monkeypatch.setattr(exchanges, "below_autograd", watched.issued)
    monkeypatch.setattr(exchanges, "waited_for", watched.waited_for)
    with fake_mesh({"ep": 2}) as axes:
        model = autopar.compile(with_experts(BEFORE), axes, batch, hardware=SLOW_DEVICES, strategy="expert_data")
        model.compile(backend=aot_autograd(fw_compiler=watched.compiled, bw_compiler=watched.compiled))
        model(**batch).backward()
    torch._dynamo.reset()
    assert not watched.running
    assert watched.found == [0, 1, 1] * 2 + [2, 2] * 2


def test_without_a_shared_expert_rows_are_waited_for_at_once() -> None:
    assert _during(Form()) == ([0, 0, 0], [0, 0])


def test_rows_that_nobody_takes_are_let_go() -> None:
    # A second run of a segment may need the first half of a call alone.
    with fake_mesh({"ep": 2}) as axes, use_mesh(axes):
        travelling: Any = leaving(torch.ones(4, 8, requires_grad=True), Way([2, 2], [2, 2], axis_of("ep"), 0))
        rows = StorageWeakRef(travelling.rows.untyped_storage())
        assert not rows.expired()
        del travelling
        assert rows.expired()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_stages_of_a_pipeline_train_as_one_process(ranks: Ranks, schedule: str) -> None:
    check(ranks, PipelineCase("deepseek_v3", "pp2xdp2", schedule, options={"strategy": "expert_data"}, steps=2))
