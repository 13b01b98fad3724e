"""Memory of frameworks besides a plan's tensors: every switch of `MemoryConventions`, in the bytes of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.planning.pipeline.plan import PipelinePlan
from tests.support.options import by_flag

BATCH, WIDTH, CLASSES = 64, 16, 512
INPUTS = (torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.int64))
ONE = {"dp": 1}
NOTHING = MemoryConventions(1.0, 0, 0, 0)


class Classifier(nn.Module):
    """Dropout between two layers, and a loss over many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x_BD: Tensor, target_B: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x_BD)), target_B)


def _planned(mesh: dict[str, int] | None = None, **options: Any) -> Any:
    requested: dict[str, Any] = {"strategy": "data_parallel", "recompute": "none", "loss_tiles": "none", **options}
    return autopar.plan(Classifier(), autopar.Mesh(mesh or ONE), INPUTS, **by_flag(**requested))


def _saved(plan: Plan, operation: str) -> int:
    return sum(row.saved_bytes for row in plan.rows if row.operation == operation)


@pytest.mark.parametrize(("mesh", "ranks"), [(ONE, 1), ({"dp": 2}, 2)], ids=["alone", "dp"])
def test_masks_of_dropout_take_a_byte_per_element_of_the_rank(mesh: dict[str, int], ranks: int) -> None:
    drawn, saved = _planned(mesh), _planned(mesh, memory_conventions=replace(NOTHING, dropout_masks=True))
    assert _saved(drawn, "dropout") == 0
    assert _saved(saved, "dropout") == 2 * BATCH * WIDTH // ranks


@pytest.mark.parametrize(("mesh", "ranks"), [(ONE, 1), ({"dp": 2}, 2)], ids=["alone", "dp"])
def test_a_loss_in_place_has_one_tensor_of_its_logits(mesh: dict[str, int], ranks: int) -> None:
    """Elsewhere there are logits or probabilities that are kept, what the backward makes of them, and the gradient."""
    usual, in_place = _planned(mesh), _planned(mesh, memory_conventions=replace(NOTHING, loss_in_place=True))
    logits = 4 * BATCH * CLASSES // ranks
    loss = "cross_entropy_loss"
    of_loss = [
        max(each.num_bytes for each in plan.memory.timeline if loss in each.name and each.backward)
        for plan in (usual, in_place)
    ]
    assert _saved(usual, loss) >= logits and _saved(in_place, loss) < logits / 10
    assert of_loss[0] - of_loss[1] == pytest.approx(2 * logits, rel=0.01)


def test_main_gradients_last_through_a_step_of_one_micro_batch() -> None:
    plain, lasting = _planned(), _planned(memory_conventions=replace(NOTHING, main_gradients=True))
    gradients = 4 * sum(parameter.numel() for parameter in Classifier().parameters())
    first = [next(each.num_bytes for each in plan.memory.timeline if not each.backward) for plan in (plain, lasting)]
    assert first[1] - first[0] == gradients
    assert lasting.seconds == pytest.approx(plain.seconds)
    assert lasting.verify().ok
    assert (
        lasting.attach(Classifier(), INPUTS, memory=autopar.Memory(conventions=replace(NOTHING, main_gradients=True)))
        .verify()
        .ok
    )


def test_stages_hold_main_gradients_and_masks_too() -> None:
    specified: dict[str, Any] = {"microbatches": 2, "schedule": "gpipe"}
    usual = _planned({"pp": 2}, memory_conventions="tensors", **specified)
    megatron = _planned({"pp": 2}, memory_conventions=replace(NOTHING, dropout_masks=True), **specified)
    assert isinstance(usual, PipelinePlan) and isinstance(megatron, PipelinePlan)
    masks = [sum(_saved(stage.plan, "dropout") for stage in plan.stages) for plan in (usual, megatron)]
    assert masks == [0, 2 * BATCH // 2 * WIDTH]


def test_a_limit_counts_what_the_framework_holds() -> None:
    free = _planned(strategy=None, memory_conventions="tensors")
    with pytest.raises(autopar.InfeasibleError):
        _planned(memory=free.peak_bytes, memory_conventions=replace(NOTHING, main_gradients=True))
