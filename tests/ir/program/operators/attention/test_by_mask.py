"""Attention by mask is PyTorch's attention with the mask made, but makes no tensor of queries by keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.program.operators.attention import masked_blocks
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK, _attend, _attend_backward
from autopar.ir.program.operators.attention.expressions import evaluate, parse
from autopar.ir.program.operators.attention.masked_blocks import rows_of

CAUSAL = "le(v1, v0)"
KINDS: dict[str, tuple[str, Callable[[int, int], list[Tensor]]]] = {
    "window": ("bitwise_and(le(v1, v0), gt(v1, sub(v0, 9)))", lambda s, t: places(s, t)),
    "documents": ("bitwise_and(le(v1, v0), eq(v2, v3))", lambda s, t: [*places(s, t), *documents(s, t)]),
    "padding": ("bitwise_and(v2, le(v1, v0))", lambda s, t: [*places(s, t), torch.rand(2, 1, 1, t) > 0.3]),
    "distances": (
        "masked_fill(mul(v2, to(sub(v1, v0), float32)), gt(v1, v0), -inf)",
        lambda s, t: [*places(s, t), torch.rand(4, 1, 1)],
    ),
    "chunks": ("eq(floor_divide(v0, 7), floor_divide(v1, 7))", lambda s, t: places(s, t)),
    "nothing known": ("eq(remainder(v0, 7), remainder(v1, 7))", lambda s, t: places(s, t)),
    "dead rows": ("bitwise_and(lt(v1, v0), ne(v0, 5))", lambda s, t: places(s, t)),
}


def places(s: int, t: int) -> list[Tensor]:
    return [torch.arange(s)[:, None], torch.arange(t)]


def documents(s: int, t: int) -> list[Tensor]:
    return [
        torch.randint(0, 4, (2, 1, s, 1)).sort(2).values,
        torch.randint(0, 4, (2, 1, 1, t)).sort(3).values,
    ]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_blocks, "LARGEST", 8)
    monkeypatch.setattr(masked_blocks, "SMALLEST", 4)


def sample(s: int, t: int, heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Any]:
    shapes = (2, 4, s, 8), (2, heads, t, 8), (2, heads, t, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.sample(20)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("s", "t"), [(40, 40), (37, 50), (6, 6)])
def test_it_equals_attention_with_the_mask(kind: str, s: int, t: int, heads: int) -> None:
    torch.manual_seed(0)
    text, vectors_of = KINDS[kind]
    vectors, inputs = vectors_of(s, t), sample(s, t, heads)
    expected = F.scaled_dot_product_attention(
        *inputs, attn_mask=evaluate(parse(text), vectors), scale=0.3, enable_gqa=True
    )
    found = ATTENTION_BY_MASK(*inputs, vectors, text, 0.3)
    weights = torch.randn_like(expected)
    gradients = (torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
    if kind == "dead rows" and s > 5:
        assert not found[:, :, [0, 5]].any()


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attention with sinks, its scores written out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    ("kind", "window"),
    [("window", None), ("window", 9), ("causal", 40), ("padding", None), ("documents", None), ("dead rows", None)],
)
def test_sinks_are_one_more_score_without_a_value(kind: str, window: int | None, heads: int) -> None:
    torch.manual_seed(0)
    text, vectors_of = (CAUSAL, places) if kind == "causal" else KINDS[kind]
    vectors, inputs = vectors_of(40, 40), sample(40, 40, heads)
    sinks = torch.randn(1, 4, 1, 1).mul_(2).requires_grad_()
    q, k, v = inputs
    expected = with_sinks(q, k, v, evaluate(parse(text), vectors), sinks, 0.3)
    found = ATTENTION_BY_MASK(*inputs, vectors, text, 0.3, window=window, sinks=sinks)
    weights = torch.randn_like(expected)
    gradients = (torch.autograd.grad((y * weights).sum(), [*inputs, sinks]) for y in (found, expected))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_in_half_precision_it_rounds_as_attention_does() -> None:
    torch.manual_seed(0)
    text, vectors = KINDS["window"][0], places(40, 40)
    inputs = sample(40, 40, dtype=torch.bfloat16)
    exact: list[Any] = [x.detach().double().requires_grad_() for x in inputs]
    found = ATTENTION_BY_MASK(*inputs, vectors, text)
    expected = F.scaled_dot_product_attention(*exact, attn_mask=evaluate(parse(text), vectors), enable_gqa=True)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)
    gradients = [torch.autograd.grad(y.sum(), x) for y, x in ((found, inputs), (expected, exact))]
    torch.testing.assert_close([x.double() for x in gradients[0]], [*gradients[1]], atol=5e-2, rtol=5e-2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "distances"])
def test_a_block_that_is_left_out_is_hidden_and_one_without_a_mask_is_seen(kind: str) -> None:
    torch.manual_seed(0)
    text, vectors_of = KINDS[kind]
    vectors = vectors_of(40, 40)
    mask = evaluate(parse(text), vectors).expand(2, 1, 40, 40)
    left = mask.clone()
    for (first, end), blocks in rows_of(parse(text), vectors, 40, 40):
        for (begin, stop), seen in blocks:
            left[..., first:end, begin:stop] = False
            assert not seen or bool(mask[..., first:end, begin:stop].all())
    assert not left.any()


def computed(text: str, vectors: list[Tensor], size: int) -> tuple[int, int]:
    """Elements of the scores that are computed, and those of them with a mask."""
    found = [
        ((end - first) * (stop - begin), seen)
        for (first, end), blocks in rows_of(parse(text), vectors, size, size)
        for (begin, stop), seen in blocks
    ]
    return sum(area for area, _ in found), sum(area for area, seen in found if not seen)


def test_windows_and_documents_cost_what_they_see() -> None:
    size = 16384
    at = places(size, size)
    squares = size // 1024
    assert computed(CAUSAL, at, size) == ((squares * (squares + 1) // 2) << 20, squares << 20)
    window = "bitwise_and(le(v1, v0), gt(v1, sub(v0, 1024)))"
    assert computed(window, at, size) == ((2 * squares - 1) << 20, (2 * squares - 1) << 20)
    document = torch.arange(size) // 4096
    packed = "bitwise_and(le(v1, v0), eq(v2, v3))"
    # Four documents of four blocks each.
    assert computed(packed, [*at, document[:, None], document], size) == (4 * 10 << 20, squares << 20)


class _Largest(TorchDispatchMode):
    """The most elements that a tensor had."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple) else (found,):
            self.numel = max(self.numel, x.numel() if isinstance(x, Tensor) else 0)
        return found


