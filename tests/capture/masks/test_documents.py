"""Attention over packed documents is captured as attention under a mask of vectors, and divided as that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import autopar
from autopar.capture.export import capture
from autopar.errors import CaptureError
from autopar.ir.program.operators.attention import masked_blocks
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.program import Program
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.training import Steps, fault_of, train_alone, train_on_ranks

POSITIONS, WORDS, HEADS, WIDTH = 16, 32, 4, 16
LENGTHS = torch.tensor([0, 3, 3, 9, 16], dtype=torch.int32)
OTHERS = torch.tensor([0, 5, 6, 11, 16], dtype=torch.int32)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`varlen_attn`, one document after the other, as its documentation and that of flash attention say."""
    done = []
    for i in range(len(cu_seq_q) - 1):
        q, k, v = (
            x[cu[i] : cu[i + 1]].transpose(0, 1) for x, cu in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))
        )
        rows, columns = q.shape[1], k.shape[1]
        behind = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
        before, after = (POSITIONS if size < 0 else size for size in window_size)
        seen = (behind >= -before) & (behind <= after)
        y = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)
        done.append(y.transpose(0, 1))
    return torch.cat(done)


class Model(nn.Module):
    """Words of packed documents through attention with grouped heads, and the loss of their successors."""

    def __init__(self, how: dict[str, Any], flat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how, self.flat = how, flat

    def attend(self, x: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        q, k, v = self.q(x).unflatten(-1, (HEADS, -1)), *self.kv(x).unflatten(-1, (HEADS, -1)).chunk(2, -2)
        y = varlen.varlen_attn(q, k, v, cu_q, cu_k, 9, 9, enable_gqa=True, **self.how)
        assert isinstance(y, Tensor)
        return y

    def forward(self, ids: Tensor, cu_q: Tensor, cu_k: Tensor | None = None) -> Tensor:
        """Ids [1, positions], or, where they are flat, [positions]."""
        x = self.embed(ids)
        y = self.attend(x if self.flat else x[0], cu_q, cu_q if cu_k is None else cu_k).flatten(1)
        return F.cross_entropy(self.head((x if self.flat else x[0]) + y), ids.roll(-1, -1).flatten())


def batches(cu_k: Tensor | None = None, flat: bool = False) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(WORDS, (POSITIONS,) if flat else (1, POSITIONS))
    return [{"ids": ids, "cu_q": LENGTHS} | ({} if cu_k is None else {"cu_k": cu_k})] * 2


def mask_of(program: Program) -> str:
    (node,) = (node for node in program.graph.nodes if node.target is ATTENTION_BY_MASK)
    return node.args[4]


MASKS = {
    (-1, -1): "eq(v0, v1)",
    (-1, 0): "bitwise_and(eq(v0, v1), le(v3, v2))",
    (2, 0): "bitwise_and(bitwise_and(eq(v0, v1), le(v3, v2)), ge(v3, sub(v2, 2)))",
    (1, 2): "bitwise_and(bitwise_and(eq(v0, v1), le(v3, add(v2, 2))), ge(v3, sub(v2, 1)))",
}


@pytest.mark.parametrize(("window", "text"), MASKS.items())
def test_windows_of_documents_are_masks_of_vectors(window: tuple[int, int], text: str) -> None:
    program = capture(Model({"window_size": window}), (), batches()[0])
    assert mask_of(program) == text
    (node,) = (node for node in program.graph.nodes if node.target is ATTENTION_BY_MASK)
    assert node.kwargs["reach"] == (2 if window == (2, 0) else None)
    assert not any("varlen" in str(node.target) for node in program.graph.nodes)


def test_layers_share_what_says_where_documents_are() -> None:
    class Twice(Model):
        def attend(self, x: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
            return super().attend(super().attend(x, cu_q, cu_k).flatten(1), cu_q, cu_k)

    program = capture(Twice({"window_size": (-1, 0)}), (), batches()[0])
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("autopar.attention_by_mask.default") == 2
    assert targets.count("aten.searchsorted.Tensor") == 1


@dataclass(frozen=True)
class Case:
    strategy: str | None
    mesh: dict[str, int]
    how: dict[str, Any]
    layout: str
    """Layout of the attention's result, [1, heads, positions, features]."""
    cu_k: Tensor | None = None
    flat: bool = False

    def __str__(self) -> str:
        return f"{self.strategy}-{self.layout}{'-flat' * self.flat}{'-others' * (self.cu_k is not None)}"


CASES = (
    Case("ring", {"sp": 4}, {"window_size": (-1, 0), "scale": 0.3}, "Z(2)"),
    Case("gather_kv", {"sp": 2}, {"window_size": (2, 1)}, "S(2)", OTHERS),
    Case("usp", {"a": 2, "b": 2}, {"window_size": (3, 0)}, "Z(2) S(1)", OTHERS),
    Case("ring", {"sp": 4}, {"window_size": (2, 0)}, "S(2)"),
    Case("data_parallel", {"dp": 4}, {}, "S(2)", flat=True),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_documents_train_on_ranks_as_one_after_the_other(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_blocks, "LARGEST", 4)
    monkeypatch.setattr(masked_blocks, "SMALLEST", 2)
    steps = Steps(batches(case.cu_k, case.flat))
    with mock.patch.object(varlen, "varlen_attn", written_out):
        expected = train_alone(Model(case.how, case.flat).double(), steps)
    options = {} if case.strategy is None else {"strategy": case.strategy}
    found = train_on_ranks(Model(case.how, case.flat).double(), steps, case.mesh, options)
    assert fault_of(found, expected) == ""
    assert found.plan is not None
    (row,) = (row for row in found.plan.rows if row.name == "attention_by_mask_default")
    assert row.layout == case.layout


def _trained(case: Case) -> list[Any]:
    """The loss and the gradients on this rank of real ones."""
    model = autopar.compile(
        Model(case.how), mesh((2,), ("sp",)), batches()[0], strategy=case.strategy, hardware=SLOW_DEVICES
    )
    loss = model(**batches()[0])
    loss.backward()
    return [loss.detach(), *(getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters())]


@pytest.mark.slow
def test_documents_in_a_ring_of_real_ranks(ranks: Ranks) -> None:
    model = Model(CASES[0].how)
    with mock.patch.object(varlen, "varlen_attn", written_out):
        loss = model(**batches()[0])
    loss.backward()
    expected = [loss.detach(), *(p.grad for p in model.parameters())]
    for found in ranks.run(_trained, CASES[0]):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


Attend = Callable[[Tensor, Tensor], Any]
REFUSED: dict[str, tuple[Attend, str]] = {
    "return_aux": (
        lambda x, cu: varlen_attn(x, x, x, cu, cu, 9, 9, return_aux=AuxRequest(lse=True))[1],
        "varlen_attn in the forward returns the log-sum-exp of its scores .return_aux., .* leave return_aux out.",
    ),
    "seqused_k": (
        lambda x, cu: varlen_attn(x, x, x, cu, cu, 9, 9, seqused_k=cu[1:]),
        "varlen_attn in the forward has seqused_k, as attention to a cache of keys, .* give keys and values of the",
    ),
    "no lengths": (
        lambda x, cu: varlen_attn(x, x, x, cu, None, 9, 9),
        "varlen_attn in the forward has no cu_seq_k, as attention to a cache of keys",
    ),
}


@pytest.mark.parametrize(("attend", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_place_in_a_mask_is_refused(attend: Attend, message: str) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, cu: Tensor) -> Tensor:
            return attend(x, cu)

    with pytest.raises(CaptureError, match=message):
        capture(Layer(), (torch.ones(POSITIONS, HEADS, 4), LENGTHS), {})
