"""Steps that are graphs next to what else a user asks for: they train bit for bit as steps without a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing import assert_close

import autopar
from autopar.runtime.step_graphs.step import WARM_UP
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh
from tests.support.recorded_calls import RecordedCalls

STEPS = WARM_UP + 3
WORDS, HIDDEN = 16, 8
PATIENCE = 240.0  # seconds, on a busy machine
BUCKETS = autopar.Buckets(lengths=(4, 8), padding={"ids": 0, "labels": -100})


class Words(nn.Module):
    """A tower on words, with a second head that only some calls use and a weight that none does; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.up, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, WORDS)
        self.second, self.unused = nn.Linear(HIDDEN, 1), nn.Parameter(torch.zeros(3))

    def forward(self, ids: Tensor, labels: Tensor, both: bool = False) -> Tensor:
        x = self.embedding(ids)
        y = self.head(F.dropout(F.gelu(self.up(x)), 0.1, self.training))
        loss = F.cross_entropy(y.flatten(0, 1), labels.flatten())
        return loss + self.second(x).square().mean() if both else loss


def _batch(number: int, samples: int = 8, length: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids, labels = torch.randint(WORDS, (2, samples, length), generator=generator)
    return ids, labels


def _local(x: Tensor | None) -> Tensor | None:
    return x if x is None else (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


Body = Callable[[Any, Callable[[], list[Any]]], list[Any]]
"""(model, what gives gradients and parameters) → results of a training."""


def _both(body: Body, axes: dict[str, int], example: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Results of training as graphs and without, captures and replays."""
    found: list[Any] = []
    recorder = RecordedCalls()
    for graphed in (True, False):
        on = mesh(tuple(axes.values()), tuple(axes))
        model: Any = autopar.compile(Words(), on, example, **by_flag(seed=3, **options))
        if graphed:
            model.capture_steps(True, recorder)

        def state(model: Any = model) -> list[Any]:
            return [_local(x) for each in model.parameters() for x in (each, each.grad)]

        found.append(body(model, state))
    return found[0], found[1], recorder.captures, recorder.replays


def _frozen_and_unused(model: Any, state: Callable[[], list[Any]]) -> list[Any]:
    """Decay would move what has a gradient of zeros in place of none."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5), []
    for number in range(3 * STEPS):
        for each in model.up.parameters():
            each.requires_grad_(not STEPS <= number < 2 * STEPS)
        model.train_step(*_batch(number), both=number < 2 * STEPS)
        found.append(state())
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 5 != 3)
    return found


def _lengths(model: Any, state: Callable[[], list[Any]]) -> list[Any]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    parts = bool(model.axes_of_parts)
    for number in range(3 * STEPS):
        length = (3, 8, 2, 7, 4)[(number + parts * dist.get_rank()) % 5]
        found.append([model.train_step(*_batch(number, 4, length)).clone(), state()])
        optimizer.step()
        optimizer.zero_grad()
    return found


def _scaled(model: Any, state: Callable[[], list[Any]]) -> list[Any]:
    """A scale that overflows, then grows."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    model.scaler = ShardedGradScaler("cpu", init_scale=2.0**20, growth_interval=2, process_group=dist.group.WORLD)
    for number in range(2 * STEPS):
        found.append([model.train_step(*_batch(number)).clone(), model.scaler.get_scale(), state()])
        model.scaler.step(optimizer)
        model.scaler.update()
        optimizer.zero_grad()
    return found


def _compiled(model: Any, state: Callable[[], list[Any]]) -> list[Any]:
    elsewhere = [object() for _ in range(100 * dist.get_rank())]  # objects of ranks have different addresses
    model.compile(backend="aot_eager", regional=True)
    del elsewhere
    found = []
    for number in range(STEPS):
        found.append([model.train_step(*_batch(number)).clone(), state()])
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("body", "axes", "example", "options", "captures"),
    [
        (_frozen_and_unused, {"dp": 2}, _batch(0), {"strategy": "zero3"}, 3),
        (_lengths, {"dp": 2}, _batch(0, 4), {"strategy": "zero3", "inputs": "local", "buckets": BUCKETS}, 1),
        pytest.param(_lengths, {"pp": 2}, _batch(0, 4), {"buckets": BUCKETS}, 2, marks=pytest.mark.slow),
        pytest.param(_scaled, {"dp": 2}, _batch(0), {"precision": "fp16-mixed"}, 1, marks=pytest.mark.slow),
        (_compiled, {"dp": 2}, _batch(0), {"strategy": "zero3"}, 1),
    ],
)
def test_a_step_as_a_graph_trains_as_one_without(
    body: Body, axes: dict[str, int], example: Any, options: dict[str, Any], captures: int, ranks: Ranks
) -> None:
    for found, expected, captured, replays in ranks.run(_both, body, axes, example, options, timeout=PATIENCE):
        assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert captured == captures and replays >= captures
