"""A pipeline's last stage takes its loss in tiles where a memory limit asks for it, and trains as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import InfeasibleError, PipelineError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from tests.support.optimizing import losses_of
from tests.support.options import by_flag
from tests.support.parity import whole
from tests.support.ranks import Ranks, mesh

CLASSES, HIDDEN, STEPS = 4096, 32, 3
NAME = "linear_cross_entropy"


class Classes(nn.Module):
    """Layers, and a head of so many classes that the last stage is mostly logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSD = x_BSD + torch.relu(layer(x_BSD))
        return F.cross_entropy(self.head(x_BSD).flatten(0, 1), labels_BS.flatten())


class Wide(Classes):
    """Layers that can be computed again where memory asks for it."""

    def __init__(self) -> None:
        super().__init__()
        wide = 16 * HIDDEN
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, wide), nn.GELU(), nn.Linear(wide, HIDDEN)) for _ in range(6)
        )


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 64, HIDDEN, generator=generator), torch.randint(0, CLASSES, (16, 64), generator=generator)


def _planned(memory: int | None = None, model: type[Classes] = Classes, **options: Any) -> PipelinePlan:
    specified: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "memory_conventions": "tensors", **options}
    plan = autopar.plan(
        model(), Mesh({"pp": 2, "dp": 2}, hardware="h100"), _batch(0), **by_flag(memory=memory, **specified)
    )
    assert isinstance(plan, PipelinePlan)
    return plan


def _takes_tiles(plan: PipelinePlan) -> list[bool]:
    texts = [stage.plan.descriptions.values() for stage in plan.stages]
    return [any(text.startswith(NAME) for text in each) for each in texts]


def test_without_a_limit_that_binds_the_loss_stays_in_one_piece() -> None:
    free = _planned()
    assert _takes_tiles(free) == [False, False]
    assert _takes_tiles(_planned(2 * free.peak_bytes)) == [False, False]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param(None, marks=pytest.mark.slow)])
def test_a_limit_that_leaves_nothing_takes_tiles_on_the_last_stage(schedule: str | None) -> None:
    limit = int(0.6 * _planned().peak_bytes)
    specified: dict[str, Any] = {} if schedule else {"schedule": None, "microbatches": None}
    plan = _planned(limit, **specified)
    assert _takes_tiles(plan)[-1] and not any(_takes_tiles(plan)[:-1])
    assert plan.peak_bytes <= limit
    assert PipelinePlan.from_json(plan.to_json()) == plan


def test_in_one_piece_nothing_fits_and_says_so() -> None:
    limit = int(0.6 * _planned().peak_bytes)
    with pytest.raises((PipelineError, InfeasibleError)):
        _planned(limit, loss_tiles="none")


def test_a_limit_that_costs_time_takes_tiles_where_they_are_faster() -> None:
    specified: dict[str, Any] = {"model": Wide, "split_points": ["layers.1"]}
    limit = int(0.9 * _planned(**specified).peak_bytes)
    as_it_is, plan = _planned(limit, loss_tiles="none", **specified), _planned(limit, **specified)
    assert set(as_it_is.stages[1].plan.recompute.values()) != {"none"}
    assert _takes_tiles(plan) == [False, True] and plan.seconds < as_it_is.seconds
    assert plan.peak_bytes <= limit


Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def _trained(shape: tuple[int, ...], memory: int | None, saved: str | None) -> tuple[list[bool], Trained]:
    specified: dict[str, Any] = {"memory": memory} if saved is None else {"plan": PipelinePlan.from_json(saved)}
    on = mesh(shape, ("pp", "dp")[: len(shape)])
    module = autopar.compile(Classes(), on, _batch(0), microbatches=4, **by_flag(schedule="1f1b", **specified))
    assert isinstance(module, PipelineModule)
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(module.train_step(*_batch(step))))
        optimizer.step()
    named = dict(module.named_parameters())
    gradients = {name: whole(each.grad) for name, each in named.items()}
    found = losses, gradients, {name: whole(each) for name, each in named.items()}
    return _takes_tiles(module.plan), found  # type: ignore[return-value]


def _alone() -> Trained:
    model = Classes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses = losses_of(optimizer, range(STEPS), lambda step: model(*_batch(step)))
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return losses, gradients, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shape", "is_saved"), [((2,), False), ((2, 2), False), ((2, 2), True)])
def test_a_last_stage_in_tiles_trains_as_one_process(ranks: Ranks, shape: tuple[int, ...], is_saved: bool) -> None:
    sizes: dict[str, int] = dict(zip(("pp", "dp"), shape, strict=False))
    specified: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4}

    def plan(memory: int | None) -> PipelinePlan:
        found = autopar.plan(Classes(), Mesh(sizes, hardware="cpu"), _batch(0), **by_flag(memory=memory, **specified))
        assert isinstance(found, PipelinePlan)
        return found

    limit = int(0.6 * plan(None).peak_bytes)
    saved = plan(limit).to_json() if is_saved else None
    world = torch.Size(shape).numel()
    losses, gradients, parameters = _alone()
    for tiles, found in ranks.run(_trained, shape, limit, saved, world_size=world, timeout=120):
        assert tiles == [False, True]
        torch.testing.assert_close(found[0], losses, rtol=1e-4, atol=1e-5)
        for expected, here in ((gradients, found[1]), (parameters, found[2])):
            for name, each in here.items():
                torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=1e-5)
