"""Notes on a search of meshes that is not as usual: without estimates, or of a model that is captured whole again."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.plans.plan import Plan
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES

EXACT = "planned on every mesh without estimates: "
X_BD = torch.zeros(8, 8)


class Stack(nn.Module):
    """Equal layers between a first and a last product, which the forward takes by number where it is told to."""

    def __init__(self, num_layers: int, by_number: bool = False) -> None:
        super().__init__()
        self.num_layers, self.by_number = num_layers, by_number
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        made = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(num_layers))
        self.layers = nn.ModuleList(made)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.stem(x_BD)
        layers = [self.layers[number] for number in range(self.num_layers)] if self.by_number else self.layers
        for layer in layers:
            x_BD = layer(x_BD)
        return self.head(x_BD).sum()


def notes_of(model: nn.Module, **options: Any) -> tuple[Any, tuple[str, ...]]:
    plan: Any = autopar.plan  # whose overloads know a mesh or "auto", not either
    found = plan(model, "auto", (X_BD,), devices=4, **by_flag(**{"hardware": SLOW_DEVICES, **options}))
    assert found.comparison is not None
    return found, found.comparison.notes


@pytest.mark.parametrize(
    ("num_layers", "options", "reason"),
    [
        (2, {}, "few or none of the model's layers repeat"),
        (12, {"training": False}, "a forward is planned alone"),
        (12, {"offload": "optimizer", "hardware": "h100"}, "Memory(offload='optimizer') is given"),
        (
            12,
            {"pipeline": "pp", "schedule": "pipedream_2bw", "microbatches": 4},
            "schedule 'pipedream_2bw' updates parameters otherwise than once a step",
        ),
    ],
    ids=["no layers", "forward", "offload", "pipedream"],
)
def test_a_search_without_estimates_says_why(num_layers: int, options: dict[str, Any], reason: str) -> None:
    assert notes_of(Stack(num_layers), **options)[1] == (EXACT + reason,)


def test_a_search_after_estimates_without_a_plan_says_so() -> None:
    with mock.patch("autopar.compiler.offline._estimated", return_value=None):
        assert notes_of(Stack(12))[1] == (f"{EXACT}no candidate that was estimated has a plan",)


def test_a_model_that_is_captured_whole_for_further_batches_is_stated() -> None:
    plan, notes = notes_of(Stack(12, by_number=True), pipeline="pp")
    (note,) = notes
    assert note.startswith("the whole model was captured for ") and "does not run with fewer layers" in note
    assert note in " ".join(str(plan).split())


def test_notes_are_in_the_table_and_in_the_file_of_a_plan() -> None:
    plan, (note,) = notes_of(Stack(2))
    assert note in " ".join(str(plan).split())
    kept = Plan.from_json(plan.to_json()).comparison
    assert kept is not None and kept.notes == (note,)


def test_estimated_candidates_of_repeated_layers_are_the_usual_search() -> None:
    assert notes_of(Stack(12))[1] == ()
