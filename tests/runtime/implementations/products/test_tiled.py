"""Products by weights in tiles train as one process does, whatever the tiles, and move the bytes that are predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import autopar
from autopar.runtime.collectives.mesh_axes import record_traffic, use_mesh
from autopar.runtime.implementations.products.tiled import linear
from autopar.strategies.rules.products import tiled
from autopar.strategies.rules.products.tiled import NAME, tile_sizes
from tests.runtime.implementations.products.test_chunked import Block, batch
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.training import Steps, train_alike


def annotated(model: Block, axis: str, rows: str) -> Block:
    """Both products in tiles over an axis that splits some rows of all that lies around them."""
    names = ("up.linear", "down.linear")
    if model.as_matmul:
        names = ("%matmul_default", "%matmul_default_1")
    for name, factor in zip(names, ("o", "k"), strict=True):
        specified: Any = {axis: f"factor:{factor}+{rows} via {NAME}"}
        autopar.annotate(model, name, **specified)
    around: Any = {axis: int(rows.removeprefix("...")) if rows.startswith("...") else 0}
    for norm in ("norm", "last"):
        autopar.annotate(model, norm, **around)
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("tile_bytes", [64, pytest.param(2**26, id="two", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mesh", "rows", "options"),
    [
        ({"dp": 2}, "...0", {}),
        ({"dp": 4}, "...1", {"bias": False}),
        ({"dp": 2}, "a0", {"as_matmul": True}),
        ({"dp": 2, "tp": 2}, "...0", {}),
        pytest.param({"tp": 2, "dp": 2}, "...1", {}, marks=pytest.mark.slow),
    ],
    ids=["samples", "positions", "matmul", "dp x tp", "tp x dp"],
)
def test_they_train_as_one_process_does(
    mesh: Mapping[str, int],
    rows: str,
    options: dict[str, bool],
    tile_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiled, "TILE_BYTES", tile_bytes)
    steps = Steps([batch(4, 8), batch(4, 8)])
    plan = train_alike(annotated(Block(**options).double(), "dp", rows), steps, mesh, {})
    chosen = [name for name in plan.choices.values() if name.endswith(NAME)]
    assert ["o+" in chosen[0], "k+" in chosen[1], len(chosen)] == [True, True, 2]


@pytest.mark.parametrize(
    ("size", "num_bytes", "expected"),
    [(8, 100, (2, 2, 2, 2)), (8, 10, (4, 4)), (7, 80, (2, 2, 3)), (3, 10**6, (1, 1, 1)), (1, 10, (1,))],
)
def test_tiles_are_as_equal_as_they_can_be(
    size: int, num_bytes: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE_BYTES", 27)
    assert tile_sizes(size, num_bytes) == expected


def _eager_and_compiled(factor: str) -> list[Tensor]:
    """A product, with the gradients of all operands, as it is and compiled."""
    ranks_mesh, found = mesh((2,), ("dp",)), []
    torch.manual_seed(0)
    shape = (6, 8) if factor == "o" else (12, 4)
    given = [each.requires_grad_() for each in (torch.randn(4, 3, 8), torch.randn(shape), torch.randn(12))]

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        axes: dict[str, Any] = {"...0": ("dp",), factor: ("dp",)}
        return linear(x, weight, bias, axes=axes, sizes={}).tanh().square().sum()

    with mock.patch.object(tiled, "TILE_BYTES", 64), use_mesh(ranks_mesh):
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            loss = function(*given)
            found += [loss, *torch.autograd.grad(loss, given)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["o", "k"])
def test_they_compile(ranks: Ranks, factor: str) -> None:
    for found in ranks.run(_eager_and_compiled, factor, timeout=300):
        torch.testing.assert_close(found[:4], found[4:])
        assert all(x.abs().sum() > 0 for x in found)


def _in_two_halves() -> list[dict[str, int]]:
    """Collectives of the forward, of the gradient of the rows, and of that of the weight."""
    ranks_mesh, found = mesh((2,), ("dp",)), []
    x, weight = torch.randn(4, 3, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    with use_mesh(ranks_mesh):
        with record_traffic() as traffic:
            loss = linear(x, weight, axes={"...0": ("dp",), "o": ("dp",)}, sizes={}).square().sum()
        found.append({name: num_bytes for (name, _), num_bytes in traffic.num_bytes.items()})
        for each in (x, weight):
            with record_traffic() as traffic:
                torch.autograd.grad(loss, each, retain_graph=True)
            found.append({name: num_bytes for (name, _), num_bytes in traffic.num_bytes.items()})
    return found


def test_a_backward_in_two_halves_moves_for_each_what_it_needs(ranks: Ranks) -> None:
    whole = 12 * 8 * 4
    assert ranks.run(_in_two_halves) == [[{"all_gather": whole}, {"all_gather": whole}, {"reduce_scatter": whole}]] * 2
