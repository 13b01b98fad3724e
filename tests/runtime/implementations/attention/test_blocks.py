"""Blocks of scores cover what queries see, once; kernels agree with PyTorch; their results are merged to the whole."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autopar.ir.program.operators.attention import kernels
from autopar.ir.program.operators.attention.kernels import Block
from autopar.ir.program.operators.attention.sums import Gradients, Sum
from autopar.runtime.collectives.rank_parts import by_rank, whole_of
from autopar.runtime.implementations.attention.blocks import Piece, add_blocks, add_gradients, pairs_of
from autopar.runtime.implementations.attention.positions import FactorSplit


def zigzag_axes(sizes: tuple[int, ...], zigzag: bool | tuple[bool, ...]) -> FactorSplit:
    each = (zigzag,) * len(sizes) if isinstance(zigzag, bool) else zigzag
    axes = tuple(SimpleNamespace(name=str(number), size=size) for number, size in enumerate(sizes))
    split = frozenset(axis.name for axis, is_zigzag in zip(axes, each, strict=False) if is_zigzag)
    return FactorSplit(axes, split)  # type: ignore[arg-type]


def places(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        found = [(*place, rank) for place in found for rank in range(size)]
    return found


SIZES = st.lists(st.integers(1, 4), min_size=0, max_size=2).map(tuple)


@settings(deadline=None)
@given(SIZES, st.tuples(st.booleans(), st.booleans()), st.integers(1, 3))
def test_positions_are_those_of_nested_parts(sizes: tuple[int, ...], zigzag: tuple[bool, bool], length: int) -> None:
    total = 2 * math.prod(sizes) * length
    for ranks in places(sizes):
        x = torch.arange(total)
        for size, rank, zigzag_axes_of in zip(sizes, ranks, zigzag, strict=False):
            x = by_rank(x, 0, size, zigzag_axes_of)[rank]
        pieces = zigzag_axes(sizes, zigzag).pieces(total, ranks)
        assert [p for piece in pieces for p in range(piece.first, piece.end)] == x.tolist()
        assert [p for piece in pieces for p in range(piece.at, piece.at + piece.size)] == list(range(len(x)))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 1), st.booleans())
def test_parts_make_the_whole_again(num_ranks: int, dim: int, zigzag: bool) -> None:
    x = torch.randn(24, 24)[: 2 * num_ranks, : 4 * num_ranks]
    assert torch.equal(whole_of(by_rank(x, dim, num_ranks, zigzag), dim, zigzag), x)


@settings(deadline=None)
@given(SIZES, SIZES, st.booleans(), st.booleans(), st.booleans())
def test_every_pair_that_is_seen_is_in_one_block(
    of_queries: tuple[int, ...], of_keys: tuple[int, ...], zigzag: bool, zigzag_keys: bool, causal: bool
) -> None:
    num_queries, num_keys = 2 * math.prod(of_queries), 2 * math.prod(of_keys)
    found: dict[tuple[int, int], int] = {}
    for q_ranks in places(of_queries):
        for k_ranks in places(of_keys):
            queries = zigzag_axes(of_queries, zigzag).pieces(num_queries, q_ranks)
            keys = zigzag_axes(of_keys, zigzag_keys).pieces(num_keys, k_ranks)
            q_positions = [p for piece in queries for p in range(piece.first, piece.end)]
            k_positions = [p for piece in keys for p in range(piece.first, piece.end)]
            for pair in pairs_of(queries, keys, (Piece(0, 0, num_keys),), causal):
                assert pair.queries[0] < pair.queries[1] and pair.keys[0] < pair.keys[1], "none is empty"
                for row, i in enumerate(range(*pair.queries)):
                    for column, j in enumerate(range(*pair.keys)):
                        assert causal or range(*pair.columns)[column] == k_positions[j]
                        if not pair.causal or column <= row:
                            key = q_positions[i], k_positions[j]
                            found[key] = found.get(key, 0) + 1
    seen = {(q, k) for q in range(num_queries) for k in range(num_keys) if not causal or k <= q}
    assert set(found) == seen and set(found.values()) == {1}


@pytest.mark.parametrize("step", range(4))
def test_a_rank_of_a_ring_calls_one_kernel_a_step(step: int) -> None:
    for rank in range(4):
        of_rank = [zigzag_axes((4,), True).pieces(32, (each,)) for each in range(4)]
        whole = (Piece(0, 0, 32),)
        assert len(pairs_of(of_rank[rank], of_rank[(rank - step) % 4], whole, True)) == 1


@settings(deadline=None)
@given(st.integers(1, 5))
def test_by_zigzag_every_rank_computes_the_same(num_ranks: int) -> None:
    def work(zigzag: bool) -> list[int]:
        size = 8 * num_ranks
        whole = (Piece(0, 0, size),)
        found = []
        for rank in range(num_ranks):
            pairs = pairs_of(zigzag_axes((num_ranks,), zigzag).pieces(size, (rank,)), whole, whole, True)
            areas = [(p.queries[1] - p.queries[0], p.keys[1] - p.keys[0], p.causal) for p in pairs]
            found.append(sum(q * (q + 1) // 2 if causal else q * k for q, k, causal in areas))
        return found

    assert len(set(work(zigzag=True))) == 1
    assert num_ranks == 1 or len(set(work(zigzag=False))) > 1


def sample(features: int = 8, dtype: torch.dtype = torch.float64, heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (2, 4, 6, 8), (2, heads, 6, 8), (2, heads, 6, features)
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def mask(dead: bool) -> Tensor:
    seen = torch.ones(6, 6, dtype=torch.bool).triu(-2)
    seen[3] = not dead
    return torch.zeros(6, 6, dtype=torch.float64).masked_fill(~seen, -math.inf)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, block: Block) -> tuple[Tensor, ...]:
    """The result and three gradients, of two blocks of keys merged."""
    pairs = pairs_of((Piece(0, 0, 6),), (Piece(0, 0, 2), Piece(2, 2, 4)), (Piece(0, 0, 6),), block.causal)
    total, grads = Sum.empty(q, v), Gradients.empty(q, k, v)
    add_blocks(total, pairs, q, k, v, block)
    out, lse = total.out_BHSD.to(q.dtype), total.lse_BHS
    add_gradients(grads, pairs, grad, q, k, v, out, lse.masked_fill(lse == -math.inf, math.inf), block=block)
    return out, grads.q_BHSD, grads.k_BGTD, grads.v_BGTD


@pytest.mark.parametrize("features", [8, 5], ids=["flash", "written out"])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["full", "causal", "mask", "dead row"])
def test_merged_blocks_are_the_whole(features: int, heads: int, kind: str) -> None:
    q, k, v = [x.requires_grad_() for x in sample(features, heads=heads)]
    given = mask(kind == "dead row") if kind in ("mask", "dead row") else None
    expected = F.scaled_dot_product_attention(q, k, v, given, is_causal=kind == "causal", scale=0.3, enable_gqa=True)
    expected = expected.nan_to_num()
    grad = torch.randn_like(expected)
    if kind == "dead row":
        grad[:, :, 3] = 0  # PyTorch's own gradient of such a row is no number
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    block = Block(0.3, kind == "causal", given)
    found = by_kernel(q.detach(), k.detach(), v.detach(), grad, block)
    torch.testing.assert_close(found, (expected.detach(), *(x.nan_to_num() for x in gradients)))


def test_a_row_that_sees_nothing_weighs_nothing_in_a_merge() -> None:
    q, k, v = sample()
    _, lse = kernels.attend(q, k[:, :, :2], v[:, :, :2], Block(1.0, mask_BHST=mask(True)[:, :2]))
    assert bool((lse[:, :, 3] == -math.inf).all()) and bool(lse[:, :, :3].isfinite().all())


@pytest.mark.parametrize(
    ("dtype", "masked", "features", "expected"),
    [
        (torch.bfloat16, False, 8, "flash_cuda"),
        (torch.bfloat16, True, 8, "efficient"),
        (torch.float32, False, 8, "efficient"),
        (torch.float64, False, 8, "written_out"),
        (torch.bfloat16, False, 5, "efficient"),
    ],
)
def test_the_kernels_of_a_gpu(dtype: torch.dtype, masked: bool, features: int, expected: str) -> None:
    def on_gpu(x: Tensor) -> Any:
        return SimpleNamespace(dtype=x.dtype, shape=x.shape, is_cuda=True, is_cpu=False)

    q, _, v = (on_gpu(x) for x in sample(features, dtype))
    block = Block(1.0, mask_BHST=mask(False) if masked else None)
    assert kernels._kernel(q, v, block) == expected


@pytest.mark.parametrize(("kernel", "masked"), [("flash_cuda", False), ("efficient", False), ("efficient", True)])
def test_calls_fit_the_kernels_of_a_gpu(kernel: str, masked: bool) -> None:
    """Their shapes and types, by their meta kernels; what they compute is a matter of a GPU."""
    dtype = torch.bfloat16
    q, k, v = (torch.empty(2, heads, 48, 16, dtype=dtype, device="meta") for heads in (4, 2, 2))
    block = Block(1.0, mask_BHST=torch.zeros(48, 48, dtype=dtype, device="meta") if masked else None)
    run = kernels._KERNELS[kernel]
    out, lse = run.forward(q, k, v, block)
    found = run.backward(out, q, k, v, out, lse, block)
    assert (out.shape, lse.shape) == ((2, 4, 48, 16), (2, 4, 48))
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
