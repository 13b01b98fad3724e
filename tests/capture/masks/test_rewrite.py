"""Masks of positions are worked out in blocks; others stay, as those that may hide all keys by large numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.capture.masks import reach
from autopar.capture.masks import rewrite_masks as rewrite
from autopar.capture.masks.seen import RISING
from autopar.ir.program.effects import is_random
from autopar.ir.program.operators.attention import masked_blocks
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.program import Program, TensorInfo
from tests.support.eager import assert_as_eager

S = 8
LOWEST = torch.finfo(torch.float32).min
Mask = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Attention under a mask that is made of the module, a column of positions, a row of them, and which are seen."""

    def __init__(self, mask: Mask, size: int = S, dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.size, self.dropout = mask, size, dropout
        self.proj = nn.Linear(8, 24)
        self.register_buffer("triangle", torch.ones(size, size).tril())
        self.register_buffer("of_keys", torch.zeros(size))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))
        self.bias = nn.Parameter(torch.zeros(size, size))

    def forward(self, x_BSD: Tensor, seen_BS: Tensor) -> Tensor:
        q, k, v = self.proj(x_BSD).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        at = torch.arange(self.size)
        mask = self.mask(self, at[:, None], at[None], seen_BS)
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout).square().sum()


MADE: dict[str, tuple[Mask, str]] = {
    "not far ahead": (lambda m, i, j, p: ~(j > i + 1), "bitwise_not(gt(v0, v1))"),
    "near": (lambda m, i, j, p: (i - j).abs() < 3, "lt(abs(sub(v0, v1)), 3)"),
    "triangle": (
        lambda m, i, j, p: torch.ones(S, S, dtype=torch.bool).tril(1),
        "masked_fill(v2, logical_not(le(v0, v1)), 0)",
    ),
    "triangle of -inf": (
        lambda m, i, j, p: torch.full((S, S), -math.inf).triu(2),
        "masked_fill(v2, logical_not(ge(v0, v1)), 0)",
    ),
    "filled": (
        lambda m, i, j, p: torch.zeros(S, S).masked_fill_(j > i + 1, -math.inf),
        "masked_fill(v0, gt(v1, v2), -inf)",
    ),
    "where": (
        lambda m, i, j, p: torch.where((j <= i) & p[:, None, None, :], 0.0, -math.inf),
        "where(bitwise_and(le(v0, v1), v2), 0.0, -inf)",
    ),
    "dim between": (lambda m, i, j, p: ((j <= i)[None] & p[:, None, :])[:, None], "bitwise_and(le(v0, v1), v2)"),
    "expanded": (lambda m, i, j, p: p[:, None, None, :].expand(2, 2, S, S), "v0"),
    "slopes": (
        lambda m, i, j, p: (m.slopes[:, None, None] * (j - i)).masked_fill(j > i, -math.inf),
        "masked_fill(mul(v0, sub(v1, v2)), gt(v1, v2), -inf)",
    ),
}

FILLED = "masked_fill(v0, gt(v1, v2), -3.4028234663852886e+38)"
HIDDEN = "masked_fill({0}, lt({0}, -1e+30), -inf)"
LOWEST_NUMBERS: dict[str, tuple[Mask, str]] = {
    "ahead": (lambda m, i, j, p: torch.zeros(S, S).masked_fill(j > i + 1, LOWEST), HIDDEN.format(FILLED)),
    "a tensor": (
        lambda m, i, j, p: torch.where(j <= i + 1, 0.0, torch.tensor(LOWEST)),
        HIDDEN.format("where(le(v0, v1), 0.0, v2)"),
    ),
    "near": (
        lambda m, i, j, p: ((i - j).abs() > 2) * LOWEST,
        HIDDEN.format(f"mul(gt(abs(sub(v0, v1)), 2), {LOWEST})"),
    ),
}


