"""Attention with dropout drops the same scores however ranks divide samples, heads, queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.capture.masks import rewrite_masks as rewrite
from autopar.ir.program.operators.attention.dropout import Dropout, lines_of
from autopar.ir.program.operators.attention.expressions import evaluate, parse
from autopar.runtime.collectives import layout_moves
from autopar.runtime.collectives.mesh_axes import axis_of, record_traffic, use_mesh
from autopar.runtime.implementations.attention.by_blocks import attention
from autopar.runtime.implementations.attention.by_mask import attention_by_mask
from autopar.runtime.implementations.dropout import seed_of_part
from autopar.runtime.implementations.randomness import randomness, use_randomness
from tests.runtime.implementations.attention import test_by_mask as masks
from tests.runtime.implementations.attention import test_heads as heads
from tests.runtime.implementations.attention.test_by_blocks import (
    FEATURES,
    GATHERED,
    HEADS,
    KINDS,
    MERGED,
    POSITIONS,
    RING,
    WAYS,
    Way,
    divided,
    divided_inputs,
    gathered,
    mask_of,
    on_ranks,
    samples,
)
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks
from tests.support.simulation.training import Steps, fault_of, train_alone, train_on_ranks
from tests.support.slow_cases import slow_where

P, KEY = 0.3, 3


def sizes_of(key_heads: int) -> dict[str, int]:
    """Return the sizes of the factors of a call."""
    shared = {"r": HEADS // key_heads, "q": HEADS} if 1 < key_heads < HEADS else {}
    return {"a0": 2, "h": HEADS if key_heads == 1 else key_heads, **shared, "s": POSITIONS, "t": POSITIONS}


def kept() -> Tensor:
    """Return the mask of the elements that a whole call does not drop."""
    if randomness().deterministic:
        return torch.empty(2, HEADS, POSITIONS, POSITIONS, dtype=torch.float64).bernoulli_(1 - P).bool()
    lines = lines_of(seed_of_part(KEY, ()), torch.arange(2), torch.arange(HEADS))
    return ~Dropout.of(P, lines, torch.arange(POSITIONS), torch.arange(POSITIONS)).dropped()


def on_one(tensors: list[Tensor], kind: str, expression: bool) -> tuple[Tensor, ...]:
    """The result and three gradients, by all probabilities; the last tensor weighs the result."""
    q, k, v = given = [x.clone().requires_grad_() for x in tensors[:3]]
    k, v = (x.repeat_interleave(HEADS // k.shape[1], 1) for x in (k, v))
    seen = evaluate(parse(masks.EXPRESSIONS[kind][0]), masks.EXPRESSIONS[kind][1]) if expression else mask_of(kind)
    if kind == "causal":
        seen = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
    scores = q @ k.mT / math.sqrt(FEATURES)
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    out = torch.ops.aten._safe_softmax(scores, -1) * kept() / (1 - P) @ v
    return (out.detach(), *torch.autograd.grad((out * tensors[3]).sum(), given))


def on_many(
    way: Way, zigzag: bool, kind: str, tensors: list[Tensor], expression: bool, count: int
) -> list[list[Tensor]]:
    """The whole result and the three gradients, on every rank."""
    given = [from_ranks([x] * count, requires_grad=True) for x in tensors[:3]]
    q, k, v = divided_inputs(way, zigzag, given)
    alone = [axis for axis in way.keys if axis not in way.queries]

    def divided_mask(x: Tensor) -> Tensor:
        for dim, axes in ((x.ndim - 2, way.queries), (x.ndim - 1, alone)):
            if x.ndim + dim > 0 and dim >= 0 and x.shape[dim] > 1:
                x = divided(x, axes, (), dim, zigzag)
        return x

    split = {name: found for name, found in (("s", way.queries), ("t", way.keys)) if found}
    keywords: dict[str, Any] = {
        "axes": split,
        "sizes": sizes_of(tensors[1].shape[1]),
        "zigzag": split if zigzag else {},
        "key": KEY,
    }
    if expression:
        text, vectors = masks.EXPRESSIONS[kind]
        local = [divided_mask(from_ranks([x] * count)) for x in vectors]
        out = attention_by_mask(q, k, v, local, text, reach=masks.REACH.get(kind), dropout_p=P, **keywords)
    else:
        seen = mask_of(kind)
        seen = None if seen is None else divided_mask(from_ranks([seen] * count))
        out = attention(q, k, v, seen, P, kind == "causal", **keywords)
    return gathered(way, zigzag, out, given, from_ranks([tensors[3]] * count))


def check(way: Way, zigzag: bool, kind: str, key_heads: int, deterministic: bool = False) -> None:
    tensors, expression = samples(key_heads), kind in masks.EXPRESSIONS
    with use_randomness(5, 2, deterministic):
        torch.manual_seed(0)
        expected = on_one(tensors, kind, expression)
        with on_ranks(way) as count:
            torch.manual_seed(0)
            found = on_many(way, zigzag, kind, tensors, expression, count)
    for name, ours, theirs in zip("oqkv", found, expected, strict=True):
        for value in ours:
            torch.testing.assert_close(value, theirs, msg=lambda text, n=name: f"{kind}, {n}: {text}")


@pytest.mark.sample(7)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (GATHERED, "causal"),
        (RING, "causal"),
        (MERGED, "dead row"),
        (RING, "window"),
        (RING, "narrow window"),
        (MERGED, "padding"),
        (Way((2, 2), ("a", "b"), ("b",)), "causal"),
    ],
    ids=str,
)
def test_ranks_drop_what_one_drops(way: Way, kind: str, deterministic: bool) -> None:
    check(way, True, kind, 2, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("zigzag", [False, True], ids=["in order", "zigzag"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_ranks_drop_what_one_drops_however_they_divide_it(way: Way, zigzag: bool, key_heads: int) -> None:
    for kind in (*KINDS, *masks.EXPRESSIONS):
        check(way, zigzag, kind, key_heads)


# A model that is trained, whose attention alone drops.


@dataclass(frozen=True)
class Case:
    choice: tuple[str, ...]
    """Factors of attention that the axes shard."""
    mesh: dict[str, int]
    key_heads: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int = 1

    def __str__(self) -> str:
        return "-".join((*self.choice, *map(str, self.options.values()), str(self.num_microbatches)))


CASES = (
    Case(("s+t",), {"a": 4}),
    Case(("s",), {"a": 4}, options={"recompute": "full"}),
    Case(("h", "s+t"), {"a": 2, "b": 2}, num_microbatches=2),
    Case(("a0", "q"), {"a": 2, "b": 4}, key_heads=2),
)


def specified_of(model: heads.Model, axes: dict[str, int], choice: tuple[str, ...]) -> heads.Model:
    specified: dict[str, Any] = {axis: f"factor:{each}" for axis, each in zip(axes, choice, strict=True)}
    return autopar.annotate(model, f"%{heads.ATTENTION}", **specified)


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_where(CASES, "s-full-1", "h-s+t-2"))
def test_a_model_trains_alike_on_all_layouts(case: Case) -> None:
    steps = Steps(heads.batches(2), num_microbatches=case.num_microbatches)
    options = {"deterministic": False, "seed": 7}

    def built(p: float) -> heads.Model:
        return heads.built(4, case.key_heads, is_causal=True, dropout_p=p)

    expected = train_on_ranks(built(P), steps, {"a": 1}, options)
    with record_traffic() as traffic:
        found = train_on_ranks(
            specified_of(built(P), case.mesh, case.choice), steps, case.mesh, {**options, **case.options}
        )
    expected.losses = [values[:1] for values in expected.losses]
    assert not fault_of(found, expected, relative=1e-5, absolute=1e-6)
    assert found.plan is not None and tuple(found.plan.choices[heads.ATTENTION].split()) == case.choice
    if case.num_microbatches == 1 and not case.options:
        counted = {key: number // 2 for key, number in traffic.num_bytes.items() if number}
        assert counted == {key: number for key, number in found.plan.traffic.items() if number}
    without = train_on_ranks(built(0.0), steps, {"a": 1}, options)
    assert fault_of(without, expected, relative=1e-3), "something is dropped"


@pytest.mark.slow
def test_in_the_deterministic_mode_a_ring_drops_what_one_process_drops() -> None:
    steps = Steps(heads.batches(2))
    expected = train_alone(heads.built(4, 4, is_causal=True, dropout_p=P), steps)
    model = specified_of(heads.built(4, 4, is_causal=True, dropout_p=P), {"a": 4}, ("s+t",))
    assert not fault_of(train_on_ranks(model, steps, {"a": 4}, {}), expected, relative=1e-5, absolute=1e-6)


def test_attention_by_expressions_with_dropout_trains_alike_on_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL", 0)
    steps, options = Steps(masks.batches(2)), {"deterministic": False, "seed": 7}

    def built() -> masks.Model:
        return masks.built(masks.MASKS["narrow window"], P)

    expected = train_on_ranks(built(), steps, {"a": 1}, options)
    expected.losses = [values[:1] for values in expected.losses]
    found = train_on_ranks(built(), steps, {"sp": 4}, {**options, "strategy": "ring"})
    assert not fault_of(found, expected, relative=1e-5, absolute=1e-6)
    assert found.plan is not None and found.plan.choices["attention_by_mask_default"] == "s+t"


def _of_rank(compiled: bool) -> list[Tensor]:
    """On this rank: the result and gradients of its part, gathered."""
    whole = [x.float() for x in samples(2)]
    with use_mesh(mesh((2,), ("a",))), use_randomness(5, 2):

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            axes = {"s": ("a",), "t": ("a",)}
            return attention(q, k, v, None, P, True, axes=axes, sizes=sizes_of(2), zigzag=axes, key=KEY)

        called: Any = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        q, k, v, weight = (layout_moves.split(x, "a", 2, True).detach() for x in whole)
        given = [x.requires_grad_() for x in (q, k, v)]
        out = called(*given)
        grads = torch.autograd.grad((out * weight).sum(), given)
        return [layout_moves.raw_all_gather(x, axis_of("a"), 2, POSITIONS, True) for x in (out.detach(), *grads)]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_ring_of_real_ranks_with_dropout(ranks: Ranks, compiled: bool) -> None:
    with use_randomness(5, 2):
        expected = on_one(samples(2), "causal", False)
    for found in ranks.run(_of_rank, compiled):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
