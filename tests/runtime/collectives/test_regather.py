"""Weights that are gathered again for the backward: those of the next layers are prefetched."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.runtime.collectives import regather
from autopar.runtime.collectives.gathering import InFlight, start_gather
from autopar.runtime.collectives.gradient_buckets import gather_parameters
from autopar.runtime.collectives.mesh_axes import record_traffic, use_mesh
from autopar.runtime.collectives.regather import Regather
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks, local_values, simulate

WIDTH, LAYERS = 6, 4
AXIS = "x"


def _shards(rank: int) -> list[list[Tensor]]:
    """This rank's rows of the weights: layer n has n + 1 of them, which tells it by its number of weights."""
    torch.manual_seed(0)
    whole = [[torch.randn(WIDTH, WIDTH) for _ in range(n + 1)] for n in range(LAYERS)]
    return [[each.chunk(2)[rank].clone().requires_grad_() for each in layer] for layer in whole]


def _forward(x: Tensor, shards: list[list[Tensor]], depth: int, log: list[str]) -> Tensor:
    with Regather(depth):
        for number, layer in enumerate(shards):
            count = len(layer)
            weights = gather_parameters(
                AXIS, (0,) * count, (WIDTH,) * count, *layer, regather=tuple(range(count)), layer=number
            )
            for weight in weights:
                x = torch.nn.functional.linear(x, weight)
            x = torch.tanh(x)
            assert x.grad_fn is not None
            x.grad_fn.register_hook(lambda *_, number=number: log.append(f"layer {number}"))
    return x.sum()


@contextlib.contextmanager
def _logged(log: list[str]) -> Iterator[None]:
    """Note which layers are issued, and which arrive."""
    issued, arrived = regather.issued, InFlight.arrived

    def issue(recipe: Any, parts: Any) -> InFlight:
        log.append(f"issue {len(recipe.dims) - 1}")
        return issued(recipe, parts)

    def arrive(self: InFlight, *arguments: Any) -> tuple[Tensor, ...]:
        log.append(f"arrive {len(self.recipe.dims) - 1}")
        return arrived(self, *arguments)

    with mock.patch.object(regather, "issued", issue), mock.patch.object(InFlight, "arrived", arrive):
        yield


def _events(depth: int, in_order: bool) -> list[str]:
    """Return the events in a backward of four layers, in order."""
    line = mesh((2,), (AXIS,))
    log: list[str] = []
    with use_mesh(line), _logged(log):
        loss = _forward(torch.ones(2, WIDTH, requires_grad=True), _shards(line.get_rank()), depth, log)
        log.clear()
        with contextlib.nullcontext() if in_order else Regather.out_of_order():
            loss.backward()
    return log


NONE_AHEAD = ", ".join(f"{what} {n}" for n in (3, 2, 1, 0) for what in ("layer", "issue", "arrive"))


@pytest.mark.parametrize(
    ("depth", "in_order", "expected"),
    [
        (0, True, NONE_AHEAD),
        (1, False, NONE_AHEAD),
        (
            1,
            True,
            "layer 3, issue 3, arrive 3, issue 2, layer 2, arrive 2, issue 1, "
            "layer 1, arrive 1, issue 0, layer 0, arrive 0",
        ),
        (
            2,
            True,
            "layer 3, issue 3, arrive 3, issue 2, issue 1, layer 2, arrive 2, issue 0, "
            "layer 1, arrive 1, layer 0, arrive 0",
        ),
    ],
)
def test_a_layer_is_on_its_way_before_the_products_of_those_behind_it(
    ranks: Ranks, depth: int, in_order: bool, expected: str
) -> None:
    assert ranks.run(_events, depth, in_order) == [expected.split(", ")] * 2


def _num_on_their_way() -> int:
    gc.collect()
    return sum(type(each) is InFlight and bool(each.buffers) for each in gc.get_objects())