LEFT: dict[str, Mask] = {
    "finfo.min of padding": lambda m, i, j, p: torch.zeros(S, S).masked_fill((j > i) | ~p[:, None, None, :], LOWEST),
    "finfo.min of all keys of a query": lambda m, i, j, p: torch.zeros(S, S).masked_fill(j <= i, LOWEST),
    "higher than the lowest": lambda m, i, j, p: torch.zeros(S, S).masked_fill(j > i, torch.finfo(torch.half).min),
    "1e9": lambda m, i, j, p: (p[:, None, None, :].float() - 1) * 1e9 + 0 * i,
    "a buffer": lambda m, i, j, p: m.triangle.bool(),
    "numbers for keys": lambda m, i, j, p: m.of_keys + 0.0 * i,
    "learned": lambda m, i, j, p: m.bias,
    "sums": lambda m, i, j, p: torch.ones(S, S).cumsum(0) > j,
    "random": lambda m, i, j, p: torch.rand(S, S) > 0.5,
}


@pytest.fixture(autouse=True)
def _all_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small."""
    monkeypatch.setattr(rewrite, "SMALL", 0)


def test_small_masks_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention(MADE["near"][0])
    for small, count in ((S * S, 0), (S * S - 1, 1)):
        monkeypatch.setattr(rewrite, "SMALL", small)
        assert len(by_mask(capture(model, inputs(), {}))) == count


def inputs() -> tuple[Tensor, Tensor]:
    seen = torch.ones(2, S, dtype=torch.bool)
    seen[0, :3] = False
    return torch.randn(2, S, 8), seen


def by_mask(program: Program) -> list[Any]:
    return [node for node in program.graph.nodes if node.target is ATTENTION_BY_MASK]


def has_mask(program: Program) -> bool:
    """Return whether a call makes a tensor with a dim of queries and a dim of keys; buffers do not count."""
    infos = (node.meta.get("tensor") for node in program.graph.nodes if node.op == "call_function")
    return any(isinstance(x, TensorInfo) and len(x.shape) != 3 and x.shape[-2:] == (S, S) for x in infos)


def assert_becomes(mask: Any, text: str) -> None:
    """Check that attention takes a mask as this expression, and computes the same."""
    torch.manual_seed(0)
    program = assert_as_eager(Attention(mask), inputs(), {}, lambda y: y)
    (node,) = by_mask(program)
    assert node.args[4] == text
    assert not has_mask(program)


@pytest.mark.parametrize("kind", MADE)
def test_a_mask_of_positions_is_an_expression(kind: str) -> None:
    assert_becomes(*MADE[kind])


@pytest.mark.parametrize("kind", LOWEST_NUMBERS)
def test_the_lowest_numbers_hide_as_infinity_does_where_each_query_sees_itself(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_blocks, "LARGEST", 2)
    monkeypatch.setattr(masked_blocks, "SMALLEST", 1)
    assert_becomes(*LOWEST_NUMBERS[kind])


@pytest.mark.parametrize("kind", LEFT)
def test_any_other_mask_stays(kind: str) -> None:
    program = capture(Attention(LEFT[kind]), inputs(), {})
    assert not by_mask(program)


class Shared(nn.Module):
    """Four heads of queries and two of keys, which are repeated as transformers does, along a dim behind the heads."""

    def __init__(self, dim: int, ahead: int = 0) -> None:
        super().__init__()
        self.dim, self.ahead, self.proj = dim, ahead, nn.Linear(8, 8 * 4)

    def forward(self, x_BSD: Tensor, seen_BS: Tensor) -> Tensor:
        q, kv = self.proj(x_BSD).unflatten(-1, (8, 4)).transpose(1, 2).split(4, 1)
        sizes = [2, 2, S, 4]
        sizes.insert(self.dim, 2)
        k, v = (x.unsqueeze(self.dim).expand(sizes).reshape(2, 4, S, 4) for x in kv.split(2, 1))
        at = torch.arange(S)
        return F.scaled_dot_product_attention(q, k, v, at[:, None] >= at - self.ahead).square().sum()


@pytest.mark.parametrize(("dim", "heads"), [(2, 2), (1, 4)])
def test_heads_that_are_repeated_for_queries_that_share_them_are_taken_once(dim: int, heads: int) -> None:
    """Repeated before the dim of heads, they are in another order, and stay."""
    torch.manual_seed(0)
    (node,) = by_mask(assert_as_eager(Shared(dim, ahead=1), inputs(), {}, lambda y: y))
    assert [each.meta["tensor"].shape for each in node.args[:3]] == [(2, 4, S, 4), (2, heads, S, 4), (2, heads, S, 4)]


TRUTHS: dict[str, tuple[Mask, bool]] = {
    "triangle": (lambda m, i, j, p: torch.full((S, S), -math.inf).triu(2), True),
    "finfo.min": (lambda m, i, j, p: torch.zeros(S, S).masked_fill(j > i + 1, LOWEST), True),
    "other numbers": (lambda m, i, j, p: torch.zeros(S, S).masked_fill(j > i, -math.inf) - 0.1 * i, False),
    "no key": (lambda m, i, j, p: torch.zeros(S, S).masked_fill(j <= i, LOWEST), False),
    "data": (lambda m, i, j, p: torch.where((j <= i) & p[:, None, None, :], 0.0, -math.inf), False),
}


@pytest.mark.parametrize("kind", TRUTHS)
def test_small_masks_that_only_hide_are_truth_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL", S**4)
    mask, of_truths = TRUTHS[kind]
    program = assert_as_eager(Attention(mask), inputs(), {}, lambda y: y)
    (node,) = (
        node for node in program.graph.nodes if node.target is torch.ops.aten.scaled_dot_product_attention.default
    )
    assert (node.args[3].meta["tensor"].dtype is torch.bool) == of_truths


def test_attention_with_dropout_is_the_same_with_its_share() -> None:
    program = capture(Attention(MADE["near"][0], dropout=0.1), inputs(), {}, training=True)
    (node,) = by_mask(program)
    assert node.kwargs["dropout_p"] == 0.1 and is_random(node)
    assert not has_mask(program)


REACH: dict[str, tuple[Mask, int | None]] = {
    "a window": (lambda m, i, j, p: (j <= i) & (j > i - 5), 4),
    "a window of padded texts": (lambda m, i, j, p: ((j <= i) & (j >= i - 2))[None, None] & p[:, None, None, :], 2),
    "pieces": (lambda m, i, j, p: (j <= i) & (i // 4 == j // 4), 3),
    "itself": (lambda m, i, j, p: i == j, 0),
    "one ahead": (lambda m, i, j, p: (j <= i + 1) & (j > i - 3), None),
    "ahead in a piece": (lambda m, i, j, p: i // 4 == j // 4, None),
    "all before but one": (lambda m, i, j, p: (j <= i) & ((i < S - 1) | (j > 1) | (j < 1)), None),
    "data": (lambda m, i, j, p: (j <= i) & ((p.cumsum(-1)[:, None, :, None] - j) < 3), None),
}


@pytest.mark.parametrize("num_blocks", [4, 512])
@pytest.mark.parametrize("kind", REACH)
def test_how_far_back_queries_see_is_known_without_data(
    kind: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "NUM_BLOCKS", num_blocks)
    mask, expected = REACH[kind]
    (node,) = by_mask(capture(Attention(mask), inputs(), {}))
    assert node.kwargs["reach"] == expected


@pytest.mark.parametrize(
    "mask", [MADE["near"][0], REACH["a window"][0], LOWEST_NUMBERS["near"][0]], ids=["near", "window", "lowest"]
)
def test_as_much_is_known_under_a_fake_tensor_mode(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_blocks, "LARGEST", 2)
    monkeypatch.setattr(masked_blocks, "SMALLEST", 1)
    model = Attention(mask)
    (expected,) = by_mask(capture(model, inputs(), {}))
    given = inputs()
    with FakeTensorMode(allow_non_fake_inputs=True):
        (found,) = by_mask(capture(model, given, {}))
    assert (found.args[4], dict(found.kwargs)) == (expected.args[4], dict(expected.kwargs))


@pytest.mark.parametrize(
    ("kind", "seen", "rising"), [("not far ahead", 13 / 16, True), ("near", 10 / 16, False), ("expanded", 1.0, False)]
)
def test_the_share_that_is_computed_is_known_without_data(
    kind: str, seen: float, rising: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_blocks, "LARGEST", 2)
    monkeypatch.setattr(masked_blocks, "SMALLEST", 1)
    (node,) = by_mask(capture(Attention(MADE[kind][0]), inputs(), {}))
    assert (node.kwargs["seen"], node.kwargs["rising"]) == (seen, rising)
    assert RISING < 2  # later halves of causal masks see more than twice what the first do
