"""Draws of steps that are graphs: a replay drops and draws what the step would draw without a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import autopar
from autopar.runtime.implementations.attention.drawing import drawn
from autopar.runtime.implementations.dropout import dropout
from autopar.runtime.implementations.randomness import Randomness, StepDraws, use_randomness
from autopar.runtime.step_graphs.step import WARM_UP
from tests.support.options import by_flag
from tests.support.parity import whole
from tests.support.ranks import Ranks, mesh
from tests.support.recorded_calls import RecordedCalls

STEPS = WARM_UP + 3


class Drawing(nn.Module):
    """Attention with dropout, a dropout, and noise; it returns its loss."""

    def __init__(self, draw: Any = torch.rand_like) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.down, self.draw = nn.Linear(16, 48), nn.Linear(16, 16), draw

    def forward(self, x_BSM: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x_BSM).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        y = F.dropout(self.down(y.transpose(1, 2).flatten(2)), 0.3)
        return (y * self.draw(y)).square().mean()


def _x(number: int) -> Tensor:
    return torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(number))


def _trained(axis: str, strategy: str, options: dict[str, Any], graphed: bool) -> tuple[list[Tensor | None], int, int]:
    devices = mesh((2,), (axis,))
    model: Any = autopar.compile(Drawing(), devices, (_x(0),), strategy=strategy, **by_flag(seed=3, **options))
    recorder = RecordedCalls()
    if graphed:
        model.capture_steps(True, recorder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor | None] = []
    for number in range(STEPS):
        found.append(model.train_step(_x(number)).clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(whole(each) for each in model.parameters())], model.random_state.step, recorder.replays


def _both(*case: Any) -> tuple[Any, ...]:
    return _trained(*case, graphed=True), _trained(*case, graphed=False)


@pytest.mark.parametrize(
    ("axis", "strategy", "options"),
    [
        ("dp", "zero3", {"microbatches": 2, "recompute": "full"}),
        ("tp", "megatron_sequence", {}),
        pytest.param("dp", "data_parallel", {"microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_replay_draws_what_a_step_without_a_graph_draws(
    axis: str, strategy: str, options: dict[str, Any], ranks: Ranks
) -> None:
    for (found, step, replays), (expected, steps, _) in ranks.run(_both, axis, strategy, options):
        assert_close(found, expected, rtol=0, atol=0)
        assert step == steps and replays >= STEPS - WARM_UP - 1


SIZES = {"a": 8, "h": 2, "s": 4, "t": 4}


def _draws(x: Tensor) -> tuple[Tensor, Tensor]:
    """A dropout, and the numbers by which attention drops."""
    return dropout(x, 0.5, True, key=0, axes={}, sizes=SIZES), drawn(x, 4, 0.5, 1, {}, SIZES, {})


def _drawn(call: Any, step: int) -> list[Tensor]:
    x = torch.ones(8, 2, 4, 4, requires_grad=True)
    with use_randomness(5, step):
        y, lines = call(x)
    return [y.detach(), lines, *torch.autograd.grad(y.sum(), x)]


def test_compiled_draws_of_a_step_take_the_seeds_that_its_run_was_given() -> None:
    compiled: Any = torch.compile(_draws, backend="aot_eager", fullgraph=True)
    steps = StepDraws()
    for step in (3, 4):
        with steps.run(Randomness(5, step)):
            found = _drawn(compiled, step)
        assert_close(found, _drawn(_draws, step), rtol=0, atol=0)
        assert_close(found, _drawn(compiled, step), rtol=0, atol=0)
    assert len(steps.generators) in (1, 2), "a backward draws again, or has the mask"


def test_a_run_that_draws_in_another_order_has_the_seeds_of_its_own_draws() -> None:
    steps = StepDraws()
    for keys in ((0, 1), (1, 0), (1,)):
        with steps.run(Randomness(5, 2)), use_randomness(5, 2):
            found = [int(steps.draw(key, 0).seed(torch.device("cpu"))) for key in keys]
        assert found == [Randomness(5, 2).seed_of(key, 0) for key in keys]