@pytest.mark.usefixtures("small_blocks")
def test_no_tensor_is_as_large_as_the_scores() -> None:
    q, k, v = (torch.randn(1, 1, 256, 4) for _ in range(3))
    call = [*places(256, 256), torch.zeros(256, dtype=torch.bool)], "bitwise_or(v2, le(v1, v0))", 0.5
    with _Largest() as largest:  # not through the operators, into which no mode sees
        out, lse = _attend(q, k, v, *call)
        _attend_backward(out, q, k, v, call[0], out, lse, *call[1:])
    assert largest.numel == 2 * 32 * 32  # the table of blocks, twice as large as the queries; scores have 256 × 256


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = sample(6, 6)
    with pytest.raises(RuntimeError, match=r"found queries \[2, 4, 6, 8\], keys \[2, 2, 6, 7\].*needed are"):
        ATTENTION_BY_MASK(q, k[..., 1:], v, places(6, 6), CAUSAL)
    with pytest.raises(RuntimeError, match=r"found a vector \[5, 1\] of a mask for scores \[2, 4, 6, 6\]"):
        ATTENTION_BY_MASK(q, k, v, places(5, 6), CAUSAL)
    with pytest.raises(RuntimeError, match="has no dim of queries, or none of keys"):
        ATTENTION_BY_MASK(q, k, v, [torch.ones(6, 6, dtype=torch.bool)], "v0")
