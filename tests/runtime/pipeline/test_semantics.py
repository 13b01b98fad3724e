"""User changes to a pipeline's modules, before or after compiling, are honoured on the rank that runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from tests.support.families import HIDDEN
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

MICROBATCHES = 2


class Layer(nn.Module):
    """A product and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.dropout(self.up(x_BD))

    def get_extra_state(self) -> int:
        return self.up.in_features

    def set_extra_state(self, state: int) -> None:
        assert state == HIDDEN


class Layers(nn.Module):
    """Two stages, with dropout that only evaluation turns off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = Layer(), Layer()

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.second(self.first(x_BD).relu()).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(step))


def pipeline(model: nn.Module, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return autopar.compile(
        model,
        mesh(shape, names),
        (batch(0),),
        hardware=SLOW_DEVICES,
        microbatches=MICROBATCHES,
        pipeline=autopar.Pipeline(schedule="1f1b", split_points=["second"]),
    )


def _train(model: Any, eager: Any) -> None:
    """Two steps of both; what this rank holds agrees."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for each in (model, eager)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model.train_step(batch(step))
        total = torch.zeros(())
        for part in batch(step).chunk(MICROBATCHES):
            (each := eager(part) / MICROBATCHES).backward()
            total += each.detach()
        assert_close(loss, total)
        theirs = dict(eager.named_parameters())
        assert {name for name, _ in model.named_parameters()} < theirs.keys()
        for name, parameter in model.named_parameters():
            found, expected = whole(parameter.grad), theirs[name].grad
            assert (found is None) == (expected is None), name
            if found is not None:
                assert_close(found, expected)
        for optimizer in optimizers:
            optimizer.step()


def _changed(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    model, eager = Layers(), Layers()
    handles = [each.first.up.weight.register_hook(lambda grad: grad * 4) for each in (model, eager)]
    compiled = pipeline(model, shape, names)
    for each in (compiled, eager):
        each.first.dropout.eval()
        each.second.dropout.eval()
    _train(compiled, eager)
    handles += [each.second.up.register_forward_hook(lambda module, args, out: out * 2) for each in (compiled, eager)]
    _train(compiled, eager)
    for handle in handles:
        handle.remove()
    for each in (compiled, eager):
        each.second.up.bias = nn.Parameter(torch.full((HIDDEN,), 2.0))
    _train(compiled, eager)
    assert {"first._extra_state", "second._extra_state"} <= compiled.state_dict().keys()
    compiled.load_state_dict(compiled.state_dict())
    compiled.second.more = nn.Linear(HIDDEN, HIDDEN)
    with pytest.raises(InputError, match=r"new are second.more.weight, second.more.bias"):
        compiled.train_step(batch(0))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shape", "names"), [((2,), ("pp",)), ((2, 2), ("pp", "dp"))], ids=str)
def test_changes_of_a_pipelines_modules_are_seen_on_the_rank_that_runs_them(
    ranks: Ranks, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    ranks.run(_changed, shape, names, world_size=2 ** len(shape), timeout=120)
