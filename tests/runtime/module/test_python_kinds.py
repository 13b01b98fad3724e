"""Python attributes and globals that forward reads, on ranks: what is set after compile counts, as in one process."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

GAIN = 1.0


class Scaled(nn.Module):
    """A linear layer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.k = 3

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD) * self.k * GAIN


class Annealed(nn.Module):
    """Reads a number of its own, one of its class, one that nobody has set, and whether this is the first call."""

    gamma = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = Scaled()
        self.beta = 1.0
        self.first = True

    def forward(self, x_BD: Tensor) -> Tensor:
        hidden_BD = self.inner(x_BD) * self.beta * self.gamma + getattr(self, "shift", 0)
        if self.first:
            hidden_BD = hidden_BD * 10
            self.first = False
        self.hidden = hidden_BD
        self.rows = x_BD.shape[0]
        return hidden_BD.square().mean()


def _step(model: Any, train_step: bool) -> dict[str, Tensor | None]:
    x_BD = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    if train_step:
        loss = model.train_step(x_BD)
    else:
        loss = model(x_BD)
        loss.backward()
    return {"": loss.detach(), **{name: whole(p.grad) for name, p in model.named_parameters()}}


def _num_programs(compiled: Any) -> int:
    return sum(map(len, compiled._known.values()))


def _same(compiled: Any, eager: Any) -> None:
    expected, found = _step(eager, False), _step(compiled, isinstance(compiled.plan, autopar.PipelinePlan))
    for name, value in found.items():
        assert_close(value, expected[name], msg=lambda text, n=name: f"{n}: {text}")


def _changed(shape: tuple[int, ...], axes: tuple[str, ...], options: dict[str, Any]) -> None:
    global GAIN
    GAIN = 1.0
    original: Any = Annealed()
    eager = copy.deepcopy(original)
    x_BD = torch.randn(4, 8)
    compiled = autopar.compile(
        original, mesh(shape, axes), example_inputs=(x_BD,), hardware=SLOW_DEVICES, **by_flag(**options)
    )
    for _ in range(3):
        _same(compiled, eager)
    assert _num_programs(compiled) == 2, "the first call, and those after it"
    compiled.beta = eager.beta = 0.5
    compiled.shift = eager.shift = 1.0
    _same(compiled, eager)
    assert (compiled.beta, compiled.shift, compiled.rows) == (0.5, 1.0, 4 // options.get("microbatches", 1))
    compiled.beta = eager.beta = 1.0
    del compiled.shift, eager.shift
    compiled.unread = 1
    _same(compiled, eager)
    assert _num_programs(compiled) == 3, "what was known before is planned once, and what forward does not read never"
    original.inner.k = eager.inner.k = 5
    compiled.gamma = eager.gamma = 2.0
    GAIN = 2.0
    _same(compiled, eager)
    with pytest.raises(TypeError, match=r"hidden is written by forward.*return it"):
        _ = compiled.hidden + 1
    with pytest.raises(TypeError, match=r"hidden is written by forward"):
        torch.relu(compiled.hidden)
    del original
    gc.collect()
    _same(compiled, eager)
    assert _num_programs(compiled) == 4


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "axes", "options"),
    [((2,), ("dp",), {"strategy": "zero3"}), ((2,), ("pp",), {"microbatches": 2})],
    ids=["zero3", "pipeline"],
)
def test_what_is_set_after_compile_counts(
    ranks: Ranks, shape: tuple[int, ...], axes: tuple[str, ...], options: dict[str, Any]
) -> None:
    ranks.run(_changed, shape, axes, options, world_size=2)


def _lazily() -> None:
    original: Any = Annealed()
    eager = copy.deepcopy(original)
    compiled = autopar.compile(original, mesh((2,), ("dp",)), hardware=SLOW_DEVICES)
    compiled.beta = eager.beta = 0.5
    original.inner.k = eager.inner.k = 7
    x_BD = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert_close(compiled(x_BD), eager(x_BD))


def _both_have_it() -> None:
    model: Any = Annealed()
    model.scaler, model._known = 2.0, "the model's"
    compiled = autopar.compile(model, mesh((1,), ("dp",)), example_inputs=(torch.ones(4, 8),), hardware=SLOW_DEVICES)
    with pytest.raises(InputError, match=r"scaler is an attribute of the compiled module and one of the model"):
        compiled.scaler = 3.0
    compiled(torch.ones(4, 8))
    assert _num_programs(compiled) == 1 and compiled.tree.root._known == "the model's"


def test_an_attribute_that_both_have_is_refused(ranks: Ranks) -> None:
    ranks.run(_both_have_it, world_size=1)


def test_what_is_set_before_the_first_call_counts(ranks: Ranks) -> None:
    ranks.run(_lazily, world_size=2)


def _many() -> None:
    compiled = autopar.compile(Annealed(), mesh((1,), ("dp",)), hardware=SLOW_DEVICES)
    with pytest.warns(UserWarning, match=r"planned 8 times for equal inputs, as beta changed.*buffer or an argument"):
        for step in range(8):
            compiled.beta = step / 8
            compiled(torch.ones(4, 8))


def test_a_number_that_changes_with_every_step_is_warned_of(ranks: Ranks) -> None:
    ranks.run(_many, world_size=1)
