"""Weights gathered from their parts, and gathered again for the backward in place of being kept.

A bucket is gathered by its recipe; inside a `Regather` block the backward holds the recipe of what it needs, not the
weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.collectives.axes import Axis, count
from autopar.runtime.collectives.functions import gathered_rows


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the weights of a bucket are gathered: what `Regather` needs to do it again."""

    axis: Axis
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    shards: tuple[Any, ...]
    """Tensors, or handles of shards that are gathered first."""
    to: Sequence[torch.dtype | None] = ()
    """The dtypes to which they are cast before; none where they stay as they are."""


def by_dtype(tensors: Sequence[Tensor | None]) -> dict[torch.dtype, dict[int, Tensor]]:
    """Dtype → the tensors that there are, by position: a weight that a loss does not use has a gradient on no rank."""
    groups: dict[torch.dtype, dict[int, Tensor]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault(tensor.dtype, {})[number] = tensor
    return groups


def cast(shards: Iterable[Tensor], to: Sequence[torch.dtype | None]) -> list[Tensor]:
    return [each.to(dtype or each.dtype) for each, dtype in zip(shards, to, strict=True)] if to else list(shards)


def gather(recipe: Recipe) -> tuple[Tensor, ...]:
    shards: list[Any] = cast(map(Regather.given_back, recipe.shards), recipe.to)
    whole: list[Tensor | None] = [None] * len(shards)
    for numbers in map(tuple, by_dtype(shards).values()):
        shapes = [shards[i].shape for i in numbers]
        flat = torch.cat([shards[i].reshape(-1) for i in numbers])
        for i in numbers:
            shards[i] = None  # parts that were gathered for this make room for the wholes
        size = recipe.axis.size
        count("all_gather", recipe.axis, flat.numel() * flat.itemsize * size)
        rows = gathered_rows(flat, recipe.axis).view(size, -1)
        del flat
        parts = rows.split([shape.numel() for shape in shapes], 1)
        for i, shape, part in zip(numbers, shapes, parts, strict=True):
            dim = recipe.dims[i]
            joined = part.view(size, *shape).movedim(0, dim).flatten(dim, dim + 1)
            # Each weight has a storage of its own, so that it is freed by itself, and `Regather` knows it by that.
            whole[i] = joined.narrow(dim, 0, recipe.sizes[i]).contiguous()
    return tuple(whole)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class _Bucket:
    """The weights of one recipe; they live as long as somebody uses them."""

    recipe: Recipe
    uses: int = 0
    """How often a weight, or a view of one, was saved for the backward."""
    asked: int = 0
    """How many of those uses this backward has asked for."""
    again: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Handle:
    """A saved view of a gathered weight, without its storage."""

    bucket: _Bucket
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regather(torch.autograd.graph.saved_tensors_hooks):
    """Inside the block, gathered weights (or views of them) that a backward needs are not kept, but gathered again.

    Each bucket is gathered once per backward, when the first of its weights is needed, and freed after the last.
    """

    current: Regather | None = None

    def __init__(self) -> None:
        super().__init__(self._pack, self.given_back)
        self._buckets: dict[int, tuple[Any, _Bucket, int]] = {}

    def __enter__(self) -> Regather:  # type: ignore[override]
        self._before = Regather.current
        Regather.current = self
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        Regather.current = self._before
        self._buckets.clear()

    def watch(self, recipe: Recipe, weights: tuple[Tensor, ...]) -> None:
        """Remember whose weights these are, without keeping them alive."""
        # Shards that were themselves gathered are not kept either: a handle gathers them again first.
        bucket = _Bucket(replace(recipe, shards=tuple(map(self._pack, recipe.shards))))
        for number, weight in enumerate(weights):
            storage = weight.untyped_storage()
            self._buckets[storage._cdata] = (weakref.ref(storage), bucket, number)

    def _pack(self, x: Tensor) -> Tensor | _Handle:
        storage = x.untyped_storage()
        alive, bucket, number = self._buckets.get(storage._cdata, (None, None, 0))
        if alive is None or bucket is None or alive() is None:
            return _without_graph(x)
        bucket.uses += 1
        return _Handle(bucket, number, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    @staticmethod
    def hold(x: Tensor) -> object:
        """What to keep of a tensor, as an open `Regather` block would; `given_back` makes the tensor of it, once."""
        return _without_graph(x) if Regather.current is None else Regather.current._pack(x)

    @staticmethod
    def given_back(saved: object) -> Tensor:
        """The tensor that was held."""
        if isinstance(saved, Tensor):
            return saved
        assert isinstance(saved, _Handle)
        bucket = saved.bucket
        if bucket.again is None:
            with torch.no_grad():
                bucket.again = gather(bucket.recipe)
        weight = bucket.again[saved.number]
        bucket.asked += 1
        if bucket.asked == bucket.uses:
            bucket.asked, bucket.again = 0, None
        return weight.as_strided(saved.size, saved.stride, saved.offset)


def _without_graph(x: Tensor) -> Tensor:
    """The tensor as a node of the graph may hold it: a call's own output, with its graph, would hold the node."""
    return x.detach() if x.grad_fn is not None else x
