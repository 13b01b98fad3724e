"""Attention whose queries, keys or both are split gives what one device gives, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autopar.runtime.collectives import layout_moves
from autopar.runtime.collectives.mesh_axes import axis_of, join_axes, record_traffic, use_mesh
from autopar.runtime.implementations.attention.by_blocks import attention
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks, local_values, simulate

HEADS, POSITIONS, FEATURES = 4, 16, 8
KINDS = ("full", "causal", "window", "dead row")
Attention = Callable[..., Tensor]
"""Implementation that runs in place of attention."""


@dataclass(frozen=True)
class Way:
    """Mesh sizes, axes that shard queries, and axes that shard keys."""

    sizes: tuple[int, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return ("a", "b")[: len(self.sizes)]

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.sizes))}-s={''.join(self.queries)}-t={''.join(self.keys)}"


GATHERED, RING, MERGED = Way((4,), ("a",), ()), Way((4,), ("a",), ("a",)), Way((4,), (), ("a",))
WAYS = (
    GATHERED,
    RING,
    MERGED,
    Way((2, 2), ("a", "b"), ("a",)),
    Way((2, 2), ("a", "b"), ("b",)),
    Way((2, 2), ("a", "b"), ("a", "b")),
    Way((2, 2), ("a",), ("b",)),
)


@contextmanager
def on_ranks(way: Way) -> Iterator[int]:
    """Simulated ranks, their number."""
    count = math.prod(way.sizes)
    with simulate(count):
        device_mesh = init_device_mesh("cpu", way.sizes, mesh_dim_names=way.names)
        with use_mesh(device_mesh, join_axes(device_mesh, ["a_b"])):
            yield count


def mask_of(kind: str) -> Tensor | None:
    return MASKS.get(kind)


def _window(of_nine: bool) -> Tensor:
    seen = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril().triu(-5)
    seen[9] = of_nine
    return seen


MASKS = {"window": _window(True), "dead row": _window(False)}
"""Made outside of simulations, in which every new tensor has a value for each rank."""


def samples(key_heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, POSITIONS, FEATURES).double() for heads in (HEADS, key_heads, key_heads, HEADS)]


def on_one(tensors: Sequence[Tensor], kind: str) -> tuple[Tensor, ...]:
    """The result and three gradients; the last tensor weighs the result."""
    q, k, v = given = [x.clone().requires_grad_() for x in tensors[:3]]
    out = F.scaled_dot_product_attention(q, k, v, mask_of(kind), is_causal=kind == "causal", enable_gqa=True)
    return (out.detach().nan_to_num(), *torch.autograd.grad((out.nan_to_num() * tensors[3]).sum(), given))


def divided(x: Tensor, axes: Sequence[str], others: Sequence[str], dim: int, zigzag: bool) -> Tensor:
    """Split over axes, and replicated, with a gradient that is to be summed, over others."""
    for axis in others:
        x = layout_moves.all_reduce_gradient(x, axis)
    for axis in axes:
        x = layout_moves.split(x, axis, dim, zigzag)
    return x


def divided_inputs(way: Way, zigzag: bool, given: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield queries, keys and values, each split over its own axes and replicated over the other ones."""
    every = [axis for axis in way.names if axis in (*way.queries, *way.keys)]
    for x, axes in zip(given, (way.queries, way.keys, way.keys), strict=True):
        yield divided(x, axes, [axis for axis in every if axis not in axes], 2, zigzag)


def gathered(way: Way, zigzag: bool, out: Tensor, given: Sequence[Tensor], weight: Tensor) -> list[list[Tensor]]:
    """The whole result and the gradients of what is given, on every rank; `weight` weighs the result."""
    for axis in reversed(way.queries):
        out = layout_moves.all_gather_invariant(out, axis, 2, out.shape[2] * axis_of(axis).size, zigzag)
    return [local_values(x) for x in (out, *torch.autograd.grad((out * weight).sum(), given))]


def on_many(
    way: Way, zigzag: bool, kind: str, tensors: Sequence[Tensor], count: int, attention: Attention = attention
) -> list[list[Tensor]]:
    """The whole result and the three gradients, on every rank."""
    given = [from_ranks([x] * count, requires_grad=True) for x in tensors[:3]]
    q, k, v = divided_inputs(way, zigzag, given)
    mask = mask_of(kind)
    if mask is not None:
        mask = divided(from_ranks([mask] * count), way.queries, (), 0, zigzag)
        mask = divided(mask, [axis for axis in way.keys if axis not in way.queries], (), 1, zigzag)
    axes = {name: found for name, found in (("s", way.queries), ("t", way.keys)) if found}
    sizes = {"s": POSITIONS, "t": POSITIONS}
    out = attention(q, k, v, mask, 0.0, kind == "causal", axes=axes, sizes=sizes, zigzag=axes if zigzag else {})
    return gathered(way, zigzag, out, given, from_ranks([tensors[3]] * count))


