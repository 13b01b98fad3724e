"""Random arguments for sample calls: sizes differ from dim to dim, so that no two can be mistaken for each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SIZES = (4, 6, 8, 10)


@dataclass(frozen=True, slots=True)
class Sample:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def sample(*args: Any, **kwargs: Any) -> Sample:
    """The arguments of one call, written as the call is."""
    return Sample(args, kwargs)


class Draw:
    """A seeded source of sizes and tensors."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for each kind of device

    def sizes(self, num_dims: int) -> tuple[int, ...]:
        """Sizes that differ; all even, none of them 2, which would hide what two ranks cannot split."""
        return tuple(self._random.sample(SIZES, num_dims))

    def x(self, *shape: int) -> Tensor:
        """Normal numbers with a gradient."""
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def positive(self, *shape: int) -> Tensor:
        """Numbers between 0.5 and 2, with a gradient."""
        return (torch.rand(shape, dtype=torch.float64) * 1.5 + 0.5).requires_grad_()

    def constant(self, *shape: int) -> Tensor:
        """Normal numbers without a gradient."""
        return torch.randn(shape, dtype=torch.float64)

    def mask(self, *shape: int) -> Tensor:
        """Half true; first false and last true, so that no two parts can be mistaken for each other."""
        found = torch.rand(shape) < 0.5
        found.view(-1)[0], found.view(-1)[-1] = False, True
        return found

    def index(self, high: int, *shape: int) -> Tensor:
        """Whole numbers from 0 to `high` - 1."""
        return torch.randint(high, shape)


Samples = Callable[[Draw], list[Sample]]
