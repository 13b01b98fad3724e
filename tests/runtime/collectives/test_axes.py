"""Joined axes at run time: which ranks they join, and what moves over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.errors import MeshError
from autopar.ir.sharding.mesh import joined_axes
from autopar.runtime.collectives import gathering
from autopar.runtime.collectives.gradient_buckets import gather_parameters, reduce_gradients
from autopar.runtime.collectives.mesh_axes import (
    axis_of,
    gathering_groups,
    join_axes,
    made_groups,
    record_traffic,
    use_mesh,
)
from autopar.runtime.collectives.regather import Regather
from autopar.runtime.module.executable import gathering_axes
from tests.support.families import HIDDEN, MLP
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks, local_values, simulate

NAMES = ("x", "y", "z")
ROWS, COLUMNS = 16, 3
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def _line(rank: int, shape: Sequence[int], joined: str) -> list[int]:
    """The ranks that stand with one on joined axes, in the order of the mesh."""
    axes = joined_axes(NAMES[: len(shape)])[joined]
    place = np.unravel_index(rank, shape)
    index = tuple(slice(None) if axis in axes else place[axis] for axis in range(len(shape)))
    return np.arange(math.prod(shape)).reshape(shape)[index].flatten().tolist()


def _part(rank: int, shape: Sequence[int], joined: str) -> Tensor:
    line = _line(rank, shape, joined)
    return WHOLE.chunk(len(line))[line.index(rank)]


def _moved(joined: str, part: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A weight that is gathered (and again in the backward), and one whose gradient is reduced."""
    (whole,) = gather_parameters(joined, (0,), (ROWS,), part, regather=(0,))
    (same,) = reduce_gradients(joined, weight)
    (whole.square().sum() * scale + (same * scale).sum()).backward()
    return whole


def _check(shape: Sequence[int], joined: str, wholes: Any, parts: Any, weights: Any) -> None:
    """Check every rank's gathered weight, and the gradients of a loss that is scaled by 1 + rank."""
    for rank in range(math.prod(shape)):
        line = _line(rank, shape, joined)
        scale = float(sum(1 + each for each in line))
        torch.testing.assert_close(wholes[rank], WHOLE)
        torch.testing.assert_close(parts[rank], 2 * scale * _part(rank, shape, joined))
        torch.testing.assert_close(weights[rank], torch.full((5,), scale))


@pytest.mark.parametrize("joined", ["x_y", "x_z", "y_z", "x_y_z"])
def test_weights_move_over_joined_axes_on_simulated_ranks(joined: str) -> None:
    shape = (2, 2, 2)
    shards = [_part(rank, shape, joined) for rank in range(8)]
    scales = [torch.tensor(1.0 + rank) for rank in range(8)]
    ones = [torch.ones(5) for _ in range(8)]
    with simulate(8):
        cube = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
        part, weight = from_ranks(shards, requires_grad=True), from_ranks(ones, requires_grad=True)
        with use_mesh(cube, join_axes(cube, (joined,))):
            whole = _moved(joined, part, weight, from_ranks(scales))
        _check(shape, joined, local_values(whole), local_values(part.grad), local_values(weight.grad))


def _on_ranks(shape: tuple[int, ...], joined: str, compiles: bool) -> tuple[Any, ...]:
    grid = mesh(shape, NAMES[: len(shape)])
    rank = grid.get_rank()
    part, weight = _part(rank, shape, joined).clone().requires_grad_(), torch.ones(5, requires_grad=True)
    groups = join_axes(grid, (joined,))
    with use_mesh(grid, groups), Regather(), record_traffic() as traffic:
        if compiles:
            whole, same = torch.compile(_gathered_and_reduced, fullgraph=True, backend="aot_eager")(
                joined, part, weight
            )
            ((whole.square().sum() + same.sum()) * (1.0 + rank)).backward()
        else:
            whole = _moved(joined, part, weight, torch.tensor(1.0 + rank))
    return whole.detach(), part.grad, weight.grad, dict(traffic.num_bytes)


def _gathered_and_reduced(joined: str, part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    (whole,) = gather_parameters(joined, (0,), (ROWS,), part)
    (same,) = reduce_gradients(joined, weight)
    return whole, same


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shape", "joined"), [((2, 2), "x_y"), ((2, 2, 2), "x_z")])
def test_weights_move_over_joined_axes_on_ranks(ranks: Ranks, shape: tuple[int, ...], joined: str) -> None:
    wholes, parts, weights, traffic = zip(
        *ranks.run(_on_ranks, shape, joined, False, world_size=math.prod(shape)), strict=True
    )
    _check(shape, joined, wholes, parts, weights)
    num_bytes = ROWS * COLUMNS * 4
    for each in traffic:
        assert each == {
            ("all_gather", joined): 2 * num_bytes,
            ("reduce_scatter", joined): num_bytes,
            ("all_reduce", joined): 5 * 4,
        }


@pytest.mark.slow
def test_moves_over_joined_axes_compile(ranks: Ranks) -> None:
    wholes, parts, weights, _ = zip(*ranks.run(_on_ranks, (2, 2), "x_y", True, world_size=4, timeout=300), strict=True)
    _check((2, 2), "x_y", wholes, parts, weights)


def _in_another_order() -> tuple[Tensor, int]:
    """A gather on a mesh whose second axis is the outer one on the machine."""
    grid = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("x", "y"))
    with use_mesh(grid, join_axes(grid, ("x_y",))):
        joined, x, y = map(axis_of, ("x_y", "x", "y"))
        (whole,) = gather_parameters("x_y", (0,), (4,), torch.tensor([float(x.rank * 2 + y.rank)]))
    return whole, joined.rank - x.rank * 2 - y.rank


