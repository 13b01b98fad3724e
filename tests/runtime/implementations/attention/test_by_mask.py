"""Attention under masks of positions, documents and padding is the same however ranks divide sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.masks import rewrite_masks as rewrite
from autopar.ir.program.operators.attention import masked_blocks
from autopar.ir.program.operators.attention.expressions import evaluate, parse
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.runtime.implementations.attention.by_mask import attention_by_mask
from tests.runtime.implementations.attention.test_by_blocks import (
    FEATURES,
    GATHERED,
    MERGED,
    POSITIONS,
    RING,
    WAYS,
    Way,
    divided,
    divided_inputs,
    gathered,
    on_ranks,
    samples,
)
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks
from tests.support.simulation.training import Steps, fault_of, train_alone, train_on_ranks

Mask = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, WORDS, WIDTH = 4, 32, 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL", 0)
    monkeypatch.setattr(masked_blocks, "LARGEST", 4)
    monkeypatch.setattr(masked_blocks, "SMALLEST", 2)


# The implementation alone.

PLACES = [torch.arange(POSITIONS)[:, None], torch.arange(POSITIONS)]
EXPRESSIONS = {
    "window": ("bitwise_and(le(v1, v0), gt(v1, sub(v0, 5)))", PLACES),
    "narrow window": ("bitwise_and(le(v1, v0), gt(v1, sub(v0, 3)))", PLACES),
    "wide window": ("bitwise_and(le(v1, v0), gt(v1, sub(v0, 7)))", PLACES),
    "dead rows": ("bitwise_and(lt(v1, v0), ne(v0, 9))", PLACES),
    "padding": ("bitwise_and(v2, le(v1, v0))", [*PLACES, torch.arange(2 * POSITIONS).view(2, 1, 1, -1) % 5 > 0]),
}

REACH = {"narrow window": 2, "window": 4, "wide window": 6}


def check(way: Way, zigzag: bool, kind: str, key_heads: int) -> None:
    """The result and the three gradients, on every rank."""
    text, vectors = EXPRESSIONS[kind]
    reach = REACH.get(kind)
    *tensors, weight = samples(key_heads)
    given: list[Any] = [x.clone().requires_grad_() for x in tensors]
    out = F.scaled_dot_product_attention(*given, attn_mask=evaluate(parse(text), vectors), enable_gqa=True)
    expected = (out.detach(), *torch.autograd.grad((out * weight).sum(), given))
    with on_ranks(way) as count:
        simulated = [from_ranks([x] * count, requires_grad=True) for x in tensors]
        q, k, v = divided_inputs(way, zigzag, simulated)
        alone = [axis for axis in way.keys if axis not in way.queries]
        local = [
            divided(from_ranks([x] * count), alone if x.shape[-1] > 1 else way.queries, (), dim, zigzag)
            for x in vectors
            for dim in [x.ndim - 1 if x.shape[-1] > 1 else x.ndim - 2]
        ]
        axes = {name: axes for name, axes in (("s", way.queries), ("t", way.keys)) if axes}
        sizes = {"s": POSITIONS, "t": POSITIONS}
        zigzag_dims = axes if zigzag else {}
        out = attention_by_mask(q, k, v, local, text, reach=reach, axes=axes, sizes=sizes, zigzag=zigzag_dims)
        found = gathered(way, zigzag, out, simulated, from_ranks([weight] * count))
    for name, ours, theirs in zip("oqkv", found, expected, strict=True):
        for value in ours:
            torch.testing.assert_close(value, theirs, msg=lambda text, n=name: f"{kind}, {n}: {text}")


@pytest.mark.parametrize(("way", "kind"), [(GATHERED, "padding"), (RING, "window"), (MERGED, "dead rows")], ids=str)
def test_ranks_compute_what_one_computes(way: Way, kind: str) -> None:
    check(way, True, kind, 2)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("way", "kind", "zigzag", "keys", "gradients"),
    [
        (RING, "narrow window", False, 2, 2),  # of four that each rank has
        (RING, "window", False, 4, 4),
        (RING, "wide window", False, 4 + 2, 4 + 4),
        (RING, "narrow window", True, 2 + 2, 2 + 2),  # from both sides
        (RING, "window", True, 12, 12),  # more than a piece of two
        (Way((2, 2), ("a", "b"), ("a", "b")), "narrow window", True, 2 + 2, 2 + 2),
        (Way((2,), ("a",), ("a",)), "narrow window", True, 2 + 2, 2 + 2),
        (RING, "dead rows", False, 12, 12),
        (Way((2, 2), ("a", "b"), ("a", "b")), "narrow window", False, 2, 2),
        (Way((2, 2), ("a", "b"), ("b",)), "narrow window", False, 8, 8),
    ],
    ids=str,
)
def test_keys_travel_as_far_as_a_window_sees_them(way: Way, kind: str, zigzag: bool, keys: int, gradients: int) -> None:
    with record_traffic() as traffic:
        check(way, zigzag, kind, 2)
    moved = sum(number for (name, _), number in traffic.num_bytes.items() if name == "permute")
    assert moved == (2 * keys + gradients) * 2 * 2 * 2 * FEATURES * 8, "samples, heads, keys and values in float64"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("zigzag", [False, True], ids=["in order", "zigzag"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_ranks_compute_what_one_computes_however_they_divide_it(way: Way, zigzag: bool, key_heads: int) -> None:
    for kind in EXPRESSIONS:
        check(way, zigzag, kind, key_heads)


# A model that is trained.

MASKS: dict[str, Mask] = {
    "window": lambda i, j, given: (j <= i) & (j > i - 5),
    "wide window": lambda i, j, given: (j <= i) & (j > i - 7),
    "narrow window": lambda i, j, given: (j <= i) & (j > i - 3),
    "causal and one": lambda i, j, given: torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril(1),
    "documents": lambda i, j, given: _same_document(given) & (j <= i),
    "padding": lambda i, j, given: (j <= i) & (given > 2)[:, None, None, :],
}


def _same_document(position: Tensor) -> Tensor:
    document = (position == 0).cumsum(-1)
    return document[:, None, :, None] == document[:, None, None, :]


class Model(nn.Module):
    """Words through one attention with grouped heads, and the loss of their successors."""

    also_causal = False

    def __init__(self, mask: Mask, dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.dropout = mask, dropout
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, given: Tensor) -> Tensor:
        x = self.embed(ids)
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, 1)
        at = torch.arange(POSITIONS)
        mask = self.mask(at[:, None], at[None], given)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, enable_gqa=True)
        if self.also_causal:
            y = y + F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x + self.out(y)).flatten(0, 1), ids.roll(-1, 1).flatten())


def built(mask: Mask, dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    return Model(mask, dropout)


def batches(count: int) -> list[dict[str, Tensor]]:
    """Ids and, of each, its place in its document."""
    torch.manual_seed(1)
    place = torch.cat([torch.arange(6), torch.arange(10)]).repeat(2, 1)
    return [{"ids": torch.randint(WORDS, (2, POSITIONS)), "given": place} for _ in range(count)]


@dataclass(frozen=True)
class Case:
    mask: str
    mesh: dict[str, int]
    choice: tuple[str, ...]
    """Factors of attention that the axes shard."""
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.mask}-{self.options.get('strategy', 'auto')}"


CASES = (
    Case("window", {"sp": 2}, ("s",), {"strategy": "gather_kv"}),
    Case("documents", {"sp": 4}, ("s+t",), {"strategy": "ring"}),
    Case("padding", {"a": 2, "b": 2}, ("s+t", "h"), {"strategy": "usp"}),
    Case("causal and one", {"sp": 2}, ("s+t",), {"strategy": "ring"}),
    Case("narrow window", {"sp": 4}, ("s+t",), {"strategy": "ring"}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_trains_on_ranks_as_on_one(case: Case) -> None:
    mask, steps = MASKS[case.mask], Steps(batches(3))
    expected = train_alone(built(mask), steps)
    with record_traffic() as traffic:
        found = train_on_ranks(built(mask), steps, case.mesh, case.options)
    assert not fault_of(found, expected, relative=1e-5, absolute=1e-6)
    assert found.plan is not None
    (row,) = (row for row in found.plan.rows if row.name == "attention_by_mask_default")
    assert tuple(found.plan.choices[row.name].split()) == case.choice
    assert {key: moved // 3 for key, moved in traffic.num_bytes.items() if moved} == {
        key: moved for key, moved in found.plan.traffic.items() if moved
    }
    # If later queries see more, positions are zigzag-sharded.
    assert ("Z" in str(row)) == ("window" not in case.mask)


class BothModel(Model):
    """The model with a second attention, without a window, which zigzag-shards positions."""

    also_causal = True


@pytest.mark.slow
def test_a_window_of_positions_that_are_zigzag_moves_what_is_predicted() -> None:
    def both() -> Model:
        torch.manual_seed(0)
        return BothModel(MASKS["narrow window"])

    steps = Steps(batches(2))
    expected = train_alone(both(), steps)
    with record_traffic() as traffic:
        found = train_on_ranks(both(), steps, {"sp": 4}, {"strategy": "ring"})
    assert not fault_of(found, expected, relative=1e-5, absolute=1e-6)
    assert found.plan is not None
    (row,) = (row for row in found.plan.rows if row.name == "attention_by_mask_default")
    assert row.layout == "Z(2)"
    permuted = traffic.num_bytes["permute", "sp"] // 2
    assert permuted == found.plan.traffic["permute", "sp"]
    each = 2 * 2 * 2 * (WIDTH // HEADS) * 4  # samples, heads, keys and values of a position in float32
    assert permuted == 3 * each * ((2 + 2) + 3 * POSITIONS // 4), "of the window, and of the other"


def _trained(mask: str, strategy: str) -> list[Any]:
    """Losses and gradients on this rank of real ones."""
    with mock.patch.object(rewrite, "SMALL", 0):
        model = autopar.compile(
            built(MASKS[mask]),
            mesh((torch.distributed.get_world_size(),), ("sp",)),
            batches(1)[0],
            strategy=strategy,
            hardware=SLOW_DEVICES,
        )
    loss = model(**batches(1)[0])
    loss.backward()
    whole = [getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters()]
    return [loss.detach(), *whole]


@pytest.mark.parametrize(("mask", "num_ranks"), [("documents", 2), ("wide window", 4)])
def test_a_ring_of_real_ranks(ranks: Ranks, mask: str, num_ranks: int) -> None:
    model = built(MASKS[mask])
    loss = model(**batches(1)[0])
    loss.backward()
    expected = [loss.detach(), *(p.grad for p in model.parameters())]
    for found in ranks.run(_trained, mask, "ring", world_size=num_ranks):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
