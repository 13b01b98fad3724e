"""Steps share the nodes of autograd at which parameters enter the graph, as long as parameters stay where they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.costs.hardware.load import load
from benchmarks.step_counts import Operations
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.fake_mesh import fake_mesh

WIDTH = 6
STRATEGIES = {"data_parallel": (2,), "zero3": (2,), "hsdp": (2, 2)}


class Model(nn.Module):
    """Layers of which one has a bias that two ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 5)
        self.second = nn.Linear(5, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def _inputs(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def _one_after_the_other(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(_inputs(step)).backward()
        if step:
            optimizer.step()
            optimizer.zero_grad()


def _two_at_once(model: Any) -> None:
    one, other = model(_inputs(0)), model(_inputs(1))
    other.backward()
    one.backward()
    (model(_inputs(2)) + model(_inputs(3)).exp()).backward()


def _twice_through_one(model: Any) -> None:
    loss = model(_inputs(0))
    loss.backward(retain_graph=True)
    loss.backward()


def _values_elsewhere(model: Any) -> None:
    model(_inputs(0)).backward()
    for p in model.parameters():
        if not isinstance(p, DTensor):  # autopar refuses it for others
            p.data = p.data.clone() * 2
    model(_inputs(1)).backward()


def _frozen_between(model: Any) -> None:
    model(_inputs(0)).backward()
    model.second.weight.requires_grad_(False)
    model(_inputs(1)).backward()
    model.second.weight.requires_grad_(True)
    model(_inputs(2)).backward()


def _watched_later(model: Any) -> None:
    model(_inputs(0)).backward()
    seen: list[Any] = []
    handle = model.third.weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad)))
    model(_inputs(1)).backward()
    torch.testing.assert_close(seen, [whole(model.third.weight.grad)])
    handle.remove()
    model(_inputs(2)).backward()


def _hooked_later(model: Any) -> None:
    model(_inputs(0)).backward()
    handle = model.third.weight.register_hook(lambda grad: 3 * grad)
    model(_inputs(1)).backward()
    handle.remove()
    model(_inputs(2)).backward()


def _moved(model: Any) -> None:
    model(_inputs(0)).backward()
    model.zero_grad()
    model.to("cpu")
    model(_inputs(1)).backward()


LOOPS: dict[str, Callable[[Any], None]] = {
    each.__name__.strip("_"): each
    for each in (
        *(_one_after_the_other, _two_at_once, _twice_through_one),
        *(_values_elsewhere, _frozen_between, _watched_later, _hooked_later, _moved),
    )
}


def _found(model: nn.Module) -> dict[str, Any]:
    return {name: (whole(p.detach()), whole(p.grad)) for name, p in model.named_parameters()}


def _on_ranks(strategy: str) -> list[dict[str, Any]]:
    devices = mesh(STRATEGIES[strategy], ("dp", "fsdp")[: len(STRATEGIES[strategy])])
    found = []
    for loop in LOOPS.values():
        model = autopar.compile(Model(), devices, (_inputs(0),), strategy=strategy, hardware=SLOW_DEVICES)
        loop(model)
        found.append(_found(model))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_one_process(strategy: str, ranks: Ranks) -> None:
    found = ranks.run(_on_ranks, strategy, world_size=2 ** len(STRATEGIES[strategy]))
    for number, (name, loop) in enumerate(LOOPS.items()):
        eager = Model()
        if name == "values_elsewhere" and strategy != "data_parallel":
            continue
        loop(eager)
        for each in found:
            torch.testing.assert_close(each[number], _found(eager), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1"])
def test_a_later_step_runs_no_operation_to_take_parameters(strategy: str) -> None:
    found = []
    with fake_mesh({"dp": 2}) as devices:
        for num_layers in (1, 3):
            model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(num_layers)))
            compiled = autopar.compile(model, devices, (torch.ones(4, 8),), strategy=strategy, hardware=load("h100"))
            compiled(torch.ones(4, 8)).sum().backward()
            with Operations() as operations:
                compiled(torch.ones(4, 8))
            found.append(operations.every["aten::detach"])
    assert found[0] == found[1]


def test_a_copy_and_a_moved_module_have_nodes_of_their_own() -> None:
    with fake_mesh({"dp": 2}) as devices:
        model = autopar.compile(Model(), devices, (_inputs(0),), strategy="data_parallel", hardware=load("h100"))
        model(_inputs(0)).backward()
        other = copy.deepcopy(model)
        other(_inputs(1))
        assert all(p.grad is not None for p in model.parameters())
        assert all(p.grad is None for p in other.parameters())
        (before,) = model._shared.values()
        model.to("cpu")
        assert before not in model._shared.values()  # it would keep the values that were moved
