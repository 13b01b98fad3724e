"""Constant masks, repeats and split points are constant indices; what depends on other values is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture, skeleton
from autopar.errors import CaptureError
from tests.support.eager import assert_as_eager

X_BD = torch.linspace(-1, 1, 32).reshape(4, 8)


class Masked(nn.Module):
    """A weight, masks and counts that are attributes, and a mask that is a buffer."""

    def __init__(self, function: Callable[[Masked, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 9.0))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.mask = torch.tensor([True, False, True, False, True, False, False, False])
        self.of_both = torch.arange(32).reshape(4, 8) % 3 == 0
        self.repeats = torch.tensor([1, 2, 0, 1])
        self.places = torch.tensor([1, 3])
        self.count = torch.tensor(2)
        self.register_buffer("buffer", self.mask.clone())
        self.embed = nn.Embedding(10, 8, sparse=True)
        self.function = function

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.function(self, x_BD * self.weight)


def written(m: Masked, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, m.mask] = m.weight[:3]
    return y


ZERO = torch.zeros((), dtype=torch.long)
WORKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "columns": lambda m, x: x[:, m.mask],
    "columns and a new dim": lambda m, x: x[..., m.mask, None],
    "two dims": lambda m, x: x[m.of_both],
    "the weight too": lambda m, x: x[:, m.mask] * m.weight[m.mask],
    "a list": lambda m, x: x[:, [True, False, True, False, True, False, False, False]],
    "the opposite": lambda m, x: x[:, ~m.mask],
    "a comparison": lambda m, x: x[m.repeats > 0],
    "written": written,
    "repeats": lambda m, x: torch.repeat_interleave(x, m.repeats, dim=0),
    "one count": lambda m, x: x.repeat_interleave(m.count, 0),
    "split points": lambda m, x: torch.tensor_split(x, m.places)[1],
    "one element": lambda m, x: torch.index_select(m.scale, 0, ZERO.reshape(1)) * x,
    "added to one element": lambda m, x: torch.index_add(m.scale, 0, ZERO.reshape(1), m.scale) * x,
    "ones as it": lambda m, x: x * torch.randint_like(x, 1, 2),
    "a write under vmap": lambda m, x: torch.vmap(lambda row: row.clone()[:2].add_(1) * 2)(x),
    "a histogram": lambda m, x: x.sum() + torch.histogram(x.detach().flatten(), 4)[0],
}


@pytest.mark.parametrize("name", WORKS)
def test_a_constant_index_is_captured_as_it_runs(name: str) -> None:
    assert_as_eager(Masked(WORKS[name]), (X_BD,))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a mask of values": (lambda m, x: x[x > 0], r"aten.index.Tensor in the forward gives a tensor whose shape depends"),
    "a buffer": (lambda m, x: x[:, m.buffer], r"A mask that never changes may be a plain tensor attribute"),
    "masked_select": (lambda m, x: torch.masked_select(x, x > 0), r"aten.masked_select.default in .* depends on"),
    "combinations": (lambda m, x: torch.combinations(x[0]), r"torch.combinations in the model gives a tensor whose"),
    "nonzero": (lambda m, x: x * torch.nonzero(x > 0).sum(), r"aten.nonzero.default in the forward gives a tensor"),
    "argwhere": (lambda m, x: x * torch.argwhere(x > 0).sum(), r"aten.argwhere.default in the forward gives a tensor"),
    "unique": (lambda m, x: x * torch.unique(x.detach()).sum(), r"aten._unique2.default in the forward gives a tensor"),
    "repeats": (lambda m, x: x.repeat_interleave((x[:, 0] > 0).long(), 0), r"output_size= for repeat_interleave"),
    "split points": (
        lambda m, x: torch.tensor_split(x, (x[0, :2] > 0).long())[0],
        r"aten.tensor_split.tensor_indices_or_sections in the forward cannot be traced without the values",
    ),
    "sparse gradients": (lambda m, x: m.embed(ZERO) * x, r"aten.embedding.default in embed asks for sparse gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_values_is_refused_by_name(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        capture(Masked(function), (X_BD,), {})


def test_a_lazy_module_is_refused_until_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match=r"0.weight has no shape yet .* run the model once on an example"):
        skeleton(model)
    model(X_BD)
    assert capture(skeleton(model), (X_BD,), {}).num_outputs == 1
