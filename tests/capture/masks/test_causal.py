"""The causal mask, however it is made, becomes `is_causal`; what differs from it in any element does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.capture.masks import rewrite_masks as rewrite
from autopar.capture.passes.traced_graph import arguments
from autopar.ir.program.operators.attention import masked_blocks
from autopar.ir.program.program import Program
from tests.support.eager import assert_as_eager

S = 8
LOWEST = torch.finfo(torch.float32).min
Mask = Callable[[Tensor, Tensor], Tensor]
"""Made of a column of positions of queries and a row of those of keys."""


class Attention(nn.Module):
    """Attention of four heads of queries to two of keys, which are repeated for them."""

    def __init__(self, mask: Mask, size: int = S, dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.size, self.dropout = mask, size, dropout
        self.proj = nn.Linear(8, 8 * 4)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.proj(x_BSD).unflatten(-1, (8, 4)).transpose(1, 2).split([4, 2, 2], 1)
        k, v = (x.unsqueeze(2).expand(2, 2, 2, self.size, 4).reshape(2, 4, self.size, 4) for x in (k, v))
        at = torch.arange(self.size)
        return F.scaled_dot_product_attention(q, k, v, self.mask(at[:, None], at[None]), self.dropout).square().sum()


CAUSAL: dict[str, Mask] = {
    "not later": lambda i, j: ~(j > i),
    "tril": lambda i, j: torch.ones(S, S, dtype=torch.bool).tril(),
    "nn.Transformer": lambda i, j: nn.Transformer.generate_square_subsequent_mask(S),
    "filled": lambda i, j: torch.zeros(S, S).masked_fill_(j > i, -math.inf),
    "finfo.min": lambda i, j: torch.where(j <= i, 0.0, torch.tensor(LOWEST)),
    "with dims": lambda i, j: (j <= i)[None, None].expand(2, 1, S, S),
    "beside a truth": lambda i, j: torch.ones((), dtype=torch.bool) & (j <= i),
    "a window of all": lambda i, j: (j <= i) & (j > i - S),
}
OTHER: dict[str, Mask] = {
    "itself hidden": lambda i, j: (j < i) | (i == 0),
    "one key more": lambda i, j: (j <= i) | ((i == 0) & (j == S - 1)),
    "one key more, of which a block is seen": lambda i, j: (j <= i) | ((i // 2 == 2) & (j // 2 == 2)),
    "one key less": lambda i, j: (j <= i) & ~((i == S - 1) & (j == 0)),
    "of one sample": lambda i, j: (j <= i) | (torch.arange(2) == 1)[:, None, None, None],
    "numbers": lambda i, j: torch.zeros(S, S).masked_fill(j > i, -math.inf) - 0.1 * (i - j),
    "less, not hidden": lambda i, j: torch.zeros(S, S).masked_fill(j > i, -1.0),
    "low, not lowest": lambda i, j: torch.zeros(S, S).masked_fill(j > i, -1e4),
    "all": lambda i, j: (j >= 0) & (i >= 0),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of few positions has several blocks."""
    monkeypatch.setattr(masked_blocks, "LARGEST", 2)
    monkeypatch.setattr(masked_blocks, "SMALLEST", 1)


def attention(program: Program) -> list[dict[str, Any]]:
    return [arguments(node) for node in program.graph.nodes if node.target is rewrite.ATTENTION]


@pytest.mark.parametrize("small", [0, rewrite.SMALL])
@pytest.mark.parametrize("kind", CAUSAL)
def test_the_causal_mask_is_not_made(kind: str, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither small nor large; and keys that are repeated are given once."""
    monkeypatch.setattr(rewrite, "SMALL", small)
    torch.manual_seed(0)
    program = assert_as_eager(Attention(CAUSAL[kind]), (torch.randn(2, S, 8),), {}, lambda y: y)
    (given,) = attention(program)
    assert given["is_causal"] and given["attn_mask"] is None
    assert given["enable_gqa"] and given["key"].meta["tensor"].shape == (2, 2, S, 4)
    infos = [node.meta.get("tensor") for node in program.graph.nodes if node.op == "call_function"]
    assert not any(getattr(x, "shape", ())[-2:] == (S, S) for x in infos)


@pytest.mark.parametrize("kind", ["tril", "not later", "nn.Transformer", "beside a truth"])
def test_it_is_found_under_a_fake_tensor_mode_too(kind: str) -> None:
    model, inputs = Attention(CAUSAL[kind]), (torch.randn(2, S, 8),)
    with FakeTensorMode(allow_non_fake_inputs=True):
        (given,) = attention(capture(model, inputs, {}))
    assert given["is_causal"]


@pytest.mark.parametrize("kind", OTHER)
def test_any_other_mask_is_taken_as_it_is(kind: str) -> None:
    torch.manual_seed(0)
    program = assert_as_eager(Attention(OTHER[kind]), (torch.randn(2, S, 8),), {}, lambda y: y)
    (given,) = attention(program)
    assert not given["is_causal"] and given["attn_mask"] is not None


def test_a_mask_of_fewer_queries_than_keys_is_no_such_one() -> None:
    """PyTorch's `is_causal` counts both from the first one; rows of a table of keys mostly do not."""

    class Last(Attention):
        def forward(self, x_BSD: Tensor) -> Tensor:
            q, k, v = self.proj(x_BSD).unflatten(-1, (8, 4)).transpose(1, 2).split([4, 2, 2], 1)
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            at = torch.arange(S)
            return F.scaled_dot_product_attention(q[:, :, :4], k, v, at[:4, None] >= at).square().sum()

    program = assert_as_eager(Last(CAUSAL["tril"]), (torch.randn(2, S, 8),), {}, lambda y: y)
    (given,) = attention(program)
    assert not given["is_causal"] and given["attn_mask"] is not None


def test_dropout_and_scale_stay() -> None:
    program = capture(Attention(CAUSAL["tril"], dropout=0.1), (torch.randn(2, S, 8),), {}, training=True)
    (given,) = attention(program)
    assert given["dropout_p"] == 0.1 and given["is_causal"] and given["scale"] is None


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(2, 9),
    ahead=st.integers(-1, 1),
    back=st.integers(1, 10),
    piece=st.integers(1, 4),
    only=st.none() | st.integers(0, 4),
    largest=st.integers(1, 4),
)
def test_it_is_the_causal_one_exactly_where_all_elements_are(
    size: int, ahead: int, back: int, piece: int, only: int | None, largest: int
) -> None:
    def mask(i: Tensor, j: Tensor) -> Tensor:
        """A window, with all pieces of the diagonal or one of them."""
        pieces = i // piece == j // piece if only is None else (i // piece == only) & (j // piece == only)
        return ((j <= i + ahead) & (j > i - back)) | pieces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked_blocks, "LARGEST", largest)
        (given,) = attention(capture(Attention(mask, size), (torch.randn(2, size, 8),), {}))
    at = torch.arange(size)
    assert given["is_causal"] == torch.equal(mask(at[:, None], at), torch.ones(size, size, dtype=torch.bool).tril())
