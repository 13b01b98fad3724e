"""Random numbers of pipeline stages: equal on differently seeded ranks, and the same after a resume."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh

HIDDEN = 8


class Noisy(nn.Module):
    """Layers with noise, a random slope and a dropout each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.RReLU(), nn.Dropout(0.2)) for _ in range(2)
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD) + torch.randn_like(x_BD) / 8
        return x_BD.square().mean()


def _losses() -> tuple[list[float], list[float]]:
    """Return the losses of four steps, and of the last two on a second module that loads the first one's checkpoint."""

    def compiled(seed: int) -> Any:
        model = Noisy()
        torch.manual_seed(seed + dist.get_rank())
        on = mesh((2, 2), ("pp", "dp"))
        options: dict[str, Any] = {"strategy": "data_parallel", "hardware": "cpu"}
        return autopar.compile(
            model, on, (batch(0),), microbatches=2, **by_flag(pipeline="pp", schedule="1f1b", **options)
        )

    def batch(step: int) -> Tensor:
        return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(step))

    first, other, file = compiled(1), compiled(9), io.BytesIO()
    losses = [float(first.train_step(batch(step))) for step in range(2)]
    torch.save(first.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    losses += [float(first.train_step(batch(step))) for step in (2, 3)]
    return losses, [float(other.train_step(batch(step))) for step in (2, 3)]


def test_stages_draw_alike_on_all_ranks_and_go_on_after_a_resume(ranks: Ranks) -> None:
    found = ranks.run(_losses, world_size=4)
    assert all(each == found[0] for each in found)
    losses, resumed = found[0]
    assert losses[2:] == resumed
    assert len(set(losses)) == len(losses)
