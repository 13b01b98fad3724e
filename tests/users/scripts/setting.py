"""Environment of a script (one process, or the ranks of a mesh), and the data that all scripts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import mesh

Found = dict[str, Any]
"""Name → a number or a tensor that a script shows."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings by which a script makes a model parallel, and the folder of its files."""

    folder: Path
    options: dict[str, Any] | None = None
    """Options of `autopar.compile`; None in one process."""
    axes: tuple[int, ...] = (2,)
    names: tuple[str, ...] = ("dp",)

    def parallel(self, model: nn.Module, *inputs: Any, **options: Any) -> Any:
        """Return the model compiled for the mesh, or as it is in one process."""
        if self.options is None:
            return model
        example = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], dict) else inputs
        given: dict[str, Any] = {"hardware": SLOW_DEVICES, **self.options, **options}
        return autopar.compile(model, mesh(self.axes, self.names), example, **by_flag(**given))

    @property
    def is_parallel(self) -> bool:
        return self.options is not None

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.is_parallel else 0

    @property
    def num_parts(self) -> int:
        """Number of ranks with different samples, if each is called with its own."""
        return dist.get_world_size() if self.options and self.options.get("inputs") == "local" else 1

    def part(self, batch: Tensor) -> Tensor:
        """Return this rank's samples of a batch: all of them, unless inputs are local."""
        return batch.chunk(self.num_parts)[self.rank] if self.num_parts > 1 else batch

    def mean(self, value: Tensor) -> float:
        """Return the mean over the ranks of a number that each has of its own samples."""
        if self.num_parts == 1:
            return value.item()
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.num_parts


def whole(value: Any) -> Any:
    """Return a tensor as one process has it."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def parameters_of(model: nn.Module, name: str = "") -> Found:
    """Return all parameters of a model, whole, by name."""
    return {f"{name}{key}": whole(value) for key, value in model.named_parameters()}


class Classifier(nn.Module):
    """A small classifier with an embedding, a normalization and a head."""

    def __init__(self, features: int = 8, hidden: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.hidden = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h + self.hidden(h).relu())


class Writer(nn.Module):
    """A tiny causal language model."""

    def __init__(self, vocabulary: int = 16, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        # A bias of keys has no gradient but rounding, which Adam would make a step of.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.heads = heads

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return self.head(x + self.down(self.up(x).relu()))


def seeded(build: Callable[[], Any], seed: int = 0) -> Any:
    """Return what `build` makes after seeding."""
    torch.manual_seed(seed)
    return build()


def batches(num: int, size: int = 8, features: int = 8, classes: int = 4, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return batches of features and classes, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, features, generator=generator),
            torch.randint(classes, (size,), generator=generator),
        )
        for _ in range(num)
    ]


def texts(num: int, size: int = 4, length: int = 8, vocabulary: int = 16, seed: int = 2) -> list[Tensor]:
    """Return batches of token ids, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (size, length), generator=generator) for _ in range(num)]