def _requested_in_parts(depth: int) -> dict[str, Any]:
    """Gradients of the last layer alone, of all twice, and what is left over of the first."""
    line = mesh((2,), (AXIS,))
    shards = _shards(line.get_rank())
    learned, others = [each for layer in shards for each in layer], _num_on_their_way()
    with use_mesh(line), record_traffic() as traffic:
        loss = _forward(torch.ones(2, WIDTH, requires_grad=True), shards, depth, [])
        last = torch.autograd.grad(loss, shards[-1], retain_graph=True)
        left = _num_on_their_way() - others
        before = traffic.calls["all_gather", AXIS]
        found = [torch.autograd.grad(loss, learned, retain_graph=True) for _ in range(2)]
        again = traffic.calls["all_gather", AXIS] - before
    return {"last": last, "all": found, "left": left, "again": again}


def test_what_a_backward_does_not_ask_for_is_let_go_and_gathered_again(ranks: Ranks) -> None:
    (none, _), ahead = ranks.run(_requested_in_parts, 0), ranks.run(_requested_in_parts, 2)
    for found in (ahead[0], none):
        assert found["left"] == 0
        assert found["again"] == 2 * LAYERS
        torch.testing.assert_close(found["all"][0], found["all"][1], rtol=0, atol=0)
    torch.testing.assert_close(ahead[0]["all"], none["all"], rtol=0, atol=0)
    torch.testing.assert_close(ahead[0]["last"], none["last"], rtol=0, atol=0)


def _over_two_axes(depth: int) -> tuple[list[Tensor], int]:
    """Gradients of weights that are gathered over one axis and then over the other, and how many gathers that took."""
    grid = mesh((2, 2), ("y", "x"))
    torch.manual_seed(grid.get_rank())
    shards = [torch.randn(2, 2, requires_grad=True) for _ in range(LAYERS)]
    x = torch.ones(3, 4, requires_grad=True)
    with use_mesh(grid), record_traffic() as traffic:
        with Regather(depth):
            for number, shard in enumerate(shards):
                rows = gather_parameters("x", (0,), (4,), shard, regather=(0,), layer=number)
                x = torch.tanh(x @ gather_parameters("y", (1,), (4,), *rows, regather=(0,), layer=number)[0])
        x.sum().backward()
    return [each.grad for each in shards if each.grad is not None], sum(
        calls for (collective, _), calls in traffic.calls.items() if collective == "all_gather"
    )


def test_weights_that_are_gathered_over_two_axes_are_gathered_no_more_often(ranks: Ranks) -> None:
    for (ahead, count), (expected, _) in zip(
        ranks.run(_over_two_axes, 1, world_size=4), ranks.run(_over_two_axes, 0, world_size=4), strict=True
    ):
        torch.testing.assert_close(ahead, expected, rtol=0, atol=0)
        assert count == 2 * 2 * LAYERS


def test_a_gather_in_flight_is_only_waited_for() -> None:
    parts = [torch.arange(3.0), torch.arange(3.0, 6.0)]
    with simulate(2), use_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=(AXIS,))), record_traffic() as traffic:
        shard = from_ranks(parts, requires_grad=True)
        in_flight = start_gather(AXIS, (0,), (6,), shard)
        assert isinstance(in_flight, InFlight)
        (whole,) = gather_parameters(AXIS, (0,), (6,), shard, in_flight=in_flight)
        assert traffic.calls["all_gather", AXIS] == 1
        assert not in_flight.buffers
        for value in local_values(whole):
            torch.testing.assert_close(value, torch.arange(6.0))
        (whole * whole).sum().backward()
        for value, part in zip(local_values(shard.grad), parts, strict=True):
            torch.testing.assert_close(value, 2 * 2 * part)


class _SavesWhatItMakes(torch.autograd.Function):
    """A function that saves its output, after its forward has made further nodes of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        with torch.enable_grad():
            x.detach().requires_grad_().exp()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return grad * y


@pytest.mark.parametrize("function", [torch.exp, _SavesWhatItMakes.apply])
def test_only_what_a_node_has_made_itself_is_saved_without_its_graph(function: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    given = x * 2
    with Regather():
        found = function(given)
        product = given * found
    assert product.grad_fn._saved_self.data_ptr() == given.data_ptr()  # type: ignore[union-attr]
    (gradient,) = torch.autograd.grad(product.sum(), x, retain_graph=True)
    torch.testing.assert_close(gradient, torch.full((3,), 6 * math.exp(2)))
    memory = weakref.ref(found.untyped_storage())
    gc.disable()  # a node that held its own output would be a cycle that it never finds
    del found, product
    assert memory() is None
    gc.enable()
