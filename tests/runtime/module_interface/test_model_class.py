"""A compiled module is the model to others: its class, signature, methods and attributes."""

from __future__ import annotations

import inspect
import typing
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._dynamo_utils import _annotate_modules_for_dynamo
from torch.nn.parallel import DistributedDataParallel

import autopar
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh


class Base(nn.Module):
    kinds: ClassVar[dict[str, int]] = {"base": 1}
    scale = 1.0

    def describe(self) -> str:
        return "base"


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.layer = nn.Linear(8, 8)
        self._note = "a note"
        self.seen: list[int] = []

    def forward(self, x: Tensor, *, targets: Tensor | None = None) -> Tensor:
        found = self.layer(x) * self.scale
        return found.square().mean() if targets is None else (found - targets).square().mean()

    def describe(self) -> str:
        return f"{super().describe()}, {self._note}"

    def get_weight(self) -> Tensor:
        return self.layer.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.last = len(x)
        return self(x)

    @property
    def width(self) -> int:
        return self.layer.in_features


def _compiled() -> tuple[Any, Model]:
    torch.manual_seed(0)
    model = Model()
    line = mesh((dist.get_world_size(),), ("dp",))
    return autopar.compile(model, line, (torch.randn(4, 8),), strategy="zero3", hardware=SLOW_DEVICES), model


def _is_the_model() -> None:
    compiled, model = _compiled()
    assert isinstance(compiled, Model)
    assert type(compiled).__name__ == "ParallelModel"
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert typing.get_type_hints(compiled.forward) == typing.get_type_hints(model.forward)
    assert list(inspect.signature(type(compiled).forward).parameters) == ["self", "x", "targets"]

    assert compiled.describe() == "base, a note"
    assert (compiled.scale, type(compiled).scale, compiled.kinds, compiled.width) == (2.0, 1.0, {"base": 1}, 8)
    assert compiled.get_weight() is compiled.layer.weight
    (group,) = compiled.configure_optimizers().param_groups
    assert list(map(id, group["params"])) == list(map(id, compiled.parameters()))

    x = torch.randn(4, 8)
    expected = model.training_step(x)
    torch.testing.assert_close(compiled.training_step(x), expected)
    assert (compiled.seen, compiled.last) == ([4], 4)
    compiled.scale = 4.0
    torch.testing.assert_close(compiled(x), expected * 4)
    torch.testing.assert_close(compiled(x, targets=x), (model.layer(x) * 4 - x).square().mean())


def test_a_compiled_module_has_signature_methods_and_attributes_of_the_model(ranks: Ranks) -> None:
    ranks.run(_is_the_model)


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def _wrappers() -> None:
    compiled, _ = _compiled()
    for wrap, name in (
        (DistributedDataParallel, "DistributedDataParallel"),
        (fully_shard, "fully_shard"),
        (lambda model: fully_shard(model.layer), "fully_shard"),
        # FullyShardedDataParallel itself refuses CPUs before it looks at the module, which it does with this:
        (lambda model: _annotate_modules_for_dynamo(model, set(), True), "FullyShardedDataParallel"),
    ):
        with pytest.raises(autopar.InputError, match=rf'^{name} around a model .* Leave {name} out.*inputs="local"'):
            wrap(compiled)
    line = mesh((2,), ("dp",))
    whole = autopar.compile(Model(), line, (torch.randn(4, 8),), strategy="data_parallel", hardware=SLOW_DEVICES)
    around = DistributedDataParallel(Around(whole))
    with pytest.raises(autopar.InputError, match="DistributedDataParallel around a model"):
        around(torch.randn(4, 8))
    torch.testing.assert_close(compiled(torch.ones(4, 8)).shape, torch.Size(()))


def test_wrappers_that_would_divide_it_again_are_refused(ranks: Ranks) -> None:
    ranks.run(_wrappers)