@pytest.mark.parametrize(("way", "kind"), [(GATHERED, "causal"), (RING, "causal"), (MERGED, "dead row")], ids=str)
def test_ranks_compute_what_one_computes(way: Way, kind: str) -> None:
    check(way, True, kind, 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("zigzag", [False, True], ids=["in order", "zigzag"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_ranks_compute_what_one_computes_however_they_divide_it(way: Way, zigzag: bool, key_heads: int) -> None:
    for kind in KINDS:
        check(way, zigzag, kind, key_heads)


def check(way: Way, zigzag: bool, kind: str, key_heads: int, attention: Attention = attention) -> None:
    tensors = samples(key_heads)
    with on_ranks(way) as count:
        found = on_many(way, zigzag, kind, tensors, count, attention)
    for name, ours, theirs in zip("oqkv", found, on_one(tensors, kind), strict=True):
        for value in ours:
            torch.testing.assert_close(value, theirs, msg=lambda text, n=name: f"{kind}, {n}: {text}")


@pytest.mark.parametrize("shape", [(6, 8, 5), (8, 5)], ids=["one head", "no heads"])
def test_other_numbers_of_dims(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).double()
    with on_ranks(RING) as count:
        given = divided(from_ranks([x] * count), ("a",), (), x.ndim - 2, False)
        sizes = {"s": 8, "t": 8}
        axes = {"s": ("a",), "t": ("a",)}
        out = attention(given, given, given, None, 0.0, True, axes=axes, sizes=sizes)
        whole = layout_moves.all_gather_invariant(out, "a", x.ndim - 2, 8)
        expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        for value in local_values(whole):
            torch.testing.assert_close(value, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("way", "hops"), [(GATHERED, 0), (RING, 3)], ids=["gathered", "ring"])
def test_what_travels_is_counted(way: Way, hops: int) -> None:
    with on_ranks(way) as count, record_traffic() as traffic:
        on_many(way, True, "causal", samples(2), count)
    keys = 2 * 2 * (POSITIONS // 4) * 2 * FEATURES * 8
    found = {name: number for (name, _), number in traffic.num_bytes.items() if name == "permute"}
    assert found == ({"permute": 3 * hops * keys} if hops else {})


def train(axes: dict[str, tuple[str, ...]], compiled: bool, attention: Attention = attention) -> list[Tensor]:
    """On this rank: the result and gradients of its part, in float32 or bfloat16."""
    found = []
    cases = [(torch.float32, True)] if compiled else itertools.product((torch.float32, torch.bfloat16), (True, False))
    for dtype, zigzag in cases:
        whole = [x.to(dtype) for x in samples(2)]
        with use_mesh(mesh((2,), ("a",))):

            def run(q: Tensor, k: Tensor, v: Tensor, zigzag: bool = zigzag) -> Tensor:
                sizes = {"s": POSITIONS, "t": POSITIONS}
                return attention(q, k, v, None, 0.0, True, axes=axes, sizes=sizes, zigzag=axes if zigzag else {})

            called: Any = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
            q, k, v, weight = (layout_moves.split(x, "a", 2, zigzag).detach() for x in whole)
            given = [x.requires_grad_() for x in (q, k, v)]
            out = called(*given)
            grads = torch.autograd.grad((out * weight).sum(), given)
            parts = [layout_moves.raw_all_gather(x, axis_of("a"), 2, POSITIONS, zigzag) for x in (out.detach(), *grads)]
        found += [x.double() for x in parts]
    return found


def test_a_ring_of_real_ranks_eager_and_compiled(ranks: Ranks) -> None:
    expected = on_one(samples(2), "causal")
    for compiled in (False, True):
        for found in ranks.run(train, {"s": ("a",), "t": ("a",)}, compiled):
            for number, value in enumerate(found):
                tolerance = 1e-5 if number < 8 else 5e-2
                torch.testing.assert_close(value, expected[number % 4], rtol=tolerance, atol=tolerance)
