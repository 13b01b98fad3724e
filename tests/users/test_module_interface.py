"""A compiled module to code that takes it for the model: optimizers made too early, anomaly detection, full states."""

from __future__ import annotations

import copy
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

import autopar
from autopar.errors import InputError
from tests.support.ranks import Ranks, mesh
from tests.users.scripts.setting import Classifier, batches, seeded, whole


def _made_before(strategy: str) -> str:
    model = seeded(Classifier)
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = batches(1)[0]
    compiled = autopar.compile(model, mesh((2,), ("dp",)), (x,), strategy=strategy, outputs="full")
    F.cross_entropy(compiled(x), y).backward()
    with pytest.raises(InputError) as error:
        early.step()
    right = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    right.step()
    # The original goes on as a model of its own.
    F.cross_entropy(model(x), y).backward()
    early.step()
    return str(error.value)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
def test_an_optimizer_made_before_compile_is_refused_in_its_first_step(strategy: str, ranks: Ranks) -> None:
    for text in ranks.run(_made_before, strategy):
        assert text.startswith("AdamW was made before autopar.compile")
        assert "Make the optimizer after autopar.compile" in text


def _hooks_left() -> tuple[int, int]:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    compiled = autopar.compile(seeded(Classifier), mesh((2,), ("dp",)), (batches(1)[0][0],))
    while_alive = len(hooks) - before
    del compiled
    gc.collect()
    return while_alive, len(hooks) - before


def test_no_hook_on_optimizers_is_left_when_compiled_modules_are_gone(ranks: Ranks) -> None:
    ranks.kill()
    assert ranks.run(_hooks_left) == [(1, 0)] * 2


def _assigned_data() -> tuple[str, list[float]]:
    x, y = batches(1)[0]
    model = autopar.compile(seeded(Classifier), mesh((2,), ("dp",)), (x,), strategy="zero3")
    weight = model.head.weight
    half = whole(weight) * 0.5
    weight.data = weight.data * 0.5
    with pytest.raises(InputError) as error:
        model(x)
    losses = [F.cross_entropy(model(x), y).item()]
    weight.data.copy_(weight.data * 0.5)
    losses.append(F.cross_entropy(model(x), y).item())
    model.load_state_dict({"head.weight": half * 0.5}, strict=False)
    return str(error.value), [*losses, F.cross_entropy(model(x), y).item()]


def test_an_assignment_to_data_that_pytorch_ignores_is_refused_and_what_is_advised_works(ranks: Ranks) -> None:
    x, y = batches(1)[0]
    model = seeded(Classifier)
    expected = []
    for _ in range(3):
        expected.append(F.cross_entropy(model(x), y).item())
        model.head.weight.data *= 0.5
    for text, losses in ranks.run(_assigned_data):
        assert text.startswith("head.weight.data was assigned to, which has no effect")
        assert losses == pytest.approx(expected, rel=1e-5)


def _anomalies(strategy: str) -> str:
    """The first backward has gradients that arrive late, in memory that is NaN until then."""
    x, _ = batches(1)[0]
    model = autopar.compile(seeded(Classifier), mesh((2,), ("dp",)), (x,), strategy=strategy)
    torch.use_deterministic_algorithms(True)  # which fills what is allocated with NaN
    try:
        with torch.autograd.detect_anomaly():
            loss = model(x).square().mean()
            if dist.get_rank():
                time.sleep(1)
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values") as error:
        (model(x).square().mean() * float("nan")).backward()
    return str(error.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strategy", ["zero3", "data_parallel"])
def test_detect_anomaly_finds_nan_and_waits_for_gradients_in_flight(ranks: Ranks, strategy: str) -> None:
    assert all("MulBackward0" in text for text in ranks.run(_anomalies, strategy))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).square().mean()


SCALED = torch.arange(16.0).view(4, 4) / 16


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(SCALED).backward()
        optimizer.step()


def _resumed_with_full_state(kind: Any, strategy: str) -> dict[str, Tensor]:
    options = StateDictOptions(full_state_dict=True)
    model = autopar.compile(seeded(Scaled), mesh((2,), ("dp",)), (SCALED,), strategy=strategy)
    optimizer = kind(model.parameters(), lr=0.1)
    _stepped(model, optimizer)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    again = autopar.compile(seeded(Scaled), mesh((2,), ("dp",)), (SCALED,), strategy=strategy)
    again.load_state_dict(model.state_dict())
    optimizer = kind(again.parameters(), lr=0.1)
    set_optimizer_state_dict(again, optimizer, state, options=options)
    _stepped(again, optimizer)
    return {name: whole(each) for name, each in again.named_parameters()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam])
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_a_full_optimizer_state_resumes_parameters_of_no_dims(ranks: Ranks, kind: Any, strategy: str) -> None:
    model = seeded(Scaled)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(2):
        _stepped(model, optimizer)
    expected = {name: each.detach() for name, each in model.named_parameters()}
    for found in ranks.run(_resumed_with_full_state, kind, strategy):
        torch.testing.assert_close(found, expected)
