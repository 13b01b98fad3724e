"""Gathered weights are the same tensors in every step, empty between, and no one finds them empty."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.collectives.gradient_buckets import gather_parameters
from autopar.runtime.collectives.mesh_axes import use_mesh
from autopar.runtime.collectives.regather import Regather, empty_weights
from autopar.runtime.collectives.reused_weights import ReusedBucket, ReusedBuckets, ReusedWeight
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh

WIDTH, LAYERS = 6, 3


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = x_BD + layer(x_BD)
        return x_BD.square().mean()


def _batch(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _weights() -> list[ReusedWeight]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is ReusedWeight]


def _failing(model: Any, x: Tensor) -> None:
    """Call a model that fails in its second layer."""
    calls = iter(range(100))
    empty = Regather.empty

    def fail(self: Regather, *weights: Tensor) -> None:
        if next(calls) == 4:
            raise RuntimeError("failed")
        empty(self, *weights)

    if isinstance(model, _Layers):
        return
    with mock.patch.object(Regather, "empty", fail), pytest.raises(RuntimeError, match="failed"):
        model(x)


def _steps(model: Any) -> list[Tensor]:
    """Return the losses of steps between which all sorts of things happen."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    batches = [_batch(seed) for seed in range(9)]
    for number, x in enumerate(batches):
        if number == 3:
            _failing(model, x)
        elif number == 4:
            model.layers[1][1].weight.requires_grad_(False)
        elif number == 5:
            model.layers[1][1].weight.requires_grad_(True)
        elif number == 6:
            with torch.no_grad():
                found.append(model(batches[0]))
            model.load_state_dict(model.state_dict())
        loss = model(x)
        if number == 2:
            loss = loss + model(batches[0])
        elif number == 7:
            torch.autograd.grad(loss, list(model.layers[-1].parameters()), retain_graph=True)
            loss.backward(retain_graph=True)
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return found


def _trained(recompute: str, prefetch: int) -> tuple[Any, ...]:
    options: dict[str, Any] = {"strategy": "zero3", "recompute": recompute, "prefetch": prefetch}
    compiled = autopar.compile(_Layers().double(), mesh((2,), ("dp",)), (_batch(0),), **by_flag(**options))
    found = _steps(compiled)
    before = {id(each) for each in _weights()}
    compiled(_batch(0)).backward()
    weights = _weights()
    sizes = {each.storage.nbytes() for each in weights}
    return found, _steps(_Layers().double()), before == {id(each) for each in weights}, sizes, len(ReusedBucket.left)


@pytest.mark.parametrize(("recompute", "prefetch"), [("none", 1), ("full", 0)])
def test_steps_between_which_all_sorts_of_things_happen_train_as_in_one_process(
    recompute: str, prefetch: int, ranks: Ranks
) -> None:
    for found, expected, same, sizes, num_left in ranks.run(_trained, recompute, prefetch):
        torch.testing.assert_close(found, expected)
        assert same
        assert (sizes, num_left) == ({0}, 0)


def _forwards() -> dict[str, Any]:
    """Gather two matrices in forwards that use them in different ways."""
    line, pool = mesh((2,), ("x",)), ReusedBuckets()
    shards = [torch.full((2, 3), line.get_rank() + 1.0, requires_grad=True) for _ in range(2)]

    def gathered() -> tuple[Tensor, ...]:
        return gather_parameters("x", (0, 0), (4, 4), *shards, regather=(0,), reuse=(0, (0, 1)))

    found: dict[str, Any] = {}
    with use_mesh(line):
        with Regather(0, pool):
            first = gathered()
            inner = gathered()
            found["of one another"] = {id(x) for x in first} & {id(x) for x in inner}
            empty_weights(*inner)
            view = first[0].t()
            empty_weights(*first)
            found["freed"] = [x.untyped_storage().nbytes() for x in (*inner, *first)]
            found["viewed"] = view
        with Regather(0, pool):
            again = gathered()
            found["filled again"] = [any(x is y for y in (*first, *inner)) for x in again]
            found["versions"] = [x._version for x in again]
            saved = again[1].exp()  # which the plan does not gather again
            product = (again[1] * saved).sum() + (again[0] * again[0]).sum()
            empty_weights(*again)
        product.backward()
        found["gradients"] = [x.grad for x in shards]
        with Regather(0, pool):
            found["returned"] = gathered()
    return found


def test_a_weight_that_somebody_holds_is_not_emptied(ranks: Ranks) -> None:
    whole = torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].expand(4, 3)
    for rank, found in enumerate(ranks.run(_forwards)):
        assert not found["of one another"]
        assert found["freed"] == [0, 0, 4 * 4 * 3, 0]
        torch.testing.assert_close(found["viewed"], whole.t())
        assert found["filled again"] == [False, True]
        assert found["versions"] == [0, 0]
        value = torch.full((2, 3), rank + 1.0)
        torch.testing.assert_close(found["gradients"], [2 * 2 * value, 2 * (1 + value) * value.exp()])
        torch.testing.assert_close(found["returned"], (whole, whole))
