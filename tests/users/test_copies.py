"""Copies of a compiled module: deepcopy, EMA and SWA, each compared with the same on one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

import autopar
from autopar.errors import InputError
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh
from tests.users.scripts.setting import whole


class Net(nn.Module):
    """Two layers around a batch norm, with a temperature that forward reads; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(8, 8, bias=False)  # one before a batch norm learns rounding errors
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 8)
        self.temperature = 1.0

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return (self.down(self.norm(self.up(x_BD)).relu()) * self.temperature).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = model.train_step(batch(step)) if hasattr(model, "train_step") else model(batch(step))
    if loss.requires_grad:
        loss.backward()
    optimizer.step()
    return loss.item()


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    for name, value in found.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if value is not None:
            torch.testing.assert_close(value, expected.state_dict()[name])


def _averaged(strategy: str) -> None:
    eager = Net()
    parallel = autopar.compile(Net(), mesh((2,), ("dp",)), (batch(0),), strategy=strategy, hardware=SLOW_DEVICES)
    here = torch.optim.SGD(parallel.parameters(), lr=0.1)
    there = torch.optim.SGD(eager.parameters(), lr=0.1)
    averages = [
        [
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True),
            AveragedModel(model),
        ]
        for model in (parallel, eager)
    ]
    for step in range(3):
        assert train(parallel, here, step) == pytest.approx(train(eager, there, step))
        for found, expected in zip(*averages, strict=True):
            found.update_parameters(parallel)
            expected.update_parameters(eager)
    for found, expected in zip(*averages, strict=True):
        assert_same_state(found.module, expected.module)
        torch.testing.assert_close(found.eval()(batch(9)), expected.eval()(batch(9)))
    assert_same_state(parallel, eager)
    assert parallel.training
    found, expected = averages[0][-1], averages[1][-1]
    before = whole(found.state_dict()["module.norm.running_var"])
    for each in (found, expected):
        update_bn(map(batch, range(4)), each)
    after = whole(found.state_dict()["module.norm.running_var"])
    assert (after - before).norm() > 0.1 * before.norm()
    assert_same_state(found.module, expected.module)
    torch.testing.assert_close(found.eval()(batch(9)), expected.eval()(batch(9)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
def test_averages_of_weights_are_those_of_one_process(strategy: str, ranks: Ranks) -> None:
    ranks.run(_averaged, strategy)


def _copies_apart(options: dict[str, Any]) -> None:
    """A copy trains by itself, keeps attributes of its own, and lives longer than what it was copied from."""
    eager = Net()
    parallel = autopar.compile(Net(), mesh((2,), ("dp",)), (batch(0),), hardware=SLOW_DEVICES, **by_flag(**options))
    twins = copy.deepcopy(eager), copy.deepcopy(parallel)
    assert type(twins[1]) is type(parallel)
    assert twins[1].plan is parallel.plan
    twins[0].temperature = twins[1].temperature = 2.0
    twins[0].down.requires_grad_(False)
    twins[1].down.requires_grad_(False)
    assert parallel.temperature == 1.0
    pairs = [(parallel, eager), (twins[1], twins[0])]
    trained: Any = None
    for trained, expected in pairs:
        optimizers = [
            torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (trained, expected)
        ]
        for step in range(2):
            assert train(trained, optimizers[0], step) == pytest.approx(train(expected, optimizers[1], step))
        assert_same_state(trained, expected)
    for refused in (pickle.dumps, copy.copy):
        with pytest.raises(InputError, match=r"cannot be pickled or copied by copy\.copy.*Save model\.state_dict\(\)"):
            refused(parallel)
    del parallel, pairs, trained
    again = copy.deepcopy(twins[1]), copy.deepcopy(twins[0])
    torch.testing.assert_close(again[0].eval()(batch(5)), again[1].eval()(batch(5)))
    assert twins[1].training


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"strategy": "zero3"}], ids=str)
def test_a_deep_copy_trains_apart_from_what_it_was_copied_from(options: dict[str, Any], ranks: Ranks) -> None:
    ranks.run(_copies_apart, options)


def _pipeline() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), Loss())
    eager = copy.deepcopy(model)
    parallel = autopar.compile(
        model,
        mesh((2,), ("pp",)),
        (batch(0),),
        pipeline=autopar.Pipeline(schedule="gpipe"),
        microbatches=2,
        hardware=SLOW_DEVICES,
    )
    averages = AveragedModel(parallel), AveragedModel(eager)
    here = torch.optim.SGD(parallel.parameters(), lr=0.1)
    there = torch.optim.SGD(eager.parameters(), lr=0.1)
    for step in range(2):
        assert train(parallel, here, step) == pytest.approx(train(eager, there, step))
        averages[0].update_parameters(parallel)
        averages[1].update_parameters(eager)
    twin = copy.deepcopy(parallel)
    del parallel
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert train(twin, optimizer, 2) == pytest.approx(train(eager, there, 2))
    torch.testing.assert_close(averages[0].eval()(batch(9)), averages[1].eval()(batch(9)))


class Loss(nn.Module):
    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD.square().mean()


def test_a_pipeline_is_copied_and_averaged_stage_by_stage(ranks: Ranks) -> None:
    torch.manual_seed(0)
    ranks.run(_pipeline)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=None)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x_BCHW)).relu().square().mean()


def _cumulative_averages(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    eager, pictures = Pictures(), [torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    own = [each.chunk(2)[torch.distributed.get_rank()] for each in pictures] if options else pictures
    parallel = autopar.compile(
        copy.deepcopy(eager),
        mesh((2,), ("dp",)),
        (own[0],),
        hardware=SLOW_DEVICES,
        strategy="data_parallel",
        **by_flag(**options),
    )
    for model, batches in ((eager, pictures), (parallel, own)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for each in batches:
            optimizer.zero_grad()
            model(each).backward()
            optimizer.step()
    assert_same_state(parallel, eager)


@pytest.mark.parametrize("options", [{}, {"inputs": "local"}], ids=str)
def test_batch_norms_with_cumulative_averages_train_as_on_one_process(options: dict[str, Any], ranks: Ranks) -> None:
    ranks.run(_cumulative_averages, options)


def _lazy() -> None:
    parallel = autopar.compile(Net(), mesh((2,), ("dp",)), hardware=SLOW_DEVICES)
    with pytest.raises(InputError, match="call it once, or give"):
        copy.deepcopy(parallel)


def test_a_module_without_parameters_yet_is_not_copied(ranks: Ranks) -> None:
    ranks.run(_lazy)
