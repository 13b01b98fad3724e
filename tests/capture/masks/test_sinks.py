"""Attention with sinks that is written out becomes one call; what differs from it in any part does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.capture.passes.traced_graph import arguments
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.program import Program, TensorInfo, tensor_inputs
from autopar.ir.program.saved_tensors import saved_in
from tests.support.eager import assert_as_eager

S, HEADS, KEY_HEADS, WIDTH = 8, 4, 2, 4
LOWEST = torch.finfo(torch.float32).min
Mask = Callable[[Tensor, Tensor], Tensor]


def hidden(seen: Tensor, by: float = LOWEST) -> Tensor:
    return torch.where(seen, 0.0, torch.tensor(by))


class Attention(nn.Module):
    """GPT-OSS's attention, as transformers writes it out, with what may be otherwise."""

    def __init__(self, mask: Mask, dropout: float = 0.0, **otherwise: Any) -> None:
        super().__init__()
        self.mask, self.dropout, self.otherwise = mask, dropout, otherwise
        self.proj = nn.Linear(8, (HEADS + 2 * KEY_HEADS) * WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.proj(x_BSD).unflatten(-1, (-1, WIDTH)).transpose(1, 2).split([HEADS, KEY_HEADS, KEY_HEADS], 1)
        batch, at = x_BSD.shape[0], torch.arange(S)
        groups = HEADS // KEY_HEADS
        k, v = (
            x[:, :, None].expand(batch, KEY_HEADS, groups, S, WIDTH).reshape(batch, HEADS, S, WIDTH) for x in (k, v)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + self.mask(at[:, None], at[None])
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(batch, -1, S, self.otherwise.get("sinks", 1))
        joined = torch.cat([scores, sinks], -1)
        joined = joined - joined.max(self.otherwise.get("level", -1), keepdim=True).values
        weights = nn.functional.softmax(joined, self.otherwise.get("softmax", -1), dtype=joined.dtype)
        weights = weights[..., self.otherwise.get("kept", slice(-1))]
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return torch.matmul(weights, v).square().sum()


def captured(model: nn.Module) -> Program:
    return capture(model, (torch.randn(2, S, 8),), {}, training=True)


def calls(program: Program) -> list[dict[str, Any]]:
    return [arguments(node) for node in program.graph.nodes if node.target is ATTENTION_BY_MASK]


FOUND: dict[str, tuple[Mask, dict[str, Any]]] = {
    "causal": (lambda i, j: hidden(j <= i), {"window": S, "seen": 9 / 16, "rising": True, "reach": None}),
    "by infinity": (lambda i, j: hidden(j <= i, -torch.inf), {"window": S}),
    "a window": (lambda i, j: hidden((j <= i) & (j > i - 3)), {"window": 3, "seen": 21 / 64, "reach": 2}),
    "all": (lambda i, j: hidden((j <= i) | (j > i)), {"window": None, "seen": 1.0}),
    "dead rows": (lambda i, j: hidden((j < i) & (i != 3)), {"window": None}),
    "one key less": (lambda i, j: hidden((j <= i) & ~((i == S - 1) & (j == 3))), {"window": None}),
}
"""A mask → what its call says."""


@pytest.mark.parametrize("kind", FOUND)
def test_scores_with_sinks_are_one_call_that_gives_the_same(kind: str) -> None:
    torch.manual_seed(0)
    mask, specified = FOUND[kind]
    model = Attention(mask)
    program = assert_as_eager(model, (torch.randn(2, S, 8),), {}, lambda y: y, tolerance=1e-5)
    (call,) = calls(program)
    assert {name: call[name] for name in specified} == specified
    assert call["key"].meta["tensor"].shape == (2, KEY_HEADS, S, WIDTH), "keys are repeated for their queries"
    infos = (node.meta.get("tensor") for node in program.graph.nodes)
    scores = [info for info in infos if isinstance(info, TensorInfo) and info.shape[-2:] == (S, S + 1)]
    assert not scores


def test_what_is_dropped_is_stated() -> None:
    (call,) = calls(captured(Attention(FOUND["causal"][0], dropout=0.25)))
    assert call["dropout_p"] == 0.25


OTHERWISE: dict[str, dict[str, Any]] = {
    "two sinks": {"sinks": 2, "kept": slice(-2)},
    "the sink is kept in place of a key": {"kept": slice(1, None)},
    "weights of queries": {"softmax": -2},
    "another level": {"level": 1},
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_is_otherwise_stays_as_it_is(kind: str) -> None:
    assert not calls(captured(Attention(FOUND["causal"][0], **OTHERWISE[kind])))


def test_a_mask_that_hides_by_small_numbers_stays_as_it_is() -> None:
    assert not calls(captured(Attention(lambda i, j: hidden(j <= i, -1e9))))


def test_memory_is_linear_in_positions_and_planned_as_autograd_counts_it() -> None:
    model = Attention(FOUND["a window"][0])
    program = captured(model)
    (node,) = (node for node in program.graph.nodes if node.target is ATTENTION_BY_MASK)
    saved = saved_in(program)[node]
    inputs = tensor_inputs(node)
    sinks = len(inputs) - 1
    assert {0, 1, 2, sinks} <= saved.inputs and saved.outputs == {0}
    assert saved.other_bytes == 4 * 2 * HEADS * S, "the log-sum-exp of each query"
    held: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    given = [torch.randn(each.meta["tensor"].shape).requires_grad_() for each in (*inputs[:3], inputs[sinks])]
    vectors = [torch.arange(S)[:, None], torch.arange(S)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y = ATTENTION_BY_MASK(*given[:3], vectors, "le(v1, v0)", sinks=given[3])
    floats = sum(4 * x.numel() for x in (*given, y))
    assert sum(held.values()) == floats + saved.other_bytes + sum(8 * x.numel() for x in vectors)
