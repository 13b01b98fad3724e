"""Experts are found however they are written, and what only looks like them is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, GROUPED_MM, OF_EXPERT
from autopar.ir.program.program import Program
from tests.support import experts
from tests.support.eager import assert_as_eager
from tests.support.experts import RepeatedTokens, SortedExperts, grouped

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))


def _count(program: Program, target: object) -> int:
    return sum(node.target is target for node in program.graph.nodes)


@pytest.mark.parametrize("counting", [experts.histogram, experts.one_hot, experts.scattered, experts.binned])
def test_rows_are_counted_in_many_ways(counting: Callable[..., Tensor]) -> None:
    model = SortedExperts(counting)
    program = assert_as_eager(model, (X,))
    assert _count(program, DISPATCH) == 1


@pytest.mark.sample(9)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("weighted", ["before", "after", "never"])
@pytest.mark.parametrize(
    "ending", [experts.added, experts.scatter_added, experts.accumulated, experts.inverted, experts.placed]
)
def test_rows_are_put_back_in_many_ways(ending: Callable[..., Tensor], weighted: str, top_k: int) -> None:
    model = SortedExperts(ending=ending, weighted=weighted, top_k=top_k)
    program = assert_as_eager(model, (X,))
    assert [_count(program, target) for target in (DISPATCH, GROUPED_MM, COMBINE)] == [1, 3, 1]
    assert not any("sort" in str(node.target) for node in program.graph.nodes)


def test_each_row_may_take_the_bias_of_its_expert() -> None:
    assert _count(assert_as_eager(SortedExperts(bias=True), (X,)), OF_EXPERT) == 1


class Looks(nn.Module):
    """Like experts, but for what a function does to the rows."""

    def __init__(self, change: Callable[[Tensor], Tensor], counted: int = 4) -> None:
        super().__init__()
        self.change, self.counted = change, counted
        self.weight = nn.Parameter(torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(2)))

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK, expert_TK = x_TD[:, :4].topk(2)
        _, perm_R = torch.sort(expert_TK.flatten(), stable=True)
        ends_E = torch.histc(expert_TK.float(), 4, 0, self.counted - 1).cumsum(0, dtype=torch.int32)
        y_RD = self.change(grouped(x_TD[perm_R // 2], self.weight, ends_E))
        y_RD = y_RD * weight_TK.flatten()[perm_R].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, perm_R // 2, y_RD)


@pytest.mark.parametrize(
    ("change", "counted"),
    [
        (lambda rows: rows.flip(0), 4),
        (lambda rows: rows.softmax(0), 4),
        (lambda rows: rows - rows.mean(0), 4),
        (lambda rows: rows.cumsum(0), 4),
        (lambda rows: rows * torch.arange(24.0).unsqueeze(-1), 4),
        (lambda rows: torch.cat([rows[:, 1:], torch.arange(24.0).unsqueeze(-1)], 1), 4),
        (lambda rows: F.layer_norm(rows, rows.shape), 4),
        (lambda rows: F.dropout(rows, 0.5), 4),
        (lambda rows: F.rrelu(rows, training=True), 4),
        (lambda rows: rows, 8),
    ],
    ids=[
        *(
            "other order",
            "softmax over rows",
            "mean of rows",
            "sums of rows",
            "by place",
            "place beside",
            "norm of all",
        ),
        *("dropout", "random slopes", "other counts"),
    ],
)
def test_what_mixes_rows_or_counts_otherwise_is_no_block(change: Callable[[Tensor], Tensor], counted: int) -> None:
    program = capture(Looks(change, counted), (X[0].repeat(2, 1),), {})
    assert _count(program, DISPATCH) == 0


def test_rows_that_are_read_next_to_the_block_are_no_block() -> None:
    class Leaks(Looks):
        def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            self.kept = None
            kept = []
            self.change = lambda rows: kept.append(rows) or rows
            return super().forward(x_TD), kept[0].square().sum()

    assert _count(capture(Leaks(lambda rows: rows), (X[0].repeat(2, 1),), {}), DISPATCH) == 0
    assert _count(capture(Looks(lambda rows: rows.tanh()), (X[0].repeat(2, 1),), {}), DISPATCH) == 1


def summed_over_all(y_RD: Tensor, token_R: Tensor, perm_R: Tensor, x_TD: Tensor, top_k: int) -> Tensor:
    return y_RD[torch.argsort(perm_R)].view(-1, top_k, y_RD.shape[-1]).sum().expand_as(x_TD)


def test_rows_that_are_put_back_one_by_one_may_be_summed_in_any_way() -> None:
    assert _count(assert_as_eager(SortedExperts(ending=summed_over_all), (X,)), COMBINE) == 1


def test_samples_and_positions_stay_apart() -> None:
    program = capture(SortedExperts(), (X,), {})
    (sent,) = (node for node in program.graph.nodes if node.target is DISPATCH)
    tokens, index = (node.meta["tensor"].shape for node in sent.all_input_nodes)
    assert (tokens, index) == ((2, 6, 8), (2, 6, 2))
    assert not any(node.target is torch.ops.aten.view.default for node in program.graph.nodes)


@pytest.mark.parametrize("model", [RepeatedTokens(), SortedExperts(weighted="before")], ids=["repeated", "weighted"])
def test_samples_and_positions_stay_apart_of_tokens_that_are_one_for_each_expert(model: nn.Module) -> None:
    program = assert_as_eager(model, (X,))
    (sent,) = (node for node in program.graph.nodes if node.target is DISPATCH)
    tokens, index = (node.meta["tensor"].shape for node in sent.all_input_nodes)
    assert (tokens, index) == ((2, 6, 2, 8), (2, 6, 2, 1))
    wide = [node.meta["tensor"] for node in program.graph.nodes if node.target is torch.ops.aten.view.default]
    assert not any(each.dtype.is_floating_point for each in wide), "tokens are flattened"