def test_parts_are_in_the_order_of_the_mesh(ranks: Ranks) -> None:
    for whole, off in ranks.run(_in_another_order, world_size=4):
        assert (whole.tolist(), off) == ([0.0, 1.0, 2.0, 3.0], 0)


def _trained(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of groups that a model makes for batches of two sizes, and the collectives that it runs."""
    grid = mesh(shape, names)
    before = len(_registered())
    options: Any = {"hardware": SLOW_DEVICES, "strategy": "data_parallel", "outputs": "dtensor"}
    model = autopar.compile(MLP(), grid, (torch.ones(8, HIDDEN),), **by_flag(**options))
    with record_traffic() as traffic:
        for size in (8, 4):
            model(torch.ones(size, HIDDEN)).sum().backward()
    return len(_registered()) - before, sorted(traffic.num_bytes)


def _registered() -> Any:
    return dist.distributed_c10d._world.pg_names


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "names", "joined"), [((2, 2), ("x", "y"), "x_y"), ((2, 1, 2), ("x", "one", "y"), "x_y")]
)
def test_all_ranks_are_joined_in_the_worlds_own_group(
    ranks: Ranks, shape: tuple[int, ...], names: tuple[str, ...], joined: str
) -> None:
    assert ranks.run(_trained, shape, names, world_size=4) == [(0, [("all_reduce", joined)])] * 4


def _made_again() -> tuple[int, list[str]]:
    cube = mesh((2, 2, 2), NAMES)
    names = [join_axes(each, ("y_z",))["y_z"] for each in (cube, cube["y", "z"], cube["y", "z"])]
    return len(made_groups()), names


def test_a_group_is_made_once(ranks: Ranks) -> None:
    for count, (first, *others) in ranks.run(_made_again, world_size=8):
        assert count == 1 and set(others) == {first}


def test_joined_axes_without_a_group_are_refused() -> None:
    with simulate(4), use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))):  # noqa: SIM117
        with pytest.raises(MeshError, match="no axis 'x_y' on the current mesh"):
            axis_of("x_y")


def _gathered_apart() -> tuple[int, bool, list[Tensor], list[Tensor | None]]:
    """Groups made for two kinds of inputs, whether both gathers ran there, a weight and its part's gradient."""
    line = mesh((2,), ("x",))
    rank, before = line.get_rank(), len(made_groups())
    groups, again = (gathering_groups(line, ("x",)) for _ in range(2))
    assert groups == again
    shard = torch.full((1,), float(rank), requires_grad=True)
    with use_mesh(line, {}, groups):
        ran: list[str] = []
        gather = gathering.rows_in_flight
        with mock.patch.object(gathering, "rows_in_flight", lambda *given: (ran.append(given[2]), gather(*given))[1]):
            with Regather(1):
                (whole,) = gather_parameters("x", (0,), (2,), shard, regather=(0,), layer=0)
                loss = (whole * whole).sum()
            loss.backward()
        apart = ran == [groups["x"]] * 2 and groups["x"] != axis_of("x").group
    return len(made_groups()) - before, apart, [whole], [shard.grad]


def test_weights_are_gathered_in_a_group_of_their_own(ranks: Ranks) -> None:
    for rank, (made, apart, (whole,), (gradient,)) in enumerate(ranks.run(_gathered_apart)):
        assert made == 1
        assert apart
        assert whole.tolist() == [0.0, 1.0]
        assert gradient is not None and gradient.tolist() == [4.0 * rank]


@pytest.mark.parametrize(
    ("strategy", "prefetch", "axes"),
    [("zero3", 1, ("x",)), ("zero3", 0, ()), ("zero2", 1, ()), ("data_parallel", 1, ())],
)
def test_plans_that_gather_and_reduce_in_the_backward_gather_apart(
    strategy: str, prefetch: Literal[0, 1], axes: tuple[str, ...]
) -> None:
    on = autopar.Mesh({"x": 2})
    plan = autopar.plan(
        MLP(), on, (torch.ones(8, HIDDEN),), strategy=strategy, memory=autopar.Memory(prefetch=prefetch)
    )
    assert gathering_axes(plan) == axes
