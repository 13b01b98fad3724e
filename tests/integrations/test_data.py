"""Loaders that give each rank its part: samplers of torch, last batches that are smaller, loaders that are resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from tests.support.optimizing import losses_of
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

NUM_SAMPLES, EACH = 22, 4
"""On two ranks two batches of 8 samples and one of 6."""


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x_BD: Tensor, y_BD: Tensor) -> Tensor:
        return (self.down(self.up(x_BD).tanh()) - y_BD).square().mean()


def _samples(count: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 4, generator=generator))


def _model(samples: TensorDataset) -> Any:
    torch.manual_seed(0)
    example = tuple(tensor[:EACH] for tensor in samples.tensors)
    model = Regression()
    autopar.annotate(model, "up", storage="dp")
    return autopar.compile(model, mesh((2,), ("dp",)), example, inputs="local", hardware=SLOW_DEVICES)


def _losses(model: nn.Module, batches: Any) -> list[float]:
    return losses_of(torch.optim.AdamW(model.parameters(), lr=1e-2), batches, lambda batch: model(*batch))


def _of_all_ranks(loader: Any, sampler: Any, epochs: int = 2) -> list[tuple[Tensor, ...]]:
    """The batches of all ranks, each one behind the other, of loaders that differ in their rank alone."""
    whole = []
    for epoch in range(epochs):
        parts = []
        for rank in range(dist.get_world_size()):
            sampler.rank = rank
            sampler.set_epoch(epoch)
            parts.append(list(loader))
        whole += [tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*parts, strict=True)]
    sampler.rank = dist.get_rank()
    return whole


def _smaller_last_batches() -> None:
    samples = _samples()
    sampler = DistributedSampler(samples, seed=3)
    loader = DataLoader(samples, batch_size=EACH, sampler=sampler)
    whole = _of_all_ranks(loader, sampler)
    assert [len(batch[0]) for batch in whole] == [8, 8, 6] * 2

    def own() -> Any:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            yield from loader

    torch.manual_seed(0)
    expected = _losses(Regression(), whole)
    assert_close(_losses(_model(samples), own()), expected, rtol=1e-5, atol=1e-6)


def test_a_last_batch_that_is_smaller_on_all_ranks_counts_as_on_one_process(ranks: Ranks) -> None:
    ranks.run(_smaller_last_batches)


def _stateful() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader  # pyright: ignore[reportMissingImports]
    from torchdata.stateful_dataloader.sampler import (  # pyright: ignore[reportMissingImports]
        StatefulDistributedSampler,
    )

    samples = _samples(32)

    def loader() -> Any:
        sampler = StatefulDistributedSampler(samples, seed=3)
        return StatefulDataLoader(samples, batch_size=EACH, sampler=sampler)

    whole = _losses(_model(samples), loader())
    first = loader()
    batches, model = iter(first), _model(samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []

    def train(batch: Any) -> None:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())

    for _ in range(2):
        train(next(batches))
    again = loader()
    again.load_state_dict(first.state_dict())
    for batch in again:
        train(batch)
    assert len(found) == 4
    assert found == whole


def test_a_stateful_loader_goes_on_where_it_was(ranks: Ranks) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    ranks.run(_stateful)
