"""Tied weights on several stages: one value, one gradient, summed in one order, however often it is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import autopar
from autopar.runtime.pipeline.shared_parameters import SharedGradients, holders_of
from tests.support.families import HIDDEN
from tests.support.parity import SLOW_DEVICES, assert_same_gradients
from tests.support.ranks import Ranks, mesh


def test_holders_are_the_ranks_with_a_name_where_there_are_several() -> None:
    assert holders_of([["a", "b"], ["c"], ["b", "a", "a"], ["b"]]) == {"a": (0, 2), "b": (0, 2, 3)}
    assert holders_of([["a"], ["b"]]) == {}


HOLDERS = {"two": (0, 2), "all": (0, 1, 2), "frozen": (0, 1)}


def _held(rank: int) -> nn.Module:
    root = nn.Module()
    for name, ranks in HOLDERS.items():
        if rank in ranks:
            value = torch.full((4,), float(rank + 1))
            root.register_parameter(name, nn.Parameter(value, requires_grad=name != "frozen"))
    return root


def _summed() -> dict[str, list[Tensor | None]]:
    rank, group = dist.get_rank(), mesh((3,), ("pp",)).get_group()
    root = _held(rank)
    found: dict[str, list[Tensor | None]] = {name: [] for name, _ in root.named_parameters()}
    shared = SharedGradients(HOLDERS, group, group)
    for step in range(3):
        before = {name: parameter.grad for name, parameter in root.named_parameters()}
        with shared.summed(root):
            for name, parameter in root.named_parameters():
                # On rank 1 nothing reaches "all" in the second step.
                if parameter.requires_grad and (rank, name, step) != (1, "all", 1):
                    (parameter.sum() * 10**rank).backward()
        for name, parameter in root.named_parameters():
            assert step == 0 or parameter.grad is before[name], "gradients stay where they are"
            found[name].append(None if parameter.grad is None else parameter.grad.clone())
    return found


def test_gradients_of_holders_are_summed_and_added_to_those_of_earlier_steps(ranks: Ranks) -> None:
    expected = {"two": [101.0, 202.0, 303.0], "all": [111.0, 212.0, 323.0], "frozen": [None] * 3}
    found = ranks.run(_summed, world_size=3)
    for rank, gradients in enumerate(found):
        assert gradients.keys() == {name for name, ranks in HOLDERS.items() if rank in ranks}
        for name, each in gradients.items():
            assert [None if g is None else g.tolist() for g in each] == [
                None if value is None else [value] * 4 for value in expected[name]
            ]


def _taken() -> list[float]:
    """Return the gradients that a hook takes from a parameter to which two backwards of a step add."""
    rank, group = dist.get_rank(), mesh((3,), ("pp",)).get_group()
    root, found = _held(rank), []

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        found.extend(parameter.grad[:1].tolist())
        parameter.grad = None

    root.get_parameter("all").register_post_accumulate_grad_hook(take)
    for _ in range(2):
        with SharedGradients(HOLDERS, group, group).summed(root):
            for _ in range(2):
                (root.get_parameter("all").sum() * 10**rank).backward()
    return found


def test_a_hook_takes_the_sum_of_all_holders_once_a_step(ranks: Ranks) -> None:
    assert ranks.run(_taken, world_size=3) == [[222.0, 222.0]] * 3


def _failed() -> list[float] | None:
    group = mesh((2,), ("pp",)).get_group()
    root = nn.Module()
    root.register_parameter("w", nn.Parameter(torch.ones(2)))
    root.get_parameter("w").grad = torch.tensor([1.0, 2.0])
    with pytest.raises(RuntimeError, match="in the step"), SharedGradients({"w": (0, 1)}, group, group).summed(root):
        raise RuntimeError("in the step")
    grad = root.get_parameter("w").grad
    return None if grad is None else grad.tolist()


def test_a_step_that_fails_leaves_earlier_gradients_as_they_were(ranks: Ranks) -> None:
    assert ranks.run(_failed) == [[1.0, 2.0]] * 2


def _uneven() -> Tensor:
    """The bits of a sum that depends on its order."""
    group = mesh((3,), ("pp",)).get_group()
    root = nn.Module()
    root.register_parameter("w", nn.Parameter(torch.zeros(1000)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    with SharedGradients({"w": (0, 1, 2)}, group, group).summed(root):
        values = torch.randn(1000, generator=generator) * 10.0 ** torch.randint(-6, 6, (1000,), generator=generator)
        root.get_parameter("w").grad = values
    grad = root.get_parameter("w").grad
    assert grad is not None
    return grad


def test_every_holder_has_the_same_bits(ranks: Ranks) -> None:
    first, *others = ranks.run(_uneven, world_size=3)
    assert all(torch.equal(first, other) for other in others)


def _distributed() -> None:
    grid = mesh((2, 2), ("pp", "tp"))
    group, inner = grid.get_group("pp"), grid["tp"]
    own = grid.get_local_rank("pp")
    for placement in (Shard(0), Shard(1), Replicate()):
        root = nn.Module()
        value = torch.arange(24.0).reshape(6, 4)
        root.register_parameter("w", nn.Parameter(distribute_tensor(value.clone(), inner, [placement])))
        weight = root.get_parameter("w")
        with SharedGradients({"w": (0, 1)}, group, group).summed(root):
            if own == 0:
                weight.grad = distribute_tensor(value * 2, inner, [placement])
        assert isinstance(weight.grad, DTensor) and weight.grad.placements == (placement,)
        assert torch.equal(weight.grad.full_tensor(), 2 * value)


def test_parts_of_a_distributed_weight_are_summed_part_by_part(ranks: Ranks) -> None:
    ranks.run(_distributed, world_size=4)


class Tied(nn.Module):
    """A weight at both ends and once between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        for number in (2, 3):
            self.layers[number].weight = self.layers[0].weight

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD).tanh()
        return x_BD.square().mean()


def _tied_on_stages(size: int, names: tuple[str, ...], schedule: str, microbatches: int) -> list[str]:
    torch.manual_seed(3)
    alone = Tied()
    model = copy.deepcopy(alone)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())  # the values of rank 0 count
    x_BD = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(0))
    shape = (size, 2) if len(names) > 1 else (size,)
    parallel: Any = autopar.compile(
        model,
        mesh(shape, names),
        (x_BD,),
        hardware=SLOW_DEVICES,
        pipeline=autopar.Pipeline(schedule=schedule),
        microbatches=microbatches,
    )
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (parallel, alone)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = alone(x_BD)
        loss.backward()
        assert_close(parallel.train_step(x_BD), loss.detach(), rtol=1e-4, atol=1e-6)
        assert_same_gradients(parallel, alone, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    return [name for name, _ in parallel.named_parameters()]


@pytest.mark.parametrize(
    ("size", "names", "schedule", "microbatches", "holders"),
    [
        (4, ("pp",), "1f1b", 4, 3),
        (2, ("pp",), "zbv", 4, 2),  # rank 0 has the first stage and the last
        (2, ("pp", "tp"), "gpipe", 2, 2),
    ],
)
def test_a_weight_on_several_stages_trains_as_one(
    ranks: Ranks, size: int, names: tuple[str, ...], schedule: str, microbatches: int, holders: int
) -> None:
    found = ranks.run(_tied_on_stages, size, names, schedule, microbatches, world_size=size * len(names))
    pipeline = found[:: len(names)]
    assert sum("layers.0.weight" in held for held in pipeline) == holders
