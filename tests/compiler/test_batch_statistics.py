"""BatchNorm under micro-batches normalizes by the statistics of one of them, and warns once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.sharding.mesh import Mesh
from tests.support.options import by_flag
from tests.support.parity import mesh
from tests.support.ranks import Ranks

X = (torch.arange(64.0).reshape(8, 8).sin(),)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x))).square().mean()


def _specified(model: nn.Module, axes: dict[str, int], **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        autopar.plan(model, Mesh(axes), X, **by_flag(**options))
    return [str(each.message) for each in found if "micro-batch" in str(each.message)]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}])
def test_statistics_of_micro_batches_are_warned_of(axes: dict[str, int]) -> None:
    (text,) = _specified(Normed(), axes, microbatches=4)
    assert text.startswith("train_step splits a batch into 4 micro-batches, and batch_norm in norm takes the mean")


def test_nothing_is_stated_of_whole_batches_of_frozen_statistics_and_of_other_norms() -> None:
    assert not _specified(Normed(), {"dp": 2})
    assert not _specified(Normed().eval(), {"dp": 2}, microbatches=4)
    model = Normed()
    model.norm = nn.LayerNorm(8)  # type: ignore[assignment]
    assert not _specified(model, {"dp": 2}, microbatches=4)


def _train(axes: tuple[str, ...], shape: tuple[int, ...]) -> tuple[list[str], Tensor]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compiled = autopar.compile(Normed(), mesh(shape, axes), microbatches=2, run=autopar.Run(seed=0))
        loss = compiled.train_step(*X)
        compiled.train_step(X[0][:4])  # another kind of inputs
    return [str(each.message) for each in found if "micro-batch" in str(each.message)], loss


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_a_compiled_module_says_it_once_and_trains_by_micro_batches(ranks: Ranks, axis: str) -> None:
    specified, other = ranks.run(_train, (axis,), (2,), world_size=2)
    torch.manual_seed(0)
    model = Normed()
    expected = sum(model(part).item() for part in X[0].chunk(2)) / 2
    assert len(specified[0]) == 1 and not other[0]
    assert specified[1].item() == pytest.approx(expected, rel=1e-5)
