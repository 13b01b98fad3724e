"""A plan says where causal attention splits its queries in order, as they do not divide for a zigzag."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.sharding.mesh import Mesh
from tests.support.simulation.training import SLOW_DEVICES, Steps, fault_of, train_alone, train_on_ranks

WORDS, WIDTH = 16, 8


class Text(nn.Module):
    """One causal layer between tokens and the loss of their successors; labels of -100 are ignored."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.qkv, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 24), nn.Linear(WIDTH, WORDS)
        self.causal = causal

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Tokens and labels [batch, positions] → the loss."""
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.table(x)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch(positions: int, padded: int = 0) -> dict[str, Tensor]:
    ids = torch.arange(2 * positions).view(2, -1) * 7 % WORDS
    return {"x": F.pad(ids, (0, padded)), "y": F.pad(ids.roll(-1, 1), (0, padded), value=-100)}


def notes(positions: int, strategy: str | None, mesh: dict[str, int], causal: bool = True) -> tuple[str, ...]:
    plan = autopar.plan(Text(causal), Mesh(mesh), batch(positions), hardware=SLOW_DEVICES, strategy=strategy)
    return plan.notes


@pytest.mark.parametrize("strategy", ["ring", "gather_kv"])
def test_a_plan_says_that_positions_do_not_divide_for_a_zigzag(strategy: str) -> None:
    assert notes(12, strategy, {"cp": 4}) == (
        "positions of causal attention are split in order over cp, and the last device computes up to 1.75 times "
        "its share of the scores: 12 positions do not divide into 8 chunks, to be zigzag-sharded. Pad the sequences "
        "to 16.",
    )


@pytest.mark.parametrize(
    ("positions", "strategy", "causal"), [(16, "ring", True), (12, "ring", False), (12, "ulysses", True)]
)
def test_nothing_is_stated_where_all_devices_compute_alike(positions: int, strategy: str, causal: bool) -> None:
    assert notes(positions, strategy, {"cp": 2 if strategy == "ulysses" else 4}, causal) == ()


def test_sequences_that_are_padded_as_the_messages_say_train_as_those_that_are_not() -> None:
    expected = train_alone(Text().double(), Steps([batch(14), batch(14)]))
    padded = Steps([batch(14, 2), batch(14, 2)])
    trained = train_on_ranks(Text().double(), padded, {"cp": 4}, {"strategy": "ring"})
    assert fault_of(trained, expected) == ""
    assert trained.plan is not None and trained.plan.notes == ()
