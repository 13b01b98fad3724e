"""On parameters in parts, however they are split: as on whole ones, with state that is split as planned."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from autopar.optim import GaLoreAdamW, Muon
from autopar.tools.benchmarking.meters import LiveBytes
from tests.support.parity import whole
from tests.support.ranks import Ranks, mesh

STEPS = 5
SHAPES = ((24, 12), (12, 24), (16, 16), (14, 9))
R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: dict[tuple[int, ...], tuple[tuple[Placement, ...], ...]] = {
    (2,): ((S0,), (S1,), (R,)),
    (2, 2): ((S0, S0), (S0, S1), (S1, S0), (S1, S1), (R, S0), (S1, R)),
}
KINDS: dict[str, tuple[type[Muon] | type[GaLoreAdamW], dict[str, Any]]] = {
    "muon": (Muon, {"lr": 0.02}),
    "galore": (GaLoreAdamW, {"lr": 0.01, "rank": 4, "update_proj_gap": 2}),
}


def _updated(kind: str, shape: tuple[int, ...], placements: tuple[Placement, ...] | None) -> tuple[list[Any], int]:
    """Matrices after some steps, whole, and the elements of optimizer state that this rank has."""
    generator = torch.Generator().manual_seed(0)

    def made(size: tuple[int, ...]) -> Tensor:
        values = torch.randn(size, generator=generator)
        if placements is None:
            return values
        return distribute_tensor(values, mesh(shape, ("dp", "tp")[: len(shape)]), placements)

    weights: list[Any] = [nn.Parameter(made(size)) for size in SHAPES]
    made_by, settings = KINDS[kind]
    optimizer = made_by([(f"layers.{i}.w", each) for i, each in enumerate(weights)], **settings)
    for _ in range(STEPS):
        for weight, size in zip(weights, SHAPES, strict=True):
            weight.grad = made(size)
        optimizer.step()
    state = [x for values in optimizer.state.values() for x in values.values() if x.ndim]
    held = sum(x.to_local().numel() if isinstance(x, DTensor) else x.numel() for x in state)
    assert placements is None or all(tuple(weight.placements) == placements for weight in weights)
    return [whole(weight) for weight in weights], held


def _every_layout(shape: tuple[int, ...]) -> dict[tuple[str, str], tuple[list[Any], int]]:
    return {(k, str(p)): _updated(k, shape, p) for k in KINDS for p in LAYOUTS[shape]}


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_matrices_in_parts_are_updated_as_whole_ones_with_state_in_as_many_parts(
    ranks: Ranks, shape: tuple[int, ...]
) -> None:
    num_ranks = math.prod(shape)
    every = ranks.run(_every_layout, shape, world_size=num_ranks)
    for kind in KINDS:
        wanted, held = _updated(kind, shape, None)
        for placements in LAYOUTS[shape]:
            for found in every:
                at = f"{kind} in {placements}"
                torch.testing.assert_close(found[kind, str(placements)][0], wanted, msg=lambda m, at=at: f"{at}: {m}")
            split = 2 ** sum(each.is_shard() for each in placements)
            assert sum(found[kind, str(placements)][1] for found in every) == num_ranks * held / split


def _bytes_of_a_step(size: tuple[int, int]) -> int:
    """Return the peak bytes of Muon's second step on two sharded matrices, beyond the resident bytes."""
    on = mesh((2,), ("dp",))
    weights: list[Any] = [nn.Parameter(distribute_tensor(torch.randn(size), on, (S0,))) for _ in range(2)]
    muon = Muon([(f"layers.{number}.w", each) for number, each in enumerate(weights)])
    for weight in weights:
        weight.grad = distribute_tensor(torch.randn(size), on, (S0,))
    muon.step()
    live = LiveBytes([*weights, *(each.grad for each in weights), *(s["momentum_buffer"] for s in muon.state.values())])
    held = live.look()
    with live:
        muon.step()
    return live.highest - held


@pytest.mark.parametrize("size", [(96, 64), (48, 160), (64, 64)])
def test_muon_has_one_matrix_at_a_time_whole_three_times_in_bfloat16_and_two_squares(
    ranks: Ranks, size: tuple[int, int]
) -> None:
    short, long = sorted(size)
    for found in ranks.run(_bytes_of_a_step, size):
        assert found == pytest.approx(6 * short * long + 4 * short * short, rel=0.01)
