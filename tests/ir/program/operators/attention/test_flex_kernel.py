"""Masks in the words of flex_attention: the kernel, as it runs eagerly on a CPU, gives what blocks do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from autopar.ir.program.operators.attention import flex_kernel
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK

B, H, G, S, D = 2, 4, 2, 300, 8


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernel be PyTorch's own reference, with gradients, which a CPU's refuses."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_validate_device", lambda *given: None)
    monkeypatch.setattr(flex_kernel, "_compiled", lambda: flex.flex_attention)
    monkeypatch.setattr(flex_kernel, "_recent", [])
    yield


def vectors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    at, documents = torch.arange(S), (torch.rand(B, S) < 0.01).cumsum(1)
    return {
        "queries": at[:, None],
        "keys": at,
        "documents of queries": documents[:, None, :, None],
        "documents": documents[:, None, None, :],
        "kept": (torch.arange(S) < torch.tensor([[S], [140]]))[:, None, None, :],
        "slopes": 2.0 ** -torch.arange(1.0, H + 1)[:, None, None],
        "prefix": torch.tensor([30, 200])[:, None, None, None],
    }


MASKS = {
    "causal": ("le(v1, v0)", ("queries", "keys")),
    "window": ("bitwise_and(le(v1, v0), gt(v1, sub(v0, 40)))", ("queries", "keys")),
    "documents": (
        "bitwise_and(le(v1, v0), eq(v2, v3))",
        ("queries", "keys", "documents of queries", "documents"),
    ),
    "padding": ("bitwise_and(le(v1, v0), v2)", ("queries", "keys", "kept")),
    "prefix": ("bitwise_or(le(v1, v0), lt(v1, v2))", ("queries", "keys", "prefix")),
    "alibi": ("masked_fill(mul(v2, to(sub(v1, v0), float32)), gt(v1, v0), -inf)", ("queries", "keys", "slopes")),
    "softcap": ("masked_fill(mul(tanh(div(score, 2.0)), 2.0), gt(v1, v0), -inf)", ("queries", "keys")),
}


WITH_FULL_BLOCKS = ("causal", "padding", "prefix")
"""Masks of truth values that let a block of 128 by 128 be seen as a whole."""


@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_gives_what_blocks_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, names = MASKS[name]
    given = [vectors()[each] for each in names]
    q, k, v = (torch.randn(B, heads, S, D, requires_grad=True) for heads in (H, G, G))

    def results() -> list[Tensor]:
        y = ATTENTION_BY_MASK(q, k, v, given, text, 0.3)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))]

    expected = results()
    monkeypatch.setattr(flex_kernel, "takes", lambda q, v: True)
    torch.testing.assert_close(results(), expected, rtol=1e-4, atol=1e-4)
    assert flex_kernel._recent, "the kernel did not run"


@pytest.mark.parametrize("name", MASKS)
def test_blocks_that_are_left_out_are_hidden_and_full_ones_seen(name: str) -> None:
    """The reference takes no notice of blocks, so they are compared with all elements of the mask."""
    text, names = MASKS[name]
    given = [vectors()[each] for each in names]
    found = flex_kernel.mask_of(text, given, S, S)
    left, size = found.blocks.to_dense().bool(), flex_kernel.BLOCK
    assert not left.all() or name == "prefix"
    at = [torch.arange(n) for n in (B, H, S, S)]
    if found.score_mod is None:
        mask = flex._vmap_for_bhqkv(found.blocks.mask_mod, prefix=())(*at)
    else:
        mask = flex._vmap_for_bhqkv(found.score_mod, prefix=(0,))(torch.zeros(B, H, S, S), *at) > -torch.inf
    whole = left.repeat_interleave(size, -1).repeat_interleave(size, -2)[..., :S, :S].expand_as(mask)
    assert not (mask & ~whole).any(), "a block that some query sees is left out"
    full = found.blocks.full_kv_num_blocks
    assert full is not None and (full.sum() > 0) == (name in WITH_FULL_BLOCKS)


def test_a_mask_is_made_once_for_the_layers_of_a_batch() -> None:
    text, names = MASKS["documents"]
    first, second = ([vectors(seed)[each] for each in names] for seed in (0, 1))
    made = flex_kernel.mask_of(text, first, S, S)
    assert flex_kernel.mask_of(text, first, S, S) is made
    other = flex_kernel.mask_of(text, second, S, S)
    assert other is not made and not torch.equal(other.blocks.to_dense(), made.blocks.to_dense())
    first[2].zero_()
    assert flex_kernel.mask_of(text, first, S, S) is not made, "a vector was written into"
    for seed in range(2, 12):
        flex_kernel.mask_of(text, [vectors(seed)[each] for each in names], S, S)
    assert len(flex_kernel._recent) == flex_kernel.KEPT


def test_a_cpu_takes_blocks() -> None:
    q = torch.randn(1, 1, 4, 8)
    assert not flex_kernel.takes(q, q)


@pytest.mark.slow
def test_the_kernel_is_compiled_once_for_all_layers_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU compiles the forward alone."""
    monkeypatch.undo()
    torch.compiler.reset()
    text, names = MASKS["documents"]
    q, k, v = (torch.randn(B, heads, S, 2 * D) for heads in (H, G, G))
    for seed in (0, 1):
        given = [vectors(seed)[each] for each in names]
        for _ in range(2):
            found = flex_kernel.attention(q, k, v, given, text, 0.3)
            torch.testing.assert_close(found, ATTENTION_BY_MASK(q, k, v, given, text, 0.3), rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
