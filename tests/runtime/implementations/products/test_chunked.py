"""Products in chunks train as one process does, whatever the chunks, and move the bytes that are predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.runtime.collectives.mesh_axes import record_traffic, use_mesh
from autopar.runtime.implementations.products.chunked import linear, linears
from autopar.strategies.rules.products import chunked
from autopar.strategies.rules.products.chunked import AGAIN, NAME
from tests.support import parity
from tests.support.parity import SLOW_DEVICES, Case, check, check_rounding
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.training import Steps, train_alike


class Block(nn.Module):
    """A feed-forward block between norms, as `Linear` or (GPT-2) as a product and a sum."""

    def __init__(self, bias: bool = True, as_matmul: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16, bias=bias), nn.Linear(16, 8, bias=bias)
        self.as_matmul = as_matmul

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[…, positions, 8] twice → the loss."""
        h = self.norm(x)
        if self.as_matmul:
            h = F.gelu(h @ self.up.weight.mT.contiguous()) @ self.down.weight.mT.contiguous()
        else:
            h = self.down(F.gelu(self.up(h)))
        return F.mse_loss(self.last(x + h), y)


def annotated(model: nn.Module, ndim: int = 3) -> nn.Module:
    """Both products in chunks over tp, what lies around them split by rows."""
    if isinstance(model, Block) and model.as_matmul:
        rows, up, down = (
            ("m", "%matmul_default", "%matmul_default_1") if ndim > 2 else ("m", "%mm_default", "%mm_default_1")
        )
    else:
        rows, up, down = f"...{ndim - 2}", "up.linear", "down.linear"
    autopar.annotate(model, up, tp=f"factor:{rows}+o via {NAME}")
    autopar.annotate(model, down, tp=f"factor:{rows}+k via {NAME}")
    for norm in ("norm", "last"):
        autopar.annotate(model, norm, tp=-2)
    return model


def batch(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    return {name: torch.randn(*shape, 8, generator=generator, dtype=torch.float64) for name in ("x", "y")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "least_bytes",
    [
        pytest.param(1, id="in chunks"),
        pytest.param(chunked.LEAST_BYTES, id="in one", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("mesh", "shape", "options"),
    [
        ({"tp": 2}, (6, 8), {}),
        ({"tp": 4}, (2, 24), {"bias": False}),
        ({"tp": 2}, (2, 12), {"as_matmul": True}),
        ({"tp": 2}, (12,), {}),
        ({"dp": 2, "tp": 2}, (12, 8), {}),
        ({"tp": 2, "dp": 2}, (2, 20), {}),
    ],
    ids=["samples", "rows", "matmul", "matrices", "dp x tp", "tp x dp"],
)
def test_they_train_as_one_process_does(
    mesh: Mapping[str, int],
    shape: tuple[int, ...],
    options: dict[str, bool],
    least_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "LEAST_BYTES", least_bytes)
    steps = Steps([batch(*shape), batch(*shape)])
    plan = train_alike(annotated(Block(**options).double(), len(shape) + 1), steps, mesh, {})
    chosen = [name for name in plan.choices.values() if name.endswith(NAME)]
    assert ["+o" in chosen[0], "+k" in chosen[1], len(chosen)] == [True, True, 2]


def _in_small_chunks(case: Case) -> parity.Training:
    with mock.patch.object(chunked, "LEAST_BYTES", 1):
        return _parallel(case)


_parallel = parity.parallel


def case(family: str, world: tuple[int, ...], strategy: str = NAME, **options: Any) -> Case:
    requested = {"hardware": SLOW_DEVICES, "strategy": strategy, **options.pop("options", {})}
    return Case(family, world, options=requested, steps=2, **options)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "parallel", _in_small_chunks)


ZERO3 = (("*", {"storage": "dp", "regather": True}),)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "requested",
    [
        pytest.param(case("gpt2", (2, 2), annotations=ZERO3), id="packed projections, zero3"),
        pytest.param(case("llama", (2,), options={"recompute": "full"}), id="recompute"),
        pytest.param(case("llama", (2,), AGAIN), id="gathered again"),
        pytest.param(case("llama", (4,)), id="plain keys", marks=pytest.mark.slow),
        pytest.param(case("gpt2", (2,), options={"recompute": "selective"}), id="selective", marks=pytest.mark.slow),
        pytest.param(case("llama", (2, 2), micro_steps=2), id="micro-steps", marks=pytest.mark.slow),
        pytest.param(
            case("gpt2", (2, 2), AGAIN, annotations=ZERO3, options={"recompute": "full"}, micro_steps=2),
            id="gathered again, zero3, recompute",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_on_ranks_they_move_what_is_predicted(ranks: Ranks, requested: Case) -> None:
    check(ranks, requested)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_in_low_precision_they_round_no_more_than_one_process_does(ranks: Ranks) -> None:
    check_rounding(ranks, case("llama", (2,), dtype=torch.bfloat16))


def _eager_and_compiled(again: int) -> list[Tensor]:
    """Three products of rows that are gathered for all, and one that is reduced, with the gradients of all operands."""
    ranks_mesh, found = mesh((2,), ("tp",)), []
    torch.manual_seed(0)
    x, weights, bias = torch.randn(4, 3, 8), [torch.randn(6, 8) for _ in range(3)], torch.randn(6)
    given = [each.requires_grad_() for each in (x, *weights, bias)]
    sizes = {"...0": 4, "...1": 6, "k": 8, "o": 12}

    def step(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
        operands = (first, bias, second, None, third, None)
        q, k, v = linears(x, *operands, axes={"...1": ("tp",), "o": ("tp",)}, sizes=sizes, again=again)
        rows = {"...1": ("tp",), "k": ("tp",)}
        return linear((q * k).tanh() * v, first.mT, axes=rows, sizes={**sizes, "k": 12, "o": 8}).square().sum()

    with mock.patch.object(chunked, "LEAST_BYTES", 1), use_mesh(ranks_mesh):
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            loss = function(*given)
            found += [loss, *torch.autograd.grad(loss, given)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 1])
def test_they_compile(ranks: Ranks, again: int) -> None:
    for found in ranks.run(_eager_and_compiled, again, timeout=300):
        torch.testing.assert_close(found[:6], found[6:])
        assert all(x.abs().sum() > 0 for x in found)


def _in_two_halves() -> list[tuple[int, int]]:
    """Return the number of collectives for the gradient of the rows and of the weight, for each product."""
    ranks_mesh, found = mesh((2,), ("tp",)), []
    x, weight = torch.randn(4, 3, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    of_rows, of_columns = {"k": 16, "o": 6}, {"k": 8, "o": 12}
    with use_mesh(ranks_mesh):
        for rows, sizes, again in (("o", of_columns, 0), ("k", of_rows, 0), ("o", of_columns, 1)):
            input_ = x.repeat(1, 1 if rows == "o" else 2, 1)
            axes = {"...1": ("tp",), rows: ("tp",)}
            loss = linear(input_, weight, axes=axes, sizes=sizes, again=again).square().sum()
            halves = []
            for each in (input_, weight):
                with record_traffic() as traffic:
                    torch.autograd.grad(loss, each, retain_graph=True)
                halves.append(sum(traffic.calls.values()))
            found.append(tuple(halves))
    return found


def test_a_backward_in_two_halves_reduces_the_gradient_of_rows_once(ranks: Ranks) -> None:
    # The gradients of results are gathered for either half, where products are reduced; rows that are not kept for one.
    assert ranks.run(_in_two_halves) == [[(1, 0), (1, 1), (1, 1)]] * 2
